"""Deep models are planned block by block by themselves, where their blocks keep it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.garbage import holds_its_callers
from tests.training.test_regions import pair, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.capture.gathering import Gathering
from remat.core.errors import BudgetError, CaptureError
from remat.training.blocks import is_deep
from remat.training.fitted_model import FittedModel, fitted_on
from remat.training.fitting import fit_at_first_batch
from remat.training.request import PlanRequest

WIDTH = 16
X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
LARGER = torch.cat([X, X + 1])
QUICK: dict[str, Any] = {"costs": "estimated"}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


class Deep(nn.Module):
    """Equal blocks, and behind them what a plan of the whole may compute again."""

    def __init__(self, depth: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        for _ in range(4):
            logits = nn.functional.gelu(logits)
        return logits.logsumexp(1).mean()


def installed(model: nn.Module) -> FittedModel:
    found = fitted_on(model)
    assert found is not None
    return found


def least_bytes(x: torch.Tensor, regions: Any) -> int:
    """Return the smallest known budget of a step."""
    with pytest.raises(BudgetError) as caught:
        remat.plan(Deep(), x, budget=1, regions=regions, **QUICK)
    return caught.value.required_bytes


@pytest.fixture(scope="module")
def only_whole_bytes() -> int:
    """Return a budget that blocks cannot keep for the larger batch, one graph can."""
    by_blocks, whole = least_bytes(LARGER, "blocks"), least_bytes(LARGER, "whole")
    assert whole < by_blocks
    return (whole + by_blocks) // 2


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_deep_model_is_planned_block_by_block_and_its_plan_says_so() -> None:
    model, plain = pair(Deep)
    plan = remat.fit(model, X, budget="80%", **QUICK)
    assert installed(model).regions == "blocks"
    assert "24, 2 of them distinct: its blocks, as the model is deep" in str(plan)
    assert_equal(trained(model, [X, X + 1]), trained(plain, [X, X + 1]))
    assert plan.fingerprint == remat.plan(Deep(), X, budget="80%", **QUICK).fingerprint


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        (23, {}),
        (24, {"regions": "whole"}),
        (24, {"dynamic": {0: {0: (32, 64)}}}),
    ],
)
def test_what_is_not_deep_or_takes_one_graph_is_planned_as_one(
    depth: int, options: dict[str, Any]
) -> None:
    model = Deep(depth)
    plan = remat.fit(model, X, budget="80%", **QUICK, **options)
    assert installed(model).regions == "whole"
    assert "graphs" not in str(plan)


def test_deep_are_many_blocks_of_few_kinds() -> None:
    def stack(*widths: int) -> nn.Module:
        return nn.Sequential(*map(Block, widths))

    assert is_deep(stack(*[8] * 24))
    assert not is_deep(stack(*[8] * 23))
    assert is_deep(stack(8, 12, *[16] * 22))
    assert not is_deep(stack(4, 8, 12, *[16] * 20, 24))
    assert not is_deep(nn.Linear(2, 2))


def test_what_blocks_cannot_keep_is_planned_as_one_graph_and_said(
    only_whole_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "remat"):
        report = remat.verify(
            Deep(), LARGER, budget=only_whole_bytes, repeats=1, **QUICK
        )
    assert "planned as one graph" in caplog.text
    assert report.is_exact
    assert report.is_within_budget
    assert "graphs" not in str(report.plan)


def test_a_loop_whose_first_step_blocks_cannot_keep_is_planned_as_one_graph(
    only_whole_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = pair(Deep)
    fit_at_first_batch(model, budget=only_whole_bytes, **QUICK)
    with caplog.at_level(logging.WARNING, "remat"):
        mine = trained(model, [LARGER, LARGER])
    assert "planned as one graph" in caplog.text
    assert installed(model).regions == "whole"
    assert_equal(mine, trained(plain, [LARGER, LARGER]))


def test_what_blocks_could_not_keep_holds_no_value_of_the_callers(
    only_whole_bytes: int,
) -> None:
    assert not holds_its_callers(
        lambda: remat.fit(Deep(), LARGER, budget=only_whole_bytes, **QUICK)
    )


def test_a_later_step_that_blocks_cannot_keep_is_planned_as_one_graph(
    only_whole_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = pair(Deep)
    remat.fit(model, X, budget=only_whole_bytes, **QUICK)
    assert installed(model).regions == "blocks"
    with caplog.at_level(logging.WARNING, "remat"):
        mine = trained(model, [X, LARGER, X])
    assert "planned as one graph" in caplog.text
    assert installed(model).regions == "whole"
    assert installed(model).latest_plan().budget_bytes == only_whole_bytes
    assert_equal(mine, trained(plain, [X, LARGER, X]))
    remat.release(model)
    assert "forward" not in vars(model)


def test_the_smaller_of_both_smallest_budgets_is_named() -> None:
    least = least_bytes(X, "whole")
    assert least_bytes(X, "auto") == least < least_bytes(X, "blocks")
    assert remat.plan(Deep(), X, budget=least, **QUICK).peak_bytes <= least


def test_saved_plans_of_either_kind_are_installed(tmp_path: Path) -> None:
    for regions in ("whole", "blocks"):
        model, plain = pair(Deep)
        plan = remat.plan(model, X, budget="90%", regions=regions, **QUICK)
        plan.save(tmp_path / "plan.json")
        remat.fit(model, X, plan=remat.load_plan(tmp_path / "plan.json"))
        assert installed(model).regions == regions
        assert_equal(trained(model, [X]), trained(plain, [X]))


def test_a_deep_model_on_the_meta_device_is_planned_as_one_graph() -> None:
    with torch.device("meta"):
        model, x = Deep(), torch.empty(64, WIDTH)
    assert "graphs" not in str(remat.plan(model, x, budget="80%", **QUICK))


def test_a_described_loss_counts_for_a_deep_model() -> None:
    class Outputs(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.exp().mean()

    report = remat.verify(Outputs(), X, budget="70%", loss=loss, repeats=1, **QUICK)
    assert "its blocks" in str(report.plan)
    assert report.is_exact
    assert report.is_within_budget


def test_an_error_of_the_model_is_that_of_one_graph() -> None:
    class Failing(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x).detach()

    with pytest.raises(CaptureError) as mine:
        remat.fit(Failing(), X, budget="70%", **QUICK)
    with pytest.raises(CaptureError) as whole:
        remat.fit(Failing(), X, budget="70%", regions="whole", **QUICK)
    assert str(mine.value) == str(whole.value)


@pytest.fixture
def run_again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each region of each forward pass for planning had to run."""
    found: list[bool] = []
    known_values = Gathering.known_values

    def noted(gathering: Gathering) -> Any:
        values = known_values(gathering)
        found.append(values is None)
        return values

    monkeypatch.setattr(Gathering, "known_values", noted)
    return found


