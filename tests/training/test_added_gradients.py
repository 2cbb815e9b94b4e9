"""A step that adds to gradients needs no second set of them."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat
from remat.core.errors import PlanWarning
from remat.core.gradient_pieces import ADDING
from remat.training.fitted_model import FittedModel
from remat.training.verification import compare

WIDTH = 512
X, TARGETS = torch.randn(64, WIDTH), torch.randint(0, 10, (64,))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A model with more bytes of weights than of activations."""

    def __init__(self, *, is_broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_broken = is_broken
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(x)
        if self.is_broken:
            torch._dynamo.graph_break()
        return self.head(hidden)


def loss(outputs: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, TARGETS)


def clear(model: nn.Module) -> None:
    model.zero_grad()


def zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def passes(
    model: nn.Module, count: int = 3, cleared: Callable[[nn.Module], None] = clear
) -> dict[str, torch.Tensor]:
    """Return the gradients that some backward passes add up."""
    cleared(model)
    torch.manual_seed(1)
    for _ in range(count):
        loss(model(X)).backward()
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return those that exist."""
    named = model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def peak_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    return remat.measure(step, repeats=0, resident=[model, X, TARGETS]).peak_bytes


def plans_of(model: nn.Module) -> list[remat.Plan]:
    fitted = model._compiled_call_impl
    assert isinstance(fitted, FittedModel)
    return list(fitted.planner.plans.values())


def named_bytes(model: nn.Module, **how: Any) -> int:
    with pytest.raises(remat.BudgetError) as caught:
        remat.fit(model, X, budget=1, loss=loss, **how)
    return caught.value.required_bytes


@pytest.fixture(autouse=True)
def quiet_random() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("regions", ["whole", "blocks", "breaks"])
@pytest.mark.parametrize("exist", [False, True], ids=["to come", "there"])
def test_the_smallest_budget_is_below_the_peak_of_plain_passes(
    regions: str, *, exist: bool
) -> None:
    plain, model = Net(), Net(is_broken=regions == "breaks")
    if exist:
        passes(model, 1)
    budget = named_bytes(model, accumulate=True, regions=regions)
    assert budget < peak_bytes(plain, lambda: passes(plain))
    remat.fit(model, X, budget=budget, loss=loss, accumulate=True, regions=regions)
    expected, found = passes(plain), passes(model)
    assert not compare(expected, found)
    peak = peak_bytes(model, lambda: passes(model))
    predicted = max(plan.peak_bytes for plan in plans_of(model))
    assert peak <= predicted <= budget
    assert predicted <= 1.01 * peak


@pytest.mark.parametrize("cleared", [clear, zero])
def test_gradients_that_are_zeroed_are_added_to(
    cleared: Callable[[nn.Module], None],
) -> None:
    plain, model = Net(), Net()
    passes(plain, 1)
    passes(model, 1)
    budget = named_bytes(model)
    remat.fit(model, X, budget=budget, loss=loss)
    expected, found = (passes(net, 1, cleared) for net in (plain, model))
    assert not compare(expected, found)
    assert peak_bytes(model, lambda: passes(model, 1, cleared)) <= budget
    assert any(ADDING in [op.name for op in plan.graph.ops] for plan in plans_of(model))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.filterwarnings("ignore:.*with retain_graph=True")
def test_a_backward_pass_that_is_retained_adds_the_same_again(count: int) -> None:
    model = Net()
    passes(model, 1)
    remat.fit(model, X, budget="100%", loss=loss)
    clear(model)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    value = loss(model(X))
    for number in range(count):
        value.backward(retain_graph=number + 1 < count)
    expected = {name: count * each for name, each in passes(Net(), 1).items()}
    assert not compare(expected, gradients(model))


def test_gradients_that_are_taken_and_not_added_are_right_and_told() -> None:
    plain, model = Net(), Net()
    passes(plain, 1)
    passes(model, 1)
    remat.fit(model, X, budget="100%", loss=loss)
    found: list[torch.Tensor] = []
    for net in (plain, model):
        torch.manual_seed(2)
        weight = net.get_parameter("blocks.1.up.weight")
        found += torch.autograd.grad(loss(net(X)), [weight])
    assert torch.equal(*found)
    with pytest.warns(PlanWarning, match="others were taken"):
        loss(model(X)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        loss(model(X)).backward()


@pytest.mark.filterwarnings("ignore:.*with retain_graph=True")
def test_gradients_that_are_taken_before_others_are_added_are_told() -> None:
    model = Net()
    passes(model, 1)
    remat.fit(model, X, budget="200%", loss=loss)
    value = loss(model(X))
    weight = model.get_parameter("blocks.1.up.weight")
    torch.autograd.grad(value, [weight], retain_graph=True)
    with pytest.warns(PlanWarning, match="others were taken"):
        value.backward()


def test_a_gradient_in_the_place_of_one_that_is_gone_is_no_sign_of_that() -> None:
    model = Net()
    remat.fit(model, X, budget="200%", loss=loss, accumulate=True)
    # The second pass begins each time with a gradient that was never written to.
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for _ in range(4):
            passes(model, 2)


@pytest.mark.parametrize("regions", ["whole", "blocks", "breaks"])
@pytest.mark.parametrize("every", [2, 3])
def test_only_some_parameters_may_have_gradients(regions: str, every: int) -> None:
    plain, model = Net(), Net(is_broken=regions == "breaks")
    for net in (plain, model):
        for parameter in list(net.parameters())[::every]:
            parameter.grad = torch.ones_like(parameter)
    budget = named_bytes(model, regions=regions)
    remat.fit(model, X, budget=budget, loss=loss, regions=regions)

    def step(net: nn.Module) -> None:
        for position, parameter in enumerate(net.parameters()):
            parameter.grad = None
            if position % every == 0:
                parameter.grad = torch.ones_like(parameter)
        torch.manual_seed(1)
        loss(net(X)).backward()

    step(plain)
    step(model)
    assert not compare(gradients(plain), gradients(model))
    assert peak_bytes(model, lambda: step(model)) <= budget


def test_an_input_that_takes_a_gradient_gets_it() -> None:
    found: list[torch.Tensor] = []
    for is_fitted in (False, True):
        model, x = Net(), X.clone().requires_grad_()
        passes(model, 1)
        if is_fitted:
            remat.fit(model, x, budget="100%", loss=loss)
        torch.manual_seed(1)
        loss(model(x)).backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("share", [1.0, 1.12])
@pytest.mark.parametrize("bias", [False, True])
def test_each_parameter_gets_its_own_under_autocast(
    share: float, *, bias: bool
) -> None:
    def narrow() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(600, 600, bias=bias) for _ in range(7)))

    x, found = torch.randn(64, 600), list[list[torch.Tensor]]()
    for is_fitted in (False, True):
        model = narrow()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with torch.autocast("cpu", torch.bfloat16):
            if is_fitted:
                with pytest.raises(remat.BudgetError) as caught:
                    remat.fit(model, x, budget=1)
                remat.fit(model, x, budget=int(share * caught.value.required_bytes))
            value = model(x).float().square().mean()
        value.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) == (14 if bias else 7)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("before", [True, False])
def test_optimizers_that_step_in_backward_change_nothing_too_early(
    *, before: bool
) -> None:
    def step_in_backward(model: nn.Module) -> None:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(parameter: torch.Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

            parameter.register_post_accumulate_grad_hook(step)

    found: list[list[torch.Tensor]] = []
    for is_fitted in (False, True):
        model = Net()
        passes(model, 1)
        model.zero_grad(set_to_none=False)
        if before or not is_fitted:
            step_in_backward(model)
        if is_fitted:
            budget = named_bytes(model)
            remat.fit(model, X, budget=budget, loss=loss)
            if not before:
                step_in_backward(model)
        expected = pytest.warns(PlanWarning, match="were not there when it was planned")
        with nullcontext() if before or not is_fitted else expected:
            torch.manual_seed(1)
            for _ in range(2):
                loss(model(X)).backward()
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("is_joined", [True, False], ids=["one backward", "two"])
def test_passes_in_flight_that_add_to_gradients_keep_their_budget(
    *, is_joined: bool
) -> None:
    model = Net()
    budget = named_bytes(model, in_flight=2, accumulate=True)
    how: dict[str, Any] = {"in_flight": 2, "accumulate": True, "loss": loss}
    remat.fit(model, X, budget=budget, **how)

    def step() -> None:
        clear(model)
        for _ in range(2):
            losses = [loss(model(X)), loss(model(X))]
            if is_joined:
                torch.stack(losses).sum().backward()
            while losses:
                value = losses.pop()
                if not is_joined:
                    value.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        assert peak_bytes(model, step) <= budget


def test_verify_predicts_the_step_that_it_measures() -> None:
    model = Net()
    passes(model, 1)
    before = {name: each.clone() for name, each in gradients(model).items()}
    report = remat.verify(model, X, budget="100%", loss=loss, repeats=1)
    assert report.is_exact
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01
    assert not compare(before, gradients(model))


def test_one_thread_trains_while_others_plan() -> None:
    models = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(4)]
    x = torch.randn(8, 64)
    how: dict[str, Any] = {"budget": 10**8, "costs": "estimated", "loss": torch.sum}
    remat.fit(models[0], x, **how)
    errors: list[Exception] = []
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            try:
                models[0](x).sum().backward()
            except Exception as error:  # noqa: BLE001
                errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for model in models[1:]:
            remat.fit(model, x, **how)
    finally:
        is_over.set()
        thread.join()
    assert errors == []


def test_a_step_that_finds_no_gradients_is_not_taken_for_one_that_adds() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    passes(model, 1)
    remat.fit(model, X, budget="100%", loss=loss, optimizer=optimizer)

    def step() -> None:
        passes(model, 1)
        optimizer.step()

    resident = [model, X, TARGETS, optimizer]
    peak = remat.measure(step, repeats=0, resident=resident).peak_bytes
    adding, first = plans_of(model)
    assert ADDING in [op.name for op in adding.graph.ops]
    assert ADDING not in [op.name for op in first.graph.ops]
    assert peak <= first.peak_bytes <= 1.01 * peak


class Shared(nn.Module):
    """Uses one layer on both sides of a graph break, or in several blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(self.layer, nn.GELU()) for _ in "abc")
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(Shared):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        torch._dynamo.graph_break()
        return self.head(torch.tanh(self.layer(x)))


