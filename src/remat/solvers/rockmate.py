"""Rockmate: integer programs for each distinct block, a dynamic program over them.

A training graph that is a chain of stages (:mod:`remat.reductions.stages`) repeats
itself: the layers of a network are alike. For each distinct stage Checkmate's integer
program, on the graph of that stage alone, finds what to save and what to compute again
for several limits on both memories; stages that are alike share the answers. Rotor's
dynamic program then composes the chain from these options. Its plans are lifted to
orders of the real ops, weighed by their true bytes and improved, as for
:class:`remat.solvers.rotor.Rotor`, which runs first: with time enough the answer is
never dearer than Rotor's.

Departures from the paper [1]_:

* the blocks are the stages of :mod:`remat.reductions.stages`: between any two places
  where one value alone crosses that backward reads, merged where there are many;
* a block's program recomputes in backward only, and each op at most once between two
  ops of backward (the coarse stages of :mod:`remat.solvers.frontier`);
* whatever the chain's program takes for granted, the schedule is judged op by op, and
  memory that is left is spent on recomputing less.

References
----------
.. [1] X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O. Beaumont. Rockmate: an
   efficient, fast, automatic and generic tool for re-materialization in PyTorch. ICML
   2023.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

from remat.algorithms.chains.rotor import plan_rotor
from remat.core.checks import keep_integers, keep_seconds
from remat.core.deadline import TimeIsUpError
from remat.core.problem import Limits, Problem, Proposal, StopReason
from remat.reductions.stage_parts import PartOption, StagePart, stage_option
from remat.reductions.stage_problems import StageProblem, stage_problem
from remat.reductions.stages import ChainOfStages
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.solvers.plan_search import PlanSearch
from remat.solvers.rotor import Rotor, chain_of
from remat.solvers.stage_choices import chosen
from remat.solvers.stage_programs import StagePrograms, stage_run

_PLAIN_SHARE = 0.3
"""Share of the time for Rotor alone, where time is limited."""

_PROGRAMS_SHARE = 0.5
"""Share of what is then left for the programs of the stages."""


@dataclass(slots=True)
class Enrichment:
    """More options for the stages of a chain, by programs.

    Parameters
    ----------
    plain
        The chain with its own options, the first of each stage keeping everything.
    programs
        Solve the stages, and remember the answers.
    most_options
        Most options a stage.
    limits
        When to stop; distinct stages get equal shares of the time that is left.
    """

    plain: ChainOfStages
    programs: StagePrograms
    most_options: int = 32
    limits: Limits = field(default_factory=Limits)

    def run(self, on_progress: ProgressCallback = ignore_progress) -> ChainOfStages:
        """Return the chain with its own options and those found, the best of them.

        Parameters
        ----------
        on_progress
            Told how many of the distinct stages are done.
        """
        plain = self.plain
        problems = self._problems()
        to_solve = {problem.graph for problem in problems if problem is not None}
        to_solve.difference_update(self.programs.runs)
        count = len(to_solve)
        options: list[list[PartOption]] = []
        for part, end, problem in zip(
            plain.parts[:-1], plain.ends, problems, strict=True
        ):
            if problem is None:
                options.append(list(part.options))
                continue
            if problem.graph in to_solve:
                done = count - len(to_solve)
                on_progress(
                    f"planning {count} distinct stages, each alone", done / count
                )
            options.append(self._options(part, end, problem, max(1, len(to_solve))))
            to_solve.discard(problem.graph)
        return plain.with_options(options)

    def _problems(self) -> list[StageProblem | None]:
        plain = self.plain
        return [
            stage_problem(plain.graph, part, end, plain.kind_index)
            for part, end in zip(plain.parts[:-1], plain.ends, strict=True)
        ]

    @property
    def distinct_count(self) -> int:
        """How many stages of the chain are distinct."""
        pairs = zip(self.plain.chain.stages, self._problems(), strict=True)
        return len(
            {
                replace(stage, name="") if problem is None else problem.graph
                for stage, problem in pairs
            }
        )

    def _options(
        self, part: StagePart, end: int, problem: StageProblem, stages_left: int
    ) -> list[PartOption]:
        """Return the options of one stage: those of its own, and those found."""
        graph, kind_index = self.plain.graph, self.plain.kind_index
        remaining_s = self.limits.remaining_s
        share_s = None if remaining_s is None else remaining_s / stages_left
        known = [stage_run(problem, problem.order_of(o)) for o in part.options]
        runs = self.programs.explore(problem, known, Limits.after(share_s))
        options = [
            *part.options,
            *(problem.option(graph, part, end, run.order) for run in runs),
        ]
        numbers = [stage_option(graph, o, (end,), kind_index) for o in options]
        return [options[index] for index in chosen(numbers, self.most_options)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rockmate:
    """Options of distinct stages by integer programs, composed by Rotor's program.

    **Guarantee** no dearer than :class:`remat.solvers.rotor.Rotor`, which runs first,
    unless time is over. Each option is, up to a thousandth of the stage's time, the
    cheapest run of its stage within its limits among those that recompute in backward,
    each op at most once between two ops of it, if its program was solved in its time.
    Of the lifted order nothing is proved beyond the judge's bytes and the bound on
    every schedule.

    Programs that end at their time limit depend on how busy the machine is, and so
    does then the answer.

    **Complexity** up to 30 integer programs for each distinct stage, then O(slots x
    stages^2 x (stages + options)) for each budget of the chain's program. Stages whose
    programs would have more than 3000 rows, about 50 ops, keep their own options.

    Parameters
    ----------
    max_stages
        Neighbouring stages are merged until there are no more than this.
    most_options
        Options of a stage that the chain's program is offered at most.
    program_time_limit_s
        Most seconds for one integer program.
    budget_count, bisection_count, improved_count, slots
        As for Rotor, on the chain with more options; there the program keeps what it
        stores (:func:`remat.algorithms.chains.rotor.plan_rotor`), so that many slots
        and options take little time.
    """

    schedule_class: ClassVar[str] = (
        "a chain of stages, each run any number of times in ways that integer programs "
        "find, improved; on one device"
    )
    is_exact: ClassVar[bool] = False

    max_stages: int = 32
    most_options: int = 32
    program_time_limit_s: float = 3.0
    budget_count: int = 24
    bisection_count: int = 6
    improved_count: int = 12
    slots: int = 2000

    def __post_init__(self) -> None:
        keep_integers(
            self,
            "max_stages",
            "most_options",
            "budget_count",
            "slots",
            of=type(self).__name__,
            least=1,
        )
        keep_integers(
            self, "bisection_count", "improved_count", of=type(self).__name__, least=0
        )
        keep_seconds(self, "program_time_limit_s", of=type(self).__name__)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits.

        Ctrl-C ends the search; the answer is then the best found before.

        Raises
        ------
        SolverUnsuitableError
            If the graph is no chain of stages, an op cannot run on device 0, or a
            storage lives elsewhere.
        MissingDependencyError
            If the library of the integer programs is not there.
        """
        search = PlanSearch(problem, limits)
        if (proposal := search.at_once()) is not None:
            return proposal
        chain = chain_of(search.graph, search.kind_index, self.max_stages)
        work = _Work(self, problem, limits, on_progress)
        try:
            with suppress(TimeIsUpError):
                work.run(chain)
        except KeyboardInterrupt:
            work.is_interrupted = True
        return work.answer()


