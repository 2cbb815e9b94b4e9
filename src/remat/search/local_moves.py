"""Orders of runs that are changed a little and weighed at once, and a search with that.

The native core keeps an order of runs in slots, the slots of the runs and reads of
every storage, and a tree over the slots that adds bytes to ranges and knows the largest
sum. Putting in, taking out or moving a run takes time O(log of the runs) for each
storage that it reads or writes, and gives cost and peak of the schedule that frees
everything after its last use, as :func:`remat.core.liveness.schedule_from_order` makes
it.
"""

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from remat.core.checks import require
from remat.core.errors import MissingDependencyError
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY
from remat.native import check_counts, core, native
from remat.search.plain_numbers import Numbers
from remat.search.retention_table import check_order, weigh_order

MOST_EFFORT = 2**27
"""Most effort of one search."""

MOST_RUNS = 64
"""Most runs of one op in an order that is changed."""

_END = -2


class MoveKind(IntEnum):
    """What a move does to an order."""

    TAKE_OUT = 0
    """Take out a run; what it wrote is read from the run before it of the same op."""

    PUT = 1
    """Put a run of an op right before a run."""

    MOVE = 2
    """Move a run right before another."""


class Passes(NamedTuple):
    """Which runs of each op are allowed, as the judge has it.

    Parameters
    ----------
    may_rerun, is_ordered, is_external
        As in :class:`remat.core.graph.Op`, per op.
    forward_count
        Number of forward ops, which come first.
    """

    may_rerun: Sequence[bool]
    is_ordered: Sequence[bool]
    is_external: Sequence[bool]
    forward_count: int


class Aim(NamedTuple):
    """What a search is for.

    Parameters
    ----------
    budget_bytes
        Most bytes at any moment, resident bytes included.
    enough_ns
        A time that is good enough: the search ends there.
    effort
        Runs to put in and take out, and to think of, 0 to :data:`MOST_EFFORT`; about a
        tenth of a microsecond each.
    seed
        Of the random choices.
    """

    budget_bytes: int
    enough_ns: int
    effort: int
    seed: int


class Found(NamedTuple):
    """What a search ends with.

    Parameters
    ----------
    order
        The cheapest order that fits; if none does, that of the smallest peak.
    cost_ns, peak_bytes
        Of its schedule.
    effort
        What was spent.
    """

    order: list[int]
    cost_ns: int
    peak_bytes: int
    effort: int


def passes_of(graph: TrainingGraph) -> Passes:
    """Return which runs of a graph's ops are allowed."""
    return Passes(
        may_rerun=[op.is_recomputable for op in graph.ops],
        is_ordered=[op.is_ordered for op in graph.ops],
        is_external=[op.is_external for op in graph.ops],
        forward_count=graph.forward_count,
    )


def may_change(passes: Passes, order: Sequence[int]) -> bool:
    """Return whether a valid order is one that a search may start from.

    No op runs more than :data:`MOST_RUNS` times, and the caller's work is done once.
    """
    counts = Counter(op for op in order if op != BOUNDARY)
    return all(
        runs <= (1 if passes.is_external[op] else MOST_RUNS)
        for op, runs in counts.items()
    )


def search_orders(
    numbers: Numbers,
    passes: Passes,
    order: Sequence[int],
    aim: Aim,
    first_heat: float,
    last_heat: float,
    time_limit_s: float | None,
) -> Found:
    """Return the best order found by changing one a little, again and again.

    A change takes out one or a few runs, drops a storage between two uses, or moves a
    run. Where memory is then too full, storages are dropped between two uses and made
    again right before the second, those of least time for their bytes first, until all
    fits; what there is room for is kept. The order that results is the next to be
    changed if it costs at most a little more: simulated annealing. As long as nothing
    fits, the peak is made smaller instead.

    Parameters
    ----------
    numbers, passes
        The graph.
    order
        Where the search begins: op indices and the boundary once, allowed by the judge
        but for the budget, and :func:`may_change`.
    aim
        What the search is for, and how long it goes on.
    first_heat, last_heat
        How many nanoseconds a change may cost more, on average, at first and at last.
    time_limit_s
        Seconds until the best order is returned, or ``None``.

    Raises
    ------
    MissingDependencyError
        If there is no native core.
    ValueError
        If the numbers do not fit together, or the order is none that may be changed.

    Notes
    -----
    One seed gives one answer, unless time runs out.
    """
    module = core()
    if module is None:
        msg = (
            "this search needs remat's native core, which is not installed or is switched "
            "off (REMAT_NATIVE=0); install a C++ compiler and reinstall remat"
        )
        raise MissingDependencyError(msg)
    return Found(
        *module.search_orders(
            numbers, passes, order, aim, first_heat, last_heat, time_limit_s
        )
    )


