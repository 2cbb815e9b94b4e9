"""PyTorch's caching allocator of an accelerator's memory, as its source says.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and of
``c10/core/AllocatorConfig.h`` in PyTorch 2.11 to 2.15, cited below by the names of
their functions. The native twin keeps PyTorch's data structures; this one is written
from the rules, with lists and plain searches, so that each checks the other.

``round_size``
    A request is rounded up to 512 bytes, or, with ``roundup_power2_divisions``, to a
    part of the distance to the next power of two.
``get_pool``
    Rounded sizes up to 1 MiB come from the small pool, others from the large one. A
    free block serves the stream that it was allocated on, and no other.
``get_free_block``
    Of the free blocks of that pool and stream that are large enough, the smallest, and
    of equal ones that of the lowest address. A block at the growing end of an
    expandable segment counts as large as it may become. A request below
    ``max_split_size`` takes no block from that size on; one from that size on takes
    none that is larger by ``max_non_split_rounding`` or more.
``should_split``
    What is left of a block stays free where it is at least 512 bytes (small pool,
    expandable segments), or more than 1 MiB and the request below ``max_split_size``
    (large pool).
``get_allocation_size``
    Without such a block a new segment is asked for: 2 MiB in the small pool, 20 MiB for
    less than 10 MiB, else the size rounded up to 2 MiB.
``try_allocate_expandable_block``, ``map_block``
    With ``expandable_segments`` the pool's segment grows instead, by pages of 2 MiB
    (small) or 20 MiB (large), at the lowest address where free and unmapped bytes
    together suffice.
``free``, ``insert_events``, ``process_events``
    A freed block that other streams have used waits until their work is over, which is
    noticed at the next request.
``free_block``, ``try_merge_blocks``
    A free block is one with its free neighbours.
``malloc``
    Where the device has no room: garbage collection (``garbage_collection_threshold``,
    if the process's memory is limited), then blocks from ``max_split_size`` on are
    given back, as many as needed, then all free segments and pages, then it fails.

Not modelled: pools of CUDA graphs and of ``torch.cuda.MemPool``, sharing with other
processes, ``cudaMallocAsync``. The address space of an expandable segment is as large
as is needed (PyTorch: 9/8 of the card's memory), and ``cudaMalloc`` gives addresses in
ascending order, where none are prescribed: both decide only between equal blocks.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from remat.core.allocator import INTERVALS, MIB, AllocatorSettings
from remat.core.checks import require
from remat.native import native

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MIN_LARGE_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB

_NONE = -1
_FIRST_INTERVAL = 20
_SPACE_BITS = 52
_MOST_STREAMS = 256
_MOST_REQUESTED = 2**48
_MOST_LIMIT = 2**50
_MOST_SEGMENT = 2**30
_MOST_SEGMENTS = 2**50
_MOST_ADDRESS = 2**60


class RequestKind(IntEnum):
    """What is asked of an allocator."""

    ALLOCATE = 0
    """Allocate ``size_bytes`` for block ``block`` on ``stream``."""
    FREE = 1
    """Free block ``block``."""
    RECORD_STREAM = 2
    """Stream ``stream`` uses block ``block``."""
    COMPLETE = 3
    """What was put on ``stream`` so far is over."""
    EMPTY_CACHE = 4
    """Give back what is unused."""


class Request(NamedTuple):
    """One request; what its kind has no use for is 0."""

    kind: int
    block: int = 0
    size_bytes: int = 0
    stream: int = 0


class DeviceAction(IntEnum):
    """What the allocator asks of the device."""

    SEGMENT_ALLOC = 0
    SEGMENT_FREE = 1
    SEGMENT_MAP = 2
    SEGMENT_UNMAP = 3
    OOM = 4


class DeviceCall(NamedTuple):
    """What the allocator asked of the device, during which request."""

    request: int
    action: int
    address: int
    size_bytes: int
    stream: int


class BlockState(IntEnum):
    """What a block of a segment is."""

    INACTIVE = 0
    PENDING = 1
    """Freed, and waiting for a stream."""
    ALLOCATED = 2


class SegmentRow(NamedTuple):
    """A segment, or a stretch of mapped pages, at the end."""

    address: int
    size_bytes: int
    stream: int
    is_large: bool
    is_expandable: bool


class BlockRow(NamedTuple):
    """A block of a segment at the end; an inactive one has 0 requested bytes."""

    segment: int
    address: int
    size_bytes: int
    requested_bytes: int
    state: int


class _Pool(IntEnum):
    """The two pools, by their places in the statistics."""

    SMALL = 1
    LARGE = 2


class Rules(NamedTuple):
    """Settings in bytes; -1 for none."""

    expandable_segments: bool
    max_split_bytes: int
    max_non_split_rounding_bytes: int
    large_segment_bytes: int
    divisions: Sequence[int]
    garbage_collection_threshold: float
    limit_bytes: int
    capacity_bytes: int
    segment_addresses: Sequence[int]


Replayed = tuple[
    list[int],
    list[int],
    list[int],
    list[int],
    list[DeviceCall],
    list[SegmentRow],
    list[BlockRow],
]

_POOLED = (
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes"),
    *("inactive_split_bytes", "requested_bytes"),
)
_POOLS = ("all", "small_pool", "large_pool")
_NUMBERS = ("current", "peak", "allocated", "freed")

STATISTICS = (
    *(
        f"{s}.{pool}.{number}"
        for s in _POOLED
        for pool in _POOLS
        for number in _NUMBERS
    ),
    *(f"oversize_allocations.{number}" for number in _NUMBERS),
    *(f"oversize_segments.{number}" for number in _NUMBERS),
    *("num_alloc_retries", "num_ooms", "num_sync_all_streams"),
    *("num_device_alloc", "num_device_free"),
)
"""The names that ``torch.cuda.memory_stats`` has for the statistics, in their order."""


def rules_of(
    settings: AllocatorSettings,
    *,
    limit_bytes: int | None = None,
    capacity_bytes: int | None = None,
    segment_addresses: Sequence[int] = (),
) -> Rules:
    """Return settings as the allocator takes them.

    Parameters
    ----------
    settings
        As ``PYTORCH_ALLOC_CONF`` gives them.
    limit_bytes
        Most bytes that the process may reserve
        (``torch.cuda.set_per_process_memory_fraction``), or ``None``.
    capacity_bytes
        Most bytes that the device gives, or ``None``.
    segment_addresses
        Where ``cudaMalloc`` puts the first segments, in order.
    """
    split = settings.max_split_size_mb
    return Rules(
        expandable_segments=settings.expandable_segments,
        max_split_bytes=_NONE if split is None else split * MIB,
        max_non_split_rounding_bytes=settings.max_non_split_rounding_mb * MIB,
        large_segment_bytes=settings.large_segment_size_mb * MIB,
        divisions=list(settings.roundup_power2_divisions),
        garbage_collection_threshold=float(settings.garbage_collection_threshold),
        limit_bytes=_NONE if limit_bytes is None else limit_bytes,
        capacity_bytes=_NONE if capacity_bytes is None else capacity_bytes,
        segment_addresses=list(segment_addresses),
    )


@dataclass(slots=True)
class _Stat:
    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def change(self, amount: int) -> None:
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount > 0:
            self.allocated += amount
        else:
            self.freed -= amount

    def numbers(self) -> list[int]:
        return [self.current, self.peak, self.allocated, self.freed]


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    is_mapped: bool = True
    state: BlockState = BlockState.INACTIVE
    requested: int = 0
    streams: set[int] = field(default_factory=set[int])
    events: int = 0
    born: int = 0

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def is_free(self) -> bool:
        return self.state is BlockState.INACTIVE


@dataclass(slots=True, eq=False)
class _Segment:
    stream: int
    pool: _Pool
    blocks: list[_Block]
    is_expandable: bool = False
    counted: list[int] = field(default_factory=lambda: [0] * (len(_POOLED) + 1))

    def count(self, max_split: float) -> list[int]:
        """Return what the statistics say of the segment, from its blocks."""
        mapped = [block for block in self.blocks if block.is_mapped]
        used = [block for block in mapped if not block.is_free]
        allocated = [block for block in used if block.state is BlockState.ALLOCATED]
        is_split = len(self.blocks) > 1 and not self.is_expandable
        idle = [block for block in mapped if block.is_free] if is_split else []
        return [
            len(allocated),
            int(bool(mapped) and not self.is_expandable),
            len(used),
            len(idle),
            sum(block.size for block in allocated),
            sum(block.size for block in mapped),
            sum(block.size for block in used),
            sum(block.size for block in idle),
            sum(block.requested for block in used),
            sum(block.size >= max_split for block in allocated),
        ]


@dataclass(slots=True, eq=False)
class _Event:
    """What a freed block waits for."""

    segment: _Segment
    block: _Block
    is_over: bool = False


class CachingAllocator:
    """An allocator that is asked one thing at a time.

    Blocks have numbers that the caller chooses. Each request takes time linear in the
    blocks.

    Parameters
    ----------
    rules
        From :func:`rules_of`.

    Raises
    ------
    ValueError
        If a rule is out of range; and, of each request, if a block is allocated twice,
        freed or used without having been allocated.
    """

    def __init__(self, rules: Rules) -> None:
        check_rules(rules)
        self._rules = rules
        split = rules.max_split_bytes
        self._max_split = math.inf if split == _NONE else split
        self._segments: list[_Segment] = []
        self._live: dict[int, tuple[_Segment, _Block] | None] = {}
        self._waiting: dict[int, deque[_Event]] = {}
        self._given = list(rules.segment_addresses)
        self._next_address = SMALL_SEGMENT_BYTES
        self._searches = dict.fromkeys(_Pool, 0)
        self._stats = [[_Stat() for _ in _POOLS] for _ in _POOLED]
        self._oversize = [_Stat(), _Stat()]
        self._counts = dict.fromkeys(STATISTICS[-5:], 0)
        self._requests = 0
        self.calls: list[DeviceCall] = []
        """What was asked of the device, in order."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the device has given at present."""
        return self._stats[5][0].current

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that are handed out at present."""
        return self._stats[4][0].current

    def allocate(self, block: int, size_bytes: int, stream: int = 0) -> int | None:
        """Return the address of a new block, or ``None`` where there is no room.

        Raises
        ------
        ValueError
            If there is a block of that number, or the size is not positive.
        """
        require(block not in self._live, "a block is allocated twice")
        require(0 < size_bytes <= _MOST_REQUESTED, "a size is not 1 to 2**48")
        require(0 <= stream < _MOST_STREAMS, "a stream is not 0 to 255")
        found = self._malloc(size_bytes, stream)
        self._live[block] = found
        self._requests += 1
        return None if found is None else found[1].address

    def free(self, block: int) -> None:
        """Free a block; one that could not be allocated may be freed, too.

        Raises
        ------
        ValueError
            If there is no such block.
        """
        require(block in self._live, "a block is freed that is not allocated")
        found = self._live.pop(block)
        self._requests += 1
        if found is None:
            return
        segment, freed = found
        freed.state = BlockState.PENDING
        self._recount(segment)
        for stream in sorted(freed.streams):
            freed.events += 1
            queue = self._waiting.setdefault(stream, deque())
            queue.append(_Event(segment, freed))
        freed.streams = set()
        if not freed.events:
            self._free_block(segment, freed)

    def record_stream(self, block: int, stream: int) -> None:
        """Note that a stream uses a block.

        Raises
        ------
        ValueError
            If there is no such block.
        """
        require(block in self._live, "a stream uses a block that is not allocated")
        require(0 <= stream < _MOST_STREAMS, "a stream is not 0 to 255")
        found = self._live[block]
        if found is not None and found[0].stream != stream:
            found[1].streams.add(stream)
        self._requests += 1

    def complete(self, stream: int) -> None:
        """Note that what was put on a stream so far is over."""
        for event in self._waiting.get(stream, ()):
            event.is_over = True
        self._requests += 1

    def empty_cache(self) -> None:
        """Give back all free segments and pages, after waiting for all streams."""
        self._release_cached_blocks()
        self._requests += 1

    def take(self, request: Request) -> int:
        """Do what a request asks; return the address of a new block, else -1."""
        kind, block, size_bytes, stream = request
        match kind:
            case RequestKind.ALLOCATE:
                address = self.allocate(block, size_bytes, stream)
                return _NONE if address is None else address
            case RequestKind.FREE:
                self.free(block)
            case RequestKind.RECORD_STREAM:
                self.record_stream(block, stream)
            case RequestKind.COMPLETE:
                self.complete(stream)
            case _:
                self.empty_cache()
        return _NONE

    def memory_stats(self) -> dict[str, int]:
        """Return the statistics under the names of ``torch.cuda.memory_stats``."""
        stats = [stat for pools in self._stats for stat in pools]
        numbers = [n for stat in (*stats, *self._oversize) for n in stat.numbers()]
        return dict(zip(STATISTICS, [*numbers, *self._counts.values()], strict=True))

    def snapshot(self) -> tuple[list[SegmentRow], list[BlockRow]]:
        """Return the segments by address, and their blocks.

        Of an expandable segment each stretch of mapped pages is a row.
        """
        runs: list[tuple[_Segment, list[_Block]]] = []
        for segment in self._segments:
            before: _Block | None = None
            for block in segment.blocks:
                if block.is_mapped:
                    if before is None or not before.is_mapped:
                        runs.append((segment, []))
                    runs[-1][1].append(block)
                before = block
        runs.sort(key=lambda run: (run[1][0].address, run[0].stream))
        segments: list[SegmentRow] = []
        rows: list[BlockRow] = []
        for index, (segment, blocks) in enumerate(runs):
            total = sum(block.size for block in blocks)
            start, is_large = blocks[0].address, segment.pool is _Pool.LARGE
            segments.append(
                SegmentRow(
                    start, total, segment.stream, is_large, segment.is_expandable
                )
            )
            for block in blocks:
                requested = 0 if block.is_free else block.requested
                rows.append(
                    BlockRow(index, block.address, block.size, requested, block.state)
                )
        return segments, rows

    def check(self) -> None:
        """Check what holds after every request.

        Raises
        ------
        RuntimeError
            If it does not, which is a fault of this class.
        """
        for segment in self._segments:
            for left, right in pairwise(segment.blocks):
                _must(left.end == right.address, "blocks overlap or gape")
                are_free = left.is_free and right.is_free
                is_merged = not are_free or left.is_mapped != right.is_mapped
                _must(is_merged, "neighbours are not merged")
            counted = segment.count(self._max_split)
            _must(segment.counted == counted, "the statistics are not the blocks'")

    def _recount(self, segment: _Segment) -> None:
        """Bring the statistics up to what the blocks of a segment say now."""
        found = segment.count(self._max_split)
        for row, before, now in zip(
            [*self._stats, self._oversize[:1]], segment.counted, found, strict=True
        ):
            if now != before:
                row[0].change(now - before)
                if len(row) > 1:
                    row[segment.pool].change(now - before)
        segment.counted = found

    def _call(self, action: DeviceAction, address: int, size: int, stream: int) -> None:
        self.calls.append(DeviceCall(self._requests, action, address, size, stream))

    def _rounded(self, size: int) -> int:
        interval = size.bit_length() - 1 - _FIRST_INTERVAL
        divisions = self._rules.divisions[min(max(interval, 0), INTERVALS - 1)]
        if size > MIN_BLOCK_BYTES * divisions > 0:
            floor = 1 << (size.bit_length() - 1)
            step = floor // divisions
            if divisions <= 1 or size == floor:
                return size
            return -(-size // step) * step if step else 2 * floor
        return -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def _segment_bytes(self, size: int) -> int:
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self._rules.large_segment_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    def _collects_garbage(self) -> bool:
        return (
            self._rules.limit_bytes != _NONE
            and self._rules.garbage_collection_threshold > 0
        )

    def _malloc(self, requested: int, stream: int) -> tuple[_Segment, _Block] | None:
        self._process_events()
        size = self._rounded(requested)
        pool = _Pool.SMALL if size <= SMALL_BYTES else _Pool.LARGE
        found = self._free_block_for(size, pool, stream)
        if found is None:
            if self._collects_garbage():
                self._collect_garbage()
            found = self._new_block(size, pool, stream)
        if found is None and self._release_oversize(size, pool, stream):
            found = self._new_block(size, pool, stream)
        if found is None:
            self._release_cached_blocks()
            self._counts["num_alloc_retries"] += 1
            found = self._new_block(size, pool, stream)
        if found is None:
            self._counts["num_ooms"] += 1
            self._call(DeviceAction.OOM, _NONE, size, stream)
            return None
        segment, block = found
        remaining = block.size - size
        if pool is _Pool.SMALL or self._rules.expandable_segments:
            is_split = remaining >= MIN_BLOCK_BYTES
        else:
            is_split = size < self._max_split and remaining > SMALL_BYTES
        if is_split:
            index = segment.blocks.index(block)
            rest = _Block(block.address + size, remaining)
            rest.born = self._searches[pool]
            segment.blocks.insert(index + 1, rest)
            block.size = size
        block.state = BlockState.ALLOCATED
        block.requested = requested
        self._recount(segment)
        return segment, block

    def _free_blocks(
        self, pool: _Pool, stream: int | None = None
    ) -> list[tuple[_Segment, _Block]]:
        """Return the free blocks of a pool by stream, size and address."""
        found = [
            (segment, block)
            for segment in self._segments
            if segment.pool is pool and stream in {None, segment.stream}
            for block in segment.blocks
            if block.is_mapped and block.is_free
        ]
        return sorted(found, key=lambda f: (f[0].stream, f[1].size, f[1].address))

    def _free_block_for(
        self, size: int, pool: _Pool, stream: int
    ) -> tuple[_Segment, _Block] | None:
        if self._collects_garbage():
            self._searches[pool] += 1
        fitting = [f for f in self._free_blocks(pool, stream) if f[1].size >= size]
        if not fitting:
            return None
        chosen = 0
        if fitting[0][0].is_expandable:
            grown = [_grown_size(*found) for found in fitting]
            while chosen + 1 < len(grown) and grown[chosen + 1] < grown[chosen]:
                chosen += 1
        found = fitting[chosen]
        is_oversize = found[1].size >= self._max_split
        if size < self._max_split:
            return None if is_oversize else found
        rounding = self._rules.max_non_split_rounding_bytes
        return None if found[1].size >= size + rounding else found

    def _has_room(self, size: int) -> bool:
        capacity = self._rules.capacity_bytes
        return capacity == _NONE or self.reserved_bytes + size <= capacity

    def _new_block(
        self, size: int, pool: _Pool, stream: int
    ) -> tuple[_Segment, _Block] | None:
        segment_bytes = self._segment_bytes(size)
        limit = self._rules.limit_bytes
        if limit != _NONE and self.reserved_bytes + segment_bytes > limit:
            return None
        if self._rules.expandable_segments:
            return self._grow(size, pool, stream)
        if not self._has_room(segment_bytes):
            return None
        address = self._address(segment_bytes)
        segment = _Segment(stream, pool, [_Block(address, segment_bytes)])
        self._segments.append(segment)
        self._recount(segment)
        if segment_bytes >= self._max_split:
            self._oversize[1].change(1)
        self._counts["num_device_alloc"] += 1
        self._call(DeviceAction.SEGMENT_ALLOC, address, segment_bytes, stream)
        return segment, segment.blocks[0]

    def _address(self, size: int) -> int:
        address = self._next_address
        if self._given:
            address = self._given.pop(0)
            for segment in self._segments:
                start, end = segment.blocks[0].address, segment.blocks[-1].end
                is_apart = address + size <= start or end <= address
                require(is_apart, "a segment's address is in use")
        self._next_address = max(self._next_address, address + size)
        return address

    def _grow(
        self, size: int, pool: _Pool, stream: int
    ) -> tuple[_Segment, _Block] | None:
        for segment in self._segments:
            if (segment.pool, segment.stream) == (pool, stream):
                break
        else:
            base = (1 + 2 * stream + (pool is _Pool.SMALL)) << _SPACE_BITS
            space = _Block(base, 1 << _SPACE_BITS, is_mapped=False)
            segment = _Segment(stream, pool, [space], is_expandable=True)
            self._segments.append(segment)
        # The lowest run of free and unmapped blocks with room; it begins at a free
        # block only if an unmapped one follows, since else the search had found it.
        blocks = segment.blocks
        start = next(
            index
            for index, block in enumerate(blocks)
            if block.is_free
            and (not block.is_mapped or (not blocks[index + 1].is_mapped))
            and _run_bytes(blocks, index, size) >= size
        )
        block = blocks[start]
        if not block.is_mapped:
            merged = self._map(segment, block, min(block.size, size))
            if merged is None:
                return None
            block = merged
        while block.size < size:
            following = blocks[blocks.index(block) + 1]
            merged = self._map(
                segment, following, min(size - block.size, following.size)
            )
            if merged is None:
                return None
            block = merged
        return segment, block

    def _page_bytes(self, segment: _Segment) -> int:
        if segment.pool is _Pool.SMALL:
            return SMALL_SEGMENT_BYTES
        return self._rules.large_segment_bytes

    def _map(self, segment: _Segment, block: _Block, size: int) -> _Block | None:
        page = self._page_bytes(segment)
        mapped = min(block.size, -(-size // page) * page)
        if not self._has_room(mapped):
            return None
        address = block.address
        block.is_mapped = True
        if mapped < block.size:
            rest = _Block(block.address + mapped, block.size - mapped, is_mapped=False)
            segment.blocks.insert(segment.blocks.index(block) + 1, rest)
            block.size = mapped
        self._merge(segment, block)
        self._recount(segment)
        self._counts["num_device_alloc"] += 1
        self._call(DeviceAction.SEGMENT_MAP, address, mapped, segment.stream)
        return block

    def _merge(self, segment: _Segment, block: _Block) -> None:
        """Make a free block one with its neighbours of the same kind."""
        for step in (-1, 1):
            index = segment.blocks.index(block) + step
            if not 0 <= index < len(segment.blocks):
                continue
            other = segment.blocks[index]
            if other.is_free and other.is_mapped == block.is_mapped:
                block.address = min(block.address, other.address)
                block.size += other.size
                segment.blocks.remove(other)
        block.born = self._searches[segment.pool]

    def _free_block(self, segment: _Segment, block: _Block) -> None:
        block.state = BlockState.INACTIVE
        self._merge(segment, block)
        self._recount(segment)

    def _finish(self, event: _Event) -> None:
        event.block.events -= 1
        if not event.block.events:
            self._free_block(event.segment, event.block)

    def _process_events(self) -> None:
        for stream in sorted(self._waiting):
            queue = self._waiting[stream]
            while queue and queue[0].is_over:
                self._finish(queue.popleft())
            if not queue:
                del self._waiting[stream]

    def _release_cached_blocks(self) -> None:
        self._counts["num_sync_all_streams"] += 1
        for stream in sorted(self._waiting):
            for event in self._waiting[stream]:
                self._finish(event)
        self._waiting.clear()
        for pool in (_Pool.LARGE, _Pool.SMALL):
            found = self._free_blocks(pool)
            for segment, block in found:
                if not segment.is_expandable and len(segment.blocks) == 1:
                    self._release(segment, block)
            for segment, block in found:
                if segment.is_expandable:
                    self._unmap(segment, block)

    def _release(self, segment: _Segment, block: _Block) -> None:
        self._counts["num_device_free"] += 1
        self._call(DeviceAction.SEGMENT_FREE, block.address, block.size, segment.stream)
        if block.size >= self._max_split:
            self._oversize[1].change(-1)
        segment.blocks = []
        self._recount(segment)
        self._segments.remove(segment)

    def _unmap(self, segment: _Segment, block: _Block) -> None:
        """Give back the pages that lie in a free block."""
        page = self._page_bytes(segment)
        base = (block.address >> _SPACE_BITS) << _SPACE_BITS
        begin = base + -(-(block.address - base) // page) * page
        end = base + (block.end - base) // page * page
        if begin >= end:
            return
        index = segment.blocks.index(block)
        born = self._searches[segment.pool]
        pieces = [_Block(begin, end - begin, is_mapped=False)]
        if begin > block.address:
            left = _Block(block.address, begin - block.address, born=born)
            pieces.insert(0, left)
        if block.end > end:
            pieces.append(_Block(end, block.end - end, born=born))
        segment.blocks[index : index + 1] = pieces
        self._merge(segment, next(b for b in pieces if not b.is_mapped))
        self._recount(segment)
        self._counts["num_device_free"] += 1
        self._call(DeviceAction.SEGMENT_UNMAP, begin, end - begin, segment.stream)
        if len(segment.blocks) == 1:
            self._segments.remove(segment)

    def _release_oversize(self, size: int, pool: _Pool, stream: int) -> bool:
        if self._max_split == math.inf:
            return False
        needed = max(size, self._rules.max_split_bytes)
        # A block from max_split_size on is a whole segment, in the large pool.
        own = [
            found
            for found in self._free_blocks(pool, stream)
            if found[1].size >= self._max_split and not found[0].is_expandable
        ]
        enough = [found for found in own if found[1].size >= needed]
        if enough:
            self._release(*enough[0])
            return True
        released = 0
        while own and released < needed:
            segment, block = own.pop()
            released += block.size
            self._release(segment, block)
        return released >= needed

    def _collect_garbage(self) -> None:
        limit = self._rules.limit_bytes
        threshold = int(self._rules.garbage_collection_threshold * float(limit))
        target = self.reserved_bytes - threshold
        if target <= 0:
            return
        whole = [f for f in self._free_blocks(_Pool.LARGE) if len(f[0].blocks) == 1]
        ages = {id(b): self._searches[_Pool.LARGE] - b.born for _, b in whole}
        total, count, reclaimed, has_freed = sum(ages.values()), len(whole), 0, True
        while reclaimed < target and has_freed and count > 0:
            least, has_freed = total / count, False
            for found in list(whole):
                segment, block = found
                if segment.is_expandable or ages[id(block)] < least:
                    continue
                has_freed = True
                reclaimed += block.size
                total -= ages[id(block)]
                count -= 1
                whole.remove(found)
                self._release(segment, block)


def _must(holds: object, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _grown_size(segment: _Segment, block: _Block) -> int:
    """Return how large a block can become by mapping what follows it."""
    index = segment.blocks.index(block) + 1
    following = segment.blocks[index] if index < len(segment.blocks) else None
    can_grow = following is not None and not following.is_mapped
    return block.size + (following.size if following is not None and can_grow else 0)


def _run_bytes(blocks: list[_Block], start: int, enough: int) -> int:
    """Return the bytes of the free blocks from a position on, up to what is enough."""
    total = 0
    for block in blocks[start:]:
        if not block.is_free or total >= enough:
            break
        total += block.size
    return total


def check_rules(rules: Rules) -> None:
    """Refuse rules that are out of range.

    Raises
    ------
    ValueError
        If one is.
    """
    split, rounding = rules.max_split_bytes, rules.max_non_split_rounding_bytes
    require(
        split == _NONE or 0 < split <= _MOST_LIMIT,
        "max_split_size is not 1 to 2**50, nor -1",
    )
    require(0 <= rounding <= _MOST_LIMIT, "max_non_split_rounding is not 0 to 2**50")
    segment = rules.large_segment_bytes
    require(split in {_NONE, max(split, segment)}, "max_split_size is below a segment")
    require(
        MIN_LARGE_BYTES <= segment <= _MOST_SEGMENT and not segment % ROUND_LARGE_BYTES,
        "a large segment is not 10 MiB to 1 GiB, in steps of 2 MiB",
    )
    require(len(rules.divisions) == INTERVALS, "there are not 16 numbers of divisions")
    for number in rules.divisions:
        require(
            0 <= number <= _MOST_LIMIT and not number & (number - 1),
            "a number of divisions is neither 0 nor a power of two",
        )
    require(
        0.0 <= rules.garbage_collection_threshold < 1.0,
        "the threshold is not 0 to below 1",
    )
    for number in (rules.limit_bytes, rules.capacity_bytes):
        require(
            number == _NONE or 0 <= number <= _MOST_LIMIT,
            "a limit is not 0 to 2**50, nor -1",
        )
    for address in rules.segment_addresses:
        require(0 <= address <= _MOST_ADDRESS, "an address is not 0 to 2**60")


def check_requests(requests: Sequence[Request], segment_bytes: int) -> None:
    """Refuse requests that are none, or too large to be counted.

    Raises
    ------
    ValueError
        If there is one.
    """
    requested = 0
    for kind, _, size_bytes, stream in requests:
        require(
            RequestKind.ALLOCATE <= kind <= RequestKind.EMPTY_CACHE,
            "there is no such kind of request",
        )
        require(0 <= stream < _MOST_STREAMS, "a stream is not 0 to 255")
        if kind == RequestKind.ALLOCATE:
            require(0 < size_bytes <= _MOST_REQUESTED, "a size is not 1 to 2**48")
            requested += size_bytes
    require(requested <= _MOST_REQUESTED, "the requests come to more than 2**48 bytes")
    require(
        len(requests) * segment_bytes <= _MOST_SEGMENTS,
        "the segments may come to more than 2**50 bytes",
    )


@native
def replay_requests(
    requests: Sequence[Request], rules: Rules, check_every: int
) -> Replayed:
    """Answer requests in order.

    Parameters
    ----------
    requests
        What is asked, at most 2**48 bytes in all.
    rules
        From :func:`rules_of`.
    check_every
        After how many requests the allocator checks itself; 0 for never.

    Returns
    -------
    Replayed
        For each request the address of its block (-1 where it makes none, or where
        there is no room), the bytes reserved and the bytes allocated after it; the
        statistics in the order of :data:`STATISTICS`; what was asked of the device; the
        segments and their blocks at the end.

    Raises
    ------
    ValueError
        If a rule or request is out of range, a block is allocated twice, freed or used
        without having been allocated, or a prescribed address is in use.

    Notes
    -----
    The native twin takes time O(log blocks) a request, this one O(blocks).
    """
    rules = Rules(*rules)
    check_rules(rules)
    check_requests(requests, rules.large_segment_bytes)
    require(check_every >= 0, "a number is negative")
    allocator = CachingAllocator(rules)
    addresses: list[int] = []
    reserved: list[int] = []
    allocated: list[int] = []
    for position, request in enumerate(requests, 1):
        addresses.append(allocator.take(request))
        reserved.append(allocator.reserved_bytes)
        allocated.append(allocator.allocated_bytes)
        if check_every and position % check_every == 0:
            allocator.check()
    segments, blocks = allocator.snapshot()
    statistics = list(allocator.memory_stats().values())
    return (
        *(addresses, reserved, allocated, statistics),
        *(allocator.calls, segments, blocks),
    )
