"""Models that the tracer splits: one budget over all their graphs."""

import gc
import logging
import random
import weakref
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.test_fitting import mean_square
from torch import nn
from torch._dynamo.variables.tensor import TensorVariable
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode

import remat
from remat.capture.gathering import Gathering
from remat.core import gradient_pieces
from remat.core.errors import (
    BudgetError,
    CaptureError,
    PlanMismatchError,
    ProfileError,
)
from remat.planning.plan import Plan
from remat.planning.regions import ComposedStep
from remat.torch_compat.attributes import contents_of
from remat.training.fitted_model import (
    fitted_on,
    made_gradient_bytes,
    trained_bytes,
)
from remat.training.fitted_regions import FittedRegions, _flat, _kind_of
from remat.training.fitting import fit_at_first_batch
from remat.training.request import Regions

WIDTH = 32
BREAK: dict[str, Any] = {"regions": "breaks", "costs": "estimated"}

X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))


class Layers(nn.Module):
    """Blocks with dropout and a norm, broken between them, and a loss after a break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, WIDTH)
            )
            for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        x = x + self.blocks[1](x)
        torch._dynamo.graph_break()
        x = self.norm(x)
        x = x + self.blocks[2](x)
        torch._dynamo.graph_break()
        x = x + self.blocks[3](x)
        torch._dynamo.graph_break()
        return x.pow(2).mean()


class Towers(nn.Module):
    """One part that is called three times, and whose outputs are used together."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Dropout(0.2))
        self.back = nn.Linear(128, WIDTH)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.back(self.tower(x)) * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.part(x)
        other = self.part(x + 1)
        both = self.part(one + other)
        return ((one - other) * both).pow(2).mean()


class Tied(nn.Module):
    """A weight that is read in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, 128, bias=False)
        self.outside = nn.Linear(WIDTH, 128, bias=False)
        self.outside.weight = self.inside.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.inside(x))
        torch._dynamo.graph_break()
        return (inside * torch.tanh(self.outside(x))).pow(2).mean()


class Unequal(nn.Module):
    """A graph without gradients, outputs of two kinds, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        with torch.no_grad():
            scale = (x.sin() + x.cos()).exp()
            torch._dynamo.graph_break()
            scale = scale / scale.sum()
        torch._dynamo.graph_break()
        inner = torch.tanh(self.first(x * scale))
        unused = inner.exp()
        torch._dynamo.graph_break()
        if unused.shape[0] == 0:
            return {}
        outer = torch.tanh(self.last(inner))
        return {"loss": outer.pow(2).mean(), "inner": inner, "rest": [outer[:, :5], 3]}


class Branching(nn.Module):
    """Which graph comes second depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 128)
        self.one, self.other = nn.Linear(128, 128), nn.Linear(128, 64)
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x))
        if x.sum() > 0:
            inner = torch.tanh(self.one(inner))
        else:
            inner = torch.relu(self.other(inner).exp())
        return inner.pow(2).mean()


class Recurrent(nn.Module):
    """Of two ways the second one keeps much between its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x)).view(8, -1, WIDTH)
        is_short = bool(x.sum() > 0)
        inner = inner * 2 if is_short else nn.functional.gelu(self.last(inner))
        outer, _ = self.memory(inner)
        for _ in range(3):
            outer = torch.tanh(self.last(outer)) + 1
        return outer.pow(2).mean()


class Deciding(Recurrent):
    """Looks at a number that each batch has anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x)).view(8, -1, WIDTH)
        inner = inner * 2 if inner.mean().item() < 1 else torch.relu(inner)
        outer, _ = self.memory(inner)
        for _ in range(3):
            outer = torch.tanh(self.last(outer)) + nn.functional.dropout(outer, 0.1)
        return outer.pow(2).mean()


MODELS = [Layers, Towers, Tied, Unequal]


def smallest_budget(model: nn.Module, x: torch.Tensor = X, **options: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        remat.plan(model, x, budget=1, regions="breaks", **options)
    return caught.value.required_bytes


def check_budgets(kind: Callable[[], nn.Module], share: float) -> None:
    """Verify the smallest budget, and one at a share of the way to what all takes."""
    torch.manual_seed(0)
    least = smallest_budget(kind())
    plain = verified(kind, least).plan.baseline_peak_bytes
    assert least <= plain
    verified(kind, least + int(share * (plain - least)))


def verified(kind: Callable[[], nn.Module], budget: int) -> remat.VerifyReport:
    torch.manual_seed(0)
    report = remat.verify(kind(), X, budget=budget, repeats=1, regions="breaks")
    assert report.is_exact
    assert report.against_eager == ()
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01
    assert report.plan.peak_bytes <= budget
    return report


@pytest.mark.parametrize("kind", MODELS)
def test_budgets_over_several_graphs_are_kept_bit_for_bit(
    kind: Callable[[], nn.Module],
) -> None:
    check_budgets(kind, 0.9)


def test_sums_of_gradients_that_are_views_count() -> None:
    class Stepping(nn.Module):
        """Its weights get a gradient from each of many steps."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.memory = nn.Linear(48, 48), nn.GRU(48, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.tanh(self.first(x))
            return torch.tanh(self.memory(inner)[0]).square().mean()

    torch.manual_seed(0)
    model, x = Stepping(), torch.randn(16, 48)
    plan = remat.fit(model, x, budget="100%", **BREAK)
    model(x).backward()
    assert 0.99 * plan.peak_bytes < peak_of_step(model, x) <= plan.peak_bytes


def test_a_model_of_one_graph_is_planned_as_ever() -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH), nn.Tanh()] * 6)
    for budget in ("100%", "80%"):
        how: dict[str, Any] = {"budget": budget, "loss": mean_square}
        whole = remat.plan(model, X, costs="estimated", **how)
        regions = remat.plan(model, X, **BREAK, **how)
        assert regions.peak_bytes == whole.peak_bytes
        assert regions.cost_ns == whole.cost_ns
        assert regions.budget_bytes == whole.budget_bytes


