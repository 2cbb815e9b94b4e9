"""Copies of optimizers on fake tensors, to be stepped in their place."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from remat.profile.arguments import empty_like
from remat.torch_compat.names import foreach_types, tree_leaves
from remat.torch_compat.sharding import (
    Division,
    division_of,
    empty_divided,
    in_pieces_like,
    local_part,
)

_LONGEST_PERIOD = 100


def stepping_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that does the work of a step.

    A wrapper that holds no parameter groups, state or tensors of its own, but one other
    optimizer, hands its steps on to that, as the wrappers of training libraries do.
    Whatever has some is an optimizer itself, also if it steps another one inside.

    Raises
    ------
    TypeError
        If there are neither groups nor one other optimizer.
    """
    while "param_groups" not in vars(optimizer):
        inner = [v for v in vars(optimizer).values() if isinstance(v, Optimizer)]
        if len(inner) != 1:
            msg = (
                f"optimizer is a {type(optimizer).__name__} with no param_groups of its "
                f"own and {len(inner)} optimizers inside; give the optimizer that steps "
                "the model's parameters"
            )
            raise TypeError(msg)
        is_its_own = _has_state(optimizer) or _holds_tensors(optimizer)
        if is_its_own and hasattr(optimizer, "param_groups"):
            break
        (optimizer,) = inner
    return optimizer


def period_of(optimizer: Optimizer) -> int:
    """Return after how many steps at most an optimizer does again what it did.

    Optimizers that do something every k steps only (averages of weights) have k among
    their settings: the largest integer of these from 2 to 100, or else 1.
    """
    settings = [
        *vars(optimizer).values(),
        *(value for group in optimizer.param_groups for value in group.values()),
    ]
    return max(
        (
            value
            for value in settings
            if isinstance(value, int)
            and not isinstance(value, bool)
            and 2 <= value <= _LONGEST_PERIOD
        ),
        default=1,
    )


def settings_of(optimizer: Optimizer | None) -> tuple[Any, ...]:
    """Return what the memory of an optimizer follows from, to see whether it changed.

    Per group its parameters with their shapes and types and whether they are trained,
    and which settings are on. What an optimizer counts in a group is none of these.
    """
    if optimizer is None:
        return ()
    optimizer = stepping_optimizer(optimizer)
    names = vars(optimizer).get("defaults", {})
    return tuple(
        (
            tuple((id(p), p.shape, p.dtype, p.requires_grad) for p in group["params"]),
            tuple(
                (name, bool(value))
                for name, value in group.items()
                if name in names and isinstance(value, bool | int | float)
            ),
        )
        for group in optimizer.param_groups
    )


def state_count(optimizer: Optimizer | None) -> int:
    """Return of how many parameters an optimizer has state by now."""
    return 0 if optimizer is None else len(stepping_optimizer(optimizer).state)


def needed_arguments(optimizer: Optimizer) -> list[str]:
    """Return the arguments that an optimizer's step cannot do without."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())
    return [
        parameter.name
        for parameter in parameters[1:]
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def held_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer and those inside of it hold.

    Without parameters and settings: its state, and whatever else it keeps.
    """
    found: list[torch.Tensor] = []
    waiting, seen = [optimizer], {id(optimizer)}
    while waiting:
        for leaf in _held_by(waiting.pop()):
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
            elif isinstance(leaf, Optimizer) and id(leaf) not in seen:
                seen.add(id(leaf))
                waiting.append(leaf)
    return found


def _held_by(optimizer: Optimizer) -> list[Any]:
    """Return what an optimizer holds, one by one, but parameters and settings."""
    held = dict(vars(optimizer))
    for name in ("param_groups", "defaults"):
        held.pop(name, None)
    held["state"] = list(held.get("state", {}).values())
    return tree_leaves(held)


def _has_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer has a place for state, which may be empty before a step."""
    return any(
        name.endswith("state") and isinstance(value, dict)
        for name, value in vars(optimizer).items()
    )


def _holds_tensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer holds tensors beside those of the ones inside of it."""
    return any(isinstance(leaf, torch.Tensor) for leaf in _held_by(optimizer))


