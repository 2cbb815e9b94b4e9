"""Topological orders of a forward graph whose prefixes make useful lower sets.

Each order takes one ready value after the other, by a rule. Applied to the graph turned
round, the same rule gives another order: what is needed last, then what leads there.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat.algorithms.lower_sets.forward_graph import ForwardGraph

Neighbours = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Direction:
    """A forward graph, seen from its beginning or from its end.

    Parameters
    ----------
    before, after
        Values that must come before, and after, each value.
    reads, readers
        Those of them that pass data.
    memory_bytes
        Bytes of each value.
    """

    before: Neighbours
    after: Neighbours
    reads: Neighbours
    readers: Neighbours
    memory_bytes: Sequence[int]


def from_beginning(graph: ForwardGraph) -> Direction:
    """Return the graph as it is."""
    return Direction(
        graph.all_predecessors,
        graph.all_successors,
        graph.predecessors,
        graph.successors,
        graph.memory_bytes,
    )


def from_end(graph: ForwardGraph) -> Direction:
    """Return the graph turned round; reverse the orders that it gives."""
    return Direction(
        graph.all_successors,
        graph.all_predecessors,
        graph.successors,
        graph.predecessors,
        graph.memory_bytes,
    )


def breadth_first(graph: Direction) -> list[int]:
    """Return the order that takes first what became ready first."""
    return _taken(graph, deque[int].popleft)


def depth_first(graph: Direction) -> list[int]:
    """Return the order that takes first what became ready last."""
    return _taken(graph, deque[int].pop)


def _taken(graph: Direction, take: Callable[[deque[int]], int]) -> list[int]:
    waiting = [len(nodes) for nodes in graph.before]
    ready = deque(v for v, count in enumerate(waiting) if count == 0)
    order: list[int] = []
    while ready:
        v = take(ready)
        order.append(v)
        for w in graph.after[v]:
            waiting[w] -= 1
            if waiting[w] == 0:
                ready.append(w)
    return order


def by_depth(graph: Direction) -> list[int]:
    """Return the order by the longest path that leads to each value."""
    depth = [0] * len(graph.before)
    for v in breadth_first(graph):
        depth[v] = 1 + max((depth[u] for u in graph.before[v]), default=0)
    return sorted(range(len(depth)), key=lambda v: (depth[v], v))


def narrow_first(graph: Direction) -> list[int]:
    """Return the order that keeps the bytes still to be read low, step by step.

    Takes the ready value that adds least: its own bytes if it is read, less those of
    the values that it is the last to read. Time O(E log V) and a little more.
    """
    memory = graph.memory_bytes
    unread = [len(nodes) for nodes in graph.readers]

    def added_bytes(v: int) -> int:
        last_reads = (memory[u] for u in graph.reads[v] if unread[u] == 1)
        return (memory[v] if unread[v] else 0) - sum(last_reads)

    waiting = [len(nodes) for nodes in graph.before]
    ready = {v for v, count in enumerate(waiting) if count == 0}
    heap = [(added_bytes(v), v) for v in ready]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        added, v = heapq.heappop(heap)
        # What a value adds changes as others are taken: entries may be out of date.
        if v not in ready or added != added_bytes(v):
            continue
        ready.remove(v)
        order.append(v)
        changed: set[int] = set()
        for u in graph.reads[v]:
            unread[u] -= 1
            changed.update(w for w in graph.readers[u] if w in ready)
        for w in graph.after[v]:
            waiting[w] -= 1
            if waiting[w] == 0:
                ready.add(w)
                changed.add(w)
        for w in changed:
            heapq.heappush(heap, (added_bytes(w), w))
    return order
