"""DeviceSearch: place, keep, copy and recompute on several devices, at any size.

Every candidate is made by executing the graph within the budgets (see
:mod:`remat.multidevice.execution`) for some placement of the ops and some rule of
eviction, and judged. Placements to start from: the optimum without memory (an integer
program that also proves a bound), the same with work priced away from each device,
everything on one device, the graph cut in two at several points. Then a local search
changes the placement: one op at a border, all ops that do the same thing (the repeated
blocks of a network move together), or a run of ops with or without their backward ops.
It ends at the time limit or after so many candidates.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from remat.bounds import cost_bound_ns
from remat.errors import SolverUnsuitableError
from remat.liveness import insert_discards
from remat.multidevice.execution import ExecutionRule, Placement, execute
from remat.multidevice.feasibility import infeasible_reason
from remat.multidevice.instance import DeviceInstance
from remat.multidevice.placements import Placements
from remat.problem import Limits, Problem, Proposal, Status, StopReason
from remat.schedule import Schedule
from remat.simulator import Trace, simulate
from remat.solvers.backends.mathopt import Settings
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.solvers.devices.alone import answer_for_one_device
from remat.solvers.devices.relaxation import relaxed_placement
from remat.solvers.greedy_eviction import GreedyEviction
from remat.solvers.min_cut_retention import MinCutRetention
from remat.units import format_bytes, format_ns

RULES = (
    ExecutionRule(),
    ExecutionRule(copy_percent=10_000, distance_exponent=0.5, ancestor_share=1.0),
    ExecutionRule(copy_percent=400),
    ExecutionRule(limit_percent=85),
    ExecutionRule(limit_percent=70, distance_exponent=0.5),
    ExecutionRule(distance_exponent=0.5, ancestor_share=1.0),
    ExecutionRule(distance_exponent=0.0, ancestor_share=1.0),
    ExecutionRule(distance_exponent=0.0, ancestor_share=0.0),
    ExecutionRule(copy_percent=10),
)
"""How candidates evict, in the order in which rules are tried."""

_PRESSURES = (0.25, 1.0, 4.0)
_RESERVES = 2
_CORE_STARTS = 5
_FEWEST = 50
_SINGLE = (GreedyEviction(), MinCutRetention(effort_ops=1_000_000))
_SINGLE_SHARE = 0.15
_RELAXATION_S = 20.0
_RELAXATION_SHARE = 0.2


class Objective(StrEnum):
    """What is to be small."""

    SERIAL = "serial"
    """The sum of all runs and copies, as in the paper."""

    OVERLAPPED = "overlapped"
    """The end of the last step when devices and links work at the same time."""


class Outcome(StrEnum):
    """What came of a candidate."""

    KEPT = "kept"
    WORSE = "worse"
    UNFIT = "unfit"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule and how it was made."""

    schedule: Schedule
    trace: Trace
    placement: Placement
    rule: ExecutionRule


