"""``remat.backend``: what ``torch.compile`` calls keeps the budget as ``fit`` does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.modules import make_case
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

import remat
from remat.capture.example_batch import example_batch
from remat.core.errors import BudgetError, CaptureError, PlanWarning, UnitError
from remat.training.step_planning import CompilerPlanner


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    backend = remat.backend(model=model, costs="estimated", **options)
    return torch.compile(model, backend=backend, dynamic=False, fullgraph=True)


def wide() -> nn.Module:
    """Gradients of 1 MiB, activations of 32 KiB."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks)


def mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.pow(2).mean()


def accumulate(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    for _ in range(3):
        mean_square(call(x)).backward()


def test_accumulation_without_room_for_the_gradients_is_refused() -> None:
    model, x = wide(), torch.randn(32, 256)
    call = compiled(model, budget="100%")
    mean_square(call(x)).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(BudgetError, match="gradient") as caught:
        call(x)
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))
    budget_bytes = caught.value.required_bytes
    torch.compiler.reset()
    model.zero_grad()
    call = compiled(model, budget=budget_bytes)
    peak_bytes = remat.measure(
        lambda: accumulate(call, model, x), repeats=0, resident=[model, x]
    ).peak_bytes
    assert peak_bytes <= budget_bytes
    # The gradients exist twice: of earlier passes, and of this one.
    assert budget_bytes > 3 * sum(p.nbytes for p in model.parameters())


def test_accumulation_is_bitwise_eager() -> None:
    case = make_case("conv net")
    plain = copy.deepcopy(case.model)
    call = compiled(case.model, budget=10**9)
    states: list[list[Any]] = []
    for step, model in ((call, case.model), (plain, plain)):
        torch.manual_seed(1)
        accumulate(step, model, *case.args)
        accumulate(step, model, *case.args)
        states.append(
            [
                *[p.grad for p in model.parameters()],
                *model.buffers(),
                torch.get_rng_state(),
            ]
        )
    assert all(map(torch.equal, *states))


def test_calls_without_gradients_need_one_variant() -> None:
    model, x = wide(), torch.randn(4, 256)
    backend = remat.backend(budget=10**9, model=model, costs="estimated")
    call = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    with torch.no_grad():
        expected = call(x)
    accumulate(call, model, x)
    # The budget has room for the gradients of the first step in the plan of the second.
    assert backend.training_step_count == 1
    with torch.no_grad():
        assert torch.equal(call(x), expected)
    assert backend.training_step_count == 1


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4000)

    def forward(self, x: torch.Tensor, *, is_pair: bool = False) -> dict[str, Any]:
        y = self.linear(x)
        return {"logits": y, "pair": y.exp()} if is_pair else {"logits": y}


def test_described_loss_is_predicted_exactly() -> None:
    model, x, labels = Outputs(), torch.randn(64, 16), torch.randint(0, 4000, (64,))

    def loss(outputs: dict[str, Any]) -> torch.Tensor:
        return functional.cross_entropy(outputs["logits"], labels)

    backend = remat.backend(budget="100%", model=model, loss=loss)
    call = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)

    def step() -> None:
        model.zero_grad()
        outputs = call(x)
        loss(outputs).backward()

    resident = [model, x, labels]
    peak_bytes = remat.measure(step, repeats=0, resident=resident).peak_bytes
    assert isinstance(backend.planner, CompilerPlanner)
    plan = backend.planner.latest
    assert plan is not None
    assert peak_bytes <= plan.peak_bytes <= 1.02 * peak_bytes


def test_loss_of_outputs_that_cannot_be_known_is_refused() -> None:
    model, x = Outputs(), torch.randn(64, 16)
    call = compiled(
        model, budget="100%", loss=lambda outputs: mean_square(outputs["logits"])
    )
    with pytest.raises(BackendCompilerFailed, match="other ones than it does here"):
        call(x, is_pair=True)
    with pytest.raises(ValueError, match="loss= needs model="):
        remat.backend(budget="100%", loss=mean_square)


@pytest.mark.parametrize(
    "sources", [["L['batch']['ids']"], ["L['args'][1]"], ["L['xs'][0]"]]
)
def test_arguments_inside_others_are_refused(sources: list[str]) -> None:
    with pytest.raises(CaptureError, match=r"Use remat\.fit"):
        example_batch(sources, [torch.ones(1)])


@pytest.mark.parametrize("budget", [0, -5, "12 XB", "0%", "-3%", "", None, 1.5])
def test_bad_budgets_are_refused_at_once(budget: Any) -> None:
    with pytest.raises(UnitError):
        remat.backend(budget=budget)


def test_a_batch_that_another_compile_marked_is_refused_with_advice() -> None:
    # It gives up on code that it compiled eight times: all sequences share theirs.
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.empty(0)
    for batch in (2, 3):
        x = torch.randn(batch, 4, 10, 10)
        torch.compile(model, backend="aot_eager")(x).sum().backward()
    fresh = copy.deepcopy(model)
    with pytest.raises(CaptureError, match=r"copy \(x\.clone\(\)\)"):
        remat.fit(fresh, x, budget="1 GiB", costs="estimated")
    remat.fit(fresh, x.clone(), budget="1 GiB", costs="estimated")


def test_several_graphs_are_told_of_once() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts[:1]:
                x = part(x).tanh()
            torch._dynamo.graph_break()
            x = self.parts[1](x).tanh()
            torch._dynamo.graph_break()
            return self.parts[2](x).tanh()

    backend = remat.backend(budget="100%", costs="estimated")
    compiled = torch.compile(Split(), backend=backend, dynamic=False)
    x = torch.randn(64, 16)
    with pytest.warns(PlanWarning, match="second graph.*whole budget") as warned:
        compiled(x).sum().backward()
    assert len(warned) == 1


def test_several_shapes_of_one_graph_are_nothing_to_tell() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    backend = remat.backend(budget="100%", costs="estimated")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for size in (8, 9, 10):
        compiled(torch.randn(size, 16)).sum().backward()


@pytest.mark.parametrize("is_trained", [True, False])
def test_parameters_that_are_trained_from_some_step_on_have_gradients(
    *, is_trained: bool
) -> None:
    # torch 2.11 does not look whether a parameter is trained.
    model, x = wide(), torch.randn(32, 256)
    model.get_submodule("0").requires_grad_(is_trained)
    plain = copy.deepcopy(model)
    call = compiled(model, budget="1 GiB")
    mean_square(call(x)).backward()
    model.zero_grad()
    for each, run in (model, call), (plain, plain):
        each.get_submodule("0").requires_grad_(not is_trained)
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            for _ in range(2):
                mean_square(run(x)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad, other.grad)
