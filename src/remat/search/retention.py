"""Retention: how long each copy of a storage stays, and keeping more of them.

An order of computations fixes a *retention interval* for every copy of a storage: from
the run that writes it to its last read. This module keeps those intervals and the bytes
over time up to date while runs are taken out of the order, so that one run can be
tried in time proportional to what it touches instead of by replaying everything.

Taking a run out means that the copy which the previous run of the same op wrote stays
until the reads that the taken run served. The inputs of the taken run are then read
once less: their intervals shrink, and runs whose outputs nobody reads any more leave as
well. Each accepted change makes the schedule cheaper and keeps it within the budget,
so the improvement is monotone. The judge has the last word on the result.
"""

from collections.abc import Sequence

from remat.core.graph import TrainingGraph
from remat.core.problem import Limits
from remat.search.plain_numbers import plain_numbers
from remat.search.retention_table import Table, improve_retention


class RetentionTable(Table):
    """The retention intervals of an order of computations of a graph."""

    def __init__(
        self, graph: TrainingGraph, order: Sequence[int], kind_index: int = 0
    ) -> None:
        super().__init__(plain_numbers(graph, kind_index), order)


def improve_order(
    graph: TrainingGraph,
    order: Sequence[int],
    budget_bytes: int,
    *,
    kind_index: int = 0,
    limits: Limits | None = None,
) -> list[int]:
    """Return ``order`` less the runs that memory lets it do without.

    Parameters
    ----------
    graph, order
        As for :class:`RetentionTable`.
    budget_bytes
        Most bytes at any moment, resident bytes included.
    kind_index
        Position of the device's kind in the ops' costs.
    limits
        When to stop; the order reached by then is returned.

    Returns
    -------
    list[int]
        An order that costs no more, and that stays within the budget if ``order``
        does.

    Notes
    -----
    Repeats passes over all recomputations, best value first, until one changes
    nothing. A pass takes time O(runs x (reads + length of what is kept)), the lengths
    at the speed of one vectorised addition.
    """
    limits = limits or Limits()
    improved, _, _ = improve_retention(
        plain_numbers(graph, kind_index),
        order,
        budget_bytes,
        1.0,
        limits.remaining_s,
    )
    return improved
