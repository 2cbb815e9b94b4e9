"""Tables for a terminal; their numbers come from plans, graphs and units."""

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from remat.core.contributors import operator_in
from remat.core.graph import TrainingGraph
from remat.core.units import format_bytes, format_ns
from remat.planning.plan import Plan

_PLAIN_WIDTH = 100
_TOP = 10


def print_table(table: Table, stream: TextIO | None = None) -> None:
    """Print a table; into files and pipes without colours, 100 characters wide."""
    target = stream or sys.stdout
    width = None if target.isatty() else _PLAIN_WIDTH
    Console(file=target, width=width, highlight=False, markup=False).print(table)


def curve_table(plans: Sequence[Plan]) -> Table:
    """Return time against memory: one row per budget."""
    if plans[0].has_several_devices:
        return _device_curve_table(plans)
    table = _table("budget", "", "peak", "time", "x plain", "recomputed", "gap", "by")
    for plan in plans:
        budget_bytes = plan.budget_bytes or plan.baseline_peak_bytes
        share = budget_bytes / (plan.baseline_peak_bytes or 1)
        table.add_row(
            format_bytes(budget_bytes),
            f"{share:.1%}",
            format_bytes(plan.peak_bytes),
            format_ns(plan.cost_ns),
            f"{1 + plan.overhead:.3f}",
            f"{plan.recomputed_op_count} ops",
            f"{plan.gap:.1%}",
            plan.solver,
        )
    first = plans[0]
    table.title = f"{first.graph.name}: time against memory"
    table.caption = (
        f"without remat: {format_bytes(first.baseline_peak_bytes)}, "
        f"{format_ns(first.baseline_cost_ns)}; gap: at most this far from the best time"
    )
    return table


def _device_curve_table(plans: Sequence[Plan]) -> Table:
    """Return time against memory of the first device: one row per budget."""
    first = plans[0]
    home, *others = first.platform.names
    table = _table(
        *(f"on {home}", "", "peak", *(f"on {name}" for name in others)),
        *("x plain", "at once", "again", "copied"),
    )
    for plan in plans:
        budget_bytes = plan.budget_bytes or plan.baseline_peak_bytes
        at_once = plan.overlapped_ns / (plan.baseline_cost_ns or 1)
        table.add_row(
            format_bytes(budget_bytes),
            f"{budget_bytes / (plan.baseline_peak_bytes or 1):.1%}",
            *(format_bytes(peak) for peak in plan.trace.peak_bytes),
            f"{1 + plan.overhead:.3f}",
            f"{at_once:.3f}",
            f"{plan.recomputed_op_count} ops",
            format_bytes(sum(use.size_bytes for use in plan.link_uses)),
        )
    table.title = f"{first.graph.name}: time against memory on {home}"
    table.caption = (
        f"without remat, on {home} alone: {format_bytes(first.baseline_peak_bytes)}, "
        f"{format_ns(first.baseline_cost_ns)}; at once: with devices and links beside "
        "each other; again: runs of ops that repeat one"
    )
    return table


def recomputed_table(plan: Plan) -> Table:
    """Return what is computed again, by operator, the most time first."""
    table = _table("computed again", "runs", "extra time", "share")
    runs: dict[str, int] = {}
    extra_ns: dict[str, int] = {}
    for index, count in plan.schedule.recompute_counts().items():
        op = plan.graph.ops[index]
        name = operator_in(op.name)
        runs[name] = runs.get(name, 0) + count
        extra_ns[name] = extra_ns.get(name, 0) + count * (op.cost_ns[0] or 0)
    for name in _largest(extra_ns):
        share = extra_ns[name] / (plan.baseline_cost_ns or 1)
        table.add_row(name, str(runs[name]), format_ns(extra_ns[name]), f"{share:+.1%}")
    return table


def operators_table(graph: TrainingGraph) -> Table:
    """Return how often each operator runs and how long, the most time first."""
    table = _table("operator", "ops", "time", "largest workspace")
    counts: dict[str, int] = {}
    costs: dict[str, int] = {}
    workspaces: dict[str, int] = {}
    for op in graph.ops:
        name = operator_in(op.name)
        counts[name] = counts.get(name, 0) + 1
        costs[name] = costs.get(name, 0) + (op.cost_ns[0] or 0)
        workspaces[name] = max(workspaces.get(name, 0), op.workspace_bytes[0])
    for name in _largest(costs):
        table.add_row(
            name,
            str(counts[name]),
            format_ns(costs[name]),
            format_bytes(workspaces[name]),
        )
    return table


def roles_table(graph: TrainingGraph) -> Table:
    """Return the bytes of the graph's storages by role."""
    table = _table("role", "storages", "size", "largest")
    sizes: dict[str, list[int]] = {}
    for storage in graph.storages:
        kept = "always live" if storage.is_resident else "made in the step"
        sizes.setdefault(f"{storage.role} ({kept})", []).append(storage.size_bytes)
    for name in _largest({role: sum(each) for role, each in sizes.items()}):
        each = sizes[name]
        table.add_row(
            name, str(len(each)), format_bytes(sum(each)), format_bytes(max(each))
        )
    return table


def _largest(sizes: dict[str, int]) -> list[str]:
    return sorted(sizes, key=lambda name: (-sizes[name], name))[:_TOP]


def _table(*headers: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for position, header in enumerate(headers):
        # Names stand left, numbers right.
        is_name = position == 0 and header != "budget"
        table.add_column(
            header, justify="left" if is_name or header == "by" else "right"
        )
    return table
