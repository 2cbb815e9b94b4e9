"""``remat plan``: plan a training step or a graph file, and run nothing."""

import argparse
from typing import get_args

from remat.cli.base import (
    WORKLOAD_HELP,
    Command,
    ExitCode,
    add_budget,
    add_graph,
    add_output,
    add_platform,
    add_solving,
    add_workload,
    chosen_budget,
    chosen_platform,
    note,
    print_json,
)
from remat.cli.planning import (
    check_source,
    compare_workload,
    load_graph_of,
    plan_workload,
)
from remat.core.errors import InvalidPlatformError, UsageError
from remat.core.hardware import Hardware
from remat.core.problem import Objective
from remat.files.hardware import chosen_hardware, hardware_names
from remat.files.serialisation import save_graph, save_schedule
from remat.planning.one_device import plan_graph
from remat.planning.plan import Account
from remat.report.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``remat plan``."""
    add_workload(parser, is_optional=True)
    add_graph(parser)
    add_budget(parser, is_required=False)
    add_platform(parser)
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="plan for a device that need not be here, by the maker's numbers: "
        f"{', '.join(hardware_names())}, or the path of a file that describes one; "
        "without --budget, say whether the step fits, how long it takes and at which "
        "batch, and compare several in one table",
    )
    parser.add_argument(
        "--autocast",
        choices=("bf16", "fp16"),
        help="with --device: plan the step under autocast to this type",
    )
    parser.add_argument(
        "--account",
        choices=get_args(Account),
        help="with --graph, whose bytes the budget counts (reserved, where the platform "
        "says that its one device has a caching allocator, else live)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the plan here")
    parser.add_argument(
        "--save-graph", metavar="FILE", help="write the training graph here"
    )
    parser.add_argument(
        "--save-schedule", metavar="FILE", help="write the schedule alone here"
    )
    add_solving(parser)
    add_output(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Make the plan, print it, write what was asked for."""
    check_source(options)
    if options.graph is None and options.account == "reserved":
        msg = (
            "--account reserved plans a --graph; of FACTORY, budgets count live bytes "
            "(--save-graph writes its graph)"
        )
        raise UsageError(msg)
    budget, platform = chosen_budget(options.budget), chosen_platform(options)
    if options.device:
        devices = _chosen_devices(options)
        if budget is None and not _writes(options):
            compared = compare_workload(options, devices)
            if options.json:
                print_json(compared.summary())
            else:
                print(compared)
            fits = any(each.plan is not None for each in compared.estimates)
            return ExitCode.OK if fits else ExitCode.INFEASIBLE
    elif options.autocast:
        raise UsageError("--autocast is for --device: a step here has its own autocast")
    elif budget is None and platform is None:
        raise UsageError("give --budget SIZE, for example --budget 8GiB")
    if options.graph is None:
        plan = plan_workload(options, budget=budget, platform=platform)
    else:
        graph = load_graph_of(options.graph)
        with progress_bar(is_quiet=options.quiet) as progress:
            plan = plan_graph(
                graph,
                budget=budget,
                platform=platform,
                solver=options.solver,
                objective=Objective(options.objective),
                time_limit=options.time_limit,
                gap=options.gap,
                seed=options.seed,
                progress=progress,
                account=options.account,
            )
    if options.json:
        print_json(plan.summary())
    else:
        print(plan)
    if options.output:
        plan.save(options.output)
        note(options, f"wrote the plan to {options.output}")
    if options.save_graph:
        save_graph(options.save_graph, plan.graph)
        note(options, f"wrote the graph to {options.save_graph}")
    if options.save_schedule:
        save_schedule(options.save_schedule, plan.schedule)
        note(options, f"wrote the schedule to {options.save_schedule}")
    return ExitCode.OK


def _writes(options: argparse.Namespace) -> bool:
    return bool(options.output or options.save_graph or options.save_schedule)


def _chosen_devices(options: argparse.Namespace) -> list[Hardware]:
    """Return the devices that the options name.

    Raises
    ------
    UsageError
        If one is unknown, or they do not go with the other options.
    """
    if options.graph is not None:
        msg = "--device has no effect with --graph: the file holds the costs"
        raise UsageError(msg)
    if len(options.device) > 1 and (options.budget or _writes(options)):
        msg = (
            f"--device is given {len(options.device)} times; a budget, and a plan that is "
            "written, are for one"
        )
        raise UsageError(msg)
    try:
        return [chosen_hardware(name) for name in options.device]
    except InvalidPlatformError as error:
        msg = f"--device: {error}"
        raise UsageError(msg) from error


PLAN = Command(
    name="plan",
    summary="plan a training step within a budget, without running it",
    description=(
        "Plan a training step, or a graph file, within a budget of bytes: which results "
        "to keep and which to compute again. Nothing of the step is run; the operators "
        "are timed one by one."
    ),
    details=WORKLOAD_HELP,
    examples=(
        "remat plan train.py --budget 8GiB --output plan.json",
        "remat plan project.models:small_gpt --budget 60% --estimated",
        "remat plan train.py --budget 100% --save-graph graph.json",
        "remat plan --graph graph.json --budget 900MB --json",
        "remat plan train.py --device h100-80gb --device rtx-4090 --autocast bf16",
        "remat plan train.py --device l4 --budget 60% --output plan.json",
        "remat plan train.py --budget cuda:0=6GiB --budget host=20GiB",
        "remat plan train.py --platform machine.json --budget a=6GiB --budget b=20GiB",
        "remat plan --graph graph.json --platform card.json --budget 8GiB --account live",
    ),
    add_arguments=add_arguments,
    run=run,
    writes=("--output", "--save-graph", "--save-schedule"),
)
