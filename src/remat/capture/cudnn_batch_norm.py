"""Batch norm in training as eager PyTorch runs it on a card: by cuDNN.

The tracer takes batch norm apart into torch's own kernel, whose sums cuDNN adds in
another order. Torch has an operator that chooses between the two as
``torch.batch_norm`` does (``Normalization.cpp``, ``_select_batch_norm_backend``). Where
cuDNN is chosen, that operator is traced. What cuDNN reserves for the backward pass is
one of its results.
"""

import operator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, fx

from remat.torch_compat.attributes import composite_kernel
from remat.torch_compat.names import (
    BatchNormBackend,
    FakeTensor,
    batch_norm_reserve_bytes,
    batch_norm_with_update,
    disable_current_modes,
    functional_batch_norm_with_update,
    select_batch_norm_backend,
    unset_fake_temporarily,
)
from remat.torch_compat.patches import patched, python_kernels

_aten = torch.ops.aten

_RESERVE = 3
"""Position of what is reserved among the results."""


def cudnn_batch_norm() -> AbstractContextManager[None]:
    """Trace batch norm as cuDNN's wherever eager PyTorch calls cuDNN."""
    return patched(python_kernels({_aten.batch_norm.default: _batch_norm}))


def is_cudnn(x: Tensor, others: tuple[Tensor | None, ...], eps: float) -> bool:
    """Return whether eager PyTorch trains this batch norm by cuDNN.

    ``others`` are weight, bias, running mean and running variance. Without one of them
    torch's own kernel is traced, and with sizes that vary.
    """
    return (
        x.device.type == "cuda"
        and all(value is not None for value in others)
        and all(isinstance(size, int) for size in x.shape)
        and select_batch_norm_backend(x, *others, True, eps) == BatchNormBackend.Cudnn  # noqa: FBT003
    )


def _batch_norm(  # noqa: PLR0913, PLR0917 - the operator has that many
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
    cudnn_enabled: bool,  # noqa: FBT001
) -> Tensor:
    others = (weight, bias, running_mean, running_var)
    if training and cudnn_enabled and is_cudnn(x, others, eps):
        return batch_norm_with_update(x, *others, momentum, eps)[0]
    return composite_kernel(_aten.batch_norm.default)(
        x, *others, training, momentum, eps, cudnn_enabled
    )


def correct_reserves(joint: fx.GraphModule) -> None:
    """Give what is reserved its size: the tracer's formula says that it is empty."""
    for node in joint.graph.nodes:
        if node.target is not functional_batch_norm_with_update:
            continue
        x: Tensor = node.args[0].meta["val"]
        if x.device.type != "cuda":  # Nothing is reserved.
            continue
        results = list(node.meta["val"])
        results[_RESERVE] = _reserve(x, results[_RESERVE])
        node.meta["val"] = tuple(results)
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == _RESERVE:
                user.meta["val"] = results[_RESERVE]


def _reserve(x: Tensor, like: FakeTensor) -> Tensor:
    with unset_fake_temporarily(), disable_current_modes():
        real = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        size_bytes = batch_norm_reserve_bytes(real, True)  # noqa: FBT003
    with like.fake_mode:
        return torch.empty(size_bytes, dtype=torch.uint8, device=x.device)
