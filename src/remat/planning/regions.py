"""One step of several graphs: put together for planning, and taken apart again.

Where the tracer splits a model, each part, a *region*, has a training graph of its own
and runs as a whole: in forward the regions run in order, in backward in the opposite
order. Here they become one training graph, so that one plan and one replay cover the
whole step. What Python and autograd do between regions are ops that take no time:

* at the end of each region's forward, one reads what the code around it still holds;
* before each region's backward, one makes the gradients of its outputs where they are
  not the gradient that one later region hands over: zeros, or the sum of several;
* after it, one reads the gradients that autograd adds to others then.

What a region hands to others is made once: only the region itself could make it again,
and its code has returned.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from remat.core.errors import BudgetError
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import Platform, single_device
from remat.core.problem import Status
from remat.core.schedule import Boundary, Compute, Schedule
from remat.core.simulator import Trace, simulate
from remat.core.units import format_bytes
from remat.planning.plan import Plan
from remat.planning.several_devices import Budget

_BETWEEN = "it is done between the graphs"


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a step: its graph, and how it hangs together with the others.

    Parameters
    ----------
    graph
        The region's training graph, without what surrounds the step.
    given
        Per resident storage that an input brings, the number of its block. Blocks have
        the same number in all regions.
    made
        Per storage that is a forward output, the number of its block.
    held
        Per forward output, the last region that ends while the code around the regions
        holds it; the count of regions for what the step returns.
    outputs
        Per tangent, the forward output whose gradient it is.
    gradients
        Pairs of an input's storage and the storage of its gradient.
    accumulated
        The gradients that autograd adds to gradients of earlier steps.
    """

    graph: TrainingGraph
    given: Mapping[int, int]
    made: Mapping[int, int]
    held: Mapping[int, int]
    outputs: Mapping[int, int]
    gradients: Sequence[tuple[int, int]]
    accumulated: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class RegionOrder:
    """What one region runs: ops of its own graph, and where nothing is overwritten.

    Parameters
    ----------
    order
        Ops of the region's graph as they run, with the boundary among them.
    fullest
        Positions in ``order`` at which memory of the whole step is fullest.
    """

    order: tuple[int, ...]
    fullest: frozenset[int] = frozenset()

    def schedule(self, graph: TrainingGraph) -> Schedule:
        """Return the region's schedule, which frees at the last use."""
        return schedule_from_order(graph, self.order)

    def fullest_steps(self, schedule: Schedule) -> frozenset[int]:
        """Return the positions of the fullest ops in the region's schedule."""
        computes = [
            position
            for position, step in enumerate(schedule.steps)
            if isinstance(step, Compute | Boundary)
        ]
        return frozenset(computes[position] for position in self.fullest)


@dataclass(frozen=True, kw_only=True)
class ComposedStep:
    """Several regions as one training graph.

    Parameters
    ----------
    graph
        The whole step.
    origins
        Per op of ``graph`` the region and the op there; ``None`` for what happens
        between regions.
    storages
        Per region and storage there, the storage of ``graph``.
    tangents
        Per tangent of ``graph``, the region that it is for, and the tangent there.
    """

    graph: TrainingGraph
    origins: tuple[tuple[int, int] | None, ...]
    storages: tuple[Mapping[int, int], ...]
    tangents: Mapping[int, tuple[int, int]]

    def surrounded(self, graph: TrainingGraph) -> "ComposedStep":
        """Return the step with a last forward op and a last backward op added."""
        forward = self.graph.forward_count
        origins = (*self.origins[:forward], None, *self.origins[forward:], None)
        return replace(self, graph=graph, origins=origins)

    @cached_property
    def _layout(self) -> list[int | tuple[Phase, int]]:
        """What runs in which order: ops between regions, and passes of regions."""
        layout: list[int | tuple[Phase, int]] = []
        for index, (op, origin) in enumerate(
            zip(self.graph.ops, self.origins, strict=True)
        ):
            if index == self.graph.forward_count:
                layout.append(BOUNDARY)
            part = index if origin is None else (op.phase, origin[0])
            if not layout or layout[-1] != part:
                layout.append(part)
        return layout

    def by_regions(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the ops of each region's passes together.

        They run as often and in the same order as before within each region.
        """
        runs: defaultdict[tuple[Phase, int], list[int]] = defaultdict(list)
        phase = Phase.FORWARD
        for step in schedule.steps:
            if isinstance(step, Boundary):
                phase = Phase.BACKWARD
            elif isinstance(step, Compute):
                origin = self.origins[step.op]
                if origin is not None:
                    runs[phase, origin[0]].append(step.op)
        order: list[int] = []
        for part in self._layout:
            order += [part] if isinstance(part, int) else runs[part]
        return schedule_from_order(self.graph, order)

    def held_bytes(self, schedule: Schedule, platform: Platform) -> tuple[int, ...]:
        """Return what is live before each region's forward, and after all, in bytes."""
        timeline = simulate(self.graph, platform, schedule).timeline_bytes[0]
        ends = [
            timeline[position]
            for position, step in enumerate(schedule.steps)
            if isinstance(step, Compute)
            and self.origins[step.op] is None
            and self.graph.ops[step.op].phase is Phase.FORWARD
        ]
        resident = (s.size_bytes for s in self.graph.storages if s.is_resident)
        return (sum(resident), *ends[: len(self.storages)])

    def region_orders(
        self, schedule: Schedule, platform: Platform
    ) -> list[RegionOrder]:
        """Take a schedule of the step, ordered by regions, apart."""
        trace = simulate(self.graph, platform, schedule)
        orders: list[list[int]] = [[] for _ in self.storages]
        fullest: list[set[int]] = [set() for _ in self.storages]
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Boundary):
                for order in orders:
                    order.append(BOUNDARY)
            elif isinstance(step, Compute):
                origin = self.origins[step.op]
                if origin is None:
                    continue
                region, op = origin
                if trace.timeline_bytes[0][position] == trace.peak_bytes[0]:
                    fullest[region].add(len(orders[region]))
                orders[region].append(op)
        return [
            RegionOrder(order=tuple(order), fullest=frozenset(full))
            for order, full in zip(orders, fullest, strict=True)
        ]


