"""Fit a model into a byte budget: capture, profile, solve, judge, install."""

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import unset_fake_temporarily

from remat.capture.autocast import autocast_again
from remat.capture.joint_program import JointProgram
from remat.capture.outputs import fake_outputs
from remat.capture.surroundings import (
    Surroundings,
    add_surroundings,
    captured_tensors,
    existing_gradient,
    resident_bytes,
    tensors_in,
)
from remat.capture.tracing import (
    check_batch,
    compiled_entry,
    quiet_tracer,
    raise_capture_error,
)
from remat.costing import Costs, with_costs, with_known_costs
from remat.errors import (
    CaptureError,
    ExecutionError,
    PlanMismatchError,
    SolverUnsuitableError,
    UnitError,
)
from remat.graph import Role
from remat.graph_planning import chosen_solvers, plan_graph
from remat.platform import Platform
from remat.profile.outside import (
    LossMemory,
    assumed_loss_bytes,
    loss_bytes,
    optimizer_bytes,
)
from remat.runtime.backend import PlannedBackend, StoppedBeforeRunningError
from remat.schedule import Schedule
from remat.simulator import simulate
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.training_plan import Plan

Loss = Callable[[Any], torch.Tensor]

_VARIANTS = 1_000_000


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
        if self.budget is None and self.given_plan is None:
            msg = "give a budget, for example budget='8 GiB' (or plan=, a saved plan)"
            raise UnitError(msg)
        chosen_solvers(self.solver)
        if self.platform is not None and len(self.platform.devices) > 1:
            msg = (
                f"the platform has {len(self.platform.devices)} devices, but this "
                "runtime executes on one; plan for one device"
            )
            raise SolverUnsuitableError(msg)
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


def optimizer_memory(request: PlanRequest) -> tuple[int, int]:
    """Return the bytes of the optimizer's state, and of its step beyond that.

    Not to be called while a model is traced: optimizers take another path then.

    Raises
    ------
    CaptureError
        If the optimizer's step cannot be predicted without running it.
    """
    return (0, 0) if request.optimizer is None else optimizer_bytes(request.optimizer)


def gradient_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the gradients that leaves among ``tensors`` hold now."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        gradient = existing_gradient(tensor)
        if gradient is not None:
            storage = gradient.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


