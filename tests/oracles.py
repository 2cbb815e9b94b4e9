"""Second opinions, written from the definitions and as slowly as they read.

:func:`replay` says what a schedule does, as :mod:`remat.core.simulator` does, but keeps
no state from step to step: whatever it needs it finds by looking back over the whole
prefix of the schedule. :func:`brute_force_best` and :func:`brute_force_smallest_budget`
search all schedules of one device.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from remat.core.graph import Op, Phase, TrainingGraph
from remat.core.platform import Platform
from remat.core.rules import Rule
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step

FOREVER = 1 << 80


def is_effect(op: Op) -> bool:
    """Whether running the op matters beyond what it writes."""
    return op.is_ordered or not op.writes


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What :func:`replay` found, as in :class:`remat.core.simulator.Trace`."""

    peak_bytes: tuple[int, ...]
    serial_ns: int
    overlapped_ns: int
    timeline_bytes: tuple[tuple[int, ...], ...]
    live_after: tuple[frozenset[int], ...]
    recomputed_ns: int
    rule: Rule | None
    step: int | None


@dataclass(frozen=True)
class History:
    """A schedule, seen from the end of one of its prefixes."""

    graph: TrainingGraph
    platform: Platform
    steps: tuple[Step, ...]

    def before(self, index: int) -> "History":
        return History(self.graph, self.platform, self.steps[:index])

    # --- what is where -----------------------------------------------------------

    def stays(self, storage: int, device: int) -> bool:
        block = self.graph.storages[storage]
        return block.is_resident and block.home == device

    def fills(self, step: Step, storage: int, device: int) -> bool:
        match step:
            case Compute(op, where):
                return where == device and storage in self.graph.ops[op].writes
            case Copy(copied, _, target):
                return (copied, target) == (storage, device)
            case Boundary():
                home = self.graph.storages[storage].home
                return storage in self.graph.tangents and home == device
            case Discard():
                return False

    def reads(self, step: Step, storage: int, device: int) -> bool:
        match step:
            case Compute(op, where):
                return where == device and storage in self.graph.ops[op].reads
            case Copy(copied, source, _):
                return (copied, source) == (storage, device)
            case _:
                return False

    def filler(self, storage: int, device: int) -> int | None:
        """Index of the step whose bytes are live at the end of the prefix."""
        for index in reversed(range(len(self.steps))):
            if self.steps[index] == Discard(storage, device):
                return None
            if self.fills(self.steps[index], storage, device):
                return index
        return None

    def is_live(self, storage: int, device: int) -> bool:
        stays = self.stays(storage, device)
        return stays or self.filler(storage, device) is not None

    def live_bytes(self, device: int) -> int:
        return sum(
            block.size_bytes
            for storage, block in enumerate(self.graph.storages)
            if self.is_live(storage, device)
        )

    def added_bytes(self, step: Step, device: int) -> int:
        added = sum(
            block.size_bytes
            for storage, block in enumerate(self.graph.storages)
            if self.fills(step, storage, device)
        )
        if isinstance(step, Compute) and step.device == device:
            op = self.graph.ops[step.op]
            added += op.workspace_bytes[self.kind(device)]
        return added

    # --- what is allowed ---------------------------------------------------------

    def kind(self, device: int) -> int:
        return self.graph.device_kinds.index(self.platform.devices[device].kind)

    def has_device(self, device: int) -> bool:
        return device in range(len(self.platform.devices))

    def has_storage(self, storage: int) -> bool:
        return storage in range(len(self.graph.storages))

    def runs(self) -> list[int]:
        return [step.op for step in self.steps if isinstance(step, Compute)]

    def is_callers_turn(self) -> bool:
        """Whether an external op has run since the pass began."""
        backward = Boundary() in self.steps
        start = self.steps.index(Boundary()) if backward else 0
        return any(
            isinstance(step, Compute) and self.graph.ops[step.op].is_external
            for step in self.steps[start:]
        )

    def is_in_callers_hands(self, storage: int, device: int) -> bool:
        """Whether the caller has what is live there now and asks for it at the end."""
        graph, home = self.graph, self.graph.storages[storage].home
        was_handed_over = storage in (*graph.forward_outputs, *graph.tangents)
        is_asked_for = storage in graph.final_outputs
        return all(
            (Boundary() in self.steps, home == device, was_handed_over, is_asked_for)
        )

    def first_runs_of_ordered_ops(self) -> list[int]:
        return [
            op for op in dict.fromkeys(self.runs()) if self.graph.ops[op].is_ordered
        ]

    def broken_rules(self, step: Step) -> Iterator[Rule]:
        """Rules that ``step`` breaks here; the first is the one to name."""
        match step:
            case Compute():
                return self.broken_by_compute(step)
            case Discard():
                return self.broken_by_discard(step)
            case Copy():
                return self.broken_by_copy(step)
            case Boundary():
                return self.broken_by_boundary()

    def broken_by_compute(self, step: Compute) -> Iterator[Rule]:
        if not self.has_device(step.device) or step.op not in range(
            len(self.graph.ops)
        ):
            yield Rule.UNKNOWN_INDEX
            return
        op = self.graph.ops[step.op]
        if op.cost_ns[self.kind(step.device)] is None:
            yield Rule.CANNOT_RUN
        if op.phase is Phase.BACKWARD and Boundary() not in self.steps:
            yield Rule.PHASE
        if not op.is_external and self.is_callers_turn():
            yield Rule.AFTER_CALLER
        if step.op in self.runs() and not op.is_recomputable:
            yield Rule.RECOMPUTED
        ordered = [*self.first_runs_of_ordered_ops(), *([step.op] * op.is_ordered)]
        ordered = list(dict.fromkeys(ordered))
        if ordered != sorted(ordered):
            yield Rule.ORDER
        if not all(self.is_live(storage, step.device) for storage in op.reads):
            yield Rule.READ_NOT_LIVE

    def broken_by_discard(self, step: Discard) -> Iterator[Rule]:
        if not self.has_device(step.device) or not self.has_storage(step.storage):
            yield Rule.UNKNOWN_INDEX
            return
        if self.stays(step.storage, step.device):
            yield Rule.DISCARD_RESIDENT
        if not self.is_live(step.storage, step.device):
            yield Rule.DISCARD_NOT_LIVE
        if self.is_in_callers_hands(step.storage, step.device):
            yield Rule.DISCARD_HELD

    def broken_by_copy(self, step: Copy) -> Iterator[Rule]:
        ends = (step.source, step.target)
        if not all(map(self.has_device, ends)) or not self.has_storage(step.storage):
            yield Rule.UNKNOWN_INDEX
            return
        if ends not in {(k.source, k.target) for k in self.platform.links}:
            yield Rule.NO_LINK
        if self.is_callers_turn():
            yield Rule.AFTER_CALLER
        if not self.is_live(step.storage, step.source):
            yield Rule.COPY_NOT_LIVE
        if self.is_live(step.storage, step.target):
            yield Rule.COPY_ALREADY_LIVE

    def lacks(self, storages: Sequence[int]) -> bool:
        homes = [(s, self.graph.storages[s].home) for s in storages]
        return not all(self.is_live(storage, home) for storage, home in homes)

    def broken_by_boundary(self) -> Iterator[Rule]:
        if Boundary() in self.steps:
            yield Rule.SECOND_BOUNDARY
        if self.lacks(self.graph.forward_outputs):
            yield Rule.OUTPUT_MISSING
        if any(self.graph.ops[i].phase is Phase.FORWARD for i in self.idle_effects()):
            yield Rule.EFFECT_MISSING

    def idle_effects(self) -> list[int]:
        run = self.runs()
        effects = [i for i, op in enumerate(self.graph.ops) if is_effect(op)]
        return [index for index in effects if index not in run]

    def broken_by_ending(self) -> Iterator[Rule]:
        if Boundary() not in self.steps:
            yield Rule.NO_BOUNDARY
        if self.lacks(self.graph.final_outputs):
            yield Rule.FINAL_MISSING
        if self.idle_effects():
            yield Rule.EFFECT_MISSING

    # --- when ---------------------------------------------------------------------

    def duration_ns(self, step: Step) -> int:
        match step:
            case Compute(op, device):
                cost = self.graph.ops[op].cost_ns[self.kind(device)]
                return FOREVER if cost is None else cost
            case Copy(storage, source, target):
                (link,) = (
                    k
                    for k in self.platform.links
                    if (k.source, k.target) == (source, target)
                )
                size = self.graph.storages[storage].size_bytes
                transfer, rest = divmod(size * 10**9, link.bytes_per_s)
                return link.latency_ns + transfer + (rest > 0)
            case _:
                return 0


