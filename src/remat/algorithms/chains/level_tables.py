"""Recurrences of chains with several storage levels, as plain functions.

The chain is AC(l) of :mod:`remat.algorithms.chains.revolve`. ``forward`` and
``backward`` are the costs of one stage; the turn costs a backward stage. These
functions are the Python twins of the native core, and return what to do in *actions*,
tuples of three integers:

========= ===================================================
``0 i j`` advance from ``x_i`` to ``x_j``
``1 i _`` run backward stage ``i`` (the turn, if it is the last)
``2 i k`` store ``x_i`` on level ``k``
``3 i k`` load ``x_i`` from level ``k``
``4 i j`` reverse AC(j - i) from ``x_i`` in the slots of level 0
========= ===================================================
"""

from collections.abc import Sequence
from functools import cache

from remat.algorithms.chains.join_tables import INFINITE
from remat.core.checks import require
from remat.native import check_table, native

ADVANCE, BACKWARD, STORE, LOAD, REVERSE = range(5)

LevelAnswer = tuple[int, list[tuple[int, int, int]]]
"""Total cost, and the actions in order."""


class _Levels:
    """H-Revolve: values of the recurrence as they are asked for, then the actions.

    ``unstored(k, l, m)`` is the cost of AC(l) with ``x_0`` in the running buffer only
    and ``m`` slots of level ``k``, and all of the lower ones, free. ``stored`` has
    ``x_0`` on level ``k`` already, in one of the ``m`` slots.
    """

    def __init__(
        self,
        slots: Sequence[int],
        write: Sequence[int],
        read: Sequence[int],
        forward: int,
        backward: int,
    ) -> None:
        self.slots, self.write, self.read = slots, write, read
        self.forward, self.backward = forward, backward
        self.unstored = cache(self._unstored)
        self.stored = cache(self._stored)
        self.actions: list[tuple[int, int, int]] = []

    def lower(self, level: int, length: int) -> int:
        if level == 0:
            return INFINITE
        return self.unstored(level - 1, length, self.slots[level - 1])

    def _unstored(self, level: int, length: int, free: int) -> int:
        if length == 0:
            return self.backward
        lower = self.lower(level, length)
        if free == 0:
            return lower
        return min(lower, self.write[level] + self.stored(level, length, free))

    def _stored(self, level: int, length: int, free: int) -> int:
        if length == 0:
            return self.backward
        splits = (self.split(level, length, free, j) for j in range(1, length + 1))
        return min(self.lower(level, length), *splits)

    def split(self, level: int, length: int, free: int, advance: int) -> int:
        upper = self.unstored(level, length - advance, free - 1)
        lower = self.stored(level, advance - 1, free)
        sweep = advance * self.forward + self.read[level]
        return min(sweep + upper + lower, INFINITE)

    def run_unstored(self, level: int, base: int, length: int, free: int) -> None:
        if length == 0:
            self.actions.append((BACKWARD, base, 0))
        elif self.unstored(level, length, free) == self.lower(level, length):
            self.run_unstored(level - 1, base, length, self.slots[level - 1])
        else:
            self.actions.append((STORE, base, level))
            self.run_stored(level, base, length, free)

    def run_stored(self, level: int, base: int, length: int, free: int) -> None:
        if length == 0:
            self.actions.append((BACKWARD, base, 0))
            return
        if self.stored(level, length, free) == self.lower(level, length):
            self.run_unstored(level - 1, base, length, self.slots[level - 1])
            return
        advance = min(
            range(1, length + 1), key=lambda j: self.split(level, length, free, j)
        )
        self.actions.append((ADVANCE, base, base + advance))
        self.run_unstored(level, base + advance, length - advance, free - 1)
        self.actions.append((LOAD, base, level))
        self.run_stored(level, base, advance - 1, free)


def check_worst(length: int, costs: tuple[int, int], copies: Sequence[int]) -> None:
    """Refuse numbers that are negative, or may add up to what cannot be counted.

    Raises
    ------
    ValueError
        If there are such.
    """
    require(min(length, *costs, *copies) >= 0, "a number is negative")
    per_stage = (length + 1) * costs[0] + costs[1] + sum(copies)
    require(
        (length + 1) * per_stage < INFINITE, "costs add up to 2**61 or more at worst"
    )


