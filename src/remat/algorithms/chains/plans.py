"""Plans of unit-size chains and joins: pieces, operations, and what they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from remat.algorithms.chains.conventions import MemoryConvention
from remat.algorithms.chains.operations import Backward, Forward, Turn, UnitOperation


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of a branch between two stored values, reversed in one go.

    Parameters
    ----------
    branch
        Index of the branch.
    base, end
        The segment is the stages ``base .. end - 1``; the value that stage ``base``
        reads is stored.
    free_units
        Units of memory to work in, besides the base and the gradient above.
    """

    branch: int
    base: int
    end: int
    free_units: int


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """A schedule of a chain or join of values of equal size.

    Parameters
    ----------
    lengths
        Number of stages of each branch.
    memory_units
        Units that the schedule was made for.
    convention
        What a unit pays for.
    forward_cost
        Cost of all forward runs: their number where every stage costs 1.
    pieces
        The segments in the order in which they are reversed, where the plan has one
        turn and no re-execution.
    operations
        Everything that runs, in order.
    """

    lengths: tuple[int, ...]
    memory_units: int
    convention: MemoryConvention
    forward_cost: int
    pieces: tuple[Piece, ...]
    operations: tuple[UnitOperation, ...]

    @classmethod
    def from_order(
        cls,
        *,
        lengths: Sequence[int],
        memory_units: int,
        convention: MemoryConvention,
        forward_cost: int,
        pieces: Sequence[Piece],
        backward_phase: Sequence[Forward | Backward],
    ) -> Self:
        """Return the plan that advances every branch once, turns, and goes back."""
        operations: list[UnitOperation] = [
            Forward(stage, branch)
            for branch in _sweep_order(lengths, pieces)
            for stage in range(lengths[branch])
        ]
        operations.append(Turn())
        operations += backward_phase
        return cls(
            lengths=tuple(lengths),
            memory_units=memory_units,
            convention=convention,
            forward_cost=forward_cost,
            pieces=tuple(pieces),
            operations=tuple(operations),
        )

    @cached_property
    def forward_count(self) -> int:
        """Number of forward runs."""
        return sum(isinstance(op, Forward) for op in self.operations)


def _sweep_order(lengths: Sequence[int], pieces: Sequence[Piece]) -> list[int]:
    """Return the order in which the branches advance to the turn.

    A branch whose last value is one stage from a stored one comes last: where outputs
    do not replace inputs and gradients are free, it alone needs no unit to move in
    when all others stand at the turn. In other conventions any order will do.
    """
    ends_short = {p.branch for p in pieces if p.end == lengths[p.branch] == p.base + 1}
    return sorted(range(len(lengths)), key=lambda branch: branch in ends_short)