def test_blocks_run_once_for_planning_and_the_plan_is_the_same(
    run_again: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = remat.plan(Deep(), X, budget="80%", **QUICK)
    assert run_again == [True] * 24 + [False] * 24
    monkeypatch.setattr(Gathering, "known_values", lambda _: None)
    other = remat.plan(Deep(), X, budget="80%", **QUICK)
    assert plan.graph.storages == other.graph.storages
    assert plan.graph.ops == other.graph.ops


@pytest.mark.parametrize(
    ("rows", "dropout", "expected"),
    [
        # 24 outputs of 512 rows of 16 numbers, where gradients are 55,424 numbers.
        (512, 0.0, [True] * 24 + [False] * 6 + [True] * 18),
        (64, 0.1, [True] * 48),
    ],
)
def test_for_planning_no_more_is_kept_than_gradients_take_and_random_draws_are_made(
    run_again: list[bool], rows: int, dropout: float, expected: list[bool]
) -> None:
    class Dropped(Deep):
        def __init__(self) -> None:
            super().__init__()
            for index, block in enumerate(self.blocks):
                self.blocks[index] = DroppedBlock(block)

    class DroppedBlock(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.block(x), dropout, self.training)

    model = Dropped() if dropout else Deep()
    remat.plan(model, torch.ones(rows, WIDTH), budget="100%", **QUICK)
    assert run_again == expected


class AttentiveBlock(nn.Module):
    """A block of an operator that may draw random numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inner(x).view(1, 2, -1, WIDTH // 2)
        mixed = nn.functional.scaled_dot_product_attention(
            heads, heads, heads, dropout_p=self.dropout
        )
        return x + mixed.reshape(x.shape)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_that_may_draw_run_again_for_planning_if_they_do(
    run_again: list[bool], dropout: float
) -> None:
    model = Deep()
    model.blocks = nn.ModuleList(AttentiveBlock(dropout) for _ in range(24))
    plan = remat.plan(model, X[:8], budget="100%", **QUICK)
    assert any(op.is_ordered for op in plan.graph.ops)
    assert run_again == [True] * 24 + [dropout > 0] * 24


class Checkpointed(Deep):
    """Blocks inside of checkpoints, which can be turned on."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoints: Any = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpoints:
                is_reentrant = self.checkpoints == "reentrant"
                x = checkpoint(block, x, use_reentrant=is_reentrant)
            else:
                x = block(x)
        return self.head(x).logsumexp(1).mean()


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_blocks_in_checkpoints_of_the_model_are_left_to_one_graph(kind: str) -> None:
    model, plain = pair(Checkpointed)
    x = X.clone().requires_grad_()
    vars(model)["checkpoints"] = vars(plain)["checkpoints"] = kind
    remat.fit(model, x, budget="90%", **QUICK)
    assert installed(model).regions == "whole"
    assert_equal(trained(model, [x]), trained(plain, [x]))


def test_checkpoints_that_are_turned_on_after_fit_have_another_plan() -> None:
    model, plain = pair(Checkpointed)
    remat.fit(model, X, budget="90%", **QUICK)
    assert installed(model).regions == "blocks"
    vars(model)["checkpoints"] = vars(plain)["checkpoints"] = True
    assert_equal(trained(model, [X, X]), trained(plain, [X, X]))
    assert installed(model).regions == "whole"


def test_what_takes_one_graph_may_not_be_split() -> None:
    assert PlanRequest(budget=1).may_be_split
    assert not PlanRequest(budget=1, kernels="fused").may_be_split
    assert not PlanRequest(budget={"cpu": 1, "host": 1}).may_be_split
    assert not PlanRequest(budget=1, dynamic={"x": {0: (2, 4)}}).may_be_split
