"""A model's outputs on fake tensors: as the caller sees them, without effects."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from tests.modules import ConvNet
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

import remat
from remat.capture.outputs import fake_outputs
from remat.training.fitted_model import fitted_on

WIDTH = 32


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    extra: Any = None


class Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Talkative(nn.Module):
    """Counts its calls, keeps what it saw, hooks its values, returns objects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0
        self.log: list[float] = []

    def forward(self, x: torch.Tensor) -> Answer:
        self.calls += 1
        self.log.append(1.0)
        self.steps += 1
        y = self.first(x)
        y.register_hook(lambda gradient: gradient * 3)
        y = self.second(functional.gelu(y))
        return Answer(logits=y, extra=[Plain(y * 2), x, y.detach(), y.argmax()])


def test_outputs_have_the_models_structure() -> None:
    model, x = Talkative(), torch.randn(5, WIDTH)
    found = fake_outputs(model, (x,), {})
    answer = found.value
    assert isinstance(answer, Answer)
    plain, given, detached, index = answer.extra
    assert isinstance(plain, Plain)
    assert given is x
    parts = [answer.logits, plain.value, detached, index]
    assert all(isinstance(part, FakeTensor) for part in parts)
    assert [part.requires_grad for part in parts] == [True, True, False, False]
    assert index.dtype is torch.int64
    assert {id(part) for part in parts} == {id(tensor) for tensor in found.tensors}


def test_the_model_and_the_generators_are_not_touched() -> None:
    model, x = ConvNet(), torch.randn(2, 3, 8, 8)
    before = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    assert fake_outputs(model, (x,), {}).value.shape == (2, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_types_are_those_under_autocast() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fake_outputs(model, (x,), {}).value.dtype is torch.bfloat16
    assert fake_outputs(model, (x,), {}).value.dtype is torch.float32


def described(outputs: Any) -> torch.Tensor:
    return outputs.logits.square().mean() + outputs.extra[0].value.mean()


@pytest.mark.parametrize("loss", [None, described])
def test_effects_happen_once_a_step_and_never_while_planning(loss: Any) -> None:
    model, x = Talkative(), torch.randn(64, WIDTH)
    seen: list[torch.Tensor] = []
    model.second.register_forward_hook(lambda *call: seen.append(call[2].detach()))
    remat.fit(model, (x,), budget="1 MB", loss=loss)
    assert (model.calls, model.log, seen) == (0, [], [])
    assert model.steps.item() == 0
    for step in range(1, 4):
        model.zero_grad()
        described(model(x)).backward()
        assert model.calls == len(model.log) == len(seen) == model.steps.item() == step
    assert all(type(tensor) is torch.Tensor for tensor in seen)


def test_hooks_inside_forward_work_with_a_described_loss() -> None:
    x = torch.randn(64, WIDTH)
    plain, planned = Talkative(), Talkative()
    remat.fit(planned, (x,), budget="1 MB", loss=described)
    for model in (plain, planned):
        described(model(x)).backward()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_what_only_looked_at_the_outputs_lets_go_of_the_model() -> None:
    model, x = Talkative(), torch.randn(5, WIDTH)
    found = fake_outputs(model, (x,), {})
    alive = weakref.ref(model)
    del model, found
    gc.collect()
    assert alive() is None


class Indexed(nn.Module):
    """Returns places, or keeps them to itself; its operators are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, *, returns: bool) -> tuple[torch.Tensor, ...]:
        places: list[torch.Tensor] = []
        for layer in self.layers:
            x, found = layer(x).unflatten(-1, (2, WIDTH)).max(1)
            places.append(found)
        loss = x.square().mean()
        return (loss, *places) if returns else (loss,)


def test_steps_that_return_other_values_of_the_same_operators_are_not_the_same() -> (
    None
):
    model, x = Indexed(), torch.randn(256, WIDTH)
    plans = [
        remat.plan(
            model,
            x,
            kwargs={"returns": returns},
            budget="100%",
            costs="estimated",
            regions="whole",
        )
        for returns in (False, True)
    ]
    assert plans[0].fingerprint != plans[1].fingerprint
    remat.fit(model, x, {"returns": False}, budget="100%", costs="estimated")
    model(x, returns=False)[0].backward()
    model.zero_grad()
    fitted = fitted_on(model)
    assert fitted is not None
    assert fitted.planner.planned_count == 1
    model(x, returns=True)[0].backward()
    assert fitted.planner.planned_count == 2
