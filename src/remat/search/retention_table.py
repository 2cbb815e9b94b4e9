"""The table behind :mod:`remat.search.retention`: plain numbers, and questions to it.

The functions run in the native core; the class is what their Python twins use, and
what is used to look at a table between changes.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy as np

from remat.core.checks import require
from remat.core.liveness import BOUNDARY
from remat.core.problem import Limits
from remat.native import check_counts, check_indices, check_rule, check_time, native
from remat.search.plain_numbers import Numbers

_VALUE_TOLERANCE = 1e-9
"""Relative drop of a value below the next one that sends a run back to the queue."""

_END = -2


@dataclass(slots=True)
class _Copy:
    """One copy of a storage: where it is written, and the positions that read it."""

    storage: int
    birth: int
    uses: list[int] = field(default_factory=list[int])

    @property
    def end(self) -> int:
        return self.uses[-1] if self.uses else self.birth


def check_order(numbers: Numbers, order: Sequence[int]) -> None:
    """Refuse numbers that do not fit together, and ops that there are not.

    Raises
    ------
    ValueError
        If lists differ in length, an index is out of range, or sizes or times are
        negative or add up to too much.
    """
    count = len(numbers.costs)
    require(
        len(numbers.reads) == len(numbers.writes) == count + 2
        and len(numbers.workspaces) == len(numbers.stays_once) == count,
        "the lists of ops differ in length",
    )
    for lists in (numbers.reads, numbers.writes):
        for storages in lists:
            check_indices(storages, len(numbers.sizes), "storage")
    check_indices(order, count, "op", BOUNDARY)
    check_counts(numbers.sizes, numbers.workspaces, [numbers.resident_bytes])
    runs = (numbers.costs[op] for op in order if op != BOUNDARY)
    check_counts(numbers.costs, runs)


class Table:
    """The retention intervals of an order of computations on one device.

    Positions are indices into the order that the table was made from; the position
    after the last one stands for the end of the step. Runs that were taken out leave
    their position empty.

    Parameters
    ----------
    numbers
        The graph that the order is for.
    order
        Op indices, possibly repeated, and :data:`remat.core.liveness.BOUNDARY` exactly
        once; every read must be preceded by a run that writes it.

    Raises
    ------
    KeyError
        If a storage is read before it is written.
    ValueError
        If lists differ in length, an index is out of range, or sizes or times are
        negative or add up to too much.

    Notes
    -----
    Construction takes time and memory O(reads and writes of the order).
    """

    def __init__(self, numbers: Numbers, order: Sequence[int]) -> None:
        numbers = Numbers(*numbers)
        check_order(numbers, order)
        self._numbers = numbers
        self._ops = list(order)
        self._is_in = [True] * len(self._ops)
        self._size = numbers.sizes
        self._runs_of: list[list[int]] = [[] for _ in numbers.costs]
        self._made: list[list[_Copy]] = []
        self._read: list[list[_Copy]] = []
        self._undo: list[Callable[[], None]] = []
        self._collect()
        self._used_bytes = self._timeline()

    def _collect(self) -> None:
        reads, writes = self._numbers.reads, self._numbers.writes
        latest: dict[int, _Copy] = {}
        for position, index in enumerate(self._ops):
            if index != BOUNDARY:
                self._runs_of[index].append(position)
            self._read.append(_note_reads(latest, reads[index], position))
            made = [_Copy(storage, position) for storage in writes[index]]
            self._made.append(made)
            for copy in made:
                latest[copy.storage] = copy
        _note_reads(latest, reads[_END], len(self._ops))

    def _timeline(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        changes = np.zeros(len(self._ops) + 2, dtype=np.int64)
        workspaces = np.zeros(len(self._ops) + 1, dtype=np.int64)
        for position, index in enumerate(self._ops):
            if index != BOUNDARY:
                workspaces[position] = self._workspace(index)
            for copy in self._made[position]:
                changes[copy.birth] += self._size[copy.storage]
                changes[copy.end + 1] -= self._size[copy.storage]
        return np.cumsum(changes)[:-1] + workspaces + self._numbers.resident_bytes

    def _workspace(self, op: int) -> int:
        return self._numbers.workspaces[op]

    def _cost(self, op: int) -> int:
        return self._numbers.costs[op]

    @property
    def peak_bytes(self) -> int:
        """Most bytes that are live at any position, resident bytes included."""
        return int(self._used_bytes.max())

    @property
    def cost_ns(self) -> int:
        """Sum of the costs of all runs, in nanoseconds."""
        return sum(self._cost(op) for op in self.order() if op != BOUNDARY)

    def order(self) -> list[int]:
        """Return the ops, and the boundary, that are still in the order."""
        return [op for op, is_in in zip(self._ops, self._is_in, strict=True) if is_in]

    def drop_unread_runs(self) -> None:
        """Take out every run whose outputs nobody reads and no rule demands.

        Never raises the bytes at any position.
        """
        for position in range(len(self._ops) - 1, -1, -1):
            if self._is_in[position] and self._is_unread(position):
                self._take_out(position)
        self._undo.clear()

    def keep_instead_of_recompute(
        self, budget_bytes: int, limits: Limits, length_exponent: float = 1.0
    ) -> bool:
        """Keep copies over recomputing them, best value first, within the budget.

        Parameters
        ----------
        budget_bytes
            Most bytes at any position whose bytes grow; positions already above it
            are not made worse.
        limits
            When to stop.
        length_exponent
            The value of keeping is the time saved over bytes x length to this power,
            where the length is the number of positions for which more is kept.

        Returns
        -------
        bool
            Whether any run was taken out.
        """
        # Taking a run out changes what others save (their inputs may now be kept, or
        # nobody's), so a value is computed anew when its turn comes.
        queue: list[tuple[float, int]] = []
        for position in chain.from_iterable(map(self._repeats, self._runs_of)):
            if limits.is_over:
                return False
            queue.append((-self._value(position, length_exponent), position))
        heapify(queue)
        has_changed = False
        while queue and not limits.is_over:
            _, position = heappop(queue)
            if not self._is_in[position]:
                continue
            value = self._value(position, length_exponent)
            if queue and value < -queue[0][0] * (1 - _VALUE_TOLERANCE):
                heappush(queue, (-value, position))
            elif self._try_without(position, budget_bytes):
                has_changed = True
        return has_changed

    def _repeats(self, runs: list[int]) -> list[int]:
        return [p for p in runs if self._is_in[p]][1:]

    def _previous_run(self, position: int) -> int | None:
        runs = self._runs_of[self._ops[position]]
        for index in range(bisect_left(runs, position) - 1, -1, -1):
            if self._is_in[runs[index]]:
                return runs[index]
        return None

    def _value(self, position: int, length_exponent: float) -> float:
        """Return the time saved per byte and length of what would be kept."""
        previous = self._previous_run(position)
        if previous is None:
            return 0.0
        kept = sum(
            self._size[new.storage] * (position - old.end) ** length_exponent
            for old, new in zip(self._made[previous], self._made[position], strict=True)
            if new.uses
        )
        return self._saved_ns(position) / max(kept, 1)

    def _saved_ns(self, position: int) -> int:
        """Return the time of a run and of the runs that only it needs."""
        gone = {position}
        pending = [position]
        saved_ns = 0
        while pending:
            current = pending.pop()
            saved_ns += self._cost(self._ops[current])
            for copy in self._read[current]:
                birth = copy.birth
                if birth not in gone and self._is_needed_only_by(birth, gone):
                    gone.add(birth)
                    pending.append(birth)
        return saved_ns

    def _is_needed_only_by(self, position: int, readers: set[int]) -> bool:
        index = self._ops[position]
        if index == BOUNDARY:
            return False
        if self._numbers.stays_once[index] and self._previous_run(position) is None:
            return False
        return all(readers.issuperset(copy.uses) for copy in self._made[position])

    def _try_without(self, position: int, budget_bytes: int) -> bool:
        """Take a run out if the bytes stay within the budget; else change nothing."""
        previous = self._previous_run(position)
        if previous is None:
            return False
        self._undo.clear()
        grown: list[tuple[int, int]] = []
        for old, new in zip(self._made[previous], self._made[position], strict=True):
            if not new.uses:
                continue
            grown.append((old.end + 1, position))
            # The position counts it already, but taking the run out uncounts it.
            self._add(old.end + 1, position + 1, self._size[new.storage])
            old.uses.extend(new.uses)
            for use in new.uses:
                self._redirect(use, new, old)
            self._undo.append(partial(self._split, old, new, new.uses))
            new.uses = []
        self._take_out(position)
        bytes_ = self._used_bytes
        if all(
            start >= stop or bytes_[start:stop].max() <= budget_bytes
            for start, stop in grown
        ):
            return True
        self._roll_back()
        return False

    def _redirect(self, use: int, source: _Copy, target: _Copy) -> None:
        if use < len(self._ops):
            read = self._read[use]
            for index, copy in enumerate(read):
                if copy is source:
                    read[index] = target

    def _add(self, start: int, stop: int, size_bytes: int) -> None:
        if start < stop and size_bytes:
            self._used_bytes[start:stop] += size_bytes
            self._undo.append(partial(self._shrink, start, stop, size_bytes))

    def _is_unread(self, position: int) -> bool:
        """Whether no output of the run is read, and it is not there for an effect."""
        index = self._ops[position]
        if index == BOUNDARY or any(copy.uses for copy in self._made[position]):
            return False
        if self._numbers.stays_once[index]:
            return self._previous_run(position) is not None
        return True

    def _take_out(self, position: int) -> None:
        """Take out an unread run, and the runs that nobody reads once it is gone."""
        pending = [position]
        while pending:
            current = pending.pop()
            if not self._is_in[current]:
                continue
            self._is_in[current] = False
            self._undo.append(partial(self._put_back, current))
            size = sum(self._size[copy.storage] for copy in self._made[current])
            size += self._workspace(self._ops[current])
            self._add(current, current + 1, -size)
            for copy in self._read[current]:
                end = copy.end
                copy.uses.pop(bisect_left(copy.uses, current))
                self._undo.append(partial(insort, copy.uses, current))
                self._add(copy.end + 1, end + 1, -self._size[copy.storage])
                if self._is_in[copy.birth] and self._is_unread(copy.birth):
                    pending.append(copy.birth)

    def _roll_back(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _shrink(self, start: int, stop: int, size_bytes: int) -> None:
        self._used_bytes[start:stop] -= size_bytes

    def _put_back(self, position: int) -> None:
        self._is_in[position] = True

    def _split(self, old: _Copy, new: _Copy, uses: list[int]) -> None:
        del old.uses[len(old.uses) - len(uses) :]
        new.uses = uses
        for use in uses:
            self._redirect(use, old, new)

    @property
    def answer(self) -> "Answer":
        """The order, its cost and its peak."""
        return self.order(), self.cost_ns, self.peak_bytes


Answer = tuple[list[int], int, int]
"""An order, its cost in nanoseconds and its peak in bytes."""


def _note_reads(
    latest: dict[int, _Copy], storages: Sequence[int], position: int
) -> list[_Copy]:
    copies = [latest[s] for s in storages]
    for copy in copies:
        copy.uses.append(position)
    return copies


@native
def weigh_order(numbers: Numbers, order: Sequence[int]) -> tuple[int, int]:
    """Return an order's cost in nanoseconds and its peak in bytes, freeing early."""
    table = Table(numbers, order)
    return table.cost_ns, table.peak_bytes


@native
def without_unread_runs(numbers: Numbers, order: Sequence[int]) -> Answer:
    """Return an order less every run whose outputs nobody reads and no rule demands."""
    table = Table(numbers, order)
    table.drop_unread_runs()
    return table.answer


@native
def improve_retention(
    numbers: Numbers,
    order: Sequence[int],
    budget_bytes: int,
    length_exponent: float,
    time_limit_s: float | None,
) -> Answer:
    """Return an order less the runs that memory lets it do without.

    Parameters
    ----------
    numbers, order
        As for :class:`Table`.
    budget_bytes
        Most bytes at any moment, resident bytes included.
    length_exponent
        As for :meth:`Table.keep_instead_of_recompute`.
    time_limit_s
        Seconds after which the order reached by then is returned, or ``None``.
    """
    check_rule([length_exponent], [])
    check_time(time_limit_s)
    limits = Limits.after(time_limit_s)
    table = Table(numbers, order)
    table.drop_unread_runs()
    while table.keep_instead_of_recompute(budget_bytes, limits, length_exponent):
        if limits.is_over:
            break
    return table.answer
