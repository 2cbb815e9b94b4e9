"""Checkmate and its LP rounding: a mixed-integer program over the joint graph.

Other names: optimal tensor rematerialisation. Stages are in
:mod:`remat.solvers.frontier`, variables and rows in
:mod:`remat.solvers.checkmate_model`.

Departures from the paper [1]_:

* ops may have several outputs and workspace; parameters and inputs are resident; the
  boundary between the passes and the end of the step are nodes; nothing of a pass runs
  after the caller's own work;
* the default rows are tighter than the published ones, which ``rows`` brings back, and
  need fewer integer variables; the cheapest schedules of both are the same;
* stages may be coarser (as in MONeT [2]_), which makes large graphs tractable at the
  price of the claim of optimality;
* the search starts from the best schedule of two heuristics and, for larger models, of
  Moccasin, which finds good schedules of large graphs early, and proves little;
* what comes back is an order of computations: freeing is that of
  :mod:`remat.core.liveness`, and memory left over is spent by
  :mod:`remat.search.retention`;
* rounding sweeps the threshold, at two budgets, instead of drawing at random.

The paper's baselines are the solvers ``store-all``, ``chen-sqrt`` and ``chen-greedy``
(linearised), ``chen-lower-sets`` (articulation points) and ``revolve``.

References
----------
.. [1] P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica,
   J. Gonzalez. Checkmate: breaking the memory wall with optimal tensor
   rematerialization. MLSys 2020: equations 1 to 9 and algorithm 2.
.. [2] A. Shah, C. Wu, J. Mohan, V. Chidambaram, P. Kraehenbuehl. Memory optimization
   for deep networks. ICLR 2021.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

from remat.backends.mathopt import (
    MipSolver,
    Outcome,
    Settings,
    Solution,
)
from remat.backends.mathopt import solve as solve_model
from remat.backends.tolerances import RELATIVE_TOLERANCE, safe_bound_ns
from remat.core.checks import (
    checked_integers,
    checked_nonempty,
    keep_flags,
    keep_integers,
    keep_seconds,
    keep_words,
)
from remat.core.deadline import TimeIsUpError, check_time, in_time
from remat.core.errors import SolverUnsuitableError
from remat.core.problem import Limits, Problem, Proposal, Status, StopReason
from remat.core.units import ceil_slots, format_ns
from remat.solvers.base import ProgressCallback
from remat.solvers.checkmate_model import ONE, FrontierModel, Rows, build_model
from remat.solvers.frontier import Frontier, frontier
from remat.solvers.frontier_search import (
    FrontierSearch,
    best_start,
    incumbent_report,
    with_deadline,
)
from remat.solvers.moccasin import Moccasin
from remat.solvers.order_search import stop_reason

DIRECT_ROWS = 25_000
"""Up to this many rows a stage per op is tried at once, unless other is asked for."""

COARSE_ROWS = (10_000, 60_000)
"""Before larger models, coarse stages are tried that have no more rows than these."""

FULL_ROWS = 400_000
"""After those, a stage per op is tried if that makes no more rows than this."""

LARGEST_ROWS = 1_000_000
"""Models with more rows are declined."""

_INTERVAL_ROWS = 3_000
"""Models of more rows start from what Moccasin finds, too."""

_INTERVAL_SHARE = 0.2
"""Share of the time that Moccasin gets for that."""

_STAGES_SHARE = 0.3
"""Share of the time that making the stages may take."""

_FEWEST_STAGES = 3
"""Coarser than this says nothing more."""

_PINNED_PART = 500
"""Coarse stages always keep the smallest items, up to this part of the budget."""

_INTEGER_SLOTS = 5_000
"""Units of the budget for CP-SAT, which wants integers, where none is exact."""

_SAFE_SLOTS = 100_000
"""Units of the budget in a second try, if a schedule used the solver's tolerance."""


