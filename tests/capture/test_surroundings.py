"""What surrounds the traced step counts: losses, residents, gradients, hooks."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import remat

ROWS, WIDTH = 256, 64


def perceptron(depth: int = 4, outputs: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth - 1)
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def fit_tightly(model: nn.Module, batch: Sequence[Any], **settings: Any) -> remat.Plan:
    """Fit into the smallest budget that is known to work."""
    try:
        return remat.fit(model, tuple(batch), budget=1, **settings)
    except remat.BudgetError as error:
        budget = error.required_bytes
    return remat.fit(model, tuple(batch), budget=budget, **settings)


def measured_peak_bytes(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[[Any], torch.Tensor],
    resident: Sequence[Any] = (),
    *,
    around: Callable[
        [], contextlib.AbstractContextManager[Any]
    ] = contextlib.nullcontext,
    optimizer: torch.optim.Optimizer | None = None,
    passes: int = 1,
) -> int:
    """Return the measured peak of a training step that holds outputs and loss."""

    def step() -> object:
        model.zero_grad()
        held = None
        for _ in range(passes):
            with around():
                outputs = model(*batch)
                held = (outputs, loss(outputs))
            held[1].backward()
        if optimizer is not None:
            optimizer.step()
        return held

    owners = [model, *batch, *resident, *([] if optimizer is None else [optimizer])]
    return remat.measure(step, warmup=2, repeats=0, resident=owners).peak_bytes


def bfloat16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_an_undescribed_loss_fits_under_autocast() -> None:
    model, x = perceptron(outputs=1000), torch.randn(ROWS, WIDTH)
    targets = torch.randint(0, 1000, (ROWS,))
    with bfloat16():
        plan = fit_tightly(model, (x,))
    peak = measured_peak_bytes(
        model,
        (x,),
        lambda out: functional.cross_entropy(out, targets),
        around=bfloat16,
    )
    assert peak <= plan.peak_bytes == plan.budget_bytes


def test_a_described_loss_is_predicted_under_the_callers_autocast() -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH)
    targets = torch.randn(ROWS, WIDTH)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out.float(), targets)

    with bfloat16():
        plan = fit_tightly(model, (x,), loss=loss)
    peak = measured_peak_bytes(model, (x,), loss, [targets], around=bfloat16)
    assert peak <= plan.peak_bytes <= 1.005 * peak


class CountsCalls(nn.Module):
    """Changes a scalar buffer, which the tracer returns before the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x) * (1 + self.calls)


def test_a_buffer_that_is_a_scalar_is_not_taken_for_the_loss() -> None:
    model, x = CountsCalls(), torch.randn(ROWS, WIDTH)
    targets = torch.randn(ROWS, WIDTH)
    plan = fit_tightly(model, (x,))
    peak = measured_peak_bytes(
        model, (x,), lambda out: functional.mse_loss(out, targets)
    )
    assert peak <= plan.peak_bytes == plan.budget_bytes
