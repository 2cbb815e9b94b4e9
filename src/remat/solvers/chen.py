"""ChenSqrt, ChenGreedy, ChenLowerSets: segments of forward, each recomputed once.

Also known as sqrt(n) checkpointing and gradient checkpointing. The forward ops, in
their topological order, are cut into segments. What a later segment reads is saved;
the rest of a segment is recomputed when backward reads it.

Departures from the paper [1]_:

* the paper cuts a list of layers; here the unit is the op, and what is saved at a cut
  is every storage that crosses it, which on a chain is the one storage of the paper
  (the paper restricts cuts on other graphs to where few storages cross);
* only those ops of a segment are recomputed whose outputs backward goes on to use;
* the last segment is kept, since backward starts in it;
* outputs of ops that may run only once are saved wherever they lie, and whatever
  backward reads of a segment that only such an op could bring back;
* freeing is that of :mod:`remat.core.liveness`, so memory is counted on true bytes;
* :class:`ChenGreedy` judges every budget of its search by the true peak, where the
  paper uses an estimate (saved bytes plus the largest segment).

:class:`ChenLowerSets` restricts cuts as the lower-set paper [2]_ did where it compares
itself with Chen's method: to lower sets of which later ops read a single value.

References
----------
.. [1] T. Chen, B. Xu, C. Zhang, C. Guestrin. Training deep nets with sublinear memory
   cost. arXiv:1604.06174, 2016: section 4 and algorithm 3.
.. [2] M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic
   framework of recomputation algorithms for memory-efficient backpropagation. NeurIPS
   2019: the experiments.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from typing import ClassVar

from remat.algorithms.lower_sets.chen import chen_segmentation
from remat.algorithms.lower_sets.choice import choose_family
from remat.core.best import Best
from remat.core.bounds import cost_bound_ns, required_ops
from remat.core.checks import keep_integers
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.problem import Limits, Problem, Proposal, Status, StopReason
from remat.core.units import format_bytes
from remat.reductions.forward_values import reduce_to_forward_values
from remat.reductions.segments import SegmentedGraph
from remat.search.plain_numbers import plain_numbers
from remat.search.retention_table import weigh_order
from remat.solvers.base import ProgressCallback, single_device_kind_index


def segment_order(graph: TrainingGraph, starts: Iterable[int]) -> list[int]:
    """Return the order that saves what crosses segments and recomputes the rest.

    A segment starts at each of the forward ops ``starts``, and at the first.
    """
    limits = sorted({0, *starts})
    segmented = SegmentedGraph(graph)
    return segmented.order({op: bisect_right(limits, op) for op in segmented.forward})


def sqrt_starts(graph: TrainingGraph) -> list[int]:
    """Return the starts of segments of about sqrt(n) of the n required forward ops."""
    forward = sorted(op for op in required_ops(graph) if op < graph.forward_count)
    length = isqrt(max(len(forward) - 1, 0)) + 1
    return forward[::length]


def greedy_starts(graph: TrainingGraph, segment_bytes: int) -> list[int]:
    """Return the starts of segments that write more than ``segment_bytes`` each.

    Parameters
    ----------
    graph
        The graph whose forward ops are cut.
    segment_bytes
        The paper's budget b: a segment ends with the op whose outputs take the bytes
        written since it began above this.
    """
    starts: list[int] = []
    written_bytes = segment_bytes + 1
    for op in sorted(required_ops(graph)):
        if op >= graph.forward_count:
            break
        if written_bytes > segment_bytes:
            starts.append(op)
            written_bytes = 0
        written_bytes += sum(graph.storages[s].size_bytes for s in graph.ops[op].writes)
    return starts


def crossing_bytes(graph: TrainingGraph) -> list[int]:
    """Return, per forward op, the bytes that a cut just before it would save.

    Counts the storages that an earlier forward op writes and the op itself or a later
    forward op reads; resident storages are not counted.
    """
    changes = [0] * (graph.forward_count + 1)
    for storage, producer in enumerate(graph.producers):
        if producer is None or producer >= graph.forward_count:
            continue
        readers = [op for op in graph.consumers[storage] if op < graph.forward_count]
        if readers:
            changes[producer + 1] += graph.storages[storage].size_bytes
            changes[readers[-1] + 1] -= graph.storages[storage].size_bytes
    return list(accumulate(changes))[: graph.forward_count]


def narrow_cuts(graph: TrainingGraph, segment_bytes: int) -> list[int]:
    """Return forward ops before which to cut, each where little crosses.

    Parameters
    ----------
    graph
        The graph whose forward ops are cut.
    segment_bytes
        The cut is made at the narrowest place of the second half of the ops that
        together write more than this.
    """
    crossing = crossing_bytes(graph)
    cuts: list[int] = []
    start, written_bytes = 0, 0
    op = 0
    while op < graph.forward_count:
        written_bytes += sum(graph.storages[s].size_bytes for s in graph.ops[op].writes)
        op += 1
        if written_bytes > segment_bytes and op < graph.forward_count:
            middle = (start + op + 1) // 2
            start = min(range(op, middle - 1, -1), key=crossing.__getitem__)
            cuts.append(start)
            op, written_bytes = start, 0
    return cuts


def saved_at(graph: TrainingGraph, cuts: Sequence[int]) -> frozenset[int]:
    """Return the storages written before one of ``cuts`` and read in forward after."""
    saved: set[int] = set()
    for storage, producer in enumerate(graph.producers):
        if producer is None or producer >= graph.forward_count:
            continue
        next_cut = bisect_right(cuts, producer)
        if next_cut < len(cuts) and any(
            cuts[next_cut] <= op < graph.forward_count
            for op in graph.consumers[storage]
        ):
            saved.add(storage)
    return frozenset(saved)


@dataclass(frozen=True, slots=True)
class ChenSqrt:
    """Save at every sqrt(n)-th op, recompute in between.

    **Guarantee** none on cost beyond one extra forward pass; on a chain of n equal
    layers the memory is O(sqrt(n)).

    **Complexity** linear in the graph.
    """

    schedule_class: ClassVar[str] = (
        "segments of the forward order, each recomputed once"
    )
    is_exact: ClassVar[bool] = False

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the one schedule there is, or UNKNOWN if it does not fit."""
        single_device_kind_index(problem)
        found = _Trials(problem)
        found.try_starts(sqrt_starts(problem.graph))
        return found.proposal()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChenGreedy:
    """Cut where the bytes written since the last cut exceed b; search for b.

    **Guarantee** none; every forward op runs at most twice.

    **Complexity** linear in the graph for each b that is tried.

    Parameters
    ----------
    grid_count
        Number of values of b, in geometric progression from the largest output to
        the bytes of the whole forward pass, at least 2.
    bisection_count
        Halvings between the best b of the grid and the next larger one.
    """

    schedule_class: ClassVar[str] = (
        "segments of the forward order, each recomputed once"
    )
    is_exact: ClassVar[bool] = False

    grid_count: int = 24
    bisection_count: int = 6

    def __post_init__(self) -> None:
        keep_integers(self, "grid_count", of=type(self).__name__, least=2)
        keep_integers(self, "bisection_count", of=type(self).__name__, least=0)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule that fits, or UNKNOWN if none of those tried."""
        single_device_kind_index(problem)
        found = _Trials(problem)
        grid = self.grid(problem.graph)
        for index, segment_bytes in enumerate(grid):
            if limits.is_over:
                return found.proposal(StopReason.TIME_LIMIT)
            on_progress("cutting the model into segments", index / len(grid))
            found.try_segment_bytes(segment_bytes)
        low = found.segment_bytes
        high = min((b for b in grid if b > low), default=low)
        for _ in range(self.bisection_count):
            if limits.is_over:
                return found.proposal(StopReason.TIME_LIMIT)
            middle = (low + high) // 2
            found.try_segment_bytes(middle)
            low, high = (middle, high) if found.has_fitted else (low, middle)
        return found.proposal()

    def grid(self, graph: TrainingGraph) -> list[int]:
        """Return the values of b to try first, in bytes, ascending."""
        written = [
            sum(graph.storages[s].size_bytes for s in graph.ops[op].writes)
            for op in required_ops(graph)
            if op < graph.forward_count
        ]
        if not written:
            return [0]
        low, high = max(1, *written), max(1, sum(written))
        last = self.grid_count - 1
        values = [int(low * (high / low) ** (k / last)) for k in range(last)]
        return sorted({0, *values, high})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChenLowerSets:
    """Cut where a single forward value crosses, into about sqrt(n) parts by bytes.

    The n places to cut are the lower sets of the forward graph of which one value is
    read outside; they are a chain's layers, and few where branches run side by side.
    This is the baseline of the lower-set paper's tables.

    **Guarantee** none; every forward op runs at most twice.

    **Complexity** linear in the graph, and O(lower sets x forward values).

    Parameters
    ----------
    max_nodes
        Forward values are merged until there are no more than this, at least 1.

    Raises
    ------
    ValueError
        If ``max_nodes`` is not positive.
    """

    schedule_class: ClassVar[str] = (
        "segments of the forward order, each recomputed once"
    )
    is_exact: ClassVar[bool] = False

    max_nodes: int = 1024

    def __post_init__(self) -> None:
        keep_integers(self, "max_nodes", of=type(self).__name__, least=1)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the one schedule there is, or UNKNOWN if it does not fit."""
        order = self.order(problem.graph, single_device_kind_index(problem))
        found = _Trials(problem)
        found.try_order(order)
        return found.proposal()

    def order(self, graph: TrainingGraph, kind_index: int = 0) -> list[int]:
        """Return the order of the method, as :func:`segment_order` does."""
        values = reduce_to_forward_values(
            graph, kind_index=kind_index, max_nodes=self.max_nodes
        )
        if values is None:
            return store_all_order(graph)
        segmentation = chen_segmentation(values.graph, choose_family(values.graph))
        return values.segments.order(values.segment_of_ops(segmentation.segment_of))


