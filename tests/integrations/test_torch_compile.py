"""``torch.compile(model, backend="remat")``: found by name, and within its budget."""

import copy
from typing import Any

import pytest
import torch
from tests.integrations.common import QUICK, Trained, trained
from tests.integrations.digits import BATCH, STEPS, Block, Classifier, loader
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

from remat.core.errors import CaptureError, PlanWarning, UnitError
from remat.integrations.torch_compile import BUDGET_VARIABLE, NamedBackend


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BUDGET_VARIABLE, raising=False)
    torch.compiler.reset()


def run(model: nn.Module, call: Any) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = loader()

    def train() -> None:
        for _ in range(STEPS // len(batches)):
            for batch in batches:
                logits = call(batch["x"])
                functional.cross_entropy(logits, batch["labels"]).backward()
                optimizer.step()
                optimizer.zero_grad()

    return trained(model, train, optimizer)


def test_torch_finds_the_backend_by_its_name() -> None:
    assert "remat" in torch.compiler.list_backends()


def test_a_budget_is_kept_and_parameters_are_bitwise_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Classifier()
    others = copy.deepcopy(model), copy.deepcopy(model)
    plain = run(model, model)
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    # A backend sees neither the optimizer nor the labels.
    labels_bytes = BATCH * torch.int64.itemsize
    budget_bytes = plain.budget_bytes - state_bytes - labels_bytes
    options = {"budget": budget_bytes, **QUICK}
    call = torch.compile(others[0], backend="remat", options=options, dynamic=False)
    found = run(others[0], call)
    assert found.peak_bytes <= plain.budget_bytes
    assert found.is_bitwise(plain)
    # Tools that pass no options have the environment.
    torch.compiler.reset()
    monkeypatch.setenv(BUDGET_VARIABLE, str(budget_bytes))
    found = run(others[1], torch.compile(others[1], backend="remat", dynamic=False))
    assert found.peak_bytes <= plain.budget_bytes
    assert found.is_bitwise(plain)


def compiled(call: Any = None, **given: Any) -> Any:
    call = call or nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    settings: dict[str, Any] = {"dynamic": False, **given}
    return torch.compile(call, backend="remat", **settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs a budget.*options=\{'budget': '8 GiB'\}.*REMAT_BUDGET"),
        ({"budget": "24 XB"}, "unknown unit 'XB'"),
        ({"budget": "1 GiB", "budgets": 1}, "no option 'budgets'; it has budget, "),
        ({"budget": "1 GiB", "costs": "guessed"}, "'measured' or 'estimated'"),
        ({"budget": "1 GiB", "model": "resnet"}, r"remat\.backend\(\.\.\., model="),
        (
            {"budget": "1 GiB", "regions": "breaks"},
            r"each graph to its backend alone; use remat\.fit",
        ),
        ({"budget": {"cpu": "1 GiB"}}, r"remat\.backend\(\.\.\., budget="),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message):
        compiled(options=options)(torch.ones(4, 8))


def test_modes_are_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match="mode='max-autotune' is one of"):
        compiled(mode="max-autotune")(torch.ones(4, 8))


def test_an_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUDGET_VARIABLE, "1 KiB")
    options = {"budget": "1 GiB", "regions": "whole", **QUICK}
    compiled(options=options)(torch.ones(4, 8)).sum().backward()


def test_a_second_shape_says_what_to_do() -> None:
    call = compiled(options={"budget": "1 GiB", **QUICK}, dynamic=None)
    call(torch.ones(4, 8)).sum().backward()
    with pytest.raises(BackendCompilerFailed, match="AUTOMATIC_DYNAMIC_SHAPES=0"):
        call(torch.ones(5, 8))


def test_sizes_that_were_to_vary_are_not_called_a_second_shape() -> None:
    call = compiled(options={"budget": "1 GiB", **QUICK}, dynamic=True)
    with pytest.raises(BackendCompilerFailed, match="as it does with dynamic=True"):
        call(torch.ones(4, 8))


def test_several_modules_share_options_and_are_told_so() -> None:
    options = {"budget": "1 GiB", **QUICK}
    x = torch.ones(4, 64)
    compiled(Classifier(), options=options)(x).sum().backward()
    other = compiled(Block(), options=dict(options))
    with pytest.warns(PlanWarning, match="several modules share the backend"):
        other(x).sum().backward()


def test_equal_modules_are_several_too() -> None:
    options = {"budget": "1 GiB", **QUICK}
    x = torch.ones(4, 64)
    block = Block()
    call = compiled(block, options=options)
    call(x).sum().backward()
    call(torch.ones(5, 64)).sum().backward()
    # It is the same one with another weight.
    owner, _, name = next(iter(dict(block.named_parameters()))).rpartition(".")
    weight = getattr(block.get_submodule(owner), name)
    setattr(block.get_submodule(owner), name, nn.Parameter(weight.detach().clone()))
    call(x).sum().backward()
    other = compiled(Block(), options=options)
    with pytest.warns(PlanWarning, match="several modules share the backend"):
        other(x).sum().backward()


def test_a_call_whose_backward_waits_is_told_of() -> None:
    call = compiled(Block(), options={"budget": "100%", **QUICK})
    x = torch.ones(64, 64)
    call(x).sum().backward()
    call(x).sum().backward()
    first = call(x)
    with pytest.warns(PlanWarning, match=r"2 forward passes .* Use remat\.fit"):
        second = call(x)
    (first + second).sum().backward()
    # Once.
    (call(x) + call(x)).sum().backward()


def test_plans_are_forgotten_when_the_compiler_is_reset() -> None:
    backend = NamedBackend()
    options = {"budget": "1 GiB", **QUICK}
    model = nn.Linear(8, 3)
    torch.compile(model, backend=lambda m, x: backend(m, x, options=options))(
        torch.ones(4, 8)
    )
    assert len(vars(backend)["_backends"]) == 1
    backend.reset()
    assert not vars(backend)["_backends"]


def test_errors_are_those_of_remat() -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled()(torch.ones(4, 8))
    assert isinstance(caught.value.inner_exception, UnitError)
    assert not isinstance(caught.value.inner_exception, CaptureError)
