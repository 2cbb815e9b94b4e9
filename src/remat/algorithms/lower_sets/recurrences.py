r"""The dynamic programs over increasing sequences of lower sets.

Each function here is the plain Python twin of the native function of its name: the
recurrences as they are written down, for reading and for comparison.

State ``(L, t, m)``: last lower set, overhead so far, bytes of the values kept so far.
From ``L`` to a larger ``L'`` of the family, with ``V' = L' \ L``::

    M = m + W(V') + owed(L') <= budget
    m' = m + M(kept)    with kept = d(L') \ L: later segments read these values of V'
    t' = t + T(V') - T(kept)

(Kusumoto et al., NeurIPS 2019.) Which states may be dropped depends on the objective:
for the least overhead those with more ``t`` and more ``m`` than another, for the most
overhead those with less ``t`` and more ``m``.
"""

import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from remat.algorithms.lower_sets.families import masks_of_rows, members
from remat.core.checks import require
from remat.native import MOST_TOTAL, check_counts, check_indices, check_time, native


class Goal(IntEnum):
    """What a query asks for; a tie is broken by the other of overhead and bytes."""

    LEAST_OVERHEAD = 0
    MOST_OVERHEAD = 1
    LEAST_CACHED = 2


class Found(IntEnum):
    """What an answer is."""

    INFEASIBLE = 0
    """No increasing sequence of the family fits."""
    OPTIMAL = 1
    """The best sequence of the family."""
    STOPPED_WITH_ANSWER = 2
    """A sequence that fits; time ran out before it was known to be best."""
    STOPPED = 3
    """Nothing; time ran out."""


GraphArrays = tuple[
    Sequence[int], Sequence[int], Sequence[int], Sequence[tuple[int, int]], int
]
"""``M_v``, ``T_v``, ``W_v`` of each value, data edges, and what is owed: 0 for that of
consumers, 1 for the boundary's, 2 for nothing."""

Query = tuple[int, int, bool]
"""Budget in bytes, :class:`Goal`, whether the last segment's overhead counts."""

Answer = tuple[int, int, int, list[int]]
""":class:`Found`, overhead, bytes of all values kept, rows of the sequence after the
empty set; zeros and an empty list without a sequence."""


