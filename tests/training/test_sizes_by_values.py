"""Graphs whose sizes values decide: experts, masks, crops, numbers from ``.item()``."""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from tests.training.test_regions import WIDTH, X, pair, peak_of_step, trained
from torch import nn

import remat
from remat.capture.varying_sizes import SizeInputs
from remat.core.errors import BudgetError, CaptureError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.planning.regions import growth_bytes
from remat.training.fitted_model import fitted_on
from remat.training.fitted_regions import FittedRegions
from remat.training.region_backend import RegionBackend
from remat.training.region_planning import RegionPlanner, Running

BLOCKS: dict[str, Any] = {"regions": "blocks", "costs": "estimated"}


def part(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, width)
    )


class Experts(nn.Module):
    """Each row goes to the expert that values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(part() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, found = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            made = expert(x[rows]) * weights[rows, number, None]
            found = found.index_add(0, rows, made)
        return found.square().mean()


class Numbers(nn.Module):
    """Blocks on as many rows as a number says that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(part() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            count = int((x[:, number] > 0).sum())
            x = torch.cat([x[:count] + block(x[:count]), x[count:]])
        return x.square().mean()


class Attending(nn.Module):
    """Some rows attend to the others: two sizes in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(part() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            is_first = x[:, number] > 0
            x = self.attend(block, x[is_first], x[~is_first])
        return x.square().mean()

    def attend(
        self, block: nn.Module, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        weights = (x @ y.T / 6).softmax(-1)
        return torch.cat([x + block(weights @ y), y])


class Crop(nn.Module):
    """A head on a part of an image: in backward there are gradients of more of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x.view(1, 1, 64, -1))
        rows, columns = int(x[0, 0]), int(x[0, 1])
        inner = self.heads[0](inner[:, :, :rows, :columns])
        return self.heads[1](inner).square().mean()


def batches_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(X.shape, generator=generator) for _ in range(count)]


def fitted(model: nn.Module) -> FittedRegions:
    found = fitted_on(model)
    assert isinstance(found, FittedRegions)
    return found


def assert_alike(
    model: nn.Module, plain: nn.Module, batches: Sequence[torch.Tensor]
) -> None:
    for one, other in zip(
        trained(model, [*batches]), trained(plain, [*batches]), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "regions"),
    [
        (Experts, "blocks"),
        (Numbers, "blocks"),
        (Attending, "blocks"),
        (Attending, "breaks"),
    ],
)
def test_one_trace_is_for_all_sizes(
    kind: Callable[[], nn.Module], regions: Literal["breaks", "blocks"]
) -> None:
    model, plain = pair(kind)
    plan = remat.fit(model, X, budget="110%", regions=regions, costs="estimated")
    batches = batches_of(24)
    # One trace for what comes first, and one from its second size on, until plans leave
    # what sizes vary by.
    assert_alike(model, plain, batches[:16])
    count = fitted(model).backend.training_step_count
    assert_alike(model, plain, batches[16:])
    assert fitted(model).backend.training_step_count == count
    for batch in batches[::6]:
        assert peak_of_step(model, batch) <= (plan.budget_bytes or 0)


class Mixture(nn.Module):
    """Each part adds to what those before it have made, the first one to zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for number in range(len(self.parts)):
            found = self.added(number, x, found)
        return found.square().mean()

    def added(self, number: int, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        rows = (x[:, number] > 0).nonzero().squeeze(1)
        return found.index_add(0, rows, self.parts[number](x[rows]))


def test_equal_graphs_that_hand_on_other_gradients_are_not_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def batch(count: int) -> torch.Tensor:
        return torch.where(torch.arange(256)[:, None] < count, X.abs(), -X.abs())

    model, plain = pair(Mixture)
    plan = remat.fit(model, batch(20), budget="200%", regions="breaks")
    # That all graphs are traced once more, for all sizes, is not said: it ends there.
    batches = [batch(count) for count in (30, 25, 30, 40)]
    for found, expected in zip(
        trained(model, batches), trained(plain, batches), strict=True
    ):
        assert torch.equal(found, expected)
    assert not any("another way" in each.getMessage() for each in caplog.records)
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    assert fitted.planner.planned_count == 1
    assert peak_of_step(model, batch(20)) <= plan.peak_bytes


class Bags(nn.Module):
    """Means of rows of a table, chosen in a graph without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.part = nn.EmbeddingBag(99, WIDTH, mode="mean"), part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.abs() * 30).long().clamp(0, 98).flatten()[:600]
        rows = rows[rows < int(x[0].abs().sum())]
        begins = torch.arange(0, rows.shape[0], 7)
        return self.part(self.table(rows, begins)).square().mean()


