"""One step of several graphs: put together for planning, and taken apart again.

Where the tracer splits a model, each part, a *region*, has a training graph of its own
and runs as a whole: in forward the regions run in order, in backward as autograd goes.
Here they become one training graph, so that one plan and one replay cover the whole
step. What Python and autograd do between regions are ops as well. They run once, and
take no time that a plan could change:

* operators that are in no graph, with the blocks that they make and keep, and in
  backward one op for each node that autograd has of them;
* at the end of each region's forward, one that reads what the code around it holds;
* before each region's backward, one that makes the gradients of its outputs where they
  are not what one other hands over: zeros, or the sum of several;
* after it, one that reads the gradients that autograd adds to others then.

What a region hands to others is made once: only the region itself could make it again,
and its code has returned.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from remat.core.errors import BudgetError
from remat.core.gradient_pieces import ADDING
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.platform import Platform, single_device
from remat.core.problem import Status
from remat.core.schedule import Boundary, Compute, Schedule
from remat.core.simulator import Trace, simulate
from remat.core.units import format_bytes
from remat.planning.plan import Plan
from remat.planning.proofs import at_budget, with_bound
from remat.planning.several_devices import Budget

_BETWEEN = "it is done between the graphs"


Slot = int
"""Where gradients come together: of an output of autograd's nodes, or of a leaf."""


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
    slots
        Per tangent, where its gradients come together.
    gradients
        Pairs of the slot that an input's gradient goes to, and its storage.
    outputs
        The ops that run once for no other reason than that they make an output.
    changed
        Inputs and forward outputs, as storages of ``graph``, that something else in the
        forward pass writes in place: what is computed again would see other values.
    one_zeros
        Tangents that take no memory where they do not exist.
    handed_over
        Gradients that an op of its own hands over before its backward pass ends.
    views
        Gradients that it hands over as views of their blocks, to which autograd adds
        none in place: the tensor that one is a view of is held with it.
    """

    graph: TrainingGraph
    given: Mapping[int, int] = field(default_factory=dict[int, int])
    made: Mapping[int, int] = field(default_factory=dict[int, int])
    slots: Mapping[int, Slot] = field(default_factory=dict[int, int])
    gradients: Sequence[tuple[Slot, int]] = ()
    outputs: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    one_zeros: frozenset[int] = frozenset()
    handed_over: frozenset[int] = frozenset()
    views: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class EagerForward:
    """What operators in no graph make before a region, or after the last.

    Parameters
    ----------
    made
        Sizes in bytes of the blocks that stay, by their numbers.
    workspace_bytes
        Most bytes that they take beyond these.
    """

    made: Mapping[int, int] = field(default_factory=dict[int, int])
    workspace_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EagerBackward:
    """The backward pass of an operator in no graph: one node of autograd.

    Parameters
    ----------
    name
        Autograd's name of it.
    slots
        Where the gradients of its outputs come together, with their sizes in bytes.
    saved
        The blocks that it keeps.
    gradients
        Slots that it hands gradients to, with their sizes in bytes; where one is the
        block of a gradient that it got, the position in ``slots``, negative from -1 on.
    views
        Slots among these that get a view of another tensor.
    workspace_bytes
        Most bytes that it takes beyond its gradients.
    """

    name: str
    slots: Sequence[tuple[Slot, int]]
    saved: Sequence[int] = ()
    gradients: Sequence[tuple[Slot, int]] = ()
    views: frozenset[Slot] = frozenset()
    workspace_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EagerWork:
    """What code around the regions does in backward that is no node of autograd.

    Parameters
    ----------
    name
        For people.
    reads
        The blocks that it is the last to need, unless others read them later.
    takes
        The slots of leaves whose gradients it is the last to need.
    made
        Sizes in bytes of the blocks that stay, by their numbers.
    workspace_bytes
        Most bytes that it takes beyond these.
    cost_ns
        Time that it takes, where it is not the same in all steps that are compared.
    """

    name: str
    reads: Sequence[int] = ()
    takes: Sequence[Slot] = ()
    made: Mapping[int, int] = field(default_factory=dict[int, int])
    workspace_bytes: int = 0
    cost_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a step, and in which order they run.

    Parameters
    ----------
    regions
        In the order of their forward passes, at least one.
    between
        What operators in no graph do before each region, and after the last.
    backward
        Regions, by their numbers, nodes of autograd, and what else is done, as backward
        goes; regions that it does not come to are left out.
    held
        Per block, the last region that ends while the code around the regions holds it;
        the count of regions for what is there when the model has returned.
    returned
        The slots that get a gradient from the caller.
    leaves
        The slots of parameters and of other leaves, and whether autograd adds the
        gradient to one of an earlier step.
    gathered
        Blocks that regions are given and that count in other parts.
    stay
        Blocks that are made in backward and are there when the step ends.
    left
        Regions that backward does not come to, and that keep what it would need.
    outputs
        The blocks of the tensors that the model returns, but for its loss, by position.
    """

    regions: Sequence[Region]
    between: Mapping[int, EagerForward] = field(default_factory=dict[int, EagerForward])
    backward: Sequence["int | EagerBackward | EagerWork"] = ()
    held: Mapping[int, int] = field(default_factory=dict[int, int])
    returned: frozenset[Slot] = frozenset()
    leaves: Mapping[Slot, bool] = field(default_factory=dict[Slot, bool])
    gathered: frozenset[int] = frozenset()
    stay: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    outputs: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, kw_only=True)
