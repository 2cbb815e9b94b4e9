"""What a traced call returns, noted while it is traced."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.comptime import ComptimeContext
from torch._subclasses.fake_tensor import FakeTensor

Note = Callable[[ComptimeContext], None]
"""Called by the tracer where a call is about to return."""

RETURNED = "returned"
"""Name of the local variable that holds what the call returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedTensor:
    """A tensor that a call returns, without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def note_nothing(_context: ComptimeContext) -> None:
    """Note nothing: a :data:`Note`."""


def note_tensor(take: Callable[[ReturnedTensor | None], None]) -> Note:
    """Return what gives ``take`` the tensor that a call returns.

    It gives ``None`` where the call returns anything but one tensor that was computed
    in it: several tensors, an object that holds them, an argument as it is.
    """

    def note(context: ComptimeContext) -> None:
        variable = context.get_local(RETURNED)
        take(None if variable.python_type() is not torch.Tensor else _tensor(variable))

    return note


def _tensor(variable: Any) -> ReturnedTensor | None:
    node = variable.as_proxy().node
    value = node.meta["example_value"]
    if node.op == "placeholder" or not isinstance(value, FakeTensor):
        return None
    return ReturnedTensor(
        shape=tuple(value.shape),
        stride=value.stride(),
        dtype=value.dtype,
        device=value.device,
        requires_grad=value.requires_grad,
    )
