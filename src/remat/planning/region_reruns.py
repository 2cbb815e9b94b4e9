"""Regions that run forward again as a whole: for budgets below what they hand over.

What goes from one region to the next is kept by each region's backward pass, in any
order of its own. Here some of it is dropped after forward. Before the first backward
pass that reads it, the regions that made it run forward again, from the last one back
whose input was kept: a *segment*. It is Rotor's step one level up, with segments that
are run again once (Chen et al. 2016).

A segment's regions each keep nothing but their inputs: the inside of a region is much
larger than what it hands over, and so the cheaper thing to give up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from remat.core.errors import BudgetError
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Proposal, Status, StopReason
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, simulate
from remat.core.units import format_bytes
from remat.planning.plan import Plan, plan_settings
from remat.planning.portfolio import solve
from remat.planning.proofs import with_bound
from remat.planning.region_program import (
    Numbers,
    RegionFront,
    RegionProgram,
    RegionSearch,
    Stage,
    cheapest,
)
from remat.planning.regions import ComposedStep, Rerun
from remat.solvers.base import ProgressCallback, ignore_progress

_LONGEST = 64
"""How many regions a segment may have."""

_HALVINGS = 11
"""How often the smallest budget is looked for between two."""


@dataclass(frozen=True, slots=True)
class RerunChoice:
    """How a step runs: an option of each region, and which regions run again."""

    options: tuple[int, ...]
    again: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Segment:
    """What a region adds to a segment in which it runs again.

    Parameters
    ----------
    options
        The options of its front by which it may run then, quickest first; all hold the
        same.
    made_bytes
        Of what it makes again.
    rerun_bytes
        Most while it does, beyond its inputs.
    cost_ns
        Time of that.
    """

    options: Numbers
    made_bytes: int
    rerun_bytes: int
    cost_ns: int


def _quickest(
    stage: Stage, segment: _Segment, used: Numbers, budget_bytes: int
) -> tuple[NDArray[np.bool_], Numbers]:
    """Return which states a region of a segment fits, and there its quickest option."""
    running = stage.running_bytes[segment.options]
    fits = used[:, None] + running[None, :] <= budget_bytes
    return np.asarray(fits.any(axis=1)), segment.options[fits.argmax(axis=1)]


@dataclass
class _States:
    """Pareto sets of bytes and time at one place, and how each came about.

    A way is the place and the state that it came from, the option of the last region,
    and whether the regions between run again.
    """

    used: list[Numbers] = field(default_factory=list[Numbers])
    cost: list[Numbers] = field(default_factory=list[Numbers])
    ways: list[tuple[int, Numbers, Numbers]] = field(
        default_factory=list[tuple[int, Numbers, Numbers]]
    )

    def merged(self) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Return bytes, time, place, state and option of those not beaten."""
        used, cost = np.concatenate(self.used), np.concatenate(self.cost)
        places = np.concatenate(
            [np.full(len(state), place) for place, state, _ in self.ways]
        )
        state = np.concatenate([state for _, state, _ in self.ways])
        option = np.concatenate([option for _, _, option in self.ways])
        used, cost, kept = cheapest(used, cost)
        return used, cost, places[kept], state[kept], option[kept]


