"""A step that adds to gradients needs no second set of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat
from remat.core.gradient_pieces import ADDING
from remat.training.fitted_model import FittedModel

WIDTH = 512
X, TARGETS = torch.randn(64, WIDTH), torch.randint(0, 10, (64,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A model with more bytes of weights than of activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def loss(outputs: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, TARGETS)


def clear(model: nn.Module) -> None:
    model.zero_grad()


def zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def passes(
    model: nn.Module, count: int = 3, cleared: Callable[[nn.Module], None] = clear
) -> list[torch.Tensor | None]:
    """Return the gradients that some backward passes add up."""
    cleared(model)
    torch.manual_seed(1)
    for _ in range(count):
        loss(model(X)).backward()
    return [parameter.grad for parameter in model.parameters()]


def peak_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    return remat.measure(step, repeats=0, resident=[model, X, TARGETS]).peak_bytes


def plans_of(model: nn.Module) -> list[remat.Plan]:
    fitted = model._compiled_call_impl
    assert isinstance(fitted, FittedModel)
    return list(fitted.planner.plans.values())


def named_bytes(model: nn.Module, **how: Any) -> int:
    with pytest.raises(remat.BudgetError) as caught:
        remat.fit(model, X, budget=1, loss=loss, **how)
    return caught.value.required_bytes


@pytest.fixture(autouse=True)
def quiet_random() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("regions", ["whole", "blocks"])
@pytest.mark.parametrize("exist", [False, True], ids=["to come", "there"])
def test_the_smallest_budget_is_below_the_peak_of_plain_passes(
    regions: str, *, exist: bool
) -> None:
    plain, model = Net(), Net()
    if exist:
        passes(model, 1)
    budget = named_bytes(model, accumulate=True, regions=regions)
    assert budget < peak_bytes(plain, lambda: passes(plain))
    remat.fit(model, X, budget=budget, loss=loss, accumulate=True, regions=regions)
    expected, found = passes(plain), passes(model)
    for one, other in zip(expected, found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    peak = peak_bytes(model, lambda: passes(model))
    predicted = max(plan.peak_bytes for plan in plans_of(model))
    assert peak <= predicted <= budget
    assert predicted <= 1.01 * peak


@pytest.mark.parametrize("cleared", [clear, zero])
def test_gradients_that_are_zeroed_are_added_to(
    cleared: Callable[[nn.Module], None],
) -> None:
    plain, model = Net(), Net()
    passes(plain, 1)
    passes(model, 1)
    budget = named_bytes(model)
    remat.fit(model, X, budget=budget, loss=loss)
    expected, found = (passes(net, 1, cleared) for net in (plain, model))
    for one, other in zip(expected, found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert peak_bytes(model, lambda: passes(model, 1, cleared)) <= budget
    assert any(ADDING in [op.name for op in plan.graph.ops] for plan in plans_of(model))


@pytest.mark.parametrize("count", [1, 2])
def test_a_backward_pass_that_is_retained_adds_the_same_again(count: int) -> None:
    model = Net()
    passes(model, 1)
    remat.fit(model, X, budget="100%", loss=loss)
    clear(model)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    value = loss(model(X))
    for number in range(count):
        value.backward(retain_graph=number + 1 < count)
    once = passes(Net(), 1)
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, count * gradient)


def test_gradients_of_some_parameters_are_taken_without_the_others() -> None:
    plain, model = Net(), Net()
    passes(plain, 1)
    passes(model, 1)
    remat.fit(model, X, budget="100%", loss=loss)
    found: list[torch.Tensor] = []
    for net in (plain, model):
        torch.manual_seed(2)
        weight = net.get_parameter("blocks.1.up.weight")
        found += torch.autograd.grad(loss(net(X)), [weight])
    assert torch.equal(*found)


def test_a_step_that_finds_no_gradients_is_not_taken_for_one_that_adds() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    passes(model, 1)
    remat.fit(model, X, budget="100%", loss=loss, optimizer=optimizer)

    def step() -> None:
        passes(model, 1)
        optimizer.step()

    resident = [model, X, TARGETS, optimizer]
    peak = remat.measure(step, repeats=0, resident=resident).peak_bytes
    adding, first = plans_of(model)
    assert ADDING in [op.name for op in adding.graph.ops]
    assert ADDING not in [op.name for op in first.graph.ops]
    assert peak <= first.peak_bytes <= 1.01 * peak
