"""Ways through a model that the tracer splits, of which each step takes one."""

import gc
import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

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
        with pytest.raises(BudgetError, match=r"that takes this way$"):
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


class SettingUp(nn.Module):
    """Finds out about its batch in the first call, as torchvision's poolers do."""

    scale: float | None

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.scale = None
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        inner = torch.tanh(self.first(x))
        if self.scale is None:
            self.scale = torch.log2(torch.tensor(8.0)).item()
        torch._dynamo.graph_break()
        return torch.tanh(self.last(inner) * self.scale).pow(2).mean()


@pytest.mark.parametrize("sizes", [(256, 256), (200, 100)])
def test_what_later_calls_do_is_planned_as_well_as_the_first(
    caplog: pytest.LogCaptureFixture, sizes: tuple[int, int]
) -> None:
    model, plain = pair(SettingUp)
    named = smallest_budget(model, X, costs="estimated")
    assert model.scale is None
    plan = remat.fit(model, X, budget=named * 11 // 10, **BREAK)
    assert (model.scale, model.calls) == (None, 0)
    first, second = (X[:size] for size in sizes)
    train_alike(model, plain, [first, first, first, second, second])
    assert (model.scale, model.calls) == (3.0, plain.calls)
    assert not any("another way" in each.getMessage() for each in caplog.records)
    for batch in (first, second):
        assert peak_of_step(model, batch) <= (plan.budget_bytes or 0)
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    # Both ways at the sizes of the first call, and the later one at others.
    assert fitted.planner.planned_count == (2 if sizes[0] == sizes[1] else 5)


class Later(nn.Module):
    """Needs more in all calls but the first, or less, by what that one sets up."""

    table: torch.Tensor | None
    count: torch.Tensor

    def __init__(self, how: str, *, is_less: bool = False) -> None:
        super().__init__()
        self.how, self.is_less, self.is_ready = how, is_less, False
        self.known: dict[int, float] = {}
        self.register_buffer("table", None)
        self.register_buffer("count", torch.tensor(0))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def is_first(self) -> bool:
        found = {
            "attribute": not hasattr(self, "scale"),
            "switch": not self.is_ready,
            "mapping": not self.known,
            "buffer": self.table is None,
            "count": int(self.count) == 0,
        }
        return found[self.how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.first(x))
        is_first = in_no_graph(self.is_first)()
        if is_first:
            in_no_graph(self.set_up)()
        if is_first != self.is_less:
            return inner.pow(2).mean()
        return torch.tanh(self.last(inner)).sin().exp().pow(2).mean()

    def set_up(self) -> None:
        if self.how == "attribute":
            self.scale = 2.0
        elif self.how == "switch":
            self.is_ready = True
        elif self.how == "mapping":
            self.known[0] = 2.0
        elif self.how == "buffer":
            self.table = torch.ones(3)
        else:
            self.count += 1


@pytest.mark.parametrize("how", ["attribute", "switch", "mapping", "buffer", "count"])
@pytest.mark.parametrize("regions", ["breaks", ["first", "last"]])
def test_budgets_are_named_for_what_later_calls_do(
    caplog: pytest.LogCaptureFixture, how: str, regions: Any
) -> None:
    options: dict[str, Any] = {"costs": "estimated", "regions": regions}
    model, plain = pair(partial(Later, how))
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, X, budget=1, **options)
    plan = remat.fit(model, X, budget=caught.value.required_bytes, **options)
    assert in_no_graph(model.is_first)()
    train_alike(model, plain, [X, X, X])
    assert not any("another way" in each.getMessage() for each in caplog.records)
    assert peak_of_step(model, X) <= (plan.budget_bytes or 0)
    # A percentage is one of what later calls do.
    everything = remat.plan(Later(how), X, budget="100%", **options)
    assert everything.overhead == 0
    assert everything.peak_bytes >= plan.peak_bytes


