"""Outputs that are parts of a larger tensor: their gradients, and what they take."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch.nn import functional

import remat
from remat.capture.gradient_layouts import dense_gradients, gradient_format
from remat.capture.outputs import fake_outputs

WIDTH, ROWS, COLUMNS = 64, 256, 192
Cut = Callable[[Tensor], Sequence[Tensor]]
Loss = Callable[[Sequence[Tensor]], Tensor]


class Heads(nn.Module):
    """Several outputs cut out of what one layer returns."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, COLUMNS)
        self.cut = cut

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.cut(self.head(self.body(x))))


def squares(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([output.square().mean() for output in outputs]).sum()


def sums(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([output.sum() for output in outputs]).sum()


def mixed(outputs: Sequence[Tensor]) -> Tensor:
    first, *others = outputs
    target = torch.zeros(first.shape)
    return functional.smooth_l1_loss(first, target) + squares(others)


CUTS: dict[str, Cut] = {
    "columns, unequal": lambda y: y.split([128, 48, 16], -1),
    "columns, short last": lambda y: y.chunk(7, -1),
    "columns, equal": lambda y: y.chunk(3, -1),
    "rows, unequal": lambda y: y.split([9, 7], 0),
    "rows, equal": lambda y: y.chunk(2, 0),
    "tensor_split": lambda y: y.tensor_split([10, 100], -1),
    "slices": lambda y: (y[..., :50], y[..., 50:]),
    "unbind": lambda y: y.view(16, 16, 3, 64).unbind(2),
    "some of several": lambda y: y.split([128, 48, 16], -1)[:2],
    "transposed": lambda y: y.transpose(1, 2).split([128, 64], 1),
    "itself and a view": lambda y: (y, y.transpose(1, 2)),
    "several views and one": lambda y: (*y.chunk(2, -1), y.transpose(1, 2)),
    "parts and views": lambda y: (*y.chunk(2, -1), y.transpose(1, 2), y[:3]),
}


@pytest.mark.parametrize(
    ("cut", "loss"), [*((cut, mixed) for cut in CUTS), ("rows, unequal", sums)]
)
def test_peak_with_parts_of_a_tensor_as_outputs(cut: str, loss: Loss) -> None:
    torch.manual_seed(0)
    model, x = Heads(CUTS[cut]), torch.randn(16, ROWS // 16, WIDTH)
    report = remat.verify(
        model, (x,), budget=2**40, loss=loss, solver="store-all", repeats=1
    )
    assert report.is_exact, report
    assert not report.against_eager, report
    assert 0 <= report.predicted_peak_bytes - report.measured_peak_bytes <= 1024


def test_gradients_of_columns_take_no_more_than_in_eager_execution() -> None:
    torch.manual_seed(0)
    model, x = Heads(CUTS["columns, short last"]), torch.randn(64, 64, WIDTH)
    report = remat.verify(
        model, (x,), budget=2**40, loss=squares, solver="store-all", repeats=1
    )
    # Seven blocks of nearly the whole width are six times the layer's output more.
    assert report.measured_peak_bytes <= report.plain_peak_bytes


@pytest.mark.parametrize("cut", ["columns, unequal", "slices"])
def test_smallest_budget_is_kept_with_parts_as_outputs(cut: str) -> None:
    torch.manual_seed(0)
    model, x = Heads(CUTS[cut]), torch.randn(16, 16, WIDTH)
    with pytest.raises(remat.BudgetError) as refused:
        remat.plan(model, (x,), budget=1, loss=squares)
    budget = refused.value.required_bytes
    report = remat.verify(model, (x,), budget=budget, loss=squares, repeats=1)
    assert report.is_within_budget, report
    assert report.is_exact, report
    assert not report.against_eager, report


def test_an_output_that_is_changed_in_place_changes_its_gradients() -> None:
    """As in eager execution; the views are made again outside of the step for it."""
    torch.manual_seed(0)
    model, x = Heads(CUTS["slices"]), torch.randn(2, 3, WIDTH)
    found: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        first, second = model(x)
        first.mul_(3)
        (first.square().sum() + second.sum()).backward()
        assert model.head.weight.grad is not None
        found.append(model.head.weight.grad.clone())
        remat.fit(model, (x,), budget="200%")
    assert torch.equal(*found)


def test_only_strides_with_gaps_have_a_format_of_their_own() -> None:
    image = torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)
    assert gradient_format(torch.zeros(4, 6)) is None
    assert gradient_format(torch.zeros(4, 6).t()) is None
    assert gradient_format(torch.zeros(4, 6)[1:3]) is None
    assert gradient_format(image) is None
    assert gradient_format(torch.zeros(0, 6)[:, :2]) is None
    assert gradient_format(torch.zeros(4, 6)[:, :2]) is torch.contiguous_format
    assert gradient_format(torch.zeros(4, 1).expand(4, 6)) is torch.contiguous_format
    assert gradient_format(image[:, :3]) is torch.channels_last


def test_the_tracer_is_left_as_it_was() -> None:
    before = vars(MemoryFormatMeta)["from_tensor"]
    with dense_gradients():
        assert vars(MemoryFormatMeta)["from_tensor"] is not before
    assert vars(MemoryFormatMeta)["from_tensor"] is before


@pytest.mark.parametrize(
    ("cut", "leaf_shapes"),
    [
        ("columns, unequal", [(4, 128), (4, 48), (4, 16)]),
        ("slices", [(4, 192)]),
        ("itself and a view", [(4, 192)]),
    ],
)
def test_gradients_are_taken_of_what_the_step_returns(
    cut: str, leaf_shapes: list[tuple[int, ...]]
) -> None:
    def last_two(y: Tensor) -> Sequence[Tensor]:
        return [part.squeeze(0) for part in CUTS[cut](y.unsqueeze(0))]

    found = fake_outputs(Heads(last_two), (torch.zeros(4, WIDTH),), {})
    shapes = [tuple(leaf.squeeze(0).shape) for leaf in found.leaves]
    assert shapes == leaf_shapes
    assert all(leaf.is_leaf for leaf in found.leaves)
    assert [output.shape for output in found.value] == [
        part.shape for part in last_two(torch.zeros(4, COLUMNS))
    ]


class Labelled(nn.Module):
    """A segmenter whose logits lie channels last, and the gradients of these do not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 16), nn.Conv2d(16, 5, 1)

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(image).permute(0, 3, 1, 2))
        larger = functional.interpolate(logits, scale_factor=4.0, mode="bilinear")
        return {"loss": functional.cross_entropy(larger, labels), "logits": logits}


def test_gradients_that_the_loss_does_not_have_lay_nothing_out() -> None:
    torch.manual_seed(0)
    image, labels = torch.randn(2, 16, 16, 3), torch.randint(0, 5, (2, 64, 64))
    before = torch.get_num_threads()
    # With two, sums happen to be the same in either layout.
    torch.set_num_threads(1)
    try:
        report = remat.verify(
            Labelled(), (image, labels), budget="100%", costs="estimated", repeats=1
        )
    finally:
        torch.set_num_threads(before)
    assert report.is_exact
    assert report.against_eager == ()


class Forecast(nn.Module):
    """Returns a loss, and what it is of, transposed behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.head(torch.tanh(self.body(x))).transpose(2, 1)
        return {"loss": nn.functional.mse_loss(found, y), "found": found}


def test_a_gradient_that_is_viewed_keeps_its_layout() -> None:
    batch = (torch.randn(8, 4, 64), torch.randn(8, 16, 4))
    report = remat.verify(
        Forecast(), batch, budget="100%", costs="estimated", repeats=1
    )
    assert report.is_exact
    assert report.against_eager == ()
    assert report.is_within_budget
