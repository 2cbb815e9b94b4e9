"""From a schedule to the order in which its passes are issued, with the fewest waits.

Ops of a device of the CPU run in the host's queue, those of another device in a queue
of its own, and a copy in the queue of its link. A device's queue is also that in whose
order its allocator works. Each instruction then waits for those accesses that it
conflicts with and that nothing orders before it yet: an event is recorded where the
link's copy ends or, of a device's queue, right before the wait. A wait that others at
the same instruction imply is left out, so that none can be spared.

What crosses from one pass to the other is handed over to the caller and taken back from
it, in the queue of its device: at the end of a pass no copy is under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from remat.core.errors import ExecutionError
from remat.core.graph import TrainingGraph
from remat.core.issue_order import (
    HOST,
    Allocate,
    Block,
    Free,
    HandOver,
    Instruction,
    IssueOrder,
    Queue,
    Record,
    Run,
    Wait,
)
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step

Place = tuple[int, int]
"""A storage and the device on which it is live."""

LEAST_BYTES_BESIDE = 1 << 20
"""Copies within the CPU's memory of fewer bytes are made by the host itself.

To hand one to another thread and to wait for it takes about 20 us, as long as to copy
half of this.
"""

Overwritten = Callable[[int, frozenset[int]], int | None]
"""Step, and storages of this pass that die with it -> the one it writes over."""


def issue_orders(
    graph: TrainingGraph,
    schedule: Schedule,
    is_on_host: Sequence[bool],
    *,
    overwritten: Overwritten = lambda _step, _dying: None,
    has_value: Callable[[int], bool] = lambda _storage: True,
    least_bytes_beside: int = LEAST_BYTES_BESIDE,
) -> tuple[IssueOrder, IssueOrder]:
    """Return the issue orders of forward and backward.

    Parameters
    ----------
    graph, schedule
        A valid schedule of the graph.
    is_on_host
        Per device, whether its ops run in the host's queue and its memory is the CPU's.
    overwritten
        Which argument an op writes over, if any.
    has_value
        Whether anything ever uses a storage; others are not copied.
    least_bytes_beside
        Copies within the CPU's memory of fewer bytes run in the host's queue.

    Raises
    ------
    ExecutionError
        If the schedule uses a value that is not live.

    Notes
    -----
    Time O((steps + reads) x queues).
    """
    boundary = schedule.steps.index(Boundary())
    homes = {
        (index, storage.home)
        for index, storage in enumerate(graph.storages)
        if storage.is_resident
    }
    forward = _Issuer(
        graph, schedule.steps, is_on_host, overwritten, has_value, least_bytes_beside
    )
    forward.issue(range(boundary), homes)
    tangents = {(s, graph.storages[s].home) for s in graph.tangents}
    backward = _Issuer(
        graph, schedule.steps, is_on_host, overwritten, has_value, least_bytes_beside
    )
    backward.issue(
        range(boundary + 1, len(schedule.steps)), tangents | forward.block_at.keys()
    )
    return forward.order(), backward.order()


def dying_at_once(steps: Sequence[Step], position: int, device: int) -> frozenset[int]:
    """Return the storages discarded on ``device`` right after a step."""
    dying: set[int] = set()
    for step in steps[position + 1 :]:
        if not isinstance(step, Discard):
            break
        if step.device == device:
            dying.add(step.storage)
    return frozenset(dying)


@dataclass(slots=True)
class _Event:
    """An event, and what has been done when it happens: a number of uses per queue."""

    number: int
    clock: tuple[int, ...]


@dataclass
class _Issuer:
    graph: TrainingGraph
    steps: Sequence[Step]
    is_on_host: Sequence[bool]
    overwritten: Overwritten
    has_value: Callable[[int], bool]
    least_bytes_beside: int
    blocks: list[Block] = field(default_factory=list[Block])
    block_at: dict[Place, int] = field(default_factory=dict[Place, int])
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    # Queue -> its number.
    queues: dict[Queue, int] = field(default_factory=dict[Queue, int])
    # Per queue: how many uses of each queue came before what is issued to it next.
    clocks: list[list[int]] = field(default_factory=list[list[int]])
    # Per block: the last change, and since then the last read of each queue, as queue
    # and number of the use.
    changed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    read: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    # How many blocks there were before the pass.
    given_count: int = 0
    event_count: int = 0
    waited_for: set[int] = field(default_factory=set[int])
    # The event after each copy of a link, and the last one of a device's queue.
    copied: dict[tuple[int, int], _Event] = field(
        default_factory=dict[tuple[int, int], _Event]
    )
    latest: dict[int, _Event] = field(default_factory=dict[int, _Event])

    def issue(self, positions: range, given: set[Place]) -> None:
        """Issue the steps at some positions; ``given`` are the places live before."""
        self.open_queues(positions)
        for storage, device in sorted(given):
            self.new_block(storage, device)
        self.hand_over(positions.start)
        for position in positions:
            step = self.steps[position]
            match step:
                case Compute():
                    self.compute(position, step)
                case Copy() if self.has_value(step.storage):
                    self.copy(position, step)
                case Copy():
                    # Live by the schedule; the step has no such value.
                    self.new_block(step.storage, step.target)
                case Discard():
                    block = self.block_at.pop((step.storage, step.device), None)
                    if block is not None:
                        self.free(position, block)
                case Boundary():
                    msg = "the schedule has a second boundary"
                    raise ExecutionError(msg)
        self.hand_over(positions.stop)

    def order(self) -> IssueOrder:
        """Return what was issued, without the events that nobody waits for."""
        return IssueOrder(
            queues=tuple(self.queues),
            blocks=tuple(self.blocks),
            instructions=tuple(
                one
                for one in self.instructions
                if not isinstance(one, Record) or one.event in self.waited_for
            ),
        )

    def open_queues(self, positions: range) -> None:
        self.queues[()] = HOST
        for device, is_on_host in enumerate(self.is_on_host):
            if not is_on_host:
                self.queues.setdefault((device,), len(self.queues))
        for position in positions:
            step = self.steps[position]
            if isinstance(step, Copy) and self.is_beside(step):
                link = (step.source, step.target)
                self.queues.setdefault(link, len(self.queues))
        self.clocks = [[0] * len(self.queues) for _ in self.queues]

    def is_beside(self, step: Copy) -> bool:
        """Whether a copy runs beside the host."""
        size_bytes = self.graph.storages[step.storage].size_bytes
        return (
            not (self.is_on_host[step.source] and self.is_on_host[step.target])
            or size_bytes >= self.least_bytes_beside
        )

    def queue_of(self, device: int) -> int:
        """Return the queue of a device's ops, and of its allocator."""
        return HOST if self.is_on_host[device] else self.queues[device,]

    def new_block(self, storage: int, device: int) -> int:
        block = len(self.blocks)
        self.blocks.append(Block(storage, device, self.queue_of(device)))
        self.block_at[storage, device] = block
        self.changed.append((HOST, 0))
        self.read.append({})
        return block

    def find(self, storage: int, device: int) -> int:
        block = self.block_at.get((storage, device))
        if block is None:
            name = self.graph.storages[storage].name
            where = f" on device {device}" if device else ""
            msg = f"storage {storage} {name!r} is used while it is not live{where}"
            raise ExecutionError(msg)
        return block

    def compute(self, position: int, step: Compute) -> None:
        op = self.graph.ops[step.op]
        queue = self.queue_of(step.device)
        reads = {storage: self.find(storage, step.device) for storage in op.reads}
        old = [self.block_at.get((storage, step.device)) for storage in op.writes]
        own = frozenset(
            storage
            for storage in dying_at_once(self.steps, position, step.device)
            if self.is_own(self.block_at.get((storage, step.device)))
        )
        over = self.overwritten(position, own)
        made = [self.allocate(position, s, step.device) for s in op.writes]
        writes = made if over is None else [reads[over], *made]
        run = Run(queue, position, tuple(reads.values()), tuple(writes))
        self.use(queue, run, run.reads, run.writes)
        for block in old:
            if block is not None:
                self.free(position, block)

    def is_own(self, block: int | None) -> bool:
        """Whether this pass made what is in a block."""
        return block is not None and block >= self.given_count

    def copy(self, position: int, step: Copy) -> None:
        source = self.find(step.storage, step.source)
        queue = self.queues[step.source, step.target] if self.is_beside(step) else HOST
        target = self.allocate(position, step.storage, step.target)
        run = Run(queue, position, (source,), (target,))
        self.use(queue, run, run.reads, run.writes)
        if queue != HOST:
            number = self.clocks[queue][queue]
            self.copied[queue, number] = self.record(queue, position)

    def allocate(self, position: int, storage: int, device: int) -> int:
        block = self.new_block(storage, device)
        self.use(self.blocks[block].queue, Allocate(block, position), (), (block,))
        return block

    def free(self, position: int, block: int) -> None:
        self.use(self.blocks[block].queue, Free(block, position), (), (block,))

    def hand_over(self, position: int) -> None:
        """Give the caller what is live, in the queues of its devices."""
        live: dict[int, list[int]] = {}
        for block in self.block_at.values():
            live.setdefault(self.blocks[block].queue, []).append(block)
        for queue, blocks in sorted(live.items()):
            self.use(queue, HandOver(queue, position, tuple(blocks)), (), blocks)
        self.given_count = len(self.blocks)

    def use(
        self,
        queue: int,
        instruction: Allocate | Run | Free | HandOver,
        reads: Sequence[int],
        changes: Sequence[int],
    ) -> None:
        """Issue an instruction after waits for what it has to come after."""
        self.await_uses(queue, instruction.step, reads, changes)
        self.instructions.append(instruction)
        self.clocks[queue][queue] += 1
        number = self.clocks[queue][queue]
        for block in reads:
            self.read[block][queue] = number
        for block in changes:
            self.changed[block] = queue, number
            self.read[block].clear()

    def await_uses(
        self, queue: int, step: int, reads: Sequence[int], changes: Sequence[int]
    ) -> None:
        clock = self.begin(queue)
        uses = [self.changed[block] for block in (*reads, *changes)]
        for block in changes:
            uses += self.read[block].items()
        missing: dict[int, int] = {}
        for other, number in uses:
            if number > clock[other]:
                missing[other] = max(number, missing.get(other, 0))
        events = {
            (other, number): self.event_after(other, number, step)
            for other, number in missing.items()
        }
        for use in list(events):
            other, number = use
            rest = [event for key, event in events.items() if key != use]
            if any(event.clock[other] >= number for event in rest):
                del events[use]
        for event in events.values():
            self.waited_for.add(event.number)
            self.instructions.append(Wait(event.number, queue, step))
            clock[:] = map(max, clock, event.clock)

    def begin(self, queue: int) -> list[int]:
        """Return a queue's clock as something is issued to it: after the host's."""
        clock = self.clocks[queue]
        if queue != HOST:
            clock[:] = map(max, clock, self.clocks[HOST])
        return clock

    def event_after(self, queue: int, number: int, step: int) -> _Event:
        """Return an event after a use in another queue than the host's."""
        known = self.copied.get((queue, number))
        if known is not None:
            return known
        latest = self.latest.get(queue)
        if latest is None or latest.clock[queue] < self.clocks[queue][queue]:
            latest = self.latest[queue] = self.record(queue, step)
        return latest

    def record(self, queue: int, step: int) -> _Event:
        event = _Event(self.event_count, tuple(self.begin(queue)))
        self.event_count += 1
        self.instructions.append(Record(event.number, queue, step))
        return event
