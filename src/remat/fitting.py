"""Fit a model into a byte budget: capture, profile, solve, judge, install."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException

from remat.capture.joint_program import JointProgram
from remat.capture.returned import note_tensor
from remat.capture.surroundings import tensors_in
from remat.capture.tracing import (
    check_batch,
    compiled_entry,
    quiet_tracer,
    raise_capture_error,
)
from remat.costing import Costs
from remat.device_planning import Budget, budget_of
from remat.errors import CaptureError, ExecutionError
from remat.kernel_choice import Kernels, kernels_of
from remat.plan_request import (
    Loss,
    PlanRequest,
    check_is_plannable,
    check_model,
    platform_of,
)
from remat.platform import Platform
from remat.problem import Objectives
from remat.profile.described_loss import DescribedLoss
from remat.runtime.backend import PlannedBackend, StoppedBeforeRunningError
from remat.runtime.variants import VariantBackend
from remat.schedule import Schedule
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.step_planning import (
    CompilerPlanner,
    Planner,
    gradient_bytes,
    optimizer_memory,
)
from remat.training_plan import Plan, objective_of

_VARIANTS = 1_000_000


def _tracer_settings() -> AbstractContextManager[None]:
    """Return a context in which every new shape and every new hook is traced.

    By default the tracer gives up after eight variants of a step, and does not look
    for hooks that are added later.
    """
    return torch._dynamo.config.patch(
        recompile_limit=_VARIANTS,
        accumulated_recompile_limit=_VARIANTS,
        skip_nnmodule_hook_guards=False,
    )


class FittedModel:
    """A model whose calls run by plans: what :func:`fit` installs.

    One compiled entry exists for steps that start without gradients, and one for each
    amount of gradients from earlier passes that steps start with, since these bytes
    count.
    """

    planner_type: ClassVar[type[Planner]] = Planner

    def __init__(self, model: nn.Module, request: PlanRequest) -> None:
        check_model(model)
        check_is_plannable(model, request.optimizer)
        self.model = model
        # What the calls of the model ran before it was fitted.
        self.previous_call = model._compiled_call_impl
        if isinstance(self.previous_call, FittedModel):
            self.previous_call = self.previous_call.previous_call
        self.request = request
        self.optimizer_memory = optimizer_memory(request)
        self.loss = None if request.loss is None else DescribedLoss(request.loss)
        # Whether plans need not run here, so that their devices need not exist.
        self.is_only_planned = False
        self.entries: dict[int, tuple[Planner, PlannedBackend, Callable[..., Any]]] = {}

    def entry(
        self, gradient_bytes: int
    ) -> tuple[Planner, PlannedBackend, Callable[..., Any]]:
        """Return planner, backend and compiled call for so many bytes of gradients."""
        if gradient_bytes not in self.entries:
            planner = self.planner_type(
                self.model,
                self.request,
                self.optimizer_memory,
                gradient_bytes,
                self.loss,
            )
            planner.is_only_planned = self.is_only_planned
            backend = PlannedBackend(
                _weakly(planner), type(self.model).__name__, _kernels_weakly(planner)
            )
            backend.is_only_planned = self.is_only_planned
            self.entries[gradient_bytes] = (
                planner,
                backend,
                compiled_entry(self.model, backend, note_tensor(backend.note_returned)),
            )
        return self.entries[gradient_bytes]

    def gradient_bytes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the bytes of the gradients that earlier passes left."""
        return gradient_bytes(
            [*self.model.parameters(), *tensors_in((args, dict(kwargs)))]
        )

    def plan_now(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        """Trace and plan the step of this example without running anything.

        Where gradients exist, the step without them is planned too: a training loop
        usually clears them before its next step. A percentage becomes a number of
        bytes here, which then holds for every step.
        """
        check_batch(self.model, args, kwargs)
        existing_bytes = self.gradient_bytes(args, kwargs)
        plan = self.plan_entry(args, kwargs, existing_bytes)
        self.set_budget(plan)
        if existing_bytes:
            self.plan_entry(args, kwargs, 0)
        return plan

    def set_budget(self, plan: Plan) -> None:
        """Plan whatever comes next anew, within the bytes of ``plan``."""
        self.request = replace(
            self.request,
            given_plan=None,
            budget=budget_of(plan),
            kernels=kernels_of(plan.settings),
            objective=objective_of(plan.settings),
            platform=self._platform_of(plan),
        )
        for planner, _, _ in self.entries.values():
            planner.request = self.request

    def _platform_of(self, plan: Plan) -> Platform | None:
        asked = self.request.platform
        if not plan.has_several_devices:
            return asked
        return replace(plan.platform, costs=None if asked is None else asked.costs)

    def plan_entry(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient_bytes: int
    ) -> Plan:
        """Trace and plan the step that starts with so many bytes of gradients."""
        planner, backend, _ = self.entry(gradient_bytes)
        backend.stop_before_running = True
        traced_before = backend.training_step_count
        try:
            with torch.enable_grad(), quiet_tracer():
                self.run(args, kwargs, gradient_bytes)
        except StoppedBeforeRunningError:
            pass
        finally:
            backend.stop_before_running = False
        if backend.training_step_count == traced_before or planner.latest is None:
            msg = (
                "the model does not train: no output depends on a parameter that "
                "requires a gradient; check requires_grad and torch.no_grad"
            )
            raise CaptureError(msg)
        return planner.latest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step's forward pass by its plan; plan it first if it is new."""
        return self.run(args, kwargs, self.gradient_bytes(args, kwargs))

    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient_bytes: int
    ) -> Any:
        """Call the model by the plan for so many bytes of existing gradients."""
        planner, backend, compiled = self.entry(gradient_bytes)
        planner.batch = (args, kwargs)
        try:
            with _tracer_settings():
                return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            raise_capture_error(error, backend.failure)
        finally:
            planner.batch = ()
            # Its traceback holds the batch and the model.
            backend.failure = None


