"""The caller's autocast setting, which the tracer switches off while it works."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Autocast:
    """One device type's autocast, switched on: to which type, and whether it caches."""

    device_type: str
    dtype: torch.dtype
    is_cached: bool


def autocast_now() -> tuple[Autocast, ...]:
    """Return what is switched on now, one entry per device type."""
    return tuple(
        Autocast(
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )
        for device_type in _DEVICE_TYPES
        if torch.is_autocast_enabled(device_type)
    )


@contextmanager
def autocast_again(settings: tuple[Autocast, ...]) -> Generator[None]:
    """Switch on what was noted; whatever else is on stays on."""
    with ExitStack() as stack:
        for each in settings:
            stack.enter_context(
                torch.autocast(
                    each.device_type, dtype=each.dtype, cache_enabled=each.is_cached
                )
            )
        yield
