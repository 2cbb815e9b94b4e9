"""Sizes that vary in a traced step, and the step's values at any of them.

Where dimensions of the batch vary, the tracer computes with symbols in their place.
Everything that plans, measures and lowers needs numbers, so each value of the joint
graph is kept twice: with symbols, for the tracer and for other sizes, and as it is at
the sizes for which the step is planned.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.proxy import GraphAppendingTracer

from remat.core.errors import CaptureError
from remat.torch_compat.attributes import storage_bytes, storage_identity, viewed
from remat.torch_compat.metadata import example_of
from remat.torch_compat.names import (
    FakeTensor,
    FakeTensorMode,
    PythonReferenceAnalysis,
    disable_current_modes,
    sympy_interp,
    tree_map,
)

Range = tuple[int, int]
"""The smallest and the largest size of a dimension, both included."""

Sizes = tuple[int, ...]
"""The values of a step's symbols, in their order; empty where nothing varies."""

_SYMBOLIC = "symbolic_val"
_SYMBOL_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST_TRIALS = 65_536
_SAMPLES = 17


def is_symbol(value: object) -> bool:
    """Return whether a value is a number that depends on sizes that vary."""
    return isinstance(value, _SYMBOL_TYPES)


def is_without_bytes(value: object) -> bool:
    """Return whether a value of a node takes no memory on any device.

    That are numbers, and what says how tensors of several processes belong together:
    meshes of devices, groups of processes.
    """
    return value is not None and not isinstance(value, torch.Tensor | list | tuple)


def expression_of(number: Any) -> Any:
    """Return the expression of a number that depends on sizes, which has a hash."""
    return number.node.expr