class RerunSearch(RegionSearch):
    """The search over regions, in which some may run forward again as a whole.

    Parameters
    ----------
    step, fronts, everything, trace
        As for :class:`~remat.planning.region_program.RegionSearch`.
    """

    def __init__(
        self,
        step: ComposedStep,
        fronts: Sequence[RegionFront],
        everything: Schedule,
        trace: Trace,
    ) -> None:
        super().__init__(step, fronts, everything, trace)
        self._judged = step.with_reruns
        self._most_bytes = trace.peak_bytes[0]
        self._segments = [
            self._segment(index, front) for index, front in enumerate(fronts)
        ]

    def _segment(self, index: int, front: RegionFront) -> _Segment | None:
        rerun = self.step.reruns.get(index)
        if rerun is None:
            return None
        fitting = [
            number
            for number, option in enumerate(front.options)
            if self.step.may_rerun(rerun, option.order)
        ]
        if not fitting:
            return None
        least_bytes = min(front.options[n].held_bytes for n in fitting)
        numbers = [n for n in fitting if front.options[n].held_bytes == least_bytes]
        storages, ops = self.step.graph.storages, self.step.graph.ops
        given = sum(storages[s].size_bytes for s in rerun.reads)
        return _Segment(
            options=np.array(numbers),
            made_bytes=sum(storages[s].size_bytes for s in rerun.storages),
            rerun_bytes=max(0, front.options[numbers[0]].forward_bytes - given),
            cost_ns=sum(ops[op].cost_ns[0] or 0 for op in rerun.ops),
        )

    def judged(self, choice: RerunChoice) -> tuple[Schedule, Trace]:  # type: ignore[override]
        """Return the step in which each region runs by an option, and its replay."""
        pairs = zip(self.fronts, choice.options, strict=True)
        orders = [front.options[index].order for front, index in pairs]
        reruns: list[Rerun] = [self.step.reruns[region] for region in choice.again]
        schedule = self.step.schedule_of(orders, reruns)
        graph = self._judged.graph
        platform = single_device(kind=graph.device_kinds[0])
        return schedule, simulate(graph, platform, schedule)

    def choose(self, budget_bytes: int) -> RerunChoice | None:  # type: ignore[override]
        """Return the choice that takes least time, or ``None`` if sums fit with none.

        Between places of the step, the program keeps the Pareto set of bytes and time.
        A segment goes from one place to a later one. O(regions x longest segment)
        steps, each over at most as many states as are kept.
        """
        count = len(self.stages)
        found = [_States() for _ in range(count + 1)]
        zero = np.zeros(1, dtype=np.int64)
        merged: list[tuple[Numbers, Numbers, Numbers, Numbers, Numbers] | None] = []
        for place in range(count + 1):
            states = found[place]
            if place == 0:
                merged.append((zero, zero, zero, zero, zero))
            else:
                merged.append(states.merged() if states.used else None)
            now = merged[place]
            if now is not None and place < count:
                self._extend(place, now[0], now[1], found, budget_bytes)
        last = merged[count]
        if last is None:
            return None
        used, cost = last[0], last[1]
        fits = np.nonzero(used + self.end_bytes <= budget_bytes)[0]
        if not len(fits):
            return None
        return self._traced(merged, int(fits[np.argmin(cost[fits])]), budget_bytes)

    def _extend(
        self,
        place: int,
        used: Numbers,
        cost: Numbers,
        found: list[_States],
        budget_bytes: int,
    ) -> None:
        """Add the states after one region more, or after a segment of several."""
        number = np.arange(len(used))
        dropped_bytes = rerun_bytes = rerun_ns = 0
        for end in range(place, min(place + _LONGEST, len(self.stages))):
            stage = self.stages[end]
            fits = used + stage.before_bytes <= budget_bytes
            used, cost, number = used[fits], cost[fits], number[fits]
            if not len(used):
                return
            runs = used[:, None] + stage.running_bytes[None, :] <= budget_bytes
            following = (
                self.stages[end + 1].before_bytes
                if end + 1 < len(self.stages)
                else self.end_bytes
            )
            after = used[:, None] + stage.held_bytes[None, :]
            if dropped_bytes:
                # All of the segment runs again before the last one's backward pass.
                most = following - dropped_bytes + rerun_bytes
                runs &= after + most <= budget_bytes
            came, option = np.nonzero(runs)
            if len(came):
                states = found[end + 1]
                states.used.append(after[came, option] - dropped_bytes)
                states.cost.append(cost[came] + stage.cost_ns[option] + rerun_ns)
                states.ways.append((place, number[came], option))
            segment = self._segments[end]
            if segment is None:
                return
            inside, option = _quickest(stage, segment, used, budget_bytes)
            used = used[inside] + int(stage.held_bytes[segment.options[0]])
            cost = cost[inside] + stage.cost_ns[option[inside]]
            number = number[inside]
            rerun_bytes = max(rerun_bytes, dropped_bytes + segment.rerun_bytes)
            dropped_bytes += segment.made_bytes
            rerun_ns += segment.cost_ns

    def _traced(
        self,
        merged: Sequence[tuple[Numbers, Numbers, Numbers, Numbers, Numbers] | None],
        state: int,
        budget_bytes: int,
    ) -> RerunChoice:
        place = len(self.stages)
        options = [0] * place
        again: list[int] = []
        while place:
            now = merged[place]
            if now is None:
                break
            _, _, places, states, chosen = now
            before = int(places[state])
            options[place - 1] = int(chosen[state])
            place, end, state = before, place, int(states[state])
            start = merged[place]
            if start is None:
                break
            used = start[0][state : state + 1]
            for region in range(place, end - 1):
                segment, stage = self._segments[region], self.stages[region]
                if segment is not None:
                    _, option = _quickest(stage, segment, used, budget_bytes)
                    options[region] = int(option[0])
                    used = used + stage.held_bytes[option]
                    again.append(region)
        return RerunChoice(tuple(options), tuple(sorted(again)))

    def least(self, known_bytes: int) -> tuple[Schedule, Trace] | None:
        """Return the schedule of the smallest peak found by halving, below a known one.

        ``None`` if there is none below. What is asked depends on the step alone: a peak
        that was named is found again when it is asked for.
        """
        best: tuple[Schedule, Trace] | None = None
        low, high = 0, self._most_bytes
        for _ in range(_HALVINGS):
            asked = (low + high) // 2
            choice = self.choose(asked)
            found = None if choice is None else self.judged(choice)
            if found is None or found[1].violation is not None:
                low = asked
                continue
            least_bytes = known_bytes if best is None else best[1].peak_bytes[0]
            if found[1].peak_bytes[0] < least_bytes:
                best = found
            high = asked
        return best


