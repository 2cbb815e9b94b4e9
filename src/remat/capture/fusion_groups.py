"""Which operators of a traced step can be computed by one kernel.

Groups are grown along the data flow: an operator joins the groups of what it reads,
where that leaves no group waiting for itself. Elementwise operators, reductions and
normalisations are taken; matrix products, convolutions, attention and whatever draws
random numbers keep the kernels that eager PyTorch runs.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from remat.capture.joint_program import is_random, is_view, moot_positions
from remat.capture.norm_parts import (
    BATCH_NORM,
    PARTS,
    kept_apart,
    norm_of,
    running_statistics,
)
from remat.torch_compat.attributes import schema_of
from remat.torch_compat.metadata import is_backward, pass_of
from remat.torch_compat.names import OpOverload

_MOST_OPERATORS = 400
"""In one group: compilers take more than twice as long for twice as many."""

_BEYOND_ELEMENTWISE = frozenset(
    {
        "_log_softmax",
        "_log_softmax_backward_data",
        "_native_batch_norm_legit_functional",
        "_safe_softmax",
        "_softmax",
        "_softmax_backward_data",
        "_to_copy",
        "amax",
        "cat",
        "clone",
        "constant_pad_nd",
        "elu_backward",
        "gelu_backward",
        "hardswish_backward",
        "hardsigmoid_backward",
        "leaky_relu_backward",
        "logsumexp",
        "masked_fill",
        "mean",
        "native_batch_norm_backward",
        "native_dropout_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "select_backward",
        "sigmoid_backward",
        "silu_backward",
        "slice_backward",
        "softplus_backward",
        "stack",
        "sum",
        "tanh_backward",
        "threshold_backward",
        "var_mean",
    }
)
"""Operators that compilers fuse although they are not tagged as elementwise."""


def fusion_groups(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return disjoint groups of operators, each in the graph's order.

    A group has at least two, or is a part of a batch norm.

    Each group can run as one operator: no operator outside of it both reads what the
    group computes and computes what the group reads, also when all groups are taken
    together. All operators of a group are of one pass. Views are in no group.

    Parameters
    ----------
    graph
        A functional joint graph; nodes are tagged forward or backward.

    Notes
    -----
    Time O(n^2) for n operators, on bit sets of n bits.
    """
    return _Grouping(graph).run()


def name_of(node: fx.Node) -> str:
    """Return the bare name of an operator, or ``""`` if nobody can fuse it."""
    if node.target in PARTS:
        return PARTS[node.target]
    if not isinstance(node.target, OpOverload):
        return ""
    return schema_of(node.target).name.partition("::")[2]


def is_operator(node: fx.Node) -> bool:
    """Return whether a node computes something, rather than to name or to view it."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and not is_view(node)
    )


def computed_by(node: fx.Node) -> fx.Node:
    """Return the operator, input or constant in whose storage a node's value lives.

    A view of a number, such as its conjugate, is taken for a constant.
    """
    while node.op == "call_function" and not is_operator(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def results_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that stand for an operator's tensors."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]


def returned_operators(graph: fx.Graph) -> set[fx.Node]:
    """Return the operators that compute what the graph returns."""
    (output,) = graph.find_nodes(op="output")
    return {computed_by(node) for node in output.all_input_nodes}


def statistics_readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what depends on the new running statistics of a batch norm."""
    for result in results_of(node):
        if result.args[1] in {3, 4}:
            for user in result.users:
                moot = [user.args[position] for position in moot_positions(user)]
                if user.op != "output" and result not in moot:
                    yield user


def is_fusible(node: fx.Node) -> bool:
    """Return whether an operator is one that a compiler can fuse with others."""
    target = node.target
    if target in PARTS:
        return True
    if not isinstance(target, OpOverload) or is_random(node):
        return False
    if pass_of(node) is None or _is_complex(node):
        return False
    if not node.all_input_nodes:
        return False  # What it makes, on which device, is said by arguments.
    if target is BATCH_NORM:
        return _is_plain_batch_norm(node)
    return torch.Tag.pointwise in target.tags or name_of(node) in _BEYOND_ELEMENTWISE


