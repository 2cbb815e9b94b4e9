"""``remat curve``: time against memory, as a table and as a picture."""

import argparse
from typing import Any

from remat.cli.base import (
    WORKLOAD_HELP,
    Command,
    ExitCode,
    add_graph,
    add_output,
    add_platform,
    add_solving,
    add_workload,
    check_size,
    chosen_budget,
    chosen_platform,
    note,
    print_json,
)
from remat.cli.planning import check_source, load_graph_of, plan_workload
from remat.core.errors import UsageError
from remat.core.platform import Platform
from remat.planning.curve import MOST_POINTS, trade_off, trade_off_on_devices
from remat.planning.plan import Plan
from remat.planning.several_devices import DeviceBudgets
from remat.report.progress import progress_bar
from remat.report.tables import curve_table, print_table
from remat.solvers import chosen_solvers

_POINTS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``remat curve``."""
    add_workload(parser, is_optional=True)
    add_graph(parser)
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--budgets",
        metavar="SIZES",
        help="budgets separated by commas, for example 100%%,80%%,60%% or 8GiB,6GiB",
    )
    either.add_argument(
        "--points",
        type=int,
        default=_POINTS,
        metavar="N",
        help=f"spread N budgets from the smallest known to 100%% (default: {_POINTS})",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the curve (png, pdf, svg)")
    add_platform(parser)
    parser.add_argument(
        "--budget",
        action="append",
        metavar="DEVICE=SIZE",
        help="with --platform: the budget of a device other than the first, whose budget "
        "varies; once for each that has none in the file (none for no limit)",
    )
    add_solving(parser, has_objective=False)
    add_output(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Capture and profile once, plan for each budget, print the table."""
    check_source(options)
    budgets = _budgets(options)
    platform, others = _several(options)
    chosen_solvers(options.solver)
    if options.graph is None:
        # One plan without a limit gives the graph with all its costs.
        plan = plan_workload(
            options,
            budget="100%" if platform is None else dict.fromkeys(platform.names),
            platform=platform or chosen_platform(options),
            solver="store-all",
        )
        graph, fingerprint, settings = plan.graph, plan.fingerprint, plan.settings
        if platform is not None:
            # In the order in which the graph has costs for its devices, home first.
            platform = plan.platform.with_budgets(
                {device.name: device.budget_bytes for device in platform.devices}
            )
    else:
        graph, fingerprint, settings = load_graph_of(options.graph), "", None
    with progress_bar(is_quiet=options.quiet) as progress:
        more: dict[str, Any] = {
            "fingerprint": fingerprint,
            "solver": options.solver,
            "time_limit": options.time_limit,
            "seed": options.seed,
            "progress": progress,
            "settings": settings,
        }
        plans = (
            trade_off(graph, budgets, **more)
            if platform is None
            else trade_off_on_devices(graph, platform, budgets, others=others, **more)
        )
    if options.json:
        print_json(_facts(plans))
    else:
        print_table(curve_table(plans))
    if options.plot:
        from remat.report.figures import save_figure, trade_off_curve  # noqa: PLC0415

        save_figure(trade_off_curve(plans), options.plot)
        note(options, f"drew the curve in {options.plot}")
    return ExitCode.OK


def _several(
    options: argparse.Namespace,
) -> tuple[Platform | None, DeviceBudgets | None]:
    """Return the platform of several devices and the budgets that stay, if given.

    A platform of one device that holds costs of operators is none of several.

    Raises
    ------
    UsageError
        If there are budgets of devices, but no platform; or one of no device.
    """
    platform, budget = chosen_platform(options), chosen_budget(options.budget)
    if platform is not None and len(platform.devices) < 2:
        if platform.costs is not None and options.factory and budget is None:
            # Of one device only its operators' costs count.
            return None, None
        msg = (
            f"{options.platform}: the platform has the device {platform.names[0]!r} only; "
            "leave --platform out, and the curve is for that device"
        )
        raise UsageError(msg)
    if budget is not None and (platform is None or not isinstance(budget, dict)):
        msg = (
            "--budget is for the other devices of a platform, as in --platform "
            "machine.json --budget host=20GiB; the budgets of the curve are --budgets"
        )
        raise UsageError(msg)
    return platform, budget


def _budgets(options: argparse.Namespace) -> list[str] | int:
    if options.budgets is None:
        if not 2 <= options.points <= MOST_POINTS:
            msg = f"--points is {options.points}; a curve has from 2 to {MOST_POINTS}"
            raise UsageError(msg)
        return options.points
    sizes = [size.strip() for size in options.budgets.split(",") if size.strip()]
    if not sizes:
        msg = f"--budgets {options.budgets!r} names no budget, for example 100%,80%,60%"
        raise UsageError(msg)
    for size in sizes:
        check_size(size)
    return sizes


def _facts(plans: tuple[Plan, ...]) -> dict[str, object]:
    keys: tuple[str, ...] = (
        "budget_bytes",
        "peak_bytes",
        "cost_ns",
        "overhead",
        "bound_ns",
        "gap",
        "status",
        "solver",
        "recomputed_op_count",
    )
    first = plans[0]
    if first.has_several_devices:
        keys += ("overlapped_ns", "devices", "copies")
    return {
        "name": first.graph.name,
        "baseline_peak_bytes": first.baseline_peak_bytes,
        "baseline_cost_ns": first.baseline_cost_ns,
        "smallest_budget_bytes": first.smallest_budget_bytes,
        "points": [{key: plan.summary()[key] for key in keys} for plan in plans],
    }


CURVE = Command(
    name="curve",
    summary="time against memory, as a table and a picture",
    description=(
        "Plan a training step, or a graph file, at several budgets from the smallest "
        "that works to the peak without remat, and print what each costs in time. The "
        "model is traced and its operators are timed once. On a platform of several "
        "devices the budget of the first one varies."
    ),
    details=WORKLOAD_HELP,
    examples=(
        "remat curve train.py --plot curve.png",
        "remat curve project.models:small_gpt --budgets 100%,80%,60%,50%",
        "remat curve --graph graph.json --points 12 --json",
        "remat curve train.py --platform machine.json --budget host=20GiB",
    ),
    add_arguments=add_arguments,
    run=run,
    draws=("--plot",),
)
