"""Inputs of traced functions of which each reader gets one of its own.

Autograd adds up the gradients of a value as they come, that of its last reader first.
A graph adds those of its own readers before it hands the sum over. That is another sum
where a later reader, outside of the graph, has handed its gradient over before: the
last digits differ. With an input for each reader autograd adds each gradient by itself,
as in eager PyTorch.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from remat.capture.gathering import Gathering, RegionCode
from remat.capture.varying_sizes import is_symbol, symbolic_value
from remat.torch_compat.attributes import LEAF_NUMBER, made_number
from remat.torch_compat.metadata import (
    argument_position,
    changed_inputs,
    example_of,
    is_tangent,
    set_example,
)

_MOST_READERS = 4
"""Of more, whose gradients would all be there at a time, a graph hands over the sum."""


def added_to_others(
    gathering: Gathering, outputs: Sequence[torch.Tensor]
) -> dict[RegionCode, set[int]]:
    """Return, per graph, which inputs get gradients of later readers outside of it.

    Parameters
    ----------
    gathering
        What a forward pass has shown.
    outputs
        What the model returned: whoever called it may read any of that.

    Returns
    -------
    Their numbers among the tensors that it is given, those left out that are written in
    place. Parameters are none of them: gradients of these may leave early.
    """
    readers = _latest_readers(outputs)
    found: dict[RegionCode, set[int]] = defaultdict(set)
    for seen in gathering.seen:
        if seen.node is None:
            continue
        program, number = seen.program, made_number(seen.node)
        tensors = [
            node
            for node in program.module.graph.find_nodes(op="placeholder")
            # Sizes are inputs as well, and autograd knows of tensors alone.
            if not (is_tangent(node) or is_symbol(symbolic_value(node)))
        ]
        edges = seen.node.next_functions
        if len(edges) != len(tensors):
            continue  # Views of one tensor that the graph writes to are one input.
        (output,) = program.module.graph.find_nodes(op="output")
        written = {*changed_inputs(output)}
        blocks = [seen.given[program.storages_of[node][0]] for node in tensors]
        changed = gathering.changed.union(
            block
            for node, block in zip(tensors, blocks, strict=True)
            if argument_position(node) in written
        )
        for position, edge in enumerate(edges):
            if (
                edge[0] is not None
                and made_number(edge[0]) != LEAF_NUMBER
                and readers.get(edge, -1) > number
                and blocks[position] not in changed
            ):
                found[seen.code.trace].add(position)
    return found


def _latest_readers(outputs: Sequence[torch.Tensor]) -> Mapping[tuple[Any, int], int]:
    """Return, per output of autograd's nodes, when its last reader was made."""
    latest: dict[tuple[Any, int], int] = {}
    for tensor in outputs:
        if tensor.grad_fn is not None:
            latest[tensor.grad_fn, tensor.output_nr] = LEAF_NUMBER
    nodes = [node for node, _ in latest]
    known = set(nodes)
    while nodes:
        reader = nodes.pop()
        number = made_number(reader)
        for edge in reader.next_functions:
            if edge[0] is None:
                continue
            latest[edge] = max(number, latest.get(edge, -1))
            if edge[0] not in known:
                known.add(edge[0])
                nodes.append(edge[0])
    return latest


def with_readers_apart(
    module: fx.GraphModule, positions: Collection[int]
) -> tuple[fx.GraphModule, list[int]]:
    """Return a traced function with an input for each reader of these inputs.

    Parameters
    ----------
    module
        What the tracer handed over; it is left as it is.
    positions
        Which of its inputs.

    Returns
    -------
    The function, and which input each of its further inputs, behind the others, is once
    more. Inputs with one reader, or with very many, stay as they are. Autograd adds the
    gradients of one value in the order of the inputs, so the last reader has the first.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copies)
    graph.output(output)
    inputs = list(graph.find_nodes(op="placeholder"))
    last, again = inputs[-1], list[int]()
    for position, node in enumerate(inputs):
        readers = list(_readers(node)) if position in positions else []
        if not 1 < sum(map(len, readers)) <= _MOST_READERS:
            continue
        is_first = True
        for reader, *rest in reversed(readers):
            own: list[fx.Node] = []
            for _ in range(1 + len(rest)):
                if is_first:
                    own.append(node)
                    is_first = False
                    continue
                with graph.inserting_after(last):
                    last = graph.placeholder(f"{node.name}_{len(inputs) + len(again)}")
                set_example(last, node)
                again.append(position)
                own.append(last)
            _replace(reader, node, own)
    if not again:
        return module, again
    return fx.GraphModule(module, graph), again


def _readers(node: fx.Node) -> Iterator[list[fx.Node]]:
    """Yield, in order, those that hand a gradient to a node, once for each argument."""
    for reader in node.graph.nodes:
        if node in reader.all_input_nodes and reader.op != "output":
            values = example_of(reader)
            # What writes a value into others returns nothing.
            is_reader = values is None
            for value in values if isinstance(values, tuple | list) else [values]:
                is_reader |= isinstance(value, torch.Tensor) and value.requires_grad
            if is_reader:
                given: list[fx.Node] = []
                fx.map_arg((reader.args, reader.kwargs), given.append)
                yield [reader] * given.count(node)


def _replace(reader: fx.Node, node: fx.Node, own: Sequence[fx.Node]) -> None:
    """Let a reader take others, in order, wherever it takes a node."""
    following = iter(own)

    def chosen(given: fx.Node) -> fx.Node:
        return next(following) if given is node else given

    reader.args = fx.map_arg(reader.args, chosen)
    reader.kwargs = fx.map_arg(reader.kwargs, chosen)
