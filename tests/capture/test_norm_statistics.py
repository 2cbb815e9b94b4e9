"""Normalisations of half-precision values with single-precision parameters."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(8),
    "batch norm without parameters": lambda: nn.BatchNorm2d(8, affine=False),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "layer norm": lambda: nn.LayerNorm([8, 14, 14]),
}


def mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.float().square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_normalisation_under_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), NORMS[name](), nn.ReLU(), nn.Conv2d(8, 4, 3)
    )
    x = torch.randn(4, 3, 16, 16)
    with torch.autocast("cpu", dtype=dtype):
        report = remat.verify(model, x, budget="100%", loss=mean_square, repeats=1)
    assert report.is_exact
    assert not report.against_eager
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.02
    sizes = {
        report.plan.graph.storages[storage].size_bytes
        for op in report.plan.graph.ops
        if "norm" in op.name and "backward" not in op.name
        for storage in op.writes[1:3]
    }
    # Mean and deviation, in single precision.
    assert all(size in {4 * n for n in (1, 4, 8, 32)} for size in sizes)
    assert sizes


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("norm", [*NORMS, "batch norm of vectors"])
def test_a_model_may_begin_with_a_normalisation(norm: str, is_training: bool) -> None:
    """Its input takes no gradient, and batch norm makes none."""
    torch.manual_seed(0)
    if norm == "batch norm of vectors":
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.GELU())
        x = torch.randn(256, 8)
    else:
        model = nn.Sequential(NORMS[norm](), nn.Conv2d(8, 8, 3), nn.GELU())
        x = torch.randn(4, 8, 14, 14)
    model.train(is_training)
    report = remat.verify(model, x, budget=2**40, loss=mean_square, repeats=1)
    assert report.is_exact
    assert not report.against_eager
    assert 0 <= report.predicted_peak_bytes - report.measured_peak_bytes <= 1024
