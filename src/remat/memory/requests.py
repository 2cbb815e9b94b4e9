"""The requests that a plan makes of an allocator, over several steps.

What is there before the first step comes first: residents, in the order of the graph.
Then one block or a few may be allocated and all freed again, the *primed* ones: they
leave the allocator free segments for all that follows, where it would else make one for
each large block, which later blocks of other sizes do not fill.

Each ``Compute`` then allocates its outputs in order, then its workspace as one block,
frees the workspace, and frees what a fresh copy replaces; a ``Discard`` frees, the
boundary allocates the tangents, a ``Copy`` allocates on its target. The optimizer's
state is made in the first step, when the optimizer steps for the first time. What a
step leaves (gradients, the loss) is freed when the next one begins, as ``zero_grad``
does by default.

The sizes are the judge's, each rounded up by the allocator by itself. What is not known
is in how many blocks, and in which order, an operator takes its scratch memory.
"""

from dataclasses import dataclass
from itertools import pairwise

from remat.core.allocator import AllocatorSettings
from remat.core.graph import Phase, Role, Storage, TrainingGraph
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule
from remat.memory.caching_allocator import (
    SMALL_SEGMENT_BYTES,
    Request,
    RequestKind,
    replay_requests,
    rules_of,
)

STEPS = 4
"""How many steps are replayed: the first, and three that should be alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequests:
    """The requests of several steps, one after the other.

    Parameters
    ----------
    requests
        In order.
    ends
        How many there are before the first step, and up to the end of each.
    """

    requests: list[Request]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedUse:
    """What a caching allocator makes of a plan's requests.

    Parameters
    ----------
    settings
        How the allocator is set.
    reserved_bytes
        Most bytes reserved at any moment of the steps that were replayed.
    allocated_bytes
        Most bytes in blocks that were handed out during the steps, each rounded up.
    step_reserved_bytes
        Most bytes reserved during each step.
    resident_reserved_bytes
        Bytes reserved before the first step, without what was primed.
    small_reserved_bytes
        Most bytes that the steps reserve in addition for blocks of up to 1 MiB.
    primed_bytes
        The sizes of the blocks that were allocated, and then freed, before the first
        step.
    """

    settings: AllocatorSettings
    reserved_bytes: int
    allocated_bytes: int
    step_reserved_bytes: tuple[int, ...]
    resident_reserved_bytes: int
    small_reserved_bytes: int
    primed_bytes: tuple[int, ...] = ()

    @property
    def is_steady(self) -> bool:
        """Whether the last step reserved no more than the one before it."""
        return len(set(self.step_reserved_bytes[-2:])) == 1


class _Writer:
    """Writes the requests of one device."""

    def __init__(self, graph: TrainingGraph, device: int, kind: str) -> None:
        self.graph = graph
        self.device = device
        self.kind = graph.kind_index(kind)
        self.requests: list[Request] = []
        self.count = 0
        self.live: dict[int, int] = {}
        self.state = [
            size_bytes
            for storage in self._residents()
            if storage.role is Role.OPTIMIZER_STATE
            for size_bytes in _state_blocks(graph, storage, device)
        ]

    def _residents(self) -> list[Storage]:
        return [
            s for s in self.graph.storages if s.is_resident and s.home == self.device
        ]

    def allocate(self, size_bytes: int) -> int | None:
        """Allocate a block; return its number, or ``None`` for no bytes."""
        if not size_bytes:
            return None
        self.count += 1
        self.requests.append(Request(RequestKind.ALLOCATE, self.count, size_bytes))
        return self.count

    def free(self, block: int | None) -> None:
        if block is not None:
            self.requests.append(Request(RequestKind.FREE, block))

    def residents(self) -> None:
        for storage in self._residents():
            if storage.role is not Role.OPTIMIZER_STATE:
                self.allocate(storage.size_bytes)

    def optimizer_state(self) -> None:
        """Allocate the optimizer's state, the first time."""
        for size_bytes in self.state:
            self.allocate(size_bytes)
        self.state = []

    def make(self, storage: int) -> int | None:
        """Make a storage live; return the block that it replaces."""
        replaced = self.live.pop(storage, None)
        block = self.allocate(self.graph.storages[storage].size_bytes)
        if block is not None:
            self.live[storage] = block
        return replaced

    def step(self, schedule: Schedule) -> None:
        for block in self.live.values():
            self.free(block)
        self.live.clear()
        for step in schedule.steps:
            match step:
                case Compute(op, device) if device == self.device:
                    self.compute(op)
                case Discard(storage, device) if device == self.device:
                    self.free(self.live.pop(storage, None))
                case Copy(storage, _, target) if target == self.device:
                    self.make(storage)
                case Boundary():
                    for storage in self.graph.tangents:
                        if self.graph.storages[storage].home == self.device:
                            self.make(storage)
                case _:
                    pass
        self.optimizer_state()

    def compute(self, index: int) -> None:
        op = self.graph.ops[index]
        if op.is_external and op.phase is Phase.BACKWARD:
            self.optimizer_state()
        replaced = [self.make(storage) for storage in op.writes]
        self.free(self.allocate(op.workspace_bytes[self.kind]))
        for block in replaced:
            self.free(block)


