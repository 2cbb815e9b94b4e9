"""Join: optimal programs on branches that meet, as in siamese and cross-modal models.

The forward pass is taken apart into stages and forks of branches
(:mod:`remat.reductions.joins`). A fork with which forward begins, and all that follows
it as its turn, is planned as a whole: one dynamic program decides for all branches
together what is kept, in which order they are reversed, and how often a stage runs
(:mod:`remat.algorithms.chains.stage_joins`, after [1]_). Where there is a stem or a
trunk, the graph is also planned as a series in which a fork is a stage with several
options, each planned inside by that program (:mod:`remat.algorithms.chains.blocks`).
Each plan is lifted to an order of the real ops and weighed by its true bytes; the
program's own budget is swept, and the cheapest orders that fit are improved
(:mod:`remat.search.retention`).

References
----------
.. [1] O. Beaumont, J. Herrmann, G. Pallez, A. Shilova. Optimal memory-aware
   backpropagation of deep join networks. Philosophical Transactions of the Royal
   Society A 378, 2020.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

from remat.algorithms.chains.rotor import plan_rotor
from remat.algorithms.chains.stage_joins import MAX_BRANCHES, StageJoin, plan_stage_join
from remat.core.checks import keep_integers
from remat.core.errors import SolverUnsuitableError
from remat.core.problem import Limits, Problem, Proposal
from remat.reductions.join_structure import NOTICEABLE_SHARE, most_branches
from remat.reductions.joins import JoinForms, reduce_to_join
from remat.reductions.segments import SegmentedGraph
from remat.reductions.stages import useful_crossings
from remat.solvers.base import ProgressCallback
from remat.solvers.plan_search import PlanSearch
from remat.solvers.rotor import FEWEST_STAGES

_TRANSITIONS = 4 * 10**8
_FEWEST_SLOTS = 32
_COARSE_SLOTS = (120, 100, 80, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Plan branches that meet together, stages as the dynamic program says.

    **Guarantee** for each of its budgets the program's plan of a fork and its turn is
    the quickest of those that run the turn and every backward once and reverse what
    lies between two stored values of a branch at one go (see
    :mod:`remat.algorithms.chains.stage_joins`), on sizes rounded up. Of series with
    forks, and of the lifted order, nothing is proved beyond the judge's bytes and the
    bound on every schedule.

    **Complexity** for each of the program's budgets, for k branches of l stages and S
    slots: time O(S (k l^3 + k l^(k + 1))), memory S (2 l + 1)^k numbers, in the native
    core; stages are merged to 40 a branch for two branches, 12 for three, 6 for four.

    Parameters
    ----------
    max_stages
        Neighbouring stages of a series are merged until there are no more than this.
    budget_count
        Budgets of the program that are tried.
    bisection_count
        Halvings between the largest of those whose schedule fits and the next.
    improved_count
        Orders that are improved.
    slots
        Most slots that a budget is divided into; fewer, at least 32, where the table
        is large.
    """

    schedule_class: ClassVar[str] = (
        "branches of stages that meet, each run any number of times, improved; on one "
        "device"
    )
    is_exact: ClassVar[bool] = False

    max_stages: int = 48
    budget_count: int = 16
    bisection_count: int = 5
    improved_count: int = 8
    slots: int = 200

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
            If no branches meet in the graph, or too many wherever any do, an op cannot
            run on device 0, or a storage lives elsewhere.
        """
        search = PlanSearch(problem, limits)
        if (proposal := search.at_once()) is not None:
            return proposal
        on_progress("planning branches that meet", 0.0)
        forms = _forms_of(search, self.max_stages)
        search.sweep_and_improve(
            self._sweep(search, forms),
            "planning branches that meet",
            self.improved_count,
            on_progress,
        )
        return search.answer(_described(forms))

    def _sweep(self, search: PlanSearch, forms: JoinForms) -> Iterator[float]:
        """Ask the programs for plans of each form."""
        if forms.join is not None:
            whole = forms.join.join()
            slots = _affordable_slots(whole, self.slots)
            yield from search.sweep_budgets(
                partial(plan_stage_join, whole, slots=slots),
                forms.join.order,
                whole.all_sizes,
                count=self.budget_count,
                bisection_count=self.bisection_count,
                coarser=[
                    partial(plan_stage_join, whole, slots=min(slots, coarse))
                    for coarse in _COARSE_SLOTS
                ],
            )
        if forms.series is not None and not search.is_over:
            chain = forms.series.chain()
            yield from search.sweep_budgets(
                lambda budget: plan_rotor(chain, budget, slots=self.slots),
                forms.series.order,
                chain.all_sizes,
                count=self.budget_count,
                bisection_count=self.bisection_count,
            )


def _affordable_slots(join: StageJoin, most: int) -> int:
    """Return how many slots keep the program's time for one budget below a second."""
    nodes = [
        1 + sum(1 + len(stage.options) for stage in branch.stages)
        for branch in join.branches
    ]
    return max(min(most, _TRANSITIONS // (prod(nodes) * sum(nodes))), _FEWEST_SLOTS)


def _forms_of(search: PlanSearch, max_stages: int) -> JoinForms:
    """Return the forms, or raise that there is no fork.

    Raises
    ------
    SolverUnsuitableError
        If no two noticeable branches meet, or more than
        :data:`~remat.algorithms.chains.stage_joins.MAX_BRANCHES` wherever any do.
    """
    graph = search.graph
    forms = reduce_to_join(graph, kind_index=search.kind_index, max_stages=max_stages)
    if forms is None:
        segmented = SegmentedGraph(graph)
        cuts = len(useful_crossings(segmented))
        branches = most_branches(segmented, kind_index=search.kind_index)
        found = (
            f"in its forward pass {branches} branches meet, and at most {MAX_BRANCHES} "
            "are planned together"
            if branches
            else "nowhere in its forward pass do two branches meet that each take "
            f"1/{NOTICEABLE_SHARE} of its time"
        )
        chains = (
            f"'rotor' (a chain that can be cut at {cuts} places), "
            if cuts >= FEWEST_STAGES
            else ""
        )
        msg = (
            f"graph {graph.name!r} is no join: {found}; solvers that fit: {chains}"
            "'lower-sets', 'min-cut-retention', 'auto'"
        )
        raise SolverUnsuitableError(msg)
    return forms


def _described(forms: JoinForms) -> str:
    form = forms.join or forms.series
    counts = [] if form is None else form.stage_counts
    return f"branches of {' + '.join(map(str, counts))} stages"