def test_planning_leaves_everything_as_it_was() -> None:
    model = Layers()
    model.note = note = ["kept"]  # type: ignore[assignment]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    state = torch.get_rng_state()
    remat.fit(model, X, budget="80%", **BREAK)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.note is note
    assert all(model.get_buffer(name) is buffer for name, buffer in buffers.items())
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_planning_leaves_nothing_of_outputs_that_refer_to_themselves() -> None:
    made = list[weakref.ref[torch.Tensor]]()

    @in_no_graph
    def cache_of(held: torch.Tensor) -> SimpleNamespace:
        made.append(weakref.ref(held))
        found = SimpleNamespace(held=held)
        found.itself = found
        return found

    class Caching(Layers):
        def forward(self, x: torch.Tensor) -> Any:
            held = self.blocks[0](x)
            return {"loss": super().forward(held), "cache": cache_of(held)}

    gc.disable()
    try:
        remat.fit(Caching(), X, budget="90%", **BREAK)
        assert made
        assert not any(each() is not None for each in made)
    finally:
        gc.enable()


def test_a_forward_pass_for_planning_holds_nothing_for_the_next_one() -> None:
    made, counts = list[weakref.ref[torch.Tensor]](), list[int]()

    class Watching(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            in_no_graph(self.count)()
            return super().forward(in_no_graph(self.made_of)(self.norm(x)))

        def count(self) -> None:
            counts.append(sum(each() is not None for each in made))

        def made_of(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin().exp()
            made.append(weakref.ref(x))
            return x

    remat.fit(Watching(), X, budget="90%", **BREAK)
    assert len(counts) >= 2
    assert not any(counts)


def test_what_forward_changes_of_the_model_is_put_back_after_planning() -> None:
    class Counting(Layers):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.cached = x
            return super().forward(x)

    model = Counting()
    remat.plan(model, X, budget="100%", **BREAK)
    assert model.count == 0
    assert not hasattr(model, "cached")


def trained(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses: list[torch.Tensor] = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def train_alike(
    model: nn.Module, plain: nn.Module, batches: list[torch.Tensor]
) -> None:
    """Train both, and check that all losses and parameters are equal."""
    for one, other in zip(
        trained(model, batches), trained(plain, batches), strict=True
    ):
        assert torch.equal(one, other)


def pair(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind()
    torch.manual_seed(0)
    return model, kind()


def test_training_is_that_without_remat_also_in_new_shapes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain = pair(Layers)
    remat.fit(model, X, budget="80%", **BREAK)
    batches = [X, X + 1, X[:100], X, X[:100]]
    train_alike(model, plain, batches)
    planned = [r for r in caplog.records if "planned a new kind" in r.getMessage()]
    assert len(planned) == 1
    assert "[100, 32]" in planned[0].getMessage()


def test_a_graph_that_was_not_planned_keeps_nothing_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain = pair(Branching)
    x = X - X.mean() + 0.1
    plan = remat.fit(model, x, budget="110%", **BREAK)
    batches = [x, -x, x, -x]
    train_alike(model, plain, batches)
    said = [r.getMessage() for r in caplog.records if "another way" in r.getMessage()]
    assert len(said) == 1
    assert "at graph 1" in said[0]
    model.zero_grad()

    def step() -> None:
        model.zero_grad()
        model(-x).backward()

    measured = remat.measure(step, warmup=1, repeats=0, resident=[model, x])
    assert measured.peak_bytes <= (plan.budget_bytes or 0)


def test_a_graph_that_was_not_planned_and_does_not_fit_is_refused() -> None:
    class Wide(Branching):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(128, 1024)

    x = X - X.mean() + 0.1
    model = Wide()
    plan = remat.fit(model, x, budget="100%", **BREAK)
    model(x).backward()
    model.zero_grad()
    with pytest.raises(BudgetError, match=r"graph 1 .* was not there when") as caught:
        model(-x)
    assert caught.value.required_bytes > (plan.budget_bytes or 0)
    model(x).backward()


def peak_of_step(model: nn.Module, x: torch.Tensor) -> int:
    """Return the measured peak of a step, with nothing before it to warm up."""
    model.zero_grad()
    measured = remat.measure(
        lambda: model(x).backward(), warmup=0, repeats=0, resident=[model, x]
    )
    model.zero_grad()
    return measured.peak_bytes


def test_planning_leaves_nothing_to_cached_parametrizations() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = weight_norm(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layer(x))
            torch._dynamo.graph_break()
            return torch.tanh(self.layer(x)).pow(2).mean()

    model, plain = pair(Normed)
    remat.fit(model, X, budget="150%", **BREAK)
    for _ in range(4):
        for each in (model, plain):
            each.zero_grad()
            with parametrize.cached():
                each(X).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)


def test_casts_of_autocast_make_no_other_ways(caplog: pytest.LogCaptureFixture) -> None:
    class Casting(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(128, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = in_no_graph(self.last.forward)(torch.tanh(self.inside(x)))
            return torch.tanh(inner).float().pow(2).mean()

    model, plain = pair(Casting)
    remat.fit(model, X, budget="100%", **BREAK)
    for each in (model, plain):
        for _ in range(3):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(X)
            loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert "another way" not in caplog.text
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert fitted.planner.planned_count == 2


def test_steps_that_are_traced_again_keep_the_budget() -> None:
    model, x = Deciding(), X[:128].clone()
    budget = smallest_budget(model, x, costs="estimated")
    remat.fit(model, x, budget=budget, **BREAK)
    # Objects grow old while the tracer still needs them, and it collects young ones.
    before = gc.get_threshold()
    gc.set_threshold(500, 2, 1_000_000)
    try:
        for _ in range(4):
            assert peak_of_step(model, x + 0.1 * torch.randn(())) <= budget
    finally:
        gc.set_threshold(*before)


def test_a_graph_of_another_size_than_planned_fits_or_is_refused() -> None:
    class Masked(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[x[:, 0] > 0])

    x = X.clone()
    x[:, 0] = -1
    x[:100, 0] = 1
    more = x.clone()
    more[:150, 0] = 1
    model = Masked()
    least = smallest_budget(model, x, costs="estimated")
    remat.fit(model, x, budget=least, **BREAK)
    with pytest.raises(BudgetError, match="not of this size") as refused:
        model(more)
    assert refused.value.required_bytes > least
    assert peak_of_step(model, x) <= least
    enough = remat.fit(model, x, budget="200%", **BREAK).budget_bytes or 0
    assert least < peak_of_step(model, more) <= enough


@pytest.mark.parametrize("accumulate", [True, False])
def test_accumulated_gradients_count(
    caplog: pytest.LogCaptureFixture, *, accumulate: bool
) -> None:
    """Also those that were not expected: such a step is planned when it comes."""
    model, plain = pair(Tied)
    plan = remat.fit(model, X, budget="150%", accumulate=accumulate, **BREAK)
    for each in (model, plain):
        for _ in range(3):
            each(X).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    fitted = fitted_on(model)
    assert fitted is not None
    peaks = {known.peak_bytes for known in fitted.planner.plans.values()}
    assert len(peaks) == 2
    assert "another way" not in caplog.text
    measured = remat.measure(
        lambda: model(X).backward(), warmup=1, repeats=0, resident=[model, X]
    )
    assert plan.peak_bytes < measured.peak_bytes <= max(peaks)


def test_gradients_of_what_is_broadcast_in_no_graph_are_sums() -> None:
    class Between(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.between = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(in_no_graph(self.scaled)(x))

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return self.between(self.blocks[0](x)) * self.scale

    model, plain = pair(Between)
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, X, budget="20%", accumulate=True, **BREAK)
    named = caught.value.required_bytes
    plan = remat.fit(model, X, budget=named, accumulate=True, **BREAK)
    assert made_gradient_bytes(plan) == trained_bytes(model)
    train_alike(model, plain, [X, X])
    model(X).backward()
    measured = remat.measure(
        lambda: model(X).backward(), warmup=0, repeats=0, resident=[model, X]
    )
    assert measured.peak_bytes <= named


def test_a_named_budget_is_kept_where_a_search_finds_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is in no graph is measured in each fit, and leads the search."""
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", "1 MB")
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    model, plain = pair(Layers)
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, X, budget="10%", **BREAK)
    named = caught.value.required_bytes

    def fails(step: ComposedStep, solve: object, budget: int, **_: object) -> Plan:
        raise BudgetError("more", budget_bytes=budget, required_bytes=named + 1)

    monkeypatch.setattr("remat.training.region_planning.plan_regions", fails)
    with pytest.raises(BudgetError, match="an earlier search found"):
        remat.fit(model, X, budget=named // 2, **BREAK)
    plan = remat.fit(model, X, budget=named, **BREAK)
    assert plan.peak_bytes <= named
    train_alike(model, plain, [X, X])


@pytest.mark.parametrize("needed", [(20, 10), (10, 20)])
def test_what_is_named_for_accumulation_is_the_larger_of_both(
    needed: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = iter(needed)

    def fails(*_: object) -> Plan:
        raise BudgetError("more", budget_bytes=1, required_bytes=next(known))

    monkeypatch.setattr(FittedRegions, "_plan_varying", fails)
    with pytest.raises(BudgetError) as caught:
        remat.fit(Layers(), X, budget=1, accumulate=True, **BREAK)
    assert caught.value.required_bytes == 20


def test_a_saved_plan_is_installed(tmp_path: Path) -> None:
    model, plain = pair(Layers)
    plan = remat.plan(model, X, budget="80%", **BREAK)
    plan.save(tmp_path / "plan.json")
    saved = remat.load_plan(tmp_path / "plan.json")
    installed = remat.fit(model, X, plan=saved, regions="breaks")
    assert installed.schedule == plan.schedule
    for one, other in zip(trained(model, [X]), trained(plain, [X]), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(PlanMismatchError):
        remat.fit(Tied(), X, plan=saved, regions="breaks")


def test_a_loss_outside_of_the_model_is_described() -> None:
    class Outputs(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            return self.blocks[1](x)

    how: dict[str, Any] = {"budget": "100%", "loss": mean_square, "repeats": 1}
    report = remat.verify(Outputs(), X, regions="breaks", **how)
    assert report.is_exact
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.02


def test_evaluation_and_release_run_the_models_own_forward() -> None:
    model, plain = pair(Layers)
    remat.fit(model, X, budget="100%", **BREAK)
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    remat.release(model)
    assert torch.equal(model(X), plain(X))


def in_no_graph(function: Any) -> Any:
    """Return a function that the tracer leaves alone."""
    return torch.compiler.disable(function)


@in_no_graph
def untraced(x: torch.Tensor) -> torch.Tensor:
    return x.exp().clamp(max=5) * 2


class Squared(torch.autograd.Function):
    """A function of a user's own, which the tracer need not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


@in_no_graph
def squared(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Squared.apply(x)
    return found


class Selecting(nn.Module):
    """Rows that values choose, and a function in no graph on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.layers[0](x))
        chosen = inner[inner.mean(1) > 0]
        outer = self.layers[1](untraced(inner))
        return self.layers[2](chosen).pow(2).sum() + squared(outer).mean()


@in_no_graph
def run_plainly(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found, _ = layers(x)
    return found


class Tagger(nn.Module):
    """An LSTM between parts that are traced, and a loss outside of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 32))
        self.rest = nn.LSTM(WIDTH, WIDTH, num_layers=2)
        self.last = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 32))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = run_plainly(self.rest, self.features(x)[:, None])
        return self.scores(inner).pow(2).mean()


@in_no_graph
def python_number() -> float:
    return random.random()


class Drawing(Layers):
    """Random numbers of Python and NumPy, which no graph draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = x * float(np.random.rand(1)[0] > 0.5)  # noqa: NPY002
        if python_number() > 0.5:
            x = x + 1
        return self.blocks[1](x).pow(2).mean()


class Residual(Tagger):
    """Operators in no graph whose one input is made of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.features(x[:8])[:, None]
        outer, _ = self.rest(inner)
        return self.scores(inner + outer).pow(2).mean()


class Viewing(Tied):
    """A graph that makes nothing but views of what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.tanh(self.inside(x))
        torch._dynamo.graph_break()
        rows = inside.view(-1, 4, 32)
        torch._dynamo.graph_break()
        return (rows.exp().sum(1) * self.outside(x).mean()).pow(2).mean()


class Keeping(Tied):
    """Keeps a value on itself that backward needs as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.tanh(self.inside(x))
        torch._dynamo.graph_break()
        return (self.kept * torch.tanh(self.outside(x))).pow(2).mean()


class Neighbours(Tied):
    """Mixes rows by sparse matrices: one that it holds, and one that it learns."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.arange(2 * len(X)).view(2, -1) % len(X)
        self.register_buffer("held", torch.eye(len(X)).roll(1, 0).to_sparse_csr())
        self.rows, self.learned = rows, nn.Parameter(torch.ones(len(X)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.mixed(torch.tanh(self.inside(x)))
        return (inside * torch.tanh(self.outside(x))).pow(2).mean()

    @in_no_graph
    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        size = (len(X), len(X))
        learned = torch.sparse_coo_tensor(
            self.rows, self.learned, size, check_invariants=True
        )
        return torch.sparse.mm(self.held, torch.sparse.mm(learned, x))


@pytest.mark.parametrize(
    "kind", [Selecting, Tagger, Residual, Viewing, Keeping, Neighbours]
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_operators_in_no_graph_run_as_they_are_and_count(
    kind: Callable[[], nn.Module],
) -> None:
    check_budgets(kind, 1.0)


def test_gradients_that_leave_early_count_where_they_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_pieces, "LEAST_BYTES", 64)
    check_budgets(Selecting, 1.0)


def test_what_cannot_be_measured_is_named() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            raise RuntimeError("only once")

    @in_no_graph
    def once(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Once.apply(x)
        return found

    class Broken(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (once(self.inside(x)) ** 2).mean() + self.outside(x).mean()

    with pytest.raises(CaptureError, match=r"OnceBackward is computed .*: only once"):
        remat.fit(Broken(), X, budget="100%", **BREAK)


@pytest.mark.filterwarnings("ignore:a way that a step of:UserWarning")
def test_ways_that_are_drawn_are_taken_as_without_remat() -> None:
    model, plain = pair(Drawing)
    remat.fit(model, X, budget="200%", **BREAK)
    found: list[list[torch.Tensor]] = []
    for each in (model, plain):
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        found.append(trained(each, [X] * 6))
    assert all(torch.equal(*tensors) for tensors in zip(*found, strict=True))


def test_modes_and_frozen_parameters_are_kinds_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain = pair(Layers)
    remat.fit(model, X, budget="150%", **BREAK)
    for each in (model, plain):
        torch.manual_seed(1)
        for number in range(4):
            each.get_submodule("norm").train(number % 2 == 0)
            each.get_submodule("blocks.0").requires_grad_(number % 2 == 0)
            each.zero_grad()
            each(X).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad, other.grad)
    assert not [r for r in caplog.records if "another way" in r.getMessage()]


def test_calls_of_one_kind_are_those_that_one_plan_holds_for() -> None:
    model = Layers()

    def kind(*args: Any, **kwargs: Any) -> Any:
        values, nesting = _flat(args, kwargs)
        return _kind_of(nesting, values, contents_of(model))

    kinds = [
        kind(X),
        kind(x=X),
        kind(X[:100]),
        kind(X.T.contiguous().T),
        kind(X.double()),
        kind(X.clone().requires_grad_()),
        kind(X, 1),
        kind(X, 2),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        kinds.append(kind(X))
    model.norm.eval()
    kinds.append(kind(X))
    model.norm.train()
    model.blocks[0].requires_grad_(requires_grad=False)
    kinds.append(kind(X))
    model.blocks[0].requires_grad_()
    assert len({*kinds}) == len(kinds)
    assert kind(X + 1) == kinds[0]


def test_what_is_in_attributes_is_put_back() -> None:
    class Noting(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.counts, self.losses = {"calls": 0}, [1.0]
            self.average = torch.zeros(())
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.note()
            return super().forward(x)

        @in_no_graph
        def note(self) -> None:
            self.counts["calls"] += 1
            self.losses.append(torch.rand((), generator=self.generator).item())
            self.average.add_(1)

    model = Noting()
    state = model.generator.get_state()
    remat.plan(model, X, budget="100%", **BREAK)
    assert model.counts == {"calls": 0}
    assert model.losses == [1.0]
    assert model.average == 0
    assert torch.equal(model.generator.get_state(), state)


def test_a_new_kind_of_call_in_a_profiler_runs_without_a_plan() -> None:
    model, plain = pair(Layers)
    remat.fit(model, X, budget="300%", **BREAK)
    with torch.profiler.profile():
        found = trained(model, [X[:100]])
    for one, other in zip(found, trained(plain, [X[:100]]), strict=True):
        assert torch.equal(one, other)


class Part(nn.Module):
    """Some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)).sin()


