"""The caller's autocast setting, which the tracer switches off while it works.

A backward pass runs under the setting at the call of ``backward()``, which need not be
that of its forward pass, and which its operators take notice of.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass

import torch

from remat.torch_compat.accelerators import accelerator_type
from remat.torch_compat.names import functorch_config


def _device_types() -> tuple[str, str]:
    return "cpu", accelerator_type()


@dataclass(frozen=True, slots=True)
class Autocast:
    """One device type's autocast, switched on: to which type, and whether it caches."""

    device_type: str
    dtype: torch.dtype
    cache_enabled: bool


def autocast_now() -> tuple[Autocast, ...]:
    """Return what is switched on now, one entry per device type."""
    return tuple(
        Autocast(
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )
        for device_type in _device_types()
        if torch.is_autocast_enabled(device_type)
    )


def autocast_again(
    settings: tuple[Autocast, ...],
) -> AbstractContextManager[None]:
    """Switch on what was noted, and off what was not."""
    # In each backward pass, and hardly ever with any.
    is_so = not settings and not autocast_now()
    return nullcontext() if is_so else _switched(settings)


@contextmanager
def _switched(settings: tuple[Autocast, ...]) -> Generator[None]:
    noted = {each.device_type for each in settings}
    with ExitStack() as stack:
        for device_type in _device_types():
            if device_type not in noted and torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        for each in settings:
            stack.enter_context(torch.autocast(**asdict(each)))
        yield


def backward_traced_under(
    settings: tuple[Autocast, ...],
) -> AbstractContextManager[None]:
    """Trace backward passes as if they were called under these settings."""
    return functorch_config.patch(
        backward_pass_autocast=[asdict(each) for each in settings]
    )
