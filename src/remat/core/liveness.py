"""Liveness: from an order of computations to a schedule that frees at the last use.

A solver that has decided which ops run, and in which order, needs no more than this to
obtain the schedule of least memory for that order: each storage is discarded right
after its last use, and outputs that nobody reads before they are computed again are
discarded right after the op.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import assert_never

from remat.core.graph import TrainingGraph
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step

BOUNDARY = -1
"""Marks the boundary in an order of computations."""

# Steps never change, and the same ones are in schedule after schedule of a large graph.
_compute = lru_cache(maxsize=2**16)(Compute)
_discard = lru_cache(maxsize=2**16)(Discard)


def store_all_order(graph: TrainingGraph) -> list[int]:
    """Return every op once, in graph order, with the boundary in its place."""
    forward = graph.forward_count
    return [*range(forward), BOUNDARY, *range(forward, len(graph.ops))]


def schedule_from_order(
    graph: TrainingGraph, order: Sequence[int], device: int = 0
) -> Schedule:
    """Return the single-device schedule that computes ``order`` and frees early.

    Parameters
    ----------
    graph
        The graph that the order is for.
    order
        Op indices, possibly repeated, and :data:`BOUNDARY` exactly once.
    device
        The device on which everything runs.

    Returns
    -------
    Schedule
        The computations of ``order`` with each storage discarded right after its last
        read, or after the op that wrote it when nothing reads that copy.

    Notes
    -----
    Time and memory O(total reads and writes of the order). A storage whose value is
    still live when its op runs again keeps the fresh copy.
    """
    steps: list[Step] = [
        Boundary() if op == BOUNDARY else _compute(op, device) for op in order
    ]
    return insert_discards(graph, steps)


def insert_discards(graph: TrainingGraph, steps: Iterable[Step]) -> Schedule:
    """Return ``steps`` with every discard moved to just after the last use.

    Existing ``Discard`` steps are dropped first, so that the result computes and
    copies the same things in the same order and never uses more memory.

    Notes
    -----
    Walks backwards, keeping per device the storages that some later step reads.
    """
    kept = [step for step in steps if not isinstance(step, Discard)]
    needed: defaultdict[int, set[int]] = defaultdict(set)
    for storage in graph.final_outputs:
        needed[graph.storages[storage].home].add(storage)
    reversed_steps: list[Step] = []
    for step in reversed(kept):
        made, used = _made_and_used(graph, step)
        for storage, device in made:
            if storage not in needed[device]:
                reversed_steps.append(_discard(storage, device))
        for storage, device in made:
            needed[device].discard(storage)
        for storage, device in used:
            block = graph.storages[storage]
            is_kept = block.is_resident and block.home == device
            if not is_kept and storage not in needed[device]:
                needed[device].add(storage)
                reversed_steps.append(_discard(storage, device))
        reversed_steps.append(step)
    return Schedule(tuple(reversed(reversed_steps)))


_Places = list[tuple[int, int]]
"""Pairs of a storage and a device."""


def kept_for_backward(graph: TrainingGraph, schedule: Schedule) -> frozenset[int]:
    """Return what steps behind the boundary use that was made before it."""
    made: set[tuple[int, int]] = set()
    kept: set[int] = set()
    for step in schedule.steps[schedule.steps.index(Boundary()) + 1 :]:
        if not isinstance(step, Discard):
            written, read = _made_and_used(graph, step)
            kept.update(
                storage for storage, device in read if (storage, device) not in made
            )
            made.update(written)
    return frozenset(kept)


def _made_and_used(graph: TrainingGraph, step: Step) -> tuple[_Places, _Places]:
    """Return what ``step`` makes live, and what must be live for it."""
    match step:
        case Compute():
            op = graph.ops[step.op]
            return (
                [(storage, step.device) for storage in op.writes],
                [(storage, step.device) for storage in op.reads],
            )
        case Copy():
            return [(step.storage, step.target)], [(step.storage, step.source)]
        case Boundary():
            homes = [storage.home for storage in graph.storages]
            return (
                [(storage, homes[storage]) for storage in graph.tangents],
                [(storage, homes[storage]) for storage in graph.forward_outputs],
            )
        case Discard():
            return [], []
        case _:
            assert_never(step)
