"""Gradients that leave in pieces are those of the whole backward pass, and earlier."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat.training import variants

BLOCK_BYTES = 4 * (32 * 32 + 32)


class Net(nn.Module):
    """Layers of which the last one is used by the second output alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2)) for _ in range(4))
        )
        self.other = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers(x)
        return x.square().sum(), self.other(x)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def models() -> tuple[Net, Net]:
    """The model, and another with a plan."""
    fitted = Net()
    remat.fit(fitted, torch.randn(16, 32), budget="1 MiB", costs="estimated")
    return Net(), fitted


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gradients leave in pieces of a block, as in a wrapper with such buckets."""
    monkeypatch.setattr(variants, "first_bucket_bytes", lambda: BLOCK_BYTES)


def gradients(
    model: Net, *, outputs: tuple[int, ...] = (0, 1), passes: int = 1
) -> list[torch.Tensor | None]:
    """Return the gradients of all parameters after some backward passes."""
    model.zero_grad()
    torch.manual_seed(1)
    found = model(torch.randn(16, 32))
    total = sum(found[output].sum() for output in outputs)
    assert isinstance(total, torch.Tensor)
    for position in range(passes):
        total.backward(retain_graph=position + 1 < passes)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("outputs", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.filterwarnings("ignore::remat.core.errors.PlanWarning")
def test_they_are_bitwise_those_of_autograd(
    models: tuple[Net, Net], outputs: tuple[int, ...], passes: int
) -> None:
    plain, fitted = (
        gradients(model, outputs=outputs, passes=passes) for model in models
    )
    for mine, other in zip(fitted, plain, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or other is None or torch.equal(mine, other)
    assert (plain[-1] is None) == (outputs == (0,))


def test_early_pieces_are_added_up_before_later_ones_are_computed(
    models: tuple[Net, Net],
) -> None:
    model = models[1]
    model.zero_grad()
    loss = model(torch.randn(16, 32))[0]
    counts: list[int] = []
    with Products() as products:
        hooks = [
            model.get_parameter(
                f"layers.{layer}.0.weight"
            ).register_post_accumulate_grad_hook(
                lambda _parameter: counts.append(products.count)
            )
            for layer in range(4)
        ]
        loss.backward()
    for hook in hooks:
        hook.remove()
    assert len(counts) == 4
    assert counts == sorted(set(counts))
    assert counts[0] + 4 <= products.count


def test_gradients_of_some_parameters_can_be_asked_for(
    models: tuple[Net, Net],
) -> None:
    found: list[torch.Tensor] = []
    for model in models:
        torch.manual_seed(1)
        loss = model(torch.randn(16, 32))[0]
        found += torch.autograd.grad(loss, [model.get_parameter("layers.0.0.weight")])
    assert torch.equal(*found)


def test_gradients_are_handed_over_and_not_copied(models: tuple[Net, Net]) -> None:
    model = models[1]
    model.zero_grad()
    x = torch.randn(16, 32)

    def step() -> None:
        model(x)[0].backward()
        model.zero_grad()

    peaks: list[int] = []
    for piece_bytes in (BLOCK_BYTES, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(variants, "first_bucket_bytes", lambda b=piece_bytes: b)
            measured = remat.measure(step, warmup=1, repeats=0, resident=[model, x])
            peaks.append(measured.peak_bytes)
    assert peaks[0] <= peaks[1]