class Coupled(nn.Module):
    """Blocks that return a part of what they are given as it is."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(256, 512), nn.GELU())
            self.last = nn.Linear(512, 256)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            one, two = x[:, :256], x[:, 256:]
            return self.last(self.layers(two)) + one, two

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(512, 512)
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, two = self.first(x).chunk(2, dim=1)
        for block in self.blocks:
            two, one = block(torch.cat([one, two], dim=1))
        return one, two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.halves(x), dim=1)


class Halves(Coupled):
    def forward(self, x: torch.Tensor) -> Any:
        return self.halves(x)


def test_gradients_of_what_blocks_return_as_it_is_are_added(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, model = Coupled(), Coupled()
    how: dict[str, Any] = {"accumulate": True, "regions": ["blocks.*"]}
    remat.fit(model, X, budget=named_bytes(model, **how), loss=loss, **how)
    for count in (1, 3):
        assert not compare(passes(plain, count), passes(model, count))
    # What gradients leave through is not what runs between the blocks.
    assert "another way" not in caplog.text


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.filterwarnings("ignore:.*with retain_graph=True")
def test_gradients_may_come_from_what_blocks_return_as_it_is_alone(
    *, is_weighted: bool
) -> None:
    """Then no block has computed any, unless for a backward pass before that."""

    def trained(model: Coupled) -> dict[str, torch.Tensor]:
        for is_first in (True, False, False):
            passed_on, made = (half.square().mean() for half in model(X))
            if is_first:
                passed_on = passed_on + made
            elif is_weighted:
                weight = model.get_parameter("blocks.2.last.weight")
                (gradient,) = torch.autograd.grad(made, weight, retain_graph=True)
                passed_on = passed_on * gradient.norm()
            passed_on.backward()
        return gradients(model)

    plain, model = Halves(), Halves()
    remat.fit(model, X, budget="200%", regions=["blocks.*"], costs="estimated")
    expected = trained(plain)
    taken = pytest.warns(PlanWarning, match="others were taken")
    with taken if is_weighted else nullcontext():
        assert not compare(expected, trained(model))


class WritesToInput(nn.Module):
    """Blocks that change what they are given, and return it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += functional.gelu(self.layer(x * 1.5))
            return x

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*[self.Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.first(x)))


