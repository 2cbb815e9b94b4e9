"""A plan is never bypassed silently: it holds, or the call says why it cannot."""

import copy
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo import eval_frame
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import remat
from remat.core.errors import BudgetError, CaptureError, PlanWarning
from remat.profile import operators
from remat.profile.arguments import Description
from remat.torch_compat.attributes import default_stance
from remat.training import step_planning
from remat.training.fitted_model import fitted_on

Call = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
            for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


X = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))


def square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def made() -> Any:
    torch.manual_seed(0)
    return Net()


def fit(model: nn.Module) -> remat.Plan:
    plan = remat.fit(model, X, budget="60%", loss=square)
    assert plan.recomputed_op_count > 0
    return plan


def fitted() -> tuple[nn.Module, remat.Plan]:
    model = made()
    return model, fit(model)


def step(model: nn.Module, call: Call) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = square(call(X))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_held(model: nn.Module, call: Call, plan: remat.Plan) -> None:
    """The step is that of the plain model bit for bit, within the plan's budget."""
    plain = made()
    expected = step(plain, plain)
    found = step(model, call)
    assert len(found) == len(expected)
    assert all(map(torch.equal, expected, found))
    measured = remat.measure(
        lambda: step(model, call), warmup=1, repeats=0, resident=[model, X]
    )
    assert measured.peak_bytes <= (plan.budget_bytes or 0)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# --- compilers around the call ------------------------------------------------------


def compiled_after(backend: str) -> tuple[nn.Module, Call, remat.Plan]:
    model, plan = fitted()
    return model, torch.compile(model, backend=backend), plan


def compiled_before_and_called_after(
    backend: str,
) -> tuple[nn.Module, Call, remat.Plan]:
    model = made()
    compiled = torch.compile(model, backend=backend)
    return model, compiled, fit(model)


def compiled_and_called_before(backend: str) -> tuple[nn.Module, Call, remat.Plan]:
    model = made()
    compiled = torch.compile(model, backend=backend)
    step(model, compiled)
    model.zero_grad()
    return model, compiled, fit(model)


def wrapped_model_fitted(backend: str) -> tuple[nn.Module, Call, remat.Plan]:
    model = made()
    compiled: Any = torch.compile(model, backend=backend)
    return model, compiled, fit(compiled)


def compiled_in_place_after(backend: str) -> tuple[nn.Module, Call, remat.Plan]:
    model, plan = fitted()
    model.compile(backend=backend)
    return model, model, plan


def compiled_in_place_before(backend: str) -> tuple[nn.Module, Call, remat.Plan]:
    model = made()
    model.compile(backend=backend)
    return model, model, fit(model)


def inside_a_compiled_module(backend: str) -> tuple[nn.Module, Call, remat.Plan]:
    model, plan = fitted()
    return model, torch.compile(Wrapper(model), backend=backend), plan


def inside_a_compiled_function(backend: str) -> tuple[nn.Module, Call, remat.Plan]:
    model, plan = fitted()
    return model, torch.compile(lambda x: 1 * model(x), backend=backend), plan


def forward_compiled_after(backend: str) -> tuple[nn.Module, Call, remat.Plan]:
    model, plan = fitted()
    model.forward = torch.compile(model.forward, backend=backend)
    return model, model, plan


@pytest.mark.parametrize(
    ("order", "backend"),
    [
        (compiled_after, "inductor"),
        (compiled_after, "aot_eager"),
        (compiled_before_and_called_after, "aot_eager"),
        (compiled_and_called_before, "aot_eager"),
        (wrapped_model_fitted, "aot_eager"),
        (compiled_in_place_after, "aot_eager"),
        (compiled_in_place_before, "aot_eager"),
        (inside_a_compiled_module, "aot_eager"),
        (inside_a_compiled_function, "aot_eager"),
        (forward_compiled_after, "aot_eager"),
    ],
)
def test_the_plan_holds_inside_of_compilers(
    order: Callable[[str], tuple[nn.Module, Call, remat.Plan]], backend: str
) -> None:
    assert_held(*order(backend))


