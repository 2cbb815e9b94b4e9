"""The dynamic program of joins of unit-size chains, as plain functions.

A join is ``k`` branches ``x_0 -> ... -> x_l`` whose last values meet in the turn. The
state after the turn is how far each branch is reversed and how many values are still
stored; the functions here are the Python twins of the native core.

Segments. ``R(a, p, f)`` is the forward cost to reverse the stages ``a .. p - 1`` of a
branch with ``x_a`` stored, the gradient at ``p`` live and ``f`` free units besides::

    R(a, a + 1, f) = 0
    R(a, p, f) = min over a < s < p of cost(a .. s - 1) + R(s, p, f - 1) + R(a, s, f)

and infinite where ``f`` is 0 (or 1 for ``s > a + 1``, where moving on takes two units).

Backward phase. ``W(r, n)`` with ``r[j]`` stages of branch ``j`` left and ``n`` values
stored has ``f(r, n) = M - n - gradients(r) - transient`` free units::

    W(0, 0) = 0
    W(r, n) = min over j, a < r[j] of R_j(a, r[j], f(r, n)) + W(r with r[j] = a, n')

with ``n' = n - 1``, or ``n`` when the base is a pinned input (``a = 0``).
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import prod

from remat.core.checks import require
from remat.native import MOST_TOTAL, check_table, native

INFINITE = 1 << 61
"""Cost of what cannot be done; sums of a few of them fit in 64 bits."""


class Segments:
    """Costs of reversing segments of one branch, computed as they are asked for."""

    def __init__(self, costs: Sequence[int], *, move_needs_two: bool) -> None:
        self.until = [0, *accumulate(costs)]
        self.move_needs_two = move_needs_two
        self.cost = cache(self._cost)

    def best_split(self, base: int, end: int, units: int) -> int:
        """Return the first of the best places to split a segment of several stages."""
        return min(
            range(base + 1, end), key=lambda s: self.split_cost(base, s, end, units)
        )

    def split_cost(self, base: int, split: int, end: int, units: int) -> int:
        """Return the cost of a segment that first advances to ``split``."""
        if units < 1 + int(self.move_needs_two and split - base >= 2):
            return INFINITE
        upper = self.cost(split, end, units - 1)
        lower = self.cost(base, split, units)
        return min(self.until[split] - self.until[base] + upper + lower, INFINITE)

    def _cost(self, base: int, end: int, units: int) -> int:
        if units < 0:
            return INFINITE
        if end - base == 1:
            return 0
        return min(
            self.split_cost(base, split, end, units) for split in range(base + 1, end)
        )

    def reverse(self, base: int, end: int, units: int) -> list[tuple[bool, int]]:
        """Return what runs to reverse a segment, as (is forward, stage)."""
        if end - base == 1:
            return [(False, base)]
        split = self.best_split(base, end, units)
        sweep = [(True, stage) for stage in range(base, split)]
        upper = self.reverse(split, end, units - 1)
        return [*sweep, *upper, *self.reverse(base, split, units)]


Convention = tuple[int, int, bool, bool]
"""Units of a gradient, units that an operation needs beyond its results, whether inputs
count, whether moving on takes two units; see
:class:`~remat.algorithms.chains.conventions.MemoryConvention`."""

_Piece = tuple[int, int, int, int]

JoinAnswer = tuple[int, list[tuple[int, int, int, int]], list[tuple[bool, int, int]]]
"""Forward cost after the turn; pieces (branch, base, end, free units) in the order of
reversal; what runs after the turn, as (is forward, branch, stage)."""


class _Join:
    """The table of one instance, filled from the states that are asked for."""

    def __init__(
        self,
        costs: Sequence[Sequence[int]],
        memory_units: int,
        convention: Convention,
    ) -> None:
        self.units = memory_units
        self.gradient_units, self.transient_units = convention[:2]
        self.counts_inputs, self.move_needs_two = convention[2:]
        self.segments = [
            Segments(branch, move_needs_two=self.move_needs_two) for branch in costs
        ]
        self.lengths = tuple(len(branch) for branch in costs)
        self.cost = cache(self._cost)

    def free(self, left: tuple[int, ...], stored: int) -> int:
        unfinished = sum(r > 0 for r in left)
        used = stored + self.gradient_units * unfinished + self.transient_units
        return self.units - used

    def pieces(
        self, left: tuple[int, ...], stored: int
    ) -> Iterator[tuple[int, _Piece, tuple[int, ...], int]]:
        """Yield cost, piece and next state of every way to go on, in a fixed order."""
        free = self.free(left, stored)
        for branch, end in enumerate(left):
            for base in range(end - 1, -1, -1):
                is_pinned = base == 0 and not self.counts_inputs
                rest = (*left[:branch], base, *left[branch + 1 :])
                after = stored if is_pinned else stored - 1
                if after < 0:
                    continue
                here = self.segments[branch].cost(base, end, free)
                if here < INFINITE:
                    yield here, (branch, base, end, free), rest, after

    def _cost(self, left: tuple[int, ...], stored: int) -> int:
        unfinished = sum(r > 0 for r in left)
        if unfinished == 0:
            return 0 if stored == 0 else INFINITE
        if self.counts_inputs and stored < unfinished:
            return INFINITE
        if self.free(left, stored) < 0:
            return INFINITE
        options = (
            here + self.cost(rest, after)
            for here, _, rest, after in self.pieces(left, stored)
        )
        return min(min(options, default=INFINITE), INFINITE)

    def at_turn(
        self, stored: int
    ) -> Iterator[tuple[int, list[_Piece], tuple[int, ...], int]]:
        """Yield cost, first pieces and state behind them for ``stored`` values."""
        count = len(self.lengths)
        tops = count + (count if self.transient_units else 0)
        room = self.units - stored - tops
        if room < 0:
            return
        if room > 0 or not self.move_needs_two:
            yield self.cost(self.lengths, stored), [], self.lengths, stored
            return
        # No unit to move in at the turn: some branch must end one stage from a
        # stored value, and reversing that stage first costs nothing.
        for branch, length in enumerate(self.lengths):
            is_pinned = length == 1 and not self.counts_inputs
            rest = (*self.lengths[:branch], length - 1, *self.lengths[branch + 1 :])
            after = stored if is_pinned else stored - 1
            if after >= 0:
                first = (branch, length - 1, length, self.free(self.lengths, stored))
                yield self.cost(rest, after), [first], rest, after

    def answer(self) -> JoinAnswer | None:
        best, left, stored = INFINITE, self.lengths, 0
        pieces: list[_Piece] = []
        most = min(self.units, sum(self.lengths))
        for count in range(most + 1):
            for cost, first, rest, after in self.at_turn(count):
                if cost < best:
                    best, pieces, left, stored = cost, first, rest, after
        if best >= INFINITE:
            return None
        while any(left):
            _, piece, left, stored = min(
                self.pieces(left, stored), key=lambda t: t[0] + self.cost(t[2], t[3])
            )
            pieces = [*pieces, piece]
        return best, pieces, self.expanded(pieces)

    def expanded(
        self, pieces: Sequence[tuple[int, int, int, int]]
    ) -> list[tuple[bool, int, int]]:
        return [
            (is_forward, branch, stage)
            for branch, base, end, units in pieces
            for is_forward, stage in self.segments[branch].reverse(base, end, units)
        ]


def check_join(
    costs: Sequence[Sequence[int]], memory_units: int, convention: Convention
) -> int:
    """Return the numbers in the tables of segments; refuse what cannot be.

    Raises
    ------
    ValueError
        If there is no branch, a branch is empty, or a number is out of range.
    """
    require(0 <= memory_units <= MOST_TOTAL, "memory must be 0 to 2**60 units")
    for units in convention[:2]:
        require(units in {0, 1}, "a gradient and what is transient take 0 or 1")
    require(len(costs) > 0, "a join has at least one branch")
    worst = numbers = 0
    for branch in costs:
        require(len(branch) > 0, "a branch has at least one stage")
        require(min(branch) >= 0, "a cost is negative")
        width = len(branch) + 1
        worst += sum(branch) * width
        numbers += width**2 * (min(memory_units, width) + 1)
    require(worst < INFINITE, "costs add up to 2**61 or more at worst")
    return numbers


@native
def join_plan(
    costs: Sequence[Sequence[int]],
    memory_units: int,
    convention: Convention,
) -> JoinAnswer | None:
    """Return the cheapest backward phase of a join, or ``None`` if none fits.

    Parameters
    ----------
    costs
        Per branch the forward cost of each stage, at least 0, one stage or more.
    memory_units
        Units at any time.
    convention
        What counts, see :data:`Convention`.

    Notes
    -----
    Of equally cheap answers: fewest values stored at the turn, then the piece of the
    first branch with the shortest segment, then the first split. Table of
    ``prod(l_j + 1) * (n + 1)`` entries for up to n stored values.
    """
    segments = check_join(costs, memory_units, convention)
    layers = min(memory_units, sum(map(len, costs))) + 1
    check_table(segments + prod(len(branch) + 1 for branch in costs) * layers)
    return _Join(costs, memory_units, convention).answer()


class _ByBranch(_Join):
    """The backward phase that finishes a branch before it touches the next."""

    def __init__(
        self,
        costs: Sequence[Sequence[int]],
        memory_units: int,
        convention: Convention,
    ) -> None:
        super().__init__(costs, memory_units, convention)
        self.alone = cache(self._alone)
        self.rest = cache(self._rest)

    def steps(
        self, branch: int, end: int, own: int, free: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield cost, base and values stored below it for the next piece of a branch.

        ``own`` values of the branch are stored, a pinned input not counted.
        """
        for base in range(end - 1, -1, -1):
            after = own if base == 0 and not self.counts_inputs else own - 1
            if after < 0 or (base == 0 and after > 0):
                continue
            here = self.segments[branch].cost(base, end, free)
            if here < INFINITE:
                yield here, base, after

    def _alone(self, branch: int, end: int, own: int, free: int) -> int:
        """Return the cost of reversing the rest of a branch, the others at rest."""
        if end == 0:
            return 0 if own == 0 else INFINITE
        if free < 0:
            return INFINITE
        options = (
            here + self.alone(branch, base, after, free + own - after)
            for here, base, after in self.steps(branch, end, own, free)
        )
        return min(min(options, default=INFINITE), INFINITE)

    def share_cost(self, order: tuple[int, ...], stored: int, own: int) -> int:
        """Return the cost of ``order`` if its first branch has ``own`` values."""
        branch = order[0]
        gradients = self.gradient_units * len(order)
        free = self.units - stored - gradients - self.transient_units
        here = self.alone(branch, self.lengths[branch], own, free)
        if here >= INFINITE:
            return INFINITE
        return min(here + self.rest(order[1:], stored - own), INFINITE)

    def _rest(self, order: tuple[int, ...], stored: int) -> int:
        """Return the cost of reversing the branches of ``order``, one by one."""
        if not order:
            return 0 if stored == 0 else INFINITE
        return min(self.share_cost(order, stored, own) for own in range(stored + 1))

    def answer_in(self, orders: Sequence[Sequence[int]]) -> JoinAnswer | None:
        """Return the best answer of the given orders; the first of equals."""
        count = len(self.lengths)
        tops = count + (count if self.transient_units else 0)
        most = min(self.units - tops - int(self.move_needs_two), sum(self.lengths))
        best, chosen, stored = INFINITE, (), 0
        for order in orders:
            for number in range(most + 1):
                cost = self.rest(tuple(order), number)
                if cost < best:
                    best, chosen, stored = cost, tuple(order), number
        if best >= INFINITE:
            return None
        pieces: list[tuple[int, int, int, int]] = []
        while chosen:
            shares = [self.share_cost(chosen, stored, n) for n in range(stored + 1)]
            own = shares.index(min(shares))
            gradients = self.gradient_units * len(chosen)
            free = self.units - stored - gradients - self.transient_units
            pieces += self.pieces_alone(chosen[0], own, free)
            chosen, stored = chosen[1:], stored - own
        return best, pieces, self.expanded(pieces)

    def pieces_alone(
        self, branch: int, own: int, free: int
    ) -> list[tuple[int, int, int, int]]:
        """Return the pieces of one branch, the others at rest."""
        pieces: list[tuple[int, int, int, int]] = []
        end = self.lengths[branch]
        while end:
            left, count, units = end, own, free

            def total(
                step: tuple[int, int, int], count: int = count, units: int = units
            ) -> int:
                here, base, after = step
                return here + self.alone(branch, base, after, units + count - after)

            _, end, own = min(self.steps(branch, left, count, units), key=total)
            pieces.append((branch, end, left, units))
            free = units + count - own
        return pieces


@native
def join_plan_by_branch(
    costs: Sequence[Sequence[int]],
    memory_units: int,
    convention: Convention,
    orders: Sequence[Sequence[int]],
) -> JoinAnswer | None:
    """Return the cheapest backward phase that finishes one branch after the other.

    Parameters are those of :func:`join_plan`, and the orders of branches to try.

    Notes
    -----
    Of equally cheap answers: the first order, fewest values stored at the turn, fewest
    of them in the first branches, then the shortest segments. Where moving on takes two
    units, one is set aside for it at the turn.
    """
    numbers = check_join(costs, memory_units, convention)
    units = memory_units + 1
    for branch in costs:
        width = len(branch) + 1
        numbers += width * units * min(units, width)
    check_table(numbers)
    for order in orders:
        is_order = sorted(order) == list(range(len(costs)))
        require(is_order, "an order must hold each branch once")
    return _ByBranch(costs, memory_units, convention).answer_in(orders)
