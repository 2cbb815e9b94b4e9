"""Batch norm by the operator that calls cuDNN: on a CPU, torch's own kernel."""

from collections.abc import Iterator

import pytest
import torch
from tests.accelerator import FIRST, IS_SIMULATED
from torch import Tensor, nn

import remat
from remat.capture import cudnn_batch_norm

NAME = "batch_norm_with_update"
DTYPES = [None, torch.float16]


@pytest.fixture
def _as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def is_cudnn(_x: Tensor, others: tuple[Tensor | None, ...], _eps: float) -> bool:
        return all(value is not None for value in others)

    monkeypatch.setattr(cudnn_batch_norm, "is_cudnn", is_cudnn)
    yield
    torch.compiler.reset()


def net(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.Sequential(
                nn.Conv2d(8 if i else 3, 8, 3, padding=1),
                nn.BatchNorm2d(8, **options),
                nn.ReLU(),
            )
            for i in range(6)
        ]
    )


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


@pytest.mark.usefixtures("_as_on_a_card")
def test_it_runs_again_and_its_statistics_move_once() -> None:
    model, x = net(), torch.randn(4, 3, 24, 24)
    report = remat.verify(model, x, budget="60%", loss=mean_square, repeats=1)
    assert report.is_exact
    assert not report.against_eager
    assert report.is_within_budget
    names = [op.name for op in report.plan.graph.ops]
    assert sum(NAME in name for name in names) >= 6, names
    assert report.plan.recomputed_op_count > 0


@pytest.mark.usefixtures("_as_on_a_card")
@pytest.mark.parametrize("way", ["evaluation", "no statistics"])
def test_what_is_no_training_with_statistics_is_traced_as_ever(way: str) -> None:
    model, x = net(track_running_stats=way != "no statistics"), torch.randn(4, 3, 9, 9)
    model.train(way != "evaluation")
    report = remat.verify(model, x, budget="80%", loss=mean_square, repeats=1)
    assert report.is_exact
    assert not report.against_eager
    assert not any(NAME in op.name for op in report.plan.graph.ops)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None] if IS_SIMULATED else DTYPES, ids=str)
def test_a_card_computes_what_eager_pytorch_does(dtype: torch.dtype | None) -> None:
    # The card's libraries keep more than a small step has.
    size = 24 if IS_SIMULATED else 192
    model, x = net().to(FIRST), torch.randn(16, 3, size, size, device=FIRST)
    # Gradients of weights are summed in another order each time otherwise.
    with (
        torch.backends.cudnn.flags(deterministic=True),
        torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None),
    ):
        report = remat.verify(model, x, budget="75%", loss=mean_square, repeats=1)
    assert report.is_exact, report
    assert not report.against_eager, report
