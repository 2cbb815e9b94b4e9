"""In which order gradients come is noted while autograd runs, and told if it is not."""

from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.capture.arrivals import Arrivals
from remat.core.errors import PlanWarning
from remat.torch_compat.patches import gradient_arrivals, patched
from remat.training import step_backend


class Inner(torch.autograd.Function):
    """Asks for gradients in its own backward pass, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.square(), [x], gradients)[0]


def test_gradients_are_noted_in_the_order_of_the_outermost_call() -> None:
    one, two, unused = (torch.ones(2, requires_grad=True) for _ in range(3))
    arrived: dict[int, None] = {}
    original = torch.autograd.grad
    with patched(gradient_arrivals(arrived)):
        loss = (Inner.apply(one * 3) * two).sum()
        found = torch.autograd.grad(loss, [one, unused, two], allow_unused=True)
    assert torch.autograd.grad is original
    assert list(arrived) == [2, 0]
    assert found[0].tolist() == [18, 18]


def test_an_order_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        x = torch.randn(8, 4)
        remat.fit(model, x, budget="200%", costs="estimated", regions="whole")
        model(x).sum().backward()

    monkeypatch.setattr(step_backend, "notes_arrivals", lambda: True)
    step()
    monkeypatch.setattr(Arrivals, "keep", lambda *_: None)
    with pytest.warns(PlanWarning, match="find_unused_parameters=True"):
        step()
