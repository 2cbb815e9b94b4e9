"""``remat verify``: plain against planned on the user's own training step."""

import argparse

import remat
from remat.cli.base import (
    WORKLOAD_HELP,
    Command,
    ExitCode,
    add_budget,
    add_output,
    add_platform,
    add_solving,
    add_workload,
    chosen_budget,
    chosen_platform,
    print_json,
    warn,
)
from remat.cli.planning import plan_options
from remat.core.errors import UsageError
from remat.core.units import format_bytes
from remat.report.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``remat verify``."""
    add_workload(parser)
    add_budget(parser, is_required=False)
    add_platform(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="pairs of steps to time, plain and planned in turn (default: 3)",
    )
    add_solving(parser)
    add_output(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Verify, print the report, and say whether the promises are kept."""
    budget, platform = chosen_budget(options.budget), chosen_platform(options)
    if budget is None and platform is None:
        raise UsageError("give --budget SIZE, for example --budget 8GiB")
    if options.repeats < 1:
        msg = f"--repeats is {options.repeats}; it must be at least 1"
        raise UsageError(msg)
    # Imports torch, which help and usage errors do without.
    from remat.cli.workload import load_workload  # noqa: PLC0415

    workload = load_workload(options.factory, options.script_arguments)
    with progress_bar(is_quiet=options.quiet) as progress:
        report = remat.verify(
            workload.model,
            workload.args,
            workload.kwargs,
            budget=budget,
            **plan_options(options, workload, platform=platform, progress=progress),
            repeats=options.repeats,
        )
    if options.json:
        print_json(report.summary())
    else:
        print(report)
    if not report.is_exact:
        names = ", ".join(d.name for d in report.against_captured[:4])
        warn(
            f"not exact: {len(report.against_captured)} of {report.compared_count} "
            f"tensors differ from the step without remat: {names}"
        )
    for device in report.devices:
        if not device.is_within_budget:
            warn(f"over budget: {device}")
    if not report.is_within_budget and not report.devices:
        excess = report.measured_peak_bytes - report.budget_bytes
        warn(
            f"over budget: the step takes {format_bytes(excess)} ({excess} bytes) more "
            "than the budget"
        )
    is_kept = report.is_exact and report.is_within_budget
    return ExitCode.OK if is_kept else ExitCode.BROKEN_PROMISE


VERIFY = Command(
    name="verify",
    summary="compare the planned step with the plain one: numbers, peak, time",
    description=(
        "Run your training step plainly and within a budget, and compare: outputs, "
        "gradients, buffers and random state bit for bit, the measured peak with the "
        "budget and the prediction, and time. The plain step runs too, so there must be "
        "memory for it. Exit code 4 says that a promise is broken."
    ),
    details=WORKLOAD_HELP,
    examples=(
        "remat verify train.py --budget 8GiB",
        "remat verify train.py:small --budget 60% -- --depth 12",
        "remat verify project.models:small_gpt --budget 900MB --json",
        "remat verify train.py --budget cuda:0=6GiB --budget host=20GiB",
    ),
    add_arguments=add_arguments,
    run=run,
)
