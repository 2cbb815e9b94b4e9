"""Stages: from a training graph to a chain of stages, and back.

The dynamic programs on chains (:mod:`remat.algorithms.chains`) plan stages through
whose ends everything goes. The reduction finds them: between two forward ops, in graph
order, the pass can be cut where one storage alone crosses, that is, is written before
and read by forward after. What is kept in any case does not count: outputs of ops that
may run only once, and small storages that much of forward reads, such as masks and
position biases.

A cut is of use only where backward reads what crosses; elsewhere stages are merged.

A stage is measured on the ops it consists of: the time of a forward for the output
alone, and of those that save what the stage's backward reads, all of it or all but what
is cheap to compute again; the time of that backward, which consists of the backward ops
that read what the stage lost and those that depend on them; the bytes it saves, and
scratch memory from replaying its ops one by one (:mod:`remat.reductions.stage_parts`).
Gradients of parameters, which stay, count as scratch of the stage that makes them.

A plan of the chain is lifted op by op: the first forward of a stage runs all of it, a
later one what its output, or its backward, needs. Freeing follows from what is read
later (:mod:`remat.core.liveness`), so that a lifted order is always valid, and the
judge says what it takes.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise

from remat.algorithms.chains.operations import Backward, Forward, Operation, Turn
from remat.algorithms.chains.stages import StageChain
from remat.core.deadline import check_time
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY
from remat.reductions.segments import SegmentedGraph
from remat.reductions.stage_parts import (
    PartOption,
    StagePart,
    cost_ns,
    never_lost,
    scratch_bytes,
    stage_of_part,
    stage_option,
    stage_part,
)

SHARED_SIZE_SHARE = 100
SHARED_SPAN_SHARE = 8
"""A storage is kept in any case if it is smaller than all forward values over the first
number, and forward needs it for longer than the whole over the second."""

_TINY_SHARE = 1000
"""So is one that is this many times smaller than the largest forward value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOfStages:
    """A training graph as a chain, and the way back.

    Parameters
    ----------
    graph
        The training graph.
    chain
        What the programs take.
    parts
        The ops of each stage, and of the turn, which comes last.
    ends
        The storage that is each stage's output.
    kind_index
        Position of the device's kind in the ops' costs.
    """

    graph: TrainingGraph
    chain: StageChain
    parts: tuple[StagePart, ...]
    ends: tuple[int, ...]
    kind_index: int

    def with_options(self, options: Sequence[Sequence[PartOption]]) -> "ChainOfStages":
        """Return the chain with these options of each stage, at least one each."""
        pairs = zip(self.parts[:-1], options, strict=True)
        parts = [replace(part, options=tuple(given)) for part, given in pairs]
        stages = [
            replace(
                stage,
                options=tuple(
                    stage_option(self.graph, option, (end,), self.kind_index)
                    for option in part.options
                ),
            )
            for stage, part, end in zip(
                self.chain.stages, parts, self.ends, strict=True
            )
        ]
        return replace(
            self,
            chain=replace(self.chain, stages=tuple(stages)),
            parts=(*parts, self.parts[-1]),
        )

    def order(self, operations: Iterable[Operation]) -> list[int]:
        """Return the order of ops that a plan of the chain stands for.

        Parameters
        ----------
        operations
            What a program answers: every stage forward at least once before the turn,
            and backward once after it. A backward without an option starts from the
            stage's input.

        Raises
        ------
        ValueError
            If an operation is none of a chain on one device.
        """
        order: list[int] = []
        has_run: set[int] = set()
        previous: Operation | None = None
        for operation in operations:
            match operation:
                case Forward(stage, 0, option):
                    part = self.parts[stage]
                    if stage not in has_run:
                        order += part.forward
                    else:
                        order += (
                            part.again
                            if option is None
                            else part.options[option].saving
                        )
                    has_run.add(stage)
                case Backward(stage, 0, option):
                    way = self.parts[stage].options[option or 0]
                    if option is None and previous != Forward(stage):
                        # From the stage's input alone: what is inside comes back first.
                        order += way.saving
                    order += way.backward
                case Turn():
                    turn = self.parts[-1]
                    order += [*turn.forward, BOUNDARY, *turn.options[0].backward]
                case _:
                    msg = f"{operation} is not an operation of a chain on one device"
                    raise ValueError(msg)
            previous = operation
        return order


