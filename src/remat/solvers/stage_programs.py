"""Stage programs: options of a stage, found by Checkmate's integer program on it alone.

For a grid of limits on what a stage saves, and on its memory while it runs, the program
finds the cheapest run of the stage: what is saved, and what is computed again when in
its backward. Forward is one stage of the program, and each backward op another. Larger
limits come first: where the run that was found for them keeps smaller ones too, it
is the cheapest there as well, and no program is solved.

Options that another one beats in every respect are dropped, and where there are more
than a chain's program takes in its stride, those go that cost least to do without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from remat.backends.mathopt import Outcome, Settings
from remat.backends.mathopt import solve as solve_model
from remat.core.bounds import peak_bound_bytes
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, store_all_order
from remat.core.problem import Limits, Problem
from remat.reductions.stage_problems import StageProblem
from remat.search.plain_numbers import plain_numbers
from remat.search.retention_table import weigh_order
from remat.solvers.checkmate_model import Rows, build_model
from remat.solvers.frontier import frontier

TOLERANCE = 1e-3
"""How much of a stage's time its run may be above the optimum."""

SAVED_LEVELS = 16
"""Limits on what is saved: this many equal parts of what keeping everything saves."""

LEAST_SAVED_PART = 32
"""The smallest limit on what is saved is what keeping everything saves over this."""

PEAK_SHARES = (0.6, 0.3)
"""Limits on a stage's memory: shares of the way from the least that is conceivable to
what the cheapest run takes."""

_PEAKS_EVERY = 4
"""These are asked for with every so many of the limits on what is saved."""

MOST_ROWS = 3_000
"""Stages whose programs have more rows are left as they are: few end in seconds."""

