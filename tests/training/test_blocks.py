"""Blocks of a model as regions of their own: alike ones are traced and solved once."""

import copy
import gc
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from tests.training.test_regions import pair, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.core.errors import BudgetError, CaptureError, PlanWarning
from remat.planning.plan import Plan
from remat.training import region_planning
from remat.training.blocks import blocks_of
from remat.training.fitted_model import fitted_on
from remat.training.fitted_regions import FittedRegions

WIDTH = 32
X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))
BLOCKS: dict[str, Any] = {"regions": "blocks", "costs": "estimated"}


class Block(nn.Module):
    """A residual block with dropout and a norm that has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        inner = nn.functional.gelu(self.wide(self.norm(x)))
        inner = nn.functional.dropout(inner, 0.2, self.training)
        return x + scale * self.narrow(inner)


class Stack(nn.Module):
    """Blocks in a loop, a branch on values, and a loss."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if logits.sum().isnan():
            logits = torch.nan_to_num(logits)
        return logits.logsumexp(1).mean()


class Shared(nn.Module):
    """One block that is called four times, another one twice at different scales."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.twice = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.often(x)
        return self.twice(self.twice(x, scale=0.5)).pow(2).mean()


def fitted(model: nn.Module) -> FittedRegions:
    found = fitted_on(model)
    assert isinstance(found, FittedRegions)
    return found


@pytest.mark.parametrize("kind", [Stack, Shared])
def test_a_budget_over_blocks_is_kept_bit_for_bit(
    kind: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters())
    report = remat.verify(
        model, X, budget="65%", optimizer=optimizer, repeats=1, regions="blocks"
    )
    assert report.is_exact
    assert report.against_eager == ()
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01


def test_blocks_that_are_alike_are_traced_once_and_run_in_few_orders() -> None:
    model, plain = pair(lambda: Stack(12))
    remat.fit(model, X, budget="60%", **BLOCKS)
    planner = fitted(model).planner
    assert len(planner.programs) == 2  # The first block's input takes no gradient.
    (step,) = fitted(model).steps
    orders = {(choice.code, choice.number) for choice in step.choices}
    assert len(step.choices) == 12
    # How few depends on what operators cost here.
    assert len(orders) <= len(step.choices) // 2
    for one, other in zip(
        trained(model, [X, X + 1]), trained(plain, [X, X + 1]), strict=True
    ):
        assert torch.equal(one, other)


def test_a_blocks_own_output_may_be_the_models() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # With three dimensions, what is returned is a view in its own graph.
            return x + self.narrow(nn.functional.gelu(self.wide(x)))

    model = nn.Sequential(*(Wide() for _ in range(3)))
    x = X.view(16, 16, WIDTH)
    report = remat.verify(
        model, x, budget="65%", loss=lambda y: y.square().mean(), repeats=1, **BLOCKS
    )
    assert report.is_exact
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01


class WithAuxiliary(nn.Module):
    """A loss, an auxiliary one behind blocks of its own, and rows and columns of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.more = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for block in self.blocks:
            x = block(x)
        more = x
        for block in self.more:
            more = block(more)
        return x.square().mean(), more.square().mean(), more.t(), more.view(-1)


DESCRIBED: dict[str, Callable[[Any], torch.Tensor]] = {
    "both": lambda outputs: outputs[0] + 0.1 * outputs[1],
    "the second": lambda outputs: outputs[1],
    "a view": lambda outputs: outputs[0] + outputs[3].abs().mean(),
}


@pytest.mark.parametrize("taken", DESCRIBED)
def test_backward_begins_where_the_described_loss_does(taken: str) -> None:
    how: dict[str, Any] = {"loss": DESCRIBED[taken], "regions": ["blocks.*", "more.*"]}
    report = remat.verify(
        WithAuxiliary(), X, budget="75%", costs="estimated", repeats=1, **how
    )
    assert report.is_exact
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01


