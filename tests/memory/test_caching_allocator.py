"""The allocator model: each rule of PyTorch's, its twin, and its invariants.

Expected numbers are worked out by hand from ``CUDACachingAllocator.cpp``.
"""

import inspect
import random
from collections.abc import Sequence
from typing import Any

import pytest

from remat.core.allocator import MIB, AllocatorSettings
from remat.memory.caching_allocator import (
    STATISTICS,
    BlockState,
    CachingAllocator,
    DeviceAction,
    Request,
    RequestKind,
    replay_requests,
    rules_of,
)
from remat.native import core

KIB = 2**10
ALLOC, FREE, RECORD, COMPLETE, EMPTY = RequestKind

needs_core = pytest.mark.skipif(core() is None, reason="there is no native core")


def allocator(
    text: str = "",
    *,
    limit_bytes: int | None = None,
    capacity_bytes: int | None = None,
) -> CachingAllocator:
    settings = AllocatorSettings.parse(text)
    return CachingAllocator(
        rules_of(settings, limit_bytes=limit_bytes, capacity_bytes=capacity_bytes)
    )


def sizes(made: CachingAllocator) -> list[list[int]]:
    """Return the bytes of each segment's blocks."""
    segments, blocks = made.snapshot()
    return [
        [block.size_bytes for block in blocks if block.segment == index]
        for index in range(len(segments))
    ]


def drawn_requests(
    count: int, seed: int, *, empties: bool = True, most_live: int = 200
) -> list[Request]:
    """Draw requests of all sizes, streams and kinds."""
    chance = random.Random(seed)
    live: list[int] = []
    requests: list[Request] = []
    for number in range(count):
        kind = chance.random()
        if (kind < 0.5 and len(live) < most_live) or not live:
            edge = chance.choice((512, MIB, 2 * MIB, 10 * MIB, 20 * MIB))
            size = chance.choice(
                (
                    chance.randint(1, 4 * KIB),
                    chance.randint(1, MIB),
                    chance.randint(MIB, 10 * MIB),
                    chance.randint(8 * MIB, 64 * MIB),
                    edge + chance.randint(-1, 1),
                )
            )
            stream = chance.randrange(3) if chance.random() < 0.2 else 0
            requests.append(Request(ALLOC, number, size, stream))
            live.append(number)
        elif kind < 0.92:
            place = chance.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            requests.append(Request(FREE, live.pop()))
        elif kind < 0.95:
            stream = chance.randrange(3)
            requests.append(Request(RECORD, chance.choice(live), stream=stream))
        elif kind < 0.995 or not empties:
            requests.append(Request(COMPLETE, stream=chance.randrange(3)))
        else:
            requests.append(Request(EMPTY))
    return requests


@pytest.mark.parametrize(
    ("size", "text", "rounded"),
    [
        (1, "", 512),
        (512, "", 512),
        (513, "", 1024),
        (MIB + 1, "", MIB + 512),
        # The source's own example: 1200 lies between 1024 and 2048; four parts of 256.
        (1200 * KIB, "roundup_power2_divisions:4", 1280 * KIB),
        (1024 * KIB, "roundup_power2_divisions:4", 1024 * KIB),
        # Not above 512 times the divisions: rounded to 512 bytes.
        (2048, "roundup_power2_divisions:4", 2048),
        (2049, "roundup_power2_divisions:4", 2560),
        # By size: from 2 MiB on in two parts, below in eight.
        (3 * MIB // 2 + 1, "roundup_power2_divisions:[1:8,>:2]", 13 * MIB // 8),
        (5 * MIB // 2, "roundup_power2_divisions:[1:8,>:2]", 3 * MIB),
    ],
)
def test_sizes_are_rounded(size: int, text: str, rounded: int) -> None:
    made = allocator(text)
    made.allocate(0, size)
    assert made.allocated_bytes == rounded
    assert made.memory_stats()["requested_bytes.all.current"] == size


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (31 * MIB, 32 * MIB),
    ],
)
def test_segments_are_of_the_sizes_that_the_source_gives(
    size: int, segment: int
) -> None:
    made = allocator()
    made.allocate(0, size)
    assert made.reserved_bytes == segment
    assert [call.action for call in made.calls] == [DeviceAction.SEGMENT_ALLOC]


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() -> None:
    made = allocator()
    addresses = [
        made.allocate(n, size * MIB) for n, size in enumerate((40, 30, 30, 50))
    ]
    for number in range(4):
        made.free(number)
    assert made.allocate(4, 29 * MIB + 1) == addresses[1]
    assert made.allocate(5, 30 * MIB) == addresses[2]
    assert made.allocate(6, 31 * MIB) == addresses[0]
    assert made.allocate(7, 31 * MIB) == addresses[3]


