"""Let kernels of backward compute elementwise values of the forward pass again.

A kernel that reads two values and needs their product can multiply them once more,
which costs less than to keep the product and to read it. Which values are kept for
backward is decided by the minimum cut that ``torch.compile`` makes between the passes
[1]_; of what it computes again, that is taken which only kernels read.

References
----------
.. [1] H. He, S. Yu. Transcending runtime-memory tradeoffs in checkpointing by being
   fusion aware. MLSys 2023.
"""

from collections.abc import Iterable

import torch
from torch import fx

from remat.capture.fusion_groups import (
    computed_by,
    is_fusible,
    is_operator,
    returned_operators,
)
from remat.capture.joint_program import is_random
from remat.torch_compat.metadata import in_backward, is_backward
from remat.torch_compat.names import (
    OpOverload,
    functorch_config,
    min_cut_rematerialization_partition,
)

_ORIGINAL = "remat_original"
"""In ``meta``: the operator of the forward pass that a node computes again."""


def recompute_in_backward(joint: fx.GraphModule, forward_output_count: int) -> None:
    """Compute elementwise values again in backward, in place, where kernels read them.

    Every operator that is added is to become part of a kernel;
    :func:`read_instead` removes one that does not.

    Parameters
    ----------
    joint
        A functional joint graph whose nodes are tagged forward or backward.
    forward_output_count
        How many of its outputs belong to the forward pass.
    """
    again = _recomputed_names(joint, forward_output_count)
    first_use = _readers_in_backward(joint.graph, again)
    new: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node in first_use:
            with joint.graph.inserting_before(first_use[node]):
                _in_backward(joint.graph, node, first_use, new)
    added = set(new.values())
    for node in list(joint.graph.nodes):
        if node not in added and is_backward(node) and _is_read(node):
            with joint.graph.inserting_before(node):
                node.args, node.kwargs = fx.map_arg(
                    (node.args, node.kwargs),
                    lambda n: _in_backward(joint.graph, n, first_use, new),
                )
    joint.graph.lint()


def original_of(node: fx.Node) -> fx.Node | None:
    """Return the forward operator that a node computes again, if it does."""
    return node.meta.get(_ORIGINAL)


def read_instead(joint: fx.GraphModule, again: Iterable[fx.Node]) -> None:
    """Let backward read values of the forward pass that it was to compute again."""
    for node in again:
        original = original_of(node)
        if original is not None:
            node.replace_all_uses_with(original)
            joint.graph.erase_node(node)
    joint.graph.lint()


def _recomputed_names(joint: fx.GraphModule, forward_output_count: int) -> set[str]:
    """Return the names of the nodes that the minimum cut computes in both passes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    with functorch_config.patch(activation_memory_budget=1.0):
        forward, backward = min_cut_rematerialization_partition(
            fx.GraphModule(joint, graph), (), num_fwd_outputs=forward_output_count
        )
    ours = {node.name for node in joint.graph.nodes if not is_backward(node)}
    both = {node.name for node in forward.graph.nodes} & {
        node.name for node in backward.graph.nodes if node.op == "call_function"
    }
    return both & ours


def _readers_in_backward(graph: fx.Graph, again: set[str]) -> dict[fx.Node, fx.Node]:
    """Return which operators are computed again, and before which node.

    That are elementwise ones whose readers in backward all can be part of a kernel.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    returned = returned_operators(graph)
    first_use: dict[fx.Node, fx.Node] = {}
    for node in reversed(order):
        if node.name not in again or not _is_elementwise(node) or node in returned:
            continue
        readers = _readers(node)
        mine = [(reader, at) for reader, at in readers if is_backward(reader)]
        also = [first_use[reader] for reader, _ in readers if reader in first_use]
        uses = [*also, *(at for _, at in mine)]
        if uses and all(is_fusible(reader) for reader, _ in mine):
            first_use[node] = min(uses, key=order.__getitem__)
    return first_use


def _is_elementwise(node: fx.Node) -> bool:
    return (
        is_operator(node)
        and not is_backward(node)
        and isinstance(node.target, OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and not is_random(node)
        and len(node.all_input_nodes) > 0
    )


def _is_read(node: fx.Node) -> bool:
    """Return whether a node is an operator, or a view that one reads."""
    return is_operator(node) or len(_readers(node)) > 0


def _readers(node: fx.Node, at: fx.Node | None = None) -> list[tuple[fx.Node, fx.Node]]:
    """Return the operators that read a value, or a view of it, and the output.

    Each with the first node of backward on the way, or itself.
    """
    found: list[tuple[fx.Node, fx.Node]] = []
    for user in node.users:
        first = at or (user if is_backward(user) else None)
        if user.op == "call_function" and not is_operator(user):
            found += _readers(user, first)
        else:
            found.append((user, first or user))
    return found


def _in_backward(
    graph: fx.Graph,
    node: fx.Node,
    first_use: dict[fx.Node, fx.Node],
    new: dict[fx.Node, fx.Node],
) -> fx.Node:
    """Return what backward reads for ``node``; new nodes go where the graph inserts."""
    if node in new:
        return new[node]
    if is_backward(node) or computed_by(node) not in first_use:
        return node
    copy = graph.node_copy(node, lambda n: _in_backward(graph, n, first_use, new))
    copy.meta = in_backward(node.meta)
    if is_operator(node):
        copy.meta[_ORIGINAL] = node
    new[node] = copy
    return copy
