"""Operators that may write their result over an argument that dies with them.

Tracing turns every in-place operation of the model, and every gradient that autograd
adds up in place, into one that allocates its result. Where an argument's block is free
right after the operator, the same kernel can write into that block instead: the numbers
are the same bit for bit, and no fresh memory has to be brought into the caches.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat.capture.joint_program import JointProgram
from remat.capture.varying_sizes import may_be_one, surely_equal, symbolic_value
from remat.torch_compat.names import OpOverload, make_contiguous_strides_for

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OverwritingVariant:
    """Another overload of an operator, which runs the same kernel.

    Parameters
    ----------
    target
        The overload.
    keyword
        Its argument that takes the block to write to, or ``None`` if it always writes
        over its first argument.
    """

    target: OpOverload
    keyword: str | None = "out"


VARIANTS: dict[Any, OverwritingVariant] = {
    _aten.add.Tensor: OverwritingVariant(_aten.add.out),
    _aten.sub.Tensor: OverwritingVariant(_aten.sub.out),
    _aten.mul.Tensor: OverwritingVariant(_aten.mul.out),
    _aten.div.Tensor: OverwritingVariant(_aten.div.out),
    _aten.neg.default: OverwritingVariant(_aten.neg.out),
    _aten.exp.default: OverwritingVariant(_aten.exp.out),
    _aten.tanh.default: OverwritingVariant(_aten.tanh.out),
    _aten.sigmoid.default: OverwritingVariant(_aten.sigmoid.out),
    _aten.rsqrt.default: OverwritingVariant(_aten.rsqrt.out),
    _aten.sqrt.default: OverwritingVariant(_aten.sqrt.out),
    _aten.silu.default: OverwritingVariant(_aten.silu.out),
    _aten.tanh_backward.default: OverwritingVariant(
        _aten.tanh_backward.grad_input, "grad_input"
    ),
    _aten.sigmoid_backward.default: OverwritingVariant(
        _aten.sigmoid_backward.grad_input, "grad_input"
    ),
    _aten.silu_backward.default: OverwritingVariant(
        _aten.silu_backward.grad_input, "grad_input"
    ),
    _aten.threshold_backward.default: OverwritingVariant(
        _aten.threshold_backward.grad_input, "grad_input"
    ),
    _aten.relu.default: OverwritingVariant(_aten.relu_.default, None),
}
"""Operator -> the overload that overwrites.

Elementwise operators alone: each element of the result is computed from the elements at
its own place, and written after they were read. An ``out`` overload is only named here
where the functional one is made from it; others compute a copy first.
"""


def overwritable_argument(
    program: JointProgram, node: fx.Node, free: Iterable[int]
) -> tuple[OverwritingVariant, int] | None:
    """Return how ``node`` can write its result over one of its arguments.

    Parameters
    ----------
    program
        The traced step.
    node
        An operator of its joint graph.
    free
        Storages that nothing needs after this run of ``node``, and that belong to the
        running pass alone: neither inputs nor values that forward saved.

    Returns
    -------
    tuple or None
        The overload to call, and the position of the argument to write over; ``None``
        if there is no such overload, or no argument whose block has the very layout of
        the result.
    """
    variant = VARIANTS.get(node.target)
    if variant is None:
        return None
    free = set(free)
    (result,) = program.storages_of[node]
    positions = range(len(node.args)) if variant.keyword else range(1)
    for position in positions:
        argument = node.args[position]
        if not isinstance(argument, fx.Node):
            continue
        storages = program.storages_of[argument]
        if (
            len(storages) == 1
            and storages[0] in free
            and _is_plain(program, storages[0])
            and _size_bytes(program, storages[0]) == _size_bytes(program, result)
            and _has_layout_of(symbolic_value(argument), symbolic_value(node))
            and _is_layout_sure(node)
            and not _is_read_otherwise(program, node, argument, storages[0])
        ):
            return variant, position
    return None


def overwritten_storage(
    program: JointProgram, node: fx.Node, free: Iterable[int]
) -> int | None:
    """Return the storage that ``node`` writes its result over, or ``None``.

    Parameters are those of :func:`overwritable_argument`.
    """
    found = overwritable_argument(program, node, free)
    if found is None:
        return None
    argument = node.args[found[1]]
    assert isinstance(argument, fx.Node)  # noqa: S101 - as the argument was found
    (storage,) = program.storages_of[argument]
    return storage


def _is_plain(program: JointProgram, storage: int) -> bool:
    """Return whether the storage's block was surely made by the op that wrote it.

    Other libraries' operators may return their argument although their schema denies
    it; where costs are estimated nobody has noticed.
    """
    nodes = program.base_nodes[storage]
    makers = [n.args[0] if n.target is operator.getitem else n for n in nodes]
    return bool(makers) and all(
        isinstance(maker, fx.Node)
        and isinstance(maker.target, OpOverload)
        and maker.target.namespace == "aten"
        for maker in makers
    )


def _size_bytes(program: JointProgram, storage: int) -> int:
    return program.graph.storages[storage].size_bytes


def _has_layout_of(argument: torch.Tensor, result: torch.Tensor) -> bool:
    return (
        surely_equal(argument.shape, result.shape)
        and surely_equal(argument.stride(), result.stride())
        and argument.dtype == result.dtype
        and argument.device == result.device
        and surely_equal(argument.storage_offset(), 0)
        and surely_equal(
            argument.untyped_storage().nbytes(), result.untyped_storage().nbytes()
        )
    )


def _is_layout_sure(node: fx.Node) -> bool:
    """Return whether a real run lays its result out as the tracer thinks.

    The stride of a dimension of size 1 says nothing about addresses, and real and fake
    tensors disagree on it; later kernels look at it all the same, and round otherwise.
    Only where everything is contiguous in the usual way is it the usual one.
    """
    if not any(map(may_be_one, symbolic_value(node).shape)):
        return True
    result: torch.Tensor = node.meta["val"]
    arguments = [other.meta["val"] for other in node.all_input_nodes]
    return result.stride() == make_contiguous_strides_for(result.shape) and all(
        isinstance(argument, torch.Tensor) and argument.is_contiguous()
        for argument in arguments
    )


def _is_read_otherwise(
    program: JointProgram, node: fx.Node, argument: fx.Node, storage: int
) -> bool:
    """Return whether ``node`` reads the storage through another view as well."""
    return any(
        storage in program.storages_of[other]
        for other in node.all_input_nodes
        if other is not argument
    )