def test_what_outputs_keep_that_the_loss_does_not_need_counts() -> None:
    model = WithAuxiliary().eval()  # Without dropout.
    plan = remat.fit(
        model, X, budget="75%", regions=["blocks.*", "more.*"], costs="estimated"
    )

    def step() -> None:
        model.zero_grad()
        outputs = model(X)
        outputs[0].backward()

    measured = remat.measure(step, repeats=0, resident=[model, X])
    assert 0.99 * plan.peak_bytes < measured.peak_bytes <= plan.peak_bytes


def test_a_budget_that_is_too_small_names_one_that_works() -> None:
    model = Stack()
    with pytest.raises(BudgetError) as caught:
        remat.plan(model, X, budget=1, **BLOCKS)
    least = caught.value.required_bytes
    report = remat.verify(model, X, budget=least, repeats=1, **BLOCKS)
    assert report.is_exact
    assert report.is_within_budget
    assert report.plan.peak_bytes <= least


def test_hooks_of_blocks_run_as_ever_also_those_for_backward() -> None:
    seen: list[str] = []
    model, plain = pair(Stack)
    for each in (model, plain):
        block = each.get_submodule("blocks.2")
        block.register_forward_hook(lambda *_: seen.append("forward"))
        block.register_full_backward_hook(lambda *_: seen.append("backward"))
    remat.fit(model, X, budget="70%", **BLOCKS)
    found: list[list[str]] = []
    results: list[list[torch.Tensor]] = []
    for each in (model, plain):
        seen.clear()
        results.append(trained(each, [X, X]))
        found.append(list(seen))
    assert found[0] == found[1] == ["forward", "backward"] * 2
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_calls_leave_the_blocks_as_they_were() -> None:
    class Failing(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if failing:
                raise ZeroDivisionError
            return x

    failing: list[int] = []
    model = Failing()
    before = [dict(vars(module)) for module in model.blocks]
    remat.fit(model, X, budget="70%", **BLOCKS)
    model(X).backward()
    assert [dict(vars(module)) for module in model.blocks] == before

    model.zero_grad()
    failing.append(1)
    with pytest.raises(ZeroDivisionError):
        model(X)
    assert [dict(vars(module)) for module in model.blocks] == before
    failing.clear()
    model(X).backward()


class Short(nn.Linear):
    """A layer that refuses long batches."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        if input.shape[0] > 300:
            raise ValueError("too long")
        return super().forward(input)


@pytest.mark.parametrize("regions", ["blocks", "breaks"])
def test_an_error_of_the_model_spoils_no_later_step(regions: Any) -> None:
    def made() -> nn.Module:
        model = Stack(3)
        for block in model.blocks:
            block.wide = Short(WIDTH, 128)
        return model

    model, plain = pair(made)
    how: dict[str, Any] = {**BLOCKS, "regions": regions}
    remat.fit(model, X, budget="90%", **how)
    with pytest.raises(ValueError, match=r"^too long$"):
        model(torch.cat([X, X]))
    batches = [X, X[:100], X]
    for one, other in zip(
        trained(model, batches), trained(plain, batches), strict=True
    ):
        assert torch.equal(one, other)


def test_a_replaced_forward_of_a_block_runs_also_one_replaced_after_fit() -> None:
    def replace_in(model: nn.Module, factor: float) -> None:
        block = model.get_submodule("blocks.1")
        assert isinstance(block, Block)
        block.forward = lambda x, scale=1.0: x + factor * Block.forward(block, x, scale)

    model, plain = pair(lambda: Stack(3))
    for factor in (0.5, 2.0):
        for each in (model, plain):
            replace_in(each, factor)
        if factor == 0.5:
            remat.fit(model, X, budget="95%", **BLOCKS)
        for one, other in zip(trained(model, [X]), trained(plain, [X]), strict=True):
            assert torch.equal(one, other)


def test_what_is_released_is_gone() -> None:
    model = Stack(2)
    remat.fit(model, X, budget="90%", **BLOCKS)
    model(X).backward()
    remat.release(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Looping(Block):
    """A block that the tracer leaves out: it breaks the graph in a loop."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + scale * torch.tanh(self.wide(x)).mean()
        return x


def test_blocks_without_a_graph_are_told_and_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Stack(4)
    model.blocks[1] = Looping()
    report = remat.verify(
        model, X, budget="85%", repeats=1, regions=["blocks.*"], costs="estimated"
    )
    said = [r.getMessage() for r in caplog.records if "have no graph" in r.getMessage()]
    assert said
    assert "blocks.1" in said[0]
    assert report.is_exact
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01


def test_blocks_that_are_traced_in_vain_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Numbered(Block):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            # The tracer looks at the number, and the graph does not depend on it.
            return super().forward(x, scale) if self.number >= 0 else x

    model = Stack(6)
    for number in range(6):
        model.blocks[number] = Numbered(number)
    caplog.set_level(logging.INFO, "remat")
    remat.fit(model, X, budget="80%", **BLOCKS)
    said = [
        r.getMessage() for r in caplog.records if "equal to others" in r.getMessage()
    ]
    assert len(said) == 1
    assert said[0].startswith("4 graphs")


def test_which_modules_are_blocks() -> None:
    leaves = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    nested = nn.Sequential(
        nn.Sequential(leaves, nn.Tanh()),
        nn.Sequential(copy.deepcopy(leaves), nn.Tanh()),
    )
    assert list(blocks_of(nested)) == ["0", "1"]
    assert list(blocks_of(Stack(3))) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(Shared())) == ["often", "twice"]
    assert list(blocks_of(Stack(3), ["blocks.[12]", "head"])) == [
        "blocks.1",
        "blocks.2",
        "head",
    ]
    chosen = blocks_of(Stack(2), lambda name, _module: "norm" in name)
    assert list(chosen) == ["blocks.0.norm", "blocks.1.norm"]
    layers = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False
    )
    assert list(blocks_of(layers)) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("model", "chosen", "words"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), None, "has no blocks"),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(4, n)) for n in (4, 8))),
            None,
            "has no blocks",
        ),
        (nn.Linear(4, 4), None, "no modules inside"),
        (Stack(2), ["blocks.7"], "'blocks.7', which is no module of Stack"),
        (Stack(2), lambda _name, _module: False, "has no blocks"),
    ],
)
def test_a_model_without_such_blocks_is_refused(
    model: nn.Module, chosen: Any, words: str
) -> None:
    with pytest.raises(CaptureError, match=words):
        blocks_of(model, chosen)


