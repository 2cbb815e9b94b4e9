"""Describe an operator's arguments, and make real tensors like them.

An argument is any nesting of lists, tuples and dicts; its leaves are tensors (real or
fake), numbers, text, ``None``, dtypes, devices, layouts and memory formats. A tensor is
described by everything that can change the cost of an operator: dtype, device, shape,
strides, offset, the size of its storage, and which of the other tensors share it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from remat.core.errors import ProfileError
from remat.torch_compat.attributes import storage_identity
from remat.torch_compat.names import OpOverload, tree_leaves

_POOL_COUNT = 1 << 16


@dataclass(frozen=True, slots=True)
class Fill:
    """Which values made tensors hold; an operator may refuse some values.

    Parameters
    ----------
    name
        For people.
    integer
        Value of every integer; 0 is valid as an index.
    floats
        Makes a float32 block of the given count of values.
    """

    name: str
    integer: int
    floats: Callable[[int, torch.Generator], torch.Tensor]


_HOW: Any = {"dtype": torch.float32, "device": "cpu"}


def _normal(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, generator=generator, **_HOW) * 0.1


def _probability(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(count, generator=generator, **_HOW) * 0.8 + 0.1


def _ones(count: int, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG001
    return torch.ones(count, **_HOW)


FILLS = (
    Fill("normal floats, integers 0", 0, _normal),
    Fill("floats between 0 and 1, integers 1", 1, _probability),
    Fill("ones", 1, _ones),
)
"""The fills in the order in which they are tried."""


@dataclass(slots=True)
class Description:
    """What identifies an operator call.

    Parameters
    ----------
    text
        Canonical text; equal for calls of equal cost.
    is_complete
        Whether the text says everything; if not, two calls of equal text may differ.
    device_types
        The kinds of device that its tensors are on.
    hides_devices
        Whether the text says ``device`` for all of them, so that it is equal for calls
        on other devices.
    """

    text: str
    is_complete: bool = True
    hides_devices: bool = False
    device_types: set[str] = field(default_factory=set[str])


def target_name(target: Callable[..., Any]) -> str:
    """Return the name of an operator, its overload included."""
    if isinstance(target, OpOverload):
        return str(target)
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{module}.{name}" if name else repr(target)


def describe(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    hides_devices: bool = False,
) -> Description:
    """Describe one call."""
    result = Description(text="", hides_devices=hides_devices)
    storages: dict[int, int] = {}
    parts = [_describe(item, result, storages) for item in args]
    parts += [
        f"{name}={_describe(item, result, storages)}"
        for name, item in sorted(kwargs.items())
    ]
    result.text = f"{target_name(target)}({', '.join(parts)})"
    return result


def _describe(item: Any, result: Description, storages: dict[int, int]) -> str:
    match item:
        case torch.Tensor():
            result.device_types.add(item.device.type)
            place = "device" if result.hides_devices else str(item.device)
            return _describe_tensor(item, place, storages)
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return repr(_plain_number(item))
        case torch.device():
            result.device_types.add(item.type)
            return "device" if result.hides_devices else repr(item)
        case list() | tuple():
            items = cast("Sequence[Any]", item)
            inner = ", ".join(_describe(i, result, storages) for i in items)
            return f"[{inner}]"
        case dict():
            pairs = cast("Mapping[Any, Any]", item)
            inner = ", ".join(
                f"{key!r}: {_describe(value, result, storages)}"
                for key, value in pairs.items()
            )
            return f"{{{inner}}}"
        case (
            None
            | bool()
            | int()
            | float()
            | complex()
            | str()
            | torch.dtype()
            | torch.layout()
            | torch.memory_format()
        ):
            return repr(item)
        case _:
            result.is_complete = False
            return f"<{type(item).__qualname__}>"


def _describe_tensor(tensor: torch.Tensor, place: str, storages: dict[int, int]) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    shape = [_plain_number(n) for n in tensor.shape]
    text = f"{name} {shape} {place}"
    if tensor.layout is not torch.strided:
        return f"{text} {tensor.layout}"
    stride = [_plain_number(n) for n in tensor.stride()]
    text += f" strides {stride}"
    offset = _plain_number(tensor.storage_offset())
    size = _storage_bytes(tensor)
    if offset or size != _extent(tensor) * tensor.element_size():
        text += f" offset {offset} of {size} bytes"
    if size:
        key = storage_identity(tensor)
        if key in storages:
            text += f" in storage {storages[key]}"
        storages.setdefault(key, len(storages))
    return text


def _plain_number(item: Any) -> Any:
    match item:
        case torch.SymInt():
            return int(item)
        case torch.SymFloat():
            return float(item)
        case torch.SymBool():
            return bool(item)
        case _:
            return item


def _extent(tensor: torch.Tensor) -> int:
    if any(n == 0 for n in tensor.shape):
        return 0
    return 1 + sum(
        (int(n) - 1) * int(stride)
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def tensors_in(item: Any) -> list[torch.Tensor]:
    """Return the tensors nested in ``item``, in order."""
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor)]


def empty_like(
    tensor: torch.Tensor, device: torch.device | None = None
) -> torch.Tensor:
    """Return a new tensor of this shape, strides and type, by default where it is."""
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=device or tensor.device,
    )


class ArgumentMaker:
    """Make real tensors like given ones, sharing storages where those do.

    Values come from a generator of its own: the global ones do not move.

    Parameters
    ----------
    fill
        Which values the tensors hold; ``None`` for whatever the memory holds.
    """

    def __init__(self, fill: Fill | None = FILLS[0]) -> None:
        self._fill = fill
        self._generator = torch.Generator().manual_seed(0)
        self._pools: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}

    def make(self, item: Any) -> Any:
        """Return ``item`` with real tensors in place of its tensors.

        Raises
        ------
        ProfileError
            If a tensor is neither dense nor strided.
        """
        match item:
            case torch.Tensor():
                return self._tensor(item)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return _plain_number(item)
            case list():
                return [self.make(inner) for inner in cast("list[Any]", item)]
            case tuple():
                items = cast("tuple[Any, ...]", item)
                return tuple(self.make(inner) for inner in items)
            case dict():
                pairs = cast("dict[Any, Any]", item)
                return {key: self.make(value) for key, value in pairs.items()}
            case _:
                return item

    def _tensor(self, like: torch.Tensor) -> torch.Tensor:
        if like.layout is not torch.strided or like.is_quantized:
            msg = (
                f"a tensor of layout {like.layout} and dtype {like.dtype} cannot be "
                "made for profiling; only dense, strided tensors can"
            )
            raise ProfileError(msg)
        key = storage_identity(like)
        block = self._storages.get(key) if _storage_bytes(like) else None
        if block is None:
            block = self._block(like)
            self._storages[key] = block
        elif block.dtype != like.dtype:
            block = block.view(torch.uint8)[: _whole(block, like)].view(like.dtype)
        return torch.as_strided(
            block,
            [int(n) for n in like.shape],
            [int(n) for n in like.stride()],
            int(like.storage_offset()),
        )

    def _block(self, like: torch.Tensor) -> torch.Tensor:
        needed = _extent(like) + int(like.storage_offset())
        count = max(needed, _storage_bytes(like) // like.element_size())
        block = torch.empty(count, dtype=like.dtype, device=like.device)
        is_float = like.dtype.is_floating_point or like.dtype.is_complex
        if self._fill is None:
            return block
        if is_float or like.dtype is torch.bool:
            self._tile(block, self._fill)
        else:
            block.fill_(self._fill.integer)
        return block

    def _tile(self, block: torch.Tensor, fill: Fill) -> None:
        # Drawing every value would take longer than most operators.
        pool = self._pool(block.dtype, block.device, fill)
        whole = block.numel() - block.numel() % _POOL_COUNT
        block[:whole].view(-1, _POOL_COUNT).copy_(pool)
        block[whole:].copy_(pool[: block.numel() - whole])

    def _pool(
        self, dtype: torch.dtype, device: torch.device, fill: Fill
    ) -> torch.Tensor:
        key = (dtype, device)
        if key not in self._pools:
            values = fill.floats(_POOL_COUNT, self._generator)
            if dtype is torch.bool:
                values = values >= values.median()
            self._pools[key] = values.to(device=device, dtype=dtype)
        return self._pools[key]


def _whole(block: torch.Tensor, like: torch.Tensor) -> int:
    size_bytes = block.numel() * block.element_size()
    return math.floor(size_bytes / like.element_size()) * like.element_size()
