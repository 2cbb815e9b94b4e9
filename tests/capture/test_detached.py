"""Detached values: no operators of the step, but what is returned stays detached."""

from collections.abc import Callable

import pytest
import torch
from tests.capture.test_joint_program import trace
from torch import nn

import remat


class Returns(nn.Module):
    def __init__(self, outputs: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> object:
        return self.outputs(self.linear(x))


@pytest.mark.parametrize(
    "outputs",
    [
        lambda y: (y, y.detach()),
        lambda y: (y, y.detach().view(-1)),
        lambda y: (y, y.detach()[:, :2]),
        lambda y: (y, y.view(-1).detach()),
        lambda y: (y, y.detach().t()[1:].detach()),
        lambda y: (y, y.tanh().detach()),
        lambda y: (y, y * y.detach()),
    ],
)
def test_what_is_returned_needs_a_gradient_where_eager_does(
    outputs: Callable[[torch.Tensor], object],
) -> None:
    model, x = Returns(outputs), torch.randn(3, 4)
    expected = [(y.requires_grad, y.is_leaf) for y in model(x)]
    remat.fit(
        model, x, budget=10**6, loss=lambda found: found[0].sum(), costs="estimated"
    )
    assert [(y.requires_grad, y.is_leaf) for y in model(x)] == expected


def test_backward_reads_what_forward_saved_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
    module = trace(model, torch.randn(3, 4)).module
    detach = torch.ops.aten.detach.default
    assert not module.graph.find_nodes(op="call_function", target=detach)
