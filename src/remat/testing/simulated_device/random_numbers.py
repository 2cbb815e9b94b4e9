"""Random numbers of the simulated device: a seed, and how many were drawn.

As Philox generators of cards do, its generator counts: its state is a seed and an
offset, sixteen bytes. Numbers are the CPU's, drawn from a seed that follows from both.
"""

import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_FORMAT = "<Qq"
_STEP = 4  # Numbers are drawn four at a time, also if fewer are wanted.


class Philox:
    """The state of the device's generator."""

    def __init__(self) -> None:
        self.seed, self.offset = 0, 0

    def manual_seed(self, seed: int) -> None:
        """Begin anew."""
        self.seed, self.offset = seed % 2**64, 0

    def state(self) -> torch.Tensor:
        """Return seed and offset as bytes."""
        raw = bytearray(struct.pack(_FORMAT, self.seed, self.offset))
        return torch.frombuffer(raw, dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from a state.

        Raises
        ------
        RuntimeError
            If it is no state of this kind of generator.
        """
        raw = bytes(state.tolist())
        if len(raw) != struct.calcsize(_FORMAT):
            msg = f"a state of the device's generator has 16 bytes, not {len(raw)}"
            raise RuntimeError(msg)
        self.seed, self.offset = struct.unpack(_FORMAT, raw)

    @contextmanager
    def drawing(self) -> Generator[list[int]]:
        """Let the CPU's kernels draw from here.

        Append to what is yielded how many numbers were wanted.
        """
        host = torch.default_generator
        before = host.get_state()
        host.manual_seed(hash((self.seed, self.offset)) % 2**63)
        wanted: list[int] = []
        try:
            yield wanted
        finally:
            host.set_state(before)
            self.offset += _STEP * -(-max(1, *wanted, 1) // _STEP)


GENERATOR = Philox()
"""The device's default generator."""


def get_rng_state(_device: Any = None) -> torch.Tensor:
    """Return the state of the default generator."""
    return GENERATOR.state()


def set_rng_state(state: torch.Tensor, _device: Any = None) -> None:
    """Set the state of the default generator; as CUDA's, from the host only."""
    if state.device.type != "cpu":
        msg = "RNG state must be a torch.ByteTensor"
        raise TypeError(msg)
    GENERATOR.set_state(state)
