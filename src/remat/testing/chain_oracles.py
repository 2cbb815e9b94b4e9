"""Exhaustive searches for chains and joins, written from the definitions.

They share no code with :mod:`remat.algorithms.chains` but its data classes, and no
idea: a state is what is live, an operation is tried wherever its inputs are, and
anything may be discarded at any time.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, product
from typing import TypeVar

from remat.algorithms.chains.conventions import MemoryConvention
from remat.algorithms.chains.stage_joins import StageJoin
from remat.algorithms.chains.stages import StageChain

_State = TypeVar("_State")


def cheapest(
    start: _State,
    moves: Callable[[_State], Iterable[tuple[int, _State]]],
    is_done: Callable[[_State], bool],
) -> int | None:
    """Return the least cost from ``start`` to a state that is done (Dijkstra)."""
    order = count()
    queue: list[tuple[int, int, _State]] = [(0, next(order), start)]
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


TurnsState = tuple[int, tuple[int, ...], frozenset[int], frozenset[tuple[int, int]]]
"""Turns so far (2: two or more), stages of each branch whose backward has not run,
branches whose gradient is live, and live values."""


def best_join_of_turns(  # noqa: C901 - as above
    costs: Sequence[Sequence[int]], memory_units: int, convention: MemoryConvention
) -> int | None:
    """Return the least forward cost of a join with two or more turns, by search.

    Every backward stage runs once, so that only the gradient of a whole branch can be
    brought back; and the turn runs again only when a branch is done.
    """
    tops = [(branch, len(c)) for branch, c in enumerate(costs)]
    gradient = int(convention.counts_gradients)

    def units(state: TurnsState) -> int:
        _, _, with_gradient, live = state
        pinned = not convention.counts_inputs
        values = sum(not (pinned and stage == 0) for _, stage in live)
        return values + gradient * len(with_gradient)

    def allowed(before: TurnsState, extra: int, after: TurnsState) -> bool:
        during = 0 if convention.overwrites_inputs else units(before) + extra
        return max(during, units(before), units(after)) <= memory_units

    def moves(state: TurnsState) -> Iterator[tuple[int, TurnsState]]:  # noqa: C901
        turns, left, held, live = state
        for value in live:
            if value[1] > 0 or convention.counts_inputs:
                yield 0, (turns, left, held, live - {value})
        for branch in held:
            yield 0, (turns, left, held - {branch}, live)
        for branch, stage in live:
            output = (branch, stage + 1)
            if stage == len(costs[branch]) or output in live:
                continue
            for kept in {live, live - {(branch, stage)}}:
                is_lost = stage == 0 and not convention.counts_inputs
                after = (turns, left, held, kept | {output})
                if not (is_lost and kept != live) and allowed(state, 1, after):
                    yield costs[branch][stage], after
        if not held and live.issuperset(tops) and (turns == 0 or not all(left)):
            for kept in product((False, True), repeat=len(tops)):
                lost = {top for top, stays in zip(tops, kept, strict=True) if not stays}
                after = (
                    min(turns + 1, 2),
                    left,
                    frozenset(range(len(costs))),
                    live - lost,
                )
                if allowed(state, gradient * len(costs), after):
                    whole = (b for b, length in tops if left[b] == length)
                    yield 0, (*after[:2], frozenset(whole), after[3])
        for branch in held:
            stage = left[branch] - 1
            if (branch, stage) in live:
                rest = (*left[:branch], stage, *left[branch + 1 :])
                after = (turns, rest, held if stage else held - {branch}, live)
                if allowed(state, gradient, after):
                    yield 0, after

    inputs = frozenset((branch, 0) for branch in range(len(costs)))
    start = (0, tuple(map(len, costs)), frozenset[int](), inputs)
    if units(start) > memory_units:
        return None
    return cheapest(start, moves, lambda s: s[0] == 2 and not any(s[1]))


StageState = tuple[
    tuple[int, ...] | None,
    frozenset[tuple[int, int]],
    frozenset[tuple[int, int, int]],
    frozenset[tuple[int, int]],
]
"""Index of each branch's live gradient (``None`` before the turn), live values, live
(branch, stage, option) that have run and saved; for a class of schedules, outputs that
have been computed or, after the turn, values that were live at it."""


def best_chain(chain: StageChain, budget_bytes: int) -> int | None:
    """Return the least time of a chain of stages over all schedules, by search."""
    return best_stage_join(StageJoin.of_chain(chain), budget_bytes)


def best_stage_join(  # noqa: C901, PLR0915 - as above
    join: StageJoin, budget_bytes: int, *, in_class: bool = False
) -> int | None:
    """Return the least time of a join over all schedules with one turn, by search.

    What a stage saved is discarded as one, and only by the stage's backward: there is
    no other use for it. With ``in_class``, only schedules are searched that compute
    every stage once before the turn, and go on with another branch only where a branch
    has come down to a value that was live at the turn.
    """
    branches = join.branches
    lengths = [len(branch.stages) for branch in branches]
    tops = frozenset(enumerate(lengths))

    def held(state: StageState) -> int:
        at, live, saved, _ = state
        total = 0
        for branch, left in enumerate(at or ()):
            total += branches[branch].gradient_bytes[left]
        for branch, s, k in saved:
            total += branches[branch].stages[s].options[k].saved_bytes
        return total + sum(branches[j].value_bytes[v] for j, v in live | outputs(saved))

    def outputs(saved: frozenset[tuple[int, int, int]]) -> frozenset[tuple[int, int]]:
        return frozenset(
            (j, s + 1)
            for j, s, k in saved
            if branches[j].stages[s].options[k].needs_output
        )

    def moves(state: StageState) -> Iterator[tuple[int, StageState]]:
        at, live, saved, stored = state
        room = budget_bytes - held(state)
        inside = outputs(saved)
        for value in live:
            yield 0, (at, live - {value}, saved, stored)
        for value in inside - live:
            yield 0, (at, live | {value}, saved, stored)
        for branch, value in live:
            if value < (lengths if at is None else at)[branch] and may_go(
                state, branch
            ):
                yield from forwards(state, branch, value, room, inside)
        if at is not None:
            yield from backwards(state, room)
        elif tops <= live:
            gradients = sum(branches[j].gradient_bytes[v] for j, v in tops)
            if gradients + join.turn_workspace_bytes <= room:
                stored = live | inside if in_class else stored
                yield join.turn_ns, (tuple(lengths), live, saved, stored)

    def may_go(state: StageState, branch: int) -> bool:
        at, _, _, stored = state
        return not in_class or all(
            other == branch or left == 0 or (other, left) in stored
            for other, left in enumerate(at or ())
        )

    def forwards(
        state: StageState,
        branch: int,
        stage: int,
        room: int,
        inside: frozenset[tuple[int, int]],
    ) -> Iterator[tuple[int, StageState]]:
        at, live, saved, stored = state
        s, output = branches[branch].stages[stage], (branch, stage + 1)
        # An output that is live would be replaced by the fresh copy after the op.
        if output in live:
            return
        if in_class and at is None:
            if output in stored:
                return
            stored |= {output}
        size = s.output_bytes
        if size + s.forward_workspace_bytes <= room:
            yield s.forward_ns, (at, live | {output}, saved, stored)
        if any((branch, stage) == other[:2] for other in saved) or output in inside:
            return
        for k, option in enumerate(s.options):
            extra = option.saved_bytes + option.forward_workspace_bytes
            most = max(s.forward_workspace_bytes, extra)
            if option.forward_ns is not None and size + most <= room:
                run = (branch, stage, k)
                after = (at, live | {output}, saved | {run}, stored)
                yield option.forward_ns, after

    def backwards(state: StageState, room: int) -> Iterator[tuple[int, StageState]]:
        at, live, saved, stored = state
        for branch, left in enumerate(at or ()):
            stage = left - 1
            if at is None or stage < 0 or (branch, stage) not in live:
                continue
            if not may_go(state, branch):
                continue
            gradients = branches[branch].gradient_bytes
            for k, option in enumerate(branches[branch].stages[stage].options):
                run = (branch, stage, k)
                is_ready = option.forward_ns is None or run in saved
                if (
                    is_ready
                    and gradients[stage] + option.backward_workspace_bytes <= room
                ):
                    rest = (*at[:branch], stage, *at[branch + 1 :])
                    yield option.backward_ns, (rest, live, saved - {run}, stored)

    inputs = frozenset((branch, 0) for branch in range(len(branches)))
    start: StageState = (None, inputs, frozenset(), frozenset())
    if held(start) > budget_bytes:
        return None
    return cheapest(start, moves, lambda s: s[0] is not None and not any(s[0]))
