"""Gradients of values with readers in several graphs are added as in eager PyTorch."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.training.test_regions import WIDTH, X, in_no_graph, pair, peak_of_step
from torch import nn
from torch.nn import functional

import remat
from remat.core.errors import BudgetError
from remat.training.fitted_model import fitted_on
from remat.training.fitted_regions import FittedRegions
from remat.training.region_backend import RegionBackend


def linear(scale: float) -> nn.Linear:
    made = nn.Linear(WIDTH, WIDTH)
    nn.init.normal_(made.weight, std=scale)
    return made


class Piece(nn.Module):
    """Reads what it is given so many times."""

    def __init__(self, reader_count: int) -> None:
        super().__init__()
        self.readers = nn.ModuleList(linear(0.3) for _ in range(reader_count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.readers[0](x))
        for each in self.readers[1:]:
            found = found * torch.sigmoid(each(x))
        return found


class Product(Piece):
    """One operator takes the same value as both of its arguments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.readers[0](x * x))


class Assigned(Piece):
    """What assigns it to a part of another tensor reads it as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(x), 2 * WIDTH)
        found[:, :WIDTH] = x
        return torch.tanh(self.readers[0](x)) * found[:, :WIDTH]


class AsItIs(Piece):
    """Reads what operators return as it is, or nearly."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(2)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.how(x))


AS_IT_IS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda x: x.to(torch.float32).contiguous(),
    "dropout": lambda x: functional.dropout(x, 0.5, training=False),
    "no dropout": lambda x: functional.dropout(x, p=0.0).to(torch.float32),
    "no channels": lambda x: functional.dropout1d(x, p=0.0),
    "view": lambda x: x.view(x.shape),
    "dropped": lambda x: functional.dropout(x, 0.5),
}


class Memory(nn.Module):
    """All layers project what the first one makes to keys and values at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear(0.3)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, WIDTH, dropout=0.0) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(32, -1, WIDTH)
        memory = self.first(x)
        for layer in self.layers:
            x = layer(x, memory)
        return x.square().mean()


class Halves(Piece):
    """Sizes of what it makes follow from those of what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (torch.cat(each(x).chunk(2), 1) for each in self.readers)
        return (torch.tanh(one) * torch.sigmoid(other)).reshape(x.shape)


class Writing(Piece):
    """Writes to what it is given between two readings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.readers[0](x * 1))
        return found * x.mul_(0.5)


class Around(nn.Module):
    """What goes into each piece goes around it as well, outside of its graph."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = linear(0.3)
        self.pieces = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for piece in self.pieces:
            x = x + in_no_graph(torch.sin)(x) * piece(x)
            torch._dynamo.graph_break()
        return x.square().mean()


