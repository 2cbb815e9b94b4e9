"""Pinned host memory, in accounts by device: torch's statistics do not show it."""

import weakref
from collections import Counter

import torch

from remat.runtime.marks import mark_pinned
from remat.torch_compat.accelerators import pinned_bytes

PINNED_BYTES: Counter[str] = Counter()
"""The pinned bytes in use, by the plan's name of the device.

Pinned blocks are rounded up to powers of two by torch's allocator; what is counted are
the bytes that were asked for.
"""


def pinned_block(size_bytes: int, device_name: str) -> torch.Tensor:
    """Return pinned bytes that count on a device for as long as they exist."""
    block = pinned_bytes(size_bytes)
    _count(device_name, size_bytes)
    weakref.finalize(block.untyped_storage(), _count, device_name, -size_bytes)
    return block


def _count(device_name: str, change_bytes: int) -> None:
    PINNED_BYTES[device_name] += change_bytes
    mark_pinned(device_name, change_bytes)
