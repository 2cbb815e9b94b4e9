"""XEngine: optimal placement, copies and recomputation on several devices.

Other names: XEngine's MIQP. :class:`XEngine` solves the corrected model (see
:mod:`remat.solvers.devices.sweep_model`), :class:`XEnginePublished` the published rows.

Departures of the corrected model from the paper [1]_: bytes and discards are counted on
each device; copies take memory and last until discarded; each is paid once, from the
cheapest source; any number of devices, some of which may only store (offload); links
may be missing or differ by direction; ops have several outputs and workspace, and may
be unable to run somewhere; storages have homes; the boundary and the end of the step
are stages of their own; the objective may be the time with devices and links at work
together. The cost of copies is linear without products: what is copied is a variable.

References
----------
.. [1] M. Schuler, R. Membarth, P. Slusallek. XEngine: optimal tensor rematerialization
   for neural networks in heterogeneous environments. ACM TACO 20(1), article 17, 2022.
"""

import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import ClassVar

from remat.backends.mathopt import (
    MipSolver,
    Outcome,
    Settings,
    Solution,
)
from remat.backends.mathopt import solve as solve_model
from remat.backends.tolerances import RELATIVE_TOLERANCE, safe_bound_ns
from remat.core.best import Best
from remat.core.bounds import cost_bound_ns
from remat.core.checks import (
    checked_integers,
    keep_flags,
    keep_integers,
    keep_seconds,
    keep_words,
)
from remat.core.deadline import TimeIsUpError, in_time
from remat.core.errors import SolverUnsuitableError
from remat.core.problem import Limits, Objective, Problem, Proposal, Status, StopReason
from remat.core.rules import Rule
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, simulate
from remat.core.units import format_bytes, format_ns
from remat.search.device_feasibility import infeasible_reason
from remat.search.device_instance import DeviceInstance
from remat.solvers.base import ProgressCallback, ignore_progress, solve_in_time
from remat.solvers.device_search import DeviceSearch
from remat.solvers.devices.alone import answer_for_one_device
from remat.solvers.devices.published import PublishedModel
from remat.solvers.devices.published_reduction import lifted, published_instance
from remat.solvers.devices.slots import (
    frontier_slots,
    sweep_slots,
    with_copies_anywhere,
)
from remat.solvers.devices.sweep_model import ModelOptions, SweepModel
from remat.solvers.frontier_search import incumbent_report

_OBJECTIVE_SCALE = 1e5
_BYTES_SCALE = 1e4
_WARM_START_SHARE = 0.25
_WARM_CANDIDATES = 200
_REPAIRS = 6
_SAFETY = 1e-7
_ROWS_PER_SLOT = 30


