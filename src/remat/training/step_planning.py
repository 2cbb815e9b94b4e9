"""Plan traced steps: what surrounds them, what they cost, which schedule they run."""

import os
import time
import warnings
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.optim import Optimizer

from remat.capture.autocast import autocast_again, autocast_now
from remat.capture.example_batch import example_batch
from remat.capture.joint_program import JointProgram
from remat.capture.outputs import FakeOutputs, fake_output, fake_outputs
from remat.capture.returned import ReturnedTensor
from remat.capture.surroundings import (
    Surroundings,
    add_surroundings,
    captured_tensors,
    existing_gradient,
    pieces_before_changes,
    resident_bytes,
    tensors_in,
)
from remat.capture.varying_sizes import (
    FixedSizesError,
    Range,
    Sizes,
    VaryingSizes,
    at_largest,
    largest_shape,
)
from remat.core.device_graph import arrange, home_of, place_of
from remat.core.errors import (
    BudgetError,
    CaptureError,
    ExecutionError,
    InvalidPlatformError,
    PlanMismatchError,
)
from remat.core.gradient_pieces import Piece
from remat.core.graph import Role, TrainingGraph
from remat.core.in_flight import with_passes
from remat.core.platform import Platform
from remat.core.problem import Limits, Objective, Status
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.core.units import format_bytes
from remat.planning.in_flight import plan_in_flight
from remat.planning.one_device import one_budget, plan_graph, several_budgets
from remat.planning.plan import Plan
from remat.planning.plan_cache import PlanCall, plan_digest, planned_once
from remat.planning.proofs import at_budget, on_graph, unproved
from remat.planning.replanning import at_sizes, equal_plan, replan, with_gradients
from remat.planning.reserved import with_allocator
from remat.planning.several_devices import Budget, budget_of
from remat.planning.smallest_budget import smallest_budget
from remat.profile.cache import CostCache
from remat.profile.costing import (
    place_name,
    with_costs,
    with_device_costs,
    with_known_costs,
)
from remat.profile.described_loss import DescribedLoss
from remat.profile.kernel_choice import fuse_named, fuse_where_quicker
from remat.profile.known import KnownCosts
from remat.profile.library_memory import library_bytes
from remat.profile.links import common_device, measured_platform
from remat.profile.optimizer_memory import (
    LossMemory,
    assumed_loss_bytes,
)
from remat.profile.optimizers_in_backward import OptimizerMemory, optimizer_memory
from remat.torch_compat.attributes import (
    contents_of,
    storage_identity,
)
from remat.torch_compat.names import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)
from remat.torch_compat.patches import callers_function_modes
from remat.torch_compat.sharding import Division, local_part
from remat.training.allocator_settings import settings_on
from remat.training.callers import gradient_buckets_bytes
from remat.training.request import PlanRequest
from remat.training.same_plan import session_now
from remat.training.shape_ranges import untouched_like
from remat.training.sized_plans import SizedPlan
from remat.training.training_loop import LoopMemory
from remat.training.variants import Kind, TracedCall, describe_tensor

PlanKey: TypeAlias = tuple[str, int, int, OptimizerMemory]
"""Fingerprint of a step, bytes of gradients that exist with buckets, those of buckets,
and memory of the optimizer."""

_MANY_REPETITIONS = 8
"""As often the tracer itself compiles a function again before it gives up."""

_BISECTIONS = 5
"""How often a smaller budget is looked for where gradients may leave early."""


def objects_in(items: Any) -> list[Any]:
    """Return objects among ``items`` in whose attributes there are tensors."""
    leaves = [leaf for leaf in tree_leaves(items) if not isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if _holds_tensors(leaf, _DEEPEST_OBJECT)]


def _holds_tensors(item: Any, depth: int) -> bool:
    held = tree_leaves(getattr(item, "__dict__", None) or {})
    return any(
        isinstance(each, torch.Tensor) or (depth and _holds_tensors(each, depth - 1))
        for each in held
    )


_DEEPEST_OBJECT = 2


