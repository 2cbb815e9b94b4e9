"""Models and requests that are unlike most: taken, or refused in so many words."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.core.errors import BudgetError, CaptureError, UnitError


class Cell(nn.Module):
    """A recurrent cell, whose gates come out of one split."""

    def __init__(self, cell: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.cell = cell(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor | tuple[Tensor, Tensor] = x
        if isinstance(self.cell, nn.LSTMCell):
            state = (x, x)
        for _ in range(3):
            state = self.cell(x, state)
        return state[0].sum() if isinstance(state, tuple) else state.sum()


class Inverse(nn.Module):
    def __init__(self, invert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.invert = invert

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.invert(torch.eye(6) + y.T @ y).sum()


class Counter(nn.Module):
    """A model that counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).sum()


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_of_recurrent_networks(cell):
    torch.manual_seed(0)
    x = torch.randn(32, 16)
    with pytest.raises(BudgetError) as refused:
        remat.plan(Cell(cell), (x,), budget=1)
    report = remat.verify(Cell(cell), (x,), budget=refused.value.required_bytes)
    assert report.against_captured == ()
    # Eager PyTorch computes the gates of this cell in one operator.
    assert cell is nn.GRUCell or report.against_eager == ()
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, partial(nn.LSTM, proj_size=4)])
def test_recurrent_modules_are_refused_with_what_to_write_instead(kind):
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = kind(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            outputs, _state = self.recurrent(x)
            return outputs.sum()

    with pytest.raises(CaptureError, match=r"self\.recurrent.*LSTMCell"):
        remat.plan(Encoder(), (torch.randn(5, 2, 8),), budget="100%")


@pytest.mark.parametrize("costs", ["measured", "estimated"])
@pytest.mark.parametrize(
    "trained", [("0.weight",), ("1.bias",), ("0.weight", "1.bias")]
)
def test_a_convolution_may_be_frozen_in_part(trained, costs):
    torch.manual_seed(0)
    # The kernel computes the gradients of weight and bias together, asked or not.
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(128, 128, 5, padding=2), nn.Tanh())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    x = torch.randn(2, 128, 8)
    report = remat.verify(model, (x,), budget="100%", loss=Tensor.sum, costs=costs)
    assert report.against_eager == ()
    assert report.measured_peak_bytes <= report.budget_bytes


