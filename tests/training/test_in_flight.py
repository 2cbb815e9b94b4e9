"""Several calls before a backward pass: planned where said, noticed where not."""

import gc
import warnings
from typing import Any

import pytest
import torch
from tests.training.test_regions import pair
from torch import nn

import remat
from remat.core.errors import BudgetError, PlanWarning
from remat.profile.memory import measure
from remat.training.fitted_model import fitted_on

WIDTH, ROWS = 32, 96
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
BATCHES = [X, X + 1, X - 1]
QUICK: dict[str, Any] = {"costs": "estimated"}


class Scored(nn.Module):
    """Layers and a dropout, with a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 128),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(128, 128),
            nn.GELU(),
            nn.Linear(128, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train on all batches: all forward passes, then the backward passes in order."""
    losses = [model(batch) for batch in BATCHES]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach() for loss in losses]


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, nn.Module, remat.Plan]:
    """A fitted model, an equal plain one, and the plan for three passes in flight."""
    model, plain = pair(Scored)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = remat.fit(model, X, budget="65%", in_flight=3, optimizer=optimizer, **QUICK)
    return model, plain, plan


def test_passes_in_flight_keep_the_budget_bit_for_bit(
    planned: tuple[nn.Module, nn.Module, remat.Plan],
) -> None:
    model, plain, plan = planned
    assert plan.in_flight == 3
    assert plan.recomputed_op_count > 0
    found: list[list[torch.Tensor]] = []
    peaks: list[int] = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters())
        torch.manual_seed(1)
        losses = step(each, optimizer) + step(each, optimizer)
        found.append([*losses, *(p.detach().clone() for p in each.parameters())])
        resident = [each, BATCHES, optimizer]
        peaks.append(
            measure(
                lambda each=each, optimizer=optimizer: step(each, optimizer),
                warmup=1,
                repeats=0,
                resident=resident,
            ).peak_bytes
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert peaks[0] <= (plan.budget_bytes or 0)
    assert plan.peak_bytes == pytest.approx(peaks[0], rel=0.01)
    assert plan.baseline_peak_bytes == pytest.approx(peaks[1], rel=0.01)


def test_a_saved_plan_knows_how_many_are_in_flight(
    planned: tuple[nn.Module, nn.Module, remat.Plan], tmp_path: Any
) -> None:
    _, plain, plan = planned
    plan.save(tmp_path / "plan.json")
    optimizer = torch.optim.AdamW(plain.parameters())
    loaded = remat.load_plan(tmp_path / "plan.json")
    installed = remat.fit(plain, X, plan=loaded, optimizer=optimizer)
    assert installed.in_flight == 3
    assert installed.peak_bytes == plan.peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        step(plain, optimizer)
    with pytest.raises(ValueError, match="the plan is for 3"):
        remat.fit(plain, X, plan=loaded, in_flight=2)
    remat.release(plain)


def test_passes_that_no_plan_counts_are_told_once() -> None:
    model, _ = pair(Scored)
    remat.fit(model, X, budget="90%", **QUICK)

    def train(rows: int = ROWS) -> None:
        losses = [model(batch[:rows]) for batch in BATCHES[:2]]
        torch.stack(losses).sum().backward()
        model.zero_grad()

    with pytest.warns(PlanWarning, match=r"2 forward passes .* in_flight=2"):
        train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        train()
        # Nor where another size needs other bytes.
        train(ROWS - 8)


def test_passes_one_after_the_other_are_none_in_flight() -> None:
    model, _ = pair(Scored)
    remat.fit(model, X, budget="90%", **QUICK)
    fitted = fitted_on(model)
    assert fitted is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        warnings.filterwarnings("ignore", ".*with retain_graph=True")
        loss = model(X)
        for batch in BATCHES:
            loss.backward(retain_graph=True)
            model.zero_grad()
            # The loss of the pass before is there still while this one runs.
            loss = model(batch)
        assert len(fitted.in_flight) == 1
        # Nobody calls its backward any more.
        del loss
        model(X)
        gc.collect()
        assert len(fitted.in_flight) == 0
        model(X).backward()
        assert len(fitted.in_flight) == 0


def test_passes_that_fit_all_the_same_are_not_told() -> None:
    model, _ = pair(Scored)
    remat.fit(model, X, budget="1 GiB", **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        torch.stack([model(batch) for batch in BATCHES]).sum().backward()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"in_flight": 0}, ValueError, "at least 1"),
        ({"in_flight": 2.0}, TypeError, "at least 1"),
        ({"in_flight": True}, TypeError, "at least 1"),
        ({"in_flight": 2, "regions": "blocks"}, ValueError, "one graph"),
        ({"in_flight": 2, "budget": {"cpu": 1, "cpu:1": 1}}, ValueError, "one device"),
    ],
)
def test_what_cannot_be_in_flight_is_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {"budget": "1 GiB", **options}
    with pytest.raises(error, match=words):
        remat.plan(Scored(), X, **given)


