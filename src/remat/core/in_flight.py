"""Several forward passes before the first backward pass, each with what it saved.

Stages of a pipeline run so, and so do losses over several calls of one model. The
passes are alike: in a graph of one of them, what belongs to the others is one block
that is there during the whole step. While the first backward pass runs, that is what
each of the others has saved; while the second runs, one has saved less, but what the
first left behind, gradients above all, is there. Each further one leaves its outputs
and the gradients of its inputs in the place of what it had saved. When the optimizer
steps, these are all that is there of the others: what its step needs may take the room
of the rest of the block.
"""

from collections.abc import Iterable
from dataclasses import replace

from remat.core.graph import Phase, Role, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.schedule import Boundary, Schedule
from remat.core.simulator import Trace, simulate

OTHERS = "of other passes in flight"
SAVED_BY_ONE_LOSS = "saved by one loss of all passes"
"""The storage of what that loss keeps of each pass until it goes backward."""

_OF_EACH_PASS = (Role.OUTPUT, Role.INPUT_GRADIENT)
"""What each pass leaves for itself; gradients of parameters are added up."""


def saved_bytes(graph: TrainingGraph, schedule: Schedule, trace: Trace) -> int:
    """Return what a forward pass leaves on the first device until its backward pass.

    Its outputs and what the caller's loss saves are among it, what is there during the
    whole step is not. One loss of all passes makes the gradients of all outputs before
    the first pass goes backward, in the place of what it has saved.
    """
    appearing = {
        *graph.tangents,
        *(n for n, s in enumerate(graph.storages) if s.is_resident),
    }
    boundary_bytes = trace.timeline_bytes[0][schedule.steps.index(Boundary())]
    boundary_bytes -= sum(graph.storages[n].size_bytes for n in appearing)
    of_loss = [s.size_bytes for s in graph.storages if s.name == SAVED_BY_ONE_LOSS]
    if of_loss:
        gradients = sum(graph.storages[n].size_bytes for n in graph.tangents)
        boundary_bytes += max(0, gradients - sum(of_loss))
    return boundary_bytes


def with_others(
    graph: TrainingGraph, counted_bytes: int, in_flight: int
) -> TrainingGraph:
    """Return the graph with so many bytes of other passes, in place of any."""
    others = Storage(name=OTHERS, size_bytes=counted_bytes, is_resident=True)
    storages = [others if s.name == OTHERS else s for s in graph.storages]
    if others not in storages:
        storages.append(others)
    kept_bytes = max(0, in_flight - 1) * _own_bytes(graph)
    freed_bytes = max(0, counted_bytes - kept_bytes)
    freed_bytes -= max(0, others_bytes(graph) - kept_bytes)
    ops = tuple(
        replace(
            op,
            workspace_bytes=tuple(
                max(0, size - freed_bytes) for size in op.workspace_bytes
            ),
        )
        if op.is_external and op.phase is Phase.BACKWARD
        else op
        for op in graph.ops
    )
    return replace(graph, storages=tuple(storages), ops=ops)


def others_bytes(graph: TrainingGraph) -> int:
    """Return the bytes of other passes that a graph counts."""
    return sum(s.size_bytes for s in graph.storages if s.name == OTHERS)


def beside_bytes(graph: TrainingGraph, saved_bytes: int, in_flight: int) -> int:
    """Return the most that other passes take beside one that runs.

    Parameters
    ----------
    graph
        One pass.
    saved_bytes
        What each pass saves.
    in_flight
        How many passes there are, the one that runs among them.
    """
    if in_flight == 1:
        return 0
    left = _left(graph)
    own_bytes = _own_bytes(graph)
    left_bytes = sum(storage.size_bytes for storage in left) - _added_bytes(graph, left)
    others = in_flight - 2
    return max(
        (others + 1) * saved_bytes, others * max(saved_bytes, own_bytes) + left_bytes
    )


def _left(graph: TrainingGraph) -> list[Storage]:
    """Return what a pass leaves behind."""
    final = (graph.storages[storage] for storage in graph.final_outputs)
    return [storage for storage in final if not storage.is_resident]


def _own_bytes(graph: TrainingGraph) -> int:
    """Return the bytes that each pass leaves for itself."""
    return sum(s.size_bytes for s in _left(graph) if s.role in _OF_EACH_PASS)


def _added_bytes(graph: TrainingGraph, left: Iterable[Storage]) -> int:
    """Return the bytes of gradients, at least, that are added to those there before.

    All gradients together take no more than the parameters, where they have their type.
    """
    there = [s for s in graph.storages if s.is_resident]
    before_bytes = sum(s.size_bytes for s in there if s.role is Role.GRADIENT)
    parameter_bytes = sum(s.size_bytes for s in there if s.role is Role.PARAMETER)
    new_bytes = sum(s.size_bytes for s in left if s.role is Role.GRADIENT)
    if max(before_bytes, new_bytes) > parameter_bytes:
        return 0
    return max(0, before_bytes + new_bytes - parameter_bytes)


def with_passes(
    graph: TrainingGraph, schedule: Schedule, in_flight: int
) -> TrainingGraph:
    """Return the graph in which so many passes in all run by a schedule of it."""
    alone = with_others(graph, 0, in_flight)
    trace = simulate(alone, single_device(kind=graph.device_kinds[0]), schedule)
    saved = saved_bytes(alone, schedule, trace)
    return with_others(graph, beside_bytes(graph, saved, in_flight), in_flight)


def plain_with_passes(graph: TrainingGraph, in_flight: int) -> TrainingGraph:
    """Return the graph in which so many passes in all keep everything."""
    return with_passes(
        graph, schedule_from_order(graph, store_all_order(graph)), in_flight
    )
