"""In which order a pass of a step is issued, and to which queues.

One thread, the *host*, issues everything. What it issues to the host's own queue is
done at once; what it issues to another queue (a device that works by itself, or a link
between two devices) is done later, after what was issued to that queue before. Between
queues events alone make an order: an event is recorded in one queue and waited for in
another.

The runtime's graphs are made from this, instruction by instruction, and
:func:`remat.core.races.check_no_race` proves of it that no two queues meet in one
block.
"""

from dataclasses import dataclass
from typing import assert_never

HOST = 0
"""The queue of the thread that issues."""

Queue = tuple[int, ...]
"""Empty for the host's, a device for its own, source and target for that of a link."""


@dataclass(frozen=True, slots=True)
class Block:
    """The memory that a storage has on a device from an allocation until it is freed.

    Parameters
    ----------
    storage, device
        What lies in it, and where.
    queue
        The queue in whose order the allocator hands it out and takes it back. It asks
        no other queue: what is freed there may be handed out there again at once.
    """

    storage: int
    device: int
    queue: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Take a block, in its allocator's queue, for the step at position ``step``."""

    block: int
    step: int


@dataclass(frozen=True, slots=True)
class Run:
    """Compute or copy: the step at position ``step``, with the blocks that it touches.

    An operator that writes over its argument writes to a block that it reads as well.
    """

    queue: int
    step: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Give a block back, in its allocator's queue."""

    block: int
    step: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let the caller, who works in a queue before and after the pass, have blocks.

    ``step`` is the first position of the pass, or the one after its last.
    """

    queue: int
    step: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Let an event happen when a queue has done what was issued to it until now."""

    event: int
    queue: int
    step: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Let what is issued to a queue from now on come after an event."""

    event: int
    queue: int
    step: int


Instruction = Allocate | Run | Free | HandOver | Record | Wait


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """The instructions of one pass, in the order in which the host issues them.

    Parameters
    ----------
    queues
        The host's first.
    blocks
        What instructions name by position.
    instructions
        An event is recorded once, before it is waited for.
    """

    queues: tuple[Queue, ...]
    blocks: tuple[Block, ...]
    instructions: tuple[Instruction, ...]

    def queue_of(self, instruction: Instruction) -> int:
        """Return the queue to which an instruction is issued."""
        if isinstance(instruction, Allocate | Free):
            return self.blocks[instruction.block].queue
        return instruction.queue

    def __repr__(self) -> str:
        waits = sum(isinstance(one, Wait) for one in self.instructions)
        return (
            f"<IssueOrder: {len(self.instructions)} instructions in "
            f"{len(self.queues)} queues, {len(self.blocks)} blocks, {waits} waits>"
        )


def accesses(instruction: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks that an instruction reads, and those that it changes.

    A block that is taken or given back is changed: whatever its bytes are used for
    before or after is not to be seen.
    """
    match instruction:
        case Allocate() | Free():
            return (), (instruction.block,)
        case Run():
            return instruction.reads, instruction.writes
        case HandOver():
            return (), instruction.blocks
        case Record() | Wait():
            return (), ()
        case _:
            assert_never(instruction)