class RegionOrder:
    """What one region runs: ops of its own graph, and where nothing is overwritten.

    Parameters
    ----------
    order
        Ops of the region's graph as they run, with the boundary among them.
    fullest
        Positions in ``order`` at which memory of the whole step is fullest.
    again
        Ops of the region's forward pass that run as a whole once more, before a later
        region's backward pass.
    remade
        Storages of the region's graph that are not kept for backward, but are made
        again by this region or by another one.
    """

    order: tuple[int, ...]
    fullest: frozenset[int] = frozenset()
    again: tuple[int, ...] = ()
    remade: frozenset[int] = frozenset()

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
    regions
        What it was put together from.
    outputs
        The storages of ``graph`` that hold the tensors that the model returns, but for
        its loss, by position.
    adds
        Whether gradients are added to those of an earlier step.
    """

    graph: TrainingGraph
    origins: tuple[tuple[int, int] | None, ...]
    storages: tuple[Mapping[int, int], ...]
    regions: tuple[Region, ...]
    outputs: Mapping[int, int] = field(default_factory=dict[int, int])
    adds: bool = False

    def surrounded(self, graph: TrainingGraph) -> "ComposedStep":
        """Return the step with a last forward op, and last backward ops, added."""
        forward = self.graph.forward_count
        before, after = self.origins[:forward], self.origins[forward:]
        last = [None] * (len(graph.ops) - len(self.origins) - 1)
        return replace(self, graph=graph, origins=(*before, None, *after, *last))

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

    @cached_property
    def everything(self) -> tuple[Schedule, Trace]:
        """The schedule in which nothing runs twice, and its replay without a budget."""
        graph = self.graph
        schedule = schedule_from_order(graph, store_all_order(graph))
        return schedule, simulate(graph, _platform(self, None), schedule)

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
        return self._in_layout(runs)

    def schedule_of(
        self, orders: Sequence[Sequence[int]], reruns: Sequence["Rerun"] = ()
    ) -> Schedule:
        """Return the schedule in which each region runs in an order of its own.

        Parameters
        ----------
        orders
            Per region ops of its graph, with the boundary among them.
        reruns
            The regions that run forward again as a whole, before the first backward
            pass of another one that reads what they made.
        """
        numbers = self._numbers
        runs: dict[tuple[Phase, int], list[int]] = {}
        for region, order in enumerate(orders):
            turn = list(order).index(BOUNDARY)
            runs[Phase.FORWARD, region] = [numbers[region, op] for op in order[:turn]]
            # Backward may not come to a region.
            runs[Phase.BACKWARD, region] = [
                numbers[region, op]
                for op in order[turn + 1 :]
                if (region, op) in numbers
            ]
        return self._in_layout(runs, reruns)

    def _in_layout(
        self,
        runs: Mapping[tuple[Phase, int], Sequence[int]],
        reruns: Sequence["Rerun"] = (),
    ) -> Schedule:
        """Return the schedule in which each pass of a region runs these ops."""
        makers = {storage: rerun for rerun in reruns for storage in rerun.storages}
        order: list[int] = []
        for part in self._layout:
            if isinstance(part, int):
                order.append(part)
                continue
            if part[0] is Phase.BACKWARD:
                order += self._reruns_before(runs[part], makers)
            order += runs[part]
        return schedule_from_order(self.graph, order)

    def _reruns_before(
        self, ops: Sequence[int], makers: dict[int, "Rerun"]
    ) -> list[int]:
        """Return what makes again what some ops read, and take it from ``makers``.

        What is made again stays for whoever reads it later.
        """
        order: list[int] = []
        # Region by region back to one whose input is there.
        waiting = [reads for op in reversed(ops) for reads in self.graph.ops[op].reads]
        while waiting:
            rerun = makers.get(waiting[-1])
            if rerun is None:
                waiting.pop()
                continue
            needed = [storage for storage in rerun.reads if storage in makers]
            if needed:
                waiting += needed
                continue
            order += rerun.ops
            for storage in rerun.storages:
                del makers[storage]
        return order

    @cached_property
    def reruns(self) -> dict[int, "Rerun"]:
        """Per region that may run forward again as a whole, what that makes.

        That is what it hands to later regions and what nobody else keeps for backward,
        as far as it follows from its inputs and from generators' states.
        """
        kept = {*self.graph.final_outputs, *self.graph.forward_outputs}
        reads: set[int] = set()
        for op, origin in zip(self.graph.ops, self.origins, strict=True):
            if op.phase is Phase.BACKWARD:
                (kept if origin is None else reads).update(op.reads)
        found: dict[int, Rerun] = {}
        for index, (region, mapped) in enumerate(
            zip(self.regions, self.storages, strict=True)
        ):
            made = [
                n
                for n in region.made
                if mapped[n] in reads - kept and n not in region.changed
            ]
            fixed = frozenset(n for n, s in mapped.items() if s in kept)
            ops, given = _closure(region, made, fixed)
            if ops and region.changed.isdisjoint(given):
                numbers = [self._numbers[index, op] for op in ops]
                found[index] = Rerun(
                    region=index,
                    local_ops=tuple(ops),
                    ops=tuple(numbers),
                    storages=tuple(
                        mapped[n]
                        for n in made
                        if any(n in region.graph.ops[op].writes for op in ops)
                    ),
                    reads=tuple(
                        mapped[n]
                        for n in given
                        if not self.graph.storages[mapped[n]].is_resident
                    ),
                )
        return found

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        """The op of ``graph`` that an op of a region is."""
        pairs = enumerate(self.origins)
        return {origin: number for number, origin in pairs if origin is not None}

    def may_rerun(self, rerun: "Rerun", order: Sequence[int]) -> bool:
        """Whether a region may run as a whole again if it runs in an order of its own.

        Its own backward pass has to keep all that it starts from, and nothing that it
        makes: so it keeps no more and no less for that.
        """
        region, mapped = self.regions[rerun.region], self.storages[rerun.region]
        ops = region.graph.ops
        made, read = set[int](), set[int]()
        for number in order[list(order).index(BOUNDARY) + 1 :]:
            if (rerun.region, number) not in self._numbers:
                return False  # Backward does not come to it.
            read.update(mapped[s] for s in ops[number].reads if s not in made)
            made.update(ops[number].writes)
        inner = {mapped[s] for op in rerun.local_ops for s in ops[op].writes}
        return read.issuperset(rerun.reads) and not (read & (inner - {*rerun.storages}))

    @cached_property
    def with_reruns(self) -> "ComposedStep":
        """The step in which regions may run forward again as a whole."""
        ops = list(self.graph.ops)
        for rerun in self.reruns.values():
            for op in rerun.ops:
                ops[op] = replace(ops[op], non_recomputable=None)
        return replace(self, graph=replace(self.graph, ops=tuple(ops)))

    def has_reruns(self, schedule: Schedule) -> bool:
        """Whether a schedule makes again what regions hand to others."""
        outputs = {
            self._numbers[index, op]
            for index, region in enumerate(self.regions)
            for op in region.outputs
            if (index, op) in self._numbers
        }
        return not outputs.isdisjoint(schedule.recompute_counts())

    @property
    def made_bytes(self) -> int:
        """The bytes of all that the step has, one after the other."""
        return sum(storage.size_bytes for storage in self.graph.storages)

    def held_bytes(self, schedule: Schedule, trace: Trace) -> tuple[int, ...]:
        """Return what is live as forward begins, after each region, and at its end.

        Then its caller has not let go of any output.
        """
        timeline = trace.timeline_bytes[0]
        ends = [
            timeline[position]
            for position, step in enumerate(schedule.steps)
            if isinstance(step, Compute)
            and self.origins[step.op] is None
            and self.graph.ops[step.op].name.startswith(_END)
        ]
        resident = (s.size_bytes for s in self.graph.storages if s.is_resident)
        boundary = timeline[schedule.steps.index(Boundary())]
        let_go = set(self.outputs.values()).difference(self.graph.forward_outputs)
        boundary += sum(self.graph.storages[s].size_bytes for s in let_go)
        return (sum(resident), *ends[: len(self.storages)], boundary)

    def backward_bytes(self, schedule: Schedule, trace: Trace) -> tuple[int, ...]:
        """Return most bytes in backward of the regions before each one, and of all.

        Less the gradients that later regions have left by then.
        """
        timeline = trace.timeline_bytes[0]
        boundary = schedule.steps.index(Boundary())
        final = set(self.graph.final_outputs)
        count = len(self.storages)
        peaks, left = [0] * count, [0] * count
        for position, step in enumerate(schedule.steps):
            if not isinstance(step, Compute):
                continue
            origin = self.origins[step.op]
            if origin is None or position < boundary:
                continue
            region = origin[0]
            peaks[region] = max(peaks[region], timeline[position])
            left[region] += sum(
                self.graph.storages[storage].size_bytes
                for storage in final.intersection(self.graph.ops[step.op].writes)
            )
        most = [0, *accumulate(peaks, max)]
        # What the regions from each one on leave.
        later = [*accumulate(reversed(left), initial=0)][::-1]
        return tuple(
            max(0, peak - gone) for peak, gone in zip(most, later, strict=True)
        )

    def resized(
        self, changed: Mapping[int, tuple[TrainingGraph, TrainingGraph]]
    ) -> "ComposedStep | None":
        """Return the step with other graphs for some regions, if it can be.

        Parameters
        ----------
        changed
            Per region its graph, and the one to put there: of the same ops on blocks of
            other sizes, or else the answer is ``None``.
        """
        if not changed:
            return self
        if any(_structure(known) != _structure(new) for known, new in changed.values()):
            return None
        storages, ops = list(self.graph.storages), list(self.graph.ops)
        for region, (known, found) in changed.items():
            for number, mapped in self.storages[region].items():
                old_bytes = known.storages[number].size_bytes
                new_bytes = found.storages[number].size_bytes
                size_bytes = storages[mapped].size_bytes
                if new_bytes not in (old_bytes, size_bytes):
                    # It may be a part of a larger block, of which others are parts too.
                    size_bytes += new_bytes - old_bytes
                    size_bytes = max(size_bytes, new_bytes)
                    storages[mapped] = replace(storages[mapped], size_bytes=size_bytes)
        for index, origin in enumerate(self.origins):
            # Gradients of parameters do not vary, nor what their sums need.
            if origin is None or origin[0] not in changed or ops[index].name == ADDING:
                continue
            _, found = changed[origin[0]]
            workspace_bytes = found.ops[origin[1]].workspace_bytes
            if ops[index].workspace_bytes != workspace_bytes:
                ops[index] = replace(ops[index], workspace_bytes=workspace_bytes)
        graph = replace(self.graph, storages=tuple(storages), ops=tuple(ops))
        return replace(self, graph=graph)

    def region_orders(self, schedule: Schedule, trace: Trace) -> list[RegionOrder]:
        """Take a schedule of the step, ordered by regions, apart."""
        orders: list[list[int]] = [[] for _ in self.storages]
        fullest: list[set[int]] = [set() for _ in self.storages]
        again: list[tuple[int, ...]] = [() for _ in self.storages]
        remade: set[int] = set()
        for run in self._runs(schedule):
            if not run:
                for order in orders:
                    order.append(BOUNDARY)
                continue
            pairs = [(position, self._origin(schedule, position)) for position in run]
            region = pairs[0][1][0]
            if self._is_rerun(orders[region], [op for _, (_, op) in pairs], region):
                again[region] = tuple(op for _, (_, op) in pairs)
                remade.update(self.reruns[region].storages)
                continue
            for position, (_, op) in pairs:
                if trace.timeline_bytes[0][position] == trace.peak_bytes[0]:
                    fullest[region].add(len(orders[region]))
                orders[region].append(op)
        return [
            RegionOrder(
                order=tuple(order),
                fullest=frozenset(full),
                again=ops,
                remade=frozenset(n for n, s in mapped.items() if s in remade),
            )
            for order, full, ops, mapped in zip(
                orders, fullest, again, self.storages, strict=True
            )
        ]

    def _runs(self, schedule: Schedule) -> list[list[int]]:
        """Return the positions of computations of a region in turn, ``[]`` between."""
        runs: list[list[int]] = []
        before: int | None = None
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Boundary):
                runs.append([])
                before = None
            elif isinstance(step, Compute):
                origin = self.origins[step.op]
                if origin is not None and origin[0] == before:
                    runs[-1].append(position)
                elif origin is not None:
                    runs.append([position])
                before = None if origin is None else origin[0]
        return runs

    def _origin(self, schedule: Schedule, position: int) -> tuple[int, int]:
        step = schedule.steps[position]
        origin = self.origins[step.op] if isinstance(step, Compute) else None
        if origin is None:
            msg = f"step {position} is none of a region"
            raise ValueError(msg)
        return origin

    def _is_rerun(self, before: Sequence[int], ops: Sequence[int], region: int) -> bool:
        """Whether ops in turn are all of a rerun: of forward, in backward."""
        forward = self.regions[region].graph.forward_count
        return BOUNDARY in before and max(ops) < forward


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A region that runs forward again as a whole.

    Parameters
    ----------
    region
        The region.
    local_ops, ops
        What runs, as ops of its graph and of the step's.
    storages
        What is made again, as storages of the step.
    reads
        What has to be there for it beside what always is, as storages of the step.
    """

    region: int
    local_ops: tuple[int, ...]
    ops: tuple[int, ...]
    storages: tuple[int, ...]
    reads: tuple[int, ...]


