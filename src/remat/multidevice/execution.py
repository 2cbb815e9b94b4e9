"""Execute a graph on several devices, each within its budget, and note the steps.

The ops run in graph order on the devices that a placement names. What an op reads and
is not on its device is copied from where that takes least time, or computed again.
Where memory is short, storages are evicted in the order of

    time to bring it back / (its bytes ^ a x its distance to the next use ^ b);

the time to bring a storage back is 0 if another device holds it and will use it, that
of a copy if another device holds it, and else the less of running its op again (with a
share of the ancestors that are gone) and of two copies, to a device with room and back.
So keep, recompute, offload and place are one decision.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from remat.graph import Phase
from remat.liveness import BOUNDARY
from remat.multidevice.instance import DeviceInstance
from remat.problem import Limits
from remat.schedule import Boundary, Compute, Copy, Step

END = -2
"""Marks the end, where final outputs are used."""

Placement = Sequence[tuple[int, ...]]
"""Per op, the devices on which it runs at its place in the graph's order."""

_CLOSURE_LIMIT = 16
_DEPTH_LIMIT = 250
_LEAST_PRICE_NS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRule:
    """How victims are chosen.

    Parameters
    ----------
    size_exponent, distance_exponent
        Exponents of the bytes and of the distance to the next use, at least 0.
    ancestor_share
        Share of the cost of ancestors that are not live, 0 to 1.
    copy_percent
        What a copy counts for, as a percentage of its time: above 100 prefers to
        recompute, below 100 to offload.
    limit_percent
        Percentage of each budget's room that is used.
    reserve_bytes
        Bytes per device that are left free beyond that; none if empty.
    """

    size_exponent: float = 1.0
    distance_exponent: float = 1.0
    ancestor_share: float = 0.5
    copy_percent: int = 100
    limit_percent: int = 100
    reserve_bytes: tuple[int, ...] = ()


class _Stuck(Exception):  # noqa: N818 - control flow inside this module
    """The execution cannot go on within the limits."""


class _Routes:
    """The quickest way over the links between each pair of devices, per size class."""

    def __init__(self, instance: DeviceInstance) -> None:
        self.instance = instance
        self.is_direct = len(instance.copy_ns) == len(instance.devices) * (
            len(instance.devices) - 1
        )
        self.known: dict[tuple[int, int, int], tuple[float, tuple[int, ...]]] = {}

    def best(
        self, storage: int, source: int, target: int
    ) -> tuple[float, tuple[int, ...]]:
        """Return time and devices on the way, infinity if there is none."""
        if self.is_direct:
            return float(self.instance.copy_ns[source, target][storage]), (target,)
        key = (storage, source, target)
        if key not in self.known:
            self.known[key] = self.search(storage, source, target)
        return self.known[key]

    def search(
        self, storage: int, source: int, target: int
    ) -> tuple[float, tuple[int, ...]]:
        queue: list[tuple[float, int, tuple[int, ...]]] = [(0.0, source, ())]
        seen: set[int] = set()
        while queue:
            time, here, path = heappop(queue)
            if here == target:
                return time, path
            if here in seen:
                continue
            seen.add(here)
            for (a, b), times in self.instance.copy_ns.items():
                if a == here and b not in seen:
                    heappush(queue, (time + times[storage], b, (*path, b)))
        return math.inf, ()


