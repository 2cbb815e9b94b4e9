"""The choice of a family: all lower sets where they are few, else the useful ones."""

from remat.algorithms.lower_sets.families import (
    Family,
    all_lower_sets,
    ancestor_sets,
    checked_graph,
    complements_of_descendants,
    family_of_masks,
    prefixes,
)
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.algorithms.lower_sets.narrowest import narrowest_sets
from remat.algorithms.lower_sets.orders import (
    breadth_first,
    by_depth,
    depth_first,
    from_beginning,
    from_end,
    narrow_first,
)
from remat.core.deadline import check_time

DEFAULT_CAP = 3_000
"""Most lower sets that :func:`choose_family` enumerates."""


def choose_family(graph: ForwardGraph, cap: int = DEFAULT_CAP) -> Family:
    """Return all lower sets if they are at most ``cap``, else an approximate family.

    Parameters
    ----------
    graph
        The graph.
    cap
        Most lower sets that are enumerated, at least 1.

    Raises
    ------
    ValueError
        If ``cap`` is not a positive integer.

    Notes
    -----
    Time O(cap |V|) to enumerate, and that of :func:`approximate_family`.

    References
    ----------
    M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic framework
    of recomputation algorithms for memory-efficient backpropagation. NeurIPS 2019.

    Examples
    --------
    >>> graph = ForwardGraph.of_values([1] * 12, [1] * 12, [])
    >>> choose_family(graph).is_complete, choose_family(graph, 5000).is_complete
    (False, True)
    """
    return all_lower_sets(graph, cap) or approximate_family(graph)


def approximate_family(graph: ForwardGraph) -> Family:
    """Return a family that is small for every graph, and good for most.

    The ancestor sets of the paper's approximate program, their duals, the narrowest
    sets, and the prefixes of eight topological orders: at most ``12 |V|`` sets.

    Parameters
    ----------
    graph
        The graph.

    Raises
    ------
    ValueError
        If it is no :class:`~remat.algorithms.lower_sets.forward_graph.ForwardGraph`.

    Notes
    -----
    One least cut a value: time O(|V| |E| P) for P paths, about as many as values on
    the boundary.

    References
    ----------
    M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic framework
    of recomputation algorithms for memory-efficient backpropagation. NeurIPS 2019.

    Examples
    --------
    >>> graph = ForwardGraph.of_values([1] * 4, [1] * 4, [(0, 1), (0, 2), (1, 3)])
    >>> len(approximate_family(graph)), approximate_family(graph).is_complete
    (7, False)
    """
    checked_graph(graph)
    forward, backward = from_beginning(graph), from_end(graph)
    rules = (breadth_first, depth_first, by_depth, narrow_first)
    families = [
        ancestor_sets(graph),
        complements_of_descendants(graph),
        narrowest_sets(graph),
        *(prefixes(graph, rule(forward)) for rule in rules),
        *(prefixes(graph, rule(backward)[::-1]) for rule in rules),
    ]
    check_time()
    return family_of_masks(
        graph.node_count,
        (mask for family in families for mask in family.masks()),
        label="ancestor sets, their duals, narrowest sets, prefixes of orders",
    )