def stages_for(problem: Problem, backward_ops_per_stage: int | None) -> list[Frontier]:
    """Return the frontiers to solve, one after the other, the last at most the finest.

    Parameters
    ----------
    problem
        With a budget, for device 0 alone.
    backward_ops_per_stage
        As for :func:`remat.solvers.frontier.frontier`. ``None`` for a stage per op if
        that has at most :data:`DIRECT_ROWS` rows; otherwise, for each of
        :data:`COARSE_ROWS`, stages of as few backward ops, a power of two, as have no
        more rows, and then a stage per op unless that has more than :data:`FULL_ROWS`.

    Raises
    ------
    SolverUnsuitableError
        If a model would have more than :data:`LARGEST_ROWS` rows, or, where no number
        of backward ops is given, no coarse stages are of use and a stage per op has
        more than :data:`FULL_ROWS`.
    """
    is_full = backward_ops_per_stage == 0
    if is_full and _fewest_rows(problem, 0) > LARGEST_ROWS:
        _decline(problem, None, LARGEST_ROWS)
    if backward_ops_per_stage is not None:
        staged = _staged(problem, backward_ops_per_stage)
        if staged.row_count > LARGEST_ROWS:
            _decline(problem, staged, LARGEST_ROWS)
        return [staged]
    # Merely to make the stages of a graph of thousands of ops takes a minute.
    full = None
    if _fewest_rows(problem, 0) <= FULL_ROWS:
        full = _staged(problem, 0)
        if full.row_count <= DIRECT_ROWS:
            return [full]
    found: list[Frontier] = []
    for rows in COARSE_ROWS:
        coarse = _coarse_enough(problem, rows)
        # Where there is no backward pass to speak of, coarse stages recompute nothing.
        is_small = len(coarse.stages) > _FEWEST_STAGES and coarse.row_count <= rows
        if is_small and (not found or len(coarse.stages) > len(found[-1].stages)):
            found.append(coarse)
    if full is not None and full.row_count <= FULL_ROWS:
        found.append(full)
    if not found:
        _decline(problem, full, FULL_ROWS)
    return found


def _stages_in_time(
    problem: Problem, backward_ops_per_stage: int | None, limits: Limits
) -> list[Frontier]:
    """Return the frontiers to solve; none if a share of the time is not enough."""
    try:
        with in_time(limits.share(_STAGES_SHARE).deadline_s):
            return stages_for(problem, backward_ops_per_stage)
    except TimeIsUpError:
        return []


def _fewest_rows(problem: Problem, size: int) -> int:
    """Return about how many rows there are at least, if most ops may run again."""
    count, forward = len(problem.graph.ops), problem.graph.forward_count
    return ceil_slots((count - forward) * forward, size) if size else count**2 // 2


def _coarse_enough(problem: Problem, rows: int) -> Frontier:
    size = 1
    while _fewest_rows(problem, size) > rows:
        size *= 2
    staged = _staged(problem, size)
    while staged.row_count > rows and len(staged.stages) > _FEWEST_STAGES:
        size *= 2
        staged = _staged(problem, size)
    return staged


