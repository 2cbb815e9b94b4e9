"""All schedules of several devices, searched exhaustively.

:func:`best_on_devices` is Dijkstra's algorithm over what is live where. Nothing is
discarded before memory is short; then every smallest set of storages that makes room is
tried. That loses nothing: keeping more is never worse, since a discard is free at any
time. Memory is that of the steps one after the other; time is their sum.

With ``is_staged`` only schedules of the frontier class are searched: first runs happen
in graph order, those of needed forward ops before the boundary, and between two of them
(or one and the boundary or the end) every op runs at most once per device, in graph
order.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, count
from typing import NamedTuple

from remat.core.bounds import required_ops
from remat.core.graph import Op, Phase, TrainingGraph
from remat.core.liveness import insert_discards
from remat.core.platform import Platform
from remat.core.schedule import Boundary, Compute, Copy, Schedule, Step


class SearchTooLargeError(Exception):
    """A graph has too many states for a search through all of them."""


class _Place(NamedTuple):
    live: tuple[frozenset[int], ...]
    run: frozenset[int]
    is_backward: bool = False
    # Of staged schedules: the first op that has not run, the last run of the stage, and
    # whether that run was a first one, which ends the stage.
    frontier: int = 0
    swept: tuple[int, int] = (-1, -1)
    is_ended: bool = False


def _matters(op: Op) -> bool:
    return op.is_ordered or not op.writes or not op.is_recomputable or op.is_external


@dataclass(frozen=True)
class _DeviceSearch:
    graph: TrainingGraph
    platform: Platform
    is_staged: bool

    # Each of these is asked for at every step of the search.
    @cached_property
    def sizes_bytes(self) -> tuple[int, ...]:
        return tuple(storage.size_bytes for storage in self.graph.storages)

    @cached_property
    def resident_bytes(self) -> tuple[int, ...]:
        return tuple(map(self.graph.resident_bytes, range(len(self.platform.devices))))

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        return tuple(self.graph.kind_index(d.kind) for d in self.platform.devices)

    @cached_property
    def required(self) -> tuple[int, ...]:
        return tuple(sorted(required_ops(self.graph)))

    @cached_property
    def external(self) -> dict[Phase, frozenset[int]]:
        return {
            phase: frozenset(
                index
                for index, op in enumerate(self.graph.ops)
                if op.is_external and op.phase is phase
            )
            for phase in Phase
        }

    def size(self, storages: Iterable[int]) -> int:
        return sum(map(self.sizes_bytes.__getitem__, storages))

    def stays(self, storage: int, device: int) -> bool:
        block = self.graph.storages[storage]
        return block.is_resident and block.home == device

    def is_handed_over(self, place: _Place, storage: int, device: int) -> bool:
        """Whether the caller has the storage there, and keeps it to the end."""
        graph = self.graph
        return (
            place.is_backward
            and graph.storages[storage].home == device
            and (storage in graph.forward_outputs or storage in graph.tangents)
            and storage in graph.final_outputs
        )

    def is_live(self, place: _Place, storage: int, device: int) -> bool:
        return self.stays(storage, device) or storage in place.live[device]

    def rooms(
        self, place: _Place, device: int, added: int, pinned: set[int]
    ) -> Iterator[_Place]:
        """Yield ``place`` after each smallest set of discards that makes room."""
        budget = self.platform.devices[device].budget_bytes
        held = self.resident_bytes[device] + self.size(place.live[device])
        excess = 0 if budget is None else held + added - budget
        if excess <= 0:
            yield place
            return
        candidates = sorted(
            s
            for s in place.live[device]
            if s not in pinned
            and self.graph.storages[s].size_bytes
            and not self.is_handed_over(place, s, device)
        )
        found: list[set[int]] = []
        for number in range(1, len(candidates) + 1):
            for chosen in combinations(candidates, number):
                if self.size(chosen) < excess or any(f <= set(chosen) for f in found):
                    continue
                found.append(set(chosen))
                live = list(place.live)
                live[device] -= frozenset(chosen)
                yield place._replace(live=tuple(live))

    def with_live(self, place: _Place, storages: Sequence[int], device: int) -> _Place:
        held = place.live[device]
        if held.issuperset(storages):
            return place
        live = (*place.live[:device], held.union(storages), *place.live[device + 1 :])
        return place._replace(live=live)

    def is_callers_turn(self, place: _Place) -> bool:
        phase = Phase.BACKWARD if place.is_backward else Phase.FORWARD
        return not self.external[phase].isdisjoint(place.run)

    def at_home(self, place: _Place, storages: Sequence[int]) -> bool:
        return all(
            self.is_live(place, s, self.graph.storages[s].home) for s in storages
        )

    def effects_done(self, place: _Place, phase: Phase | None) -> bool:
        return all(
            index in place.run
            for index, op in enumerate(self.graph.ops)
            if (op.is_ordered or not op.writes) and phase in {None, op.phase}
        )

    def is_goal(self, place: _Place) -> bool:
        return (
            place.is_backward
            and self.at_home(place, self.graph.final_outputs)
            and self.effects_done(place, None)
        )

    def moves(self, place: _Place) -> Iterator[tuple[Step, int, _Place]]:
        yield from self.boundaries(place)
        if not self.is_callers_turn(place):
            yield from self.copies(place)
        for index, op in enumerate(self.graph.ops):
            if self.may_run(place, index, op):
                for device in range(len(self.platform.devices)):
                    yield from self.runs(place, index, device)

    def boundaries(self, place: _Place) -> Iterator[tuple[Step, int, _Place]]:
        graph = self.graph
        if (
            place.is_backward
            or (self.is_staged and self.is_forward_left(place))
            or not self.at_home(place, graph.forward_outputs)
            or not self.effects_done(place, Phase.FORWARD)
        ):
            return
        places = [place]
        for device in range(len(self.platform.devices)):
            mine = [s for s in graph.tangents if graph.storages[s].home == device]
            # Everything is live at once, and forward outputs are still held.
            pinned = {
                s for s in graph.forward_outputs if graph.storages[s].home == device
            }
            places = [
                room
                for p in places
                for room in self.rooms(p, device, self.size(mine), pinned)
            ]
        for room in places:
            # The boundary ends a stage, as the end does.
            after = room._replace(is_backward=True, swept=(-1, -1), is_ended=False)
            for storage in graph.tangents:
                home = graph.storages[storage].home
                after = self.with_live(after, [storage], home)
            yield Boundary(), 0, after

    def is_forward_left(self, place: _Place) -> bool:
        ops = self.graph.ops
        left = place.frontier < len(ops)
        return left and ops[place.frontier].phase is Phase.FORWARD

    def copies(self, place: _Place) -> Iterator[tuple[Step, int, _Place]]:
        for link in self.platform.links:
            for storage, block in enumerate(self.graph.storages):
                if self.is_live(place, storage, link.source) and not self.is_live(
                    place, storage, link.target
                ):
                    step = Copy(storage, link.source, link.target)
                    time = link.copy_ns(block.size_bytes)
                    for room in self.rooms(place, link.target, block.size_bytes, set()):
                        yield step, time, self.with_live(room, [storage], link.target)

    def may_run(self, place: _Place, index: int, op: Op) -> bool:
        if op.phase is Phase.BACKWARD and not place.is_backward:
            return False
        if self.is_callers_turn(place) and not op.is_external:
            return False
        if index in place.run:
            if not op.is_recomputable:
                return False
        elif op.is_ordered and any(
            self.graph.ops[r].is_ordered and r > index for r in place.run
        ):
            return False
        return not self.is_staged or index <= place.frontier

    def runs(
        self, place: _Place, index: int, device: int
    ) -> Iterator[tuple[Step, int, _Place]]:
        op = self.graph.ops[index]
        kind = self.kinds[device]
        cost = op.cost_ns[kind]
        if cost is None or not all(self.is_live(place, s, device) for s in op.reads):
            return
        if self.is_staged:
            staged = self.in_stage(place, (index, device))
            if staged is None:
                return
            place = staged
        added = self.size(op.writes) + op.workspace_bytes[kind]
        run = place.run | {index} if _matters(op) else place.run
        for room in self.rooms(place, device, added, set(op.reads)):
            after = self.with_live(room, op.writes, device)
            if run is not place.run:
                after = after._replace(run=run)
            yield Compute(index, device), cost, after

    def in_stage(self, place: _Place, run: tuple[int, int]) -> _Place | None:
        """Return ``place`` after a run; ``None`` where the class does not allow it."""
        op, device = run
        if op == place.frontier:
            later = [r for r in self.required if r > op]
            return place._replace(
                frontier=min(later, default=len(self.graph.ops)),
                swept=run,
                is_ended=True,
            )
        if place.is_ended:
            # A first run on several devices is one stage still.
            is_same = op == place.swept[0] and device > place.swept[1]
            return place._replace(swept=run, is_ended=is_same)
        return place._replace(swept=run) if run > place.swept else None

    def best(self, most_places: float) -> tuple[int, Schedule] | None:
        devices = range(len(self.platform.devices))
        for index, device in enumerate(self.platform.devices):
            budget = device.budget_bytes
            if budget is not None and self.resident_bytes[index] > budget:
                return None
        first = min(self.required, default=0)
        root = _Place(
            tuple(frozenset[int]() for _ in devices), frozenset(), frontier=first
        )
        ticket = count()
        queue = [(0, next(ticket), root)]
        came_from: dict[_Place, tuple[_Place, Step] | None] = {root: None}
        least = {root: 0}
        while queue:
            cost, _, place = heapq.heappop(queue)
            if cost > least[place]:
                continue
            if self.is_goal(place):
                steps: list[Step] = []
                while (origin := came_from[place]) is not None:
                    place, step = origin
                    steps.append(step)
                return cost, insert_discards(self.graph, reversed(steps))
            for step, time, after in self.moves(place):
                if cost + time < least.get(after, 1 << 80):
                    if len(least) >= most_places:
                        msg = f"there are more than {most_places} places to search"
                        raise SearchTooLargeError(msg)
                    least[after] = cost + time
                    came_from[after] = (place, step)
                    heapq.heappush(queue, (cost + time, next(ticket), after))
        return None


def best_on_devices(
    graph: TrainingGraph,
    platform: Platform,
    *,
    is_staged: bool = False,
    most_places: int | None = None,
) -> tuple[int, Schedule] | None:
    """Return the least serial time of all schedules whose list fits, and one of them.

    ``None`` if no schedule fits. For graphs of up to 6 ops; a few of these have more
    states on several devices than can be searched.

    Parameters
    ----------
    graph, platform
        The problem.
    is_staged
        Whether only schedules of the frontier class are searched.
    most_places
        States that are searched before the search gives up; 20 000 take some seconds.

    Raises
    ------
    SearchTooLargeError
        If there are more.
    """
    return _DeviceSearch(graph, platform, is_staged).best(most_places or math.inf)
