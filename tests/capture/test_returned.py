"""A call's one tensor, noted while it is traced: what fake outputs would say."""

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tests.modules import ConvNet
from torch import nn
from torch.nn import functional

import remat
import remat.training.step_planning
from remat.capture.outputs import fake_output, fake_outputs
from remat.capture.returned import Returned, note_returned
from remat.capture.tracing import compiled_entry
from remat.core.errors import PlanWarning

WIDTH = 32
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


class Returning(nn.Module):
    """Returns what ``choose`` makes of its input and of a layer's result."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.choose = choose
        self.latest: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        self.latest = y * 2
        return self.choose(self, x, y)


def noted(model: nn.Module, *args: Any) -> tuple[Returned, list[str]]:
    """Return what is noted of a call, and the names of the traced graph's outputs."""
    found: list[Returned] = []
    names: list[str] = []

    def compiler(module: Any, _inputs: Any) -> Any:
        assert len(found) == 1, "it is noted before the compiler is called"
        (output,) = module.graph.find_nodes(op="output")
        names.extend(node.name for node in output.args[0])
        return module.forward

    compiled_entry(model, compiler, note_returned(found.append))(*args)
    return found[0], names


ONE_TENSOR = {
    "computed": lambda _m, _x, y: functional.gelu(y),
    "transposed": lambda _m, _x, y: y.transpose(0, 1),
    "without gradient": lambda _m, _x, y: y.detach(),
    "integers": lambda _m, _x, y: y.argmax(dim=1),
    "view of an input": lambda _m, x, _y: x.view(-1),
    "kept besides": lambda m, _x, y: m.latest + y,
}


@pytest.mark.parametrize("kind", ONE_TENSOR)
def test_one_tensor_is_noted_as_fake_outputs_have_it(kind: str) -> None:
    model, x = Returning(ONE_TENSOR[kind]), torch.randn(5, WIDTH)
    expected = fake_outputs(model, (x,), {}).value
    returned = noted(model, x)[0].tensor
    assert returned is not None
    outputs = fake_output(returned)
    assert outputs.tensors == [outputs.value]
    assert outputs.value.is_leaf
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(outputs.value, name) == getattr(expected, name), name
    assert outputs.value.stride() == expected.stride()


@pytest.mark.parametrize(
    "choose",
    [
        lambda _m, _x, y: (y,),
        lambda _m, _x, y: {"logits": y},
        lambda _m, x, _y: x,
        lambda m, _x, _y: m.layer.weight,
        lambda _m, _x, _y: None,
    ],
)
def test_anything_else_is_not_noted(choose: Any) -> None:
    assert noted(Returning(choose), torch.randn(5, WIDTH))[0].tensor is None


@dataclass
class Scores:
    """Outputs as a data class has them."""

    logits: torch.Tensor
    loss: torch.Tensor | None


class Slots:
    """Outputs without a dictionary."""

    __slots__ = ("logits", "loss")

    def __init__(self, logits: torch.Tensor, loss: torch.Tensor) -> None:
        self.logits, self.loss = logits, loss


