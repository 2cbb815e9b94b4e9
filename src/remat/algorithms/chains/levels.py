"""Revolve on several storage levels: DiskRevolve and HRevolve.

The same homogeneous chain as :mod:`remat.algorithms.chains.revolve`, AC(l), whose
values may be stored on levels that cost time to write and read: slots in device memory,
in host memory, on a disk. The running value and the gradient take no slot.

* :func:`plan_disk_revolve`: limited memory at no cost, and an unlimited second level;
* :func:`plan_hrevolve`: any number of levels, each with its slots and costs.

What is optimal: both programs are exact for the total time of schedules in which a
value is stored on one level when it is first reached, loaded when the sweep needs it,
and every backward stage runs once; no copy overlaps a computation
(:mod:`remat.algorithms.chains.offload` has overlap).

Departure from published code: for chains of one stage the recurrence as published
charges one read of level 0 whatever the level of ``x_0``; here length 1 is no special
case. Values agree wherever storing on level 0 costs nothing.

References
----------
G. Aupy, J. Herrmann, P. Hovland, Y. Robert. Optimal multistage algorithm for adjoint
computation. SIAM J. Sci. Comput. 38(3), 2016.
J. Herrmann, G. Pallez (Aupy). H-Revolve: a framework for adjoint computation on
synchronous hierarchical platforms. ACM TOMS 46(2), 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from remat.algorithms.chains.conventions import MAX_STAGES, check_operations
from remat.algorithms.chains.join_tables import INFINITE
from remat.algorithms.chains.joins import check_worst_ns, checked_table_bytes
from remat.algorithms.chains.level_tables import (
    ADVANCE,
    BACKWARD,
    LOAD,
    REVERSE,
    STORE,
    disk_revolve_plan,
    hrevolve_plan,
)
from remat.algorithms.chains.operations import (
    Backward,
    Forward,
    Load,
    Operation,
    Store,
    Turn,
)
from remat.algorithms.chains.plans import Piece
from remat.algorithms.chains.revolve import reverse_segment, revolve_forwards
from remat.core.checks import (
    checked_integer,
    checked_record,
    checked_records,
)
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.units import LARGEST_TOTAL, format_bytes, keep_amounts

MAX_TABLE_BYTES = 2**30
"""Default limit of the tables of :func:`plan_hrevolve`, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLevel:
    """A place for values, with the time that storing and loading one takes.

    Parameters
    ----------
    slots
        Values that fit, at least 0.
    write_ns, read_ns
        Time of storing and of loading one value, at least 0.

    Raises
    ------
    InvalidGraphError
        If a number is no integer, negative or more than
        :data:`~remat.core.units.LARGEST_TOTAL`.
    """

    slots: int
    write_ns: int = 0
    read_ns: int = 0

    def __post_init__(self) -> None:
        names = ("slots", "write_ns", "read_ns")
        keep_amounts(self, *names, of="a storage level", error=InvalidGraphError)


@dataclass(frozen=True, kw_only=True)
class LevelPlan:
    """A schedule of a homogeneous chain on several storage levels.

    Parameters
    ----------
    length
        Number of forward stages.
    cost_ns
        Total time: forward, backward, storing and loading.
    operations
        Everything that happens, in order. Keeping a value in level 0 of
        :func:`plan_disk_revolve` is not an operation.
    """

    length: int
    cost_ns: int
    operations: tuple[Operation, ...]

    @cached_property
    def forward_count(self) -> int:
        """Number of forward runs."""
        return sum(isinstance(op, Forward) for op in self.operations)

    def copy_count(self, level: int) -> int:
        """Return how often a value is stored on or loaded from ``level``."""
        copies = (op for op in self.operations if isinstance(op, Store | Load))
        return sum(op.level == level for op in copies)


def plan_hrevolve(
    length: int,
    levels: Sequence[StorageLevel],
    *,
    forward_ns: int = 1,
    backward_ns: int = 1,
    max_table_bytes: int = MAX_TABLE_BYTES,
) -> LevelPlan | None:
    """Return a schedule of least total time on several storage levels.

    Parameters
    ----------
    length
        Number of forward stages, 0 to
        :data:`~remat.algorithms.chains.conventions.MAX_STAGES`; there are ``length +
        1`` backward ones, the first of them the turn.
    levels
        The levels, the cheapest first; at least one.
    forward_ns, backward_ns
        Time of one stage, at least 0.
    max_table_bytes
        Limit of the tables in bytes, at most :data:`~remat.native.MOST_TABLE_BYTES`.

    Returns
    -------
    LevelPlan or None
        ``None`` if no level has a slot and the chain needs one.

    Raises
    ------
    InvalidGraphError
        If a number is no integer or out of range, there is no level, or times may
        overflow.
    SolverUnsuitableError
        If the tables would take more than ``max_table_bytes``, or the plan has too many
        operations.

    Notes
    -----
    Time O(length^2 * sum(slots)), memory O(length * sum(slots)) numbers; slots beyond
    ``length`` do not count.

    References
    ----------
    J. Herrmann, G. Pallez (Aupy). H-Revolve: a framework for adjoint computation on
    synchronous hierarchical platforms. ACM TOMS 46(2), 2020.

    Examples
    --------
    >>> host = StorageLevel(slots=3, write_ns=2, read_ns=2)
    >>> levels = [StorageLevel(slots=1), host]
    >>> [plan_hrevolve(l, levels).cost_ns for l in range(9)]
    [1, 3, 6, 10, 15, 19, 23, 28, 32]
    """
    checked = checked_records("levels", levels, StorageLevel, error=InvalidGraphError)
    levels = cast("Sequence[StorageLevel]", checked)
    max_table_bytes = checked_table_bytes(max_table_bytes)
    if not levels:
        msg = "HRevolve needs at least one storage level; got none"
        raise InvalidGraphError(msg)
    writes = [level.write_ns for level in levels]
    reads = [level.read_ns for level in levels]
    length = _check(length, forward_ns, backward_ns, [*writes, *reads])
    slots = [min(level.slots, length) for level in levels]
    needed = 2 * 8 * (length + 1) * (sum(slots) + len(slots))
    if needed > max_table_bytes:
        msg = (
            f"the tables of HRevolve for {length} stages and {slots} slots take "
            f"{format_bytes(needed)}, more than the limit of "
            f"{format_bytes(max_table_bytes)}; use fewer slots or DiskRevolve"
        )
        raise SolverUnsuitableError(msg)
    found = hrevolve_plan(length, slots, writes, reads, forward_ns, backward_ns)
    if found is None:
        return None
    return _plan(length, slots[0], found)