def _checked_masks(graph: GraphArrays, rows: NDArray[np.uint64]) -> list[int]:
    """Return the sets of a family; refuse what does not fit together."""
    memory_bytes, cost, segment_bytes, edges, owed = graph
    count = len(memory_bytes)
    require(
        0 < count == len(cost) == len(segment_bytes),
        "sizes and costs must have one entry a value",
    )
    check_counts(memory_bytes, memory_bytes, memory_bytes, segment_bytes)
    check_counts(cost)
    for u, v in edges:
        is_known = 0 <= u < count and 0 <= v < count
        require(is_known, "an edge names a value that does not exist")
    require(0 <= owed <= 2, "owed must be 0, 1 or 2")
    require(
        rows.ndim == 2 and rows.shape[1] == -(-count // 64) and len(rows) > 1,
        "rows must be two or more bit sets of the values",
    )
    masks = masks_of_rows(rows)
    sizes = [mask.bit_count() for mask in masks]
    require(
        sizes == sorted(sizes) and all(mask >> count == 0 for mask in masks),
        "rows must hold values only, smaller sets first",
    )
    require(
        sizes[0] == 0 < sizes[1] and sizes[-2] < sizes[-1] == count,
        "the first row must be empty and the last one full",
    )
    for u, v in edges:
        require(
            all(mask >> u & 1 or not mask >> v & 1 for mask in masks),
            "a row holds a value without what it reads",
        )
    return masks


def _check_known(masks: Sequence[int], known: Sequence[Sequence[int]]) -> None:
    for chain in known:
        check_indices(chain, len(masks), "row")
        sets = [0, *(masks[row] for row in chain)]
        require(
            all(a != b and a & ~b == 0 for a, b in pairwise(sets))
            and sets[-1] == masks[-1],
            "a known sequence does not increase, or does not end",
        )


class _Tables:
    """Per lower set of a family, what the recurrence needs."""

    def __init__(self, graph: GraphArrays, masks: Sequence[int]) -> None:
        memory_bytes, cost, segment_bytes, edges, owed = graph
        count = len(memory_bytes)
        readers, reads = [0] * count, [0] * count
        for u, v in edges:
            readers[u] |= 1 << v
            reads[v] |= 1 << u
        self.memory_bytes, self.cost = memory_bytes, cost
        self.masks = masks
        self.segment_sum = [_total(segment_bytes, mask) for mask in masks]
        self.cost_sum = [_total(cost, mask) for mask in masks]
        self.boundary: list[int] = []
        self.owed_bytes: list[int] = []
        for mask in masks:
            boundary = 0
            consumers = 0
            for u in members(mask):
                outside = readers[u] & ~mask
                consumers |= outside
                if outside:
                    boundary |= 1 << u
            read = 0
            for w in members(consumers):
                read |= reads[w] & ~mask
            self.boundary.append(boundary)
            held = (
                _total(memory_bytes, consumers) + _total(memory_bytes, read),
                _total(memory_bytes, boundary),
                0,
            )
            self.owed_bytes.append(held[owed])

    def is_step(self, a: int, b: int) -> bool:
        """Whether row ``b`` strictly contains row ``a``."""
        return a != b and self.masks[a] & ~self.masks[b] == 0

    def charge_bytes(self, a: int, b: int) -> int:
        """Bytes while the segment from ``a`` to ``b`` is processed, less ``m``."""
        return self.segment_sum[b] - self.segment_sum[a] + self.owed_bytes[b]

    def kept(self, a: int, b: int) -> int:
        return self.boundary[b] & ~self.masks[a]

    def added_overhead(self, a: int, b: int, *, charge_last: bool) -> int:
        if b == len(self.masks) - 1 and not charge_last:
            return 0
        kept = self.kept(a, b)
        return self.cost_sum[b] - self.cost_sum[a] - _total(self.cost, kept)

    def measure(
        self, chain: Sequence[int], *, charge_last: bool
    ) -> tuple[int, int, int]:
        """Peak, overhead, and bytes kept of a sequence."""
        peak = spent = kept_bytes = a = 0
        for b in chain:
            peak = max(peak, kept_bytes + self.charge_bytes(a, b))
            spent += self.added_overhead(a, b, charge_last=charge_last)
            kept_bytes += _total(self.memory_bytes, self.kept(a, b))
            a = b
        return peak, spent, kept_bytes


def _total(numbers: Sequence[int], mask: int) -> int:
    return sum(numbers[v] for v in members(mask))


@native
def solve_lower_sets(
    graph: GraphArrays,
    rows: NDArray[np.uint64],
    queries: Sequence[Query],
    known: Sequence[Sequence[int]],
    time_limit_s: float | None,
) -> list[Answer]:
    """Return the best increasing sequence of a family for each query.

    Parameters
    ----------
    graph
        The forward graph.
    rows
        The family, as :class:`remat.algorithms.lower_sets.families.Family` keeps it.
    queries
        What to find.
    known
        Sequences of the family, as answers give them, that may be good. They only
        shorten the native search, and are the answer should it stop.
    time_limit_s
        Seconds after which to stop, or ``None``.

    Notes
    -----
    Per query, time O(pairs of sets x length of the fronts), memory O(sets x length of
    the fronts), where a front is no longer than the sum of the costs.
    """
    check_time(time_limit_s)
    masks = _checked_masks(graph, rows)
    for budget, goal, _ in queries:
        require(-1 <= budget <= MOST_TOTAL, "a budget must be -1 to 2**60 bytes")
        require(0 <= goal <= max(Goal), "a goal must be 0, 1 or 2")
    _check_known(masks, known)
    deadline_s = None if time_limit_s is None else time.monotonic() + time_limit_s
    tables = _Tables(graph, masks)
    return [
        _solve(tables, query, deadline_s) or _best_known(tables, query, known)
        for query in queries
    ]


_State = tuple[int, int]
"""Overhead so far (negated for the most overhead) or peak, and bytes kept so far."""

_Fronts = list[dict[_State, tuple[int, _State]]]
"""Per row its states, and the row and state that each came from; by increasing cost."""


def _fronts(
    tables: _Tables,
    deadline_s: float | None,
    steps: Callable[[int, int], Callable[[_State], _State | None]],
) -> _Fronts | None:
    """Return the states that no other beats; ``None`` if time ran out.

    ``steps`` gives for two rows the state that one of the first leads to in the second.
    """
    fronts: _Fronts = [{} for _ in tables.masks]
    fronts[0] = {(0, 0): (0, (0, 0))}
    for b in range(1, len(fronts)):
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return None
        reached: dict[_State, tuple[int, _State]] = {}
        for a in range(b):
            if not fronts[a] or not tables.is_step(a, b):
                continue
            step = steps(a, b)
            for state in fronts[a]:
                if (after := step(state)) is not None:
                    reached.setdefault(after, (a, state))
        least = None
        for state in sorted(reached):
            if least is None or state[1] < least:
                fronts[b][state] = reached[state]
                least = state[1]
    return fronts


def _sequence(fronts: _Fronts, state: _State) -> list[int]:
    """Return the rows that led to a state of the last row."""
    chain: list[int] = []
    row = len(fronts) - 1
    while row:
        chain.append(row)
        row, state = fronts[row][state]
    return chain[::-1]


def _solve(tables: _Tables, query: Query, deadline_s: float | None) -> Answer | None:
    """Return the answer; ``None`` if time ran out."""
    budget, goal, charge_last = query
    sign = -1 if goal == Goal.MOST_OVERHEAD else 1

    def steps(a: int, b: int) -> Callable[[_State], _State | None]:
        room = budget - tables.charge_bytes(a, b)
        added = sign * tables.added_overhead(a, b, charge_last=charge_last)
        kept_bytes = _total(tables.memory_bytes, tables.kept(a, b))
        return lambda s: (s[0] + added, s[1] + kept_bytes) if s[1] <= room else None

    fronts = _fronts(tables, deadline_s, steps)
    if fronts is None:
        return None
    if not fronts[-1]:
        return Found.INFEASIBLE, 0, 0, []
    if goal == Goal.LEAST_CACHED:
        best = min(fronts[-1], key=lambda state: (state[1], state[0]))
    else:
        best = min(fronts[-1])
    return Found.OPTIMAL, sign * best[0], best[1], _sequence(fronts, best)


def _best_known(
    tables: _Tables, query: Query, known: Sequence[Sequence[int]]
) -> Answer:
    budget, goal, charge_last = query
    best: tuple[tuple[int, int], Answer] | None = None
    for chain in known:
        peak, spent, kept_bytes = tables.measure(chain, charge_last=charge_last)
        if peak > budget:
            continue
        signed = -spent if goal == Goal.MOST_OVERHEAD else spent
        least_cached = goal == Goal.LEAST_CACHED
        order = (kept_bytes, signed) if least_cached else (signed, kept_bytes)
        if best is None or order < best[0]:
            answer = Found.STOPPED_WITH_ANSWER, spent, kept_bytes, list(chain)
            best = order, answer
    return (Found.STOPPED, 0, 0, []) if best is None else best[1]


@native
def smallest_lower_set_budget(
    graph: GraphArrays,
    rows: NDArray[np.uint64],
    known: Sequence[Sequence[int]],
    time_limit_s: float | None,
) -> Answer:
    """Return the least peak of any increasing sequence of a family.

    The answer holds the least peak in bytes in place of the overhead; stopped, the
    least peak known, at worst that of a single segment. Arguments are those of
    :func:`solve_lower_sets`.

    Notes
    -----
    States ``(L, peak, m)``, of which those with more of both are dropped. Time
    O(pairs of sets x length of the fronts).
    """
    check_time(time_limit_s)
    masks = _checked_masks(graph, rows)
    _check_known(masks, known)
    deadline_s = None if time_limit_s is None else time.monotonic() + time_limit_s
    tables = _Tables(graph, masks)

    def steps(a: int, b: int) -> Callable[[_State], _State | None]:
        charge = tables.charge_bytes(a, b)
        kept_bytes = _total(tables.memory_bytes, tables.kept(a, b))
        return lambda s: (max(s[0], s[1] + charge), s[1] + kept_bytes)

    fronts = _fronts(tables, deadline_s, steps)
    if fronts is None:
        peak, kept_bytes, chain = min(
            (peak, kept_bytes, list(chain))
            for chain in ([len(masks) - 1], *known)
            for peak, _, kept_bytes in [tables.measure(chain, charge_last=False)]
        )
        return Found.STOPPED_WITH_ANSWER, peak, kept_bytes, chain
    least = min(fronts[-1])
    return Found.OPTIMAL, *least, _sequence(fronts, least)
