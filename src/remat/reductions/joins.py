"""Joins: from a training graph whose forward pass has branches that meet, and back.

The structure is that of :mod:`remat.reductions.join_structure`. Backward follows it: an
op of backward belongs to the earliest stage, in forward order, whose values it reads or
whose backward it depends on. Where that is two stages of different branches, as for the
sum of what two branches add to the gradient of a shared parameter, the op belongs to
the fork itself, and runs as soon as what it depends on has run.

Two forms are made of the structure. If forward begins with a fork, all that follows it
can be the turn of a join, which
:func:`~remat.algorithms.chains.stage_joins.plan_stage_join` takes as a whole. In any
case forks can be stages of a series (:mod:`remat.algorithms.chains.blocks`), their
insides planned first, so that stems, trunks and nested forks are allowed; that is a
decomposition, not an exact program.

A plan is lifted op by op as for chains (:mod:`remat.reductions.stages`). Before the
turn everything runs once, in the order of the plan if the ops allow that (random
numbers are drawn in one order only), or else in that of the graph.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

from remat.algorithms.chains.blocks import Block, BlockStage, block_stage
from remat.algorithms.chains.operations import Backward, Forward, Operation, Turn
from remat.algorithms.chains.stage_joins import MAX_BRANCHES, StageJoin
from remat.algorithms.chains.stages import Stage, StageChain
from remat.core.deadline import check_time
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY
from remat.reductions.join_structure import (
    Fork,
    ForwardStructure,
    Leaf,
    Series,
    merged_series,
)
from remat.reductions.segments import SegmentedGraph
from remat.reductions.stage_parts import (
    StagePart,
    cost_ns,
    never_lost,
    scratch_bytes,
    stage_of_part,
    stage_part,
)

Place = tuple[int, ...]
"""A stage or a fork: item of the series, branch of that fork, item of that branch..."""

MAX_BRANCH_STAGES = {2: 40, 3: 12, 4: 6, 5: 4, 6: 3}
"""Number of branches -> stages of each, so that tables stay small."""


def is_before(place: Place, other: Place) -> bool:
    """Whether a place comes before another in every order of forward.

    Examples
    --------
    >>> (
    ...     is_before((0,), (1,)),
    ...     is_before((0, 0, 3), (0, 1, 0)),
    ...     is_before((0,), (0, 1, 0)),
    ... )
    (True, False, True)
    """
    for depth, (one, two) in enumerate(zip(place, other, strict=False)):
        if one != two:
            return depth % 2 == 0 and one < two
    return len(place) < len(other)


def meet(place: Place, other: Place) -> Place:
    """Return the latest place that comes before both or is one of them.

    Examples
    --------
    >>> meet((2,), (0, 1, 0)), meet((0, 0, 3), (0, 1, 0))
    ((0, 1, 0), (0,))
    """
    if place == other or is_before(place, other):
        return place
    if is_before(other, place):
        return other
    depth = next(
        depth
        for depth, (one, two) in enumerate(zip(place, other, strict=False))
        if one != two
    )
    return place[:depth]


class JoinOfStages:
    """A training graph as a join, or as a series with forks, and the way back.

    Parameters
    ----------
    segmented
        The graph.
    series
        Its structure; the last stage is the turn.
    kind_index
        Position of the device's kind in the ops' costs.
    """

    def __init__(
        self, segmented: SegmentedGraph, series: Series, kind_index: int
    ) -> None:
        self.graph: TrainingGraph = segmented.graph
        self._segmented = segmented
        self._kind = kind_index
        self._series = series
        self._leaves = dict(_leaves(series, ()))
        self._turn: Place = (len(series) - 1,)
        self._place_of = {
            op: place for place, leaf in self._leaves.items() for op in leaf.ops
        }
        self._backward_place = self._assigned()
        self._parts = {
            place: self._part(place, leaf) for place, leaf in self._leaves.items()
        }
        self._blocks: dict[Place, BlockStage] = {}

    @property
    def is_join(self) -> bool:
        """Whether the series is of one fork and a turn, so that it is a join."""
        return len(self._series) == 2 and isinstance(self._series[0], Fork)

    @property
    def stage_counts(self) -> list[int]:
        """Stages of each branch of the first fork."""
        forks = (item for item in self._series if isinstance(item, Fork))
        first = next(forks, None)
        return [] if first is None else [len(branch) for branch in first.branches]

    # --- where backward runs ----------------------------------------------------------

    def _assigned(self) -> dict[int, Place]:
        """Return where each op of backward belongs."""
        kept: set[int] = set()
        while True:
            latest = self._latest(kept)
            found, more = self._assign(latest)
            if not more:
                return found
            kept |= more

    def _latest(self, kept: set[int]) -> dict[int, Place]:
        """Return per storage that may be lost the last place in forward to have it.

        Its backward is the first in which the storage is there without being computed
        for that alone. An end of a stage is still there in what follows.
        """
        is_kept = never_lost(self.graph)
        found: dict[int, Place] = {}
        for storage, producer in enumerate(self.graph.producers):
            if producer is None or is_kept[storage] or storage in kept:
                continue
            own = self._place_of.get(producer)
            if own is None:
                continue
            readers = (
                self._place_of.get(r, own) for r in self.graph.consumers[storage]
            )
            if storage in self._leaves[own].ends:
                found[storage] = self._following(own)
            elif all(place == own for place in readers):
                found[storage] = own
        return found

    def _following(self, place: Place) -> Place:
        """Return the stage or fork that comes next."""
        series = self._series_at(place[:-1])
        if place[-1] + 1 < len(series):
            return (*place[:-1], place[-1] + 1)
        return self._following(place[:-2])

    def _series_at(self, prefix: Place) -> Series:
        series = self._series
        for item, branch in zip(prefix[::2], prefix[1::2], strict=True):
            fork = series[item]
            if not isinstance(fork, Fork):
                msg = f"place {prefix} is in no fork"
                raise AssertionError(msg)  # noqa: TRY004 - a fault of this module
            series = fork.branches[branch]
        return series

    def _assign(
        self, latest: dict[int, Place]
    ) -> tuple[dict[int, Place], frozenset[int]]:
        """Return the place of each op, and what must be kept to make them possible."""
        segmented = self._segmented
        found: dict[int, Place] = {}
        more: set[int] = set()
        for op in segmented.backward:
            check_time()
            places = [found[p] for p in segmented.predecessors[op] if p in found]
            lost = [s for s in self.graph.ops[op].reads if s in latest]
            stages = [latest[s] for s in lost if latest[s] in self._leaves]
            place = reduce(meet, [*places, *stages], self._turn)
            # What is before a fork is there in the first stages of its branches.
            for storage in lost:
                if latest[storage] not in self._leaves:
                    place = self._at_entry(place, latest[storage], storage)
            if place not in self._leaves:
                more |= {s for s in lost if not is_before(latest[s], place)}
            found[op] = place
        return found, frozenset(more)

    def _at_entry(self, place: Place, fork: Place, storage: int) -> Place:
        """Return where an op of ``place`` finds the input of a fork."""
        if len(place) > len(fork) and place[: len(fork)] == fork:
            first = (*place[: len(fork) + 1], 0)
            if first in self._leaves:
                return first
        if is_before(place, fork):
            return place
        producer = self.graph.producers[storage]
        return place if producer is None else meet(place, self._place_of[producer])

    def _part(self, place: Place, leaf: Leaf) -> StagePart:
        check_time()
        backward = [
            op for op in self._segmented.backward if self._backward_place[op] == place
        ]
        return stage_part(
            self.graph,
            forward=leaf.ops,
            backward=[op for op in backward if not self.graph.ops[op].is_external],
            ends=leaf.ends,
            kind_index=self._kind,
            has_options=place != self._turn,
        )

    # --- what the programs take -------------------------------------------------------

    @cached_property
    def _gradients(self) -> list[tuple[int, Place, tuple[Place, ...]]]:
        """Bytes, place of origin and places of use of what backward makes."""
        graph, place = self.graph, self._backward_place
        found: list[tuple[int, Place, tuple[Place, ...]]] = []
        for storage, producer in enumerate(graph.producers):
            if producer in place:
                uses = {
                    place[op]
                    for op in graph.consumers[storage]
                    if op in place and not graph.ops[op].is_external
                }
                size = graph.storages[storage].size_bytes
                found.append((size, place[producer], tuple(uses - {place[producer]})))
        return found

    def _gradient_bytes(self, below: Place) -> int:
        """Return the bytes that backward passes to a stage from what follows it."""
        check_time()
        branch = below[:-1]
        return sum(
            size
            for size, origin, uses in self._gradients
            if is_before(below, origin)
            and any(
                (use == below or is_before(use, below))
                and branch in {origin[: len(branch)], use[: len(branch)]}
                for use in uses
            )
        )

    def join(self) -> StageJoin:
        """Return the graph as a join.

        Raises
        ------
        ValueError
            If it is not of a fork and a turn alone.
        """
        fork = self._series[0]
        if len(self._series) != 2 or not isinstance(fork, Fork):
            msg = "the series is not of one fork and a turn"
            raise ValueError(msg)
        turn_ns, workspace = self._turn_numbers()
        return StageJoin(
            branches=self._branch_chains(fork, (0,)),
            turn_ns=turn_ns,
            turn_workspace_bytes=workspace,
        )

    def chain(self) -> StageChain:
        """Return the graph as a chain of stages, with forks as stages of options.

        Raises
        ------
        SolverUnsuitableError
            If the inside of a fork is too large for its program.
        """
        turn_ns, workspace = self._turn_numbers()
        return StageChain(
            stages=tuple(
                self._stage(item, (index,))
                for index, item in enumerate(self._series[:-1])
            ),
            turn_ns=turn_ns,
            turn_workspace_bytes=workspace,
        )

    def _turn_numbers(self) -> tuple[int, int]:
        turn = self._parts[self._turn]
        ops = [*turn.forward, *turn.options[0].backward]
        return (
            cost_ns(self.graph, ops, self._kind),
            scratch_bytes(self.graph, ops, self._kind),
        )

    def _stage(self, item: Leaf | Fork, place: Place) -> Stage:
        if isinstance(item, Leaf):
            return stage_of_part(
                self.graph,
                self._parts[place],
                item.ends,
                self._gradient_bytes(place),
                self._kind,
            )
        branches = self._branch_chains(item, place)
        block = block_stage(
            Block(
                branches=branches,
                output_bytes=sum(chain.value_bytes[-1] for chain in branches),
                gradient_bytes=sum(chain.gradient_bytes[-1] for chain in branches),
                # What meets is one stage later.
                merge_needs_inputs=False,
                name=f"fork of {len(branches)}",
            )
        )
        self._blocks[place] = block
        return block.stage

    def _branch_chains(self, fork: Fork, place: Place) -> tuple[StageChain, ...]:
        return tuple(
            StageChain(
                stages=tuple(
                    self._stage(item, (*place, index, position))
                    for position, item in enumerate(branch)
                ),
                input_gradient_bytes=self._gradient_bytes((*place, index, -1)),
            )
            for index, branch in enumerate(fork.branches)
        )

    # --- the way back -----------------------------------------------------------------

    def order(self, operations: Sequence[Operation]) -> list[int]:
        """Return the order of ops that a plan of :meth:`join` or :meth:`chain` is.

        Raises
        ------
        ValueError
            If an operation is none of a join on one device.
        """
        turn = operations.index(Turn())
        prefix: Place = (0,) if self.is_join else ()
        before = self._expand(operations[:turn], prefix)
        after = self._expand(operations[turn + 1 :], prefix)
        late = _Late(self._segmented, self._late_ops())
        order = [*self._first_pass(before), BOUNDARY, *late.at_once()]
        for op in self._parts[self._turn].options[0].backward:
            order += [op, *late.after(op)]
        for place, operation in after:
            part = self._parts[place]
            way = part.options[operation.option or 0]
            if isinstance(operation, Backward):
                for op in way.backward:
                    order += [op, *late.after(op)]
            else:
                order += part.again if operation.option is None else way.saving
        return order

    def _expand(
        self, operations: Iterable[Operation], prefix: Place
    ) -> Iterator[tuple[Place, Forward | Backward]]:
        """Yield the runs of stages that operations on a series or a fork stand for."""
        is_fork = len(prefix) % 2 == 1
        for operation in operations:
            if not isinstance(operation, Forward | Backward):
                msg = f"{operation} is not an operation of a join on one device"
                raise ValueError(msg)  # noqa: TRY004 - a wrong plan, not a wrong type
            branch = (operation.branch,) if is_fork else ()
            place = (*prefix, *branch, operation.stage)
            block = self._blocks.get(place)
            if block is None:
                yield place, operation
                continue
            if isinstance(operation, Forward):
                inside = block.forward_operations(operation.option)
            elif operation.option is None:
                msg = f"{operation} of a fork has no option"
                raise ValueError(msg)
            else:
                inside = block.backward_operations(operation.option)
            yield from self._expand(inside, place)

    def _first_pass(
        self, runs: Iterable[tuple[Place, Forward | Backward]]
    ) -> Sequence[int]:
        """Return all of forward, once: in the order of the plan if ops allow that."""
        places = [*dict.fromkeys(place for place, _ in runs), self._turn]
        order = [op for place in places for op in self._parts[place].forward]
        done: set[int] = set()
        for op in order:
            if not done.issuperset(self._segmented.predecessors[op]):
                return self._segmented.forward
            done.add(op)
        return order

    def _late_ops(self) -> list[int]:
        """Return the ops of backward that belong to no stage."""
        return [
            op
            for op, place in self._backward_place.items()
            if place not in self._leaves or self.graph.ops[op].is_external
        ]


class _Late:
    """Ops of backward that run as soon as what they depend on has run."""

    def __init__(self, segmented: SegmentedGraph, ops: Iterable[int]) -> None:
        backward = set(segmented.backward)
        self._left: dict[int, int] = {}
        self._waiting: dict[int, list[int]] = {}
        for op in ops:
            before = [p for p in segmented.predecessors[op] if p in backward]
            self._left[op] = len(before)
            for producer in before:
                self._waiting.setdefault(producer, []).append(op)

    def at_once(self) -> list[int]:
        """Return what depends on nothing in backward, and what runs after it."""
        free = [op for op, left in self._left.items() if not left]
        return [op for first in free for op in (first, *self.after(first))]

    def after(self, op: int) -> list[int]:
        """Return what runs now that ``op`` has run."""
        found: list[int] = []
        pending = [op]
        while pending:
            for late in self._waiting.pop(pending.pop(), ()):
                self._left[late] -= 1
                if not self._left[late]:
                    found.append(late)
                    pending.append(late)
        return found


def _leaves(series: Series, prefix: Place) -> Iterator[tuple[Place, Leaf]]:
    for index, item in enumerate(series):
        if isinstance(item, Leaf):
            yield (*prefix, index), item
        else:
            for branch, inner in enumerate(item.branches):
                yield from _leaves(inner, (*prefix, index, branch))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinForms:
    """What a graph with a fork can be planned as.

    Parameters
    ----------
    join
        As a join whose turn is all that follows the fork, if forward begins with it.
    series
        As a series of stages and forks, if there is more than a fork and a turn.
    """

    join: JoinOfStages | None
    series: JoinOfStages | None


def reduce_to_join(
    graph: TrainingGraph, *, kind_index: int = 0, max_stages: int = 64
) -> JoinForms | None:
    """Return the forms of a graph whose forward pass has a fork; ``None`` without one.

    A fork of more than :data:`~remat.algorithms.chains.stage_joins.MAX_BRANCHES`
    branches counts as a stage like any other.

    Parameters
    ----------
    graph
        The graph to reduce.
    kind_index
        Position of the device's kind in the ops' costs.
    max_stages
        Most stages of a series; branches have at most :data:`MAX_BRANCH_STAGES`.
        Neighbouring stages are merged, cheapest first.

    Notes
    -----
    Time O(ops^2 / 64 + ops x cuts).
    """
    segmented = SegmentedGraph(graph)
    structure = ForwardStructure(segmented, kind_index)
    costs = [op.cost_ns[kind_index] or 0 for op in graph.ops]
    series = _merged(structure.series, costs, max_stages, is_whole=True)
    forks = [index for index, item in enumerate(series) if isinstance(item, Fork)]
    if not forks:
        return None
    join = None
    if forks[0] == 0:
        turn = Leaf(tuple(sorted(_ops(series[1:]))), ())
        join = JoinOfStages(segmented, (series[0], turn), kind_index)
    whole = JoinOfStages(segmented, series, kind_index) if len(series) > 2 else None
    return JoinForms(join=join, series=whole)


def _merged(
    series: Series, costs: Sequence[int], most: int, *, is_whole: bool = False
) -> Series:
    """Merge stages of a series and of the branches in it, and too wide forks."""
    items: list[Leaf | Fork] = []
    for item in series:
        if isinstance(item, Fork) and len(item.branches) > MAX_BRANCHES:
            ops = (op for branch in item.branches for op in _ops(branch))
            items.append(Leaf(tuple(sorted(ops)), item.ends))
        elif isinstance(item, Fork):
            limit = MAX_BRANCH_STAGES.get(len(item.branches), 1)
            branches = (_merged(branch, costs, limit) for branch in item.branches)
            items.append(replace(item, branches=tuple(branches)))
        else:
            items.append(item)
    return merged_series(tuple(items), most, costs, keeps_last=is_whole)


def _ops(series: Series) -> Iterator[int]:
    return (op for _, leaf in _leaves(series, ()) for op in leaf.ops)
