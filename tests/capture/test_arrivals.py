"""In which order gradients come is noted while autograd runs, and told if it is not."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.capture import joint_program
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
    noted: list[tuple[int, list[int]]] = []
    original = torch.autograd.grad
    with patched(gradient_arrivals(lambda *found: noted.append(found))):
        loss = (Inner.apply(one * 3) * two).sum()
        found = torch.autograd.grad(loss, [one, unused, two], allow_unused=True)
    assert torch.autograd.grad is original
    assert noted == [(3, [2, 0])]
    assert found[0].tolist() == [18, 18]


class Fixed(torch.autograd.Function):
    """Has a parameter that gets no gradient."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return x * step.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradients[0], None


class Stepped(nn.Module):
    """A layer behind one whose parameter gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(Fixed.apply(self.layer(x), self.step))


# By the tracer, of every such function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_parameter_without_gradient_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_backend, "notes_arrivals", lambda: True)
    torch.manual_seed(0)
    model = Stepped()
    plain, x = copy.deepcopy(model), torch.randn(8, 4)
    remat.fit(model, x, budget="200%", costs="estimated", regions="whole")
    orders: list[list[str]] = []
    for each in (plain, model):
        order: list[str] = []
        # Parameters do not hold them.
        nodes: list[Any] = []
        for name, parameter in each.named_parameters():
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            nodes.append(node)
            node.register_hook(lambda *_, order=order, name=name: order.append(name))
        each(x).square().sum().backward()
        orders.append(order)
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(name for name, _ in plain.named_parameters())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad, other.grad)


def test_gradients_that_are_planned_out_of_turn_wait_and_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of a MiB as they are ready, a weight comes before its bias."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    plain, x = copy.deepcopy(model), torch.randn(8, 512)
    monkeypatch.setattr(joint_program, "arrivals_in", lambda _joint: ())
    options: dict[str, Any] = {"costs": "estimated", "regions": "whole"}
    # Less than all gradients twice.
    remat.fit(model, x, budget="125%", accumulate=True, **options)
    for each in (plain, model):
        each(x).square().sum().backward()
    monkeypatch.setattr(step_backend, "notes_arrivals", lambda: True)
    plain(x).square().sum().backward()
    with pytest.warns(PlanWarning, match="outside of no_sync"):
        model(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Masked(nn.Module):
    """A graph without parameters, a break, and a graph with some."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x.abs().sum(1, keepdim=True) > 1).float()
        torch._dynamo.graph_break()
        return self.layer(x * mask)


def test_graphs_without_gradients_have_no_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_backend, "notes_arrivals", lambda: True)
    model, x = Masked(), torch.randn(8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        remat.fit(model, x, budget="200%", costs="estimated", regions="breaks")
        model(x).sum().backward()


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