def test_a_builtin_container_holds_inside_of_compilers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in "123"])
    remat.fit(model, X, budget="80%", loss=square)
    calls = count_planned_calls(model)
    torch.compile(model, backend="aot_eager")(X)
    torch.compile(lambda x: 1 * model(x), backend="aot_eager")(X)
    model.compile(backend="aot_eager")
    model(X)
    assert calls() == 3


def count_planned_calls(model: nn.Module) -> Callable[[], int]:
    """Return how often the model's plan has run since now."""
    inner = fitted_on(model)
    assert inner is not None
    runs: list[None] = []
    run = inner.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(None)
        return run(*args, **kwargs)

    inner.run = counted
    return lambda: len(runs)


def test_one_graph_is_asked_for_in_vain_and_the_reason_is_said() -> None:
    model, _ = fitted()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    calls = count_planned_calls(model)
    compiled(X)
    assert calls() == 1
    inside = torch.compile(lambda x: 1 * model(x), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="leave fullgraph=True out"):
        inside(X)


# --- other callers ------------------------------------------------------------------


def test_forward_runs_the_plan() -> None:
    model, plan = fitted()
    assert_held(model, model.forward, plan)


def test_functional_call_runs_a_plan() -> None:
    model, plan = fitted()

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,))

    assert_held(model, call, plan)


def test_wrappers_that_replace_forward_and_call_the_old_one_run_the_plan() -> None:
    model, plan = fitted()
    old = model.forward
    model.forward = lambda x: 1 * old(x)
    assert_held(model, model, plan)


def test_a_forward_that_does_not_call_the_old_one_is_told_once() -> None:
    model, _ = fitted()
    model.forward = lambda x: x * next(model.parameters()).sum()
    with pytest.warns(PlanWarning, match=r"replaced after remat\.fit.*fit once more"):
        model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)


def test_another_forward_of_the_class_is_traced(monkeypatch: Any) -> None:
    model, plain = fitted()[0], made()
    step(model, model)
    old = Net.forward
    monkeypatch.setattr(Net, "forward", lambda self, x: old(self, x) * 0.5)
    assert all(map(torch.equal, step(plain, plain), step(model, model)))


def test_a_fitted_part_of_a_fitted_model_is_named() -> None:
    model = made()
    remat.fit(model.layers[2], X, budget="100%")
    with pytest.raises(CaptureError, match=r"layers\.2 of Net was fitted by itself"):
        fit(model)
    remat.release(model.layers[2])
    fit(model)
    step(model, model)
    remat.fit(model.layers[2], X, budget="100%")
    with pytest.raises(CaptureError, match=r"layers\.2 of Net was fitted by itself"):
        model(X)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("has_hooks", [False, True])
def test_hooks_of_the_model_itself_run_once(has_hooks: bool) -> None:
    model, plan = fitted()
    seen: list[str] = []
    if has_hooks:
        model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert_held(model, model, plan)
    assert seen.count("backward") == 3
    assert seen.count("before") == (3 if has_hooks else 0)


def test_hooks_that_compute_are_in_the_plan() -> None:
    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.exp().tanh().exp()

    plain, model = made(), made()
    plain.register_forward_hook(hook)
    model.register_forward_hook(hook)
    plan = remat.fit(model, X, budget="60%", loss=square)
    assert all(map(torch.equal, step(plain, plain), step(model, model)))
    measured = remat.measure(
        lambda: step(model, model), warmup=1, repeats=0, resident=[model, X]
    )
    assert measured.peak_bytes <= (plan.budget_bytes or 0)


