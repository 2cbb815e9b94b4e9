"""Random plans of several queues, what can be taken out of them, and two oracles.

The oracles share nothing with the vector clocks: one closes the relation "comes after"
over all instructions, the other runs the queues in every way in which they can run.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from tests.device_schedules import scattered

from remat.core.device_graph import fully_linked
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.issue_order import (
    HOST,
    Allocate,
    Free,
    HandOver,
    IssueOrder,
    Record,
    Wait,
    accesses,
)
from remat.core.platform import Device, Platform
from remat.core.schedule import Compute, Schedule
from remat.runtime.issuing import issue_orders


def random_graph(
    chance: random.Random, device_count: int, op_count: int
) -> TrainingGraph:
    """Return a graph that runs anywhere, with parameters, tangents and gradients."""
    forward_count = op_count // 2
    storages = [
        Storage(name=f"weight{i}", size_bytes=chance.randrange(1, 9), is_resident=True)
        for i in range(2)
    ]
    ops: list[Op] = []
    tangent = -1
    for number in range(op_count):
        if number == forward_count:
            tangent = len(storages)
            storages.append(Storage(name="tangent", size_bytes=4))
        first = [tangent] if number == forward_count else []
        few = chance.sample(
            range(len(storages)), min(len(storages), chance.randrange(1, 4))
        )
        reads = tuple(dict.fromkeys([*first, *few]))
        writes = tuple(range(len(storages), len(storages) + chance.choice((1, 1, 2))))
        storages += [
            Storage(name=f"value{i}", size_bytes=chance.randrange(1, 9)) for i in writes
        ]
        ops.append(
            Op(
                name=f"op{number}",
                reads=reads,
                writes=writes,
                cost_ns=(5,) * device_count,
                workspace_bytes=(0,) * device_count,
                phase=Phase.FORWARD if number < forward_count else Phase.BACKWARD,
            )
        )
    return TrainingGraph(
        name="random",
        storages=tuple(storages),
        ops=tuple(ops),
        device_kinds=tuple(f"kind{d}" for d in range(device_count)),
        forward_outputs=(ops[forward_count - 1].writes[0],),
        tangents=(tangent,),
        final_outputs=(ops[-1].writes[0],),
    )


def random_case(
    seed: int, op_count: int = 8
) -> tuple[TrainingGraph, Schedule, tuple[bool, ...]]:
    """Return a graph, a valid schedule of it, and which devices are the host's."""
    chance = random.Random(seed)
    count = chance.choice((2, 2, 3))
    graph = random_graph(chance, count, op_count)
    names = [f"device{d}" for d in range(count)]
    platform = Platform(
        devices=tuple(Device(name=n, kind=f"kind{d}") for d, n in enumerate(names)),
        links=fully_linked(tuple(names), 10**9, 10),
        copies_wait=True,
    )
    schedule = scattered(graph, platform, seed, eviction_share=0.6)
    return graph, schedule, tuple(chance.random() < 0.5 for _ in names)


def random_orders(seed: int, op_count: int = 8) -> tuple[IssueOrder, IssueOrder]:
    """Return the issue orders of a random plan.

    Small copies are the host's, and ops write over what dies with them.
    """
    graph, schedule, is_on_host = random_case(seed, op_count)

    def overwritten(position: int, dying: frozenset[int]) -> int | None:
        step = schedule.steps[position]
        reads = graph.ops[step.op].reads if isinstance(step, Compute) else ()
        return min(dying.intersection(reads), default=None)

    return issue_orders(
        graph, schedule, is_on_host, overwritten=overwritten, least_bytes_beside=3
    )


def without(order: IssueOrder, position: int) -> IssueOrder:
    """Return the order without one instruction."""
    kept = order.instructions[:position] + order.instructions[position + 1 :]
    return replace(order, instructions=kept)


def moved(order: IssueOrder, position: int, queue: int) -> IssueOrder:
    """Return the order with one instruction in another queue, old or new.

    To take a block from the allocator of another queue, or give it back, moves both.
    """
    one = order.instructions[position]
    instructions, blocks = list(order.instructions), list(order.blocks)
    if isinstance(one, Allocate | Free):
        blocks[one.block] = replace(blocks[one.block], queue=queue)
    else:
        instructions[position] = replace(one, queue=queue)
    return IssueOrder(
        queues=order.queues + ((),) * (queue == len(order.queues)),
        blocks=tuple(blocks),
        instructions=tuple(instructions),
    )


