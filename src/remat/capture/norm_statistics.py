"""The types of what normalisations save, which the tracer gets wrong in half precision.

With an input in half precision and parameters in single, as under autocast, mean and
deviation are saved in single precision; the tracer's fake kernels say half. So each
such operator runs once on a few numbers, and what it says counts.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from remat.capture.joint_program import is_view

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
    aten._native_batch_norm_legit_functional.default: _small_batch_norm,
    aten._batch_norm_with_update_functional.default: _small_batch_norm,
    aten._native_batch_norm_legit.no_stats: _small_batch_norm,
    aten.native_layer_norm.default: _small_layer_norm,
    aten.native_group_norm.default: _small_group_norm,
}
"""Operator -> arguments of the same types, and a few numbers in each."""


def correct_statistics(joint: fx.GraphModule) -> None:
    """Give the fake results of normalisations the types that the real ones have."""
    for node in joint.graph.nodes:
        small = _SMALL.get(node.target)
        if small is None:
            continue
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
        types = {v.dtype for v in values if isinstance(v, torch.Tensor)}
        if values[0].dtype in _HALF and len(types) > 1:
            _correct(node, _types_of_results(node.target, small, values))


def _types_of_results(
    target: Callable[..., Sequence[torch.Tensor]],
    small: Callable[[Sequence[Any]], list[Any]],
    values: Sequence[Any],
) -> list[torch.dtype]:
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        return [result.dtype for result in target(*small(values))]


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
