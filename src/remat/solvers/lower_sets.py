"""LowerSets and LowerSetsApprox: dynamic programs over lower sets of the forward graph.

Also known as canonical strategies, or the exact and the approximate dynamic program of
Kusumoto et al. [1]_. The training graph is reduced to its forward values
(:mod:`remat.reductions.forward_values`); the programs
(:mod:`remat.algorithms.lower_sets`) cut those into segments, exactly over all lower
sets or over a family of them; each answer is lifted to an order of the real ops
(:mod:`remat.reductions.segments`).

The program's formula for the peak is a model: it charges a segment's values and
gradients all at once, and knows no workspace. So the program's own budget is swept, for
each objective, and every answer is weighed by the true bytes of its lifted order. Then

* the cheapest that fit are improved: runs that the memory left over can do without are
  taken out (:mod:`remat.search.retention`), which also keeps what is recomputed while
  it is still live;
* those closest to the budget are executed within it, forward keeping what they keep,
  with eviction where that alone does not fit (:mod:`remat.search.eviction`), and
  improved.

Departures from the paper: the last segment is not recomputed; only what backward reads
is; the objectives are three (least overhead, most overhead, fewest bytes kept); the
approximate family is wider than the paper's; eviction may recompute a value more than
once.

Known to be improvable: costs are in coarse units within the program, and graphs with
more forward values than ``max_nodes`` are merged until they have no more.

References
----------
.. [1] M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic
   framework of recomputation algorithms for memory-efficient backpropagation. NeurIPS
   2019.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import ClassVar

from remat.algorithms.lower_sets.choice import (
    DEFAULT_CAP,
    approximate_family,
    choose_family,
)
from remat.algorithms.lower_sets.families import Family
from remat.algorithms.lower_sets.programs import (
    LowerSetObjective,
    LowerSetQuery,
    Segmentation,
    smallest_budget,
    sweep_lower_sets,
)
from remat.core.checks import checked_integer, checked_record
from remat.core.problem import Limits, Problem, Proposal
from remat.reductions.forward_values import (
    ForwardValues,
    reduce_to_forward_values,
)
from remat.search.eviction import EvictionRule, evicting_order
from remat.solvers.base import ProgressCallback
from remat.solvers.order_search import Candidate, OrderSearch, geometric_budgets

_RULES = (
    EvictionRule(distance_exponent=0.0, ancestor_share=1.0),
    EvictionRule(distance_exponent=0.5, ancestor_share=1.0),
    EvictionRule(distance_exponent=0.0, ancestor_share=0.0),
)
"""How victims are chosen where what a segmentation keeps does not fit by itself."""

_RUNS_PER_OP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerSetsEffort:
    """How much a lower-set solver tries.

    Parameters
    ----------
    max_nodes
        Forward values are merged until there are no more than this, at least 1.
    budget_count
        Budgets of the program that are tried, for each objective, at least 1.
    bisection_count
        Halvings between the largest of those whose schedule fits and the next, 0 or
        more.
    improved_count
        Segmentations that are improved as they are, 0 or more.
    executed_ops
        Executions with eviction are made until they have run about this many ops, 0 or
        more, and at least one by each rule.

    Raises
    ------
    ValueError
        If a number is smaller than that, or no integer.
    """

    max_nodes: int = 128
    budget_count: int = 16
    bisection_count: int = 6
    improved_count: int = 8
    executed_ops: int = 10_000

    def __post_init__(self) -> None:
        least = {"max_nodes": 1, "budget_count": 1}
        for field in fields(self):
            number = checked_integer(
                field.name, getattr(self, field.name), least=least.get(field.name, 0)
            )
            object.__setattr__(self, field.name, number)


@dataclass(frozen=True, slots=True)
class _Lifted:
    """What forward keeps under a segmentation, and the best order it gives."""

    kept: frozenset[int]
    candidate: Candidate


class _Search(OrderSearch):
    """Orders lifted from segmentations."""

    def __init__(
        self, problem: Problem, limits: Limits, values: ForwardValues, family: Family
    ) -> None:
        super().__init__(problem, limits)
        self.values = values
        self.family = family
        self.lifted: dict[tuple[int, ...], _Lifted] = {}

    def sweep(self, budgets: Sequence[int], bisection_count: int) -> Iterator[float]:
        """Ask for each budget of the program, then around the largest that fits."""
        low = budgets[0]
        for index, model_budget in enumerate(budgets):
            if self.is_over:
                return
            if self.ask(model_budget, tuple(LowerSetObjective)):
                low = model_budget
            yield (index + 1) / len(budgets)
        high = min((b for b in budgets if b > low), default=low)
        for _ in range(bisection_count):
            if self.is_over:
                return
            middle = (low + high) // 2
            fits = self.ask(middle, (LowerSetObjective.LEAST_OVERHEAD,))
            low, high = (middle, high) if fits else (low, middle)
            yield 1.0

    def ask(self, model_budget: int, objectives: Sequence[LowerSetObjective]) -> bool:
        """Lift the program's answers; return whether any of them fits."""
        answers = sweep_lower_sets(
            self.values.graph,
            self.family,
            [LowerSetQuery(budget_bytes=model_budget, objective=o) for o in objectives],
            deadline_s=self.limits.deadline_s,
        )
        peaks = [self.lift(found) for found in answers if found is not None]
        return any(peak <= self.budget_bytes for peak in peaks)

    def lift(self, found: Segmentation) -> int:
        """Weigh an answer by the true bytes of its order; return its peak."""
        if found.segment_of not in self.lifted:
            segments = self.values.segment_of_ops(found.segment_of)
            cut = self.values.segments
            orders = [cut.order(segments)]
            in_graph_order = cut.order(segments, reorders_backward=False)
            if in_graph_order != orders[0]:
                orders.append(in_graph_order)
            best = min(map(self.weigh, orders), key=lambda c: c.peak_bytes)
            self.lifted[found.segment_of] = _Lifted(cut.kept(segments), best)
        return self.lifted[found.segment_of].candidate.peak_bytes

    def execute_closest(self, count: int) -> Iterator[float]:
        """Execute within the budget from what those closest to it keep."""
        closest = sorted(
            self.lifted.values(),
            key=lambda lifted: abs(lifted.candidate.peak_bytes - self.budget_bytes),
        )
        for index, (lifted, rule) in enumerate(list(product(closest, _RULES))[:count]):
            if self.is_over:
                return
            order = evicting_order(
                self.graph,
                self.budget_bytes,
                kind_index=self.kind_index,
                rule=rule,
                runs_per_op=_RUNS_PER_OP,
                saved=lifted.kept,
                limits=self.limits,
            )
            if order is not None:
                self.improve(order)
            yield (index + 1) / count


