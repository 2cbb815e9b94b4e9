"""What optimizers do to the parameters of fitted models, seen when they step.

A call that goes around a plan calls nothing of this package: a ``forward`` that was
taken before ``fit``, or that of the class. Nor does an optimizer that no plan counts.
Both end in a step of the parameters, and every optimizer of torch tells of its steps.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from remat.core.units import format_bytes

_WATCHES: dict[int, "weakref.ref[StepWatch]"] = {}


class StepWatch:
    """Looks at the steps of a fitted model's parameters.

    Parameters
    ----------
    model
        The fitted model.
    optimizer
        What its plans count, wrapped or not; ``None`` if they count none.
    tell
        Warns once for each message.
    counts_unknown
        Whether a given plan may count an optimizer that is not known here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        tell: Callable[[str], None],
        *,
        counts_unknown: bool = False,
    ) -> None:
        parameters = list(model.parameters())
        # Gradients that are there already come from a call before the model was fitted.
        self.planned_calls = int(any(p.grad is not None for p in parameters))
        self._name = type(model).__name__
        self._counted = _with_those_inside(optimizer)
        self._tell = tell
        self._counts_unknown = counts_unknown
        self._calls_at_step: weakref.WeakKeyDictionary[Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._parameters = {id(p): weakref.ref(p) for p in parameters}

    def begin(self) -> None:
        """Look at steps from now on, as long as this object lives."""
        _hook_all_optimizers()
        _WATCHES.update(dict.fromkeys(self._parameters, weakref.ref(self)))

    def end(self) -> None:
        """Look no more."""
        for key in self._parameters:
            known = _WATCHES.get(key)
            if known is not None and known() is self:
                del _WATCHES[key]

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether this is a parameter of the model, and no later one of the same id."""
        known = self._parameters.get(id(parameter))
        return known is not None and known() is parameter

    def look(self, optimizer: Optimizer) -> None:
        """Tell what a step of the model's parameters shows."""
        before = self._calls_at_step.get(optimizer, 0)
        self._calls_at_step[optimizer] = self.planned_calls
        if self.planned_calls == before:
            self._tell(
                f"{type(optimizer).__name__} steps parameters of {self._name}, which was "
                "fitted by remat but not called since the step before: its forward pass "
                "ran without the plan, and the budget is not kept. Call the model "
                "itself, or take its forward and compile it after remat.fit"
            )
        elif optimizer not in self._counted and not self._counts_unknown:
            self._tell_of_state(optimizer)

    def _tell_of_state(self, optimizer: Optimizer) -> None:
        size_bytes = sum(
            value.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        # What needs no state needs next to nothing.
        if size_bytes or self._counted:
            name = type(optimizer).__name__
            self._tell(
                f"{name} steps parameters of {self._name} and is not the optimizer that "
                f"was given to remat.fit: its state of {format_bytes(size_bytes)} "
                f"({size_bytes} bytes), and what its steps take, are in no plan, so that "
                "the budget can be exceeded. Fit with optimizer= this one"
            )


def _with_those_inside(optimizer: Optimizer | None) -> "weakref.WeakSet[Optimizer]":
    found: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    pending = [] if optimizer is None else [optimizer]
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending += [v for v in vars(one).values() if isinstance(v, Optimizer)]
    return found


@functools.cache
def _hook_all_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    seen: set[int] = set()
    for group in optimizer.param_groups:
        # As a rule a model's parameters are all there or not at all.
        for parameter in group["params"][:1]:
            reference = _WATCHES.get(id(parameter))
            watch = None if reference is None else reference()
            if watch is not None and id(watch) not in seen and watch.has(parameter):
                seen.add(id(watch))
                watch.look(optimizer)