def steady(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train as a pipeline does: a backward pass after each but two forward passes."""
    losses: list[torch.Tensor] = []
    waiting: list[torch.Tensor] = []
    for batch in [*BATCHES, *BATCHES]:
        waiting.append(model(batch))
        if len(waiting) == 3:
            loss = waiting.pop(0)
            loss.backward()
            losses.append(loss.detach())
    for loss in waiting:
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def test_passes_before_and_after_there_are_gradients_keep_one_budget() -> None:
    model, plain = pair(Scored)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    plan = remat.fit(
        model,
        X,
        budget="75%",
        in_flight=3,
        accumulate=True,
        optimizer=optimizers[0],
        **QUICK,
    )
    fitted = fitted_on(model)
    assert fitted is not None
    found: list[list[torch.Tensor]] = []
    peaks: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            torch.manual_seed(1)
            losses = steady(each, optimizer) + steady(each, optimizer)
            found.append([*losses, *(p.detach().clone() for p in each.parameters())])
            peaks.append(
                measure(
                    lambda each=each, optimizer=optimizer: steady(each, optimizer),
                    warmup=1,
                    repeats=0,
                    resident=[each, BATCHES, optimizer],
                ).peak_bytes
            )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    # One schedule for passes that begin before there are gradients and after.
    assert len({each.schedule for each in fitted.planner.plans.values()}) == 1
    assert plan.recomputed_op_count > 0
    assert peaks[0] <= (plan.budget_bytes or 0) < peaks[1]


def test_passes_in_flight_by_plans_that_differ_are_told() -> None:
    model, _ = pair(Scored)
    optimizer = torch.optim.AdamW(model.parameters())
    remat.fit(model, X, budget="75%", in_flight=3, optimizer=optimizer, **QUICK)
    with pytest.warns(PlanWarning, match=r"in_flight=3, accumulate=True"):
        steady(model, optimizer)


def test_passes_of_sizes_that_differ_share_the_plan_of_the_largest() -> None:
    model, plain = pair(Scored)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    how: dict[str, Any] = {"in_flight": 2, "dynamic": {"x": {0: (2, ROWS)}}, **QUICK}
    plan = remat.fit(model, X, budget="78%", optimizer=optimizers[0], **how)
    assert plan.recomputed_op_count > 0
    fitted = fitted_on(model)
    assert fitted is not None

    def train(
        each: nn.Module, optimizer: torch.optim.Optimizer, rows: tuple[int, int]
    ) -> torch.Tensor:
        torch.manual_seed(1)
        losses = torch.stack([each(X[:count]) for count in rows])
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach()

    peaks: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for rows in ((ROWS, ROWS), (7, ROWS), (ROWS, 2), (33, 50)):
            pairs = zip((model, plain), optimizers, strict=True)
            assert torch.equal(*(train(*both, rows) for both in pairs))
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one, other)
            peaks.append(
                measure(
                    lambda rows=rows: train(model, optimizers[0], rows),
                    warmup=0,
                    repeats=0,
                    resident=[model, X, optimizers[0]],
                ).peak_bytes
            )
            train(plain, optimizers[1], rows)
    assert max(peaks) <= (plan.budget_bytes or 0)
    assert fitted.planner.planned_count == 1


def test_one_loss_of_all_passes_makes_all_gradients_of_outputs_at_once() -> None:
    """Fewer passes were planned than run in the end, which is told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(512, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    how: dict[str, Any] = {
        "in_flight": 3,
        "optimizer": optimizer,
        "loss": lambda outputs: outputs.square().sum(),
        **QUICK,
    }
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, x, budget=1, **how)
    plan = remat.fit(model, x, budget=caught.value.required_bytes, **how)
    batches = [x, x + 1, x - 1, x + 2]

    def train(count: int = 3) -> None:
        outputs = [model(batch) for batch in batches[:count]]
        torch.stack([each.square().sum() for each in outputs]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        train()
        resident = [model, batches[:3], optimizer]
        measured = measure(train, warmup=1, repeats=0, resident=resident)
    assert measured.peak_bytes <= plan.peak_bytes <= 1.01 * measured.peak_bytes
    with pytest.warns(PlanWarning, match=r"4 forward passes .* in_flight=4"):
        train(4)
