"""The layout of one arena: what a perfect allocator would need for a step's blocks.

Blocks with known lifetimes are placed in one stretch of memory, the largest first, each
at the lowest address where it overlaps no other that lives at the same time (greedy by
size [1]_). The end of the highest block is what such an arena takes; the most bytes
live at once are a lower bound on it.

References
----------
.. [1] Y. Pisarchyk, J. Lee. Efficient memory management for deep neural net inference.
   MLSys workshop 2020.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remat.core.checks import require
from remat.memory.caching_allocator import Request, RequestKind


class Lifetime(NamedTuple):
    """A block that lives from one request to before another, with its bytes."""

    start: int
    end: int
    size_bytes: int


def lifetimes(requests: Sequence[Request], round_bytes: int = 512) -> list[Lifetime]:
    """Return the lifetimes of the blocks that requests allocate.

    Parameters
    ----------
    requests
        Allocations and frees; others count for nothing.
    round_bytes
        Sizes are rounded up to a multiple of it, at least 1.
    """
    born: dict[int, tuple[int, int]] = {}
    found: list[Lifetime] = []
    for now, (kind, block, size_bytes, _) in enumerate(requests):
        if kind == RequestKind.ALLOCATE:
            born[block] = (now, -(-size_bytes // round_bytes) * round_bytes)
        elif kind == RequestKind.FREE:
            start, size = born.pop(block)
            found.append(Lifetime(start, now, size))
    found.extend(Lifetime(start, len(requests), size) for start, size in born.values())
    return sorted(found)


def greedy_by_size(blocks: Sequence[Lifetime]) -> list[int]:
    """Return an address for each block, none overlapping one that lives with it.

    Raises
    ------
    ValueError
        If a block ends before it starts, or has no bytes.

    Notes
    -----
    Time O(n²) in numpy, for n blocks.
    """
    for block in blocks:
        require(block.start <= block.end, "a block ends before it starts")
        require(block.size_bytes > 0, "a block has no bytes")
    starts = np.array([block.start for block in blocks], dtype=np.int64)
    ends = np.array([block.end for block in blocks], dtype=np.int64)
    sizes = np.array([block.size_bytes for block in blocks], dtype=np.int64)
    addresses = np.full(len(blocks), -1, dtype=np.int64)
    order = sorted(range(len(blocks)), key=lambda i: (-sizes[i], starts[i]))
    for index in order:
        beside = np.nonzero(
            (addresses >= 0) & (starts < ends[index]) & (ends > starts[index])
        )[0]
        beside = beside[np.argsort(addresses[beside], kind="stable")]
        address = 0
        for other in beside:
            if addresses[other] - address >= sizes[index]:
                break
            address = max(address, int(addresses[other] + sizes[other]))
        addresses[index] = address
    return addresses.tolist()


def arena_bytes(requests: Sequence[Request]) -> int:
    """Return what an arena that is laid out greedily takes for these requests."""
    blocks = lifetimes(requests)
    placed = zip(blocks, greedy_by_size(blocks), strict=True)
    return max((address + b.size_bytes for b, address in placed), default=0)
