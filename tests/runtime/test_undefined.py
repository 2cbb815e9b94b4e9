"""Gradients that eager PyTorch does not have are ``None``, and retained graphs work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.training.verification import compare


class Heads(nn.Module):
    """Outputs of each kind: plain, views of one block, an input, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 6)
        self.parts = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.trunk(x))
        self.get_buffer("average").mul_(0.9).add_(hidden.detach().mean(0))
        left, right = torch.sigmoid(self.parts(x)).chunk(2)
        return {
            "same": x,
            "index": hidden.argmax(1),
            "first": self.first(hidden),
            "second": [self.second(hidden).view(6, -1)],
            "left": left,
            "right": right,
        }


LOSSES: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "first": lambda outputs: outputs["first"].square().mean(),
    "second": lambda outputs: outputs["second"][0].square().mean(),
    "left": lambda outputs: outputs["left"].square().mean(),
    "right": lambda outputs: outputs["right"].square().mean(),
    "both": lambda o: o["first"].square().mean() + o["second"][0].sum(),
    "all": lambda o: (
        o["first"].sum() + (o["left"] * o["right"] + o["second"][0].sum()).sum()
    ),
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_loss_does_not_reach_has_no_gradient(name: str) -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(4, 8)
    LOSSES[name](model(x)).backward()
    expected = gradients(model)
    model.zero_grad()
    remat.fit(model, x, budget=10**7, costs="estimated")
    LOSSES[name](model(x)).backward()
    assert not compare(expected, gradients(model))
    assert name == "all" or len(expected) < 8


def test_each_backward_pass_is_looked_at_by_itself() -> None:
    model, x = Heads(), torch.randn(4, 8)
    remat.fit(model, x, budget=10**7, costs="estimated")
    outputs = model(x)
    later = model(2 * x)
    LOSSES["left"](outputs).backward(retain_graph=True)
    assert set(gradients(model)) == {"parts.weight", "parts.bias"}
    model.zero_grad()
    LOSSES["all"](later).backward()
    assert len(gradients(model)) == 8
    model.zero_grad()
    LOSSES["first"](outputs).backward()
    assert "second.weight" not in gradients(model)
    assert "trunk.weight" in gradients(model)


def test_training_alternating_heads_is_bitwise_plain() -> None:
    results: list[list[Tensor]] = []
    for is_fitted in (False, True):
        torch.manual_seed(0)
        model, x = Heads(), torch.randn(4, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        if is_fitted:
            remat.fit(model, x, budget=10**7, costs="estimated", optimizer=optimizer)
        for name in ("first", "left", "second", "first"):
            optimizer.zero_grad()
            LOSSES[name](model(x)).backward()
            optimizer.step()
        results.append([*model.parameters(), *model.buffers()])
    assert all(map(torch.equal, *results))


def test_a_graph_is_retained_after_ordinary_backward_passes() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model, x = nn.Sequential(*blocks), torch.randn(4, 8)
    remat.fit(model, x, budget=10**7, costs="estimated")
    # The backward code that this compiles could not retain anything.
    model(x).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    loss = model(x).sum()
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert not compare(expected, gradients(model))
