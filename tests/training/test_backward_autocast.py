"""Gradients are those of eager PyTorch wherever backward() is called."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.errors import PlanWarning


class Attention(nn.Module):
    """Attention with dropout: its backward pass rounds otherwise under autocast."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions."""
        batch, length, width = x.shape
        parts = self.project(x).view(batch, length, 3, 4, width // 4)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.5 if self.training else 0.0
        )
        return x + mixed.transpose(1, 2).reshape(batch, length, width)


def attention(regions: str = "whole") -> nn.Module:
    """Return a model whose gradients depend on where backward() is called."""
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(1 + (regions == "blocks"))))


def perceptron() -> nn.Module:
    """Return a model whose gradients do not."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return nn.Sequential(block, copy.deepcopy(block))


def gradients(model: nn.Module, *, inside: bool) -> list[torch.Tensor]:
    """Return the gradients of a step in half precision."""
    torch.manual_seed(1)
    x = torch.randn(4, 16, 32)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def fitted(model: nn.Module, **options: Any) -> nn.Module:
    """Return a copy of a model with a plan that recomputes."""
    model = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        remat.fit(
            model, torch.randn(4, 16, 32), budget="90%", costs="estimated", **options
        )
    return model


def are_equal(mine: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether all gradients are bitwise equal."""
    return all(map(torch.equal, mine, others)) and len(mine) == len(others)


def test_where_backward_is_called_matters_to_eager() -> None:
    """Else the tests below could not fail."""
    model = attention()
    inside, outside = (gradients(model, inside=flag) for flag in (True, False))
    assert not are_equal(inside, outside)


@pytest.mark.parametrize(
    ("regions", "inside"), [("whole", True), ("blocks", True), ("breaks", False)]
)
def test_gradients_where_backward_is_said_to_be_called(
    regions: str, *, inside: bool
) -> None:
    plain = attention(regions)
    planned = fitted(plain, regions=regions, backward_in_autocast=inside)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for _ in range(2):
            mine = gradients(planned, inside=inside)
            assert are_equal(mine, gradients(plain, inside=inside))


@pytest.mark.parametrize(
    ("regions", "said"), [("whole", True), ("breaks", False), ("blocks", False)]
)
def test_other_way_than_said_is_told_once_and_exact_from_then_on(
    regions: str, *, said: bool
) -> None:
    plain = attention(regions)
    planned = fitted(plain, regions=regions, backward_in_autocast=said)
    with pytest.warns(PlanWarning, match="planned anew and are exact"):
        gradients(planned, inside=not said)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for _ in range(2):
            mine = gradients(planned, inside=not said)
            assert are_equal(mine, gradients(plain, inside=not said))


@pytest.mark.parametrize("regions", ["whole", "blocks"])
def test_nothing_is_told_where_it_does_not_matter(regions: str) -> None:
    plain = perceptron()
    planned = fitted(plain, regions=regions)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for inside in (True, False):
            mine = gradients(planned, inside=inside)
            assert are_equal(mine, gradients(plain, inside=inside))


def test_backward_under_autocast_of_a_forward_without() -> None:
    plain = attention()
    planned = copy.deepcopy(plain)
    x = torch.randn(4, 16, 32, dtype=torch.bfloat16)
    plain, planned = plain.bfloat16(), planned.bfloat16()
    remat.fit(planned, x, budget="90%", costs="estimated")

    def step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(x).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        step(planned)
    assert are_equal(step(planned), step(plain))


def test_verify_calls_backward_where_it_is_said() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = remat.verify(
            Attention(),
            torch.randn(4, 16, 32),
            budget="90%",
            costs="estimated",
            backward_in_autocast=True,
            repeats=1,
        )
    assert report.is_exact
    assert not report.against_eager


def test_compiler_backend_takes_the_option() -> None:
    plain = Attention()
    planned: Any = torch.compile(
        copy.deepcopy(plain),
        backend=remat.backend(
            budget="90%", costs="estimated", backward_in_autocast=True
        ),
        dynamic=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        mine = gradients(planned, inside=True)
    assert are_equal(mine, gradients(plain, inside=True))