def test_copies_and_files_have_the_plain_forward() -> None:
    model, _ = fitted()
    expected = made().eval()(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fitted_on(other) is None
        parameter = next(other.parameters())
        assert parameter is not next(model.parameters())
        with torch.no_grad():
            assert torch.equal(other.eval()(X), expected)
            parameter.zero_()
            assert not torch.equal(other(X), expected)
    average = torch.optim.swa_utils.AveragedModel(model)
    assert torch.equal(average.eval()(X), expected)


def test_release_puts_everything_back() -> None:
    model = made()
    before = dict(vars(model))
    remat.fit(model, X, budget="60%", loss=square)
    fit(model)
    remat.release(model)
    assert {**before, "_compiled_call_impl": None} == vars(model)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (lambda m: torch.jit.trace(m, (X,), check_trace=False), r"torch\.jit\.trace"),
        (lambda m: torch.export.export(m, (X,), strict=False), r"torch\.export"),
        (lambda m: make_fx(m)(X), "make_fx"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_records_the_model_is_named(
    record: Callable[[nn.Module], Any], name: str
) -> None:
    model, plan = fitted()
    model.eval()
    with pytest.warns(PlanWarning, match=rf"recorded by .*{name}.*remat\.release"):
        record(model)
    model.train()
    assert_held(model, model, plan)


def test_transforms_are_refused_by_name() -> None:
    model, _ = fitted()
    model.eval()
    calls = {
        "vmap": lambda: torch.vmap(model)(X),
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(X),
    }
    for name, call in calls.items():
        with pytest.raises(CaptureError, match=rf"inside torch\.func\.{name}"):
            call()
    with torch.no_grad():
        assert torch.equal(torch.vmap(model)(X), model(X))


# --- wrappers for several devices and processes --------------------------------------


def test_data_parallel_holds_on_one_device_and_says_that_replicas_do_not() -> None:
    model, plan = fitted()
    assert_held(model, DataParallel(model), plan)
    with pytest.warns(PlanWarning, match=r"replicated by DataParallel"):
        replica = model._replicate_for_data_parallel()
    assert fitted_on(replica) is None
    assert replica._compiled_call_impl is None


@pytest.fixture
def _process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
def test_the_plan_holds_inside_of_a_sharded_module() -> None:
    model, plan = fitted()
    sharded = Wrapper(model)
    fully_shard(sharded)
    plain = made()
    expected, calls = step(plain, plain), count_planned_calls(model)
    loss, *gradients = step(model, sharded)
    assert calls() == 1
    assert torch.equal(loss, expected[0])
    for gradient, other in zip(gradients, expected[1:], strict=True):
        assert isinstance(gradient, DTensor)
        assert torch.equal(gradient.full_tensor(), other)
    peak = remat.measure(
        lambda: step(model, sharded), warmup=1, repeats=0, resident=[model, X]
    ).peak_bytes
    gathered_bytes = sum(p.nbytes for p in model.parameters())
    assert peak <= (plan.budget_bytes or 0) + gathered_bytes


def seen_peak_bytes(model: nn.Module, call: Call, *, keeps: bool = False) -> int:
    """Return the peak of a second step, gradients kept for it or dropped before."""

    def one() -> None:
        model.zero_grad(set_to_none=not keeps)
        square(call(X)).backward()

    measured = remat.measure(one, warmup=1, repeats=0, resident=[model, X])
    return measured.peak_bytes


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("are_views", [True, False])
def test_gradient_buckets_count(
    caplog: pytest.LogCaptureFixture, *, are_views: bool
) -> None:
    model = made()
    expected = step(model, model)
    plan = remat.fit(model, X, budget="60%", loss=square, costs="estimated")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=are_views)
    for _ in range(2):
        found = step(model, wrapped)
        assert all(map(torch.equal, found, expected))
    assert all("of gradient buckets" in line for line in announced(caplog))
    assert seen_peak_bytes(model, wrapped) <= (plan.budget_bytes or 0)


@pytest.mark.usefixtures("_process_group")
def test_a_budget_that_buckets_do_not_fit_is_refused_with_one_that_works() -> None:
    model = made()
    with pytest.raises(BudgetError) as smallest:
        remat.plan(model, X, budget=1, loss=square, costs="estimated")
    least = smallest.value.required_bytes
    remat.fit(model, X, budget=least, loss=square, costs="estimated")
    wrapped = DistributedDataParallel(model)
    bucket_bytes = sum(p.nbytes for p in model.parameters())
    with pytest.raises(BudgetError) as caught:
        step(model, wrapped)
    required = caught.value.required_bytes
    assert least < required <= least + bucket_bytes
    remat.fit(model, X, budget=required, loss=square, costs="estimated")
    step(model, wrapped)
    assert seen_peak_bytes(model, wrapped) <= required


@pytest.mark.usefixtures("_process_group")
def test_buckets_whose_views_gradients_are_count_with_the_plan() -> None:
    model = made()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    step(model, wrapped)
    plan = remat.fit(model, X, budget="70%", loss=square, costs="estimated")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peak_bytes = seen_peak_bytes(model, wrapped, keeps=True)
    assert peak_bytes <= (plan.budget_bytes or 0)


# --- steps of a new kind -------------------------------------------------------------


def announced(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "remat"]
    assert all(record.levelno == logging.WARNING for record in records)
    return [record.getMessage() for record in records]


def test_a_new_kind_of_step_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = fitted()
    step(model, model)
    assert not announced(caplog)
    for _ in range(2):
        step(model, lambda x: model(x[:100]))
    with torch.autocast("cpu"):
        step(model, model)
    square(model(X)).backward()
    model.eval()
    step(model, model)
    lines = announced(caplog)
    assert len(lines) == 4
    shape, autocast, accumulating, mode = lines
    assert "float32 [100, 64]" in shape
    assert "autocast to torch.bfloat16" in autocast
    assert "of gradients" in accumulating
    assert "evaluation mode" in mode
    assert all(" s: " in line and "peak" in line for line in lines)


class Squashed(nn.Module):
    """Computes with its parameters alone, too: that costs the same for any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = nn.functional.gelu(x @ weight.tanh())
        return x


def test_another_length_is_planned_from_what_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    measured: list[str] = []
    profile = operators._profile_operator

    def noted(call: operators.OperatorCall, description: Description) -> Any:
        measured.append(description.text)
        return profile(call, description)

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("all solvers were asked")

    monkeypatch.setattr(operators, "_profile_operator", noted)
    model = Squashed()
    fit(model)
    before = [*measured]
    measured.clear()
    monkeypatch.setattr(step_planning, "plan_graph", refuse)
    square(model(X[:100])).backward()
    assert measured
    assert not {*before} & {*measured}
    inner = fitted_on(model)
    assert inner is not None
    assert inner.planner.planned_count == 2


def test_accumulation_is_planned_with_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = made()
    remat.fit(model, X, budget="70%", loss=square, accumulate=True)
    step(model, model)
    square(model(X)).backward()
    assert not announced(caplog)
    wrong: Any = 2
    with pytest.raises(TypeError, match="accumulate is 2; it must be True or False"):
        remat.fit(model, X, budget="70%", accumulate=wrong)


def test_one_batch_twice_is_another_kind_than_two_equal_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(x), y)

    model = Both()
    remat.fit(model, (X, X), budget="70%")
    model(X, X).backward()
    assert not announced(caplog)
    model.zero_grad()
    model(X, X.clone()).backward()
    model.zero_grad()
    model(X, X).backward()
    (said,) = announced(caplog)
    assert "one tensor" not in said
    remat.fit(model, (X, X.clone()), budget="70%")
    model(X, X).backward()
    assert "one tensor given twice" in announced(caplog)[-1]


# --- calls without gradients ---------------------------------------------------------


def test_without_gradients_the_models_own_forward_runs() -> None:
    model, _ = fitted()
    plain = made()
    calls = count_planned_calls(model)
    for each in (model, plain):
        each.eval()
    for length in range(1, 40):
        with torch.no_grad():
            assert torch.equal(model(X[:length]), plain(X[:length]))
    with torch.inference_mode():
        assert torch.equal(model(X), plain(X))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(model(X), plain(X))
    assert calls() == 0
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert calls() == 1
    assert x.grad is not None


def train(
    model: nn.Module, call: Call, optimizer: torch.optim.Optimizer, count: int = 1
) -> None:
    for seed in range(count):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        square(call(X)).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_copy_that_is_trained_is_told_of_once(is_compiled: bool) -> None:
    model, _ = fitted()
    plain, other = made(), copy.deepcopy(model)
    called: Any = other
    if is_compiled:
        called = torch.compile(other, backend="eager", fullgraph=True)
    optimizer = sgd(other)
    with pytest.warns(PlanWarning, match="steps a copy of a .* was fitted by remat"):
        train(other, called, optimizer)
    train(other, called, optimizer)
    plain_optimizer = sgd(plain)
    for _ in range(2):
        train(plain, plain, plain_optimizer)
    assert all(map(torch.equal, plain.parameters(), other.parameters()))


def test_copies_that_are_not_trained_or_fitted_anew_are_not_told_of() -> None:
    model, _ = fitted()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        (square(model(X)) + square(teacher(X)).detach()).backward()
        optimizer.step()
    other = copy.deepcopy(model)
    fit(other)
    train(other, other, sgd(other))


def bound_before(model: nn.Module) -> Call:
    return model.forward


def compiled_before(model: nn.Module) -> Call:
    return torch.compile(model.forward, backend="eager")


def of_the_class(model: nn.Module) -> Call:
    return lambda x: type(model).forward(model, x)


@pytest.mark.parametrize("take", [bound_before, compiled_before, of_the_class])
def test_training_around_the_plan_is_told_of_once(
    take: Callable[[nn.Module], Call],
) -> None:
    model = made()
    taken, optimizer = take(model), sgd(model)
    remat.fit(model, X, budget="60%", loss=square, optimizer=optimizer)
    train(model, taken, optimizer)
    with pytest.warns(PlanWarning, match="SGD steps all parameters of .* called since"):
        train(model, taken, optimizer)
    train(model, taken, optimizer)


def test_a_part_is_seen_wherever_its_parameters_stand() -> None:
    whole = nn.ModuleList([nn.Linear(2, 2), made()])
    part = whole[1]
    taken = part.forward
    fit(part)
    optimizer = torch.optim.AdamW(whole.parameters())
    with pytest.warns(PlanWarning) as told:
        train(part, taken, optimizer, 3)
    assert len(told) == 2  # Around the plan, and with state that it does not count.


def test_correct_loops_are_not_told_of() -> None:
    model = made()
    parameters = list(model.parameters())
    parts = [parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]]
    optimizers = [torch.optim.SGD(part, 0.1) for part in parts]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    remat.fit(model, X, budget="60%", loss=square)
    # As a checkpoint of an optimizer makes its state, before anything is trained.
    for optimizer in optimizers:
        optimizer.step()
    for _ in range(3):
        model.zero_grad()
        square(model(X)).backward()
        for optimizer in optimizers:
            optimizer.step()


def test_models_that_share_parameters_are_not_taken_for_each_other() -> None:
    shared = nn.Linear(64, 64)
    one = nn.Sequential(shared, nn.Linear(64, 64))
    other = nn.Sequential(shared, nn.Linear(64, 64))
    for model in (one, other):
        remat.fit(model, X, budget="100%", loss=square)
    optimizer = torch.optim.SGD([*one.parameters(), *other[1].parameters()], 0.1)
    train(one, one, optimizer, 3)
    train(other, other, optimizer, 2)


def test_state_that_no_plan_counts_is_told_of_once() -> None:
    model = made()
    counted = sgd(model)
    remat.fit(model, X, budget="60%", loss=square, optimizer=counted)
    train(model, model, counted)
    size_bytes = sum(2 * p.nbytes + 4 for p in model.parameters())
    each = [torch.optim.Adam([parameter]) for parameter in model.parameters()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PlanWarning)
        for _ in range(2):
            model.zero_grad()
            square(model(X)).backward()
            for optimizer in each:
                optimizer.step()
    assert ["the plan counts 0 bytes" in str(each.message) for each in told] == [True]
    other = made()
    fit(other)
    with pytest.warns(PlanWarning, match=rf"takes .* \({size_bytes} bytes\)"):
        train(other, other, torch.optim.Adam(other.parameters()))


class KeepsCount(torch.optim.SGD):
    """Has a number among its state, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = 1  # pyright: ignore[reportArgumentType]
        return super().step(closure)


def test_state_that_is_counted_is_not_told_of() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    remat.fit(model, X, budget="60%", loss=square, optimizer=optimizer)
    train(model, model, optimizer, 2)
    other = made()
    fit(other)
    train(other, other, KeepsCount(other.parameters(), 0.1))


def test_steps_of_verify_are_not_told_of() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    remat.fit(model, X, budget="60%", loss=square, optimizer=optimizer)
    report = remat.verify(model, X, budget="60%", loss=square, optimizer=optimizer)
    assert report.is_exact


def test_after_release_steps_are_nobodys_business() -> None:
    model, _ = fitted()
    remat.release(model)
    square(model(X)).backward()
    torch.optim.Adam(model.parameters()).step()


def test_a_shallow_copy_is_a_plain_model_of_its_own() -> None:
    plain, model = made(), made()
    fit(model)
    for each in (plain, model):
        each.layers[0][2].eval()
    outputs = []
    for each in (plain, model):
        # A backbone: the weights are shared, the last layers are not there.
        backbone = copy.copy(each)
        backbone._modules = {"layers": each.layers[:2]}
        torch.manual_seed(1)
        result = backbone(X)
        square(result).backward()
        outputs += [result, *(p.grad for p in each.layers[:2].parameters())]
        assert fitted_on(backbone) is None
        assert all(p.grad is None for p in each.layers[2:].parameters())
    assert all(
        map(torch.equal, outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :])
    )
    assert fitted_on(model) is not None
    remat.release(model)
    assert "__getstate__" not in vars(model)


