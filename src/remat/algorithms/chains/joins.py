"""Joins of chains of unit-size values: the optimal schedule for any number of branches.

Several chains whose last values meet in the loss: siamese, triplet and cross-modal
networks. Every value takes one unit of memory, under a convention that is a parameter;
forward costs may differ from stage to stage.

What is optimal. :func:`plan_join` returns the least forward cost *among schedules that
run the turn and every backward stage once*, on any interleaving of the branches.
Running them again can be cheaper at the tightest budgets, and feasible below them
(:mod:`remat.algorithms.chains.reexecution`).

Why the program is exact. Before the turn nothing is recomputed: of what is live at the
turn each value can be kept on its first computation. After it the branches share only
the number of free units, a segment between two stored values is reversed without
interruption, and reversing one frees its base (and, at the bottom of a branch, the
gradient): a state is how far each branch is and how many values are stored. Order and
interleaving of segments are part of what is optimised. The turn limits how many values
are stored: in strict accounting all last values and all their gradients are live at
once, so that many units are of no use for storing although they are free right after.

Complexity. Time O(M * sum(l) * prod(l)) and memory M * prod(l + 1) numbers for M stored
values at most, divided by the symmetries of equal branches in time. For many long
branches :func:`plan_join_by_branch` finishes branches one by one: never better, rarely
worse, and polynomial in the number of stages for any number of branches up to eight.
"""

from collections.abc import Sequence
from itertools import permutations
from math import prod

from remat.algorithms.chains.conventions import (
    MAX_STAGES,
    MemoryConvention,
    checked_convention,
)
from remat.algorithms.chains.join_tables import INFINITE, join_plan, join_plan_by_branch
from remat.algorithms.chains.operations import Backward, Forward
from remat.algorithms.chains.plans import Piece, UnitPlan
from remat.core.checks import checked_integer, checked_integers, checked_list, shown
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.units import LARGEST_TOTAL, format_bytes
from remat.native import MOST_TABLE_BYTES

MAX_TABLE_BYTES = 2**30
"""Default limit of the tables of a join, in bytes."""

MAX_PERMUTED_BRANCHES = 8
"""Most branches for which :func:`plan_join_by_branch` tries every order."""


def plan_join(
    stage_costs: Sequence[Sequence[int]],
    memory_units: int,
    convention: MemoryConvention,
    *,
    max_table_bytes: int = MAX_TABLE_BYTES,
) -> UnitPlan | None:
    """Return the best schedule of a join among those with one turn.

    Parameters
    ----------
    stage_costs
        Per branch the forward cost of each stage: at least one branch, at least one
        stage in each, integers of at least 0. Equal stages: all 1.
    memory_units
        Units that all counted values have to fit in at any time.
    convention
        Which values count, and whether outputs may replace inputs.
    max_table_bytes
        Limit of the table in bytes, at most :data:`~remat.native.MOST_TABLE_BYTES`.

    Returns
    -------
    UnitPlan or None
        The schedule, with ``forward_cost`` the sum over all forward runs; ``None`` if
        no schedule with one turn fits.

    Raises
    ------
    InvalidGraphError
        If there is no branch, a branch is empty, or a number is no integer or out of
        range.
    SolverUnsuitableError
        If the table would take more than ``max_table_bytes``.

    Notes
    -----
    For branches of l_j stages and M units: time O(M sum(l_j) prod(l_j)), memory
    O(M prod(l_j + 1)) numbers.

    References
    ----------
    O. Beaumont, J. Herrmann, G. Pallez, A. Shilova. Optimal memory-aware
    backpropagation of deep join networks. Phil. Trans. R. Soc. A 378, 2020 (the
    problem; the program was derived here).

    Examples
    --------
    >>> from remat.algorithms.chains.conventions import IN_PLACE, STRICT
    >>> [plan_join([[1] * 3] * 2, m, IN_PLACE).forward_cost for m in (5, 6, 7, 8)]
    [9, 8, 7, 6]
    >>> plan_join([[1] * 3] * 2, 5, STRICT) is None
    True
    """
    checked_convention(convention)
    costs = checked_costs(stage_costs)
    units = useful_units(costs, memory_units)
    max_table_bytes = checked_table_bytes(max_table_bytes)
    needed = join_table_bytes([len(branch) for branch in costs], units)
    if needed > max_table_bytes:
        lengths = [len(branch) for branch in costs]
        msg = (
            f"the table of a join of branches of {shown(lengths)} stages in {units} "
            f"units takes {needed:_} bytes, more than the limit of {max_table_bytes:_} "
            f"({format_bytes(max_table_bytes)}); plan branch by branch, merge stages, "
            "or raise the limit"
        )
        raise SolverUnsuitableError(msg)
    found = join_plan(costs, units, convention.numbers)
    return None if found is None else _plan(costs, memory_units, convention, found)


