"""Plan a forward graph: the best segmentation of a family for budgets and objectives.

The entry points of the method::

    family = choose_family(graph)
    least = smallest_budget(graph, family).peak_bytes
    answers = sweep_lower_sets(
        graph, family, [LowerSetQuery(budget_bytes=2 * least), ...]
    )

What they return is optimal among the increasing sequences of the family, and so of the
graph when the family is complete. When it is not, it is made larger where that may
help: sets beside those of an answer are added, and the query is solved again.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from remat.algorithms.lower_sets.choice import approximate_family
from remat.algorithms.lower_sets.families import (
    Family,
    checked_graph,
    family_of_masks,
    masks_of_rows,
    members,
    neighbours,
)
from remat.algorithms.lower_sets.formula import (
    cached_values,
    check_segmentation,
    overhead,
    peak_bytes,
)
from remat.algorithms.lower_sets.forward_graph import ForwardGraph, Owed
from remat.algorithms.lower_sets.recurrences import (
    Answer,
    Found,
    Goal,
    GraphArrays,
    smallest_lower_set_budget,
    solve_lower_sets,
)
from remat.core.checks import (
    checked_flag,
    checked_integer,
    checked_integers,
    checked_number,
    checked_record,
    checked_records,
    keep_flags,
    keep_integer_lists,
    keep_integers,
    keep_words,
)
from remat.core.errors import BudgetError
from remat.native import MOST_TOTAL

DEFAULT_REFINEMENTS = 3
"""Rounds of adding sets beside an answer's, in an incomplete family."""

_SCOUT_ABOVE = 1_500
"""Complete families larger than this are searched after an approximate one: what was
found there bounds the search, which becomes many times shorter."""


class LowerSetObjective(StrEnum):
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
    LowerSetObjective.LEAST_OVERHEAD: Goal.LEAST_OVERHEAD,
    LowerSetObjective.MOST_OVERHEAD: Goal.MOST_OVERHEAD,
    LowerSetObjective.LEAST_CACHED: Goal.LEAST_CACHED,
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
        Whether it is the best of the family that was asked for, rather than the best
        known when time ran out. Only in a family of all lower sets is the best of the
        family the best there is.

    Raises
    ------
    ValueError
        If a field is of another type, or negative.
    """

    segment_of: tuple[int, ...]
    overhead: int
    peak_bytes: int
    cached_bytes: int
    is_optimal: bool = True

    def __post_init__(self) -> None:
        of = "a segmentation"
        keep_integer_lists(self, "segment_of", of=of, least=0)
        keep_integers(self, "overhead", "peak_bytes", "cached_bytes", of=of, least=0)
        keep_flags(self, "is_optimal", of=of)

    @property
    def segment_count(self) -> int:
        """Number of segments, ``k``."""
        return max(self.segment_of) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerSetQuery:
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

    Raises
    ------
    ValueError
        If the budget is no integer, the objective unknown, or ``charge_last`` not true
        or false.
    """

    budget_bytes: int
    objective: LowerSetObjective = LowerSetObjective.LEAST_OVERHEAD
    charge_last: bool = False

    def __post_init__(self) -> None:
        # Any integer will do, however large.
        budget_bytes = checked_integer("budget_bytes", self.budget_bytes)
        object.__setattr__(self, "budget_bytes", budget_bytes)
        keep_words(self, LowerSetObjective, "objective")
        keep_flags(self, "charge_last")


