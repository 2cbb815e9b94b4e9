"""Replay of random operators: note the generator's state, restore it, put it back."""

from collections.abc import Callable
from typing import Any

import torch


def note_state(device_type: str) -> torch.Tensor:
    """Return a copy of the default generator's state on the current device."""
    if device_type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device_type).get_rng_state()


def _set_state(device_type: str, state: torch.Tensor) -> None:
    if device_type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device_type).set_rng_state(state)


def replay(
    target: Callable[..., Any],
    device_type: str,
    state: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``target`` from the noted ``state`` and leave the generator as it was."""
    current = note_state(device_type)
    _set_state(device_type, state)
    try:
        return target(*args, **kwargs)
    finally:
        _set_state(device_type, current)