def _has_state_divided_otherwise(optimizer: Optimizer) -> bool:
    """Whether there is state of a parameter's shape that is divided as it is not."""
    pairs = [
        (division_of(param), division_of(value))
        for param, entry in vars(optimizer).get("state", {}).items()
        if isinstance(param, torch.Tensor)
        for value in tree_leaves(entry)
        if isinstance(value, torch.Tensor) and value.shape == param.shape
    ]
    return any(
        own is not None and other is not None and own.placements != other.placements
        for own, other in pairs
    )


class OptimizerCopier:
    """Copies optimizers with all that they hold; what they share stays shared.

    For use under a ``FakeTensorMode``, which makes all that is copied fake.

    Parameters
    ----------
    trained
        The ids of the parameters that receive a gradient; by default all that require
        one.
    gradients
        By the id of a parameter, how its gradient is divided among processes if
        otherwise than itself.

    Attributes
    ----------
    are_divided
        Whether copies are divided among processes as well.

    Notes
    -----
    Where gradients or states are divided otherwise than their parameters, copies are
    divided as well, so that steps bring them together. Else each is of what this
    process holds.
    """

    def __init__(
        self,
        trained: set[int] | None = None,
        gradients: Mapping[int, Division] | None = None,
    ) -> None:
        self._trained = trained
        self._gradients = gradients or {}
        self.are_divided = bool(gradients)
        self._copies: dict[int, Any] = {}
        # Ids stay unique only while their objects live.
        self._originals: list[Any] = []

    def copy(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer like this one, with fake tensors for real ones.

        Not by ``copy.copy``: optimizers pickle only their state, and some keep more.
        """
        self.are_divided |= _has_state_divided_otherwise(optimizer)
        copy = object.__new__(type(optimizer))
        self._note(optimizer, copy)
        self._copy_params(optimizer)
        for name, value in vars(optimizer).items():
            # Learning rate schedulers wrap `step` on the instance, around the original.
            if name == "step":
                continue
            if name.endswith("_hooks") and isinstance(value, dict):
                vars(copy)[name] = OrderedDict[int, Any]()
            else:
                vars(copy)[name] = self._copied(value)
        for group in vars(copy).get("param_groups", ()):
            self._choose_foreach(group, optimizer)
        return copy

    def _note(self, original: Any, copy: Any) -> None:
        self._copies[id(original)] = copy
        self._originals.append(original)

    def _copy_params(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._copies:
                    self._note(param, self._param(param))

    def _param(self, param: torch.Tensor) -> torch.Tensor:
        fake = self._tensor(param).requires_grad_(param.requires_grad)
        trained = self._trained
        if param.requires_grad if trained is None else id(param) in trained:
            division = self._gradients.get(id(param))
            fake.grad = (
                torch.empty_like(fake)
                if division is None
                else empty_divided(fake, division)
            )
        return fake

    def _tensor(self, original: torch.Tensor) -> torch.Tensor:
        """Return a tensor like this one, or like what this process holds of it."""
        part = empty_like(local_part(original))
        return in_pieces_like(original, part) if self.are_divided else part

    def _copied(self, value: Any) -> Any:
        """Return a value with copies of the tensors and optimizers nested in it."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, Optimizer):
            return self.copy(value)
        if isinstance(value, MethodType):
            owner = self._copies.get(id(value.__self__), value.__self__)
            return MethodType(value.__func__, owner)
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, list):
            return self._list(value)
        if type(value) is tuple:
            return tuple(self._list(value))
        if isinstance(value, torch.Tensor):
            self._note(value, self._tensor(value))
            return self._copies[id(value)]
        return value

    def _list(self, value: Sequence[Any]) -> list[Any]:
        copy: list[Any] = []
        self._note(value, copy)
        copy.extend(self._copied(item) for item in value)
        return copy

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        if isinstance(value, defaultdict):
            copy: Any = defaultdict(value.default_factory)
        else:
            copy = OrderedDict() if isinstance(value, OrderedDict) else {}
        self._note(value, copy)
        for key, item in value.items():
            copy[self._copied(key)] = self._copied(item)
        return copy

    def _choose_foreach(self, group: dict[str, Any], optimizer: Optimizer) -> None:
        """Choose one parameter after the other where types of the originals need that.

        Fakes hide these. Else the optimizer chooses, as it does for the originals.
        """
        if group.get("foreach", False) is None and not group.get("fused"):
            originals = [p for g in optimizer.param_groups for p in g["params"]]
            known = {id(self._copies[id(p)]): p for p in originals}
            if any(type(known[id(p)]) not in foreach_types for p in group["params"]):
                group["foreach"] = False