class Resampling(nn.Module):
    """Convolutions around an image that is resampled."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = functional.interpolate(self.first(x), **self.how)
        return self.last(y).square().mean()


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "nearest", "scale_factor": 2},
        {"mode": "nearest-exact", "size": (31, 17)},
        {"mode": "bilinear", "scale_factor": 2},
        {"mode": "bilinear", "size": (50, 50), "align_corners": True},
        {"mode": "bilinear", "size": (11, 11), "antialias": True},
        {"mode": "bicubic", "scale_factor": 1.5},
    ],
)
def test_resampling_takes_what_it_takes_eager_execution(how):
    torch.manual_seed(0)
    model, x = Resampling(**how), torch.randn(4, 3, 24, 24)
    report = remat.verify(model, (x,), budget="100%")
    assert report.against_eager == ()
    assert report.measured_peak_bytes <= report.plain_peak_bytes


def test_the_tracer_is_left_as_it_was():
    op = torch.ops.aten.upsample_bilinear2d.default
    before = dict(op.py_kernels)
    remat.plan(
        Resampling(mode="bilinear", scale_factor=2),
        (torch.randn(4, 3, 24, 24),),
        budget="100%",
    )
    assert op.py_kernels == before
    assert torch._C.DispatchKey.Autograd in before


def test_an_operation_with_an_effect_is_named_with_its_line():
    with pytest.raises(
        CaptureError, match=r"_linalg_check_errors.*inv_ex.*self\.invert"
    ):
        remat.plan(Inverse(torch.linalg.inv), (torch.randn(9, 6),), budget="100%")


def test_its_variant_without_the_effect_is_taken():
    model = Inverse(lambda a: torch.linalg.inv_ex(a).inverse)
    report = remat.verify(model, (torch.randn(9, 6),), budget="100%")
    assert report.against_eager == ()


def test_a_lazy_module_is_refused_and_stays_lazy():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(5))
    with pytest.raises(CaptureError, match=r"'1.weight' has no shape"):
        remat.plan(model, (torch.randn(2, 4),), budget="100%")
    assert type(model[1]) is nn.LazyLinear


def test_the_optimizer_of_another_model_is_refused():
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters())
    with pytest.raises(ValueError, match="none of which is among the model's 2"):
        remat.plan(model, (torch.randn(2, 4),), budget="100%", optimizer=optimizer)


def test_a_saved_plan_has_its_own_budget():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    plan = remat.plan(model, (x,), budget="100%")
    with pytest.raises(ValueError, match="leave one of them out"):
        remat.fit(model, (x,), plan=plan, budget=1)


def test_a_negative_percentage_is_not_said_in_bytes():
    with pytest.raises(UnitError, match="the budget '-10%'; it must be positive"):
        remat.plan(nn.Linear(4, 4), (torch.randn(2, 4),), budget="-10%")


def test_release_gives_back_what_was_compiled_before():
    model, x = Inverse(lambda a: a), torch.randn(9, 6)
    ran: list[int] = []

    def backend(module, _inputs):
        return lambda *values: ran.append(1) or module.forward(*values)

    model.compile(backend=backend)
    for _ in range(2):
        remat.fit(model, (x,), budget="100%")
    model(x)
    assert ran == []
    remat.release(model)
    model(x)
    assert ran == [1]


def test_tracing_at_every_call_is_warned_of_once():
    model, x = Counter(), torch.randn(2, 4)
    remat.fit(model, (x,), budget="200%")
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(12):
            model(x).backward()
            model.zero_grad()
    said = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(said) == 1
    assert "a counter in Python" in said[0]


class OneHot(nn.Module):
    """What one_hot checks of its classes holds of some made-up values only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, classes: Tensor) -> Tensor:
        return self.linear(functional.one_hot(classes, 8).float()).square().sum()


def test_checks_inside_operators_are_measured_on_values_that_pass():
    report = remat.verify(OneHot(), torch.randint(8, (320,)), budget="1 GiB", repeats=1)
    assert report.is_exact
    assert not report.against_eager


class Pair(nn.Module):
    """A network for two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.net(one).mean() + self.net(other).square().mean()


@pytest.mark.parametrize("regions", ["whole", "breaks"])
def test_parts_of_one_tensor_count_it_once(regions: Any) -> None:
    model = Pair()
    halves = torch.randn(2, 512, 64)
    report = remat.verify(
        model, tuple(halves), budget="90%", repeats=1, regions=regions
    )
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01
    # What else the tensor holds counts, too.
    more = torch.randn(8, 512, 64)
    ends = more[0], more[7]
    report = remat.verify(model, ends, budget="100%", repeats=1, regions=regions)
    assert 0 <= report.prediction_error < 0.01


def test_a_plan_for_parts_of_one_tensor_holds_for_tensors_of_their_own() -> None:
    model = Pair()
    plan = remat.fit(model, tuple(torch.randn(2, 512, 64)), budget="90%")
    one, other = torch.randn(512, 64), torch.randn(512, 64)

    def step() -> None:
        model.zero_grad()
        model(one, other).backward()

    measured = remat.measure(step, repeats=0, resident=[model, one, other])
    assert measured.peak_bytes <= plan.peak_bytes


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0].sum()


class Chosen(nn.Module):
    """Rows by value; with a size that is made of a sum, which the compiler refuses."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_cut = is_cut

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.is_cut:
            return y[: int(x.abs().sum().item())].sum()
        return y[(y > 0).nonzero()[:, 0]].sum()


@pytest.mark.parametrize(
    "make", [Recurrent, lambda: Chosen(is_cut=False), lambda: Chosen(is_cut=True)]
)
def test_what_works_between_graphs_is_refused_with_that_remedy(
    make: Callable[[], nn.Module],
) -> None:
    model, x = make(), torch.randn(5, 8)
    with pytest.raises(CaptureError, match='regions="breaks"'):
        remat.fit(model, x, budget="100%", costs="estimated")
