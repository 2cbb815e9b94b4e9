"""One program over the regions of a step, each with a front of plans of its own.

Solvers of whole steps take more time the longer the step is, and give each of many
equal blocks another plan. Here each distinct region is solved alone, for several limits
on what it holds between its passes and on the peak of its backward pass. Of these
options a program picks one for each region, so that the step takes least time:

* in a reference every region keeps everything, and the judge says what is in use when;
* another option of a region changes that by what it holds less, as long as it holds it,
  and by the difference of the two peaks while the region itself runs.

So what is in use at any time depends on one number, the sum of these differences over
the regions before. What two regions hold together counts in both differences: the
schedule is judged, and the program asked again for as much less or more as the true
peak is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Proposal, Status, StopReason
from remat.core.schedule import Boundary, Compute, Discard, Schedule
from remat.core.simulator import Trace, simulate
from remat.planning.portfolio import solve_portfolio
from remat.planning.regions import (
    ComposedStep,
    EagerForward,
    Parts,
    Region,
    compose,
    frugal_order,
)
from remat.planning.smallest_budget import smallest_budget
from remat.solvers.base import ProgressCallback, Solver
from remat.solvers.greedy_eviction import CANDIDATES, GreedyEviction
from remat.solvers.min_cut_retention import MinCutRetention

_HELD_LEVELS = 12
_BACKWARD_LEVELS = 2
"""How many limits a region is solved for: on what it holds, on its backward peak."""

_HALVINGS = 6
"""How often the backward peak is halved of what holds least."""

_SOLVERS: tuple[Solver, ...] = (
    GreedyEviction(candidates=CANDIDATES[:3]),
    MinCutRetention(effort_ops=100_000),
)

_STATES = 1000
"""How many sums of differences the program keeps apart."""

_REPLAYS = 8
"""How often it is asked again."""

_NEAR_SHARE = 500
"""It is not if less than the budget over this number is left."""


@dataclass(frozen=True, slots=True)
class RegionOption:
    """One way to run a region; bytes are beyond what is there during the whole step.

    Parameters
    ----------
    order
        Ops of the region's graph as they run, with the boundary among them.
    cost_ns
        Time of its ops.
    held_bytes
        Between its passes.
    forward_bytes, backward_bytes
        Most during its passes.
    """

    order: tuple[int, ...]
    cost_ns: int
    held_bytes: int
    forward_bytes: int
    backward_bytes: int

    def beats(self, other: "RegionOption") -> bool:
        """Whether this is nowhere worse than another one."""
        return (
            self.cost_ns <= other.cost_ns
            and self.held_bytes <= other.held_bytes
            and self.forward_bytes <= other.forward_bytes
            and self.backward_bytes <= other.backward_bytes
        )


@dataclass(frozen=True, slots=True)
class RegionFront:
    """The ways to run a region: keeping everything, and those that none beats.

    Parameters
    ----------
    everything
        What others are compared with.
    options
        At least one, quickest first.
    """

    everything: RegionOption
    options: tuple[RegionOption, ...]


class LoneRegion:
    """A region as a step of its own, while others run between its passes.

    Parameters
    ----------
    region
        The region.
    moving
        Its inputs that are not there during the whole step.
    """

    def __init__(self, region: Region, moving: frozenset[int]) -> None:
        graph = region.graph
        slots = {tangent: slot for slot, tangent in enumerate(graph.tangents)}
        gradients = [
            (slot, storage)
            for slot, (_, storage) in enumerate(region.gradients, len(slots))
        ]
        alone = Region(
            graph=graph,
            given={number: number for number in region.given},
            made={number: number for number in region.made},
            slots=slots,
            gradients=gradients,
        )
        inputs = {number: graph.storages[number].size_bytes for number in moving}
        parts = Parts(
            regions=[alone],
            # All other regions run between the two passes.
            between={0: EagerForward(made=inputs), 1: EagerForward()},
            backward=[0] if len(graph.ops) > graph.forward_count else [],
            held=dict.fromkeys(region.made, 0),
            returned=frozenset(slots.values()),
            leaves=dict.fromkeys((slot for slot, _ in gradients), False),
        )
        self._step = compose("a region alone", parts, frees_tangents=True)
        self._graph = self._step.graph
        storages = self._graph.storages
        self._resident_bytes = sum(s.size_bytes for s in storages if s.is_resident)
        # They come at the boundary.
        self._tangent_bytes = sum(storages[t].size_bytes for t in self._graph.tangents)
        # Outputs that are there when its forward pass ends, and gone when others run.
        count = self._graph.forward_count
        read = {s for op in self._graph.ops[count:] for s in op.reads}
        last = self._graph.ops[count - 1]
        self._passing_bytes = sum(storages[s].size_bytes for s in {*last.reads} - read)

    def front(self, limits: Limits) -> RegionFront:
        """Return the ways to run it that are found; fewer where time is over."""
        graph = self._graph
        if len(graph.ops) == graph.forward_count:
            only = self._forward_only()
            return RegionFront(only, (only,))
        everything = self._measured(store_all_order(graph))
        least = self._measured(frugal_order(graph))
        found = [everything, least]
        if least.held_bytes < everything.held_bytes:
            found += self._between(least, everything, limits)
        kept: list[RegionOption] = []
        for option in found:
            if not any(other.beats(option) for other in kept):
                kept = [other for other in kept if not option.beats(other)]
                kept.append(option)
        kept.sort(key=lambda option: option.cost_ns)
        return RegionFront(everything, tuple(kept))

    def _between(
        self, least: RegionOption, everything: RegionOption, limits: Limits
    ) -> list[RegionOption]:
        floor = smallest_budget(self._loaded(0), kind=self._kind, limits=limits)
        lowest = floor.budget_bytes - self._resident_bytes
        highest = max(least.backward_bytes, everything.backward_bytes)
        found = [self._measured_schedule(floor.schedule)]
        span_bytes = everything.held_bytes - least.held_bytes
        for part in range(_BACKWARD_LEVELS):
            most_bytes = highest - (highest - lowest) * part // _BACKWARD_LEVELS
            for level in range(_HELD_LEVELS):
                held_bytes = least.held_bytes + span_bytes * level // _HELD_LEVELS
                if held_bytes < most_bytes and not limits.is_over:
                    found += self._solved(held_bytes, most_bytes, limits)
        return [*found, *self._halved(least, lowest, limits)]

    def _halved(
        self, least: RegionOption, lowest: int, limits: Limits
    ) -> list[RegionOption]:
        """Return ways that hold least, of smaller and smaller backward peaks."""
        found: list[RegionOption] = []
        fails, fits = lowest, least.backward_bytes
        for _ in range(_HALVINGS):
            most_bytes = (fails + fits) // 2
            if limits.is_over or not least.held_bytes < most_bytes < fits:
                break
            solved = self._solved(least.held_bytes, most_bytes, limits)
            found += solved
            if solved:
                fits = most_bytes
            else:
                fails = most_bytes
        return found

    @property
    def _kind(self) -> str:
        return self._graph.device_kinds[0]

    def _loaded(self, load_bytes: int) -> TrainingGraph:
        """Return the graph with so many bytes more in use between the passes."""
        graph, last = self._graph, self._graph.forward_count - 1
        load = (load_bytes,) * len(graph.device_kinds)
        loaded = replace(graph.ops[last], workspace_bytes=load)
        return replace(graph, ops=(*graph.ops[:last], loaded, *graph.ops[last + 1 :]))

    def _solved(
        self, held_bytes: int, most_bytes: int, limits: Limits
    ) -> list[RegionOption]:
        """Return a way to run within both limits, if one is found."""
        graph = self._loaded(max(0, most_bytes - held_bytes - self._passing_bytes))
        platform = single_device(self._resident_bytes + most_bytes, kind=self._kind)
        problem = Problem(graph=graph, platform=platform)
        result = solve_portfolio(problem, _SOLVERS, limits=limits)
        if result.schedule is None:
            return []
        return [self._measured_schedule(result.schedule)]

    def _forward_only(self) -> RegionOption:
        schedule = schedule_from_order(self._graph, range(self._graph.forward_count))
        trace = simulate(self._graph, single_device(kind=self._kind), schedule)
        (order,) = self._step.region_orders(schedule, trace)
        return RegionOption(
            order=(*order.order, BOUNDARY),
            cost_ns=trace.serial_ns,
            held_bytes=0,
            forward_bytes=trace.peak_bytes[0] - self._resident_bytes,
            backward_bytes=0,
        )

    def _measured(self, order: Sequence[int]) -> RegionOption:
        return self._measured_schedule(schedule_from_order(self._graph, order))

    def _measured_schedule(self, schedule: Schedule) -> RegionOption:
        schedule = self._step.by_regions(schedule)
        trace = simulate(self._graph, single_device(kind=self._kind), schedule)
        (order,) = self._step.region_orders(schedule, trace)
        timeline = trace.timeline_bytes[0]
        boundary = schedule.steps.index(Boundary())
        return RegionOption(
            order=order.order,
            cost_ns=trace.serial_ns,
            held_bytes=timeline[boundary] - self._resident_bytes - self._tangent_bytes,
            forward_bytes=max(timeline[:boundary]) - self._resident_bytes,
            backward_bytes=max(timeline[boundary:]) - self._resident_bytes,
        )


FrontKey: TypeAlias = tuple[int, frozenset[int]]
Fronts: TypeAlias = dict[FrontKey, RegionFront]


@dataclass(frozen=True)
class RegionProgram:
    """Picks for each region of a step one of its own plans.

    **Guarantee** none on cost. Of the options that it is given the program picks the
    cheapest ones, as far as sums of bytes predict the peak; the peak is judged.

    **Complexity** 30 searches and a bisection for each distinct region; then O(regions
    x options) for each of at most 8 budgets, and a replay of the step.

    Parameters
    ----------
    step
        The step of the problem.
    fronts
        What was found for regions before, by their graphs; changed.
    """

    schedule_class: ClassVar[str] = (
        "each region run as a whole, in one of the orders found for it alone"
    )
    is_exact: ClassVar[bool] = False

    step: ComposedStep = field(repr=False)
    fronts: Fronts = field(default_factory=dict[FrontKey, RegionFront], repr=False)

    @property
    def repeats(self) -> bool:
        """Whether most regions are equal to others, which is where it pays."""
        keys = self._keys()
        return len(set(keys)) * 2 <= len(keys)

    def description(self, how: str) -> str:
        """Return in words of how many graphs the step is, and what they are."""
        keys = self._keys()
        return f"{len(keys)}, {len(set(keys))} of them distinct{how}"

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, or UNKNOWN if none fits."""
        budget_bytes = problem.budget_bytes
        schedule, trace = self.step.everything
        if budget_bytes is not None and trace.peak_bytes[0] > budget_bytes:
            fronts = self.fronts_of(limits, on_progress)
            on_progress("choosing a plan for each region", 0.9)
            search = RegionSearch(self.step, fronts, schedule, trace)
            schedule = search.run(budget_bytes)
        keys = self._keys()
        return Proposal(
            status=Status.UNKNOWN if schedule is None else Status.FEASIBLE,
            stop_reason=(
                StopReason.TIME_LIMIT if limits.is_over else StopReason.COMPLETED
            ),
            schedule=schedule,
            message=f"{len(set(keys))} of {len(keys)} graphs are distinct",
        )

    def fronts_of(
        self, limits: Limits, on_progress: ProgressCallback
    ) -> list[RegionFront]:
        """Return the front of each region; those that are not known are looked for."""
        keys = self._keys()
        missing = [key for key in dict.fromkeys(keys) if key not in self.fronts]
        for done, key in enumerate(missing):
            on_progress(
                f"planning {len(missing)} distinct graphs, each alone",
                0.9 * done / len(missing),
            )
            region = self.step.regions[keys.index(key)]
            part = limits.share(1 / (len(missing) - done + 1))
            self.fronts[key] = LoneRegion(region, key[1]).front(part)
        return self.known_fronts()

    def known_fronts(self) -> list[RegionFront]:
        """Return the front of each region, all of them found before."""
        return [self.fronts[key] for key in self._keys()]

    def _keys(self) -> list[FrontKey]:
        """Return what is equal for regions that have the same front."""
        return [
            (
                id(region.graph),
                frozenset(
                    number
                    for number in region.given
                    if not self.step.graph.storages[mapped[number]].is_resident
                ),
            )
            for region, mapped in zip(
                self.step.regions, self.step.storages, strict=True
            )
        ]


Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stage:
    """A region in the program: its options as numbers, relative to the reference.

    Parameters
    ----------
    before_bytes
        Most in the reference between the passes of the region before and of this one.
    cost_ns, held_bytes
        Per option.
    running_bytes
        Per option the most while the region runs.
    """

    before_bytes: int
    cost_ns: Numbers
    held_bytes: Numbers
    running_bytes: Numbers