def _weakly(
    planner: Planner,
) -> Callable[[JointProgram], tuple[JointProgram, Schedule]]:
    """Return the planner's choice of a schedule, without keeping the planner.

    The compiler never forgets a backend, and the planner holds loss and optimizer.
    """
    method = weakref.WeakMethod(planner.choose_schedule)

    def choose_schedule(program: JointProgram) -> tuple[JointProgram, Schedule]:
        choose = method()
        if choose is None:
            raise ExecutionError("the plan of this model was released")
        return choose(program)

    return choose_schedule


def _kernels_weakly(planner: Planner) -> Callable[[fx.GraphModule, int], None]:
    """Return the planner's choice of kernels, without keeping the planner."""
    method = weakref.WeakMethod(planner.choose_kernels)

    def choose_kernels(joint: fx.GraphModule, forward_output_count: int) -> None:
        choose = method()
        if choose is None:
            raise ExecutionError("the plan of this model was released")
        choose(joint, forward_output_count)

    return choose_kernels


def fit(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    platform: Platform | str | PathLike[str] | None = None,
    solver: str = "auto",
    objective: Objectives = "serial",
    time_limit: float | None = None,
    seed: int = 0,
    costs: Costs = "measured",
    kernels: Kernels = "eager",
    progress: ProgressCallback | None = None,
    plan: Plan | None = None,
) -> Plan:
    """Make a model train within a budget of bytes, and return the plan.

    The model is changed in place, as by ``nn.Module.compile``: calling it runs the
    plan. Parameters, buffers, gradients, random state and mode are as before. Another
    input shape is planned at its first call, with the same budget. :func:`release`
    undoes it.

    Parameters
    ----------
    model
        Any module that ``torch.compile`` can take as one graph.
    args, kwargs
        An example batch, as the model is called with; a single tensor may be given
        for ``args``.
    budget
        Most bytes on the model's device during a whole training step: an integer of
        bytes, a size such as ``"8 GiB"`` or ``"900MB"``, or a percentage such as
        ``"60%"`` of the predicted peak without rematerialisation. For several devices
        a mapping of these by the devices' names, such as ``{"cuda:0": "6 GiB", "cpu":
        "20 GiB"}``; a percentage is then of the step on the model's device alone.
    optimizer
        Counts its state and the memory of its step.
    loss
        The function of the model's outputs whose gradient is taken, when it is outside
        the model: its memory is then predicted exactly. Without it, a scalar that is
        the first output is taken for the loss, and other outputs to need four times
        their size.
    platform
        The devices and links, or the path of their file; their budgets are replaced by
        ``budget``. Without it, the names in ``budget`` are devices of this machine
        (``"cpu"``, ``"cpu:1"``, ``"cuda:0"``, ``"host"`` for host memory that only
        stores), and their links are measured.
    solver
        ``"auto"`` for the best judged answer, or a name in ``remat.solvers.SOLVERS``.
    objective
        What is made small on several devices: ``"serial"``, the sum of all runs and
        copies (``plan.cost_ns``), or ``"overlapped"``, the time with devices and links
        at work together (``plan.overlapped_ns``), about which nothing is proved.
    time_limit
        Seconds for solving, or ``None``.
    seed
        Seed of solvers that randomise.
    costs
        ``"measured"`` runs each distinct operator alone; ``"estimated"`` runs none,
        and predicts workspace by rules of thumb, so that the budget may be exceeded by
        some percent.
    kernels
        ``"eager"`` runs the kernels of eager PyTorch, and results are bitwise its own.
        ``"fused"`` lets ``torch.compile``'s compiler make one kernel of neighbouring
        elementwise operators, reductions and normalisations, where that is measured to
        be quicker: results are then bitwise those of the step with these kernels and
        without rematerialisation, and differ from eager in the last digits. It needs a
        compiler, and compiling takes about a second for each distinct kernel.
    progress
        Called with what is being done and the share of it that is done.
    plan
        A saved plan to install instead of making one; it has its own budget.

    Returns
    -------
    Plan
        What was decided, predicted and proved.

    Raises
    ------
    BudgetError
        If no schedule fits; names the smallest budget that works.
    CaptureError
        If the step cannot be traced as one graph, or does not train.
    PlanMismatchError
        If ``plan`` is for another model, shape or version.
    UnitError
        If ``budget`` is not a positive size.
    InvalidPlatformError
        If a device has no budget, does not exist, cannot be reached, or an operator can
        run on none; the message names it.
    SolverUnsuitableError
        If ``solver`` is unknown or cannot treat this graph.
    ProfileError
        If an operator cannot be run alone.
    TypeError, ValueError
        If another argument is of the wrong type or makes no sense.

    Notes
    -----
    Whatever is raised, the model is as it was before the call.
    """
    request = PlanRequest(
        budget=budget,
        optimizer=optimizer,
        loss=loss,
        platform=platform_of(platform),
        solver=solver,
        objective=objective,
        time_limit=time_limit,
        seed=seed,
        costs=costs,
        kernels=kernels,
        progress=ignore_progress if progress is None else progress,
        given_plan=plan,
    )
    fitted = FittedModel(model, request)
    result = fitted.plan_now(positional(args), keywords(kwargs))
    model._compiled_call_impl = fitted
    return result


