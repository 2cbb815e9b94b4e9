"""A model whose calls run by plans: what :func:`remat.fit` installs on it."""

import copy
import functools
import inspect
import logging
import sys
import textwrap
import time
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import fx, nn

import remat
from remat.capture.joint_program import JointProgram
from remat.capture.returned import note_returned
from remat.capture.surroundings import tensors_in
from remat.capture.tracing import (
    TRACE_ERRORS,
    check_backward_hooks,
    check_batch,
    check_is_no_wrapper,
    compiled_code,
    compiled_entry,
    quiet_tracer,
    raise_capture_error,
)
from remat.capture.varying_sizes import (
    FixedSizesError,
    Sizes,
    UnequalRangesError,
    VaryingSizes,
)
from remat.core.errors import (
    BudgetError,
    CaptureError,
    ExecutionError,
    PlanWarning,
    RematError,
)
from remat.core.garbage import old_objects_left_alone
from remat.core.graph import Role
from remat.core.platform import Platform
from remat.core.schedule import Schedule
from remat.core.units import format_bytes, is_percentage, round_up
from remat.planning.plan import Plan
from remat.planning.several_devices import budget_of
from remat.profile.costing import granule_bytes
from remat.profile.optimizer_copy import settings_of, state_count, stepping_optimizer
from remat.profile.optimizers_in_backward import (
    OptimizerMemory,
    OptimizersInBackward,
    optimizer_memory,
)
from remat.torch_compat.attributes import (
    Contents,
    active_wrapper,
    contents_of,
    install_call,
    install_replication,
    install_state,
    installed_call,
    is_trained,
    marked_dynamic,
    plain_call,
    replication_of,
    uninstall_replication,
    uninstall_state,
)
from remat.torch_compat.attributes import plain_model as plain_model
from remat.torch_compat.messages import NESTED_TRACE, NO_SAVED_TENSOR_HOOKS
from remat.torch_compat.patches import alone
from remat.torch_compat.process_groups import group_around
from remat.torch_compat.sharding import gathered_groups, gathering_alone, local_part
from remat.training.caller_state import unchanged
from remat.training.callers import (
    gradient_buckets_bytes,
    has_forward_hooks,
    has_untraceable_hooks,
    tracer_around,
    transform_around,
)
from remat.training.forward_state import kept
from remat.training.optimizer_steps import FittedSteps, StepWatch
from remat.training.passes_in_flight import PassesInFlight
from remat.training.request import (
    PlanRequest,
    Regions,
    check_hooks,
    check_is_plannable,
    check_model,
)
from remat.training.same_plan import planning_together
from remat.training.shape_ranges import Asked, ShapeRanges, checked_shapes
from remat.training.step_backend import PlannedBackend, StoppedBeforeRunningError
from remat.training.step_planning import Planner, objects_in
from remat.training.training_loop import AwaitedBatch, LoopMemory
from remat.training.variants import Kind, TracedCall, VariantBackend

logger = logging.getLogger("remat")

_VARIANTS = 1_000_000
_OPAQUE = (
    "a model fitted by remat runs its own compiled step, which an outer torch.compile "
    "cannot look into: leave fullgraph=True out, or compile without remat"
)


def _tracer_settings(*, is_whole: bool) -> dict[str, Any]:
    """Return settings with which every new shape and every new hook is traced.

    By default the tracer gives up after eight variants of a step, and does not look
    for hooks that are added later. Where the model may be split, it is at NumPy's
    random draws; in one graph the tracer draws from torch's generator instead. Inside
    of a ``DistributedDataParallel`` it splits no graph at the borders of buckets.
    """
    return {
        "optimize_ddp": False,
        "use_numpy_random_stream": not is_whole,
        "recompile_limit": _VARIANTS,
        "accumulated_recompile_limit": _VARIANTS,
        "skip_nnmodule_hook_guards": False,
        # In torch 2.11 it passes over parameters that are frozen or converted.
        "skip_tensor_guards_with_matching_dict_tags": False,
    }


def fitted_on(model: nn.Module) -> "FittedModel | None":
    """Return what :func:`remat.fit` installed on a module, or ``None``."""
    forward = vars(model).get("forward")
    return forward.fitted if isinstance(forward, PlannedForward) else None


_MANY_ALIKE = 8
_LONGEST_WORDS = 600
"""As often steps are planned for calls that look alike before that is said."""