def queue_of(step: Step) -> tuple[int, ...] | None:
    match step:
        case Compute(_, device):
            return (device,)
        case Copy(_, source, target):
            return (source, target)
        case _:
            return None


@dataclass(frozen=True)
class Clock:
    """When each step of a schedule begins and ends in overlapped execution."""

    history: History
    begin_ns: list[int]
    end_ns: list[int]
    # Where copies wait: the step that ends the life of a block, its device, and until
    # when the device waits for the copies of the block.
    holds: list[tuple[int, int, int]]

    def free_ns(self, index: int, device: int) -> int:
        """When the device has done what was issued to it before step ``index``."""
        held = [ns for at, d, ns in self.holds if at < index and d == device]
        return max([self.last_end_ns(index, lambda q: q == (device,)), *held])

    def hold(self, index: int) -> None:
        """Note until when a step that ends the life of blocks holds up its device."""
        step, before = self.history.steps[index], self.history.before(index)
        if not self.history.platform.copies_wait or not isinstance(
            step, Compute | Discard
        ):
            return
        for storage in range(len(self.history.graph.storages)):
            ends = step == Discard(storage, step.device) or self.history.fills(
                step, storage, step.device
            )
            born = before.filler(storage, step.device)
            if ends and born is not None:
                until = block_end_ns(self, born, storage, step.device)
                self.holds.append((index, step.device, until))

    def arrival_ns(self, index: int, storage: int, device: int) -> int:
        """When what is live just before step ``index`` may be read."""
        filler = self.history.before(index).filler(storage, device)
        return 0 if filler is None else self.end_ns[filler]

    def last_end_ns(self, index: int, queues: Callable[[tuple[int, ...]], bool]) -> int:
        ends = [0]
        for earlier, step in enumerate(self.history.steps[:index]):
            queue = queue_of(step)
            if queue is not None and queues(queue):
                ends.append(self.end_ns[earlier])
        return max(ends)


