"""What surrounds the traced step counts: losses, residents, gradients, hooks."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
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


class ReadsAList(nn.Module):
    """Reads a tensor that is neither parameter nor buffer, and holds one unread."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.constants = [torch.randn(ROWS, WIDTH)]
        self.unread = {"table": [torch.randn(ROWS, WIDTH)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.constants[0])


class Targets:
    def __init__(self) -> None:
        self.values = torch.randn(ROWS, WIDTH)
        self.others = torch.randn(ROWS, WIDTH)

    def distance(self, out: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out, self.values)

    def __call__(self, out: torch.Tensor) -> torch.Tensor:
        return self.distance(out)


global_targets = Targets()


def helper(out: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(out, global_targets.values)


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attribute": lambda out: functional.mse_loss(out, global_targets.values),
    "helper": lambda out: 2 * helper(out),
    "method": global_targets.distance,
    "callable": global_targets,
}


@pytest.mark.parametrize("name", LOSSES)
def test_targets_count_however_the_loss_reaches_them(name: str) -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH)
    plan = fit_tightly(model, (x,), loss=LOSSES[name])
    peak = measured_peak_bytes(model, (x,), LOSSES[name], [global_targets.values])
    assert peak <= plan.peak_bytes <= 1.005 * peak


def test_tensors_outside_of_parameters_and_batch_all_count() -> None:
    model, x = ReadsAList(), torch.randn(ROWS, WIDTH)
    plan = fit_tightly(model, (x,), loss=helper)
    held = [model.constants, model.unread, global_targets.values]
    peak = measured_peak_bytes(model, (x,), helper, held)
    assert peak <= plan.peak_bytes <= 1.005 * peak


def test_a_storage_counts_once_wherever_it_is_reached() -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out, x.view(WIDTH, ROWS).view(ROWS, WIDTH))

    plan = fit_tightly(model, (x,), loss=loss)
    peak = measured_peak_bytes(model, (x,), loss)
    assert peak <= plan.peak_bytes <= 1.005 * peak


def test_a_loss_with_parameters_of_its_own() -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH)
    judge = nn.Sequential(nn.Linear(WIDTH, 500), nn.LogSoftmax(-1))

    def loss(out: torch.Tensor) -> torch.Tensor:
        judge.zero_grad()
        return judge(out).mean()

    optimizer = torch.optim.Adam([*model.parameters(), *judge.parameters()])
    plan = fit_tightly(model, (x,), loss=loss, optimizer=optimizer)
    assert all(parameter.grad is None for parameter in judge.parameters())
    peak = measured_peak_bytes(model, (x,), loss, [judge], optimizer=optimizer)
    assert peak <= plan.peak_bytes <= 1.02 * peak


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.Adam(parameters, foreach=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ],
    ids=["large step", "small step"],
)
def test_accumulated_gradients_are_gone_when_the_optimizer_steps(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
) -> None:
    model, x = perceptron(depth=6), torch.randn(8, WIDTH)
    optimizer = make_optimizer(model.parameters())
    targets = torch.randn(8, WIDTH)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out, targets)

    loss(model(x)).backward()
    plan = fit_tightly(model, (x,), loss=loss, optimizer=optimizer)
    peak = measured_peak_bytes(
        model, (x,), loss, [targets], optimizer=optimizer, passes=3
    )
    assert peak <= plan.peak_bytes <= 1.02 * peak


def test_a_loss_for_one_batch_size_serves_smaller_ones() -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH)
    targets = torch.randn(ROWS, WIDTH)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out, targets)

    remat.fit(model, (x,), budget="90%", loss=loss)
    for accumulates in (False, True):
        for rows in (100, 2):
            functional.mse_loss(model(x[:rows]), targets[:rows]).backward()
            if not accumulates:
                model.zero_grad()
    with pytest.raises(remat.CaptureError, match=r"\(512, 64\).*largest batch first"):
        model(torch.randn(2 * ROWS, WIDTH))


def test_a_loss_for_any_batch_size_serves_larger_ones() -> None:
    model, x = perceptron(), torch.randn(2 * ROWS, WIDTH)
    targets = torch.randn(2 * ROWS, WIDTH)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out, targets[: len(out)])

    remat.fit(model, (x[:ROWS],), budget="2 MB", loss=loss)
    loss(model(x)).backward()


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
