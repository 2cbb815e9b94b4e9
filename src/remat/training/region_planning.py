"""Plan the graphs of a model that the tracer splits, all under one budget."""

import hashlib
import math
import operator
import time
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer

from remat.capture.autocast import Autocast, autocast_again, autocast_now
from remat.capture.gathering import (
    AS_PLANNED,
    Between,
    Gathering,
    MoreThanPlanned,
    NodesBetween,
    RegionCode,
    Route,
    SeenRegion,
    all_within,
)
from remat.capture.joint_program import HELD_OUTPUT, JointProgram
from remat.capture.outputs import FakeOutputs, fakes_like
from remat.capture.returned import is_loss, loss_in
from remat.capture.surroundings import FREES_TANGENTS, add_surroundings, tensors_in
from remat.capture.varying_sizes import Sizes, is_symbol, symbolic_value
from remat.core.errors import BudgetError, CaptureError
from remat.core.graph import Role, TrainingGraph
from remat.core.liveness import BOUNDARY, kept_for_backward
from remat.core.platform import single_device
from remat.core.problem import Limits, Objective, Problem
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.core.units import format_bytes, is_percentage, parse_budget
from remat.planning.one_device import one_budget, plan_graph
from remat.planning.plan import Plan
from remat.planning.plan_cache import (
    PlanCall,
    planned_if_named,
    planned_once,
    step_digest,
)
from remat.planning.region_program import Fronts, RegionProgram
from remat.planning.region_reruns import plan_with_reruns
from remat.planning.regions import (
    ComposedStep,
    EagerBackward,
    EagerForward,
    EagerWork,
    Parts,
    Region,
    RegionOrder,
    Slot,
    compose,
    frugal_needs,
    frugal_order,
    growth_bytes,
    plan_regions,
)
from remat.planning.replanning import at_sizes
from remat.planning.several_devices import Budget
from remat.profile.allocations import Recording
from remat.profile.costing import with_costs
from remat.profile.eager_parts import (
    BackwardOrder,
    backward_order,
    eager_forwards,
    left_behind,
)
from remat.profile.gathered_parameters import (
    ChosenToKeep,
    GatheredBackward,
    held_for,
    leave_out,
)
from remat.profile.known import KnownCosts
from remat.profile.live_memory import Watch
from remat.profile.optimizer_memory import LossMemory, assumed_loss_bytes
from remat.profile.optimizers_in_backward import OptimizerMemory
from remat.runtime.remade import RemadeValues
from remat.torch_compat.accelerators import is_accelerator
from remat.torch_compat.attributes import storage_identity
from remat.torch_compat.metadata import may_be_one_zero, outputs_of_tangents
from remat.torch_compat.names import FakeTensorMode, tree_map
from remat.torch_compat.sharding import Gathered, GatheredGroup, gathering_alone
from remat.training.request import PlanRequest
from remat.training.same_plan import session_now
from remat.training.sized_plans import SizedStep, have_same_ops
from remat.training.step_planning import (
    PlanKey,
    Planner,
    accept_plan,
    outside_of_tracing,
)

_HOW = {
    "auto": ": its blocks, as the model is deep",
    "blocks": ": its blocks",
    "breaks": ": what the tracer splits it into",
}

_SOLVING_SHARE = 2 / 3
"""How much of the time that is left one search may take: others may have to follow."""

_LEAST_S = 0.001
"""What a search is given after the end, as none may be given no time."""

FRUGAL = 0
"""Number of the order that keeps nothing, in which graphs run that have no plan."""


_NEEDED_PER_BYTE = 2
"""How many bytes may be needed for each that is made or kept between graphs: an LSTM
makes gradients of the gates that it keeps."""

_NOISE_BYTES = 2 << 20
_NOISE_SHARE = 100
"""How much more than planned may be live during forward, in bytes and as a part of the
budget: heads of blocks and objects of Python."""

_NODE_BYTES = 1 << 10
"""And for each operator in no graph, of which autograd keeps a node: 830 to 950 bytes
were seen for each step of a recurrent layer's loop."""

_SET_UP_BYTES = 512 << 10
_SET_UP_OP_BYTES = 16 << 10
"""How much more for each graph that runs for the first time, which sets up what stays:
2 to 4 MB were seen for 9 to 37 graphs."""

_MOST_GROWN = 4096
"""How many pairs of graphs that differ in sizes are remembered."""

_NOTHING_TO_PLAN = (
    "no graph of the model computes anything that backward goes through, but views at "
    "most, so there is nothing to plan: name modules that compute in regions=, or leave "
    "it out"
)


@dataclass(frozen=True, kw_only=True)
class RegionChoice:
    """How one region of a step runs: a number for each order of a graph."""

    code: RegionCode
    number: int
    order: RegionOrder | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """The regions of one kind of step in order.

    Parameters
    ----------
    plan, choices, composed, schedule
        The plan, how each region runs by it, the step that it is of, and the order in
        which that step's ops run then.
    between
        What runs before each region, and after the last.
    kept
        Groups of gathered parameters, and whether each stays whole between its passes.
    held_bytes
        What is live when forward begins, after each region, and when forward ends.
    backward_bytes
        Most bytes in the backward passes of the regions before each, and of all, less
        the gradients that later ones have left by then.
    peak_bytes
        The peak of that order.
    short_bytes
        How much more than the budget its plan needs at the sizes that it has now, if it
        keeps nothing from some graph on for that.
    turns
        What is known of steps that begin like this one and turn to another way after so
        many regions: the step, or else what it needs.
    """

    plan: Plan
    choices: tuple[RegionChoice, ...]
    between: list[Between]
    composed: ComposedStep
    schedule: Schedule
    held_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    peak_bytes: int
    short_bytes: int = 0
    kept: Mapping[GatheredGroup, bool] = field(
        default_factory=dict[GatheredGroup, bool]
    )
    turns: "dict[tuple[int, PlannedStep], PlannedStep | int | None]" = field(
        default_factory=dict[Any, Any], repr=False
    )

    @cached_property
    def eager_count(self) -> int:
        """How many operators are in no graph."""
        return self.composed.origins.count(None)

    @cached_property
    def unread_outputs(self) -> tuple[int, ...]:
        """The positions of outputs that the schedule does not keep for backward."""
        kept = kept_for_backward(self.composed.graph, self.schedule)
        outputs = self.composed.outputs.items()
        return tuple(position for position, s in outputs if s not in kept)

    @property
    def room_bytes(self) -> int:
        """How much more may be made and kept between graphs than was planned."""
        left_bytes = max(0, (self.plan.budget_bytes or 0) - self.peak_bytes)
        return left_bytes // _NEEDED_PER_BYTE

    @property
    def route(self) -> Route:
        """Which graphs run, and what runs between them."""
        codes = [choice.code for choice in self.choices]
        return Route(codes=codes, between=self.between)

    def without_plan(self, gradient_bytes: int) -> "PlannedStep":
        """Return a step of which no region is planned, onto so many gradients."""
        before = self.held_bytes[0] + gradient_bytes
        return replace(
            self,
            choices=(),
            between=[],
            held_bytes=(before,),
            backward_bytes=(0,),
            turns={},
        )


