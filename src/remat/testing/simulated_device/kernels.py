"""Kernels of the simulated device: the CPU's, on its memory.

Every operator that is no view and makes no memory itself comes to :func:`run_on_host`,
which shows the CPU's kernel the device's memory, and copies new results to it. So the
bits are the CPU's, and layouts those that torch's formulas give.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, cast

import torch

from remat.testing.simulated_device.faults import FAULTS
from remat.testing.simulated_device.memory import DeviceMemory, on_host
from remat.testing.simulated_device.random_numbers import GENERATOR
from remat.testing.simulated_device.streams import DEFAULT, current_stream
from remat.torch_compat.attributes import schema_of
from remat.torch_compat.names import (
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    exclude_dispatch_keys,
    make_contiguous_strides_for,
    tree_map,
)

MEMORY = DeviceMemory()
"""The device's."""

_ATEN = torch.ops.aten
_VIEWS = (
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)
"""Kernels of the CPU that look at sizes alone: they do for any device."""

_WITH_SCRATCH = ("convolution", "_scaled_dot_product")
"""Names of operators that take as much scratch memory as their first result."""

LIBRARY_BYTES = 64 * 1024
"""What the device's library of products keeps for each thread that calls it."""

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")


class Handle:
    """A thread's handle of the library, whose block the next thread gets."""

    free: ClassVar[list[Any]] = []
    count: ClassVar[int] = 0

    def __init__(self) -> None:
        if not self.free:
            self.free.append(MEMORY.block(LIBRARY_BYTES))
            Handle.count += 1
        self._block = self.free.pop()

    def __del__(self) -> None:
        self.free.append(self._block)


_of_thread = threading.local()


_CASTS_DOWN = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution")
_CASTS_UP = ("_softmax", "_log_softmax", "native_layer_norm", "nll_loss_forward", "pow")
"""What autocast does with operators: to its type, or to single precision."""


_AUTOCAST: Any = DispatchKeySet(cast("Any", DispatchKey).AutocastPrivateUse1)


def is_on_device(value: object) -> bool:
    """Return whether something is a tensor of the simulated device."""
    return isinstance(value, torch.Tensor) and value.device.type not in {"cpu", "meta"}


def _shown_to_host(value: Any) -> Any:
    if is_on_device(value):
        return on_host(value)
    if isinstance(value, torch.device) and value.type not in {"cpu", "meta"}:
        return torch.device("cpu")
    return value