class Parting(Around):
    """The pieces read as many rows as values say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, piece in enumerate(self.pieces):
            rows = x[: 9 + int((x[:, number] > 0).sum())]
            x = torch.cat([rows + rows * piece(rows), x[len(rows) :]])
        return x.square().mean()


def assert_equal_gradients(
    model: nn.Module, plain: nn.Module, x: torch.Tensor = X
) -> None:
    for each in (model, plain):
        each(x).backward()
    assert_equal(model, plain)
    for each in (model, plain):
        each.zero_grad()


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind",
    [partial(Piece, 2), partial(Piece, 4), partial(Product, 1), partial(Assigned, 1)],
)
@pytest.mark.parametrize("regions", ["breaks", "blocks"])
def test_sums_are_those_of_eager_pytorch(
    kind: Callable[[], nn.Module], regions: Any
) -> None:
    model, plain = pair(partial(Around, kind))
    with pytest.raises(BudgetError) as caught:
        remat.fit(model, X, budget=1, regions=regions)
    smallest = caught.value.required_bytes
    for budget in ("100%", smallest):
        plan = remat.fit(model, X, budget=budget, regions=regions)
        assert_equal_gradients(model, plain)
        peak = peak_of_step(model, X)
        assert peak <= (plan.budget_bytes or 0)
        assert plan.peak_bytes == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("regions", ["breaks", "blocks"])
def test_so_they_are_at_all_sizes(regions: Any) -> None:
    model, plain = pair(partial(Parting, partial(Piece, 2)))
    remat.fit(model, X, budget="110%", regions=regions, costs="estimated")
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        batch = torch.randn(X.shape, generator=generator)
        assert_equal_gradients(model, plain, batch)
        assert peak_of_step(model, batch) <= 1.1 * peak_of_step(plain, batch)


def test_so_they_are_in_shapes_that_come_later() -> None:
    model, plain = pair(partial(Around, partial(Halves, 2)))
    remat.fit(model, X, budget="110%", regions="blocks", costs="estimated")
    for size in (256, 200, 120, 200):
        assert_equal_gradients(model, plain, X[:size])


def test_so_they_are_where_the_caller_reads_what_is_returned() -> None:
    class Returning(Around):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            found = [x]
            for piece in self.pieces:
                x = piece(x)
                found.append(x)
            return {"loss": x.square().mean(), "found": found}

    model, plain = pair(partial(Returning, partial(Piece, 2)))
    remat.fit(model, X, budget="150%", regions="blocks", costs="estimated")
    for each in (model, plain):
        outputs = each(X)
        read = sum(value.sin().mean() for value in outputs["found"])
        (outputs["loss"] + read).backward()
    assert_equal(model, plain)


def test_what_takes_one_tensor_several_times_takes_one() -> None:
    model, plain = pair(Memory)
    remat.fit(model, X, budget="120%", regions="blocks", costs="estimated")
    assert_equal_gradients(model, plain)


def test_what_is_several_readers_takes_one_input() -> None:
    class Scaled(Piece):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(functional.rms_norm(x, x.shape[1:]))

    model, plain = pair(partial(Around, partial(Scaled, 1)))
    remat.fit(model, X, budget="120%", regions="blocks", costs="estimated")
    assert not any(again_in(model))
    for each in (model, plain):
        each(X).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("how", AS_IT_IS)
def test_so_they_are_behind_what_returns_its_input(how: str) -> None:
    model, plain = pair(partial(Around, partial(AsItIs, AS_IT_IS[how])))
    remat.fit(model, X, budget="120%", regions="blocks", costs="estimated")
    for seed in range(2):
        for each in (model, plain):
            torch.manual_seed(seed)
            each(X).backward()
        assert_equal(model, plain)
    assert any(again_in(model)) == (how not in {"view", "dropped", "no channels"})


def test_so_they_are_where_the_caller_reads_what_is_kept() -> None:
    class Keeping(Around):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            self.seen = x
            for piece in self.pieces:
                x = piece(x)
            return x.square().mean()

    model, plain = pair(partial(Keeping, partial(Piece, 2)))
    remat.fit(model, X, budget="150%", regions="blocks", costs="estimated")
    for each in (model, plain):
        (each(X) + each.seen.sin().mean()).backward()
    assert_equal(model, plain)


@pytest.mark.parametrize("is_made", [False, True])
def test_so_they_are_where_the_caller_reads_what_was_given(*, is_made: bool) -> None:
    class Given(Around):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pieces[1](self.pieces[0](x)).square().mean()

    model, plain = pair(partial(Given, partial(Piece, 2)))
    given = (X * 0.5).requires_grad_()
    remat.fit(model, given, budget="150%", regions="blocks", costs="estimated")
    found: list[torch.Tensor] = []
    for each in (model, plain):
        first = (X * 0.5).requires_grad_()
        read = first.cos() if is_made else first
        (each(read) + read.sin().mean()).backward()
        assert first.grad is not None
        found.append(first.grad)
    assert torch.equal(*found)


def again_in(model: nn.Module) -> list[int]:
    """Return, per graph, how many inputs are given once more."""
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedRegions)
    backend = fitted.backend
    assert isinstance(backend, RegionBackend)
    return [len(traced._again) for traced in backend._traced]


def further_inputs(kind: Callable[[], nn.Module]) -> list[int]:
    model, plain = pair(partial(Around, kind))
    remat.fit(model, X, budget="110%", regions="breaks", costs="estimated")
    assert_equal_gradients(model, plain)
    return again_in(model)


def test_only_where_it_matters_readers_get_inputs_of_their_own() -> None:
    assert sum(further_inputs(partial(Piece, 2))) == 1
    # One reader; none is outside of the graph; it is written in between.
    assert not any(further_inputs(partial(Piece, 1)))
    model = nn.Sequential(*(Piece(2) for _ in range(3)))
    remat.fit(model, X, budget="100%", regions="blocks", costs="estimated")
    assert not any(again_in(model))


def test_what_a_graph_writes_to_is_one_input() -> None:
    class Written(Around):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for piece in self.pieces:
                inner = x * 1
                x = x + inner.mean() * piece(inner)
                torch._dynamo.graph_break()
            return x.square().mean()

    model, plain = pair(partial(Written, partial(Writing, 1)))
    remat.fit(model, X, budget="110%", regions="breaks", costs="estimated")
    assert not any(again_in(model))
    for each in (model, plain):
        each(X).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_saved_plan_of_it_is_installed(tmp_path: Any) -> None:
    kind = partial(Around, partial(Piece, 2))
    plan = remat.plan(kind(), X, budget="90%", regions="breaks", costs="estimated")
    plan.save(tmp_path / "plan.json")
    model, plain = pair(kind)
    given = remat.load_plan(tmp_path / "plan.json")
    installed = remat.fit(model, X, plan=given, regions="breaks", costs="estimated")
    assert installed.fingerprint == plan.fingerprint
    assert_equal_gradients(model, plain)


def test_so_they_are_in_a_decoder_that_reads_an_encoder() -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=1,
            num_decoder_layers=3,
            num_heads=2,
            vocab_size=100,
            decoder_start_token_id=0,
        )
    ).train()
    plain = copy.deepcopy(model)
    ids = torch.randint(2, 100, (2, 20))
    batch = {"input_ids": ids, "labels": ids[:, :12].clone()}
    how: dict[str, Any] = {"regions": "blocks", "costs": "estimated"}
    plan = remat.fit(model, (), batch, budget="90%", **how)
    for each in (model, plain):
        torch.manual_seed(1)
        each(**batch).loss.backward()
    assert_equal(model, plain)
    model.zero_grad()

    def step() -> None:
        model(**batch).loss.backward()

    measured = remat.measure(step, warmup=0, repeats=0, resident=[model, batch])
    assert measured.peak_bytes <= (plan.budget_bytes or 0)