def compose(
    name: str,
    regions: Sequence[Region],
    *,
    loss: tuple[int, int] | None,
    frees_tangents: bool,
) -> ComposedStep:
    """Return the step that runs the regions in order.

    Parameters
    ----------
    name
        Name of the graph, for people.
    regions
        In the order of their forward passes, at least one.
    loss
        The region and the storage of the loss, if the step returns it; else each
        returned output that takes a gradient may get one.
    frees_tangents
        Whether a region frees the gradients of its outputs at their last use, not at
        its end.

    Raises
    ------
    InvalidGraphError
        If the regions do not hang together as they say.
    """
    return _Composition(name, regions, loss, frees_tangents=frees_tangents).run()


class _Composition:
    def __init__(
        self,
        name: str,
        regions: Sequence[Region],
        loss: tuple[int, int] | None,
        *,
        frees_tangents: bool,
    ) -> None:
        self.name = name
        self.regions = regions
        self.loss = loss
        self.frees_tangents = frees_tangents
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.origins: list[tuple[int, int] | None] = []
        self.maps: list[dict[int, int]] = [{} for _ in regions]
        # Per block its storage; per storage the gradients that it has got.
        self.blocks: dict[int, int] = {}
        self.gradients: defaultdict[int, list[int]] = defaultdict(list)
        # Per storage, how many gradients it will get.
        self.gradient_counts: Counter[int] = Counter()
        # Per tangent of the step, the region and the tangent there.
        self.tangents: dict[int, tuple[int, int]] = {}
        self.final: dict[int, None] = {}

    def run(self) -> ComposedStep:
        for region in range(len(self.regions)):
            self.add_forward(region)
        returned = self.held_after(len(self.regions))
        self.final.update(dict.fromkeys(returned))
        self.gradient_counts.update(
            mapped[given]
            for region, mapped in zip(self.regions, self.maps, strict=True)
            for given, _ in region.gradients
        )
        for region in reversed(range(len(self.regions))):
            self.add_backward(region)
        first = self.regions[0].graph
        graph = TrainingGraph(
            name=self.name,
            storages=tuple(self.storages),
            ops=tuple(self.ops),
            forward_outputs=tuple(returned),
            tangents=tuple(self.tangents),
            final_outputs=tuple(self.final),
            device_kinds=first.device_kinds,
        )
        return ComposedStep(
            graph=graph,
            origins=tuple(self.origins),
            storages=tuple(self.maps),
            tangents=self.tangents,
        )

    def add_storage(self, storage: Storage) -> int:
        self.storages.append(storage)
        return len(self.storages) - 1

    def add_forward(self, index: int) -> None:
        region, mapped = self.regions[index], self.maps[index]
        tangents = set(region.graph.tangents)
        for number, storage in enumerate(region.graph.storages):
            block = region.given.get(number)
            if block in self.blocks:
                mapped[number] = self.blocks[block]
            elif number not in tangents:
                mapped[number] = self.add_storage(storage)
                if block is not None:
                    self.blocks[block] = mapped[number]
        for number, block in region.made.items():
            self.blocks[block] = mapped[number]
        self.add_ops(index, Phase.FORWARD)
        outputs = [mapped[number] for number in region.graph.forward_outputs]
        reads = tuple(dict.fromkeys([*outputs, *self.held_after(index)]))
        self.add_between(f"the end of graph {index}", Phase.FORWARD, reads)

    def held_after(self, index: int) -> list[int]:
        """Return what the code around the regions holds when a region has ended."""
        held = [
            self.maps[earlier][number]
            for earlier, region in enumerate(self.regions[: index + 1])
            for number, last in region.held.items()
            if last >= index
        ]
        return [s for s in dict.fromkeys(held) if not self.storages[s].is_resident]

    def add_ops(self, index: int, phase: Phase) -> None:
        mapped = self.maps[index]
        for number, op in enumerate(self.regions[index].graph.ops):
            if op.phase is phase:
                self.ops.append(
                    Op(
                        name=op.name,
                        reads=tuple(dict.fromkeys(mapped[s] for s in op.reads)),
                        writes=tuple(mapped[s] for s in op.writes),
                        cost_ns=op.cost_ns,
                        workspace_bytes=op.workspace_bytes,
                        phase=phase,
                        non_recomputable=op.non_recomputable,
                        is_ordered=op.is_ordered,
                        source=op.source,
                    )
                )
                self.origins.append((index, number))

    def add_between(
        self,
        name: str,
        phase: Phase,
        reads: tuple[int, ...],
        writes: tuple[int, ...] = (),
    ) -> None:
        count = len(self.regions[0].graph.device_kinds)
        self.ops.append(
            Op(
                name=name,
                reads=tuple(s for s in reads if not self.storages[s].is_resident),
                writes=writes,
                cost_ns=(0,) * count,
                workspace_bytes=(0,) * count,
                phase=phase,
                non_recomputable=_BETWEEN,
            )
        )
        self.origins.append(None)

    def add_backward(self, index: int) -> None:
        region, mapped = self.regions[index], self.maps[index]
        for tangent in region.graph.tangents:
            mapped[tangent] = self.tangent(index, tangent)
        self.add_ops(index, Phase.BACKWARD)
        dropped: list[int] = []
        if not self.frees_tangents:
            dropped += [mapped[tangent] for tangent in region.graph.tangents]
        for given, gradient in region.gradients:
            storage, found = mapped[given], self.gradients[mapped[given]]
            found.append(mapped[gradient])
            if not self.storages[storage].is_resident:
                continue
            # Autograd adds later ones to the first, and the sum, once all are there, to
            # a gradient of earlier steps.
            if len(found) > 1:
                dropped += [found[0], found[-1]]
            if len(found) == self.gradient_counts[storage]:
                if gradient in region.accumulated:
                    dropped.append(found[0])
                else:
                    self.final[found[0]] = None
        if dropped:
            name, reads = (
                f"the end of backward of graph {index}",
                dict.fromkeys(dropped),
            )
            self.add_between(name, Phase.BACKWARD, tuple(reads))

    def tangent(self, index: int, tangent: int) -> int:
        """Return the gradient of a region's output, which is there for its backward."""
        region, mapped = self.regions[index], self.maps[index]
        block = region.graph.storages[tangent]
        number = region.outputs.get(tangent)
        if number is None:  # Of an input that the region changes.
            return self.made_between(f"zeros for {block.name}", block, ())
        output = mapped[number]
        found = self.gradients[output]
        is_returned = region.held.get(number) == len(self.regions)
        if is_returned and self.loss in {None, (index, number)}:
            given = self.add_storage(block)
            self.tangents[given] = (index, tangent)
            found = [*found, given]
        if len(found) == 1:
            return found[0]
        if not found:
            return self.made_between(f"zeros for {block.name}", block, ())
        name, reads = f"the sum for {block.name}", tuple(dict.fromkeys(found))
        if len(reads) < len(found) or found[0] in self.final:
            return self.made_between(name, block, reads)
        # Autograd adds to the first where nobody else has it.
        self.add_between(name, Phase.BACKWARD, reads)
        return found[0]

    def made_between(self, name: str, block: Storage, reads: tuple[int, ...]) -> int:
        made = self.add_storage(
            Storage(name=name, size_bytes=block.size_bytes, role=Role.TANGENT)
        )
        self.add_between(name, Phase.BACKWARD, reads, (made,))
        return made


