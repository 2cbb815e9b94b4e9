"""State that a forward pass reads and changes: put back, or begun with again.

A forward pass for planning runs the model's own code. What that changes is put back.
Where a call went a way that hangs on a counter or on random numbers, planning begins as
that call did.
"""

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from remat.capture.captured import reached_put_back
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
    parts_of,
    version_of,
)
from remat.training.caller_state import host_random_state, set_host_random_state

_PLAIN = (bool, int, float, str, bytes, type(None), np.generic)
"""What attributes may be that ways hang on."""

_MOST_ENTRIES = 64
"""Of lists, sets, mappings and tuples that ways hang on."""

_OF_EACH_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""Attributes in which no model counts."""

_DEEPEST = 3
"""How deep containers are looked into."""


@dataclass
class Kept:
    """What a forward pass changed that was put back.

    Parameters
    ----------
    has_new_hooks
        Whether hooks were left.
    has_set_up
        Whether later calls may go another way: attributes have a value that had none
        before, or are switched, mappings and lists hold other things, or a buffer of
        one element is zero no more. What only counts sets up nothing.
    """

    has_new_hooks: bool = False
    has_set_up: bool = False


@contextmanager
def kept(model: nn.Module) -> Generator[Kept]:
    """Let a forward pass run inside, and put back what it changes of the model.

    Buffers, and tensors that are attributes, are copies meanwhile. Random generators,
    those of Python and NumPy and those that are attributes too, the attributes of the
    modules, what is in lists, mappings, sets, queues and arrays among them, hooks, what
    these change of their own, and what ``parametrize.cached`` has are put back.
    """
    found = Kept()
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    # Among them what a module keeps of its own: parameters, buffers, hooks.
    contents = [
        _Contents(name, value)
        for before in attributes
        for name, value in before.items()
    ]
    buffers = [_set_buffers(module) for module in modules]
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
        with (
            forked_random_state(_accelerators(model)),
            parametrizations_put_back(),
            reached_put_back(model),
        ):
            yield found
    finally:
        set_host_random_state(host)
        for set_state, state in generators:
            set_state(state)
        found.has_new_hooks = any(
            each.name in MODULE_STATE
            and each.name.endswith("hooks")
            and each.has_changed
            for each in contents
        )
        found.has_set_up = any(map(_has_set_up, modules, attributes, buffers)) or any(
            each.has_changed for each in contents if each.name not in _OF_EACH_MODULE
        )
        for each in contents:
            each.put_back()
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)


def _has_set_up(
    module: nn.Module, attributes: Mapping[str, Any], buffers: Mapping[str, bool]
) -> bool:
    """Return whether a module finds other attributes and buffers than before."""
    for name, value in vars(module).items():
        before = attributes.get(name)
        if name in _OF_EACH_MODULE or value is None:
            continue
        if before is None or (isinstance(before, bool) and value is not before):
            return True
    now = _set_buffers(module)
    return any(is_set and not buffers.get(name) for name, is_set in now.items())


def _set_buffers(module: nn.Module) -> dict[str, bool]:
    """Return which buffers there are; one element of zero is none."""
    return {
        name: buffer is not None
        and (buffer.numel() != 1 or buffer.is_meta or bool(buffer.any()))
        for name, buffer in own_buffers(module).items()
        if name != _COUNT
    }


_COUNT = "num_batches_tracked"
"""What batch norm counts."""


@contextmanager
def values_put_back(tensors: Iterable[torch.Tensor]) -> Generator[None]:
    """Let what runs inside write to tensors, and put their values back.

    Takes as much memory as they have meanwhile.
    """
    noted = [
        (tensor, version_of(tensor), tensor.detach().clone())
        for tensor in tensors
        if _is_writable(tensor)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in noted:
                if version_of(tensor) != version:
                    tensor.copy_(value)


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether a forward pass may write to a tensor, such that it is seen."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or tensor.is_inference():
        return False
    # Several elements of others are one in memory.
    return tensor.nbytes <= tensor.untyped_storage().nbytes()


class _Contents:
    """What is in an attribute that may change without being set anew.

    That is a list, mapping, set or queue, what is in it in turn, an array of NumPy, or
    a tensor in any of these.
    """

    def __init__(self, name: str, value: Any, depth: int = 0) -> None:
        self.name = name
        self.value = value
        self.before: Any = None
        self.inner: list[_Contents] = []
        self.version = 0
        if isinstance(value, np.ndarray):
            self.before = value.copy()
        elif isinstance(value, torch.Tensor):
            # Those that are attributes themselves are others meanwhile.
            if depth and name not in MODULE_STATE:
                value = self.value = _once(value)
                self.before, self.version = value.detach().clone(), version_of(value)
        elif isinstance(value, dict):
            self.before = dict(value)
            self._look_into(value.values(), depth)
        elif isinstance(value, list | set | deque):
            self.before = list(value)
            self._look_into(value, depth)
        elif isinstance(value, tuple):
            self._look_into(value, depth)

    def _look_into(self, values: Iterable[Any], depth: int) -> None:
        if depth < _DEEPEST and self.name not in MODULE_STATE:
            # Parameters are many bytes; whether they were written is looked at before.
            kinds = (*_PLAIN, nn.Parameter)
            changeable = (each for each in values if not isinstance(each, kinds))
            self.inner += [_Contents(self.name, each, depth + 1) for each in changeable]

    @property
    def has_changed(self) -> bool:
        """Whether it is otherwise now; what is inside of it is not looked at."""
        value, before = self.value, self.before
        if before is None:
            return False
        if isinstance(value, np.ndarray):
            return value.tobytes() != before.tobytes()
        if isinstance(value, torch.Tensor):
            # Not all that writes is counted, as what goes by ``data`` is not.
            return version_of(value) != self.version or not all(
                map(torch.equal, parts_of(value), parts_of(before))
            )
        return _identities(value) != _identities(before)

    def put_back(self) -> None:
        """Let it be as before, and what is inside of it."""
        value, before = self.value, self.before
        if self.has_changed:
            if isinstance(value, np.ndarray):
                if value.shape != before.shape:
                    value.resize(before.shape, refcheck=False)
                value[...] = before
            elif isinstance(value, torch.Tensor):
                with torch.no_grad():
                    if value.shape != before.shape:
                        value.resize_(before.shape)
                    value.copy_(before)
            else:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(
                    before
                )
        for each in self.inner:
            each.put_back()


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of what an expanded tensor repeats, or the tensor itself."""
    if tensor.layout != torch.strided:
        return tensor
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _identities(values: Any) -> list[int]:
    found = [*map(id, values)]
    return [*found, *map(id, values.values())] if isinstance(values, dict) else found


def _own_generators(model: nn.Module) -> list[tuple[Callable[[Any], object], Any]]:
    """Return how random generators that are attributes are set, and their states."""
    found: list[tuple[Callable[[Any], object], Any]] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if name in _OF_EACH_MODULE:
                continue
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
    list, set, mapping or tuple of few such; each buffer of one element; and the states
    of the random generators of torch, Python and NumPy, those that are attributes among
    them.
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
        if name in _OF_EACH_MODULE:
            continue
        if isinstance(value, _PLAIN):
            found[name] = value
        # Not of other kinds that behave like these.
        elif type(value) in (list, set, dict, tuple) and len(value) <= _MOST_ENTRIES:
            values = value.values() if isinstance(value, dict) else value
            if all(isinstance(each, _PLAIN) for each in values):
                found[name] = value if isinstance(value, tuple) else value.copy()
    return found


def _small_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: buffer.clone()
        for name, buffer in own_buffers(module).items()
        if buffer is not None and buffer.numel() == 1
    }