class Planner:
    """Makes one plan per traced training step and remembers it.

    Parameters
    ----------
    model
        Held weakly: the compiler keeps what planned for it longer than the model.
    request
        What is asked for.
    optimizer_memory
        Bytes of the optimizer's state, and of its step beyond that.
    gradient_bytes
        Bytes of the gradients of earlier passes that exist during the whole step.
    """

    def __init__(
        self,
        model: nn.Module | None,
        request: PlanRequest,
        optimizer_memory: tuple[int, int],
        gradient_bytes: int = 0,
    ) -> None:
        self._model = None if model is None else weakref.ref(model)
        self.request = request
        self.optimizer_memory = optimizer_memory
        self.gradient_bytes = gradient_bytes
        self.batch: Any = ()
        self.plans: dict[str, Plan] = {}
        self.latest: Plan | None = None

    @property
    def model(self) -> nn.Module | None:
        """The model whose parameters and buffers count, if one was given.

        Raises
        ------
        ExecutionError
            If it was given and no longer exists.
        """
        if self._model is None:
            return None
        model = self._model()
        if model is None:
            msg = (
                "the model that was given for planning no longer exists, so its "
                "parameters cannot be counted; keep it for as long as its step runs"
            )
            raise ExecutionError(msg)
        return model

    def choose_schedule(self, program: JointProgram) -> tuple[JointProgram, Schedule]:
        """Plan a traced step, or find the plan made for an equal one."""
        with _outside_of_tracing():
            program = add_surroundings(program, self.surroundings(program))
            key = program.fingerprint
            if key not in self.plans:
                self.plans[key] = self.make_plan(program)
            self.latest = self.plans[key]
        return replace(program, graph=self.latest.graph), self.latest.schedule

    def surroundings(self, program: JointProgram) -> Surroundings:
        """Return what lives and runs around the traced step now."""
        request = self.request
        self.request.progress("surroundings", 0.0)
        state_bytes, step_bytes = self.optimizer_memory
        loss = self.loss_memory(program)
        residents = resident_bytes(
            self.model,
            (self.batch, captured_tensors(request.loss)),
            state_bytes,
            program.device,
            counts_gradients=False,
        )
        return Surroundings(
            resident_bytes={**residents, Role.GRADIENT: self.gradient_bytes},
            loss_peak_bytes=loss.peak_bytes,
            loss_held_bytes=loss.held_bytes,
            optimizer_workspace_bytes=step_bytes,
        )

    def loss_memory(self, program: JointProgram) -> LossMemory:
        """Return what the caller's loss may need beyond the outputs."""
        if self.request.loss is not None and self.model is not None:
            args, kwargs = self.batch
            with autocast_again(program.autocast):
                outputs = fake_outputs(self.model, args, kwargs)
                return loss_bytes(self.request.loss, outputs)
        # Only outputs that take a gradient have one.
        return assumed_loss_bytes(
            program.base_nodes[tangent][0].meta["val"]
            for tangent in program.graph.tangents
        )

    def make_plan(self, program: JointProgram) -> Plan:
        """Return a new plan for a traced step, or the given one if it fits."""
        if self.request.given_plan is not None:
            return accept_plan(program, self.request.given_plan)
        graph = with_costs(program, self.request.costs, self.request.progress)
        return plan_graph(
            graph,
            budget=self.request.required_budget,
            fingerprint=program.fingerprint,
            solver=self.request.solver,
            time_limit=self.request.time_limit,
            seed=self.request.seed,
            progress=self.request.progress,
            settings={"torch": torch.__version__, "costs": self.request.costs},
        )


def accept_plan(program: JointProgram, plan: Plan) -> Plan:
    """Return a saved plan, judged again on the step that was traced now.

    Raises
    ------
    PlanMismatchError
        If the plan was made for another model, other shapes or other versions, or if
        what surrounds the step now needs more than the plan's budget.
    """
    if plan.fingerprint != program.fingerprint:
        msg = (
            f"the plan is for {plan.graph.name} (step {plan.fingerprint[:12]}, torch "
            f"{plan.settings.get('torch', 'unknown')}), but this is "
            f"{program.graph.name} (step {program.fingerprint[:12]}, torch "
            f"{torch.__version__}): another model, other input shapes, another mode or "
            "another version; make a new plan with remat.fit(..., budget=...)"
        )
        raise PlanMismatchError(msg)
    graph = with_known_costs(program.graph, plan.graph)
    trace = simulate(graph, plan.platform, plan.schedule)
    if trace.violation is not None:
        msg = (
            "the plan does not hold for what surrounds the step now (optimizer, "
            f"gradients, batch): {trace.violation}"
        )
        raise PlanMismatchError(msg)
    return replace(plan, graph=graph)