class Masking(nn.Module):
    """Writes a parameter where a mask says so, behind a part of its own."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.masked = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x).clone()
        x[x[:, 0] > 0] = self.masked
        return x.pow(2).mean()


def test_a_part_without_a_graph_by_values_is_said_with_what_to_write(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model, plain = pair(lambda: Masking(Part()))
    remat.fit(model, X, budget="100%", **BREAK)
    assert "nothing of it is computed again" in caplog.text
    assert "torch.where(mask.unsqueeze(-1), values, x)" in caplog.text
    assert "Report an issue to the backend" not in capfd.readouterr().err
    for one, other in zip(trained(model, [X]), trained(plain, [X]), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(CaptureError, match=r"no graph of the model.*torch\.where"):
        remat.fit(Masking(nn.Linear(WIDTH, WIDTH)), X, budget="100%", **BREAK)


def test_a_gradient_inside_of_a_later_forward_is_refused() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Part(), Part()
            self.is_late = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            loss = self.second(x).pow(2).mean()
            if self.is_late:
                loss = loss + torch.autograd.grad(loss, x)[0].sum()
            return loss

    model = Penalised()
    remat.fit(model, X, budget="100%", **BREAK)
    model(X).backward()
    vars(model)["is_late"] = True
    with pytest.raises(CaptureError, match="takes a gradient inside its forward"):
        model(X)


@pytest.mark.parametrize("regions", ["blocks", "breaks"])
def test_a_first_planning_in_a_profiler_says_what_to_do(regions: Regions) -> None:
    model = Layers()
    with (
        torch.profiler.profile(),
        pytest.raises(ProfileError, match=r"before that recording begins.*'whole'"),
    ):
        remat.fit(model, X, budget="300%", regions=regions, costs="estimated")
    remat.fit(model, X, budget="300%", regions=regions, costs="estimated")


class WritesToItsBatch(nn.Module):
    """Puts what it computes into the mapping that it is given, as sentence encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
            for _ in range(4)
        )

    def forward(self, features: Any) -> Any:
        hidden = features["x"]
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        features["all"].append(hidden)
        features["embedding"] = hidden.mean(0)
        return dict(features)