class _Grouping:
    def __init__(self, graph: fx.Graph) -> None:
        self.operators = [node for node in graph.nodes if is_operator(node)]
        self.index = {node: i for i, node in enumerate(self.operators)}
        self.held = self.held_by_the_caller(graph)
        count = len(self.operators)
        # Bit sets of operators: what a unit holds, and what it must not hold.
        self.holds = [1 << i for i in range(count)]
        self.excludes = [0] * count
        for node, statistics in kept_apart(graph).items():
            for other in statistics:
                self.excludes[self.index[node]] |= 1 << self.index[other]
        # A unit is a group, or an operator in none; it is named by its first operator.
        self.unit_of = list(range(count))
        self.members = [[i] for i in range(count)]
        # Bit sets of units: what a unit reads directly, and all that it waits for.
        self.reads = [0] * count
        self.waits_for = [0] * count

    @staticmethod
    def held_by_the_caller(graph: fx.Graph) -> set[fx.Node]:
        """Return the forward operators whose results the caller holds.

        They run once, and so would everything that is fused with them.
        """
        return {
            node
            for node in returned_operators(graph)
            if not is_backward(node)
            and node.target not in {BATCH_NORM, running_statistics}
        }

    def run(self) -> list[list[fx.Node]]:
        for index, node in enumerate(self.operators):
            sources = {computed_by(source) for source in node.all_input_nodes}
            read = [self.index[s] for s in sources if s in self.index]
            for unit in {self.unit_of[i] for i in read}:
                self.reads[index] |= 1 << unit
                self.waits_for[index] |= 1 << unit | self.waits_for[unit]
            if self.is_fusible(node):
                self.join(index, [i for i in read if self.may_share(i, node)])
        return [
            [self.operators[i] for i in sorted(members)]
            for unit, members in enumerate(self.members)
            if self.unit_of[unit] == unit and self.is_worth_a_kernel(members)
        ]

    def is_worth_a_kernel(self, members: list[int]) -> bool:
        (first, *others) = members
        node = self.operators[first]
        return len(others) > 0 or (norm_of(node) is not None and node not in self.held)

    def may_share(self, index: int, node: fx.Node) -> bool:
        other = self.operators[index]
        return self.is_fusible(other) and pass_of(other) == pass_of(node)

    def is_fusible(self, node: fx.Node) -> bool:
        return node not in self.held and is_fusible(node)

    def join(self, index: int, read: list[int]) -> None:
        """Merge an operator with the groups of the operators that it reads."""
        for unit in sorted({self.unit_of[i] for i in read}, reverse=True):
            mine = self.unit_of[index]
            size = len(self.members[mine]) + len(self.members[unit])
            if (
                size <= _MOST_OPERATORS
                and not self.is_apart(unit, mine)
                and not self.is_between(unit, mine)
                and not self.is_between(mine, unit)
            ):
                self.merge(unit, mine)

    def is_apart(self, one: int, other: int) -> bool:
        """Return whether a unit must not hold what another one holds."""
        return bool(
            self.excludes[one] & self.holds[other]
            or self.excludes[other] & self.holds[one]
        )

    def is_between(self, first: int, last: int) -> bool:
        """Return whether a third unit waits for ``first`` and is waited for by last."""
        others = self.reads[last] & ~(1 << first) & ~(1 << last)
        while others:
            unit = (others & -others).bit_length() - 1
            if self.waits_for[unit] >> first & 1:
                return True
            others &= others - 1
        return False

    def merge(self, kept: int, gone: int) -> None:
        both = 1 << kept | 1 << gone
        for member in self.members[gone]:
            self.unit_of[member] = kept
        self.holds[kept] |= self.holds[gone]
        self.excludes[kept] |= self.excludes[gone]
        self.members[kept] += self.members[gone]
        self.members[gone] = []
        self.reads[kept] = (self.reads[kept] | self.reads[gone]) & ~both
        self.waits_for[kept] = (self.waits_for[kept] | self.waits_for[gone]) & ~both
        found = 1 << kept | self.waits_for[kept]
        for unit, waits_for in enumerate(self.waits_for):
            if waits_for & both and unit != kept:
                self.waits_for[unit] = waits_for & ~both | found
                if self.reads[unit] & both:
                    self.reads[unit] = self.reads[unit] & ~both | 1 << kept


def _is_complex(node: fx.Node) -> bool:
    """Return whether a node reads or makes complex numbers, which no kernel does."""
    values = [other.meta.get("val") for other in (node, *node.all_input_nodes)]
    return any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)


def _is_plain_batch_norm(node: fx.Node) -> bool:
    """Return whether running statistics are inputs of the step, read by no other."""
    moot: list[Any] = [node.args[position] for position in moot_positions(node)]
    return (
        len(moot) > 0
        and all(isinstance(a, fx.Node) and a.op == "placeholder" for a in moot)
        and not any(statistics_readers(node))
    )
