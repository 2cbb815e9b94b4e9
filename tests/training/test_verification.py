"""Verify: what it finds, what it restores, and what it must not miss."""

from typing import Any

import pytest
import torch
from tests.modules import make_case
from torch import nn
from torch.nn import functional

import remat
from remat.profile.live_memory import live_bytes
from remat.training.verification import TrainingStep, compare, default_loss


def mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.pow(2).mean()


def test_compare_sees_one_bit() -> None:
    one = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor(3)}
    assert not compare(one, {k: v.clone() for k, v in one.items()})
    (found,) = compare(one, {"a": torch.tensor([-0.0, 1.0]), "b": torch.tensor(3)})
    assert found.name == "a"
    changed = {"a": torch.tensor([0.0, 1.0 + 2**-23]), "b": torch.tensor(3)}
    assert compare(one, changed)[0].largest == pytest.approx(2**-23)
    assert len(compare(one, {"a": torch.zeros(3)})) == 2
    nan = {"a": torch.tensor([float("nan")])}
    assert not compare(nan, {"a": torch.tensor([float("nan")])})


def test_a_step_leaves_no_casts_of_weights_to_the_caller_s_autocast() -> None:
    """They are no tensors that Python knows, and would count for the next step."""
    model, x = nn.Linear(1024, 1024), torch.ones(2, 1024)
    step = TrainingStep(model, (x,), {}, mean_square, None)
    with torch.autocast("cpu", dtype=torch.bfloat16), step.restored():
        step.train(None)
        before = live_bytes(x.device)
        torch.clear_autocast_cache()
        after = live_bytes(x.device)
    assert before is not None
    assert after is not None
    assert before - after < 1 << 20


def test_whether_an_output_takes_a_gradient_is_compared() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output = self.linear(x)
            return output, output.detach()

    model, x = Detached(), torch.ones(2, 3)
    step = TrainingStep(model, (x,), {}, lambda found: found[0].sum(), None)
    with step.restored():
        expected = step.outcome(None)
        found = step.outcome(lambda x: (model.linear(x),) * 2)
    names = [difference.name for difference in compare(expected, found)]
    assert names == ["pass 1: output[1]", "pass 2: output[1]"]


class Deviating(nn.Module):
    """Counts its own calls in a way that only Python sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.linear(x) * 1.000001
        return self.linear(x)


def test_a_deviation_from_eager_is_reported() -> None:
    report = remat.verify(
        Deviating(), torch.randn(4, 8), budget="100%", loss=mean_square
    )
    assert report.is_exact
    assert report.against_eager
    assert "differ" in str(report)
    shown = repr(report)
    assert shown.startswith("<VerifyReport of Deviating: exact, budget ")
    assert len(shown) < 200
    assert report.summary()["against_eager"]


def test_everything_is_restored() -> None:
    case = make_case("conv net")
    model = case.model
    optimizer = torch.optim.Adam(model.parameters())
    mean_square(model(*case.args)).backward()
    remat.fit(model, case.args, budget="100%", loss=mean_square)
    installed = model._compiled_call_impl
    before = [p.detach().clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    state = torch.get_rng_state()
    remat.verify(
        model,
        case.args,
        budget="100%",
        optimizer=optimizer,
        loss=mean_square,
        repeats=1,
    )
    assert all(map(torch.equal, before, model.parameters()))
    assert all(map(torch.equal, buffers, model.buffers()))
    assert all(a is p.grad for a, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state
    assert model._compiled_call_impl is installed


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return torch.tanh(self.linear(x))


def test_a_model_that_changes_its_input_starts_from_the_same_batch() -> None:
    x = torch.randn(4, 8)
    kept = x.clone()
    report = remat.verify(ChangesItsInput(), x, budget="100%", loss=mean_square)
    assert report.is_exact
    assert not report.against_eager
    assert torch.equal(x, kept)


class TakesOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.offset = torch.randn(64, 8)

    def forward(
        self, x: torch.Tensor, *, dtype: torch.dtype, size: tuple[int, ...]
    ) -> torch.Tensor:
        return (self.linear(x) + self.offset).to(dtype).reshape(size)


def test_options_and_plain_tensors_of_the_model() -> None:
    report = remat.verify(
        TakesOptions(),
        torch.randn(64, 8),
        {"dtype": torch.float64, "size": (32, 16)},
        budget="100%",
        loss=mean_square,
    )
    assert report.is_exact
    assert 0 <= report.prediction_error < 0.1


def test_gradients_of_inputs_are_compared_and_counted() -> None:
    x = torch.randn(256, 64, requires_grad=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    report = remat.verify(model, x, budget="100%", loss=mean_square)
    assert report.is_exact
    assert report.is_within_budget
    assert x.grad is None
    step = TrainingStep(model, (x,), {}, mean_square, None)
    with step.restored():
        assert any("input" in name for name in step.outcome(None, 1))


TARGET = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))


def global_target_loss(out: torch.Tensor) -> torch.Tensor:
    return functional.smooth_l1_loss(out, TARGET)


@pytest.mark.parametrize("percent", ["100%", "92%"])
def test_large_outputs_and_a_loss_with_a_global_target(percent: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()]
    model, x = nn.Sequential(*layers), torch.randn(256, 32)
    report = remat.verify(model, x, budget=percent, loss=global_target_loss)
    assert report.is_within_budget
    assert 0 <= report.prediction_error < 0.02
    assert report.is_exact


def test_tangents_are_held_where_torch_holds_them(monkeypatch: Any) -> None:
    monkeypatch.setattr("remat.capture.surroundings.FREES_TANGENTS", False)
    model, x = nn.Linear(8, 64), torch.randn(4, 8)
    graph = remat.plan(model, x, budget=10**7, costs="estimated").graph
    *_, returned, step = graph.ops
    assert returned.is_external
    assert set(graph.tangents) <= set(returned.reads)
    # The optimizer steps when nobody holds them any more.
    assert not set(graph.tangents) & {*step.reads, *graph.final_outputs}


def test_default_loss() -> None:
    loss = torch.tensor(2.0, requires_grad=True)
    assert default_loss(loss) is loss
    assert default_loss({"loss": loss, "logits": torch.ones(3)}) is loss
    outputs = (torch.ones(2, requires_grad=True), torch.ones(3))
    assert default_loss(outputs).item() == 2.0
    with pytest.raises(remat.CaptureError, match="does not train"):
        default_loss([torch.ones(2)])


@pytest.mark.parametrize("is_model_on_meta", [False, True])
def test_meta_tensors_are_refused_as_by_fit(is_model_on_meta: bool) -> None:
    model = nn.Linear(3, 3, device="meta" if is_model_on_meta else "cpu")
    with pytest.raises(remat.CaptureError, match="has no memory"):
        remat.verify(model, torch.randn(2, 3, device="meta"), budget="90%")


@pytest.mark.parametrize("repeats", [0, -1, 1.5, True, 2**70])
def test_number_of_timed_steps_is_checked(repeats: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^repeats is "):
        remat.verify(nn.Linear(3, 3), torch.randn(2, 3), budget="1 GB", repeats=repeats)


def test_nothing_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    remat.verify(model, torch.randn(64, 16), budget="100%", repeats=1)
    assert not [record for record in caplog.records if record.name == "remat"]
