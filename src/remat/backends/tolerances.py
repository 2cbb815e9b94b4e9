"""How far a solver's numbers may be off, and what that leaves of its bounds."""

RELATIVE_TOLERANCE = 1e-6
"""A bound within this share of the cost counts as met: solvers work in floats."""


def safe_bound_ns(raw_ns: float, divisor_ns: int, tolerance_ns: float) -> int:
    """Return a bound in whole costs: what a solver proved, less its tolerance.

    Parameters
    ----------
    raw_ns
        The solver's bound; minus infinity if it has none.
    divisor_ns
        Every cost is a multiple of this, at least 1.
    tolerance_ns
        What the solver may be wrong by.

    Examples
    --------
    >>> safe_bound_ns(20.2, 5, 0.001), safe_bound_ns(20.0000001, 5, 0.001)
    (25, 20)
    >>> safe_bound_ns(float("-inf"), 5, 0.001)
    0
    """
    if raw_ns <= tolerance_ns:
        return 0
    return -int(-(raw_ns - tolerance_ns) // divisor_ns) * divisor_ns
