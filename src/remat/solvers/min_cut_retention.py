"""MinCutRetention: what to keep across the boundary is a minimum cut.

With a price on every byte that is kept from forward to backward, the choice between
keeping a storage and recomputing it is a closure problem: a storage that backward reads
must be kept or recomputed, and recomputing an op needs what it reads in the same way.
A minimum cut solves it exactly (the cut formulation is that of PyTorch's partitioner,
which has no prices over time, no budget and no search around it). Here:

1. prices are per position of the base order, so that only bytes at moments when memory
   is tight cost anything; their level is bisected until the evaluated peak fits the
   budget, and their distribution follows the timeline that results;
2. each cut becomes a schedule by :mod:`remat.solvers.recompute_order`, whose evaluation
   is exact, so that the working set of recomputation counts;
3. cuts that do not fit are repaired at their fullest moment, releasing what costs least
   time per byte there, a second recomputation included;
4. memory that is left over is spent on keeping instead of recomputing.
"""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import ClassVar

from remat.bounds import cost_bound_ns, peak_bound_bytes
from remat.graph import TrainingGraph
from remat.liveness import BOUNDARY, schedule_from_order
from remat.problem import Limits, Problem, Proposal, Status, StopReason
from remat.retention import improve_order
from remat.solvers.base import ProgressCallback, single_device_kind_index
from remat.solvers.recompute_order import (
    KEEP,
    RELEASE,
    TRANSIENT,
    Evaluation,
    UseTables,
    evaluate,
    use_tables,
)
from remat.solvers.retention_cut import RetentionCut

_SEGMENT_COUNTS = (0, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)
"""Numbers of segments that forward is cut into; 0 leaves all to the prices."""

_ROUNDS = 8
"""Bisection steps for a price level."""

_REFINED = 3
"""Segmentations whose prices are redistributed after the first bisection."""

_REWEIGHTINGS = 3
"""Redistributions of prices for each of these."""

_FIRST_SHARPNESS = 10.0
_SHARPNESS = 20.0
"""Prices fall by e where memory is 1/sharpness of the transient peak below it."""

_REPAIRED = 3
_TRIALS = 10
_KEEPING_TRIALS = 6
_JOINT = 4
"""Repair: states repaired, moves evaluated a time, and moves made together."""

_CLOSURE_OPS = 40
"""Ops after which the estimate of a recomputation stops looking further."""

_FILL_TRIALS = 60
"""Moves evaluated when spending memory that is left over."""

_FEWEST_EVALUATIONS = 600
_MOST_EVALUATIONS = 4000


@dataclass(slots=True)
class _Copy:
    """One copy of a storage in an order: the steps that write it and read it."""

    storage: int
    birth: int
    uses: list[int]


def _copies(tables: UseTables, order: Sequence[int]) -> list[_Copy]:
    latest: dict[int, _Copy] = {}
    copies: list[_Copy] = []
    for step, op in enumerate(order):
        if op == BOUNDARY:
            reads, writes = tables.reads_at[tables.boundary], tables.tangents
        else:
            reads, writes = tables.reads[op], tables.writes[op]
        for storage in reads:
            latest[storage].uses.append(step)
        for storage in writes:
            latest[storage] = copy = _Copy(storage, step, [])
            copies.append(copy)
    for storage in tables.final_outputs:
        latest[storage].uses.append(len(order))
    return copies


@dataclass(slots=True)
class _State:
    """Policies and what they evaluate to."""

    policies: bytearray
    evaluation: Evaluation
    excess: int

    @property
    def cost_ns(self) -> int:
        return self.evaluation.cost_ns

    @property
    def peak_bytes(self) -> int:
        return self.evaluation.peak_bytes


_Move = tuple[int, int]
"""An interval and the policy to give it."""


