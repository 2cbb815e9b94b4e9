r"""The cost of a segmentation, in plain code: overhead, and bytes of each segment.

A *segmentation* gives each value the index ``0..k-1`` of its segment; segments run one
after the other. It is the increasing sequence ``L_1 < ... < L_k = V`` of lower sets
with ``V_i = L_i \ L_{i-1}``. The formulas are those of Kusumoto et al. (NeurIPS 2019),
section 3; :func:`segment_peaks_bytes` says what their terms are.
"""

from collections.abc import Sequence
from itertools import accumulate

from remat.algorithms.lower_sets.forward_graph import ForwardGraph, Owed
from remat.core.checks import checked_integer, checked_list, checked_record


def check_segmentation(graph: ForwardGraph, segment_of: Sequence[int]) -> int:
    """Return the number of segments of a valid segmentation.

    Raises
    ------
    ValueError
        If there is not one integer a value, a segment is empty, or an edge leads back
        to an earlier segment.
    """
    checked_record("graph", graph, ForwardGraph)
    indices = checked_list("segment_of", segment_of)
    if len(indices) != graph.node_count:
        msg = f"{len(indices)} segment indices for {graph.node_count} values"
        raise ValueError(msg)
    for v, segment in enumerate(indices):
        checked_integer(f"the segment of {graph.node_name(v)}", segment)
    count = max(segment_of) + 1
    if set(segment_of) != set(range(count)):
        empty = sorted(set(range(count)) ^ set(segment_of))
        msg = f"segments must be 0..{count - 1}, none empty; wrong: {empty}"
        raise ValueError(msg)
    for u, v in graph.all_edges:
        if segment_of[u] > segment_of[v]:
            msg = (
                f"{graph.node_name(v)} in segment {segment_of[v]} follows "
                f"{graph.node_name(u)} in the later segment {segment_of[u]}"
            )
            raise ValueError(msg)
    return count


def last_readers(graph: ForwardGraph, segment_of: Sequence[int]) -> list[int]:
    """Return per value the last segment that reads it, its own if none does."""
    check_segmentation(graph, segment_of)
    last = list(segment_of)
    for u, v in graph.edges:
        last[u] = max(last[u], segment_of[v])
    return last


def cached_values(graph: ForwardGraph, segment_of: Sequence[int]) -> list[int]:
    """Return ``U_k``: the values kept, because a later segment reads them."""
    last = last_readers(graph, segment_of)
    return [v for v in range(graph.node_count) if last[v] > segment_of[v]]


def overhead(
    graph: ForwardGraph, segment_of: Sequence[int], *, charge_last: bool = False
) -> int:
    """Return the cost of all recomputation, in the unit of ``graph.cost``.

    Parameters
    ----------
    graph, segment_of
        The graph and a valid segmentation of it.
    charge_last
        Whether the last segment is recomputed as well, as in the paper. By default
        its values are kept: that is free, because nothing runs in between.
    """
    kept = set(cached_values(graph, segment_of))
    last = max(segment_of)
    return sum(
        cost
        for v, cost in enumerate(graph.cost)
        if v not in kept and (charge_last or segment_of[v] < last)
    )


def segment_peaks_bytes(graph: ForwardGraph, segment_of: Sequence[int]) -> list[int]:
    """Return ``M^(i)``: the most bytes live while each segment is processed.

    Notes
    -----
    The sum of (i) ``M(U_{i-1})``, the values kept of earlier segments; (ii) ``W(V_i)``,
    by default the values and gradients of the whole segment; and what is owed to the
    segments before, by default (iii) the gradients of later consumers of ``L_i`` and
    (iv) the other values outside ``L_i`` that these consumers read.
    """
    check_segmentation(graph, segment_of)
    ends = [
        _while_kept(graph, segment_of),
        _while_in_segment(graph, segment_of),
        *_while_owed(graph, segment_of),
    ]
    changes = [0] * (max(segment_of) + 2)
    for spans in ends:
        for first, last, size in spans:
            changes[first] += size
            changes[last + 1] -= size
    return list(accumulate(changes[:-1]))


_Spans = list[tuple[int, int, int]]
"""First and last segment while whose processing some bytes are held, and the bytes."""


def _while_kept(graph: ForwardGraph, segment_of: Sequence[int]) -> _Spans:
    last = max(segment_of)
    return [
        (segment_of[v] + 1, last, graph.memory_bytes[v])
        for v in cached_values(graph, segment_of)
    ]


def _while_in_segment(graph: ForwardGraph, segment_of: Sequence[int]) -> _Spans:
    return [
        (segment, segment, size)
        for segment, size in zip(segment_of, graph.charged_bytes, strict=True)
    ]


def _while_owed(graph: ForwardGraph, segment_of: Sequence[int]) -> list[_Spans]:
    memory = graph.memory_bytes
    nodes = range(graph.node_count)
    if graph.owed is Owed.NOTHING:
        return []
    if graph.owed is Owed.BOUNDARY:
        last = last_readers(graph, segment_of)
        return [[(segment_of[v], last[v] - 1, memory[v]) for v in nodes]]
    # Per value, the first segment from which on it consumes a value of L_i.
    first = [
        min([segment_of[v], *(segment_of[u] for u in graph.predecessors[v])])
        for v in nodes
    ]
    beside = [
        min([segment_of[v], *(first[w] for w in graph.successors[v])]) for v in nodes
    ]
    return [
        [(first[v], segment_of[v] - 1, memory[v]) for v in nodes],
        [(beside[v], segment_of[v] - 1, memory[v]) for v in nodes],
    ]


def peak_bytes(graph: ForwardGraph, segment_of: Sequence[int]) -> int:
    """Return the formula's peak: the largest ``M^(i)``."""
    return max(segment_peaks_bytes(graph, segment_of))