_ABOUT_ALL = SAVED_LEVELS + 1 + 2 * (SAVED_LEVELS // _PEAKS_EVERY + 1)
"""Programs of a stage, with one for each limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One run of a stage alone, with what it takes.

    Parameters
    ----------
    order
        Ops of the stage's graph, and the boundary.
    cost_ns, saved_bytes, peak_bytes
        Time, bytes saved from forward to backward besides the output, and the most
        bytes of the stage's own at any time.
    """

    order: tuple[int, ...]
    cost_ns: int
    saved_bytes: int
    peak_bytes: int

    def keeps(self, saved_bytes: int, peak_bytes: int) -> bool:
        """Return whether the run is within two limits."""
        return self.saved_bytes <= saved_bytes and self.peak_bytes <= peak_bytes


def stage_run(problem: StageProblem, order: Sequence[int]) -> StageRun:
    """Return an order of a stage's step as a run, measured."""
    graph = problem.graph
    cost_ns, peak_bytes = weigh_order(plain_numbers(graph), order)
    return StageRun(
        order=tuple(order),
        cost_ns=cost_ns,
        saved_bytes=_saved_bytes(problem, order),
        peak_bytes=peak_bytes,
    )


def _saved_bytes(problem: StageProblem, order: Sequence[int]) -> int:
    """Return the bytes that what follows the boundary needs as forward left them."""
    graph = problem.graph
    at = list(order).index(BOUNDARY)
    wanted: set[int] = set(graph.final_outputs)
    for op in reversed(order[at + 1 :]):
        wanted.difference_update(graph.ops[op].writes)
        wanted.update(graph.ops[op].reads)
    wanted.difference_update(graph.forward_outputs, graph.tangents)
    return sum(graph.storages[s].size_bytes for s in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnswer:
    """What one program has found.

    Parameters
    ----------
    order
        Ops of the stage's graph, and the boundary; ``None`` if none was found.
    is_proved_empty, is_interrupted
        Whether it is proved that there is none, and whether Ctrl-C ended the program.
    """

    order: tuple[int, ...] | None
    is_proved_empty: bool = False
    is_interrupted: bool = False


StageProgram = Callable[[Problem, Limits], StageAnswer]
"""Finds the cheapest run of a stage within the budget of a problem."""


def solve_stage(problem: Problem, limits: Limits) -> StageAnswer:
    """Return the cheapest run of a stage, up to :data:`TOLERANCE`, by Checkmate's rows.

    Forward is one stage of the program, and each backward op another: forward ops may
    run again before each of them, backward ops run once. Sizes are exact.

    Raises
    ------
    MissingDependencyError
        If the library of the program is not there.
    """
    if peak_bound_bytes(problem.graph) > (problem.budget_bytes or 0):
        return StageAnswer(order=None, is_proved_empty=True)
    staged = frontier(problem, 1)
    built = build_model(staged, Rows.TIGHT)
    gap_ns = max(0.5 * built.divisor_ns, TOLERANCE * staged.first_runs_ns)
    found = solve_model(
        built.model,
        settings=Settings(
            time_limit_s=limits.remaining_s,
            absolute_gap=gap_ns / built.cost_unit_ns,
            seed=limits.seed,
        ),
    )
    return StageAnswer(
        order=tuple(built.order(found)) or None,
        is_proved_empty=found.outcome is Outcome.INFEASIBLE,
        is_interrupted=found.is_interrupted,
    )


@dataclass(slots=True)
class StagePrograms:
    """What the programs of distinct stages have found: each stage is solved once.

    Parameters
    ----------
    program
        Solves the problem of one stage.
    time_limit_s
        Most seconds for one program.
    seed
        Seed of the programs.

    Attributes
    ----------
    runs
        Per distinct stage, the runs found.
    solved_count
        Programs solved.
    is_interrupted
        Whether Ctrl-C ended one of them; then no more are solved.
    """

    program: StageProgram = solve_stage
    time_limit_s: float = 3.0
    seed: int = 0
    runs: dict[TrainingGraph, list[StageRun]] = field(
        default_factory=dict[TrainingGraph, list[StageRun]]
    )
    solved_count: int = 0
    is_interrupted: bool = False

    def explore(
        self, problem: StageProblem, known: Sequence[StageRun], limits: Limits
    ) -> list[StageRun]:
        """Return runs of a stage, those found before if it is like one solved before.

        Parameters
        ----------
        problem
            The stage alone.
        known
            Runs of it to do as well as, or better.
        limits
            When to stop; what has been found by then is returned.
        """
        if problem.graph not in self.runs:
            search = _StageSearch(self, problem, limits)
            search.run(known)
            self.runs[problem.graph] = search.found
        return self.runs[problem.graph]


@dataclass(slots=True)
class _StageSearch:
    """The runs of one stage found so far, and the limits asked for."""

    programs: StagePrograms
    problem: StageProblem
    limits: Limits
    found: list[StageRun] = field(default_factory=list[StageRun])
    asked: list[tuple[int, int, StageRun | None]] = field(
        default_factory=list[tuple[int, int, StageRun | None]]
    )

    def run(self, known: Sequence[StageRun]) -> None:
        """Ask for the grid of limits, and for those that known runs keep."""
        problem = self.problem
        plain = stage_run(problem, store_all_order(problem.graph))
        self.found.append(plain)
        everything = problem.problem(plain.saved_bytes, problem.all_bytes)
        if frontier(everything, 1).row_count > MOST_ROWS:
            return
        self.asked.append((plain.saved_bytes, problem.all_bytes, plain))
        low = max(peak_bound_bytes(problem.graph), problem.given_bytes)
        unit = SAVED_LEVELS * LEAST_SAVED_PART
        parts = [p * LEAST_SAVED_PART for p in range(SAVED_LEVELS, 0, -1)]
        for index, part in enumerate([*parts, SAVED_LEVELS]):
            saved_bytes = plain.saved_bytes * part // unit
            cheapest = self.cheapest(saved_bytes, problem.all_bytes)
            if cheapest is None or index % _PEAKS_EVERY:
                continue
            for share in PEAK_SHARES:
                peak_bytes = low + int((cheapest.peak_bytes - low) * share)
                self.cheapest(saved_bytes, peak_bytes)
        for run in known:
            self.cheapest(run.saved_bytes, run.peak_bytes)

    def cheapest(self, saved_bytes: int, peak_bytes: int) -> StageRun | None:
        """Return the cheapest run within two limits that was found or can be."""
        for saved, peak, run in self.asked:
            if saved_bytes <= saved and peak_bytes <= peak:
                if run is None:
                    return None
                if run.keeps(saved_bytes, peak_bytes):
                    return run
        programs = self.programs
        if self.limits.is_over or programs.is_interrupted:
            return None
        answer = programs.program(
            self.problem.problem(saved_bytes, peak_bytes),
            Limits.after(self._limit_s(), programs.seed),
        )
        programs.solved_count += 1
        programs.is_interrupted = answer.is_interrupted
        run = None
        if answer.order is not None:
            run = stage_run(self.problem, answer.order)
            if run not in self.found:
                self.found.append(run)
        if run is not None or answer.is_proved_empty:
            self.asked.append((saved_bytes, peak_bytes, run))
        return run

    def _limit_s(self) -> float:
        """Return the seconds of the next program: twice its share of what is left."""
        most_s, remaining_s = self.programs.time_limit_s, self.limits.remaining_s
        if remaining_s is None:
            return most_s
        left = max(2, _ABOUT_ALL - len(self.asked))
        return min(most_s, 2 * remaining_s / left)