@pytest.mark.parametrize("regions", ["block", 3, [3], b"x"])
def test_what_says_no_blocks_is_refused(regions: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="regions"):
        remat.plan(Stack(2), X, budget="90%", regions=regions)


# --- blocks that run forward again as a whole ----------------------------------------


class Thin(nn.Module):
    """A residual block with little inside, beside what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.relu(self.inner(self.norm(x)))
        return nn.functional.relu(x + nn.functional.dropout(inner, 0.2, self.training))


class Through(nn.Module):
    """Nine of them, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Thin() for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.sum(1).square().mean()


LARGE = X.repeat(8, 1)


class Again(NamedTuple):
    """A model whose blocks run again, a plain one of the same weights, its plan."""

    model: nn.Module
    plain: nn.Module
    plan: Plan
    kept_bytes: int


@pytest.fixture(scope="module")
def again() -> Again:
    model, plain = pair(Through)
    with pytest.raises(BudgetError) as caught:
        remat.plan(model, LARGE, budget=1, **BLOCKS)
    assert "run forward again as a whole" in str(caught.value)
    before = caught.value.__context__
    assert isinstance(before, BudgetError)
    plan = remat.fit(model, LARGE, budget=caught.value.required_bytes, **BLOCKS)
    return Again(model, plain, plan, before.required_bytes)


def test_blocks_run_again_as_a_whole_below_what_they_hand_over(again: Again) -> None:
    """Their draws are repeated, their statistics move once, each keeps its output."""
    model, plain, plan, kept_bytes = again
    assert plan.peak_bytes < 0.95 * kept_bytes
    for one, other in zip(
        trained(model, [LARGE, LARGE + 1]),
        trained(plain, [LARGE, LARGE + 1]),
        strict=True,
    ):
        assert torch.equal(one, other)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)

    def step() -> None:
        model.zero_grad()
        model(LARGE).backward()

    measured = remat.measure(step, repeats=0, resident=[model, LARGE])
    model.zero_grad()
    assert 0.99 * plan.peak_bytes < measured.peak_bytes <= plan.peak_bytes


