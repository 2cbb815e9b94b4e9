"""What is found out of autograd's graph of operators in no graph."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.profile.eager_parts import _dependent_nodes


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
