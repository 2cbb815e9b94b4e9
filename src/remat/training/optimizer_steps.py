"""What optimizers do to the parameters of fitted models, seen when they step.

A call that goes around a plan calls nothing of this package: a ``forward`` that was
taken before ``fit``, or that of the class, or a copy of the model. Nor does an
optimizer that no plan counts. All end in a step of the parameters, and every optimizer
of torch tells of its steps.
"""

import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from remat.core.units import format_bytes
from remat.torch_compat.sharding import local_part

_WATCHES: "weakref.WeakSet[StepWatch]" = weakref.WeakSet()
_OF_PARAMETER: dict[int, list["weakref.ref[StepWatch]"]] = {}
_SEEN: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
"""How many parameters an optimizer had when parameters were last looked up for it."""

_IS_OURS: ContextVar[bool] = ContextVar("steps of remat's own", default=False)


class StepWatch:
    """Looks at the steps of a model's parameters.

    Parameters
    ----------
    model
        A fitted model, or a copy of one.
    look
        Called at each step of its parameters, with the optimizer and the parameters of
        the model that were stepped: those that have a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        look: Callable[[Optimizer, list[torch.Tensor]], None],
    ) -> None:
        self._model = weakref.ref(model)
        self.look = look

    def begin(self) -> None:
        """Look at steps from now on, as long as this object and the model live."""
        _hook_all_optimizers()
        _WATCHES.add(self)
        # The next step looks parameters up: a copy may still be in the making here.
        _SEEN.clear()

    def end(self) -> None:
        """Look no more."""
        _WATCHES.discard(self)
        _SEEN.clear()

    def parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters that the model has now."""
        model = self._model()
        return () if model is None else model.parameters()


@contextmanager
def steps_of_ours() -> Generator[None]:
    """Look at no step that this thread makes in the block: they train nothing."""
    before = _IS_OURS.get()
    _IS_OURS.set(True)
    try:
        yield
    finally:
        _IS_OURS.set(before)


def _look_parameters_up() -> None:
    """Note whose each parameter is; they may have been added or replaced."""
    _OF_PARAMETER.clear()
    for watch in list(_WATCHES):
        for parameter in watch.parameters():
            _OF_PARAMETER.setdefault(id(parameter), []).append(weakref.ref(watch))


@functools.cache
def _hook_all_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _WATCHES or _IS_OURS.get():
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if _SEEN.get(optimizer) != len(parameters):
        _SEEN[optimizer] = len(parameters)
        _look_parameters_up()
    stepped: dict[int, tuple[StepWatch, list[torch.Tensor]]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            for reference in _OF_PARAMETER.get(id(parameter), ()):
                watch = reference()
                if watch is not None:
                    stepped.setdefault(id(watch), (watch, []))[1].append(parameter)
    for watch, own in stepped.values():
        watch.look(optimizer, own)


class FittedSteps:
    """Tells of calls around a plan, and of optimizer state that it does not count.

    Parameters
    ----------
    model
        The fitted model.
    counted_bytes
        Bytes of optimizer state that its plans count at present; ``None`` if that is
        not known here.
    tell
        Warns once for each message.
    """

    def __init__(
        self,
        model: nn.Module,
        counted_bytes: Callable[[], int | None],
        tell: Callable[[str], None],
    ) -> None:
        self.was_called = any(p.grad is not None for p in model.parameters())
        self._model = weakref.ref(model)
        self._counted_bytes = counted_bytes
        self._tell = tell
        self._uncalled_steps = 0
        self._is_state_told = False
        # Per optimizer: how many parameters have state, and its bytes by tensor.
        self._state: weakref.WeakKeyDictionary[
            Optimizer, tuple[int, Mapping[int, int]]
        ] = weakref.WeakKeyDictionary()

    def look(self, optimizer: Optimizer, stepped: list[torch.Tensor]) -> None:
        """Tell what a step of the model's parameters shows."""
        model = self._model()
        if model is None:
            return
        if not self.was_called:
            self._look_for_bypass(model, optimizer, stepped)
        if not self._is_state_told:
            self._look_at_state(model, optimizer)

    def _look_for_bypass(
        self, model: nn.Module, optimizer: Optimizer, stepped: list[torch.Tensor]
    ) -> None:
        """Tell if all parameters were trained twice and the model was never called.

        A single step may be the one that makes the optimizer's state, with gradients of
        zero, and a part of the parameters may be trained as part of another model.
        """
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        if not model.training or trained - {id(p) for p in stepped}:
            return
        if not any(p.grad is not None and bool(p.grad.any()) for p in stepped):
            return
        self._uncalled_steps += 1
        if self._uncalled_steps == 2:
            name = type(model).__name__
            self._tell(
                f"{type(optimizer).__name__} steps all parameters of {name}, which was "
                "fitted by remat but not called since: its forward pass runs without the "
                "plan, and the budget is not kept. Call the model itself, or take its "
                "forward, or compile it, after remat.fit"
            )

    def _look_at_state(self, model: nn.Module, optimizer: Optimizer) -> None:
        known_count, _ = self._state.get(optimizer, (-1, {}))
        if known_count == len(optimizer.state):
            return
        own = {id(parameter) for parameter in model.parameters()}
        state = cast("Mapping[Any, Any]", optimizer.state)
        sizes_bytes = {
            id(value): local_part(value).nbytes
            for parameter, entry in state.items()
            if id(parameter) in own and isinstance(entry, Mapping)
            for value in entry.values()
            if torch.is_tensor(value)
        }
        self._state[optimizer] = (len(optimizer.state), sizes_bytes)
        # A wrapper may show the state of the optimizer inside as its own.
        found = {k: v for _, sizes in self._state.values() for k, v in sizes.items()}
        total_bytes = sum(found.values())
        counted_bytes = self._counted_bytes()
        if counted_bytes is not None and total_bytes > counted_bytes:
            self._is_state_told = True
            self._tell(
                f"{type(optimizer).__name__} steps parameters of {type(model).__name__}: "
                f"the state of its optimizers takes {format_bytes(total_bytes)} "
                f"({total_bytes} bytes), and the plan counts {counted_bytes} bytes, as "
                "another optimizer or none was given to remat.fit. The budget can be "
                "exceeded; fit with optimizer= this one"
            )
