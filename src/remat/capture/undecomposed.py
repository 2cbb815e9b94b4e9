"""Operators that eager PyTorch runs whole, kept whole while a step is traced.

The tracer takes resampling operators apart into many small ones, for compilers that
fuse them again. Run one by one these need several times the memory and time, and round
otherwise. The dispatcher does so for as long as an operator has a Python kernel for it.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from remat.torch_compat.names import (
    upsample_bicubic2d_aa,
    upsample_bilinear2d_aa,
    upsample_nearest_exact1d,
    upsample_nearest_exact2d,
    upsample_nearest_exact3d,
)
from remat.torch_compat.patches import patched, python_kernels

_aten = torch.ops.aten

_PACKETS: tuple[Any, ...] = (
    _aten.upsample_linear1d,
    _aten.upsample_bilinear2d,
    _aten.upsample_trilinear3d,
    _aten.upsample_bicubic2d,
    _aten.upsample_nearest1d,
    _aten.upsample_nearest2d,
    _aten.upsample_nearest3d,
    upsample_nearest_exact1d,
    upsample_nearest_exact2d,
    upsample_nearest_exact3d,
    upsample_bilinear2d_aa,
    upsample_bicubic2d_aa,
)


def whole_operators() -> AbstractContextManager[None]:
    """Trace resampling as the operators that eager PyTorch runs."""
    overloads = [getattr(p, overload) for p in _PACKETS for overload in p.overloads()]
    return patched(python_kernels(dict.fromkeys(overloads)))
