"""Let copies overlap with computation, without more memory than the budgets allow.

Solvers put copies next to uses and discards right after copies, and count times one
after the other. Where copies wait (:attr:`remat.core.platform.Platform.copies_wait`),
what is copied out and discarded at once makes the device wait, and so does what is
copied in right before it is read. Here discards of what is being copied go later, and
copies go earlier, as far as there is room; what comes back before it had to go is not
copied at all. Serial time never grows.
"""

from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.core.problem import Limits
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.core.simulator import simulate

_Place = tuple[int, int]


def overlapping(
    graph: TrainingGraph,
    platform: Platform,
    schedule: Schedule,
    limits: Limits | None = None,
) -> Schedule:
    """Return a schedule of the same ops that takes no longer when copies overlap.

    Parameters
    ----------
    graph, platform
        What is trained, and where; a device without a budget has room for everything.
    schedule
        A valid schedule.
    limits
        When to stop; the best by then is returned.

    Returns
    -------
    Schedule
        Valid, with at most the serial and the overlapped time of ``schedule``; the same
        schedule if nothing is gained.

    Notes
    -----
    Time O(steps x the computes that a copy overlaps with). A heuristic: in the order of
    the list, each discard as late and each copy as early as there is room.
    """
    best, trace = schedule, simulate(graph, platform, schedule)
    for change in (_discard_late, _drop_unused, _copy_early):
        if limits is not None and limits.is_over:
            break
        changed = Schedule(tuple(change(graph, platform, best.steps)))
        found = simulate(graph, platform, changed)
        before = (trace.overlapped_ns, trace.serial_ns)
        after = (found.overlapped_ns, found.serial_ns)
        if found.is_valid and all(a <= b for a, b in zip(after, before, strict=True)):
            best, trace = changed, found
    return best


def _made(graph: TrainingGraph, step: Step) -> list[_Place]:
    """Return the storages that a step makes live, and where."""
    match step:
        case Compute(op, device):
            return [(storage, device) for storage in graph.ops[op].writes]
        case Copy(storage, _, target):
            return [(storage, target)]
        case Boundary():
            return [(s, graph.storages[s].home) for s in graph.tangents]
        case Discard():
            return []


@dataclass
class _LateDiscards:
    """Goes through a schedule and holds back discards of what is being copied."""

    graph: TrainingGraph
    platform: Platform
    steps: list[Step] = field(default_factory=list[Step])
    live: set[_Place] = field(default_factory=set[_Place])
    copied: set[_Place] = field(default_factory=set[_Place])
    used: list[int] = field(default_factory=list[int])
    waiting: list[deque[int]] = field(default_factory=list[deque[int]])
    # How often something is still copied to a place.
    coming: Counter[_Place] = field(default_factory=Counter[_Place])

    def __post_init__(self) -> None:
        devices = range(len(self.platform.devices))
        self.used = [self.graph.resident_bytes(device) for device in devices]
        self.waiting = [deque() for _ in devices]

    def take(self, step: Step) -> None:
        if isinstance(step, Discard):
            place = step.storage, step.device
            if place in self.copied:
                self.waiting[step.device].append(step.storage)
            else:
                self.discard(place)
            return
        if isinstance(step, Copy) and self.is_unneeded(step):
            return
        if isinstance(step, Compute):
            for storage in self.graph.ops[step.op].writes:
                if storage in self.waiting[step.device]:
                    self.release(storage, step.device)
        if isinstance(step, Boundary):
            # What forward does not hand over to backward ends with it.
            self.release_all(kept=self.coming)
        made = _made(self.graph, step)
        for device, size_bytes in self.bytes_during(step, made).items():
            self.make_room(device, size_bytes)
        self.steps.append(step)
        for place in made:
            if place not in self.live:
                self.live.add(place)
                self.used[place[1]] += self.graph.storages[place[0]].size_bytes

    def bytes_during(self, step: Step, made: Sequence[_Place]) -> Counter[int]:
        """Return what a step adds while it runs, per device."""
        added = Counter[int]()
        for storage, device in made:
            added[device] += self.graph.storages[storage].size_bytes
        if isinstance(step, Compute):
            kind = self.graph.kind_index(self.platform.devices[step.device].kind)
            added[step.device] += self.graph.ops[step.op].workspace_bytes[kind]
        return added

    def is_unneeded(self, copy: Copy) -> bool:
        """Note a copy, and return whether what it brings never left."""
        target = copy.storage, copy.target
        self.coming[target] -= 1
        if not self.coming[target]:
            del self.coming[target]
        if copy.storage in self.waiting[copy.target]:
            self.waiting[copy.target].remove(copy.storage)
            return True
        self.copied |= {target, (copy.storage, copy.source)}
        return False

    def make_room(self, device: int, size_bytes: int) -> None:
        limit = self.platform.devices[device].budget_bytes
        waiting = self.waiting[device]
        while limit is not None and waiting and self.used[device] + size_bytes > limit:
            self.release(waiting[0], device)

    def release(self, storage: int, device: int) -> None:
        self.waiting[device].remove(storage)
        self.discard((storage, device))

    def discard(self, place: _Place) -> None:
        self.steps.append(Discard(*place))
        self.live.discard(place)
        self.copied.discard(place)
        self.used[place[1]] -= self.graph.storages[place[0]].size_bytes

    def release_all(self, kept: Container[_Place] = ()) -> None:
        for device, waiting in enumerate(self.waiting):
            for storage in list(waiting):
                if (storage, device) not in kept:
                    self.release(storage, device)

    def end(self) -> list[Step]:
        self.release_all()
        return self.steps


