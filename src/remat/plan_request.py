"""What a plan shall be made for, checked before anything slow is done."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.costing import Costs
from remat.errors import SolverUnsuitableError, UnitError
from remat.graph_planning import chosen_solvers
from remat.platform import Platform
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.training_plan import Plan
from remat.units import parse_budget

Loss = Callable[[Any], torch.Tensor]

_ANY_WHOLE_BYTES = 2**62


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan shall be made for, and how.

    See :func:`fit` for the meaning of the fields; exactly one of ``budget`` and
    ``given_plan`` is not ``None``.
    """

    budget: int | str | None = None
    optimizer: torch.optim.Optimizer | None = None
    loss: Loss | None = None
    platform: Platform | None = None
    solver: str = "auto"
    time_limit: float | None = None
    seed: int = 0
    costs: Costs = "measured"
    progress: ProgressCallback = ignore_progress
    given_plan: Plan | None = None

    def __post_init__(self) -> None:
        if self.given_plan is not None:
            _check("plan", self.given_plan, Plan, "a plan, as remat.load_plan returns")
        elif self.budget is None:
            msg = "give a budget, for example budget='8 GiB' (or plan=, a saved plan)"
            raise UnitError(msg)
        else:
            # Any whole will do: what a percentage comes to is known after tracing.
            parse_budget(self.budget, whole_bytes=_ANY_WHOLE_BYTES)
        if self.optimizer is not None:
            _check("optimizer", self.optimizer, torch.optim.Optimizer, "an optimizer")
        if self.loss is not None:
            _check("loss", self.loss, Callable, "a function of the model's outputs")
        _check("progress", self.progress, Callable, "a function of (activity, share)")
        _check("seed", self.seed, int, "an integer")
        _check_time_limit(self.time_limit)
        chosen_solvers(self.solver)
        if self.platform is not None:
            _check("platform", self.platform, Platform, "a remat.Platform")
            _check_platform(self.platform)
        if self.costs not in {"measured", "estimated"}:
            msg = f"costs is {self.costs!r}; it must be 'measured' or 'estimated'"
            raise ValueError(msg)

    @property
    def required_budget(self) -> int | str:
        """The budget of a request that has one.

        Raises
        ------
        UnitError
            If there is none.
        """
        if self.budget is None:
            raise UnitError("give a budget, for example budget='8 GiB'")
        return self.budget


def check_model(model: object) -> None:
    """Refuse what is no model.

    Raises
    ------
    TypeError
        If it is not a module.
    """
    _check("model", model, nn.Module, "a torch.nn.Module")


def _check(name: str, value: object, kind: Any, needed: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        msg = f"{name} is {value!r} ({type(value).__name__}); it must be {needed}"
        raise TypeError(msg)


def _check_time_limit(seconds: object) -> None:
    needed = "a number of seconds, at least 0, or None for no limit"
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        msg = (
            f"time_limit is {seconds!r} ({type(seconds).__name__}); it must be {needed}"
        )
        raise TypeError(msg)
    if not seconds >= 0:
        msg = f"time_limit is {seconds}; it must be {needed}"
        raise ValueError(msg)


def _check_platform(platform: Platform) -> None:
    if len(platform.devices) > 1:
        msg = (
            f"the platform has {len(platform.devices)} devices, but this runtime "
            "executes on one; plan for one device"
        )
        raise SolverUnsuitableError(msg)