@pytest.mark.parametrize("regions", ["whole", "breaks", ["layers.*"]])
def test_planning_writes_nothing_to_the_batch(regions: Any) -> None:
    x = torch.randn(64, 32)

    def trained(budget: str | None) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = WritesToItsBatch()
        if budget is not None:
            seen: list[torch.Tensor] = []
            batch: Any = {"x": x, "all": seen}
            if regions != "whole":
                batch = UserDict(batch)
            remat.fit(model, (batch,), budget=budget, regions=regions)
            assert set(batch) == {"x", "all"}
            assert seen == []
            assert batch["all"] is seen
        for _ in range(2):
            found = model({"x": x, "all": []})
            assert set(found) == {"x", "all", "embedding"}
            assert len(found["all"]) == 1
            found["embedding"].square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for mine, other in zip(trained("90%"), trained(None), strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)


def add_one(x: torch.Tensor) -> None:
    x.add_(1)


class WritesToItsTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        in_no_graph(add_one)(x)
        return self.last(hidden + x).square().mean()


@pytest.mark.parametrize("regions", ["breaks", ["first", "last"]])
def test_values_of_the_batch_are_put_back(regions: Any) -> None:
    x = torch.ones(64, 32)
    model, plain = WritesToItsTensor(), WritesToItsTensor()
    plain.load_state_dict(model.state_dict())
    remat.fit(model, x, budget="120%", regions=regions)
    assert torch.equal(x, torch.ones(64, 32))
    y = x.clone()
    assert torch.equal(model(x), plain(y))
    assert torch.equal(x, y)