class FittedModel:
    """A model whose calls run by plans: what :func:`remat.fit` installs.

    Installed are the call of the module, as by ``nn.Module.compile``, and its
    ``forward``: whoever calls that instead, such as another compiler or a wrapper that
    replaces the call, runs the plan too.

    Each kind of step is planned once: each set of shapes and types, and each amount of
    gradients from earlier passes that steps start with, since these bytes count.

    Parameters
    ----------
    model
        The model, changed by :meth:`install` only.
    request
        What is asked for.
    is_only_planned
        Whether plans need not run here, so that their devices need not exist.
    """

    planner_type: ClassVar[type[Planner]] = Planner
    is_whole: ClassVar[bool] = True

    def __init__(
        self, model: nn.Module, request: PlanRequest, *, is_only_planned: bool = False
    ) -> None:
        check_model(model)
        check_is_plannable(model, request.optimizer)
        if not is_only_planned:
            check_hooks(model, request.optimizer)
        check_is_no_wrapper(model, may_be_sharded=not self.is_whole)
        self.model = model
        before = fitted_on(model)
        # What the calls of the model ran before it was fitted.
        self.previous_call = before.previous_call if before else installed_call(model)
        self.previous_forward = (
            before.previous_forward if before else vars(model).get("forward")
        )
        self.planned_forward = PlannedForward(self)
        self._check_nesting()
        # What plans depend on, and may be changed between calls. The optimizer may be
        # gone before the model is, and wrappers around it before it is.
        self._optimizer = (
            None
            if request.optimizer is None
            else weakref.ref(stepping_optimizer(request.optimizer))
        )
        # Nobody else holds many optimizers as one.
        is_own = isinstance(request.optimizer, OptimizersInBackward)
        self._own_optimizer = request.optimizer if is_own else None
        self._optimizer_seen = settings_of(request.optimizer)
        self._memory_of: dict[Any, OptimizerMemory] = {}
        self._forward_seen = type(model).forward
        self.planner = self.planner_type(
            model,
            replace(request, optimizer=None),
            optimizer_memory(request.optimizer),
            is_only_planned=is_only_planned,
            optimizer=None if self._optimizer is None else self._optimizer(),
        )
        self.backend = self.make_backend(is_only_planned=is_only_planned)
        # What varies among the sizes of a call; nothing where the tracer cannot.
        self.ranges = (
            None
            if request.dynamic is None
            else ShapeRanges.of(model, checked_shapes(request.dynamic))
        )
        self.is_traced_once = self.ranges is not None and self.is_whole
        self._may_vary = self.ranges is not None or not self.is_whole
        # With the model's own hooks or without, where no module has any or where one
        # has, per memory of the optimizer.
        self._compiled: dict[
            tuple[bool, bool, OptimizerMemory], Callable[..., Any]
        ] = {}
        self.told: set[str] = set()
        # How often a step was planned in the middle of training, by its words.
        self._announced: Counter[str] = Counter()
        # And of its calls, how many tensors each was given.
        self._calls: dict[str, int] = {}
        self._awaited: AwaitedBatch | None = None
        self.first_plan: Plan | None = None
        # What is asked for, before a percentage is a number of bytes.
        self._asked = replace(request, optimizer=None)
        self._accumulates = False
        # The group whose processes have planned together, and whether in a wrapper.
        self._planned_in = _place(None)
        self._has_trained = False
        self._has_given_plan = (
            request.given_plan is not None and request.optimizer is None
        )
        self._steps = FittedSteps(model, self._counted_state_bytes, self.tell)
        self.in_flight = PassesInFlight(
            self.name,
            self.tell,
            is_plannable=self.is_whole
            and not isinstance(request.optimizer, OptimizersInBackward),
        )
        self._call_count = 0
        self._watch = StepWatch(model, self._steps.look)

    @property
    def regions(self) -> Regions:
        """What are graphs of their own: nothing, or which parts of the model."""
        return "whole"

    def make_backend(self, *, is_only_planned: bool) -> PlannedBackend:
        """Return the backend that compiles the model's call."""
        return VariantBackend(
            _Weakly(self.planner),
            type(self.model).__name__,
            is_only_planned=is_only_planned,
            keeps_failure=True,
            backward_in_autocast=self.planner.request.backward_in_autocast,
        )

    # --- installing --------------------------------------------------------------

    def install(self) -> None:
        """Let calls of the model, and of its ``forward``, run by plans."""
        install_call(self.model, self)
        self.model.forward = self.planned_forward
        install_replication(self.model, _Replicating(self))
        install_state(self.model, _StateOfCopies(self))
        self._watch.begin()

    def uninstall(self) -> None:
        """Let the model's calls run as before it was fitted."""
        install_call(self.model, self.previous_call)
        uninstall_replication(self.model)
        uninstall_state(self.model)
        self._set_forward(self.previous_forward)
        self._watch.end()

    def _set_forward(self, forward: Any) -> None:
        if forward is None:
            vars(self.model).pop("forward", None)
        else:
            self.model.forward = forward

    def _counted_state_bytes(self) -> int | None:
        """Return the bytes of optimizer state in the plans, if that is known."""
        if self._has_given_plan:
            return None
        return self.planner.state_bytes

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward that the model had before it was fitted."""
        if self.previous_forward is not None:
            return self.previous_forward(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    # --- planning ----------------------------------------------------------------

    def plan_now(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        accumulate: bool = False,
    ) -> Plan:
        """Trace and plan the step of this example without running anything.

        Where gradients exist, the step without them is planned too: a training loop
        usually clears them before its next step. With ``accumulate`` the step that
        adds to the gradients of a first one is planned as well; passes in flight, of
        which some begin before there are gradients and some after, get one plan that
        counts them. A percentage becomes a number of bytes here, which then holds for
        every step. All processes of a group plan together.
        """
        self._accumulates = accumulate
        group = self._group_now()
        before, self._planned_in = self._planned_in, _place(group)
        try:
            with planning_together(group, self._facts()) as session:
                plan = self._plan_kinds(args, kwargs, accumulate=accumulate)
                if session is not None:
                    session.note(plan)
        except BaseException:
            self._planned_in = before
            raise
        return plan

    def _plan_kinds(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, accumulate: bool
    ) -> Plan:
        check_batch(self.model, args, kwargs, may_be_sharded=not self.is_whole)
        if self.ranges is not None:
            self.ranges.check(args, kwargs)
        # Inside of a wrapper there are buckets, whatever else is cleared.
        least_bytes = gradient_buckets_bytes()
        existing_bytes = self.planner.gradient_bytes_now((args, kwargs))
        is_one_plan = accumulate and self.planner.request.passes_in_flight > 1
        if is_one_plan or (accumulate and self.planner.loop.has_microbatches):
            existing_bytes = least_bytes + trained_bytes(self.model)
        try:
            plan = self._plan_varying(args, kwargs, existing_bytes)
        except BudgetError as error:
            if accumulate and existing_bytes == least_bytes:
                full_bytes = least_bytes + trained_bytes(self.model)
                self._refuse_accumulated(args, kwargs, full_bytes, error)
            raise
        self.set_budget(plan)
        if self.ranges is not None and not self.is_traced_once:
            args, kwargs = self.ranges.largest(args, kwargs)
        if is_one_plan:
            return plan
        if existing_bytes > least_bytes:
            self.plan_step(args, kwargs, least_bytes)
        elif accumulate:
            self.plan_step(args, kwargs, least_bytes + self.left_bytes(plan))
        return plan

    def _refuse_accumulated(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        gradient_bytes: int,
        error: BudgetError,
    ) -> None:
        """Raise the error of the step that adds to so many bytes of gradients.

        It needs more than the first one, of which ``error`` is. Where less is known for
        it all the same, that of the first one is raised: what is named works for both.
        """
        request = self.planner.request
        if isinstance(request.budget, str) and is_percentage(request.budget):
            self.planner.request = replace(request, budget=error.budget_bytes)
        try:
            self._plan_varying(args, kwargs, gradient_bytes)
        except BudgetError as added:
            if added.required_bytes < error.required_bytes:
                raise error from None
            raise
        finally:
            self.planner.request = request

    def left_bytes(self, plan: Plan) -> int:
        """Return the bytes of the gradients that a planned step leaves behind."""
        return made_gradient_bytes(plan)

    def _group_now(self) -> dist.ProcessGroup | None:
        """Return the processes that plan together now, ``None`` if each for itself."""
        asked = self._asked.group
        if asked != "auto":
            return asked
        return group_around(self.model) if self._asked.may_be_together else None

    def _facts(self) -> dict[str, str]:
        """Return what processes that plan together have alike before they trace."""
        asked = self._asked
        budget = asked.budget if asked.given_plan is None else "that of a plan"
        if budget is None and asked.platform is not None:
            budget = asked.platform.devices[0].budget_bytes
        names = "solver", "time_limit", "gap", "seed", "costs", "in_flight"
        options = [f"{name}={getattr(asked, name)!r}" for name in names]
        shapes = "none" if asked.dynamic is None else str(asked.dynamic)
        optimizer = None if self._optimizer is None else self._optimizer()
        return {
            "torch": torch.__version__,
            "remat": remat.__version__,
            "the budget": str(budget),
            "the options": ", ".join(options),
            "the sizes that vary": shapes,
            "the optimizer": "none" if optimizer is None else type(optimizer).__name__,
        }

    def _plan_with_others(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Plan anew, with others, at the first call in a group that has not planned.

        What was planned before the model was wrapped, each planned for itself.
        """
        if self._asked.given_plan is not None:
            return
        # Looks through all modules, and whoever divides a model does so by then.
        if self._has_trained and active_wrapper() is None:
            return
        self._has_trained = True
        group = self._group_now()
        if group is None or _place(group) == self._planned_in:
            return
        optimizer = None if self._optimizer is None else self._optimizer()
        self.forget()
        with unchanged(self.model, optimizer):
            self.plan_now(args, kwargs, accumulate=self._accumulates)

    def share_plans_with(self, other: "FittedModel") -> None:
        """Let another one plan the same model for the same, with the same processes."""
        other.plans_for(self._asked, self._planned_in, accumulates=self._accumulates)

    def plans_for(
        self, asked: PlanRequest, planned_in: tuple[str, bool], *, accumulates: bool
    ) -> None:
        """Take what was asked for, and the group that has planned that already."""
        self._asked, self._planned_in = asked, planned_in
        self._accumulates = accumulates

    def forget(self) -> None:
        """Forget all plans, so that what is called next is traced and planned."""
        self._compiled.clear()
        self.planner.plans.clear()

    def _plan_varying(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient_bytes: int
    ) -> Plan:
        """Plan the step, or the largest one where its sizes cannot vary in a trace."""
        if self.ranges is None:
            return self.plan_step(args, kwargs, gradient_bytes)
        try:
            return self.plan_step(args, kwargs, gradient_bytes)
        except UnequalRangesError:
            raise
        except CaptureError as error:
            reason = error
        self.is_traced_once = False
        args, kwargs = self.ranges.largest(args, kwargs)
        plan = self.plan_step(args, kwargs, gradient_bytes)
        logger.warning(
            "%s cannot be traced once for all sizes (%s): %s. Planned is the largest "
            "step; each other shape is traced at its first call, and runs the same "
            "schedule where it is the same step and fits, else a plan of its own",
            self.name,
            self.ranges.words(),
            f"the model fixes {reason}"
            if isinstance(reason, FixedSizesError)
            else reason,
        )
        return plan

    def set_budget(self, plan: Plan) -> None:
        """Plan whatever comes next anew, within the bytes of ``plan``."""
        asked = self.planner.request.platform
        self.planner.request = replace(
            self.planner.request,
            given_plan=None,
            budget=budget_of(plan),
            in_flight=plan.in_flight,
            kernels=plan.kernels,
            objective=plan.objective,
            platform=_platform_of(plan, asked),
        )

    def plan_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient_bytes: int
    ) -> Plan:
        """Trace and plan the step that starts with so many bytes of gradients."""
        with self.planning(gradient_bytes, (args, kwargs)):
            self.run(args, kwargs)
        return self.latest_plan()

    @contextmanager
    def planning(self, gradient_bytes: int, batch: Any) -> Generator[None]:
        """Let a call inside be planned for so many bytes of gradients, not run.

        Those of all parameters, where these are more than there are now.
        """
        existing_bytes = self.planner.gradient_bytes_now(batch)
        self.backend.stop_before_running = True
        if gradient_bytes != existing_bytes:
            self.planner.assumes_gradients = gradient_bytes > existing_bytes
        self.planner.assumed_gradient_bytes = gradient_bytes
        self.planner.latest = None
        try:
            with torch.enable_grad(), quiet_tracer(), old_objects_left_alone():
                yield
        except StoppedBeforeRunningError:
            pass
        except RematError:
            raise
        # Nothing runs, so whatever else is raised is about the trace.
        except Exception as error:  # noqa: BLE001
            raise_capture_error(error, None)
        finally:
            self.backend.stop_before_running = False
            self.planner.assumed_gradient_bytes = None
            self.planner.assumes_gradients = None

    def latest_plan(self) -> Plan:
        """Return the plan that was made last.

        Raises
        ------
        CaptureError
            If the last call has none, since it does not train.
        """
        plan = self.planner.latest
        if plan is None:
            msg = (
                "the model does not train: no output depends on a parameter that "
                "requires a gradient; check requires_grad and torch.no_grad"
            )
            raise CaptureError(msg)
        return plan

    def await_batch(self, awaited: AwaitedBatch) -> None:
        """Plan nothing until the model is called, then for what it is called with."""
        self.planner.loop = awaited.loop
        self._awaited = awaited

    def hold(self, held: Any) -> None:
        """Count tensors of the loop besides those that the model is called with."""
        self.planner.loop = replace(self.planner.loop, tensors=held)

    def count(self, loop: LoopMemory) -> None:
        """Count what a loop holds around each step."""
        self.planner.loop = loop

    @property
    def is_awaiting(self) -> bool:
        """Whether nothing is planned yet, since no batch came."""
        return self._awaited is not None

    def _plan_for_first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Plan for the call that is about to run, with all that is around it now.

        If that fails, the next call is the first.
        """
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return
        started_s = time.monotonic()
        try:
            with unchanged(self.model, awaited.optimizer):
                plan = self.plan_now(args, kwargs, accumulate=awaited.accumulate)
        except BaseException as error:
            self._awaited = awaited
            early = awaited.loop.batches_early
            if early and isinstance(error, BudgetError):
                error.add_note(
                    f"Of each batch, {early} more like it count: so many may the loader "
                    "hold at most that its workers brought before their turn. Fewer "
                    "workers, or a smaller prefetch_factor, bring fewer"
                )
            raise
        self.first_plan = plan
        logger.info(
            "planned %s in %.1f s; peak %s of %s, %+.1f %% time",
            self.name,
            time.monotonic() - started_s,
            format_bytes(plan.peak_bytes),
            format_bytes(plan.budget_bytes or plan.peak_bytes),
            100 * plan.overhead,
        )

    # --- calling -----------------------------------------------------------------

    @torch.compiler.disable(reason=_OPAQUE)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model: its forward pass runs by its plan, planned if it is new."""
        self._note_call()
        if not self.is_planned(args, kwargs):
            call = self.previous_call or plain_call(self.model)
            return call(*args, **kwargs)
        installed = vars(self.model).get("forward")
        if installed is not self.planned_forward and installed is not (
            self.previous_forward
        ):
            return self._call_replaced(args, kwargs)
        if has_untraceable_hooks(self.model):
            if installed is self.planned_forward:
                return plain_call(self.model)(*args, **kwargs)
            msg = (
                f"{type(self.model).__name__} has hooks of its own that cannot be "
                "traced (for its backward pass, or under torch.compiler.disable); "
                "remove them, or put the module into another one and fit that"
            )
            raise CaptureError(msg)
        return self._run_or_raise(args, kwargs, runs_hooks=True)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's forward by its plan, without the model's own hooks."""
        self._note_call()
        if not self.is_planned(args, kwargs):
            return self.plain_forward(*args, **kwargs)
        return self._run_or_raise(args, kwargs, runs_hooks=False)

    def is_planned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call made now is the forward pass of a training step."""
        if not torch.is_grad_enabled():
            return False
        if not is_trained(self.model) and not any(
            tensor.requires_grad for tensor in tensors_in((args, dict(kwargs)))
        ):
            return False
        tracer = tracer_around()
        if tracer is not None:
            self.tell(
                f"{self.name} is being recorded by {tracer}, and what is recorded has no "
                "plan: its calls are not within the budget. Record the model before "
                "remat.fit, or after remat.release(model)"
            )
            return False
        transform = transform_around()
        if transform is not None:
            msg = (
                f"{self.name} was fitted by remat and is called inside torch.func."
                f"{transform}, which a plan cannot run in; call remat.release(model) "
                "before, or use the transform under torch.no_grad()"
            )
            raise CaptureError(msg)
        return True

    def _run_or_raise(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, runs_hooks: bool
    ) -> Any:
        """Run the forward pass by its plan, or raise what the model's own code raises.

        A loop that leaves out a batch catches that, whether its step is planned or not.
        """
        try:
            return self.run(args, kwargs, runs_hooks=runs_hooks)
        except CaptureError:
            if not self._raises_plainly(args, kwargs, runs_hooks=runs_hooks):
                raise
        # Its code changes, before it raises, what it changes without a plan.
        self._run_plainly(args, kwargs, runs_hooks=runs_hooks)
        msg = (
            f"{self.name} raised an error as its step was planned, and none as it was "
            "called once more with the same batch, so this step has no plan; call it again"
        )
        raise CaptureError(msg)

    def _raises_plainly(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, runs_hooks: bool
    ) -> bool:
        """Whether the model's own code raises in this call; nothing is changed."""
        handled = sys.exception()
        with alone(), kept(self.model):
            try:
                self._run_plainly(args, kwargs, runs_hooks=runs_hooks)
            # The model's own code runs, which may raise anything.
            except Exception as error:  # noqa: BLE001
                behind: BaseException | None = error
                # The one that is handled now is behind all of them.
                while behind is not None and behind is not handled:
                    if isinstance(behind, RematError):
                        return False
                    behind = behind.__context__
                return NO_SAVED_TENSOR_HOOKS not in str(error)
        return False

    def _run_plainly(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, runs_hooks: bool
    ) -> None:
        """Run the forward pass without a plan, and keep nothing for a backward pass."""
        call = plain_call(self.model) if runs_hooks else self.plain_forward
        with (
            alone(),
            gathering_alone(gathered_groups(self.model)),
            torch.autograd.graph.saved_tensors_hooks(_left_out, _refused),
            self._own_forward(),
        ):
            call(*args, **kwargs)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        runs_hooks: bool = True,
    ) -> Any:
        """Run the forward pass by its plan; trace and plan it first if it is new."""
        self._plan_for_first(args, kwargs)
        check_backward_hooks(self.model)
        planner = self.planner
        is_training = not self.backend.stop_before_running
        if is_training:
            self._plan_with_others(args, kwargs)
            self._renew_if_changed()
            self._look_for_gradients_left()
        runs_hooks = runs_hooks and has_forward_hooks(self.model)
        # A described loss has the model's call traced again for what it returns.
        is_called = runs_hooks or planner.loss is not None
        asked: Asked = ()
        if self.ranges is not None and self.is_traced_once:
            asked = self.ranges.varying(args, kwargs)
            self.backend.asked = planner.varying_inputs = asked
        planner.batch = (args, kwargs)
        contents = contents_of(self.model)
        planner.parameters = contents.parameters
        known_count = planner.planned_count
        started_s = time.monotonic()
        outputs: Any = None
        is_done = False
        try:
            own = self._own_forward() if is_called else nullcontext()
            given = tensors_in((args, kwargs)) if self._may_vary else ()
            with own, marked_dynamic(asked, given):
                self.before_call(args, kwargs, contents, runs_hooks=runs_hooks)
                entry = self._entry(contents, runs_hooks=runs_hooks)
                outputs = _called(entry, args, kwargs)
            running = planner.running_plan
            is_done = True
        except TRACE_ERRORS as error:
            if self.backend.failure is None:
                self._check_nesting()
                check_batch(self.model, args, kwargs, may_be_sharded=not self.is_whole)
            raise_capture_error(error, self.backend.failure)
        finally:
            planner.batch = self.backend.asked = planner.varying_inputs = ()
            planner.parameters = None
            self.after_call(outputs, is_done=is_done)
            # Its traceback holds the batch and the model.
            self.backend.failure = None
        if is_training and planner.planned_count > known_count:
            self._announce(args, kwargs, planner.planned_s - started_s)
        if is_training and running is not None:
            self.in_flight.note(outputs, running)
        return outputs

    def before_call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        contents: Contents,
        *,
        runs_hooks: bool,
    ) -> None:
        """Prepare for a call that is about to run by its plan, or to be planned."""

    def after_call(self, outputs: Any, *, is_done: bool) -> None:
        """Take note that a call has ended, with outputs or an error."""

    def _check_nesting(self) -> None:
        """Refuse a model of which a part has plans of its own.

        Raises
        ------
        CaptureError
            If there is one.
        """
        for path, module in self.model.named_modules():
            if path and fitted_on(module) is not None:
                msg = (
                    f"{path} of {self.name} was fitted by itself, and a plan is for a "
                    "whole step: call remat.release on that part first, or leave the "
                    "whole unfitted"
                )
                raise CaptureError(msg)

    def _renew_if_changed(self) -> None:
        """Plan for the optimizer memory of now, and drop traces of another forward.

        Parameters may have been added, changed in type or frozen, and settings of the
        optimizer changed, since it was looked at; the class may have another forward.
        Plans for other memory are kept: loops with several optimizers freeze
        parameters by turns.
        """
        optimizer = None if self._optimizer is None else self._optimizer()
        seen = self._optimizer_seen if optimizer is None else settings_of(optimizer)
        if seen != self._optimizer_seen:
            self._optimizer_seen = seen
            # Parameters that were frozen keep the state that they have by now.
            key = (seen, state_count(optimizer))
            if key not in self._memory_of:
                self._memory_of[key] = optimizer_memory(optimizer)
            self.planner.optimizer_memory = self._memory_of[key]
        forward = type(self.model).forward
        if forward is not self._forward_seen:
            self._forward_seen = forward
            self._compiled.clear()

    def _look_for_gradients_left(self) -> None:
        """Tell of gradients that optimizers which step in backward have not let go."""
        if not self.planner.optimizer_memory.in_backward or self.planner.plans_ahead:
            return
        parameters = contents_of(self.model).parameters
        if all(parameter.grad is None for parameter in parameters):
            return
        left = [n for n, p in self.model.named_parameters() if p.grad is not None]
        self.tell(
            f"the gradient of {left[0]!r} is still there, though its optimizer steps in "
            f"backward: the budget of {self.name} counts on it being gone. Call "
            "zero_grad() in the hook that steps it; until then steps may need as much "
            "more as all gradients take"
        )

    def _entry(self, contents: Contents, *, runs_hooks: bool) -> Callable[..., Any]:
        """Return the compiled call, with the model's own hooks or without."""
        # Code of several graphs is shared by all entries.
        guards_hooks = not self.is_whole or contents.are_hooked
        memory = self.planner.optimizer_memory
        key = (runs_hooks, guards_hooks, memory)
        if key in self._compiled:
            return self._compiled[key]

        def prepared() -> None:
            # Libraries leave hooks, which what is traced from now on looks for.
            if contents_of(self.model).are_hooked and key in self._compiled:
                self._compiled[runs_hooks, True, memory] = self._compiled.pop(key)

        call = plain_call(self.model) if runs_hooks else self.forward_to_trace()
        entry = self.compiled(call, None if guards_hooks else prepared)
        self._compiled[key] = entry
        return entry

    @property
    def takes_layers(self) -> bool:
        """Whether layers of an ``nn.LSTM`` may be operators of a graph."""
        return self.is_whole or self.ranges is None

    def compiled(
        self, call: Callable[..., Any], prepared: Callable[[], None] | None
    ) -> Callable[..., Any]:
        """Return a call of the model whose graphs the backend compiles."""
        note = note_returned(self.backend.note_returned)
        return compiled_entry(
            self.model,
            self.backend,
            note,
            traced=call,
            is_whole=self.is_whole,
            settings=self.tracer_settings(),
            takes_layers=self.takes_layers,
            prepared=prepared,
        )

    def compiled_part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that the model's call runs, whose graphs are compiled."""
        return compiled_code(
            function,
            self.backend,
            model=self.model,
            settings=self.tracer_settings(),
            takes_layers=self.takes_layers,
        )

    def tracer_settings(self) -> Callable[[], Mapping[str, Any]]:
        """Return what gives the tracer its settings; the tracer never forgets it."""
        return functools.partial(_tracer_settings, is_whole=self.is_whole)

    def forward_to_trace(self) -> Callable[..., Any]:
        """Return the forward that the model had before it was fitted."""
        if self.previous_forward is not None:
            return self.previous_forward
        return types.MethodType(type(self.model).forward, self.model)

    @contextmanager
    def _own_forward(self) -> Generator[None]:
        """Give the model its own forward while its call with hooks is traced or run."""
        installed = vars(self.model).get("forward")
        if not isinstance(installed, PlannedForward):
            yield
            return
        self._set_forward(self.previous_forward)
        try:
            yield
        finally:
            self.model.forward = installed

    def _note_call(self) -> None:
        self._steps.was_called = True
        self._call_count += 1

    def _call_replaced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a model whose forward somebody replaced since it was fitted."""
        before = self._call_count
        outputs = plain_call(self.model)(*args, **kwargs)
        # The new forward may call the old one, or put it back and call the model.
        if self._call_count == before:
            self.tell(
                f"the forward of {self.name} was replaced after remat.fit, and the new "
                "one does not call the old one: the plan is not used, and the budget "
                "is not kept. Call remat.fit once more, after the replacement"
            )
        return outputs

    # --- what the user is told ---------------------------------------------------

    @property
    def name(self) -> str:
        """The class of the model, for messages."""
        return type(self.model).__name__

    def tell(self, message: str) -> None:
        """Warn of a promise that cannot be kept, once for each cause."""
        if message not in self.told:
            self.told.add(message)
            warnings.warn(message, PlanWarning, stacklevel=2)

    def _announce(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seconds: float
    ) -> None:
        """Say that a step was planned in the middle of training, in one line."""
        plan = self.planner.latest
        # While a plan is verified it is not installed, and nobody trains.
        if plan is None or fitted_on(self.model) is not self:
            return
        outside = "" if self.ranges is None else self.ranges.outside(args, kwargs)
        words = self.planner.describe_step(args, kwargs)
        self._announced[words] += 1
        shown = textwrap.shorten(words, _LONGEST_WORDS, placeholder=" ...")
        if self._announced[words] == _MANY_ALIKE:
            self.tell(
                f"{_MANY_ALIKE} kinds of step of {self.name} were planned in the middle "
                f"of training for calls that look alike ({shown}), which takes longer "
                "than running them. A number in Python that changes at each call, as an "
                "argument or in the model, is a constant of each trace: give it as a "
                "tensor, such as torch.tensor(value)"
            )
        tensor_count = len(tensors_in((args, kwargs)))
        self._calls[self.planner.describe_call(args, kwargs)] = tensor_count
        if len(self._calls) == _MANY_ALIKE and self.ranges is None:
            self._tell_of_sizes(args, kwargs)
        logger.warning(
            "planned a new kind of step of %s in %.1f s: %s%s; peak %s of %s, %+.1f %% time",
            self.name,
            seconds,
            shown,
            outside and f" ({outside})",
            format_bytes(plan.peak_bytes),
            format_bytes(plan.budget_bytes or plan.peak_bytes),
            100 * plan.overhead,
        )

    def _tell_of_sizes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Say, once, what to do where each call is of other sizes."""
        if "sizes" in self.told:
            return
        self.told.add("sizes")
        objects = objects_in((args, kwargs))
        cure = (
            "Name the dimensions that vary with dynamic=, as in dynamic={'input_ids': "
            "{1: (2, 512)}}, and all sizes are one trace and one plan"
        )
        if len({*self._calls.values()}) > 1:
            cure = (
                "They are given different numbers of tensors, and each number is planned "
                "by itself: give all calls equally many, or one tensor in the place of a "
                "list, whose dimensions that vary are named with dynamic="
            )
        elif objects:
            cure = (
                f"The tensors that vary are inside of a {type(objects[0]).__name__}, which "
                "the tracer looks into and dynamic= does not: with regions='breaks' other "
                "sizes than the example's run without a plan of their own where they fit; "
                "or give forward the tensors themselves, and name what varies with dynamic="
            )
        logger.warning(
            "%d kinds of step of %s were planned in the middle of training, each for "
            "other tensors. %s",
            _MANY_ALIKE,
            self.name,
            cure,
        )


