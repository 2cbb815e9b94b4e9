"""Wrong arguments of the public calls: the message says what to write instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat
from remat.core.errors import CaptureError
from remat.planning.plan import Plan

Call = Callable[..., Any]
X, TARGET = torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
CALLS = (remat.fit, remat.plan, remat.verify)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("budget", ["80%", 8_000_000])
def test_a_budget_by_position_is_told_its_name(call: Call, budget: Any) -> None:
    for more in ({}, {"budget": budget}):
        with pytest.raises(TypeError) as refused:
            call(make_model(), (X,), budget, **more)
        assert f"given by its name: budget={budget!r}" in str(refused.value)


@pytest.mark.parametrize("call", CALLS)
def test_an_optimizer_by_position_is_told_its_name(call: Call) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match="by its name: optimizer=optimizer"):
        call(model, (X,), optimizer, budget="100%")


def test_keys_of_kwargs_are_names() -> None:
    kwargs: Any = {0: X}
    with pytest.raises(TypeError, match="kwargs has the key 0; keys are names"):
        remat.plan(make_model(), (), kwargs, budget="100%")


@pytest.mark.parametrize(
    ("loss", "example"),
    [
        (functional.cross_entropy, "cross_entropy(outputs, target)"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss()(outputs, target)"),
        (nn.CrossEntropyLoss, "CrossEntropyLoss()(outputs, target)"),
        (lambda one, other: one + other, "loss(outputs, target)"),
        (lambda: 0, "loss(outputs, target)"),
    ],
    ids=["function", "module", "class", "two", "none"],
)
def test_a_loss_takes_the_outputs_alone(loss: Any, example: str) -> None:
    with pytest.raises(TypeError) as refused:
        remat.plan(make_model(), (X,), budget="100%", loss=loss)
    message = str(refused.value)
    assert f"loss=lambda outputs: {example}" in message
    if not isinstance(loss, type):
        assert "loss is called with the model's outputs alone" in message


@pytest.mark.parametrize(
    "loss",
    [
        torch.sum,  # Written in C: it has no signature.
        nn.Flatten(0),
        lambda outputs, scale=2.0: scale * outputs.sum(),
        lambda *everything: everything[0].sum(),
    ],
    ids=["in C", "module", "default", "variadic"],
)
def test_a_loss_that_can_take_the_outputs_is_called(loss: Any) -> None:
    if isinstance(loss, nn.Flatten):
        with pytest.raises(CaptureError, match="shape"):
            remat.plan(make_model(), X, budget="100%", loss=loss, costs="estimated")
        return
    plan = remat.plan(make_model(), X, budget="100%", loss=loss, costs="estimated")
    assert isinstance(plan, Plan)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda o: functional.cross_entropy(o, TARGET, reduction="none"),
            r"a tensor of shape \(16,\); .* one number, .* mean\(\) or the sum\(\)",
        ),
        (lambda o: o, r"a tensor of shape \(16, 4\); .* one number"),
        (lambda o: float(o.sum()), "a float; .* leave out .item"),
        (lambda o: o.sum().backward(), "None; .* not call backward"),
        (lambda o: (o.sum(), 1), "a tuple; .* a tensor of one number"),
        (
            lambda o: o.detach().sum(),
            "a tensor that does not depend on an output .* detach",
        ),
        (lambda o: o.argmax(), "a tensor that does not depend on an output"),
    ],
    ids=["vector", "outputs", "float", "nothing", "tuple", "detached", "integer"],
)
def test_a_loss_returns_a_scalar_that_takes_a_gradient(
    loss: Call, message: str
) -> None:
    with pytest.raises(CaptureError, match=f"^loss= returned {message}") as refused:
        remat.plan(make_model(), (X,), budget="100%", loss=loss)
    assert "cannot be predicted" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", X),
        ("optimizer", [torch.optim.SGD(make_model().parameters())]),
        ("loss", X),
        ("plan", "plan.json"),
    ],
    ids=["model", "optimizer", "loss", "plan"],
)
def test_a_wrong_type_is_named_in_one_line(name: str, value: Any) -> None:
    given: dict[str, Any] = {"model": make_model(), "args": X, "budget": "100%"}
    given[name] = value
    if name == "plan":
        del given["budget"]
    with pytest.raises(TypeError) as refused:
        remat.fit(**given)
    message = str(refused.value)
    assert message.startswith(f"{name} is ")
    assert type(value).__name__ in message
    assert "; it must be " in message
    assert len(message.splitlines()) == 1
    assert len(message) < 250
