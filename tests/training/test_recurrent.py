"""Recurrent modules: layers of an LSTM are operators, all else splits the graph."""

import copy
import logging
import re
import warnings
from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import remat
from remat.core.errors import BudgetError, CaptureError, PlanWarning
from remat.planning.plan import Plan
from remat.training.fitted_model import fitted_on

LENGTH, BATCH, WIDTH, HIDDEN = 20, 4, 8, 16
X = torch.randn(LENGTH, BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
STATE = torch.randn(1, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
LAYER, LAYER_BACKWARD = "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"


class Tagger(nn.Module):
    """A recurrent module between linear layers, with the loss inside."""

    def __init__(self, recurrent: nn.Module, width: int = HIDDEN) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
        )
        self.recurrent = recurrent
        self.last = nn.Linear(width, 3)

    def recur(self, x: Tensor, *states: Tensor) -> Tensor:
        found, _ = self.recurrent(x, *([states] if states else []))
        return found

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        found = self.recur(self.first(x).relu(), *states)
        return self.last(found).tanh().pow(2).mean()


class Packed(Tagger):
    def recur(self, x: Tensor, *_states: Tensor) -> Tensor:
        lengths = torch.tensor([LENGTH, 5, 7, 9])
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.recurrent(packed)[0])[0]


def assert_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def deep() -> Tagger:
    how: dict[str, Any] = {"num_layers": 3, "dropout": 0.3, "bidirectional": True}
    return Tagger(nn.LSTM(WIDTH, HIDDEN, **how), 2 * HIDDEN)


@cache
def least_plan() -> Plan:
    """Return the plan of the smallest budget that is known for the deep one."""
    with pytest.raises(BudgetError) as refused:
        remat.plan(deep(), X, budget=1)
    return remat.plan(deep(), X, budget=refused.value.required_bytes)


def counts(plan: Plan) -> Counter[str]:
    return Counter(re.sub(r"_\d+$", "", op.name) for op in plan.graph.ops)


def test_each_layer_and_direction_is_one_operator() -> None:
    found = counts(least_plan())
    assert (found[LAYER], found[LAYER_BACKWARD]) == (6, 6)
    # All there is besides are the linear layers, dropout, and states of zeros.
    assert len(least_plan().graph.ops) < 90


def test_layers_are_computed_again() -> None:
    plan = least_plan()
    repeated = [plan.graph.ops[op].name for op in plan.schedule.recompute_counts()]
    assert any(LAYER in name for name in repeated)
    assert plan.peak_bytes < 0.85 * plan.baseline_peak_bytes


CASES = {
    "deep": deep,
    "batch first": lambda: Tagger(nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True)),
    "no bias": lambda: Tagger(nn.LSTM(WIDTH, HIDDEN, 2, bias=False)),
    "eval": lambda: deep().eval(),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_bitwise_eager(case: str) -> None:
    report = remat.verify(CASES[case](), X, budget="80%", repeats=1)
    assert (report.against_captured, report.against_eager) == ((), ())
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.01


def test_states_may_be_given_and_take_gradients() -> None:
    batch = X.clone().requires_grad_(), STATE.clone().requires_grad_(), STATE
    model = Tagger(nn.LSTM(WIDTH, HIDDEN))
    report = remat.verify(model, batch, budget="90%", repeats=1, regions="breaks")
    assert (report.against_captured, report.against_eager) == ((), ())
    assert counts(report.plan)[LAYER] == 1