@contextmanager
def _outside_of_tracing() -> Generator[None]:
    """Leave fake-tensor mode and autograd while operators are really run."""
    with unset_fake_temporarily(), torch.no_grad():
        yield


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

    def __init__(self, model: nn.Module, request: PlanRequest) -> None:
        self.model = model
        self.request = request
        self.optimizer_memory = optimizer_memory(request)
        self.entries: dict[int, tuple[Planner, PlannedBackend, Callable[..., Any]]] = {}

    def entry(
        self, gradient_bytes: int
    ) -> tuple[Planner, PlannedBackend, Callable[..., Any]]:
        """Return planner, backend and compiled call for so many bytes of gradients."""
        if gradient_bytes not in self.entries:
            planner = Planner(
                self.model, self.request, self.optimizer_memory, gradient_bytes
            )
            backend = PlannedBackend(_weakly(planner), type(self.model).__name__)
            self.entries[gradient_bytes] = (
                planner,
                backend,
                compiled_entry(self.model, backend),
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
        self.request = replace(self.request, given_plan=None, budget=plan.budget_bytes)
        for planner, _, _ in self.entries.values():
            planner.request = self.request

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


def fit(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    platform: Platform | None = None,
    solver: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    costs: Costs = "measured",
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
        ``"60%"`` of the predicted peak without rematerialisation.
    optimizer
        Counts its state and the memory of its step.
    loss
        The function of the model's outputs whose gradient is taken, when it is outside
        the model: its memory is then predicted exactly. Without it, a scalar that is
        the first output is taken for the loss, and other outputs to need four times
        their size.
    platform
        A platform of one device; its budget is replaced by ``budget``.
    solver
        ``"auto"`` for the best judged answer, or a name in ``remat.solvers.SOLVERS``.
    time_limit
        Seconds for solving, or ``None``.
    seed
        Seed of solvers that randomise.
    costs
        ``"measured"`` runs each distinct operator alone; ``"estimated"`` runs none,
        and predicts workspace by rules of thumb, so that the budget may be exceeded by
        some percent.
    progress
        Called with what is being done and the share of it that is done.
    plan
        A saved plan to install instead of making one.

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
    SolverUnsuitableError
        If ``solver`` is unknown or cannot treat this graph.
    ProfileError
        If an operator cannot be run alone.

    Notes
    -----
    Whatever is raised, the model is as it was before the call.
    """
    request = PlanRequest(
        budget=budget,
        optimizer=optimizer,
        loss=loss,
        platform=platform,
        solver=solver,
        time_limit=time_limit,
        seed=seed,
        costs=costs,
        progress=progress or ignore_progress,
        given_plan=plan,
    )
    fitted = FittedModel(model, request)
    result = fitted.plan_now(positional(args), kwargs or {})
    model._compiled_call_impl = fitted
    return result


def plan(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    platform: Platform | None = None,
    solver: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    costs: Costs = "measured",
    progress: ProgressCallback | None = None,
) -> Plan:
    """Return the plan that :func:`fit` would install, and install nothing.

    Parameters and exceptions are those of :func:`fit`.
    """
    request = PlanRequest(
        budget=budget,
        optimizer=optimizer,
        loss=loss,
        platform=platform,
        solver=solver,
        time_limit=time_limit,
        seed=seed,
        costs=costs,
        progress=progress or ignore_progress,
    )
    return FittedModel(model, request).plan_now(positional(args), kwargs or {})


def release(model: nn.Module) -> nn.Module:
    """Undo :func:`fit`: the model's calls run as before. Returns the model.

    A model that was not fitted is left as it is.
    """
    if isinstance(model._compiled_call_impl, FittedModel):
        model._compiled_call_impl = None
    return model


def backend(
    *,
    budget: int | str,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    solver: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    costs: Costs = "measured",
    progress: ProgressCallback | None = None,
) -> PlannedBackend:
    """Return a backend for ``torch.compile(model, backend=..., dynamic=False)``.

    The compiler sees the traced graph only: parameters it does not read and the
    optimizer's state count only if ``model`` and ``optimizer`` are given here. A
    budget that is too small shows at the first call, as the cause of the compiler's
    own exception. Parameters are those of :func:`fit`.
    """
    request = PlanRequest(
        budget=budget,
        optimizer=optimizer,
        loss=loss,
        solver=solver,
        time_limit=time_limit,
        seed=seed,
        costs=costs,
        progress=progress or ignore_progress,
    )
    memory = optimizer_memory(request)
    # The compiler never forgets a backend: it must not keep the optimizer alive.
    planner = Planner(model, replace(request, optimizer=None), memory)
    name = "compiled step" if model is None else type(model).__name__
    return PlannedBackend(planner.choose_schedule, name)


def positional(args: Any) -> tuple[Any, ...]:
    """Return example arguments as a tuple; a single value stands for itself."""
    return tuple(args) if isinstance(args, tuple | list) else (args,)