@dataclass
class _Search:
    """The schedules that one call has seen, and what is proved.

    ``floor_ns`` is a bound for every schedule, ``bound_ns`` one for those of the class.
    """

    problem: Problem
    instance: DeviceInstance
    objective: Objective
    floor_ns: int
    bound_ns: int = 0
    best: Best[tuple[Schedule, Trace]] = field(
        default_factory=Best[tuple[Schedule, Trace]]
    )
    is_infeasible: bool = False
    stop_reason: StopReason = StopReason.COMPLETED
    notes: list[str] = field(default_factory=list[str])

    def cost_ns(self, trace: Trace) -> int:
        is_serial = self.objective is Objective.SERIAL
        return trace.serial_ns if is_serial else trace.overlapped_ns

    def offer(self, schedule: Schedule) -> Trace:
        """Judge a schedule and keep it if it is the best."""
        trace = simulate(self.problem.graph, self.problem.platform, schedule)
        if trace.violation is None:
            self.best.offer((schedule, trace), self.cost_ns(trace))
        return trace

    def proposal(self) -> Proposal:
        notes = list(self.notes)
        if self.best.answer is not None:
            schedule, trace = self.best.answer
            cost_ns, bound_ns = trace.serial_ns, max(self.bound_ns, self.floor_ns)
            if cost_ns < bound_ns * (1 - RELATIVE_TOLERANCE):
                # The search that it starts from is bound to no class.
                notes.append("what is given leaves the class and is cheaper")
                bound_ns = self.floor_ns
            return Proposal(
                status=Status.OPTIMAL if bound_ns >= cost_ns else Status.FEASIBLE,
                schedule=schedule,
                bound_ns=min(bound_ns, cost_ns),
                stop_reason=self.stop_reason,
                message="; ".join(notes),
            )
        status = Status.INFEASIBLE if self.is_infeasible else Status.UNKNOWN
        return Proposal(
            status=status,
            bound_ns=self.floor_ns,
            stop_reason=self.stop_reason,
            message="; ".join(notes) or "found nothing in time",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class XEngine:
    """The exact model, from the best schedule that :class:`DeviceSearch` finds.

    **Optimal among** schedules of the frontier class (first runs in graph order, those
    of needed forward ops before the boundary; between two of them each op at most once
    per device, in graph order) whose copies are right before or after a use. The memory
    of the model is that of the list of steps. Where the judge finds that copies running
    ahead exceed a budget in overlapped execution, those copies are forbidden and the
    model is solved again: what is found then is valid, but the bound, which holds for
    all, may not be met.

    **Complexity** exponential at worst; about 12 ops^2 binaries per two devices.
    Thirty ops take seconds. Larger graphs than ``max_rows`` are declined.

    Parameters
    ----------
    objective
        What is made small. With the overlapped objective nothing is proved, except that
        the answer for the serial one takes no less time: it is found first, in half the
        time.
    solver
        Which solver minimises; HiGHS by default.
    sweeps
        Instead of stages, so many sweeps over the ops before and after the boundary:
        first runs then need not be in graph order. For graphs of a few ops.
    copies_anywhere
        Whether storages may be copied at any time. For graphs of a few ops.
    is_transient
        Whether copies serve one run and go, as in the paper.
    max_rows
        Models with more rows are declined.
    time_limit_s
        Most seconds to solve, whatever the deadline; ``None`` for no limit.
    """

    schedule_class: ClassVar[str] = (
        "first runs in graph order, forward before the boundary, each op at most once per "
        "device in between, copies next to uses"
    )
    is_exact: ClassVar[bool] = True

    objective: Objective = Objective.SERIAL
    solver: MipSolver = MipSolver.HIGHS
    sweeps: tuple[int, int] | None = None
    copies_anywhere: bool = False
    is_transient: bool = False
    max_rows: int = 150_000
    time_limit_s: float | None = 60.0

    def __post_init__(self) -> None:
        keep_words(self, Objective, "objective", of=type(self).__name__)
        keep_words(self, MipSolver, "solver", of=type(self).__name__)
        if self.sweeps is not None:
            sweeps = checked_integers("sweeps of XEngine", self.sweeps, least=1)
            if len(sweeps) != 2:
                msg = f"sweeps of XEngine has {len(sweeps)} entries; it must have 2"
                raise ValueError(msg)
            object.__setattr__(self, "sweeps", sweeps)
        keep_flags(self, "copies_anywhere", "is_transient", of=type(self).__name__)
        keep_integers(self, "max_rows", of=type(self).__name__, least=1)
        keep_seconds(self, "time_limit_s", of=type(self).__name__, optional=True)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule of the class, or the best found in time.

        Raises
        ------
        MissingDependencyError
            If the library of the chosen solver is not there.
        SolverUnsuitableError
            If there is one device only and not everything fits, or the model would be
            too large.
        """
        alone = answer_for_one_device(
            problem, limits, is_exact=self.is_exact, other="checkmate"
        )
        if alone is not None:
            return alone
        instance = DeviceInstance.of(problem)
        search = _Search(
            problem, instance, self.objective, floor_ns=cost_bound_ns(problem)
        )
        reason = infeasible_reason(instance)
        if reason is not None:
            search.is_infeasible = True
            search.notes.append(reason)
            return search.proposal()
        self._check_size(instance)
        if limits.is_over:
            search.stop_reason = StopReason.TIME_LIMIT
            search.notes.append("the time limit was over before the search began")
            return search.proposal()
        limits = self._own_limits(limits)
        if self.objective is Objective.OVERLAPPED:
            self._solve_serially(search, limits, on_progress)
            if search.is_infeasible:
                return search.proposal()
        if search.stop_reason is StopReason.COMPLETED:
            self._warm_start(search, limits, on_progress)
        if search.stop_reason is StopReason.COMPLETED:
            try:
                with in_time(limits.deadline_s):
                    self._solve_exactly(search, limits, on_progress)
            except TimeIsUpError:
                search.stop_reason = StopReason.TIME_LIMIT
        return search.proposal()

    def _solve_serially(
        self, search: _Search, limits: Limits, on_progress: ProgressCallback
    ) -> None:
        """Offer the answer for the serial objective, which the other shall not lose to.

        Half the time is left.
        """
        half = limits.share(0.5)
        found = replace(self, objective=Objective.SERIAL).solve(
            search.problem, half, on_progress
        )
        if found.status is Status.INFEASIBLE:
            search.is_infeasible = True
            search.notes.append(found.message)
        if found.schedule is not None:
            search.offer(found.schedule)
        if found.stop_reason is StopReason.INTERRUPTED:
            search.stop_reason = StopReason.INTERRUPTED

    def _own_limits(self, limits: Limits) -> Limits:
        left = limits.remaining_s
        if self.time_limit_s is None or (left is not None and left < self.time_limit_s):
            return limits
        return Limits.after(self.time_limit_s, limits.seed)

    def _check_size(self, instance: DeviceInstance) -> None:
        """Decline what is too large, before it is written down.

        Raises
        ------
        SolverUnsuitableError
            If it is.
        """
        ops, devices = len(instance.required), len(instance.devices)
        slots = ops * ops // 2
        rows = slots * devices * (_ROWS_PER_SLOT if instance.copy_ns else 10) // 2
        if rows > self.max_rows:
            msg = (
                f"{ops} ops on {devices} devices make about {rows:_} rows, more than "
                f"{self.max_rows:_}; use solver='device-search', which has no such limit"
            )
            raise SolverUnsuitableError(msg)

    def _warm_start(
        self, search: _Search, limits: Limits, on_progress: ProgressCallback
    ) -> None:
        finder = DeviceSearch(objective=self.objective, candidates=_WARM_CANDIDATES)
        found = solve_in_time(
            finder, search.problem, limits.share(_WARM_START_SHARE), on_progress
        )
        search.floor_ns = max(search.floor_ns, found.bound_ns)
        if found.schedule is not None:
            search.offer(found.schedule)
        if found.stop_reason is StopReason.INTERRUPTED:
            search.stop_reason = StopReason.INTERRUPTED

    def _model(self, search: _Search) -> SweepModel:
        instance = search.instance
        slots = (
            frontier_slots(instance)
            if self.sweeps is None
            else sweep_slots(instance, *self.sweeps)
        )
        if self.copies_anywhere:
            slots = with_copies_anywhere(instance, slots)
        budgets = [b for b in instance.budgets_bytes if b]
        horizon_ns = None
        if self.objective is Objective.OVERLAPPED:
            horizon_ns = _horizon_ns(search)
        return SweepModel(
            instance,
            slots,
            ModelOptions(is_transient=self.is_transient, horizon_ns=horizon_ns),
            cost_unit_ns=max(1.0, search.floor_ns / _OBJECTIVE_SCALE),
            size_unit_bytes=max(1.0, min(budgets, default=1) / _BYTES_SCALE),
        ).build()

    def _solve_exactly(
        self, search: _Search, limits: Limits, on_progress: ProgressCallback
    ) -> None:
        model = self._model(search)
        for attempt in range(_REPAIRS):
            found = self._minimise(model, search, limits, on_progress)
            if attempt == 0:
                self._note_proof(model, search, found)
            search.stop_reason = found.stop_reason
            if not len(found.values):
                return
            schedule = model.schedule(found.values)
            trace = search.offer(schedule)
            violation = trace.violation
            if (
                violation is None
                or violation.rule is not Rule.OVER_BUDGET
                or search.stop_reason is not StopReason.COMPLETED
            ):
                return
            search.notes.append(
                f"the model's best, {format_ns(trace.serial_ns)}, was refused: "
                f"{violation.message} when devices and links work at the same time"
            )
            if violation.device is None or not model.forbid_arrivals(
                found.values, violation.device
            ):
                return

    def _minimise(
        self,
        model: SweepModel,
        search: _Search,
        limits: Limits,
        on_progress: ProgressCallback,
    ) -> Solution:
        if search.best.answer is not None:
            start = model.values_of(search.best.answer[0])
            if start is not None:
                model.program.model.start.update(start)

        return solve_model(
            model.program.model,
            self.solver,
            Settings(
                time_limit_s=limits.remaining_s,
                absolute_gap=max(
                    0.9 * _cost_step(search.instance) / model.cost_unit_ns,
                    _OBJECTIVE_SCALE * 1e-6,
                ),
                seed=limits.seed,
            ),
            on_incumbent=None
            if on_progress is ignore_progress
            else incumbent_report(on_progress, 0, model.cost_unit_ns),
        )

    def _note_proof(self, model: SweepModel, search: _Search, found: Solution) -> None:
        """Keep what the first solve has proved about all schedules of the class."""
        if found.outcome is Outcome.INFEASIBLE:
            search.is_infeasible = search.best.answer is None
            if search.is_infeasible:
                search.notes.append(
                    f"no schedule of the class fits ({self.schedule_class})"
                )
            return
        if self.objective is not Objective.SERIAL or math.isinf(found.bound):
            return
        bound = found.bound * model.cost_unit_ns
        step = _cost_step(search.instance)
        tolerance = _SAFETY * bound + 0.05 * step
        search.bound_ns = max(search.bound_ns, safe_bound_ns(bound, step, tolerance))


def _cost_step(instance: DeviceInstance) -> int:
    """Return the greatest number of which all costs are multiples, at least 1."""
    costs = [c for costs in instance.cost_ns for c in costs if c]
    costs += [time for times in instance.copy_ns.values() for time in times]
    return max(1, reduce(math.gcd, costs, 0))


def _horizon_ns(search: _Search) -> int:
    """Return a time by which a best schedule has ended."""
    if search.best.answer is not None:
        return search.best.answer[1].overlapped_ns
    instance = search.instance
    runs = sum(max(c or 0 for c in costs) for costs in instance.cost_ns)
    copies = sum(sum(times) for times in instance.copy_ns.values())
    return 4 * (runs + copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class XEnginePublished:
    """The rows as published, for comparison.

    What they find is judged before it is returned. Their memory is summed over devices,
    so it often does not fit: the answer is then UNKNOWN and says what broke. Of the
    graph they know one output per op, of its true total size; parameters and inputs are
    left out of the choice, but count for the judge.

    **Optimal among** nothing: no claim is made.

    Parameters
    ----------
    is_quadratic
        Whether copies are products, for SCIP, or their exact linearisation, for HiGHS.
    sums_over_devices
        Whether memory is summed over devices, as published.
    max_ops
        Larger graphs are declined.
    """

    schedule_class: ClassVar[str] = "as published: nothing is proved"
    is_exact: ClassVar[bool] = False

    is_quadratic: bool = False
    sums_over_devices: bool = True
    max_ops: int = 60

    def __post_init__(self) -> None:
        keep_flags(self, "is_quadratic", "sums_over_devices", of=type(self).__name__)
        keep_integers(self, "max_ops", of=type(self).__name__, least=1)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the schedule if the judge accepts it, else UNKNOWN with the reason.

        Raises
        ------
        SolverUnsuitableError
            If there is one device only, or the graph is too large.
        """
        alone = answer_for_one_device(
            problem, limits, is_exact=self.is_exact, other="checkmate"
        )
        if alone is not None:
            return alone
        instance = DeviceInstance.of(problem)
        if len(instance.required) > self.max_ops:
            msg = (
                f"{len(instance.required)} ops are more than the {self.max_ops} that the "
                "published rows are solved for; use solver='device-search'"
            )
            raise SolverUnsuitableError(msg)
        bound_ns = cost_bound_ns(problem)
        reason = infeasible_reason(instance)
        if reason is not None:
            return Proposal(status=Status.UNKNOWN, bound_ns=bound_ns, message=reason)
        published, ops = published_instance(instance)
        model = PublishedModel(
            published,
            is_quadratic=self.is_quadratic,
            sums_over_devices=self.sums_over_devices,
        ).build()
        found = solve_model(
            model.model,
            MipSolver.SCIP if self.is_quadratic else MipSolver.HIGHS,
            Settings(time_limit_s=limits.remaining_s, seed=limits.seed),
        )
        unknown = Proposal(
            status=Status.UNKNOWN, bound_ns=bound_ns, stop_reason=found.stop_reason
        )
        if not len(found.values):
            reason = (
                "no solution of the published rows was found in time"
                if found.is_over_time
                else f"the published rows have no solution ({found.outcome})"
            )
            return replace(unknown, message=reason)
        runs = [(ops[op], device) for op, device in model.runs(found.values)]
        schedule = lifted(instance, runs)
        trace = simulate(problem.graph, problem.platform, schedule)
        if trace.violation is not None:
            peaks = ", ".join(
                f"{name} {format_bytes(peak)}"
                for name, peak in zip(
                    instance.device_names, trace.peak_bytes, strict=True
                )
            )
            reason = (
                f"the published rows accept a schedule that the judge refuses: "
                f"{trace.violation.message} (true peaks: {peaks})"
            )
            return replace(unknown, message=reason)
        return replace(unknown, status=Status.FEASIBLE, schedule=schedule)
