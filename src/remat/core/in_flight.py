"""Several forward passes before the first backward pass, each with what it saved.

Stages of a pipeline run so, and so do losses over several calls of one model. The
passes are alike: in a graph of one of them, what belongs to the others is one block
that is there during the whole step. While the first backward pass runs, that is what
each of the others has saved; while the second runs, one has saved less, but what the
first left behind, gradients above all, is there. Each further one leaves its outputs
and the gradients of its inputs in the place of what it had saved.
"""

from dataclasses import replace

from remat.core.graph import Role, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.schedule import Boundary, Compute, Schedule
from remat.core.simulator import Trace, simulate

OTHERS = "of other passes in flight"

_OF_EACH_PASS = (Role.OUTPUT, Role.INPUT_GRADIENT)
"""What each pass leaves for itself; gradients of parameters are added up."""


def saved_bytes(graph: TrainingGraph, schedule: Schedule, trace: Trace) -> int:
    """Return what a forward pass leaves on the first device until its backward pass.

    Its outputs and what the caller's loss needs are among it, what is there during the
    whole step is not.
    """
    timeline = trace.timeline_bytes[0]
    boundary = schedule.steps.index(Boundary())
    tangents_bytes = sum(
        graph.storages[tangent].size_bytes for tangent in graph.tangents
    )
    most = [timeline[boundary] - tangents_bytes]
    most += [
        timeline[position]
        for position, step in enumerate(schedule.steps[:boundary])
        if isinstance(step, Compute) and graph.ops[step.op].is_external
    ]
    return max(most) - sum(s.size_bytes for s in graph.storages if s.is_resident)


def with_others(graph: TrainingGraph, others_bytes: int) -> TrainingGraph:
    """Return the graph with so many bytes of other passes, in place of any."""
    others = Storage(name=OTHERS, size_bytes=others_bytes, is_resident=True)
    storages = [others if s.name == OTHERS else s for s in graph.storages]
    if others not in storages:
        storages.append(others)
    return replace(graph, storages=tuple(storages))


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
    final = (graph.storages[storage] for storage in graph.final_outputs)
    left = [storage for storage in final if not storage.is_resident]
    left_bytes = sum(storage.size_bytes for storage in left)
    own_bytes = sum(s.size_bytes for s in left if s.role in _OF_EACH_PASS)
    others = in_flight - 2
    return max(
        (others + 1) * saved_bytes, others * max(saved_bytes, own_bytes) + left_bytes
    )


def with_passes(
    graph: TrainingGraph, schedule: Schedule, in_flight: int
) -> TrainingGraph:
    """Return the graph in which so many passes in all run by a schedule of it."""
    alone = with_others(graph, 0)
    trace = simulate(alone, single_device(kind=graph.device_kinds[0]), schedule)
    saved = saved_bytes(alone, schedule, trace)
    return with_others(graph, beside_bytes(graph, saved, in_flight))


def plain_with_passes(graph: TrainingGraph, in_flight: int) -> TrainingGraph:
    """Return the graph in which so many passes in all keep everything."""
    return with_passes(
        graph, schedule_from_order(graph, store_all_order(graph)), in_flight
    )