def test_graphs_without_gradients_are_for_all_sizes_too() -> None:
    model, plain = pair(Bags)
    remat.fit(
        model, X, budget="130%", regions="breaks", costs="estimated", accumulate=False
    )
    for each in (model, plain):
        torch.manual_seed(2)
        # Each step adds to gradients, so its kind is planned when sizes vary already.
        for batch in batches_of(5):
            each(batch).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_steps_of_other_sizes_compute_again_what_the_plan_says() -> None:
    model, plain = pair(Experts)
    plan = remat.fit(model, X, budget="85%", **BLOCKS)
    assert plan.recomputed_op_count
    batches = batches_of(6)
    assert_alike(model, plain, batches)
    for batch in batches:
        assert peak_of_step(model, batch) <= (plan.budget_bytes or 0)


def test_plans_leave_what_sizes_vary_by() -> None:
    model, plain = pair(Experts)
    first = remat.fit(model, X, budget="80%", **BLOCKS)
    batches = batches_of(20)
    assert_alike(model, plain, batches[:14])
    latest = fitted(model).steps[-1].plan
    assert latest.budget_bytes == first.budget_bytes
    varied_bytes = first.peak_bytes - latest.peak_bytes
    assert varied_bytes > 0.005 * first.peak_bytes
    assert_alike(model, plain, batches)
    for batch in batches[::5]:
        assert peak_of_step(model, batch) <= (first.budget_bytes or 0)
    assert fitted(model).planner.planned_count <= 6