@pytest.mark.parametrize("of_gradients", [True, False])
def test_backward_hooks_of_all_modules_are_named_after_the_fit(
    of_gradients: bool,
) -> None:
    model, _ = fitted()
    modules = nn.modules.module
    handle = (
        modules.register_module_full_backward_hook(lambda *_: None)
        if of_gradients
        else modules.register_module_full_backward_pre_hook(lambda *_: None)
    )
    try:
        for call in (model, model.forward):
            with pytest.raises(
                CaptureError, match=r"backward hooks .* on every module"
            ):
                call(X)
    finally:
        handle.remove()
    square(model(X)).backward()


def test_modes_that_keep_the_tracer_away_are_named() -> None:
    model, _ = fitted()
    with FlopCounterMode(display=False):
        with pytest.raises(CaptureError, match="a TorchDispatchMode around the call"):
            model(X)
        with pytest.raises(CaptureError, match="a TorchDispatchMode around the call"):
            remat.fit(made(), X, budget="1 GiB")
    # The refused trace left nothing behind.
    compiled: list[fx.GraphModule] = []

    def compiler(graph: fx.GraphModule, _example: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph

    torch.compile(made(), backend=compiler)(X)
    assert len(compiled) == 1
    square(model(X[:100])).backward()


@pytest.mark.parametrize(
    "stance",
    ["force_eager", "eager_on_recompile", "eager_then_compile", "fail_on_recompile"],
)
def test_what_torch_compile_is_told_to_do_leaves_plans_alone(stance: Any) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.compiler.set_stance(stance):
            return model(x)

    with torch.compiler.set_stance(stance):
        model, plan = fitted()
        square(model(X[:100])).backward()  # It is planned here.
    assert_held(model, call, plan)


def test_a_backend_that_torch_compile_is_told_to_use_leaves_plans_alone() -> None:
    model, plan = fitted()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.compiler.set_stance(force_backend="eager"):
            return model(x)

    assert_held(model, call, plan)


def test_guards_hold_where_torch_compile_is_told_to_skip_them() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.factor = nn.Linear(64, 64), 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.factor

    model = Scaled()
    remat.fit(model, X, budget="1 GiB", costs="estimated")
    square(model(X)).backward()
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        model.factor = 3.0
        assert torch.equal(model(X), model.layer(X) * 3.0)


def test_the_stance_of_another_thread_stays_as_that_thread_left_it() -> None:
    wanted = eval_frame._stance
    stance = torch.compiler.set_stance("force_eager")
    with default_stance():
        stance.__exit__(None, None, None)
        assert eval_frame._stance is wanted
    assert eval_frame._stance is wanted


def test_a_tracer_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(
        CaptureError, match="off in this process; unset TORCHDYNAMO_DIS"
    ):
        fitted()


def test_a_tracer_that_is_turned_off_after_the_fit_is_named() -> None:
    model, _ = fitted()
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(CaptureError, match="is turned off in this process"),
    ):
        model(X)
    square(model(X)).backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("call", [remat.fit, remat.plan, remat.verify])
def test_a_script_is_named(call: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"the model is a script \(.*made from"):
        call(torch.jit.script(nn.Linear(4, 4)), torch.zeros(2, 4), budget="90%")
