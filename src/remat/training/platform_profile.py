"""Measure what the operators of a model cost on every device of a platform."""

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from torch import nn

from remat.capture.joint_program import JointProgram
from remat.core.errors import InvalidPlatformError
from remat.core.platform import MeasuredCosts, Platform
from remat.planning.plan import Plan
from remat.profile.cache import environment
from remat.profile.costing import platform_costs
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.training.fitted_model import FittedModel
from remat.training.fitting import keywords, positional
from remat.training.request import PlanRequest, platform_of
from remat.training.step_planning import Planner


class _MeasuringPlanner(Planner):
    """Measures the operators of the steps it is to plan; the plans do not matter."""

    measured: tuple[MeasuredCosts, ...] = ()

    def make_plan(self, program: JointProgram) -> Plan:
        platform = self.request.platform
        if platform is None:
            raise InvalidPlatformError("there is no platform to measure operators on")
        # Refuses a platform that the model is not on before anything is measured.
        self.platform_for(program)
        measured = MeasuredCosts(
            environment=tuple(sorted(environment().items())),
            operators=platform_costs(program, platform, self.request.progress),
        )
        self.measured = (*self.measured, measured)
        # The plan is made with what was measured, and measures nothing again.
        platform = replace(platform, costs=measured)
        self.request = replace(self.request, platform=platform)
        return super().make_plan(program)


class _MeasuredModel(FittedModel):
    planner_type = _MeasuringPlanner


def merged(old: MeasuredCosts | None, new: MeasuredCosts) -> MeasuredCosts:
    """Return the new costs, and the old ones of operators that are not among them."""
    if old is None:
        return new
    again = {(cost.device, cost.operator) for cost in new.operators}
    kept = [c for c in old.operators if (c.device, c.operator) not in again]
    return replace(new, operators=(*kept, *new.operators))


def with_measured_costs(
    platform: Platform | str | PathLike[str],
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> Platform:
    """Return a platform with what each operator of a model's step costs on its devices.

    A plan for that platform takes the costs from it, on any machine; saved with
    :func:`remat.files.serialisation.save_platform`, it can be made where the devices
    are not. The model, its gradients and the random state stay as they are, and nothing
    of the step is run as a whole.

    Parameters
    ----------
    platform
        Devices of this machine, the model's among them, or the path of their file.
        Costs that it has stay, but those of operators of this step are measured anew.
    model, args, kwargs
        As for :func:`remat.plan`.
    progress
        Called with what is being done and the share of it that is done.

    Raises
    ------
    CaptureError
        If the step cannot be traced as one graph, or does not train.
    InvalidPlatformError
        If the model is on none of the devices, or one is not on this machine.
    ProfileError
        If an operator cannot be run alone on the model's device.
    """
    platform = platform_of(platform) or Platform(devices=())
    names = platform.names
    request = PlanRequest(
        budget=dict.fromkeys(names) if len(names) > 1 else "100%",
        platform=platform,
        solver="store-all",
        group=None,
        progress=ignore_progress if progress is None else progress,
    )
    measured = _MeasuredModel(model, request, is_only_planned=True)
    measured.plan_now(positional(args), keywords(kwargs))
    # Steps that start with and without gradients have operators of their own.
    found = platform
    if isinstance(measured.planner, _MeasuringPlanner):
        for costs in measured.planner.measured:
            found = replace(found, costs=merged(found.costs, costs))
    return found