class _Execution:
    """One execution; :meth:`run` may be called once."""

    def __init__(
        self,
        instance: DeviceInstance,
        placement: Placement,
        rule: ExecutionRule,
        *,
        run_limit: int,
        limits: Limits,
    ) -> None:
        self.instance, self.graph = instance, instance.graph
        self.placement, self.rule = placement, rule
        self.limits = limits
        self.run_limit = run_limit
        self.routes = _Routes(instance)
        self.size = instance.sizes_bytes
        self.producers = self.graph.producers
        self.devices = tuple(instance.devices)
        self.cheapest = [
            min((c for c in costs if c is not None), default=0)
            for costs in instance.cost_ns
        ]
        self.home = [s.home for s in self.graph.storages]
        self.is_resident = [s.is_resident for s in self.graph.storages]
        self.live = [dict[int, None]() for _ in instance.devices]
        self.used = [0 for _ in instance.devices]
        self.limit = [
            math.inf if b is None else b * rule.limit_percent // 100
            for b in instance.budgets_bytes
        ]
        for device, reserve in enumerate(rule.reserve_bytes):
            self.limit[device] -= reserve
        self.pins = [Counter[int]() for _ in instance.devices]
        self.steps: list[Step] = []
        self.runs = 0
        self.done: set[int] = set()
        self.now = 0
        self.base = self.base_items()
        # Per device and storage, the positions of its uses there, the next one last.
        self.uses = self.remaining_uses()
        self.left = [sum(len(on[s]) for on in self.uses) for s in range(len(self.size))]

    def base_items(self) -> list[int]:
        items: list[int] = []
        is_backward = False
        for op in self.instance.required:
            if not is_backward and self.graph.ops[op].phase is Phase.BACKWARD:
                items.append(BOUNDARY)
                is_backward = True
            items.append(op)
        return [*items, END] if is_backward else [*items, BOUNDARY, END]

    def remaining_uses(self) -> list[list[list[int]]]:
        uses = [[list[int]() for _ in self.size] for _ in self.devices]
        for position in reversed(range(len(self.base))):
            item = self.base[position]
            if item in {BOUNDARY, END}:
                graph = self.graph
                leaving = (
                    graph.forward_outputs if item == BOUNDARY else graph.final_outputs
                )
                for storage in leaving:
                    uses[self.home[storage]][storage].append(position)
            else:
                for device in self.placement[item]:
                    for storage in self.graph.ops[item].reads:
                        uses[device][storage].append(position)
        return uses

    # --- the base ----------------------------------------------------------------

    def run(self) -> list[Step] | None:
        """Return the steps, without discards, or ``None`` if memory does not do."""
        try:
            for position, item in enumerate(self.base):
                self.now = position
                if item == BOUNDARY:
                    self.pass_boundary()
                elif item == END:
                    self.bring_home(self.graph.final_outputs)
                else:
                    self.run_first(item)
        except (_Stuck, RecursionError):
            return None
        return self.steps

    def run_first(self, op: int) -> None:
        if self.limits.is_over:
            raise _Stuck
        is_external = self.graph.ops[op].is_external
        if is_external:
            # Nothing is copied once the caller's work has begun.
            forward = self.graph.ops[op].phase is Phase.FORWARD
            outputs = (
                self.graph.forward_outputs if forward else self.graph.final_outputs
            )
            self.bring_home([s for s in outputs if not self.is_callers(s)], stays=True)
        for device in self.placement[op]:
            self.run_op(op, device, depth=0)
        self.done.add(op)
        for device in self.placement[op]:
            for storage in self.graph.ops[op].reads:
                self.uses[device][storage].pop()
                self.left[storage] -= 1
        for storage in (*self.graph.ops[op].reads, *self.graph.ops[op].writes):
            self.drop_if_idle(storage)

    def is_callers(self, storage: int) -> bool:
        """Return whether the caller's own work writes a storage."""
        op = self.producers[storage]
        return op is not None and self.graph.ops[op].is_external

    def bring_home(self, storages: Sequence[int], *, stays: bool = False) -> None:
        for storage in storages:
            self.ensure(storage, self.home[storage], depth=0)
            self.pins[self.home[storage]][storage] += 1
        if not stays:
            for storage in storages:
                self.pins[self.home[storage]][storage] -= 1

    def pass_boundary(self) -> None:
        outputs = self.graph.forward_outputs
        self.bring_home(outputs, stays=True)
        needed = Counter[int]()
        for storage in self.graph.tangents:
            needed[self.home[storage]] += self.size[storage]
        for device, size in needed.items():
            self.make_room(device, size)
        for pins in self.pins:
            pins.clear()
        for storage in self.graph.tangents:
            self.add(storage, self.home[storage])
        self.steps.append(Boundary())
        for storage in self.graph.held_outputs:
            self.pins[self.home[storage]][storage] += 1
        for storage in outputs:
            self.uses[self.home[storage]][storage].pop()
            self.left[storage] -= 1
        for storage in (*outputs, *self.graph.tangents):
            self.drop_if_idle(storage)

    # --- what is where -----------------------------------------------------------

    def is_at(self, storage: int, device: int) -> bool:
        return storage in self.live[device] or (
            self.is_resident[storage] and self.home[storage] == device
        )

    def holders(self, storage: int) -> list[int]:
        return [d for d in self.devices if self.is_at(storage, d)]

    def add(self, storage: int, device: int) -> None:
        if storage not in self.live[device]:
            self.live[device][storage] = None
            self.used[device] += self.size[storage]

    def drop(self, storage: int, device: int) -> None:
        if storage in self.live[device]:
            del self.live[device][storage]
            self.used[device] -= self.size[storage]

    def drop_if_idle(self, storage: int) -> None:
        """Forget a storage without a use left, and idle copies of one that is kept."""
        for device in self.devices:
            if storage not in self.live[device] or self.pins[device][storage]:
                continue
            is_spare = not self.uses[device][storage] and len(self.holders(storage)) > 1
            if is_spare or not self.left[storage]:
                self.drop(storage, device)

    # --- bringing things in ------------------------------------------------------

    def copy_time(self, storage: int, target: int) -> tuple[float, int]:
        """Return the least time to copy from a holder, and that holder."""
        return min(
            (
                (self.routes.best(storage, source, target)[0], source)
                for source in self.holders(storage)
            ),
            default=(math.inf, -1),
        )

    def ensure(self, storage: int, device: int, depth: int) -> None:
        """Make a storage live on a device.

        Raises
        ------
        _Stuck
            If it cannot be brought or made.
        """
        if self.is_at(storage, device):
            return
        if depth > _DEPTH_LIMIT:
            raise _Stuck
        time, source = self.copy_time(storage, device)
        op = self.producers[storage]
        if op is not None and self.may_rerun(op) and self.cost_here(op, device) < time:
            self.run_op(op, device, depth + 1)
            return
        if math.isinf(time):
            if op is None or not self.may_rerun(op):
                raise _Stuck
            where = self.rerun_device(op, storage, device)
            self.run_op(op, where, depth + 1)
            if where == device:
                return
            source = where
        self.copy(storage, source, device)

    def copy(self, storage: int, source: int, target: int) -> None:
        here = source
        pinned = not (self.is_resident[storage] and self.home[storage] == source)
        if pinned:
            self.pins[source][storage] += 1
        for there in self.routes.best(storage, source, target)[1]:
            if not self.is_at(storage, there):
                self.make_room(there, self.size[storage])
                self.steps.append(Copy(storage, here, there))
                self.add(storage, there)
            is_idle = not self.uses[here][storage] and not self.pins[here][storage]
            if here != source and is_idle:
                self.drop(storage, here)
            here = there
        if pinned:
            self.pins[source][storage] -= 1

    def may_rerun(self, op: int) -> bool:
        return op in self.done and self.graph.ops[op].is_recomputable

    def cost_here(self, op: int, device: int) -> float:
        """Return the time of a run on a device that holds all inputs, else infinity."""
        cost = self.instance.cost_ns[op][device]
        if cost is None or not all(
            self.is_at(s, device) for s in self.graph.ops[op].reads
        ):
            return math.inf
        return cost

    def rerun_device(self, op: int, storage: int, device: int) -> int:
        """Return where to run an op whose output is wanted on ``device``."""

        def price(where: int) -> float:
            cost = self.instance.cost_ns[op][where]
            if cost is None:
                return math.inf
            total = float(cost)
            for read in self.graph.ops[op].reads:
                if not self.is_at(read, where):
                    total += min(self.copy_time(read, where)[0], self.remake_time(read))
            if where != device:
                total += self.routes.best(storage, where, device)[0]
            return total

        best = min(self.devices, key=price)
        if math.isinf(price(best)):
            raise _Stuck
        return best

    def run_op(self, op: int, device: int, depth: int) -> None:
        """Run an op, after bringing in what it reads."""
        self.runs += 1
        cost = self.instance.cost_ns[op][device]
        if cost is None or self.runs > self.run_limit:
            raise _Stuck
        step = self.graph.ops[op]
        for storage in step.reads:
            self.ensure(storage, device, depth)
            self.pins[device][storage] += 1
        added = self.instance.workspace_bytes[op][device] + sum(
            self.size[s] for s in step.writes
        )
        self.make_room(device, added)
        self.steps.append(Compute(op, device))
        for storage in step.writes:
            self.add(storage, device)
        for storage in step.reads:
            self.pins[device][storage] -= 1
        if depth:
            for storage in step.reads:
                self.drop_if_idle(storage)

    # --- eviction ----------------------------------------------------------------

    def make_room(self, device: int, size_bytes: int) -> None:
        """Evict until so many bytes are free.

        Raises
        ------
        _Stuck
            If everything that may go has gone and it is not enough.
        """
        excess = self.used[device] + size_bytes - self.limit[device]
        if excess <= 0:
            return
        pins = self.pins[device]
        victims = [
            (self.score(storage, device), storage)
            for storage in self.live[device]
            if not pins[storage] and self.size[storage]
        ]
        victims.sort()
        for score, storage in victims:
            if excess <= 0 or math.isinf(score):
                break
            if self.evict(storage, device):
                excess -= self.size[storage]
        if excess > 0:
            raise _Stuck

    def score(self, storage: int, device: int) -> float:
        price, _ = self.price(storage, device)
        next_uses = [on[storage][-1] for on in self.uses if on[storage]]
        distance = max(1, min(next_uses, default=len(self.base)) - self.now)
        return max(price, _LEAST_PRICE_NS) / (
            self.size[storage] ** self.rule.size_exponent
            * distance**self.rule.distance_exponent
        )

    def price(self, storage: int, device: int) -> tuple[float, int]:
        """Return the time to have a storage back, and where to copy it, or -1."""
        if not self.left[storage] or len(self.holders(storage)) > 1:
            if not self.uses[device][storage]:
                return 0.0, -1
            others = [d for d in self.holders(storage) if d != device]
            back = min(
                (self.routes.best(storage, d, device)[0] for d in others),
                default=0.0,
            )
            return back * self.rule.copy_percent / 100, -1
        best, goal = self.remake_time(storage), -1
        following = min(
            (on[storage][-1], d) for d, on in enumerate(self.uses) if on[storage]
        )[1]
        for other in self.devices:
            if (
                other == device
                or self.used[other] + self.size[storage] > self.limit[other]
            ):
                continue
            time, path = self.routes.best(storage, device, other)
            if len(path) != 1:
                continue
            if other != following:
                time += self.routes.best(storage, other, following)[0]
                if following != device:
                    time -= self.routes.best(storage, device, following)[0]
            else:
                # It has to go there anyway.
                time = 0.0
            time *= self.rule.copy_percent / 100
            if time < best:
                best, goal = time, other
        return best, goal

    def remake_time(self, storage: int) -> float:
        """Return about how long it takes to compute a storage again."""
        op = self.producers[storage]
        if op is None or not self.may_rerun(op):
            return math.inf
        total = float(self.cheapest[op])
        seen = {op}
        pending = [op]
        for current in pending:
            for read in self.graph.ops[current].reads:
                if self.is_resident[read] or any(read in live for live in self.live):
                    continue
                ancestor = self.producers[read]
                if ancestor in seen:
                    continue
                if ancestor is None or not self.may_rerun(ancestor):
                    return math.inf
                share = self.rule.ancestor_share if self.left[read] else 1.0
                total += share * self.cheapest[ancestor]
                seen.add(ancestor)
                pending.append(ancestor)
            if len(seen) > _CLOSURE_LIMIT:
                break
        return total

    def evict(self, storage: int, device: int) -> bool:
        """Evict a storage; return whether it could be, after what went before."""
        price, goal = self.price(storage, device)
        if math.isinf(price):
            return False
        if goal >= 0:
            self.steps.append(Copy(storage, device, goal))
            self.add(storage, goal)
        self.drop(storage, device)
        return True


def execute(
    instance: DeviceInstance,
    placement: Placement,
    rule: ExecutionRule | None = None,
    *,
    runs_per_op: int = 12,
    limits: Limits | None = None,
) -> list[Step] | None:
    """Return steps that keep to every device's budget, one after the other.

    Parameters
    ----------
    instance
        What is trained where.
    placement
        Where each op runs for the first time; at least one device each.
    rule
        How victims are chosen.
    runs_per_op
        Give up once the runs exceed this multiple of the ops.
    limits
        When to give up.

    Returns
    -------
    list[Step] | None
        Runs, copies and the boundary, for :func:`remat.liveness.insert_discards`;
        ``None`` if the rule does not get by with the memory.

    Notes
    -----
    Time O(runs x live storages).
    """
    return _Execution(
        instance,
        placement,
        rule or ExecutionRule(),
        run_limit=runs_per_op * len(instance.graph.ops),
        limits=limits or Limits(),
    ).run()
