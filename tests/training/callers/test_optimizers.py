"""Planning leaves optimizers as they are, whatever wraps them, and counts them."""

import contextlib
import gc
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

import remat
from remat.core.errors import CaptureError, StateChangedError
from remat.profile import optimizer_bytes
from remat.training.caller_state import unchanged
from remat.training.fitted_model import fitted_on
from remat.training.platform_profile import with_measured_costs


class Lookahead(torch.optim.Optimizer):
    """Slow weights every k steps, written as timm writes it: groups are the base's."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 6) -> None:
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self._base_optimizer = base
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)
        for group in base.param_groups:
            group.setdefault("lookahead_k", k)
            group.setdefault("lookahead_step", 0)

    def state_dict(self) -> Any:
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._base_optimizer.step(closure)
        for group in self._base_optimizer.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for param in group["params"]:
                    state = self._base_optimizer.state[param]
                    if "slow" not in state:
                        state["slow"] = torch.empty_like(param).copy_(param)
                    state["slow"].add_(param - state["slow"], alpha=0.5)
                    param.copy_(state["slow"])


class Slow(torch.optim.Optimizer):
    """Slow weights of its own, as pytorch_optimizer keeps them: groups are inside."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.state = defaultdict(dict)
        for group in base.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for param, state in self.state.items():
            state["slow"].lerp_(param, 0.5)
            param.copy_(state["slow"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class Decaying(torch.optim.SGD):
    """A subclass with a step of its own, and a tensor that is in no state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.average = torch.zeros(1000)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.average.mul_(0.9)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])


def accelerated(model: nn.Module) -> Any:
    return Accelerator(cpu=True).prepare_optimizer(
        torch.optim.AdamW(model.parameters())
    )


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters()),
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "AdamW, foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "accelerate's": accelerated,
    "Lightning's": lambda m: LightningOptimizer(torch.optim.Adam(m.parameters())),
    "Lookahead": lambda m: Lookahead(torch.optim.Adam(m.parameters())),
    "slow weights": lambda m: Slow(torch.optim.AdamW(m.parameters())),
    "with SWALR": scheduled,
    "a subclass": lambda m: Decaying(m.parameters()),
    "Lookahead in accelerate's": lambda m: Accelerator(cpu=True).prepare_optimizer(
        Lookahead(torch.optim.SGD(m.parameters(), lr=0.1))
    ),
}


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(256, 32)


def square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def stepped(model: nn.Module, optimizer: Any) -> Any:
    """Return the optimizer that really steps, once it has stepped."""
    inner = optimizer
    while "param_groups" not in vars(inner) and not isinstance(inner, Slow):
        (inner,) = [
            v for v in vars(inner).values() if isinstance(v, torch.optim.Optimizer)
        ]
    for _ in range(2):
        square(model(net()[1])).backward()
        inner.step()
        inner.zero_grad()
    return inner


def state_of(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return all objects that a caller could hold, and copies of their values."""
    held: list[Any] = [*model.parameters(), *(p.grad for p in model.parameters())]
    groups = optimizer.param_groups
    held += [optimizer, groups, *groups, *(p for g in groups for p in g["params"])]
    values = [torch.get_rng_state(), *(p.detach().clone() for p in model.parameters())]
    for param, state in optimizer.state.items():
        held += [param, state, *state.values()]
        values += [torch.as_tensor(v).clone() for v in state.values()]
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in groups
    ]
    return [list(map(id, held)), values, settings]


def assert_same(before: list[Any], after: list[Any]) -> None:
    assert before[0] == after[0]
    assert all(map(torch.equal, before[1], after[1]))
    assert before[2] == after[2]


def fit(model: nn.Module, x: torch.Tensor, optimizer: Any) -> None:
    remat.fit(model, x, budget="80%", optimizer=optimizer, loss=square)


def plan(model: nn.Module, x: torch.Tensor, optimizer: Any) -> None:
    remat.plan(model, x, budget="80%", optimizer=optimizer, loss=square)


def verify(model: nn.Module, x: torch.Tensor, optimizer: Any) -> None:
    report = remat.verify(
        model, x, budget="80%", optimizer=optimizer, loss=square, repeats=1
    )
    assert report.is_exact
    assert report.is_within_budget


@pytest.mark.parametrize(
    ("name", "call"),
    [*product(OPTIMIZERS, [verify]), ("accelerate's", plan), ("accelerate's", fit)],
)
def test_planning_leaves_the_optimizer_as_it_is(
    name: str, call: Callable[..., None]
) -> None:
    model, x = net()
    optimizer = OPTIMIZERS[name](model)
    stepped(model, optimizer)
    before = state_of(model, optimizer)
    call(model, x, optimizer)
    assert_same(before, state_of(model, optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_without_remat(name: str) -> None:
    plain, x = net()
    stepped(plain, OPTIMIZERS[name](plain))
    model, _ = net()
    optimizer = OPTIMIZERS[name](model)
    before = state_of(model, optimizer)
    fit(model, x, optimizer)
    assert_same(before, state_of(model, optimizer))
    stepped(model, optimizer)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_memory_of_a_wrapped_optimizer_is_counted(name: str) -> None:
    model, _ = net()
    optimizer = OPTIMIZERS[name](model)
    predicted, _ = optimizer_bytes(optimizer)
    inner = stepped(model, optimizer)
    for _ in range(5):
        square(model(net()[1])).backward()
        inner.step()
    states = [*inner.state.values()]
    if isinstance(inner, Lookahead):
        states += inner._base_optimizer.state.values()
    if isinstance(inner, Slow):
        states += inner.base.state.values()
    held = sum(
        value.nbytes
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    held += sum(v.nbytes for v in vars(inner).values() if isinstance(v, torch.Tensor))
    assert predicted == held


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model, x = net()
    with pytest.raises(CaptureError, match=r"LBFGS.*closure"):
        fit(model, x, torch.optim.LBFGS(model.parameters()))
    assert fitted_on(model) is None


def test_memory_of_the_optimizer_that_grows_after_fit_is_planned() -> None:
    model, x = net()
    optimizer = torch.optim.AdamW(model.parameters())
    known = remat.plan(model, x, budget="85%", optimizer=optimizer, loss=square)
    # Nothing is left over for more state.
    budget = known.peak_bytes
    remat.fit(model, x, budget=budget, optimizer=optimizer, loss=square)

    def step() -> None:
        optimizer.zero_grad()
        square(model(x)).backward()
        optimizer.step()

    def peak_bytes() -> int:
        return remat.measure(
            step, warmup=1, repeats=0, resident=[model, optimizer, x]
        ).peak_bytes

    assert peak_bytes() <= budget
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.state.clear()
    with contextlib.suppress(remat.BudgetError):
        assert peak_bytes() <= budget
    fitted = fitted_on(model)
    assert fitted is not None
    more_bytes = sum(p.nbytes for p in model.parameters())
    assert fitted.planner.optimizer_memory[0] == 3 * more_bytes + 4 * 12


def test_parameters_frozen_by_turns_are_planned_once_for_each_turn() -> None:
    """As Lightning's ``toggle_optimizer``, and loops with two networks, freeze them."""
    (model, x), (plain, _) = net(), net()
    halves = [list(m.parameters())[k::2] for m in (model, plain) for k in (0, 1)]
    optimizer, plain_optimizer = (
        torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)
    )
    fit(model, x, optimizer)
    fitted = fitted_on(model)
    assert fitted is not None

    def step(own: Any, own_optimizer: Any, frozen: Any, trained: Any) -> None:
        for parameters, is_trained in ((frozen, False), (trained, True)):
            for parameter in parameters:
                parameter.requires_grad_(is_trained)
        own_optimizer.zero_grad()
        square(own(x)).backward()
        own_optimizer.step()

    counts = []
    for k in range(8):
        turn = k % 2
        step(model, optimizer, halves[1 - turn], halves[turn])
        step(plain, plain_optimizer, halves[3 - turn], halves[2 + turn])
        counts.append(fitted.planner.planned_count)
    assert counts[3:] == [counts[3]] * 5
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_settings_that_change_nothing_plan_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fit(model, x, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    square(model(x)).backward()
    assert not [record for record in caplog.records if record.name == "remat"]


def test_what_an_optimizer_counts_in_its_groups_is_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
            super().step(closure)

    model, x = net()
    optimizer = Counting(model.parameters(), lr=0.1)
    fit(model, x, optimizer)
    asked: list[Any] = []
    monkeypatch.setattr("remat.training.fitted_model.optimizer_memory", asked.append)
    for _ in range(2):
        square(model(x)).backward()
        optimizer.step()
    assert not asked


def test_a_wrapper_without_an_optimizer_is_refused() -> None:
    class Hollow(torch.optim.Optimizer):
        def __init__(self, groups: Any) -> None:
            self.groups = groups

        def __getattr__(self, name: str) -> Any:
            if name == "param_groups":
                return vars(self)["groups"]
            raise AttributeError(name)

    model, x = net()
    with pytest.raises(TypeError, match="Hollow with no param_groups of its own"):
        fit(model, x, Hollow([{"params": list(model.parameters())}]))


class Careless(torch.optim.SGD):
    """Changes the caller's state while its step is predicted, by a door of its own."""

    victim: Any = None

    def step(self, closure: Any = None) -> None:
        self.victim()
        super().step(closure)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("parameters", lambda m, _: m[0][0].register_parameter("bias", None)),
        ("forward hooks", lambda m, _: m.register_forward_hook(print)),
        ("training mode", lambda m, _: m.eval()),
        ("gradient of", lambda m, _: setattr(m[0][0].weight, "grad", None)),
        ("requires_grad of", lambda m, _: m[0][0].weight.requires_grad_(False)),
        ("param_groups", lambda _, o: o.param_groups[0].update(lr=7.0)),
        ("param_groups", lambda _, o: o.param_groups.clear()),
        ("state", lambda _, o: o.state.clear()),
        ("random state", lambda *_: torch.manual_seed(99)),
    ],
)
def test_a_change_is_an_error_and_is_put_back(
    name: str, change: Callable[..., Any]
) -> None:
    model: Any = net()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    square(model(net()[1])).backward()
    before, hooks = state_of(model, optimizer), len(model._forward_hooks)
    with (
        pytest.raises(StateChangedError, match=rf"{name}.*put back"),
        unchanged(model, optimizer),
    ):
        change(model, optimizer)
    assert_same(before, state_of(model, optimizer))
    assert model.training
    assert len(model._forward_hooks) == hooks
    assert all(p.requires_grad for p in model.parameters())


def test_values_that_were_written_are_named_as_lost() -> None:
    model: Any = net()[0]
    with (
        pytest.raises(StateChangedError, match=r"all but values of 0\.0\.weight"),
        unchanged(model, None),
        torch.no_grad(),
    ):
        model[0][0].weight.zero_()


def test_fit_notices_code_of_the_user_that_changes_state() -> None:
    model, x = net()
    optimizer = Careless(model.parameters(), lr=0.1)
    optimizer.victim = model.eval
    with pytest.raises(StateChangedError, match="training mode"):
        fit(model, x, optimizer)
    assert model.training
    assert all("forward" not in vars(m) for m in model.modules())


def test_measured_platforms_leave_the_model_as_it_is() -> None:
    model, x = net()
    optimizer = OPTIMIZERS["AdamW"](model)
    stepped(model, optimizer)
    before = state_of(model, optimizer)
    platform = remat.core.platform.single_device(None)
    with_measured_costs(platform, model, x)
    assert_same(before, state_of(model, optimizer))


def test_an_optimizer_that_the_caller_drops_is_gone() -> None:
    model, x = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fit(model, x, optimizer)
    square(model(x)).backward()
    optimizer.step()
    state, gone = optimizer.state_dict(), weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    # One that takes its place has as much state: nothing to tell, nothing to plan.
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state)
    fitted = fitted_on(model)
    assert fitted is not None
    count = fitted.planner.planned_count
    optimizer.zero_grad()
    square(model(x)).backward()
    optimizer.step()
    assert fitted.planner.planned_count <= count + 1


def test_a_wrapper_may_go_before_what_it_wraps() -> None:
    model, x = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fit(model, x, LightningOptimizer(optimizer))
    gc.collect()
    square(model(x)).backward()
    optimizer.step()
    fitted = fitted_on(model)
    assert fitted is not None
    before = fitted.planner.optimizer_memory
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.state.clear()
    optimizer.zero_grad()
    with contextlib.suppress(remat.BudgetError):
        model(x)
    assert fitted.planner.optimizer_memory[0] > before[0]


def test_a_thread_trains_while_another_looks_at_an_optimizer() -> None:
    looks, is_over = threading.Event(), threading.Event()

    class Slowly(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            looks.set()
            is_over.wait(0.5)
            super().step(closure)

    model, x = net()
    fit(model, x, None)

    def look() -> None:
        optimizer_bytes(Slowly([nn.Parameter(torch.ones(3))], lr=0.1))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert looks.wait(60)
        # It waits, and does not take the other thread's mode for one of its own.
        square(model(x)).backward()
    finally:
        is_over.set()
        thread.join()


def test_another_thread_that_draws_random_numbers_is_thought_of() -> None:
    model, x = net()
    is_over = threading.Event()

    def draw() -> None:
        while not is_over.wait(0.001):
            torch.rand(8)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with pytest.raises(
            StateChangedError, match="another thread drew random numbers"
        ):
            fit(model, x, None)
    finally:
        is_over.set()
        thread.join()


class Passing(torch.optim.Optimizer):
    """Wraps an optimizer, and shows its state as its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.state = base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def test_state_that_two_optimizers_show_is_counted_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = nn.Linear(8, 8)
    optimizer = Passing(torch.optim.AdamW(model.parameters()))
    remat.fit(model, torch.ones(2, 8), budget="100%", optimizer=optimizer)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not [w for w in recwarn if "state of its optimizers" in str(w.message)]


def test_the_gradient_of_an_output_is_gone_when_the_optimizer_steps() -> None:
    """Some versions of torch hold it until backward returns, and none any longer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 512))
    # Its step is where the most memory is taken.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    report = remat.verify(
        model,
        torch.randn(64, 256),
        budget="100%",
        optimizer=optimizer,
        loss=lambda outputs: outputs.square().mean(),
        repeats=1,
    )
    assert report.is_within_budget, report
    assert abs(report.prediction_error) < 0.005, report
