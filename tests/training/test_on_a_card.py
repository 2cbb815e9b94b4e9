"""What is otherwise on a card than on a CPU: whole steps of small models."""

from typing import Any

import pytest
import torch
from tests.accelerator import FIRST, IS_SIMULATED
from torch import Tensor, nn

import remat
from remat.core.graph import Role

ROWS = 512 if IS_SIMULATED else 16384
"""The card's libraries keep more than a small step has."""


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_attention_with_dropout_is_planned_and_repeated(
    dtype: torch.dtype | None,
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(FIRST)
    x = torch.randn(ROWS // 16, 32, 128, device=FIRST)
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
        report = remat.verify(model, x, budget="70%", loss=mean_square, repeats=1)
    assert report.is_exact, report
    assert report.is_within_budget, report
    assert report.plan.recomputed_op_count


@pytest.mark.gpu
def test_what_libraries_keep_is_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    ).to(FIRST)
    x = torch.randn(ROWS, 256, device=FIRST)
    report = remat.verify(model, x, budget="70%", loss=mean_square, repeats=1)
    kept = [s for s in report.plan.graph.storages if s.role is Role.LIBRARY]
    assert len(kept) == 1
    assert kept[0].size_bytes > 0
    assert report.is_within_budget, report
    assert 0 <= report.prediction_error < 0.02, report


def test_a_cpu_has_no_such_library() -> None:
    plan = remat.plan(nn.Linear(8, 8), torch.ones(2, 8), budget="100%")
    assert not any(s.role is Role.LIBRARY for s in plan.graph.storages)


class BrokenInAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.in_two(x)

    def in_two(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(hidden).float()


@pytest.mark.gpu
def test_graphs_without_a_tensor_of_the_card_are_of_a_step_on_it() -> None:
    model, x = BrokenInAutocast().to(FIRST), torch.randn(ROWS, 256, device=FIRST)
    how: dict[str, Any] = {"loss": mean_square, "regions": "breaks", "repeats": 1}
    report = remat.verify(model, x, budget="150%", **how)
    kinds = {storage.role for storage in report.plan.graph.storages}
    assert report.plan.graph.device_kinds == (x.device.type,)
    assert Role.LIBRARY in kinds
    assert report.is_exact, report
    assert report.is_within_budget, report


@pytest.mark.gpu
def test_the_budget_that_is_named_is_enough_for_a_step_that_adds_to_gradients() -> None:
    def narrow() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(20, 20) for _ in range(6))).to(FIRST)

    x = torch.randn(64, 20, device=FIRST)
    how: dict[str, Any] = {"loss": mean_square, "accumulate": True}
    with pytest.raises(remat.BudgetError) as caught:
        remat.fit(narrow(), x, budget=1, **how)
    # Each gradient is rounded up to what the allocator gives.
    remat.fit(narrow(), x, budget=caught.value.required_bytes, **how)