def plan_join_by_branch(
    stage_costs: Sequence[Sequence[int]],
    memory_units: int,
    convention: MemoryConvention,
) -> UnitPlan | None:
    """Return the best schedule of a join that reverses one whole branch at a time.

    Parameters
    ----------
    stage_costs
        Per branch the forward cost of each stage, as for :func:`plan_join`; at most
        :data:`MAX_PERMUTED_BRANCHES` branches.
    memory_units
        Units that all counted values have to fit in at any time.
    convention
        Which values count, and whether outputs may replace inputs.

    Returns
    -------
    UnitPlan or None
        The schedule; ``None`` if no schedule of this form fits.

    Raises
    ------
    InvalidGraphError
        As for :func:`plan_join`.
    SolverUnsuitableError
        If there are more than :data:`MAX_PERMUTED_BRANCHES` branches, or the tables
        would take more than :data:`MAX_TABLE_BYTES`.

    Notes
    -----
    Every order of the branches is tried, equal branches once. Time
    O(k! k M^2 + M^2 sum(l^2)), memory O(M^2 max(l)) numbers. A schedule with
    interleaved branches can be feasible where this finds none, and cheaper; it rarely
    is.

    References
    ----------
    O. Beaumont, J. Herrmann, G. Pallez, A. Shilova. Optimal memory-aware
    backpropagation of deep join networks. Phil. Trans. R. Soc. A 378, 2020 (the
    problem; the program was derived here).

    Examples
    --------
    >>> from remat.algorithms.chains.conventions import IN_PLACE
    >>> costs = [[1] * 20] * 2
    >>> plans = [plan(costs, 10, IN_PLACE) for plan in (plan_join, plan_join_by_branch)]
    >>> [plan.forward_cost for plan in plans]
    [74, 75]
    """
    checked_convention(convention)
    costs = checked_costs(stage_costs)
    units = useful_units(costs, memory_units)
    if len(costs) > MAX_PERMUTED_BRANCHES:
        msg = (
            f"a join of {len(costs)} branches; orders are tried for at most "
            f"{MAX_PERMUTED_BRANCHES}: merge branches, or treat the join as a chain"
        )
        raise SolverUnsuitableError(msg)
    needed = branch_table_bytes([len(branch) for branch in costs], units)
    if needed > MAX_TABLE_BYTES:
        msg = (
            f"the tables of {len(costs)} branches of {max(map(len, costs)):_} stages or "
            f"fewer in {units:_} units take {needed:_} bytes, more than the limit of "
            f"{MAX_TABLE_BYTES:_} ({format_bytes(MAX_TABLE_BYTES)}); merge stages"
        )
        raise SolverUnsuitableError(msg)
    kinds = [costs.index(branch) for branch in costs]
    orders: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(range(len(costs))):
        orders.setdefault(tuple(kinds[b] for b in order), order)
    found = join_plan_by_branch(costs, units, convention.numbers, list(orders.values()))
    return None if found is None else _plan(costs, memory_units, convention, found)


def smallest_units(lengths: Sequence[int], convention: MemoryConvention) -> int:
    """Return the fewest units in which a join can be trained with one turn.

    Parameters
    ----------
    lengths
        Number of stages of each branch, at least 1.
    convention
        Which values count, and whether outputs may replace inputs.

    Raises
    ------
    InvalidGraphError
        If there is no branch, or a length is no integer or out of range.
    SolverUnsuitableError
        If there are so many branches that the table of :func:`plan_join` would take
        more than :data:`MAX_TABLE_BYTES`; with three stages or more each, from eleven
        or twelve.

    Notes
    -----
    Asks :func:`plan_join` for growing numbers of units, from what the turn takes, on
    branches cut to three stages: for k branches time O(k^2 4^k) each.

    References
    ----------
    O. Beaumont, J. Herrmann, G. Pallez, A. Shilova. Optimal memory-aware
    backpropagation of deep join networks. Phil. Trans. R. Soc. A 378, 2020 (the
    problem; the program was derived here).

    Examples
    --------
    >>> from remat.algorithms.chains.conventions import IN_PLACE, STRICT
    >>> smallest_units([2, 2], IN_PLACE), smallest_units([2, 2], STRICT)
    (5, 6)
    """
    checked_convention(convention)
    lengths = checked_integers(
        "lengths", lengths, least=1, most=MAX_STAGES, error=InvalidGraphError
    )
    # Feasibility does not depend on lengths beyond a few stages.
    short = checked_costs([[1] * min(length, 3) for length in lengths])
    # At the turn every branch has its last value and one to start again from, and
    # after it, or with it, its gradient. No schedule needs more than everything.
    stored, gradients = int(convention.counts_inputs), convention.gradient_units
    if convention.overwrites_inputs:
        least = len(lengths) * (stored + max(1, gradients))
    else:
        least = len(lengths) * (stored + 1 + gradients)
    needed = join_table_bytes([len(branch) for branch in short], least)
    if needed > MAX_TABLE_BYTES:
        msg = (
            f"the smallest number of units for a join of {len(lengths)} branches is "
            f"found by tables of {needed:_} bytes or more, above the limit of "
            f"{MAX_TABLE_BYTES:_} ({format_bytes(MAX_TABLE_BYTES)}); ask for fewer "
            "branches"
        )
        raise SolverUnsuitableError(msg)
    for units in range(least, 2 * sum(lengths) + 2 * len(lengths) + 2):
        if plan_join(short, units, convention) is not None:
            return units
    msg = "no number of units is enough; this contradicts what all values take"
    raise AssertionError(msg)