class Segments(nn.Module):
    """Blocks on parts of a batch, whose gradients are parts of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(part() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int(x[0, 0])
        x = self.first(x)
        found = torch.cat([self.blocks[0](x[:count]), self.blocks[1](x[count:])])
        return torch.zeros_like(x).index_add(0, torch.arange(len(x)), found).sum()


def test_a_block_of_which_several_graphs_have_parts_stays_as_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Running] = []
    end_step = RegionPlanner.end_step

    def noted(self: RegionPlanner) -> Running | None:
        running = end_step(self)
        ran.extend([] if running is None else [running])
        return running

    monkeypatch.setattr(RegionPlanner, "end_step", noted)
    batches = [X.clone() for _ in range(5)]
    for batch, count in zip(batches, (128, 100, 20, 150, 230), strict=True):
        batch[0, 0] = count
    model, replayed_count = Segments(), 0
    budget = remat.fit(model, batches[0], budget="100%", **BLOCKS).peak_bytes
    # There is next to no room, so that each step is replayed.
    remat.fit(model, batches[0], budget=int(1.02 * budget), **BLOCKS)
    for batch in batches[1:]:
        try:
            peak = peak_of_step(model, batch)
        except BudgetError:
            continue
        if ran[-1].unplanned is None:
            graph, schedule = ran[-1].composed.graph, ran[-1].step.schedule
            replay = simulate(graph, single_device(), schedule)
            assert 0.99 * peak < replay.peak_bytes[0] + ran[-1].grown_bytes
            replayed_count += ran[-1].sized_count > 0
    assert replayed_count


def test_gradients_of_what_views_are_parts_of_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide, high = X.clone(), X.clone()
    wide[0, :2], high[0, :2] = torch.tensor([16.0, 48.0]), torch.tensor([48.0, 16.0])
    model = Crop()
    # In backward there are 16 rows of the image, or 48, and all else is of one size.
    budget_bytes = remat.fit(model, wide, budget="100%", **BLOCKS).peak_bytes
    remat.fit(model, wide, budget=budget_bytes, **BLOCKS)
    assert peak_of_step(model, wide) <= budget_bytes
    with caplog.at_level(logging.WARNING, logger="remat"):
        try:
            model(high).backward()
        except BudgetError:
            return
    assert "another way" in caplog.text


def test_where_symbols_cannot_be_traced_each_size_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = RegionBackend.compile

    def refusing(
        self: RegionBackend,
        module: Any,
        inputs: Any,
        specs: Any,
        sizes: SizeInputs | None = None,
    ) -> Any:
        if sizes is not None:
            raise CaptureError("no symbols today")
        return compiled(self, module, inputs, specs)

    monkeypatch.setattr(RegionBackend, "compile", refusing)
    model, plain = pair(Numbers)
    with caplog.at_level(logging.WARNING, logger="remat"):
        remat.fit(model, X, budget="150%", **BLOCKS)
        assert_alike(model, plain, batches_of(5))
    said = [r for r in caplog.messages if "no symbols today" in r]
    assert len(said) == 1
    assert "Each size is traced when it comes" in said[0]


def test_code_for_which_a_size_became_fixed_is_for_that_size_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain = pair(Numbers)
    plan = remat.fit(model, X, budget="150%", **BLOCKS)
    batches = batches_of(5)
    assert_alike(model, plain, batches[:4])
    planner = fitted(model).planner
    # As a fault of ours would, or of torch's, when the trace is long over.
    for code in [*planner.programs]:
        varying = planner.programs[code].varying
        for traced in () if varying is None else varying.inputs.traced:
            if isinstance(traced, torch.SymInt):
                assert int(traced)
    # Of fewer rows it is another kind of step, for which graphs run in other orders.
    planner.request = replace(planner.request, budget=int(0.7 * plan.peak_bytes))
    with caplog.at_level(logging.WARNING, logger="remat"):
        assert_alike(model, plain, [batches[4][:250]])
    latest = fitted(model).steps[-1].plan
    assert latest.recomputed_op_count
    assert "a size became fixed when its trace was over" in caplog.text


def _graph(sizes: Sequence[int], workspaces: Sequence[int]) -> TrainingGraph:
    """Return a chain with a backward pass that reads what forward made."""
    count = len(workspaces) // 2
    storages = [Storage(name=f"s{i}", size_bytes=size) for i, size in enumerate(sizes)]
    ops = [
        Op(
            name=f"{'forward' if i < count else 'backward'}_{i}",
            reads=() if i == 0 else (i - 1, *((2 * count - 1 - i,) * (i > count))),
            writes=(i,),
            cost_ns=(1,),
            workspace_bytes=(workspace,),
            phase=Phase.FORWARD if i < count else Phase.BACKWARD,
        )
        for i, workspace in enumerate(workspaces)
    ]
    return TrainingGraph(
        name="chain",
        storages=tuple(storages),
        ops=tuple(ops),
        forward_outputs=(count - 1,),
        tangents=(),
        final_outputs=(2 * count - 1,),
    )


def test_no_order_grows_by_more_than_the_sum_of_what_grows() -> None:
    numbers = random.Random(1)
    for _ in range(200):
        count = numbers.randint(1, 4)
        graphs = [
            _graph(
                [numbers.randint(0, 50) for _ in range(2 * count)],
                [numbers.randint(0, 50) for _ in range(2 * count)],
            )
            for _ in range(2)
        ]
        peaks: list[int] = []
        for graph in graphs:
            schedule = schedule_from_order(graph, store_all_order(graph))
            peaks.append(simulate(graph, single_device(), schedule).peak_bytes[0])
        known, found = graphs
        grown_bytes = growth_bytes(known, found)
        assert grown_bytes is not None
        assert peaks[1] - peaks[0] <= grown_bytes
        assert growth_bytes(known, known) == 0
    assert growth_bytes(_graph([1, 1], [0, 0]), _graph([1] * 4, [0] * 4)) is None
