"""Revolve: the homogeneous chain, by recurrence and in closed form.

A chain of ``l`` stages of equal cost, ``x_0 -> x_1 -> ... -> x_l``, is reversed with
few places for values. Two indexings are common, and mixing them is the classical
off-by-one:

* Griewank and Walther count ``n`` steps to reverse with ``s`` checkpoints *including*
  the initial state; the cost is the forward steps without the last, taping one of each
  step: :func:`extra_forwards`;
* Aupy, Herrmann and others count the ``l`` forward stages of the adjoint graph AC(l),
  which has ``l + 1`` backward operations, the first of them the turn: AC(l) with ``c``
  slots is the former with ``l + 1`` steps and ``s = c``: :func:`revolve_forwards`.

In both, the running value and the gradient take no slot. What that means in units of
memory that *everything* has to fit in is a
:class:`~remat.algorithms.chains.conventions.MemoryConvention`: :func:`chain_forwards`
and :func:`plan_chain`.

References
----------
A. Griewank, A. Walther. Algorithm 799: Revolve. ACM TOMS 26(1), 2000: proposition 1.
G. Aupy, J. Herrmann. Periodicity in optimal hierarchical checkpointing schemes for
adjoint computations. Optimization Methods and Software 32(3), 2017.
"""

from math import comb

from remat.algorithms.chains.conventions import (
    MemoryConvention,
    check_operations,
    checked_convention,
)
from remat.algorithms.chains.operations import Backward, Forward
from remat.algorithms.chains.plans import Piece, UnitPlan
from remat.core.checks import checked_integer, checked_record
from remat.core.errors import InvalidGraphError


def repetition_number(steps: int, checkpoints: int) -> int:
    """Return the least ``r`` for which ``steps <= C(checkpoints + r, checkpoints)``.

    No step is run more than ``r`` times in the best schedule.

    Raises
    ------
    InvalidGraphError
        If a number is no integer, or out of range: several steps need a checkpoint.

    Examples
    --------
    >>> repetition_number(10, 3), repetition_number(11, 3), repetition_number(1, 5)
    (2, 3, 0)
    """
    steps = _integer("steps", steps)
    checkpoints = _integer("checkpoints", checkpoints, least=int(steps > 1))
    if steps <= 1:
        return 0
    if checkpoints == 1:
        return steps - 1
    # Doubled, then halved: with two checkpoints r is about the root of the steps.
    low, high = 0, 1
    while comb(checkpoints + high, high) < steps:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if comb(checkpoints + middle, middle) < steps:
            low = middle
        else:
            high = middle
    return high


def _integer(label: str, value: object, least: int = 0) -> int:
    return checked_integer(label, value, least=least, error=InvalidGraphError)


def extra_forwards(steps: int, checkpoints: int) -> int | None:
    """Return the fewest forward steps that reversing ``steps`` costs, taping apart.

    Parameters
    ----------
    steps
        Steps to reverse, at least 0.
    checkpoints
        Places for values, the initial one included, at least 0.

    Returns
    -------
    int or None
        ``r * steps - C(checkpoints + r, r - 1)`` with the repetition number ``r``;
        ``None`` if it cannot be done (several steps without a place).

    Raises
    ------
    InvalidGraphError
        If a number is no integer, or negative.

    Notes
    -----
    Satisfies ``t(l, s) = min over i of i + t(i, s) + t(l - i, s - 1)``. Time
    O(log r) binomial coefficients for the repetition number r.

    References
    ----------
    A. Griewank, A. Walther. Algorithm 799: Revolve. ACM TOMS 26(1), 2000.

    Examples
    --------
    >>> [extra_forwards(n, 3) for n in (1, 2, 10, 100)]
    [0, 1, 15, 490]
    """
    steps = _integer("steps", steps)
    checkpoints = _integer("checkpoints", checkpoints)
    if steps <= 1:
        return 0
    if checkpoints == 0:
        return None
    if checkpoints == 1:
        return steps * (steps - 1) // 2
    r = repetition_number(steps, checkpoints)
    return r * steps - comb(checkpoints + r, r - 1)


