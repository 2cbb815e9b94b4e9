"""Paging: run everything on the first device, and keep elsewhere what does not fit.

Every op runs once, in the graph's order. Where room is short, the value that is used
again last leaves for the device with most room (Belady's rule), and comes back right
before it is read. Nothing is computed again, so this is the other extreme to
rematerialisation on one device; it gets by with little more than the largest op needs,
if there is a device to store the rest. Copies wait for each other:
:mod:`remat.search.schedule_paging` lets them overlap with a given schedule instead.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from remat.core.bounds import peak_bound_bytes
from remat.core.graph import Phase, TrainingGraph
from remat.core.liveness import BOUNDARY, store_all_order
from remat.core.platform import Platform
from remat.core.problem import Limits
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.core.simulator import Trace, simulate

_NEVER = 1 << 62
_TOLERANCE_PERCENT = 1


class _NoRoomError(Exception):
    pass


@dataclass
class _Pager:
    graph: TrainingGraph
    platform: Platform
    store: int
    steps: list[Step] = field(default_factory=list[Step])
    at_home: set[int] = field(default_factory=set[int])
    stored: set[int] = field(default_factory=set[int])
    # Used bytes at home and on the device that stores.
    used: list[int] = field(default_factory=list[int])
    # Per storage the positions in the order at which it must be at home, last first.
    uses: list[list[int]] = field(default_factory=list[list[int]])
    # What may leave home, the one that is used last first: next use and size, both
    # negative, and the storage. Entries that a later use has overtaken are left in.
    leaving: list[tuple[int, int, int]] = field(
        default_factory=list[tuple[int, int, int]]
    )

    def run(self) -> Schedule:
        order = store_all_order(self.graph)
        self.find_uses(order)
        for device in (0, self.store):
            self.used.append(self.graph.resident_bytes(device))
        for position, op in enumerate(order):
            if op == BOUNDARY:
                self.cross(position)
            else:
                self.compute(op, position)
        final = {s for s in self.graph.final_outputs if not self.is_always_there(s)}
        self.fetch(final, 0, len(order))
        return Schedule(tuple(self.steps))

    def find_uses(self, order: list[int]) -> None:
        graph = self.graph
        self.uses = [[] for _ in graph.storages]
        for storage in graph.final_outputs:
            self.uses[storage].append(len(order))
        for position in range(len(order) - 1, -1, -1):
            op = order[position]
            reads = graph.forward_outputs if op == BOUNDARY else graph.ops[op].reads
            for storage in reads:
                self.uses[storage].append(position)

    def size(self, storage: int) -> int:
        return self.graph.storages[storage].size_bytes

    def is_always_there(self, storage: int) -> bool:
        return self.graph.storages[storage].is_resident

    def compute(self, index: int, position: int) -> None:
        op = self.graph.ops[index]
        reads = {s for s in op.reads if not self.is_always_there(s)}
        added = sum(map(self.size, op.writes)) + op.workspace_bytes[0]
        if op.is_external and op.phase is Phase.FORWARD:
            # Nothing can be copied between the caller's work and the boundary.
            appearing = sum(map(self.size, (*op.writes, *self.graph.tangents)))
            added = max(added, appearing)
        self.fetch(reads, added, position)
        self.steps.append(Compute(index, 0))
        for storage in op.writes:
            self.add(storage)
        self.drop_dead({*reads, *op.writes}, position)

    def cross(self, position: int) -> None:
        outputs = {s for s in self.graph.forward_outputs if not self.is_always_there(s)}
        self.fetch(outputs, sum(map(self.size, self.graph.tangents)), position)
        self.steps.append(Boundary())
        for storage in self.graph.tangents:
            self.add(storage)
        self.drop_dead({*outputs, *self.graph.tangents}, position)

    def fetch(self, wanted: set[int], added_bytes: int, position: int) -> None:
        """Bring what is wanted home, with room for so many bytes more."""
        missing = sorted(wanted - self.at_home)
        limit = self.platform.devices[0].budget_bytes
        needed = added_bytes + sum(map(self.size, missing))
        kept: list[tuple[int, int, int]] = []
        while limit is not None and self.used[0] + needed > limit and self.leaving:
            entry = heappop(self.leaving)
            storage = entry[-1]
            if storage in wanted:
                kept.append(entry)
            elif storage in self.at_home and -entry[0] == self.next_use(
                storage, position
            ):
                self.send(storage)
        for entry in kept:
            heappush(self.leaving, entry)
        if limit is not None and self.used[0] + needed > limit:
            raise _NoRoomError
        for storage in missing:
            self.steps.append(Copy(storage, self.store, 0))
            self.add(storage)

    def next_use(self, storage: int, position: int) -> int:
        uses = self.uses[storage]
        while uses and uses[-1] < position:
            uses.pop()
        return uses[-1] if uses else _NEVER

    def send(self, storage: int) -> None:
        if storage not in self.stored:
            limit = self.platform.devices[self.store].budget_bytes
            if limit is not None and self.used[1] + self.size(storage) > limit:
                raise _NoRoomError
            self.steps.append(Copy(storage, 0, self.store))
            self.stored.add(storage)
            self.used[1] += self.size(storage)
        self.leave(storage)

    def add(self, storage: int) -> None:
        self.at_home.add(storage)
        self.used[0] += self.size(storage)

    def leave(self, storage: int) -> None:
        self.steps.append(Discard(storage, 0))
        self.at_home.discard(storage)
        self.used[0] -= self.size(storage)

    def drop_dead(self, storages: set[int], position: int) -> None:
        for storage in sorted(storages):
            next_use = self.next_use(storage, position + 1)
            if next_use != _NEVER:
                if storage not in self.graph.held_outputs:
                    entry = (-next_use, -self.size(storage), storage)
                    heappush(self.leaving, entry)
                continue
            self.leave(storage)
            if storage in self.stored:
                self.steps.append(Discard(storage, self.store))
                self.stored.discard(storage)
                self.used[1] -= self.size(storage)


def paged(graph: TrainingGraph, platform: Platform) -> tuple[Schedule, Trace] | None:
    """Return the schedule that pages to the device with most room, and its replay.

    Parameters
    ----------
    graph
        A graph whose storages are all at home, on the first device.
    platform
        At least two devices, with budgets.

    Returns
    -------
    tuple or None
        ``None`` if there is not enough room, an op cannot run on the first device, or
        no device is linked to it in both directions.

    Notes
    -----
    Time O(reads and writes of all ops x log of their number), plus a replay.
    """
    kind = graph.kind_index(platform.devices[0].kind)
    runs_at_home = all(op.cost_ns[kind] is not None for op in graph.ops)
    stores = [
        device
        for device in range(1, len(platform.devices))
        if platform.link(0, device) and platform.link(device, 0)
    ]
    if not runs_at_home or kind != 0 or not stores:
        return None

    def room(device: int) -> int:
        limit = platform.devices[device].budget_bytes
        return _NEVER if limit is None else limit

    try:
        schedule = _Pager(graph, platform, max(stores, key=room)).run()
    except _NoRoomError:
        return None
    trace = simulate(graph, platform, schedule)
    return (schedule, trace) if trace.is_valid else None


def smallest_paged(
    graph: TrainingGraph,
    platform: Platform,
    most_bytes: int,
    limits: Limits | None = None,
) -> tuple[Schedule, Trace] | None:
    """Return the paged schedule of the smallest budget at home that bisection finds.

    Parameters
    ----------
    graph, platform
        As for :func:`paged`; the budget of the first device does not count.
    most_bytes
        Budgets from there on are not tried.
    limits
        When to stop; the smallest found by then is returned.
    """
    home = platform.devices[0]
    failed = peak_bound_bytes(graph, home.kind) - 1
    best: tuple[Schedule, Trace] | None = None
    guess = failed + 1
    limits = limits or Limits()
    while guess < most_bytes and not limits.is_over:
        found = paged(graph, platform.with_budgets({home.name: guess}))
        if found is None:
            failed = guess
        else:
            best, most_bytes = found, found[1].peak_bytes[0]
        if most_bytes - failed <= max(1, failed * _TOLERANCE_PERCENT // 100):
            break
        guess = (failed + most_bytes) // 2
    return best