def plan_disk_revolve(
    length: int,
    memory_slots: int,
    disk: StorageLevel,
    *,
    forward_ns: int = 1,
    backward_ns: int = 1,
) -> LevelPlan:
    """Return a schedule of least total time with memory slots and an unlimited disk.

    Parameters
    ----------
    length
        Number of forward stages, 0 to
        :data:`~remat.algorithms.chains.conventions.MAX_STAGES`.
    memory_slots
        Slots in memory, at no cost; at least 0.
    disk
        Times of the second level; its ``slots`` are not looked at.
    forward_ns, backward_ns
        Time of one stage, at least 0.

    Raises
    ------
    InvalidGraphError
        If a number is no integer or out of range, or times may overflow.
    SolverUnsuitableError
        If the plan has too many operations.

    Notes
    -----
    Time O(length^2), memory O(length).

    References
    ----------
    G. Aupy, J. Herrmann, P. Hovland, Y. Robert. Optimal multistage algorithm for
    adjoint computation. SIAM J. Sci. Comput. 38(3), 2016.

    Examples
    --------
    >>> disk = StorageLevel(slots=0, write_ns=5, read_ns=5)
    >>> [plan_disk_revolve(l, 1, disk).cost_ns for l in range(9)]
    [1, 3, 6, 10, 15, 21, 28, 34, 39]
    """
    checked_record("disk", disk, StorageLevel, error=InvalidGraphError)
    length = _check(length, forward_ns, backward_ns, [disk.write_ns, disk.read_ns])
    in_memory = [
        INFINITE if count is None else count * forward_ns + (stages + 1) * backward_ns
        for stages, count in enumerate(memory_forwards(length, memory_slots))
    ]
    found = disk_revolve_plan(
        in_memory, disk.write_ns, disk.read_ns, forward_ns, backward_ns
    )
    return _plan(length, memory_slots, found)


def memory_forwards(length: int, slots: int) -> list[int | None]:
    """Return what ``revolve_forwards`` counts, for chains up to this length."""
    length = checked_length(length)
    slots = checked_integer("memory_slots", slots, least=0, error=InvalidGraphError)
    return [revolve_forwards(stages, slots) for stages in range(length + 1)]


def checked_length(length: object) -> int:
    """Return the length of a chain that is planned, or raise ``InvalidGraphError``."""
    return checked_integer(
        "length", length, least=0, most=MAX_STAGES, error=InvalidGraphError
    )


def _check(
    length: int, forward_ns: int, backward_ns: int, copies: Sequence[int]
) -> int:
    length = checked_length(length)
    for label, time_ns in (("forward_ns", forward_ns), ("backward_ns", backward_ns)):
        checked_integer(
            label, time_ns, least=0, most=LARGEST_TOTAL, error=InvalidGraphError
        )
    # Nothing costs more than advancing from x_0 for every single backward stage.
    per_stage = (length + 1) * forward_ns + backward_ns + sum(copies)
    check_worst_ns((length + 1) * per_stage)
    return length


def _plan(
    length: int, memory_slots: int, found: tuple[int, list[tuple[int, int, int]]]
) -> LevelPlan:
    cost, actions = found
    check_operations(
        sum(
            second - first
            if kind == ADVANCE
            else revolve_forwards(second - first, max(memory_slots, 1)) or 1
            for kind, first, second in actions
            if kind in {ADVANCE, REVERSE}
        )
    )
    operations: list[Operation] = []
    for kind, first, second in actions:
        if kind == ADVANCE:
            operations += [Forward(stage) for stage in range(first, second)]
        elif kind == BACKWARD:
            operations.append(Backward(first))
        elif kind == STORE:
            operations.append(Store(first, second))
        elif kind == LOAD:
            operations.append(Load(first, second))
        elif kind == REVERSE:
            piece = Piece(0, first, second + 1, max(memory_slots, 1))
            operations += reverse_segment(piece)
    turn = Backward(length)
    return LevelPlan(
        length=length,
        cost_ns=cost,
        operations=tuple(Turn() if op == turn else op for op in operations),
    )
