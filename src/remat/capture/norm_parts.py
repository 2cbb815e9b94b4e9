"""Batch norm in two parts, of which the second can run again without the first.

In training, batch norm reduces its input to a mean and a variance per channel, and then
scales each number. As one operator it does both whenever its result is computed again;
as two, the reduction runs once and leaves a few numbers per channel. Kernels that
compilers make of the parts are quicker than one of the whole, too, which takes a square
root for every number instead of every channel.

Channels that are put together keep their statistics: what reduces a concatenation is
put together from what reduces its parts. A network that appends channels to all earlier
ones then reduces each of them once, and not once per layer.

The parts are Python functions, for kernels to be made of: as operators of a graph they
are taken apart by whoever traces them. Their results differ from the operator's in the
last digits.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.capture.joint_program import example_value
from remat.capture.node_order import put_in_order
from remat.torch_compat.metadata import origin_of
from remat.torch_compat.names import functional_batch_norm

aten = torch.ops.aten

BATCH_NORM = functional_batch_norm

_NORM = "remat_norm"
"""In ``meta``: the number of the batch norm that a node is a part of."""

_WHOLE = "remat_whole_norm"
"""In ``meta`` of a second part: what else the batch norm had."""

_LEAST_ROWS, _MOST_ROWS = 7, 32
"""How many rows are reduced at once."""

_PRECISE = ({torch.float32}, {torch.float64})
"""Types whose sums may be kept in the same type."""

_AFTER = 1e-3
"""How far in the order a part is behind what it reads."""


def batch_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance, uncorrected, of each channel."""
    chunks = _in_chunks(x)
    if chunks is None:
        variance, mean = aten.var_mean.correction(x, _all_but_channels(x), correction=0)
        return mean, variance
    within, means = aten.var_mean.correction(chunks, [1], correction=0)
    between, mean = aten.var_mean.correction(means, [0], correction=0)
    return mean, within.mean(0) + between


def inverse_deviation(variance: torch.Tensor, eps: float) -> torch.Tensor:
    """Return one over the standard deviation of each channel."""
    return (variance + eps).rsqrt()


