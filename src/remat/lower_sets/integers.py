"""Integers as they are given: Python's, numpy's, and what is none."""

import operator
from typing import SupportsIndex


def integer_of(value: object) -> int | None:
    """Return an integer of any kind as ``int``; ``None`` for what is none.

    Truth values are none: where a number is needed they are a mistake.

    Examples
    --------
    >>> integer_of(19), integer_of(19.0), integer_of("19"), integer_of(True)
    (19, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # Arrays offer it, and refuse unless they hold one integer.
        return None


def checked_integer(label: str, value: object, least: int | None = None) -> int:
    """Return an integer of any kind as ``int``.

    Parameters
    ----------
    label
        What the value is, as the message begins.
    value
        The value.
    least
        The smallest that is allowed, if there is one.

    Raises
    ------
    ValueError
        If it is no integer, or less than ``least``.
    """
    number = integer_of(value)
    if number is None:
        msg = f"{label} is {value!r}; it must be an integer"
        raise ValueError(msg)
    if least is not None and number < least:
        msg = f"{label} is {number}; it must be at least {least}"
        raise ValueError(msg)
    return number