def run_on_host(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator by the CPU's kernel, with results on the device."""
    FAULTS.on_use()
    DEFAULT.synchronize()
    if str(operator).startswith(_PRODUCTS):
        _of_thread.handle = getattr(_of_thread, "handle", None) or Handle()
    host_args, host_kwargs = tree_map(_shown_to_host, (args, kwargs))
    for name, value in kwargs.items():
        if name.startswith("out") and is_on_device(value):
            # Some kernels make what they write larger, and then smaller again.
            host_kwargs[name] = torch.empty(0, dtype=value.dtype, device="cpu")
    if torch.Tag.nondeterministic_seeded in operator.tags:
        with GENERATOR.drawing() as wanted:
            found = operator(*host_args, **host_kwargs)
            wanted.extend(each.numel() for each in _tensors(found))
    else:
        found = operator(*host_args, **host_kwargs)
    written = _written(operator, args, kwargs)
    if not isinstance(found, (tuple, list)):
        return _result(operator, found, written.get(0))
    return type(found)(
        _result(operator, value, written.get(position))
        for position, value in enumerate(found)
    )


def _result(operator: OpOverload, value: Any, own: torch.Tensor | None) -> Any:
    """Return on the device what a kernel has returned: an argument, or a new tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if FAULTS.disturbs(str(operator)) and value.is_floating_point():
        value.copy_(torch.nextafter(value, value + 1))
    if own is None:
        return _on_device(operator, value)
    if own.shape != value.shape:
        own.set_(cast("Any", _on_device(operator, value)))
    elif on_host(own).data_ptr() != value.data_ptr():
        on_host(own).copy_(value)
    return own


def resize(
    tensor: torch.Tensor, size: list[int], *, memory_format: Any = None
) -> torch.Tensor:
    """Give a tensor another shape, on a block of its own if its own is too small."""
    shaped = torch.empty(
        size,
        dtype=tensor.dtype,
        device="meta",
        memory_format=memory_format or torch.contiguous_format,
    )
    start, storage = tensor.storage_offset(), tensor.untyped_storage()
    needed = start + max(1, shaped.untyped_storage().nbytes() // tensor.dtype.itemsize)
    if needed * tensor.dtype.itemsize > storage.nbytes():
        larger = MEMORY.tensor((int(needed),), (1,), tensor.dtype)
        held = storage.nbytes() // tensor.dtype.itemsize
        on_host(larger)[:held].copy_(
            on_host(tensor).as_strided((held,), (1,), storage_offset=0)
        )
        storage = larger.untyped_storage()
    return tensor.set_(storage, start, shaped.shape, shaped.stride())


def _tensors(found: Any) -> Iterable[torch.Tensor]:
    values = found if isinstance(found, (tuple, list)) else [found]
    return (value for value in values if isinstance(value, torch.Tensor))


def _on_device(operator: OpOverload, value: torch.Tensor) -> torch.Tensor:
    name, strides = str(operator), value.stride()
    if name.startswith("aten.convolution"):
        # So torch's formula for a spare device says, whatever the layout of the input.
        strides = make_contiguous_strides_for(value.shape)
    result = MEMORY.tensor(tuple(value.shape), strides, value.dtype)
    if name.startswith(tuple(f"aten.{each}" for each in _WITH_SCRATCH)):
        # Given back at once: it counts in the peak.
        MEMORY.tensor((int(value.numel()),), (1,), value.dtype)
    on_host(result).copy_(value)
    return result


def _written(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Any]:
    """Return the results that are arguments which the operator writes."""
    schema = schema_of(operator)
    if schema is None:
        return {}
    found: dict[int, Any] = {}
    for position, result in enumerate(schema.returns):
        if result.alias_info is None or not result.alias_info.is_write:
            continue
        for index, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            if alias and alias.before_set == result.alias_info.before_set:
                by_name = kwargs.get(argument.name)
                found[position] = args[index] if index < len(args) else by_name
    return found


def empty(
    size: list[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Make a tensor with no values."""
    del layout, device, pin_memory
    shaped = torch.empty(
        size,
        dtype=dtype,
        device="meta",
        memory_format=memory_format or torch.contiguous_format,
    )
    return MEMORY.tensor(shaped.shape, shaped.stride(), shaped.dtype)


def empty_strided(
    size: list[int], stride: list[int], dtype: torch.dtype | None = None, **_kwargs: Any
) -> torch.Tensor:
    """Make a tensor with no values and given strides."""
    return MEMORY.tensor(size, stride, dtype or torch.get_default_dtype())


def copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy between devices: on the current stream, and later if it may be."""
    shown_source, shown_target = _shown_to_host(source), _shown_to_host(target)
    chosen = current_stream()
    chosen.issue(partial(shown_target.copy_, shown_source))
    if not non_blocking:
        chosen.synchronize()
    return target


def _autocast(operator: OpOverload, *, up: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if up else torch.get_autocast_dtype("sim")

        def cast(value: Any) -> Any:
            if is_on_device(value) and value.is_floating_point():
                return value.to(dtype)
            return value

        with exclude_dispatch_keys(_AUTOCAST):
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")


def kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels of operators that have one of their own."""
    host = DispatchKeySet(DispatchKey.CPU)

    def through(name: str) -> Callable[..., Any]:
        operator = _overload(name)
        return lambda *args, **kwargs: operator.redispatch(host, *args, **kwargs)

    def convolution(*args: Any) -> Any:
        return run_on_host(_ATEN.convolution.default, *args)

    def convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any) -> Any:
        operator = _ATEN.convolution_backward.default
        return run_on_host(operator, gradient, x, weight, [weight.shape[0]], *rest)

    return {
        **{name: through(name) for name in _VIEWS},
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "resize_": resize,
        "_copy_from": copy_from,
        "_local_scalar_dense": lambda value: on_host(value).item(),
        "convolution_overrideable": convolution,
        "convolution_backward_overrideable": convolution_backward,
    }


def autocast_kernels() -> dict[str, Callable[..., Any]]:
    """Return what autocast does before operators."""
    casts = [*((n, False) for n in _CASTS_DOWN), *((n, True) for n in _CASTS_UP)]
    found: dict[str, Callable[..., Any]] = {}
    for packet, up in casts:
        for overload in getattr(_ATEN, packet).overloads():
            if "out" not in overload:
                name = packet if overload == "default" else f"{packet}.{overload}"
                found[name] = _autocast(_overload(name), up=up)
    return found