def _staged(problem: Problem, size: int) -> Frontier:
    pinned_bytes = 0
    if size:
        transient = (problem.budget_bytes or 0) - problem.graph.resident_bytes()
        pinned_bytes = max(0, transient // _PINNED_PART)
    return frontier(problem, size, pinned_bytes=pinned_bytes)


def _decline(problem: Problem, staged: Frontier | None, most_rows: int) -> None:
    advice = "min-cut-retention and greedy-eviction treat graphs of this size"
    fitting = _coarse_enough(problem, LARGEST_ROWS)
    if fitting.row_count <= LARGEST_ROWS:
        size = fitting.stages[1].last - fitting.stages[1].first + 1
        advice = (
            f"backward_ops_per_stage={size} makes {fitting.row_count:_} rows; {advice}"
        )
    ops = len(problem.graph.ops)
    stages = ops if staged is None else len(staged.stages)
    rows = _fewest_rows(problem, 0) if staged is None else staged.row_count
    msg = (
        f"graph {problem.graph.name!r} with {ops:_} ops in {stages:_} stages makes a "
        f"model of about {rows:_} rows; at most {most_rows:_} are tried: {advice}"
    )
    raise SolverUnsuitableError(msg)


@dataclass(slots=True)
class _Run:
    """One model, solved: what it proves, in nanoseconds."""

    built: FrontierModel
    found: Solution
    bound_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkmate:
    """The cheapest frontier-advancing schedule, by mixed-integer programming.

    **Guarantee** with a stage per op and exact sizes: OPTIMAL and INFEASIBLE are proved
    for the class, up to one part in a million, and the bound holds for it. With coarser
    stages or rounded sizes nothing is claimed.

    **Complexity** exponential in the worst case; the model has O(ops x reads) rows.
    Graphs of up to 100 ops are solved in seconds to minutes, at tight budgets rarely.

    Parameters
    ----------
    rows
        The published rows or the tight ones.
    backward_ops_per_stage
        0 for a stage per op; otherwise forward is one stage, each later one holds that
        many backward ops, and backward ops run once; ``None`` chooses by size.
    memory_slots
        Round sizes up and the budget down to this many units; ``None`` for true sizes.
    mip_solver
        Which solver; all but Gurobi come with OR-tools.
    starts_from_known
        Whether to start from the best schedule of others.
    improves
        Whether memory that a schedule leaves over is spent on recomputing less.
    threads
        Threads of the solver.
    default_time_limit_s
        When to stop if the caller sets no deadline, in seconds.
    """

    schedule_class: ClassVar[str] = (
        "first runs in graph order, and between two of them every earlier op at most "
        "once, in graph order, on one device"
    )
    is_exact: ClassVar[bool] = True

    rows: Rows = Rows.TIGHT
    backward_ops_per_stage: int | None = None
    memory_slots: int | None = None
    mip_solver: MipSolver = MipSolver.HIGHS
    starts_from_known: bool = True
    improves: bool = True
    threads: int = 1
    default_time_limit_s: float = 120.0

    def __post_init__(self) -> None:
        keep_words(self, Rows, "rows", of=type(self).__name__)
        keep_words(self, MipSolver, "mip_solver", of=type(self).__name__)
        keep_integers(
            self,
            "backward_ops_per_stage",
            of=type(self).__name__,
            least=0,
            optional=True,
        )
        keep_integers(
            self, "memory_slots", of=type(self).__name__, least=1, optional=True
        )
        keep_integers(self, "threads", of=type(self).__name__, least=1)
        keep_flags(self, "starts_from_known", "improves", of=type(self).__name__)
        keep_seconds(self, "default_time_limit_s", of=type(self).__name__)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, with what is proved.

        Raises
        ------
        SolverUnsuitableError
            If an op cannot run on device 0, a storage lives elsewhere, or the model
            would be too large.
        MissingDependencyError
            If the solver's library is not there.
        """
        limits = with_deadline(limits, self.default_time_limit_s)
        search = FrontierSearch(problem, limits, improves=self.improves)
        if (answer := search.at_once()) is not None:
            return answer
        frontiers = _stages_in_time(problem, self.backward_ops_per_stage, limits)
        is_interrupted = False
        if self.starts_from_known:
            on_progress("looking for a first schedule", 0.0)
            search.start_from_known()
            is_large = bool(frontiers) and frontiers[-1].row_count > _INTERVAL_ROWS
            if is_large and not search.is_over:
                is_interrupted = _start_from_intervals(search, on_progress)
        run = None
        if not is_interrupted:
            run = self._solve_frontiers(search, frontiers, on_progress)
        if run is None:
            return search.proved(
                bound_ns=None,
                stop_reason=stop_reason(limits, is_interrupted=is_interrupted)
                if frontiers
                else StopReason.TIME_LIMIT,
                message="no time was left for the integer program",
            )
        return self._answer(search, run)

    def _solve_frontiers(
        self,
        search: FrontierSearch,
        frontiers: Sequence[Frontier],
        on_progress: ProgressCallback,
    ) -> _Run | None:
        """Solve the models one after the other; return the last that was solved."""
        run: _Run | None = None
        with suppress(TimeIsUpError), in_time(search.limits.deadline_s):
            for index, staged in enumerate(frontiers):
                left = len(frontiers) - index
                if search.is_over or (run is not None and run.found.is_interrupted):
                    break
                # What coarse stages can do is known: then time goes to the finest.
                is_known = run is not None and run.found.outcome is Outcome.OPTIMAL
                if not is_known or left == 1:
                    run = self._solve_stages(search, staged, left, on_progress)
        return run

    def _solve_stages(
        self,
        search: FrontierSearch,
        staged: Frontier,
        models_left: int,
        on_progress: ProgressCallback,
    ) -> _Run:
        """Solve the model of some stages, and adopt what it finds."""
        limits = search.limits
        if models_left > 1 and limits.remaining_s is not None:
            limits = Limits.after(limits.remaining_s / models_left, limits.seed)
        run = self._solve_model(search, staged, self.memory_slots, limits, on_progress)
        order = run.built.order(run.found)
        if order and not search.adopt(order) and self.memory_slots is None:
            # A few bytes over, within the tolerance of the rows: leave it none.
            run = self._solve_model(search, staged, _SAFE_SLOTS, limits, on_progress)
            order = run.built.order(run.found)
            if order:
                search.adopt(order)
        if order:
            search.orders.append(order)
        return run

    def _solve_model(
        self,
        search: FrontierSearch,
        staged: Frontier,
        memory_slots: int | None,
        limits: Limits,
        on_progress: ProgressCallback,
    ) -> _Run:
        if self.mip_solver is MipSolver.CP_SAT:
            memory_slots = memory_slots or _INTEGER_SLOTS
        built = build_model(staged, self.rows, memory_slots)
        if (start := best_start(search, staged)) is not None:
            built.model.start = built.start(start)
        fixed_ns, unit_ns = staged.first_runs_ns, built.cost_unit_ns

        tolerance_ns = max(0.5 * built.divisor_ns, 0.5 * RELATIVE_TOLERANCE * fixed_ns)
        found = solve_model(
            built.model,
            self.mip_solver,
            Settings(
                time_limit_s=limits.remaining_s,
                absolute_gap=tolerance_ns / unit_ns,
                seed=limits.seed,
                threads=self.threads,
            ),
            on_incumbent=incumbent_report(on_progress, fixed_ns, unit_ns),
        )
        return _Run(built, found, _bound_ns(built, found))

    def _answer(self, search: FrontierSearch, run: _Run) -> Proposal:
        built, found = run.built, run.found
        stages = len(built.frontier.stages)
        is_full = stages == len(built.frontier.nodes)
        is_claimed = is_full and not built.scale.is_rounded
        message = (
            f"{self.mip_solver}, {self.rows} rows, {stages} stages, "
            f"{built.model.row_count:_} rows x {built.model.variable_count:_} columns: "
            f"{found.outcome}, bound {format_ns(run.bound_ns)}"
        )
        if not is_claimed:
            coarse = "" if is_full else " with these stages"
            rounded = " with rounded sizes" if built.scale.is_rounded else ""
            message += f", which holds for schedules{coarse}{rounded} only"
        return search.proved(
            bound_ns=run.bound_ns if is_claimed else None,
            stop_reason=stop_reason(search.limits, is_interrupted=found.is_interrupted),
            message=message,
            is_proved_empty=is_claimed and found.outcome is Outcome.INFEASIBLE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckmateLpRounding:
    """Keep what the linear relaxation keeps by more than a threshold.

    **Guarantee** none on cost. With a stage per op the bound is that of the relaxation,
    which holds for all frontier-advancing schedules.

    **Complexity** one or two linear programs with O(ops x reads) rows, and one
    evaluation per threshold.

    Parameters
    ----------
    rows, backward_ops_per_stage, mip_solver, default_time_limit_s
        As for :class:`Checkmate`; CP-SAT solves no linear programs.
    thresholds
        Percentages, each rounds once; without any there is a bound only.
    allowance_percents
        How much of the transient budget the relaxation does without, one after the
        other until a rounded schedule fits; the paper has 10.
    """

    schedule_class: ClassVar[str] = Checkmate.schedule_class
    is_exact: ClassVar[bool] = False

    rows: Rows = Rows.TIGHT
    backward_ops_per_stage: int | None = None
    mip_solver: MipSolver = MipSolver.HIGHS
    thresholds: tuple[int, ...] = field(default=tuple(range(5, 100, 5)))
    allowance_percents: tuple[int, ...] = (0, 10)
    default_time_limit_s: float = 120.0

    def __post_init__(self) -> None:
        keep_words(self, Rows, "rows", of=type(self).__name__)
        keep_words(self, MipSolver, "mip_solver", of=type(self).__name__)
        keep_integers(
            self,
            "backward_ops_per_stage",
            of=type(self).__name__,
            least=0,
            optional=True,
        )
        for name in ("thresholds", "allowance_percents"):
            label = f"{name} of CheckmateLpRounding"
            numbers = checked_integers(label, getattr(self, name), least=0, most=100)
            object.__setattr__(self, name, numbers)
        checked_nonempty(
            "allowance_percents of CheckmateLpRounding", self.allowance_percents
        )
        keep_seconds(self, "default_time_limit_s", of=type(self).__name__)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest rounded schedule that fits, or UNKNOWN.

        Raises
        ------
        SolverUnsuitableError
            If an op cannot run on device 0, a storage lives elsewhere, or the model
            would be too large.
        """
        limits = with_deadline(limits, self.default_time_limit_s)
        search = FrontierSearch(problem, limits)
        if (answer := search.at_once()) is not None:
            return _unclaimed(answer)
        bound_ns = None
        is_interrupted = False
        stages = 0
        with suppress(TimeIsUpError), in_time(limits.deadline_s):
            frontiers = stages_for(problem, self.backward_ops_per_stage)[-2:]
            stages = len(frontiers[-1].stages)
            for staged in frontiers:
                on_progress("solving a linear program", 0.0)
                is_full = len(staged.stages) == len(staged.nodes)
                for percent in self.allowance_percents:
                    # A relaxation with a stage per op is worth its bound, at least.
                    is_of_use = search.best is None or (is_full and not percent)
                    if not is_of_use or search.is_over or is_interrupted:
                        continue
                    built = build_model(staged, self.rows, allowance_percent=percent)
                    left_s = limits.remaining_s
                    settings = Settings(time_limit_s=left_s, seed=limits.seed)
                    found = solve_model(
                        built.model, self.mip_solver, settings, is_relaxed=True
                    )
                    is_interrupted = found.is_interrupted
                    if is_full and not percent:
                        bound_ns = _bound_ns(built, found)
                    if len(found.values):
                        self._round(search, built, found)
        return _unclaimed(
            search.proved(
                bound_ns=bound_ns,
                stop_reason=stop_reason(limits, is_interrupted=is_interrupted),
                message=f"{stages} stages, {self.rows} rows"
                if stages
                else "no time was left to make the stages",
            )
        )

    def _round(
        self, search: FrontierSearch, built: FrontierModel, found: Solution
    ) -> None:
        for percent in self.thresholds:
            check_time()
            kept = [
                {
                    item
                    for item, variable in stage.items()
                    if variable == ONE or 100 * found.values[variable] >= percent
                }
                for stage in built.keeps
            ]
            search.adopt(built.frontier.order(built.frontier.complete(kept)))


def _start_from_intervals(
    search: FrontierSearch, on_progress: ProgressCallback
) -> bool:
    """Run Moccasin for a while, from and to the incumbent of a search.

    Returns
    -------
    bool
        Whether Ctrl-C ended it.
    """
    moccasin = Moccasin()
    if moccasin.refusal(search.problem):
        return False
    share_s = _INTERVAL_SHARE * (search.limits.remaining_s or 0.0)
    limits = Limits.after(share_s, search.limits.seed)
    found, _ = moccasin.improve(search, limits, on_progress)
    return found.is_interrupted


def _unclaimed(answer: Proposal) -> Proposal:
    """Return an answer of a solver that is not exact."""
    status = Status.FEASIBLE if answer.status.has_schedule else Status.UNKNOWN
    return replace(answer, status=status)


def _bound_ns(built: FrontierModel, found: Solution) -> int:
    if found.outcome is Outcome.INFEASIBLE:
        return 0
    raw_ns = found.bound * built.cost_unit_ns
    fixed_ns = built.frontier.first_runs_ns
    tolerance_ns = RELATIVE_TOLERANCE * max(abs(raw_ns), built.divisor_ns)
    if not math.isfinite(raw_ns):
        tolerance_ns = 0.0
    return fixed_ns + safe_bound_ns(raw_ns, built.divisor_ns, tolerance_ns)
