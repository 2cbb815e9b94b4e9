"""The layout in which a traced step takes the gradients of its outputs.

The tracer expects the gradient of an output to have the output's strides, and copies
other gradients into a block with them. Of an output that is a part of a larger tensor,
such as one of several heads that ``torch.split`` cuts out of the last layer, the
strides have gaps: that block is almost as large as the whole tensor, once for every
part. What a loss makes is dense, in eager PyTorch too; so here such a gradient is
expected dense.
"""

from contextlib import AbstractContextManager

import torch

from remat.capture.varying_sizes import surely_equal
from remat.torch_compat.names import (
    is_traceable_wrapper_subclass,
    suggest_memory_format,
)
from remat.torch_compat.patches import gradient_formats, patched


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last, both included.

    Examples
    --------
    >>> spanned_bytes(torch.zeros(4, 6)[:, :2])
    80
    """
    if surely_equal(tensor.numel(), 0):
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((n - 1) * step for n, step in steps))


def gradient_format(output: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format expected of an output's gradient.

    ``None`` where it is the output's own strides that are expected.
    """
    if output.layout != torch.strided:
        return None
    # ``nbytes`` knows no sizes that vary.
    dense_bytes = output.numel() * output.element_size()
    if surely_equal(spanned_bytes(output), dense_bytes):
        return None
    return suggest_memory_format(output)


def dense_gradients() -> AbstractContextManager[None]:
    """Trace so that gradients of outputs whose strides have gaps come dense."""
    return patched(gradient_formats(_format_of_gaps))


def _format_of_gaps(output: torch.Tensor) -> torch.memory_format | None:
    if is_traceable_wrapper_subclass(output):
        return None
    return gradient_format(output)