def reduce_to_chain(
    graph: TrainingGraph, *, kind_index: int = 0, max_stages: int = 64
) -> ChainOfStages | None:
    """Return a training graph as a chain of stages; ``None`` if it cannot be cut.

    Parameters
    ----------
    graph
        The graph to reduce.
    kind_index
        Position of the device's kind in the ops' costs.
    max_stages
        Neighbouring stages are merged, cheapest first, until there are no more than
        this, at least 1.

    Notes
    -----
    Time O(reads of the graph), and O(cuts^2) for merging.
    """
    segmented = SegmentedGraph(graph)
    crossing = useful_crossings(segmented)
    cuts = _merged(graph, segmented, sorted(crossing), kind_index, max_stages)
    if not cuts:
        return None
    segment_of = {op: bisect_right(cuts, op) for op in segmented.forward}
    outputs = {crossing[cut] for cut in cuts}
    turns = segmented.backward_segments(
        segment_of, _latest_turns(graph, segment_of, outputs)
    )
    ends: list[int | None] = [*(crossing[cut] for cut in cuts), None]
    parts = tuple(
        stage_part(
            graph,
            forward=[op for op in segmented.forward if segment_of[op] == index],
            backward=[op for op in segmented.backward if turns[op] == index],
            ends=() if end is None else (end,),
            kind_index=kind_index,
            has_options=end is not None,
        )
        for index, end in enumerate(ends)
    )
    owed = _gradient_bytes(graph, turns, len(cuts))
    stages = tuple(
        stage_of_part(graph, part, (crossing[cut],), gradient, kind_index)
        for part, cut, gradient in zip(parts[:-1], cuts, owed, strict=True)
    )
    last = parts[-1]
    turn_ops = [*last.forward, *last.options[0].backward]
    return ChainOfStages(
        graph=graph,
        chain=StageChain(
            stages=stages,
            turn_ns=cost_ns(graph, turn_ops, kind_index),
            turn_workspace_bytes=scratch_bytes(graph, turn_ops, kind_index),
        ),
        parts=parts,
        ends=tuple(crossing[cut] for cut in cuts),
        kind_index=kind_index,
    )


def _latest_turns(
    graph: TrainingGraph, segment_of: dict[int, int], outputs: set[int]
) -> dict[int, int]:
    """Return per storage the stage in whose backward it is there at the latest.

    What a stage computes is there in its own backward; its output, in that of the next
    stage already. What else crosses a cut is there all the time.
    """
    is_never_lost = never_lost(graph)
    found: dict[int, int] = {}
    for storage, producer in enumerate(graph.producers):
        if producer is None or producer not in segment_of or is_never_lost[storage]:
            continue
        own = segment_of[producer]
        if storage in outputs:
            found[storage] = own + 1
        elif all(
            segment_of.get(reader, own) == own for reader in graph.consumers[storage]
        ):
            found[storage] = own
    return found


def is_read_back(graph: TrainingGraph, storage: int) -> bool:
    """Whether an op of backward reads a storage.

    Where none does, a cut there only makes the programs hold what nobody needs.
    """
    return any(op >= graph.forward_count for op in graph.consumers[storage])


def useful_crossings(segmented: SegmentedGraph) -> dict[int, int]:
    """Return where a chain is cut: where one storage crosses that backward reads."""
    return {
        cut: storage
        for cut, storage in narrow_crossings(segmented).items()
        if is_read_back(segmented.graph, storage)
    }


def narrow_crossings(
    segmented: SegmentedGraph, ops: Sequence[int] | None = None
) -> dict[int, int]:
    """Return where forward can be cut: first op of a stage -> what crosses.

    Where the same storage crosses at several places in a row, the first is taken.

    Parameters
    ----------
    segmented
        The graph.
    ops
        Required forward ops, ascending, to look at alone; what others read of them is
        needed to their end. ``None``: all.
    """
    graph = segmented.graph
    ops = segmented.forward if ops is None else ops
    is_never_lost = never_lost(graph)
    inside, required = set(ops), set(segmented.forward)
    spans: dict[int, tuple[int, int]] = {}
    for storage, producer in enumerate(graph.producers):
        if producer is None or producer not in inside or is_never_lost[storage]:
            continue
        readers = [op for op in graph.consumers[storage] if op in required]
        if readers:
            is_read_outside = any(op not in inside for op in readers)
            spans[storage] = (producer, ops[-1] if is_read_outside else readers[-1])
    is_counted = _counted(graph, ops, spans)
    open_: set[int] = set()
    found: dict[int, int] = {}
    previous: int | None = None
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for storage, (start, end) in spans.items():
        if storage in is_counted:
            starts.setdefault(start, []).append(storage)
            ends.setdefault(end, []).append(storage)
    for op, following in pairwise(ops):
        check_time()
        open_.update(starts.get(op, ()))
        open_.difference_update(ends.get(op, ()))
        if len(open_) == 1:
            (crossing,) = open_
            if crossing != previous:
                found[following] = crossing
            previous = crossing
    return found


