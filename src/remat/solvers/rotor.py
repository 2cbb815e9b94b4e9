"""Rotor and Revolve: optimal programs on the chain of stages of a training graph.

The training graph is cut where one value alone crosses
(:mod:`remat.reductions.stages`). Rotor's dynamic program [1]_ then says which stages to
run when, with what kept, and how often; Revolve [2]_ does so for stages that count as
equal, within a number of stored values. Each answer is lifted to an order of the real
ops and weighed by its true bytes; the program's own budget is swept, and the cheapest
orders that fit are improved (:mod:`remat.search.retention`).

Unlike segments that are recomputed once, these run a stage as often as memory makes
necessary, so that peaks fall well below that of one recomputation.

A stage has at most three ways to be saved here (:mod:`remat.reductions.stage_parts`);
what else is chosen within a stage is left to the improvement, or to integer programs
(:mod:`remat.solvers.rockmate`).

References
----------
.. [1] O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova. Optimal
   checkpointing for heterogeneous chains: how to train deep neural networks with
   limited memory. arXiv:1911.13214, 2019.
.. [2] A. Griewank, A. Walther. Algorithm 799: revolve. ACM Transactions on
   Mathematical Software 26(1), 2000.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from remat.algorithms.chains.conventions import CHECKPOINTS_ONLY
from remat.algorithms.chains.revolve import plan_chain
from remat.algorithms.chains.rotor import plan_rotor
from remat.core.checks import keep_integers
from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.problem import Limits, Problem, Proposal
from remat.reductions.joins import reduce_to_join
from remat.reductions.segments import SegmentedGraph
from remat.reductions.stages import ChainOfStages, reduce_to_chain, useful_crossings
from remat.solvers.base import ProgressCallback
from remat.solvers.order_search import geometric_budgets
from remat.solvers.plan_search import PlanSearch

FEWEST_STAGES = 3
"""Places at which a graph has to be cut to count as a chain."""


def _sweep_slots(
    search: PlanSearch, chain: ChainOfStages, count: int
) -> Iterator[float]:
    """Ask Revolve for growing numbers of stored values."""
    length = len(chain.chain.stages)
    numbers = geometric_budgets(1, length + 1, count)
    for index, number in enumerate(numbers):
        if search.is_over:
            return
        plan = plan_chain(length, number, CHECKPOINTS_ONLY)
        if plan is not None:
            search.lift(chain.order(plan.operations))
        yield (index + 1) / len(numbers)


def chain_of(graph: TrainingGraph, kind_index: int, max_stages: int) -> ChainOfStages:
    """Return a graph as a chain of stages, or raise that it is none.

    Raises
    ------
    SolverUnsuitableError
        If the graph cannot be cut into stages.
    """
    chain = reduce_to_chain(graph, kind_index=kind_index, max_stages=max_stages)
    if chain is None or len(chain.chain.stages) < min(FEWEST_STAGES, max_stages):
        found = len(useful_crossings(SegmentedGraph(graph)))
        is_join = reduce_to_join(graph, kind_index=kind_index) is not None
        joins = "'join' (branches meet), " if is_join else ""
        msg = (
            f"graph {graph.name!r} is no chain: forward can be cut where one value that "
            f"backward reads crosses alone at {found} places, and a chain needs "
            f"{FEWEST_STAGES}; solvers that fit: {joins}'lower-sets', "
            "'min-cut-retention', 'auto'"
        )
        raise SolverUnsuitableError(msg)
    return chain


def _solve(
    question: tuple[Problem, Limits, ProgressCallback],
    sweep: Callable[[PlanSearch, ChainOfStages], Iterator[float]],
    *,
    max_stages: int,
    improved_count: int,
) -> Proposal:
    """Reduce to a chain, weigh what ``sweep`` asks a program for, improve the best."""
    problem, limits, on_progress = question
    search = PlanSearch(problem, limits)
    if (proposal := search.at_once()) is not None:
        return proposal
    on_progress("planning stage after stage", 0.0)
    chain = chain_of(search.graph, search.kind_index, max_stages)
    search.sweep_and_improve(
        sweep(search, chain), "planning stage after stage", improved_count, on_progress
    )
    return search.answer(f"{len(chain.chain.stages)} stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotor:
    """Run stages of unequal time and size as the dynamic program says.

    **Guarantee** for each of its budgets the program's plan is the quickest of the
    persistent ones of the chain, or better (see :mod:`remat.algorithms.chains.rotor`),
    on sizes rounded up. Of the lifted order nothing is proved beyond the judge's bytes
    and the bound on every schedule.

    **Complexity** O(slots x stages^3) for each of the program's budgets, in the native
    core.

    Parameters
    ----------
    max_stages
        Neighbouring stages are merged until there are no more than this.
    budget_count
        Budgets of the program that are tried.
    bisection_count
        Halvings between the largest of those whose schedule fits and the next.
    improved_count
        Orders that are improved.
    slots
        Slots that a budget is divided into.
    """

    schedule_class: ClassVar[str] = (
        "a chain of stages, each run any number of times, improved; on one device"
    )
    is_exact: ClassVar[bool] = False

    max_stages: int = 64
    budget_count: int = 16
    bisection_count: int = 6
    improved_count: int = 8
    slots: int = 160

    def __post_init__(self) -> None:
        keep_integers(
            self, "max_stages", "budget_count", "slots", of=type(self).__name__, least=1
        )
        keep_integers(
            self, "bisection_count", "improved_count", of=type(self).__name__, least=0
        )

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits.

        Raises
        ------
        SolverUnsuitableError
            If the graph is no chain of stages, an op cannot run on device 0, or a
            storage lives elsewhere.
        """
        return _solve(
            (problem, limits, on_progress),
            lambda search, chain: search.sweep_budgets(
                lambda budget: plan_rotor(chain.chain, budget, slots=self.slots),
                chain.order,
                chain.chain.all_sizes,
                count=self.budget_count,
                bisection_count=self.bisection_count,
            ),
            max_stages=self.max_stages,
            improved_count=self.improved_count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Revolve:
    """Run stages as if they were equal, with the fewest forward runs.

    **Guarantee** for each number of stored values the plan has the fewest runs of
    stages; on stages that differ this is a heuristic.

    **Complexity** linear in the length of the plan, for each number of stored values.

    Parameters
    ----------
    max_stages
        Neighbouring stages are merged until there are no more than this.
    slot_count
        Numbers of stored values that are tried.
    improved_count
        Orders that are improved.
    """

    schedule_class: ClassVar[str] = (
        "a chain of stages that count as equal, improved; on one device"
    )
    is_exact: ClassVar[bool] = False

    max_stages: int = 64
    slot_count: int = 16
    improved_count: int = 8

    def __post_init__(self) -> None:
        keep_integers(self, "max_stages", "slot_count", of=type(self).__name__, least=1)
        keep_integers(self, "improved_count", of=type(self).__name__, least=0)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits.

        Raises
        ------
        SolverUnsuitableError
            If the graph is no chain of stages, an op cannot run on device 0, or a
            storage lives elsewhere.
        """
        return _solve(
            (problem, limits, on_progress),
            lambda search, chain: _sweep_slots(search, chain, self.slot_count),
            max_stages=self.max_stages,
            improved_count=self.improved_count,
        )
