"""What a training step takes on devices that are described and need not be here.

A step is traced at the size of its batch and at twice that. Bytes and times in between,
and beyond, follow a straight line through both; where the two traces are not the same
step, no other size is looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remat.core.checks import checked_integer
from remat.core.errors import BudgetError
from remat.core.graph import Role, TrainingGraph
from remat.core.hardware import Hardware
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem
from remat.core.simulator import Trace, simulate
from remat.core.units import format_bytes, format_ns, round_up
from remat.planning.one_device import plan_graph
from remat.planning.plan import Plan
from remat.planning.portfolio import solve
from remat.planning.smallest_budget import FLOOR_SOLVERS
from remat.solvers.base import ProgressCallback, ignore_progress

TIME_PERCENT = (85, 145)
"""Between which percents of predicted times published ones lie: docs/hardware.md."""

_LARGEST_BATCH = 1 << 24
"""Where the search ends."""
_SOLVE_S = 10.0
_FORWARD_SHARE = 3
"""A forward pass takes about a third of a step."""


@dataclass(frozen=True, kw_only=True)
class DeviceEstimate:
    """What a training step takes on one device.

    Parameters
    ----------
    hardware
        The device.
    plain_peak_bytes
        Predicted peak of live bytes without remat, scratch memory at its upper bound.
    least_peak_bytes
        The same without the scratch memory of convolutions.
    plain_ns, optimizer_ns
        Predicted time of the operators without remat, and of the optimizer's step.
    plan
        The plan within what the device leaves to a step; ``None`` if nothing fits.
    needed_bytes
        Its peak, or the smallest known budget where nothing fits.
    largest_plain, largest_planned
        The largest batch that fits without remat and with it; 0 where not even one
        does, ``None`` where it was not looked for.
    offload
        What moving to the host instead would take, in words; empty if nothing has to.
    """

    hardware: Hardware
    plain_peak_bytes: int
    least_peak_bytes: int
    plain_ns: int
    optimizer_ns: int
    plan: Plan | None = field(repr=False)
    needed_bytes: int
    largest_plain: int | None = None
    largest_planned: int | None = None
    offload: str = ""

    @property
    def fits(self) -> str:
        """Whether it fits, in words."""
        if self.plain_peak_bytes <= self.hardware.usable_bytes:
            return "yes"
        return "no" if self.plan is None else "with remat"

    @property
    def step_ns(self) -> int | None:
        """Predicted time of the step as planned, ``None`` if nothing fits."""
        return None if self.plan is None else self.plan.cost_ns + self.optimizer_ns

    def summary(self) -> dict[str, Any]:
        """Return the numbers, for JSON."""
        return {
            "device": self.hardware.name,
            "usable_bytes": self.hardware.usable_bytes,
            "fits": self.fits,
            "plain_peak_bytes": self.plain_peak_bytes,
            "least_peak_bytes": self.least_peak_bytes,
            "needed_bytes": self.needed_bytes,
            "plain_ns": self.plain_ns + self.optimizer_ns,
            "step_ns": self.step_ns,
            "largest_plain": self.largest_plain,
            "largest_planned": self.largest_planned,
            "offload": self.offload,
        }


@dataclass(frozen=True, kw_only=True)
class DeviceComparison:
    """What a training step takes on several devices; ``print`` shows a table.

    Parameters
    ----------
    name
        Of the step.
    batch
        The size of the batch it was traced for, ``None`` where there is none.
    estimates
        One for each device, in the order that was asked for.
    notes
        What the numbers do not hold for, in words.
    """

    name: str
    batch: int | None
    estimates: tuple[DeviceEstimate, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [_HEADS, *map(_row, self.estimates)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if place in {0, 3} else text.rjust(width)
                for place, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        size = "" if self.batch is None else f", batch of {self.batch}"
        least, most = TIME_PERCENT
        offload = [
            f"offload on {each.hardware.name} instead of remat (formula, not planned): "
            f"{each.offload}"
            for each in self.estimates
            if each.offload
        ]
        return "\n".join(
            [
                f"{self.name}{size}: predicted, nothing was run",
                *lines,
                *offload,
                f"times published for one of the cards are {least} to {most} % of predicted ones",
                *self.notes,
            ]
        )

    def summary(self) -> dict[str, Any]:
        """Return the numbers, for JSON."""
        return {
            "name": self.name,
            "batch": self.batch,
            "devices": [each.summary() for each in self.estimates],
            "time_percent": list(TIME_PERCENT),
            "notes": list(self.notes),
        }


_HEADS = (
    "device",
    "memory",
    "peak",
    "fits",
    "planned peak",
    "time",
    "planned time",
    "largest batch",
    "planned",
)
"""Of a step without remat: peak, time and largest batch; and of one as planned."""


def _row(each: DeviceEstimate) -> tuple[str, ...]:
    plain, least = each.plain_peak_bytes, each.least_peak_bytes
    peak = format_bytes(plain)
    if least * 100 < plain * 99:
        peak = f"{format_bytes(least)} to {peak}"
    plain_ns = each.plain_ns + each.optimizer_ns
    return (
        each.hardware.name,
        format_bytes(each.hardware.usable_bytes),
        peak,
        each.fits,
        format_bytes(each.needed_bytes),
        format_ns(plain_ns) if each.fits == "yes" else f"({format_ns(plain_ns)})",
        "-" if each.step_ns is None else format_ns(each.step_ns),
        "-" if each.largest_plain is None else str(each.largest_plain),
        "-" if each.largest_planned is None else str(each.largest_planned),
    )


class ScaledGraph:
    """A step at any size of its batch, from traces at two sizes.

    Parameters
    ----------
    graph
        At ``batch``.
    twice
        At twice that.
    batch
        At least 1.
    granule_bytes
        What sizes are rounded up to.
    """

    def __init__(
        self, graph: TrainingGraph, twice: TrainingGraph, batch: int, granule_bytes: int
    ) -> None:
        self.graph, self.twice = graph, twice
        self.batch = checked_integer("batch", batch, least=1)
        self.granule_bytes = granule_bytes

    @property
    def is_one_step(self) -> bool:
        """Whether both traces are of the same operators and storages."""

        def shape(graph: TrainingGraph) -> object:
            return [(op.name, op.reads, op.writes) for op in graph.ops], len(
                graph.storages
            )

        return shape(self.graph) == shape(self.twice)

    def at(self, batch: int) -> TrainingGraph:
        """Return the step at another size of the batch, at least 1."""

        def line(first: int, second: int) -> int:
            # Rounded up, and never less than nothing.
            more = -((first - second) * (batch - self.batch) // self.batch)
            return max(0, first + more)

        def times(
            first: Sequence[int | None], second: Sequence[int | None]
        ) -> tuple[int | None, ...]:
            pairs = zip(first, second, strict=True)
            return tuple(
                None if a is None or b is None else line(a, b) for a, b in pairs
            )

        storages = tuple(
            replace(
                one,
                size_bytes=round_up(
                    line(one.size_bytes, two.size_bytes), self.granule_bytes
                ),
            )
            for one, two in zip(self.graph.storages, self.twice.storages, strict=True)
        )
        ops = tuple(
            replace(
                one,
                cost_ns=times(one.cost_ns, two.cost_ns),
                workspace_bytes=tuple(
                    line(a, b)
                    for a, b in zip(
                        one.workspace_bytes, two.workspace_bytes, strict=True
                    )
                ),
            )
            for one, two in zip(self.graph.ops, self.twice.ops, strict=True)
        )
        return replace(self.graph, storages=storages, ops=ops)


def plain_trace(graph: TrainingGraph) -> Trace:
    """Return the replay of a step without remat."""
    schedule = schedule_from_order(graph, store_all_order(graph))
    return simulate(graph, single_device(kind=graph.device_kinds[0]), schedule)


def _without_scratch(graph: TrainingGraph) -> TrainingGraph:
    ops = [
        replace(op, workspace_bytes=tuple(0 for _ in op.workspace_bytes))
        if "convolution" in op.name
        else op
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops))


def estimate_on(  # noqa: PLR0913 - every option of a plan
    graph: TrainingGraph,
    hardware: Hardware,
    *,
    scaled: ScaledGraph | None = None,
    solver: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    has_assumed_loss: bool = False,
    progress: ProgressCallback = ignore_progress,
) -> DeviceEstimate:
    """Return what a step takes on a device.

    Parameters
    ----------
    graph
        With the device's costs.
    hardware
        The device.
    scaled
        The step at other sizes of its batch, if the largest is to be looked for.
    solver, time_limit, seed, has_assumed_loss, progress
        As for :func:`~remat.planning.one_device.plan_graph`; without a limit, 10 s.

    Notes
    -----
    Besides one plan, about ``2 log2(batch)`` quick searches for the largest batch.
    """
    plain = plain_trace(graph)
    usable_bytes, peak_bytes = hardware.usable_bytes, plain.peak_bytes[0]
    plan: Plan | None = None
    try:
        plan = plan_graph(
            graph,
            budget=usable_bytes,
            solver=solver,
            time_limit=_SOLVE_S if time_limit is None else time_limit,
            seed=seed,
            has_assumed_loss=has_assumed_loss,
            progress=progress,
            settings={"device": hardware.name, "costs": "estimated"},
        )
        needed_bytes = plan.peak_bytes
    except BudgetError as error:
        needed_bytes = error.required_bytes
    largest_plain = largest_planned = None
    if scaled is not None:
        progress(f"looking for the largest batch on {hardware.name}", 0.0)
        largest_plain = _largest(scaled, usable_bytes, _fits_plainly, 0)
        largest_planned = _largest(scaled, usable_bytes, _fits_planned, largest_plain)
    return DeviceEstimate(
        hardware=hardware,
        plain_peak_bytes=peak_bytes,
        least_peak_bytes=plain_trace(_without_scratch(graph)).peak_bytes[0],
        plain_ns=plain.serial_ns,
        optimizer_ns=_optimizer_ns(graph, hardware),
        plan=plan,
        needed_bytes=needed_bytes,
        largest_plain=largest_plain,
        largest_planned=largest_planned,
        offload=_offload(peak_bytes - usable_bytes, plain.serial_ns, hardware),
    )


def _largest(
    scaled: ScaledGraph,
    budget_bytes: int,
    fits: Callable[[TrainingGraph, int], bool],
    known: int,
) -> int:
    """Return the largest batch that fits, ``known`` if none beyond that does."""
    low, step = known, max(1, known // 4)
    while low + step <= _LARGEST_BATCH and fits(scaled.at(low + step), budget_bytes):
        low += step
        step *= 2
    high = min(low + step, _LARGEST_BATCH + 1)
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        if fits(scaled.at(middle), budget_bytes):
            low = middle
        else:
            high = middle
    return low


def _fits_plainly(graph: TrainingGraph, budget_bytes: int) -> bool:
    return plain_trace(graph).peak_bytes[0] <= budget_bytes


def _fits_planned(graph: TrainingGraph, budget_bytes: int) -> bool:
    platform = single_device(budget_bytes, graph.device_kinds[0])
    problem = Problem(graph=graph, platform=platform)
    return any(
        solve(problem, solver, limits=Limits()).schedule is not None
        for solver in FLOOR_SOLVERS[:2]
    )


def _optimizer_ns(graph: TrainingGraph, hardware: Hardware) -> int:
    """Return the time to read and write state and parameters, and to read gradients."""
    by_role = {
        role: sum(s.size_bytes for s in graph.storages if s.role is role)
        for role in (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.GRADIENT)
    }
    if not by_role[Role.OPTIMIZER_STATE]:
        return 0
    moved_bytes = (
        2 * (by_role[Role.PARAMETER] + by_role[Role.OPTIMIZER_STATE])
        + by_role[Role.GRADIENT]
    )
    bandwidth = hardware.bytes_per_s * hardware.percent["memory"] // 100
    return moved_bytes * 10**9 // bandwidth


def _offload(excess_bytes: int, plain_ns: int, hardware: Hardware) -> str:
    """Return what it takes to move what does not fit to the host and back."""
    if excess_bytes <= 0:
        return ""
    bandwidth = hardware.link_bytes_per_s * hardware.percent["link"] // 100
    copy_ns = excess_bytes * 10**9 // bandwidth
    forward_ns = plain_ns // _FORWARD_SHARE
    exposed_ns = max(0, copy_ns - forward_ns) + max(0, copy_ns - plain_ns + forward_ns)
    return (
        f"{format_bytes(excess_bytes)} over the link and back, {format_ns(copy_ns)} each "
        f"way; at least {format_ns(exposed_ns)} more than {format_ns(plain_ns)} of operators"
    )
