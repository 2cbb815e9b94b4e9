"""Parse and print sizes and times; the one place where bytes are divided.

Sizes are integers of bytes and times integers of nanoseconds everywhere. Quantised
algorithms round sizes up and budgets down, with :func:`ceil_slots` and
:func:`floor_slots`.
"""

import re
from fractions import Fraction
from math import floor

from remat.core.checks import checked_integer, integer_of, keep_integers, shown
from remat.core.errors import UnitError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
ANY_WHOLE_BYTES = 2**62
"""Stands for what 100 % means where a budget is only checked to be a size."""

LARGEST_BUDGET = 2**62
"""Most bytes of a budget."""

LARGEST_TOTAL = 2**53
"""Most bytes or nanoseconds (104 days) of a graph: what floats still count one by one,
and what may be repeated hundreds of times before 64 bits are full."""


def keep_amounts(
    record: object,
    *names: str,
    of: str,
    optional: bool = False,
    error: type[ValueError],
) -> None:
    """Check fields of a dataclass that are bytes or times of a graph.

    They are kept as integers of 0 to :data:`LARGEST_TOTAL`; see
    :func:`~remat.core.checks.keep_integers`.
    """
    keep_integers(
        record,
        *names,
        of=of,
        least=0,
        most=LARGEST_TOTAL,
        optional=optional,
        error=error,
    )


# Bounded, because Python refuses to read integers of thousands of digits.
_SIZE = re.compile(r"\s*([+-]?\d[\d_]{0,60}(?:\.\d{1,60})?)\s*([A-Za-z]*|%)\s*\Z")


def parse_budget(budget: int | str, *, whole_bytes: int | None = None) -> int:
    """Return the budget in bytes, rounded down.

    Parameters
    ----------
    budget
        A positive integer of bytes, at most :data:`LARGEST_BUDGET`, or text: a number
        with a unit (``"8 GiB"``, ``"900MB"``) or a percentage of ``whole_bytes``
        (``"60%"``).
    whole_bytes
        What 100 % means, in bytes; needed for percentages only.

    Raises
    ------
    UnitError
        If the text is not a size, the unit is unknown or that of bits (``"Gib"``), the
        result is not positive or too large, or a percentage is given without
        ``whole_bytes``.

    Examples
    --------
    >>> parse_budget("1.5 KiB"), parse_budget("2MB"), parse_budget(7)
    (1536, 2000000, 7)
    >>> parse_budget("60%", whole_bytes=1001)
    600
    """
    number = integer_of(budget)
    if number is None and not isinstance(budget, str):
        msg = (
            f"a budget is an integer of bytes or text such as '8 GiB', '900MB' or "
            f"'60%'; got {shown(budget)} ({type(budget).__name__})"
        )
        raise UnitError(msg)
    result = floor(_parse(str(budget), whole_bytes)) if number is None else number
    if result > LARGEST_BUDGET and not is_percentage(budget):
        msg = (
            f"the budget is {shown(result)} bytes; at most {LARGEST_BUDGET:_} "
            "are counted"
        )
        raise UnitError(msg)
    if result <= 0:
        is_negative_share = is_percentage(budget) and result < 0
        size_text = "" if is_negative_share else f" is {result:_} bytes"
        msg = f"the budget {shown(budget)}{size_text}; it must be positive"
        raise UnitError(msg)
    return result


def is_percentage(budget: int | str) -> bool:
    """Return whether ``budget`` is a percentage of another size."""
    return isinstance(budget, str) and budget.strip().endswith("%")


def _parse(text: str, whole_bytes: int | None) -> Fraction:
    match = _SIZE.match(text)
    known = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB or %"
    if match is None:
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        msg = f"{shown!r} is not a size; write a number and a unit ({known})"
        raise UnitError(msg)
    number = Fraction(match[1].replace("_", ""))
    if match[2] == "%":
        if whole_bytes is None:
            msg = f"{text!r} is a percentage, but nothing says of what; give bytes"
            raise UnitError(msg)
        return number * whole_bytes / 100
    if match[2][1:].endswith("b") and match[2][0].isupper():
        bytes_unit = f"{match[2][:-1]}B"
        msg = (
            f"{match[2]!r} in {text!r} is the unit of bits; for bytes write "
            f"{match[1]} {bytes_unit}"
        )
        raise UnitError(msg)
    unit = _UNITS.get(match[2].upper())
    if unit is None:
        msg = f"unknown unit {match[2]!r} in {text!r}; use {known}"
        raise UnitError(msg)
    return number * unit


def ceil_slots(size_bytes: int, slot_bytes: int) -> int:
    """Return the fewest slots that hold ``size_bytes``: sizes round up.

    Examples
    --------
    >>> ceil_slots(9, 8), ceil_slots(8, 8), ceil_slots(0, 8)
    (2, 1, 0)
    """
    if type(slot_bytes) is not int or slot_bytes < 1:
        slot_bytes = checked_integer("slot_bytes", slot_bytes, least=1, error=UnitError)
    return -(-size_bytes // slot_bytes)


def round_up(size_bytes: int, granule_bytes: int) -> int:
    """Return the smallest multiple of ``granule_bytes`` that holds ``size_bytes``.

    Examples
    --------
    >>> round_up(513, 512), round_up(512, 512), round_up(7, 1)
    (1024, 512, 7)
    """
    return ceil_slots(size_bytes, granule_bytes) * granule_bytes


def floor_slots(budget_bytes: int, slot_bytes: int) -> int:
    """Return the most slots that fit in ``budget_bytes``: budgets round down.

    Examples
    --------
    >>> floor_slots(9, 8), floor_slots(7, 8)
    (1, 0)
    """
    if type(slot_bytes) is not int or slot_bytes < 1:
        slot_bytes = checked_integer("slot_bytes", slot_bytes, least=1, error=UnitError)
    return budget_bytes // slot_bytes


def format_bytes(size_bytes: int) -> str:
    """Return a size for people, in binary units.

    Examples
    --------
    >>> format_bytes(512), format_bytes(1536), format_bytes(-3 * 2**30)
    ('512 B', '1.50 KiB', '-3.00 GiB')
    """
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    size = size_bytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        # Compared as printed: what would read 1024.00 MiB is 1.00 GiB.
        if round(abs(size), 2) < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_ns(time_ns: int) -> str:
    """Return a time for people.

    Examples
    --------
    >>> format_ns(999), format_ns(1_500), format_ns(2_500_000), format_ns(10**10)
    ('999 ns', '1.50 us', '2.50 ms', '10.00 s')
    """
    if abs(time_ns) < 1000:
        return f"{time_ns} ns"
    for factor, unit in ((10**3, "us"), (10**6, "ms")):
        # Compared as printed: what would read 1000.00 ms is 1.00 s.
        if round(abs(time_ns) / factor, 2) < 1000:
            return f"{time_ns / factor:.2f} {unit}"
    return f"{time_ns / 10**9:.2f} s"
