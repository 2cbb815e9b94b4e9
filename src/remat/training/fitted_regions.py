"""A model of several graphs whose calls run by plans of the whole step."""

import copy
import gc
import weakref
from collections import Counter, UserDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import nn

from remat.capture.autocast import autocast_now
from remat.capture.first_call import prepare
from remat.capture.gathering import MARK, Gathering, RegionCode, Route
from remat.capture.readers_apart import added_to_others
from remat.capture.surroundings import plain_tensors, tensors_in
from remat.capture.tracing import (
    TRACE_ERRORS,
    example_error,
    quiet_tracer,
    traced_entry,
)
from remat.core.errors import (
    BudgetError,
    CaptureError,
    PlanMismatchError,
    ProfileError,
    RematError,
)
from remat.core.garbage import old_objects_left_alone
from remat.core.units import format_bytes
from remat.planning.plan import Plan
from remat.profile.allocations import AllocationRecorder, Recording
from remat.profile.gathered_parameters import check_groups
from remat.runtime.undefined import HeldOutputs, held_words
from remat.torch_compat.attributes import (
    Contents,
    contents_of,
    forward_hooks_of_all,
    storage_identity,
    trace_again,
    version_of,
    versions_of,
)
from remat.torch_compat.names import (
    preserve_rng_state,
    profiler_enabled,
    tree_flatten,
)
from remat.torch_compat.patches import alone
from remat.torch_compat.sharding import (
    gathered_groups,
    gathering_alone,
    is_in_pieces,
    local_part,
    sharded_parts,
)
from remat.training.blocks import BlockCalls, blocks_of, is_deep
from remat.training.caller_state import unchanged
from remat.training.fitted_model import FittedModel, logger
from remat.training.forward_state import CallState, kept, values_put_back
from remat.training.region_backend import RegionBackend
from remat.training.region_planning import PlannedStep, RegionPlanner, Running
from remat.training.request import PlanRequest, Regions
from remat.training.step_planning import Planner

_MANY_TRACES = 3
"""How many graphs that were traced in vain are worth a word."""

_MOST_KEPT = 2
"""Batches that wait for their ways to be planned: they are in no budget."""

_RECORDINGS_BESIDE_THREADS = 3
"""How often a forward pass is recorded where some releases may not be seen."""

_MOST_SPARE = 4
"""How often plans of a kind of call are made anew to leave more, as sizes vary."""

_LAYERS_LEFT_OUT = (
    "where dynamic= lets sizes vary, layers of an nn.LSTM are in no graph, and nothing of "
    "them is computed again: without dynamic= it may be, and each size is traced by itself"
)

_MOST_PLANS = 8
"""How often a kind of call is planned again as it took another way than planned."""


def fitted_for(
    model: nn.Module, request: PlanRequest, *, is_only_planned: bool = False
) -> FittedModel:
    """Return what runs a model as one graph, or as several, as was asked for."""
    kind = FittedModel if request.regions == "whole" else FittedRegions
    parts = sharded_parts(model)
    if parts:
        _check_for_blocks(request)
    if request.regions == "auto" and request.may_be_split and parts:
        kind, request = FittedRegions, replace(request, regions=parts)
    if request.regions == "auto":
        is_split = request.may_be_split and is_deep(model)
        is_split = is_split and not any(map(is_in_pieces, model.parameters()))
        kind = FittedDeepModel if is_split else FittedModel
    return kind(model, request, is_only_planned=is_only_planned)


def _check_for_blocks(request: PlanRequest) -> None:
    """Refuse, for a sharded model, what is planned for one graph only.

    Raises
    ------
    CaptureError
        Naming what to leave out.
    """
    asked = {
        f"in_flight={request.passes_in_flight}": request.passes_in_flight > 1,
        f"kernels={request.kernels!r}": request.kernels != "eager",
        "more than one device": request.has_several_devices,
    }
    for name, is_asked in asked.items():
        if not is_asked:
            continue
        msg = (
            "the model is divided by torch.distributed.fsdp.fully_shard, and is planned "
            f"block by block; {name} plans a model of one graph. Leave it out"
        )
        if "in_flight" in name:
            msg += ", and call backward after each forward pass"
        raise CaptureError(msg)