def _discard_late(
    graph: TrainingGraph, platform: Platform, steps: tuple[Step, ...]
) -> list[Step]:
    walk = _LateDiscards(graph, platform)
    copies = [step for step in steps if isinstance(step, Copy)]
    walk.coming = Counter((copy.storage, copy.target) for copy in copies)
    for step in steps:
        walk.take(step)
    return walk.end()


def _copy_early(
    graph: TrainingGraph, platform: Platform, steps: tuple[Step, ...]
) -> list[Step]:
    """Move each copy before computes that take as long as it does, if there is room."""
    timelines = simulate(graph, platform, Schedule(steps)).timeline_bytes
    used = [list(timeline) for timeline in timelines]
    result = list(steps)
    for position, step in enumerate(steps):
        if isinstance(step, Copy):
            start = _earliest(graph, platform, result, used, position, step)
            _move(graph, result, used, position, start, step)
    return result


def _earliest(
    graph: TrainingGraph,
    platform: Platform,
    steps: list[Step],
    used: list[list[int]],
    position: int,
    copy: Copy,
) -> int:
    """Return the position to which a copy moves."""
    link = platform.link(copy.source, copy.target)
    size_bytes = graph.storages[copy.storage].size_bytes
    limit = platform.devices[copy.target].budget_bytes
    needed_ns = 0 if link is None else link.copy_ns(size_bytes)
    hidden_ns, start = 0, position
    while start > 0 and hidden_ns < needed_ns:
        before = steps[start - 1]
        is_full = (
            limit is not None and used[copy.target][start - 1] + size_bytes > limit
        )
        if is_full or _must_precede(graph, before, copy):
            break
        if isinstance(before, Compute):
            kind = graph.kind_index(platform.devices[before.device].kind)
            hidden_ns += graph.ops[before.op].cost_ns[kind] or 0
        start -= 1
    return start


def _must_precede(graph: TrainingGraph, step: Step, copy: Copy) -> bool:
    """Whether a step has to stay before a copy."""
    match step:
        case Boundary():
            return True
        case Compute(op, device):
            made = copy.storage in graph.ops[op].writes
            return graph.ops[op].is_external or (
                made and device in {copy.source, copy.target}
            )
        case Copy(storage, source, target):
            # A link keeps its order, and what comes over two links comes in turn.
            is_same = (source, target) == (copy.source, copy.target)
            return is_same or storage == copy.storage
        case Discard(storage, device):
            return storage == copy.storage and device in {copy.source, copy.target}


def _move(
    graph: TrainingGraph,
    steps: list[Step],
    used: list[list[int]],
    position: int,
    start: int,
    copy: Copy,
) -> None:
    """Move a copy to ``start``, with the bytes on its target from there on."""
    if start == position:
        return
    size_bytes = graph.storages[copy.storage].size_bytes
    steps.insert(start, steps.pop(position))
    for timeline in used:
        timeline.pop(position)
    for passed in range(start, position):
        used[copy.target][passed] += size_bytes
    for timeline in used:
        # What is live before a step is no more than what the step finds.
        timeline.insert(start, timeline[start])


def _drop_unused(
    graph: TrainingGraph, _platform: Platform, steps: tuple[Step, ...]
) -> list[Step]:
    """Leave out copies that nothing reads, with their discards."""
    needed = {(s, graph.storages[s].home) for s in graph.final_outputs}
    discards: dict[_Place, int] = {}
    dropped: set[int] = set()
    for position in range(len(steps) - 1, -1, -1):
        step = steps[position]
        match step:
            case Discard(storage, device):
                discards[storage, device] = position
                needed.discard((storage, device))
            case Copy(storage, source, target):
                if (storage, target) in needed:
                    needed.discard((storage, target))
                    needed.add((storage, source))
                else:
                    dropped.add(position)
                    if (storage, target) in discards:
                        dropped.add(discards.pop((storage, target)))
            case Compute(op, device):
                needed -= {(s, device) for s in graph.ops[op].writes}
                needed |= {(s, device) for s in graph.ops[op].reads}
            case Boundary():
                needed -= {(s, graph.storages[s].home) for s in graph.tangents}
                needed |= {(s, graph.storages[s].home) for s in graph.forward_outputs}
    return [step for position, step in enumerate(steps) if position not in dropped]