@dataclass
class Running:
    """A step whose forward pass runs now.

    Parameters
    ----------
    step, others
        The plan that it began with or turned to, and other ways that it may turn to.
    refused
        Ways that do not fit the budget, and the bytes that these need.
    takes_any_size
        Whether what runs between graphs may make more than was planned.
    unplanned
        Its first region that is in no plan.
    set_up_bytes
        What may be allocated for the code of those regions that ran for the first time.
    excess, excess_bytes
        After how many regions more than planned was live, if it was too much, and how
        much more.
    """

    step: PlannedStep
    others: Sequence[PlannedStep] = ()
    refused: Sequence[tuple[Route, int]] = ()
    takes_any_size: bool = False
    route: Route = field(default_factory=Route)
    # Of what ran between graphs so far.
    more: MoreThanPlanned = AS_PLANNED
    # The step with the sizes that its first regions have had in this call, how many
    # these are, and how much more than planned the others have together.
    composed: ComposedStep = field(init=False)
    sized_count: int = 0
    grown_bytes: int = 0
    # How much more than planned all have that have more, and how much more than the
    # budget it would have needed by the plan of its way.
    varied_bytes: int = 0
    short_bytes: int = 0
    unplanned: int | None = None
    set_up_bytes: int = 0
    excess: int | None = None
    excess_bytes: int = 0
    # Without a plan: what is held before the next region.
    held_bytes: int = 0
    backward_bytes: int = 0
    # What the caller set of gathered parameters.
    let_go: dict[GatheredGroup, bool] = field(default_factory=dict[GatheredGroup, bool])

    def __post_init__(self) -> None:
        self.composed = self.step.composed

    @cached_property
    def remade(self) -> RemadeValues:
        """What the step does not keep for backward, and makes again."""
        return RemadeValues()

    def room_bytes(self, way: PlannedStep) -> float:
        """Return how much more than planned may be made between graphs of a way."""
        if self.takes_any_size:
            return math.inf
        grown_bytes = self.grown_bytes if way is self.step else 0
        return max(0, way.room_bytes - grown_bytes // _NEEDED_PER_BYTE)

    def more_bytes(self, way: PlannedStep) -> int:
        """Return what may be needed for what was made between graphs beyond a way."""
        if self.takes_any_size:
            return 0
        more, most_bytes = AS_PLANNED, 0
        for found, planned in zip(self.route.between, way.between, strict=False):
            more = more.then(found, planned)
            most_bytes = max(most_bytes, more.size_bytes)
        return _NEEDED_PER_BYTE * most_bytes

    def turn_to(self, step: PlannedStep, composed: ComposedStep) -> None:
        """Go on as a way that began like this step."""
        self.step, self.composed = step, composed
        self.sized_count, self.grown_bytes = len(self.route.codes), 0
        self.more = AS_PLANNED
        for found, planned in zip(self.route.between, step.between, strict=False):
            self.more = self.more.then(found, planned)


@dataclass(frozen=True, kw_only=True)
class _SeenStep:
    """What the forward passes for planning showed of a step."""

    gathering: Gathering
    backward: BackwardOrder
    regions: Sequence[Region]
    between: Mapping[int, EagerForward]
    held: Mapping[int, int]
    left: frozenset[int]
    # Blocks of what the model returns, but for its loss, by position.
    outputs: Mapping[int, int]
    gathered: frozenset[int]
    choice: ChosenToKeep
    # The step that was composed last, by the groups that stay whole in it.
    composed: dict[frozenset[GatheredGroup], tuple[JointProgram, ComposedStep]] = field(
        default_factory=dict[
            frozenset[GatheredGroup], tuple[JointProgram, ComposedStep]
        ]
    )

    def last_kept(self) -> list[frozenset[GatheredGroup]]:
        """Return the last groups, from none to all of which either may be chosen."""
        groups = self.choice.groups
        return [frozenset(groups[first:]) for first in range(len(groups), -1, -1)]


class RegionPlanner(Planner):
    """Plans the graphs of a model that the tracer splits, all under one budget.

    Attributes
    ----------
    gathering
        What the forward pass for planning has shown so far, while it runs.
    """

    # The step that is planned now.
    _composed: ComposedStep

    def __init__(
        self,
        model: nn.Module | None,
        request: PlanRequest,
        optimizer_memory: OptimizerMemory,
        *,
        is_only_planned: bool = False,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__(
            model,
            request,
            optimizer_memory,
            is_only_planned=is_only_planned,
            optimizer=optimizer,
        )
        self.gathering: Gathering | None = None
        self.running: Running | None = None
        # The operator for which there was no graph of what holds it.
        self.left_out: str | None = None
        self.watch = Watch()
        # What plans are to leave of the budget, as sizes vary.
        self.spare_bytes = 0
        # Of the forward pass that runs now.
        self.between = NodesBetween(model)
        # Of each graph its analysis, and the orders in which it runs by their numbers.
        self.programs: weakref.WeakKeyDictionary[RegionCode, JointProgram] = (
            weakref.WeakKeyDictionary()
        )
        # By trace, the orders in which it runs, and for which sizes these came first.
        self._orders: weakref.WeakKeyDictionary[
            RegionCode, dict[RegionOrder, Sizes]
        ] = weakref.WeakKeyDictionary()
        self._graphs: dict[str, TrainingGraph] = {}
        # Pairs of a planned graph and one called in its place.
        self._grown: dict[tuple[RegionCode, RegionCode], int | None] = {}
        self._sized_by_trace: weakref.WeakKeyDictionary[RegionCode, SizedStep] = (
            weakref.WeakKeyDictionary()
        )
        # Where sizes vary, those whose operators were measured.
        self._sized_regions: list[SizedStep] = []
        self._fronts: Fronts = {}
        self._outputs: Any = None
        # Parameters in pieces, how the forward pass gathered them, those that are whole
        # between steps, and the bytes of gradients that wait since the step before.
        self.groups: list[GatheredGroup] = []
        self.whole_groups: list[GatheredGroup] = []
        self.waiting_bytes = 0
        self.gathered = Gathered()
        # Those among them that stay whole between their passes, once that is decided.
        self._decided: frozenset[GatheredGroup] | None = None
        # What the backward pass of the step that is planned is called under.
        self.backward_autocast: tuple[Autocast, ...] = ()
        # What of the time limit it took to decide what stays gathered.
        self._decided_in_s = 0.0

    # --- planning ----------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        first = None if self.model is None else next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def words_of_left_out(self) -> str:
        """Return why a part has no graph, and what to do."""
        return (
            f"sizes or numbers depend on values ({self.left_out}), as in the gradient of "
            "x[mask] = values. Write torch.where(mask.unsqueeze(-1), values, x), or put "
            "that line into a function of its own under torch.compiler.disable"
        )

    def plan_seen(self, outputs: Any, recording: Recording) -> PlannedStep:
        """Plan the step whose forward pass was just gathered.

        Parameters
        ----------
        outputs
            What the model returned.
        recording
            What one more forward pass allocated, with marks at the borders of regions.

        Raises
        ------
        CaptureError
            If it does not train, or a part of it in no graph cannot be measured.
        BudgetError
            If no schedule fits; names the smallest known budget.
        """
        gathering = self.gathering
        if gathering is None or not gathering.seen:
            msg = (
                "the tracer made no graph of the model: it leaves out functions that "
                "break the graph in a loop, and functions that are given or read a "
                "sparse tensor. Move what breaks it into a function of its own that "
                "these call; decorate it with torch.compiler.disable if it reads such. Or "
                "let the modules that the loop calls be graphs, and the loop run as it is: "
                "regions='blocks', or a list of their names"
            )
            if self.left_out is not None:
                msg = f"there is no graph of the model: {self.words_of_left_out()}"
            raise CaptureError(msg)
        with outside_of_tracing():
            self._outputs = outputs
            try:
                seen = self._seen_step(gathering, recording)
                plan, kept = self._plan_and_kept(seen)
                self.latest = plan
                self.planned_s = time.monotonic()
            finally:
                self._outputs = None
        step = self._chosen(gathering, plan)
        return replace(
            step, kept={group: group in kept for group in seen.choice.groups}
        )

    def _plan_and_kept(self, seen: _SeenStep) -> tuple[Plan, frozenset[GatheredGroup]]:
        """Return a plan of the step, and which gathered parameters stay whole in it."""
        kept = as_set = seen.choice.kept
        program = self._compose(seen, as_set)
        if self._decided is not None:
            kept = self._decided.intersection(seen.choice.groups)
            program = self._compose(seen, kept)
        key = self._key_of(program.fingerprint, self.gradient_bytes)
        plan = self._plan_that_holds(program, key)
        if plan is not None:
            self.plans[key] = plan
            return plan, kept
        request, is_decided = self.request, True
        self._decided_in_s = 0.0
        try:
            if request.given_plan is not None:
                kept = self._kept_in(request.given_plan, seen)
            elif self._decided is None and self._may_decide(seen):
                # A percentage is one of the step as the caller set it.
                program = self._compose(seen, as_set)
                self.request = replace(request, budget=self._budget_bytes())
                kept = self._agreed(seen)
            else:
                is_decided = False
            program = self._compose(seen, kept)
            plan = self.with_allocator(self.make_plan(program), program)
        finally:
            self.request = request
        if is_decided:
            self._decided = kept
        self.planned_count += 1
        self.plans[self._key_of(program.fingerprint, self.gradient_bytes)] = plan
        return plan, kept

    def _may_decide(self, seen: _SeenStep) -> bool:
        """Whether what stays gathered is decided now, in all processes alike.

        They gather together, so no process may decide for itself.
        """
        is_alone = all(group.world_size == 1 for group in seen.choice.groups)
        return (
            bool(seen.choice.groups)
            and self.request.solver == "auto"
            and (is_alone or session_now() is not None)
        )

    def _agreed(self, seen: _SeenStep) -> frozenset[GatheredGroup]:
        """Return which gathered parameters stay whole, in all processes the same."""
        groups = seen.choice.groups

        def chosen() -> list[int]:
            began_s = time.monotonic()
            kept = self._quickest(seen, self._limits().share(_SOLVING_SHARE))
            self._decided_in_s = time.monotonic() - began_s
            return [number for number, group in enumerate(groups) if group in kept]

        session = session_now()
        facts = {"weights that may stay gathered": f"{len(groups)} groups"}
        numbers = chosen() if session is None else session.choose(facts, chosen)
        return frozenset(groups[number] for number in numbers)

    def _limits(self) -> Limits:
        """Return limits that end when what is left of the time limit is over."""
        limit_s = self.request.time_limit
        if limit_s is not None:
            limit_s = max(0.0, limit_s - self._decided_in_s)
        return Limits.after(limit_s, self.request.seed)

    def _kept_in(self, given: Plan, seen: _SeenStep) -> frozenset[GatheredGroup]:
        """Return which gathered parameters stay whole in a given plan, if it fits."""
        as_set = seen.choice.kept
        for kept in [as_set, *seen.last_kept()]:
            if self._compose(seen, kept).fingerprint == given.fingerprint:
                return kept
        return as_set

    def _quickest(self, seen: _SeenStep, limits: Limits) -> frozenset[GatheredGroup]:
        """Return which gathered parameters stay whole in the quickest step found.

        Of parameters of one size, it is those of the last modules that are kept: they
        are there for the shortest time. How many is found by a search that takes times
        for convex in it, as what is computed again for each more grows. Where no two
        regions are alike it is all or those that the caller set.
        """
        as_set, candidates = seen.choice.kept, seen.last_kept()
        budget_bytes = self._budget_bytes()
        self._compose(seen, candidates[-1])
        if self._composed.everything[1].peak_bytes[0] <= budget_bytes:
            return candidates[-1]
        if not RegionProgram(step=self._composed).repeats:
            return as_set
        costs: dict[frozenset[GatheredGroup], float] = {}

        def cost_of(kept: frozenset[GatheredGroup]) -> float:
            if kept not in costs:
                costs[kept] = self._least_cost(seen, kept, budget_bytes, limits)
            return costs[kept]

        least, most = 0, len(candidates) - 1
        while most - least > 2:
            one = least + (most - least) // 3
            other = most - (most - least) // 3
            if cost_of(candidates[one]) <= cost_of(candidates[other]):
                most = other
            else:
                least = one
        best = min([as_set, *candidates[least : most + 1]], key=cost_of)
        # An error is to name the smallest budget.
        return best if cost_of(best) < math.inf else candidates[0]

    def _least_cost(
        self,
        seen: _SeenStep,
        kept: frozenset[GatheredGroup],
        budget_bytes: int,
        limits: Limits,
    ) -> float:
        """Return the time of the quickest step that the program of regions finds."""
        graph = self._compose(seen, kept).graph
        platform = single_device(budget_bytes, kind=graph.device_kinds[0])
        found = RegionProgram(step=self._composed, fronts=self._fronts).solve(
            Problem(graph=graph, platform=platform),
            limits,
            self.request.progress,
        )
        if found.schedule is None:
            return math.inf
        return simulate(graph, platform, found.schedule).serial_ns

    def _budget_bytes(self) -> int:
        """Return the budget; a percentage is of the step that was composed last."""
        budget = one_budget(self.request.budget, self.request.platform)
        if is_percentage(budget):
            _, trace = self._composed.everything
            return parse_budget(budget, whole_bytes=trace.peak_bytes[0])
        return parse_budget(budget)

    def _plan_that_holds(self, program: JointProgram, key: PlanKey) -> Plan | None:
        """Return a known plan of the step, if its schedule keeps the budget now.

        Of equal graphs, what happens between them may have other sizes. Where the sizes
        of a call vary, those of the graphs may be others as well.
        """
        known = self.plans.get(key)
        if known is not None and known.graph == program.graph:
            return known
        others = [] if self.request.dynamic is None else self.plans.values()
        for plan in filter(None, (known, *others)):
            if have_same_ops(plan.graph, program.graph):
                found = at_sizes(plan, self._graph_for(plan, program))
                if found is not None:
                    return replace(found, fingerprint=program.fingerprint)
        return None

    def _graph_for(self, plan: Plan, program: JointProgram) -> TrainingGraph:
        """Return the step in which what a plan runs again may do so."""
        has_reruns = self._composed.has_reruns(plan.schedule)
        return self._composed.with_reruns.graph if has_reruns else program.graph

    def _compose(self, seen: _SeenStep, kept: frozenset[GatheredGroup]) -> JointProgram:
        """Return the whole step as far as planning needs it, surroundings included.

        In it these gathered parameters stay whole between their passes.
        """
        if kept not in seen.composed:
            seen.composed.clear()
            seen.composed[kept] = self._composition(seen, kept)
        program, self._composed = seen.composed[kept]
        return program

    def _composition(
        self, seen: _SeenStep, kept: frozenset[GatheredGroup]
    ) -> tuple[JointProgram, ComposedStep]:
        name = "step" if self.model is None else type(self.model).__name__
        gathering = seen.gathering
        parts = self._parts(seen, kept)
        composed = compose(name, parts, frees_tangents=FREES_TANGENTS)
        programs = [each.program for each in gathering.seen]
        first = programs[0]
        # Graphs that hold no tensor, or the CPU's alone, say nothing of the step.
        devices = [each.device for each in programs if is_accelerator(each.device)]
        program = JointProgram(
            module=first.module,
            graph=composed.graph,
            op_nodes=[None] * len(composed.graph.ops),
            base_nodes=[],
            storages_of={},
            forward_values=[],
            backward_values=[],
            random_states={},
            unchecked_inputs=frozenset(),
            device=devices[0] if devices else first.device,
            fingerprint=_fingerprint(gathering, composed),
            given_storages=frozenset(
                block for seen in gathering.seen for block in seen.given.values()
            ),
            autocast=autocast_now(),
            loss=0 if is_loss(loss_in(self._outputs)) else None,
            returned_storages=frozenset(composed.outputs.values()),
        )
        modules = [each.module for each in programs]
        surroundings = self.surroundings(program, modules=modules)
        program = add_surroundings(program, surroundings)
        return program, composed.surrounded(program.graph)

    def _begins_backward(self) -> list[torch.Tensor]:
        """Return the outputs of which the caller's loss is computed, or is one."""
        outputs = tensors_in(self._outputs)
        if self.loss is not None and self.model is not None:
            fakes = self.example_outputs(self.model, self.batch)
            taken = self.memory_of_loss(self.loss, fakes).taken
            return [outputs[position] for position in sorted(taken)]
        loss = loss_in(self._outputs)
        return [loss] if is_loss(loss) else outputs

    def _seen_step(self, gathering: Gathering, recording: Recording) -> _SeenStep:
        begin = self._begins_backward()
        with (
            torch.enable_grad(),
            autocast_again(self.backward_autocast),
            gathering_alone(self.groups),
        ):
            gathered = leave_out(gathering, self.groups)
            backward = backward_order(
                gathering,
                begin,
                self.has_gradient,
                self.step_bytes_of,
                partial(held_for, self.groups),
            )
        if not any(isinstance(each, int) for each in backward.order):
            raise CaptureError(
                _NOTHING_TO_PLAN
                if any(tensor.requires_grad for tensor in begin)
                else f"the model does not train: no tensor in the "
                f"{type(self._outputs).__name__} that it returns depends on a parameter "
                "that requires a gradient; check requires_grad and torch.no_grad, and "
                "return tensors alone or in tuples, lists and dicts"
            )
        count = len(gathering.seen)
        loss = loss_in(self._outputs)
        outputs = {
            position: gathering.note_eager(tensor, count)
            for position, tensor in enumerate(tensors_in(self._outputs))
        }
        left, kept = left_behind(gathering, tensors_in(self._outputs), backward)
        between = eager_forwards(gathering, recording)
        choice = ChosenToKeep(gathering, self.gathered, between)
        # What autograd keeps as well is held no longer than that, if not returned.
        held = dict.fromkeys([*outputs.values(), *gathering.stay, *kept], count)
        for block, last in gathering.held.items():
            held.setdefault(block, -1 if block in backward.saved else last)
        return _SeenStep(
            gathering=gathering,
            backward=backward,
            regions=[
                self._region(seen, backward, gathering.changed)
                for seen in gathering.seen
            ],
            between=between,
            held=held,
            left=left,
            outputs={
                position: outputs[position]
                for position, tensor in enumerate(tensors_in(self._outputs))
                if tensor is not loss
            },
            gathered=gathered,
            choice=choice,
        )

    def _parts(self, seen: _SeenStep, kept: frozenset[GatheredGroup]) -> Parts:
        sharding = GatheredBackward(
            seen.backward,
            seen.gathering,
            self.gathered,
            seen.between,
            seen.choice,
            kept,
        )
        return Parts(
            regions=seen.regions,
            between=seen.between,
            backward=_with_steps(sharding.parts(), seen),
            held={**seen.held, **seen.choice.held(kept)},
            returned=seen.backward.returned,
            leaves=seen.backward.leaves,
            gathered=seen.gathered,
            stay=frozenset(sharding.stay),
            left=seen.left,
            outputs=seen.outputs,
        )

    def _region(
        self, seen: SeenRegion, backward: BackwardOrder, changed: Set[int]
    ) -> Region:
        program, node = seen.program, seen.node
        slots: dict[int, int] = {}
        gradients: list[tuple[int, int]] = []
        one_zeros: set[int] = set()
        views: set[int] = set()
        if node is not None:
            positions = outputs_of_tangents(program.module.graph)
            for tangent, position in positions.items():
                (storage,) = program.storages_of[tangent]
                slots[storage] = backward.slot(node, position)
                if may_be_one_zero(tangent):
                    one_zeros.add(storage)
            # Sizes are inputs as well, and autograd knows of tensors alone.
            inputs = program.module.graph.find_nodes(op="placeholder")
            gradients_of_tensors = (
                gradient
                for given, gradient in zip(
                    inputs, program.backward_values, strict=False
                )
                if not is_symbol(symbolic_value(given))
            )
            for (following, number), value in zip(
                node.next_functions, gradients_of_tensors, strict=False
            ):
                if following is not None and isinstance(value, fx.Node):
                    found = program.storages_of[value]
                    gradients += [(backward.slot(following, number), s) for s in found]
                    views.update(s for s in found if value not in program.base_nodes[s])
        blocks = {**seen.given, **seen.made}
        return Region(
            graph=self._graph_of(seen.code),
            given=seen.given,
            made=seen.made,
            changed=frozenset(n for n, block in blocks.items() if block in changed),
            slots=slots,
            gradients=gradients,
            one_zeros=frozenset(one_zeros),
            views=frozenset(views),
            handed_over=frozenset(
                storage
                for op in program.piece_ops
                for storage in program.graph.ops[op].reads
            ),
            outputs=frozenset(
                number
                for number, op in enumerate(program.graph.ops)
                if op.non_recomputable == HELD_OUTPUT
            ),
        )

    def loss_memory(self, program: JointProgram) -> LossMemory:
        """Return what the caller's loss may need beyond the outputs."""
        if self.loss is None and program.loss is None:
            outputs = tensors_in(self._outputs)
            return assumed_loss_bytes(t for t in outputs if t.requires_grad)
        return super().loss_memory(program)

    def _costed(self, program: JointProgram) -> TrainingGraph:
        """Return a region's graph with what its operators cost."""
        found = self._graphs.get(program.fingerprint) or self._costed_larger(program)
        if found is None:
            request = self.request
            home, place = self.home_of(program)
            with outside_of_tracing():
                found = with_costs(
                    program,
                    request.costs,
                    request.progress,
                    known=KnownCosts.of(request.platform, home),
                    place=place,
                    is_alone=True,
                )
            if request.dynamic is not None:
                self._sized_regions.append(SizedStep.of(program, found))
        self._graphs[program.fingerprint] = found
        return found

    def _costed_larger(self, program: JointProgram) -> TrainingGraph | None:
        """Return a region's graph with the costs of the same at larger sizes."""
        for sized in self._sized_regions:
            smaller = sized.program_like(program)
            if smaller is not None:
                return sized.with_costs(smaller.graph, sized.graph)
        return None

    def make_plan(self, program: JointProgram) -> Plan:
        """Return a new plan of a step of several graphs, or the given one."""
        request, given = self.request, self.request.given_plan
        if given is not None:
            graph = self._graph_for(given, program)
            if request.dynamic is not None and _are_alike(given.graph, graph):
                # Traced for all sizes at once, a step has another fingerprint.
                given = replace(given, fingerprint=program.fingerprint)
            return accept_plan(replace(program, graph=graph), given)

        budget = one_budget(request.budget, request.platform)
        session = session_now()
        if session is None:
            return self._solve_regions(program, program.graph, budget)
        return session.plan(
            program.graph,
            self.step_facts(program),
            budget,
            partial(self._solve_regions, program),
        )

    def _solve_regions(
        self, program: JointProgram, graph: TrainingGraph, budget: int | str
    ) -> Plan:
        """Return a plan of a step of several graphs with its costs."""
        request, limits = self.request, self._limits()
        composed = replace(self._composed, graph=graph)
        own = RegionProgram(step=composed, fronts=self._fronts)
        leading = own if own.repeats else None

        settings = {
            "torch": torch.__version__,
            "costs": request.costs,
            "graphs": own.description(_HOW.get(str(request.regions), "")),
        }

        def solve(budget: Budget | None) -> Plan:
            left_s = limits.share(_SOLVING_SHARE).remaining_s
            return plan_graph(
                graph,
                budget=budget,
                fingerprint=program.fingerprint,
                solver=request.solver,
                objective=Objective(request.objective),
                time_limit=None if left_s is None else max(_LEAST_S, left_s),
                gap=request.gap,
                seed=request.seed,
                progress=request.progress,
                has_assumed_loss=request.loss is None and program.loss is None,
                settings=settings,
                leading=leading,
            )

        if is_percentage(budget):
            _, trace = composed.everything
            budget = parse_budget(budget, whole_bytes=trace.peak_bytes[0])
        spare_bytes = self.spare_bytes
        if spare_bytes:
            budget = parse_budget(budget)
        call = PlanCall(
            graph=graph,
            budget=budget,
            fingerprint=program.fingerprint,
            settings=settings,
            asked={
                **request.solving,
                "regions": step_digest(composed),
                **({"spare": str(spare_bytes)} if spare_bytes else {}),
            },
            parts=partial(step_digest, composed, with_costs=False),
        )

        def make() -> Plan:
            return plan_regions(composed, solve, budget, spare_bytes=spare_bytes)

        try:
            return planned_once(call, make, request.progress)
        except BudgetError as error:
            # Deep models that nobody asked to be split are one graph then. Parameters
            # in pieces are gathered for each region's own backward pass only.
            is_asked_for = request.regions not in ("auto", "breaks")
            if not is_asked_for or self.groups or request.solver != "auto":
                raise
            again = partial(
                plan_with_reruns,
                own,
                error,
                fingerprint=program.fingerprint,
                settings=settings,
                limits=limits,
                progress=request.progress,
            )
            if not own.step.reruns:
                return again()
            return planned_if_named(
                replace(call, graph=own.step.with_reruns.graph), again
            )

    def example_outputs(self, model: nn.Module, batch: Any) -> FakeOutputs:  # noqa: ARG002
        """Return what the gathered forward pass returned, made of fake tensors."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.enable_grad():
            made, bases = fakes_like(tensors_in(self._outputs), mode)
        remaining = iter(made)
        value = tree_map(
            lambda leaf: next(remaining) if isinstance(leaf, torch.Tensor) else leaf,
            self._outputs,
        )
        leaves = [*(fake for fake in made if fake.is_leaf), *bases]
        return FakeOutputs(value=value, tensors=made, leaves=leaves, mode=mode)

    def _chosen(self, gathering: Gathering, plan: Plan) -> PlannedStep:
        """Return how each region runs by a plan of the whole step."""
        composed = replace(self._composed, graph=plan.graph)
        orders = composed.region_orders(plan.schedule, plan.trace)
        choices: list[RegionChoice] = []
        for seen, order in zip(gathering.seen, orders, strict=True):
            backward_count = (
                len(seen.program.graph.ops) - seen.program.graph.forward_count
            )
            if backward_count and order.order[-1] == BOUNDARY:
                # Autograd does not come to it.
                choices.append(RegionChoice(code=seen.code, number=FRUGAL))
                continue
            choices.append(self._choice(seen.code, order))
        return PlannedStep(
            plan=plan,
            choices=tuple(choices),
            between=gathering.between,
            composed=composed,
            schedule=plan.schedule,
            held_bytes=composed.held_bytes(plan.schedule, plan.trace),
            backward_bytes=composed.backward_bytes(plan.schedule, plan.trace),
            peak_bytes=plan.trace.peak_bytes[0],
        )

    def program_of(self, code: RegionCode) -> JointProgram:
        """Return the analysis of a graph, at its sizes."""
        if code not in self.programs:
            self.programs[code] = self._sized_step(code).program_at(code.sizes)
        return self.programs[code]

    def _sized_step(self, code: RegionCode) -> SizedStep:
        """Return what is known of a graph at the sizes at which it was traced."""
        trace = code.trace
        if trace not in self._sized_by_trace:
            program = self.programs[trace]
            sized = SizedStep.of(program, self._costed(program))
            self._sized_by_trace[trace] = sized
        return self._sized_by_trace[trace]

    def _graph_of(self, code: RegionCode) -> TrainingGraph:
        """Return a graph with what its operators cost, at its sizes."""
        program = self.program_of(code)
        if code.traced is None:
            return self._costed(program)
        sized = self._sized_step(code)
        # Costs of what was traced for few sizes may be those of larger ones already.
        larger = None if sized.covers(code.sizes) else self._costed_larger(program)
        return larger or sized.with_costs(program.graph, sized.graph)

    def _choice(self, code: RegionCode, order: RegionOrder | None) -> RegionChoice:
        """Return the choice to run a graph in an order, under that order's number."""
        if order is None:
            return RegionChoice(code=code, number=FRUGAL)
        known = self._orders.setdefault(code.trace, {})
        if order not in known:
            # Elsewhere fullest at other sizes: at most the memory that is planned, and
            # nothing is compiled again.
            whole = replace(order, fullest=frozenset())
            alike = (
                each
                for each, sizes in known.items()
                if sizes != code.sizes and replace(each, fullest=frozenset()) == whole
            )
            order = next(alike, order)
            known.setdefault(order, code.sizes)
        number = FRUGAL + 1 + [*known].index(order)
        return RegionChoice(code=code, number=number, order=order)

    def gradient_bytes_now(self, inputs: Sequence[Any]) -> int:
        """Return the bytes of the gradients that earlier passes left, and of buckets.

        Some are whole where parameters are in pieces.
        """
        found_bytes = super().gradient_bytes_now(inputs)
        if self.plans_ahead:
            return found_bytes
        whole = {
            storage_identity(gradient): gradient.nbytes
            for group in self.groups
            for gradient in group.whole_gradients
        }
        return found_bytes + sum(whole.values())

    @property
    def made_bytes(self) -> int:
        """The bytes of all that the step has that was planned last."""
        return self._composed.made_bytes

    def note_groups(self, groups: list[GatheredGroup]) -> None:
        """Note parameters in pieces, and what of them is whole as a step begins."""
        self.groups = groups
        self.whole_groups = [group for group in groups if group.stays_gathered]
        self.waiting_bytes = (
            sum(each.nbytes for each in groups[0].waiting) if groups else 0
        )

    def ahead_bytes(self, program: JointProgram) -> int:
        """Return the bytes of batches loaded ahead, and of what stays whole of weights.

        These, and gradients that wait, count by themselves, and all the time: whether
        they are gathered again in a step hangs on what the one before has left.
        """
        kept = sum(group.gathered_bytes for group in self.whole_groups)
        return super().ahead_bytes(program) + kept + self.waiting_bytes

    # --- running -----------------------------------------------------------------

    @property
    def region_count(self) -> int:
        """How many regions of the step that runs now have begun."""
        if self.gathering is not None:
            return len(self.gathering.seen)
        return 0 if self.running is None else len(self.running.route.codes)

    def begin_step(
        self,
        step: PlannedStep,
        others: Sequence[PlannedStep] = (),
        refused: Sequence[tuple[Route, int]] = (),
        *,
        takes_any_size: bool = False,
    ) -> None:
        """Run the regions that are called from now on by a plan.

        Parameters
        ----------
        step
            The planned step.
        others
            Ways that a step which begins like it may take instead.
        refused
            Ways that do not fit the budget, and what these need.
        takes_any_size
            Whether what runs between graphs may make more than was planned.
        """
        self.running = Running(step, others, refused, takes_any_size)
        self.watch.begin(self.device)
        self.running_plan = step.plan
        for group, is_kept in step.kept.items():
            self.running.let_go[group] = group.is_let_go
            group.let_go(not is_kept)

    def end_step(self) -> Running | None:
        """Return the step that ran; regions called from now on belong to none."""
        running, self.running = self.running, None
        if running is None:
            return None
        # What a forward pass left as it is stays so until its backward pass.
        for group, is_let_go in running.let_go.items():
            group.let_go(is_let_go)
        return running

    def check_end(self, running: Running, outputs: Sequence[torch.Tensor]) -> None:
        """Note where a forward pass has ended otherwise than planned.

        It returned before all planned graphs have run, or other operators ran after the
        last one.

        Raises
        ------
        BudgetError
            If the way is known, and does not fit the budget.
        """
        count = len(running.route.codes)
        running.route.between.append(self.between.leading_to(outputs))
        self._check_live(running, is_over=True)
        if running.unplanned is not None or _is_all(
            running.step, running.route, running.room_bytes(running.step)
        ):
            return
        for way in running.others:
            composed = self._taken_so_far(running, way)
            room_bytes = running.room_bytes(way)
            if composed is None or not _is_all(way, running.route, room_bytes):
                continue
            found = self._turned(running.step, count, way, composed)
            if isinstance(found, PlannedStep):
                return
            if found is not None:
                raise _no_room(running.step, count, found)
        self._refuse_known(running, is_over=True)
        running.unplanned = count

    def check_region_end(self, choice: RegionChoice) -> None:
        """Note where more is live after a region than planned, whatever keeps it.

        The rest of the step runs by its plan all the same: it needs no more for that.

        Raises
        ------
        BudgetError
            If it is known that such a step does not fit the budget.
        """
        running = self.running
        if running is None or self.gathering is not None:
            return
        set_up = choice.code.trace.set_up
        if choice.number not in set_up:
            set_up.add(choice.number)
            ops = self.programs[choice.code.trace].graph.ops
            running.set_up_bytes += _SET_UP_BYTES + len(ops) * _SET_UP_OP_BYTES
        self._check_live(running, is_over=False)

    def _check_live(self, running: Running, *, is_over: bool) -> None:
        step, count = running.step, len(running.route.codes)
        if running.takes_any_size or running.unplanned is not None:
            return
        if running.excess is not None or (is_over and count != len(step.choices)):
            return
        grown_bytes = self.watch.grown_bytes(is_over=is_over)
        if grown_bytes is None:
            return
        planned_bytes = step.held_bytes[count + is_over] - step.held_bytes[0]
        budget_bytes = step.plan.budget_bytes or 0
        excess_bytes = grown_bytes - planned_bytes
        left_bytes = max(0, budget_bytes - step.peak_bytes)
        noise_bytes = budget_bytes // _NOISE_SHARE + _NOISE_BYTES
        noise_bytes += running.set_up_bytes + step.eager_count * _NODE_BYTES
        if excess_bytes <= left_bytes + noise_bytes:
            return
        self._refuse_known(running, is_over=is_over)
        running.excess, running.excess_bytes = count, excess_bytes

    def choice_for(self, code: RegionCode, between: Between) -> RegionChoice:
        """Return how the region that is called now runs, after this in no graph.

        Raises
        ------
        BudgetError
            If it is not in the plan, and does not fit what is left of the budget.
        """
        running = self.running
        if self.gathering is not None:
            self.gathering.between.append(between)
        if self.gathering is not None or running is None:
            return RegionChoice(code=code, number=FRUGAL)
        position = len(running.route.codes)
        running.route.codes.append(code)
        running.route.between.append(between)
        if running.unplanned is None and (
            _is_next(running, code, between)
            or self._has_room(running, code, between)
            or self._goes_on(running, position)
        ):
            choice = running.step.choices[position]
            if choice.code is code:
                return choice
            running.varied_bytes += self._grown_bytes(choice.code, code) or 0
            return self._choice(code, choice.order)
        if running.unplanned is None:
            self._refuse_known(running, is_over=False)
        self._run_unplanned(running, code, position)
        return RegionChoice(code=code, number=FRUGAL)

    def _has_room(self, running: Running, code: RegionCode, between: Between) -> bool:
        """Whether the next graph is the planned one at sizes that surely fit.

        All that has more bytes than planned, taken together, is no more than the plan
        leaves of the budget; so no replay is needed.
        """
        step, position = running.step, len(running.route.codes) - 1
        if position >= len(step.choices):
            return False
        planned = step.between[position]
        grown_bytes = self._grown_bytes(step.choices[position].code, code)
        if grown_bytes is None or between.kinds != planned.kinds:
            return False
        more = running.more.then(between, planned)
        left_bytes = (step.plan.budget_bytes or 0) - step.peak_bytes
        needed_bytes = running.grown_bytes + grown_bytes
        if not running.takes_any_size:
            needed_bytes += _NEEDED_PER_BYTE * more.size_bytes
        if needed_bytes > left_bytes:
            return False
        running.more = more
        running.grown_bytes += grown_bytes
        return True

    def _grown_bytes(self, planned: RegionCode, code: RegionCode) -> int | None:
        """Return how much more a graph may need than a planned one, if it is like that.

        The growth of all blocks, and the largest of an operator's workspace.
        """
        if planned.sources != code.sources or not (planned.sizes or code.sizes):
            return None
        pair = planned, code
        if pair not in self._grown:
            if len(self._grown) == _MOST_GROWN:
                self._grown.clear()
            known, found = self._graph_of(planned), self._graph_of(code)
            self._grown[pair] = growth_bytes(known, found)
        return self._grown[pair]

    def _goes_on(self, running: Running, position: int) -> bool:
        """Whether a step may go on with a graph that is not the planned one.

        That is one of the same operators, traced again for other sizes or another
        number, or one of another way that is known. The judge says whether the budget
        holds where the graphs that have run did so by the plan that the step began
        with, and later ones run by the plan of the way, or else keep as little as they
        can.

        Raises
        ------
        BudgetError
            If all known ways that go on like this break the budget.
        """
        needed: list[int] = []
        for way in (running.step, *running.others):
            composed = self._taken_so_far(running, way)
            if composed is None:
                continue
            if composed is running.composed:
                running.turn_to(way, composed)
                return True
            found = self._turned(
                running.step, position, way, composed, running.more_bytes(way)
            )
            if isinstance(found, PlannedStep):
                running.turn_to(found, composed)
                running.short_bytes = max(running.short_bytes, found.short_bytes)
                self.running_plan = way.plan
                return True
            if found is not None:
                needed.append(found)
        if needed:
            running.unplanned = position
            running.short_bytes = min(needed) - (running.step.plan.budget_bytes or 0)
            raise _no_room(running.step, position, min(needed))
        return False

    def _turned(
        self,
        begun: PlannedStep,
        position: int,
        way: PlannedStep,
        composed: ComposedStep,
        more_bytes: int = 0,
    ) -> PlannedStep | int | None:
        """Return a step that goes on by a way's plan, or else with nothing kept.

        Parameters
        ----------
        begun, position
            The step that it begins with, and how many regions have run by its plan.
        way, composed
            The way, and its step with the sizes of now.
        more_bytes
            What it may need besides.

        Returns
        -------
        PlannedStep or int or None
            If it breaks the budget, the bytes that it needs; ``None`` if regions of it
            run again as a whole.
        """
        if composed is not way.composed or more_bytes:
            return _turn(begun.choices[:position], way, composed, more_bytes)
        if (position, way) not in begun.turns:
            taken = begun.choices[:position]
            begun.turns[position, way] = _turn(taken, way, composed)
        return begun.turns[position, way]

    def with_best_beginning(self, ways: Sequence[PlannedStep]) -> list[PlannedStep]:
        """Return ways of one kind of step, the one to begin with at the end.

        From its plan, as many as possible of the others can be turned to within the
        budget. Of equally good ones it is one that is planned for less, or the last.
        """

        def merit(begun: PlannedStep) -> tuple[int, int]:
            count = 0
            for other in ways:
                alike = _count_alike(begun.route, other.route)
                found = self._turned(begun, alike, other, other.composed)
                count += isinstance(found, PlannedStep)
            return count, sum(begun.route.is_within(each.route) for each in ways)

        *others, best = sorted(ways, key=merit)
        return [*others, best]

    def _refuse_known(self, running: Running, *, is_over: bool) -> None:
        """Raise an error if a step takes a way that does not fit the budget."""
        codes, between = running.route.codes, running.route.between
        count = len(codes)
        for route, needed_bytes in running.refused:
            begun = route.codes if is_over else route.codes[:count]
            if (
                len(begun) == count
                and all(map(self._are_same, begun, codes))
                # What made no less does not fit either.
                and all_within(route.between, between)
            ):
                position = count if is_over else count - 1
                raise _no_room(running.step, position, needed_bytes, is_known=True)

    def _are_same(self, one: RegionCode, other: RegionCode) -> bool:
        """Whether graphs are one, or traced again with the same result."""
        if one is other or one.sources != other.sources:
            return one is other
        known, found = self.programs[one.trace], self.programs[other.trace]
        return one.sizes == other.sizes and known.fingerprint == found.fingerprint

    def _taken_so_far(self, running: Running, way: PlannedStep) -> ComposedStep | None:
        """Return a way's step with the sizes seen in this call, if that goes this way.

        What is gathered from other processes was let go as the first plan says.
        """
        is_own = way is running.step
        composed = running.composed if is_own else way.composed
        if way.kept and not is_own:
            return None
        if not all_within(
            running.route.between[: len(running.route.codes)],
            way.between,
            running.room_bytes(way),
        ):
            return None
        first = running.sized_count if is_own else 0
        return self._sized_like(running.route, way, composed, first)

    def is_known(self, route: Route, ways: Sequence[PlannedStep]) -> bool:
        """Whether a pass that came so far, or is over, may have gone a planned way."""
        is_over = len(route.between) > len(route.codes)
        return any(
            all_within(route.between[: len(route.codes)], way.between, way.room_bytes)
            and self._sized_like(route, way, way.composed, 0) is not None
            and (not is_over or _is_all(way, route, way.room_bytes))
            for way in ways
        )

    def _sized_like(
        self, route: Route, way: PlannedStep, composed: ComposedStep, first: int
    ) -> ComposedStep | None:
        """Return a way's step with the sizes of a route from one of its graphs on."""
        if len(way.choices) < len(route.codes):
            return None
        changed: dict[int, tuple[TrainingGraph, TrainingGraph]] = {}
        for place, code in enumerate(route.codes[first:], first):
            planned = way.choices[place].code
            if self._are_same(planned, code):
                continue
            if planned.sources != code.sources:
                return None
            changed[place] = self._graph_of(planned), self._graph_of(code)
        return composed.resized(changed)

    def _run_unplanned(self, running: Running, code: RegionCode, position: int) -> None:
        """Count a region that has no plan, which keeps as little as it can."""
        step = running.step
        if running.unplanned is None:
            before = min(position, len(step.choices))
            running.unplanned = position
            running.held_bytes = step.held_bytes[before]
            running.backward_bytes = step.backward_bytes[before]
        graph = self._graph_of(code)
        peak_bytes, held_bytes = frugal_needs(graph)
        # They are there while the regions before run backward.
        running.backward_bytes += sum(
            graph.storages[storage].size_bytes
            for storage in graph.final_outputs
            if graph.storages[storage].role in (Role.GRADIENT, Role.INPUT_GRADIENT)
        )
        needed_bytes = max(running.held_bytes + peak_bytes, running.backward_bytes)
        if needed_bytes > (step.plan.budget_bytes or 0):
            raise _no_room(step, position, needed_bytes)
        running.held_bytes += held_bytes


def _with_steps(
    parts: Sequence[int | EagerBackward | EagerWork], seen: _SeenStep
) -> list[int | EagerBackward | EagerWork]:
    """Return the parts of a backward pass with the steps of parameters among them.

    Each is stepped, and its gradient gone, when autograd has been through all that the
    parameter was given to, also where no gradient comes from there.
    """
    backward, steps = seen.backward, seen.backward.steps
    nodes = {id(p): n for p, n in zip(backward.order, backward.nodes, strict=True)}
    last: dict[Slot, int] = {}
    for number, part in enumerate(parts):
        if not isinstance(part, EagerWork):
            following = backward.following(nodes[id(part)])
            slots = (backward.slot(*each) for each in following)
            last |= {slot: number for slot in slots if slot in steps}
    found: list[int | EagerBackward | EagerWork] = []
    for number, part in enumerate(parts):
        found.append(part)
        found += [
            EagerWork(
                name="the step of a parameter",
                takes=[slot],
                workspace_bytes=steps[slot],
            )
            for slot, after in last.items()
            if after == number
        ]
    return found


def _turn(
    taken: Sequence[RegionChoice],
    way: PlannedStep,
    composed: ComposedStep,
    more_bytes: int = 0,
) -> PlannedStep | int | None:
    needed: list[int] = []
    budget_bytes = way.plan.budget_bytes or 0
    frugal = [replace(c, number=FRUGAL, order=None) for c in way.choices]
    for rest in (way.choices, frugal):
        choices = (*taken, *rest[len(taken) :])
        schedule = way.schedule
        if choices != way.choices:
            if any(choice.order and choice.order.remade for choice in choices):
                continue
            schedule = composed.schedule_of(_orders(choices, composed.regions))
        trace = simulate(composed.graph, way.plan.platform, schedule)
        needed_bytes = trace.peak_bytes[0] + more_bytes
        if trace.violation is None and needed_bytes <= budget_bytes:
            return replace(
                way,
                choices=choices,
                schedule=schedule,
                held_bytes=composed.held_bytes(schedule, trace),
                backward_bytes=composed.backward_bytes(schedule, trace),
                peak_bytes=trace.peak_bytes[0],
                short_bytes=needed[0] - budget_bytes if needed else 0,
                turns={},
            )
        needed.append(needed_bytes)
    return min(needed, default=None)


def _is_next(running: Running, code: RegionCode, between: Between) -> bool:
    """Whether a region that begins is the next one of the planned step."""
    step, position = running.step, len(running.route.codes) - 1
    if position >= len(step.choices) or step.choices[position].code is not code:
        return False
    planned = step.between[position]
    if between == planned and running.more is AS_PLANNED:
        return True
    more = running.more.then(between, planned)
    if between.kinds != planned.kinds or more.size_bytes > running.room_bytes(step):
        return False
    running.more = more
    return True


def _is_all(step: PlannedStep, route: Route, room_bytes: float) -> bool:
    """Whether a pass that is over, and went like a step so far, was the whole of it."""
    if len(step.between) != len(route.between):
        return False
    as_planned = route.between == step.between
    return as_planned or all_within(route.between, step.between, room_bytes)


def _count_alike(begun: Route, other: Route) -> int:
    """Return how many regions of a way run by the plan of one that it begins with."""
    codes = map(operator.is_, begun.codes, other.codes)
    alike = sum(1 for _ in takewhile(bool, codes))
    while not all_within(other.between[:alike], begun.between):
        alike -= 1
    return alike


def _no_room(
    step: PlannedStep, position: int, needed_bytes: int, *, is_known: bool = False
) -> BudgetError:
    budget_bytes = step.plan.budget_bytes or 0
    next_call = (
        ""
        if is_known
        else ". The next such call is planned before it runs, and may fit"
    )
    msg = (
        f"graph {position} of the step, or what runs before it, was not there when it "
        "was planned, or not of this size: the step may need "
        f"{format_bytes(needed_bytes)} ({needed_bytes} bytes) with it, of "
        f"{format_bytes(budget_bytes)} ({budget_bytes} bytes). Give a larger budget, or "
        f"fit an example that takes this way{next_call}"
    )
    return BudgetError(msg, budget_bytes=budget_bytes, required_bytes=needed_bytes)


def _are_alike(planned: TrainingGraph, found: TrainingGraph) -> bool:
    """Whether two steps are of the same operators, on blocks as large."""
    sizes = [[each.size_bytes for each in g.storages] for g in (planned, found)]
    return have_same_ops(planned, found) and sizes[0] == sizes[1]


def _orders(
    choices: Sequence[RegionChoice], regions: Sequence[Region]
) -> list[Sequence[int]]:
    """Return the order in which each region of a step runs."""
    return [
        choice.order.order if choice.order else frugal_order(region.graph)
        for choice, region in zip(choices, regions, strict=True)
    ]


def _fingerprint(gathering: Gathering, composed: ComposedStep) -> str:
    """Return what is equal for steps of equal graphs that hang together alike."""
    digest = hashlib.sha256()
    for seen, mapped in zip(gathering.seen, composed.storages, strict=True):
        links = sorted(mapped[storage] for storage in seen.given)
        sizes = seen.code.sizes or ""
        digest.update(f"{seen.program.fingerprint}{sizes}|{links}\n".encode())
    for index, region in enumerate(composed.regions):
        if region.changed:
            digest.update(f"{index} changed {sorted(region.changed)}\n".encode())
    for op, origin in zip(composed.graph.ops, composed.origins, strict=True):
        if origin is None:
            digest.update(f"{op.name}|{op.reads}|{op.writes}\n".encode())
    return digest.hexdigest()
