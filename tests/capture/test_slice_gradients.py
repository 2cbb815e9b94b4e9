"""Gradients of pieces: one concatenation instead of a sum of zeros, bit for bit."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tests.capture.test_joint_program import trace
from torch import Tensor, nn

import remat
from remat.capture import rewrites

aten = torch.ops.aten


class TakesApart(nn.Module):
    """Adds up what a function makes of the pieces of a tensor of [3, 6, 4]."""

    def __init__(self, pieces: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        found = self.pieces(self.linear(x))
        return torch.stack([torch.tanh(p).mul(k).sum() for k, p in enumerate(found)])


def step_of(pieces: Callable[[Tensor], list[Tensor]]) -> Counter[object]:
    """Return how often each operator is in the traced step."""
    torch.manual_seed(0)
    program = trace(TakesApart(pieces), torch.randn(3, 6, 4))
    return Counter(node.target for node in program.module.graph.nodes)


def each(x: Tensor) -> list[Tensor]:
    return [x[:, t] for t in range(6)]


JOINED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "selected": each,
    "selected, counted from the end": lambda x: [x[:, t - 6] for t in range(6)],
    "selected in any order": lambda x: [x[:, t] for t in (3, 0, 5, 1, 4, 2)],
    "halves": lambda x: [x[..., :2], x[..., 2:]],
    "slices of unequal size": lambda x: [x[:, 4:], x[:, :1], x[:, 1:-2]],
    "slices and a selected one": lambda x: [x[:, 1:], x[:, 0]],
    "pieces of pieces": lambda x: [p[..., k] for p in each(x) for k in range(4)],
    "of complex numbers": lambda x: [p.abs() for p in each(torch.complex(x, x.sin()))],
}

ADDED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "one is missing": lambda x: each(x)[1:],
    "one is there twice": lambda x: [*each(x), x[:, 2]],
    "they overlap": lambda x: [x[..., :3], x[..., 2:]],
    "the whole between": lambda x: [*each(x)[:3], x, *each(x)[3:]],
    "along two dimensions": lambda x: [x[:, :3], x[..., :2], x[:, 3:], x[..., 2:]],
    "views of a larger block": lambda x: [
        torch.cat([p.detach().repeat(1, 9), p], 1).sin() for p in each(x)
    ],
    "every second one": lambda x: [x[:, ::2], x[:, 1::2]],
    "none": lambda x: [x],
}


@pytest.mark.parametrize("name", JOINED)
def test_pieces_that_cover_all_are_concatenated(name: str) -> None:
    count = step_of(JOINED[name])
    assert count[aten.select_backward.default] == 0
    assert count[aten.slice_backward.default] == 0
    assert count[aten.stack.default] + count[aten.cat.default] > 0


@pytest.mark.parametrize("name", ADDED)
def test_other_pieces_are_added_up(name: str) -> None:
    count = step_of(ADDED[name])
    apart = count[aten.select_backward.default] + count[aten.slice_backward.default]
    assert apart > 0 or name == "none"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in (*JOINED, *ADDED)),
        *((name, torch.bfloat16) for name in ("selected", "the whole between")),
    ],
)
def test_every_bit_is_that_of_the_plain_step(name: str, dtype: torch.dtype) -> None:
    pieces = (JOINED | ADDED)[name]
    model = TakesApart(pieces).to(dtype)
    x = torch.randn(3, 6, 4, dtype=dtype, requires_grad=True)
    report = remat.verify(model, x, budget=10**6, repeats=1, costs="estimated")
    assert report.is_exact
    assert report.against_eager == ()


class Signed(nn.Module):
    """Gives the elements of a tensor gradients that were chosen, piece by piece."""

    def __init__(self, factors: Tensor, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(factors.shape))
        self.factors, self.length = factors, length

    def forward(self) -> Tensor:
        x = self.weight * 1.0
        parts: list[Tensor] = []
        for start in range(0, len(x), max(1, self.length)):
            places = slice(start, start + self.length) if self.length else start
            parts.append((x[places] * self.factors[places]).sum())
        return torch.stack(parts).sum()


@pytest.mark.parametrize("length", [0, 2])
def test_zeros_have_the_signs_that_adding_gives(length: int) -> None:
    special = [-0.0, 0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, -1.0]
    factors = torch.stack([torch.tensor(special).roll(k) for k in range(6)])
    model = Signed(factors, length)
    graph = trace(model).module.graph
    join = aten.cat.default if length else aten.stack.default
    joined = graph.find_nodes(op="call_function", target=join)
    assert any(len(node.args[0]) == (3 if length else 6) for node in joined)
    model().backward()
    assert model.weight.grad is not None
    expected, model.weight.grad = model.weight.grad, None
    remat.fit(model, (), budget=10**6, loss=lambda y: y, costs="estimated")
    model().backward()
    assert model.weight.grad is not None
    bits = torch.int32
    assert torch.equal(model.weight.grad.view(bits), expected.view(bits))


def test_views_of_larger_blocks_are_not_kept_until_all_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cell = nn.Linear(3, 2), nn.Linear(66, 64)
            self.cell.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x, h = self.first(x), torch.zeros(len(x), 64)
            for t in range(x.shape[1]):
                h = h + self.cell(torch.cat([x[:, t], h], 1))
            return h.mean()

    def peak_bytes() -> int:
        x = torch.randn(128, 24, 3)
        plan = remat.plan(Cell(), x, budget=10**9, costs="estimated")
        return plan.baseline_peak_bytes

    found = peak_bytes()
    monkeypatch.setattr(rewrites, "join_gradient_pieces", lambda _joint: None)
    assert found <= peak_bytes()


def test_a_constant_may_be_added_to_pieces() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            return (y[0] + y[1]).sum() + (y * torch.ones(2, 3)).sum()

    x = torch.randn(2, 3, requires_grad=True)
    report = remat.verify(Constant(), x, budget=10**6, repeats=1, costs="estimated")
    assert report.is_exact
    assert report.against_eager == ()


def test_what_is_returned_is_no_view_of_another_gradient() -> None:
    class One(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x[:, 0] * y

    model = One()
    x, y = (torch.randn(s, requires_grad=True) for s in ((3, 1, 4), (3, 4)))
    remat.fit(model, (x, y), budget=10**6, loss=torch.sum, costs="estimated")
    model(x, y).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:, 0], y.detach())
    assert x.grad.untyped_storage().nbytes() == 3 * 4 * 4


@pytest.mark.parametrize(
    ("layout", "is_joined"),
    [(torch.contiguous_format, True), (torch.channels_last, False)],
)
def test_a_layout_that_would_differ_is_left_alone(
    layout: torch.memory_format, is_joined: bool
) -> None:
    class Channels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            return y[:, :2].sin().sum() + y[:, 2:].cos().sum()

    images = torch.randn(2, 4, 3, 3).to(memory_format=layout).requires_grad_()
    graph = trace(Channels(), images).module.graph
    assert (aten.cat.default in {node.target for node in graph.nodes}) == is_joined
    report = remat.verify(
        Channels(), images, budget=10**6, repeats=1, costs="estimated"
    )
    assert report.is_exact
    assert report.against_eager == ()
