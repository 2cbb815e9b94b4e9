"""Families of lower sets: what the programs choose increasing sequences from.

A *lower set* contains, with each value, all that the value needs. A family is exact
when it holds all of them; their number grows with what runs in parallel, so beyond a
cap a family is chosen that holds the useful ones.

A family is kept as bit sets: row ``i`` of ``rows`` is a lower set, value ``v`` is bit
``v % 64`` of word ``v // 64``. Rows are distinct and sorted by their number of values;
the first is empty, the last is all of ``V``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.core.checks import (
    checked_integer,
    checked_integers,
    checked_record,
    checked_text,
    keep_flags,
    keep_integers,
    require,
)
from remat.core.deadline import check_time
from remat.native import native

MOST_NODES = 2**15
"""Most values of a graph whose lower sets are looked for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """Lower sets of one forward graph.

    Parameters
    ----------
    rows
        Bit sets, shape (sets, words) of ``uint64``, as the module describes.
    node_count
        Number of values of the graph.
    is_complete
        Whether these are all the lower sets of the graph.
    label
        What the family consists of, for people.

    Raises
    ------
    ValueError
        If the rows are no such bit sets, or a field is of another type.
    """

    rows: NDArray[np.uint64]
    node_count: int
    is_complete: bool
    label: str

    def __post_init__(self) -> None:
        keep_integers(self, "node_count", of="a family", least=1, most=MOST_NODES)
        checked_record("rows of a family", self.rows, np.ndarray)
        keep_flags(self, "is_complete", of="a family")
        checked_text("label of a family", self.label)
        words = -(-self.node_count // 64)
        is_bits = self.rows.dtype == np.uint64 and self.rows.ndim == 2
        if not is_bits or self.rows.shape[1] != words or len(self.rows) < 2:
            msg = (
                f"rows of a family are of shape {self.rows.shape} and type "
                f"{self.rows.dtype}; they must be two or more bit sets of "
                f"{self.node_count} values: {words} words of uint64 each"
            )
            raise ValueError(msg)

    def __len__(self) -> int:
        """Return the number of lower sets, the empty one and ``V`` included."""
        return len(self.rows)

    def masks(self) -> list[int]:
        """Return each lower set as an integer with bit ``v`` set for value ``v``."""
        return masks_of_rows(self.rows)

    def __or__(self, other: "Family") -> "Family":
        """Return the union of two families of one graph."""
        if other.node_count != self.node_count:
            msg = f"families of {self.node_count} and {other.node_count} values"
            raise ValueError(msg)
        return family_of_masks(
            self.node_count,
            [*self.masks(), *other.masks()],
            label=f"{self.label}, {other.label}",
            is_complete=self.is_complete or other.is_complete,
        )


def _checked_masks(node_count: object, masks: object) -> tuple[int, tuple[int, ...]]:
    count = checked_integer("node_count", node_count, least=1, most=MOST_NODES)
    sets = checked_integers("the lower sets", masks, least=0)
    for index, mask in enumerate(sets):
        if mask >> count:
            msg = (
                f"lower set {index} holds value {mask.bit_length() - 1}; the values are "
                f"0..{count - 1}"
            )
            raise ValueError(msg)
    return count, sets


def members(mask: int) -> list[int]:
    """Return the values of a lower set given as an integer, ascending.

    Raises
    ------
    ValueError
        If it is no integer of at least 0.
    """
    if type(mask) is not int or mask < 0:
        mask = checked_integer("a lower set", mask, least=0)
    found: list[int] = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found


def masks_of_rows(rows: NDArray[np.uint64]) -> list[int]:
    """Return the rows of a family as integers."""
    little = np.ascontiguousarray(rows, dtype="<u8")
    return [int.from_bytes(row.tobytes(), "little") for row in little]


def contents(family: Family) -> NDArray[np.bool_]:
    """Return which set holds which value, shape (sets, values)."""
    bits = np.ascontiguousarray(family.rows, dtype="<u8").view(np.uint8)
    unpacked = np.unpackbits(bits, axis=1, bitorder="little", count=family.node_count)
    return unpacked.astype(np.bool_)


def rows_of_masks(node_count: int, masks: Sequence[int]) -> NDArray[np.uint64]:
    """Return integers as rows of a family, in the order given.

    Raises
    ------
    ValueError
        If the number of values is out of range, or a set holds others.
    """
    node_count, masks = _checked_masks(node_count, masks)
    words = -(-node_count // 64)
    data = b"".join(mask.to_bytes(8 * words, "little") for mask in masks)
    little = np.frombuffer(data, dtype="<u8").reshape(len(masks), words)
    return little.astype(np.uint64)


def family_of_masks(
    node_count: int, masks: Iterable[int], *, label: str, is_complete: bool = False
) -> Family:
    """Return the family of these lower sets, the empty one and ``V`` added.

    Raises
    ------
    ValueError
        If the number of values is out of range, or a set holds others.
    """
    node_count, masks = _checked_masks(node_count, masks)
    everything = (1 << node_count) - 1
    check_time()
    distinct = sorted(
        {0, everything, *masks}, key=lambda mask: (mask.bit_count(), mask)
    )
    return Family(
        rows=rows_of_masks(node_count, distinct),
        node_count=node_count,
        is_complete=is_complete,
        label=label,
    )


def most_sets(node_count: int) -> int:
    """Return the most lower sets that are ever enumerated: they take 2**29 bytes."""
    return 2**29 // (8 * -(-node_count // 64))


def check_count(node_count: int) -> None:
    """Refuse numbers of values that cannot be.

    Raises
    ------
    ValueError
        If there is none, or more than :data:`MOST_NODES`.
    """
    require(1 <= node_count <= MOST_NODES, "a graph has 1 to 2**15 values")


def check_edges(node_count: int, *lists: Sequence[tuple[int, int]]) -> None:
    """Refuse edges that name unknown values or close a cycle.

    Raises
    ------
    ValueError
        If there are such.
    """
    waiting = [0] * node_count
    later: list[list[int]] = [[] for _ in waiting]
    for edges in lists:
        for u, v in edges:
            require(
                0 <= u < node_count and 0 <= v < node_count,
                "an edge names a value that does not exist",
            )
            waiting[v] += 1
            later[u].append(v)
    ready = [v for v, count in enumerate(waiting) if count == 0]
    for u in ready:  # Grows as it is walked.
        for v in later[u]:
            waiting[v] -= 1
            if waiting[v] == 0:
                ready.append(v)
    require(len(ready) == node_count, "the edges close a cycle")


@native
def enumerate_lower_sets(
    node_count: int, edges: Sequence[tuple[int, int]], cap: int
) -> NDArray[np.uint64] | None:
    """Return all lower sets as rows of a family; ``None`` beyond ``cap`` of them.

    Parameters
    ----------
    node_count
        Number of values.
    edges
        Pairs ``(u, v)``, acyclic: a lower set with ``v`` contains ``u``.
    cap
        Most lower sets, at least 1.

    Notes
    -----
    Grows each set by one ready value and keeps what is new. Time and memory
    O(min(sets, cap) x values); nothing beyond ``cap`` sets is stored.
    """
    check_count(node_count)
    check_edges(node_count, edges)
    require(
        1 <= cap <= most_sets(node_count),
        "the cap must be at least 1, and the sets take at most 2**29 bytes",
    )
    need = [0] * node_count
    for u, v in edges:
        need[v] |= 1 << u
    layer, found = {0}, [0]
    while layer:
        larger: set[int] = set()
        for mask in layer:
            check_time()
            for v in range(node_count):
                if not mask >> v & 1 and need[v] & ~mask == 0:
                    larger.add(mask | 1 << v)
                    if len(found) + len(larger) > cap:
                        return None
        found += sorted(larger)
        layer = larger
    return rows_of_masks(node_count, found) if len(found) <= cap else None


def checked_graph(graph: object) -> None:
    """Refuse what is no :class:`~.forward_graph.ForwardGraph`."""
    checked_record("graph", graph, ForwardGraph)


def all_lower_sets(graph: ForwardGraph, cap: int) -> Family | None:
    """Return the family of all lower sets, or ``None`` if they are more than ``cap``.

    Whatever the cap, no more are enumerated than :func:`most_sets` says.

    Parameters
    ----------
    graph
        The graph.
    cap
        Most lower sets, at least 1.

    Raises
    ------
    ValueError
        If ``cap`` is not a positive integer.

    Notes
    -----
    Time and memory O(min(sets, cap) |V|).

    References
    ----------
    M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic framework
    of recomputation algorithms for memory-efficient backpropagation. NeurIPS 2019.

    Examples
    --------
    >>> diamond = ForwardGraph.of_values(
    ...     [2, 3, 5, 1], [1, 10, 10, 1], [(0, 1), (0, 2), (1, 3), (2, 3)]
    ... )
    >>> len(all_lower_sets(diamond, 100)), all_lower_sets(diamond, 5)
    (6, None)
    """
    checked_graph(graph)
    cap = checked_integer("the cap on lower sets", cap, least=1)
    # More do not fit in memory.
    cap = min(cap, most_sets(graph.node_count))
    rows = enumerate_lower_sets(graph.node_count, list(graph.all_edges), cap)
    if rows is None:
        return None
    return Family(
        rows=rows,
        node_count=graph.node_count,
        is_complete=True,
        label="all lower sets",
    )


def ancestor_sets(graph: ForwardGraph) -> Family:
    """Return the family of the approximate program: each value with all it needs.

    Parameters
    ----------
    graph
        The graph.

    Raises
    ------
    ValueError
        If it is no :class:`~.forward_graph.ForwardGraph`.

    Notes
    -----
    At most ``|V| + 1`` sets; time O(|V| |E|).

    References
    ----------
    M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic framework
    of recomputation algorithms for memory-efficient backpropagation. NeurIPS 2019.

    Examples
    --------
    >>> chain = ForwardGraph.of_values([4] * 9, [1] * 9, [(v, v + 1) for v in range(8)])
    >>> len(ancestor_sets(chain))
    10
    """
    checked_graph(graph)
    sets = [1 << v for v in range(graph.node_count)]
    for v in graph.topological_order:
        for u in graph.all_predecessors[v]:
            sets[v] |= sets[u]
    return family_of_masks(graph.node_count, sets, label="ancestor sets")


def complements_of_descendants(graph: ForwardGraph) -> Family:
    """Return the duals: for each value, all that does not need it."""
    everything = (1 << graph.node_count) - 1
    later = [1 << v for v in range(graph.node_count)]
    for u in reversed(graph.topological_order):
        for v in graph.all_successors[u]:
            later[u] |= later[v]
    masks = [everything & ~mask for mask in later]
    return family_of_masks(graph.node_count, masks, label="complements of descendants")


def prefixes(graph: ForwardGraph, order: Sequence[int]) -> Family:
    """Return the prefixes of one topological order of all the values.

    Raises
    ------
    ValueError
        If the order leaves a value out, names one that is none, or puts one before what
        it needs.
    """
    checked_graph(graph)
    order = checked_integers("the order", order, least=0, most=graph.node_count - 1)
    masks, mask = [0], 0
    for v in order:
        if any(not mask >> u & 1 for u in graph.all_predecessors[v]):
            msg = f"{graph.node_name(v)} comes before a value that it needs"
            raise ValueError(msg)
        mask |= 1 << v
        masks.append(mask)
    if len(order) != graph.node_count or mask != (1 << graph.node_count) - 1:
        msg = f"an order of {len(order)} values; need each of {graph.node_count} once"
        raise ValueError(msg)
    return family_of_masks(graph.node_count, masks, label="prefixes of an order")


@native
def neighbouring_lower_sets(
    edges: Sequence[tuple[int, int]], rows: NDArray[np.uint64], node_count: int
) -> NDArray[np.uint64]:
    """Return the lower sets with one value more, or one less, than one of ``rows``.

    Parameters
    ----------
    edges
        Pairs ``(u, v)``, acyclic: a lower set with ``v`` contains ``u``.
    rows
        Lower sets, as rows of a family, in any order.
    node_count
        Number of values.

    Returns
    -------
    NDArray
        Distinct rows, smaller sets first.
    """
    check_count(node_count)
    check_edges(node_count, edges)
    masks = masks_of_rows(rows)
    require(
        rows.shape[1] == -(-node_count // 64)
        and all(mask >> node_count == 0 for mask in masks),
        "rows must be bit sets of the values",
    )
    need, hold = [0] * node_count, [0] * node_count
    for u, v in edges:
        need[v] |= 1 << u
        hold[u] |= 1 << v
    found: set[int] = set()
    for mask in masks:
        check_time()
        for v in range(node_count):
            if mask >> v & 1:
                if not hold[v] & mask:
                    found.add(mask & ~(1 << v))
            elif not need[v] & ~mask:
                found.add(mask | 1 << v)
    ordered = sorted(found, key=lambda mask: (mask.bit_count(), mask))
    return rows_of_masks(node_count, ordered)


def neighbours(graph: ForwardGraph, family: Family) -> Family:
    """Return the lower sets that differ from one of a family's in a single value."""
    rows = neighbouring_lower_sets(list(graph.all_edges), family.rows, graph.node_count)
    return family_of_masks(
        graph.node_count, masks_of_rows(rows), label=f"neighbours of {family.label}"
    )
