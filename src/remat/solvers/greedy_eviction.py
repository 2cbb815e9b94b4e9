"""GreedyEviction: execute within a limit, then keep what there is room for.

Each candidate is made in two steps. First the graph is executed in its own order within
a limit, and what is cheapest to lose is evicted when memory is short (see
:mod:`remat.eviction`). Then the runs that the memory still free can do without are
taken out of the resulting order, best value first (see :mod:`remat.retention`).

Several candidates are made, because no rule is best on every graph: eviction rules with
different exponents; limits below the budget, since leaving room for the second step is
often better than filling it in the first; executions whose forward pass saves only
what crosses some narrow cuts of the graph, as per-block checkpointing would; and the
segments of :class:`remat.solvers.chen.ChenGreedy`. The cheapest candidate is returned.

Known to be improvable: the two steps only remove recomputation; nothing yet trades one
kept storage for another, and the order of the ops is always the graph's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.bounds import cost_bound_ns, peak_bound_bytes
from remat.eviction import EvictionRule, evicting_order
from remat.graph import TrainingGraph
from remat.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.problem import Limits, Problem, Proposal, Status, StopReason
from remat.retention import RetentionTable, improve_order
from remat.schedule import Boundary, Compute, Schedule
from remat.solvers.base import (
    ProgressCallback,
    ignore_progress,
    single_device_kind_index,
)
from remat.solvers.chen import ChenGreedy, narrow_cuts, saved_at
from remat.units import floor_slots, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """How one candidate schedule is made.

    Parameters
    ----------
    rule
        How victims are chosen.
    limit_percent
        The limit kept to while executing, as a percentage of the way from the lower
        bound on the peak to the budget, 0 to 100.
    segment_count
        If given, forward saves only what crosses cuts that make about as many
        segments of equal bytes, and drops the rest at once.
    """

    rule: EvictionRule
    limit_percent: int = 100
    segment_count: int | None = None


CANDIDATES = (
    Candidate(rule=EvictionRule(distance_exponent=0.5, ancestor_share=1.0)),
    Candidate(rule=EvictionRule(distance_exponent=0.0, ancestor_share=0.0)),
    Candidate(
        rule=EvictionRule(distance_exponent=0.0, ancestor_share=1.0), segment_count=8
    ),
    Candidate(
        rule=EvictionRule(distance_exponent=1.0, ancestor_share=1.0), limit_percent=70
    ),
    Candidate(rule=EvictionRule(distance_exponent=0.0, ancestor_share=1.0)),
    Candidate(
        rule=EvictionRule(distance_exponent=0.0, ancestor_share=1.0), segment_count=32
    ),
    Candidate(rule=EvictionRule(distance_exponent=1.0, ancestor_share=0.5)),
)
"""The candidates that are made, in this order."""


def _feasible(
    problem: Problem,
    order: Sequence[int],
    stop_reason: StopReason = StopReason.COMPLETED,
) -> Proposal:
    return Proposal(
        status=Status.FEASIBLE,
        schedule=schedule_from_order(problem.graph, order),
        bound_ns=cost_bound_ns(problem),
        stop_reason=stop_reason,
    )


def _nothing_fits(
    budget_bytes: int, reason: str, stop_reason: StopReason = StopReason.COMPLETED
) -> Proposal:
    return Proposal(
        status=Status.UNKNOWN,
        stop_reason=stop_reason,
        message=f"found nothing within {format_bytes(budget_bytes)}: {reason}",
    )


def _order(schedule: Schedule) -> list[int]:
    return [
        step.op if isinstance(step, Compute) else BOUNDARY
        for step in schedule.steps
        if isinstance(step, Compute | Boundary)
    ]


def _saved(graph: TrainingGraph, segment_count: int | None) -> frozenset[int] | None:
    if segment_count is None:
        return None
    written_bytes = sum(
        graph.storages[storage].size_bytes
        for op in graph.ops[: graph.forward_count]
        for storage in op.writes
    )
    return saved_at(
        graph, narrow_cuts(graph, floor_slots(written_bytes, segment_count))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyEviction:
    """Evict by cost over bytes and distance; then keep what there is room for.

    **Guarantee** none on cost. Finds a schedule for budgets well below the peak of
    storing everything, on any graph.

    **Complexity** about 2 s for 2 000 ops and one budget; see
    :func:`remat.eviction.evicting_order` and :func:`remat.retention.improve_order`.

    Parameters
    ----------
    candidates
        How candidates are made, in this order; the cheapest schedule is returned.
    runs_per_op
        A candidate is given up once the runs exceed this multiple of the ops.
    starts_from_segments
        Whether the best segments of :class:`remat.solvers.chen.ChenGreedy` are
        improved as well, so that the answer is never worse than those.
    """

    schedule_class: ClassVar[str] = "any op any number of times, on one device"
    is_exact: ClassVar[bool] = False

    candidates: tuple[Candidate, ...] = CANDIDATES
    runs_per_op: int = 8
    starts_from_segments: bool = True

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN.

        Raises
        ------
        SolverUnsuitableError
            If an op cannot run on device 0, or a storage lives elsewhere.
        """
        graph, kind = problem.graph, single_device_kind_index(problem)
        budget = problem.budget_bytes
        store_all = RetentionTable(graph, store_all_order(graph), kind)
        store_all.drop_unread_runs()
        if budget is None or store_all.peak_bytes <= budget:
            return _feasible(problem, store_all.order())
        bound = peak_bound_bytes(graph, problem.platform.devices[0].kind)
        if bound > budget:
            return _nothing_fits(budget, f"every schedule needs {format_bytes(bound)}")
        best: tuple[int, int, list[int]] | None = None
        stop_reason = StopReason.COMPLETED
        for share, order in self._orders(problem, bound, limits):
            on_progress("evicting", share)
            if order is not None:
                kept = improve_order(
                    graph, order, budget, kind_index=kind, limits=limits
                )
                table = RetentionTable(graph, kept, kind)
                found = (table.cost_ns, table.peak_bytes, kept)
                best = found if best is None else min(best, found)
            if limits.is_over:
                stop_reason = StopReason.TIME_LIMIT
                break
        if best is None:
            return _nothing_fits(budget, "no candidate gets by", stop_reason)
        return _feasible(problem, best[2], stop_reason)

    def _orders(
        self, problem: Problem, bound_bytes: int, limits: Limits
    ) -> Iterator[tuple[float, list[int] | None]]:
        """Yield the share of the work done, and an order or ``None``, per candidate."""
        graph, kind = problem.graph, single_device_kind_index(problem)
        room_bytes = (problem.budget_bytes or 0) - bound_bytes
        count = len(self.candidates) + self.starts_from_segments
        for index, candidate in enumerate(self.candidates):
            order = evicting_order(
                graph,
                bound_bytes + room_bytes * candidate.limit_percent // 100,
                kind_index=kind,
                rule=candidate.rule,
                runs_per_op=self.runs_per_op,
                saved=_saved(graph, candidate.segment_count),
                limits=limits,
            )
            yield (index + 1) / count, order
        if self.starts_from_segments:
            segments = ChenGreedy().solve(problem, limits, ignore_progress).schedule
            yield 1.0, None if segments is None else _order(segments)
