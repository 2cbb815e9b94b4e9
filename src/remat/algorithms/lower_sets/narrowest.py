"""The narrowest lower sets: those that keep the fewest bytes for later segments.

A segment that ends at a value should keep as little as possible on the paths beside it.
Which lower set does that is a least cut, so that for each value the best are found
without enumerating any. They are what makes an approximate family good where things run
in parallel: with them the approximate program is exact, or nearly so, on all of the
networks of the paper.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from remat.algorithms.lower_sets.families import (
    Family,
    check_count,
    check_edges,
    family_of_masks,
    masks_of_rows,
    rows_of_masks,
)
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.core.deadline import check_time
from remat.native import check_counts, native


@native
def narrowest_lower_sets(
    memory_bytes: Sequence[int],
    edges: Sequence[tuple[int, int]],
    order_edges: Sequence[tuple[int, int]],
) -> NDArray[np.uint64]:
    """Return for each value the narrowest lower sets that end with it.

    Among the lower sets that hold a value and nothing that comes right after it, those
    whose boundary (values that are read outside) has the fewest bytes form a lattice.
    Rows ``2 v`` and ``2 v + 1`` are its smallest and its largest member.

    Parameters
    ----------
    memory_bytes
        Bytes of each value.
    edges, order_edges
        Pairs ``(u, v)`` with ``v`` after ``u``, acyclic; ``edges`` carry data.

    Notes
    -----
    One least cut a value, by augmenting paths: time O(V E P) for P paths, which is the
    number of values on the boundary or a little more.
    """
    count = len(memory_bytes)
    check_count(count)
    check_edges(count, edges, order_edges)
    check_counts(memory_bytes)
    network = _Network(2 * count)
    later: list[list[int]] = [[] for _ in range(count)]
    # Point v is on the source's side if v is in the set, point count + v if all readers
    # of v are: the arc between is cut, at v's bytes, exactly if v is on the boundary.
    for v, size in enumerate(memory_bytes):
        network.add_arc(v, count + v, size)
    for u, v in edges:
        network.add_arc(count + u, v, None)
    for u, v in (*edges, *order_edges):
        network.add_arc(v, u, None)
        later[u].append(v)
    masks: list[int] = []
    for v in range(count):
        check_time()
        network.fill(v, later[v])
        smallest = network.fed([v])
        largest = network.feeding(later[v])
        masks.append(sum(1 << u for u in range(count) if u in smallest))
        masks.append(sum(1 << u for u in range(count) if u not in largest))
    return rows_of_masks(count, masks)


class _Network:
    """Capacities of a flow network, and a largest flow through it."""

    def __init__(self, points: int) -> None:
        self.capacity: list[dict[int, float]] = [{} for _ in range(points)]
        self.left = self.capacity

    def add_arc(self, a: int, b: int, capacity: int | None) -> None:
        more = math.inf if capacity is None else capacity
        self.capacity[a][b] = self.capacity[a].get(b, 0) + more
        self.capacity[b].setdefault(a, 0)

    def fill(self, source: int, targets: Sequence[int]) -> None:
        self.left = [dict(arcs) for arcs in self.capacity]
        while True:
            came_from = self._reach([source], set(targets))
            end = next((target for target in targets if target in came_from), None)
            if end is None:
                return
            steps = [(came_from[end], end)]
            while steps[-1][0] != source:
                steps.append((came_from[steps[-1][0]], steps[-1][0]))
            amount = min(self.left[a][b] for a, b in steps)
            for a, b in steps:
                self.left[a][b] -= amount
                self.left[b][a] += amount

    def fed(self, sources: Sequence[int]) -> set[int]:
        return set(self._reach(sources, set()))

    def feeding(self, targets: Sequence[int]) -> set[int]:
        seen, queue = set(targets), deque(targets)
        while queue:
            b = queue.popleft()
            for a in self.capacity[b]:
                if a not in seen and self.left[a][b] > 0:
                    seen.add(a)
                    queue.append(a)
        return seen

    def _reach(self, sources: Sequence[int], targets: set[int]) -> dict[int, int]:
        came_from, queue = {point: point for point in sources}, deque(sources)
        while queue:
            a = queue.popleft()
            if a in targets:
                break
            for b, left in self.left[a].items():
                if left > 0 and b not in came_from:
                    came_from[b] = a
                    queue.append(b)
        return came_from


def narrowest_sets(graph: ForwardGraph) -> Family:
    """Return the lower sets of fewest boundary bytes that end with each value.

    They are what makes an approximate family good where things run in parallel: a
    segment that ends at a value should keep as little as possible on the other paths.
    """
    rows = narrowest_lower_sets(graph.memory_bytes, graph.edges, graph.order_edges)
    masks = masks_of_rows(rows)
    return family_of_masks(graph.node_count, masks, label="narrowest sets")