def frugal_order(graph: TrainingGraph) -> list[int]:
    """Return the order that keeps nothing that can be computed again.

    All of forward runs again at the beginning of backward, as far as it may and as
    backward depends on it.
    """
    forward = graph.forward_count
    backward = range(forward, len(graph.ops))
    needed = {storage for op in backward for storage in graph.ops[op].reads}
    again: list[int] = []
    for number in reversed(range(forward)):
        op = graph.ops[number]
        if op.is_recomputable and needed.intersection(op.writes):
            again.append(number)
            needed.update(op.reads)
    return [*range(forward), BOUNDARY, *reversed(again), *backward]


def frugal_needs(graph: TrainingGraph) -> tuple[int, int]:
    """Return what the frugal order takes beside a region's inputs, in bytes.

    Most at any time, and after forward.
    """
    schedule = schedule_from_order(graph, frugal_order(graph))
    platform = single_device(kind=graph.device_kinds[0])
    forward = Schedule(schedule.steps[: schedule.steps.index(Boundary())])
    held = simulate(graph, platform, forward).live_after[0]
    given_bytes = sum(s.size_bytes for s in graph.storages if s.is_resident)
    return (
        simulate(graph, platform, schedule).peak_bytes[0] - given_bytes,
        sum(graph.storages[storage].size_bytes for storage in held),
    )


