"""Scratch memory of reductions on CUDA: what blocks of threads hand to each other.

Where an output is summed up by several blocks of threads, each leaves the sums of its
threads in the memory of the device, of which the last one makes the result
(``Reduce.cuh``, torch 2.11). This is mostly twice as much as the reduction reads: each
thread sums up 16 values at least. It is an exact function of shapes, strides, and how
many threads the device runs at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat.profile.arguments import tensors_in
from remat.profile.operators import OperatorCall
from remat.torch_compat.attributes import schema_of

_WARP = 32
_MOST_THREADS = 512
_FEWEST_VALUES = 16
_MOST_VALUES = 256
_VECTOR = 4
_LEAST_VECTORISED = 128
_SEMAPHORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension of a reduction's input; strides are in elements."""

    size: int
    stride: int
    output_stride: int

    @property
    def is_reduced(self) -> bool:
        return self.output_stride == 0

    def goes_on_in(self, other: "_Axis") -> bool:
        """Return whether this one and the next slower are one in memory."""
        return (
            self.size * self.stride == other.stride
            and self.size * self.output_stride == other.output_stride
        )


def reduction_bytes(call: OperatorCall, resident_threads: int) -> int:
    """Return the scratch memory of an operator that reduces dimensions on CUDA.

    0 for all others.

    Parameters
    ----------
    call
        The operator and its arguments, fake or real.
    resident_threads
        How many threads the device runs at once.
    """
    schema = schema_of(call.target)
    if schema is None or not resident_threads:
        return 0
    partial_bytes = _PARTIAL_BYTES.get(schema.name.partition("::")[2])
    tensors = tensors_in([call.args, dict(call.kwargs)])
    if partial_bytes is None or not tensors or not tensors[0].dtype.is_floating_point:
        return 0
    given = dict(zip((a.name for a in schema.arguments), call.args, strict=False))
    dims = (given | dict(call.kwargs)).get("dim")
    axes = _axes(tensors[0], [dims] if isinstance(dims, int) else dims)
    return _buffer_bytes(axes, partial_bytes(tensors[0].dtype), resident_threads)


def _axes(tensor: torch.Tensor, dims: Any) -> list[_Axis]:
    """Return the dimensions as torch's iterator orders and joins them."""
    reduced = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    output_stride, found = 1, list[_Axis]()
    for dim in reversed(range(tensor.dim())):
        size, is_reduced = tensor.shape[dim], dim in reduced
        if size > 1:
            stride = 0 if is_reduced else output_stride
            found.append(_Axis(size, tensor.stride(dim), stride))
        output_stride *= 1 if is_reduced else size
    found.sort(key=lambda axis: (axis.output_stride, axis.stride))
    joined = found[:1]
    for axis in found[1:]:
        if joined[-1].goes_on_in(axis):
            joined[-1] = replace(joined[-1], size=joined[-1].size * axis.size)
        else:
            joined.append(axis)
    return joined


def _product(axes: Sequence[_Axis]) -> int:
    size = 1
    for axis in axes:
        size *= axis.size
    return size


def _buffer_bytes(
    axes: Sequence[_Axis], partial_bytes: int, resident_threads: int
) -> int:
    """Return what ``setReduceConfig`` makes a kernel ask for."""
    reduced = [axis for axis in axes if axis.is_reduced]
    kept = [axis for axis in axes if not axis.is_reduced]
    output_count, input_count = _product(kept), _product(reduced)
    if not reduced or not output_count * input_count:
        return 0
    along_input = not kept or reduced[0].stride < kept[0].stride
    vector = 1
    if along_input:
        width, height = input_count, output_count
        if len(axes) == 1 and axes[0].stride == 1 and width > _LEAST_VECTORISED:
            width //= _VECTOR
    else:
        width, height = output_count, input_count
        if kept[0].stride == 1:
            others = [axis.stride for axis in axes if axis is not kept[0]]
            vector = _common_vector([kept[0].size, *others])
            width //= vector
    block_width, block_height = _block(width, height, _MOST_THREADS // vector)
    values = _parts(input_count, block_width) if along_input else input_count
    grid = output_count // vector
    if not along_input:
        grid = _parts(grid, block_width)
    if values < min(block_height * _FEWEST_VALUES, _MOST_VALUES):
        return 0  # Each row of threads has an output of its own.
    values = _parts(values, block_height)
    most_blocks = resident_threads // (block_width * block_height)
    if values < _MOST_VALUES or grid > most_blocks:
        return 0
    blocks = max(
        min(_parts(most_blocks, grid), _parts(values, _FEWEST_VALUES)),
        _parts(values, _MOST_VALUES),
    )
    if blocks == 1:
        return 0
    size_bytes = partial_bytes * output_count * blocks
    if not along_input:
        size_bytes *= block_width * vector
    return size_bytes + _SEMAPHORE_BYTES * grid


def _block(width: int, height: int, most_threads: int) -> tuple[int, int]:
    """Return how wide and high a block of threads is: powers of two."""
    wide = _last_power_of_two(min(width, most_threads))
    high = _last_power_of_two(min(height, most_threads))
    block_height = min(high, most_threads // min(wide, _WARP))
    return min(wide, most_threads // block_height), block_height


def _last_power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


def _common_vector(sizes: Sequence[int]) -> int:
    """Return how many outputs a thread reads at once."""
    vector = _VECTOR
    while any(size % vector for size in sizes):
        vector //= 2
    return vector


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


def _of_sums(dtype: torch.dtype) -> int:
    return max(4, dtype.itemsize)


_PARTIAL_BYTES: Mapping[str, Callable[[torch.dtype], int]] = {
    **dict.fromkeys(
        ("sum", "nansum", "mean", "prod", "norm", "linalg_vector_norm"), _of_sums
    ),
    "amax": lambda dtype: dtype.itemsize,
    "amin": lambda dtype: dtype.itemsize,
    # Value and place.
    **dict.fromkeys(("max", "min", "argmax", "argmin"), lambda _: 16),
    # Mean, squares, and the count as integer and as number (``WelfordData``).
    **dict.fromkeys(
        ("var", "std", "var_mean", "std_mean"),
        lambda dtype: 4 * _of_sums(dtype),
    ),
}
"""Operator -> bytes of what a thread leaves of values of a type."""