class PlannedForward:
    """The ``forward`` of a fitted model, for whoever calls that and not the model."""

    def __init__(self, fitted: FittedModel) -> None:
        self.fitted = fitted
        # Libraries read names and code of a forward to learn its arguments.
        functools.update_wrapper(
            self,
            fitted.forward_to_trace(),
            (*functools.WRAPPER_ASSIGNMENTS, "__code__"),
        )

    @torch.compiler.disable(reason=_OPAQUE)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass by its plan."""
        return self.fitted.forward(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Files of the model have the forward that it had before.
        return (_same, (self.fitted.forward_to_trace(),))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model: nn.Module | None = memo.get(id(self.fitted.model))
        if model is not None:
            _watch_copy(model, self.fitted.name)
        return copy.deepcopy(self.fitted.forward_to_trace(), memo)


def _watch_copy(model: nn.Module, name: str) -> None:
    """Tell once if a copy of a fitted model is trained: copies have no plan.

    Copies are made to average weights, or to look at, as often as to train.
    """

    def look(optimizer: torch.optim.Optimizer, _stepped: list[torch.Tensor]) -> None:
        watch.end()
        found = reference()
        if found is not None and fitted_on(found) is None:
            warnings.warn(
                f"{type(optimizer).__name__} steps a copy of a {name} that was fitted by "
                "remat: copies run plainly, without the plan, and no budget is kept. "
                "Call remat.fit on the copy, or remat.release on the model before it is "
                "copied",
                PlanWarning,
                stacklevel=2,
            )

    reference = weakref.ref(model)
    watch = StepWatch(model, look)
    watch.begin()
    # Lives as long as the copy, and is no attribute of it.
    weakref.finalize(model, watch.end)


class _StateOfCopies:
    """Takes out of shallow copies what is installed: it belongs to the model alone.

    Deep copies and files do that by themselves, object by object.
    """

    def __init__(self, fitted: FittedModel) -> None:
        self.fitted = fitted

    def __call__(self) -> Any:
        model = self.fitted.model
        state: Any = type(model).__getstate__(model)
        if not isinstance(state, dict):
            return state
        state = {name: value for name, value in state.items() if value is not self}
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if caller is not None and caller.f_code is copy.copy.__code__:
            ours = PlannedForward, _Replicating
            state = {n: value for n, value in state.items() if type(value) not in ours}
            if self.fitted.previous_forward is not None:
                state["forward"] = self.fitted.previous_forward
        return state


class _Replicating:
    """Makes replicas for ``DataParallel``, which have parameters of their own."""

    def __init__(self, fitted: FittedModel) -> None:
        self.fitted = fitted

    def __call__(self) -> nn.Module:
        fitted = self.fitted
        fitted.tell(
            f"{fitted.name} is replicated by DataParallel: the replicas run plainly, "
            "without the plan, and the budget is not kept. Use DistributedDataParallel"
        )
        replica = replication_of(fitted.model)()
        vars(replica).pop("forward", None)
        uninstall_replication(replica)
        uninstall_state(replica)
        install_call(replica, None)
        return replica

    def __reduce__(self) -> tuple[Any, ...]:
        return (_same, (replication_of(self.fitted.model),))


def _place(group: dist.ProcessGroup | None) -> tuple[str, bool]:
    """Return the name of a group, "" for none, and whether a wrapper is around."""
    return "" if group is None else group.group_name, active_wrapper() is not None


def _same(value: Any) -> Any:
    return value


def _left_out(_tensor: torch.Tensor) -> None:
    return None


def _refused(_saved: None) -> torch.Tensor:
    msg = "the model takes a gradient inside of a forward pass that keeps nothing"
    raise ExecutionError(msg)


def _called(
    entry: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call compiled code, and once more where another thread was tracing.

    Torch notes that something is traced for the whole process, and then refuses to
    begin with a compiled call.
    """
    try:
        return entry(*args, **kwargs)
    except RuntimeError as error:
        if NESTED_TRACE not in str(error):
            raise
    with alone():
        return entry(*args, **kwargs)