def _solve(
    problem: Problem,
    limits: Limits,
    on_progress: ProgressCallback,
    effort: LowerSetsEffort,
    cap: int | None,
) -> Proposal:
    search = OrderSearch(problem, limits)
    if (proposal := search.at_once()) is not None:
        return proposal
    values = reduce_to_forward_values(
        problem.graph, kind_index=search.kind_index, max_nodes=effort.max_nodes
    )
    if values is None:
        return search.unknown("no forward op may run again")
    on_progress("choosing where to cut the model", 0.0)
    graph = values.graph
    family = approximate_family(graph) if cap is None else choose_family(graph, cap)
    search = _Search(problem, limits, values, family)
    with search.in_time():
        least = smallest_budget(graph, family, deadline_s=limits.deadline_s)
        # A single segment takes what all values are charged.
        budgets = geometric_budgets(
            least.peak_bytes, sum(graph.charged_bytes), effort.budget_count
        )
        for share in search.sweep(budgets, effort.bisection_count):
            on_progress("choosing where to cut the model", share / 2)
        for share in search.improve_best(effort.improved_count):
            on_progress("keeping what there is room for", 0.5 + share / 4)
        executions = max(len(_RULES), effort.executed_ops // len(problem.graph.ops))
        for share in search.execute_closest(executions):
            on_progress("fitting the order into the budget", 0.75 + share / 4)
    return search.answer(_label(values, family, cap))


def _label(values: ForwardValues, family: Family, cap: int | None) -> str:
    """Return what the program was exact about, for people."""
    what = f"{values.graph.node_count} forward values, {len(family):_} lower sets"
    if family.is_complete:
        return f"{what}: all there are"
    if cap is None:
        return f"{what}: an approximate family"
    return f"{what}: an approximate family, as there are more than {cap:_} in all"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerSets:
    """Cut forward along all lower sets there are, if they can be enumerated.

    **Guarantee** the program is exact: for each of its budgets no increasing sequence
    of lower sets of the reduced graph is better by its formula. Of the lifted order
    nothing is proved beyond the judge's bytes and the bound on every schedule. Where
    there are more lower sets than ``cap``, the family is that of
    :class:`LowerSetsApprox`, and the answer's message says so.

    **Complexity** O(lower sets^2 x length of the fronts) for each of the program's
    budgets, in the native core; the rest is linear in the graph, for each answer.

    Parameters
    ----------
    effort
        How much is tried.
    cap
        Most lower sets to enumerate, at least 1.

    Raises
    ------
    ValueError
        If the cap is not a positive integer.
    """

    schedule_class: ClassVar[str] = (
        "canonical strategies of lower sets, improved; on one device"
    )
    is_exact: ClassVar[bool] = False

    effort: LowerSetsEffort = LowerSetsEffort()
    cap: int = DEFAULT_CAP

    def __post_init__(self) -> None:
        checked_record("effort of LowerSets", self.effort, LowerSetsEffort)
        cap = checked_integer("the cap on lower sets", self.cap, least=1)
        object.__setattr__(self, "cap", cap)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits."""
        return _solve(problem, limits, on_progress, self.effort, self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerSetsApprox:
    """Cut forward along a family of lower sets that is small for every graph.

    **Guarantee** the program is exact within the family:
    :func:`remat.algorithms.lower_sets.choice.approximate_family`. As for
    :class:`LowerSets`, nothing is proved of the lifted order.

    **Complexity** as for :class:`LowerSets`, with a few lower sets a forward value.

    Parameters
    ----------
    effort
        How much is tried.
    """

    schedule_class: ClassVar[str] = (
        "canonical strategies of some lower sets, improved; on one device"
    )
    is_exact: ClassVar[bool] = False

    effort: LowerSetsEffort = LowerSetsEffort()

    def __post_init__(self) -> None:
        checked_record("effort of LowerSetsApprox", self.effort, LowerSetsEffort)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits."""
        return _solve(problem, limits, on_progress, self.effort, None)
