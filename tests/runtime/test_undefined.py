"""Gradients that eager PyTorch does not have are ``None``, and retained graphs work."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.core.errors import PlanWarning
from remat.training.verification import compare


class Heads(nn.Module):
    """Outputs of each kind: plain, views of one block, an input, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 6)
        self.parts = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.trunk(x))
        self.get_buffer("average").mul_(0.9).add_(hidden.detach().mean(0))
        left, right = torch.sigmoid(self.parts(x)).chunk(2)
        return {
            "same": x,
            "index": hidden.argmax(1),
            "first": self.first(hidden),
            "second": [self.second(hidden).view(6, -1)],
            "left": left,
            "right": right,
        }


LOSSES: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "first": lambda outputs: outputs["first"].square().mean(),
    "second": lambda outputs: outputs["second"][0].square().mean(),
    "left": lambda outputs: outputs["left"].square().mean(),
    "right": lambda outputs: outputs["right"].square().mean(),
    "both": lambda o: o["first"].square().mean() + o["second"][0].sum(),
    "all": lambda o: (
        o["first"].sum() + (o["left"] * o["right"] + o["second"][0].sum()).sum()
    ),
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_loss_does_not_reach_has_no_gradient(name: str) -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(4, 8)
    LOSSES[name](model(x)).backward()
    expected = gradients(model)
    model.zero_grad()
    remat.fit(model, x, budget=10**7, costs="estimated")
    LOSSES[name](model(x)).backward()
    assert not compare(expected, gradients(model))
    assert name == "all" or len(expected) < 8


@pytest.mark.filterwarnings("ignore:.*with retain_graph=True")
def test_each_backward_pass_is_looked_at_by_itself() -> None:
    model, x = Heads(), torch.randn(4, 8)
    remat.fit(model, x, budget=10**7, costs="estimated")
    outputs = model(x)
    later = model(2 * x)
    LOSSES["left"](outputs).backward(retain_graph=True)
    assert set(gradients(model)) == {"parts.weight", "parts.bias"}
    model.zero_grad()
    LOSSES["all"](later).backward()
    assert len(gradients(model)) == 8
    model.zero_grad()
    LOSSES["first"](outputs).backward()
    assert "second.weight" not in gradients(model)
    assert "trunk.weight" in gradients(model)