def trained_bytes(model: nn.Module) -> int:
    """Return the bytes that a step leaves in gradients, as its plan counts them."""
    trained = [local_part(p) for p in model.parameters() if p.requires_grad]
    return sum(round_up(p.nbytes, granule_bytes(p.device.type)) for p in trained)


def made_gradient_bytes(plan: Plan) -> int:
    """Return the bytes of the gradients that a planned step leaves behind."""
    graph = plan.graph
    return sum(
        graph.storages[s].size_bytes
        for s in graph.final_outputs
        if graph.storages[s].role is Role.GRADIENT
    )


def _platform_of(plan: Plan, asked: Platform | None) -> Platform | None:
    if not plan.has_several_devices:
        return asked
    return replace(plan.platform, costs=None if asked is None else asked.costs)


class _Weakly:
    """A planner that is not kept alive by what it plans for.

    The compiler never forgets a backend, and the planner holds loss and optimizer.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = weakref.ref(planner)

    def _found(self) -> Planner:
        planner = self._planner()
        if planner is None:
            raise ExecutionError("the plan of this model was released")
        return planner

    def choose_schedule(self, program: JointProgram) -> tuple[JointProgram, Schedule]:
        return self._found().choose_schedule(program)

    def choose_kernels(self, joint: fx.GraphModule, forward_output_count: int) -> None:
        self._found().choose_kernels(joint, forward_output_count)

    def gradient_bytes_now(self, inputs: Sequence[Any]) -> int:
        return self._found().gradient_bytes_now(inputs)

    def has_gradient(self, leaf: torch.Tensor) -> bool:
        return self._found().has_gradient(leaf)

    def step_bytes_of(self, leaf: torch.Tensor) -> int | None:
        return self._found().step_bytes_of(leaf)

    @property
    def has_several_devices(self) -> bool:
        return self._found().has_several_devices

    @property
    def has_described_loss(self) -> bool:
        return self._found().has_described_loss

    @property
    def plans_ahead(self) -> bool:
        return self._found().plans_ahead

    @property
    def running_plan(self) -> Plan | None:
        return self._found().running_plan

    @property
    def planned_sizes(self) -> Sizes:
        return self._found().planned_sizes

    def begin(
        self,
        call: TracedCall,
        inputs: Sequence[Any],
        gradient_bytes: int,
        sizes: Sizes | None = None,
    ) -> None:
        self._found().begin(call, inputs, gradient_bytes, sizes)

    def choose_sizes(self, varying: VaryingSizes) -> Sizes:
        return self._found().choose_sizes(varying)

    def variant_that_fits(
        self, call: TracedCall, kind: Kind, inputs: Sequence[Any]
    ) -> Kind | None:
        return self._found().variant_that_fits(call, kind, inputs)

    def sizes_that_break(
        self, call: TracedCall, gradient_bytes: int, inputs: Sequence[Any]
    ) -> Sizes | None:
        return self._found().sizes_that_break(call, gradient_bytes, inputs)

    def note_running(self, call: TracedCall, kind: Kind) -> None:
        self._found().note_running(call, kind)

    def settle(self, call: TracedCall, kind: Kind) -> None:
        self._found().settle(call, kind)