@pytest.mark.parametrize("budget", ["100%", 200_000])
@pytest.mark.parametrize("how", ["switch", "count"])
@pytest.mark.parametrize("regions", ["breaks", ["first", "last"]])
def test_a_first_call_that_needs_more_keeps_the_budget(
    caplog: pytest.LogCaptureFixture, how: str, regions: Any, budget: Any
) -> None:
    options: dict[str, Any] = {"costs": "estimated", "regions": regions}
    model, plain = pair(partial(Later, how, is_less=True))
    try:
        plan = remat.fit(model, X, budget=budget, **options)
    except BudgetError as error:
        plan = remat.fit(model, X, budget=error.required_bytes, **options)

    def step() -> None:
        model(X).backward()

    peak = remat.measure(step, warmup=0, repeats=0, resident=[model, X]).peak_bytes
    assert peak <= (plan.budget_bytes or 0)
    plain(X).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        one.grad = other.grad = None
    train_alike(model, plain, [X, X])
    assert not any("another way" in each.getMessage() for each in caplog.records)


def test_what_is_named_is_enough_for_a_first_call_of_another_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain = pair(partial(Later, "switch", is_less=True))
    # The first call fits so large a share of its own, and later ones do not.
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, X, budget="80%", **BREAK)
    plan = remat.fit(model, X, budget=caught.value.required_bytes, **BREAK)
    assert plan.budget_bytes == caught.value.required_bytes
    train_alike(model, plain, [X, X])
    assert not any("another way" in each.getMessage() for each in caplog.records)


def test_a_saved_plan_of_what_later_calls_do_is_installed(tmp_path: Any) -> None:
    plan = remat.plan(Later("switch"), X, budget="100%", **BREAK)
    plan.save(tmp_path / "plan.json")
    model, plain = pair(partial(Later, "switch"))
    given = remat.load_plan(tmp_path / "plan.json")
    installed = remat.fit(model, X, plan=given, **BREAK)
    assert installed.fingerprint == plan.fingerprint
    train_alike(model, plain, [X, X])


@pytest.mark.parametrize("is_counting", [True, False])
def test_what_later_calls_do_not_read_changes_no_plan(is_counting: bool) -> None:
    class Noting(Tied):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1 if is_counting else 1
            return super().forward(x)

    model = Noting()
    plan = remat.fit(model, X, budget="100%", **BREAK)
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert fitted.planner.planned_count == 1
    # To look at the way of a later call has not made it forget.
    assert fitted.latest_plan() is plan


def many_exponentials(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x] * 8).sin().exp().sum(0)


def in_order(x: torch.Tensor) -> torch.Tensor:
    return x.sort(dim=0).values


def often(x: torch.Tensor) -> torch.Tensor:
    for _ in range(9):
        x = x.sin()
    return x


def often_in_rows(x: torch.Tensor, count: int, times: int = 1) -> torch.Tensor:
    rows = x[:count]
    for _ in range(times):
        rows = often(rows)
    return torch.cat([rows, x[count:]])


def products(x: torch.Tensor, *, is_square: bool) -> torch.Tensor:
    for _ in range(9):
        x = x * x if is_square else x * 0.9
    return x


def twice_in(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).sin().sin().float()


def scaled(x: torch.Tensor, *, is_by_tensors: bool) -> torch.Tensor:
    for _ in range(9):
        x = x * (torch.full_like(x, 0.9) if is_by_tensors else 0.9)
    return x


class Saving(torch.autograd.Function):
    """Doubles, and keeps so many tensors for that, one of them as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(*(x + each for each in range(count)))
        ctx.attribute = x.clone()
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        assert ctx.saved_tensors
        return gradients[0] * 2, None


class SavingAttributes(Saving):
    """Keeps them in an object of an attribute of its own, which holds itself too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        held = SimpleNamespace(tensors={x + each for each in range(count)})
        attributes: list[Any] = [held]
        attributes.append(attributes)
        ctx.attributes = attributes
        return x * 2


TABLE = nn.Parameter(torch.ones(5000, WIDTH))


def looked_up(x: torch.Tensor, times: int) -> torch.Tensor:
    rows = [nn.functional.embedding(torch.arange(4), TABLE) for _ in range(times)]
    return x + sum(each.mean() for each in rows)


