"""Which dimensions of the batch vary, between which sizes: the option ``dynamic``."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from remat.capture.varying_sizes import Range
from remat.torch_compat.names import maybe_mark_dynamic

DynamicShapes: TypeAlias = (
    Mapping[str, Mapping[int, Any]]
    | Mapping[int, Mapping[int, Any]]
    | Mapping[str | int, Mapping[int, Any]]
)
"""Argument, by name or position -> dimension -> ``(from, to)`` or a ``Dim``."""

Asked: TypeAlias = tuple[tuple[torch.Tensor, Mapping[int, Range]], ...]
"""Tensors of a call with dimensions that may vary, and their ranges."""

Call: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]

_SMALLEST = 2
"""The tracer makes another step of a dimension of size 1, and of an empty one."""

_FORM = "as in dynamic={'input_ids': {1: (2, 512)}}"


def checked_shapes(dynamic: Any) -> dict[str | int, dict[int, Range]]:
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
    found: dict[str | int, dict[int, Range]] = {}
    for argument, dims in dynamic.items():
        if not isinstance(argument, str | int) or isinstance(argument, bool):
            msg = (
                f"dynamic has the key {argument!r}; keys are names or positions of "
                f"arguments of forward, {_FORM}"
            )
            raise TypeError(msg)
        if not isinstance(dims, Mapping) or not dims:
            msg = (
                f"dynamic[{argument!r}] is {dims!r}; it must be a mapping from "
                f"dimensions to ranges, {_FORM}"
            )
            raise TypeError(msg)
        found[argument] = {
            _dimension(argument, dim): _range(f"dynamic[{argument!r}][{dim!r}]", limits)
            for dim, limits in dims.items()
        }
    if not found:
        msg = f"dynamic is empty: name what varies, {_FORM}, or leave it out"
        raise ValueError(msg)
    return found


def _dimension(argument: str | int, dim: Any) -> int:
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        msg = (
            f"dynamic[{argument!r}] has the key {dim!r}; dimensions are counted from 0, "
            f"{_FORM}"
        )
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
    by_name
        Name of a parameter of forward, or position beyond those with a name -> the
        dimensions that vary -> their ranges.
    names
        The names of forward's positional parameters, in order.
    """

    by_name: Mapping[str | int, Mapping[int, Range]]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls, model: nn.Module, by_argument: Mapping[str | int, Mapping[int, Range]]
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
        found: dict[str | int, Mapping[int, Range]] = {}
        for argument, dims in by_argument.items():
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
            if name in found:
                msg = f"dynamic names argument {name!r} twice, by name and by position"
                raise ValueError(msg)
            found[name] = dims
        return cls(found, names)

    def name_of(self, position: int) -> str | int:
        """Return under what name a positional argument is known here."""
        return self.names[position] if position < len(self.names) else position

    def dims_of(self, name: str | int, value: Any) -> dict[int, Range]:
        """Return the dimensions of a given argument that vary."""
        if not isinstance(value, torch.Tensor):
            return {}
        found = self.by_name.get(name, {})
        return {dim: limits for dim, limits in found.items() if dim < value.dim()}

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse an example that is not what is said to vary.

        Raises
        ------
        TypeError
            If an argument is no tensor.
        ValueError
            If an argument is missing, or a size is out of its range.
        """
        given = {self.name_of(i): value for i, value in enumerate(args)} | dict(kwargs)
        for name, dims in self.by_name.items():
            value = given.get(name)
            if value is None:
                msg = f"dynamic names {name!r}, which is not given in the example"
                raise ValueError(msg)
            if not isinstance(value, torch.Tensor):
                msg = (
                    f"dynamic names {name!r}, which is a {type(value).__name__} in the "
                    "example; only tensors have dimensions that vary"
                )
                raise TypeError(msg)
            for dim, (low, high) in dims.items():
                where = f"dimension {dim} of {name!r}"
                if dim >= value.dim():
                    msg = f"dynamic names {where}, which has {value.dim()} dimensions"
                    raise ValueError(msg)
                if not low <= value.shape[dim] <= high:
                    msg = (
                        f"{where} is {value.shape[dim]} in the example, which is not "
                        f"within dynamic's range from {low} to {high}"
                    )
                    raise ValueError(msg)

    def marked(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Call, Asked]:
        """Return a call whose tensors tell the tracer what varies, and these tensors.

        The caller's own tensors are not marked: other compilers see them, too.
        """
        asked: list[tuple[torch.Tensor, Mapping[int, Range]]] = []

        def marked(name: str | int, value: Any) -> Any:
            dims = {
                dim: limits
                for dim, limits in self.dims_of(name, value).items()
                if value.shape[dim] >= _SMALLEST
            }
            if not dims:
                return value
            alias = value if value.requires_grad else value.detach()
            maybe_mark_dynamic(alias, list(dims))
            asked.append((alias, dims))
            return alias

        call = (
            tuple(marked(self.name_of(i), value) for i, value in enumerate(args)),
            {name: marked(name, value) for name, value in kwargs.items()},
        )
        return call, tuple(asked)

    def largest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return stand-ins for a call, as large as it may become."""
        return self._resized(args, kwargs, 1)

    def smallest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return stand-ins for a call, as small as it may become."""
        return self._resized(args, kwargs, 0)

    def _resized(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], end: int
    ) -> Call:
        def resized(name: str | int, value: Any) -> Any:
            dims = self.dims_of(name, value)
            shape = [
                dims[dim][end] if dim in dims else size
                for dim, size in enumerate(getattr(value, "shape", ()))
            ]
            return (
                value if shape == [*getattr(value, "shape", ())] else _cut(value, shape)
            )

        return (
            tuple(resized(self.name_of(i), value) for i, value in enumerate(args)),
            {name: resized(name, value) for name, value in kwargs.items()},
        )

    def outside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return in words which sizes of a call are out of range, ``""`` if none is."""
        given = [*((self.name_of(i), v) for i, v in enumerate(args)), *kwargs.items()]
        return ", ".join(
            f"{value.shape[dim]} in dimension {dim} of {name!r} is outside of {low} to {high}"
            for name, value in given
            for dim, (low, high) in self.dims_of(name, value).items()
            if not low <= value.shape[dim] <= high
        )

    def words_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return in words the shapes of what varies in a call."""
        given = [*((self.name_of(i), v) for i, v in enumerate(args)), *kwargs.items()]
        return ", ".join(
            f"{name} {list(value.shape)}"
            for name, value in given
            if self.dims_of(name, value)
        )

    def words(self) -> str:
        """Return in words what varies."""
        return ", ".join(
            f"dimension {dim} of {name!r} from {low} to {high}"
            for name, dims in self.by_name.items()
            for dim, (low, high) in dims.items()
        )


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