class _Search:
    """One run of the solver: evaluations, the best state that fits, the limits."""

    def __init__(
        self,
        tables: UseTables,
        cut: RetentionCut,
        budget_bytes: int,
        limits: Limits,
        evaluations: int,
    ) -> None:
        self.tables = tables
        self.cut = cut
        self.budget_bytes = budget_bytes
        self.limits = limits
        self.left = evaluations
        self.random = random.Random(limits.seed)  # noqa: S311
        self.best: _State | None = None
        self.closest: _State | None = None
        self.least_peak_bytes = -1

    @property
    def is_over(self) -> bool:
        return self.left <= 0 or self.limits.is_over

    def try_policies(self, policies: bytearray) -> _State:
        """Evaluate policies and remember them if they are the best so far."""
        self.left -= 1
        evaluation = evaluate(self.tables, policies)
        peak = evaluation.peak_bytes
        excess = 0
        if peak > self.budget_bytes:
            excess = sum(self.occupancy(evaluation, self.budget_bytes)) + 1
            excess -= self.budget_bytes * (len(self.tables.base) + 1)
        state = _State(policies, evaluation, excess)
        if self.least_peak_bytes < 0 or peak < self.least_peak_bytes:
            self.least_peak_bytes = peak
        if excess:
            if self.closest is None or excess < self.closest.excess:
                self.closest = state
        elif self.best is None or (state.cost_ns, peak) < (
            self.best.cost_ns,
            self.best.peak_bytes,
        ):
            self.best = state
        return state

    def occupancy(self, evaluation: Evaluation, floor_bytes: int = 0) -> list[int]:
        """Return the most bytes per position of the base order, at least a floor."""
        most = [floor_bytes] * (len(self.tables.base) + 1)
        for position, used in zip(
            evaluation.positions, evaluation.timeline_bytes, strict=True
        ):
            most[position] = max(most[position], used)
        return most

    def weights(self, evaluation: Evaluation, sharpness: float) -> list[float]:
        """Return a distribution over positions that favours the fullest ones."""
        occupancy = self.occupancy(evaluation)
        top = max(occupancy)
        scale = sharpness / max(1, top - self.tables.resident_bytes)
        raw = [exp((used - top) * scale) for used in occupancy]
        total = sum(raw)
        return [value / total for value in raw]

    def bisect_price(
        self, weights: list[float], rounds: int, free: frozenset[int]
    ) -> _State | None:
        """Bisect the price level; return the state closest to the budget."""
        tables = self.tables
        scale = sum(tables.cost_ns) / max(1, sum(tables.size_bytes))
        low, high = scale / 1024, scale * 1024
        known: dict[frozenset[int], _State] = {}
        for _ in range(rounds):
            if self.is_over:
                break
            level = (low * high) ** 0.5
            kept = self.cut.kept([level * weight for weight in weights], free)
            if kept not in known:
                known[kept] = self.try_policies(self.cut.policies(kept))
            if known[kept].excess:
                low = level
            else:
                high = level
        return min(
            known.values(),
            key=lambda state: abs(state.peak_bytes - self.budget_bytes),
            default=None,
        )

    def sweep(self, store_all: Evaluation) -> list[_State]:
        """Bisect prices for several segmentations; return what came closest to fit."""
        tables = self.tables
        total = sum(tables.output_bytes[op] for op in tables.base[: tables.boundary])
        first = self.weights(store_all, _FIRST_SHARPNESS)
        found: list[tuple[int, int, int, frozenset[int], _State]] = []
        seen: set[frozenset[int]] = set()
        for index, count in enumerate(_SEGMENT_COUNTS):
            free = frozenset[int]()
            if count:
                free = self.cut.separators(-(-total // count))
            if free in seen:
                continue
            seen.add(free)
            before, self.best = self.best, None
            state = self.bisect_price(first, _ROUNDS, free)
            state = self.best or state
            if state is not None:
                found.append((state.excess, state.cost_ns, index, free, state))
            self.best = min(
                (s for s in (before, self.best) if s), key=_rank, default=None
            )
        found.sort(key=lambda entry: entry[:3])
        ends = [entry[4] for entry in found]
        for *_, free, nearest in found[:_REFINED]:
            weights, state = first, nearest
            for _ in range(_REWEIGHTINGS):
                target = self.weights(state.evaluation, _SHARPNESS)
                weights = [(a + b) / 2 for a, b in zip(weights, target, strict=True)]
                state = self.bisect_price(weights, _ROUNDS, free) or state
                ends.append(state)
        return sorted(ends, key=_rank)

    def interval_at(self, storage: int, position: int) -> int:
        """Return the interval of a storage that is open just before a position."""
        tables = self.tables
        interval = tables.first_interval[storage]
        while tables.interval_end[interval] < position:
            interval += 1
        return interval

    def relieving_moves(self, state: _State) -> list[_Move]:
        """Return moves that may lower the fullest moment, the likeliest first."""
        tables, evaluation = self.tables, state.evaluation
        timeline, positions = evaluation.timeline_bytes, evaluation.positions
        fullest = max(range(len(timeline)), key=timeline.__getitem__)
        now = positions[fullest]
        copies = _copies(tables, evaluation.order)
        live_until: dict[int, list[_Copy]] = {}
        for copy in copies:
            live_until.setdefault(copy.storage, []).append(copy)
        moves: list[tuple[float, _Move]] = []
        for copy in copies:
            if copy.birth >= fullest or not copy.uses or copy.uses[-1] <= fullest:
                continue
            following = next(use for use in copy.uses if use >= fullest)
            later = positions[following] if following < len(positions) else now
            size = tables.size_bytes[copy.storage]
            if later == now or tables.is_pinned[copy.storage] or not size:
                continue
            interval = self.interval_at(copy.storage, now)
            is_recomputed = positions[copy.birth] > tables.interval_start[interval]
            policy = TRANSIENT if is_recomputed else RELEASE
            if state.policies[interval] >= policy:
                continue
            cost = self.closure_ns(copy.storage, following, live_until)
            moves.append((size / (1 + cost), (interval, policy)))
        moves.sort(reverse=True)
        chosen = [move for _, move in moves[:_TRIALS]]
        return chosen + self.keeping_moves(state, copies, fullest)

    def closure_ns(
        self, storage: int, step: int, copies_of: dict[int, list[_Copy]]
    ) -> int:
        """Estimate the time to recompute a storage just before a step."""
        tables = self.tables
        pending = [storage]
        ops: set[int] = set()
        cost = 0
        while pending and len(ops) < _CLOSURE_OPS:
            op = tables.producer[pending.pop()]
            if op in ops:
                continue
            ops.add(op)
            cost += tables.cost_ns[op]
            pending.extend(
                s
                for s in tables.reads[op]
                if not tables.is_pinned[s]
                and not any(
                    copy.birth < step and copy.uses and copy.uses[-1] >= step
                    for copy in copies_of.get(s, ())
                )
            )
        return cost

    def keeping_moves(
        self, state: _State, copies: list[_Copy], fullest: int
    ) -> list[_Move]:
        """Return moves that keep something so that less is recomputed at once."""
        tables, evaluation = self.tables, state.evaluation
        positions, order = evaluation.positions, evaluation.order
        now = positions[fullest]
        start, stop = bisect_left(positions, now), bisect_right(positions, now)
        # Bytes of what is computed for this position and that one step alone reads.
        behind = [0] * (stop - start)
        made: list[_Copy] = [c for c in copies if start <= c.birth < stop]
        for copy in reversed(made):
            if copy.birth == stop - 1 and order[copy.birth] == tables.base[now]:
                continue
            freed = behind[copy.birth - start]
            if copy.uses and copy.uses[-1] >= fullest:
                freed += tables.size_bytes[copy.storage]
            inside = {use for use in copy.uses if use < stop}
            if len(inside) == 1:
                behind[inside.pop() - start] += freed
        ranked = sorted(
            (
                tables.size_bytes[copy.storage] - behind[copy.birth - start],
                copy.birth,
                copy.storage,
            )
            for copy in made
            if order[copy.birth] != BOUNDARY
        )
        moves: list[_Move] = []
        for _, _, storage in ranked:
            interval = self.interval_at(storage, now)
            if state.policies[interval] and tables.interval_end[interval] >= now:
                moves.append((interval, KEEP))
            if len(moves) >= _KEEPING_TRIALS:
                break
        return moves

    def moved(self, state: _State, moves: Sequence[_Move]) -> _State:
        policies = bytearray(state.policies)
        for interval, policy in moves:
            policies[interval] = policy
        return self.try_policies(policies)

    def repair(self, state: _State, most_ns: float = inf) -> _State:
        """Lower the fullest moments until the state fits, or nothing helps."""
        while state.excess and not self.is_over:
            trials: list[tuple[float, _Move, _State]] = []
            for move in self.relieving_moves(state):
                trial = self.moved(state, [move])
                relief = state.excess - trial.excess
                if relief > 0 and trial.cost_ns < most_ns:
                    price = max(0, trial.cost_ns - state.cost_ns) + 1
                    trials.append((relief / price, move, trial))
                if self.is_over:
                    break
            if not trials:
                break
            trials.sort(key=lambda entry: entry[:2], reverse=True)
            following = trials[0][2]
            if following.excess and len(trials) > 1:
                together = self.moved(state, [move for _, move, _ in trials[:_JOINT]])
                if together.excess < following.excess and together.cost_ns < most_ns:
                    following = together
            state = following
        return state

    def fill(self, state: _State) -> _State:
        """Keep what is recomputed, dearest per byte first, while it fits."""
        for move in self.saving_moves(state):
            if self.is_over:
                break
            trial = self.moved(state, [move])
            if not trial.excess and trial.cost_ns < state.cost_ns:
                state = trial
        return state

    def saving_moves(self, state: _State) -> list[_Move]:
        """Return the moves that keep a recomputed storage and seem to fit."""
        tables, evaluation = self.tables, state.evaluation
        order, positions = evaluation.order, evaluation.positions
        timeline = evaluation.timeline_bytes
        copies = _copies(tables, order)
        saving = [0 if op == BOUNDARY else tables.cost_ns[op] for op in order]
        previous: dict[int, _Copy] = {}
        again: list[tuple[_Copy, _Copy]] = []
        is_again = bytearray(len(order))
        for copy in copies:
            if copy.storage in previous:
                again.append((previous[copy.storage], copy))
                is_again[copy.birth] = 1
            previous[copy.storage] = copy
        for _, copy in reversed(again):
            if len(copy.uses) == 1 and copy.uses[0] < len(order):
                use = copy.uses[0]
                if is_again[use]:
                    saving[use] += saving[copy.birth]
        ranked: list[tuple[float, _Move]] = []
        for before, copy in again:
            size = tables.size_bytes[copy.storage]
            interval = self.interval_at(copy.storage, positions[copy.birth])
            last = before.uses[-1] if before.uses else before.birth
            tightest = max(timeline[last + 1 : copy.birth], default=0)
            if (
                state.policies[interval]
                and copy.uses
                and tightest + size // 2 <= self.budget_bytes
            ):
                ranked.append((saving[copy.birth] / (1 + size), (interval, KEEP)))
        ranked.sort(reverse=True)
        return [move for _, move in ranked[:_FILL_TRIALS]]

    def exchange(self, state: _State) -> _State:
        """Keep something at random, repair, fill; return the cheaper state."""
        policies = state.policies
        released = [i for i, policy in enumerate(policies) if policy]
        if not released:
            return state
        count = 1 + self.random.randrange(3)
        moves = [(self.random.choice(released), KEEP) for _ in range(count)]
        trial = self.moved(state, moves)
        if trial.cost_ns >= state.cost_ns:
            return state
        trial = self.repair(trial, state.cost_ns)
        if trial.excess:
            return state
        trial = self.fill(trial)
        return min(state, trial, key=_rank)


def _rank(state: _State) -> tuple[int, int, int]:
    return (state.excess, state.cost_ns, state.peak_bytes)


@dataclass(frozen=True, slots=True)
class MinCutRetention:
    """Keep across the boundary what a minimum cut says, then search around it.

    Parameters
    ----------
    effort_ops
        Work to spend, in op runs simulated; about a microsecond or two each.

    **Optimal among** nothing in general: the cut is exact for given prices, the
    search around it is not.

    **Complexity** a minimum cut takes about linear time on training graphs; the number
    of evaluations is ``effort_ops`` over the number of ops, within limits.
    """

    effort_ops: int = 2_500_000

    schedule_class: ClassVar[str] = "recomputation right before its use, in graph order"
    is_exact: ClassVar[bool] = False

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits.

        Raises
        ------
        SolverUnsuitableError
            If an op cannot run on device 0, or a storage lives elsewhere.
        """
        graph = problem.graph
        kind_index = single_device_kind_index(problem)
        tables = use_tables(graph, kind_index)
        bound_ns = cost_bound_ns(problem)
        budget = problem.budget_bytes
        store_all = evaluate(tables, bytes(len(tables.interval_start)))
        if budget is None or store_all.peak_bytes <= budget:
            return _proposal(graph, store_all.order, bound_ns, limits)
        least = peak_bound_bytes(graph, problem.platform.devices[0].kind)
        if least > budget:
            return Proposal(
                status=Status.UNKNOWN,
                bound_ns=bound_ns,
                message=f"every schedule needs {least:_} bytes; the budget is {budget:_}",
            )
        count = max(_FEWEST_EVALUATIONS, self.effort_ops // len(tables.base))
        cut = RetentionCut(graph, tables)
        search = _Search(tables, cut, budget, limits, min(count, _MOST_EVALUATIONS))
        _run(search, store_all, on_progress)
        if search.best is None:
            return Proposal(
                status=Status.UNKNOWN,
                bound_ns=bound_ns,
                stop_reason=(
                    StopReason.TIME_LIMIT if limits.is_over else StopReason.COMPLETED
                ),
                message=(
                    f"the smallest peak found is {search.least_peak_bytes:_} bytes; the "
                    f"budget is {budget:_}"
                ),
            )
        order = search.best.evaluation.order
        if not limits.is_over:
            order = improve_order(
                graph, order, budget, kind_index=kind_index, limits=limits
            )
        return _proposal(graph, order, bound_ns, limits)


def _run(search: _Search, store_all: Evaluation, on_progress: ProgressCallback) -> None:
    """Sweep prices, repair what nearly fits, then exchange until the effort is gone."""
    most = search.left
    on_progress("minimum cuts", 0.0)
    ends = search.sweep(store_all)
    for state in ends[:_REPAIRED]:
        if state.excess:
            on_progress("repair", 1 - search.left / most)
            search.repair(state, search.best.cost_ns if search.best else inf)
    state = search.best
    if state is None:
        return
    state = search.fill(state)
    while not search.is_over:
        on_progress("exchange", 1 - search.left / most)
        before = search.left
        state = min(search.exchange(state), search.best or state, key=_rank)
        if search.left == before:
            break


def _proposal(
    graph: TrainingGraph,
    order: Sequence[int],
    bound_ns: int,
    limits: Limits,
) -> Proposal:
    return Proposal(
        status=Status.FEASIBLE,
        schedule=schedule_from_order(graph, order),
        bound_ns=bound_ns,
        stop_reason=StopReason.TIME_LIMIT if limits.is_over else StopReason.COMPLETED,
    )