def test_backward_runs_also_when_the_model_is_gone(again: Again) -> None:
    found: list[torch.Tensor] = []
    for is_fitted in (True, False):
        model, x = copy.deepcopy(again.plain), LARGE.clone().requires_grad_()
        if is_fitted:
            try:
                remat.fit(model, x, budget=again.plan.budget_bytes, **BLOCKS)
            except BudgetError as error:  # The input's gradient takes more.
                remat.fit(model, x, budget=error.required_bytes, **BLOCKS)
        torch.manual_seed(3)
        loss, known = model(x), weakref.ref(model)
        del model
        gc.collect()
        assert known() is None
        loss.backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


def test_all_searches_for_a_step_share_one_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes all that it is given, those of regions and of what runs again."""
    taken_s: list[float] = []
    names = ["plan_graph", "plan_with_reruns"]
    searched: list[str] = []

    def using_it_up(name: str, search: Callable[..., Plan]) -> Callable[..., Plan]:
        def found(*args: Any, **options: Any) -> Plan:
            limits = options.get("limits")
            given_s = options["time_limit"] if limits is None else limits.remaining_s
            searched.append(name)
            taken_s.append(given_s)
            time.sleep(given_s)
            return search(*args, **options)

        return found

    for name in names:
        searching = using_it_up(name, getattr(region_planning, name))
        monkeypatch.setattr(region_planning, name, searching)
    with pytest.raises(BudgetError):
        remat.plan(Through(), LARGE, budget=1, time_limit=0.5, **BLOCKS)
    # What the first one's error knows is not searched for again.
    assert searched == names
    assert 0.3 < sum(taken_s) < 0.51


# What the hooks keep is more than was planned.
@pytest.mark.filterwarnings(
    "ignore:.*more were allocated:remat.core.errors.PlanWarning"
)
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.filterwarnings("ignore:.*with retain_graph=True")
def test_what_is_made_again_is_made_for_each_backward_pass(
    again: Again, others: bool
) -> None:
    """Under other hooks for saved tensors it is kept."""
    around = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
    found: list[list[torch.Tensor]] = []
    for module in (again.model, again.plain):
        torch.manual_seed(3)
        with around if others else nullcontext():
            loss = module(LARGE)
        loss.backward(retain_graph=True)
        loss.backward()
        gradients = [p.grad for p in module.parameters()]
        found.append([g for g in gradients if g is not None])
        module.zero_grad()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Moving(nn.Module):
    """Blocks around which something is written in place, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Reading() for _ in range(9))
        self.register_buffer("time", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inner = block(x, self.time)
            if self.how == "output of a block":
                inner += x
            elif self.how == "output of a block, without gradients":
                with torch.no_grad():
                    inner += x
            x = inner
        if self.how == "buffer, in place":
            self.time += 0.5
        elif self.how == "buffer, replaced":
            self.time = self.time + 0.5
        return x.sum(1).square().mean()


class Reading(nn.Module):
    """A block that keeps nothing but its input, and adds what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x)) + time


def at_the_smallest(how: str) -> tuple[Any, Any, Plan]:
    model, plain = pair(lambda: Moving(how))
    options: dict[str, Any] = {"regions": "blocks", "costs": "estimated"}
    with pytest.raises(BudgetError) as caught:
        remat.plan(model, LARGE, budget=1, **options)
    budget = caught.value.required_bytes
    return model, plain, remat.fit(model, LARGE, budget=budget, **options)


@pytest.mark.parametrize(
    "how", ["output of a block", "buffer, in place", "buffer, replaced"]
)
def test_what_is_written_in_place_beside_blocks_is_not_made_again(how: str) -> None:
    model, plain, _ = at_the_smallest(how)
    found: list[list[torch.Tensor]] = []
    for each in (model, plain):
        each(LARGE).backward()
        found.append([p.grad for p in each.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(
            one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max())
        )


def test_a_write_in_place_that_planning_did_not_see_is_right_and_told() -> None:
    model, plain, _ = at_the_smallest("never")
    for each in (model, plain):
        each.how = "output of a block, without gradients"
    with pytest.warns(PlanWarning, match=r"of shape .* was written in"):
        loss = model(LARGE)
    loss.backward()
    plain(LARGE).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        most = float(other.grad.abs().max())
        assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-6 * most)


def test_a_write_in_place_that_autograd_records_is_another_way() -> None:
    model, _, _ = at_the_smallest("never")
    model(LARGE).backward()
    model.zero_grad()
    model.how = "output of a block"
    with pytest.raises(BudgetError, match="or what runs before it, was not there"):
        model(LARGE)


def test_what_blocks_read_that_run_again_may_not_change_before_backward() -> None:
    model, _, plan = at_the_smallest("never")
    assert "run forward again" in str(plan) or plan.recomputed_op_count
    loss = model(LARGE)
    model.get_buffer("time").add_(0.5)
    with pytest.raises(remat.RematError, match="was changed in place between"):
        loss.backward()


class Handing(nn.Module):
    """Blocks, and the output of one of them, or a loss of it besides its followers'."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Adding() for _ in range(12))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = x = self.first(x)
        for block in self.blocks[:6]:
            middle = x = block(x)
        if self.detached:
            x = x.detach()
            middle = middle.sum(1).square().mean()
        for block in self.blocks[6:]:
            x = block(x)
        return x.sum(1).square().mean(), middle


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


def handing_at_the_smallest(**options: Any) -> Handing:
    model = Handing(detached="loss" in options)
    how: dict[str, Any] = {**BLOCKS, **options}
    with pytest.raises(BudgetError) as caught:
        remat.plan(model, LARGE, budget=1, **how)
    remat.fit(model, LARGE, budget=caught.value.required_bytes, **how)
    return model


def test_an_output_that_changes_before_gradients_of_some_is_told() -> None:
    model = handing_at_the_smallest()
    loss, middle = model(LARGE)
    with torch.no_grad():
        middle.mul_(3)
    with pytest.raises(remat.RematError, match="was changed in place between"):
        torch.autograd.grad(loss, list(model.blocks[8].parameters()))


def test_backward_passes_in_an_order_that_does_not_work_are_told_the_one_that_does() -> (
    None
):
    model = handing_at_the_smallest(loss=sum)
    loss, aside = model(LARGE)
    aside.backward()
    with pytest.raises(remat.RematError, match="first for those of later blocks"):
        loss.backward()
    model.zero_grad()
    loss, aside = model(LARGE)
    loss.backward()
    aside.backward()


def test_blocks_in_checkpoints_of_their_own_run_as_they_are_and_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # A batch norm's statistics would move again while backward is measured.
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
                for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
            return x.square().mean()

    model, plain = pair(Checkpointed)
    with caplog.at_level(logging.WARNING, logger="remat"):
        remat.fit(model, X, budget="95%", **BLOCKS)
    assert "2 blocks of Checkpointed are called inside of" in caplog.text
    for one, other in zip(trained(model, [X]), trained(plain, [X]), strict=True):
        assert torch.equal(one, other)


class AllCheckpointed(nn.Module):
    """Blocks that are called in checkpoints, once that is turned on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.is_checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.is_checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.square().mean()


def test_checkpoints_around_all_blocks_are_named_as_the_cause() -> None:
    model = AllCheckpointed()
    vars(model)["is_checkpointed"] = True
    with pytest.raises(
        CaptureError, match=r"4 blocks .*checkpoint, .*Leave the checkp"
    ):
        remat.fit(model, X, budget="100%", **BLOCKS)
    vars(model)["is_checkpointed"] = False
    remat.fit(model, X, budget="100%", **BLOCKS)
    vars(model)["is_checkpointed"] = True
    trained(model, [X])
    with pytest.warns(PlanWarning, match=r"4 blocks .*checkpoint, .*Leave the checkp"):
        trained(model, [X])