def test_two_threads_may_call_one_model() -> None:
    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    remat.fit(model, X, budget="300%", **BREAK)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(model, [X[: 10 * n] for n in range(1, 9)]))
    for loss, n in zip(found, range(1, 9), strict=True):
        assert torch.equal(loss, plain(X[: 10 * n]))


def test_random_generators_of_python_and_numpy_stay() -> None:
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    remat.plan(Drawing(), X, budget="100%", **BREAK)
    assert random.getstate() == before[0]
    state = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(state, before[1], strict=True))


def doubled(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_hooks_of_a_first_call_are_installed_once() -> None:
    class Preparing(Layers):
        is_prepared = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_prepared:
                self.is_prepared = True
                self.blocks[0].register_forward_hook(doubled)
            return super().forward(x)

    model, plain = pair(Preparing)
    remat.fit(model, X, budget="90%", **BREAK)
    assert model.is_prepared
    plain(X)
    plain.load_state_dict(model.state_dict())
    for one, other in zip(trained(model, [X]), trained(plain, [X]), strict=True):
        assert torch.equal(one, other)


class Collector:
    """A hook that collects outputs, for a loss of them."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self.seen.append(output)


@pytest.mark.parametrize("regions", ["breaks", "blocks"])
def test_planning_takes_out_what_hooks_have_collected(regions: str) -> None:
    def trained_with_collected(model: nn.Module, budget: str | None) -> list[Any]:
        collector = Collector()
        model.get_submodule("norm").register_forward_hook(collector)
        if budget is not None:
            remat.fit(model, X, budget=budget, regions=regions, costs="estimated")
        assert collector.seen == []
        torch.manual_seed(1)
        for batch in (X, X[:100], X):
            loss = model(batch)
            (collected,) = collector.seen
            (loss + collected.square().mean()).backward()
            collector.seen.clear()
        return [parameter.grad for parameter in model.parameters()]

    model, plain = pair(Layers)
    mine = trained_with_collected(model, "200%")
    for one, other in zip(mine, trained_with_collected(plain, None), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("regions", ["breaks", "blocks"])
def test_planning_leaves_alone_what_the_batch_was_computed_by(regions: str) -> None:
    encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model, plain = pair(Layers)
    how: dict[str, Any] = {"budget": "150%", "regions": regions, "costs": "estimated"}
    inner = encoder(X)
    remat.plan(plain, inner, **how)
    inner.sum().backward()
    remat.fit(model, X, **how)
    seen: list[torch.Tensor] = []
    encoder[0].weight.register_hook(seen.append)
    for each in (model, plain):
        torch.manual_seed(1)
        loss = each(encoder(X))
        assert len(seen) == (each is plain)
        loss.backward()
    assert torch.equal(*seen)


def test_a_model_of_which_nothing_is_traced_is_refused() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(x @ self.weight)
                torch._dynamo.graph_break()
            return x.pow(2).mean()

    with pytest.raises(CaptureError, match="no graph of the model"):
        remat.fit(Loop(), X, budget="100%", **BREAK)


def test_experts_in_a_loop_over_values_are_graphs_as_the_error_says() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 2)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
                for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = self.gate(x).softmax(-1)
            chosen, found = weights.argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero().squeeze(1)
                if rows.numel():
                    part = expert(x[rows]) * weights[rows, number, None]
                    found = found.index_add(0, rows, part)
            return found.square().mean()

    model, plain = pair(Experts)
    with pytest.raises(CaptureError, match="regions='blocks'"):
        remat.fit(model, X, budget="100%", **BREAK)
    remat.fit(model, X, budget="90%", regions="blocks", costs="estimated")
    train_alike(model, plain, [X, X])


def test_a_model_that_does_not_train_is_refused() -> None:
    model = Layers().requires_grad_(requires_grad=False)
    with pytest.raises(CaptureError, match="does not train"):
        remat.fit(model, X, budget="100%", **BREAK)


def test_graphs_that_compute_nothing_are_named_as_such() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(8, 8))
    with pytest.raises(CaptureError, match="name modules that compute in regions="):
        remat.fit(model, torch.ones(4, 8), budget=10**7, regions=["1"])


class Breaking(nn.Module):
    """Breaks the graph, or not, and does something more after that, or not."""

    def __init__(self, *, breaks: bool, does_more: bool) -> None:
        super().__init__()
        self.breaks, self.does_more = breaks, does_more
        self.layer = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return y.view(-1, 512) if self.does_more else y


class Around(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 512)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.first(x))
        x = nn.functional.gelu(self.blocks[0](x) + x)
        return self.last(self.blocks[1](x))


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize("regions", ["breaks", ["blocks.*"]])
def test_modules_of_one_class_may_break_otherwise(
    regions: str | list[str], caplog: pytest.LogCaptureFixture, *, breaks: bool
) -> None:
    """The tracer leaves out what follows on a break once it found nothing there."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        first = Breaking(breaks=breaks, does_more=breaks)
        second = Breaking(breaks=True, does_more=False)
        return Around(first, second)

    def passes(model: nn.Module) -> list[torch.Tensor]:
        for _ in range(3):
            model(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    x, model = torch.randn(8, 512), made()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    options: dict[str, Any] = {"regions": regions, "costs": "estimated"}
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, x, budget=1, **options)
    remat.fit(model, x, budget=caught.value.required_bytes, **options)
    expected = passes(made())
    assert all(map(torch.equal, expected, passes(model)))
    assert "another way" not in caplog.text


def test_outputs_in_objects_that_hide_them_are_named() -> None:
    class Hidden(Layers):
        def forward(self, x: torch.Tensor) -> Any:
            return Hiding(super().forward(x))

    class Hiding:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss.detach()

    with pytest.raises(CaptureError, match=r"no tensor in the Hiding that it returns"):
        remat.fit(Hidden(), X, budget="100%", **BREAK)


def test_what_the_model_keeps_on_itself_counts() -> None:
    plan = remat.plan(Keeping(), X, budget="100%", **BREAK)
    names = [plan.graph.storages[s].name for s in plan.graph.forward_outputs]
    assert "tanh" in names
    assert not hasattr(Keeping(), "kept")


def test_errors_of_the_model_itself_are_said() -> None:
    with pytest.raises(CaptureError, match=r"raises inside the model: .*\[256, 5\]"):
        remat.fit(Layers(), X[:, :5], budget="100%", **BREAK)


class Refusing(nn.Module):
    """Dropout and a norm with statistics, and an error after these where asked for."""

    def __init__(self, *, is_split: bool = False) -> None:
        super().__init__()
        self.is_split = is_split
        self.blocks = Layers().blocks
        self.norm = nn.BatchNorm1d(WIDTH)
        self.refused: list[ValueError] = []
        self.is_bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) + self.blocks[0](x)
        x = x + self.blocks[1](x)
        if self.is_split:
            torch._dynamo.graph_break()
        if self.is_bad:
            self.refused.append(ValueError("bad batch"))
            raise self.refused[-1]
        x = x + self.blocks[2](x)
        return (x + self.blocks[3](x)).pow(2).mean()