@native
def weigh_moves(
    numbers: Numbers,
    passes: Passes,
    order: Sequence[int],
    moves: Sequence[tuple[int, int, int]],
) -> list[tuple[bool, int, int]]:
    """Make moves one after the other; return if each was made, and cost and peak then.

    Parameters
    ----------
    numbers, passes, order
        As for :func:`search_orders`.
    moves
        A :class:`MoveKind`, the number of a run in the order as it is then, and the op
        that is put before it, or the number of the run before which it is moved. The
        end of the step counts as the last run.

    Returns
    -------
    list of tuple
        Whether the judge allows the move (one that it does not is left out), and time
        in nanoseconds and peak in bytes after it.

    Raises
    ------
    ValueError
        If the numbers do not fit together, the order is none that may be changed, or
        there is no such run, op or kind.
    """
    numbers, passes = Numbers(*numbers), Passes(*passes)
    check_order(numbers, order)
    orders = _Orders(numbers, passes)
    require(orders.is_allowed(order), "the order is none that may be changed")
    current = list(order)
    found: list[tuple[bool, int, int]] = []
    for kind, number, target in moves:
        changed = orders.changed(current, kind, number, target)
        is_made = changed is not None and orders.is_allowed(changed)
        if changed is not None and is_made:
            current = changed
        found.append((is_made, *weigh_order(numbers, current)))
    return found


class _Orders:
    """What the judge allows of orders of runs, budgets aside."""

    def __init__(self, numbers: Numbers, passes: Passes) -> None:
        self.numbers = numbers
        self.passes = passes
        self.count = len(numbers.costs)
        lists = (passes.may_rerun, passes.is_ordered, passes.is_external)
        require(
            all(len(flags) == self.count for flags in lists),
            "the lists of ops differ in length",
        )
        require(
            0 <= passes.forward_count <= self.count,
            "there are not so many forward ops",
        )
        for lists_of_ops in (numbers.reads, numbers.writes):
            for storages in lists_of_ops:
                require(
                    len(set(storages)) == len(storages), "an op names a storage twice"
                )
        written = [s for storages in numbers.writes for s in storages]
        require(len(set(written)) == len(written), "a storage is written twice")
        require(not numbers.writes[self.count], "the end writes a storage")
        check_counts([cost * MOST_RUNS for cost in numbers.costs])

    def changed(
        self, order: list[int], kind: int, number: int, target: int
    ) -> list[int] | None:
        """Return an order after a move; ``None`` for a move of what stays there."""
        require(0 <= kind <= max(MoveKind), "there is no such kind of move")
        require(0 <= number <= len(order), "there is no such run")
        if kind == MoveKind.PUT:
            require(0 <= target < self.count, "there is no such op")
            is_callers = self.passes.is_external[target]
            return None if is_callers else [*order[:number], target, *order[number:]]
        if kind == MoveKind.MOVE:
            require(0 <= target <= len(order), "there is no such run")
        if number == len(order) or self.stays(order[number]):
            return None
        without = [*order[:number], *order[number + 1 :]]
        if kind == MoveKind.MOVE:
            without.insert(target - (number < target), order[number])
        return without

    def stays(self, op: int) -> bool:
        return op == BOUNDARY or self.passes.is_external[op]

    def is_allowed(self, order: Sequence[int]) -> bool:
        """Whether each run finds what it reads, in its pass, as often as it may."""
        runs: Counter[int] = Counter()
        made: set[int] = set()
        last_ordered = -1
        is_backward = is_callers = False
        for op in order:
            if not made.issuperset(self.numbers.reads[op]):
                return False
            made.update(self.numbers.writes[op])
            if op == BOUNDARY:
                if is_backward or not self.have_effects(
                    runs, self.passes.forward_count
                ):
                    return False
                is_backward, is_callers = True, False
                continue
            if not self.may_run(op, runs[op], is_backward=is_backward):
                return False
            if is_callers and not self.passes.is_external[op]:
                return False
            is_callers = self.passes.is_external[op]
            if self.passes.is_ordered[op] and not runs[op]:
                if op < last_ordered:
                    return False
                last_ordered = op
            runs[op] += 1
        has_all = made.issuperset(self.numbers.reads[_END])
        return is_backward and has_all and self.have_effects(runs, self.count)

    def may_run(self, op: int, runs: int, *, is_backward: bool) -> bool:
        passes = self.passes
        if not is_backward and op >= passes.forward_count:
            return False
        may_again = passes.may_rerun[op] and not passes.is_external[op]
        return not runs or (may_again and runs < MOST_RUNS)

    def have_effects(self, runs: Counter[int], stop: int) -> bool:
        return all(runs[op] for op in range(stop) if self.numbers.stays_once[op])
