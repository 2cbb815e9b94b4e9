"""Layouts that the tracer gets wrong, as the kernels choose them.

A step is traced on fake tensors, whose strides should be those of real ones: they say
whether a later reshape is a view or a copy, and with what strides later operators are
measured. For some operators the tracer's formula lays its result out otherwise than the
CPU's kernel does; the table below says how.

Strides of dimensions of size 1 say nothing about addresses, but kernels look at them to
tell channels-last from contiguous: a channels-last map of one pixel, or of one channel,
is contiguous too, and each kernel settles that its own way. There the kernel itself is
asked, on zeros, once for each such operator. A view of a batch of one is another such
case: the stride of the batch decides whether it is taken for channels-last.

Of the layers of an ``nn.LSTM`` it gets sizes wrong, too, and of batch norm in lower
precision the types of the statistics.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from remat.capture.recurrent import REAL_RESULTS
from remat.torch_compat.attributes import schema_of
from remat.torch_compat.names import (
    DisablePythonDispatcher,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    batch_norm_legit,
    batch_norm_without_statistics,
    functional_batch_norm,
    log_softmax_backward,
    make_contiguous_strides_for,
    no_dispatch,
    suggest_memory_format,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    unsafe_view,
)
from remat.torch_compat.patches import fake_results, patched

_aten = torch.ops.aten

Layout = Callable[..., Tensor]
"""From the tracer's result and the operator's arguments to a tensor laid out right."""


def _contiguous(result: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _after_input(result: Tensor, values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(result, memory_format=suggest_memory_format(values))


def _after_second_input(result: Tensor, _first: Tensor, *rest: Any) -> Tensor:
    return _after_input(result, *rest)


def _as_a_product(_result: Tensor, *args: Any) -> Tensor:
    first, second = (arg for arg in args if isinstance(arg, Tensor))
    return first * second


_LAYOUTS: dict[Any, Layout] = {
    # Contiguous whatever the inputs are.
    log_softmax_backward: _contiguous,
    _aten.glu_backward.default: _contiguous,
    _aten.huber_loss_backward.default: _contiguous,
    _aten.mse_loss_backward.default: _contiguous,
    _aten.native_layer_norm_backward.default: _contiguous,
    _aten.smooth_l1_loss_backward.default: _contiguous,
    # Channels-last if the values are, and contiguous otherwise.
    batch_norm_legit: _after_input,
    batch_norm_without_statistics: _after_input,
    functional_batch_norm: _after_input,
    _aten.native_batch_norm.default: _after_input,
    _aten.native_batch_norm_backward.default: _after_second_input,
    _aten.native_group_norm_backward.default: _after_second_input,
    _aten.reflection_pad2d_backward.default: _after_second_input,
    _aten.replication_pad2d_backward.default: _after_second_input,
    _aten.roll.default: _after_input,
    # As the elementwise product of its two inputs.
    _aten.binary_cross_entropy.default: _as_a_product,
    _aten.elu_backward.default: _as_a_product,
    _aten.hardsigmoid_backward.default: _as_a_product,
    _aten.hardswish_backward.default: _as_a_product,
    _aten.hardtanh_backward.default: _as_a_product,
    _aten.native_dropout_backward.default: _as_a_product,
    _aten.softplus_backward.default: _as_a_product,
}
"""Operator -> how the CPU's kernel lays out its first result."""

_BATCH_NORMS = frozenset(
    {
        batch_norm_legit,
        batch_norm_without_statistics,
        functional_batch_norm,
        _aten.native_batch_norm.default,
    }
)
"""Operators whose second and third results are of the type of their parameters."""

_VIEWS = frozenset({_aten.view.default, unsafe_view})
"""Operators to which the tracer gives other strides along dimensions of size 1."""


def _with_real_strides(view: Tensor, source: Tensor, size: Any) -> Tensor:
    """Return a view of a fake tensor with the strides that a view of a real one has."""
    numbers = (*source.shape, *size)
    if not all(isinstance(n, int) for n in numbers) or 1 not in view.shape:
        return view
    # Without the formulas of the tracer, which are those of such a tensor otherwise.
    with no_dispatch(), DisablePythonDispatcher():
        real = torch.empty_strided(source.shape, source.stride(), device="meta")
        stride = real.view(size).stride()
    if stride == view.stride():
        return view
    return view.as_strided(view.shape, stride, view.storage_offset())


def real_layouts() -> AbstractContextManager[None]:
    """Trace with the layouts of the CPU's kernels."""
    return patched(fake_results(_with_real_layouts))


def _with_real_layouts(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return the tracer's dispatch with its results laid out as real kernels do it."""

    @wraps(dispatch)
    def dispatch_impl(
        mode: FakeTensorMode, operator: Any, types: Any, args: Any, kwargs: Any
    ) -> Any:
        results = dispatch(mode, operator, types, args, kwargs)
        if operator in REAL_RESULTS:
            with mode:
                return REAL_RESULTS[operator](results, *args)
        if operator in _VIEWS:
            with mode:
                return _with_real_strides(results, *args)
        layout = _LAYOUTS.get(operator)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_asked = _makes_new_values(operator) and any(map(_is_ambiguous, inputs))
        if not (layout or is_asked):
            return results
        leaves, structure = tree_flatten(results)
        values = (*inputs, leaves[0])
        if not all(map(_is_ordinary, values)):
            return results
        with mode:
            if operator in _BATCH_NORMS and len(inputs) > 1:
                leaves[1:3] = [leaf.to(inputs[1].dtype) for leaf in leaves[1:3]]
            if is_asked and all(map(_is_known, values)):
                reals = _run_on_zeros(operator, args, kwargs)
                leaves = [
                    _laid_out_as(*pair) for pair in zip(leaves, reals, strict=True)
                ]
            elif layout:
                leaves[0] = layout(leaves[0], *args)
        return tree_unflatten(leaves, structure)

    return dispatch_impl


def _makes_new_values(operator: Any) -> bool:
    """Return whether zeros will do to see how a result is laid out.

    Matrices of zeros are refused by the factorisations, and nothing is known of what
    other libraries' operators do.
    """
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return False
    schema = schema_of(operator)
    return not (
        any(a.alias_info for a in (*schema.arguments, *schema.returns))
        or "linalg" in schema.name
        or "cholesky" in schema.name
    )


def _is_ambiguous(tensor: Tensor) -> bool:
    """Return whether the map can be read as contiguous and as something else."""
    return (
        tensor.dim() in (4, 5)
        and _is_known(tensor)
        and tensor.is_contiguous()
        and tensor.stride() != make_contiguous_strides_for(tensor.shape)
    )


def _is_known(value: Any) -> bool:
    """Return whether it is an ordinary tensor on the CPU, its sizes being numbers."""
    return _is_ordinary(value) and all(isinstance(size, int) for size in value.shape)


def _is_ordinary(value: Any) -> bool:
    """Return whether it is an ordinary tensor on the CPU."""
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.layout == torch.strided
    )


def _run_on_zeros(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the operator's real results for such arguments that are all zero."""
    with no_dispatch(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        args, kwargs = tree_map_only(Tensor, _zeros_like, (args, kwargs))
        return tree_leaves(operator(*args, **kwargs))


def _zeros_like(tensor: Tensor) -> Tensor:
    shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu").zero_()


def _laid_out_as(leaf: Any, real: Any) -> Any:
    if not isinstance(leaf, FakeTensor) or not isinstance(real, Tensor):
        return leaf
    return torch.empty_strided(
        leaf.shape, real.stride(), dtype=real.dtype, device=leaf.device
    )