def test_they_are_trained_as_without_remat() -> None:
    torch.manual_seed(0)
    planned, plain = deep(), deep()
    plain.load_state_dict(planned.state_dict())
    remat.fit(planned, X, plan=least_plan())
    for model in (planned, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).backward()
            optimizer.step()
    pairs = zip(planned.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


OTHERS = {
    "gru": lambda: Tagger(nn.GRU(WIDTH, HIDDEN)),
    "projected": lambda: Tagger(nn.LSTM(WIDTH, HIDDEN, proj_size=5), 5),
    "packed": lambda: Packed(nn.LSTM(WIDTH, HIDDEN)),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_all_else_is_in_no_graph(case: str) -> None:
    how: dict[str, Any] = {"budget": "100%", "costs": "estimated"}
    with pytest.raises(CaptureError, match='or give regions="breaks"'):
        remat.plan(OTHERS[case](), X, regions="whole", **how)
    report = remat.verify(OTHERS[case](), X, repeats=1, regions="breaks", **how)
    assert (report.against_captured, report.against_eager) == ((), ())
    assert not counts(report.plan)[LAYER]
    # The code behind is traced as well.
    assert int(str(report.plan.settings["graphs"]).split(",")[0]) >= 2


def test_half_precision_and_autocast_are_in_no_graph() -> None:
    plan = partial(remat.plan, budget="100%", regions="whole", costs="estimated")
    with pytest.raises(CaptureError, match="single precision"):
        plan(deep().bfloat16(), X.bfloat16())
    with (
        pytest.raises(CaptureError, match="without autocast"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        plan(deep(), X)


def test_lengths_that_vary_are_traced_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    planned = Tagger(nn.LSTM(WIDTH, HIDDEN))
    plain = copy.deepcopy(planned)
    how: dict[str, Any] = {"budget": "90%", "costs": "estimated"}
    with caplog.at_level(logging.WARNING, logger="remat"):
        plan = remat.fit(planned, X[:9], dynamic={0: {0: (2, LENGTH)}}, **how)
    assert "cannot be traced once for all sizes" in caplog.text
    assert counts(plan)[LAYER] == 1
    for length in (LENGTH, 2, 9):
        for model in (planned, plain):
            model.zero_grad()
            model(X[:length]).backward()
        assert_equal_gradients(planned, plain)


def test_hooked_modules_run_as_they_are() -> None:
    class Hooked(Tagger):
        def __init__(self) -> None:
            super().__init__(nn.LSTM(WIDTH, HIDDEN))
            self.seen = 0
            self.last.register_full_backward_hook(self.count)

        def count(self, *_: object) -> None:
            self.seen += 1

    torch.manual_seed(0)
    model, plain = Hooked(), Hooked()
    plain.load_state_dict(model.state_dict())
    with pytest.raises(CaptureError, match="regions='breaks'"):
        remat.fit(model, X, budget="100%", costs="estimated")
    remat.fit(model, X, budget="100%", regions="breaks", costs="estimated")
    model.seen = 0
    for each in (model, plain):
        each(X).backward()
    assert model.seen == plain.seen == 1
    assert_equal_gradients(model, plain)


def test_gradients_of_layers_in_no_graph_count_as_they_lie() -> None:
    class Rows(nn.Module):
        """Hands gradients on that the layer's backward pass copies."""

        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(32, 32, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            found, _ = self.recurrent(x.view(-1, 8, 32))
            return found.square().mean()

    model, x = Rows(), torch.randn(256, 32)
    dynamic = {"x": {0: (8, 256)}}
    plan = remat.fit(model, x, budget="120%", regions="breaks", dynamic=dynamic)

    def step() -> None:
        model(x).backward()
        model.zero_grad()

    step()
    measured = remat.measure(step, warmup=0, repeats=0, resident=[model, x])
    assert measured.peak_bytes <= plan.peak_bytes <= 1.01 * measured.peak_bytes


def test_blocks_of_layers_are_planned_for_all_sizes_before_training() -> None:
    """Where sizes vary, layers of an LSTM are in no graph."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(32, 32, batch_first=True)
            self.last = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            found, _ = self.recurrent(x)
            return x + self.last(found)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Layer() for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    dynamic = {"x": {0: (2, 6), 1: (4, 40)}}
    how: dict[str, Any] = {"regions": "blocks", "dynamic": dynamic}
    model, x = Stack(), torch.randn(6, 40, 32)
    plain = copy.deepcopy(model)
    with pytest.raises(BudgetError, match="without dynamic= it may be") as caught:
        remat.fit(model, x, budget=1, **how)
    plan = remat.fit(model, x, budget=caught.value.required_bytes, **how)
    planner: Any = getattr(fitted_on(model), "planner", None)
    for rows, length in ((6, 40), (5, 30), (2, 20), (6, 35)):
        for each in (model, plain):
            each.zero_grad()
            each(x[:rows, :length]).backward()
        assert_equal_gradients(model, plain)
        assert planner.running_plan.peak_bytes <= plan.peak_bytes
    assert planner.planned_count == 1


def test_nodes_of_a_loop_over_time_are_not_taken_for_memory_beyond_the_plan() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            how: dict[str, Any] = {"batch_first": True, "bidirectional": True}
            self.recurrent, self.last = nn.GRU(8, 8, 2, **how), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.last(self.recurrent(x)[0])).square().mean()

    model, dynamic = Long(), {"x": {1: (4, 96)}}
    x = torch.randn(2, 96, 8)
    remat.fit(model, x, budget="100%", regions="breaks", dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for length in (96, 96, 40, 96):
            model(x[:, :length]).backward()
            model.zero_grad()
