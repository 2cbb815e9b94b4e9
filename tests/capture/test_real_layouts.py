"""Fake tensors laid out as the real kernels do it, for every layout of the inputs."""

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode

import remat
from remat.capture.real_layouts import real_layouts

aten = torch.ops.aten
SHAPES = [(2, 3, 4), (2, 3, 4, 5)]


def layouts(shape: tuple[int, ...]) -> Iterator[Tensor]:
    for order in permutations(range(len(shape))):
        inverse = [order.index(i) for i in range(len(shape))]
        yield torch.randn([shape[i] for i in order]).permute(inverse)


def forward(x: Tensor) -> Any:
    ones, zeros = x.new_ones(3), x.new_zeros(3)
    return aten._native_batch_norm_legit_functional(
        x, ones, zeros, zeros, ones, True, 0.1, 1e-5
    )


def backward(gradient: Tensor, x: Tensor) -> Any:
    ones = x.new_ones(3)
    return aten.native_batch_norm_backward(
        gradient, x, ones, ones, ones, ones, ones, True, 1e-5, [True] * 3
    )


def gradient_of_log_softmax(gradient: Tensor, output: Tensor) -> Any:
    return aten._log_softmax_backward_data(gradient, output, 1, torch.float32)


def gradient_of_dropout(gradient: Tensor, mask: Tensor) -> Any:
    return aten.native_dropout_backward(gradient, mask > 0, 2.0)


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


def gradient_of_layer_norm(gradient: Tensor, values: Tensor) -> Any:
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
    )[:1]


@pytest.mark.parametrize(
    "operator",
    [gradient_of_log_softmax, gradient_of_dropout, gradient_of_layer_norm],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_laid_out_as_their_kernels_do_it(
    operator: Callable[[Tensor, Tensor], Any], shape: tuple[int, ...]
):
    with real_layouts():
        for gradient, other in product(layouts(shape), repeat=2):
            with FakeTensorMode() as mode:
                found = strides(
                    operator(mode.from_tensor(gradient), mode.from_tensor(other))
                )
            assert found == strides(operator(gradient, other))


def test_the_tracer_is_left_as_it_was():
    before = dict(decomposition_table)
    with real_layouts():
        assert decomposition_table != before
    assert decomposition_table == before


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