def _closure(
    region: Region, made: Sequence[int], fixed: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Return the ops that make outputs of a region again, and what these start from.

    Outputs that do not follow from inputs and noted states alone are left out, and
    those for which an op would have to write what is ``fixed``.
    """
    graph = region.graph
    chosen, given = set[int](), dict[int, None]()
    for output in made:
        ops, starts, stack = set[int](), list[int](), [output]
        is_whole = True
        while stack:
            storage = stack.pop()
            producer = graph.producers[storage]
            if producer is None:
                starts.append(storage)
            elif producer in ops:
                continue
            elif (
                graph.ops[producer].is_recomputable or producer in region.outputs
            ) and fixed.isdisjoint(graph.ops[producer].writes):
                ops.add(producer)
                stack += graph.ops[producer].reads
            elif graph.ops[producer].is_ordered and not graph.ops[producer].reads:
                starts.append(storage)  # The state of a random generator.
            else:
                is_whole = False
                break
        if is_whole:
            chosen |= ops
            given |= dict.fromkeys(starts)
    return sorted(chosen), list(given)


def compose(name: str, parts: Parts, *, frees_tangents: bool) -> ComposedStep:
    """Return the step that runs the parts in order.

    Parameters
    ----------
    name
        Name of the graph, for people.
    parts
        What the step is made of.
    frees_tangents
        Whether a region frees the gradients of its outputs at their last use, not at
        its end.

    Raises
    ------
    InvalidGraphError
        If the parts do not hang together as they say.
    """
    return _Composition(name, parts, frees_tangents=frees_tangents).run()


_END = "the end of graph "


class _Composition:
    def __init__(self, name: str, parts: Parts, *, frees_tangents: bool) -> None:
        self.name = name
        self.parts = parts
        self.regions = parts.regions
        # A graph that holds no tensor of an accelerator is none of it, and runs beside.
        kinds = [region.graph.device_kinds for region in self.regions]
        self.device_kinds = next((k for k in kinds if k != ("cpu",)), kinds[0])
        self.frees_tangents = frees_tangents
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.origins: list[tuple[int, int] | None] = []
        self.maps: list[dict[int, int]] = [{} for _ in parts.regions]
        # Per block its storage, and per storage how long it is held.
        self.blocks: dict[int, int] = {}
        self.held: dict[int, int] = {}
        # Per slot the gradients that it has got, and how many a leaf will get.
        self.gradients: defaultdict[Slot, list[int]] = defaultdict(list)
        # Slots whose first gradient is a view, which holds the tensor that it is of.
        self.viewed: set[Slot] = set()
        # Per storage, in how many slots it waits as a gradient.
        self.waiting: Counter[int] = Counter()
        self.slot_blocks = _slot_blocks(parts)
        self.gradient_counts = Counter(
            slot
            for each in parts.backward
            if not isinstance(each, EagerWork)
            for slot, _ in (
                self.regions[each].gradients
                if isinstance(each, int)
                else each.gradients
            )
        )
        self.taken = frozenset(
            slot
            for each in parts.backward
            if isinstance(each, EagerWork)
            for slot in each.takes
        )
        self.tangents: list[int] = []
        self.final: dict[int, None] = {}

    def run(self) -> ComposedStep:
        count = len(self.regions)
        for region in range(count):
            self.add_eager_forward(region)
            self.add_forward(region)
        self.add_eager_forward(count)
        returned = self.held_after(count)
        self.final.update(dict.fromkeys(returned))
        for each in self.parts.backward:
            if isinstance(each, int):
                self.add_backward(each)
            elif isinstance(each, EagerWork):
                self.add_work(each)
            else:
                self.add_eager_backward(each)
        graph = TrainingGraph(
            name=self.name,
            storages=tuple(self.storages),
            ops=tuple(self.ops),
            forward_outputs=tuple(returned),
            tangents=tuple(self.tangents),
            final_outputs=tuple(self.final),
            device_kinds=self.device_kinds,
        )
        return ComposedStep(
            graph=graph,
            origins=tuple(self.origins),
            storages=tuple(self.maps),
            regions=tuple(self.regions),
            outputs={
                position: self.blocks[block]
                for position, block in self.parts.outputs.items()
                if block in self.blocks
            },
            adds=any(self.parts.leaves.values()),
        )

    def add_storage(self, storage: Storage, block: int | None = None) -> int:
        self.storages.append(storage)
        number = len(self.storages) - 1
        if block is not None:
            self.blocks[block] = number
            self.held[number] = self.parts.held.get(block, -1)
        return number

    # --- forward -----------------------------------------------------------------

    def add_eager_forward(self, before: int) -> None:
        """Add what operators in no graph do before a region."""
        eager = self.parts.between.get(before)
        if eager is None:
            return
        made = tuple(
            self.add_storage(Storage(name="value in no graph", size_bytes=size), block)
            for block, size in eager.made.items()
        )
        reads = () if before == 0 else tuple(self.held_after(before - 1))
        self.add_between(
            f"operators in no graph before graph {before}",
            Phase.FORWARD,
            tuple(storage for storage in reads if storage not in made),
            made,
            workspace_bytes=eager.workspace_bytes,
        )

    def add_forward(self, index: int) -> None:
        region, mapped = self.regions[index], self.maps[index]
        for number, block in region.given.items():
            if block not in self.blocks:
                storage = region.graph.storages[number]
                if block in self.parts.gathered:
                    storage = replace(storage, size_bytes=0)
                self.add_storage(storage, block)
            mapped[number] = self.blocks[block]
        self.add_ops(index, Phase.FORWARD)
        for number, block in region.made.items():
            storage = self.storage_of(index, number)
            self.blocks[block] = storage
            self.held[storage] = self.parts.held.get(block, -1)
        if index in self.parts.left:
            for number in _kept_for_nothing(region):
                self.held[self.storage_of(index, number)] = len(self.regions)
        outputs = [self.storage_of(index, n) for n in region.graph.forward_outputs]
        reads = tuple(dict.fromkeys([*outputs, *self.held_after(index)]))
        self.add_between(f"{_END}{index}", Phase.FORWARD, reads)

    def held_after(self, index: int) -> list[int]:
        """Return what the code around the regions holds when a region has ended."""
        return [
            storage
            for storage, last in self.held.items()
            if last >= index and not self.storages[storage].is_resident
        ]

    def storage_of(self, index: int, number: int) -> int:
        """Return the storage of the step that a region's storage is."""
        mapped = self.maps[index]
        if number not in mapped:
            mapped[number] = self.add_storage(
                self.regions[index].graph.storages[number]
            )
        return mapped[number]

    def add_ops(self, index: int, phase: Phase) -> None:
        for number, op in enumerate(self.regions[index].graph.ops):
            if op.phase is phase:
                reads = dict.fromkeys(self.storage_of(index, s) for s in op.reads)
                writes = tuple(self.storage_of(index, s) for s in op.writes)
                self.ops.append(replace(op, reads=tuple(reads), writes=writes))
                self.origins.append((index, number))

    def add_between(
        self,
        name: str,
        phase: Phase,
        reads: tuple[int, ...],
        writes: tuple[int, ...] = (),
        *,
        workspace_bytes: int = 0,
        cost_ns: int = 0,
    ) -> None:
        count = len(self.device_kinds)
        self.ops.append(
            Op(
                name=name,
                reads=tuple(s for s in reads if not self.storages[s].is_resident),
                writes=writes,
                cost_ns=(cost_ns,) * count,
                workspace_bytes=(workspace_bytes,) * count,
                phase=phase,
                non_recomputable=_BETWEEN,
            )
        )
        self.origins.append(None)

    # --- backward ----------------------------------------------------------------

    def add_backward(self, index: int) -> None:
        region, mapped = self.regions[index], self.maps[index]
        dropped: dict[int, None] = {}
        for tangent in region.graph.tangents:
            block = region.graph.storages[tangent]
            slot = region.slots.get(tangent)
            found = None if slot is None else self.gradient_at(slot, block)
            if found is None:
                name = f"zeros for {block.name}"
                if tangent in region.one_zeros:
                    block = replace(block, size_bytes=0)
                found = self.made_between(name, block, ())
            elif self.storages[found].size_bytes < block.size_bytes:
                # An expanded one, as of a sum: regions take copies of them.
                dropped[found] = None
                found = self.made_between(f"all of {block.name}", block, (found,))
            mapped[tangent] = found
        first = len(self.ops)
        self.add_ops(index, Phase.BACKWARD)
        self.count_sums(index, first)
        if not self.frees_tangents:
            dropped.update(dict.fromkeys(mapped[t] for t in region.graph.tangents))
        for slot, gradient in region.gradients:
            if gradient in region.views and not self.gradients[slot]:
                self.viewed.add(slot)
            found = self.hand_over(slot, self.storage_of(index, gradient))
            if gradient not in region.handed_over or self.gradient_counts[slot] > 1:
                dropped.update(found)
        self.drop(f"the end of backward of graph {index}", dropped)

    def count_sums(self, index: int, first: int) -> None:
        """Count sums that autograd makes when a region hands over gradients early.

        With ones of other regions, and not in the place of either.
        """
        region = self.regions[index]
        sums = {
            self.storage_of(index, gradient)
            for slot, gradient in region.gradients
            if gradient in region.handed_over
            and self.gradients[slot]
            and slot in self.viewed
        }
        for number in range(first, len(self.ops)):
            op = self.ops[number]
            if op.name == ADDING and sums.intersection(op.reads):
                made = (
                    self.storages[s].size_bytes for s in sums.intersection(op.reads)
                )
                size_bytes = max(made)
                sizes = tuple(size + size_bytes for size in op.workspace_bytes)
                self.ops[number] = replace(op, workspace_bytes=sizes)

    def add_work(self, work: EagerWork) -> None:
        """Add what is done around the regions, and after it what it needed last."""
        reads = [self.blocks[block] for block in work.reads]
        for slot in work.takes:
            reads += self.gradients[slot]
        made = tuple(
            self.add_storage(Storage(name=work.name, size_bytes=size), block)
            for block, size in work.made.items()
        )
        self.final.update(
            (self.blocks[block], None)
            for block in work.made
            if block in self.parts.stay
        )
        self.add_between(
            work.name,
            Phase.BACKWARD,
            tuple(dict.fromkeys(reads)),
            made,
            workspace_bytes=work.workspace_bytes,
            cost_ns=work.cost_ns,
        )

    def add_eager_backward(self, eager: EagerBackward) -> None:
        got: list[int | None] = []
        for slot, size_bytes in eager.slots:
            block = _gradient_for(eager, size_bytes)
            got.append(self.gradient_at(slot, block))
        reads = [storage for storage in got if storage is not None]
        reads += [self.blocks[block] for block in eager.saved]
        writes: list[int] = []
        handed: list[tuple[Slot, int]] = []
        for slot, size_bytes in eager.gradients:
            storage = got[-1 - size_bytes] if size_bytes < 0 else None
            if storage is None:
                name = f"gradient of {eager.name}"
                storage = self.add_storage(
                    Storage(
                        name=name, size_bytes=max(0, size_bytes), role=Role.GRADIENT
                    )
                )
                writes.append(storage)
            handed.append((slot, storage))
        self.add_between(
            eager.name,
            Phase.BACKWARD,
            tuple(dict.fromkeys(reads)),
            tuple(writes),
            workspace_bytes=eager.workspace_bytes,
        )
        dropped: dict[int, None] = {}
        for slot, storage in handed:
            if slot in eager.views and not self.gradients[slot]:
                self.viewed.add(slot)
            dropped.update(self.hand_over(slot, storage))
        self.drop(f"the end of {eager.name}", dropped)

    def drop(self, name: str, dropped: Mapping[int, None]) -> None:
        if dropped:
            self.add_between(name, Phase.BACKWARD, tuple(dropped))

    def hand_over(self, slot: Slot, gradient: int) -> dict[int, None]:
        """Hand a gradient over to a slot, and return what is read once more for it.

        Autograd adds each to the one that is there as it comes. That of a leaf is
        added, once all are there, to a gradient of earlier steps.
        """
        found = self.gradients[slot]
        found.append(gradient)
        if slot not in self.parts.leaves:
            self.waiting[gradient] += 1
            if len(found) == 2 and slot in self.slot_blocks:
                total = self.added(slot, found, self.slot_blocks[slot])
                found[:] = [total]
                self.waiting[total] += 1
            return {}
        dropped: list[int] = []
        if len(found) == 2 and slot in self.viewed:
            block = self.storages[found[0]]
            found[0] = self.made_between("the sum of gradients", block, tuple(found))
        elif len(found) > 1:
            dropped += [found[0], found[-1]]
        if len(found) == self.gradient_counts[slot]:
            if slot in self.taken:
                found[:] = found[:1]
            elif self.parts.leaves[slot]:
                dropped.append(found[0])
            else:
                self.final[found[0]] = None
        return dict.fromkeys(dropped)

    def gradient_at(self, slot: Slot, block: Storage) -> int | None:
        """Return the gradient that has come together in a slot, if there is one."""
        found = self.gradients[slot]
        if slot in self.parts.returned:
            self.tangents.append(self.add_storage(block))
            self.waiting[self.tangents[-1]] += 1
            found = [*found, self.tangents[-1]]
        if len(found) < 2:
            self.waiting.subtract(found)
            return found[0] if found else None
        return self.added(slot, found, block)

    def added(self, slot: Slot, found: Sequence[int], block: Storage) -> int:
        """Return the sum of gradients that come together."""
        self.waiting.subtract(found)
        name, reads = f"the sum for {block.name}", tuple(dict.fromkeys(found))
        first = found[0]
        is_shared = first in self.final or self.waiting[first] > 0
        if len(reads) < len(found) or is_shared or slot in self.viewed:
            return self.made_between(name, block, reads)
        # Autograd adds to the first where nobody else has it.
        self.add_between(name, Phase.BACKWARD, reads)
        return first

    def made_between(self, name: str, block: Storage, reads: tuple[int, ...]) -> int:
        made = self.add_storage(
            Storage(name=name, size_bytes=block.size_bytes, role=block.role)
        )
        self.add_between(name, Phase.BACKWARD, reads, (made,))
        return made


def _structure(graph: TrainingGraph) -> tuple[object, ...]:
    """Return what is equal for graphs that differ in nothing but sizes and times."""
    return (
        [(s.role, s.is_resident) for s in graph.storages],
        [(op.kind, op.reads, op.writes, op.is_recomputable) for op in graph.ops],
        (graph.forward_outputs, graph.tangents, graph.final_outputs),
    )


def growth_bytes(known: TrainingGraph, found: TrainingGraph) -> int | None:
    """Return how much more a graph may need, in any order, than one of other sizes.

    ``None`` if they differ in more than sizes and times.
    """
    if _structure(known) != _structure(found):
        return None
    blocks = zip(known.storages, found.storages, strict=True)
    workspaces = (
        new - old
        for one, other in zip(known.ops, found.ops, strict=True)
        for old, new in zip(one.workspace_bytes, other.workspace_bytes, strict=True)
    )
    more_bytes = sum(max(0, new.size_bytes - old.size_bytes) for old, new in blocks)
    return more_bytes + max(0, 0, *workspaces)


def _slot_blocks(parts: Parts) -> dict[Slot, Storage]:
    """Return what a gradient is that has come together, per slot of an output."""
    found = {
        slot: region.graph.storages[tangent]
        for region in parts.regions
        for tangent, slot in region.slots.items()
    }
    for each in parts.backward:
        if isinstance(each, EagerBackward):
            found |= {slot: _gradient_for(each, size) for slot, size in each.slots}
    return found


def _gradient_for(eager: EagerBackward, size_bytes: int) -> Storage:
    name = f"gradient for {eager.name}"
    return Storage(name=name, size_bytes=size_bytes, role=Role.TANGENT)


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


def _kept_for_nothing(region: Region) -> list[int]:
    """Return what a region keeps in the frugal order if no backward pass comes."""
    graph = region.graph
    order = frugal_order(graph)
    later = order[order.index(BOUNDARY) + 1 :]
    read = {storage for op in later for storage in graph.ops[op].reads}
    forward = graph.ops[: graph.forward_count]
    once = {s for op in forward if op.non_recomputable for s in op.writes}
    return sorted(read & (once | set(region.given)))


def plan_regions(
    step: ComposedStep,
    solve: Callable[[Budget | None], Plan],
    budget: Budget | None,
    *,
    spare_bytes: int = 0,
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
    spare_bytes
        How much of it is to be left, if that can be, as sizes vary.

    Raises
    ------
    BudgetError
        If no schedule is known that fits; names the smallest known budget.

    Notes
    -----
    Solvers know nothing of regions. An op of theirs that runs among those of another
    region runs with its own instead, and where that takes more than the budget, they
    are asked again for as much less. The plan for the smallest budget comes last, and
    an error names what that takes: so the budget that it names works. Raises what
    ``solve`` raises, too.
    """
    if spare_bytes and isinstance(budget, int):
        spared = _leaving(step, solve, budget, spare_bytes)
        if spared is not None:
            return spared
    try:
        plan = solve(budget)
    except BudgetError as error:
        raise _true_error(step, error, solve) from None
    budget_bytes = asked_bytes = plan.budget_bytes or 0
    for _ in range(_ATTEMPTS):
        found = _by_regions(step, plan, budget_bytes)
        if isinstance(found, Plan):
            is_as_asked = asked_bytes == budget_bytes
            return found if is_as_asked else replace(found, status=Status.FEASIBLE)
        asked_bytes -= max(1, found - budget_bytes)
        try:
            plan = solve(asked_bytes)
        except BudgetError:
            break
    plan, least = _smallest_plan(solve, 1)
    # What an error has named may be the peak of one of these.
    others = [plan.schedule, least or plan.schedule, _keeping_all(step)]
    for other in others:
        found = _by_regions(step, plan, budget_bytes, other)
        if isinstance(found, Plan):
            return replace(found, status=Status.FEASIBLE)
    raise _budget_error(step, budget_bytes, *_least_of(step, others))


_ATTEMPTS = 4


def _leaving(
    step: ComposedStep,
    solve: Callable[[Budget | None], Plan],
    budget_bytes: int,
    spare_bytes: int,
) -> Plan | None:
    """Return a plan that leaves so much of a budget, or a half or a quarter of it."""
    least_bytes = 1
    for part in (1, 2, 4):
        asked_bytes = budget_bytes - spare_bytes // part
        if asked_bytes < least_bytes:
            continue
        try:
            plan = solve(asked_bytes)
        except BudgetError as error:
            least_bytes = error.required_bytes
            continue
        found = _by_regions(step, plan, budget_bytes)
        if isinstance(found, Plan):
            return replace(found, status=Status.FEASIBLE)
    return None


def _by_regions(
    step: ComposedStep, plan: Plan, budget_bytes: int, other: Schedule | None = None
) -> Plan | int:
    """Return a plan as the regions run it, or the bytes that it needs, if more.

    With another schedule in place of its own, if one is given.
    """
    schedule = step.by_regions(other or plan.schedule)
    is_as_planned = schedule == plan.schedule and plan.budget_bytes == budget_bytes
    trace = plan.trace if is_as_planned else _judged(step, schedule, budget_bytes)
    if trace.violation is not None:
        return trace.peak_bytes[0]
    if is_as_planned:
        return plan
    if plan.budget_bytes != budget_bytes:
        plan = at_budget(plan, budget_bytes)
        return with_bound(replace(plan, schedule=schedule, _judged=trace))
    return replace(plan, schedule=schedule, _judged=trace)


def _smallest_plan(
    solve: Callable[[Budget | None], Plan], least_bytes: int
) -> tuple[Plan, Schedule | None]:
    """Return the plan for the smallest budget, of this or more, of which one is known.

    With the schedule that budget is known from, which the plan's may be quicker than.
    With less time solvers may know of a larger one than before.
    """
    known: Schedule | None = None
    while True:
        try:
            return solve(least_bytes), known
        except BudgetError as error:
            if error.required_bytes <= least_bytes:
                raise
            least_bytes, known = error.required_bytes, error.schedule


def _platform(step: ComposedStep, budget_bytes: int | None) -> Platform:
    return single_device(budget_bytes, kind=step.graph.device_kinds[0])


def _judged(step: ComposedStep, schedule: Schedule, budget_bytes: int | None) -> Trace:
    return simulate(step.graph, _platform(step, budget_bytes), schedule)


def _true_error(
    step: ComposedStep, error: BudgetError, solve: Callable[[Budget | None], Plan]
) -> BudgetError:
    """Return an error whose smallest known budget works for whole regions too."""
    schedule = error.schedule
    if schedule is None:
        try:
            schedule = _smallest_plan(solve, error.required_bytes)[0].schedule
        except BudgetError:
            return error
    needed_bytes, as_run = _least_of(step, [schedule, _keeping_all(step)])
    if needed_bytes <= error.required_bytes:
        error.schedule = as_run
        return error
    return _budget_error(step, error.budget_bytes, needed_bytes, as_run)


def _least_of(
    step: ComposedStep, schedules: Iterable[Schedule]
) -> tuple[int, Schedule]:
    """Return the smallest peak of schedules as the regions run, and whose it is."""
    as_run = [step.by_regions(schedule) for schedule in schedules]
    peaks = [_judged(step, schedule, None).peak_bytes[0] for schedule in as_run]
    least = min(range(len(peaks)), key=peaks.__getitem__)
    return peaks[least], as_run[least]


def _keeping_all(step: ComposedStep) -> Schedule:
    return schedule_from_order(step.graph, store_all_order(step.graph))


def _budget_error(
    step: ComposedStep, budget_bytes: int, needed_bytes: int, schedule: Schedule
) -> BudgetError:
    msg = (
        f"no schedule of {step.graph.name} is known that fits "
        f"{format_bytes(budget_bytes)} ({budget_bytes} bytes) with each of its "
        f"{len(step.storages)} graphs run as a whole; the smallest known budget is "
        f"{format_bytes(needed_bytes)} ({needed_bytes} bytes)"
    )
    return BudgetError(
        msg, budget_bytes=budget_bytes, required_bytes=needed_bytes, schedule=schedule
    )
