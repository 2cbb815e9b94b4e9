"""State that belongs to the caller: noted before planning, compared and put back after.

Planning works on fake tensors and on copies, so nothing should differ. That it does not
is checked all the same, because an optimizer, a module or a hook is code that nobody
here has seen. The check reads no tensor but the random state: it compares which objects
there are, and how often each tensor was written.
"""

import random
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from remat.capture.first_call import prepared_count
from remat.core.errors import StateChangedError
from remat.torch_compat.accelerators import (
    is_accelerator,
    note_random_state,
    set_random_state,
)
from remat.torch_compat.attributes import MODULE_STATE, write_count


@dataclass(frozen=True, slots=True)
class _Noted:
    """One piece of state: how it is read, what it was, and how it is put back."""

    name: str
    read: Callable[[], Any]
    before: Any
    put_back: Callable[[Any], None] | None
    is_of_hooks: bool = False

    def is_same(self) -> bool:
        return _is_same(self.read(), self.before)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return list(map(id, one)) == list(map(id, other)) and all(
            one[key] is other[key] for key in other
        )
    if isinstance(one, list) and isinstance(other, list):
        return list(map(id, one)) == list(map(id, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (one.shape == other.shape and torch.equal(one, other))
    return one is other or (isinstance(one, int | float) and one == other)


@contextmanager
def unchanged(model: nn.Module, optimizer: Optimizer | None) -> Generator[None]:
    """Check that what runs inside leaves model, optimizer and random state as they are.

    Compared are the identities of parameters, buffers, gradients, submodules and hooks,
    of the optimizer's groups, their values, its state and its attributes, and of those
    of the optimizers inside of it; how often each tensor was written; training mode;
    and the random generators. What differs is put back.

    Parameters
    ----------
    model
        The model that is planned for.
    optimizer
        Its optimizer, if one was given.

    Raises
    ------
    StateChangedError
        If something differs; the message names it, and says whether it could be put
        back. Errors that are raised inside go first, with all put back as well.
    """
    noted = [*_of_model(model), *_of_random_state(model)]
    if optimizer is not None:
        noted += _of_optimizer(optimizer)
    prepared_before = prepared_count(model)

    def compared() -> list[_Noted]:
        # Hooks that the model's first call adds belong to it from now on.
        is_prepared = prepared_count(model) > prepared_before
        return [each for each in noted if not (is_prepared and each.is_of_hooks)]

    try:
        yield
    except BaseException:
        _put_back(compared())
        raise
    changed = _put_back(compared())
    if changed:
        lost = [each.name for each in changed if not each.is_same()]
        msg = (
            f"planning changed {', '.join(each.name for each in changed[:5])}"
            f"{f' and {len(changed) - 5} more' if len(changed) > 5 else ''}, which it "
            "must not; "
            + (
                f"all but {', '.join(lost[:5])} was put back: make the model and the "
                "optimizer anew before training"
                if lost
                else "everything was put back"
            )
            + ". "
            + (
                "Perhaps another thread drew random numbers meanwhile: let it wait until "
                "planning is over"
                if _is_of_random_state_alone(changed)
                else "Please report it with the class of the model and of the optimizer"
            )
        )
        raise StateChangedError(msg)


@contextmanager
def kept_optimizer(optimizer: Optimizer | None) -> Generator[None]:
    """Let an optimizer step inside, and put it back: the same objects and values."""
    noted = [] if optimizer is None else list(_of_optimizer(optimizer))
    written = {
        tensor: tensor.detach().clone()
        for each in noted
        for tensor in _tensors_of(each.before)
    }
    try:
        yield
    finally:
        _put_back(noted)
        with torch.no_grad():
            for tensor, value in written.items():
                tensor.copy_(value)


def _tensors_of(held: Any) -> list[torch.Tensor]:
    values = held.values() if isinstance(held, dict) else ()
    return [
        value
        for value in values
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    ]


def _is_of_random_state_alone(changed: list[_Noted]) -> bool:
    return threading.active_count() > 1 and all(
        each.name.startswith("the random state") for each in changed
    )


def _put_back(noted: list[_Noted]) -> list[_Noted]:
    changed = [each for each in noted if not each.is_same()]
    for each in changed:
        if each.put_back is not None:
            each.put_back(each.before)
    return changed


def _of_model(model: nn.Module) -> Iterator[_Noted]:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # It makes these anew whenever they are asked for; refused later.
        where = f" of {path}" if path else ""
        for kind in MODULE_STATE:
            held = getattr(module, kind)
            name = f"{kind.strip('_').replace('_', ' ')}{where}"
            yield _of_dict(name, held, is_of_hooks=kind.endswith("hooks"))
        yield _of_attribute(module, "training", f"training mode{where}")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not is_lazy(tensor):  # It has nothing to compare, and is refused later.
            yield from _of_tensor(name, tensor)


def _of_tensor(name: str, tensor: torch.Tensor) -> Iterator[_Noted]:
    if not tensor.is_inference():
        yield _of_writes(f"values of {name}", tensor)
    if tensor.is_leaf:
        yield _of_attribute(tensor, "requires_grad", f"requires_grad of {name}")
        yield _of_attribute(tensor, "grad", f"gradient of {name}")
        if tensor.grad is not None:
            yield _of_writes(f"values of the gradient of {name}", tensor.grad)


def _of_optimizer(optimizer: Optimizer) -> Iterator[_Noted]:
    waiting, seen = [optimizer], {id(optimizer)}
    while waiting:
        each = waiting.pop()
        name = type(each).__name__
        attributes = vars(each)
        yield _of_dict(f"attributes of {name}", attributes)
        groups = attributes.get("param_groups", [])
        yield _of_list(f"param_groups of {name}", groups)
        for index, group in enumerate(groups):
            yield _of_dict(f"param_groups[{index}] of {name}", group)
            yield _of_list(f"parameters of param_groups[{index}]", group["params"])
        state = attributes.get("state", {})
        yield _of_dict(f"state of {name}", state)
        for value in state.values():
            if isinstance(value, dict):
                yield _of_dict(f"state of a parameter in {name}", value)
                for key, tensor in value.items():
                    if isinstance(tensor, torch.Tensor):
                        yield _of_writes(f"{key} in the state of {name}", tensor)
        held = [v if isinstance(v, list) else [v] for v in attributes.values()]
        for value in chain(*held):
            if isinstance(value, Optimizer) and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)


def _of_random_state(model: nn.Module) -> Iterator[_Noted]:
    devices = {p.device for p in model.parameters() if is_accelerator(p.device)}
    for place in ("cpu", *devices):
        yield _Noted(
            f"the random state of {place}",
            partial(note_random_state, place),
            note_random_state(place),
            partial(set_random_state, place),
        )


def host_random_state() -> tuple[Any, Any]:
    """Return the states of the random generators of Python and of NumPy."""
    # The one that code of models draws from.
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def set_host_random_state(state: tuple[Any, Any]) -> None:
    """Put the random generators of Python and of NumPy back."""
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002


def _of_attribute(owner: Any, attribute: str, name: str) -> _Noted:
    return _Noted(
        name,
        lambda: getattr(owner, attribute),
        getattr(owner, attribute),
        lambda value: setattr(owner, attribute, value),
    )


def _of_writes(name: str, tensor: torch.Tensor) -> _Noted:
    # Counted by autograd at each write; the old values are not kept.
    return _Noted(name, lambda: write_count(tensor), write_count(tensor), None)


def _of_dict(name: str, held: dict[Any, Any], *, is_of_hooks: bool = False) -> _Noted:
    def put_back(before: dict[Any, Any]) -> None:
        held.clear()
        held.update(before)

    return _Noted(name, lambda: held, dict(held), put_back, is_of_hooks)


def _of_list(name: str, held: list[Any]) -> _Noted:
    def put_back(before: list[Any]) -> None:
        held[:] = before

    return _Noted(name, lambda: held, list(held), put_back)