def test_what_is_left_of_a_block_stays_free_from_the_sizes_on_that_the_source_gives() -> (
    None
):
    made = allocator()
    made.allocate(0, 2 * MIB - 512 - MIB)
    assert sizes(made) == [[MIB - 512, MIB + 512]]
    made.allocate(1, MIB)
    assert sizes(made) == [[MIB - 512, MIB, 512]]
    # In the large pool 1 MiB is not split off, and 1 MiB and 512 bytes are.
    large = allocator()
    large.allocate(0, 19 * MIB)
    assert sizes(large) == [[20 * MIB]]
    large.free(0)
    large.allocate(1, 19 * MIB - 512)
    assert sizes(large) == [[19 * MIB - 512, MIB + 512]]


def test_free_neighbours_are_one_block() -> None:
    made = allocator()
    for number in range(3):
        made.allocate(number, 3 * MIB)
    made.free(0)
    made.free(2)
    assert sizes(made) == [[3 * MIB, 3 * MIB, 14 * MIB]]
    made.free(1)
    assert sizes(made) == [[20 * MIB]]


def test_small_and_large_requests_never_share_a_segment() -> None:
    made = allocator()
    made.allocate(0, 19 * MIB)
    made.free(0)
    made.allocate(1, MIB)
    assert made.reserved_bytes == 22 * MIB


def test_a_free_block_serves_its_own_stream_alone() -> None:
    made = allocator()
    first = made.allocate(0, 30 * MIB, 1)
    made.free(0)
    assert made.allocate(1, 30 * MIB, 2) != first
    assert made.allocate(2, 30 * MIB, 1) == first


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    made = allocator()
    first = made.allocate(0, 30 * MIB)
    made.record_stream(0, 0)  # Its own stream: nothing to wait for.
    made.record_stream(0, 3)
    made.free(0)
    stats = made.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["active_bytes.all.current"] == 30 * MIB
    assert made.snapshot()[1][0].state == BlockState.PENDING
    assert made.allocate(1, 30 * MIB) != first
    made.complete(3)
    assert made.allocate(2, 30 * MIB) == first


def test_blocks_from_max_split_size_on_are_whole() -> None:
    made = allocator("max_split_size_mb:64")
    first = made.allocate(0, 100 * MIB)
    made.free(0)
    # A smaller request does not take it, one that is 20 MiB smaller neither.
    made.allocate(1, 30 * MIB)
    assert made.reserved_bytes == 130 * MIB
    made.allocate(2, 80 * MIB)
    assert made.reserved_bytes == 210 * MIB
    assert made.allocate(3, 80 * MIB + 1) == first
    assert made.allocated_bytes == 210 * MIB
    assert made.memory_stats()["oversize_allocations.current"] == 2


def test_expandable_segments_grow_by_pages() -> None:
    made = allocator("expandable_segments:True")
    made.allocate(0, 3 * MIB)
    assert made.reserved_bytes == 20 * MIB
    made.allocate(1, 30 * MIB)  # 17 MiB are free at the end: 13 MiB more, one page.
    assert made.reserved_bytes == 40 * MIB
    made.allocate(2, 512)
    assert made.reserved_bytes == 42 * MIB
    assert [call.action for call in made.calls] == [DeviceAction.SEGMENT_MAP] * 3
    assert sizes(made) == [[3 * MIB, 30 * MIB, 7 * MIB], [512, 2 * MIB - 512]]


def test_the_growing_end_is_taken_last() -> None:
    made = allocator("expandable_segments:True")
    made.allocate(0, 8 * MIB)
    first = made.allocate(1, 8 * MIB)
    made.allocate(2, 2 * MIB)  # 2 MiB of the page are left, at the growing end.
    made.free(1)
    # Of 2 MiB and 8 MiB the smaller fits, but it could grow without end.
    assert made.allocate(3, 2 * MIB) == first
    made.check()


def test_empty_cache_gives_back_whole_segments_and_pages() -> None:
    made = allocator()
    for number, size in enumerate((30, 3, 3)):
        made.allocate(number, size * MIB)
    made.free(0)
    made.free(1)
    made.empty_cache()
    assert made.reserved_bytes == 20 * MIB
    grown = allocator("expandable_segments:True")
    for number, size in enumerate((10, 50, 10)):
        grown.allocate(number, size * MIB)
    grown.free(1)
    grown.empty_cache()
    # Bytes 10 to 60 MiB are free: the pages from 20 to 60 MiB.
    assert grown.reserved_bytes == 40 * MIB
    assert sizes(grown) == [[10 * MIB, 10 * MIB], [10 * MIB, 10 * MIB]]
    # The hole is filled first, before anything is mapped at the end.
    assert grown.allocate(3, 50 * MIB) == grown.calls[0].address + 10 * MIB


