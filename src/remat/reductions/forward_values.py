"""Forward values: from a training graph to ``(V, E, M_v, T_v)``, and back.

The lower-set programs [1]_ plan a graph whose nodes are forward values with a size and
a cost; backward is implied. The reduction makes a node of each forward op that may run
again:

* its edges are what later nodes read of it; what it reads of parameters and inputs,
  and of ops that may run only once (their outputs are kept in any case), is left out,
  but an order that these impose is kept as an edge without data;
* its size is that of the outputs that other nodes read;
* ``T_v`` is its measured cost in units of a share of the whole, rounded up;
* what its segment holds in memory while backward passes through it is what backward
  reads of its outputs, and its own gradient. (Without the gradient, which backward does
  not hold all at once, judged costs were never lower, and up to 2.6 % of a step higher:
  U-Net, ResNet-50 and GPT-2 at 30 to 80 % of their plain peaks.)

Free and nearly free nodes are merged with a neighbour, as far as no cut is lost that
could be worth making: where a value has one reader, one of the two is nearly free, and
what is read of the reader is no larger. More are merged, cheapest first, in graphs that
have more nodes than asked for.

The answer, a segment per node, is lifted by :class:`remat.reductions.segments`.

References
----------
.. [1] M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic
   framework of recomputation algorithms for memory-efficient backpropagation. NeurIPS
   2019.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from remat.algorithms.lower_sets.forward_graph import ForwardGraph, Owed
from remat.core.deadline import check_time
from remat.core.graph import TrainingGraph
from remat.core.units import ceil_slots
from remat.reductions.segments import SegmentedGraph

NEGLIGIBLE_SHARE = 4000
"""A node that costs less than the whole over this is merged if nothing is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardValues:
    """The abstraction of a training graph, and the way back.

    Parameters
    ----------
    segments
        The training graph, ready to be cut.
    members
        Per node, the forward ops that it stands for, ascending.
    graph
        The abstraction: what the lower-set programs take.
    """

    segments: SegmentedGraph
    members: tuple[tuple[int, ...], ...]
    graph: ForwardGraph

    def segment_of_ops(self, segment_of_nodes: Sequence[int]) -> dict[int, int]:
        """Return the segment of every required forward op.

        Parameters
        ----------
        segment_of_nodes
            Segment of each node, 0 or more, never decreasing along edges.

        Notes
        -----
        An op that is no node runs as early as what it depends on allows.
        """
        node_of = {op: v for v, ops in enumerate(self.members) for op in ops}
        found: dict[int, int] = {}
        for op in self.segments.forward:
            if op in node_of:
                found[op] = segment_of_nodes[node_of[op]]
            else:
                before = self.segments.predecessors[op]
                found[op] = max((found[p] for p in before), default=0)
        return found


