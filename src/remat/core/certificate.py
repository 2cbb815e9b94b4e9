"""What proves a lower bound on time; :mod:`remat.bounds.certificate` verifies it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proves how much time every schedule on one device takes at least.

    Parameters
    ----------
    version
        Of the rules by which rows are made.
    memory_bytes
        What it is proved for: beyond resident bytes, as much or less.
    moments
        Nodes of the moment program: ops by their indices, and the number of ops for the
        boundary; the end is left out.
    multipliers
        Pairs of a row of that program and its multiplier. Rows ascend; multipliers are
        integers of at least 0, in the units of the verifier.
    """

    version: int
    memory_bytes: int
    moments: tuple[int, ...]
    multipliers: tuple[tuple[int, int], ...]
