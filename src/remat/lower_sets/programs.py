"""Plan a forward graph: the best segmentation of a family for budgets and objectives.

The entry points of the method. What they return is optimal among the increasing
sequences of the family given, and so of the graph when the family is complete.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from remat.errors import BudgetError
from remat.lower_sets.families import Family, masks_of_rows, members
from remat.lower_sets.formula import cached_values, overhead, peak_bytes
from remat.lower_sets.forward_graph import MOST_TOTAL, ForwardGraph, Owed
from remat.lower_sets.recurrences import (
    Found,
    Goal,
    GraphArrays,
    smallest_lower_set_budget,
    solve_lower_sets,
)


class Objective(StrEnum):
    """What to look for among the sequences within the budget."""

    LEAST_OVERHEAD = "least overhead"
    """The paper's time-centric strategy; a tie is broken by fewer bytes kept."""

    MOST_OVERHEAD = "most overhead"
    """The paper's memory-centric strategy: coarse segments, of which a liveness pass
    then makes less than the formula says; a tie is broken by fewer bytes kept."""

    LEAST_CACHED = "least cached bytes"
    """The fewest bytes kept; a tie is broken by less overhead. Another source of
    coarse segments: the published program's reading of memory-centric."""


_GOALS = {
    Objective.LEAST_OVERHEAD: Goal.LEAST_OVERHEAD,
    Objective.MOST_OVERHEAD: Goal.MOST_OVERHEAD,
    Objective.LEAST_CACHED: Goal.LEAST_CACHED,
}
_OWED = {Owed.CONSUMERS: 0, Owed.BOUNDARY: 1, Owed.NOTHING: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmentation:
    """An increasing sequence of lower sets, as the segment of each value.

    Parameters
    ----------
    segment_of
        Per value the index of its segment, ``0..k-1``.
    overhead
        Cost of all recomputation, in the unit of the graph's costs; with or without
        the last segment's, as was asked for.
    peak_bytes
        The formula's peak: the largest ``M^(i)``.
    cached_bytes
        Bytes of ``U_k``: all values kept for a later segment.
    is_optimal
        Whether it is the best of the family, rather than the best when time ran out.
    """

    segment_of: tuple[int, ...]
    overhead: int
    peak_bytes: int
    cached_bytes: int
    is_optimal: bool = True

    @property
    def segment_count(self) -> int:
        """Number of segments, ``k``."""
        return max(self.segment_of) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question of a sweep.

    Parameters
    ----------
    budget_bytes
        Most bytes that the formula's peak may reach.
    objective
        What to look for within the budget.
    charge_last
        Whether the last segment's recomputation counts, as in the paper. It never has
        to happen, so that by default it does not count.
    """

    budget_bytes: int
    objective: Objective = Objective.LEAST_OVERHEAD
    charge_last: bool = False


def sweep(
    graph: ForwardGraph,
    family: Family,
    queries: Sequence[Query],
    *,
    deadline_s: float | None = None,
) -> list[Segmentation | None]:
    """Return the best segmentation for each query; ``None`` where none fits.

    Parameters
    ----------
    graph, family
        The graph, and a family of its lower sets.
    queries
        Budgets and objectives.
    deadline_s
        A value of ``time.monotonic()`` at which to stop, or ``None``. What was not
        answered by then is the best known (``is_optimal`` false), or ``None`` too.

    Raises
    ------
    ValueError
        If the family is of another graph.

    Notes
    -----
    Time per query O(S^2 F) and memory O(S F) for a family of S sets and fronts of
    length F, at most the sum of the costs; in practice far less.
    """
    _check_family(graph, family)
    answers = solve_lower_sets(
        _arrays(graph),
        family.rows,
        [
            (_clipped(query.budget_bytes), _GOALS[query.objective], query.charge_last)
            for query in queries
        ],
        _remaining_s(deadline_s),
    )
    return [
        _segmentation(
            graph,
            family,
            chain,
            charge_last=query.charge_last,
            is_optimal=found == Found.OPTIMAL,
        )
        if chain
        else None
        for query, (found, _, _, chain) in zip(queries, answers, strict=True)
    ]


def solve(
    graph: ForwardGraph,
    family: Family,
    query: Query,
    *,
    deadline_s: float | None = None,
) -> Segmentation:
    """Return the best segmentation for one query.

    Raises
    ------
    BudgetError
        If no sequence of the family fits; the message names the smallest budget.
    TimeoutError
        If the deadline came before any sequence was found.
    ValueError
        If the family is of another graph.
    """
    (found,) = sweep(graph, family, [query], deadline_s=deadline_s)
    if found is not None:
        return found
    least = smallest_budget(graph, family, deadline_s=deadline_s).peak_bytes
    if least <= query.budget_bytes:
        msg = (
            f"{graph.name}: time ran out before a segmentation within "
            f"{query.budget_bytes:_} bytes was found; allow more, or use a smaller "
            f"family than these {len(family):_} lower sets"
        )
        raise TimeoutError(msg)
    msg = (
        f"{graph.name}: no segmentation fits in {query.budget_bytes:_} bytes; the "
        f"smallest budget is {least:_} bytes ({least - query.budget_bytes:_} more) "
        f"among sequences of {len(family):_} lower sets ({family.label})"
    )
    raise BudgetError(msg, budget_bytes=query.budget_bytes, required_bytes=least)


def smallest_budget(
    graph: ForwardGraph,
    family: Family,
    *,
    charge_last: bool = False,
    deadline_s: float | None = None,
) -> Segmentation:
    """Return a segmentation of least formula peak; its ``peak_bytes`` is that budget.

    Its overhead is that of one such segmentation, not the least: for that, ask
    :func:`solve` with this budget.

    Raises
    ------
    TimeoutError
        If the deadline came before any sequence was found.
    ValueError
        If the family is of another graph.
    """
    _check_family(graph, family)
    found, _, _, chain = smallest_lower_set_budget(
        _arrays(graph),
        family.rows,
        _remaining_s(deadline_s),
    )
    if not chain:
        msg = f"{graph.name}: time ran out before the smallest budget was found"
        raise TimeoutError(msg)
    return _segmentation(
        graph,
        family,
        chain,
        charge_last=charge_last,
        is_optimal=found == Found.OPTIMAL,
    )


def _check_family(graph: ForwardGraph, family: Family) -> None:
    if family.node_count != graph.node_count:
        msg = (
            f"the family has lower sets of {family.node_count} values, the graph "
            f"{graph.node_count}"
        )
        raise ValueError(msg)


def _arrays(graph: ForwardGraph) -> GraphArrays:
    return (
        graph.memory_bytes,
        graph.cost,
        graph.charged_bytes,
        graph.edges,
        _OWED[graph.owed],
    )


def _clipped(budget_bytes: int) -> int:
    return max(-1, min(budget_bytes, MOST_TOTAL))


def _remaining_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())


def _segmentation(
    graph: ForwardGraph,
    family: Family,
    chain: Sequence[int],
    *,
    charge_last: bool,
    is_optimal: bool,
) -> Segmentation:
    segment_of = [0] * graph.node_count
    done = 0
    for segment, mask in enumerate(masks_of_rows(family.rows[list(chain)])):
        for v in members(mask & ~done):
            segment_of[v] = segment
        done = mask
    kept = cached_values(graph, segment_of)
    return Segmentation(
        segment_of=tuple(segment_of),
        overhead=overhead(graph, segment_of, charge_last=charge_last),
        peak_bytes=peak_bytes(graph, segment_of),
        cached_bytes=sum(graph.memory_bytes[v] for v in kept),
        is_optimal=is_optimal,
    )
