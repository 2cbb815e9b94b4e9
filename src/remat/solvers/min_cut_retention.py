"""MinCutRetention: what to keep across the boundary is a minimum cut.

With a price on every byte that is kept from forward to backward, the choice between
keeping a storage and recomputing it is a closure problem: a storage that backward reads
must be kept or recomputed, and recomputing an op needs what it reads in the same way.
A minimum cut solves it exactly (see :mod:`remat.solvers.retention_cut`). PyTorch's
partitioner poses the same cut with fixed weights; here it is one part of a search that
knows the budget:

1. prices are per position of the base order, so that only bytes at moments when memory
   is tight cost anything. Their level is bisected until the peak fits the budget, and
   their distribution follows the timeline that results. Forward is also cut into
   segments whose limits are kept for nothing, because the prices alone do not see that
   recomputing everything at once needs memory too;
2. each cut becomes a schedule by :mod:`remat.solvers.recompute_order`, whose cost and
   peak are exact;
3. an execution within the budget (:mod:`remat.search.eviction`) starts from what a cut
keeps,
   with one of several rules, and evicts where the cut alone does not fit, second
   recomputations included; memory that is left over is spent on recomputing less
   (:mod:`remat.search.retention`);
4. with the effort that is left, what the best schedule keeps is changed a little at
   random, and step 3 repeated.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import ClassVar

from remat.core.checks import keep_integers
from remat.core.problem import Limits, Problem, Proposal
from remat.search.eviction import EvictionRule, evicting_order
from remat.solvers.base import ProgressCallback
from remat.solvers.order_search import Candidate, OrderSearch
from remat.solvers.recompute_order import (
    Evaluation,
    UseTables,
    evaluate,
    policies_of_order,
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

_RULES = tuple(
    EvictionRule(distance_exponent=distance, ancestor_share=share)
    for distance, share in (
        (0.0, 0.0),
        (0.0, 0.5),
        (0.0, 1.0),
        (0.5, 1.0),
        (0.5, 0.0),
        (1.0, 1.0),
    )
)
_LIMIT_PERCENTS = (100, 100, 90, 80)
"""Executions take a rule and a limit (between floor and budget) from these."""

_STARTS_SHARE = 0.5
"""Share of the evaluations after which the best schedule is varied."""

_MOST_CHANGES = 4
"""Storages that a variation keeps, or stops keeping, at most."""

_EXECUTION_EVALUATIONS = 80
_EXECUTION_GROWTH = 2
_RUNS_PER_OP = 8
"""About how many evaluations take as long as one execution with eviction that runs
every op once, the power of the runs by which that grows, and the most runs an op."""

_FEWEST_EVALUATIONS = 450
_MOST_EVALUATIONS = 4000


@dataclass(slots=True)
class _State:
    """What a cut keeps, and the exact evaluation of that."""

    kept: frozenset[int]
    evaluation: Evaluation
    excess_bytes: int


def _rank(state: _State) -> tuple[int, int]:
    return (state.excess_bytes, state.evaluation.cost_ns)


class _Search:
    """One run of the solver: the cheapest order that fits, and the effort left."""

    def __init__(
        self, orders: OrderSearch, tables: UseTables, evaluations: int
    ) -> None:
        self.orders = orders
        self.graph = orders.graph
        self.kind_index = orders.kind_index
        self.tables = tables
        self.cut = RetentionCut(self.graph, self.tables)
        self.budget_bytes = orders.budget_bytes
        self.limits = orders.limits
        self.evaluations = evaluations
        self.left = evaluations
        self.random = random.Random(self.limits.seed)  # noqa: S311 - not a secret
        self.least_peak_bytes = inf

    @property
    def best_order(self) -> list[int]:
        """The cheapest order that fits, empty as long as there is none."""
        return [] if self.orders.best is None else self.orders.best.order

    @property
    def is_over(self) -> bool:
        return self.left <= 0 or self.orders.is_over

    @property
    def is_starting(self) -> bool:
        """Whether to go on executing from cuts: there is nothing to vary, or time."""
        is_early = self.left > (1 - _STARTS_SHARE) * self.evaluations
        return not self.is_over and (is_early or not self.best_order)

    @property
    def share_done(self) -> float:
        return 1 - max(0, self.left) / self.evaluations

    def adopt(self, order: list[int], cost_ns: int, peak_bytes: int) -> None:
        """Remember an order if it fits best so far, or comes closest to fitting."""
        found = Candidate(order, cost_ns, peak_bytes)
        if self.orders.keep(found) or peak_bytes < self.least_peak_bytes:
            self.least_peak_bytes = min(peak_bytes, self.least_peak_bytes)
            self.orders.candidates.append(found)

    def try_kept(self, kept: frozenset[int]) -> _State:
        """Evaluate what a cut keeps."""
        self.left -= 1
        found = evaluate(self.tables, self.cut.policies(kept))
        self.adopt(found.order, found.cost_ns, found.peak_bytes)
        return _State(kept, found, max(0, found.peak_bytes - self.budget_bytes))

    def weights(self, evaluation: Evaluation, sharpness: float) -> list[float]:
        """Return a distribution over base positions that favours the fullest."""
        most = [0] * (len(self.tables.base) + 1)
        for position, used in zip(
            evaluation.positions, evaluation.timeline_bytes, strict=True
        ):
            most[position] = max(most[position], used)
        top = max(most)
        scale = sharpness / max(1, top - self.tables.resident_bytes)
        raw = [exp((used - top) * scale) for used in most]
        total = sum(raw)
        return [value / total for value in raw]

    def bisect_price(
        self, weights: list[float], segment_limits: frozenset[int]
    ) -> list[_State]:
        """Bisect the price level; return every state met, the last ones closest."""
        tables = self.tables
        scale = sum(tables.cost_ns) / max(1, sum(tables.size_bytes))
        low, high = scale / 1024, scale * 1024
        known: dict[frozenset[int], _State] = {}
        for _ in range(_ROUNDS):
            if self.is_over:
                break
            level = (low * high) ** 0.5
            kept = self.cut.kept([level * w for w in weights], segment_limits)
            if kept not in known:
                known[kept] = self.try_kept(kept)
            if known[kept].excess_bytes:
                low = level
            else:
                high = level
        return list(known.values())

    def sweep(self, store_all: Evaluation) -> list[_State]:
        """Return the best state of each bisection, those that fit best first."""
        tables = self.tables
        total = sum(tables.output_bytes[op] for op in tables.base[: tables.boundary])
        first = self.weights(store_all, _FIRST_SHARPNESS)
        found: list[tuple[_State, frozenset[int]]] = []
        seen: set[frozenset[int]] = set()
        for count in _SEGMENT_COUNTS:
            segment_limits = frozenset[int]()
            if count:
                segment_limits = self.cut.separators(-(-total // count))
            if segment_limits in seen:
                continue
            seen.add(segment_limits)
            states = self.bisect_price(first, segment_limits)
            if states:
                found.append((min(states, key=_rank), segment_limits))
        found.sort(key=lambda entry: _rank(entry[0]))
        ends = [state for state, _ in found]
        for state, segment_limits in found[:_REFINED]:
            weights, nearest = first, state
            for _ in range(_REWEIGHTINGS):
                target = self.weights(nearest.evaluation, _SHARPNESS)
                weights = [(a + b) / 2 for a, b in zip(weights, target, strict=True)]
                states = self.bisect_price(weights, segment_limits)
                nearest = min(states, key=self.distance, default=nearest)
                ends.extend(states)
        unique = {state.kept: state for state in sorted(ends, key=_rank, reverse=True)}
        return list(reversed(unique.values()))

    def distance(self, state: _State) -> int:
        return abs(state.evaluation.peak_bytes - self.budget_bytes)

    def execute(
        self, kept: frozenset[int] | None, rule: EvictionRule, limit_percent: int
    ) -> None:
        """Execute within a limit, forward keeping ``kept``; adopt what results."""
        floor_bytes = self.orders.floor_bytes
        room_bytes = self.budget_bytes - floor_bytes
        order = evicting_order(
            self.graph,
            floor_bytes + room_bytes * limit_percent // 100,
            kind_index=self.kind_index,
            rule=rule,
            runs_per_op=_RUNS_PER_OP,
            saved=kept,
            limits=self.limits,
        )
        # Long orders take longer to make, and much longer to improve.
        # Those that get stuck mostly do so early.
        runs = 2.0 if order is None else len(order) / len(self.tables.base)
        self.left -= round(_EXECUTION_EVALUATIONS * runs**_EXECUTION_GROWTH)
        if order is not None:
            self.improve(order)

    def improve(self, order: list[int]) -> None:
        """Take out what memory lets an order do without, and adopt the rest."""
        order, cost_ns, peak_bytes = self.orders.improved(order)
        self.adopt(order, cost_ns, peak_bytes)

    def execute_from(self, states: list[_State]) -> None:
        """Execute from nothing and from cuts, by each rule; then at random.

        At random, cuts that fit best are taken more often.
        """
        kept: list[frozenset[int] | None] = [None, *(state.kept for state in states)]
        for index, rule in enumerate(_RULES):
            following = _RULES[(index + 1) % len(_RULES)]
            for start, chosen in (
                (None, rule),
                (kept[(index + 1) % len(kept)], following),
            ):
                if self.is_starting:
                    self.execute(start, chosen, 100)
        while self.is_starting:
            self.execute(
                kept[int(len(kept) * self.random.random() ** 2)],
                self.random.choice(_RULES),
                self.random.choice(_LIMIT_PERCENTS),
            )

    def vary_best(self) -> None:
        """Execute from what the best order keeps, a few storages changed."""
        policies = policies_of_order(self.tables, self.best_order)
        kept = self.cut.kept_by(policies)
        lost = [s for s in self.cut.storages if s not in kept]
        held = sorted(kept)
        gained = self.random.sample(lost, self.change_count(lost))
        dropped = self.random.sample(held, self.change_count(held))
        self.execute(
            kept.union(gained).difference(dropped), self.random.choice(_RULES), 100
        )

    def change_count(self, storages: Sequence[int]) -> int:
        return self.random.randrange(min(_MOST_CHANGES, len(storages)) + 1)

    def run(self, store_all: Evaluation, on_progress: ProgressCallback) -> None:
        """Spend the effort: cuts, executions from them, variations of the best."""
        on_progress("choosing what to keep", 0.0)
        states = self.sweep(store_all)
        if self.best_order:
            self.improve(self.best_order)
        on_progress("trying orders", self.share_done)
        self.execute_from(states)
        while self.best_order and not self.is_over:
            on_progress("trying changes", self.share_done)
            self.vary_best()


@dataclass(frozen=True, slots=True)
class MinCutRetention:
    """Keep across the boundary what a minimum cut says, then search around it.

    **Guarantee** none on cost: the cut is exact for given prices, the search around it
    is not. The peak is exact.

    **Complexity** the number of evaluations is ``effort_ops`` over the number of ops,
    within limits; an evaluation takes time linear in the reads and writes of the
    order, and so does, in practice, a minimum cut.

    Parameters
    ----------
    effort_ops
        Work to spend, in op runs evaluated: a microsecond or two each.
    """

    schedule_class: ClassVar[str] = "any op any number of times, on one device"
    is_exact: ClassVar[bool] = False

    effort_ops: int = 3_000_000

    def __post_init__(self) -> None:
        keep_integers(self, "effort_ops", of=type(self).__name__, least=0)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits."""
        orders = OrderSearch(problem, limits)
        at_once = orders.at_once()
        if at_once is not None:
            return at_once
        tables = use_tables(orders.graph, orders.kind_index)
        store_all = evaluate(tables, bytes(len(tables.interval_start)))
        count = max(_FEWEST_EVALUATIONS, self.effort_ops // len(tables.base))
        search = _Search(orders, tables, min(count, _MOST_EVALUATIONS))
        with orders.in_time():
            search.run(store_all, on_progress)
        return orders.answer(f"{search.evaluations - search.left} evaluations")