@dataclass(frozen=True)
class RerunProgram:
    """Picks plans of regions, some of which run forward again as a whole.

    **Guarantee** none on cost. In a segment each region runs by the quickest one of
    those orders that hold least; a segment is run again once.

    **Complexity** that of the program over regions, and O(regions x 64) steps of it for
    each budget that it is asked for.

    Parameters
    ----------
    program
        The program over the regions that are not run again.
    """

    schedule_class: ClassVar[str] = (
        "each region run as a whole, in one of the orders found for it alone, and again "
        "in segments"
    )
    is_exact: ClassVar[bool] = False

    program: RegionProgram = field(repr=False)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits."""
        budget_bytes = problem.budget_bytes
        schedule, _ = self.program.step.everything
        if budget_bytes is not None:
            fronts = self.program.fronts_of(limits, on_progress)
            schedule = self.search(fronts).run(budget_bytes)
        return Proposal(
            status=Status.UNKNOWN if schedule is None else Status.FEASIBLE,
            stop_reason=(
                StopReason.TIME_LIMIT if limits.is_over else StopReason.COMPLETED
            ),
            schedule=schedule,
            message=f"{len(self.program.step.reruns)} graphs may run again as a whole",
        )

    def search(self, fronts: Sequence[RegionFront]) -> RerunSearch:
        """Return the search over these ways to run each region."""
        everything, trace = self.program.step.everything
        return RerunSearch(self.program.step, fronts, everything, trace)

    @cached_property
    def is_of_use(self) -> bool:
        """Whether any region may run again."""
        return bool(self.program.step.reruns)


def plan_with_reruns(
    program: RegionProgram,
    error: BudgetError,
    *,
    fingerprint: str,
    settings: Mapping[str, Any],
    limits: Limits,
    progress: ProgressCallback = ignore_progress,
) -> Plan:
    """Return a plan of a step whose budget no plan keeps that runs no region again.

    Parameters
    ----------
    program
        The program over the step's regions.
    error
        What was found: the budget that is asked for, and the smallest one that other
        plans keep.
    fingerprint, settings, limits, progress
        As for :func:`~remat.planning.one_device.plan_graph`.

    Raises
    ------
    BudgetError
        If that is not enough; names the smaller of the two smallest budgets.
    """
    reruns, budget_bytes = RerunProgram(program=program), error.budget_bytes
    if not reruns.is_of_use:
        raise error
    step = program.step.with_reruns
    platform = single_device(budget_bytes, kind=step.graph.device_kinds[0])
    problem = Problem(graph=step.graph, platform=platform)
    progress("looking for graphs to run again as a whole", 0.0)
    result = solve(problem, reruns, limits=limits, on_progress=progress)
    schedule, trace = result.schedule, result.trace
    if schedule is None:
        search = reruns.search(program.known_fronts())
        least = search.least(error.required_bytes)
        if least is None:
            raise error
        schedule, trace = least
        needed_bytes = trace.peak_bytes[0]
        if needed_bytes > budget_bytes:
            msg = (
                f"no schedule was found within {format_bytes(budget_bytes)} "
                f"({budget_bytes:_} bytes): the smallest known budget is "
                f"{format_bytes(needed_bytes)} ({needed_bytes:_} bytes), in which graphs "
                "run forward again as a whole; raise the budget to at least "
                f"{needed_bytes} bytes, or shrink the batch"
            )
            raise BudgetError(
                msg,
                budget_bytes=budget_bytes,
                required_bytes=needed_bytes,
                schedule=schedule,
            )
        trace = simulate(step.graph, platform, schedule)
    return with_bound(
        Plan(
            graph=step.graph,
            platform=platform,
            schedule=schedule,
            solver=result.solver,
            status=Status.FEASIBLE,
            bound_ns=result.bound_ns,
            fingerprint=fingerprint,
            settings=plan_settings(settings, "auto", limits.seed, result),
            _judged=trace,
        ),
        limits=limits,
    )