def running_statistics(
    mean: torch.Tensor,
    variance: torch.Tensor,
    running_mean: torch.Tensor,
    running_variance: torch.Tensor,
    momentum: float,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the running statistics after a batch of ``count`` numbers per channel."""
    corrected = variance * (count / (count - 1))
    return (
        momentum * mean + (1 - momentum) * running_mean,
        momentum * corrected + (1 - momentum) * running_variance,
    )


def normalised(
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``x`` with each channel shifted and scaled."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    y = (x - mean.view(shape)) * inverse.view(shape)
    if weight is not None:
        y = y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def norm_gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, *others: Any
) -> tuple[torch.Tensor | None, ...]:
    """Return what ``aten::native_batch_norm_backward`` returns, summed in chunks.

    Takes what that takes: after these, running mean and variance, saved mean and one
    over the saved deviation, whether in training, epsilon, and which are needed.
    """
    _, _, mean, inverse, is_training, _, is_needed = others
    given = [gradient, x, mean, inverse, *([] if weight is None else [weight])]
    gradients, values = _in_chunks(gradient), _in_chunks(x)
    is_precise = {tensor.dtype for tensor in given} in _PRECISE
    if not is_training or gradients is None or values is None or not is_precise:
        return aten.native_batch_norm_backward.default(gradient, x, weight, *others)
    share = mean.numel() / x.numel()
    shift = gradients.sum(1).sum(0)
    scale = (gradients * (values - mean)).sum(1).sum(0)
    shape = [1, -1] + [1] * (x.dim() - 2)
    factor = inverse if weight is None else inverse * weight
    slope = scale * inverse * inverse * share
    of_x = (
        gradient
        - (shift * share).view(shape)
        - (x - mean.view(shape)) * slope.view(shape)
    ) * factor.view(shape)
    found = (of_x, scale * inverse, shift)
    return tuple(g if n else None for g, n in zip(found, is_needed, strict=True))


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _in_chunks(x: torch.Tensor) -> torch.Tensor | None:
    """Return ``x`` as chunks, rows and channels, if its channels lie side by side.

    The CPU's compiled reductions read such a tensor in columns, a few channels at a
    time, and therefore several times from memory; a chunk of a few rows is still in the
    cache when its next columns are read.
    """
    rows = x.movedim(1, -1)
    if x.device.type != "cpu" or not rows.is_contiguous() or x.is_contiguous():
        return None
    count = rows.numel() // x.shape[1]
    for size in range(_MOST_ROWS, _LEAST_ROWS - 1, -1):
        if count % size == 0 and count > size:
            return rows.reshape(count // size, size, x.shape[1])
    return None


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    aten.native_batch_norm_backward.default: norm_gradients
}
"""What kernels are made of in the place of operators."""

REVISION = 2
"""Names of kernels hold it, and measured costs are kept by name: to be raised when
any function here computes otherwise."""

PARTS: Mapping[Any, str] = {
    part: part.__name__
    for part in (batch_statistics, inverse_deviation, running_statistics, normalised)
}
"""The parts of a batch norm, and their names."""


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.args)


def norm_of(node: fx.Node) -> int | None:
    """Return the number of the batch norm that a node is a part of, if it is one."""
    return node.meta.get(_NORM)


def batch_norms(graph: fx.Graph) -> list[fx.Node]:
    """Return the batch norms of a graph that is not split; positions are numbers."""
    return [node for node in graph.nodes if node.target is BATCH_NORM]


def can_be_split(joint: fx.GraphModule, norm: fx.Node) -> bool:
    """Return whether the parts lose nothing: half precision is reduced in single."""
    values = [example_value(joint, a) for a in norm.args if isinstance(a, fx.Node)]
    results = [v for v in norm.meta["val"] if isinstance(v, torch.Tensor)]
    return {value.dtype for value in [*values, *results]} in _PRECISE


def split_norms(joint: fx.GraphModule, numbers: Sequence[int]) -> None:
    """Put parts in the place of batch norms, in place.

    Parameters
    ----------
    joint
        A functional joint graph, annotated with fake tensors, with no norm split.
    numbers
        Which of its :func:`batch_norms` to split; all of them in training.
    """
    splitting = _Splitting(joint.graph)
    norms = batch_norms(joint.graph)
    for number in numbers:
        splitting.split(norms[number], number)
    put_in_order(joint.graph, splitting.rank)


def join_norms(joint: fx.GraphModule) -> None:
    """Put every batch norm that is split together again, in place."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=normalised):
        _join(graph, node)
    for node in reversed(list(graph.nodes)):
        if norm_of(node) is not None:
            graph.erase_node(node)
    graph.lint()


def kept_apart(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return what may not be in one kernel: node to statistics that it waits for.

    That are the second part of each batch norm, and the concatenation that it reads,
    whose own parts are what is reduced.
    """
    apart: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=normalised):
        x, mean, inverse, *_ = _arguments(node)
        statistics = {s for root in (mean, inverse) for s in _parts_before(root)}
        apart.setdefault(node, set()).update(statistics)
        if _channels_put_together(x):
            apart.setdefault(x, set()).update(statistics)
    return apart


def whole_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of the batch norm whose second part ``node`` is."""
    x, _, _, weight, bias = _arguments(node)
    whole = _whole_of(node)
    running = (whole.running_mean, whole.running_variance)
    return (x, weight, bias, *running, True, whole.momentum, whole.eps)


@dataclass(frozen=True, eq=False)
class _Whole:
    """What a batch norm has beside what its second part reads."""

    meta: dict[str, Any]
    running_mean: fx.Node
    running_variance: fx.Node
    momentum: float
    eps: float
    # The part that makes new running statistics.
    running: fx.Node


def _whole_of(node: fx.Node) -> _Whole:
    whole: _Whole = node.meta[_WHOLE]
    return whole


class _Splitting:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        # Where nodes go; what is reduced is reduced as soon as it is there.
        self.rank = {node: float(i) for i, node in enumerate(graph.nodes)}
        # What is known of the channels of a value: mean and variance.
        self.known: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def split(self, norm: fx.Node, number: int) -> None:
        x, weight, bias, old_mean, old_variance, _, momentum, eps = _arguments(norm)
        y, saved, _, *_ = norm.meta["val"]
        part = _Maker(self, norm, number)
        mean, variance = self.statistics(x, part, saved)
        inverse = part.make(inverse_deviation, (variance, eps), saved)
        count = x.meta["val"].numel() // saved.numel()
        running = part.make(
            running_statistics,
            (mean, variance, old_mean, old_variance, momentum, count),
            norm.meta["val"][3:],
        )
        second = part.make(normalised, (x, mean, inverse, weight, bias), y)
        self.rank[second] = self.rank[norm]
        second.meta[_WHOLE] = _Whole(
            norm.meta, old_mean, old_variance, momentum, eps, running
        )
        news = [part.item(running, i) for i in range(2)]
        for result in list(norm.users):
            new = (second, mean, inverse, *news)[_arguments(result)[1]]
            result.replace_all_uses_with(new)
            self.graph.erase_node(result)
        self.graph.erase_node(norm)

    def statistics(
        self, x: fx.Node, part: "_Maker", like: torch.Tensor
    ) -> tuple[fx.Node, fx.Node]:
        """Return nodes for mean and variance of ``x``; ``like`` is a fake of one."""
        if x not in self.known:
            pieces = _channels_put_together(x)
            if pieces:
                counts = [piece.meta["val"].shape[1] for piece in pieces]
                known = [
                    self.statistics(piece, part, like.new_empty(count))
                    for piece, count in zip(pieces, counts, strict=True)
                ]
                self.known[x] = (
                    part.make(aten.cat.default, ([mean for mean, _ in known],), like),
                    part.make(aten.cat.default, ([var for _, var in known],), like),
                )
            else:
                both = part.make(batch_statistics, (x,), (like, like))
                self.known[x] = (part.item(both, 0), part.item(both, 1))
        return self.known[x]


class _Maker:
    """Makes the parts of one batch norm."""

    def __init__(self, splitting: _Splitting, norm: fx.Node, number: int) -> None:
        self.graph = splitting.graph
        self.rank = splitting.rank
        self.norm = norm
        self.number = number

    def make(self, target: Any, args: tuple[Any, ...], value: object) -> fx.Node:
        with self.graph.inserting_before(self.norm):
            node = self.graph.call_function(target, args)
        node.meta = {**origin_of(self.norm), "val": value, _NORM: self.number}
        self.rank[node] = max(self.rank[n] for n in node.all_input_nodes) + _AFTER
        return node

    def item(self, node: fx.Node, position: int) -> fx.Node:
        value = node.meta["val"][position]
        return self.make(operator.getitem, (node, position), value)


def _channels_put_together(x: fx.Node) -> list[fx.Node]:
    """Return the pieces of which ``x`` is a concatenation along channels, if it is."""
    if x.target is not aten.cat.default:
        return []
    pieces, *dims = _arguments(x)
    value = x.meta["val"]
    values = [piece.meta["val"] for piece in pieces]
    is_along_channels = [dim % value.dim() for dim in dims] == [1]
    is_plain = all(v.dim() == value.dim() and v.dtype == value.dtype for v in values)
    return list(pieces) if is_along_channels and is_plain else []


def _parts_before(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the parts, names aside, that ``node`` is computed from, itself included."""
    found = {node}
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if part.target is not operator.getitem:
            yield part
        for source in part.all_input_nodes:
            is_statistic = norm_of(source) is not None
            if is_statistic and source.target is not normalised and source not in found:
                found.add(source)
                waiting.append(source)


def _join(graph: fx.Graph, second: fx.Node) -> None:
    whole = _whole_of(second)
    _, mean, inverse, *_ = _arguments(second)
    with graph.inserting_before(second):
        norm = graph.call_function(BATCH_NORM, whole_arguments(second))
    norm.meta = whole.meta
    news = {_arguments(user)[1] + 3: user for user in whole.running.users}
    before = norm
    for position, old in sorted({0: second, 1: mean, 2: inverse, **news}.items()):
        with graph.inserting_after(before):
            before = graph.call_function(operator.getitem, (norm, position))
        before.meta = {**old.meta, "val": norm.meta["val"][position]}
        del before.meta[_NORM]
        # Of two norms of one value, both are made of the same statistics; the first one
        # that is joined then hands its own, which are equal, to what reads them.
        readers = list(old.users)
        for reader in readers:
            if old is second or norm_of(reader) is None:
                reader.replace_input_with(old, before)