def reduce_to_forward_values(
    graph: TrainingGraph,
    *,
    kind_index: int = 0,
    max_nodes: int = 256,
    cost_units: int = 2048,
) -> ForwardValues | None:
    """Return the forward values of a training graph; ``None`` if it has none.

    Parameters
    ----------
    graph
        The graph to reduce.
    kind_index
        Position of the device's kind in the ops' costs.
    max_nodes
        Nodes are merged until there are no more than this, as long as any may be; at
        least 1.
    cost_units
        About how many units the costs sum to, at least 1; a unit more is possible per
        node, since costs are rounded up.

    Raises
    ------
    ValueError
        If ``max_nodes`` or ``cost_units`` is not positive.

    Notes
    -----
    Time O(reads of the graph x log), and for each merge the degree of the nodes.
    """
    for name, number in (("max_nodes", max_nodes), ("cost_units", cost_units)):
        if number < 1:
            msg = f"{name} is {number}; it must be at least 1"
            raise ValueError(msg)
    segments = SegmentedGraph(graph)
    merging = _Merging(segments, kind_index)
    merging.merge(max_nodes)
    groups = merging.groups()
    if not groups:
        return None
    node_of = {op: v for v, ops in enumerate(groups) for op in ops}
    edges, order_edges = _edges(segments, node_of)
    costs = [
        sum(graph.ops[op].cost_ns[kind_index] or 0 for op in ops) for ops in groups
    ]
    unit_ns = max(1, sum(costs) // cost_units)
    sizes = [_read_bytes(segments, ops, node_of) for ops in groups]
    saved = [_saved_bytes(graph, ops) for ops in groups]
    return ForwardValues(
        segments=segments,
        members=tuple(groups),
        graph=ForwardGraph(
            memory_bytes=tuple(sizes),
            cost=tuple(ceil_slots(cost, unit_ns) for cost in costs),
            edges=tuple(sorted(edges)),
            order_edges=tuple(sorted(order_edges - edges)),
            segment_bytes=tuple(a + b for a, b in zip(saved, sizes, strict=True)),
            owed=Owed.BOUNDARY,
            names=tuple(graph.ops[ops[-1]].name for ops in groups),
        ),
    )


def _edges(
    segments: SegmentedGraph, node_of: dict[int, int]
) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return data edges, and edges that only order, between nodes."""
    producers, ops = segments.graph.producers, segments.graph.ops
    data: set[tuple[int, int]] = set()
    order: set[tuple[int, int]] = set()
    # Per op that is no node: the nodes that it has to wait for.
    behind: dict[int, frozenset[int]] = {}
    for op in segments.forward:
        check_time()
        waits: set[int] = set()
        for before in segments.predecessors[op]:
            waits |= {node_of[before]} if before in node_of else behind[before]
        if op not in node_of:
            behind[op] = frozenset(waits)
            continue
        node = node_of[op]
        order |= {(u, node) for u in waits if u != node}
        read = (producers[storage] for storage in ops[op].reads)
        data |= {
            (node_of[p], node) for p in read if p in node_of and node_of[p] != node
        }
    return data, order


def _read_bytes(
    segments: SegmentedGraph, group: Sequence[int], node_of: dict[int, int]
) -> int:
    """Return the bytes of a group's outputs that other nodes read."""
    graph, node = segments.graph, node_of[group[0]]
    return sum(
        graph.storages[storage].size_bytes
        for op in group
        for storage in graph.ops[op].writes
        if any(node_of.get(reader, node) != node for reader in graph.consumers[storage])
    )


def _saved_bytes(graph: TrainingGraph, group: Iterable[int]) -> int:
    """Return the bytes of a group's outputs that backward reads."""
    return sum(
        graph.storages[storage].size_bytes
        for op in group
        for storage in graph.ops[op].writes
        if any(reader >= graph.forward_count for reader in graph.consumers[storage])
    )


class _Merging:
    """Groups of forward ops that are computed together, merged step by step."""

    def __init__(self, segments: SegmentedGraph, kind_index: int) -> None:
        graph = segments.graph
        self.graph = graph
        self.parts = {
            op: [op] for op in segments.forward if graph.ops[op].is_recomputable
        }
        self.cost = {op: graph.ops[op].cost_ns[kind_index] or 0 for op in self.parts}
        self.negligible_ns = sum(self.cost.values()) / NEGLIGIBLE_SHARE
        node_of = {op: op for op in self.parts}
        data, order = _edges(segments, node_of)
        self.after: dict[int, set[int]] = {op: set() for op in self.parts}
        self.before: dict[int, set[int]] = {op: set() for op in self.parts}
        for u, v in data | order:
            self.after[u].add(v)
            self.before[v].add(u)
        self.size = {op: _read_bytes(segments, [op], node_of) for op in self.parts}

    def merge(self, max_nodes: int) -> None:
        """Merge what is free, then the cheapest until few enough are left."""
        queue = [(self._price(op), op) for op in self.parts]
        heapify(queue)
        while queue:
            check_time()
            price, op = heappop(queue)
            if op not in self.parts or len(self.after[op]) != 1:
                continue
            if price != self._price(op):
                heappush(queue, (self._price(op), op))
                continue
            is_lossy, _, _ = price
            if not is_lossy or len(self.parts) > max_nodes:
                into = self._merge_into_reader(op)
                heappush(queue, (self._price(into), into))
                for before in self.before[into]:
                    heappush(queue, (self._price(before), before))

    def _price(self, op: int) -> tuple[bool, bool, int]:
        """Return what is lost by merging a node into its reader, as a sort key."""
        if len(self.after[op]) != 1:
            return (True, True, 0)
        (reader,) = self.after[op]
        cheaper = min(self.cost[op], self.cost[reader])
        grows = self.size[reader] > self.size[op]
        return (cheaper > self.negligible_ns or grows, grows, cheaper)

    def _merge_into_reader(self, op: int) -> int:
        (reader,) = self.after[op]
        self.parts[reader] += self.parts.pop(op)
        self.cost[reader] += self.cost.pop(op)
        self.before[reader].discard(op)
        for before in self.before.pop(op):
            self.after[before].discard(op)
            self.after[before].add(reader)
            self.before[reader].add(before)
        del self.after[op], self.size[op]
        return reader

    def groups(self) -> list[tuple[int, ...]]:
        """Return the groups in a topological order of the merged graph."""
        left = {op: len(before) for op, before in self.before.items()}
        ready = [op for op, count in left.items() if not count]
        heapify(ready)
        found: list[tuple[int, ...]] = []
        while ready:
            op = heappop(ready)
            found.append(tuple(sorted(self.parts[op])))
            for after in self.after[op]:
                left[after] -= 1
                if not left[after]:
                    heappush(ready, after)
        return found