def clock(history: History) -> Clock:
    times = Clock(history, [], [], [])
    graph = history.graph
    devices = range(len(history.platform.devices))
    for index, step in enumerate(history.steps):
        waits = [0]
        match step:
            case Compute(op, device):
                reads = [(storage, device) for storage in graph.ops[op].reads]
                waits.append(times.free_ns(index, device))
            case Copy(storage, source, target):
                reads = [(storage, source)]
                pair = (source, target)
                waits.append(times.last_end_ns(index, lambda q, p=pair: q == p))
                if history.platform.copies_wait:
                    waits += [times.free_ns(index, device) for device in pair]
            case Boundary():
                reads = [(s, graph.storages[s].home) for s in graph.forward_outputs]
                waits += [times.free_ns(index, device) for device in devices]
            case Discard():
                reads = []
        waits += [times.arrival_ns(index, *read) for read in reads]
        times.begin_ns.append(max(waits))
        times.end_ns.append(max(waits) + history.duration_ns(step))
        times.hold(index)
    return times


def overlapped_peak(times: Clock, device: int) -> int:
    """Most bytes on a device over the overlapped timeline, the O(n^3) way."""
    return max(load for _, load, _ in overlapped_loads(times, device))


def overlapped_loads(times: Clock, device: int) -> list[tuple[int, int, int]]:
    """Per moment at which bytes are taken: it, all bytes, the last step to take."""
    history = times.history
    graph, steps = history.graph, history.steps
    blocks: list[tuple[int, int, int, int]] = []
    for index, step in enumerate(steps):
        if isinstance(step, Compute) and step.device == device:
            size = graph.ops[step.op].workspace_bytes[history.kind(device)]
            blocks.append((times.begin_ns[index], times.end_ns[index], size, index))
        for storage, block in enumerate(graph.storages):
            if history.fills(step, storage, device):
                death = block_end_ns(times, index, storage, device)
                blocks.append((times.begin_ns[index], death, block.size_bytes, index))
    resident = History(graph, history.platform, ()).live_bytes(device)
    moments = sorted({begin for begin, end, size, _ in blocks if size and end > begin})
    found = [(0, resident, -1)]
    for moment in moments:
        there = [size for begin, end, size, _ in blocks if begin <= moment < end]
        takers = [
            index
            for begin, end, size, index in blocks
            if begin == moment < end and size
        ]
        found.append((moment, resident + sum(there), max(takers)))
    return found


