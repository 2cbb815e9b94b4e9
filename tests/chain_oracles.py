"""Exhaustive searches for chains and joins, written from the definitions.

They share no code with :mod:`remat.chains` but its data classes, and no idea: a state
is what is live, an operation is tried wherever its inputs are, and anything may be
discarded at any time.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

from remat.chains.conventions import MemoryConvention
from remat.chains.stages import StageChain

State = TypeVar("State")

SHARED = Path(__file__).parents[2] / "shared" / "papers"

CONVENTIONS = [
    MemoryConvention(
        overwrites_inputs=overwrites, counts_gradients=gradients, counts_inputs=inputs
    )
    for overwrites in (False, True)
    for gradients in (True, False)
    for inputs in (True, False)
]


def oracle_table(name: str) -> Any:
    """Return a table of published or exhaustive values, or skip the test."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"no oracle tables in this checkout: {name} is not there")
    return json.loads(path.read_text(encoding="utf-8"))


def label(convention: MemoryConvention) -> str:
    """Return a convention's key in the oracle tables, and its name in test ids."""
    mode = "inplace" if convention.overwrites_inputs else "strict"
    gradients = "counted" if convention.counts_gradients else "free"
    inputs = "counted" if convention.counts_inputs else "pinned_uncounted"
    return f"{mode}|grads={gradients}|inputs={inputs}"


def cheapest(
    start: State,
    moves: Callable[[State], Iterable[tuple[int, State]]],
    is_done: Callable[[State], bool],
) -> int | None:
    """Return the least cost from ``start`` to a state that is done (Dijkstra)."""
    order = count()
    queue: list[tuple[int, int, State]] = [(0, next(order), start)]
    best = {start: 0}
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if is_done(state):
            return cost
        for more, after in moves(state):
            if cost + more < best.get(after, cost + more + 1):
                best[after] = cost + more
                heapq.heappush(queue, (cost + more, next(order), after))
    return None


JoinState = tuple[tuple[int, ...] | None, frozenset[tuple[int, int]]]
"""Position of each branch's gradient (``None`` before the turn), and live values."""


def best_join(  # noqa: C901 - a search is read in one piece
    costs: Sequence[Sequence[int]], memory_units: int, convention: MemoryConvention
) -> int | None:
    """Return the least forward cost of a join with one turn, by search."""
    tops = frozenset((branch, len(c)) for branch, c in enumerate(costs))
    gradient = int(convention.counts_gradients)

    def units(state: JoinState) -> int:
        left, live = state
        pinned = not convention.counts_inputs
        values = sum(not (pinned and stage == 0) for _, stage in live)
        return values + gradient * sum(r > 0 for r in left or ())

    def allowed(before: JoinState, extra: int, after: JoinState) -> bool:
        during = 0 if convention.overwrites_inputs else units(before) + extra
        return max(during, units(before), units(after)) <= memory_units

    def moves(  # noqa: C901 - as above
        state: JoinState,
    ) -> Iterator[tuple[int, JoinState]]:
        left, live = state
        for value in live:
            if value[1] > 0 or convention.counts_inputs:
                yield 0, (left, live - {value})
        for branch, stage in live:
            output = (branch, stage + 1)
            if stage == len(costs[branch]) or output in live:
                continue
            for kept in {live, live - {(branch, stage)}}:
                is_lost = stage == 0 and not convention.counts_inputs
                if is_lost and kept != live:
                    continue
                after = (left, kept | {output})
                if allowed(state, 1, after):
                    yield costs[branch][stage], after
        if left is None:
            if tops <= live:
                turned = (tuple(map(len, costs)), live - tops)
                if allowed(state, gradient * len(costs), turned):
                    yield 0, turned
            return
        for branch, r in enumerate(left):
            if r > 0 and (branch, r - 1) in live:
                after = ((*left[:branch], r - 1, *left[branch + 1 :]), live)
                if allowed(state, gradient, after):
                    yield 0, after

    start = frozenset((branch, 0) for branch in range(len(costs)))
    if units((None, start)) > memory_units:
        return None
    return cheapest((None, start), moves, lambda s: s[0] is not None and not any(s[0]))


StageState = tuple[int, frozenset[int], frozenset[tuple[int, int]]]
"""Index of the live gradient (number of values before the turn), live values, live
(stage, option) that have run and saved."""


def best_chain(  # noqa: C901 - as above
    chain: StageChain, budget_bytes: int
) -> int | None:
    """Return the least time of a chain of stages over all schedules, by search.

    What a stage saved is discarded as one, and only by the stage's backward: there is
    no other use for it.
    """
    stages, values, gradients = chain.stages, chain.value_bytes, chain.gradient_bytes
    length = len(stages)

    def held(state: StageState) -> int:
        at, live, saved = state
        total = gradients[at] if at <= length else 0
        total += sum(stages[s].options[k].saved_bytes for s, k in saved)
        outputs = {s + 1 for s, k in saved if stages[s].options[k].needs_output}
        return total + sum(values[v] for v in live | outputs)

    def moves(state: StageState) -> Iterator[tuple[int, StageState]]:
        at, live, saved = state
        room = budget_bytes - held(state)
        outputs = {s + 1 for s, k in saved if stages[s].options[k].needs_output}
        for value in live:
            yield 0, (at, live - {value}, saved)
        for value in outputs - live:
            yield 0, (at, live | {value}, saved)
        for value in live:
            if value < min(at, length):
                yield from forwards(state, value, room, is_new=value + 1 not in outputs)
        if at == length + 1 and length in live:
            if gradients[length] + chain.turn_workspace_bytes <= room:
                yield chain.turn_ns, (length, live, saved)
            return
        yield from backwards(state, room)

    def forwards(
        state: StageState, stage: int, room: int, *, is_new: bool
    ) -> Iterator[tuple[int, StageState]]:
        at, live, saved = state
        s = stages[stage]
        # An output that is live is replaced by the fresh copy after the op.
        size = values[stage + 1]
        if size + s.forward_workspace_bytes <= room and stage + 1 not in live:
            yield s.forward_ns, (at, live | {stage + 1}, saved)
        if any(stage == other for other, _ in saved) or not is_new:
            return
        for k, option in enumerate(s.options):
            inside = option.saved_bytes + option.forward_workspace_bytes
            most = max(s.forward_workspace_bytes, inside)
            if option.forward_ns is not None and size + most <= room:
                after = (at, live | {stage + 1}, saved | {(stage, k)})
                yield option.forward_ns, after

    def backwards(state: StageState, room: int) -> Iterator[tuple[int, StageState]]:
        at, live, saved = state
        if not 1 <= at <= length or at - 1 not in live:
            return
        for k, option in enumerate(stages[at - 1].options):
            is_ready = option.forward_ns is None or (at - 1, k) in saved
            more = gradients[at - 1] + option.backward_workspace_bytes
            if is_ready and more <= room:
                yield option.backward_ns, (at - 1, live, saved - {(at - 1, k)})

    start: StageState = (length + 1, frozenset({0}), frozenset())
    if held(start) > budget_bytes:
        return None
    return cheapest(start, moves, lambda s: s[0] == 0)