def stage_of(
    between_bytes: int,
    forward_bytes: int,
    backward_bytes: int,
    front: RegionFront,
) -> Stage:
    """Return the numbers of a region, from those in the reference."""
    first, options = front.everything, front.options
    running = [
        max(
            forward_bytes + option.forward_bytes - first.forward_bytes,
            backward_bytes + option.backward_bytes - first.backward_bytes,
        )
        for option in options
    ]
    return Stage(
        before_bytes=between_bytes,
        cost_ns=np.array([option.cost_ns for option in options]),
        held_bytes=np.array([o.held_bytes - first.held_bytes for o in options]),
        running_bytes=np.array(running),
    )


class RegionSearch:
    """Budgets that the program is asked for, and what the judge says of its answers.

    Parameters
    ----------
    step
        The step.
    fronts
        Of each region.
    everything, trace
        The reference, in which each region keeps everything, and its replay.

    Attributes
    ----------
    stages
        The regions as numbers.
    end_bytes
        Most in the reference between the passes of the last region.
    """

    def __init__(
        self,
        step: ComposedStep,
        fronts: Sequence[RegionFront],
        everything: Schedule,
        trace: Trace,
    ) -> None:
        self.step = step
        self.fronts = fronts
        self.stages, self.end_bytes = self._stages(everything, trace)

    def judged(self, choice: Sequence[int]) -> tuple[Schedule, Trace]:
        """Return the step in which each region runs by an option, and its replay."""
        graph = self.step.graph
        pairs = zip(self.fronts, choice, strict=True)
        orders = [front.options[index].order for front, index in pairs]
        schedule = self.step.schedule_of(orders)
        return schedule, simulate(
            graph, single_device(kind=graph.device_kinds[0]), schedule
        )

    def _stages(self, schedule: Schedule, trace: Trace) -> tuple[list[Stage], int]:
        """Return the program's numbers, and most bytes when all regions are held."""
        count = len(self.fronts)
        between, forward, backward = [0] * (count + 1), [0] * count, [0] * count
        # Where nothing runs, as many regions hold something as ran last.
        place, is_forward = 0, True
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Discard):
                continue  # What is in use then is less than while the op before ran.
            used_bytes = trace.timeline_bytes[0][position]
            origin = self.step.origins[step.op] if isinstance(step, Compute) else None
            if isinstance(step, Boundary):
                is_forward = False
            if origin is None:
                between[place] = max(between[place], used_bytes)
                continue
            region = origin[0]
            place = region + 1 if is_forward else region
            most = forward if is_forward else backward
            most[region] = max(most[region], used_bytes)
        stages = [
            stage_of(*numbers)
            for numbers in zip(
                between[:-1], forward, backward, self.fronts, strict=True
            )
        ]
        return stages, between[count]

    def run(self, budget_bytes: int) -> Schedule | None:
        """Return the cheapest schedule found within the budget."""
        near_bytes = budget_bytes // _NEAR_SHARE
        found: dict[int, Schedule] = {}
        asked, fits, exceeds = budget_bytes, 0, 2 * budget_bytes
        for _ in range(_REPLAYS):
            choice = self.choose(asked)
            if choice is None:
                # Sums may be too high as well: what is asked for may be more.
                fits, asked = asked, min(2 * asked - fits, (asked + exceeds) // 2)
                continue
            schedule, trace = self.judged(choice)
            left_bytes = budget_bytes - trace.peak_bytes[0]
            if left_bytes >= 0:
                found.setdefault(trace.serial_ns, schedule)
                fits = asked
            else:
                exceeds = asked
            if 0 <= left_bytes <= near_bytes or exceeds - fits <= near_bytes:
                break
            asked += left_bytes
            if not fits < asked < exceeds:
                asked = (fits + exceeds) // 2
        return found[min(found)] if found else None

    def choose(self, budget_bytes: int) -> list[int] | None:
        """Return the option of each region that together take least time.

        ``None`` if the sums of their bytes fit with no choice.
        """
        used = np.zeros(1, dtype=np.int64)
        cost = np.zeros(1, dtype=np.int64)
        ways: list[tuple[Numbers, Numbers]] = []
        for stage in self.stages:
            fits = used + stage.before_bytes <= budget_bytes
            runs = used[:, None] + stage.running_bytes[None, :] <= budget_bytes
            came, option = np.nonzero(runs & fits[:, None])
            if not len(came):
                return None
            used, cost, kept = cheapest(
                used[came] + stage.held_bytes[option],
                cost[came] + stage.cost_ns[option],
            )
            ways.append((came[kept], option[kept]))
        fits = np.nonzero(used + self.end_bytes <= budget_bytes)[0]
        if not len(fits):
            return None
        at = int(fits[np.argmin(cost[fits])])
        choice: list[int] = []
        for came, option in reversed(ways):
            choice.append(int(option[at]))
            at = int(came[at])
        return choice[::-1]


def cheapest(used: Numbers, cost: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the states that none is better than, thinned out, and their numbers."""
    # Sorted by both, the same would take three times as long.
    order = np.argsort(used, kind="stable")
    best = np.minimum.accumulate(cost[order])
    is_better = np.ones(len(order), dtype=bool)
    is_better[1:] = best[1:] < best[:-1]
    kept = order[is_better]
    # Of as many bytes the cheapest comes last.
    is_last = np.ones(len(kept), dtype=bool)
    is_last[:-1] = used[kept[1:]] != used[kept[:-1]]
    kept = kept[is_last]
    if len(kept) > _STATES:
        # Of those that are about alike the quickest, which is the last.
        low, high = used[kept[0]], used[kept[-1]]
        bucket = (used[kept] - low) * _STATES // (high - low + 1)
        is_last = np.ones(len(kept), dtype=bool)
        is_last[:-1] = bucket[1:] != bucket[:-1]
        is_last[0] = True
        kept = kept[is_last]
    return used[kept], cost[kept], kept