def block_end_ns(times: Clock, born: int, storage: int, device: int) -> int:
    """When the bytes that step ``born`` filled are free again."""
    history = times.history
    busy = [times.end_ns[born]]
    # Where a step that ends lives is being timed, those after it are not yet.
    for index in range(born + 1, len(times.end_ns)):
        step = history.steps[index]
        if step == Discard(storage, device):
            busy.append(times.free_ns(index, device))
            return max(busy)
        if history.fills(step, storage, device):
            busy.append(times.end_ns[index])
            return max(busy)
        if history.reads(step, storage, device):
            busy.append(times.end_ns[index])
    return FOREVER


def replay(graph: TrainingGraph, platform: Platform, schedule: Schedule) -> Replayed:
    """Return what ``schedule`` does on ``platform``, up to the first broken rule."""
    devices = range(len(platform.devices))
    budgets = [
        FOREVER if d.budget_bytes is None else d.budget_bytes for d in platform.devices
    ]
    whole = History(graph, platform, schedule.steps)
    rule, at = None, len(schedule.steps)
    for index, step in enumerate(schedule.steps):
        rule = next(whole.before(index).broken_rules(step), None)
        if rule is not None:
            at = index
            break
    done = whole.before(at)
    if rule is None:
        rule = next(done.broken_by_ending(), None)
    timeline = [
        tuple(
            done.before(index).live_bytes(device)
            + done.before(index).added_bytes(step, device)
            for index, step in enumerate(done.steps)
        )
        for device in devices
    ]
    times = clock(done)
    peaks = [
        max(
            History(graph, platform, ()).live_bytes(device),
            overlapped_peak(times, device),
            *timeline[device],
        )
        for device in devices
    ]
    over = [
        index
        for index in range(len(done.steps))
        if any(timeline[device][index] > budgets[device] for device in devices)
    ]
    if over:
        rule, at = Rule.OVER_BUDGET, over[0]
    elif rule is None and any(peaks[device] > budgets[device] for device in devices):
        rule = Rule.OVER_BUDGET
        full = next(d for d in devices if peaks[d] > budgets[d])
        loads = overlapped_loads(times, full)
        at = next(index for _, load, index in loads if load > budgets[full])
    durations = [done.duration_ns(step) for step in done.steps]
    return Replayed(
        peak_bytes=tuple(peaks),
        serial_ns=sum(durations),
        overlapped_ns=max([0, *times.end_ns]),
        timeline_bytes=tuple(timeline),
        live_after=tuple(
            frozenset(
                storage
                for storage in range(len(graph.storages))
                if done.filler(storage, device) is not None
            )
            for device in devices
        ),
        recomputed_ns=sum(
            durations[index]
            for index, step in enumerate(done.steps)
            if isinstance(step, Compute) and step.op in done.before(index).runs()
        ),
        rule=rule,
        step=None if rule is None else at,
    )


# --- all schedules of one device -----------------------------------------------------


@dataclass(frozen=True)
class State:
    """All that decides what may still happen: live storages, and runs that matter."""

    live: frozenset[int]
    run: frozenset[int]
    is_backward: bool