def _state_blocks(graph: TrainingGraph, state: Storage, device: int) -> list[int]:
    """Return the blocks of an optimizer's state, which the graph holds as one.

    Optimizers keep tensors of the parameters' sizes, the same number for each. Where
    the bytes say how many these are, that is how they are split, with what is left over
    as a block of its own.
    """
    sizes = [
        storage.size_bytes
        for storage in graph.storages
        if storage.role is Role.PARAMETER
        and storage.is_resident
        and storage.home == device
    ]
    copies, rest = divmod(state.size_bytes, sum(sizes) or state.size_bytes or 1)
    if not sizes or not copies:
        return [state.size_bytes]
    return [*(size for size in sizes for _ in range(copies)), rest]


def step_requests(
    graph: TrainingGraph,
    schedule: Schedule,
    *,
    kind: str | None = None,
    device: int = 0,
    step_count: int = STEPS,
) -> StepRequests:
    """Return what a schedule asks of a device's allocator over several steps.

    Parameters
    ----------
    graph, schedule
        What is run; the schedule is valid.
    kind
        The device's kind; by default the graph's first.
    device
        Whose requests.
    step_count
        How many steps, at least 1.

    Raises
    ------
    InvalidGraphError
        If the graph has no costs for that kind.
    """
    writer = _Writer(graph, device, graph.device_kinds[0] if kind is None else kind)
    writer.residents()
    ends = [len(writer.requests)]
    for _ in range(step_count):
        writer.step(schedule)
        ends.append(len(writer.requests))
    return StepRequests(requests=writer.requests, ends=tuple(ends))


class AllocatorReplay:
    """What an allocator makes of a schedule, whatever is primed.

    Parameters
    ----------
    graph, schedule, kind, device, step_count
        As for :func:`step_requests`.
    settings
        How the allocator is set.

    Raises
    ------
    InvalidGraphError
        As :func:`step_requests`.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        schedule: Schedule,
        settings: AllocatorSettings,
        *,
        kind: str | None = None,
        device: int = 0,
        step_count: int = STEPS,
    ) -> None:
        self.settings = settings
        self._asked = step_requests(
            graph, schedule, kind=kind, device=device, step_count=step_count
        )
        self._rules = rules_of(settings)

    def use(self, primed_bytes: tuple[int, ...] = ()) -> ReservedUse:
        """Return what is reserved where blocks of these sizes are primed."""
        requests, ends = self._asked.requests, self._asked.ends
        start = ends[0]
        primed = [
            Request(RequestKind.ALLOCATE, -number, size_bytes)
            for number, size_bytes in enumerate(primed_bytes, 1)
        ]
        primed += [Request(RequestKind.FREE, request.block) for request in primed]
        requests = [*requests[:start], *primed, *requests[start:]]
        ends = tuple(end + len(primed) for end in ends)
        found = replay_requests(requests, self._rules, 0)
        _, reserved, allocated, _, calls, *_ = found
        return ReservedUse(
            settings=self.settings,
            reserved_bytes=max(reserved, default=0),
            allocated_bytes=max(allocated[ends[0] :], default=0),
            step_reserved_bytes=tuple(
                max(reserved[begin:end], default=0) for begin, end in pairwise(ends)
            ),
            resident_reserved_bytes=reserved[start - 1] if start else 0,
            # Nothing is given back, so what is asked for is all that is reserved.
            small_reserved_bytes=sum(
                size_bytes
                for request, _, _, size_bytes, _ in calls
                if request >= ends[0] and size_bytes <= SMALL_SEGMENT_BYTES
            ),
            primed_bytes=primed_bytes,
        )


def reserved_use(
    graph: TrainingGraph,
    schedule: Schedule,
    settings: AllocatorSettings,
    *,
    kind: str | None = None,
    primed_bytes: tuple[int, ...] = (),
) -> ReservedUse:
    """Return what a schedule makes the caching allocator of device 0 reserve.

    Arguments are those of :class:`AllocatorReplay`. Time O(steps of the schedule x
    steps replayed), without a card and without torch.

    Raises
    ------
    InvalidGraphError
        As :func:`step_requests`.
    """
    return AllocatorReplay(graph, schedule, settings, kind=kind).use(primed_bytes)
