"""Placements to start from, and small changes of a placement.

Ops that do the same thing (equal costs, equal sizes of what they read and write) form a
*group*: the repeated blocks of a network have their ops in the same groups, so that one
change decides for all blocks at once.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from remat.core.graph import Phase
from remat.search.device_execution import Placement
from remat.search.device_feasibility import runnable_devices
from remat.search.device_instance import DeviceInstance

_CUTS = 5


class Placements:
    """Where the ops of an instance may run, and what belongs together."""

    def __init__(self, instance: DeviceInstance) -> None:
        self.instance = instance
        self.graph = instance.graph
        self.runnable = runnable_devices(instance)
        self.required = instance.required
        self.movable = [op for op in self.required if len(self.runnable[op]) > 1]

    @cached_property
    def computing(self) -> tuple[int, ...]:
        """Devices on which some op may run."""
        return tuple(sorted({d for op in self.required for d in self.runnable[op]}))

    @cached_property
    def groups(self) -> list[list[int]]:
        """Ops that do the same thing, movable ones only."""
        found: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        sizes = self.instance.sizes_bytes
        for op in self.movable:
            step = self.graph.ops[op]
            found[
                step.phase,
                self.instance.cost_ns[op],
                self.instance.workspace_bytes[op],
                tuple(sizes[s] for s in step.reads),
                tuple(sizes[s] for s in step.writes),
            ].append(op)
        return list(found.values())

    @cached_property
    def partner(self) -> list[int | None]:
        """Per backward op, the last forward op whose values it reads, or ``None``."""
        found: list[int | None] = []
        for op in self.graph.ops:
            forward = [
                producer
                for storage in op.reads
                if (producer := self.graph.producers[storage]) is not None
                and producer < self.graph.forward_count
            ]
            is_backward = op.phase is Phase.BACKWARD
            found.append(max(forward, default=None) if is_backward else None)
        return found

    @cached_property
    def neighbours(self) -> list[list[int]]:
        """Per op, the ops that write what it reads or read what it writes."""
        found: list[list[int]] = [[] for _ in self.graph.ops]
        for storage, producer in enumerate(self.graph.producers):
            if producer is None:
                continue
            for consumer in self.graph.consumers[storage]:
                found[producer].append(consumer)
                found[consumer].append(producer)
        return found

    def on(self, devices: Sequence[int]) -> Placement:
        """Return the placement of each op on one device, or the cheapest that works."""
        return [
            (device,) if device in allowed else self.cheapest(op)
            for op, (device, allowed) in enumerate(
                zip(devices, self.runnable, strict=True)
            )
        ]

    def cheapest(self, op: int) -> tuple[int, ...]:
        """Return the device on which a run takes least time."""
        costs = self.instance.cost_ns[op]
        allowed = self.runnable[op]
        return (min(allowed, key=lambda d: costs[d] or 0),) if allowed else (0,)

    def cheapest_everywhere(self) -> Placement:
        """Return the placement of each op where its run takes least time."""
        return [self.cheapest(op) for op in range(len(self.graph.ops))]

    def starts(self) -> Iterator[Placement]:
        """Yield placements: on one device, wherever cheapest, cut in two."""
        count = len(self.graph.ops)
        for device in self.computing:
            yield self.on([device] * count)
        if len(self.computing) < 2:
            return
        yield self.cheapest_everywhere()
        for step in range(1, _CUTS):
            for first in self.computing:
                for second in self.computing:
                    if first != second:
                        yield self.cut(first, second, step / _CUTS)

    def cut(self, first: int, second: int, share: float) -> Placement:
        """Return a placement of the first ``share`` of forward's bytes apart."""
        sizes = self.instance.sizes_bytes
        forward = [op for op in self.required if op < self.graph.forward_count]
        written = [sum(sizes[s] for s in self.graph.ops[op].writes) for op in forward]
        seen, goal = 0, share * sum(written)
        devices = [first] * len(self.graph.ops)
        for op, size in zip(forward, written, strict=True):
            devices[op] = first if seen < goal else second
            seen += size
        for op in range(self.graph.forward_count, len(devices)):
            devices[op] = self._followed(op, devices)
        return self.on(devices)

    def _followed(self, op: int, devices: Sequence[int]) -> int:
        partner = self.partner[op]
        if partner is not None:
            return devices[partner]
        before = [n for n in self.neighbours[op] if n < op]
        return devices[before[-1]] if before else devices[max(op - 1, 0)]

    def changed(self, placement: Placement, rng: random.Random) -> Placement:
        """Return a placement that differs a little, if one may."""
        if not self.movable:
            return placement
        ops = self._chosen(placement, rng)
        device = rng.choice(self.computing)
        found = list(placement)
        for op in ops:
            allowed = self.runnable[op]
            if device in allowed:
                found[op] = (device,)
                is_spread = rng.random() < 0.1 and self.graph.ops[op].is_recomputable
                if is_spread and device not in placement[op]:
                    found[op] = tuple(sorted({*placement[op], device}))
        return found

    def _chosen(self, placement: Placement, rng: random.Random) -> list[int]:
        kind = rng.random()
        seed = rng.choice(self.movable)
        if kind < 0.25:
            borders = [
                op
                for op in self.movable
                if any(placement[n] != placement[op] for n in self.neighbours[op])
            ]
            return [rng.choice(borders)] if borders else [seed]
        if kind < 0.4:
            return [seed]
        if kind < 0.6:
            return rng.choice(self.groups)
        start = self.movable.index(seed)
        length = max(1, int(rng.expovariate(1 / max(2.0, len(self.movable) / 10))))
        run = self.movable[start : start + length]
        if kind < 0.8:
            return run
        chosen = set(run)
        return run + [op for op in self.movable if self.partner[op] in chosen]
