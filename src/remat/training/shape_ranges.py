"""Which dimensions of the batch vary, between which sizes: the option ``dynamic``."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from remat.capture.varying_sizes import Range
from remat.torch_compat.names import tree_flatten_with_path, tree_unflatten

DynamicShapes: TypeAlias = (
    Mapping[str, Any] | Mapping[int, Any] | Mapping[str | int, Any]
)
"""Argument, by name or position -> dimension -> ``(from, to)`` or a ``Dim``.

For a list or a mapping of tensors, a list or a mapping of these, with ``None`` for what
does not vary.
"""

Path: TypeAlias = tuple[str | int, ...]
"""An argument, and the places by which a tensor is found in it."""

Asked: TypeAlias = tuple[tuple[torch.Tensor, Mapping[int, Range]], ...]
"""Tensors of a call with dimensions that may vary, and their ranges."""

Call: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]

_SMALLEST = 2
"""The tracer makes another step of a dimension of size 1, and of an empty one."""

_FORM = "as in dynamic={'input_ids': {1: (2, 512)}}"
_NESTED_FORM = "as in dynamic={'targets': [{'boxes': {0: (2, 20)}}]}"


def checked_shapes(dynamic: Any) -> dict[Path, dict[int, Range]]:
    """Return what may vary, as far as that can be checked without an example.

    Raises
    ------
    TypeError
        If it is not a mapping of mappings.
    ValueError
        If a range is empty or has no upper end, or nothing varies.
    """
    if not isinstance(dynamic, Mapping):
        msg = f"dynamic is a {type(dynamic).__name__}; it must be a mapping, {_FORM}"
        raise TypeError(msg)
    for argument in dynamic:
        if not isinstance(argument, str | int) or isinstance(argument, bool):
            msg = (
                f"dynamic has the key {argument!r}; keys are names or positions of "
                f"arguments of forward, {_FORM}"
            )
            raise TypeError(msg)
    found = dict(_flattened((), dynamic.items()))
    if not found:
        msg = f"dynamic is empty: name what varies, {_FORM}, or leave it out"
        raise ValueError(msg)
    return found


def _flattened(
    path: Path, items: Iterable[tuple[str | int, Any]]
) -> Iterator[tuple[Path, dict[int, Range]]]:
    for key, value in items:
        here = (*path, key)
        if value is None:
            continue
        if isinstance(value, list | tuple):
            yield from _flattened(here, enumerate(value))
        elif not isinstance(value, Mapping) or not value:
            msg = (
                f"{_entry(here)} is {value!r}; it must be a mapping from dimensions to "
                f"ranges, {_FORM}, or a list or mapping of such, {_NESTED_FORM}"
            )
            raise TypeError(msg)
        elif any(isinstance(each, str) for each in value):
            yield from _flattened(here, value.items())
        else:
            yield (
                here,
                {
                    _dimension(here, dim): _range(_entry((*here, dim)), limits)
                    for dim, limits in value.items()
                },
            )


def _entry(path: Path) -> str:
    return "dynamic" + "".join(f"[{key!r}]" for key in path)


def _named(path: Path) -> str:
    name, *places = path
    return _words(path) if places else repr(name)


def _words(path: Path) -> str:
    name, *places = path
    return f"{name}{''.join(f'[{key!r}]' for key in places)}"


def _dimension(path: Path, dim: Any) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        msg = f"{_entry(path)} has the key {dim!r}; dimensions are counted from 0, {_FORM}"
        raise TypeError(msg)
    return dim


def _range(name: str, limits: Any) -> Range:
    if isinstance(limits, torch.export.Dim):
        low, high = limits.min, limits.max
    elif isinstance(limits, tuple | list) and len(limits) == 2:
        low, high = limits
    else:
        msg = (
            f"{name} is {limits!r}; it must be (from, to), such as (2, 512), or a "
            "torch.export.Dim with min and max"
        )
        raise TypeError(msg)
    if high is None or (isinstance(limits, torch.export.Dim) and not _is_int(high)):
        msg = (
            f"{name} has no upper end; the step is planned for its largest size, so give "
            "one: (2, 512), or Dim(..., max=512)"
        )
        raise ValueError(msg)
    if not _is_int(low) or not _is_int(high):
        msg = f"{name} is {limits!r}; both ends must be whole numbers"
        raise TypeError(msg)
    if not 0 < int(low) <= int(high):
        msg = f"{name} is from {low} to {high}; it must be from 1 or more up to no less"
        raise ValueError(msg)
    if high < _SMALLEST:
        msg = f"{name} is from {low} to {high}, which is one size; leave it out"
        raise ValueError(msg)
    return int(low), int(high)


def _is_int(number: Any) -> bool:
    # Bounds of a Dim may be integers of sympy.
    return not isinstance(number, bool) and (
        isinstance(number, int) or bool(getattr(number, "is_Integer", False))
    )


@dataclass(frozen=True)
class ShapeRanges:
    """Which dimensions of a model's arguments vary, and between which sizes.

    Parameters
    ----------
    by_path
        Name of a parameter of forward, or position beyond those with a name, and where
        in it a tensor is -> the dimensions that vary -> their ranges.
    names
        The names of forward's positional parameters, in order.
    """

    by_path: Mapping[Path, Mapping[int, Range]]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls, model: nn.Module, asked: Mapping[Path, Mapping[int, Range]]
    ) -> "ShapeRanges":
        """Return the ranges by the names that the model's forward gives its arguments.

        Raises
        ------
        ValueError
            If forward has no such argument, or one is named twice.
        """
        parameters = inspect.signature(model.forward).parameters.values()
        by_position = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        names = tuple(p.name for p in parameters if p.kind in by_position)
        kinds = {p.kind for p in parameters}
        known = {p.name for p in parameters if p.kind not in _VARIADIC}
        arguments: dict[str | int, str | int] = {}
        for argument in dict.fromkeys(path[0] for path in asked):
            name = argument
            if isinstance(argument, int):
                name = names[argument] if 0 <= argument < len(names) else argument
                is_known = 0 <= argument < len(names) or (
                    inspect.Parameter.VAR_POSITIONAL in kinds and argument >= 0
                )
            else:
                is_known = argument in known or inspect.Parameter.VAR_KEYWORD in kinds
            if not is_known:
                msg = (
                    f"dynamic names {argument!r}, which is no argument of "
                    f"{type(model).__name__}.forward: it takes {', '.join(names)}"
                )
                raise ValueError(msg)
            if name in arguments.values():
                msg = f"dynamic names argument {name!r} twice, by name and by position"
                raise ValueError(msg)
            arguments[argument] = name
        by_path = {(arguments[path[0]], *path[1:]): asked[path] for path in asked}
        return cls(by_path, names)

    def _varying(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Path, torch.Tensor, dict[int, Range]]]:
        """Yield the tensors of a call that vary, and in which dimensions."""
        for path, value in self._leaves(args, kwargs):
            dims = self._dims_of(path, value)
            if dims:
                yield path, value, dims

    def _leaves(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Path, Any]]:
        """Yield what is in the arguments in which something varies."""
        varying = self._arguments
        given = [*((self._name_of(i), v) for i, v in enumerate(args)), *kwargs.items()]
        for name, value in given:
            if name in varying:
                for keys, leaf in tree_flatten_with_path(value)[0]:
                    yield (name, *map(_place, keys)), leaf

    @property
    def _arguments(self) -> set[str | int]:
        """The arguments in which something varies."""
        return {path[0] for path in self.by_path}

    def _name_of(self, position: int) -> str | int:
        """Return under what name a positional argument is known here."""
        return self.names[position] if position < len(self.names) else position

    def _replaced(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        replace: Callable[[Path, Any], Any],
    ) -> Call:
        """Return a call with other values in the arguments that vary somewhere."""
        varying = self._arguments

        def replaced(name: str | int, value: Any) -> Any:
            if name not in varying:
                return value
            leaves, structure = tree_flatten_with_path(value)
            values = [
                replace((name, *map(_place, keys)), leaf) for keys, leaf in leaves
            ]
            return tree_unflatten(values, structure)

        return (
            tuple(replaced(self._name_of(i), value) for i, value in enumerate(args)),
            {name: replaced(name, value) for name, value in kwargs.items()},
        )

    def _dims_of(self, path: Path, value: Any) -> dict[int, Range]:
        """Return the dimensions of a value that vary."""
        if not isinstance(value, torch.Tensor):
            return {}
        found = self.by_path.get(path, {})
        return {dim: limits for dim, limits in found.items() if dim < value.dim()}

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse an example that is not what is said to vary.

        Raises
        ------
        TypeError
            If what is named is no tensor.
        ValueError
            If it is missing, or a size is out of its range.
        """
        given = dict(self._leaves(args, kwargs))
        for path, dims in self.by_path.items():
            value = given.get(path)
            if not isinstance(value, torch.Tensor):
                names = [*map(self._name_of, range(len(args))), *kwargs]
                raise _is_no_tensor(path, given, names)
            for dim, (low, high) in dims.items():
                where = f"dimension {dim} of {_named(path)}"
                if dim >= value.dim():
                    msg = f"dynamic names {where}, which has {value.dim()} dimensions"
                    raise ValueError(msg)
                if not low <= value.shape[dim] <= high:
                    msg = (
                        f"{where} is {value.shape[dim]} in the example, which is not "
                        f"within dynamic's range from {low} to {high}"
                    )
                    raise ValueError(msg)

    def varying(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Asked:
        """Return the tensors of a call whose dimensions the tracer may let vary."""
        found = [
            (
                value,
                {
                    d: limits
                    for d, limits in dims.items()
                    if value.shape[d] >= _SMALLEST
                },
            )
            for _, value, dims in self._varying(args, kwargs)
        ]
        return tuple((value, dims) for value, dims in found if dims)

    def largest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return stand-ins for a call, as large as it may become."""
        return self._resized(args, kwargs, lambda _size, limits: limits[1])

    def smallest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return stand-ins for a call, as small as it may become."""
        return self._resized(args, kwargs, lambda _size, limits: limits[0])

    def smaller(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call]:
        """Return stand-ins for calls in which nothing that varies is at its largest.

        What is smaller stays. What is not becomes smaller by one in the first call, and
        as small as one trace may be for all in the second.
        """

        def cut(size: int, limits: Range, *, by_one: bool) -> int:
            low, high = limits
            if _SMALLEST <= size < high:
                return size
            return min(max(low, _SMALLEST, high - 1 if by_one else 0), high)

        return [
            self._resized(args, kwargs, partial(cut, by_one=by_one))
            for by_one in (True, False)
        ]

    def _resized(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        choose: Callable[[int, Range], int],
    ) -> Call:
        # What is given twice is one tensor at any size.
        made: dict[tuple[int, tuple[int, ...]], Any] = {}

        def resized(path: Path, value: Any) -> Any:
            dims = self._dims_of(path, value)
            shape = tuple(
                choose(size, dims[dim]) if dim in dims else size
                for dim, size in enumerate(getattr(value, "shape", ()))
            )
            if shape == tuple(getattr(value, "shape", ())):
                return value
            key = id(value), shape
            if key not in made:
                made[key] = _cut(value, shape)
            return made[key]

        return self._replaced(args, kwargs, resized)

    def outside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return in words which sizes of a call are out of range, ``""`` if none is."""
        return ", ".join(
            f"{value.shape[dim]} in dimension {dim} of {_named(path)} is outside of "
            f"{low} to {high}"
            for path, value, dims in self._varying(args, kwargs)
            for dim, (low, high) in dims.items()
            if not low <= value.shape[dim] <= high
        )

    def words_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return in words the shapes of what varies in a call."""
        return ", ".join(
            f"{_words(path)} {list(value.shape)}"
            for path, value, _ in self._varying(args, kwargs)
        )

    def words(self) -> str:
        """Return in words what varies."""
        return ", ".join(
            f"dimension {dim} of {_named(path)} from {low} to {high}"
            for path, dims in self.by_path.items()
            for dim, (low, high) in dims.items()
        )


def _place(key: Any) -> str | int:
    """Return where a value is in what holds it: a position, a key or a name."""
    (place,) = astuple(key)
    return place


def _is_no_tensor(
    path: Path, given: Mapping[Path, Any], names: Iterable[str | int]
) -> Exception:
    """Return an error for a path at which a call, given such, holds no tensor."""
    # What holds it, or what it holds, if anything.
    holders = [path[:count] for count in range(1, len(path) + 1)]
    holder = next((each for each in holders if each in given), None)
    if holder is not None and given[holder] is not None:
        is_what = f"is a {type(given[holder]).__name__} in the example"
        msg = (
            f"dynamic names {_named(path)}, "
            f"{'which' if holder == path else f'and {_named(holder)}'} {is_what}; only "
            "tensors have dimensions that vary, by themselves or in lists, tuples and "
            "dicts. For tensors in other objects leave dynamic= out and give "
            "regions='breaks'"
        )
        return TypeError(msg)
    if any(each[: len(path)] == path for each in given):
        msg = (
            f"dynamic names {_named(path)}, which holds several values in the example: "
            f"name the tensors in it, {_NESTED_FORM}"
        )
        return TypeError(msg)
    msg = f"dynamic names {_named(path)}, which is not given in the example"
    parents = [path[:count] for count in range(len(path) - 1, 0, -1)]
    for parent in parents:
        inside = [each for each in given if each[: len(parent)] == parent]
        if inside:
            places = {each[len(parent)]: None for each in inside}
            found = ", ".join(map(repr, places))
            msg += f": {_named(parent)} holds {found}; name what varies by these"
            break
    else:
        msg += f", in which the model is given {', '.join(map(repr, names))}"
    return ValueError(msg)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def untouched_like(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return memory of another shape, whose dimensions lie as ``like``'s."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    made = like.new_empty([shape[dim] for dim in order])
    back = [order.index(dim) for dim in range(like.dim())]
    return made.permute(back).requires_grad_(like.requires_grad)


def _cut(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of another shape, with the values of one cut off or repeated."""
    made = untouched_like(value, shape)
    with torch.no_grad():
        for dim, size in enumerate(shape):
            places = torch.arange(size, device=value.device) % value.shape[dim]
            value = value.index_select(dim, places)
        made.copy_(value)
    return made
