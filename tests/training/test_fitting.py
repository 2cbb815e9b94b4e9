"""The public functions: what they promise, on modules small enough to plan at once."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref
from typing import Any, cast

import pytest
import torch
from tests.modules import ConvNet, LossInside
from torch import nn
from torch.nn import functional

import remat
from remat.core import gradient_pieces
from remat.core.errors import (
    BudgetError,
    CaptureError,
    InvalidPlatformError,
    PlanMismatchError,
    PlanWarning,
    ProfileError,
    SolverUnsuitableError,
    UnitError,
)
from remat.core.gradient_pieces import LEAST_BYTES
from remat.core.platform import Device, Platform
from remat.core.schedule import Boundary, Discard
from remat.training.fitted_model import FittedModel


def mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.pow(2).mean()


def conv_net() -> tuple[ConvNet, torch.Tensor]:
    torch.manual_seed(0)
    return ConvNet(depth=6), torch.randn(8, 3, 24, 24)


def fingerprint_of_state(model: nn.Module) -> list[Any]:
    """Everything that planning must leave alone, as comparable values."""
    return [
        [
            (n, p.detach().clone(), p._version, id(p))
            for n, p in model.named_parameters()
        ],
        [(n, b.clone(), b._version, id(b)) for n, b in model.named_buffers()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        torch.get_rng_state(),
        [m.training for m in model.modules()],
        sorted(model.__dict__),
        torch.is_grad_enabled(),
    ]


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, torch.Tensor):
        assert torch.equal(before, after)
    elif isinstance(before, list | tuple):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert_same(one, other)
    else:
        assert before == after


def steps(model: nn.Module, x: torch.Tensor, count: int = 3) -> list[torch.Tensor]:
    """Train and return the losses, parameters and buffers."""
    torch.manual_seed(7)
    # Without state, as plans of these tests count no optimizer.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[torch.Tensor] = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = mean_square(model(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters(), *model.buffers(), torch.get_rng_state()]


def test_training_within_a_tight_budget_is_bitwise_plain() -> None:
    model, x = conv_net()
    plan = remat.fit(model, x, budget="60%", loss=mean_square, costs="estimated")
    assert plan.recomputed_op_count > 0
    plain, _ = conv_net()
    assert_same(steps(plain, x), steps(model, x))


def test_measured_peak_is_within_the_budget() -> None:
    model, x = conv_net()
    plain_peak = remat.measure(
        lambda: steps(model, x, 1), warmup=1, repeats=0, resident=[model, x]
    ).peak_bytes
    plan = remat.fit(model, x, budget=int(plain_peak * 0.6), loss=mean_square)

    def step() -> None:
        model.zero_grad()
        mean_square(model(x)).backward()

    measured = remat.measure(step, warmup=2, repeats=0, resident=[model, x])
    assert measured.peak_bytes <= int(plain_peak * 0.6)
    assert measured.peak_bytes <= plan.peak_bytes
    assert plan.peak_bytes <= 1.02 * measured.peak_bytes


def test_outputs_that_the_caller_holds_are_never_freed() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    model, x, y = nn.Sequential(*blocks), torch.randn(512, 64), torch.randn(512, 64)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs, y)

    report = remat.verify(model, x, budget="60%", loss=loss)
    graph, steps_taken = report.plan.graph, report.plan.schedule.steps
    held = set(graph.forward_outputs) & set(graph.final_outputs)
    assert held
    after = steps_taken[steps_taken.index(Boundary()) :]
    assert not [s for s in after if isinstance(s, Discard) and s.storage in held]
    assert report.is_within_budget
    assert report.is_exact


def test_planning_leaves_the_model_untouched() -> None:
    model, x = conv_net()
    mean_square(model(x)).backward()
    before = fingerprint_of_state(model)
    remat.plan(model, x, budget="80%", loss=mean_square)
    assert_same(before, fingerprint_of_state(model))
    assert model._compiled_call_impl is None


def test_a_failed_fit_leaves_the_model_untouched() -> None:
    model, x = conv_net()
    before = fingerprint_of_state(model)
    with pytest.raises(BudgetError):
        remat.fit(model, x, budget=1000, costs="estimated")
    assert_same(before, fingerprint_of_state(model))
    assert model._compiled_call_impl is None


def test_budget_error_names_a_budget_that_works() -> None:
    model, x = conv_net()
    with pytest.raises(
        BudgetError, match=r"smallest (known|possible) budget"
    ) as caught:
        remat.plan(model, x, budget=1000, costs="estimated")
    assert caught.value.budget_bytes == 1000
    plan = remat.plan(model, x, budget=caught.value.required_bytes, costs="estimated")
    assert plan.peak_bytes <= caught.value.required_bytes


def test_new_shape_is_planned_anew_and_old_plans_are_kept() -> None:
    model, x = conv_net()
    remat.fit(model, x, budget="90%", costs="estimated")
    fitted = model._compiled_call_impl
    assert isinstance(fitted, FittedModel)
    planner = fitted.planner
    mean_square(model(x)).backward()
    model.zero_grad()
    assert len(planner.plans) == 1
    small = torch.randn(2, 3, 24, 24)
    # A result that is kept would be a pass in flight beside the next.
    shape = model(small).shape
    assert len(planner.plans) == 2
    model(x)
    assert len(planner.plans) == 2
    plain, _ = conv_net()
    plain.load_state_dict(model.state_dict())
    assert shape == plain(small).shape


def test_inference_and_evaluation_run_plainly() -> None:
    model, x = conv_net()
    remat.fit(model, x, budget="90%", costs="estimated")
    plain, _ = conv_net()
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    with torch.inference_mode():
        assert torch.equal(model(x), plain(x))


def test_gradient_accumulation_counts_the_gradients() -> None:
    model, x = conv_net()
    remat.fit(model, x, budget=10**9, costs="estimated")
    fitted = model._compiled_call_impl
    assert isinstance(fitted, FittedModel)
    mean_square(model(x)).backward()
    mean_square(model(x)).backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    first, second = fitted.planner.plans.values()
    assert second.peak_bytes - first.peak_bytes == gradients


@pytest.mark.parametrize("regions", ["whole", "blocks"])
@pytest.mark.parametrize("budget", [1, "1%"])
@pytest.mark.parametrize("piece_bytes", [64, LEAST_BYTES])
def test_the_budget_named_for_accumulation_works(
    regions: str, budget: int | str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_pieces, "LEAST_BYTES", piece_bytes)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(32, 64)
    how: dict[str, Any] = {"loss": mean_square, "costs": "estimated"}
    how |= {"regions": regions, "accumulate": True}
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, x, budget=budget, **how)
    plan = remat.fit(model, x, budget=caught.value.required_bytes, **how)
    # What a first pass leaves is there when the second begins, and more beside it.
    assert plan.peak_bytes < caught.value.required_bytes

    def step() -> None:
        model.zero_grad()
        for _ in range(2):
            mean_square(model(x)).backward()

    peak = remat.measure(step, repeats=0, resident=[model, x]).peak_bytes
    assert plan.peak_bytes < peak <= caught.value.required_bytes


def test_gradients_that_appear_after_the_first_accumulating_call_count() -> None:
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(32, 256)
    bias = model.get_parameter("0.0.bias")
    bias.grad = torch.zeros(256)
    plan = remat.fit(model, x, budget="100%", loss=mean_square, costs="estimated")
    mean_square(model(x)).backward()
    # Now the weights have gradients too, for which this budget has no room.
    with pytest.raises(BudgetError):
        model(x)
    needed = plan.peak_bytes + sum(p.nbytes for p in model.parameters())
    remat.fit(model, x, budget=needed, loss=mean_square, costs="estimated")

    def step() -> None:
        model.zero_grad()
        bias.grad = torch.zeros(256)
        for _ in range(2):
            mean_square(model(x)).backward()

    measured = remat.measure(step, warmup=2, repeats=0, resident=[model, x])
    assert measured.peak_bytes <= needed


def test_grad_scaler_hooks_and_state_dict_work() -> None:
    results: list[Any] = []
    for is_fitted in (False, True):
        model, x = conv_net()
        seen: list[torch.Size] = []
        model.convs[0].register_forward_hook(lambda *_: None)
        model.head.weight.register_hook(lambda grad, seen=seen: seen.append(grad.shape))
        names = list(model.state_dict())
        identities = [id(p) for p in model.parameters()]
        if is_fitted:
            remat.fit(model, x, budget="70%", loss=mean_square, costs="estimated")
        assert list(model.state_dict()) == names
        assert [id(p) for p in model.parameters()] == identities
        torch.manual_seed(3)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(mean_square(model(x))).backward()
            scaler.step(optimizer)
            scaler.update()
        assert seen == [model.head.weight.shape] * 2
        results.append([*model.parameters()])
    assert_same(*results)


def test_release_allows_copies_and_pickles() -> None:
    model, x = conv_net()
    remat.fit(model, x, budget="90%", costs="estimated")
    assert remat.release(model) is model
    assert model._compiled_call_impl is None
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    other = pickle.loads(pickle.dumps(model))
    for made in (twin, other):
        torch.manual_seed(5)
        expected = model(x)
        torch.manual_seed(5)
        model_state = made(x)
        assert expected.shape == model_state.shape


@pytest.mark.parametrize("way", ["fit", "plan", "failed plan", "compile"])
def test_nothing_keeps_a_model_or_its_optimizer_alive(way: str) -> None:
    def use() -> list[weakref.ref[Any]]:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
        target = torch.randn(4, 8)
        optimizer = torch.optim.Adam(model.parameters())

        def loss(outputs: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(outputs, target)

        called: Any = model
        match way:
            case "fit":
                remat.fit(model, x, budget=10**7, optimizer=optimizer, loss=loss)
            case "plan":
                remat.plan(model, x, budget=10**7, optimizer=optimizer, loss=loss)
            case "failed plan":
                with pytest.raises(BudgetError):
                    remat.plan(model, x, budget=9, optimizer=optimizer, loss=loss)
            case _:
                backend = remat.backend(budget=10**7, model=model, optimizer=optimizer)
                called = torch.compile(model, backend=backend, dynamic=False)
        for _ in range(2):
            optimizer.zero_grad()
            loss(called(x)).backward()
            optimizer.step()
        remat.release(model)
        return [weakref.ref(item) for item in (model, optimizer, x, target)]

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_plan_round_trip_and_mismatch(tmp_path: Any) -> None:
    model, x = conv_net()
    plan = remat.plan(model, x, budget="70%", loss=mean_square, costs="estimated")
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = remat.load_plan(path)
    assert loaded == plan
    installed = remat.fit(model, x, plan=loaded, loss=mean_square)
    assert installed.schedule == plan.schedule
    plain, _ = conv_net()
    assert_same(steps(plain, x), steps(model, x))
    with pytest.raises(PlanMismatchError, match="another model"):
        remat.fit(ConvNet(depth=2), x, plan=loaded)
    with pytest.raises(PlanMismatchError, match="another model"):
        remat.fit(conv_net()[0], x[:2], plan=loaded)


def test_an_optimizer_counts_state_and_step() -> None:
    model, x = conv_net()
    optimizer = torch.optim.Adam(model.parameters())
    without = remat.plan(model, x, budget=10**9, costs="estimated")
    with_adam = remat.plan(
        model, x, budget=10**9, optimizer=optimizer, costs="estimated"
    )
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert with_adam.graph.resident_bytes() - without.graph.resident_bytes() >= state
    assert not optimizer.state


def test_backend_for_torch_compile() -> None:
    model, x = conv_net()
    backend = remat.backend(budget="70%", costs="estimated")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    plain, _ = conv_net()
    torch.manual_seed(2)
    mean_square(compiled(x)).backward()
    torch.manual_seed(2)
    mean_square(plain(x)).backward()
    assert backend.training_step_count == 1
    assert_same(
        [p.grad for p in plain.parameters()], [p.grad for p in model.parameters()]
    )


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            return y
        return -y


class Mismatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ torch.ones(5, 5)


@pytest.mark.parametrize(
    ("model", "line"),
    [(Branching(), "if y.sum() > 0"), (Mismatched(), "@ torch.ones(5, 5)")],
)
def test_what_cannot_be_traced_is_named_with_its_line(
    model: nn.Module, line: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        remat.fit(model, torch.randn(2, 4), budget="1 GiB")
    assert line in str(caught.value)
    assert "test_fitting.py" in str(caught.value)


def test_a_model_that_does_not_train_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    with pytest.raises(CaptureError, match="does not train"):
        remat.fit(model, torch.randn(2, 4), budget="1 GiB")


@pytest.mark.parametrize("budget", ["8 GiX", "-5", 0, -3, "", "%", True])
def test_bad_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(UnitError):
        remat.fit(nn.Linear(2, 2), torch.randn(1, 2), budget=budget, costs="estimated")


def test_bad_requests_are_refused() -> None:
    model, x = nn.Linear(2, 2), torch.randn(1, 2)
    with pytest.raises(ValueError, match="give a budget"):
        remat.fit(model, x)
    with pytest.raises(SolverUnsuitableError, match="unknown solver"):
        remat.fit(model, x, budget=10**6, solver="magic")
    platform = Platform(devices=(Device(), Device(name="other")))
    with pytest.raises(InvalidPlatformError, match="the devices cpu, other"):
        remat.fit(model, x, budget=10**6, platform=platform)
    with pytest.raises(
        CaptureError, match=r"^an example input of shape \(1, 2\) has no mem"
    ):
        remat.fit(model, x.to("meta"), budget=10**6)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"time_limit": "3"}, TypeError),
        ({"time_limit": True}, TypeError),
        ({"time_limit": 0}, UnitError),
        ({"time_limit": -1}, UnitError),
        ({"time_limit": float("nan")}, UnitError),
        ({"time_limit": float("inf")}, UnitError),
        ({"seed": "a"}, TypeError),
        ({"seed": 1.5}, TypeError),
        ({"progress": 3}, TypeError),
        ({"loss": 3}, TypeError),
        ({"optimizer": "adam"}, TypeError),
        ({"platform": 3}, TypeError),
        ({"kwargs": torch.ones(2)}, TypeError),
        ({"costs": "guessed"}, ValueError),
        ({"costs": []}, ValueError),
        ({"kernels": ["fused"]}, ValueError),
    ],
    ids=str,
)
def test_options_of_a_wrong_type_are_named(
    option: dict[str, Any], error: type[Exception]
) -> None:
    (name,) = option
    for function in (remat.fit, remat.plan, remat.verify):
        with pytest.raises(error, match=f"^{name} is "):
            function(nn.Linear(2, 2), torch.randn(1, 2), budget="1 GB", **option)
    if name != "kwargs":
        given: dict[str, Any] = {"model": nn.Linear(2, 2), **option}
        with pytest.raises(error, match=f"^{name} is "):
            remat.backend(budget="1 GB", **given)
    with pytest.raises(TypeError, match=r"^plan is "):
        remat.fit(nn.Linear(2, 2), torch.randn(1, 2), plan=cast("Any", "plan.json"))


@pytest.mark.parametrize(
    "model", [None, "model", torch.relu], ids=["None", "text", "function"]
)
def test_what_is_no_model_is_refused(model: Any) -> None:
    x = torch.randn(1, 2)
    for call in (
        lambda: remat.fit(model, x, budget="1 GB"),
        lambda: remat.plan(model, x, budget="1 GB"),
        lambda: remat.release(model),
        lambda: remat.verify(model, x, budget="1 GB"),
        lambda: remat.backend(budget="1 GB", model=cast("Any", model or "none")),
    ):
        with pytest.raises(TypeError, match=r"^model is "):
            call()


def test_loss_inside_needs_no_description() -> None:
    torch.manual_seed(0)
    model = LossInside()
    x, labels = torch.randn(64, 16), torch.randint(0, 5, (64,))
    report = remat.verify(model, x, {"labels": labels}, budget="100%")
    assert report.is_exact
    assert report.is_within_budget


class Head(nn.Module):
    """A loss outside of the model, with layers of its own."""

    def __init__(self, *, is_recurrent: bool) -> None:
        super().__init__()
        self.layer = nn.LSTM(64, 64) if is_recurrent else nn.Linear(64, 256)

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        found = self.layer(outputs)
        if isinstance(found, tuple):
            return found[0].square().mean()
        return functional.dropout(found, 0.5).square().mean()


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_loss_outside_counts_by_what_runs(is_recurrent: bool) -> None:
    """In a trace a mask would be of bytes, and a recurrent layer keep nothing."""
    torch.manual_seed(0)
    model, head = nn.Linear(64, 64), Head(is_recurrent=is_recurrent)
    x = torch.randn(64, 8, 64)
    plan = remat.fit(model, x, budget="100%", loss=head, costs="estimated")

    def step() -> None:
        head(model(x)).backward()
        model.zero_grad()
        head.zero_grad()

    measured = remat.measure(step, warmup=1, repeats=0, resident=[model, head, x])
    assert measured.peak_bytes <= plan.peak_bytes <= 1.05 * measured.peak_bytes


def test_outside_loss_without_description_is_covered() -> None:
    model = nn.Linear(16, 4000)
    x, labels = torch.randn(64, 16), torch.randint(0, 4000, (64,))
    plan = remat.fit(model, x, budget=10**9)

    def step() -> None:
        model.zero_grad()
        outputs = model(x)
        functional.cross_entropy(outputs, labels).backward()

    measured = remat.measure(step, warmup=2, repeats=0, resident=[model, x, labels])
    assert measured.peak_bytes <= plan.peak_bytes


def test_more_than_eight_shapes_are_planned() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    remat.fit(model, torch.randn(20, 8), budget=10**7, costs="estimated")
    for size in range(21, 32):
        mean_square(model(torch.randn(size, 8))).backward()
        model.zero_grad()
    fitted = model._compiled_call_impl
    assert isinstance(fitted, FittedModel)
    assert len(fitted.planner.plans) == 12


def test_a_percentage_is_bytes_from_the_first_plan_on() -> None:
    model, x = conv_net()
    plan = remat.fit(model, x, budget="60%", loss=mean_square, costs="estimated")
    model(x[:2])
    fitted = model._compiled_call_impl
    assert isinstance(fitted, FittedModel)
    latest = fitted.planner.latest
    assert latest is not None
    assert latest is not plan
    assert latest.budget_bytes == plan.budget_bytes
    assert latest.recomputed_op_count == 0


class _LinearAndOther(nn.Module):
    """A layer, and one that is a part of the model or stands in a plain list."""

    def __init__(self, *, is_part: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        others = [nn.Linear(8, 8)]
        self.others = nn.ModuleList(others) if is_part else others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.others[0](self.linear(x)))


@pytest.mark.parametrize("options", [{}, {"dynamic": {"x": {0: (2, 8)}}}])
@pytest.mark.parametrize("is_part", [True, False])
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_hooks_that_come_and_go_later_run(
    kind: str, options: dict[str, Any], *, is_part: bool
) -> None:
    model, x = _LinearAndOther(is_part=is_part), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    remat.fit(model, x, budget=10**7, costs="estimated", **options)

    def double(_module: nn.Module, args: Any, *out: torch.Tensor) -> Any:
        return 2 * out[0] if out else (2 * args[0],)

    for name in ("linear", "others"):
        hooks = [
            getattr(hooked, f"register_{kind}_hook")(double)
            for each in (model, plain)
            for hooked in [each.linear if name == "linear" else each.others[0]]
        ]
        assert torch.equal(model(x), plain(x))
        for hook in hooks:
            hook.remove()
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("options", [{}, {"dynamic": {"x": {0: (2, 8)}}}])
def test_hooks_of_a_module_that_is_a_part_no_more_run(options: dict[str, Any]) -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.order = tuple(self.layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.order:
                x = torch.tanh(layer(x))
            return x

    def double(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
        return 2 * out

    model, x = Ordered(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    remat.fit(model, x, budget=10**7, costs="estimated", **options)
    assert torch.equal(model(x), plain(x))
    for each in (model, plain):
        each.layers[1] = nn.Identity()
        each.order[1].register_forward_hook(double)
    assert torch.equal(model(x), plain(x))


def test_a_scalar_next_to_outputs_is_not_taken_for_the_loss() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 1000)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            return y, y.abs().mean()

    model, x, y = TwoOutputs(), torch.randn(64, 8), torch.randint(0, 1000, (64,))
    plan = remat.fit(model, x, budget=10**9)

    def step() -> None:
        model.zero_grad()
        outputs, penalty = model(x)
        (functional.cross_entropy(outputs, y) + penalty).backward()

    measured = remat.measure(step, warmup=2, repeats=0, resident=[model, x, y])
    assert measured.peak_bytes <= plan.peak_bytes


def test_what_the_example_raises_is_named() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 2:
                raise KeyError("boom")
            return self.linear(x)

    with pytest.raises(CaptureError, match=r"KeyError\('boom'\)"):
        remat.fit(Raises(), torch.randn(2, 4), budget="1 GiB")


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.ones(2, 4), 1, 2),
            {},
            "too many positional arguments; the example has 3",
        ),
        ((), {}, r"missing a required argument: 'input'.*takes \(input: .*\)"),
        (
            (),
            {"input": torch.ones(2, 4), "scale": 1},
            "unexpected keyword argument 'scale'",
        ),
        (
            (torch.ones(2, 5),),
            {},
            r"RuntimeError in linear: a and b must have .* \[2, 5\].*linear.py:\d+ in forward",
        ),
        (({"x": 1},), {}, "TypeError .*argument 'input'.* must be Tensor"),
        (({"input": torch.ones(2, 4)},), {}, "TypeError .* must be Tensor"),
    ],
)
def test_an_example_that_does_not_fit_is_said_to(
    args: Any, kwargs: Any, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        remat.fit(nn.Linear(4, 4), args, kwargs, budget="1 GiB")


def test_a_batch_of_keywords_is_said_to_be_given_as_such() -> None:
    batch = {"input1": torch.ones(2, 4), "input2": torch.ones(2, 4)}
    model = nn.Bilinear(4, 4, 4)
    with pytest.raises(CaptureError, match=r"Bilinear.*input1, input2.*kwargs=batch"):
        remat.fit(model, batch, budget="1 GiB")
    remat.fit(model, kwargs=batch, budget="1 GiB", costs="estimated")


def test_an_operator_that_refuses_its_arguments_is_said_where_it_is_called() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, self.weight)

    with pytest.raises(ProfileError, match=r"the call comes from .*test_fitting.py"):
        remat.fit(Mixed(), torch.ones(2, 4, dtype=torch.float64), budget="1 GiB")


def test_replaying_a_random_op_counts_the_generators_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    plan = remat.plan(model, torch.randn(4, 8), budget=10**7, costs="estimated")
    (dropout,) = [
        op
        for op in plan.graph.ops
        if op.name.startswith("dropout_mask") and op.is_ordered
    ]
    assert dropout.workspace_bytes[0] >= torch.get_rng_state().numel()


def test_an_optimizer_over_all_parameters_at_once_can_be_the_peak() -> None:
    model, x = nn.Linear(256, 256), torch.randn(4, 256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    report = remat.verify(
        model, x, budget="100%", optimizer=optimizer, loss=mean_square, repeats=1
    )
    assert report.is_within_budget
    assert report.is_exact
    assert 0 <= report.prediction_error < 0.02


def test_a_saved_plan_is_installed_in_another_process(tmp_path: Any) -> None:
    code = """
