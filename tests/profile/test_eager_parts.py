"""What is found out of autograd's graph of operators in no graph."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.capture.gathering import Gathering
from remat.profile.eager_parts import _dependent_nodes, _made_where
from remat.torch_compat.attributes import LEAF_NUMBER, leaf_of, made_number
from remat.torch_compat.names import next_node_number


class Node:
    """A node of autograd, as far as its inputs go."""

    def __init__(self, inputs: list["Node | None"]) -> None:
        self.next_functions = [(each, 0) for each in inputs]


def inputs_of(node: Any) -> set[Any]:
    return {each for each, _ in node.next_functions if each is not None}


def by_definition(node: Any) -> bool:
    """Whether a walk from an input of the node comes to another one."""
    waiting, inputs = list(inputs_of(node)), inputs_of(node)
    known: set[Any] = set()
    while waiting:
        for following in inputs_of(waiting.pop()) - known:
            known.add(following)
            waiting.append(following)
    return bool(inputs & known)


def waiting_of(nodes: list[Any]) -> Counter[Any]:
    waiting = Counter(dict.fromkeys(nodes, 0))
    waiting.update(f for node in nodes for f, _ in node.next_functions if f is not None)
    return waiting


@settings(max_examples=200)
@given(data=st.data(), count=st.integers(1, 12))
def test_dependent_nodes_are_those_of_the_definition(data: st.DataObject, count: int):
    nodes: list[Node] = []
    for _ in range(count):
        choices = st.sampled_from([None, *nodes])
        nodes.append(Node(data.draw(st.lists(choices, max_size=3))))
    order = data.draw(st.permutations(nodes))
    expected = {node for node in nodes if by_definition(node)}
    assert _dependent_nodes(waiting_of(order)) == expected


def test_a_residual_sum_is_dependent_and_what_comes_together_is_not():
    x = torch.ones(3, requires_grad=True)
    inner = x.exp()
    outer = inner.sin()
    fork = inner.cos()
    found = {
        name: value.grad_fn
        for name, value in [("residual", inner + outer), ("join", outer + fork)]
    }
    nodes: list[Any] = []
    waiting = list(found.values())
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.append(node)
            waiting += inputs_of(node)
    assert _dependent_nodes(waiting_of(nodes)) == {found["residual"]}


def test_blocks_are_made_where_a_recording_of_their_size_shows_one():
    """A dropout's input, its noise, which is saved, and its output, of one size."""
    gathering = Gathering([])
    gathering.eager = {1: 0, 2: 0, 3: 4, 5: 2}
    gathering.sizes_bytes = {1: 64, 2: 64, 3: 64, 5: 8}
    gathering.held = {1: 0, 3: 4}  # The noise is not seen.
    stayed = [[(64, 13), (64, 0), (64, 20)], [], [(64, 4), (64, 9)], [], []]
    found = _made_where(gathering, stayed)
    # What is given to the fourth region was made before the second.
    assert found == {1: 0, 2: 0, 3: 2, 5: 2}
    # What is left of the first is the input, which code holds up to the region 13.
    assert stayed == [[(64, 13)], [], [(64, 9)], [], []]


def test_nodes_behind_regions_without_gradients_are_told_apart():
    numbers: list[Any] = [
        next_node_number(),
        (torch.ones(1, requires_grad=True) * 2).grad_fn,
        next_node_number(),
        (torch.ones(1, requires_grad=True) * 2).grad_fn,
    ]
    first, before, second, after = numbers
    assert first <= made_number(before) < second <= made_number(after)
    leaf = torch.ones(1, requires_grad=True)
    node: Any = (leaf * 2).grad_fn
    (found, _), _ = node.next_functions
    assert leaf_of(found) is leaf
    assert made_number(found) == LEAF_NUMBER