def plan_regions(
    step: ComposedStep, solve: Callable[[Budget | None], Plan], budget: Budget | None
) -> Plan:
    """Return a plan for a step of several regions, judged as the regions run.

    Parameters
    ----------
    step
        The whole step, with what surrounds it.
    solve
        Returns a plan of ``step.graph`` on one device for a budget.
    budget
        What is asked for.

    Raises
    ------
    BudgetError
        If no schedule is known that fits; names the smallest known budget.

    Notes
    -----
    Solvers know nothing of regions. An op of theirs that runs among those of another
    region runs with its own instead, and where that takes more than the budget, they
    are asked again for as much less. Raises what ``solve`` raises, too.
    """
    try:
        plan = solve(budget)
    except BudgetError as error:
        raise _true_error(step, error, solve(error.required_bytes)) from None
    budget_bytes = asked_bytes = plan.budget_bytes or 0
    needed_bytes: list[int] = []
    for _ in range(_ATTEMPTS):
        schedule = step.by_regions(plan.schedule)
        trace = _judged(step, schedule, budget_bytes)
        if trace.violation is None:
            return replace(
                plan,
                platform=_platform(step, budget_bytes),
                schedule=schedule,
                status=plan.status if asked_bytes == budget_bytes else Status.FEASIBLE,
                _judged=trace,
            )
        needed_bytes.append(trace.peak_bytes[0])
        asked_bytes -= max(1, trace.peak_bytes[0] - budget_bytes)
        try:
            plan = solve(asked_bytes)
        except BudgetError:
            break
    raise _budget_error(step, budget_bytes, min(needed_bytes))


_ATTEMPTS = 4


def _platform(step: ComposedStep, budget_bytes: int | None) -> Platform:
    return single_device(budget_bytes, kind=step.graph.device_kinds[0])


def _judged(step: ComposedStep, schedule: Schedule, budget_bytes: int | None) -> Trace:
    return simulate(step.graph, _platform(step, budget_bytes), schedule)


def _true_error(step: ComposedStep, error: BudgetError, known: Plan) -> BudgetError:
    """Return an error whose smallest known budget works for whole regions too.

    ``known`` is the plan for the budget that ``error`` names.
    """
    trace = _judged(step, step.by_regions(known.schedule), None)
    if trace.peak_bytes[0] <= error.required_bytes:
        return error
    return _budget_error(step, error.budget_bytes, trace.peak_bytes[0])


def _budget_error(
    step: ComposedStep, budget_bytes: int, needed_bytes: int
) -> BudgetError:
    msg = (
        f"no schedule of {step.graph.name} is known that fits "
        f"{format_bytes(budget_bytes)} ({budget_bytes} bytes) with each of its "
        f"{len(step.storages)} graphs run as a whole; the smallest known budget is "
        f"{format_bytes(needed_bytes)} ({needed_bytes} bytes)"
    )
    return BudgetError(msg, budget_bytes=budget_bytes, required_bytes=needed_bytes)
