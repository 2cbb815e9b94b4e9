"""Sizes that vary: expressions, conditions of a trace, and values at any of them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn

from remat.capture.varying_sizes import (
    Range,
    SizeInputs,
    VaryingSizes,
    is_symbol,
    may_be_one,
    size_inputs,
    surely_at_most,
    surely_equal,
    varies,
)
from remat.torch_compat.names import aot_autograd, maybe_mark_dynamic


class TracedError(Exception):
    """The joint graph was seen, and nothing else is to be done."""


def traced(
    function: Callable[..., torch.Tensor],
    tensors: list[torch.Tensor],
    ranges: list[Mapping[int, Range]],
    look: Callable[[VaryingSizes], None],
) -> None:
    """Look at the sizes of a function's joint graph while it is traced."""
    weight = nn.Parameter(torch.ones(8))

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        sizes = size_inputs(module, inputs, list(zip(tensors, ranges, strict=True)))
        assert isinstance(sizes, SizeInputs)

        def partition(joint: fx.GraphModule, *_: Any, **__: Any) -> Any:
            look(VaryingSizes(joint, sizes))
            raise TracedError

        return aot_autograd(fw_compiler=lambda g, _: g, partition_fn=partition)(
            module, inputs
        )

    for tensor, dims in zip(tensors, ranges, strict=True):
        maybe_mark_dynamic(tensor, list(dims))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: function(*args, weight), backend=backend, dynamic=False
    )
    with pytest.raises(Exception, match="TracedError"):
        compiled(*tensors)


def test_values_at_other_sizes_are_those_of_a_trace_of_them() -> None:
    def look(varying: VaryingSizes) -> None:
        for size in (5, 16):
            varying.set_sizes((size,))
            values = [
                node.meta["val"]
                for node in varying.joint.graph.nodes
                if isinstance(node.meta.get("val"), torch.Tensor)
            ]
            shapes = {tuple(value.shape) for value in values}
            assert (3, size, 8) in shapes
            assert (3, size // 2, 8) in shapes
            assert all(type(n) is int for shape in shapes for n in shape)
            halves = [v for v in values if tuple(v.shape) == (3, size // 2, 8)]
            # A slice lies in the block that it is cut out of.
            assert any(
                value.untyped_storage().nbytes() == 4 * 3 * size * 8 for value in halves
            )

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight)[:, : x.shape[1] // 2].exp().sum()

    traced(function, [torch.ones(3, 12, 8)], [{1: (5, 16)}], look)


def test_numbers_never_need_a_tensor() -> None:
    def look(varying: VaryingSizes) -> None:
        for node in varying.joint.graph.nodes:
            if is_symbol(node.meta.get("val")):
                assert all(is_symbol(n.meta["val"]) for n in node.all_input_nodes)
        assert varying.words(varying.inputs.traced[varying.inputs.places[0]]) == "n0"

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight).mean() / x.shape[1]

    traced(function, [torch.ones(3, 12, 8)], [{1: (5, 16)}], look)


def test_the_largest_sizes_are_those_that_the_trace_is_for() -> None:
    found: list[Any] = []

    def look(varying: VaryingSizes) -> None:
        found.append(varying.largest())
        samples = varying.samples()
        assert varying.is_for((9,))
        assert not varying.is_for((16,))
        assert all(size % 3 == 0 for (size,) in samples)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x * weight
        return (y.exp() if x.shape[1] % 3 == 0 else y.sin()).sum()

    traced(function, [torch.ones(3, 12, 8)], [{1: (5, 20)}], look)
    assert found == [(18,)]


def test_sizes_that_must_be_equal_are_one() -> None:
    found: list[Any] = []

    def look(varying: VaryingSizes) -> None:
        found.append((len(varying.inputs.symbols), varying.largest()))

    def function(
        x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return ((x + y) * weight).sum()

    tensors = [torch.ones(3, 12, 8), torch.ones(3, 12, 8)]
    traced(function, tensors, [{1: (2, 17)}, {1: (2, 17)}], look)
    assert found == [(1, (17,))]


def test_what_is_not_known_for_all_sizes_is_not_sure() -> None:
    found: list[int] = []

    def look(varying: VaryingSizes) -> None:
        size = varying.inputs.traced[varying.inputs.places[0]]
        environment = size.node.shape_env
        before = len(environment.guards)
        assert varies(size)
        assert not varies(12)
        assert surely_equal((3, size + 1), (3, 1 + size))
        assert not surely_equal(size, 12)
        assert not surely_equal((size,), (size, 1))
        assert surely_at_most(size, 2 * size)
        assert not surely_at_most(size, 100)
        assert not may_be_one(size)
        assert may_be_one(size // 2)
        assert may_be_one(1)
        # Nothing of this is a condition of the trace.
        assert len(environment.guards) == before
        found.append(before)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight).sum()

    traced(function, [torch.ones(3, 12, 8)], [{1: (5, 16)}], look)
    assert found


def test_the_larger_of_two_sizes_is_a_number_also_for_numbers_of_sympy() -> None:
    """The strides of fresh tensors are such, and the tracer's own sizes."""

    def look(varying: VaryingSizes) -> None:
        rows = next(s for s in varying.inputs.traced if is_symbol(s))
        larger = torch.sym_max(rows, 5)
        assert is_symbol(larger)
        for size in (3, 7):
            given: Any = (sympy.Integer(size),)
            assert varying.evaluated([larger], given) == [max(size, 5)]

    traced(lambda x, w: (x * w).sum(), [torch.ones(7, 8)], [{0: (2, 9)}], look)
