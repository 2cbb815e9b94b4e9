"""What a traced call returns, noted while it is traced, and the loss in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remat.torch_compat.metadata import example_of
from remat.torch_compat.names import ComptimeContext, FakeTensor

Note = Callable[[ComptimeContext], None]
"""Called by the tracer where a call is about to return."""

RETURNED = "returned"
"""Name of the local variable that holds what the call returns."""

LOSS = "loss"
"""Name of the field of a loss in outputs."""

FOUND_LOSS = "_loss"
"""Name of the local variable that holds what stands in its place."""


def loss_in(outputs: Any) -> Any:
    """Return what stands in the place of a loss in a model's outputs, or ``None``.

    That is the outputs themselves if they are a tensor, their field or key ``loss``, or
    the first item of a tuple or list. Traced with the model's call; adds nothing to it.

    Examples
    --------
    >>> loss_in({"logits": 1, "loss": 2}), loss_in((3, 4)), loss_in({"logits": 1})
    (2, 3, None)
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and LOSS in outputs:
        return outputs[LOSS]
    try:
        held = getattr(outputs, LOSS, None)
    # A property of the user's object may raise anything; nobody asked for its value.
    except Exception:  # noqa: BLE001
        held = None
    if held is None and isinstance(outputs, tuple | list) and outputs:
        return outputs[0]
    return held


def is_loss(value: Any) -> bool:
    """Return whether a value is a scalar that takes a gradient."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedTensor:
    """A tensor that a call returns, without its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What is known of what a call returns.

    Parameters
    ----------
    tensor
        The tensor, if the call returns one alone that was computed in it: not several,
        no object that holds them, and no argument as it is.
    loss
        The name of the node, in the traced graph, of the loss that it returns.
    """

    tensor: ReturnedTensor | None = None
    loss: str | None = None


def note_nothing(_context: ComptimeContext) -> None:
    """Note nothing: a :data:`Note`."""


def note_returned(take: Callable[[Returned], None]) -> Note:
    """Return what gives ``take`` what a call returns."""

    def note(context: ComptimeContext) -> None:
        variable, loss = context.get_local(RETURNED), context.get_local(FOUND_LOSS)
        is_tensor = variable.python_type() is torch.Tensor
        has_loss = loss.python_type() is torch.Tensor
        take(
            Returned(
                tensor=_tensor(variable) if is_tensor else None,
                loss=_loss_name(loss) if has_loss else None,
            )
        )

    return note


def _tensor(variable: Any) -> ReturnedTensor | None:
    node = variable.as_proxy().node
    value = example_of(node)
    if node.op == "placeholder" or not isinstance(value, FakeTensor):
        return None
    return ReturnedTensor(
        shape=tuple(value.shape),
        stride=value.stride(),
        dtype=value.dtype,
        device=value.device,
        requires_grad=value.requires_grad,
    )


def _loss_name(variable: Any) -> str | None:
    node = variable.as_proxy().node
    is_computed = node.op != "placeholder" and is_loss(example_of(node))
    return node.name if is_computed else None