def sweep_lower_sets(
    graph: ForwardGraph,
    family: Family,
    queries: Sequence[LowerSetQuery],
    *,
    refinements: int = DEFAULT_REFINEMENTS,
    deadline_s: float | None = None,
) -> list[Segmentation | None]:
    """Return the best segmentation for each query; ``None`` where none fits.

    Parameters
    ----------
    graph, family
        The graph, and a family of its lower sets.
    queries
        Budgets and objectives.
    refinements
        Most rounds of adding sets beside an answer's, in an incomplete family; 0 for
        the best of the family as it is.
    deadline_s
        A value of ``time.monotonic()`` at which to stop, or ``None``. What was not
        answered by then is the best known (``is_optimal`` false), or ``None`` too.

    Raises
    ------
    ValueError
        If the family is of another graph, or ``refinements`` is not 0, 1, 2, ...

    Notes
    -----
    Time per query O(S^2 F) and memory O(S F) for a family of S sets and fronts of
    length F, at most the sum of the costs; in practice far less.

    References
    ----------
    M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic framework
    of recomputation algorithms for memory-efficient backpropagation. NeurIPS 2019.

    Examples
    --------
    >>> from remat.algorithms.lower_sets.families import ancestor_sets
    >>> chain = ForwardGraph.of_values([1] * 9, [1] * 9, [(v, v + 1) for v in range(8)])
    >>> family = ancestor_sets(chain)
    >>> queries = [
    ...     LowerSetQuery(budget_bytes=budget, charge_last=True)
    ...     for budget in (6, 7, 8, 9, 12)
    ... ]
    >>> found = sweep_lower_sets(chain, family, queries)
    >>> [answer and answer.overhead for answer in found]
    [None, 4, 3, 2, 1]
    """
    check_family(graph, family)
    queries = cast(
        "Sequence[LowerSetQuery]", checked_records("queries", queries, LowerSetQuery)
    )
    refinements = checked_integer("refinements", refinements, least=0)
    planner = _Planner(graph, deadline_s)
    if family.is_complete:
        known = planner.scout(family, queries) if len(family) > _SCOUT_ABOVE else []
        return planner.answer(family, queries, known)
    return planner.refined(family, queries, refinements)


def plan_lower_sets(
    graph: ForwardGraph,
    family: Family,
    query: LowerSetQuery,
    *,
    refinements: int = DEFAULT_REFINEMENTS,
    deadline_s: float | None = None,
) -> Segmentation:
    """Return the best segmentation for one query, as :func:`sweep_lower_sets` does.

    Parameters
    ----------
    graph, family
        The graph, and a family of its lower sets.
    query
        Budget in bytes, and objective.
    refinements
        Most rounds of adding sets beside an answer's, in an incomplete family.
    deadline_s
        A value of ``time.monotonic()`` at which to stop, or ``None``.

    Raises
    ------
    BudgetError
        If no sequence of the family fits; the message names the smallest budget.
    TimeoutError
        If the deadline came before any sequence was found.
    ValueError
        If the family is of another graph, or ``refinements`` is not 0, 1, 2, ...

    Notes
    -----
    Time and memory of one query of :func:`sweep_lower_sets`: O(S^2 F) and O(S F).

    References
    ----------
    M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic framework
    of recomputation algorithms for memory-efficient backpropagation. NeurIPS 2019.

    Examples
    --------
    >>> from remat.algorithms.lower_sets.families import ancestor_sets
    >>> chain = ForwardGraph.of_values([1] * 9, [1] * 9, [(v, v + 1) for v in range(8)])
    >>> family = ancestor_sets(chain)
    >>> answer = plan_lower_sets(chain, family, LowerSetQuery(budget_bytes=8))
    >>> answer.overhead, answer.peak_bytes
    (2, 8)
    """
    (found,) = sweep_lower_sets(
        graph, family, [query], refinements=refinements, deadline_s=deadline_s
    )
    if found is not None:
        return found
    smallest = smallest_budget(
        graph, family, refinements=refinements, deadline_s=deadline_s
    )
    least = smallest.peak_bytes
    if least <= query.budget_bytes or not smallest.is_optimal:
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
    refinements: int = DEFAULT_REFINEMENTS,
    deadline_s: float | None = None,
) -> Segmentation:
    """Return a segmentation of least formula peak; its ``peak_bytes`` is that budget.

    Its overhead is that of one such segmentation, not the least: for that, ask
    :func:`plan_lower_sets` with this budget. Stopped by the deadline, it is the least
    known, at worst a single segment.

    Parameters
    ----------
    graph, family
        The graph, and a family of its lower sets.
    charge_last
        Whether the overhead counts the last segment's recomputation.
    refinements
        Most rounds of adding sets beside an answer's, in an incomplete family.
    deadline_s
        A value of ``time.monotonic()`` at which to stop, or ``None``.

    Raises
    ------
    ValueError
        If the family is of another graph, or ``refinements`` is not 0, 1, 2, ...

    Notes
    -----
    Time O(S^2 F), memory O(S F) for a family of S sets and fronts of length F.

    References
    ----------
    M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic framework
    of recomputation algorithms for memory-efficient backpropagation. NeurIPS 2019.

    Examples
    --------
    >>> from remat.algorithms.lower_sets.families import ancestor_sets
    >>> chain = ForwardGraph.of_values([1] * 9, [1] * 9, [(v, v + 1) for v in range(8)])
    >>> family = ancestor_sets(chain)
    >>> smallest_budget(chain, family).peak_bytes
    7
    """
    check_family(graph, family)
    checked_flag("charge_last", charge_last)
    refinements = checked_integer("refinements", refinements, least=0)
    planner = _Planner(graph, deadline_s)
    if family.is_complete:
        known: list[Sequence[int]] = []
        if len(family) > _SCOUT_ABOVE:
            scouts = approximate_family(graph)
            # Where time is limited, what is found first may be the answer.
            rounds = 0 if deadline_s is None else refinements
            scouts, (_, _, _, chain) = planner.refine_budget(scouts, rounds)
            known = _rows_in(family, [masks_of_rows(scouts.rows[chain])])
        answer = planner.least(family, known)
    else:
        family, answer = planner.refine_budget(family, refinements)
    return segmentation_of_chain(
        graph,
        masks_of_rows(family.rows[answer[3]]),
        charge_last=charge_last,
        is_optimal=answer[0] == Found.OPTIMAL,
    )


