"""Liveness: from an order of computations to a schedule that frees at the last use.

A solver that has decided which ops run, and in which order, needs no more than this to
obtain the schedule of least memory for that order: each storage is discarded right
after its last use, and outputs that nobody reads before they are computed again are
discarded right after the op.
"""

from collections.abc import Iterable, Sequence

from remat.graph import TrainingGraph
from remat.schedule import Boundary, Compute, Copy, Discard, Schedule, Step

BOUNDARY = -1
"""Marks the boundary in an order of computations."""


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
        Boundary() if op == BOUNDARY else Compute(op, device) for op in order
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
    needed: dict[int, set[int]] = {}
    for storage in graph.final_outputs:
        needed.setdefault(graph.storages[storage].home, set()).add(storage)
    reversed_steps: list[Step] = []

    def use(storage: int, device: int, dying: list[Step]) -> None:
        block = graph.storages[storage]
        if block.is_resident and block.home == device:
            return
        live = needed.setdefault(device, set())
        if storage not in live:
            live.add(storage)
            dying.append(Discard(storage, device))

    for step in reversed(kept):
        dying: list[Step] = []
        if isinstance(step, Compute):
            live = needed.setdefault(step.device, set())
            op = graph.ops[step.op]
            dying.extend(Discard(s, step.device) for s in op.writes if s not in live)
            live.difference_update(op.writes)
            for storage in op.reads:
                use(storage, step.device, dying)
        elif isinstance(step, Copy):
            live = needed.setdefault(step.target, set())
            if step.storage not in live:
                dying.append(Discard(step.storage, step.target))
            live.discard(step.storage)
            use(step.storage, step.source, dying)
        else:
            for storage in graph.tangents:
                home = graph.storages[storage].home
                live = needed.setdefault(home, set())
                if storage not in live:
                    dying.append(Discard(storage, home))
                live.discard(storage)
            for storage in graph.forward_outputs:
                use(storage, graph.storages[storage].home, dying)
        reversed_steps.extend(dying)
        reversed_steps.append(step)
    return Schedule(tuple(reversed(reversed_steps)))