@dataclass
class _Call:
    """A call of the model, and what is equal for calls that run by one plan."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    # What it is given, in one list, and how that is nested.
    values: list[Any]
    nesting: Any
    runs_hooks: bool
    gradient_bytes: int = 0
    kind: Any = None
    # How often what it is given, and each parameter, was written when it began.
    given_versions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    parameter_versions: list[int] = field(default_factory=list[int])
    state: CallState | None = None
    # Where it came, if it took a way without a plan, or without room for its sizes.
    route: Route = field(default_factory=Route)
    had_plan: bool = False
    # What was allocated beyond its plan, if that was too much, and what is in that.
    excess_bytes: int = 0
    planned_bytes: int = 0


class FittedRegions(FittedModel):
    """A model that the tracer splits, and whose graphs are planned together.

    Parameters
    ----------
    model, request, is_only_planned
        As for :class:`~remat.training.fitted_model.FittedModel`.
    """

    planner_type: ClassVar[type[Planner]] = RegionPlanner
    planner: RegionPlanner
    is_whole = False
    # Whether a call is of another kind where a switch of a module is another.
    notes_switches: ClassVar[bool] = False

    def __init__(
        self, model: nn.Module, request: PlanRequest, *, is_only_planned: bool = False
    ) -> None:
        super().__init__(model, request, is_only_planned=is_only_planned)
        if not gathered_groups(model) and any(map(is_in_pieces, model.parameters())):
            msg = (
                f"parameters of {self.name} are in pieces on several processes "
                "(DTensor), and such a model is planned as one graph: leave regions= "
                "out, or give regions='whole'"
            )
            raise CaptureError(msg)
        self._blocks = self._block_calls(request.regions)
        # Whether the pass that was looked at last has set up what later ones find.
        self._has_set_up = False
        # How many graphs had been traced when the call that runs now began.
        self._traced_count = 0
        self._codes: list[RegionCode] = []
        # A way that a call took is one of those that there are already.
        self._looks_for_later = True
        self._hooks_seen = forward_hooks_of_all()
        # Per kind of call: what is given, which mode, which gradients exist.
        # The ways that its steps took when they were planned, the last one at the end.
        self._steps_by_kind: dict[Any, list[PlannedStep]] = {}
        self._kind: Any = None
        self._failed_counts: Counter[Any] = Counter()
        # Per kind, what plans are to leave of the budget, and how often that grew.
        self._spare_bytes: dict[Any, int] = {}
        self._spare_counts: Counter[Any] = Counter()
        # The call that runs now, and per kind the last one without a plan for its way.
        self._call: _Call | None = None
        self._unplanned: dict[Any, _Call] = {}
        # Whether calls are noted as they begin, as a way hung on more than the batch.
        self._notes_state = False
        # What is called before the largest step is planned.
        self._smaller: list[tuple[Any, Any]] = []
        # Per kind of call, ways that do not fit, and what these need.
        self._refused: dict[Any, list[tuple[Route, int]]] = {}

    @property
    def regions(self) -> Regions:
        """What are graphs of their own."""
        return self.planner.request.regions

    @property
    def steps(self) -> tuple[PlannedStep, ...]:
        """The kinds of step that are planned, each with how its regions run."""
        return tuple(ways[-1] for ways in self._steps_by_kind.values())

    def _block_calls(self, regions: Regions) -> BlockCalls | None:
        if regions == "breaks":
            return None
        chosen = None if isinstance(regions, str) else regions
        blocks = blocks_of(self.model, chosen)
        planner = weakref.ref(self.planner)

        def region_count() -> int:
            found = planner()
            return 0 if found is None else found.region_count

        is_strict = regions == "auto"
        compiled = self.compiled_part
        return BlockCalls(blocks, compiled, region_count, is_strict=is_strict)

    def make_backend(self, *, is_only_planned: bool) -> RegionBackend:
        """Return the backend that compiles the model's graphs."""
        return RegionBackend(
            self.planner,
            type(self.model).__name__,
            is_only_planned=is_only_planned,
            backward_in_autocast=self.planner.request.backward_in_autocast,
        )

    def tracer_settings(self) -> Callable[[], Mapping[str, Any]]:
        """Return what gives the tracer its settings; the tracer never forgets it.

        What is of another size in a call whose kind was planned, depends on values, and
        so may vary for ever: from its second size on one trace is for all. So it is
        where the caller has said that sizes vary.
        """
        fixed, planner = super().tracer_settings(), weakref.ref(self.planner)
        vary = self.ranges is not None

        def settings() -> Mapping[str, Any]:
            now = planner()
            is_running = now is not None and now.running is not None
            return {
                **fixed(),
                "automatic_dynamic_shapes": vary or is_running,
                # It would read a number again that it has put into a tensor.
                "specialize_float": True,
            }

        return settings

    def plan_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient_bytes: int
    ) -> Plan:
        """Run a forward pass for planning, and plan the step that it shows.

        The step is to start with so many bytes of gradients. Values are real; what
        forward changes is put back. Where it sets something up that later ones find,
        and these go another way, that is planned as well.

        Raises
        ------
        ProfileError
            If a torch profiler is recording.
        """
        with old_objects_left_alone():
            try:
                return self._plan_ways(args, kwargs, gradient_bytes)
            finally:
                # What the model returned may refer to itself, as libraries' caches do.
                gc.collect()

    def _plan_ways(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient_bytes: int
    ) -> Plan:
        try:
            first = self._plan_way_of(args, kwargs, gradient_bytes)
        except (BudgetError, PlanMismatchError) as error:
            # Its traceback holds the frames of all callers, and with them their values.
            first = error.with_traceback(None)
        is_alone = self._group_now() is None and not self.planner.groups
        later: Plan | None = None
        if self._has_set_up and self._looks_for_later and is_alone:
            try:
                later = self._plan_later_way(args, kwargs, gradient_bytes, first)
            except BudgetError as error:
                refused = self._error_of_both(
                    args, kwargs, gradient_bytes, first, error
                )
                raise refused from None
        if later is None:
            if isinstance(first, RematError):
                raise first
            # To look at later calls made it forget.
            self.planner.latest = first
            return first
        self.set_budget(later)
        self._forget_plans_but_of(later.budget_bytes)
        # The tracer may cut the first way otherwise since it knows the later one.
        self._plan_way_of(args, kwargs, gradient_bytes, adds_way=True)
        ways = self._steps_by_kind[self._kind]
        # Of ways as good to begin with the last one is taken, as of all calls but one.
        ways.sort(key=lambda way: way.plan is later)
        ways[:] = self.planner.with_best_beginning(ways)
        self.planner.latest = later
        return later

    def _plan_later_way(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        gradient_bytes: int,
        first: Plan | RematError,
    ) -> Plan | None:
        """Plan what calls do that find what the first one sets up.

        A percentage is one of that step. ``None`` if it is the same.

        Parameters
        ----------
        args, kwargs, gradient_bytes
            As for :meth:`plan_step`.
        first
            The plan of the first call, or why there is none.

        Raises
        ------
        BudgetError
            If it does not fit.
        """
        with kept(self.model):
            if self._goes_the_same_way(args, kwargs):
                return None
            is_given = self.planner.request.given_plan is not None
            if is_given and isinstance(first, Plan):
                self.set_budget(first)
            return self._plan_way_of(args, kwargs, gradient_bytes, adds_way=True)

    def _error_of_both(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        gradient_bytes: int,
        first: Plan | RematError,
        later: BudgetError,
    ) -> BudgetError:
        """Return the error of the way that needs more, of which the later one has one.

        Parameters
        ----------
        args, kwargs, gradient_bytes, first
            As for :meth:`_plan_later_way`.
        later
            Why there is no plan of the later way.
        """
        named_bytes, request = later.required_bytes, self.planner.request
        if isinstance(first, Plan) and first.peak_bytes > named_bytes:
            # It fits its own share, which may be larger than what is named.
            self.planner.request = replace(request, given_plan=None, budget=named_bytes)
            self._forget_plans_but_of(named_bytes)
            try:
                self._plan_way_of(args, kwargs, gradient_bytes, adds_way=True)
            except BudgetError as error:
                first = error.with_traceback(None)
            finally:
                self.planner.request = request
        if isinstance(first, BudgetError) and first.required_bytes > named_bytes:
            return first
        return later.with_traceback(None)

    def _forget_plans_but_of(self, budget_bytes: int | None) -> None:
        plans = self.planner.plans
        for key in [k for k, p in plans.items() if p.budget_bytes != budget_bytes]:
            del plans[key]

    def _plan_way_of(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        gradient_bytes: int,
        *,
        adds_way: bool = False,
    ) -> Plan:
        """Plan the way of a forward pass now, beside those known if it adds one."""
        planner = self.planner
        if profiler_enabled():
            msg = (
                f"to plan {self.name} in parts, what is allocated between them is "
                "recorded by a torch profiler, and one is already recording, which "
                "only one can: fit or plan the model before that recording begins, or "
                "as one graph, with regions='whole'"
            )
            raise ProfileError(msg)
        planner.note_groups(gathered_groups(self.model))
        check_groups(planner.groups)
        planner.gradient_bytes = gradient_bytes
        known_count = self.backend.training_step_count
        planning = self.planning(gradient_bytes, (args, kwargs))
        with unchanged(self.model, None), planning, quiet_tracer():
            try:
                if self._blocks is not None:
                    self._blocks.checkpointed.clear()
                gathering, outputs, recording = self._gathered_alike(args, kwargs)
                if self._take_apart(gathering, outputs, (args, dict(kwargs))):
                    del gathering, outputs, recording
                    gathering, outputs, recording = self._gathered_alike(args, kwargs)
                planner.gathering, planner.batch = gathering, (args, kwargs)
                self._codes = [seen.code for seen in gathering.seen]
                planner.spare_bytes = self._spare_bytes.get(self._kind, 0)
                planner.backward_autocast = self.backend.backward_autocast_now()
                self._check_checkpoints(gathering)
                self._tell_of_left_out(gathering)
                self._tell_of_blocks(gathering)
                step = planner.plan_seen(outputs, recording)
            finally:
                planner.gathering, planner.batch = None, ()
            if (
                self.ranges is not None
                and self.backend.training_step_count > known_count
                and not adds_way
            ):
                # What was planned before was traced for one size, and is no more.
                self._steps_by_kind.clear()
            ways = self._steps_by_kind.setdefault(self._kind, [])
            others = (way for way in ways if way.route != step.route)
            ways[:] = planner.with_best_beginning([*others, step])
        return self.latest_plan()

    def _goes_the_same_way(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Run a forward pass, leave what it set up, and look at the way of a second."""
        codes = self._codes
        with self.planning(self.planner.gradient_bytes, (args, kwargs)):
            try:
                # Both draw the same.
                with preserve_rng_state():
                    self._gather(args, kwargs, nullcontext())
                return [s.code for s in self._gathered(args, kwargs).seen] == codes
            finally:
                self.planner.gathering = None

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        runs_hooks: bool = True,
    ) -> Any:
        """Run the forward pass by its plan; trace and plan it first if it is new.

        In one thread at a time: which graph comes next is counted, and others trace.
        """
        planner = self.planner
        with alone(), planner.watch.without_traces():
            return super().run(args, kwargs, runs_hooks=runs_hooks)

    def compiled(
        self, call: Callable[..., Any], prepared: Callable[[], None] | None
    ) -> Callable[..., Any]:
        """Return a call of the model whose graphs, or blocks, are compiled."""
        if self._blocks is None:
            return super().compiled(call, prepared)
        return traced_entry(self.model, self._blocks.calling(call))

    def _check_checkpoints(self, gathering: Gathering) -> None:
        """Refuse a step of which there is no graph, as checkpoints run its blocks.

        Raises
        ------
        CaptureError
            Naming a block, and what to leave out.
        """
        if self._blocks is None or gathering.seen or not self._blocks.checkpointed:
            return
        names = sorted(self._blocks.checkpointed)
        msg = (
            f"{len(names)} blocks of {self.name} are called inside of torch.utils."
            f"checkpoint, {names[0]} among them, and no other part of it is a graph, so "
            "that there is nothing to plan. Leave the checkpoint out, as a plan takes "
            "its place"
        )
        raise CaptureError(msg)

    def _tell_of_left_out(self, gathering: Gathering) -> None:
        """Say, once, why a part has no graph that might have one."""
        if self.planner.left_out and gathering.seen and "left out" not in self.told:
            self.told.add("left out")
            logger.warning(
                "a part of %s has no graph, and nothing of it is computed again: %s",
                self.name,
                self.planner.words_of_left_out(),
            )

    def _tell_of_blocks(self, gathering: Gathering) -> None:
        """Say, once, which blocks have no graph, and which were traced in vain."""
        if self._blocks is None:
            return
        untraced = sorted(self._blocks.untraced)
        if untraced and "untraced" not in self.told:
            self.told.add("untraced")
            logger.warning(
                "%d blocks of %s have no graph, %s among them: they run as they are, and "
                "nothing of them is computed again. The tracer leaves out functions that "
                "break the graph in a loop; move what breaks it into a function of its "
                "own that these call",
                len(untraced),
                self.name,
                untraced[0],
            )
        checkpointed = sorted(self._blocks.checkpointed)
        if checkpointed and "checkpointed" not in self.told:
            self.told.add("checkpointed")
            logger.warning(
                "%d blocks of %s are called inside of torch.utils.checkpoint, %s among "
                "them: they run as they are, and no plan is made for them. Leave the "
                "checkpoint out, as a plan takes its place",
                len(checkpointed),
                self.name,
                checkpointed[0],
            )
        codes = {seen.code: seen.program.fingerprint for seen in gathering.seen}
        again = len(codes) - len(set(codes.values()))
        if again >= _MANY_TRACES and "traces" not in self.told:
            self.told.add("traces")
            logger.info(
                "%d graphs of %s are equal to others and were traced all the same, since "
                "the code reads numbers that differ, such as the index of a layer in a "
                "cache. A transformers model shares them if called with use_cache=False",
                again,
                self.name,
            )

    def _gathered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Gathering:
        """Run a forward pass that keeps nothing; return what it showed."""
        gathering, _, is_prepared = self._gathered_once(args, kwargs, nullcontext())
        if not is_prepared:
            # Libraries install hooks in the first call, which stay.
            prepare(self.model, args, kwargs)
            gathering, *_ = self._gathered_once(args, kwargs, nullcontext())
        # They hold what is kept for a backward pass, as long as the next one runs.
        for seen in gathering.seen:
            seen.node = None
        gathering.kept = []
        return gathering

    def _gathered_alike(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Gathering, Any, Recording]:
        """Return what a forward pass showed, what it returned, and what it allocated.

        While the tracer compiles the first one it holds values longer than the code
        does, so it is the second one. The tracer looks anew at code for another module
        of its class, and may leave it out of its graphs from then on: then two further
        passes are like those to come.
        """
        with self._sizes_seen():
            traced = self._gathered(args, kwargs)
        found = self._recorded(args, kwargs, traced)
        if [seen.code for seen in found[0].seen] != [seen.code for seen in traced.seen]:
            found = self._recorded(args, kwargs, self._gathered(args, kwargs))
        return found

    def _take_apart(self, gathering: Gathering, outputs: Any, batch: Any) -> bool:
        """Give readers inputs of their own where sums need it; say if any has now."""
        kept, gathering.kept = gathering.kept, []
        outputs = [*tensors_in(outputs), *kept]
        found = added_to_others(gathering, outputs, tensors_in(batch))
        if not cast("RegionBackend", self.backend).take_apart(found):
            return False
        # What was planned before is of graphs that are no more.
        self._steps_by_kind.clear()
        return True

    def _gathered_once(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        around: AbstractContextManager[None],
        before: Gathering | None = None,
    ) -> tuple[Gathering, Any, bool]:
        with kept(self.model) as found:
            gathering, outputs = self._gather(args, kwargs, around, before)
        self._has_set_up = found.has_set_up
        return gathering, outputs, not found.has_new_hooks

    def _gather(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        around: AbstractContextManager[None],
        before: Gathering | None = None,
    ) -> tuple[Gathering, Any]:
        """Run a forward pass that leaves what it changes of the model."""
        planner = self.planner
        gathering = planner.gathering = Gathering(
            self._residents(args, kwargs),
            before=before,
            # A step needs as many for gradients, whatever its plan.
            keeps_bytes=sum(
                local_part(p).nbytes for p in self.model.parameters() if p.requires_grad
            ),
        )
        try:
            # Forward may write to what it is given, which is the caller's.
            own_args, own_kwargs = with_own_containers((args, dict(kwargs)))
            given = values_put_back(tensors_in((args, dict(kwargs))))
            alone = gathering_alone(planner.groups)
            with given, alone as planner.gathered, around:
                outputs = self.run(own_args, own_kwargs)
        # The model's own code runs, which may raise anything.
        except BaseException as error:
            self._forget(error)
            is_of_example = isinstance(error, Exception)
            if is_of_example and not isinstance(error, (RematError, *TRACE_ERRORS)):
                raise example_error(error) from error
            raise
        gathering.between.append(planner.between.leading_to(tensors_in(outputs)))
        gathering.end_step(self._residents(args, kwargs))
        on_model = plain_tensors(self.model)
        gathering.stay.update(map(gathering.note, on_model))
        gathering.kept = [each for each in on_model if each.grad_fn is not None]
        return gathering, outputs

    def _residents(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """Return what is there during the whole step, as it is now."""
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *plain_tensors(self.model),
            *tensors_in((args, dict(kwargs))),
        ]

    def _forget(self, error: BaseException) -> None:
        """Forget what was traced, as the tracer leaves out code that has raised.

        Plans are found again.
        """
        trace_again(error)
        self._compiled.clear()
        self._steps_by_kind.clear()
        self._unplanned.clear()
        self._refused.clear()
        self._blocks = self._block_calls(self.planner.request.regions)

    def left_bytes(self, plan: Plan) -> int:
        """Return the bytes of the gradients that a planned step leaves behind."""
        if not self.planner.groups:
            return super().left_bytes(plan)
        # What is left of gathered gradients are pieces.
        parameters = (p for p in self.model.parameters() if p.requires_grad)
        return sum(local_part(parameter).nbytes for parameter in parameters)

    def forget(self) -> None:
        """Forget all plans, so that what is called next is traced and planned."""
        super().forget()
        self._steps_by_kind.clear()
        self._unplanned.clear()
        self._refused.clear()

    def _recorded(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: Gathering
    ) -> tuple[Gathering, Any, Recording]:
        """Run the same once more, and record what is allocated between the regions.

        What they return is known from before, and they run again only where not.
        """
        found: list[tuple[Gathering, Any, Recording]] = []
        are_threads = any(group.has_threads for group in self.planner.groups)
        for _ in range(_RECORDINGS_BESIDE_THREADS if are_threads else 1):
            recorder = AllocationRecorder(self.planner.device.type, mark_prefix=MARK)
            with recorder:
                gathering, outputs, _ = self._gathered_once(
                    args, kwargs, recorder.region(), before
                )
            found.append((gathering, outputs, recorder.recording))
        # Of releases by other threads, hardly any is unseen each time.
        return min(found, key=lambda each: each[-1].final_bytes())

    def before_call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        contents: Contents,
        *,
        runs_hooks: bool,
    ) -> None:
        """Plan a call of a new kind before it runs.

        Raises
        ------
        CaptureError
            If hooks of all modules came or went: the tracer looks for them in one graph
            only.
        """
        if forward_hooks_of_all() != self._hooks_seen:
            msg = (
                f"hooks of all modules (register_module_forward_hook) were added or removed "
                f"since {self.name} was fitted, and its graphs do not notice: call "
                "remat.fit once more, or register hooks on the modules themselves"
            )
            raise CaptureError(msg)
        planner = self.planner
        values, nesting = _flat(args, kwargs)
        planner.between.begin(values)
        if planner.gathering is None:
            is_first = not self._steps_by_kind
            planner.note_groups(
                gathered_groups(self.model) if is_first else planner.groups
            )
        call = _Call(args, kwargs, values, nesting, runs_hooks)
        call.gradient_bytes = planner.gradient_bytes_now(values)
        call.kind = self._kind = self._kind_of_call(call, contents)
        if planner.gathering is not None:
            return
        call.given_versions = _writes_of(values)
        call.parameter_versions = versions_of(contents.parameters)
        if self._notes_state:
            call.state = CallState(self.model)
        known = self._steps_by_kind
        # A second profiler could not measure what there is between the graphs.
        if not (profiler_enabled() and known):
            was = self._unplanned.pop(call.kind, None)
            # This call may take another way than that one.
            if was is not None:
                self._plan_way(was)
            is_new = call.kind not in known
            if is_new:
                self.plan_step(args, kwargs, call.gradient_bytes)
            # What was run for planning has begun meanwhile.
            if is_new or was is not None:
                planner.between.begin(values)
        self._call, self._kind = call, call.kind
        self.begin_call(call.gradient_bytes)

    def _plan_way(self, call: "_Call") -> None:
        """Plan the way that a call took, or refuse it from now on."""
        values, nesting = _flat(call.args, call.kwargs)
        if (
            nesting != call.nesting
            or list(map(id, values)) != list(map(id, call.values))
            or _writes_of(values) != call.given_versions
        ):
            self.tell(
                f"a way that a step of {self.name} took cannot be planned, as its batch "
                "was written over before the next call. Steps that take it may need more "
                "than the budget; give each call tensors of its own, or fit an example "
                "that takes it"
            )
            return
        self._looks_for_later = False
        try:
            with nullcontext() if call.state is None else call.state.again():
                self.plan_step(call.args, call.kwargs, call.gradient_bytes)
        except BudgetError as error:
            if call.had_plan:
                return
            refused = self._refused.setdefault(call.kind, [])
            refused.append((call.route, error.required_bytes))
            logger.warning(
                "no plan is known for the way of %s that was not planned: %s. Calls that "
                "take it raise an error from now on",
                self.name,
                error,
            )
            return
        except CaptureError as error:
            self.tell(
                f"a way that a step of {self.name} took cannot be planned: {error}. Steps "
                "that take it may need more than the budget"
            )
            return
        finally:
            self._looks_for_later = True
        self._check_excess(call)
        ways = self._steps_by_kind[call.kind]
        if self.planner.is_known(call.route, ways):
            return
        if call.state is None:
            self._notes_state = True
            logger.info(
                "a way of %s was not there any more when it was planned with the same "
                "batch; from now on calls are noted as they begin, with the numbers that "
                "the model keeps and the random states, to plan such ways with these",
                self.name,
            )
            return
        self.tell(
            f"a way that a step of {self.name} took was not there any more when it was "
            "planned with the same batch, numbers that the model keeps and random "
            "states: it depends on something else that differs from call to call. Steps "
            "that take it may need more than the budget; let it depend on what the "
            "model is given, or fit an example that takes it"
        )

    def _check_excess(self, call: "_Call") -> None:
        """Say, and look no more, where planning does not see what a call has allocated.

        Else the next call would be planned in vain as well.
        """
        if self.planner.made_bytes < call.planned_bytes + call.excess_bytes // 2:
            self.planner.watch.is_on = False
            self.tell(
                f"the {format_bytes(call.excess_bytes)} that were allocated beyond the plan "
                f"of {self.name} are not there when such a step is planned again: "
                "something beside it allocates, such as another thread, or what it keeps "
                "hangs on more than the batch. What is allocated is compared with the plan "
                "no more; leave that much room in the budget"
            )

    def _kind_of_call(self, call: "_Call", contents: Contents) -> Any:
        return (
            _kind_of(call.nesting, call.values, contents),
            _switches_of(contents.modules) if self.notes_switches else (),
            call.runs_hooks,
            self.backend.backward_autocast,
            call.gradient_bytes,
            self.planner.optimizer_memory,
            tuple(
                (each.reduces_gradients, each in self.planner.whole_groups)
                for each in self.planner.groups
            ),
            self.planner.waiting_bytes,
        )

    def _plan_varying(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient_bytes: int
    ) -> Plan:
        """Plan the step, or the largest one where sizes vary.

        The tracer knows the sizes that it is given, and not those of what is made
        between graphs. So each shape is judged by what a forward pass of it shows.
        """
        if self.ranges is None:
            return self.plan_step(args, kwargs, gradient_bytes)
        # Graphs that are traced for one size give way to others at the second one.
        self._smaller = self.ranges.smaller(args, kwargs)
        try:
            return self.plan_step(
                *self.ranges.largest(args, kwargs), gradient_bytes=gradient_bytes
            )
        except BudgetError as error:
            if any(isinstance(module, nn.LSTM) for module in self.model.modules()):
                error.args = (f"{error}; {_LAYERS_LEFT_OUT}",)
            raise
        finally:
            self._smaller = []

    def _sizes_seen(self) -> AbstractContextManager[None]:
        """Let the tracer see that sizes vary before it sees the largest step inside."""
        calls, self._smaller = self._smaller, []
        refused: CaptureError | None = None
        for call in calls:
            try:
                self._gathered(*call)
            # Sizes may have to be multiples of something.
            except CaptureError as error:
                refused = error.with_traceback(None)
            else:
                refused = None
                break
        if refused is not None and self.ranges is not None:
            logger.warning(
                "%s cannot be traced at a smaller size that dynamic= allows, %s: %s. The "
                "first call of another size than the largest traces all of it again",
                self.name,
                self.ranges.words_of(*calls[-1]),
                refused,
            )
        backend = cast("RegionBackend", self.backend)
        return backend.measuring_here() if calls else nullcontext()

    def begin_call(self, gradient_bytes: int) -> None:
        """Let the call that is about to run, of the kind seen last, run by its plan."""
        planner, known, kind = self.planner, self._steps_by_kind, self._kind
        self._traced_count = self.backend.training_step_count
        if kind in known:
            *others, step = known[kind]
            # Those that are planned for less come first.
            planner.begin_step(
                step,
                others[::-1],
                self._refused.get(kind, ()),
                takes_any_size=self._failed_counts[kind] > _MOST_PLANS,
            )
        else:
            other = next(reversed(known.values()))[-1]
            planner.begin_step(other.without_plan(gradient_bytes))

    def after_call(self, outputs: Any, *, is_done: bool) -> None:
        """Say, once, that a step took a way that was not planned.

        It is planned before the next call of its kind, with the batch that took it: a
        number that the tracer took for a constant is none any more. A way that depends
        on values may change for ever.
        """
        call, self._call = self._call, None
        running = self.planner.end_step()
        if running is None:
            return
        if is_done:
            self.planner.check_end(running, tensors_in(outputs))
            if not self.planner.loop.holds_outputs:
                self._watch_let_go(running.step, outputs)
        if call is not None:
            self._leave_room(call, running, is_done=is_done)
        if running.unplanned is None and running.excess is None:
            return
        if call is not None:
            if running.excess is not None:
                call.excess_bytes = running.excess_bytes
                call.planned_bytes = running.composed.made_bytes
            self._note_unplanned(call, running.route)
        if running.excess is not None and "excess" not in self.told:
            self.told.add("excess")
            self.tell(
                f"after graph {running.excess - 1} of a step of {self.name} "
                f"{format_bytes(running.excess_bytes)} more were allocated than its plan "
                "says, which its operators do not show: what runs between graphs keeps "
                "more than when it was planned, or something beside the step does. This "
                "step may need more than the budget; such a call is planned again before "
                "the next one"
            )
        if running.unplanned is not None and is_done and "unplanned" not in self.told:
            self.told.add("unplanned")
            logger.warning(
                "a step of %s took another way at graph %d than in its plan: graphs "
                "that are not in it keep nothing, and are computed again in backward; "
                "what runs between them is not measured yet, and this step may need more "
                "than the budget. Such ways are planned before the next such call, up to "
                "%d of them",
                self.name,
                running.unplanned,
                _MOST_PLANS,
            )

    def _watch_let_go(self, step: PlannedStep, outputs: Any) -> None:
        """Warn, once, if outputs are there when backward begins that are to be gone."""
        tensors = tensors_in(outputs)
        if len(tensors) <= max(step.composed.outputs, default=-1):
            return
        watched = HeldOutputs(tensors[position] for position in step.unread_outputs)
        # What the tracer has made refers to itself, and to what it was given.
        was_traced = self.backend.training_step_count > self._traced_count

        def look(_gradients: Any) -> None:
            held_bytes = watched.held_bytes()
            if held_bytes and was_traced:
                gc.collect()
                held_bytes = watched.held_bytes()
            if held_bytes:
                self.backend.tell("held", held_words(held_bytes))

        begin = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        for node in begin[:1]:
            node.register_prehook(look)

    def _leave_room(self, call: "_Call", running: Running, *, is_done: bool) -> None:
        """Let plans of a kind leave room for what its sizes vary by.

        A plan takes all that it may, and graphs that have run keep no less afterwards.
        Where some grow others become smaller: half of what has grown is left, or what
        was missing and a bit.
        """
        plan = running.step.plan
        left_bytes = (plan.budget_bytes or 0) - plan.peak_bytes
        spare_bytes = running.varied_bytes // 2
        if running.short_bytes > 0:
            missing_bytes = left_bytes + running.short_bytes
            spare_bytes = max(spare_bytes, missing_bytes * 5 // 4)
        if spare_bytes <= max(left_bytes, self._spare_bytes.get(call.kind, 0)):
            return
        # Processes that plan together have other sizes, and make the same plans.
        is_alone = self._group_now() is None and not self.planner.groups
        if self._spare_counts[call.kind] == _MOST_SPARE or not is_alone:
            return
        self._spare_counts[call.kind] += 1
        self._spare_bytes[call.kind] = spare_bytes
        if is_done and running.unplanned is None and running.excess is None:
            call.had_plan, call.route = True, running.route
            self._unplanned[call.kind] = call

    def _note_unplanned(self, call: "_Call", route: Route) -> None:
        """Let the way of a call that is over be planned before the next of its kind."""
        now = versions_of(contents_of(self.model).parameters)
        if now != call.parameter_versions:
            self.tell(
                f"a way that a step of {self.name} took writes parameters in its forward "
                "pass, and cannot be planned, as that runs it again. Such steps may need "
                "more than the budget; write parameters outside of the model"
            )
            return
        self._failed_counts[call.kind] += 1
        if self._failed_counts[call.kind] > _MOST_PLANS:
            self.tell(
                f"steps of {self.name} took more than {_MOST_PLANS} ways that were not "
                "planned, and no more are: steps that take another one may need more "
                "than the budget. Those in which only more is made between graphs run by "
                "the plan of a known way; leave room in the budget"
            )
            return
        call.route = route
        self._unplanned[call.kind] = call
        while len(self._unplanned) > _MOST_KEPT:
            del self._unplanned[next(iter(self._unplanned))]


class _OneGraphError(Exception):
    """The call that is about to run was planned as one graph."""

    def __init__(self, whole: FittedModel) -> None:
        super().__init__()
        self.whole = whole


class FittedDeepModel(FittedRegions):
    """A model that is planned block by block as long as all its steps can be.

    Nobody asked for blocks, so a step that they cannot keep the budget with, or cannot
    be made regions of, is planned as one graph; so are then all that come later.

    Parameters
    ----------
    model, request, is_only_planned
        As for :class:`~remat.training.fitted_model.FittedModel`.
    """

    notes_switches = True

    def __init__(
        self, model: nn.Module, request: PlanRequest, *, is_only_planned: bool = False
    ) -> None:
        super().__init__(model, request, is_only_planned=is_only_planned)
        self._is_only_planned = is_only_planned
        self._whole: FittedModel | None = None

    @property
    def regions(self) -> Regions:
        """What are graphs of their own by now."""
        return "blocks" if self._whole is None else "whole"

    def plan_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradient_bytes: int
    ) -> Plan:
        """Plan a step block by block, or as one graph if that cannot be.

        Raises
        ------
        RematError
            If neither can be: for want of memory, the error that names the smaller of
            the two budgets.
        """
        if self._whole is not None:
            return self._whole.plan_step(args, kwargs, gradient_bytes)
        try:
            return super().plan_step(args, kwargs, gradient_bytes)
        except RematError as error:
            # Its traceback holds the frames of all callers, and with them their values.
            reason = error.with_traceback(None)
        optimizer = None if self._optimizer is None else self._optimizer()
        whole = FittedModel(
            self.model,
            replace(self.planner.request, regions="whole", optimizer=optimizer),
            is_only_planned=self._is_only_planned,
        )
        self.share_plans_with(whole)
        try:
            plan = whole.plan_step(args, kwargs, gradient_bytes)
        except RematError as error:
            raise _that_helps_more(reason, error) from None
        logger.warning(
            "%s is planned as one graph, which takes longer, since block by block: %s",
            self.name,
            reason,
        )
        self._whole = whole
        return plan

    def latest_plan(self) -> Plan:
        """Return the plan that was made last.

        Raises
        ------
        CaptureError
            If the last call has none, since it does not train.
        """
        made_by_now = super() if self._whole is None else self._whole
        return made_by_now.latest_plan()

    def forget(self) -> None:
        """Forget all plans, so that what is called next is traced and planned."""
        super().forget()
        self._whole = None

    def set_budget(self, plan: Plan) -> None:
        """Plan whatever comes next anew, within the bytes of ``plan``."""
        super().set_budget(plan)
        if self._whole is not None:
            self._whole.set_budget(plan)

    def before_call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        contents: Contents,
        *,
        runs_hooks: bool,
    ) -> None:
        """Plan a call of a new kind before it runs, if it is not one graph by now."""
        # The first call of a loop, or among other processes, was planned just now.
        if self._whole is not None:
            raise _OneGraphError(self._whole)
        super().before_call(args, kwargs, contents, runs_hooks=runs_hooks)

    def begin_call(self, gradient_bytes: int) -> None:
        """Let the call that is about to run, of the kind seen last, run by its plan."""
        if self._whole is not None:
            raise _OneGraphError(self._whole)
        super().begin_call(gradient_bytes)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        runs_hooks: bool = True,
    ) -> Any:
        """Run the forward pass by its plan; trace and plan it first if it is new."""
        whole = self._whole
        if whole is None:
            try:
                return super().run(args, kwargs, runs_hooks=runs_hooks)
            except _OneGraphError as planned:
                whole = planned.whole
        return whole.run(args, kwargs, runs_hooks=runs_hooks)


def _that_helps_more(by_blocks: RematError, as_one: RematError) -> RematError:
    """Return the error that says more of what would work."""
    if not isinstance(by_blocks, BudgetError):
        return as_one
    if not isinstance(as_one, BudgetError):
        return by_blocks
    return min(by_blocks, as_one, key=lambda error: error.required_bytes)


def _writes_of(values: Sequence[Any]) -> list[tuple[int, int]]:
    """Return where tensors are, and how often each was written."""
    return [
        (storage_identity(v), version_of(v))
        for v in values
        if isinstance(v, torch.Tensor)
    ]


def _kind_of(
    nesting: Any,
    values: Sequence[Any],
    contents: Contents,
) -> tuple[Any, ...]:
    """Return what is equal for calls that run by one plan, of what they read."""
    return (
        nesting,
        *map(_described, values),
        _repeated(values),
        tuple([module.training for module in contents.modules]),
        tuple([parameter.requires_grad for parameter in contents.parameters]),
        autocast_now(),
    )


def _repeated(values: Sequence[Any]) -> tuple[int, ...]:
    """Return where each tensor stands first, ``()`` if each stands once."""
    tensors = [id(value) for value in values if isinstance(value, torch.Tensor)]
    first = {identity: place for place, identity in reversed([*enumerate(tensors)])}
    if len(first) == len(tensors):
        return ()
    return tuple([first[identity] for identity in tensors])


def _switches_of(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return what is switched on in modules, such as what turns checkpoints on."""
    return tuple(
        [
            (index, name, value)
            for index, module in enumerate(modules)
            for name, value in vars(module).items()
            if type(value) is bool
        ]
    )


_PLAIN = bool | int | float | str | None
_UNNESTED = torch.Tensor | _PLAIN


def with_own_containers(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a value with copies of the lists and mappings nested in it.

    What these hold is the same; what is shared among them stays shared.
    """
    known = {} if known is None else known
    if type(value) is tuple:
        return tuple(with_own_containers(each, known) for each in value)
    if not isinstance(value, dict | UserDict | list):
        return value
    if id(value) not in known:
        known[id(value)] = own = copy.copy(cast("Any", value))
        places = own if isinstance(own, dict | UserDict) else range(len(own))
        for place in list(places):
            own[place] = with_own_containers(own[place], known)
    return known[id(value)]


def _flat(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], tuple[Any, ...]]:
    """Return what a call is given in one list, and how it is nested."""
    values = [*args, *kwargs.values()]
    if all(isinstance(value, _UNNESTED) for value in values):
        return values, (len(args), *kwargs)
    values, structure = tree_flatten((args, kwargs))
    return values, (str(structure),)


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    return (type(value), value if isinstance(value, _PLAIN) else None)