@dataclass
class DeviceSearchRun:
    """One search: its candidates, and the best of them."""

    problem: Problem
    instance: DeviceInstance
    objective: Objective
    limits: Limits
    best: Candidate | None = None
    # What broke the budgets least, to search on from while nothing fits.
    nearest: Candidate | None = None
    bound_ns: int = 0
    tried: int = 0

    def __post_init__(self) -> None:
        self.bound_ns = cost_bound_ns(self.problem)

    def cost_ns(self, candidate: Candidate) -> int:
        """Return what the search makes small, of a candidate."""
        return self.time_ns(candidate.trace)

    def time_ns(self, trace: Trace) -> int:
        """Return what the search makes small, of a replay."""
        is_serial = self.objective is Objective.SERIAL
        return trace.serial_ns if is_serial else trace.overlapped_ns

    def judged(self, schedule: Schedule) -> Trace:
        """Replay a schedule."""
        return simulate(self.problem.graph, self.problem.platform, schedule)

    def offer(self, schedule: Schedule, placement: Placement) -> None:
        """Judge a schedule that was found by other means."""
        self.keep(Candidate(schedule, self.judged(schedule), placement, RULES[0]))

    def keep(self, candidate: Candidate) -> bool:
        """Keep a candidate that fits and is at least as good as the best."""
        if candidate.trace.violation is not None:
            excess = self.excess(candidate)
            if excess and (self.nearest is None or excess <= self.excess(self.nearest)):
                self.nearest = candidate
            return False
        if self.best is None or self.cost_ns(candidate) <= self.cost_ns(self.best):
            self.best = candidate
            return True
        return False

    @staticmethod
    def excess(candidate: Candidate) -> int:
        """Return the bytes by which a candidate breaks a budget."""
        violation = candidate.trace.violation
        return 0 if violation is None else violation.excess_bytes

    def attempt(self, placement: Placement, rule: ExecutionRule) -> Outcome:
        """Execute, judge; return what came of it.

        What fits as a list of steps may not fit when copies run ahead of it or behind:
        then the device keeps as much free as was lacking, and again.
        """
        reserve = list(rule.reserve_bytes or (0,) * len(self.instance.devices))
        for _ in range(_RESERVES):
            self.tried += 1
            careful = replace(rule, reserve_bytes=tuple(reserve))
            steps = execute(self.instance, placement, careful, limits=self.limits)
            if steps is None:
                return Outcome.UNFIT
            schedule = insert_discards(self.problem.graph, steps)
            trace = self.judged(schedule)
            if self.keep(Candidate(schedule, trace, placement, careful)):
                return Outcome.KEPT
            violation = trace.violation
            if violation is None or self.is_worse(trace):
                return Outcome.WORSE if violation is None else Outcome.UNFIT
            if violation.device is None or self.limits.is_over:
                return Outcome.UNFIT
            reserve[violation.device] += violation.excess_bytes * 5 // 4
        return Outcome.UNFIT

    def is_worse(self, trace: Trace) -> bool:
        """Return whether the best schedule takes less time, fit or not."""
        return self.best is not None and self.time_ns(trace) > self.cost_ns(self.best)

    @property
    def is_proved(self) -> bool:
        """Whether nothing cheaper exists, up to the precision of the bound."""
        return (
            self.objective is Objective.SERIAL
            and self.best is not None
            and self.cost_ns(self.best) <= self.bound_ns * (1 + 1e-6)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSearch:
    """Judged local search over placements and rules of eviction.

    **Guarantee** none on cost, apart from the bound that comes with the answer. Finds a
    schedule wherever executing in graph order within the budgets does, on any of a few
    dozen placements.

    **Complexity** some ten milliseconds per candidate and hundred ops.

    Parameters
    ----------
    objective
        What is to be small.
    candidates
        Most candidates that are made. The answer depends on nothing else where there is
        no deadline.
    op_runs
        Most ops in all candidates together, so that large graphs get fewer of them; at
        least fifty are made.
    """

    schedule_class: ClassVar[str] = "any schedule on any devices"
    is_exact: ClassVar[bool] = False

    objective: Objective = Objective.SERIAL
    candidates: int = 600
    op_runs: int = 100_000

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the best schedule found, INFEASIBLE with a proof, or UNKNOWN.

        Raises
        ------
        SolverUnsuitableError
            If there is one device only and not everything fits.
        """
        alone = answer_for_one_device(
            problem, limits, is_exact=self.is_exact, other="auto"
        )
        if alone is not None:
            return alone
        run = DeviceSearchRun(
            problem, DeviceInstance.of(problem), self.objective, limits
        )
        reason = infeasible_reason(run.instance)
        if reason is not None:
            # The reasons are proofs, but this solver makes no claims.
            return Proposal(
                status=Status.UNKNOWN, bound_ns=run.bound_ns, message=reason
            )
        stop_reason = StopReason.COMPLETED
        try:
            self.search(run, on_progress)
        except KeyboardInterrupt:
            stop_reason = StopReason.INTERRUPTED
        if stop_reason is StopReason.COMPLETED and limits.is_over:
            stop_reason = StopReason.TIME_LIMIT
        return self.proposal(run, stop_reason)

    def proposal(self, run: DeviceSearchRun, stop_reason: StopReason) -> Proposal:
        """Return what a search has found."""
        if run.best is None:
            return Proposal(
                status=Status.UNKNOWN,
                bound_ns=run.bound_ns,
                stop_reason=stop_reason,
                message=_nothing_fits(run, stop_reason),
            )
        trace = run.best.trace
        return Proposal(
            status=Status.FEASIBLE,
            schedule=run.best.schedule,
            bound_ns=run.bound_ns,
            stop_reason=stop_reason,
            message=(
                f"{run.tried} candidates; serial {format_ns(trace.serial_ns)}, "
                f"overlapped {format_ns(trace.overlapped_ns)}"
            ),
        )

    def search(self, run: DeviceSearchRun, on_progress: ProgressCallback) -> None:
        """Make candidates until the limit, the proof or the last candidate."""
        places = Placements(run.instance)
        rng = random.Random(run.limits.seed)  # noqa: S311 - not a secret
        for number, placement in enumerate(self.starts(run, places)):
            # The other rules are for what does not fit.
            for rule in RULES[:4] if number < _CORE_STARTS else RULES[:2]:
                outcome = run.attempt(placement, rule)
                self.report(run, on_progress)
                if run.limits.is_over or run.is_proved:
                    return
                if outcome is not Outcome.UNFIT:
                    break
        if not places.movable:
            self.vary_rules(run, rng, on_progress)
            return
        while run.tried < self.most(run) and not run.limits.is_over:
            start = run.best or run.nearest
            if start is None:
                placement, rule = places.cheapest_everywhere(), rng.choice(RULES)
            else:
                placement, rule = start.placement, start.rule
            if rng.random() < 0.1:
                rule = rng.choice(RULES)
            run.attempt(places.changed(placement, rng), rule)
            self.report(run, on_progress)
            if run.is_proved:
                return

    def vary_rules(
        self, run: DeviceSearchRun, rng: random.Random, on_progress: ProgressCallback
    ) -> None:
        """Try rules at random where there is nothing to place."""
        placement = Placements(run.instance).cheapest_everywhere()
        while run.tried < self.most(run) // 4 and not run.limits.is_over:
            rule = ExecutionRule(
                size_exponent=rng.choice((0.5, 0.75, 1.0)),
                distance_exponent=rng.choice((0.0, 0.25, 0.5, 1.0)),
                ancestor_share=rng.choice((0.0, 0.5, 1.0)),
                copy_percent=rng.choice((10, 50, 100, 200, 400)),
                limit_percent=rng.randint(50, 100),
            )
            run.attempt(placement, rule)
            self.report(run, on_progress)
            if run.is_proved:
                return

    def most(self, run: DeviceSearchRun) -> int:
        """Return how many candidates are made of a graph of that size."""
        by_size = self.op_runs // len(run.instance.graph.ops)
        return min(self.candidates, max(_FEWEST, by_size))

    def report(self, run: DeviceSearchRun, on_progress: ProgressCallback) -> None:
        """Tell what the incumbent is."""
        share = min(1.0, run.tried / self.most(run))
        if run.best is None:
            on_progress("no schedule yet", share)
        else:
            cost, bound = run.cost_ns(run.best), run.bound_ns
            gap = (cost - bound) / cost if cost else 0.0
            on_progress(
                f"incumbent {format_ns(cost)}, bound {format_ns(bound)}, gap {gap:.1%}",
                share,
            )

    def starts(self, run: DeviceSearchRun, places: Placements) -> Iterator[Placement]:
        """Yield placements to start from, and offer a schedule of one device."""
        count = len(run.instance.graph.ops)
        first, *others = [*places.starts()]
        # The simplest first, so that there is something however short the time.
        yield first
        relaxed = relaxed_placement(run.instance, self._settings(run))
        run.bound_ns = max(run.bound_ns, relaxed.bound_ns)
        if relaxed.placement is not None:
            yield relaxed.placement
        self.offer_single_device(run, [(0,)] * count)
        yield from others
        if len(places.computing) < 2:
            return
        written = sum(run.instance.sizes_bytes)
        per_byte = run.bound_ns / max(1, written)
        for device in places.computing:
            for weight in _PRESSURES:
                if run.limits.is_over:
                    return
                pressure = [0.0] * len(run.instance.devices)
                pressure[device] = weight * per_byte
                pushed = relaxed_placement(
                    run.instance, self._settings(run), tuple(pressure)
                )
                if pushed.placement is not None:
                    yield pushed.placement

    def _settings(self, run: DeviceSearchRun) -> Settings:
        left = run.limits.remaining_s
        limit = (
            _RELAXATION_S
            if left is None
            else min(_RELAXATION_S, left * _RELAXATION_SHARE)
        )
        return Settings(time_limit_s=limit, absolute_gap=0.5, seed=run.limits.seed)

    @staticmethod
    def offer_single_device(run: DeviceSearchRun, placement: Placement) -> None:
        """Offer what solvers for one device find for device 0."""
        left = run.limits.remaining_s
        share = None if left is None else left * _SINGLE_SHARE
        for solver in _SINGLE:
            limits = Limits.after(share, run.limits.seed)
            try:
                found = solver.solve(run.problem, limits, ignore_progress)
            except SolverUnsuitableError:
                return
            if found.schedule is not None:
                run.offer(found.schedule, placement)


def _nothing_fits(run: DeviceSearchRun, stop_reason: StopReason) -> str:
    budgets = ", ".join(
        f"{device.name} {format_bytes(device.budget_bytes)}"
        for device in run.problem.platform.devices
        if device.budget_bytes is not None
    )
    reason = f"found nothing within the budgets ({budgets}) in {run.tried} candidates"
    if stop_reason is not StopReason.COMPLETED:
        reason += f"; stopped by the {stop_reason}"
    if run.nearest is not None:
        reason += f"; the nearest: {run.nearest.trace.violation}"
    return reason
