"""Torch is changed by one thread at a time, and only while a step is traced."""

import contextvars
import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import remat
from remat.capture.tracing import compiled_entry
from remat.planning.plan import Kernels
from remat.torch_compat.names import (
    FakeTensorMode,
    MemoryFormatMeta,
    dynamo_config,
    guards,
)
from remat.torch_compat.patches import (
    KEYS,
    Patch,
    ThreadKernels,
    alone,
    fake_results,
    patched,
    python_kernels,
    tracer_settings,
)

_UPSAMPLE = torch.ops.aten.upsample_bilinear2d.default
_DROPOUT = torch.ops.aten.dropout.default


def state_of_torch() -> tuple[object, ...]:
    """Return all that a trace changes."""
    kernels = [op.py_kernels.get(key) for op in (_UPSAMPLE, _DROPOUT) for key in KEYS]
    return (
        vars(FakeTensorMode)["_dispatch_impl"],
        id(FakeTensorMode.cache),
        vars(MemoryFormatMeta)["from_tensor"],
        *kernels,
    )


class Resampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.interpolate(self.norm(self.conv(x)), scale_factor=2.0)
        return nn.functional.dropout(y.relu(), 0.1).square().mean()


def test_torch_is_its_own_again_while_a_plan_is_made() -> None:
    before = state_of_torch()
    during: dict[str, tuple[object, ...]] = {}

    def progress(activity: str, _share: float) -> None:
        during[activity] = state_of_torch()

    remat.plan(
        Resampling(), (torch.randn(2, 3, 9, 9),), budget="100%", progress=progress
    )
    assert "counting parameters, batch, optimizer and loss" in during
    assert len(during) > 2
    assert set(during.values()) == {before}
    assert state_of_torch() == before


@pytest.mark.parametrize("kernels", ["eager", "fused"])
def test_torch_is_its_own_again_after_an_error(kernels: Kernels) -> None:
    before = state_of_torch()
    with pytest.raises(remat.BudgetError):
        remat.plan(Resampling(), (torch.randn(2, 3, 9, 9),), budget=1, kernels=kernels)
    assert state_of_torch() == before


def test_patches_go_off_in_the_opposite_order_also_after_an_error() -> None:
    done: list[str] = []

    def patch(name: str) -> Callable[[], Callable[[], None]]:
        def put_on() -> Callable[[], None]:
            done.append(f"{name} on")
            return lambda: done.append(f"{name} off")

        return put_on

    def broken() -> Callable[[], None]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), patched(patch("a"), patch("b"), broken):
        pass
    assert done == ["a on", "b on", "b off", "a off"]


def counted(
    dispatch: Callable[..., object], asked: list[object]
) -> Callable[..., object]:
    def count(mode: object, operator: object, *rest: object) -> object:
        asked.append(operator)
        return dispatch(mode, operator, *rest)

    return count


def shape_of_sum(*patches: Patch) -> tuple[int, ...]:
    """Return the shape of a sum that is taken of fake tensors."""
    with patched(*patches), FakeTensorMode():
        x = torch.empty(7, 3)
        return tuple((x + x[:1]).shape)


def test_what_was_found_for_fake_tensors_is_found_once() -> None:
    asked: list[object] = []

    def wrap(dispatch: Callable[..., object]) -> Callable[..., object]:
        return counted(dispatch, asked)

    add = torch.ops.aten.add.Tensor
    theirs = dict(FakeTensorMode.cache)
    for _ in range(3):
        assert shape_of_sum(fake_results(wrap)) == (7, 3)
    assert asked.count(add) == 1
    assert theirs == FakeTensorMode.cache
    # Found by another function, or under settings that decide about kernels.
    others: list[object] = []
    assert shape_of_sum(fake_results(lambda d: counted(d, others))) == (7, 3)
    assert others.count(add) == 1
    torch.use_deterministic_algorithms(mode=True)
    try:
        shape_of_sum(fake_results(wrap))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert asked.count(add) == 2


def test_no_more_results_are_remembered_than_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def wrap(dispatch: Callable[..., object]) -> Callable[..., object]:
        return counted(dispatch, asked)

    monkeypatch.setattr("remat.torch_compat.patches.MOST_RESULTS", 0)
    for _ in range(2):
        shape_of_sum(fake_results(wrap))
    assert asked.count(torch.ops.aten.add.Tensor) == 2
    assert not FakeTensorMode.cache


def test_a_second_trace_finds_hardly_anything_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        FakeTensorMode, "_dispatch_impl", counted(FakeTensorMode._dispatch_impl, asked)
    )
    plans: list[remat.Plan] = []
    counts: list[int] = []
    for _ in range(2):
        asked.clear()
        plans.append(
            remat.plan(Resampling(), (torch.randn(2, 3, 9, 9),), budget="100%")
        )
        counts.append(len(asked))
    assert plans[0].fingerprint == plans[1].fingerprint
    assert counts[1] < counts[0] / 2