def _counted(
    graph: TrainingGraph, ops: Sequence[int], spans: dict[int, tuple[int, int]]
) -> set[int]:
    """Return the storages that count where they cross, the others being kept."""
    place = {op: index for index, op in enumerate(ops)}
    sizes = {storage: graph.storages[storage].size_bytes for storage in spans}
    largest, total = max(sizes.values(), default=0), sum(sizes.values())
    return {
        storage
        for storage, (start, end) in spans.items()
        if sizes[storage] * _TINY_SHARE > largest
        and (
            sizes[storage] * SHARED_SIZE_SHARE > total
            or (place[end] - place[start]) * SHARED_SPAN_SHARE < len(place)
        )
    }


def _merged(
    graph: TrainingGraph,
    segmented: SegmentedGraph,
    cuts: list[int],
    kind_index: int,
    max_stages: int,
) -> list[int]:
    """Drop cuts until few enough are left: those between the cheapest stages first."""
    costs = [0] * (len(cuts) + 1)
    for op in segmented.forward:
        costs[bisect_right(cuts, op)] += graph.ops[op].cost_ns[kind_index] or 0
    runs = merged_neighbours(costs, max_stages + 1)
    return [cuts[run.start - 1] for run in runs[1:]]


def merged_neighbours(costs: Sequence[int | None], most: int) -> list[range]:
    """Merge neighbours, the two that are cheapest together first, until few are left.

    Parameters
    ----------
    costs
        Cost of each item; ``None`` for one that is never merged.
    most
        Items wanted, at least 1.

    Returns
    -------
    list of range
        The items that are one now, in order.

    Notes
    -----
    Time O(items x log items). Of pairs that cost the same the first is merged.

    Examples
    --------
    >>> merged_neighbours([5, 1, 2, 9], 2)
    [range(0, 3), range(3, 4)]
    """
    total = list(costs)
    # Per item that begins a run: where the run ends, and where the one before begins.
    end = list(range(1, len(total) + 1))
    before = list(range(-1, len(total) - 1))
    pairs: list[tuple[int, int, int, int]] = []

    def offer(first: int) -> None:
        if first >= 0 and end[first] < len(total):
            one, other = total[first], total[end[first]]
            if one is not None and other is not None:
                middle = end[first]
                heappush(pairs, (one + other, first, middle, end[middle]))

    for first in range(len(total)):
        offer(first)
    count = len(total)
    is_start = [True] * count
    while count > most and pairs:
        cost, first, middle, stop = heappop(pairs)
        is_known = is_start[first] and is_start[middle]
        if not is_known or (end[first], end[middle]) != (middle, stop):
            continue
        total[first], end[first], is_start[middle] = cost, stop, False
        if stop < len(total):
            before[stop] = first
        count -= 1
        offer(before[first])
        offer(first)
    return [range(first, end[first]) for first, starts in enumerate(is_start) if starts]


def _gradient_bytes(
    graph: TrainingGraph, turns: dict[int, int], count: int
) -> list[int]:
    """Return per cut the bytes that backward passes over it, downwards.

    What is left for the caller, the gradients of parameters, is passed to no stage.
    """
    found = [0] * count
    for storage, producer in enumerate(graph.producers):
        if producer not in turns:
            continue
        read_in = [
            turns[op]
            for op in graph.consumers[storage]
            if op in turns and not graph.ops[op].is_external
        ]
        lowest = min(read_in, default=turns[producer])
        for cut in range(lowest, turns[producer]):
            found[cut] += graph.storages[storage].size_bytes
    return found
