"""A graph on one device in plain numbers, as the native core takes it."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, store_all_order


class Numbers(NamedTuple):
    """A graph on one device, in plain numbers.

    Parameters
    ----------
    reads, writes
        Storages, without resident ones among the reads. Behind those of the ops come
        those of the end, then those of the boundary: the places -2 and -1.
    sizes, costs, workspaces
        Bytes of each storage, time and bytes of each op.
    stays_once
        Per op whether its first run stays although nobody reads what it writes.
    resident_bytes
        Bytes in use throughout.
    """

    reads: Sequence[Sequence[int]]
    writes: Sequence[Sequence[int]]
    sizes: Sequence[int]
    costs: Sequence[int]
    workspaces: Sequence[int]
    stays_once: Sequence[bool]
    resident_bytes: int


def required_order(graph: TrainingGraph) -> list[int]:
    """Return every required op once, in graph order, with the boundary in its place."""
    required = graph.required_ops
    return [op for op in store_all_order(graph) if op == BOUNDARY or op in required]


_KNOWN: dict[tuple[int, int], Numbers] = {}


def plain_numbers(graph: TrainingGraph, kind_index: int = 0) -> Numbers:
    """Return what the native core needs of a graph, for orders on one device.

    Notes
    -----
    Kept as long as the graph is: every solver asks, and to hash a graph takes longer
    than to make them.
    """
    key = (id(graph), kind_index)
    if key not in _KNOWN:
        _KNOWN[key] = _plain_numbers(graph, kind_index)
        weakref.finalize(graph, _KNOWN.pop, key, None)
    return _KNOWN[key]


def _plain_numbers(graph: TrainingGraph, kind_index: int) -> Numbers:
    is_resident = [s.is_resident for s in graph.storages]

    def transient(storages: Sequence[int]) -> list[int]:
        return [s for s in storages if not is_resident[s]]

    sizes = [s.size_bytes for s in graph.storages]
    costs = [op.cost_ns[kind_index] or 0 for op in graph.ops]
    workspaces = [op.workspace_bytes[kind_index] for op in graph.ops]
    return Numbers(
        # The end and the boundary come last, as -2 and BOUNDARY count from there.
        reads=[
            *(transient(op.reads) for op in graph.ops),
            transient(graph.final_outputs),
            transient(graph.forward_outputs),
        ],
        writes=[*(op.writes for op in graph.ops), (), graph.tangents],
        sizes=sizes,
        costs=costs,
        workspaces=workspaces,
        stays_once=[op.is_ordered or not op.writes for op in graph.ops],
        resident_bytes=sum(s.size_bytes for s in graph.storages if s.is_resident),
    )