class ReadsWhatBlocksWrite(WritesToInput):
    """Uses what a block has written to after it."""

    class Block(WritesToInput.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.relu_()
            return functional.gelu(self.layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x * 1.0
            x = block(x) + x
        return self.head(x)


@pytest.mark.parametrize("kind", [WritesToInput, ReadsWhatBlocksWrite])
@pytest.mark.parametrize("count", [1, 2])
def test_blocks_may_write_to_their_input(kind: type[nn.Module], count: int) -> None:
    plain, model = kind(), kind()
    how: dict[str, Any] = {"accumulate": count > 1, "regions": ["blocks.*"]}
    budget = named_bytes(model, **how)
    remat.fit(model, X, budget=budget, loss=loss, **how)
    assert not compare(passes(plain, count), passes(model, count))
    assert peak_bytes(model, lambda: passes(model, count)) <= budget


class HeadOfFirst(WritesToInput):
    """Uses the first layer's weight for its head as well, outside of its blocks."""

    class Block(WritesToInput.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(functional.gelu(self.layer(x))).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.blocks(self.first(x)), self.first.weight)


def test_a_budget_that_the_smallest_schedule_alone_fits_works() -> None:
    model, x = HeadOfFirst(), torch.randn(8, WIDTH)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    how: dict[str, Any] = {"regions": ["blocks.*"], "costs": "estimated"}
    with pytest.raises(remat.BudgetError) as caught:
        remat.fit(model, x, budget=1, **how)
    least_bytes = caught.value.required_bytes
    assert remat.fit(model, x, budget=least_bytes, **how).peak_bytes <= least_bytes
    measured = remat.measure(
        lambda: model(x).square().mean().backward(), repeats=0, resident=[model, x]
    )
    assert measured.peak_bytes <= least_bytes


class UsedAround(WritesToInput):
    """Uses what a block is given once more after it, and a part that it returns."""

    class Block(WritesToInput.Block):
        def forward(self, x: torch.Tensor) -> Any:
            return functional.gelu(self.layer(x)), x[:, WIDTH // 2 :]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, more = self.first(x), torch.zeros(())
        for block in self.blocks:
            made, part = block(x)
            more = more + 0.1 * x.tanh().sum() + 0.1 * part.sin().sum()
            x = made
        return self.head(x) * more


def test_gradients_are_added_in_the_order_of_eager_execution() -> None:
    plain, model = UsedAround(), UsedAround()
    remat.fit(model, X, budget="200%", regions=["blocks.*"], costs="estimated")
    assert not compare(passes(plain), passes(model))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", [Shared, Twice])
def test_gradients_of_one_weight_from_several_graphs_count(
    kind: type[nn.Module], count: int
) -> None:
    plain, model = kind(), kind()
    how: dict[str, Any] = {"accumulate": count > 1, "regions": "breaks"}
    if kind is Shared:
        how["regions"] = ["blocks.*"]
    budget = named_bytes(model, **how)
    remat.fit(model, X, budget=budget, loss=loss, **how)
    expected, found = passes(plain, count), passes(model, count)
    assert not compare(expected, found)
    peak = peak_bytes(model, lambda: passes(model, count))
    assert peak <= budget
    predicted = max(plan.peak_bytes for plan in plans_of(model))
    assert predicted <= 1.01 * peak