def gradient_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the gradients that leaves among ``tensors`` hold now."""
    # At each call, for each parameter: few have a gradient when a step begins.
    found = [tensor.grad for tensor in tensors if tensor.is_leaf]
    gradients = [local_part(each) for each in found if each is not None]
    sizes = {storage_identity(g): g.untyped_storage().nbytes() for g in gradients}
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
        What the optimizer takes in the steps that are planned next, with gradients
        that are divided among processes as their parameters are.
    is_only_planned
        Whether plans need not run here, so that home need not be here either.
    optimizer
        The optimizer itself, held weakly.

    Attributes
    ----------
    gradient_bytes
        Bytes of the gradients of earlier passes that exist during the whole step that
        is planned now.
    parameters
        Those of the model, while it is called; ``None`` to look for them.
    loop
        What the caller's loop holds around the step.
    assumed_gradient_bytes
        What these bytes are taken to be, where a step is planned before it is called.
    assumes_gradients
        Whether all parameters that are trained are taken to have gradients then, or
        none; ``None`` for those that have.
    plans
        One for each kind of step.
    latest, planned_s
        The plan that was chosen last, and the clock (``time.monotonic``) at that time.
    planned_count
        How many plans were made.
    running_plan
        The plan of the call that runs, or ran last.
    """

    def __init__(
        self,
        model: nn.Module | None,
        request: PlanRequest,
        optimizer_memory: OptimizerMemory,
        *,
        is_only_planned: bool = False,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.loss = None if request.loss is None else DescribedLoss(request.loss)
        self._model = None if model is None else weakref.ref(model)
        self.request = request
        self.optimizer_memory = optimizer_memory
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        # With gradients that are divided otherwise, by what it takes else.
        self._memory_with: dict[OptimizerMemory, dict[Any, OptimizerMemory]] = {}
        self.gradient_bytes = 0
        self.assumed_gradient_bytes: int | None = None
        self.assumes_gradients: bool | None = None
        self.batch: Any = ()
        self.parameters: Sequence[nn.Parameter] | None = None
        self.loop = LoopMemory()
        self.plans: dict[PlanKey, Plan] = {}
        # In which pieces gradients leave early in each.
        self._pieces: dict[PlanKey, Mapping[int, Piece]] = {}
        self.latest: Plan | None = None
        self.planned_count = 0
        self.planned_s = 0.0
        # The call that is traced, and the plans of each by the bytes of gradients.
        self.call: TracedCall | None = None
        self._variants: weakref.WeakKeyDictionary[TracedCall, dict[int, Plan]] = (
            weakref.WeakKeyDictionary()
        )
        # Where sizes vary: the same by sizes too, what is planned next, what was last.
        self._sized: weakref.WeakKeyDictionary[TracedCall, dict[Kind, SizedPlan]] = (
            weakref.WeakKeyDictionary()
        )
        # The plan that runs, and that of each kind of each call.
        self.running_plan: Plan | None = None
        self._running_plans: weakref.WeakKeyDictionary[
            TracedCall, dict[Kind, Plan | None]
        ] = weakref.WeakKeyDictionary()
        # Steps that may vary, of which each shape is traced by itself all the same.
        self._traced_alone: list[SizedPlan] = []
        self._asked_sizes: Sizes | None = None
        # What was planned last, with its costs.
        self._planned_graph: TrainingGraph | None = None
        self.planned_sizes: Sizes = ()
        # Tensors of the call whose dimensions may vary, and their ranges.
        self.varying_inputs: Sequence[tuple[torch.Tensor, Mapping[int, Range]]] = ()
        self.repetition_count = 0
        self.is_only_planned = is_only_planned
        # Names of the fused kernels of the step that is being traced.
        self.fused_kernels: frozenset[str] = frozenset()

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

    def gradient_bytes_now(self, inputs: Sequence[Any]) -> int:
        """Return the bytes of the gradients that earlier passes left, and of buckets.

        Buckets are those of a wrapper around the call that copies gradients.
        """
        if self.assumed_gradient_bytes is not None:
            return self.assumed_gradient_bytes
        known = self.parameters
        if known is None:
            model = self.model
            known = [] if model is None else contents_of(model).parameters
        # Most of what a graph is given.
        identities = set(map(id, known))
        others = [value for value in inputs if id(value) not in identities]
        held_bytes = gradient_bytes([*tensors_in(others), *known])
        return held_bytes + gradient_buckets_bytes()

    def has_gradient(self, leaf: torch.Tensor) -> bool:
        """Return whether the step that is planned adds to a gradient of a leaf."""
        if self.assumes_gradients is None:
            return existing_gradient(leaf) is not None
        return self.assumes_gradients and leaf.is_leaf and leaf.requires_grad

    def step_bytes_of(self, leaf: torch.Tensor) -> int | None:
        """Return what the optimizer of a leaf takes that steps in backward.

        ``None`` if none does.
        """
        if not isinstance(leaf, nn.Parameter) or not leaf.requires_grad:
            return None
        return dict(self.optimizer_memory.in_backward).get((leaf.shape, leaf.dtype))

    def memory_with(self, gradients: Mapping[int, Division]) -> OptimizerMemory:
        """Return what the optimizer takes where gradients are divided in this way.

        Raises
        ------
        CaptureError
            If it has to be looked at once more and no longer exists, or its step cannot
            be predicted.
        """
        if not gradients or self._optimizer is None:
            return self.optimizer_memory
        known = self._memory_with.setdefault(self.optimizer_memory, {})
        key = frozenset(gradients.items())
        if key not in known:
            optimizer = self._optimizer()
            if optimizer is None:
                msg = (
                    "the optimizer that was given for planning no longer exists, and "
                    "gradients are divided among processes otherwise than when it was "
                    "looked at: keep it for as long as its parameters are trained"
                )
                raise CaptureError(msg)
            known[key] = optimizer_memory(optimizer, gradients)
        return known[key]

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state that plans count at present."""
        known = self._memory_with.get(self.optimizer_memory, {})
        memories = known.values() or [self.optimizer_memory]
        return max(memory.state_bytes for memory in memories)

    def begin(
        self,
        call: TracedCall,
        inputs: Sequence[Any],  # noqa: ARG002
        gradient_bytes: int,
        sizes: Sizes | None = None,
    ) -> None:
        """Prepare to plan a call that starts with so many bytes of gradients.

        Where sizes vary, for ``sizes``, or for the largest if these are ``None``.
        """
        self.call, self.gradient_bytes = call, gradient_bytes
        self._asked_sizes = sizes

    @property
    def has_described_loss(self) -> bool:
        """Whether it was said what the loss is computed from."""
        return self.loss is not None

    @property
    def plans_ahead(self) -> bool:
        """Whether a step is planned that is not about to run."""
        return self.assumed_gradient_bytes is not None

    def note_running(self, call: TracedCall, kind: Kind) -> None:
        """Take note of the plan that runs next: the latest, if the kind is new."""
        plans = self._running_plans.setdefault(call, {})
        if kind not in plans:
            plans[kind] = self.latest
        self.running_plan = plans[kind]

    def choose_sizes(self, varying: VaryingSizes) -> Sizes:
        """Return the sizes for which the variant is planned that was begun last.

        Raises
        ------
        FixedSizesError
            If a step is planned ahead for sizes that turned out to be one number each.
        """
        fixed = varying.fixed()
        if fixed and self.plans_ahead:
            raise FixedSizesError(", ".join(fixed))
        self.planned_sizes = self._asked_sizes or varying.largest()
        return self.planned_sizes

    def variant_that_fits(
        self, call: TracedCall, kind: Kind, inputs: Sequence[Any]
    ) -> Kind | None:
        """Return a variant of the call that will do for another kind.

        ``None`` if no known plan holds then, and another has to be made.
        """
        sizes, gradient_bytes = kind
        if sizes:
            return self._sized_variant(call, kind, inputs)
        known_bytes = self._variant_by_gradients(call, gradient_bytes)
        return None if known_bytes is None else ((), known_bytes)

    def _sized_variant(
        self, call: TracedCall, kind: Kind, inputs: Sequence[Any]
    ) -> Kind | None:
        sizes, gradient_bytes = kind
        known = self._sized.get(call, {})
        if kind in known:
            return kind
        measured = [sized for sized in known.values() if sized.covers(sizes)]
        if not measured:
            return None
        given = frozenset(map(storage_identity, tensors_in(inputs)))
        found: dict[Kind, Plan] = {}
        for other, sized in known.items():
            _, other_bytes = other
            if gradient_bytes == other_bytes and self._is_within(sized, sizes):
                return other
            # With fewer gradients another plan could be faster.
            is_enough = gradient_bytes >= other_bytes or not (
                sized.plan.recomputed_op_count or sized.program.pieces
            )
            if is_enough:
                plan = self._plan_at(sized, kind, given, measured[0])
                if plan is not None:
                    found[other] = plan
        if not found:
            return None
        best = min(found, key=lambda other: found[other].cost_ns)
        self.latest = found[best]
        return best

    def _is_within(self, sized: SizedPlan, sizes: Sizes) -> bool:
        """Whether a plan holds for a call since nothing in it is larger."""
        return sized.is_larger(sizes) and all(
            tensor.shape[dim] <= largest
            for tensor, ranges in self.varying_inputs
            for dim, (_, largest) in ranges.items()
        )

    def sizes_that_break(
        self, call: TracedCall, gradient_bytes: int, inputs: Sequence[Any]
    ) -> Sizes | None:
        """Return sizes in the ranges at which no known plan of a call holds.

        ``None`` if none was found. Some are looked at; each is judged before it runs.
        From now on the budget is that of the plan for the largest.
        """
        known = self._sized[call]
        first = next(iter(known.values()))
        # A percentage is one of the largest step.
        budget = budget_of(first.plan)
        self.request = replace(self.request, budget=budget, given_plan=None)
        varying, latest = first.program.varying, self.latest
        samples = [] if varying is None else varying.samples()
        broken = [
            sizes
            for sizes in samples
            if self.variant_that_fits(call, (sizes, gradient_bytes), inputs) is None
        ]
        self.latest = latest
        return max(broken, key=first.sum_bytes, default=None)

    def settle(self, call: TracedCall, kind: Kind) -> None:
        """Take the plan of a kind of call for the latest."""
        self.latest = self._sized[call][kind].plan

    def _plan_at(
        self, sized: SizedPlan, kind: Kind, given: frozenset[int], measured: SizedPlan
    ) -> Plan | None:
        """Return a plan with its step at other sizes, or ``None`` if it breaks.

        ``measured`` is a plan of sizes that are no smaller.
        """
        sizes, gradient_bytes = kind
        program = replace(sized.program_at(sizes), given_storages=given)
        surroundings = self.surroundings(program, gradient_bytes)
        graph = add_surroundings(program, surroundings).graph
        return at_sizes(sized.plan, sized.with_costs(graph, measured.graph))

    def _variant_by_gradients(
        self, call: TracedCall, gradient_bytes: int
    ) -> int | None:
        known_plans = self._variants.get(call, {})
        for known_bytes, known in known_plans.items():
            plan = with_gradients(
                known, known_bytes, gradient_bytes, gradient_buckets_bytes()
            )
            if plan is not None:
                known_plans[gradient_bytes] = self.latest = plan
                self.plans[self._key_of(plan.fingerprint, gradient_bytes)] = plan
                return known_bytes
        return None

    def describe_step(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return in words what step was planned last."""
        words = [self.describe_call(args, kwargs)]
        bucket_bytes = gradient_buckets_bytes()
        if self.gradient_bytes > bucket_bytes:
            held_bytes = self.gradient_bytes - bucket_bytes
            words.append(f"onto {format_bytes(held_bytes)} of gradients")
        if bucket_bytes:
            words.append(f"with {format_bytes(bucket_bytes)} of gradient buckets")
        words += [f"autocast to {kind.dtype}" for kind in autocast_now()]
        return ", ".join(words)

    def describe_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return in words what the step that was planned last is called with."""
        words = self._call_words(args, kwargs, is_nested=True)
        if self.latest is not None and objects_in((args, kwargs)):
            # The tracer looks into them.
            words[:0] = [
                f"{storage.name} of {format_bytes(storage.size_bytes)}"
                for storage in self.latest.graph.storages
                if storage.role is Role.INPUT
            ]
        tensors = tensors_in((args, kwargs))
        if len({*map(id, tensors)}) < len(tensors):
            words.append("one tensor given twice")
        return ", ".join(words)

    def _call_words(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_nested: bool = False
    ) -> list[str]:
        """Return in words the tensors of a call, those in lists and mappings too."""
        words = [
            f"{name}{keystr(path)} {describe_tensor(leaf)}".lstrip()
            for name, value in [*(("", value) for value in args), *kwargs.items()]
            for path, leaf in (
                tree_flatten_with_path(value)[0] if is_nested else [((), value)]
            )
            if isinstance(leaf, torch.Tensor)
        ]
        model = self.model
        if model is not None:
            words.append("training mode" if model.training else "evaluation mode")
        return words

    def step_facts(self, program: JointProgram) -> dict[str, str]:
        """Return what is alike of a step in all processes that plan it together."""
        args, kwargs = self.batch
        autocast = [f"autocast to {kind.dtype}" for kind in program.autocast]
        words = ", ".join([*self._call_words(args, kwargs), *autocast])
        return {
            "what the model is called with": words,
            "the traced step": program.fingerprint[:12],
            "gradients of earlier passes": "some" if self.gradient_bytes else "none",
        }

    def choose_kernels(self, joint: fx.GraphModule, forward_output_count: int) -> None:
        """Fuse operators of a traced step, in place, if that is asked for."""
        given = self.request.given_plan
        with outside_of_tracing():
            if given is not None:
                fuse_named(joint, forward_output_count, given.fused_kernels)
            elif self.request.kernels == "fused":
                self.fused_kernels = fuse_where_quicker(
                    joint, forward_output_count, self.request.progress
                )

    def choose_schedule(self, program: JointProgram) -> tuple[JointProgram, Schedule]:
        """Plan a traced step, or find the plan made for an equal one."""
        with outside_of_tracing():
            if self.has_several_devices:
                # What copies of blocks wait for is decided for the pass as a whole.
                program = replace(program, pieces={})
            key = self._key_of(program.fingerprint, self.gradient_bytes)
            bare = replace(program, pieces=self._pieces.get(key, program.pieces))
            program = add_surroundings(bare, self.surroundings(bare))
            if key not in self.plans:
                plan = self._plan_of_larger(bare)
                if plan is None:
                    bare, program, plan = self._plan_anew(bare, program)
                    self.planned_count += 1
                self.plans[key], self._pieces[key] = plan, bare.pieces
            else:
                self.note_repetition(program)
            self.latest = plan = self.plans[key]
            self.planned_s = time.monotonic()
        if self.call is not None:
            self._remember(self.call, bare, plan)
        platform = plan.platform if plan.has_several_devices else None
        loss = program.loss if self.loss is None else None
        return (
            replace(program, graph=plan.graph, platform=platform, loss=loss),
            plan.schedule,
        )

    def _plan_anew(
        self, bare: JointProgram, program: JointProgram
    ) -> tuple[JointProgram, JointProgram, Plan]:
        """Return a plan, and the step that it is of, without and with surroundings.

        Gradients wait that would leave before something reads what changes with them.
        """
        asked, passed = bare.pieces, list[tuple[JointProgram, JointProgram, Plan]]()
        first, graph = (bare, program), None
        while True:
            try:
                plan = self.with_allocator(self.make_plan(program), program)
            except BudgetError as error:
                if error.schedule is None:
                    raise
                pieces = pieces_before_changes(program, error.schedule)
                if pieces == bare.pieces:
                    # One that another budget's error has named may be of those before.
                    for found in filter(None, map(self._smallest, passed)):
                        return found
                    if graph is None:
                        raise
                    plan = self._below(error, *first, graph)
                    return *first, self.with_allocator(plan, first[1])
            else:
                pieces = pieces_before_changes(program, plan.schedule)
                if pieces == bare.pieces:
                    # Nothing is proved of schedules in which more of them leave early.
                    is_all = pieces == asked
                    return bare, program, plan if is_all else unproved(plan)
                passed.append((bare, program, plan))
            graph = graph or self._planned_graph
            bare = replace(bare, pieces=pieces)
            program = add_surroundings(bare, self.surroundings(bare))

    def _smallest(
        self, passed: tuple[JointProgram, JointProgram, Plan]
    ) -> tuple[JointProgram, JointProgram, Plan] | None:
        """Return the plan of a step with the smallest known peak, if it will do."""
        bare, program, plan = passed
        if plan.account != "live" or plan.in_flight > 1 or plan.budget_bytes is None:
            return None
        limits = Limits.after(self.request.time_limit, self.request.seed)
        kind = plan.graph.device_kinds[0]
        floor = smallest_budget(plan.graph, kind=kind, limits=limits)
        if floor.budget_bytes > plan.budget_bytes:
            return None
        if pieces_before_changes(program, floor.schedule) != bare.pieces:
            return None
        smallest = {"schedule": floor.schedule, "solver": "smallest_budget"}
        plan = replace(unproved(plan), **smallest, status=Status.FEASIBLE)
        return bare, program, plan

    def _below(
        self,
        error: BudgetError,
        bare: JointProgram,
        program: JointProgram,
        graph: TrainingGraph,
    ) -> Plan:
        """Return a plan of fewer bytes than an error names, if it will do.

        A schedule for one budget may change nothing too early where one for a smaller
        budget does: it is looked for by bisection.

        Raises
        ------
        BudgetError
            If it will not do, naming its bytes, or the one given if none is found.
        """
        request, asked_bytes = self.request, error.budget_bytes
        if request.in_flight > 1 or session_now() is not None:
            raise error
        limits = Limits.after(request.time_limit, request.seed)
        kind, most_bytes = graph.device_kinds[0], error.required_bytes
        floor = smallest_budget(graph, kind=kind, limits=limits)
        least_bytes, found = floor.budget_bytes, None
        for _ in range(_BISECTIONS):
            middle_bytes = (least_bytes + most_bytes) // 2
            try:
                plan = self._solve(program, graph, None, middle_bytes)
            except BudgetError:
                least_bytes = middle_bytes
                continue
            if pieces_before_changes(program, plan.schedule) != bare.pieces:
                least_bytes = middle_bytes
                continue
            most_bytes, found = plan.peak_bytes, plan
            if most_bytes <= asked_bytes:
                return at_budget(plan, asked_bytes)
        if found is None:
            raise error
        msg = (
            f"no schedule was found within {format_bytes(asked_bytes)} ({asked_bytes:_} "
            f"bytes): the smallest known budget is {format_bytes(most_bytes)} "
            f"({most_bytes:_} bytes), in which nothing reads a parameter again that hooks "
            f"in backward may have changed; raise the budget to at least {most_bytes} "
            "bytes, or shrink the batch"
        )
        raise BudgetError(
            msg,
            budget_bytes=asked_bytes,
            required_bytes=most_bytes,
            schedule=found.schedule,
        )

    @property
    def has_several_devices(self) -> bool:
        """Whether steps are planned for more than one device."""
        return self.request.has_several_devices

    def with_allocator(self, plan: Plan, program: JointProgram) -> Plan:
        """Return a plan that knows how the allocator of its device is set."""
        platform = self.request.platform
        if plan.platform.allocators:
            return plan
        if platform is None:
            return with_allocator(plan, settings_on(program.device, os.environ))
        home = self.home_in(platform, place_name(program.device))
        return with_allocator(plan, platform.allocator_of(home))

    def _remember(self, call: TracedCall, program: JointProgram, plan: Plan) -> None:
        if not program.sizes:
            self._variants.setdefault(call, {})[self.gradient_bytes] = plan
            if self.request.dynamic is not None:
                self._traced_alone.append(SizedPlan.planned(program, plan))
        else:
            kind = program.sizes, self.gradient_bytes
            self._sized.setdefault(call, {})[kind] = SizedPlan.planned(program, plan)

    def _plan_of_larger(self, program: JointProgram) -> Plan | None:
        """Return a plan made for a larger shape of a step, if its schedule holds here.

        Of steps that each shape is traced for by itself, though all may vary.
        """
        if self.request.dynamic is None or program.sizes:
            return None
        for sized in self._traced_alone:
            smaller = sized.program_like(program)
            if smaller is None:
                continue
            surrounded = add_surroundings(smaller, self.surroundings(smaller))
            graph = sized.with_costs(surrounded.graph, sized.graph)
            plan = at_sizes(sized.plan, graph)
            if plan is not None:
                return replace(plan, fingerprint=program.fingerprint)
        return None

    def _key_of(self, fingerprint: str, gradient_bytes: int) -> PlanKey:
        # Buckets and gradients that exist may have the same bytes.
        buckets_bytes = gradient_buckets_bytes()
        return fingerprint, gradient_bytes, buckets_bytes, self.optimizer_memory

    def note_repetition(self, program: JointProgram) -> None:
        """Count how often equal steps are traced again, and say so when it is often."""
        self.repetition_count += 1
        if self.repetition_count == _MANY_REPETITIONS:
            msg = (
                f"{program.graph.name} was traced {_MANY_REPETITIONS} times more with "
                "equal results, which takes longer than running it: the model changes "
                "something at each call that the tracer looks at, such as a counter in "
                "Python, a number from .item(), or a size that values decide; keep it in a "
                "tensor, or out of forward"
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=2)

    def surroundings(
        self,
        program: JointProgram,
        gradient_bytes: int | None = None,
        modules: Sequence[fx.GraphModule] = (),
    ) -> Surroundings:
        """Return what lives and runs around the traced step now.

        ``modules`` is what was traced, if that is not ``program.module`` alone.
        """
        request = self.request
        self.request.progress("counting parameters, batch, optimizer and loss", 0.0)
        if gradient_bytes is None:
            gradient_bytes = self.gradient_bytes
        bucket_bytes = min(gradient_bytes, gradient_buckets_bytes())
        waiting_bytes = 0
        may_join = request.passes_in_flight > 1 and self.loop.joins_passes
        # In the middle of training it is seen, and told, where passes need more.
        if may_join and self.plans_ahead:
            storages = program.graph.storages
            sizes = [storages[s].size_bytes for s in program.accumulated]
            # Those of the first pass, and the sum of two that is made.
            waiting_bytes = sum(sizes) + max(sizes, default=0)
        memory = self.memory_with(program.gradients)
        loss = self.loss_memory(program)
        residents = resident_bytes(
            self.model,
            (
                self.batch_for(program),
                captured_tensors(request.loss),
                loss.read,
                self.loop.tensors,
            ),
            memory.state_bytes,
            program.device,
            counted=program.given_storages,
        )
        outside_bytes = self.ahead_bytes(program) + self.loop.held_bytes
        residents[Role.INPUT] = residents.get(Role.INPUT, 0) + outside_bytes
        if self.loop.tangent_bytes is not None:
            residents[Role.TANGENT] = self.loop.tangent_bytes
        return Surroundings(
            resident_bytes={
                **residents,
                Role.GRADIENT: gradient_bytes - bucket_bytes + waiting_bytes,
                Role.BUCKET: bucket_bytes,
                Role.LIBRARY: library_bytes(
                    modules or [program.module], program.device
                ),
            },
            loss_peak_bytes=loss.peak_bytes,
            loss_held_bytes=loss.held_bytes,
            loss_saved_bytes=loss.saved_bytes if request.passes_in_flight > 1 else 0,
            has_one_loss=may_join,
            loss_forward_peak_bytes=loss.forward_peak_bytes,
            loss_saves_outputs=loss.saves_outputs,
            optimizer_workspace_bytes=max(memory.step_bytes, self.loop.merged_bytes),
            has_tangents_of_its_own=self.loop.tangent_bytes is None,
            holds_outputs=self.loop.holds_outputs,
            outputs_leave_with_pass=self.loop.outputs_leave_with_pass,
        )

    def ahead_bytes(self, program: JointProgram) -> int:
        """Return the bytes of batches like this one that the loop has loaded ahead.

        Each is taken to be as large as this one may become.
        """
        limits = {
            id(tensor): at_largest(tensor, ranges)
            for tensor, ranges in self.varying_inputs
        }
        held = (self.batch, self.loop.tensors)
        held = tree_map(lambda leaf: limits.get(id(leaf), leaf), held)
        sizes = resident_bytes(None, held, 0, program.device)
        others = self.loop.batches_ahead + self.request.passes_in_flight - 1
        return others * sum(sizes.values())

    def batch_for(self, program: JointProgram) -> Any:
        """Return the batch, with what the step does not read at its largest.

        What it reads is counted in the graph, at the sizes that the graph is for.
        """
        if program.sizes != self.planned_sizes or not self.varying_inputs:
            return self.batch
        limits = {
            id(tensor): at_largest(tensor, ranges)
            for tensor, ranges in self.varying_inputs
            if storage_identity(tensor) not in program.given_storages
        }
        return tree_map(lambda leaf: limits.get(id(leaf), leaf), self.batch)

    def loss_memory(self, program: JointProgram) -> LossMemory:
        """Return what the caller's loss may need beyond the outputs."""
        if self.loop.tangent_bytes is not None:
            return LossMemory(peak_bytes=0, held_bytes=0)
        if self.loss is not None and self.model is not None:
            with callers_function_modes(), autocast_again(program.autocast):
                outputs = (
                    self.example_outputs(self.model, self.batch_at(program))
                    if program.returned is None
                    else fake_output(_at_sizes(program, program.returned))
                )
                memory = self.memory_of_loss(self.loss, outputs)
                # Which of several outputs it keeps is not told apart.
                is_sure = len(outputs.tensors) == 1
                return memory if is_sure else replace(memory, saves_outputs=True)
        if program.loss is not None:
            return LossMemory(peak_bytes=0, held_bytes=0, saves_outputs=False)
        # Only outputs that take a gradient have one.
        return assumed_loss_bytes(program.tangent_values())

    def memory_of_loss(self, loss: DescribedLoss, outputs: FakeOutputs) -> LossMemory:
        """Return what a described loss needs for these outputs."""
        try:
            return loss.memory(outputs)
        except CaptureError as error:
            if self.request.dynamic is None:
                raise
            msg = (
                f"{error}. With dynamic= the loss is tried on outputs of the largest size: "
                "let it take its targets for as many as it is given, such as "
                "y[:, :outputs.shape[1]] of targets for the largest"
            )
            raise CaptureError(msg) from error

    def batch_at(self, program: JointProgram) -> Any:
        """Return the batch at the sizes that a program is for, without its values.

        Arguments that the graph does not read are as large as they may become.
        """
        varying = program.varying
        if varying is None:
            return self.batch
        found: dict[int, torch.Tensor] = {}
        pairs = zip(self.varying_inputs, varying.inputs.shapes, strict=True)
        for (tensor, ranges), shape in pairs:
            known = (
                largest_shape(tensor, ranges)
                if shape is None
                else varying.evaluated(shape, program.sizes)
            )
            if known != list(tensor.shape):
                found[id(tensor)] = untouched_like(tensor, known)
        return tree_map(lambda leaf: found.get(id(leaf), leaf), self.batch)

    def example_outputs(self, model: nn.Module, batch: Any) -> FakeOutputs:
        """Return what the model returns for a batch."""
        args, kwargs = batch
        return fake_outputs(model, args, kwargs)

    def make_plan(self, program: JointProgram) -> Plan:
        """Return a new plan for a traced step, or the given one if it fits."""
        if self.request.given_plan is not None:
            return accept_plan(program, self.request.given_plan)
        request = self.request
        platform = self.platform_for(program)
        budget = request.budget
        if platform is None:
            budget = one_budget(budget, request.platform)
        home, place = self.home_of(program)
        graph = with_costs(
            program,
            request.costs,
            request.progress,
            known=KnownCosts.of(request.platform, home),
            place=place,
            is_alone=platform is None,
        )
        if platform is not None:
            several_budgets(platform, budget)
            graph = with_device_costs(
                program,
                graph,
                platform,
                request.costs,
                request.progress,
                known=request.platform,
            )
        self._planned_graph = graph
        session = session_now()
        if session is None or platform is not None:
            return self._solve(program, graph, platform, budget)
        return session.plan(
            graph,
            self.step_facts(program),
            one_budget(budget, request.platform),
            lambda graph, budget: self._solve(program, graph, None, budget),
        )

    def _solve(
        self,
        program: JointProgram,
        graph: TrainingGraph,
        platform: Platform | None,
        budget: Budget | None,
    ) -> Plan:
        """Return a plan of a step with its costs, on the devices that are given."""
        request = self.request
        settings = {"torch": torch.__version__, "costs": request.costs}
        if request.device is not None:
            settings |= {"device": request.device.name, "costs": "estimated"}
        known = equal_plan(graph, self.plans.values())
        if request.in_flight > 1 or request.solver != "auto":
            known = None

        def make() -> Plan:
            plan = None
            if request.in_flight > 1:
                plan = plan_in_flight(
                    graph,
                    request.in_flight,
                    budget=one_budget(budget, request.platform),
                    fingerprint=program.fingerprint,
                    solver=request.solver,
                    time_limit=request.time_limit,
                    seed=request.seed,
                    progress=request.progress,
                    settings=settings,
                )
            elif known and isinstance(budget, int):
                plan = replan(
                    graph,
                    budget,
                    known,
                    fingerprint=program.fingerprint,
                    limits=Limits.after(request.time_limit, request.seed),
                    settings=settings,
                )
            return plan or plan_graph(
                graph,
                budget=budget,
                platform=platform,
                fingerprint=program.fingerprint,
                solver=request.solver,
                objective=Objective(request.objective),
                time_limit=request.time_limit,
                gap=request.gap,
                seed=request.seed,
                progress=request.progress,
                has_assumed_loss=request.loss is None and program.loss is None,
                settings=settings,
            )

        call = PlanCall(
            graph=graph,
            budget=budget,
            platform=platform,
            fingerprint=program.fingerprint,
            in_flight=request.in_flight,
            settings=settings,
            asked={
                **request.solving,
                "known": None if known is None else plan_digest(known),
            },
        )
        plan = planned_once(call, make, request.progress)
        if request.kernels == "eager":
            return plan
        return replace(
            plan,
            kernels=request.kernels,
            fused_kernels=self.fused_kernels,
            _judged=plan.trace,
        )

    def platform_for(self, program: JointProgram) -> Platform | None:
        """Return the devices that the request is for, the step's own first.

        ``None`` if that is the step's own device alone.

        Raises
        ------
        InvalidPlatformError
            If the step's device is not among them, or one cannot be reached.
        """
        request, place = self.request, place_name(program.device)
        platform = request.platform
        if platform is None and isinstance(request.budget, Mapping):
            request.progress("measuring links between devices", 0.0)
            names = list(request.budget)
            _check_home_is_named(place, names)
            platform = measured_platform(names, cache=CostCache())
        if platform is None:
            return None
        home = self.home_in(platform, place)
        return None if len(platform.devices) == 1 else arrange(platform, home)

    def home_in(self, platform: Platform, place: str) -> int:
        """Return the device of a platform on which the model is, or is planned to be.

        Where no device of the platform is the model's, a plan that nobody runs is for
        the first device with measured costs: the model would be there.

        Raises
        ------
        InvalidPlatformError
            If there is none.
        """
        known = [
            device
            for device, name in enumerate(platform.names)
            if platform.kind_of(device).computes and platform.costs_on(name)
        ]
        places = [place_of(platform, device) for device in known]
        if self.is_only_planned and known and place not in places:
            try:
                return home_of(platform, place)
            except InvalidPlatformError:
                return known[0]
        return home_of(platform, place)

    def home_of(self, program: JointProgram) -> tuple[str, str | None]:
        """Return the name of home, and where it is if the model is not there."""
        place, platform = place_name(program.device), self.request.platform
        if platform is None:
            return place, None
        home = self.home_in(platform, place)
        there = place_of(platform, home)
        return platform.names[home], None if there == place else there


def _check_home_is_named(place: str, names: Sequence[str]) -> None:
    """Refuse budgets by device without one for the device that the model is on.

    Raises
    ------
    InvalidPlatformError
        If there is none, or a name stands for no device of this machine.
    """
    for name in names:
        common_device(name)
    first = place.removesuffix(":0")
    if place not in names and first not in names:
        msg = (
            f"the model is on {place}, which has no budget: budgets are given for "
            f"{', '.join(names)}; add one for {place!r}, or None where there is no limit"
        )
        raise InvalidPlatformError(msg)


class CompilerPlanner(Planner):
    """Plans what ``torch.compile`` traces, of which only the graph shows."""

    def __init__(
        self,
        model: nn.Module | None,
        request: PlanRequest,
        optimizer_memory: OptimizerMemory,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(model, request, optimizer_memory, optimizer=optimizer)
        self.asked = request
        # What a percentage came to at the first variant of a call.
        self.budgets: weakref.WeakKeyDictionary[TracedCall, Budget] = (
            weakref.WeakKeyDictionary()
        )

    def begin(
        self,
        call: TracedCall,
        inputs: Sequence[Any],
        gradient_bytes: int,
        sizes: Sizes | None = None,
    ) -> None:
        """Prepare to plan a call that starts with so many bytes of gradients.

        Raises
        ------
        CaptureError
            If there is a loss, and the call's arguments do not show in the graph.
        """
        super().begin(call, inputs, gradient_bytes, sizes)
        self.request = replace(
            self.asked, budget=self.budgets.get(call, self.asked.budget)
        )
        if self.request.loss is not None:
            self.batch = example_batch(call.sources, inputs)

    def choose_schedule(self, program: JointProgram) -> tuple[JointProgram, Schedule]:
        """Plan a traced step, or find the plan made for an equal one."""
        chosen = super().choose_schedule(program)
        # The batch is the caller's, and the tracer never forgets a planner.
        self.batch = ()
        if self.call is not None and self.latest is not None:
            self.budgets.setdefault(self.call, budget_of(self.latest))
        return chosen

    def example_outputs(self, model: nn.Module, batch: Any) -> FakeOutputs:
        """Return what the model returns for the call's arguments.

        Raises
        ------
        CaptureError
            If that is not what the traced graph returns.
        """
        try:
            outputs = super().example_outputs(model, batch)
            found = tuple(describe_tensor(t) for t in outputs.tensors)
        # Whatever the model raises without the arguments that cannot be seen.
        except Exception as error:  # noqa: BLE001
            found = f"{type(error).__name__}: {error}"
        else:
            if self.call is not None and found == self.call.outputs:
                return outputs
        msg = (
            "the loss needs the model's outputs, but called with the tensors that the "
            f"compiler shows, the model gives other ones than it does here: {found}. Use "
            "remat.fit, which is given the example, or leave loss= out of remat.backend"
        )
        raise CaptureError(msg)


def _at_sizes(program: JointProgram, returned: ReturnedTensor) -> ReturnedTensor:
    """Return what a model returns at the sizes that a program is for."""
    varying = program.varying
    if varying is None:
        return returned
    return replace(
        returned,
        shape=tuple(varying.evaluated(returned.shape, program.sizes)),
        stride=tuple(varying.evaluated(returned.stride, program.sizes)),
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
    if len(plan.graph.ops) != len(program.graph.ops):
        msg = (
            f"the plan's step has {len(plan.graph.ops)} operators, and this one "
            f"{len(program.graph.ops)}: gradients leave it at other times, as for "
            "optimizers that step in backward, or not, or for gradients of earlier "
            "passes; give the optimizer that the plan was made with, or make a new plan "
            "with remat.fit(..., budget=...)"
        )
        raise PlanMismatchError(msg)
    graph = with_known_costs(program.graph, plan.graph)
    if plan.in_flight > 1:
        graph = with_passes(graph, plan.schedule, plan.in_flight)
    trace = simulate(graph, plan.platform, plan.schedule)
    if trace.violation is not None:
        msg = (
            "the plan does not hold for what surrounds the step now (optimizer, "
            f"gradients, batch): {trace.violation}"
        )
        raise PlanMismatchError(msg)
    return on_graph(plan, graph)


@contextmanager
def outside_of_tracing() -> Generator[None]:
    """Leave fake-tensor mode and autograd while operators are really run."""
    with unset_fake_temporarily(), torch.no_grad():
        yield
