"""Chen's method on a forward graph, as the lower-set paper ran it for comparison.

The segments end at *candidates*, lower sets of which a single value is read outside, in
about ``sqrt`` of their number equal parts by bytes; the canonical strategy is the same
as for the programs. It optimises nothing: it is the baseline of the paper's table.

References
----------
T. Chen, B. Xu, C. Zhang, C. Guestrin: Training deep nets with sublinear memory cost.
2016. Walk and candidates: M. Kusumoto et al., NeurIPS 2019, published experiments.
"""

import math
from itertools import compress
from operator import itemgetter

import numpy as np

from remat.algorithms.lower_sets.families import Family, contents, masks_of_rows
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.algorithms.lower_sets.programs import (
    Segmentation,
    check_family,
    segmentation_of_chain,
)
from remat.core.checks import checked_flag
from remat.core.deadline import check_time


def chen_candidates(graph: ForwardGraph, family: Family) -> list[tuple[int, int]]:
    """Return the sets of a family with one value on their boundary, and their bytes.

    Bytes come first, and the sets are in their order.

    The empty set and ``V`` are candidates too. With a complete family these are the
    candidates of the paper; in an incomplete one some may be missing.
    """
    check_family(graph, family)
    inside = contents(family)
    is_read = np.zeros_like(inside)
    for u, v in graph.edges:
        check_time()
        is_read[:, u] |= inside[:, u] & ~inside[:, v]
    is_candidate = is_read.sum(axis=1) == 1
    is_candidate[[0, -1]] = True
    rows = np.flatnonzero(is_candidate)
    found: list[tuple[int, int, int]] = []
    for row, mask in zip(rows, masks_of_rows(family.rows[rows]), strict=True):
        check_time()
        size = sum(compress(graph.memory_bytes, inside[row]))
        found.append((size, mask.bit_count(), mask))
    return [(size, mask) for size, _, mask in sorted(found, key=itemgetter(0, 1))]


def chen_segmentation(
    graph: ForwardGraph, family: Family, *, charge_last: bool = False
) -> Segmentation:
    """Return the segmentation of Chen's method.

    Parameters
    ----------
    graph, family
        The graph, and a family of its lower sets: the complete one, as in the paper,
        where that is small enough.
    charge_last
        Whether the overhead counts the last segment's recomputation.

    Returns
    -------
    Segmentation
        Not the best of anything; its peak is whatever it is.

    Raises
    ------
    ValueError
        If the family is of another graph.

    Notes
    -----
    With ``k = floor(sqrt(candidates))`` the walk takes each candidate that is the first
    to reach the next multiple of ``M(V) / k``. Candidates need not contain each other:
    one that lacks values of the last one taken is passed over. For a family of S sets
    the time is O(S (|V| + |E|)).

    References
    ----------
    T. Chen, B. Xu, C. Zhang, C. Guestrin. Training deep nets with sublinear memory
    cost. arXiv:1604.06174, 2016.

    Examples
    --------
    >>> from remat.algorithms.lower_sets.families import all_lower_sets
    >>> chain = ForwardGraph.of_values([1] * 9, [1] * 9, [(v, v + 1) for v in range(8)])
    >>> chen_segmentation(chain, all_lower_sets(chain, 100)).segment_of
    (0, 0, 0, 1, 1, 1, 2, 2, 2)
    """
    checked_flag("charge_last", charge_last)
    candidates = chen_candidates(graph, family)
    part_bytes = max(1, sum(graph.memory_bytes) // math.isqrt(len(candidates)))
    chain: list[int] = []
    last, target = 0, part_bytes
    for size, mask in candidates:
        if size < target or last & ~mask:
            continue
        chain.append(mask)
        last = mask
        target = (size // part_bytes + 1) * part_bytes
    everything = (1 << graph.node_count) - 1
    if last != everything:
        chain.append(everything)
    return segmentation_of_chain(graph, chain, charge_last=charge_last)
