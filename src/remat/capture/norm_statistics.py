"""What normalisations return, where the tracer's fake kernels get it wrong.

With an input in half precision and parameters in single, as under autocast, mean and
deviation are saved in single precision; the fake kernels say half. Where the input
takes no gradient, as at the start of a model, batch norm makes none; the fake kernels
do. So each such operator runs once on a few numbers, and what it says counts.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from remat.capture.joint_program import is_view
from remat.torch_compat.names import (
    FakeTensor,
    batch_norm_without_statistics,
    disable_current_modes,
    functional_batch_norm,
    functional_batch_norm_with_update,
    unset_fake_temporarily,
)

_HALF = (torch.bfloat16, torch.float16)

aten = torch.ops.aten


def _few(tensor: object, shape: Sequence[int]) -> object:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return torch.ones(shape, dtype=tensor.dtype, device=tensor.device)


def _small_batch_norm(values: Sequence[Any]) -> list[Any]:
    small = [2, 1, *[2] * (values[0].dim() - 2)]
    return [_few(values[0], small), *[_few(value, [1]) for value in values[1:]]]


def _small_layer_norm(values: Sequence[Any]) -> list[Any]:
    x, _, weight, bias, *rest = values
    return [_few(x, [2, 2]), [2], _few(weight, [2]), _few(bias, [2]), *rest]


def _small_group_norm(values: Sequence[Any]) -> list[Any]:
    x, weight, bias, *_, eps = values
    return [_few(x, [2, 2, 2]), _few(weight, [2]), _few(bias, [2]), 2, 2, 2, 1, eps]


_SMALL: dict[Any, Callable[[Sequence[Any]], list[Any]]] = {
    functional_batch_norm: _small_batch_norm,
    functional_batch_norm_with_update: _small_batch_norm,
    batch_norm_without_statistics: _small_batch_norm,
    aten.native_layer_norm.default: _small_layer_norm,
    aten.native_group_norm.default: _small_group_norm,
}
"""Operator -> arguments of the same types, and a few numbers in each."""


def _small_batch_norm_backward(values: Sequence[Any]) -> list[Any]:
    gradient, x, *rest = values
    small = [2, 1, *[2] * (x.dim() - 2)]
    return [_few(gradient, small), _few(x, small), *[_few(v, [1]) for v in rest]]


_MASKED: dict[Any, Callable[[Sequence[Any]], list[Any]]] = {
    aten.native_batch_norm_backward.default: _small_batch_norm_backward,
}
"""Operator with a mask of gradients, in which the fake kernel makes one that is not."""


def correct_statistics(joint: fx.GraphModule) -> None:
    """Give the fake results of normalisations the types that the real ones have.

    What they do not make is ``None``.
    """
    for node in joint.graph.nodes:
        masked = _MASKED.get(node.target)
        if masked is not None and not all(node.args[-1]):
            results = _results(node.target, masked, _values(node))
            node.meta["val"] = tuple(
                None if real is None else fake
                for fake, real in zip(node.meta["val"], results, strict=True)
            )
        small = _SMALL.get(node.target)
        if small is None:
            continue
        values = _values(node)
        types = {v.dtype for v in values if isinstance(v, torch.Tensor)}
        if values[0].dtype in _HALF and len(types) > 1:
            results = _results(node.target, small, values)
            _correct(node, [result.dtype for result in results])


def _values(node: fx.Node) -> list[Any]:
    return [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]


def _results(
    target: Callable[..., Sequence[Any]],
    small: Callable[[Sequence[Any]], list[Any]],
    values: Sequence[Any],
) -> list[Any]:
    with unset_fake_temporarily(), disable_current_modes(), torch.no_grad():
        return list(target(*small(values)))


def _correct(node: fx.Node, types: Sequence[torch.dtype]) -> None:
    results: list[torch.Tensor] = []
    for position, (fake, dtype) in enumerate(zip(node.meta["val"], types, strict=True)):
        results.append(_retyped(fake, dtype))
        if fake.dtype is not dtype:
            for user in node.users:
                if user.target is operator.getitem and user.args[1] == position:
                    _correct_views(user, dtype)
    node.meta["val"] = tuple(results)


def _correct_views(node: fx.Node, dtype: torch.dtype) -> None:
    node.meta["val"] = _retyped(node.meta["val"], dtype)
    for user in node.users:
        if is_view(user):
            _correct_views(user, dtype)


def _retyped(fake: FakeTensor, dtype: torch.dtype) -> torch.Tensor:
    if fake.dtype is dtype:
        return fake
    with fake.fake_mode:
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=dtype, device=fake.device
        )