class _Trials:
    """The orders tried so far, and the cheapest of those that fit."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.numbers = plain_numbers(problem.graph, single_device_kind_index(problem))
        self.best = Best[Sequence[int]]()
        self.least_peak_bytes: int | None = None
        self.segment_bytes = 0
        self.has_fitted = False

    def try_segment_bytes(self, segment_bytes: int) -> None:
        if self.try_starts(greedy_starts(self.problem.graph, segment_bytes)):
            self.segment_bytes = segment_bytes

    def try_starts(self, starts: Sequence[int]) -> bool:
        """Judge one way to cut; return whether it is the cheapest so far."""
        return self.try_order(segment_order(self.problem.graph, starts))

    def try_order(self, order: Sequence[int]) -> bool:
        """Judge one order; return whether it is the cheapest so far."""
        cost_ns, peak = weigh_order(self.numbers, order)
        budget = self.problem.budget_bytes
        self.has_fitted = budget is None or peak <= budget
        self.least_peak_bytes = min(peak, self.least_peak_bytes or peak)
        return self.has_fitted and self.best.offer(order, cost_ns)

    def proposal(self, stop_reason: StopReason = StopReason.COMPLETED) -> Proposal:
        if self.best.answer is not None:
            return Proposal(
                status=Status.FEASIBLE,
                schedule=schedule_from_order(self.problem.graph, self.best.answer),
                bound_ns=cost_bound_ns(self.problem),
                stop_reason=stop_reason,
            )
        least = self.least_peak_bytes
        return Proposal(
            status=Status.UNKNOWN,
            stop_reason=stop_reason,
            message=(
                "no segmentation was tried"
                if least is None
                else f"the segmentations that were tried need {format_bytes(least)} "
                f"or more; the budget is {format_bytes(self.problem.budget_bytes or 0)}"
            ),
        )
