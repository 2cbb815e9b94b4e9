"""Memory conventions of the unit-size problems: which values count, and when."""

from dataclasses import dataclass

from remat.core.checks import checked_integer, checked_record, keep_flags
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.units import LARGEST_TOTAL

MAX_STAGES = 2**20
"""Most stages of a chain that is planned."""

MAX_OPERATIONS = 10_000_000
"""Most operations of a plan: longer ones are counted, and not written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConvention:
    """What one unit of memory pays for, in chains and joins of values of equal size.

    The literature differs in these three points and rarely names them; answers of
    different conventions differ by an off-by-one that is not the same everywhere.

    Parameters
    ----------
    overwrites_inputs
        Whether an operation may write its outputs over the inputs it releases
        (*in-place*: memory during it is the larger of before and after), or has both
        at once (*strict*, as in every deep-learning framework).
    counts_gradients
        Whether a live gradient takes a unit, as an activation does.
    counts_inputs
        Whether the input of a branch takes a unit until its last use, or is *pinned*:
        resident for the whole step and paid for elsewhere.

    Raises
    ------
    InvalidGraphError
        If a field is neither true nor false.

    Examples
    --------
    >>> IN_PLACE == MemoryConvention(overwrites_inputs=True)
    True
    """

    overwrites_inputs: bool = False
    counts_gradients: bool = True
    counts_inputs: bool = True

    def __post_init__(self) -> None:
        keep_flags(
            self,
            "overwrites_inputs",
            "counts_gradients",
            "counts_inputs",
            error=InvalidGraphError,
        )

    @property
    def gradient_units(self) -> int:
        """Units of a live gradient: 1 or 0."""
        return int(self.counts_gradients)

    @property
    def transient_units(self) -> int:
        """Units that an operation of the backward phase needs beyond its results.

        One for strict accounting: the output beside the input. Without counted
        gradients a backward operation needs none, and forward operations are
        accounted for one by one.
        """
        return int(not self.overwrites_inputs and self.counts_gradients)

    @property
    def move_needs_two(self) -> bool:
        """Whether two free units are needed to advance past an uncounted input."""
        return not self.overwrites_inputs and not self.counts_gradients

    @property
    def numbers(self) -> tuple[int, int, bool, bool]:
        """The convention as :mod:`remat.algorithms.chains.join_tables` takes it."""
        return (
            self.gradient_units,
            self.transient_units,
            self.counts_inputs,
            self.move_needs_two,
        )


STRICT = MemoryConvention()
"""Outputs beside inputs, everything counts: what an executor of tensors has."""

IN_PLACE = MemoryConvention(overwrites_inputs=True)
"""Outputs may replace inputs, everything counts: the pebble game."""

CHECKPOINTS_ONLY = MemoryConvention(overwrites_inputs=True, counts_gradients=False)
"""Gradients are free; on a chain, Revolve with one unit for the running value."""


def checked_convention(convention: object) -> None:
    """Refuse what is no :class:`MemoryConvention`."""
    checked_record("convention", convention, MemoryConvention, error=InvalidGraphError)


def checked_budget(budget_bytes: object) -> int:
    """Return a budget of a program on stages, in bytes: 0 or more.

    More than :data:`~remat.core.units.LARGEST_TOTAL` is no different from that: no
    chain holds more.
    """
    budget = checked_integer(
        "budget_bytes", budget_bytes, least=0, error=InvalidGraphError
    )
    return min(budget, LARGEST_TOTAL)


def check_operations(count: int) -> None:
    """Refuse plans of more than :data:`MAX_OPERATIONS` operations.

    Raises
    ------
    SolverUnsuitableError
        If there are more.
    """
    if count > MAX_OPERATIONS:
        msg = (
            f"the plan has {count:_} operations or more; at most {MAX_OPERATIONS:_} are "
            "written down: give more memory, or fewer stages"
        )
        raise SolverUnsuitableError(msg)
