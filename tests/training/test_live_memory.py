"""What is allocated during forward against the plan, whatever keeps it."""

from collections.abc import Callable

import pytest
import torch
from tests.training.test_regions import (
    BREAK,
    Tied,
    in_no_graph,
    pair,
    peak_of_step,
    smallest_budget,
    train_alike,
)

import remat
from remat.core.errors import BudgetError, PlanWarning
from remat.profile import live_memory
from remat.torch_compat import names
from remat.training import region_planning
from remat.training.fitted_model import fitted_on
from remat.training.fitted_regions import _MOST_PLANS, FittedRegions

MANY = 32_768
"""Rows: a value has 16 MiB."""

X = torch.randn(MANY, 32, generator=torch.Generator().manual_seed(0)).abs()

SAID = "more were allocated than its plan says"


@pytest.fixture(autouse=True)
def _the_count_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a worker that ran many tests it is not, and is asked for seldom."""
    monkeypatch.setattr(live_memory, "_QUICK_NS", 10**10)
    monkeypatch.setattr(live_memory, "_MOST_NS", 10**12)


def kept_by_hook(x: torch.Tensor, *, is_large: bool) -> torch.Tensor:
    kept = torch.ones(MANY * 128 if is_large else 1)
    x = x * 2

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * kept[0]

    x.register_hook(hook)
    return x


def kept_by_writing_to_a_view(x: torch.Tensor, *, is_large: bool) -> torch.Tensor:
    x = x * 2
    most = x[:, :127]
    most.mul_(torch.full_like(most, 0.5) if is_large else 0.5)
    return x


@pytest.mark.parametrize(
    ("between", "is_last"),
    [(kept_by_hook, False), (kept_by_writing_to_a_view, True)],
    ids=["between graphs", "after the last"],
)
def test_what_operators_do_not_show_is_told_and_then_planned_or_refused(
    between: Callable[..., torch.Tensor], is_last: bool
) -> None:
    @in_no_graph
    def run(x: torch.Tensor, is_large: bool) -> torch.Tensor:
        x = between(x, is_large=is_large)
        return x.mean() if is_last else x

    class Alike(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.inside(x).exp().sin().exp().tanh()
            found = run(inner, bool(x.sum() > 0))
            return found if is_last else found.sin().exp().tanh().pow(2).mean()

    model, plain = pair(Alike)
    large, small = (smallest_budget(model, x, costs="estimated") for x in (X, -X))
    assert large > small + 7 * region_planning._NOISE_BYTES
    # There the small way keeps a value more than it has to, and the large one may not.
    budget = large + 6 * region_planning._NOISE_BYTES
    remat.fit(model, -X, budget=budget, **BREAK)
    with pytest.warns(PlanWarning, match=SAID):
        train_alike(model, plain, [-X, X])
    train_alike(model, plain, [X, -X, X])
    for x in (X, -X):
        assert peak_of_step(model, x) <= budget
    remat.fit(model, -X, budget=small, **BREAK)
    model(-X).backward()
    model.zero_grad()
    with pytest.warns(PlanWarning, match=SAID):
        model(X).backward()
    model.zero_grad()
    # Each time: it is not planned again in vain.
    for _ in range(_MOST_PLANS + 1):
        with pytest.raises(BudgetError) as caught:
            model(X)
        assert caught.value.required_bytes == large
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert fitted.planner.planned_count == 1
    train_alike(model, plain, [-X])


def test_what_a_plan_leaves_and_noise_are_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise_bytes = region_planning._NOISE_BYTES
    read = live_memory.live_bytes
    more_bytes = 0

    class Growing(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.tanh(self.inside(x))
            count(1)
            return torch.tanh(self.outside(x) * inner).pow(2).mean()

    @in_no_graph
    def count(growth: int) -> None:
        nonlocal more_bytes
        more_bytes += growth * step_bytes

    monkeypatch.setattr(
        live_memory, "live_bytes", lambda place: (read(place) or 0) + more_bytes
    )
    step_bytes = 0
    model, _ = pair(Growing)
    least = smallest_budget(model, X, costs="estimated")
    plan = remat.fit(model, X, budget=least, **BREAK)
    left_bytes = least - plan.peak_bytes
    # The first step runs two graphs for the first time.
    step_bytes = left_bytes + noise_bytes + region_planning._SET_UP_BYTES
    model(X).backward()
    model.zero_grad()
    step_bytes = left_bytes + noise_bytes // 2
    model(X).backward()
    model.zero_grad()
    step_bytes = left_bytes + noise_bytes * 3 // 2 + least // 100
    with pytest.warns(PlanWarning, match=SAID):
        model(X).backward()
    model.zero_grad()
    # It is no part of the step, as planning finds, and is then left alone.
    with pytest.warns(PlanWarning, match="something beside it allocates"):
        model(X).backward()
    for _ in range(2):
        model.zero_grad()
        model(X).backward()
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert fitted.planner.planned_count <= 2


def test_counts_take_a_twentieth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, now_ns, took_ns = 0, 0, 50_000

    def slow(_place: torch.device) -> int:
        nonlocal count, now_ns
        count += 1
        now_ns += took_ns
        return count

    def clock_ns() -> int:
        return now_ns

    monkeypatch.setattr(live_memory, "live_bytes", slow)
    monkeypatch.setattr(live_memory, "_QUICK_NS", 100_000)
    monkeypatch.setattr(live_memory, "_MOST_NS", 200_000)
    for name in "monotonic_ns", "thread_time_ns":
        monkeypatch.setattr(live_memory.time, name, clock_ns)
    watch, place = live_memory.Watch(), torch.device("cpu")

    def looks() -> list[int | None]:
        watch.begin(place)
        return [watch.grown_bytes(is_over=is_over) for is_over in (False, False, True)]

    found: list[list[int | None]] = []
    for _ in range(400):
        now_ns += 1_000_000
        found.append(looks())
    # The first ones are looked at, and then some, each to its end.
    assert found[:2] == 2 * [[1, 2, 3]]
    assert {*map(tuple, found)} == {(1, 2, 3), (None, None, None)}
    assert count * took_ns == pytest.approx(now_ns / live_memory._SHARE, rel=0.05)
    # All are that take long.
    for _ in range(20):
        now_ns += 4_000_000
        assert looks() == [1, 2, 3]
    # A slow one is asked for at the beginning and at the end.
    now_ns, took_ns = now_ns + 10**12, 200_000
    assert looks() == [None, None, 1]


def test_what_tracing_allocates_is_not_the_steps() -> None:
    kept: list[torch.Tensor] = []

    class Split(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = in_no_graph(torch.sin)(torch.tanh(self.inside(x)))
            return torch.tanh(self.outside(x) * inner).pow(2).mean()

    def trace_ends(_trace: object) -> None:
        kept.append(torch.ones(MANY * 128))

    model, plain = pair(Split)
    remat.fit(model, X, budget="100%", **BREAK)
    train_alike(model, plain, [X])
    torch._dynamo.reset_code(Split.forward.__code__)
    # Told before the count's own.
    names.compile_callbacks.end_callbacks.insert(0, trace_ends)
    try:
        train_alike(model, plain, [X])
    finally:
        names.compile_callbacks.remove_end_callback(trace_ends)
    assert kept
