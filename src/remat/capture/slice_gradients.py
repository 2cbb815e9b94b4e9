"""Gradients of the pieces of a tensor, put together by one operator.

Where forward takes a tensor apart, such as in ``x[:, t]`` for each time, autograd
writes the gradient of each piece into zeros of the size of the whole and adds these up:
n tensors of full size for n pieces. Where the pieces cover the whole without overlap,
the sum is their concatenation.

The bits are the same. Adding zero changes no number but a negative zero, and one
addition of zero to the concatenation makes that positive, as the others did.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from remat.capture.detached import is_returned
from remat.capture.varying_sizes import surely_at_most, surely_equal
from remat.torch_compat.attributes import storage_identity

aten = torch.ops.aten

_ADD = aten.add.Tensor
_SELECT, _SLICE = aten.select_backward.default, aten.slice_backward.default


@dataclass(frozen=True, slots=True)
class _Piece:
    """A gradient of the places from ``start`` up to ``stop`` of one dimension.

    One that is selected lacks the dimension.
    """

    start: int
    stop: int
    gradient: fx.Node
    is_selected: bool


@dataclass(slots=True)
class _Sum:
    """Pieces along a dimension that a node adds up."""

    dim: int
    pieces: list[_Piece]


def join_gradient_pieces(joint: fx.GraphModule) -> None:
    """Concatenate gradients that make up a whole, in place, instead of adding them up.

    Not where the result would be laid out in memory otherwise, nor where the pieces are
    views of larger blocks, all of which would have to be there at once.

    Parameters
    ----------
    joint
        A functional joint graph, annotated with fake tensors.

    Notes
    -----
    Time O(n log n) for n nodes.
    """
    sums: dict[fx.Node, _Sum] = {}
    parts: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.target in (_SELECT, _SLICE):
            found = _piece_at(node)
        else:
            found = _sum_at(node, sums, parts) if _adds_alike(node) else None
        if found is not None:
            sums[node] = found
    wholes = [
        node
        for node, found in sums.items()
        if node not in parts and _is_whole(found, node.meta["val"].shape[found.dim])
    ]
    # What one sum gives may be what another one takes.
    new: dict[fx.Node, fx.Node] = {}
    for node in wholes:
        _join(joint.graph, node, sums[node], new)
    joint.graph.lint()
    joint.recompile()


def _sum_at(
    node: fx.Node, sums: dict[fx.Node, _Sum], parts: set[fx.Node]
) -> _Sum | None:
    """Return what an addition adds up; what is added up in it becomes a part of it."""
    values = node.all_input_nodes
    if not all(value in sums and len(value.users) == 1 for value in values):
        return None
    shorter, longer = sorted((sums[v] for v in values), key=lambda s: len(s.pieces))
    if shorter.dim != longer.dim:
        return None
    parts.update(values)
    # Only one sum has each part, so that its list can grow.
    longer.pieces += shorter.pieces
    return longer


def _piece_at(node: fx.Node) -> _Sum | None:
    gradient, sizes, dim, *places = cast("Any", node.args)
    if "val" not in gradient.meta:
        return None
    dim %= len(sizes)
    size = sizes[dim]
    if any(isinstance(number, fx.Node) for number in (size, *places)):
        return None  # Whether pieces meet depends on a size that varies.
    if node.target is _SELECT:
        start = places[0] % size
        return _Sum(dim, [_Piece(start, start + 1, gradient, is_selected=True)])
    start, stop, step = places
    start, stop = (max(0, p + size) if p < 0 else min(p, size) for p in (start, stop))
    if step != 1 or start >= stop:
        return None
    return _Sum(dim, [_Piece(start, stop, gradient, is_selected=False)])


def _adds_alike(node: fx.Node) -> bool:
    """Return whether a node adds two tensors that are as the result is."""
    if node.target is not _ADD or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    result, *values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return isinstance(result, torch.Tensor) and all(
        isinstance(value, torch.Tensor)
        and surely_equal(value.shape, result.shape)
        and value.dtype == result.dtype
        for value in values
    )


def _is_whole(found: _Sum, size: int) -> bool:
    """Return whether the pieces cover the dimension, each place once."""
    found.pieces.sort(key=lambda piece: piece.start)
    ends = [0, *(piece.stop for piece in found.pieces)]
    starts = [*(piece.start for piece in found.pieces), size]
    return starts == ends


def _join(
    graph: fx.Graph, node: fx.Node, found: _Sum, new: dict[fx.Node, fx.Node]
) -> None:
    if len(found.pieces) == 1 and is_returned(node):
        return
    made: list[fx.Node] = []

    def call(target: Callable[..., Any], *args: Any) -> fx.Node:
        with graph.inserting_before(node):
            called = graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with node.meta["val"].fake_mode:
            called.meta = {**node.meta, "val": target(*values)}
        made.append(called)
        return called

    gradients = [new.get(piece.gradient, piece.gradient) for piece in found.pieces]
    are_selected = [piece.is_selected for piece in found.pieces]
    if not surely_at_most(_held_bytes(gradients), _held_bytes([node])):
        return
    joined = _joined(call, gradients, are_selected, found.dim)
    if _have_one_layout(joined, node):
        new[node] = joined
        node.replace_all_uses_with(joined)
        _erase_unread(graph, node)
    else:
        for called in reversed(made):
            graph.erase_node(called)


def _joined(
    call: Callable[..., fx.Node],
    gradients: Sequence[fx.Node],
    are_selected: Sequence[bool],
    dim: int,
) -> fx.Node:
    if len(gradients) > 1 and all(are_selected):
        return call(_ADD, call(aten.stack.default, gradients, dim), 0.0)
    parts = [
        call(aten.unsqueeze.default, gradient, dim) if is_selected else gradient
        for gradient, is_selected in zip(gradients, are_selected, strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return call(_ADD, call(aten.cat.default, parts, dim), 0.0)


def _held_bytes(nodes: Sequence[fx.Node]) -> int:
    """Return the bytes of the blocks in which values are."""
    values = [node.meta["val"] for node in nodes]
    sizes = {storage_identity(v): v.untyped_storage().nbytes() for v in values}
    return sum(sizes.values())


def _have_one_layout(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta["val"], second.meta["val"]
    return (
        surely_equal(a.shape, b.shape)
        and surely_equal(a.stride(), b.stride())
        and (a.dtype, a.device) == (b.dtype, b.device)
    )


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a sum that nothing reads, and its parts."""
    waiting = [node]
    while waiting:
        last = waiting.pop()
        if not last.users and last.target in (_ADD, _SELECT, _SLICE):
            waiting.extend(last.all_input_nodes)
            graph.erase_node(last)
