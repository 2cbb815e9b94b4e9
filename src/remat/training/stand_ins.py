"""Stand-ins for tensors without memory, so that a step is planned before it has any."""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from remat.capture.surroundings import plain_tensors, tensors_in
from remat.capture.tracing import is_without_memory
from remat.core.errors import CaptureError
from remat.profile.arguments import empty_like

Step = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any], Any]
"""A model, its positional and keyword arguments, and its optimizer or ``None``."""


def with_stand_ins(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], optimizer: Any
) -> Step:
    """Return the step with memory, that nobody touched, for tensors that have none.

    The system gives memory to a process when it is written to, and planning with
    estimated costs writes to none of it. The parts are copied, tensors with memory are
    not; where all have some, the parts themselves are returned.

    Raises
    ------
    CaptureError
        If tensors of a ``FakeTensorMode`` claim to be on another device than the CPU,
        or the model or the optimizer cannot be copied.
    """
    groups = getattr(optimizer, "param_groups", ())
    states = getattr(optimizer, "state", {}).values()
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *plain_tensors(model),
        *tensors_in((args, dict(kwargs))),
        *(parameter for group in groups for parameter in group["params"]),
        *tensors_in([dict(state) for state in states]),
    ]
    if not any(map(is_without_memory, tensors)):
        return model, args, kwargs, optimizer
    stand_ins = {id(tensor): _stand_in(tensor) for tensor in tensors}
    try:
        return copy.deepcopy((model, args, kwargs, optimizer), stand_ins)
    # What users keep in their modules may refuse to be copied with any exception.
    except Exception as error:
        msg = (
            "a model without memory is copied to be planned, and this one cannot be: "
            f"{type(error).__name__}: {error}; give it memory, as by "
            'model.to_empty(device="cpu")'
        )
        raise CaptureError(msg) from error


def where_memory_is() -> AbstractContextManager[Any]:
    """Return what makes new tensors on the CPU where they would be on ``meta``."""
    if torch.get_default_device().type == "meta":
        return torch.device("cpu")
    return nullcontext()


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    if not is_without_memory(tensor):
        return tensor
    if tensor.device.type not in {"meta", "cpu"}:
        msg = (
            f"a tensor of a FakeTensorMode says that it is on {tensor.device}; without "
            "memory, steps are planned for the CPU: make the model under "
            'torch.device("meta")'
        )
        raise CaptureError(msg)
    made = empty_like(tensor, torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    else:
        made.requires_grad_(tensor.requires_grad)
    if tensor.is_leaf and tensor.grad is not None:
        made.grad = _stand_in(tensor.grad)
    return made
