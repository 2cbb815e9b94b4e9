"""A call's one tensor, noted while it is traced: what fake outputs would say."""

from typing import Any

import pytest
import torch
from tests.modules import ConvNet
from torch import nn
from torch.nn import functional

import remat
import remat.step_planning
from remat.capture.outputs import fake_output, fake_outputs
from remat.capture.returned import ReturnedTensor, note_tensor
from remat.capture.tracing import compiled_entry

WIDTH = 32


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


def noted(model: nn.Module, *args: Any) -> list[ReturnedTensor | None]:
    found: list[ReturnedTensor | None] = []

    def compiler(module: Any, _inputs: Any) -> Any:
        assert len(found) == 1, "it is noted before the compiler is called"
        return module.forward

    compiled_entry(model, compiler, note_tensor(found.append))(*args)
    return found


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
    (returned,) = noted(model, x)
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
    assert noted(Returning(choose), torch.randn(5, WIDTH)) == [None]


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

    monkeypatch.setattr(remat.step_planning, "fake_outputs", again)
    assert plan().peak_bytes == once.peak_bytes
    assert not traced
    # As if the tensor had not been noted.
    monkeypatch.setattr(
        remat.step_planning, "fake_output", lambda _: again(model, (x,), {})
    )
    twice = plan()
    assert traced
    assert [op.workspace_bytes for op in twice.graph.ops] == [
        op.workspace_bytes for op in once.graph.ops
    ]
    assert (twice.peak_bytes, twice.cost_ns) == (once.peak_bytes, once.cost_ns)
