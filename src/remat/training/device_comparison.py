"""One training step on devices that need not be here: memory, time, largest batch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar, Unpack

import torch
from torch import nn

from remat.capture.accelerator import TRACED_OTHERWISE, costed_for, traced_for
from remat.capture.joint_program import JointProgram
from remat.capture.surroundings import tensors_in
from remat.capture.tracing import check_tracer
from remat.core.errors import CaptureError
from remat.core.graph import TrainingGraph
from remat.core.hardware import Hardware
from remat.files.hardware import chosen_hardware
from remat.planning.device_estimates import (
    DeviceComparison,
    DeviceEstimate,
    ScaledGraph,
    estimate_on,
)
from remat.planning.plan import Plan
from remat.profile.costing import with_costs
from remat.torch_compat.names import tree_map, unset_fake_temporarily
from remat.training.caller_state import unchanged
from remat.training.fitted_model import FittedModel, plain_model
from remat.training.fitting import keywords, positional
from remat.training.request import (
    PlanOptions,
    PlanRequest,
    check_memory_holds,
    check_model,
    requested,
    shows_options,
)
from remat.training.stand_ins import where_memory_is, with_stand_ins
from remat.training.step_planning import Planner

_ONE_GRAPH = "the largest batch was not looked for: with twice the batch the step is not the same"


class _CostingPlanner(Planner):
    """Keeps the graph of a step with the costs on each of several devices."""

    devices: Sequence[Hardware] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graphs: dict[str, TrainingGraph] = {}
        self.has_assumed_loss = False

    def make_plan(self, program: JointProgram) -> Plan:
        self.has_assumed_loss = self.request.loss is None and program.loss is None
        for hardware in self.devices:
            # With the gradients that exist, before the step that begins without.
            if hardware.name in self.graphs:
                continue
            with costed_for(hardware):
                self.graphs[hardware.name] = with_costs(
                    program, "estimated", self.request.progress
                )
        return super().make_plan(program)


class _CostedModel(FittedModel):
    planner_type: ClassVar[type[Planner]] = _CostingPlanner


@shows_options(after="finds_largest_batch")
def compare_devices(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Sequence[Hardware | str | PathLike[str]],
    finds_largest_batch: bool = True,
    **options: Unpack[PlanOptions],
) -> DeviceComparison:
    """Return whether and how a model trains on devices that need not be here.

    The step is traced once as an accelerator would run it, and once more with twice the
    batch; its costs are estimated from the makers' numbers. Nothing is run.

    Parameters
    ----------
    model, args, kwargs
        As for :func:`remat.plan`; without memory, planning takes little.
    devices
        Names of :func:`remat.files.hardware.hardware_names`, paths of files that
        describe devices, or these; at least one.
    finds_largest_batch
        Whether the largest batch is looked for. The size of the batch is the first
        dimension of its first tensor, and all tensors of that size have it.
    **options
        As for :func:`remat.plan`, without ``platform``. Under ``torch.autocast("cpu",
        dtype)`` the step is one under the accelerator's autocast to that type. A
        ``loss`` must make its targets from the outputs for another batch to be tried.

    Returns
    -------
    DeviceComparison
        ``print`` shows a table.

    Raises
    ------
    CaptureError
        If the step cannot be traced.
    InvalidPlatformError, FileFormatError
        If a device is unknown; the message lists all.
    ValueError
        If no device is given, or an option makes no sense.

    Notes
    -----
    Two traces, and for each device a plan of at most 10 s and quick searches.
    """
    if options.get("device") is not None:
        msg = "device= is for one device and remat.plan; give devices= here"
        raise ValueError(msg)
    chosen = [chosen_hardware(device) for device in devices]
    if not chosen:
        msg = "devices is empty; give at least one, such as devices=['h100-80gb']"
        raise ValueError(msg)
    names = [hardware.name for hardware in chosen]
    if len(set(names)) < len(names):
        msg = f"a device is given twice: {', '.join(names)}"
        raise ValueError(msg)
    kwargs = keywords(kwargs)
    request = requested("plan", {**options, "device": chosen[0]}, budget=None)
    check_model(model)
    given = positional(args)
    batch = batch_size(given, kwargs)
    estimates: dict[str, DeviceEstimate] = {}
    notes: list[str] = []
    for is_cpu in (False, True):
        group = [hardware for hardware in chosen if (hardware.kind == "cpu") is is_cpu]
        if not group:
            continue
        tracing = replace(request, device=group[0], budget="100%")
        graphs, is_assumed = _costed(model, given, kwargs, tracing, group)
        twice: dict[str, TrainingGraph] = {}
        if finds_largest_batch and batch is not None:
            scaled = _of_batch((given, kwargs), batch, 2 * batch)
            try:
                twice, _ = _costed(model, *scaled, tracing, group)
            except CaptureError as error:
                notes.append(f"the largest batch was not looked for: {error}")
        for hardware in group:
            graph, other = graphs[hardware.name], twice.get(hardware.name)
            line = None
            if other is not None and batch is not None:
                line = ScaledGraph(graph, other, batch, hardware.granule_bytes)
                if not line.is_one_step:
                    line = None
                    notes.append(_ONE_GRAPH)
            estimates[hardware.name] = estimate_on(
                graph,
                hardware,
                scaled=line,
                solver=request.solver,
                time_limit=request.time_limit,
                seed=request.seed,
                has_assumed_loss=is_assumed,
                progress=request.progress,
            )
        if not is_cpu:
            notes += TRACED_OTHERWISE
    return DeviceComparison(
        name=type(plain_model(model)).__name__,
        batch=batch,
        estimates=tuple(estimates[name] for name in names),
        notes=tuple(dict.fromkeys(notes)),
    )


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the first dimension of the first tensor that has one, if there is one."""
    sizes = [t.shape[0] for t in tensors_in((args, dict(kwargs))) if t.dim()]
    return sizes[0] if sizes and sizes[0] else None


def _of_batch(example: Any, batch: int, wanted: int) -> Any:
    """Return an example of another batch, without memory."""

    def sized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        if leaf.shape[0] != batch:
            return leaf
        shape = (wanted, *leaf.shape[1:])
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    return tree_map(sized, example)


def _costed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    request: PlanRequest,
    devices: Sequence[Hardware],
) -> tuple[dict[str, TrainingGraph], bool]:
    """Trace a step, and return it with the costs on each device.

    Also whether the memory of its loss is assumed.
    """
    check_tracer()
    with unset_fake_temporarily(), where_memory_is(), traced_for(devices[0]):
        stood = with_stand_ins(plain_model(model), args, kwargs, request.optimizer)
        model, args, kwargs, optimizer = stood
        largest = max(devices, key=lambda hardware: hardware.usable_bytes)
        check_memory_holds(model, largest)
        request = replace(request, optimizer=optimizer, regions="whole")
        with unchanged(model, optimizer):
            fitted = _CostedModel(model, request, is_only_planned=True)
            planner = fitted.planner
            if not isinstance(planner, _CostingPlanner):
                msg = f"the planner is a {type(planner).__name__}"
                raise TypeError(msg)
            planner.devices = devices
            fitted.plan_now(args, kwargs)
            return dict(planner.graphs), planner.has_assumed_loss