def in_pieces(x: torch.Tensor, count: int) -> torch.Tensor:
    return x + sum(x.repeat(24 // count, 1).mean(0) for _ in range(count))


def windows(x: torch.Tensor, size: int) -> torch.Tensor:
    return x + x.unfold(0, size, 1).mean(-1).mean(0)


def apply_saving(
    x: torch.Tensor, kind: type[torch.autograd.Function], count: int
) -> torch.Tensor:
    found: torch.Tensor = kind.apply(x, count)
    return found


@pytest.mark.parametrize("is_last", [False, True], ids=["between", "last"])
@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (torch.neg, in_order),
        (torch.neg, many_exponentials),
        (torch.sin, often),
        (partial(often_in_rows, count=8), partial(often_in_rows, count=250)),
        (
            partial(often_in_rows, count=8, times=20),
            partial(often_in_rows, count=250, times=20),
        ),
        (
            partial(twice_in, dtype=torch.float16),
            partial(twice_in, dtype=torch.float64),
        ),
        (partial(products, is_square=False), partial(products, is_square=True)),
        (partial(scaled, is_by_tensors=False), partial(scaled, is_by_tensors=True)),
        (
            partial(apply_saving, kind=Saving, count=1),
            partial(apply_saving, kind=Saving, count=9),
        ),
        (
            partial(apply_saving, kind=SavingAttributes, count=1),
            partial(apply_saving, kind=SavingAttributes, count=9),
        ),
        (partial(looked_up, times=1), partial(looked_up, times=2)),
        (partial(in_pieces, count=12), partial(in_pieces, count=1)),
        (partial(windows, size=2), partial(windows, size=40)),
    ],
    ids=[
        "other",
        "others",
        "more",
        "larger",
        "many larger",
        "wider",
        "itself",
        "by tensors",
        "of its own",
        "of its own in attributes",
        "looked up again",
        "in one piece",
        "wider views",
    ],
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


def test_ways_that_make_as_much_at_another_place_are_told_apart() -> None:
    class Moving(Recurrent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            is_late = bool(x.sum() > 0)
            inner = self.repeated(torch.tanh(self.first(x)), 1 if is_late else 24)
            inner = scaled_by_tensors(inner)
            inner = self.repeated(torch.tanh(self.last(inner)), 24 if is_late else 1)
            return torch.tanh(self.first(inner)).pow(2).mean()

        @in_no_graph
        def repeated(self, x: torch.Tensor, count: int) -> torch.Tensor:
            return x + x.repeat(count, 1).mean(0)

    @in_no_graph
    def scaled_by_tensors(x: torch.Tensor) -> torch.Tensor:
        return scaled(x, is_by_tensors=True)

    x = X - X.mean() + 0.1
    model, plain = pair(Moving)
    early, late = (smallest_budget(model, each, costs="estimated") for each in (-x, x))
    assert late > early
    budget = (early + late) // 2
    remat.fit(model, -x, budget=budget, **BREAK)
    model(x).sum().backward()
    model.zero_grad()
    train_alike(model, plain, [-x])
    with pytest.raises(BudgetError):
        model(x)


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
            "drawn by torch": lambda: int(torch.randint(8, ())),
            "drawn by NumPy": lambda: np.random.randint(8),  # noqa: NPY002
            "drawn by Python": lambda: random.randrange(8),
            "drawn by its own": lambda: int(
                torch.randint(8, (), generator=self.generator)
            ),
            "drawn by its own of NumPy": lambda: int(self.numpy_generator.integers(8)),
            "drawn by its own of Python": lambda: self.python_generator.randrange(8),
            "elsewhere": lambda: next(self.tick),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.inside(x))
        inner = self.between(inner)
        return torch.tanh(inner).pow(2).mean()

    @in_no_graph
    def between(self, x: torch.Tensor) -> torch.Tensor:
        is_large = self.decide[self.by]() % 8 == 7
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
    # Of its first step it is not known how it began.
    assert sum(fitted._failed_counts.values()) <= 2
    assert all(map(torch.equal, steps_from(3, model), steps_from(3, plain)))
    assert sum(fitted._failed_counts.values()) <= 2
    assert fitted.planner.planned_count == 2


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def steps_from(number: int, model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of steps from this seed on, and what is drawn next."""
    seed(number)
    found: list[torch.Tensor] = []
    for _ in range(40):
        model.zero_grad()
        model(X).backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
    drawn = [random.random(), np.random.rand()]  # noqa: NPY002
    return [*found, torch.rand(1), torch.tensor(drawn)]


class Settings(dict[str, Any]):
    """A mapping whose keys are attributes, as those of libraries are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Holding(Drawing):
    """Changes what it holds beside its buffers at each call, of which some are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings(every=4)
        self.queue = deque([1.0], maxlen=5)
        self.total: torch.Tensor
        self.array = np.zeros(3)
        self.tensors = [torch.zeros(2)]
        self.nested = {"of": [[0]]}
        self.register_buffer("total", torch.zeros(()))
        self.same = [self.total]
        self.hidden: torch.Tensor | None = None
        self.waiting: list[torch.Tensor] = []
        self.hard: list[Any] = [torch.zeros(3), torch.zeros(1).expand(3), np.zeros(2)]
        self.sparse = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()]
        self.constant = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.inside(x))
        return torch.tanh(self.step(inner)).pow(2).mean()

    @in_no_graph
    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.queue.append(self.queue[-1] + 1)
        self.array += 1
        self.tensors[0] += 1
        self.nested["of"][0][0] += 1
        self.hard[0].data += 1
        self.hard[1][0] += 1
        for each in self.sparse:
            each.mul_(2)
        self.hard[2].resize(self.hard[2].shape[0] + 1, refcheck=False)
        self.waiting.append(x.detach()[:1])
        if self.hidden is not None:
            x = x + self.hidden
        self.hidden = x.detach()
        self.count += 1
        if self.count % self.settings.every:
            return x.sin()
        self.same[0] += 1
        self.hidden = None
        self.waiting.clear()
        return often(x)

    def held(self) -> list[Any]:
        hidden = None if self.hidden is None else float(self.hidden.sum())
        tensors = [*map(float, self.tensors[0]), float(self.total), hidden]
        hard = [each.tolist() for each in self.hard]
        hard += [each.to_dense().tolist() for each in self.sparse]
        return [
            *self.queue,
            *self.array,
            *tensors,
            self.nested,
            len(self.waiting),
            hard,
        ]


@pytest.mark.filterwarnings("ignore::remat.core.errors.PlanWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_planning_ways_leaves_what_a_model_holds_as_it_was() -> None:
    model, plain = pair(Holding)
    remat.fit(model, X, budget="300%", **BREAK)
    for _ in range(4):
        assert all(map(torch.equal, steps_from(2, model), steps_from(2, plain)))
        assert isinstance(model, Holding)
        assert isinstance(plain, Holding)
        assert model.held() == plain.held()
        assert type(model.settings) is Settings


def test_ways_that_write_parameters_are_told_and_not_run_again() -> None:
    class Moving(Drawing):
        def __init__(self) -> None:
            super().__init__()
            self.average = nn.Parameter(torch.zeros(128, WIDTH), requires_grad=False)

        @in_no_graph
        def between(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if self.count % 4:
                return x.sin()
            with torch.no_grad():
                self.average.add_(self.inside.weight)
            return often(x)

    model, plain = pair(Moving)
    remat.fit(model, X, budget="300%", **BREAK)
    with pytest.warns(PlanWarning, match="writes parameters in its forward pass"):
        gradients = steps_from(2, model)
    assert all(map(torch.equal, gradients, steps_from(2, plain)))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


class Valued(Tied):
    """A way that the batch decides, and one that is small."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.inside(x))
        inner = in_no_graph(often if x.sum() > 0 else torch.sin)(inner)
        return torch.tanh(inner).pow(2).mean()


@pytest.mark.parametrize("is_data", [False, True], ids=["values", "data"])
def test_batches_that_are_written_over_are_told(is_data: bool) -> None:
    x = X - X.mean() + 0.1
    model = Valued()
    place = -x
    remat.fit(model, place, budget="300%", **BREAK)

    def train() -> None:
        for each in (-x, x, -x):
            if is_data:
                place.data = each.clone()
            else:
                place.copy_(each)
            model(place).backward()
            model.zero_grad()

    with pytest.warns(PlanWarning, match="its batch was written over"):
        train()


def test_ways_are_planned_when_the_next_call_of_their_kind_comes() -> None:
    x = X - X.mean() + 0.1
    model = Valued()
    budget = smallest_budget(model, x, costs="estimated")
    remat.fit(model, -x, budget=budget, **BREAK)
    for _ in range(3):
        with suppress(BudgetError):
            model(x).backward()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(-x)
        loss.backward()
        model.zero_grad()
    assert peak_of_step(model, x) <= budget


def test_what_fits_beside_a_plan_is_no_other_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = X - X.mean() + 0.1
    model = Valued()
    plan = remat.fit(model, -x, budget="1000%", **BREAK)
    for batch in (-x, x, -x):
        assert peak_of_step(model, batch) <= (plan.budget_bytes or 0)
    assert "another way" not in caplog.text


def test_a_batch_whose_container_is_used_again_is_told() -> None:
    class Mapped(Valued):
        def forward(self, x: Any) -> torch.Tensor:
            return super().forward(x["x"])

    x = X - X.mean() + 0.1
    model = Mapped()
    batch = {"x": -x}
    remat.fit(model, batch, budget="300%", **BREAK)

    def train() -> None:
        for each in (-x, x, -x):
            batch["x"] = each.clone()
            model(batch).backward()
            model.zero_grad()

    with pytest.warns(PlanWarning, match="its batch was written over"):
        train()


def test_batches_wait_for_a_plan_in_small_numbers() -> None:
    x = X - X.mean() + 0.1
    model = Valued()
    remat.fit(model, -x, budget="1000%", **BREAK)
    kept: list[weakref.ref[torch.Tensor]] = []
    for count in range(10, 18):
        batch = x[:count].clone()
        model(-batch).backward()
        model.zero_grad()
        model(batch).backward()
        model.zero_grad()
        kept.append(weakref.ref(batch))
        del batch
    gc.collect()
    assert sum(each() is not None for each in kept) <= 2


def test_a_way_that_does_not_train_is_told_and_the_next_call_runs() -> None:
    class Leaving(Valued):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.tanh(self.inside(x))
            if x.sum() > 0:
                return x.sum() * 0
            return torch.tanh(in_no_graph(torch.sin)(inner)).pow(2).mean()

    x = X - X.mean() + 0.1
    model = Leaving()
    remat.fit(model, -x, budget="300%", **BREAK)
    model(x)
    with pytest.warns(PlanWarning, match="cannot be planned: the model does not train"):
        model(-x).backward()
    model(-x).backward()


def test_more_ways_than_are_planned_are_told() -> None:
    names = [
        "sin",
        "cos",
        "tanh",
        "sinh",
        "cosh",
        "exp",
        "sigmoid",
        "asinh",
        "atan",
        "erf",
        "expm1",
        "log1p",
    ]
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        partial(often_in_rows, count=8),
        *(getattr(torch, name) for name in names),
        partial(often_in_rows, count=250),
    ]

    class Many(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = torch.sigmoid(self.inside(x))
            inner = in_no_graph(ways[int(x[0, 0])])(inner)
            return torch.tanh(inner).pow(2).mean()

    model, plain = pair(Many)
    batches = [X.clone() for _ in ways]
    for number, batch in enumerate(batches):
        batch[0, 0] = number
    # Of what is in between, the last one makes thirty times as much as the first.
    remat.fit(model, batches[0], budget="105%", **BREAK)

    def train() -> None:
        for batch in batches[1:-1]:
            with suppress(BudgetError):
                model(batch).backward()
            model.zero_grad()

    with pytest.warns(PlanWarning, match="more than 8 ways that were not planned"):
        train()
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert sum(fitted._failed_counts.values()) == len(names)
    for each in (model, plain):
        each.zero_grad()
        each(batches[-1]).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert sum(fitted._failed_counts.values()) == len(names)


def test_a_way_that_planning_does_not_see_again_is_told() -> None:
    class Elsewhere(Drawing):
        by = "elsewhere"

    model = Elsewhere()
    remat.fit(model, X, budget="300%", **BREAK)

    def train() -> None:
        for _ in range(40):
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
