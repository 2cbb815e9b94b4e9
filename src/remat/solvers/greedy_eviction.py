"""GreedyEviction: execute within a limit, then keep what there is room for.

Each candidate is made in two steps. First the graph is executed in its own order within
a limit, and what is cheapest to lose is evicted when memory is short (see
:mod:`remat.search.eviction`). Then the runs that the memory still free can do without
are taken out of the resulting order, best value first (see
:mod:`remat.search.retention`).

Several candidates are made, because no rule is best on every graph: eviction rules with
different exponents; limits below the budget, since leaving room for the second step is
often better than filling it in the first; executions whose forward pass saves only
what crosses some narrow cuts of the graph, as per-block checkpointing would; and the
segments of :class:`remat.solvers.chen.ChenGreedy`. The cheapest candidate is returned.

Known to be improvable: the two steps only remove recomputation; nothing yet trades one
kept storage for another, and the order of the ops is always the graph's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from remat.core.checks import (
    checked_nonempty,
    checked_record,
    checked_records,
    keep_flags,
    keep_integers,
)
from remat.core.graph import TrainingGraph
from remat.core.problem import Limits, Problem, Proposal
from remat.core.units import floor_slots
from remat.search.eviction import EvictionRule, evicting_order
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.solvers.chen import ChenGreedy, narrow_cuts, saved_at
from remat.solvers.order_search import OrderSearch, order_of


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

    def __post_init__(self) -> None:
        of = type(self).__name__
        checked_record(f"rule of {of}", self.rule, EvictionRule)
        keep_integers(self, "limit_percent", of=of, least=0, most=100)
        keep_integers(self, "segment_count", of=of, least=1, optional=True)


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

    **Complexity** about half a second for 2 000 ops and one budget; see
    :func:`remat.search.eviction.evicting_order` and
    :func:`remat.search.retention.improve_order`.

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

    def __post_init__(self) -> None:
        of = type(self).__name__
        candidates = checked_records(f"candidates of {of}", self.candidates, Candidate)
        checked_nonempty(f"candidates of {of}", candidates)
        object.__setattr__(self, "candidates", candidates)
        keep_integers(self, "runs_per_op", of=of, least=0)
        keep_flags(self, "starts_from_segments", of=of)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN."""
        search = OrderSearch(problem, limits)
        at_once = search.at_once()
        if at_once is not None:
            return at_once
        for share, order in self._orders(search):
            on_progress("choosing what to compute again", share)
            if order is not None:
                search.improve(order)
            if search.is_over:
                break
        return search.answer(f"{len(search.candidates)} candidates get by")

    def _orders(self, search: OrderSearch) -> Iterator[tuple[float, list[int] | None]]:
        """Yield the share of the work done, and an order or ``None``, per candidate."""
        graph = search.graph
        room_bytes = search.budget_bytes - search.floor_bytes
        count = len(self.candidates) + self.starts_from_segments
        for index, candidate in enumerate(self.candidates):
            order = evicting_order(
                graph,
                search.floor_bytes + room_bytes * candidate.limit_percent // 100,
                kind_index=search.kind_index,
                rule=candidate.rule,
                runs_per_op=self.runs_per_op,
                saved=_saved(graph, candidate.segment_count),
                limits=search.limits,
            )
            yield (index + 1) / count, order
        if self.starts_from_segments:
            segments = ChenGreedy().solve(
                search.problem, search.limits, ignore_progress
            )
            yield (
                1.0,
                None if segments.schedule is None else order_of(segments.schedule),
            )