@dataclass(slots=True)
class _Work:
    """One run of the solver: what its two searches have found."""

    solver: Rockmate
    problem: Problem
    limits: Limits
    on_progress: ProgressCallback
    searches: list[PlanSearch] = field(default_factory=list[PlanSearch])
    label: str = "the programs of the stages had no time"
    is_interrupted: bool = False

    def run(self, chain: ChainOfStages) -> None:
        """Plan the chain as Rotor does, enrich its stages, and plan it again."""
        solver, limits = self.solver, self.limits
        rotor = Rotor()
        finest = chain_of(chain.graph, chain.kind_index, rotor.max_stages)
        plain_limits = limits.share(_PLAIN_SHARE)
        self._search(finest, rotor, plain_limits.share(0.6), (0.0, 0.15))
        if len(finest.parts) != len(chain.parts):
            self._search(chain, rotor, plain_limits, (0.15, 0.3))
        if self.is_over:
            return
        programs = StagePrograms(
            time_limit_s=solver.program_time_limit_s, seed=limits.seed
        )
        enrichment = Enrichment(
            chain, programs, solver.most_options, limits.share(_PROGRAMS_SHARE)
        )
        richer = enrichment.run(_progress_part(self.on_progress, (0.3, 0.7)))
        self.is_interrupted = programs.is_interrupted
        self.label = (
            f"{enrichment.distinct_count} of {len(chain.ends)} stages are distinct, "
            f"{programs.solved_count} programs"
        )
        if not self.is_interrupted:
            self._search(richer, solver, limits, (0.7, 1.0))

    def _search(
        self,
        chain: ChainOfStages,
        how: Rotor | Rockmate,
        limits: Limits,
        shares: tuple[float, float],
    ) -> None:
        """Sweep the budgets of a chain, and improve the best."""
        search = PlanSearch(self.problem, limits)
        self.searches.append(search)
        search.sweep_and_improve(
            search.sweep_budgets(
                lambda budget: plan_rotor(
                    chain.chain,
                    budget,
                    slots=how.slots,
                    beyond_persistence=isinstance(how, Rotor),
                ),
                chain.order,
                chain.chain.all_sizes,
                count=how.budget_count,
                bisection_count=how.bisection_count,
            ),
            f"planning a chain of {len(chain.ends)} stages",
            how.improved_count,
            _progress_part(self.on_progress, shares),
        )

    @property
    def is_over(self) -> bool:
        """Whether time is over, or no schedule at all can be cheaper."""
        return self.limits.is_over or any(
            search.best is not None and search.best.cost_ns <= search.bound_ns
            for search in self.searches
        )

    def answer(self) -> Proposal:
        """Return the best of both searches."""
        fitting = [search for search in self.searches if search.best is not None]
        none = PlanSearch(self.problem, self.limits)
        best = min(fitting, key=_rank, default=[none, *self.searches][-1])
        best.limits = self.limits
        proposal = best.answer(self.label)
        if self.is_interrupted:
            proposal = replace(proposal, stop_reason=StopReason.INTERRUPTED)
        return proposal


def _rank(search: PlanSearch) -> tuple[int, int]:
    return (0, 0) if search.best is None else search.best.rank


def _progress_part(
    on_progress: ProgressCallback, shares: tuple[float, float]
) -> ProgressCallback:
    """Return what reports shares of a part as shares of the whole."""
    start, end = shares
    return lambda activity, share: on_progress(activity, start + share * (end - start))
