"""Every increasing sequence of lower sets of a small graph, by definition.

Shares no code with the package beyond the description of a graph.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from remat.algorithms.lower_sets.forward_graph import ForwardGraph, Owed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one increasing sequence costs."""

    overhead: int
    overhead_last_free: int
    peak_bytes: int
    cached_bytes: int


def lower_sets(graph: ForwardGraph) -> list[frozenset[int]]:
    """All lower sets, found among all subsets; smaller ones first."""
    nodes = range(graph.node_count)
    edges = [*graph.edges, *graph.order_edges]
    subsets = (
        frozenset(chosen)
        for size in range(graph.node_count + 1)
        for chosen in combinations(nodes, size)
    )
    return [s for s in subsets if all(u in s or v not in s for u, v in edges)]


class Sequences:
    """All increasing sequences, or those of some lower sets, with their costs."""

    def __init__(
        self, graph: ForwardGraph, sets: list[frozenset[int]] | None = None
    ) -> None:
        self.graph = graph
        self.sets = sorted(lower_sets(graph) if sets is None else sets, key=len)
        self.everything = frozenset(range(graph.node_count))
        self.boundary = {s: self._boundary(s) for s in self.sets}
        self.owed = {s: self._owed(s) for s in self.sets}

    def _boundary(self, lower: frozenset[int]) -> frozenset[int]:
        return frozenset(
            u for u, v in self.graph.edges if u in lower and v not in lower
        )

    def _owed(self, lower: frozenset[int]) -> int:
        memory = self.graph.memory_bytes
        if self.graph.owed is Owed.NOTHING:
            return 0
        if self.graph.owed is Owed.BOUNDARY:
            return sum(memory[v] for v in self._boundary(lower))
        edges = self.graph.edges
        consumers = {v for u, v in edges if u in lower}
        read = {u for u, v in edges if v in consumers}
        return sum(memory[v] for v in consumers - lower) + sum(
            memory[v] for v in read - lower
        )

    def __iter__(self) -> Iterator[Outcome]:
        """Yield the outcome of each sequence."""
        return self._extend(frozenset(), frozenset(), 0, 0)

    def _extend(
        self, last: frozenset[int], kept: frozenset[int], spent: int, peak: int
    ) -> Iterator[Outcome]:
        memory, cost = self.graph.memory_bytes, self.graph.cost
        charged = self.graph.charged_bytes
        for lower in self.sets:
            if not last < lower:
                continue
            segment = lower - last
            used = (
                sum(memory[v] for v in kept)
                + sum(charged[v] for v in segment)
                + self.owed[lower]
            )
            more = sum(cost[v] for v in segment - self.boundary[lower])
            now_kept, now_peak = kept | self.boundary[lower], max(peak, used)
            if lower == self.everything:
                yield Outcome(
                    spent + more, spent, now_peak, sum(memory[v] for v in kept)
                )
            else:
                yield from self._extend(lower, now_kept, spent + more, now_peak)


def count_sequences(sets: list[frozenset[int]]) -> int:
    """Number of increasing sequences that end with the largest set."""
    ways = {sets[0]: 1}
    for lower in sets[1:]:
        ways[lower] = sum(ways[s] for s in ways if s < lower)
    return ways[sets[-1]]


def random_graph(
    seed: int, *, most_nodes: int = 8, is_general: bool = False
) -> ForwardGraph:
    """A graph of 1 to ``most_nodes`` values, numbered in any order.

    With ``is_general`` also zero sizes, order edges, and other charges.
    """
    rng = random.Random(seed)
    count = rng.randint(1, most_nodes)
    density = rng.choice([0.15, 0.3, 0.5, 0.8])
    names = rng.sample(range(count), count)
    edges: list[tuple[int, int]] = []
    order_edges: list[tuple[int, int]] = []
    for u, v in combinations(range(count), 2):
        if rng.random() < density:
            is_order = is_general and rng.random() < 0.2
            (order_edges if is_order else edges).append((names[u], names[v]))
    least = 0 if is_general else 1
    most = rng.choice([1, 3, 10, 10**9])
    memory_bytes = tuple(rng.randint(least, max(1, most)) for _ in range(count))
    segment_bytes = None
    if is_general and rng.random() < 0.5:
        segment_bytes = tuple(rng.randint(0, 2 * most) for _ in range(count))
    return ForwardGraph(
        memory_bytes=memory_bytes,
        cost=tuple(rng.choice([0, 1, 1, 2, 5, 10, 10]) for _ in range(count)),
        edges=tuple(edges),
        order_edges=tuple(order_edges),
        segment_bytes=segment_bytes,
        owed=rng.choice([*Owed]) if is_general else Owed.CONSUMERS,
        name=f"random graph {seed}",
    )