def test_guards_are_timed_for_others_only(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []

    def time(*arguments: object) -> float:
        timed.append(arguments)
        return 0.0

    monkeypatch.setattr(guards, "profile_guard_manager", time)
    model, x = Resampling(), torch.randn(2, 3, 9, 9)
    remat.fit(model, (x,), budget="100%")
    model(x).backward()
    with pytest.raises(remat.BudgetError):
        remat.plan(Resampling(), (x,), budget=1)
    assert not timed
    assert guards.profile_guard_manager is time
    torch.compile(Resampling(), backend="eager")(x)
    assert timed


def test_guards_are_timed_again_when_a_trace_is_over() -> None:
    timing = guards.profile_guard_manager
    seen: list[bool] = []

    def compiler(module: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(guards.profile_guard_manager is timing)
        return module.forward

    compiled_entry(nn.Linear(2, 2), compiler)(torch.ones(1, 2))
    assert seen == [False]
    assert guards.profile_guard_manager is timing


def test_only_hooks_of_what_is_not_registered_are_guarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.registered = nn.Sequential(nn.Linear(2, 2))
            self.others = [nn.Linear(2, 2)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.others[0](self.registered(x))

    names: set[str] = set()
    original = guards.GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT

    def spy(self: Any, guard: Any) -> None:
        names.add(guard.name)
        original(self, guard)

    monkeypatch.setattr(guards.GuardBuilder, "EMPTY_NN_MODULE_HOOKS_DICT", spy)
    model, x = Both(), torch.ones(1, 2)
    remat.fit(model, x, budget="1 GiB", costs="estimated")
    model(x)
    assert names
    assert all(".others[0]." in name for name in names)


def test_another_thread_waits_until_the_patches_are_off() -> None:
    before = _DROPOUT.py_kernels.get(KEYS[0])
    seen: list[object] = []

    def look() -> None:
        with alone():
            seen.append(_DROPOUT.py_kernels.get(KEYS[0]))

    def other(*_: object) -> None:
        """Stand in for dropout."""

    thread = threading.Thread(target=look)
    with patched(python_kernels({_DROPOUT: other})):
        assert _DROPOUT.py_kernels[KEYS[0]] is other
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        with alone():  # The thread that has it may take it again.
            assert not seen
    thread.join()
    assert seen == [before]


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [24, 64, 64, 48, 8]
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in itertools.pairwise(widths)
        )
        self.norm = nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = torch.tanh(conv(nn.functional.interpolate(x, scale_factor=1.25)))
        return x.square().mean()


def trained(model: nn.Module, batches: torch.Tensor) -> list[torch.Tensor]:
    """Return losses, gradients and parameters of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        found += [
            loss.detach(),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]
    return [*found, *(p.detach() for p in model.parameters())]


def test_two_threads_fit_and_train_at_once() -> None:
    torch.manual_seed(0)
    models = [Perceptron(), Convolutional()]
    batches = [torch.randn(3, 64, 24), torch.randn(3, 2, 4, 8, 8)]
    expected = [
        trained(copy.deepcopy(model), data)
        for model, data in zip(models, batches, strict=True)
    ]
    before = state_of_torch()
    found: dict[int, list[torch.Tensor]] = {}
    plans: dict[int, remat.Plan] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(2)

    def work(index: int) -> None:
        try:
            start.wait()
            model, data = models[index], batches[index]
            plans[index] = remat.fit(model, (data[0],), budget="85%")
            found[index] = trained(model, data)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    for index in range(2):
        assert plans[index].peak_bytes < plans[index].baseline_peak_bytes
        pairs = zip(found[index], expected[index], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert state_of_torch() == before


def test_kernels_of_a_thread_are_not_those_of_others() -> None:
    seen: list[str] = []

    def kernel(theirs: Callable[..., object], *args: object) -> object:
        seen.append(threading.current_thread().name)
        return theirs(*args)

    def dispatched() -> None:
        _DROPOUT.py_kernels[KEYS[0]](torch.ones(3), 0.5, False)

    kernels = ThreadKernels({_DROPOUT: kernel})
    before = state_of_torch()
    with kernels.seen():
        other = threading.Thread(target=dispatched)
        other.start()
        other.join()
        assert seen == []
        with kernels.seen():
            dispatched()
        dispatched()
        assert seen == [threading.current_thread().name] * 2
    assert state_of_torch() == before
    dispatched()
    assert len(seen) == 2


def test_settings_of_the_tracer_come_back():
    before = dynamo_config.recompile_limit
    outer = tracer_settings(recompile_limit=before + 1)
    inner = tracer_settings(recompile_limit=before + 2, optimize_ddp=False)
    with outer, inner:
        assert dynamo_config.recompile_limit == before + 2
        assert not dynamo_config.optimize_ddp
    assert dynamo_config.recompile_limit == before
    assert dynamo_config.optimize_ddp
    with pytest.raises(AttributeError), tracer_settings(no_such_setting=1):
        pass


@pytest.mark.parametrize("regions", ["whole", "breaks"])
def test_calls_leave_nothing_in_the_context_of_their_thread(regions: str):
    model = nn.Linear(2, 2)
    x = torch.ones(3, 2)
    remat.fit(model, x, budget="1 MiB", costs="estimated", regions=regions)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    before = len(contextvars.copy_context())
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
    assert len(contextvars.copy_context()) == before