def segmentation_of_chain(
    graph: ForwardGraph,
    masks: Sequence[int],
    *,
    charge_last: bool = False,
    is_optimal: bool = True,
) -> Segmentation:
    """Return the segmentation of an increasing sequence of lower sets.

    Parameters
    ----------
    graph
        The graph.
    masks
        The lower sets after the empty one as integers, bit ``v`` for value ``v``; the
        last holds every value.
    charge_last
        Whether the overhead counts the last segment's recomputation.
    is_optimal
        What to say of it.

    Raises
    ------
    ValueError
        If the sets do not increase, are not lower sets of the graph, or do not end with
        all values.
    """
    checked_graph(graph)
    checked_flag("charge_last", charge_last)
    masks = checked_integers("the lower sets", masks, least=0)
    segment_of = [len(masks)] * graph.node_count
    done = 0
    for segment, mask in enumerate(masks):
        if mask >> graph.node_count:
            msg = (
                f"set {segment} of {len(masks)} holds value {mask.bit_length() - 1}; the "
                f"values are 0..{graph.node_count - 1}"
            )
            raise ValueError(msg)
        for v in members(mask & ~done):
            segment_of[v] = segment
        if done & ~mask:
            msg = f"set {segment} of {len(masks)} lacks values of the set before it"
            raise ValueError(msg)
        done = mask
    if len(masks) in segment_of:
        msg = (
            f"the last of {len(masks)} sets lacks {segment_of.count(len(masks))} values"
        )
        raise ValueError(msg)
    check_segmentation(graph, segment_of)
    kept = cached_values(graph, segment_of)
    return Segmentation(
        segment_of=tuple(segment_of),
        overhead=overhead(graph, segment_of, charge_last=charge_last),
        peak_bytes=peak_bytes(graph, segment_of),
        cached_bytes=sum(graph.memory_bytes[v] for v in kept),
        is_optimal=is_optimal,
    )


def chain_of_segmentation(segment_of: Sequence[int]) -> list[int]:
    """Return the lower sets ``L_1..L_k`` of a segmentation, as integers."""
    masks = [0] * (max(segment_of) + 1)
    for v, segment in enumerate(segment_of):
        masks[segment] |= 1 << v
    for segment in range(1, len(masks)):
        masks[segment] |= masks[segment - 1]
    return masks


def check_family(graph: ForwardGraph, family: Family) -> None:
    """Refuse a family that is not of the graph.

    Raises
    ------
    ValueError
        If it is of another, or one of the two is no such thing.
    """
    checked_graph(graph)
    checked_record("family", family, Family)
    if family.node_count != graph.node_count:
        msg = (
            f"the family has lower sets of {family.node_count} values, the graph "
            f"{graph.node_count}"
        )
        raise ValueError(msg)


