"""Fake tensors laid out as the real kernels do it, for every layout of the inputs."""

import copy
from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import remat
from remat.capture.real_layouts import real_layouts

aten = torch.ops.aten
SHAPES = [(2, 3, 4), (2, 3, 4, 5)]


def layouts(shape: tuple[int, ...]) -> Iterator[Tensor]:
    for order in permutations(range(len(shape))):
        inverse = [order.index(i) for i in range(len(shape))]
        yield torch.randn([shape[i] for i in order]).permute(inverse)


def forward(x: Tensor) -> Any:
    ones, zeros = x.new_ones(x.shape[1]), x.new_zeros(x.shape[1])
    return aten._native_batch_norm_legit_functional(
        x, ones, zeros, zeros, ones, True, 0.1, 1e-5
    )


def backward(gradient: Tensor, x: Tensor) -> Any:
    ones = x.new_ones(x.shape[1])
    return aten.native_batch_norm_backward(
        gradient, x, ones, ones, ones, ones, ones, True, 1e-5, [True] * 3
    )


def strides(results: Any) -> list[tuple[int, ...]]:
    each = [results] if isinstance(results, Tensor) else results
    return [tensor.stride() for tensor in each]


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_is_laid_out_as_its_kernels_do_it(shape: tuple[int, ...]):
    gradients = [next(layouts(shape)), list(layouts(shape))[-1]]
    with real_layouts():
        for x, gradient in product(layouts(shape), gradients):
            with FakeTensorMode() as mode:
                fake, fake_gradient = mode.from_tensor(x), mode.from_tensor(gradient)
                found = strides(forward(fake)), strides(backward(fake_gradient, fake))
            assert found[0] == strides(forward(x))
            assert found[1] == strides(backward(gradient, x))


def gradient_of_layer_norm(gradient: Tensor, values: Tensor) -> Tensor:
    moment = values.new_ones(*values.shape[:-1], 1)
    return aten.native_layer_norm_backward(
        gradient,
        values,
        [values.shape[-1]],
        moment,
        moment,
        None,
        None,
        [True, False, False],
    )[0]


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": lambda x, y: aten.binary_cross_entropy(x.sigmoid(), y.sigmoid(), None, 0),
    "dropout": lambda x, y: aten.native_dropout_backward(x, y > 0, 2.0),
    "elu": lambda x, y: aten.elu_backward(x, 1.0, 1.0, 1.0, False, y),
    "glu": lambda x, y: aten.glu_backward(x, torch.cat([y, y], 1), 1),
    "hardsigmoid": aten.hardsigmoid_backward,
    "hardswish": aten.hardswish_backward,
    "hardtanh": lambda x, y: aten.hardtanh_backward(x, y, 0.0, 6.0),
    "huber": lambda x, y: aten.huber_loss_backward(x.new_ones(()), x, y, 1, 1.0),
    "layer norm": gradient_of_layer_norm,
    "log-softmax": lambda x, y: aten._log_softmax_backward_data(x, y, 1, torch.float32),
    "mse": lambda x, y: aten.mse_loss_backward(x.new_ones(()), x, y, 1),
    "roll": lambda x, _: x.roll(1, 1),
    "smooth l1": lambda x, y: aten.smooth_l1_loss_backward(
        x.new_ones(()), x, y, 1, 1.0
    ),
    "softplus": lambda x, y: aten.softplus_backward(x, y, 1.0, 20.0),
}


@pytest.mark.parametrize("operator", BINARY.values(), ids=BINARY.keys())
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_laid_out_as_their_kernels_do_it(
    operator: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
):
    some = list(layouts(shape))[::5]
    with real_layouts():
        for first, second in product(layouts(shape), some):
            with FakeTensorMode() as mode:
                found = operator(mode.from_tensor(first), mode.from_tensor(second))
            assert found.stride() == operator(first, second).stride()


CHANNELS_LAST = {
    "batch norm": lambda x, _: forward(x)[0],
    "batch norm's gradient": lambda x, y: backward(x, y)[0],
    "cat": lambda x, y: torch.cat([x, y], 1),
    "convolution": lambda x, _: torch.conv2d(x, x.new_ones(5, x.shape[1], 1, 1)),
    "dropout": lambda x, _: aten.native_dropout(x, 0.5, True)[0],
    "log-softmax": lambda x, _: x.log_softmax(1),
    "masked": lambda x, y: x.masked_fill(y > 0, 0.0),
    "product": lambda x, y: x * y,
    "relu": lambda x, _: x.relu(),
    "relu's gradient": lambda x, y: aten.threshold_backward(x, y, 0),
    "scaled": lambda x, _: x * 2.0,
    "upsampled": lambda x, _: aten.upsample_bilinear2d(x, [6, 6], False),
    "upsampled relu": lambda x, _: aten.upsample_bilinear2d(x.relu(), [6, 6], False),
}


