"""Ways through a model that the tracer splits, of which each step takes one."""

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from tests.training.test_regions import (
    BREAK,
    WIDTH,
    Branching,
    Recurrent,
    Tied,
    X,
    in_no_graph,
    pair,
    peak_of_step,
    smallest_budget,
    train_alike,
    trained,
)
from torch import nn

import remat
from remat.core.errors import BudgetError, PlanWarning
from remat.training.fitted_model import fitted_on
from remat.training.fitted_regions import FittedRegions


def test_ways_that_were_planned_keep_the_budget_in_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = X - X.mean() + 0.1
    model, plain = pair(Recurrent)
    budget = smallest_budget(model, -x, costs="estimated")
    remat.fit(model, x, budget=budget, **BREAK)
    # The second way is planned before the next call, whichever way that takes.
    batches = [x, -x, x, -x, x, -x]
    train_alike(model, plain, batches)
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert fitted.planner.planned_count == 2
    for batch in (x, -x, x, -x):
        assert peak_of_step(model, batch) <= budget
    assert fitted.planner.planned_count == 2
    assert sum("another way" in r.getMessage() for r in caplog.records) == 1


def test_a_way_that_no_plan_fits_is_refused_when_it_is_taken_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Longer(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.tanh(self.first(x)).view(8, -1, WIDTH)
            if bool(x.sum() > 0):
                return torch.tanh(self.last(inner)).pow(2).mean()
            inner = self.memory(self.memory(inner)[0])[0]
            return torch.tanh(self.first(inner)).pow(2).mean()

    x = X - X.mean() + 0.1
    model = Longer()
    remat.fit(model, x, budget="120%", **BREAK)
    model(x).backward()
    model.zero_grad()
    model(-x).backward()
    model.zero_grad()
    for _ in range(2):
        model(x).backward()
        model.zero_grad()
        with pytest.raises(BudgetError, match="was not there when it was planned"):
            model(-x)
    said = [r for r in caplog.records if "no plan is known for the way" in r.message]
    assert len(said) == 1


def test_a_way_that_ends_before_its_plan_is_planned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Shorter(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.tanh(self.first(x)).view(8, -1, WIDTH)
            if bool(x.sum() > 0):
                return torch.tanh(self.last(inner)).pow(2).mean()
            return in_no_graph(self.memory)(inner)[0].pow(2).mean()

    x = X - X.mean() + 0.1
    model = Shorter()
    remat.fit(model, x, budget="400%", **BREAK)
    for each in (x, -x, x, -x):
        model(each).backward()
        model.zero_grad()
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert fitted.planner.planned_count == 2
    said = [r.message for r in caplog.records if "another way at graph 1" in r.message]
    assert len(said) == 1


def many_exponentials(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x] * 8).sin().exp().sum(0)


def in_order(x: torch.Tensor) -> torch.Tensor:
    return x.sort(dim=0).values


def often(x: torch.Tensor) -> torch.Tensor:
    for _ in range(9):
        x = x.sin()
    return x


def often_in_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([often(x[:count]), x[count:]])


@pytest.mark.parametrize("is_last", [False, True], ids=["between", "last"])
@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (torch.neg, in_order),
        (torch.neg, many_exponentials),
        (torch.sin, often),
        (partial(often_in_rows, count=8), partial(often_in_rows, count=250)),
    ],
    ids=["other", "others", "more", "larger"],
)
def test_ways_of_equal_graphs_are_told_apart_by_what_runs_in_no_graph(
    smaller: Callable[[torch.Tensor], torch.Tensor],
    larger: Callable[[torch.Tensor], torch.Tensor],
    is_last: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    @in_no_graph
    def between(x: torch.Tensor, is_large: bool) -> torch.Tensor:
        x = larger(x) if is_large else smaller(x)
        return x.pow(2).mean() if is_last else x

    class Alike(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.tanh(self.inside(x))
            found = between(inner, bool(x.sum() > 0))
            return found if is_last else torch.tanh(found).pow(2).mean()

    x = X - X.mean() + 0.1
    model, plain = pair(Alike)
    budget = smallest_budget(model, x, costs="estimated")
    assert budget > smallest_budget(model, -x, costs="estimated")
    remat.fit(model, -x, budget=budget, **BREAK)
    batches = [-x, x, -x, x, -x]
    train_alike(model, plain, batches)
    for batch in (x, -x):
        assert peak_of_step(model, batch) <= budget
    assert sum("another way" in r.getMessage() for r in caplog.records) == 1


class Drawing(Tied):
    """A way that something else than the batch decides, and how: ``counted``, say."""

    by = "counted"
    tick = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.count, self.counts = 0, [0]
        self.generator = torch.Generator().manual_seed(2)
        self.numpy_generator = np.random.default_rng(1)
        self.python_generator = random.Random(2)
        self.register_buffer("counter", torch.zeros(()))
        self.decide: dict[str, Callable[[], int]] = {
            "counted": lambda: self.count,
            "in a list": lambda: self.counts[0],
            "in a buffer": lambda: int(self.counter),
            "drawn by torch": lambda: int(torch.randint(4, ())),
            "drawn by NumPy": lambda: np.random.randint(4),  # noqa: NPY002
            "drawn by Python": lambda: random.randrange(4),
            "drawn by its own": lambda: int(
                torch.randint(4, (), generator=self.generator)
            ),
            "drawn by its own of NumPy": lambda: int(self.numpy_generator.integers(4)),
            "drawn by its own of Python": lambda: self.python_generator.randrange(4),
            "elsewhere": lambda: next(self.tick),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.inside(x))
        inner = self.between(inner)
        return torch.tanh(inner).pow(2).mean()

    @in_no_graph
    def between(self, x: torch.Tensor) -> torch.Tensor:
        is_large = self.decide[self.by]() % 4 == 3
        self.count += 1
        self.counts[0] += 1
        self.counter += 1
        return often(x) if is_large else x.sin()


@pytest.mark.parametrize(
    "by",
    [
        "counted",
        "in a list",
        "in a buffer",
        "drawn by torch",
        "drawn by NumPy",
        "drawn by Python",
        "drawn by its own",
        "drawn by its own of NumPy",
        "drawn by its own of Python",
    ],
)
def test_ways_that_numbers_of_the_model_or_random_ones_decide_are_planned(
    by: str,
) -> None:
    class Kind(Drawing):
        pass

    Kind.by = by
    model, plain = pair(Kind)
    seed(2)
    remat.fit(model, X, budget="300%", **BREAK)
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)

    # Warnings are errors.
    assert all(map(torch.equal, steps_from(2, model), steps_from(2, plain)))
    assert fitted.planner.planned_count == 2
    assert all(map(torch.equal, steps_from(3, model), steps_from(3, plain)))
    assert fitted.planner.planned_count == 2


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def steps_from(number: int, model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of steps from this seed on, and what is drawn next."""
    seed(number)
    found: list[torch.Tensor] = []
    for _ in range(16):
        model.zero_grad()
        model(X).backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
    drawn = [random.random(), np.random.rand()]  # noqa: NPY002
    return [*found, torch.rand(1), torch.tensor(drawn)]


def test_a_way_that_planning_does_not_see_again_is_told() -> None:
    class Elsewhere(Drawing):
        by = "elsewhere"

    model = Elsewhere()
    remat.fit(model, X, budget="300%", **BREAK)

    def train() -> None:
        for _ in range(16):
            model(X).backward()
            model.zero_grad()

    with pytest.warns(PlanWarning, match="was not there any more") as told:
        train()
    assert len(told) == 1


def test_a_way_that_was_cut_short_by_an_error_is_planned_and_runs() -> None:
    class Wider(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.tanh(self.first(x))
            if x.sum() > 0:
                inner = nn.functional.gelu(torch.cat([inner, inner]).sin().exp())
            torch._dynamo.graph_break()
            return torch.tanh(self.one(inner)).pow(2).mean()

    x = X - X.mean() + 0.1
    model = Wider()
    budget = smallest_budget(model, x, costs="estimated")
    remat.fit(model, -x, budget=budget, **BREAK)
    for batch in (-x, x, -x):
        with suppress(BudgetError):
            model(batch).backward()
        model.zero_grad()
    assert peak_of_step(model, x) <= budget


def test_a_way_with_another_number_each_time_is_not_said_to_be_gone() -> None:
    class Numbered(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.tanh(self.inside(x))
            if x.sum() > 0:
                inner = torch.tanh(inner @ self.outside.weight) @ self.inside.weight.T
            number = int(inner.mean().item() * 1e6)
            return (inner + number * 1e-9).pow(2).mean()

    x = X - X.mean() + 0.1
    model = Numbered()
    remat.fit(model, -x, budget="300%", **BREAK)
    # Warnings are errors.
    trained(model, [-x, x, x, -x, x])
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert fitted.planner.planned_count == 2
