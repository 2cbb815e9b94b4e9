"""Layouts that the tracer gets wrong, as the kernels choose them.

A step is traced on fake tensors, whose strides should be those of real ones: they say
whether a later reshape is a view or a copy, and with what strides later operators are
measured. For some operators the tracer's formula lays its result out otherwise than the
CPU's kernel does:

- batch norm and its gradient lay their result out contiguously, or channels-last, and
  not as the input is;
- the gradients of log-softmax and of layer norm are contiguous, whatever the input is;
- the gradient of dropout is laid out as a product of its inputs.

Strides of dimensions of size 1 say nothing about addresses, but kernels look at them to
tell channels-last from contiguous, and there the tracer can still be wrong.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten

Layout = Callable[..., Tensor]
"""From the formula's result and the operator's arguments to a tensor laid out right."""


def _after_input(result: Tensor, values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(result, memory_format=suggest_memory_format(values))


def _after_second_input(result: Tensor, _first: Tensor, *rest: Any) -> Tensor:
    return _after_input(result, *rest)


def _contiguous(result: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _product(_result: Tensor, gradient: Tensor, mask: Tensor, *_: Any) -> Tensor:
    return gradient * mask


_LAYOUTS: dict[Any, Layout] = {
    _aten.native_batch_norm.default: _after_input,
    _aten._native_batch_norm_legit.default: _after_input,
    _aten._native_batch_norm_legit.no_stats: _after_input,
    _aten._native_batch_norm_legit_functional.default: _after_input,
    _aten.native_batch_norm_backward.default: _after_second_input,
    _aten._log_softmax_backward_data.default: _contiguous,
    _aten.native_dropout_backward.default: _product,
    _aten.native_layer_norm_backward.default: _contiguous,
}
"""Operator -> how the CPU's kernel lays out its first result."""


@contextmanager
def real_layouts() -> Generator[None]:
    """Trace these operators with the layouts of the CPU's kernels."""
    formulas = {operator: decomposition_table[operator] for operator in _LAYOUTS}
    # What was found for fake tensors before is remembered across traces.
    FakeTensorMode.cache_clear()
    for operator, layout in _LAYOUTS.items():
        decomposition_table[operator] = _laid_out(formulas[operator], layout)
    try:
        yield
    finally:
        decomposition_table.update(formulas)
        FakeTensorMode.cache_clear()


def _laid_out(formula: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Return the tracer's formula with its result laid out as a real kernel does."""

    # The tracer looks at where a formula comes from.
    @wraps(formula)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        results = formula(*args, **kwargs)
        is_one = isinstance(results, Tensor)
        first, *others = [results] if is_one else results
        if first is not None and first.device.type == "cpu":
            first = layout(first, *args)
        return first if is_one else (first, *others)

    return laid_out