def test_training_alternating_heads_is_bitwise_plain() -> None:
    results: list[list[Tensor]] = []
    for is_fitted in (False, True):
        torch.manual_seed(0)
        model, x = Heads(), torch.randn(4, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        if is_fitted:
            remat.fit(model, x, budget=10**7, costs="estimated", optimizer=optimizer)
        for name in ("first", "left", "second", "first"):
            optimizer.zero_grad()
            LOSSES[name](model(x)).backward()
            optimizer.step()
        results.append([*model.parameters(), *model.buffers()])
    assert all(map(torch.equal, *results))


def test_a_graph_is_retained_after_ordinary_backward_passes() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model, x = nn.Sequential(*blocks), torch.randn(4, 8)
    remat.fit(model, x, budget=10**7, costs="estimated")
    # The backward code that this compiles could not retain anything.
    model(x).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    loss = model(x).sum()
    # No plan counts what is retained, and that is said once.
    with pytest.warns(PlanWarning, match="with retain_graph=True"):
        loss.backward(retain_graph=True)
    assert not compare(expected, gradients(model))
    model.zero_grad()
    loss.backward(retain_graph=True)
    assert not compare(expected, gradients(model))


def test_a_gradient_of_a_gradient_is_refused_by_name() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    remat.fit(model, x, budget=10**7, costs="estimated")
    (weight, _) = model.parameters()
    loss = model(x).sum()
    with pytest.warns(
        PlanWarning, match="with create_graph=True.*torch.compiler.disable"
    ):
        (gradient,) = torch.autograd.grad(loss, [weight], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.square().sum().backward()


TARGETS = torch.randint(0, 1000, (4, 64))
LOGITS_BYTES = 4 * 64 * 1000 * 4


class Language(nn.Module):
    """Returns a loss with what it is computed from, as language models do."""

    def __init__(self, *, is_broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_broken = is_broken
        self.embedding = nn.Embedding(1000, 32)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1000, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        if self.is_broken:
            torch._dynamo.graph_break()
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return {"loss": loss, "logits": logits, "hidden": hidden.transpose(1, 2)}


def backward(model: nn.Module, *keys: str) -> None:
    model.zero_grad()
    outputs = model(TARGETS)
    torch.stack([outputs[key].sum() for key in keys]).sum().backward()


def peak_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    return remat.measure(step, repeats=0, resident=[model, TARGETS]).peak_bytes


@pytest.mark.parametrize("is_broken", [False, True], ids=["one graph", "two"])
def test_gradients_that_do_not_exist_take_no_memory(*, is_broken: bool) -> None:
    regions = "breaks" if is_broken else "auto"
    plain, model = Language(), Language(is_broken=is_broken)
    plan = remat.fit(model, TARGETS, budget="100%", regions=regions)
    eager = peak_bytes(plain, lambda: backward(plain, "loss"))
    measured = peak_bytes(model, lambda: backward(model, "loss"))
    assert abs(plan.peak_bytes - eager) < LOGITS_BYTES // 10
    assert measured <= plan.peak_bytes < measured + LOGITS_BYTES // 10
    backward(plain, "loss")
    backward(model, "loss")
    assert not compare(gradients(plain), gradients(model))


@pytest.mark.filterwarnings("ignore::remat.core.errors.PlanWarning")
@pytest.mark.parametrize("is_broken", [False, True], ids=["one graph", "two"])
def test_gradients_that_do_exist_count(*, is_broken: bool) -> None:
    regions = "breaks" if is_broken else "auto"
    plain, model = Language(), Language(is_broken=is_broken)
    remat.fit(model, TARGETS, budget="120%", regions=regions, costs="estimated")
    ways = [("loss", "logits"), ("loss",), ("loss", "hidden"), ("logits",), ("hidden",)]
    for keys in ways:
        backward(plain, *keys)
        backward(model, *keys)
        assert gradients(plain).keys() == gradients(model).keys()
        for name, gradient in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[name], gradient)


def test_a_gradient_that_is_in_no_plan_is_told() -> None:
    model = Language()
    remat.fit(model, TARGETS, budget="100%", costs="estimated")
    backward(model, "loss")
    with pytest.warns(PlanWarning, match="differentiates this alone"):
        backward(model, "loss", "logits")


def test_zeros_that_are_more_than_added_are_made() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.layer(x)
            return hidden.sum(), hidden.square()

    torch.manual_seed(0)
    model, x = Squares(), torch.randn(4, 8)
    model(x)[0].backward()
    expected = gradients(model)
    model.zero_grad()
    plan = remat.fit(model, x, budget=10**6, costs="estimated")
    model(x)[0].backward()
    assert not compare(expected, gradients(model))
    tangents = [plan.graph.storages[t].size_bytes for t in plan.graph.tangents]
    assert sorted(tangents) == [4, 4 * 8 * 4]


def test_zeros_of_two_outputs_that_are_one_value_are_made() -> None:
    class Twice(nn.Module):
        """Returns one value twice: gradients of both are added to each other."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            hidden = self.layer(x).t()
            return torch.tanh(hidden).sum(), hidden.clone(), hidden

    plain, model, x = Twice(), Twice(), torch.randn(4, 8)
    remat.fit(model, x, budget=10**6, costs="estimated")
    for net in (plain, model):
        net(x)[0].backward()
    assert not compare(gradients(plain), gradients(model))


class Features(nn.Module):
    """Returns a value and one that is computed of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.first(x))
        return features, self.second(features)


@pytest.mark.parametrize("retains", [False, True])
def test_a_hook_of_what_others_are_computed_of_is_told(*, retains: bool) -> None:
    x = torch.randn(8, 16)
    seen: list[Tensor] = []

    def step(model: nn.Module) -> Tensor | None:
        features, outputs = model(x)
        if retains:
            features.retain_grad()
        else:
            features.register_hook(seen.append)
        outputs.register_hook(lambda gradient: gradient)
        (features.sum() + outputs.sum()).backward()
        return features.grad if retains else seen[-1]

    expected = step(Features())
    assert expected is not None
    model = Features()
    remat.fit(model, (x,), budget="100%")
    with pytest.warns(PlanWarning, match=r"returns tensors \[0\], of which it makes"):
        step(model)
    # As it says.
    cured = Features()
    remat.fit(cured, (x,), budget="100%", regions=["first"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        found = step(cured)
    assert found is not None
    assert torch.equal(found, expected)


def test_a_hook_of_what_nothing_is_computed_of_is_not_told() -> None:
    x = torch.randn(8, 16)
    model = Features()
    remat.fit(model, (x,), budget="100%")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        _, outputs = model(x)
        outputs.register_hook(lambda gradient: gradient)
        outputs.sum().backward()


class WritesToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.layer(x).tanh()


def test_a_gradient_of_what_a_part_writes_to_is_expected() -> None:
    first, part = nn.Linear(16, 16), WritesToItsInput()
    x = torch.randn(8, 16)
    remat.fit(part, first(x), budget="300%")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        written = first(x)
        part(written).square().mean().backward()
    assert first.weight.grad is not None


class _Sink(torch.autograd.Function):
    """Goes backward from all that it is given, as ``DistributedDataParallel`` does."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return gradients


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [tower(x) for tower in self.towers]


def test_the_one_gradient_that_a_graph_waits_for_may_not_exist() -> None:
    model, x = TwoTowers(), torch.randn(4, 8)
    remat.fit(model, x, budget=10**7, costs="estimated", regions=["towers.*"])
    first, _ = _Sink.apply(*model(x))
    first.sum().backward()
    assert set(gradients(model)) == {"towers.0.weight", "towers.0.bias"}
