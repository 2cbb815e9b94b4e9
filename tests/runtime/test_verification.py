"""Comparing two runs bit by bit."""

import math

import pytest
import torch
from torch import Tensor

from remat.training.verification import compare


def differs(one: Tensor, other: Tensor) -> bool:
    return bool(compare({"x": one}, {"x": other}))


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(4, 3, 2, 2),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(6, 4).T,
        torch.randn(8)[::2],
        torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(5, 512)[:, :1],
        torch.randn(1, 512)[:, :1],
        torch.tensor([True, False]),
        torch.tensor([math.nan, -0.0]),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.stride()} {value.dtype}",
)
def test_equal_bits_are_equal_whatever_the_strides(value: Tensor) -> None:
    assert not differs(value, value.clone())
    assert not differs(value, value.clone(memory_format=torch.contiguous_format))


def test_one_bit_is_a_difference() -> None:
    assert differs(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert differs(torch.ones(3), torch.ones(3, dtype=torch.float64))
    assert differs(torch.ones(3), torch.ones(3, 1))


def test_difference_names_the_largest() -> None:
    (found,) = compare({"x": torch.zeros(3)}, {"x": torch.tensor([0.0, 2.0, -3.0])})
    assert (found.name, found.largest) == ("x", 3.0)


def test_tensor_of_one_run_only_is_a_difference() -> None:
    (found,) = compare({"x": torch.zeros(3)}, {})
    assert found.name == "x"
    assert math.isnan(found.largest)
