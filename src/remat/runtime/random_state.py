"""Replay of random operators: note the generator's state, restore it, put it back."""

from collections.abc import Callable
from typing import Any

import torch

from remat.torch_compat.accelerators import note_random_state, set_random_state


def replay(
    target: Callable[..., Any],
    device_type: str,
    state: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``target`` from the noted ``state`` and leave the generator as it was."""
    current = note_random_state(device_type)
    set_random_state(device_type, state)
    try:
        return target(*args, **kwargs)
    finally:
        set_random_state(device_type, current)
