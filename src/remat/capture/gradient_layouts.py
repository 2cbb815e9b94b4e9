"""The layout in which a traced step takes the gradients of its outputs.

The tracer expects the gradient of an output to have the output's strides, and copies
other gradients into a block with them. Of an output that is a part of a larger tensor,
such as one of several heads that ``torch.split`` cuts out of the last layer, the
strides have gaps: that block is almost as large as the whole tensor, once for every
part. What a loss makes is dense, in eager PyTorch too; so here such a gradient is
expected dense.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last, both included.

    Examples
    --------
    >>> spanned_bytes(torch.zeros(4, 6)[:, :2])
    80
    """
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((n - 1) * step for n, step in steps))


def gradient_format(output: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format expected of an output's gradient.

    ``None`` where it is the output's own strides that are expected.
    """
    if output.layout != torch.strided or spanned_bytes(output) == output.nbytes:
        return None
    return suggest_memory_format(output)


@contextmanager
def dense_gradients() -> Generator[None]:
    """Trace so that gradients of outputs whose strides have gaps come dense."""
    descriptor = vars(MemoryFormatMeta)["from_tensor"]
    original = MemoryFormatMeta.from_tensor

    def from_tensor(
        t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> MemoryFormatMeta | None:
        expected = None if is_traceable_wrapper_subclass(t) else gradient_format(t)
        if expected is None:
            return original(t, *args, **kwargs)
        return MemoryFormatMeta(memory_format=expected)

    MemoryFormatMeta.from_tensor = staticmethod(from_tensor)
    try:
        yield
    finally:
        MemoryFormatMeta.from_tensor = descriptor
