"""State that a forward pass reads and changes: put back, or begun with again.

A forward pass for planning runs the model's own code. What that changes is put back.
Where a call went a way that hangs on a counter or on random numbers, planning begins as
that call did.
"""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from remat.torch_compat.accelerators import (
    forked_random_state,
    is_accelerator,
    note_random_state,
    set_random_state,
)
from remat.torch_compat.attributes import (
    MODULE_STATE,
    own_buffers,
    parametrizations_put_back,
)
from remat.training.caller_state import host_random_state, set_host_random_state

_PLAIN = (bool, int, float, str, bytes, type(None))
"""What attributes may be that ways hang on."""


@dataclass
class Kept:
    """What a forward pass changed that was put back."""

    has_new_hooks: bool = False


@contextmanager
def kept(model: nn.Module) -> Generator[Kept]:
    """Let a forward pass run inside, and put back what it changes of the model.

    Buffers, and tensors that are attributes, are copies meanwhile. Random generators,
    those of Python and NumPy and those that are attributes too, the attributes of the
    modules, what is in lists and mappings among them, hooks, and what
    ``parametrize.cached`` has are put back.
    """
    found = Kept()
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    # Among them what a module keeps of its own: parameters, buffers, hooks.
    contents = [
        (name, value, value.copy())
        for before in attributes
        for name, value in before.items()
        if isinstance(value, list | dict | set)
    ]
    generators = _own_generators(model)
    copies: dict[int, torch.Tensor] = {}
    for module in modules:
        for name, buffer in list(own_buffers(module).items()):
            if buffer is not None:
                copy = copies.setdefault(id(buffer), buffer.clone())
                own_buffers(module)[name] = copy
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                copy = copies.setdefault(id(value), value.detach().clone())
                vars(module)[name] = copy.requires_grad_(value.requires_grad)
    host = host_random_state()
    try:
        with forked_random_state(_accelerators(model)), parametrizations_put_back():
            yield found
    finally:
        set_host_random_state(host)
        for set_state, state in generators:
            set_state(state)
        found.has_new_hooks = any(
            name in MODULE_STATE and name.endswith("hooks") and value != before
            for name, value, before in contents
        )
        for _, value, before in contents:
            _refill(value, before)
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)


def _refill(value: Any, before: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(before)


def _own_generators(model: nn.Module) -> list[tuple[Callable[[Any], object], Any]]:
    """Return how random generators that are attributes are set, and their states."""
    found: list[tuple[Callable[[Any], object], Any]] = []
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator | np.random.RandomState):
                found.append((value.set_state, value.get_state()))
            elif isinstance(value, np.random.Generator):
                bits = value.bit_generator
                found.append((partial(setattr, bits, "state"), bits.state))
            elif isinstance(value, random.Random):  # noqa: S311
                found.append((value.setstate, value.getstate()))
    return found


def _accelerators(model: nn.Module) -> set[torch.device]:
    return {p.device for p in model.parameters() if is_accelerator(p.device)}


class CallState:
    """What a call of a model may depend on beside its weights and what it is given.

    That is each attribute of its modules that is a number, a text or nothing, or a
    list, set or mapping of such; each buffer of one element; and the states of the
    random generators of torch, Python and NumPy, those that are attributes among them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = [
            (module, _plain_attributes(module), _small_buffers(module))
            for module in model.modules()
        ]
        self._random_states = {
            device: note_random_state(device)
            for device in (torch.device("cpu"), *_accelerators(model))
        }
        self._host = host_random_state()
        self._generators = _own_generators(model)

    @contextmanager
    def again(self) -> Generator[None]:
        """Let everything be as it was then inside, and as it is now after it."""
        with kept(self._model):
            self._set()
            yield

    def _set(self) -> None:
        for module, attributes, buffers in self._modules:
            for name in _plain_attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            own_buffers(module).update(buffers)
        for device, state in self._random_states.items():
            set_random_state(device, state)
        set_host_random_state(self._host)
        for set_state, state in self._generators:
            set_state(state)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in MODULE_STATE:
            continue
        if isinstance(value, _PLAIN):
            found[name] = value
        elif isinstance(value, list | set | dict):
            values = value.values() if isinstance(value, dict) else value
            if all(isinstance(each, _PLAIN) for each in values):
                found[name] = value.copy()
    return found


def _small_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: buffer.clone()
        for name, buffer in own_buffers(module).items()
        if buffer is not None and buffer.numel() == 1
    }