class Raising:
    """Outputs whose property named loss is no field."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    @property
    def loss(self) -> torch.Tensor:
        raise ValueError("there is no loss here")


class Pair(NamedTuple):
    """Outputs as a tuple has them whose items have names."""

    logits: torch.Tensor
    loss: torch.Tensor


LOSSES = {
    "alone": lambda y: y.sum(),
    "key": lambda y: {"logits": y, "loss": y.sum()},
    "key of an ordered one": lambda y: OrderedDict(logits=y, loss=y.sum()),
    "data class": lambda y: Scores(y, y.sum()),
    "slots": lambda y: Slots(y, y.sum()),
    "named tuple": lambda y: Pair(y, y.sum()),
    "first of a tuple": lambda y: (y.sum(), y),
    "first of a list": lambda y: [y.sum(), y],
}
NO_LOSSES = {
    "vector": lambda y: {"loss": y.sum(0), "logits": y},
    "no gradient": lambda y: {"loss": y.sum().detach(), "logits": y},
    "none": lambda y: Scores(y, None),
    "number": lambda y: {"loss": 1.0, "logits": y},
    "later in a tuple": lambda y: (y, y.sum()),
    "other name": lambda y: {"logits": y, "scale": y.sum()},
    "raises": Raising,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_is_noted_by_its_place(kind: str) -> None:
    model = Returning(lambda _m, _x, y: LOSSES[kind](y))
    returned, names = noted(model, torch.randn(5, WIDTH))
    assert returned.loss in names
    # The model keeps another tensor, which the graph returns too.
    assert len(names) == (2 if kind == "alone" else 3)


@pytest.mark.parametrize("kind", NO_LOSSES)
def test_anything_else_is_no_loss(kind: str) -> None:
    model = Returning(lambda _m, _x, y: NO_LOSSES[kind](y))
    returned, _ = noted(model, torch.randn(5, WIDTH))
    assert returned.loss is None


class WithLogits(nn.Module):
    """Returns its loss after large scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(x)
        return {"logits": scores, "loss": functional.cross_entropy(scores, y)}


def test_a_step_with_its_loss_inside_is_predicted_as_it_is() -> None:
    batch = (torch.randn(64, WIDTH), torch.randint(0, 512, (64,)))
    report = remat.verify(WithLogits(), batch, budget="100%", repeats=1)
    assert report.against_eager == ()
    assert abs(report.prediction_error) < 0.01
    described = remat.plan(
        WithLogits(), batch, budget="100%", loss=lambda out: out["loss"]
    )
    assert report.plan.peak_bytes <= described.peak_bytes


def test_other_outputs_that_are_differentiated_are_said_once() -> None:
    model, plain = WithLogits(), WithLogits()
    x, y = torch.randn(64, WIDTH), torch.randint(0, 512, (64,))
    remat.fit(model, (x, y), budget="100%", costs="estimated")
    model(x, y)["loss"].backward()
    model.zero_grad()
    for expectation in (
        pytest.warns(PlanWarning, match=r"WithLogits returns a loss.*\[0\].*loss="),
        nullcontext(),
    ):
        with expectation:
            for each in (model, plain):
                each.zero_grad()
                outputs = each(x, y)
                (outputs["loss"] + outputs["logits"].square().mean()).backward()
        assert_equal(model.layer.weight.grad, plain.layer.weight.grad)


def test_a_described_loss_may_use_all_outputs() -> None:
    def loss(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return outputs["loss"] + outputs["logits"].square().mean()

    model = WithLogits()
    x, y = torch.randn(64, WIDTH), torch.randint(0, 512, (64,))
    remat.fit(model, (x, y), budget="100%", costs="estimated", loss=loss)
    loss(model(x, y)).backward()


def test_a_described_loss_of_one_tensor_takes_no_second_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = ConvNet(), torch.randn(4, 3, 16, 16)
    target = torch.zeros(model(x).shape)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(y, target)

    def plan() -> remat.Plan:
        return remat.plan(model, x, budget="100%", loss=loss, costs="estimated")

    once = plan()
    real = fake_outputs
    traced: list[object] = []

    def again(*args: Any) -> Any:
        traced.append(args)
        return real(*args)

    monkeypatch.setattr(remat.training.step_planning, "fake_outputs", again)
    assert plan().peak_bytes == once.peak_bytes
    assert not traced
    # As if the tensor had not been noted.
    monkeypatch.setattr(
        remat.training.step_planning, "fake_output", lambda _: again(model, (x,), {})
    )
    twice = plan()
    assert traced
    assert [op.workspace_bytes for op in twice.graph.ops] == [
        op.workspace_bytes for op in once.graph.ops
    ]
    assert (twice.peak_bytes, twice.cost_ns) == (once.peak_bytes, once.cost_ns)
