"""Closed formulas: bytes of one of many processes between which FSDP2 cuts a model.

A parameter is cut along its first dimension, and each piece is padded to as many rows
as the first one has.
"""

import math
from collections.abc import Sequence

import torch

_COUNT_BYTES = 4


def piece_bytes(parameters: Sequence[torch.Tensor], processes: int) -> int:
    """Return what the first process has: as many whole rows as any."""
    return sum(
        p.dtype.itemsize * -(-p.shape[0] // processes) * math.prod(p.shape[1:])
        for p in parameters
    )


def gathered_bytes(parameters: Sequence[torch.Tensor], processes: int) -> int:
    """Return what all pieces take together: of parameters, or of their gradients."""
    return processes * piece_bytes(parameters, processes)


def adamw_bytes(parameters: Sequence[torch.Tensor], processes: int) -> int:
    """Return the state of AdamW: two moments, and for each parameter its steps."""
    moments_bytes = 2 * piece_bytes(parameters, processes)
    return moments_bytes + _COUNT_BYTES * len(parameters)
