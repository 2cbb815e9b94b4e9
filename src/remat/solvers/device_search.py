"""DeviceSearch: place, keep, copy and recompute on several devices, at any size.

Every candidate is made by executing the graph within the budgets (see
:mod:`remat.search.device_execution`) for some placement of the ops and some rule of
eviction, and judged. Placements to start from: the optimum without memory (an integer
program that also proves a bound), the same with work priced away from each device,
everything on one device, the graph cut in two at several points. Then a local search
changes the placement: one op at a border, all ops that do the same thing (the repeated
blocks of a network move together), or a run of ops with or without their backward ops.
It ends at the time limit or after so many candidates.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, tee
from typing import ClassVar

from remat.backends.mathopt import Settings
from remat.core.checks import keep_integers, keep_words
from remat.core.deadline import TimeIsUpError, in_time
from remat.core.errors import SolverUnsuitableError
from remat.core.problem import (
    Limits,
    Objective,
    Problem,
    Proposal,
    Status,
    StopReason,
)
from remat.core.units import format_bytes, format_ns
from remat.search.device_execution import ExecutionRule, Placement
from remat.search.device_feasibility import infeasible_reason
from remat.search.device_instance import DeviceInstance
from remat.search.device_placements import Placements
from remat.solvers.base import ProgressCallback, solve_in_time
from remat.solvers.devices.alone import answer_for_one_device
from remat.solvers.devices.relaxation import relaxed_placement
from remat.solvers.devices.search_run import DeviceSearchRun
from remat.solvers.devices.walk import Walk, changed_rule
from remat.solvers.greedy_eviction import GreedyEviction
from remat.solvers.min_cut_retention import MinCutRetention
from remat.solvers.order_search import stop_reason

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
_CORE_STARTS = 5
_FEWEST = 50
_SINGLE = (GreedyEviction(), MinCutRetention(effort_ops=1_000_000))
_SINGLE_SHARE = 0.15
_RELAXATION_S = 20.0
_RELAXATION_SHARE = 0.4
_PRESSURE_SHARE = 0.05
_PRESSED_SHARE = 0.25


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
    candidates: int = 2_000
    op_runs: int = 600_000

    def __post_init__(self) -> None:
        keep_words(self, Objective, "objective", of=type(self).__name__)
        keep_integers(self, "candidates", "op_runs", of=type(self).__name__, least=1)

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
        is_interrupted = False
        try:
            with suppress(TimeIsUpError), in_time(limits.deadline_s):
                self.search(run, on_progress)
        except KeyboardInterrupt:
            is_interrupted = True
        return self.proposal(run, stop_reason(limits, is_interrupted=is_interrupted))

    def proposal(self, run: DeviceSearchRun, stop_reason: StopReason) -> Proposal:
        """Return what a search has found."""
        best = run.bests[self.objective].answer
        if best is None:
            return Proposal(
                status=Status.UNKNOWN,
                bound_ns=run.bound_ns,
                stop_reason=stop_reason,
                message=_nothing_fits(run, stop_reason),
            )
        trace = best.trace
        return Proposal(
            status=Status.FEASIBLE,
            schedule=best.schedule,
            bound_ns=run.bound_ns,
            stop_reason=stop_reason,
            message=(
                f"{run.tried} candidates; serial {format_ns(trace.serial_ns)}, "
                f"overlapped {format_ns(trace.overlapped_ns)}"
            ),
        )

    def search(self, run: DeviceSearchRun, on_progress: ProgressCallback) -> None:
        """Search by the serial time, and from its answer by the overlapped one.

        So the answer to the second question is none that the first one beats.
        """
        places = Placements(run.instance)
        starts, again = tee(self.starts(run, places))
        pressed, pressed_again = tee(self.pressed(run, places))
        limits = run.limits
        if self.objective is Objective.OVERLAPPED:
            run.objective, run.limits = Objective.SERIAL, limits.share(0.5)
            self.improve(run, places, (starts, pressed), on_progress)
            run.objective, run.limits = self.objective, limits
            starts, pressed = again, pressed_again
        self.improve(run, places, (starts, pressed), on_progress)

    def improve(
        self,
        run: DeviceSearchRun,
        places: Placements,
        starts: tuple[Iterator[Placement], Iterator[Placement]],
        on_progress: ProgressCallback,
    ) -> None:
        """Make candidates until the limit, the proof or the last candidate.

        Placements to start from come in two parts, the slower ones in the second.
        """
        rng = random.Random(run.limits.seed)  # noqa: S311 - not a secret
        last = run.tried + self.most(run)
        tried: list[Placement] = []
        quick, slow = starts
        for placement in quick:
            tried.append(placement)
            # The other rules are for what does not fit.
            for rule in RULES[:4] if len(tried) <= _CORE_STARTS else RULES[:2]:
                cost_ns = run.attempt(placement, rule)
                self.report(run, on_progress, last)
                if run.limits.is_over or run.is_proved:
                    return
                if cost_ns is not None:
                    break
        middle = (3 * run.tried + last) // 4
        for placement, rule in product(tried, RULES):
            if run.tried >= middle or run.limits.is_over or run.is_proved:
                break
            run.attempt(placement, rule)
            self.report(run, on_progress, last)
        for placement in () if run.is_proved else slow:
            tried.append(placement)
            for rule in RULES[:2]:
                run.attempt(placement, rule)
            self.report(run, on_progress, last)
        self.walk(run, places, tried, rng, on_progress, last)

    def walk(
        self,
        run: DeviceSearchRun,
        places: Placements,
        starts: Sequence[Placement],
        rng: random.Random,
        on_progress: ProgressCallback,
        last: int,
    ) -> None:
        """Make candidates that differ a little from one before."""
        walk: Walk | None = None
        while run.tried < last and not run.limits.is_over and not run.is_proved:
            best, cost_ns = run.best, run.cost_ns
            if walk is None and best is not None and cost_ns is not None:
                walk = Walk(best.placement, best.rule, cost_ns)
            if walk is not None:
                placement, rule = walk.candidate(places, rng)
                walk.take(placement, rule, run.attempt(placement, rule))
            elif run.nearest is not None:
                near = run.nearest
                run.attempt(places.changed(near.placement, rng), near.rule)
            else:
                placement = places.changed(rng.choice(starts), rng)
                run.attempt(placement, changed_rule(rng.choice(RULES), rng))
            self.report(run, on_progress, last)

    def most(self, run: DeviceSearchRun) -> int:
        """Return how many candidates are made of a graph of that size."""
        by_size = self.op_runs // len(run.instance.graph.ops)
        return min(self.candidates, max(_FEWEST, by_size))

    def report(
        self, run: DeviceSearchRun, on_progress: ProgressCallback, last: int
    ) -> None:
        """Tell what the incumbent is."""
        share = min(1.0, run.tried / max(last, 1))
        cost, bound = run.cost_ns, run.bound_ns
        if cost is None:
            on_progress("no schedule yet", share)
        else:
            gap = (cost - bound) / cost if cost else 0.0
            on_progress(
                f"best so far {format_ns(cost)}, none below {format_ns(bound)}, gap {gap:.1%}",
                share,
            )

    def starts(self, run: DeviceSearchRun, places: Placements) -> Iterator[Placement]:
        """Yield placements to start from, and offer a schedule of one device."""
        count = len(run.instance.graph.ops)
        first, *others = [*places.starts()]
        # The simplest first, so that there is something however short the time.
        yield first
        relaxed = relaxed_placement(
            run.instance, self._settings(run, _RELAXATION_SHARE)
        )
        run.bound_ns = max(run.bound_ns, relaxed.bound_ns)
        if relaxed.placement is not None:
            yield relaxed.placement
        self.offer_single_device(run, [(0,)] * count)
        yield from others

    def pressed(self, run: DeviceSearchRun, places: Placements) -> Iterator[Placement]:
        """Yield optima without memory with work priced away from one device."""
        if len(places.computing) < 2:
            return
        left = run.limits.remaining_s
        enough = Limits.after(None if left is None else left * _PRESSED_SHARE)
        written = sum(run.instance.sizes_bytes)
        per_byte = run.bound_ns / max(1, written)
        for device in places.computing:
            for weight in _PRESSURES:
                if enough.is_over:
                    return
                pressure = [0.0] * len(run.instance.devices)
                pressure[device] = weight * per_byte
                pushed = relaxed_placement(
                    run.instance,
                    self._settings(run, _PRESSURE_SHARE),
                    tuple(pressure),
                )
                if pushed.placement is not None:
                    yield pushed.placement

    @staticmethod
    def _settings(run: DeviceSearchRun, share: float) -> Settings:
        left = run.limits.remaining_s
        limit = _RELAXATION_S if left is None else min(_RELAXATION_S, left * share)
        return Settings(time_limit_s=limit, absolute_gap=0.5, seed=run.limits.seed)

    @staticmethod
    def offer_single_device(run: DeviceSearchRun, placement: Placement) -> None:
        """Offer what solvers for one device find for device 0."""
        left = run.limits.remaining_s
        share = None if left is None else left * _SINGLE_SHARE
        for solver in _SINGLE:
            limits = Limits.after(share, run.limits.seed)
            try:
                found = solve_in_time(solver, run.problem, limits)
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
