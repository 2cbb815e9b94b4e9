"""Minimum cuts by OR-tools' push-relabel maximum flow."""

from collections.abc import Sequence
from dataclasses import dataclass

from remat.backends.library import check_library


@dataclass(frozen=True, slots=True)
class FlowNetwork:
    """A directed graph with a source, node 0, and a sink, node 1.

    Parameters
    ----------
    tails, heads
        Per arc, the node it leaves and the node it enters.
    """

    tails: tuple[int, ...]
    heads: tuple[int, ...]


def min_cut_source_side(
    network: FlowNetwork, capacities: Sequence[int]
) -> frozenset[int]:
    """Return the nodes on the source's side of a minimum cut.

    Parameters
    ----------
    network
        The arcs.
    capacities
        Per arc, an integer of at least 0; their sum must fit in 63 bits.

    Returns
    -------
    frozenset[int]
        The smallest such set: what the source reaches in the residual network.

    Raises
    ------
    ValueError
        If a capacity is negative or their sum too large.
    RuntimeError
        If the library fails for another reason.
    MissingDependencyError
        If it is not installed.

    Examples
    --------
    >>> chain = FlowNetwork(tails=(0, 2), heads=(2, 1))
    >>> sorted(min_cut_source_side(chain, [5, 3]))
    [0, 2]
    """
    check_library("ortools.graph.python.max_flow")
    import numpy as np  # noqa: PLC0415  # keeps `import remat` light
    from ortools.graph.python import max_flow  # noqa: PLC0415

    total = sum(capacities)
    if min(capacities, default=0) < 0 or total >= 1 << 63:
        msg = (
            f"capacities from {min(capacities):_} on, summing to {total:_}; each must "
            "be at least 0 and their sum below 2^63: scale them down"
        )
        raise ValueError(msg)
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(
        np.asarray(network.tails, dtype=np.int32),
        np.asarray(network.heads, dtype=np.int32),
        np.asarray(capacities, dtype=np.int64),
    )
    status = flow.solve(0, 1)
    if status != flow.OPTIMAL:
        msg = f"maximum flow over {len(network.tails)} arcs ended with {status}"
        raise RuntimeError(msg)
    return frozenset(flow.get_source_side_min_cut())
