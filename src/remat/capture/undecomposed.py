"""Operators that eager PyTorch runs whole, kept whole while a step is traced.

The tracer takes resampling operators apart into many small ones, for compilers that
fuse them again. Run one by one these need several times the memory and time, and round
otherwise. The dispatcher does so for as long as an operator has a Python kernel for it.
"""

from contextlib import AbstractContextManager

import torch

from remat.capture.python_kernels import python_kernels

_NAMES = (
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)


def whole_operators() -> AbstractContextManager[None]:
    """Trace resampling as the operators that eager PyTorch runs."""
    packets = [getattr(torch.ops.aten, name) for name in _NAMES]
    overloads = [getattr(p, overload) for p in packets for overload in p.overloads()]
    return python_kernels(dict.fromkeys(overloads))
