"""Inputs of traced functions of which each reader gets one of its own.

Autograd adds up the gradients of a value as they come, that of its last reader first.
A graph adds those of its own readers before it hands the sum over. That is another sum
where a later reader, outside of the graph, has handed its gradient over before: the
last digits differ. With an input for each reader autograd adds each gradient by itself,
as in eager PyTorch.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from inspect import signature
from itertools import repeat
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from remat.capture.gathering import Gathering, RegionCode
from remat.capture.surroundings import tensors_in
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
    gathering: Gathering,
    outputs: Sequence[torch.Tensor],
    batch: Sequence[torch.Tensor],
) -> dict[RegionCode, set[int]]:
    """Return, per graph, which inputs get gradients of later readers outside of it.

    Parameters
    ----------
    gathering
        What a forward pass has shown.
    outputs, batch
        What the model returned or keeps, and was given: whoever called it may read any
        of that later.

    Returns
    -------
    Their numbers among the tensors that it is given, those left out that are written in
    place. Parameters are none of them: gradients of these may leave early.
    """
    readers, numbers = _latest_readers(outputs)
    of_batch = [get_gradient_edge(each) for each in batch if each.requires_grad]
    given = {(edge.node, edge.output_nr) for edge in of_batch}
    readers |= dict.fromkeys(given, LEAF_NUMBER)
    found: dict[RegionCode, set[int]] = defaultdict(set)
    for seen in gathering.seen:
        # Nothing else that may be differentiated depends on it.
        if seen.node not in numbers:
            continue
        program, number = seen.program, numbers[seen.node]
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
                and (made_number(edge[0]) != LEAF_NUMBER or edge in given)
                and readers.get(edge, -1) > number
                and blocks[position] not in changed
            ):
                found[seen.code.trace].add(position)
    return found


def _latest_readers(
    outputs: Sequence[torch.Tensor],
) -> tuple[dict[tuple[Any, int], int], dict[Any, int]]:
    """Return when the last reader of each value was made, and when each node was.

    Values are the outputs of autograd's nodes.
    """
    latest: dict[tuple[Any, int], int] = {}
    for tensor in outputs:
        if tensor.grad_fn is not None:
            latest[tensor.grad_fn, tensor.output_nr] = LEAF_NUMBER
    nodes = [node for node, _ in latest]
    numbers = {node: made_number(node) for node in nodes}
    while nodes:
        reader = nodes.pop()
        for edge in reader.next_functions:
            if edge[0] is None:
                continue
            latest[edge] = max(numbers[reader], latest.get(edge, -1))
            if edge[0] not in numbers:
                numbers[edge[0]] = made_number(edge[0])
                nodes.append(edge[0])
    return latest, numbers


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
    more. Inputs with one reader, or with very many, stay as they are, and so do those
    of which an operator is several readers. Autograd adds the gradients of one value
    in the order of the inputs, so the last reader has the first.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, copies)
    graph.output(output)
    inputs = list(graph.find_nodes(op="placeholder"))
    last, again = inputs[-1], list[int]()
    for position, node in enumerate(inputs):
        if position in positions:
            _read_directly(node)
        readers = _readers(node) if position in positions else {}
        if not 1 < sum(readers.values()) <= _MOST_READERS:
            continue
        is_first = True
        for reader in reversed(readers):
            own: list[fx.Node] = []
            for _ in range(readers[reader]):
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


def _read_directly(node: fx.Node) -> None:
    """Let readers of what operators return as it is read it from before them."""
    same = [node]
    for each in same:
        same += [user for user in each.users if _returns_as_it_is(user, each)]
    for each in same[1:]:
        each.replace_all_uses_with(node)
        node.graph.erase_node(each)


def _returns_as_it_is(user: fx.Node, node: fx.Node) -> bool:
    """Return whether an operator returns what it is given, as it is."""
    if user.target is functional.dropout and user.args[:1] == (node,):
        # On fake tensors it returns a copy.
        return not _drops(*user.args, **user.kwargs)
    return example_of(user) is example_of(node)


def _drops(*args: Any, **kwargs: Any) -> bool:
    given = signature(functional.dropout).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments["p"] != 0 and given.arguments["training"] is not False


def _readers(node: fx.Node) -> dict[fx.Node, int]:
    """Return, in order, what hands gradients to a node, and how many.

    Nothing if one of them hands more than it has arguments.
    """
    found: dict[fx.Node, int] = {}
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
                count = _edge_count(reader, node, given)
                if count not in {None, 1, given.count(node)}:
                    return {}
                found[reader] = given.count(node) if count is None else count
    return found


def _edge_count(reader: fx.Node, node: fx.Node, given: Sequence[fx.Node]) -> int | None:
    """Return how often autograd finds a value in what an operator makes of it.

    ``None`` where it is not known, as the operator runs code of its own, or not alone.
    """
    if any(example_of(each) is None for each in given):
        return None
    leaf = example_of(node).detach().requires_grad_()
    examples = {each: example_of(each) for each in given} | {node: leaf}
    taken = {
        each: value.detach()
        if each is not node and isinstance(value, torch.Tensor)
        else value
        for each, value in examples.items()
    }
    args, kwargs = fx.map_arg((reader.args, reader.kwargs), taken.__getitem__)
    try:
        with torch.enable_grad():
            if reader.op == "call_method":
                made = getattr(args[0], str(reader.target))(*args[1:], **kwargs)
            else:
                made = reader.target(*args, **kwargs)  # type: ignore[operator]
    # By itself it may refuse what the whole trace gives it: types of an autocast,
    # tensors of the model's code that are no fake ones.
    except Exception:  # noqa: BLE001
        return None
    # Some write what they make into others.
    roots = [each.grad_fn for each in tensors_in((made, args, kwargs))]
    nodes = {each for each in roots if each is not None}
    remaining = [*nodes]
    own, count = get_gradient_edge(leaf).node, 0
    while remaining:
        for following, _ in remaining.pop().next_functions:
            count += following is own
            if following is not None and following not in nodes:
                nodes.add(following)
                remaining.append(following)
    return count


def _replace(reader: fx.Node, node: fx.Node, own: Sequence[fx.Node]) -> None:
    """Let a reader take others, in order, wherever it takes a node."""
    following = iter(own if len(own) > 1 else repeat(own[0]))

    def chosen(given: fx.Node) -> fx.Node:
        return next(following) if given is node else given

    reader.args = fx.map_arg(reader.args, chosen)
    reader.kwargs = fx.map_arg(reader.kwargs, chosen)
