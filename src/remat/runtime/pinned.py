"""Pinned host memory, in accounts by device: torch's statistics do not show it."""

import weakref
from dataclasses import dataclass

import torch

from remat.torch_compat.accelerators import pinned_bytes


@dataclass(slots=True)
class PinnedAccount:
    """The pinned bytes in use on one device, and the most since the last reset.

    Pinned blocks are rounded up to powers of two by torch's allocator; what is counted
    are the bytes that were asked for.
    """

    used_bytes: int = 0
    peak_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """Count a block, or its release."""
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def reset(self) -> None:
        """Let the peak start from what is in use."""
        self.peak_bytes = self.used_bytes


ACCOUNTS: dict[str, PinnedAccount] = {}
"""By the plan's name of the device."""


def pinned_block(size_bytes: int, device_name: str) -> torch.Tensor:
    """Return pinned bytes that count on a device for as long as they exist."""
    block = pinned_bytes(size_bytes)
    account = ACCOUNTS.setdefault(device_name, PinnedAccount())
    account.add(size_bytes)
    weakref.finalize(block.untyped_storage(), account.add, -size_bytes)
    return block