def first_checkpoint(steps: int, checkpoints: int) -> int:
    """Return how far to advance before the next checkpoint of a best schedule.

    Parameters
    ----------
    steps
        Steps to reverse, at least 2.
    checkpoints
        Places for values, the one of the initial value included, at least 1.

    Raises
    ------
    InvalidGraphError
        If a number is no integer, or out of range.

    Notes
    -----
    The rule of algorithm 799 (p. 34): with the repetition number r and
    ``b(s, r) = C(s + r, s)``, as little as keeps both parts within their reach.
    With one checkpoint there is no next one: the answer is the last step.
    """
    steps = _integer("steps", steps, least=2)
    checkpoints = _integer("checkpoints", checkpoints, least=1)
    if checkpoints == 1:
        return steps - 1
    if checkpoints >= steps - 1:
        return 1
    r, s = repetition_number(steps, checkpoints), checkpoints
    upper, lower = _reach(s - 1, r - 1), _reach(s - 2, r - 1)
    if steps <= _reach(s, r - 1) + lower:
        return _reach(s, r - 2)
    if steps < _reach(s, r - 1) + upper + lower:
        return steps - upper - lower
    return _reach(s, r - 1)


def _reach(checkpoints: int, repetitions: int) -> int:
    if checkpoints < 0 or repetitions < 0:
        return 0
    return comb(checkpoints + repetitions, repetitions)


def revolve_forwards(length: int, slots: int) -> int | None:
    """Return the fewest forward stages that reversing AC(``length``) costs.

    Parameters
    ----------
    length
        Number of forward stages, at least 0.
    slots
        Checkpoint slots, at least 0, the one of ``x_0`` included; the running value
        has none.

    Raises
    ------
    InvalidGraphError
        If either is no integer, or negative.

    Notes
    -----
    Time as :func:`extra_forwards`: O(log r) binomial coefficients.

    References
    ----------
    G. Aupy, J. Herrmann. Periodicity in optimal hierarchical checkpointing schemes for
    adjoint computations. Optimization Methods and Software 32(3), 2017.

    Examples
    --------
    >>> [revolve_forwards(l, 2) for l in range(8)]
    [0, 1, 2, 4, 6, 8, 11, 14]
    """
    return extra_forwards(_integer("length", length) + 1, _integer("slots", slots))


def chain_forwards(
    length: int, memory_units: int, convention: MemoryConvention
) -> int | None:
    """Return the fewest forward stages that train a chain, in closed form.

    Parameters
    ----------
    length
        Number of stages, at least 1; the turn on the last value is not one of them.
    memory_units
        Units that all counted values have to fit in at any time, at least 0.
    convention
        Which values count, and whether outputs may replace inputs.

    Returns
    -------
    int or None
        The count with the turn and every backward stage run once, or ``None`` if no
        schedule fits.

    Raises
    ------
    InvalidGraphError
        If a number is no integer or out of range, or the convention is strict with
        uncounted gradients, which has no closed form
        (:func:`remat.algorithms.chains.joins.plan_join` takes every convention).

    Notes
    -----
    Before the turn no gradient is live, so one value more can be kept than a reversal
    of the whole chain could: the base of a last segment of one stage. What remains is
    a standard instance of ``length - 1`` stages. Without counted gradients there is no
    such gain, and it is Revolve with the running value in a unit of its own. Time as
    :func:`extra_forwards`: O(log r) binomial coefficients.

    References
    ----------
    A. Griewank, A. Walther. Algorithm 799: Revolve. ACM TOMS 26(1), 2000.

    Examples
    --------
    >>> from remat.algorithms.chains.conventions import (
    ...     CHECKPOINTS_ONLY,
    ...     IN_PLACE,
    ...     STRICT,
    ... )
    >>> [chain_forwards(8, m, IN_PLACE) for m in (3, 4, 5)]
    [29, 15, 12]
    >>> chain_forwards(8, 4, STRICT), chain_forwards(8, 3, CHECKPOINTS_ONLY)
    (29, 17)
    """
    length, memory_units = _chain(length, memory_units, convention)
    slots = _sweep_slots(memory_units, convention)
    if length == 1:
        return 1 if memory_units >= _least_units(convention) else None
    if slots < 1:
        return None
    if convention.counts_gradients:
        extra = extra_forwards(length, slots)
        return None if extra is None else 1 + extra
    return extra_forwards(length + 1, slots)


