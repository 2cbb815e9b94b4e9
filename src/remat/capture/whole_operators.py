"""Operators that eager PyTorch runs whole, kept whole while a step is traced.

The tracer takes resampling operators apart into many small ones, for compilers that
fuse them again. Run one by one these need several times the memory and time, and round
otherwise. The dispatcher does so for as long as an operator has a Python kernel for it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

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
_KEYS = (
    torch._C.DispatchKey.Autograd,
    torch._C.DispatchKey.CompositeImplicitAutograd,
)


@contextmanager
def whole_operators() -> Generator[None]:
    """Trace resampling as the operators that eager PyTorch runs."""
    taken: list[tuple[Any, Any, Any]] = []
    for name in _NAMES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            for key in _KEYS:
                if key in op.py_kernels:
                    taken.append((op, key, op.py_kernels.pop(key)))
                    op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