def in_queues(order: IssueOrder) -> Iterator[int]:
    """Yield the positions of what is issued to another queue than the host's.

    To work in its device's queue is the caller's choice, and an op that touches nothing
    may run at any time.
    """
    for position, one in enumerate(order.instructions):
        is_ours = isinstance(one, Wait | Record) or any(accesses(one))
        if order.queue_of(one) != HOST and is_ours and not isinstance(one, HandOver):
            yield position


def removed_one_by_one(order: IssueOrder) -> Iterator[IssueOrder]:
    """Yield the order without each wait and each event, and each use out of its queue.

    An instruction out of its queue is in one of its own: no order but that the host
    issues it when it does.
    """
    for position, one in enumerate(order.instructions):
        if isinstance(one, Wait | Record):
            yield without(order, position)
    for position in in_queues(order):
        yield moved(order, position, len(order.queues))


def moved_one_by_one(order: IssueOrder, chance: random.Random) -> Iterator[IssueOrder]:
    """Yield the order with each instruction in another of its queues."""
    for position in in_queues(order):
        now = order.queue_of(order.instructions[position])
        others = [queue for queue in range(len(order.queues)) if queue != now]
        yield moved(order, position, chance.choice(others))


def conflicts(order: IssueOrder) -> Iterator[tuple[int, int]]:
    """Yield all pairs of positions whose accesses to some block conflict."""
    uses: list[list[tuple[int, bool]]] = [[] for _ in order.blocks]
    for position, one in enumerate(order.instructions):
        reads, changes = accesses(one)
        for block in {*reads, *changes}:
            uses[block].append((position, block in changes))
    for block_uses in uses:
        for index, (second, changes) in enumerate(block_uses):
            for first, changed in block_uses[:index]:
                if changes or changed:
                    yield first, second


def recorded_before(order: IssueOrder) -> dict[int, int]:
    """Return for each wait the position where its event is recorded, if it is."""
    recorded: dict[int, int] = {}
    found: dict[int, int] = {}
    for position, one in enumerate(order.instructions):
        if isinstance(one, Record):
            recorded[one.event] = position
        elif isinstance(one, Wait) and one.event in recorded:
            found[position] = recorded[one.event]
    return found


def is_racy_by_closure(order: IssueOrder) -> bool:
    """Whether some conflicting pair is not in the closure of "comes after"."""
    waits = recorded_before(order)
    last: dict[int, int] = {}
    # Per instruction, those that it comes after, as bits.
    before: list[int] = []
    for position, one in enumerate(order.instructions):
        own = order.queue_of(one)
        direct = {last[queue] for queue in (own, HOST) if queue in last}
        if position in waits:
            direct.add(waits[position])
        bits = 0
        for other in direct:
            bits |= before[other] | 1 << other
        before.append(bits)
        last[own] = position
    return any(not before[second] >> first & 1 for first, second in conflicts(order))


def is_racy_by_running(order: IssueOrder, most_states: int = 100_000) -> bool:
    """Whether the queues can run so that of a conflicting pair the second is first.

    All states that queues and host can reach are visited.
    """
    waits = recorded_before(order)
    queued: list[list[int]] = [[] for _ in order.queues]
    place: list[tuple[int, int]] = []
    for position, one in enumerate(order.instructions):
        own = order.queue_of(one)
        place.append((own, len(queued[own])))
        queued[own].append(position)
    earlier: dict[int, list[int]] = {}
    for first, second in conflicts(order):
        earlier.setdefault(second, []).append(first)

    def is_done(position: int, done: tuple[int, ...]) -> bool:
        queue, index = place[position]
        return done[queue] > index

    # How much the host has issued, and how much each queue has done.
    start = 0, (0,) * len(order.queues)
    seen: set[tuple[int, tuple[int, ...]]] = {start}
    todo = list(seen)
    while todo:
        assert len(seen) < most_states
        issued, done = todo.pop()
        following: list[tuple[int, tuple[int, ...]]] = []
        if issued < len(order.instructions) and place[issued][0] != HOST:
            following.append((issued + 1, done))
        for queue, positions in enumerate(queued):
            if done[queue] == len(positions):
                continue
            position = positions[done[queue]]
            is_issued = position == issued if queue == HOST else position < issued
            if not is_issued or (
                position in waits and not is_done(waits[position], done)
            ):
                continue
            if not all(is_done(first, done) for first in earlier.get(position, ())):
                return True
            after = (*done[:queue], done[queue] + 1, *done[queue + 1 :])
            following.append((issued + (queue == HOST), after))
        for state in following:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return False