def _rows_in(family: Family, chains: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """Return chains of lower sets as rows of the family, which holds them."""
    row_of = {mask: row for row, mask in enumerate(family.masks())}
    return [[row_of[mask] for mask in chain] for chain in chains if chain]


class _Planner:
    def __init__(self, graph: ForwardGraph, deadline_s: float | None) -> None:
        if deadline_s is not None:
            checked_number("deadline_s", deadline_s, least=-math.inf)
        self.graph = graph
        self.deadline_s = deadline_s
        self.arrays: GraphArrays = (
            graph.memory_bytes,
            graph.cost,
            graph.charged_bytes,
            graph.edges,
            _OWED[graph.owed],
        )

    def remaining_s(self) -> float | None:
        if self.deadline_s is None:
            return None
        return max(0.0, self.deadline_s - time.monotonic())

    def chains(
        self,
        family: Family,
        queries: Sequence[LowerSetQuery],
        known: Sequence[Sequence[int]],
    ) -> list[Answer]:
        return solve_lower_sets(
            self.arrays,
            family.rows,
            [
                (
                    max(-1, min(query.budget_bytes, MOST_TOTAL)),
                    int(_GOALS[query.objective]),
                    query.charge_last,
                )
                for query in queries
            ],
            known,
            self.remaining_s(),
        )

    def least(self, family: Family, known: Sequence[Sequence[int]]) -> Answer:
        return smallest_lower_set_budget(
            self.arrays, family.rows, known, self.remaining_s()
        )

    def answer(
        self,
        family: Family,
        queries: Sequence[LowerSetQuery],
        known: Sequence[Sequence[int]],
    ) -> list[Segmentation | None]:
        return [
            segmentation_of_chain(
                self.graph,
                masks_of_rows(family.rows[chain]),
                charge_last=query.charge_last,
                is_optimal=found == Found.OPTIMAL,
            )
            if chain
            else None
            for query, (found, _, _, chain) in zip(
                queries, self.chains(family, queries, known), strict=True
            )
        ]

    def scout(
        self, family: Family, queries: Sequence[LowerSetQuery]
    ) -> list[Sequence[int]]:
        """Return good sequences for the queries, found in an approximate family.

        Where time is limited, they are refined: they may be the answer.
        """
        scouts = approximate_family(self.graph)
        if self.deadline_s is None:
            answers = self.chains(scouts, queries, [])
            chains = [masks_of_rows(scouts.rows[chain]) for *_, chain in answers]
            return _rows_in(family, chains)
        found = self.refined(scouts, queries, DEFAULT_REFINEMENTS)
        return _rows_in(
            family, (chain_of_segmentation(one.segment_of) for one in found if one)
        )

    def refined(
        self, family: Family, queries: Sequence[LowerSetQuery], rounds: int
    ) -> list[Segmentation | None]:
        """Return the answers of an incomplete family, enlarged where that may help."""
        answers = self.answer(family, queries, [])
        if rounds < 1:
            return answers
        wider = family
        if None in answers:
            wider, _ = self.refine_budget(family, rounds)
        return [
            self.refine(wider if found is None else family, query, found, rounds)
            for query, found in zip(queries, answers, strict=True)
        ]

    def around(self, family: Family, segment_of: Sequence[int]) -> Family:
        """Return a family with the sets beside those of a segmentation as well."""
        count = self.graph.node_count
        chain = family_of_masks(count, chain_of_segmentation(segment_of), label="")
        more = neighbours(self.graph, chain).masks()
        masks = [*family.masks(), *chain.masks(), *more]
        return family_of_masks(count, masks, label=family.label)

    def refine(
        self,
        family: Family,
        query: LowerSetQuery,
        found: Segmentation | None,
        rounds: int,
    ) -> Segmentation | None:
        """Return the answer after adding sets beside it while that helps."""
        for _ in range(rounds):
            known: list[Sequence[int]] = []
            if found is not None:
                sets_before = len(family)
                family = self.around(family, found.segment_of)
                if len(family) == sets_before:
                    break
                known = _rows_in(family, [chain_of_segmentation(found.segment_of)])
            (better,) = self.answer(family, [query], known)
            is_stuck = (
                better is None
                or not better.is_optimal
                or (
                    found is not None
                    and (better.overhead, better.cached_bytes)
                    == (found.overhead, found.cached_bytes)
                )
            )
            found = better or found
            if is_stuck:
                break
        return found

    def refine_budget(self, family: Family, rounds: int) -> tuple[Family, Answer]:
        """Return the smallest budget, with the family in which it was found."""
        answer = self.least(family, [])
        for _ in range(rounds):
            if answer[0] != Found.OPTIMAL:
                break
            masks = masks_of_rows(family.rows[answer[3]])
            segmentation = segmentation_of_chain(self.graph, masks)
            wider = self.around(family, segmentation.segment_of)
            if len(wider) == len(family):
                break
            better = self.least(wider, _rows_in(wider, [masks]))
            if not better[3] or better[1] >= answer[1]:
                break
            family, answer = wider, better
        return family, answer
