"""``remat show``: what is in a plan, graph or schedule file."""

import argparse
from collections import Counter

from remat.cli.base import Command, ExitCode, add_output, note, print_json
from remat.cli.planning import load_graph_of
from remat.core.bounds import peak_bound_bytes
from remat.core.errors import FileFormatError, UsageError
from remat.core.graph import Phase, TrainingGraph
from remat.core.platform import Platform, single_device
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.core.simulator import simulate
from remat.core.units import format_bytes, format_ns
from remat.files.documents import document_kind
from remat.files.serialisation import load_graph, load_schedule
from remat.planning.one_device import plain_peak_bytes
from remat.planning.plan import Plan, contributors, load_plan
from remat.report.tables import (
    operators_table,
    print_table,
    recomputed_table,
    roles_table,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``remat show``."""
    parser.add_argument("file", metavar="FILE", help="a plan, graph or schedule file")
    parser.add_argument(
        "--graph",
        metavar="FILE",
        help="the graph (or plan) that a schedule file is for: replays the schedule",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw memory over the step (png, pdf, svg)",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Print a summary of the file."""
    kind = document_kind(options.file)
    if options.graph and kind != "schedule":
        msg = f"--graph goes with a schedule file, but {options.file} holds a {kind}"
        raise UsageError(msg)
    match kind:
        case "plan":
            return _show_plan(options, load_plan(options.file))
        case "graph":
            return _show_graph(options, load_graph(options.file))
        case "schedule":
            return _show_schedule(options, load_schedule(options.file))
        case _:
            msg = (
                f"{options.file}: the file holds a {kind}; plan, graph and schedule "
                "files can be shown"
            )
            raise FileFormatError(msg)


def _draw(options: argparse.Namespace, shown: Plan | TrainingGraph) -> None:
    if options.timeline:
        from remat.report.figures import (  # noqa: PLC0415
            device_timelines,
            memory_timeline,
            save_figure,
        )

        if isinstance(shown, Plan) and shown.has_several_devices:
            ax, *_ = device_timelines(shown.graph, shown.platform, shown.schedule)
        else:
            ax = memory_timeline(shown)
        save_figure(ax, options.timeline)
        note(options, f"drew memory over the step in {options.timeline}")


def _show_plan(options: argparse.Namespace, plan: Plan) -> ExitCode:
    if options.json:
        parts = contributors(
            plan.graph, plan.schedule, plan.trace.peak_step(), plan.platform
        )
        print_json(
            {
                "kind": "plan",
                **plan.summary(),
                "at_the_peak": [
                    {"name": name, "size_bytes": size} for name, size in parts
                ],
            }
        )
    else:
        print(plan)
        if plan.recomputed_op_count:
            print()
            print_table(recomputed_table(plan))
    _draw(options, plan)
    return ExitCode.OK


def graph_facts(graph: TrainingGraph) -> dict[str, object]:
    """Return the figures of a graph as a dictionary that JSON can hold."""
    costs = [op.cost_ns[0] or 0 for op in graph.ops]
    return {
        "kind": "graph",
        "name": graph.name,
        "device_kinds": list(graph.device_kinds),
        "op_count": len(graph.ops),
        "forward_op_count": graph.forward_count,
        "backward_op_count": sum(op.phase is Phase.BACKWARD for op in graph.ops),
        "once_only_op_count": sum(not op.is_recomputable for op in graph.ops),
        "storage_count": len(graph.storages),
        "resident_bytes": graph.resident_bytes(),
        "plain_peak_bytes": plain_peak_bytes(graph),
        "peak_bound_bytes": peak_bound_bytes(graph),
        "cost_ns": sum(costs),
    }


def _show_graph(options: argparse.Namespace, graph: TrainingGraph) -> ExitCode:
    facts = graph_facts(graph)
    if options.json:
        print_json(facts)
    else:
        print(f"training graph of {graph.name}")
        print(
            f"  ops           {facts['op_count']}: {facts['forward_op_count']} forward, "
            f"{facts['backward_op_count']} backward; {facts['once_only_op_count']} may "
            "run only once"
        )
        print(f"  time          {format_ns(sum(o.cost_ns[0] or 0 for o in graph.ops))}")
        print(
            f"  peak          {format_bytes(plain_peak_bytes(graph))} without remat; "
            f"no schedule needs less than {format_bytes(peak_bound_bytes(graph))}"
        )
        print()
        print_table(roles_table(graph))
        print()
        print_table(operators_table(graph))
    _draw(options, graph)
    return ExitCode.OK


def _show_schedule(options: argparse.Namespace, schedule: Schedule) -> ExitCode:
    counts = Counter(type(step).__name__ for step in schedule.steps)
    recomputed = sum(schedule.recompute_counts().values())
    facts: dict[str, object] = {
        "kind": "schedule",
        "step_count": len(schedule.steps),
        **{f"{name.lower()}_count": count for name, count in sorted(counts.items())},
        "recomputed_op_count": recomputed,
    }
    lines = [
        f"schedule of {len(schedule.steps)} steps",
        "  steps         "
        + ", ".join(f"{count} {name}" for name, count in counts.most_common()),
        f"  recomputed    {recomputed} of {counts[Compute.__name__]} runs of ops",
    ]
    code = ExitCode.OK
    if options.graph:
        graph, platform = _place_of(options, schedule)
        trace = simulate(graph, platform, schedule)
        peaks = dict(zip(platform.names, trace.peak_bytes, strict=True))
        facts |= {
            "peak_bytes": trace.peak_bytes[0],
            "peak_bytes_by_device": peaks,
            "cost_ns": trace.serial_ns,
            "violation": None if trace.violation is None else str(trace.violation),
        }
        shown = ", ".join(
            (f"{name} " if len(peaks) > 1 else "") + format_bytes(peak)
            for name, peak in peaks.items()
        )
        lines += [
            f"  peak          {shown}",
            f"  time          {format_ns(trace.serial_ns)}",
            f"  valid         {'yes' if trace.is_valid else trace.violation}",
        ]
        code = ExitCode.OK if trace.is_valid else ExitCode.BROKEN_PROMISE
        if options.timeline:
            from remat.report.figures import (  # noqa: PLC0415
                device_timelines,
                save_figure,
            )

            ax, *_ = device_timelines(graph, platform, schedule, label="schedule")
            save_figure(ax, options.timeline)
            note(options, f"drew memory over the step in {options.timeline}")
    elif options.timeline:
        msg = "a schedule file holds no sizes; add --graph FILE to draw its timeline"
        raise UsageError(msg)
    if options.json:
        print_json(facts)
    else:
        print("\n".join(lines))
    return code


def _place_of(
    options: argparse.Namespace, schedule: Schedule
) -> tuple[TrainingGraph, Platform]:
    """Return the graph of a schedule and its devices, without budgets.

    Raises
    ------
    UsageError
        If the schedule uses several devices, and the file says nothing of devices.
    """
    if document_kind(options.graph) == "plan":
        plan = load_plan(options.graph)
        platform = plan.platform
        return plan.graph, platform.with_budgets(dict.fromkeys(platform.names))
    graph = load_graph_of(options.graph)
    used = {d for step in schedule.steps for d in _devices_of(step)}
    if used - {0}:
        msg = (
            f"{options.file}: the schedule uses devices {min(used)} to {max(used)}, but "
            f"{options.graph} is a graph without devices; give the plan that the schedule "
            "is of: --graph plan.json"
        )
        raise UsageError(msg)
    return graph, single_device(kind=graph.device_kinds[0])


def _devices_of(step: Step) -> tuple[int, ...]:
    match step:
        case Compute() | Discard():
            return (step.device,)
        case Copy():
            return (step.source, step.target)
        case Boundary():
            return ()


SHOW = Command(
    name="show",
    summary="print what is in a plan, graph or schedule file",
    description=(
        "Print a readable summary of a plan, graph or schedule file, and draw the "
        "memory over the step. Needs no torch."
    ),
    examples=(
        "remat show plan.json",
        "remat show plan.json --timeline memory.png",
        "remat show schedule.json --graph graph.json --json",
    ),
    add_arguments=add_arguments,
    run=run,
    draws=("--timeline",),
)