def join_table_bytes(lengths: Sequence[int], memory_units: int) -> int:
    """Return the bytes that the table of :func:`plan_join` takes at most."""
    lengths = checked_integers("lengths", lengths, least=1, error=InvalidGraphError)
    memory_units = checked_integer(
        "memory_units", memory_units, least=0, error=InvalidGraphError
    )
    stored = min(memory_units, sum(lengths))
    states = prod(length + 1 for length in lengths) * (stored + 1)
    units = min(memory_units, max(lengths)) + 1
    segments = sum((length + 1) ** 2 * units for length in lengths)
    return 8 * (states + segments)


def branch_table_bytes(lengths: Sequence[int], memory_units: int) -> int:
    """Return the bytes that the tables of :func:`plan_join_by_branch` take at most."""
    units = memory_units + 1
    alone = sum((min(memory_units, n) + 1) * units * (n + 1) for n in set(lengths))
    return 8 * alone + join_table_bytes([max(lengths)], memory_units) * len(lengths)


def useful_units(costs: Sequence[Sequence[int]], memory_units: object) -> int:
    """Return the units that make a difference: more than everything takes are no use.

    Raises
    ------
    InvalidGraphError
        If the memory is no integer of at least 0.
    """
    units = checked_integer(
        "memory_units", memory_units, least=0, error=InvalidGraphError
    )
    return min(units, 2 * sum(map(len, costs)) + 2 * len(costs) + 2)


def checked_table_bytes(max_table_bytes: object) -> int:
    """Return a limit of tables, in bytes, or raise ``InvalidGraphError``."""
    return checked_integer(
        "max_table_bytes",
        max_table_bytes,
        least=0,
        most=MOST_TABLE_BYTES,
        error=InvalidGraphError,
    )


def check_worst_ns(worst_ns: int) -> None:
    """Refuse times that may be too many to be counted."""
    if worst_ns >= INFINITE:
        msg = f"times add up to {worst_ns:_} ns at worst; need less than {INFINITE:_}"
        raise InvalidGraphError(msg)


def checked_costs(stage_costs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the costs as lists, or raise what :func:`plan_join` says."""
    branches = checked_list("stage_costs", stage_costs, error=InvalidGraphError)
    costs = [
        list(
            checked_integers(
                f"the costs of branch {index}",
                branch,
                least=0,
                most=LARGEST_TOTAL,
                error=InvalidGraphError,
            )
        )
        for index, branch in enumerate(branches)
    ]
    if not costs:
        msg = "a join needs at least one branch; got none"
        raise InvalidGraphError(msg)
    for index, branch in enumerate(costs):
        if not branch:
            msg = f"branch {index} of {len(costs)} has no stage; it needs at least one"
            raise InvalidGraphError(msg)
    # A stage runs at most once per stage above it: sums stay below INFINITE.
    most = sum(sum(branch) * (len(branch) + 1) for branch in costs)
    if most >= INFINITE:
        msg = f"costs add up to {most:_} at worst; need less than {INFINITE:_}"
        raise InvalidGraphError(msg)
    return costs


def _plan(
    costs: list[list[int]],
    memory_units: int,
    convention: MemoryConvention,
    found: tuple[int, list[tuple[int, int, int, int]], list[tuple[bool, int, int]]],
) -> UnitPlan:
    cost, pieces, order = found
    return UnitPlan.from_order(
        lengths=[len(branch) for branch in costs],
        memory_units=int(memory_units),
        convention=convention,
        forward_cost=cost + sum(map(sum, costs)),
        pieces=[Piece(*piece) for piece in pieces],
        backward_phase=[
            Forward(stage, branch) if is_forward else Backward(stage, branch)
            for is_forward, branch, stage in order
        ],
    )