@dataclass(frozen=True)
class Search:
    graph: TrainingGraph

    @property
    def resident_bytes(self) -> int:
        return sum(s.size_bytes for s in self.graph.storages if s.is_resident)

    def size(self, storages: Sequence[int] | frozenset[int]) -> int:
        return sum(self.graph.storages[s].size_bytes for s in storages)

    def has(self, state: State, storages: Sequence[int]) -> bool:
        return all(
            s in state.live or self.graph.storages[s].is_resident for s in storages
        )

    def is_goal(self, state: State) -> bool:
        return (
            state.is_backward
            and self.has(state, self.graph.final_outputs)
            and all(
                index in state.run
                for index, op in enumerate(self.graph.ops)
                if op.is_ordered or not op.writes
            )
        )

    def moves(self, state: State) -> Iterator[tuple[Step, int, int, State]]:
        """Yield each step that is allowed, its bytes, its time and where it leads."""
        graph = self.graph
        held = self.resident_bytes + self.size(state.live)
        for storage in state.live:
            lighter = State(state.live - {storage}, state.run, state.is_backward)
            yield Discard(storage), held, 0, lighter
        is_forward_done = self.has(state, graph.forward_outputs) and all(
            index in state.run
            for index, op in enumerate(graph.ops)
            if op.phase is Phase.FORWARD and is_effect(op)
        )
        if not state.is_backward and is_forward_done:
            live = state.live | set(graph.tangents)
            appearing = self.size(graph.tangents)
            yield Boundary(), held + appearing, 0, State(live, state.run, True)
        phase = Phase.BACKWARD if state.is_backward else Phase.FORWARD
        is_callers_turn = any(
            graph.ops[r].is_external and graph.ops[r].phase is phase for r in state.run
        )
        for index, op in enumerate(graph.ops):
            cost = op.cost_ns[0]
            if is_callers_turn and not op.is_external:
                continue
            runs_too_early = (op.phase is Phase.BACKWARD and not state.is_backward) or (
                op.is_ordered
                and index not in state.run
                and any(graph.ops[r].is_ordered and r > index for r in state.run)
            )
            runs_too_often = index in state.run and not op.is_recomputable
            if cost is None or runs_too_early or runs_too_often:
                continue
            if self.has(state, op.reads):
                during = held + self.size(op.writes) + op.workspace_bytes[0]
                matters = op.is_ordered or not op.writes or not op.is_recomputable
                run = state.run | {index} if matters else state.run
                after = State(state.live | set(op.writes), run, state.is_backward)
                yield Compute(index), during, cost, after

    def best(
        self,
        weigh: Callable[[int, int, int], int],
        start: int,
        budget_bytes: int,
    ) -> tuple[int, Schedule] | None:
        """Return the least weight of a schedule within the budget, and the schedule.

        ``weigh(weight so far, bytes during the step, its time)`` must never fall.
        """
        root = State(frozenset(), frozenset(), False)
        ticket = count()
        queue = [(start, next(ticket), root)]
        came_from: dict[State, tuple[State, Step] | None] = {root: None}
        least = {root: start}
        while queue:
            weight, _, state = heapq.heappop(queue)
            if weight > least[state]:
                continue
            if self.is_goal(state):
                return weight, _path(came_from, state)
            for step, size, time, after in self.moves(state):
                heavier = weigh(weight, size, time)
                if size <= budget_bytes and heavier < least.get(after, FOREVER):
                    least[after] = heavier
                    came_from[after] = (state, step)
                    heapq.heappush(queue, (heavier, next(ticket), after))
        return None


def _path(came_from: dict[State, tuple[State, Step] | None], state: State) -> Schedule:
    steps: list[Step] = []
    while (origin := came_from[state]) is not None:
        state, step = origin
        steps.append(step)
    return Schedule(tuple(reversed(steps)))


def brute_force_schedule(graph: TrainingGraph, budget_bytes: int) -> Schedule | None:
    """Return a cheapest of all single-device schedules within the budget, or ``None``.

    For graphs of up to 7 ops or so: exponential in storages and in ops with a memory.
    """
    found = Search(graph).best(lambda weight, _, time: weight + time, 0, budget_bytes)
    return None if found is None else found[1]


def brute_force_best(graph: TrainingGraph, budget_bytes: int) -> int | None:
    """Return the least serial time within the budget, or ``None`` if nothing fits."""
    found = Search(graph).best(lambda weight, _, time: weight + time, 0, budget_bytes)
    return None if found is None else found[0]


def brute_force_smallest_budget(graph: TrainingGraph) -> int | None:
    """Return the smallest peak of any single-device schedule.

    ``None`` if there is no valid schedule at all (an op cannot run on kind 0).
    """
    search = Search(graph)
    found = search.best(
        lambda weight, size, _: max(weight, size), search.resident_bytes, FOREVER
    )
    return None if found is None else found[0]
