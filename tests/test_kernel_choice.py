"""Fused kernels through the public calls: exact, within budget, quicker or absent."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

import remat
from remat import kernel_choice
from remat.errors import MissingDependencyError
from remat.fitting import FittedModel
from remat.step_planning import CompilerPlanner


class Block(nn.Module):
    """Batch norm and dropout twice, with a skip: what fuses and what must not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.other_norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.first(x)))
        h = self.dropout(h).mul(1.5).sigmoid()
        return torch.relu(self.other_norm(self.second(h)) + x).tanh()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Flatten(), nn.Linear(4 * 32 * 32, 2))


X = torch.randn(8, 4, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def always_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every kernel, whatever this machine's clock says."""
    monkeypatch.setattr(kernel_choice, "is_quicker", lambda *_: True)


def fused_ops(plan: remat.Plan) -> list[str]:
    return [op.name for op in plan.graph.ops if op.name.startswith("fused_")]


def test_a_step_of_fused_kernels_is_exact_and_within_its_budget(
    model: nn.Module,
) -> None:
    report = remat.verify(model, X, budget="85%", kernels="fused", repeats=1)
    assert len(fused_ops(report.plan)) > 2
    assert report.plan.recomputed_op_count > 0
    assert report.is_exact
    assert report.is_within_budget
    assert math.isclose(report.prediction_error, 0, abs_tol=0.02)
    # Not bitwise eager's, but the same numbers; running statistics moved once.
    assert max((d.largest for d in report.against_eager), default=0) < 1e-3


def test_a_saved_plan_brings_its_kernels(model: nn.Module, tmp_path: Path) -> None:
    plan = remat.plan(model, X, budget="85%", kernels="fused")
    plan.save(tmp_path / "plan.json")
    loaded = remat.load_plan(tmp_path / "plan.json")
    assert loaded == plan
    try:
        installed = remat.fit(model, X, plan=loaded)
        assert fused_ops(installed) == fused_ops(plan)
        # Another shape is planned with fused kernels too.
        model(X[:4]).sum().backward()
        fitted = model._compiled_call_impl
        assert isinstance(fitted, FittedModel)
        again = fitted.entries[0][0].latest
        assert again is not None
        assert again is not installed
        assert fused_ops(again)
    finally:
        remat.release(model)
        model.zero_grad()


def test_kernels_that_are_not_quicker_are_left_out(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "is_quicker", lambda *_: False)
    report = remat.verify(model, X, budget="85%", kernels="fused", repeats=1)
    assert fused_ops(report.plan) == []
    assert report.against_eager == ()


def test_a_compiler_takes_a_backend_with_fused_kernels(model: nn.Module) -> None:
    backend = remat.backend(budget="1 GiB", model=model, kernels="fused")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    compiled(X).sum().backward()
    assert isinstance(backend.planner, CompilerPlanner)
    assert backend.planner.latest is not None
    assert fused_ops(backend.planner.latest)
    model.zero_grad()


def test_eager_kernels_are_the_default(model: nn.Module) -> None:
    assert fused_ops(remat.plan(model, X, budget="85%")) == []


@pytest.mark.parametrize("kernels", ["inductor", None, True])
def test_unknown_kernels_are_refused(model: nn.Module, kernels: Any) -> None:
    with pytest.raises(ValueError, match="must be 'eager' or 'fused'"):
        remat.plan(model, X, budget="85%", kernels=kernels)


def test_without_a_compiler_the_message_says_so(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_found() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    with pytest.raises(MissingDependencyError, match="needs a C\\+\\+ compiler"):
        remat.plan(model, X, budget="85%", kernels="fused")


def test_the_quicker_of_both_is_taken_and_remembered() -> None:
    assert decide("a", 10, 11)
    assert decide("a", 12, 11)  # As before: equal steps are to run equal kernels.
    assert not decide("b", 11, 11)


decide = kernel_choice.is_quicker