@pytest.mark.parametrize("operator", CHANNELS_LAST.values(), ids=CHANNELS_LAST.keys())
@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (1, 3, 4, 5), (3, 1, 4, 5)])
def test_ambiguous_maps_are_laid_out_as_the_kernels_settle_it(
    operator: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
):
    _, c, h, w = shape
    plain = torch.randn(shape)
    last = torch.empty_strided(shape, (h * w * c, 1, w * c, c)).normal_()
    state = torch.get_rng_state()
    with real_layouts():
        for first, second in product([plain, last], repeat=2):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                found = operator(mode.from_tensor(first), mode.from_tensor(second))
            assert torch.equal(torch.get_rng_state(), state)
            assert found.stride() == operator(first, second).stride()
            torch.set_rng_state(state)


def test_the_tracer_is_left_as_it_was():
    before = FakeTensorMode._dispatch_impl
    with real_layouts():
        assert FakeTensorMode._dispatch_impl != before
    assert FakeTensorMode._dispatch_impl == before


class NormalisedAlongTheSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.linear(x))
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x.square().mean()


@pytest.mark.parametrize("solver", ["store-all", "chen-greedy", "lower-sets"])
def test_batch_norm_of_a_transposed_value_runs(solver: str):
    model, x = NormalisedAlongTheSequence(), torch.randn(16, 48, 32)
    report = remat.verify(
        model, x, budget="100%", solver=solver, costs="estimated", repeats=1
    )
    assert report.is_exact
    assert report.is_within_budget


class Pyramid(nn.Module):
    """A map beside itself pooled to one pixel and resized."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.deep = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
        self.pooled = nn.Conv2d(32, 32, 1)
        self.last = nn.Conv2d(64, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for convolution in self.deep:
            x = convolution(x).relu()
        pooled = self.pooled(functional.adaptive_avg_pool2d(x, 1)).relu()
        size = x.shape[-2:]
        pooled = functional.interpolate(pooled, size=size, mode="bilinear")
        return self.last(torch.cat([x, pooled], 1)).square().mean()


@pytest.mark.parametrize("budget", ["100%", "70%"])
def test_a_channels_last_pyramid_stays_within_its_budget(budget: str):
    model = Pyramid().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 64, 64).to(memory_format=torch.channels_last)
    report = remat.verify(model, x, budget=budget, solver="lower-sets", repeats=1)
    assert report.is_exact
    assert report.is_within_budget
    assert abs(report.prediction_error) < 0.01


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("regions", ["whole", "breaks"])
def test_batch_norm_of_one_pixel_runs_in_lower_precision(
    regions: Any, is_last: bool
) -> None:
    torch.manual_seed(0)
    first, norm = nn.Conv2d(3, 16, 3, padding=1, stride=4), nn.BatchNorm2d(16)
    last = nn.Conv2d(16, 16, 1).to(memory_format=torch.channels_last)
    model: Any = nn.Sequential(first, norm, last, nn.Flatten(), nn.Linear(16, 10))
    x: Any = torch.randn(8, 3, 4, 4)
    if is_last:
        model, x = (v.to(memory_format=torch.channels_last) for v in (model, x))
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        remat.fit(model, x, budget="150%", costs="estimated", regions=regions)
        for each in (model, plain):
            each(x).float().square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert torch.equal(model[1].running_var, plain[1].running_var)


class TokensToImage(nn.Module):
    """Reads tokens as the pixels of an image, whose strides the batch then decides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.last = nn.Linear(4, 8), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        image = self.tokens(x).transpose(1, 2).reshape(x.shape[0], 8, 6, 6)
        larger = functional.interpolate(image, scale_factor=2, mode="bilinear")
        return self.last(functional.dropout(larger.relu(), 0.5)).square().mean()


@pytest.mark.parametrize("batch_count", [1, 2])
def test_dropout_of_one_image_made_of_tokens_draws_the_same_mask(batch_count: int):
    x = torch.randn(batch_count, 36, 4)
    report = remat.verify(
        TokensToImage(), x, budget="100%", costs="estimated", repeats=1
    )
    assert report.against_captured == ()
    assert report.against_eager == ()
