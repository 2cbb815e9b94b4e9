"""Memory conventions of the unit-size problems: which values count, and when."""

from dataclasses import dataclass


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
    """

    overwrites_inputs: bool = False
    counts_gradients: bool = True
    counts_inputs: bool = True

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
        """The convention as :mod:`remat.chains.join_tables` takes it."""
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