def varies(size: object) -> bool:
    """Return whether a size may be another one in a call that is traced no more."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def surely_equal(first: Any, second: Any) -> bool:
    """Return whether two sizes, or two lists of them, are equal whatever varies.

    Says no where that is not known; asks for no guard.
    """
    if isinstance(first, Sequence) and isinstance(second, Sequence):
        return len(first) == len(second) and all(map(surely_equal, first, second))
    return statically_known_true(first == second)


def surely_at_most(first: Any, second: Any) -> bool:
    """Return whether a size is at most another one whatever varies."""
    return statically_known_true(first <= second)


def may_be_one(size: Any) -> bool:
    """Return whether a size is 1, or may be where others vary."""
    return size == 1 if isinstance(size, int) else not statically_known_true(size > 1)


def symbolic_value(node: fx.Node) -> Any:
    """Return the value of a node as the tracer knows it, with symbols if sizes vary."""
    return node.meta.get(_SYMBOLIC, node.meta.get("val"))


def restore_symbols(module: fx.GraphModule) -> None:
    """Give the nodes of a lowered graph the values that the tracer knows."""
    for node in module.graph.nodes:
        if _SYMBOLIC in node.meta:
            node.meta["val"] = node.meta.pop(_SYMBOLIC)


class FixedSizesError(CaptureError):
    """Sizes that were to vary are one number in the trace."""


class UnequalRangesError(CaptureError):
    """Dimensions that are always of one size were given different ranges."""


@dataclass(frozen=True, slots=True)
class SizeInputs:
    """The inputs of a traced function that are sizes, and the symbols they stand for.

    Parameters
    ----------
    symbols
        The symbols, in the order of their first input.
    places
        Per symbol the position of an input that is it, or else of a view of a block
        whose size depends on it.
    ranges
        Per symbol the range that was asked for, ``None`` if none was.
    first
        The symbols' values in the call that was traced.
    block_bytes
        Per symbol the size of the block then, 0 where none depends on it.
    traced
        The inputs as the tracer knows them.
    shapes
        Of each tensor with dimensions that may vary its shape, with symbols; ``None``
        if it is no input.
    """

    symbols: tuple[Any, ...]
    places: tuple[int, ...]
    ranges: tuple[Range | None, ...]
    first: Sizes
    block_bytes: tuple[int, ...]
    traced: tuple[Any, ...]
    shapes: tuple[tuple[Any, ...] | None, ...]

    def sizes_in(self, inputs: Sequence[Any]) -> Sizes:
        """Return the symbols' values in a call."""
        return tuple(
            [
                # No operator of the function sees the rest of a view's block.
                -(-first * storage_bytes(given) // block_bytes)
                if isinstance(given := inputs[place], torch.Tensor)
                else given
                for place, first, block_bytes in zip(
                    self.places, self.first, self.block_bytes, strict=True
                )
            ]
        )

    def begun_with(self, inputs: Sequence[Any]) -> "SizeInputs":
        """Return the same as if this call had been traced."""
        bytes_now = [
            storage_bytes(inputs[place]) if block_bytes else 0
            for place, block_bytes in zip(self.places, self.block_bytes, strict=True)
        ]
        first = self.sizes_in(inputs)
        return replace(self, first=first, block_bytes=tuple(bytes_now))

    def conditions(self) -> tuple[Any, ...]:
        """Return what the tracer takes for known of the sizes: more with each guard.

        When the trace is over nobody checks further ones, so code that was compiled
        since they were added is not for all sizes.
        """
        if not self.symbols:
            return ()
        environment = next(filter(is_symbol, self.traced)).node.shape_env
        return (
            len(environment.guards),
            dict(environment.replacements),
            [environment.var_to_range[symbol] for symbol in self.symbols],
        )

    def is_asked_for(self, sizes: Sizes) -> bool:
        """Whether sizes lie in the ranges that were asked for."""
        return all(
            asked is None or asked[0] <= size <= asked[1]
            for size, asked in zip(sizes, self.ranges, strict=True)
        )


def size_inputs(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    asked: Sequence[tuple[torch.Tensor, Mapping[int, Range]]],
) -> SizeInputs | None:
    """Return which inputs of a traced function are sizes, or ``None`` if none is.

    Parameters
    ----------
    module
        What the tracer hands over.
    inputs
        What it is called with now.
    asked
        The tensors with dimensions that may vary, and their ranges.

    Raises
    ------
    UnequalRangesError
        If dimensions that are always of one size have different ranges.
    """
    nodes = list(module.graph.find_nodes(op="placeholder"))
    traced = tuple(example_of(node) for node in nodes)
    if not any(map(is_symbol, traced)):
        return None
    values: dict[Any, int] = {}
    ranges: dict[Any, Range] = {}
    for fake, real in zip(traced, inputs, strict=True):
        if not isinstance(fake, torch.Tensor):
            continue
        limits = next((found for tensor, found in asked if tensor is real), {})
        for dim, symbol in _symbols_in(fake):
            values[symbol] = real.shape[dim]
            if dim in limits and ranges.setdefault(symbol, limits[dim]) != limits[dim]:
                (low, high), (least, most) = ranges[symbol], limits[dim]
                msg = (
                    f"dynamic lets one dimension go from {low} to {high} and another "
                    f"from {least} to {most}, and the model needs them to be of one "
                    "size: give both the same range"
                )
                raise UnequalRangesError(msg)
    places: dict[Any, int] = {}
    for place, value in enumerate(traced):
        if is_symbol(value) and expression_of(value).is_Symbol:
            places.setdefault(expression_of(value), place)
            # A number of the caller's need be no size of a tensor. To take it for an
            # integer would let the trace be for this one alone.
            values.setdefault(expression_of(value), value.node.hint)
    blocks: dict[Any, int] = {}
    for place, symbol, value in _symbols_of_blocks(traced, inputs):
        if symbol not in places:
            places[symbol], values[symbol] = place, value
            blocks[symbol] = storage_bytes(inputs[place])
    symbols = tuple(symbol for symbol in places if symbol in values)
    return SizeInputs(
        symbols=symbols,
        places=tuple(places[symbol] for symbol in symbols),
        ranges=tuple(ranges.get(symbol) for symbol in symbols),
        first=tuple(values[symbol] for symbol in symbols),
        block_bytes=tuple(blocks.get(symbol, 0) for symbol in symbols),
        traced=traced,
        shapes=tuple(
            next(
                (
                    tuple(fake.shape)
                    for fake, real in zip(traced, inputs, strict=True)
                    if real is tensor
                ),
                None,
            )
            for tensor, _ in asked
        ),
    )


def _symbols_of_blocks(
    traced: Sequence[Any], inputs: Sequence[Any]
) -> Iterator[tuple[int, Any, int]]:
    """Yield where views are given, and what varies of what they are views of."""
    for place, (fake, real) in enumerate(zip(traced, inputs, strict=True)):
        if not isinstance(fake, torch.Tensor):
            continue
        base, real_base = viewed(fake), viewed(real)
        if base is not None and real_base is not None:
            for dim, symbol in _symbols_in(base):
                yield place, symbol, real_base.shape[dim]


def _symbols_in(fake: torch.Tensor) -> list[tuple[int, Any]]:
    """Return the dimensions of a traced tensor that vary by themselves."""
    sizes = [(d, expression_of(s)) for d, s in enumerate(fake.shape) if is_symbol(s)]
    return [(dim, symbol) for dim, symbol in sizes if symbol.is_Symbol]


class VaryingSizes:
    """The values of a joint graph at any sizes of what varies in it.

    Parameters
    ----------
    joint
        A functional joint graph, annotated with fake tensors whose sizes are symbolic.
        Numbers that are read from tensors are computed from its inputs instead, in
        place, so that no tensor must be live for them.
    inputs
        The sizes among the inputs of the traced function.

    Raises
    ------
    CaptureError
        If a size depends on something that is no input.
    """

    def __init__(self, joint: fx.GraphModule, inputs: SizeInputs) -> None:
        self.joint = joint
        self.inputs = inputs
        self._names = {symbol: f"n{i}" for i, symbol in enumerate(inputs.symbols)}
        self._sources: dict[Any, fx.Node] = {}
        for node in joint.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            if is_symbol(value) and value.node.expr.is_Symbol:
                self._sources.setdefault(value.node.expr, node)
        self._take_from_inputs()
        for node in joint.graph.nodes:
            if "val" in node.meta:
                node.meta[_SYMBOLIC] = node.meta["val"]
        self.sizes = inputs.first

    def _take_from_inputs(self) -> None:
        graph = self.joint.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        made: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            value = node.meta.get("val")
            if not is_symbol(value):
                continue
            expression = value.node.expr
            known = self._sources.get(expression)
            if known is not None and known is not node:
                node.replace_all_uses_with(known)
            elif any(not is_symbol(n.meta["val"]) for n in node.all_input_nodes):
                if expression not in made:
                    made[expression] = self._computed(expression, first)
                node.replace_all_uses_with(made[expression])
            else:
                continue
            if node.op != "placeholder":
                graph.erase_node(node)
        for node in reversed(graph.nodes):
            # Only its sizes were read.
            if node.target is torch.ops.aten.empty_like.default and not node.users:
                graph.erase_node(node)
        self.joint.recompile()

    def _computed(self, expression: Any, before: fx.Node) -> fx.Node:
        """Return a new node for an expression, computed from the inputs."""
        graph = self.joint.graph
        known = set(graph.nodes)
        with graph.inserting_before(before):
            tracer = GraphAppendingTracer(graph)
            proxies = {s: fx.Proxy(n, tracer) for s, n in self._sources.items()}
            try:
                found: Any = sympy_interp(PythonReferenceAnalysis, proxies, expression)
            except KeyError as error:
                raise self._unknown(error) from error
        for node in graph.nodes:
            if node not in known:
                args, kwargs = fx.map_arg(
                    (node.args, node.kwargs), lambda n: n.meta["val"]
                )
                node.meta["val"] = node.target(*args, **kwargs)
        return found.node

    def _unknown(self, error: KeyError) -> CaptureError:
        return CaptureError(
            f"a size of the step depends on {error.args[0]}, which is no size of its "
            "inputs; leave dynamic= out, so that each shape is planned by itself"
        )

    # --- numbers -----------------------------------------------------------------

    def evaluated(self, numbers: Sequence[Any], sizes: Sizes) -> list[Any]:
        """Return numbers that depend on sizes, at given sizes."""
        known: dict[Any, Any] = {}
        return [self.number_at(number, sizes, known) for number in numbers]

    def number_at(self, number: Any, sizes: Sizes, known: dict[Any, Any]) -> Any:
        """Return a number at sizes, and remember it by its expression in ``known``."""
        if not is_symbol(number):
            return number
        expression = number.node.expr
        if expression not in known:
            # The tracer's own sizes are numbers of sympy, of which it takes no maximum.
            values = dict(zip(self.inputs.symbols, map(int, sizes), strict=True))
            try:
                found = sympy_interp(PythonReferenceAnalysis, values, expression)
            except KeyError as error:
                raise self._unknown(error) from error
            known[expression] = found if isinstance(found, bool | float) else int(found)
        return known[expression]

    def words(self, number: Any) -> str:
        """Return a number in words, whatever the tracer calls its symbols."""
        if not is_symbol(number):
            return repr(number)
        expression = number.node.expr
        names = {s: type(s)(n) for s, n in self._names.items()}
        return str(expression.xreplace(names))

    # --- values ------------------------------------------------------------------

    def set_sizes(self, sizes: Sizes) -> None:
        """Let the nodes of the joint graph have the values that they have at sizes."""
        self.sizes = sizes
        convert = _AtSizes(self, sizes)
        # The tracer's modes would look at each of the new tensors, too.
        with disable_current_modes():
            for node in self.joint.graph.nodes:
                if _SYMBOLIC in node.meta:
                    node.meta["val"] = tree_map(convert, node.meta[_SYMBOLIC])

    def value_at(self, node: fx.Node, sizes: Sizes) -> Any:
        """Return the value of one node at sizes."""
        return tree_map(_AtSizes(self, sizes), symbolic_value(node))

    # --- which sizes the trace is for ----------------------------------------------

    def largest(self) -> Sizes:
        """Return the largest sizes that were asked for and that the trace is for.

        A trace is for those sizes at which the model's code takes the same path.
        """
        for sizes in self._descending():
            if self.is_for(sizes):
                return sizes
        return self.inputs.first

    def _descending(self) -> Iterator[Sizes]:
        first = self.inputs.first
        ranges = [
            asked or (size, size)
            for asked, size in zip(self.inputs.ranges, first, strict=True)
        ]
        longest = max(high - low for low, high in ranges)
        for less in range(min(longest + 1, _MOST_TRIALS)):
            yield tuple(max(low, high - less) for low, high in ranges)

    def samples(self) -> list[Sizes]:
        """Return sizes from the smallest to the largest, for which the trace is, too.

        All dimensions together, and each one alone with the others at the largest.
        """
        largest = self.largest()
        ranges = [
            (asked[0] if asked else size, size)
            for asked, size in zip(self.inputs.ranges, largest, strict=True)
        ]
        # Sizes of 1 and 0 are never the trace's.
        ranges = [(max(low, min(2, high)), high) for low, high in ranges]
        found: dict[Sizes, None] = {}
        for step in range(_SAMPLES):
            part = step / (_SAMPLES - 1)
            sizes = tuple(round(low + part * (high - low)) for low, high in ranges)
            found[sizes] = None
            if len(sizes) > 1:
                for place, size in enumerate(sizes):
                    found[*largest[:place], size, *largest[place + 1 :]] = None
        return [sizes for sizes in found if self.is_for(sizes)]

    def is_for(self, sizes: Sizes) -> bool:
        """Whether the model takes the path that was traced at other sizes, too."""
        environment = self._environment()
        values = dict(zip(self.inputs.symbols, sizes, strict=True))
        for symbol in list(environment.replacements):
            # What was found to be equal to others, or to be one number alone.
            found = environment.replace(symbol)
            number = _evaluated(found, values)
            if symbol not in values and number is not None:
                values[symbol] = number
            elif values.get(symbol, number) != number:
                return False
        return all(_holds(guard.expr, values) for guard in environment.guards)

    def fixed(self) -> list[str]:
        """Return what of the sizes turned out to be one number alone, in words."""
        environment, first = self._environment(), self.inputs.first
        # Arithmetic with floats pins sizes by conditions alone.
        is_pinned = self.largest() == first
        return [
            f"a size that is {size} in the example"
            for symbol, size, asked in zip(
                self.inputs.symbols, first, self.inputs.ranges, strict=True
            )
            if environment.replace(symbol).is_number
            or (is_pinned and asked is not None and size < asked[1])
        ]

    def _environment(self) -> Any:
        """Return where the tracer notes what held on the way that the model took."""
        fakes = (value for value in self.inputs.traced if is_symbol(value))
        return next(fakes).node.shape_env


def _evaluated(expression: Any, values: dict[Any, Any]) -> Any:
    try:
        return sympy_interp(PythonReferenceAnalysis, values, expression)
    except KeyError:
        return None


def _holds(condition: Any, values: dict[Any, Any]) -> bool:
    try:
        return bool(sympy_interp(PythonReferenceAnalysis, values, condition))
    except KeyError:
        return True  # About what is none of the step's sizes.
    except ZeroDivisionError:
        return False


class _AtSizes:
    """Makes the fake tensors of a graph anew, with numbers for sizes."""

    def __init__(self, varying: VaryingSizes, sizes: Sizes) -> None:
        self.varying = varying
        self.sizes = sizes
        self.mode = FakeTensorMode()
        self.known: dict[Any, Any] = {}
        self.blocks: dict[int, torch.UntypedStorage] = {}

    def __call__(self, value: Any) -> Any:
        if is_symbol(value):
            return self.number(value)
        if isinstance(value, FakeTensor) and value.layout is torch.strided:
            return self.tensor(value)
        return value

    def number(self, value: Any) -> Any:
        return self.varying.number_at(value, self.sizes, self.known)

    def tensor(self, value: FakeTensor) -> torch.Tensor:
        shape = [self.number(size) for size in value.shape]
        stride = [self.number(step) for step in value.stride()]
        offset = self.number(value.storage_offset())
        # Views made under the mode would take ten times as long.
        bare = torch.empty(0, dtype=value.dtype, device="meta")
        bare.set_(self.block(value), offset, shape, stride)
        made = FakeTensor(self.mode, bare, value.device)
        with self.mode, torch.no_grad():
            return made.conj() if value.is_conj() else made

    def block(self, value: FakeTensor) -> torch.UntypedStorage:
        key = storage_identity(value)
        if key not in self.blocks:
            size_bytes = self.number(value.untyped_storage().nbytes())
            self.blocks[key] = torch.UntypedStorage(size_bytes, device="meta")
        return self.blocks[key]


def at_largest(tensor: torch.Tensor, ranges: Mapping[int, Range]) -> torch.Tensor:
    """Return a tensor without memory that is as large as one may become."""
    with FakeTensorMode():
        return torch.empty(
            largest_shape(tensor, ranges), dtype=tensor.dtype, device=tensor.device
        )


def largest_shape(tensor: torch.Tensor, ranges: Mapping[int, Range]) -> list[int]:
    """Return the shape that a tensor has where it is as large as it may become."""
    shape = list(tensor.shape)
    for dim, (_, largest) in ranges.items():
        shape[dim] = max(shape[dim], largest)
    return shape