import sys, torch, remat
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
x = torch.randn(512, 64)
plan = remat.fit(model, x, plan=remat.load_plan(sys.argv[1]))
model(x).sum().backward()
print(plan.recomputed_op_count, model[0][0].weight.grad.double().sum().item())
"""
    path = str(tmp_path / "plan.json")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))
        model = nn.Sequential(*layers)
        x = torch.randn(512, 64)
    plan = remat.plan(model, x, budget="85%", costs="estimated")
    assert plan.recomputed_op_count > 0
    plan.save(path)
    model(x).sum().backward()
    first: Any = model[0]
    done = subprocess.run(
        [sys.executable, "-c", code, path], check=True, capture_output=True, text=True
    )
    count, gradient = done.stdout.split()
    assert int(count) == plan.recomputed_op_count
    assert float(gradient) == first[0].weight.grad.double().sum().item()


def test_progress_is_in_words_that_a_user_knows() -> None:
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    remat.plan(
        model,
        torch.randn(4, 8),
        budget="100%",
        progress=lambda activity, _: seen.append(activity),
    )
    assert seen[0] == "counting parameters, batch, optimizer and loss"
    assert seen[-1] == "done"
    assert "trying store-all" in seen
    for activity in seen:
        assert activity in {"operators measured", "done"} or activity.split()[
            0
        ].endswith("ing")


class Tempered(nn.Module):
    """Computes with a number that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, temperature: Any) -> torch.Tensor:
        return torch.tanh(self.layer(x) / temperature).square().mean()


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_number_of_which_each_value_is_planned_anew_is_told(
    *, is_tensor: bool
) -> None:
    def given(step: int) -> Any:
        value = 1 / (1 + step)
        return torch.tensor(value) if is_tensor else value

    model, x = Tempered(), torch.randn(8, 16)
    remat.fit(model, (x, given(0)), budget="100%", costs="estimated")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PlanWarning)
        for step in range(10):
            model.zero_grad()
            model(x, given(step)).backward()
    alike = [str(each.message) for each in told if "look alike" in str(each.message)]
    assert len(alike) == (0 if is_tensor else 1)
    assert all("give it as a tensor" in message for message in alike)
