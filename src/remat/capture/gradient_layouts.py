"""The layout in which a traced step takes the gradients of its outputs.

The tracer expects the gradient of an output to have the output's strides, and copies
other gradients into a block with them. Of an output that is a part of a larger tensor,
such as one of several heads that ``torch.split`` cuts out of the last layer, the
strides have gaps: that block is almost as large as the whole tensor, once for every
part. What a loss makes is dense, in eager PyTorch too; so here such a gradient is
expected dense.

Where a loss alone is differentiated, the gradients of other outputs, such as logits,
are zeros that the step adds to what comes from the loss. A sum is laid out as the first
of two tensors that differ, and kernels round otherwise in another layout; so the zeros
come second. Where they are only added to others of one layout, they need no memory: one
zero is expanded to their shape.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from remat.capture.varying_sizes import surely_equal, varies
from remat.torch_compat.metadata import is_tangent, let_be_one_zero, output_position
from remat.torch_compat.names import (
    is_traceable_wrapper_subclass,
    suggest_memory_format,
)
from remat.torch_compat.patches import gradient_formats, patched


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last, both included.

    Examples
    --------
    >>> spanned_bytes(torch.zeros(4, 6)[:, :2])
    80
    """
    if surely_equal(tensor.numel(), 0):
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((n - 1) * step for n, step in steps))


def gradient_format(output: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format expected of an output's gradient.

    ``None`` where it is the output's own strides that are expected.
    """
    if output.layout != torch.strided:
        return None
    # ``nbytes`` knows no sizes that vary.
    dense_bytes = output.numel() * output.element_size()
    if surely_equal(spanned_bytes(output), dense_bytes):
        return None
    return suggest_memory_format(output)


def dense_gradients() -> AbstractContextManager[None]:
    """Trace so that gradients of outputs whose strides have gaps come dense."""
    return patched(gradient_formats(_format_of_gaps))


def _format_of_gaps(output: torch.Tensor) -> torch.memory_format | None:
    if is_traceable_wrapper_subclass(output):
        return None
    return gradient_format(output)


def add_zeros_last(joint: fx.GraphModule, loss: int | None) -> None:
    """Let gradients that a loss does not have be the second ones of sums, in place.

    Not where an operator behind the sum does not take it as it is laid out then.

    Parameters
    ----------
    joint
        A functional joint graph, annotated with fake tensors.
    loss
        The position among the outputs of the one that is differentiated; ``None`` if
        all are.
    """
    for tangent in _tangents_besides(joint, loss):
        for node in list(tangent.users):
            _swap(node, tangent)
    joint.recompile()


def _tangents_besides(joint: fx.GraphModule, loss: int | None) -> list[fx.Node]:
    """Return the tangents of other outputs than the loss; none if that is unknown."""
    tangents = [node for node in joint.graph.nodes if is_tangent(node)]
    if loss is None or loss not in map(output_position, tangents):
        return []
    return [node for node in tangents if output_position(node) != loss]


def expand_zeros(joint: fx.GraphModule, loss: int | None, *, is_alone: bool) -> None:
    """Mark the gradients that take no memory where they do not exist.

    Parameters
    ----------
    joint
        A functional joint graph, annotated with fake tensors.
    loss
        The position among the outputs of the one that is differentiated; ``None`` if
        all are.
    is_alone
        Whether no other graph of the step may differentiate the other outputs.
    """
    tangents = _tangents_besides(joint, loss)
    if not is_alone:
        tangents = [node for node in joint.graph.nodes if is_tangent(node)]
    added = [node for node in tangents if _is_only_added(node)]
    # The others are made where backward begins, by what the trace says of them.
    others = [node.meta["val"] for node in tangents if node not in added]
    if any(varies(size) for value in others for size in value.shape):
        return
    for node in added:
        let_be_one_zero(node)


def _is_only_added(value: fx.Node) -> bool:
    """Whether a value, or a view of it, is added to others and nothing else.

    To others that are laid out as the sum, so that its own layout does not matter.
    """
    for user in value.users:
        if user.target is torch.ops.aten.add.Tensor and not user.kwargs:
            first, second = user.args
            if not _lays_out(second if first is value else first, user.meta["val"]):
                return False
        elif user.target not in _VIEWS or not _is_only_added(user):
            return False
    return True


def _lays_out(other: Any, total: torch.Tensor) -> bool:
    """Whether a sum is laid out as one of its operands, whatever the other one is."""
    known = other.meta.get("val") if isinstance(other, fx.Node) else None
    return (
        isinstance(known, torch.Tensor)
        and known.dtype == total.dtype
        and _is_laid_out_as(known, total)
        # The sum of two expanded zeros is laid out as neither.
        and not is_tangent(_viewed(other))
    )


def _viewed(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.view.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.t.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.detach.default,
    }
)
"""Views that there are of any layout of a tensor whose elements are all one."""


def _swap(node: fx.Node, tangent: fx.Node) -> None:
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return
    first, second = node.args
    if first is not tangent or not isinstance(second, fx.Node):
        return
    one, other = tangent.meta.get("val"), second.meta.get("val")
    if one is None or other is None:
        return
    if one.dtype != other.dtype or _is_laid_out_as(one, other):
        return
    node.args = (second, first)
    values = _values_from(node, one.fake_mode)
    if values is None:
        node.args = (first, second)
        return
    for changed, value in values.items():
        changed.meta["val"] = value


def _values_from(start: fx.Node, mode: Any) -> dict[fx.Node, Any] | None:
    """Return what a node computes now, and those whose inputs are laid out otherwise.

    ``None`` if one of them does not take its input so.
    """
    found: dict[fx.Node, Any] = {}

    def value_of(node: fx.Node) -> Any:
        return found.get(node, node.meta.get("val"))

    node = start
    while node.op != "output":
        if node is start or any(source in found for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
            operator: Any = node.target
            if any(value_of(source) is None for source in node.all_input_nodes):
                return None
            with mode:
                try:
                    value = operator(*args, **kwargs)
                except (RuntimeError, ValueError):  # A view of what lies elsewhere now.
                    return None
            if node is start or not _are_alike(value, node.meta.get("val")):
                found[node] = value
        node = node.next
    return found


def _are_alike(value: Any, other: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return all(_are_alike(*pair) for pair in zip(value, other, strict=True))
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and _is_laid_out_as(value, other)
    return True


def _is_laid_out_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return surely_equal(one.shape, other.shape) and surely_equal(
        one.stride(), other.stride()
    )