def test_without_room_everything_unused_is_given_back_and_then_it_fails() -> None:
    made = allocator(capacity_bytes=100 * MIB)
    made.allocate(0, 60 * MIB)
    made.free(0)
    assert made.allocate(1, 70 * MIB) is not None
    assert made.reserved_bytes == 70 * MIB
    assert made.allocate(2, 40 * MIB) is None
    stats = made.memory_stats()
    assert stats["num_alloc_retries"] == 2
    assert stats["num_ooms"] == 1
    made.free(2)  # What failed may be freed.


def test_oversize_blocks_are_given_back_first_and_no_more_than_needed() -> None:
    made = allocator("max_split_size_mb:50", capacity_bytes=300 * MIB)
    for number, size in enumerate((60, 100, 120)):
        made.allocate(number, size * MIB)
    for number in range(3):
        made.free(number)
    assert made.allocate(3, 40 * MIB) is not None
    # The smallest from max_split_size on went.
    assert made.reserved_bytes == (100 + 120 + 40) * MIB
    assert made.memory_stats()["num_alloc_retries"] == 0


def test_garbage_collection_gives_back_what_was_not_used_for_long() -> None:
    made = allocator("garbage_collection_threshold:0.5", limit_bytes=200 * MIB)
    for number, size in enumerate((40, 60)):
        made.allocate(number, size * MIB)
        made.free(number)
    made.allocate(2, 60 * MIB)
    # 100 MiB are reserved, half of the limit: nothing is collected yet.
    made.allocate(3, 62 * MIB)
    assert made.reserved_bytes == 162 * MIB
    # Now it is more, and 40 MiB are unused.
    made.allocate(4, 64 * MIB)
    assert made.reserved_bytes == (60 + 62 + 64) * MIB


def test_misuse_is_refused() -> None:
    made = allocator()
    made.allocate(0, 1)
    for wrong in (
        lambda: made.allocate(0, 1),
        lambda: made.free(1),
        lambda: made.record_stream(1, 0),
        lambda: made.allocate(2, 0),
        lambda: made.allocate(2, 1, 256),
    ):
        with pytest.raises(ValueError, match=r"block|size|stream"):
            wrong()
    with pytest.raises(ValueError, match="address is in use"):
        replay_requests(
            [Request(ALLOC, 0, 30 * MIB), Request(ALLOC, 1, 30 * MIB)],
            rules_of(AllocatorSettings(), segment_addresses=[0, 20 * MIB]),
            0,
        )


SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "garbage_collection_threshold:0.6",
    "expandable_segments:True,roundup_power2_divisions:4",
    "max_split_size_mb:20,garbage_collection_threshold:0.3,large_segment_size_mb:12",
)


@needs_core
@pytest.mark.parametrize("text", SETTINGS)
def test_core_and_twin_do_the_same_at_every_request(text: str) -> None:
    twin = inspect.unwrap(replay_requests)
    settings = AllocatorSettings.parse(text)
    for seed, (limit, capacity) in enumerate(
        [(None, None), (2**31, None), (None, 3 * 2**29), (2**31, 3 * 2**29)]
    ):
        rules = rules_of(settings, limit_bytes=limit, capacity_bytes=capacity)
        requests = drawn_requests(700, seed)
        expected = [list(part) for part in twin(requests, rules, 50)]
        found = [list(part) for part in replay_requests(requests, rules, 1)]
        assert found[:3] == expected[:3]
        assert dict(zip(STATISTICS, found[3], strict=True)) == dict(
            zip(STATISTICS, expected[3], strict=True)
        )
        assert _rows(found[4:]) == _rows(expected[4:])


def _rows(parts: Sequence[Sequence[Any]]) -> list[list[tuple[Any, ...]]]:
    return [[tuple(row) for row in part] for part in parts]


@needs_core
@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_invariants_hold_under_very_many_requests(text: str) -> None:
    # The core checks itself: neighbours, merging, sums, no overlap.
    requests = drawn_requests(100_000, 7, empties=False)
    rules = rules_of(AllocatorSettings.parse(text))
    _, reserved, allocated, statistics, *_ = replay_requests(requests, rules, 997)
    assert reserved == sorted(reserved)
    assert all(a <= r for a, r in zip(allocated, reserved, strict=True))
    named = dict(zip(STATISTICS, statistics, strict=True))
    assert named["reserved_bytes.all.peak"] == max(reserved)
    assert named["allocated_bytes.all.peak"] == max(allocated)
    assert named["allocated_bytes.all.current"] == (
        named["allocated_bytes.all.allocated"] - named["allocated_bytes.all.freed"]
    )
