"""Every study model trains: one step, a finite loss, a gradient for every parameter."""

import pytest
import torch
from studies.models import MODELS, Options, Workload
from torch.nn import Dropout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TINY = Options(tiny=True)
NAMES = sorted(MODELS)


def run_step(workload: Workload, *, seed: int = 7) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = workload.training_loss()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", NAMES)
def test_step_gives_finite_loss_and_every_gradient(name: str) -> None:
    workload = MODELS[name](TINY)
    loss = run_step(workload)
    assert workload.name == name
    assert workload.model.training
    assert loss.shape == ()
    assert torch.isfinite(loss)
    for key, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("name", NAMES)
def test_loss_inside_is_the_same_loss(name: str) -> None:
    outside = run_step(MODELS[name](TINY))
    inside = MODELS[name](Options(tiny=True, is_loss_inside=True))
    assert inside.loss is None
    assert torch.equal(outside, run_step(inside))


@pytest.mark.parametrize("name", NAMES)
def test_building_is_deterministic_and_leaves_the_generator(name: str) -> None:
    before = torch.get_rng_state()
    first, second = MODELS[name](TINY), MODELS[name](TINY)
    assert torch.equal(before, torch.get_rng_state())
    for left, right in zip(
        first.model.state_dict().values(),
        second.model.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(left, right)
    for key, value in first.kwargs.items():
        assert torch.equal(value, second.kwargs[key])


def test_another_seed_gives_other_parameters() -> None:
    first = next(MODELS["gpt2"](TINY).model.parameters())
    second = next(MODELS["gpt2"](Options(tiny=True, seed=1)).model.parameters())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ["vgg19", "unet", "gpt2", "bert", "vit", "t5"])
def test_dropout_is_active(name: str) -> None:
    workload = MODELS[name](TINY)
    layers = [m for m in workload.model.modules() if isinstance(m, Dropout)]
    assert any(layer.p > 0 for layer in layers)
    first = run_step(workload, seed=1)
    assert not torch.equal(first, run_step(workload, seed=2))


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "t5", "llama"])
def test_eager_attention_trains(name: str) -> None:
    workload = MODELS[name](Options(tiny=True, attention="eager"))
    assert torch.isfinite(run_step(workload))


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_step_moves_parameters(name: str) -> None:
    workload = MODELS[name](TINY)
    optimizer = workload.make_optimizer(workload.model)
    before = [p.detach().clone() for p in workload.model.parameters()]
    run_step(workload)
    optimizer.step()
    after = list(workload.model.parameters())
    moved = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert any(moved)