@pytest.mark.parametrize("regions", ["breaks", "blocks", "whole"])
@pytest.mark.parametrize("has_example", [True, False])
def test_errors_of_the_model_in_a_loop_are_its_own(
    regions: Any, *, has_example: bool
) -> None:
    model, plain = pair(lambda: Refusing(is_split=regions == "breaks"))
    how: dict[str, Any] = {"budget": "100%", "costs": "estimated", "regions": regions}
    if has_example:
        remat.fit(model, X, **how)
    else:
        fit_at_first_batch(model, **how)

    def left_out(each: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        losses: list[torch.Tensor] = []
        # Of known kinds of step and new ones: other shapes, and gradients that exist.
        sizes = [(256, True), (256, False), (256, True), (256, False)]
        for size, is_bad in [*sizes, (100, True), (100, False)]:
            vars(each)["is_bad"] = is_bad
            if is_bad:
                with pytest.raises(ValueError, match=r"^bad batch$") as caught:
                    each(X[:size])
                assert caught.value is vars(each)["refused"][-1]
                assert type(caught.value) is ValueError
                assert caught.value.__context__ is None
                continue
            loss = each(X[:size])
            loss.backward()
            losses.append(loss.detach())
        gradients = [p.grad for p in each.parameters() if p.grad is not None]
        return [*losses, *gradients, *each.buffers(), torch.get_rng_state()]

    for one, other in zip(left_out(model), left_out(plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        (
            {"regions": "some"},
            "regions is 'some'; it must be 'auto', 'whole', 'breaks', 'blocks'",
        ),
        ({"regions": "breaks", "kernels": "fused"}, "leave kernels='fused' out"),
        ({"regions": "breaks", "budget": {"cpu": 1, "cpu:1": 1}}, "for one device"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    option: dict[str, Any], match: str
) -> None:
    given: dict[str, Any] = {"budget": "100%", **option}
    with pytest.raises(ValueError, match=match):
        remat.fit(Layers(), X, **given)


def test_the_backend_takes_one_graph_at_a_time() -> None:
    with pytest.raises(ValueError, match=r"remat\.fit"):
        remat.backend(budget="1 GiB", regions="breaks")


def test_plans_without_memory_are_of_one_graph() -> None:
    with torch.device("meta"):
        model, x = Layers(), torch.empty(256, WIDTH)
    with pytest.raises(CaptureError, match="a forward pass"):
        remat.plan(model, x, budget="100%", **BREAK)


def test_the_error_of_a_broken_model_names_the_option() -> None:
    with pytest.raises(CaptureError, match='regions="breaks"'):
        remat.fit(Layers(), X, budget="100%")


class Scattered(nn.Module):
    """Adds rows up into as many as an index says, and as the loss has targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, index: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        rows = torch.tanh(self.layer(x))
        count = int(index.max()) + 1
        rows = rows.new_zeros((count, WIDTH)).index_add(0, index, rows)
        return nn.functional.cross_entropy(rows, y)


def test_a_number_that_is_read_is_refused_though_the_loss_tells_it() -> None:
    batch = (X, torch.arange(256) % 20, torch.arange(20))
    said = r'reads a whole number .*int\(index\.max\(\)\).*regions="breaks"'
    with pytest.raises(CaptureError, match=said):
        remat.fit(Scattered(), batch, budget="100%", regions="whole")
    model, plain = pair(Scattered)
    remat.fit(model, batch, budget="100%", **BREAK)
    for each in (model, plain):
        each(*batch).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_number_that_changes_costs_a_trace_and_is_said() -> None:
    class Number(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.blocks[0](x)
            return inner.pow(2).mean() * (1 + 1e-3 * inner.mean().item())

    model, plain = pair(Number)
    remat.fit(model, X, budget="150%", **BREAK)
    batches = [X + step for step in range(12)]
    with pytest.warns(RuntimeWarning, match=r"a number from \.item\(\)"):
        found = trained(model, batches)
    for one, other in zip(found, trained(plain, batches), strict=True):
        assert torch.equal(one, other)


def test_the_tracers_own_advice_for_numbers_is_not_shown() -> None:
    advice = TensorVariable._warn_capture_scalar_outputs
    advice.cache_clear()
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._dynamo.variables.tensor")
    logger.addHandler(handler)
    try:
        model = Numbered()
        remat.fit(model, X, budget="150%", **BREAK)
        model(X).backward()
    finally:
        logger.removeHandler(handler)
    assert advice.cache_info().currsize == 1
    assert not found


def test_tracing_again_and_again_is_said() -> None:
    class Counting(Layers):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            return self.blocks[1](x).pow(2).mean()

    model = Counting()
    remat.fit(model, X, budget="150%", **BREAK)
    with pytest.warns(RuntimeWarning, match=r"such as a counter in Python"):
        trained(model, [X] * 12)


class Penalised(Tied):
    """A penalty on a gradient that is taken in forward."""

    def penalty(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        found = torch.tanh(self.inside(x)).sum()
        (gradient,) = torch.autograd.grad(found, x, create_graph=True)
        return (gradient.norm(dim=1) - 1).pow(2).mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.penalty(x) + super().forward(x)


class Apart(Penalised):
    def penalty(self, x: torch.Tensor) -> torch.Tensor:
        apart: Any = torch.compiler.disable(super().penalty)
        found: torch.Tensor = apart(x)
        return found


def test_double_backward_is_refused_by_name_and_runs_where_it_is_told_to() -> None:
    said = r"gradient inside .*compiler\.disable"
    with pytest.raises(CaptureError, match=said):
        remat.fit(Penalised(), X, budget="90%", costs="estimated")
    model: nn.Module = Penalised()
    if torch.__version__ >= "2.15":
        # Its tracer breaks the graph there by itself.
        report = remat.verify(model, X, budget="100%", repeats=1, regions="breaks")
        assert report.is_exact
        assert report.is_within_budget
    else:
        with pytest.raises(CaptureError, match=said):
            remat.fit(model, X, budget="90%", **BREAK)
    torch.manual_seed(0)
    model = Apart()
    report = remat.verify(model, X, budget="100%", repeats=1, regions="breaks")
    assert report.is_exact
    assert report.against_eager == ()
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01


class Numbered(Layers):
    """A number that Python hands on, other at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x + self.blocks[0](x)
        inner = self.blocks[1](inner) * (1 + 1e-3 * inner.mean().item())
        return self.blocks[2](inner).pow(2).mean()


class Rows(Layers):
    """Blocks on as many rows as are positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        x = x[x[:, 0] > 0]
        x = x + self.blocks[1](x)
        return (x + self.blocks[2](x)).pow(2).mean()


@pytest.mark.filterwarnings("ignore:Numbered was traced:RuntimeWarning")
@pytest.mark.parametrize("kind", [Numbered, Rows])
def test_graphs_that_are_traced_again_run_by_the_plan_of_their_place(
    kind: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = pair(kind)
    x = X.clone()
    x[:, 0] = x[:, 0].abs() + 1  # All rows, or nearly all.
    least = smallest_budget(model)
    plan = remat.fit(model, x, budget=int(1.1 * least), regions="breaks")
    assert plan.recomputed_op_count
    other = x - 2.5 * (torch.arange(256) % 3 == 0)[:, None]
    batches = [x, 0.9 * x, other, 0.8 * other]
    for one, two in zip(trained(model, batches), trained(plain, batches), strict=True):
        assert torch.equal(one, two)
    assert not [r for r in caplog.records if "another way" in r.getMessage()]
    for batch in batches:

        def step(batch: torch.Tensor = batch) -> None:
            model.zero_grad()
            model(batch).backward()

        measured = remat.measure(step, warmup=1, repeats=0, resident=[model, batch])
        assert measured.peak_bytes <= (plan.budget_bytes or 0)


def test_more_rows_than_planned_run_by_the_plan_as_far_as_they_fit() -> None:
    few = X.clone()
    few[:, 0] = torch.where(torch.arange(256) < 128, 5.0, -5.0)
    model = Rows()
    remat.fit(model, few, budget="100%", **BREAK)
    more = few.clone()
    more[:200, 0] = 5.0
    with pytest.raises(BudgetError, match="next such call is planned"):
        model(more)
    remat.fit(model, few, budget="400%", **BREAK)
    model(more).backward()


class Aside(nn.Module):
    """Works on a batch in no graph, besides what is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + largest_of(y)


@in_no_graph
def largest_of(y: torch.Tensor) -> torch.Tensor:
    return y.exp().square().max()


def test_equal_graphs_with_more_between_them_are_judged_again() -> None:
    model = Aside()
    # Whatever the machine's rates, there is room for more than what was planned.
    plan = remat.fit(model, (X, torch.randn(100)), budget="110%", **BREAK)
    fitted = fitted_on(model)
    assert fitted is not None
    model(X, torch.randn(200))
    assert fitted.planner.planned_count == 1
    with pytest.raises(BudgetError):
        model(X, torch.randn(plan.budget_bytes or 0))


def test_a_mode_that_the_model_enters_between_its_graphs_is_its_own() -> None:
    class Counting(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with FlopCounterMode(display=False):
                x = in_no_graph(torch.sin)(x)
            return super().forward(x)

    model, plain = pair(Counting)
    remat.fit(model, X, budget="150%", **BREAK)
    for found, expected in zip(trained(model, [X]), trained(plain, [X]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("regions", ["breaks", "blocks"])
def test_hooks_of_all_modules_that_come_after_the_fit_are_told(regions: Any) -> None:
    model, plain = pair(Layers)
    remat.fit(model, X, budget="150%", costs="estimated", regions=regions)
    for each in (model, plain):
        trained(each, [X])
    hook = register_module_forward_hook(lambda _module, _args, output: 2 * output)
    try:
        with pytest.raises(CaptureError, match=r"call remat\.fit once more"):
            model(X)
        remat.fit(model, X, budget="150%", costs="estimated", regions=regions)
        found, expected = trained(model, [X]), trained(plain, [X])
    finally:
        hook.remove()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Collecting(nn.Module):
    """A part returns what its parts gather, and the last graph is given some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = Branches()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.parts(x)
        last = self.head(found.last)
        return last.square().mean() + sum(side.square().mean() for side in found.sides)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Branch() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> "Found":
        sides: list[torch.Tensor] = []
        for part in self.parts:
            x = part(x, sides)
        return Found(self.norm(x), sides)


class Found:
    def __init__(self, last: torch.Tensor, sides: list[torch.Tensor]) -> None:
        self.last, self.sides = last, sides


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, sides: list[torch.Tensor]) -> torch.Tensor:
        x = self.layer(x).relu()
        torch._dynamo.graph_break()
        sides.append(self.side(x))
        return x.tanh()


def test_what_the_tracer_holds_while_it_compiles_does_not_count() -> None:
    model = Collecting()
    # The budget that one fit names is given to the next.
    first, second = (remat.plan(model, X, budget="150%", **BREAK) for _ in range(2))
    assert first.peak_bytes == second.peak_bytes
    assert first.graph == second.graph


def test_beside_threads_the_recording_counts_that_saw_most_releases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Layers()
    remat.fit(model, X, budget="150%", **BREAK)
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    unseen: list[torch.Tensor] = []
    sizes = [4096, 1024, 8192]

    # In the place of a forward pass: what stays is as if a thread had released it.
    def run(_args: Any, _kwargs: Any, around: Any, _before: Any) -> list[Any]:
        with around:
            unseen.append(torch.empty(sizes[len(unseen)], dtype=torch.uint8))
        return [Gathering([]), None, True]

    monkeypatch.setattr(fitted, "_gathered_once", run)
    *_, recording = fitted._recorded((X,), {}, Gathering([]))
    assert recording.final_bytes() == 4096
    unseen.clear()
    monkeypatch.setattr(
        fitted.planner, "groups", [SimpleNamespace(has_threads=has) for has in (0, 1)]
    )
    *_, recording = fitted._recorded((X,), {}, Gathering([]))
    assert recording.final_bytes() == 1024
    assert len(unseen) == 3
