"""The execution behind :mod:`remat.search.device_execution`, on plain numbers."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from remat.core.checks import require
from remat.core.liveness import BOUNDARY
from remat.native import (
    MOST_TOTAL,
    check_counts,
    check_indices,
    check_rule,
    check_time,
    native,
)

END = -2
"""Marks the end, where final outputs are used."""

NO_LIMIT_BYTES = 1 << 61
"""Stands for the room of a device without a budget."""

LARGEST_PERCENT = 10**9
"""Largest percentage that a copy counts for."""

Note = tuple[int, int, int]
"""A step: (op, device, -1) for a run, (storage, source, target) for a copy, all
:data:`~remat.core.liveness.BOUNDARY` for the boundary."""

_CLOSURE_LIMIT = 16
_DEPTH_LIMIT = 250
_LEAST_PRICE_NS = 1e-3


class Ops(NamedTuple):
    """What is known of each op.

    Parameters
    ----------
    reads, writes
        Storages.
    is_recomputable, is_external, is_forward
        Whether it may run again, is the caller's work, belongs to the forward pass.
    costs, workspaces
        Per device, the time of a run in ns, or -1 where it cannot run; bytes.
    """

    reads: Sequence[Sequence[int]]
    writes: Sequence[Sequence[int]]
    is_recomputable: Sequence[bool]
    is_external: Sequence[bool]
    is_forward: Sequence[bool]
    costs: Sequence[Sequence[int]]
    workspaces: Sequence[Sequence[int]]


class Blocks(NamedTuple):
    """What is known of each storage: bytes, home, whether resident, its op or -1."""

    sizes: Sequence[int]
    homes: Sequence[int]
    is_resident: Sequence[bool]
    producers: Sequence[int]


class Passes(NamedTuple):
    """Storages at the boundary and at the end, as in the graph."""

    forward_outputs: Sequence[int]
    tangents: Sequence[int]
    final_outputs: Sequence[int]
    held_outputs: Sequence[int]


class Graph(NamedTuple):
    """What is trained."""

    ops: Ops
    blocks: Blocks
    passes: Passes


class Routes(NamedTuple):
    """The quickest ways over the links, at ``source * devices + target``.

    Parameters
    ----------
    times
        Per storage, ns; infinity where no way leads.
    nexts
        Per storage, the first device on the way, or -1.
    """

    times: Sequence[Sequence[float]]
    nexts: Sequence[Sequence[int]]


class Prices(NamedTuple):
    """The numbers of :class:`remat.search.device_execution.ExecutionRule`."""

    size_exponent: float
    distance_exponent: float
    ancestor_share: float
    copy_percent: int


class Bounds(NamedTuple):
    """What the execution keeps to: room per device in bytes, and most runs."""

    limits_bytes: Sequence[int]
    run_limit: int


@native
def run_on_devices(
    base: Sequence[int],
    placement: Sequence[Sequence[int]],
    graph: Graph,
    routes: Routes,
    prices: Prices,
    bounds: Bounds,
    time_limit_s: float | None,
) -> list[Note] | None:
    """Return steps within the bounds, or ``None`` if it cannot go on.

    Parameters
    ----------
    base
        Ops in the order of their first runs, :data:`~remat.core.liveness.BOUNDARY`
        among them, and :data:`END` at the end.
    placement
        Per op, the devices on which it runs at its place.
    graph, routes, prices, bounds
        The graph, the rule and the limits, in plain numbers.
    time_limit_s
        Seconds until giving up, or ``None``.
    """
    graph = Graph(Ops(*graph[0]), Blocks(*graph[1]), Passes(*graph[2]))
    routes, prices, bounds = Routes(*routes), Prices(*prices), Bounds(*bounds)
    check_execution(base, placement, graph, routes, prices, bounds)
    check_time(time_limit_s)
    execution = _Execution(base, placement, graph, routes, prices, bounds, time_limit_s)
    try:
        return execution.run()
    except _Stuck:
        return None


def check_execution(
    base: Sequence[int],
    placement: Sequence[Sequence[int]],
    graph: Graph,
    routes: Routes,
    prices: Prices,
    bounds: Bounds,
) -> None:
    """Refuse numbers that do not fit together or are out of range.

    Raises
    ------
    ValueError
        If there are such.
    """
    ops, blocks, passes = graph
    count, storages = len(ops.reads), len(blocks.sizes)
    devices = len(bounds.limits_bytes)
    require(devices >= 1, "there must be at least one device")
    _check_ops(ops, storages, devices)
    require(len(placement) == count, "each op needs its devices")
    require(
        all(len(one) == storages for one in blocks),
        "the lists of storages differ in length",
    )
    check_counts(blocks.sizes)
    check_indices(blocks.producers, count, "op", -1)
    check_indices(base, count, "op", END)
    require(list(base).count(BOUNDARY) == 1, "the steps need one boundary")
    for entries in (*placement, blocks.homes):
        check_indices(entries, devices, "device")
    for entries in passes:
        check_indices(entries, storages, "storage")
    require(
        len(routes.times) == len(routes.nexts) == devices**2,
        "each pair of devices needs its routes",
    )
    for times, nexts in zip(routes.times, routes.nexts, strict=True):
        require(len(times) == len(nexts) == storages, "each storage needs its routes")
        require(all(time >= 0.0 for time in times), "a route takes no time that can be")
        check_indices(nexts, devices, "device", -1)
    check_rule(
        [prices.size_exponent, prices.distance_exponent], [prices.ancestor_share]
    )
    require(
        1 <= prices.copy_percent <= LARGEST_PERCENT,
        "the percentage of copies is not between 1 and 10**9",
    )
    least = min(bounds.limits_bytes)
    require(least >= -MOST_TOTAL, "a limit is less than -2**60")
    require(bounds.run_limit >= 0, "the limit of runs is negative")


def _check_ops(ops: Ops, storages: int, devices: int) -> None:
    count = len(ops.reads)
    require(all(len(one) == count for one in ops), "the lists of ops differ in length")
    for of_ops in (ops.reads, ops.writes):
        for entries in of_ops:
            check_indices(entries, storages, "storage")
    for costs, workspaces in zip(ops.costs, ops.workspaces, strict=True):
        require(
            len(costs) == len(workspaces) == devices,
            "an op needs one time and one workspace per device",
        )
        require(min(costs) >= -1, "a time is less than -1")
        check_counts(workspaces)
    check_counts(max(cost, 0) for costs in ops.costs for cost in costs)


class _Stuck(Exception):  # noqa: N818 - control flow inside this module
    """The execution cannot go on within the limits."""


class _Execution:
    """One execution; :meth:`run` may be called once."""

    def __init__(
        self,
        base: Sequence[int],
        placement: Sequence[Sequence[int]],
        graph: Graph,
        routes: Routes,
        prices: Prices,
        bounds: Bounds,
        time_limit_s: float | None,
    ) -> None:
        self.base, self.placement = base, placement
        self.ops, self.blocks, self.passes = graph
        ops, blocks = self.ops, self.blocks
        self.routes, self.prices = routes, prices
        self.limits, self.run_limit = bounds
        self.deadline = (
            math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        )
        self.devices = range(len(self.limits))
        self.size, self.home = blocks.sizes, blocks.homes
        self.cheapest = [min((c for c in on if c >= 0), default=0) for on in ops.costs]
        self.live = [[False] * len(self.size) for _ in self.devices]
        self.live_count = [0] * len(self.size)
        self.used = [0 for _ in self.devices]
        self.pins = [[0] * len(self.size) for _ in self.devices]
        self.notes: list[Note] = []
        self.runs = 0
        self.is_done = [False] * len(ops.reads)
        self.now = 0
        # While the caller works, the position at which the pass ends; else -1.
        self.callers_end = -1
        # Per device and storage, the positions of its uses there, the next one last.
        self.uses = self.remaining_uses()
        self.left = [sum(len(on[s]) for on in self.uses) for s in range(len(self.size))]

    def remaining_uses(self) -> list[list[list[int]]]:
        uses = [[list[int]() for _ in self.size] for _ in self.devices]
        for position in reversed(range(len(self.base))):
            item = self.base[position]
            if item >= 0:
                for device in self.placement[item]:
                    for storage in self.ops.reads[item]:
                        uses[device][storage].append(position)
                continue
            is_end = item == END
            passes = self.passes
            for storage in passes.final_outputs if is_end else passes.forward_outputs:
                uses[self.home[storage]][storage].append(position)
        return uses

    # --- the base ----------------------------------------------------------------

    def run(self) -> list[Note]:
        for position, item in enumerate(self.base):
            self.now = position
            if item == BOUNDARY:
                self.pass_boundary()
            elif item == END:
                self.bring_home(self.passes.final_outputs, stays=False)
            else:
                self.run_first(item)
        return self.notes

    def run_first(self, op: int) -> None:
        if time.monotonic() >= self.deadline:
            raise _Stuck
        ops = self.ops
        if ops.is_external[op] and self.callers_end < 0:
            self.prepare_callers_work(op)
        for device in self.placement[op]:
            self.run_op(op, device, depth=0)
            if ops.is_external[op]:
                end = BOUNDARY if ops.is_forward[op] else END
                self.callers_end = self.base.index(end)
        self.is_done[op] = True
        for device in self.placement[op]:
            for storage in ops.reads[op]:
                self.uses[device][storage].pop()
                self.left[storage] -= 1
        for storage in ops.reads[op]:
            self.drop_if_idle(storage)
        for storage in ops.writes[op]:
            self.drop_if_idle(storage)

    def prepare_callers_work(self, op: int) -> None:
        """Do what cannot be done once the caller's work has begun: run and copy."""
        is_forward, passes = self.ops.is_forward[op], self.passes
        outputs = passes.forward_outputs if is_forward else passes.final_outputs
        self.bring_home([s for s in outputs if not self.is_callers(s)], stays=True)
        if is_forward:
            self.make_room_for_tangents()

    def is_callers(self, storage: int) -> bool:
        """Return whether the caller's own work writes a storage."""
        op = self.blocks.producers[storage]
        return op >= 0 and self.ops.is_external[op]

    def bring_home(self, storages: Sequence[int], *, stays: bool) -> None:
        for storage in storages:
            self.ensure(storage, self.home[storage], depth=0)
            self.pins[self.home[storage]][storage] += 1
        if not stays:
            for storage in storages:
                self.pins[self.home[storage]][storage] -= 1

    def pass_boundary(self) -> None:
        outputs, tangents = self.passes.forward_outputs, self.passes.tangents
        self.bring_home(outputs, stays=True)
        self.make_room_for_tangents()
        for device in self.devices:
            self.pins[device] = [0] * len(self.size)
        for storage in tangents:
            self.add(storage, self.home[storage])
        self.notes.append((BOUNDARY, BOUNDARY, BOUNDARY))
        self.callers_end = -1
        for storage in self.passes.held_outputs:
            self.pins[self.home[storage]][storage] += 1
        for storage in outputs:
            self.uses[self.home[storage]][storage].pop()
            self.left[storage] -= 1
        for storage in outputs:
            self.drop_if_idle(storage)
        for storage in tangents:
            self.drop_if_idle(storage)

    def make_room_for_tangents(self) -> None:
        needed = [0 for _ in self.devices]
        for storage in self.passes.tangents:
            needed[self.home[storage]] += self.size[storage]
        for device, size in enumerate(needed):
            if size:
                self.make_room(device, size)

    # --- what is where -----------------------------------------------------------

    def lives_at(self, storage: int, device: int) -> bool:
        """Return whether a storage is resident on a device."""
        return self.blocks.is_resident[storage] and self.home[storage] == device

    def is_at(self, storage: int, device: int) -> bool:
        return self.live[device][storage] or self.lives_at(storage, device)

    def holder_count(self, storage: int) -> int:
        """Return on how many devices a storage is."""
        home = self.home[storage]
        is_only_home = self.blocks.is_resident[storage] and not self.live[home][storage]
        return self.live_count[storage] + is_only_home

    def add(self, storage: int, device: int) -> None:
        if not self.live[device][storage]:
            self.live[device][storage] = True
            self.live_count[storage] += 1
            self.used[device] += self.size[storage]

    def drop(self, storage: int, device: int) -> None:
        if self.live[device][storage]:
            self.live[device][storage] = False
            self.live_count[storage] -= 1
            self.used[device] -= self.size[storage]

    def drop_if_idle(self, storage: int) -> None:
        """Forget a storage without a use left, and idle copies of one that is kept."""
        for device in self.devices:
            if not self.live[device][storage] or self.pins[device][storage]:
                continue
            is_spare = not self.uses[device][storage] and self.holder_count(storage) > 1
            if is_spare or not self.left[storage]:
                self.drop(storage, device)

    # --- bringing things in ------------------------------------------------------

    def route_ns(self, storage: int, source: int, target: int) -> float:
        return self.routes.times[source * len(self.devices) + target][storage]

    def next_on_route(self, storage: int, source: int, target: int) -> int:
        return self.routes.nexts[source * len(self.devices) + target][storage]

    def copy_time(self, storage: int, target: int) -> tuple[float, int]:
        """Return the least time to copy from a holder, and that holder."""
        best, holder = math.inf, -1
        for source in self.devices:
            if self.is_at(storage, source):
                route = self.route_ns(storage, source, target)
                if holder < 0 or route < best:
                    best, holder = route, source
        return best, holder

    def ensure(self, storage: int, device: int, depth: int) -> None:
        """Make a storage live on a device.

        Raises
        ------
        _Stuck
            If it cannot be brought or made.
        """
        if self.is_at(storage, device):
            return
        if depth > _DEPTH_LIMIT or self.callers_end >= 0:
            raise _Stuck
        copy_ns, source = self.copy_time(storage, device)
        op = self.blocks.producers[storage]
        may_rerun = op >= 0 and self.may_rerun(op)
        if may_rerun and self.cost_here(op, device) < copy_ns:
            self.run_op(op, device, depth + 1)
            return
        if math.isinf(copy_ns):
            if not may_rerun:
                raise _Stuck
            where = self.rerun_device(op, storage, device)
            self.run_op(op, where, depth + 1)
            if where == device:
                return
            source = where
        self.copy(storage, source, device)

    def copy(self, storage: int, source: int, target: int) -> None:
        here, hops = source, 0
        is_pinned = not self.lives_at(storage, source)
        if is_pinned:
            self.pins[source][storage] += 1
        while here != target:
            there = self.next_on_route(storage, here, target)
            hops += 1
            if there < 0 or hops > len(self.devices):
                raise _Stuck
            if not self.is_at(storage, there):
                self.make_room(there, self.size[storage])
                self.notes.append((storage, here, there))
                self.add(storage, there)
            is_idle = not self.uses[here][storage] and not self.pins[here][storage]
            if here != source and is_idle:
                self.drop(storage, here)
            here = there
        if is_pinned:
            self.pins[source][storage] -= 1

    def may_rerun(self, op: int) -> bool:
        return self.is_done[op] and self.ops.is_recomputable[op]

    def cost_here(self, op: int, device: int) -> float:
        """Return the time of a run on a device that holds all inputs, else infinity."""
        cost = self.ops.costs[op][device]
        if cost < 0 or not all(self.is_at(s, device) for s in self.ops.reads[op]):
            return math.inf
        return cost

    def rerun_price(self, op: int, storage: int, where: int, device: int) -> float:
        """Return the time to run an op somewhere for its output on ``device``."""
        cost = self.ops.costs[op][where]
        if cost < 0:
            return math.inf
        total = float(cost)
        for read in self.ops.reads[op]:
            if not self.is_at(read, where):
                total += min(self.copy_time(read, where)[0], self.remake_time(read))
        if where != device:
            total += self.route_ns(storage, where, device)
        return total

    def rerun_device(self, op: int, storage: int, device: int) -> int:
        """Return where to run an op whose output is wanted on ``device``."""
        best, least = -1, math.inf
        for where in self.devices:
            price = self.rerun_price(op, storage, where, device)
            if price < least:
                best, least = where, price
        if best < 0:
            raise _Stuck
        return best

    def run_op(self, op: int, device: int, depth: int) -> None:
        """Run an op, after bringing in what it reads."""
        self.runs += 1
        if self.ops.costs[op][device] < 0 or self.runs > self.run_limit:
            raise _Stuck
        reads, writes, pins = self.ops.reads[op], self.ops.writes[op], self.pins[device]
        for storage in reads:
            self.ensure(storage, device, depth)
            pins[storage] += 1
        added = self.ops.workspaces[op][device] + sum(self.size[s] for s in writes)
        self.make_room(device, added)
        self.notes.append((op, device, -1))
        for storage in writes:
            self.add(storage, device)
        for storage in reads:
            pins[storage] -= 1
        if depth:
            for storage in reads:
                self.drop_if_idle(storage)

    # --- eviction ----------------------------------------------------------------

    def make_room(self, device: int, size_bytes: int) -> None:
        """Evict until so many bytes are free.

        Raises
        ------
        _Stuck
            If everything that may go has gone and it is not enough.
        """
        excess = self.used[device] + size_bytes - self.limits[device]
        if excess <= 0:
            return
        pins, live = self.pins[device], self.live[device]
        victims = sorted(
            (self.score(storage, device), storage)
            for storage in range(len(self.size))
            if live[storage] and not pins[storage] and self.size[storage]
        )
        for score, storage in victims:
            if excess <= 0 or math.isinf(score):
                break
            if self.evict(storage, device):
                excess -= self.size[storage]
        if excess > 0:
            raise _Stuck

    def score(self, storage: int, device: int) -> float:
        price, _ = self.price(storage, device)
        next_use = len(self.base)
        for on in self.uses:
            if on[storage]:
                next_use = min(next_use, on[storage][-1])
        if next_use <= self.callers_end:
            return math.inf
        distance = float(max(1, next_use - self.now))
        weight = float(self.size[storage]) ** self.prices.size_exponent
        return max(price, _LEAST_PRICE_NS) / (
            weight * distance**self.prices.distance_exponent
        )

    def price(self, storage: int, device: int) -> tuple[float, int]:
        """Return the time to have a storage back, and where to copy it, or -1."""
        if not self.left[storage] or self.holder_count(storage) > 1:
            if not self.uses[device][storage]:
                return 0.0, -1
            back = math.inf
            for other in self.devices:
                if other != device and self.is_at(storage, other):
                    back = min(back, self.route_ns(storage, other, device))
            return back * self.prices.copy_percent / 100, -1
        following = self.next_user(storage)
        best, goal = self.remake_time(storage), -1
        for other in self.devices:
            is_full = self.used[other] + self.size[storage] > self.limits[other]
            if other == device or is_full or self.callers_end >= 0:
                continue
            if self.next_on_route(storage, device, other) != other:
                continue
            # Nothing where it has to go anyway.
            there_ns = 0.0
            if other != following:
                there_ns = self.route_ns(storage, device, other)
                there_ns += self.route_ns(storage, other, following)
                if following != device:
                    there_ns -= self.route_ns(storage, device, following)
            there_ns = there_ns * self.prices.copy_percent / 100
            if there_ns < best:
                best, goal = there_ns, other
        return best, goal

    def next_user(self, storage: int) -> int:
        """Return the device that uses a storage next, or -1."""
        following, position = -1, len(self.base)
        for other, on in enumerate(self.uses):
            if on[storage] and on[storage][-1] < position:
                following, position = other, on[storage][-1]
        return following

    def remake_time(self, storage: int) -> float:
        """Return about how long it takes to compute a storage again."""
        op = self.blocks.producers[storage]
        if op < 0 or not self.may_rerun(op):
            return math.inf
        total = float(self.cheapest[op])
        pending = [op]
        for current in pending:
            for read in self.ops.reads[current]:
                if self.blocks.is_resident[read] or self.live_count[read]:
                    continue
                ancestor = self.blocks.producers[read]
                if ancestor in pending:
                    continue
                if ancestor < 0 or not self.may_rerun(ancestor):
                    return math.inf
                share = self.prices.ancestor_share if self.left[read] else 1.0
                total += share * self.cheapest[ancestor]
                pending.append(ancestor)
            if len(pending) > _CLOSURE_LIMIT:
                break
        return total

    def evict(self, storage: int, device: int) -> bool:
        """Evict a storage; return whether it could be, after what went before."""
        price, goal = self.price(storage, device)
        if math.isinf(price):
            return False
        if goal >= 0:
            self.notes.append((storage, device, goal))
            self.add(storage, goal)
        self.drop(storage, device)
        return True