@native
def hrevolve_plan(
    length: int,
    slots: Sequence[int],
    write: Sequence[int],
    read: Sequence[int],
    forward: int,
    backward: int,
) -> LevelAnswer | None:
    """Return the cheapest schedule of AC(length) on several levels, or ``None``.

    Parameters
    ----------
    length
        Forward stages.
    slots, write, read
        Per level the slots and the costs of storing and loading one value.
    forward, backward
        Costs of a forward and a backward stage.

    Notes
    -----
    Ties go to the lower level, then to the shorter advance. Time
    O(length^2 * sum(slots)), memory O(length * sum(slots)).
    """
    require(
        0 < len(slots) == len(write) == len(read),
        "there must be at least one level, with slots and both costs",
    )
    require(min(slots) >= 0, "a number is negative")
    check_worst(length, (forward, backward), [*write, *read])
    rows = sum(min(count, length) for count in slots) + len(slots)
    check_table(2 * rows * (length + 1))
    levels = _Levels(
        [min(count, length) for count in slots], write, read, forward, backward
    )
    top = len(slots) - 1
    cost = levels.unstored(top, length, levels.slots[top])
    if cost >= INFINITE:
        return None
    levels.run_unstored(top, 0, length, levels.slots[top])
    return cost, levels.actions


@native
def disk_revolve_plan(
    in_memory: Sequence[int], write: int, read: int, forward: int, backward: int
) -> LevelAnswer:
    """Return the cheapest schedule with limited memory and an unlimited disk.

    Parameters
    ----------
    in_memory
        Cost of AC(l) in memory alone, for l = 0 .. length; entry 0 is ``backward``.
    write, read
        Costs of storing a value on the disk and of loading it.
    forward, backward
        Costs of a forward and a backward stage.

    Notes
    -----
    Once a value has been loaded nothing more is written below it (Aupy, Herrmann et
    al., 2016): ``again`` is the cost with ``x_0`` on the disk and no further writes.
    Ties go to memory, then to the shorter advance. Time O(length^2).
    """
    require(len(in_memory) > 0, "the costs in memory must begin with that of no stage")
    length = len(in_memory) - 1
    require(
        min(in_memory) >= 0 and max(in_memory) <= INFINITE, "a cost is out of range"
    )
    check_worst(length, (forward, backward), [write, read])
    again, fresh = [backward], [backward]
    again_from, fresh_from = [0], [0]
    for l in range(1, length + 1):  # noqa: E741 - the length of a chain
        once = [
            j * forward + in_memory[l - j] + read + again[j - 1]
            for j in range(1, l + 1)
        ]
        cost = min(in_memory[l], *once)
        again.append(min(cost, INFINITE))
        again_from.append(0 if cost == in_memory[l] else once.index(cost) + 1)
        split = [
            write + j * forward + fresh[l - j] + read + again[j - 1]
            for j in range(1, l + 1)
        ]
        cost = min(in_memory[l], *split)
        fresh.append(min(cost, INFINITE))
        fresh_from.append(0 if cost == in_memory[l] else split.index(cost) + 1)
    actions: list[tuple[int, int, int]] = []
    # What is left to reverse: base, length, and whether x_base is on the disk.
    pending = [(0, length, False)]
    while pending:
        base, l, is_stored = pending.pop()  # noqa: E741 - as above
        if is_stored:
            actions.append((LOAD, base, 1))
            advance = again_from[l]
        else:
            advance = fresh_from[l]
        if advance == 0:
            actions.append((REVERSE, base, base + l))
            continue
        if not is_stored:
            actions.append((STORE, base, 1))
        actions.append((ADVANCE, base, base + advance))
        pending.append((base, advance - 1, True))
        if is_stored:
            actions.append((REVERSE, base + advance, base + l))
        else:
            pending.append((base + advance, l - advance, False))
    return fresh[length], actions
