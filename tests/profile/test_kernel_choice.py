"""Fused kernels through the public calls: exact, within budget, quicker or absent."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

import remat
from remat.capture.fused_kernel import FusedKernel
from remat.capture.norm_parts import BATCH_NORM
from remat.core.errors import BudgetError, MissingDependencyError
from remat.profile import kernel_choice
from remat.profile.operators import (
    OperatorCall,
    OperatorCost,
    profile_operators,
    result_layouts,
)
from remat.torch_compat import names
from remat.training.fitted_model import FittedModel
from remat.training.step_planning import CompilerPlanner


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
        again = fitted.planner.latest
        assert again is not None
        assert again is not installed
        assert fused_ops(again)
    finally:
        remat.release(model)
        model.zero_grad()


def test_a_kernel_is_compiled_once_in_a_process(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = remat.plan(model, X, budget="85%", kernels="fused")

    def compiles(self: FusedKernel, _inputs: Sequence[torch.Tensor]) -> None:
        pytest.fail(f"{self} is compiled again")

    monkeypatch.setattr(FusedKernel, "_compile", compiles)
    again = remat.plan(model, X, budget="85%", kernels="fused")
    assert fused_ops(again) == fused_ops(plan) != []


def test_kernels_that_are_not_quicker_are_left_out(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "is_quicker", lambda *_: False)
    report = remat.verify(model, X, budget="85%", kernels="fused", repeats=1)
    assert fused_ops(report.plan) == []
    assert report.against_eager == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda cost: replace(cost, aliases_input=True),
        lambda cost: replace(cost, output_sizes_bytes=(0,) * 9),
    ],
    ids=["a result that is an input", "results in one block"],
)
def test_kernels_must_hand_over_blocks_of_their_own(
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[OperatorCost], OperatorCost],
) -> None:
    def measured(calls: Sequence[OperatorCall], **options: Any) -> list[OperatorCost]:
        return [
            change(cost) if isinstance(call.target, FusedKernel) else cost
            for call, cost in zip(
                calls, profile_operators(calls, **options), strict=True
            )
        ]

    monkeypatch.setattr(kernel_choice, "profile_operators", measured)
    assert fused_ops(remat.plan(model, X, budget="1 GiB", kernels="fused")) == []


def test_kernels_must_lay_results_out_as_their_operators_do(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernel_choice, "result_layouts", lambda call: [*result_layouts(call), None]
    )
    assert fused_ops(remat.plan(model, X, budget="1 GiB", kernels="fused")) == []


class SharedNorm(nn.Module):
    """The second call reads the statistics that the first one wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x).tanh().exp()).tanh().exp().sum()


def test_a_norm_whose_statistics_another_one_wrote_runs_alone() -> None:
    report = remat.verify(SharedNorm(), X, budget="1 GiB", kernels="fused", repeats=1)
    names = [op.name for op in report.plan.graph.ops]
    assert sum(name.startswith("_native_batch_norm_legit") for name in names) == 1
    assert fused_ops(report.plan)
    assert report.is_exact


class Phase(nn.Module):
    """Complex numbers, and a constant among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(1j * self.linear(x)).abs().exp().tanh().sum()


def test_what_runs_again_of_a_batch_norm_reduces_nothing(model: nn.Module) -> None:
    with pytest.raises(BudgetError) as caught:
        remat.plan(model, X, budget="1 KiB", kernels="fused")
    floor = caught.value.required_bytes
    # At the smallest budget of all, statistics are made again as well.
    plan = remat.plan(model, X, budget=int(1.05 * floor), kernels="fused")
    runs = plan.schedule.recompute_counts()
    again = {plan.graph.ops[op].name for op in runs}
    assert any("normalised" in name for name in again)
    assert not any("statistics" in name for name in again)
    reducing = [op for op in plan.graph.ops if "batch_statistics" in op.name]
    assert len(reducing) == 2
    # Whatever the running statistics are by then, it could.
    assert not any(op.non_recomputable for op in reducing)


def test_parts_are_compared_with_their_norm_which_counts_once(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(calls: Sequence[OperatorCall], **options: Any) -> list[OperatorCost]:
        return [
            replace(cost, cost_ns=10**6 if call.target is BATCH_NORM else 1)
            for call, cost in zip(
                calls, profile_operators(calls, **options), strict=True
            )
        ]

    compared: dict[str, tuple[int, int]] = {}

    def note(name: str, fused_ns: int, separate_ns: int) -> bool:
        compared[name] = fused_ns, separate_ns
        return True

    monkeypatch.setattr(kernel_choice, "profile_operators", measured)
    monkeypatch.setattr(kernel_choice, "is_quicker", note)
    remat.plan(model, X, budget="1 GiB", kernels="fused")
    of_norms = [times for name, times in compared.items() if "normalised" in name]
    # Two kernels of a norm on one side, on the other the norm and what follows it.
    assert of_norms
    for fused_ns, separate_ns in of_norms:
        assert fused_ns == 2
        assert 10**6 < separate_ns < 10**6 + 10


class TwoNorms(nn.Module):
    """Two norms of one value, which is reduced once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, eps=0.1)])
        self.last = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(self.norms[0](y).relu() * self.norms[1](y).tanh()).mean()


@pytest.mark.parametrize("is_quicker", [True, False])
def test_two_norms_of_one_value_reduce_it_once(
    monkeypatch: pytest.MonkeyPatch, is_quicker: bool
) -> None:
    monkeypatch.setattr(
        kernel_choice,
        "is_quicker",
        lambda name, *_: is_quicker or "statistics" not in name,
    )
    torch.manual_seed(0)
    report = remat.verify(TwoNorms(), X, budget="1 GiB", kernels="fused", repeats=1)
    names = [op.name for op in report.plan.graph.ops]
    assert sum("batch_statistics" in name for name in names) == is_quicker
    assert any("native_batch_norm_legit" in name for name in names) != is_quicker
    assert report.is_exact
    assert max((d.largest for d in report.against_eager), default=0) < 1e-3


def test_a_norm_whose_parts_are_slower_stays_whole(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    split = remat.plan(model, X, budget="85%", kernels="fused")
    monkeypatch.setattr(
        kernel_choice, "is_quicker", lambda name, *_: "batch_statistics" not in name
    )
    plan = remat.plan(model, X, budget="85%", kernels="fused")
    assert not any("statistics" in name for name in fused_ops(plan))
    assert sum("native_batch_norm_legit" in name for name in fused_ops(plan)) == 2
    # The plan knows which, whatever would be quicker now.
    monkeypatch.setattr(kernel_choice, "is_quicker", lambda *_: True)
    for each in (plan, split):
        each.save(tmp_path / "plan.json")
        try:
            installed = remat.fit(
                model, X, plan=remat.load_plan(tmp_path / "plan.json")
            )
            assert fused_ops(installed) == fused_ops(each)
        finally:
            remat.release(model)


def test_complex_numbers_keep_the_operators_of_eager() -> None:
    report = remat.verify(
        Phase(), torch.randn(4, 8), budget="1 GiB", kernels="fused", repeats=1
    )
    assert report.is_exact


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

    monkeypatch.setattr(names, "get_cpp_compiler", none_found)
    with pytest.raises(MissingDependencyError, match="needs a C\\+\\+ compiler"):
        remat.plan(model, X, budget="85%", kernels="fused")


def test_the_quicker_of_both_is_taken_and_remembered() -> None:
    assert decide("a", 10, 11)
    assert decide("a", 12, 11)  # As before: equal steps are to run equal kernels.
    assert not decide("b", 11, 11)


decide = kernel_choice.is_quicker
