"""Proof that no two queues meet in one block: vector clocks over an issue order.

Two accesses to one block *conflict* unless both read. For each conflicting pair the
second must come after the first whatever the queues' speeds: through the order of one
queue, through an event, or because the host had done the first before it issued the
second. To be taken and to be given back are accesses too, in the queue of the block's
allocator. So a block that lies where another one lay needs no rule of its own: all uses
of the first come before it is given back, that comes before the second is taken, in the
order of one queue, and all uses of the second come after.

Vector clocks are those of Mattern (Virtual Time and Global States of Distributed
Systems, 1989), used on streams as by Eizenberg, Peng, Pigli, Mansky and Devietti
(BARRACUDA, PLDI 2017) on threads of a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from remat.core.errors import RaceError
from remat.core.graph import TrainingGraph
from remat.core.issue_order import (
    HOST,
    Allocate,
    Free,
    HandOver,
    Instruction,
    IssueOrder,
    Record,
    Run,
    Wait,
    accesses,
)

_Point = tuple[int, int]
"""An instruction's position in the order, and its number in its queue, from 1."""


@dataclass(slots=True)
class _Uses:
    """The accesses to a block that a later one may conflict with, by queue."""

    changes: dict[int, _Point] = field(default_factory=dict[int, _Point])
    reads: dict[int, _Point] = field(default_factory=dict[int, _Point])


@dataclass(frozen=True, slots=True)
class Race:
    """Two conflicting accesses to a block in no order.

    Parameters
    ----------
    block
        Position among the blocks of the issue order.
    first, second
        Positions of the instructions, in the order in which they are issued.
    """

    block: int
    first: int
    second: int


def first_race(order: IssueOrder) -> Race | None:
    """Return the first race of an issue order, or ``None``: there is none.

    Notes
    -----
    Time O((instructions + accesses) x queues). An event that is not recorded before it
    is waited for holds nothing up, as on CUDA.
    """
    count = len(order.queues)
    clocks = [[0] * count for _ in range(count)]
    events: dict[int, list[int]] = {}
    uses = [_Uses() for _ in order.blocks]
    for position, instruction in enumerate(order.instructions):
        queue = order.queue_of(instruction)
        clock = clocks[queue]
        if queue != HOST:
            # Nothing begins before it is issued.
            _join(clock, clocks[HOST])
        match instruction:
            case Record():
                events[instruction.event] = list(clock)
                continue
            case Wait():
                _join(clock, events.get(instruction.event, ()))
                continue
            case _:
                pass
        reads, changes = accesses(instruction)
        for block in reads:
            first = _unordered(uses[block].changes, clock)
            if first is not None:
                return Race(block, first, position)
        for block in changes:
            for earlier in (uses[block].changes, uses[block].reads):
                first = _unordered(earlier, clock)
                if first is not None:
                    return Race(block, first, position)
        clock[queue] += 1
        point = position, clock[queue]
        for block in reads:
            uses[block].reads[queue] = point
        for block in changes:
            # All earlier ones come before this one, and so before what follows it.
            uses[block] = _Uses(changes={queue: point})
    return None


def _join(clock: list[int], other: Sequence[int]) -> None:
    for queue, number in enumerate(other):
        clock[queue] = max(clock[queue], number)


def _unordered(earlier: dict[int, _Point], clock: Sequence[int]) -> int | None:
    """Return the position of an access that a clock has not seen, or ``None``."""
    for queue, (position, number) in earlier.items():
        if number > clock[queue]:
            return position
    return None


def check_no_race(
    order: IssueOrder, graph: TrainingGraph, names: Sequence[str]
) -> None:
    """Prove that every two conflicting accesses have an order.

    Parameters
    ----------
    order
        One pass of a step.
    graph
        What it trains; storages are named by it.
    names
        The devices' names.

    Raises
    ------
    RaceError
        If two have none; the message names both, the block and the steps.
    """
    race = first_race(order)
    if race is None:
        return
    block = order.blocks[race.block]
    first, second = (order.instructions[at] for at in (race.first, race.second))
    storage = f"storage {block.storage} {graph.storages[block.storage].name!r}"
    msg = (
        f"{storage} on device {names[block.device]!r}: nothing makes "
        f"{_described(second, race.block, order, names)} come after "
        f"{_described(first, race.block, order, names)}, so the bytes may be wrong. "
        "This is a fault of remat, found before the plan ran; please report it with "
        "the plan's file"
    )
    raise RaceError(
        msg, storage=block.storage, device=block.device, steps=(first.step, second.step)
    )


def _described(
    instruction: Instruction, block: int, order: IssueOrder, names: Sequence[str]
) -> str:
    match instruction:
        case Allocate():
            what = "its allocation"
        case Free():
            what = "its release"
        case HandOver():
            what = "a use by the caller"
        case Run():
            what = "a write" if block in instruction.writes else "a read"
        case Record() | Wait():
            what = "an event"
    queue = order.queues[order.queue_of(instruction)]
    places = [repr(names[device]) for device in queue]
    where = ("the host", "the queue of device ", "the link from ")[len(queue)]
    return f"{what} at step {instruction.step} ({where}{' to '.join(places)})"
