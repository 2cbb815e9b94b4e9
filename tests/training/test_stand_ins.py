"""A step is planned before its model has memory, and installed once it has."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from tests.training.test_fitting import mean_square
from torch import nn

import remat
from remat.core.errors import CaptureError
from remat.torch_compat.names import FakeTensor, FakeTensorMode


class Tied(nn.Module):
    """Two names for one weight, a buffer, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(32, 64, bias=False)
        self.norm = nn.BatchNorm1d(64)
        self.outside = nn.Linear(32, 64, bias=False)
        self.outside.weight = self.inside.weight
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.inside(x)).tanh() * self.scale
        return inner * self.outside(x)


def on_meta() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Tied(), torch.empty(256, 32)


def fake() -> tuple[nn.Module, torch.Tensor]:
    with FakeTensorMode():
        return Tied(), torch.empty(256, 32)


def half_on_meta() -> tuple[nn.Module, torch.Tensor]:
    model, _ = on_meta()
    return model, torch.randn(256, 32)


@pytest.mark.parametrize("make", [on_meta, fake, half_on_meta])
def test_the_plan_is_that_of_the_model_with_memory(make: Any, tmp_path: Any) -> None:
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {
        name: id(value) for name, value in model.state_dict(keep_vars=True).items()
    }
    how: dict[str, Any] = {"budget": "90%", "loss": mean_square, "costs": "estimated"}
    plan = remat.plan(model, x, optimizer=optimizer, **how)
    assert {n: id(v) for n, v in model.state_dict(keep_vars=True).items()} == before
    assert not optimizer.state

    real, batch = Tied(), torch.randn(256, 32)
    real_optimizer = torch.optim.AdamW(real.parameters())
    expected = remat.plan(real, batch, optimizer=real_optimizer, **how)
    assert plan.schedule == expected.schedule
    assert plan.graph == expected.graph
    assert plan.fingerprint == expected.fingerprint
    plan.save(tmp_path / "plan.json")
    installed = remat.fit(
        real,
        batch,
        plan=remat.load_plan(tmp_path / "plan.json"),
        optimizer=real_optimizer,
        loss=mean_square,
    )
    assert installed.peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("around", [FakeTensorMode, lambda: torch.device("meta")])
def test_plans_are_made_where_models_are(around: Any) -> None:
    with around():
        model, x = Tied(), torch.empty(256, 32)
        plan = remat.plan(model, x, budget="90%", costs="estimated")
    expected = remat.plan(model, x, budget="90%", costs="estimated")
    assert plan.schedule == expected.schedule
    assert plan.cost_ns == expected.cost_ns
    assert plan.fingerprint == expected.fingerprint


@pytest.mark.parametrize("make", [on_meta, fake])
@pytest.mark.parametrize("call", [remat.fit, remat.verify])
def test_fit_says_when_it_can_be_installed(call: Any, make: Any) -> None:
    model, x = make()
    with pytest.raises(CaptureError, match=r"remat\.plan plans the step.*to_empty"):
        call(model, x, budget="90%")
    with (
        FakeTensorMode(),
        pytest.raises(CaptureError, match=r"remat\.plan plans the step"),
    ):
        call(model, x, budget="90%")


@pytest.mark.parametrize("call", [remat.fit, remat.verify])
def test_a_step_with_memory_is_planned_where_new_tensors_have_none(call: Any) -> None:
    model, x = Tied(), torch.randn(256, 32)
    with FakeTensorMode():
        made = call(model, x, budget="90%", costs="estimated")
    assert call is remat.fit or (made.is_exact and made.is_within_budget)


@pytest.mark.parametrize("call", [remat.fit, remat.verify])
def test_an_example_without_memory_is_refused_too(call: Any) -> None:
    with FakeTensorMode():
        x = torch.empty(256, 32)
    with pytest.raises(CaptureError, match=r"an example input .* has no memory"):
        call(Tied(), x, budget="90%")


def test_gradients_and_optimizer_state_count() -> None:
    how: dict[str, Any] = {"budget": "1 MiB", "loss": mean_square, "costs": "estimated"}
    peaks: set[int] = set()
    for device in ("meta", "cpu"):
        with torch.device(device):
            model, x = Tied(), torch.empty(256, 32)
            optimizer = torch.optim.AdamW(model.parameters())
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
                optimizer.state[parameter] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        plan = remat.plan(model, x, optimizer=optimizer, **how)
        peaks.add(plan.peak_bytes)
    assert len(peaks) == 1


def test_what_cannot_be_copied_is_named() -> None:
    model, x = on_meta()
    vars(model)["lock"] = threading.Lock()
    with pytest.raises(CaptureError, match=r"cannot be: TypeError: .*lock"):
        remat.plan(model, x, budget="90%")


def test_fake_tensors_elsewhere_are_refused() -> None:
    x: Any = FakeTensor(FakeTensorMode(), torch.empty(2, 4, device="meta"), "cuda:0")
    with pytest.raises(CaptureError, match=r"says that it is on cuda.*\"meta\""):
        remat.plan(nn.Linear(4, 4), x, budget="90%")


def test_planning_touches_no_weights() -> None:
    """Weights and gradients of 12 GiB are planned for in less than one."""
    code = """
import re, torch, remat
from pathlib import Path
from torch import nn
with torch.device("meta"):
    layers = [nn.Sequential(nn.Linear(16384, 16384), nn.GELU()) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.empty(4096, 16384)
plan = remat.plan(model, x, budget="100%", costs="estimated")
# Of this program alone: what getrusage says includes who started it.
(most,) = re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(plan.peak_bytes, int(most) * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    planned_bytes, used_bytes = map(int, done.stdout.split())
    assert planned_bytes > 12 * 2**30
    assert used_bytes < 2**30
