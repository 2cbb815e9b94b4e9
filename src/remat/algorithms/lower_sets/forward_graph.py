"""The abstraction of the lower-set method: forward values, their sizes and costs.

A :class:`ForwardGraph` is ``G = (V, E)`` of Kusumoto et al. (NeurIPS 2019), section 3:
the intermediate values of a forward pass, each with its bytes ``M_v`` and the cost
``T_v`` of computing it; inputs and parameters are left out. The backward pass is
implied. Two generalisations let it stand for graphs of real training steps: edges that
order without passing data, and another charge for a segment than the paper's ``2 M_v``.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NoReturn, cast

from remat.core.checks import (
    checked_records,
    checked_text,
    checked_word,
    entries_of,
    integer_of,
)
from remat.core.errors import InvalidGraphError
from remat.native import MOST_TOTAL


class Owed(StrEnum):
    """What the backward of a segment holds on behalf of the segments before it."""

    CONSUMERS = "consumers"
    """The paper's: for each later consumer of a value of the segments so far, its
    gradient and the other forward values that it reads, terms (iii) and (iv)."""

    BOUNDARY = "boundary"
    """The gradients, accumulated, of the values that later segments read."""

    NOTHING = "nothing"
    """Nothing: for callers who charge it elsewhere."""


@dataclass(frozen=True, kw_only=True)
class ForwardGraph:
    """A directed acyclic graph of forward values.

    Any integers will do, such as numpy's; they are kept as ``int``.

    Parameters
    ----------
    memory_bytes
        ``M_v``: bytes of each value, 0 or more; the gradient is as large.
    cost
        ``T_v``: cost of computing each value once, in any unit, 0 or more. The programs
        take time that grows with the sum: quantise measured times (to some ``5 |V|``
        in all) before.
    edges
        Pairs ``(u, v)``: computing value ``v``, or its backward, reads value ``u``. No
        pair twice. Values may be numbered in any order.
    order_edges
        Pairs ``(u, v)``: ``v`` comes after ``u`` although it does not read it. They
        restrict lower sets and orders, and keep nothing alive.
    segment_bytes
        ``W_v``: bytes that each value adds while its segment is processed, 0 or more;
        by default the paper's ``2 M_v`` (value and gradient).
    owed
        What else is held meanwhile for the segments before.
    names
        For people: one per value, or none at all.
    name
        For people.

    Raises
    ------
    InvalidGraphError
        If there is no value, a list has another length, a size or cost is negative or
        not an integer, sums do not fit in 64 bits, or the edges are no pairs of
        integers, name unknown values, repeat, join a value to itself, or close a cycle.
    """

    memory_bytes: tuple[int, ...]
    cost: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    order_edges: tuple[tuple[int, int], ...] = ()
    segment_bytes: tuple[int, ...] | None = None
    owed: Owed = Owed.CONSUMERS
    names: tuple[str, ...] = ()
    name: str = "forward graph"

    def __post_init__(self) -> None:
        for label in ("memory_bytes", "cost", "segment_bytes", "edges", "order_edges"):
            entries = getattr(self, label)
            if label != "segment_bytes" or entries is not None:
                self._keep(label, self._listed(label, entries))
        checked_text("the name of a forward graph", self.name, error=InvalidGraphError)
        label = f"{self.name}: owed"
        self._keep(
            "owed", checked_word(label, self.owed, Owed, error=InvalidGraphError)
        )
        names = checked_records(
            f"{self.name}: names", self.names, str, error=InvalidGraphError
        )
        self._keep("names", names)
        if not self.memory_bytes:
            self._fail("there is no value; a forward graph has at least one")
        if self.names and len(self.names) != self.node_count:
            self._fail(f"{len(self.names)} names for {self.node_count} values")
        self._keep("memory_bytes", self._numbers("memory_bytes", self.memory_bytes))
        self._keep("cost", self._numbers("cost", self.cost))
        if self.segment_bytes is not None:
            self._keep(
                "segment_bytes", self._numbers("segment_bytes", self.segment_bytes)
            )
        total = sum(self.charged_bytes) + 3 * sum(self.memory_bytes)
        if total > MOST_TOTAL:
            self._fail(
                f"the sizes add up to {total:_} bytes as they are charged, more than "
                f"{MOST_TOTAL:_}; give sizes in a larger unit"
            )
        if sum(self.cost) > MOST_TOTAL:
            self._fail(
                f"the costs add up to {sum(self.cost):_}, more than {MOST_TOTAL:_}; "
                "give costs in a larger unit"
            )
        self._keep("edges", self._pairs("edges", self.edges))
        self._keep("order_edges", self._pairs("order_edges", self.order_edges))
        if len(self.topological_order) < self.node_count:
            stuck = sorted(set(range(self.node_count)) - set(self.topological_order))
            shown = ", ".join(map(self.node_name, stuck[:5]))
            self._fail(
                f"{len(stuck)} values are on or behind a cycle of edges: {shown}"
                f"{', ...' if len(stuck) > 5 else ''}; a forward pass has none"
            )

    def _fail(self, message: str) -> NoReturn:
        msg = f"{self.name}: {message}"
        raise InvalidGraphError(msg)

    def _keep(self, label: str, value: object) -> None:
        # The class is frozen for everyone else.
        object.__setattr__(self, label, value)

    def _listed(self, label: str, entries: object) -> tuple[object, ...]:
        found = entries_of(entries)
        if found is None:
            self._fail(f"{label} is {entries!r}; need a list")
        return found

    def _numbers(self, label: str, numbers: Sequence[object]) -> tuple[int, ...]:
        if len(numbers) != self.node_count:
            self._fail(f"{label} has {len(numbers)} entries for {self.node_count}")
        found: list[int] = []
        for node, entry in enumerate(numbers):
            number = integer_of(entry)
            if number is None:
                self._fail(
                    f"{label} of {self.node_name(node)} is {entry!r}; need an integer"
                )
            if number < 0:
                self._fail(
                    f"{label} of {self.node_name(node)} is {number:_}; need 0 or more"
                )
            found.append(number)
        return tuple(found)

    def _pairs(
        self, label: str, edges: Sequence[object]
    ) -> tuple[tuple[int, int], ...]:
        seen: dict[tuple[int, int], None] = {}
        for edge in edges:
            ends = [integer_of(end) for end in entries_of(edge) or ()]
            if len(ends) != 2 or ends[0] is None or ends[1] is None:
                self._fail(f"{label} has {edge!r}; need pairs of integers (u, v)")
            u, v = ends[0], ends[1]
            if not (0 <= u < self.node_count and 0 <= v < self.node_count):
                self._fail(
                    f"{label} has {u}->{v}, but the values are 0..{self.node_count - 1}"
                )
            if u == v:
                self._fail(f"{label} joins {self.node_name(u)} to itself")
            if (u, v) in seen:
                self._fail(f"{label} has {u}->{v} twice; give each pair once")
            seen[u, v] = None
        return tuple(seen)

    @classmethod
    def of_values(
        cls,
        memory_bytes: Sequence[int],
        cost: Sequence[int],
        edges: Sequence[tuple[int, int]],
        *,
        name: str = "forward graph",
    ) -> "ForwardGraph":
        """Return the graph in the paper's own setting: every size is positive.

        Raises
        ------
        InvalidGraphError
            As the constructor, and if a size is zero: such a value is free to keep, so
            that it belongs to another value or is missing its size.
        """
        graph = cls(
            # The constructor makes tuples of them, or says what is wrong.
            memory_bytes=cast("tuple[int, ...]", memory_bytes),
            cost=cast("tuple[int, ...]", cost),
            edges=cast("tuple[tuple[int, int], ...]", edges),
            name=name,
        )
        for node, size in enumerate(graph.memory_bytes):
            if size == 0:
                graph._fail(
                    f"memory_bytes of {graph.node_name(node)} is 0; need 1 or more "
                    "(leave out, or merge, values without bytes)"
                )
        return graph

    @property
    def node_count(self) -> int:
        """Number of values, ``|V|``."""
        return len(self.memory_bytes)

    @property
    def charged_bytes(self) -> tuple[int, ...]:
        """``W_v`` of each value: ``segment_bytes``, or twice its bytes."""
        if self.segment_bytes is not None:
            return self.segment_bytes
        return tuple(2 * size for size in self.memory_bytes)

    def node_name(self, node: int) -> str:
        """Return what to call a value in messages."""
        return f"value {node}" + (f" {self.names[node]!r}" if self.names else "")

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """``delta-``: the values that each value reads, ascending."""
        return _neighbours(self.node_count, [(v, u) for u, v in self.edges])

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """``delta+``: the values that read each value, ascending."""
        return _neighbours(self.node_count, self.edges)

    @cached_property
    def all_edges(self) -> tuple[tuple[int, int], ...]:
        """Edges and order edges, each pair once, ascending."""
        return tuple(sorted({*self.edges, *self.order_edges}))

    @cached_property
    def all_predecessors(self) -> tuple[tuple[int, ...], ...]:
        """What each value comes after, by an edge or an order edge, ascending."""
        return _neighbours(self.node_count, [(v, u) for u, v in self.all_edges])

    @cached_property
    def all_successors(self) -> tuple[tuple[int, ...], ...]:
        """What comes after each value, by an edge or an order edge, ascending."""
        return _neighbours(self.node_count, self.all_edges)

    @cached_property
    def topological_order(self) -> tuple[int, ...]:
        """The values in the order that takes the smallest ready one first."""
        waiting = [len(nodes) for nodes in self.all_predecessors]
        ready = [node for node, count in enumerate(waiting) if count == 0]
        order: list[int] = []
        while ready:
            node = heapq.heappop(ready)
            order.append(node)
            for later in self.all_successors[node]:
                waiting[later] -= 1
                if waiting[later] == 0:
                    heapq.heappush(ready, later)
        return tuple(order)


def _neighbours(
    count: int, edges: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    lists: list[set[int]] = [set() for _ in range(count)]
    for u, v in edges:
        lists[u].add(v)
    return tuple(tuple(sorted(nodes)) for nodes in lists)