def plan_chain(
    length: int, memory_units: int, convention: MemoryConvention
) -> UnitPlan | None:
    """Return a best schedule of a homogeneous chain, or ``None`` if none fits.

    Best is what :func:`chain_forwards` counts: the fewest forward stages, with the turn
    and every backward stage run once.

    Parameters
    ----------
    length
        Number of stages, at least 1; the turn on the last value is not one of them.
    memory_units
        Units that all counted values have to fit in at any time, at least 0.
    convention
        Which values count, and whether outputs may replace inputs.

    Raises
    ------
    InvalidGraphError
        As for :func:`chain_forwards`.
    SolverUnsuitableError
        If there are more than
        :data:`~remat.algorithms.chains.conventions.MAX_OPERATIONS` operations.

    Notes
    -----
    Needs no table: every split follows from :func:`first_checkpoint`. Time O(number of
    operations times r) for the repetition number r.

    References
    ----------
    A. Griewank, A. Walther. Algorithm 799: Revolve. ACM TOMS 26(1), 2000.

    Examples
    --------
    >>> from remat.algorithms.chains.conventions import IN_PLACE
    >>> plan = plan_chain(8, 4, IN_PLACE)
    >>> plan.forward_count, len(plan.operations), plan.operations[0]
    (15, 24, Forward(stage=0, branch=0, option=None))
    """
    cost = chain_forwards(length, memory_units, convention)
    if cost is None:
        return None
    length, memory_units = _chain(length, memory_units, convention)
    check_operations(cost + length + 1)
    slots = _sweep_slots(memory_units, convention)
    # With counted gradients the last step is the last stage, whose base the running
    # value holds until the turn; without, the turn is a step of its own.
    steps = length if convention.counts_gradients else length + 1
    pieces: list[Piece] = []
    base = 0
    while steps - base > 1 and slots > 1:
        advance = first_checkpoint(steps - base, slots)
        pieces.append(Piece(0, base, min(base + advance, length), slots))
        base, slots = base + advance, slots - 1
    if base < steps - 1:
        pieces.append(Piece(0, base, steps - 1, slots))
    if convention.counts_gradients:
        pieces.append(Piece(0, length - 1, length, 0))
    pieces.reverse()
    order = [step for piece in pieces for step in reverse_segment(piece)]
    return UnitPlan.from_order(
        lengths=(length,),
        memory_units=memory_units,
        convention=convention,
        forward_cost=cost,
        pieces=pieces,
        backward_phase=order,
    )


def reverse_segment(piece: Piece) -> list[Forward | Backward]:
    """Return the operations that reverse a segment of equal stages.

    Parameters
    ----------
    piece
        The segment, with its base stored, the gradient above it live and
        ``piece.free_units`` units to work in: at least 1, if it has several stages.

    Raises
    ------
    InvalidGraphError
        If a number of the piece is no integer, or out of range.
    SolverUnsuitableError
        If there are more than
        :data:`~remat.algorithms.chains.conventions.MAX_OPERATIONS` operations.
    """
    checked_record("piece", piece, Piece, error=InvalidGraphError)
    base, end = _integer("base", piece.base), _integer("end", piece.end)
    steps = _integer("end - base", end - base, least=1)
    units = _integer("free_units", piece.free_units, least=int(steps > 1))
    check_operations((extra_forwards(steps, units) or 0) + steps)
    order: list[Forward | Backward] = []
    pending = [(piece.base, piece.end, piece.free_units)]
    while pending:
        base, end, units = pending.pop()
        if end - base == 1:
            order.append(Backward(base, piece.branch))
            continue
        split = base + first_checkpoint(end - base, units)
        order += [Forward(stage, piece.branch) for stage in range(base, split)]
        pending += [(base, split, units), (split, end, units - 1)]
    return order


def _chain(
    length: int, memory_units: int, convention: MemoryConvention
) -> tuple[int, int]:
    checked_convention(convention)
    if convention.move_needs_two:
        msg = (
            "a strict convention with uncounted gradients has no closed form; use "
            "remat.algorithms.chains.joins.plan_join with one branch"
        )
        raise InvalidGraphError(msg)
    return _integer("length", length, least=1), _integer("memory_units", memory_units)


def _sweep_slots(memory_units: int, convention: MemoryConvention) -> int:
    """Return the slots, in Griewank's count, that the reversal from x_0 has."""
    units = memory_units + int(not convention.counts_inputs)
    if not convention.counts_gradients:
        return units - 1
    return units - 2 - convention.transient_units


def _least_units(convention: MemoryConvention) -> int:
    """Return the units in which a chain of one stage can be trained."""
    return 1 + int(convention.counts_inputs) + convention.transient_units
