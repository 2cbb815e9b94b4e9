"""What a plan asks of an allocator, step by step, and what an arena would take."""

import itertools
import random

import pytest

from remat.core.allocator import MIB, AllocatorSettings
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.memory.arena import Lifetime, arena_bytes, greedy_by_size, lifetimes
from remat.memory.caching_allocator import Request, RequestKind
from remat.memory.requests import AllocatorReplay, reserved_use, step_requests

ALLOC, FREE = RequestKind.ALLOCATE, RequestKind.FREE


def small_step() -> TrainingGraph:
    """Return a step of one layer: y from x and w, then the gradient of w, then Adam."""
    return TrainingGraph(
        name="small",
        storages=(
            Storage(name="x", size_bytes=3 * MIB, role=Role.INPUT, is_resident=True),
            Storage(name="w", size_bytes=MIB, role=Role.PARAMETER, is_resident=True),
            Storage(name="y", size_bytes=5 * MIB),
            Storage(name="dw", size_bytes=MIB, role=Role.GRADIENT),
            Storage(
                name="Adam",
                size_bytes=2 * MIB + 8,
                role=Role.OPTIMIZER_STATE,
                is_resident=True,
            ),
        ),
        ops=(
            Op(
                name="f",
                reads=(0, 1),
                writes=(2,),
                cost_ns=(1,),
                workspace_bytes=(7,),
                phase=Phase.FORWARD,
            ),
            Op(
                name="b",
                reads=(0, 2),
                writes=(3,),
                cost_ns=(1,),
                workspace_bytes=(0,),
                phase=Phase.BACKWARD,
            ),
            Op(
                name="optimizer step",
                reads=(3,),
                writes=(),
                cost_ns=(0,),
                workspace_bytes=(9,),
                phase=Phase.BACKWARD,
                is_external=True,
                non_recomputable="steps once",
            ),
        ),
        final_outputs=(3,),
    )


def words(requests: list[Request]) -> list[tuple[str, int]]:
    """Return allocations as ("+", bytes), and frees as ("-", bytes)."""
    sizes = {r.block: r.size_bytes for r in requests if r.kind == ALLOC}
    return [("+" if r.kind == ALLOC else "-", sizes[r.block]) for r in requests]


def test_requests_of_two_steps() -> None:
    graph = small_step()
    asked = step_requests(
        graph, schedule_from_order(graph, store_all_order(graph)), step_count=2
    )
    step = [("+", 5 * MIB), ("+", 7), ("-", 7), ("+", MIB), ("-", 5 * MIB)]
    # Adam has two tensors of the parameter's size, and a counter.
    state = [("+", MIB), ("+", MIB), ("+", 8)]
    expected = [
        *[("+", 3 * MIB), ("+", MIB)],
        *[*step, *state, ("+", 9), ("-", 9)],
        # What the first step left goes before the second begins.
        *[("-", MIB), *step, ("+", 9), ("-", 9)],
    ]
    assert words(asked.requests) == expected
    assert asked.ends == (2, 12, 20)


def test_a_fresh_copy_is_allocated_before_the_old_one_is_freed() -> None:
    graph = small_step()
    forward, backward = store_all_order(graph)[:2], store_all_order(graph)[2:]
    schedule = schedule_from_order(graph, [*forward, 0, *backward])
    # The first copy is dropped before: nothing reads it.
    assert words(step_requests(graph, schedule, step_count=1).requests)[2:8] == [
        *[("+", 5 * MIB), ("+", 7), ("-", 7), ("-", 5 * MIB)],
        *[("+", 5 * MIB), ("+", 7)],
    ]


def test_what_is_reserved_is_never_less_than_what_is_live() -> None:
    graph = small_step()
    schedule = schedule_from_order(graph, store_all_order(graph))
    live = simulate(graph, single_device(), schedule).peak_bytes[0]
    for text in ("", "expandable_segments:True"):
        use = reserved_use(graph, schedule, AllocatorSettings.parse(text))
        assert live <= use.allocated_bytes <= use.reserved_bytes
        assert use.is_steady
        assert use.step_reserved_bytes[-1] == use.reserved_bytes


def test_priming_leaves_a_segment_for_the_steps() -> None:
    graph = small_step()
    schedule = schedule_from_order(graph, store_all_order(graph))
    replay = AllocatorReplay(graph, schedule, AllocatorSettings())
    plain, primed = replay.use(), replay.use((30 * MIB,))
    # x takes a segment of 20 MiB, in which y fits too.
    assert plain.resident_reserved_bytes == 22 * MIB
    assert primed.reserved_bytes == plain.reserved_bytes + 30 * MIB
    assert primed.primed_bytes == (30 * MIB,)
    assert primed.allocated_bytes == plain.allocated_bytes


def test_an_arena_overlaps_no_two_blocks_and_is_never_below_what_is_live() -> None:
    chance = random.Random(5)
    for _ in range(30):
        blocks = [
            Lifetime(start, start + chance.randint(1, 12), 512 * chance.randint(1, 9))
            for start in [chance.randrange(20) for _ in range(25)]
        ]
        addresses = greedy_by_size(blocks)
        placed = list(zip(blocks, addresses, strict=True))
        for (a, at), (b, other) in itertools.combinations(placed, 2):
            are_together = a.start < b.end and b.start < a.end
            are_apart = at + a.size_bytes <= other or other + b.size_bytes <= at
            assert are_apart or not are_together
        live = max(
            sum(b.size_bytes for b in blocks if b.start <= now < b.end)
            for now in range(40)
        )
        assert max(at + b.size_bytes for b, at in placed) >= live


def test_an_arena_of_requests() -> None:
    requests = [
        Request(ALLOC, 0, 600),
        Request(ALLOC, 1, 512),
        Request(FREE, 0),
        Request(ALLOC, 2, 1024),
    ]
    assert lifetimes(requests) == [(0, 2, 1024), (1, 4, 512), (3, 4, 1024)]
    # The third takes the place of the first.
    assert arena_bytes(requests) == 1536
    assert arena_bytes([]) == 0
    with pytest.raises(ValueError, match="has no bytes"):
        greedy_by_size([Lifetime(0, 1, 0)])
