"""Eviction: execute a graph within a limit, losing what is cheapest to lose.

The ops run in graph order. Before each run, storages are evicted until the run fits;
a read that is not live is recomputed first, with the ancestors that are not live
either. The victim has the smallest

    time to recompute it / (its bytes ^ a x its distance to the next use ^ b),

where the future is known: the remaining uses are those of the graph's own order. The
time to recompute counts the op and a share of its ancestors that are not live. An
ancestor that the rest of the step will use in its own right is recomputed sooner or
later anyway, hence the share; one that nobody else needs counts in full.

This is the shape of dynamic tensor rematerialisation [1]_ with Belady's knowledge of
the future [2]_ in the place of staleness.

An op that may run once is never lost while it is needed: its outputs are evicted only
when they have no use left and everything computed from them is live; what was computed
from them is then kept in their place.

References
----------
.. [1] M. Kirisame et al. Dynamic tensor rematerialization. ICLR 2021.
.. [2] L. A. Belady. A study of replacement algorithms for a virtual-storage computer.
   IBM Systems Journal 5(2), 1966.
"""

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from remat.core.checks import checked_number
from remat.core.graph import TrainingGraph
from remat.core.problem import Limits
from remat.native import LARGEST_EXPONENT
from remat.search.eviction_run import END, Blocks, Bounds, Ops, Scores, run_evicting
from remat.search.plain_numbers import plain_numbers, required_order


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRule:
    """How victims are scored.

    Parameters
    ----------
    size_exponent, distance_exponent
        Exponents of the bytes and of the distance to the next use, at least 0.
    ancestor_share
        Share, 0 to 1, of the cost of ancestors that are not live but will be used
        again anyway.
    spare_share
        Share, 0 to 1, of the cost of a storage without uses of its own, as long as
        everything that could be recomputed from it is live.

    Raises
    ------
    ValueError
        If a number is none, not finite or out of range; exponents are at most
        :data:`~remat.native.LARGEST_EXPONENT`.
    """

    size_exponent: float = 1.0
    distance_exponent: float = 1.0
    ancestor_share: float = 0.5
    spare_share: float = 0.01

    def __post_init__(self) -> None:
        for name, most in (
            ("size_exponent", LARGEST_EXPONENT),
            ("distance_exponent", LARGEST_EXPONENT),
            ("ancestor_share", 1.0),
            ("spare_share", 1.0),
        ):
            label = f"{name} of EvictionRule"
            number = checked_number(label, getattr(self, name), most=most)
            object.__setattr__(self, name, number)


def evicting_order(
    graph: TrainingGraph,
    limit_bytes: int,
    *,
    kind_index: int = 0,
    rule: EvictionRule | None = None,
    runs_per_op: int = 8,
    saved: Container[int] | None = None,
    limits: Limits | None = None,
) -> list[int] | None:
    """Return an order whose peak is at most ``limit_bytes``, or ``None``.

    Parameters
    ----------
    graph
        The graph to execute.
    limit_bytes
        Most bytes at any moment, resident bytes included.
    kind_index
        Position of the device's kind in the ops' costs.
    rule
        How victims are chosen; by default as :class:`EvictionRule` has it.
    runs_per_op
        Give up once the runs exceed this multiple of the graph's ops.
    saved
        If given, forward drops everything else as soon as it has read it for the
        last time, instead of waiting until memory is short.
    limits
        When to give up.

    Returns
    -------
    list[int] | None
        Op indices and the boundary, for
        :func:`remat.core.liveness.schedule_from_order`; ``None`` when the rule does not
        get by with the limit.

    Notes
    -----
    Time O(runs x live storages), at the speed of vectorised arithmetic.
    """
    rule = rule or EvictionRule()
    limits = limits or Limits()
    numbers = plain_numbers(graph, kind_index)
    steps = required_order(graph)
    distances = np.maximum(np.arange(len(steps) + 2, dtype=np.float64), 1.0)
    weights = (
        np.maximum(np.array(numbers.sizes, dtype=np.float64), 1.0) ** rule.size_exponent
    )
    ops = Ops(
        reads=numbers.reads,
        writes=numbers.writes,
        may_rerun=[op.is_recomputable for op in graph.ops],
        costs=numbers.costs,
        workspaces=numbers.workspaces,
    )
    blocks = Blocks(
        consumers=graph.consumers,
        producers=[
            -1 if producer is None else producer for producer in graph.producers
        ],
        sizes=numbers.sizes,
        weights=weights.tolist(),
    )
    scores = Scores(
        distance_weights=(distances**rule.distance_exponent).tolist(),
        ancestor_share=rule.ancestor_share,
        spare_share=rule.spare_share,
    )
    bounds = Bounds(
        limit_bytes=limit_bytes,
        resident_bytes=numbers.resident_bytes,
        run_limit=runs_per_op * len(graph.ops),
    )
    kept = None if saved is None else [s in saved for s in range(len(numbers.sizes))]
    return run_evicting(
        [*steps, END], ops, blocks, scores, bounds, kept, limits.remaining_s
    )
