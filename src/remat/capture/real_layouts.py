"""Layouts that the tracer gets wrong, as the kernels choose them.

A step is traced on fake tensors, whose strides are to be those of real ones: whether a
later reshape is a view or a copy is decided by them. Of batch norm on an input that is
neither contiguous nor channels-last the tracer thinks that the result is laid out as
the input; the CPU's kernels lay it out contiguously.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten

_LAID_OUT_AFTER: dict[Any, int] = {
    _aten.native_batch_norm.default: 0,
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}
"""Operator -> position of the argument whose memory format its first result takes."""


@contextmanager
def real_layouts() -> Generator[None]:
    """Trace batch norm with the layouts of the CPU's kernels."""
    formulas = {operator: decomposition_table[operator] for operator in _LAID_OUT_AFTER}
    # What was found for fake tensors before is remembered across traces.
    FakeTensorMode.cache_clear()
    for operator, formula in formulas.items():
        decomposition_table[operator] = _laid_out(formula, _LAID_OUT_AFTER[operator])
    try:
        yield
    finally:
        decomposition_table.update(formulas)
        FakeTensorMode.cache_clear()


def _laid_out(formula: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Return the tracer's formula with its result laid out as a real kernel does."""

    # The tracer looks at where a formula comes from.
    @wraps(formula)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        first, *others = formula(*args, **kwargs)
        if first is not None and first.device.type == "cpu":
            format_ = suggest_memory_format(args[position])
            first = torch.empty_like(first, memory_format=format_)
        return (first, *others)

    return laid_out