def plan(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    platform: Platform | str | PathLike[str] | None = None,
    solver: str = "auto",
    objective: Objectives = "serial",
    time_limit: float | None = None,
    seed: int = 0,
    costs: Costs = "measured",
    kernels: Kernels = "eager",
    progress: ProgressCallback | None = None,
) -> Plan:
    """Return the plan that :func:`fit` would install, and install nothing.

    Parameters and exceptions are those of :func:`fit`.
    """
    request = PlanRequest(
        budget=budget,
        optimizer=optimizer,
        loss=loss,
        platform=platform_of(platform),
        solver=solver,
        objective=objective,
        time_limit=time_limit,
        seed=seed,
        costs=costs,
        kernels=kernels,
        progress=ignore_progress if progress is None else progress,
    )
    fitted = FittedModel(model, request)
    fitted.is_only_planned = True
    return fitted.plan_now(positional(args), keywords(kwargs))


def release(model: nn.Module) -> nn.Module:
    """Undo :func:`fit`: the model's calls run as before. Returns the model.

    A model that was not fitted is left as it is.

    Raises
    ------
    TypeError
        If ``model`` is no module.
    """
    check_model(model)
    if isinstance(model._compiled_call_impl, FittedModel):
        model._compiled_call_impl = model._compiled_call_impl.previous_call
    return model


def backend(
    *,
    budget: Budget,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    platform: Platform | str | PathLike[str] | None = None,
    solver: str = "auto",
    objective: Objectives = "serial",
    time_limit: float | None = None,
    seed: int = 0,
    costs: Costs = "measured",
    kernels: Kernels = "eager",
    progress: ProgressCallback | None = None,
) -> VariantBackend:
    """Return a backend for ``torch.compile(model, backend=..., dynamic=False)``.

    The compiler sees the traced graph only: parameters it does not read and the
    optimizer's state count only if ``model`` and ``optimizer`` are given here. A
    budget that is too small shows at the first call, as ``inner_exception`` of the
    compiler's ``BackendCompilerFailed``. While gradients of an earlier pass exist
    their bytes count: that kind of step is planned at its first call, which raises
    ``BudgetError`` itself. Parameters are those of :func:`fit`; ``loss`` needs
    ``model``, and a model that is called with tensors only.

    Raises
    ------
    UnitError
        If ``budget`` is not a positive size.
    CaptureError
        If the optimizer's step cannot be predicted without running it.
    ValueError, TypeError
        If an argument makes no sense, or ``loss`` is given without ``model``.
    """
    if loss is not None and model is None:
        msg = (
            "loss= needs model=, whose outputs the loss is tried on; give "
            "remat.backend(..., model=model, loss=loss)"
        )
        raise ValueError(msg)
    request = PlanRequest(
        budget=budget,
        optimizer=optimizer,
        loss=loss,
        platform=platform_of(platform),
        solver=solver,
        objective=objective,
        time_limit=time_limit,
        seed=seed,
        costs=costs,
        kernels=kernels,
        progress=ignore_progress if progress is None else progress,
    )
    if model is not None:
        check_model(model)
    memory = optimizer_memory(request)
    # The compiler never forgets a backend: it must not keep the optimizer alive.
    planner = CompilerPlanner(model, replace(request, optimizer=None), memory)
    name = "compiled step" if model is None else type(model).__name__
    return VariantBackend(planner, name)


def positional(args: Any) -> tuple[Any, ...]:
    """Return example arguments as a tuple; a single value stands for itself."""
    return tuple(args) if isinstance(args, tuple | list) else (args,)


def keywords(kwargs: Any) -> dict[str, Any]:
    """Return example arguments by keyword.

    Raises
    ------
    TypeError
        If they are no mapping.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        msg = (
            f"kwargs is a {type(kwargs).__name__}; it must be a mapping of keyword "
            "arguments (several positional ones are a tuple: args=(x, y))"
        )
        raise TypeError(msg)
    return dict(kwargs)
