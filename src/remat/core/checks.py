"""Checks of what callers pass in: integers, numbers, flags and words, in one place.

Integers of any kind are taken, such as numpy's, and kept as ``int``. Floats are not,
3.0 neither, and truth values are no numbers: where one is needed they are a mistake.
Whatever is refused is one exception, a ``ValueError`` or the error of the module that
asks, and its message names the argument, what it is, and what it must be.
"""

import math
import operator
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import SupportsIndex, TypeVar, cast

W = TypeVar("W", bound=StrEnum)

LARGEST = 2**63 - 1
"""Largest integer of a field that has no smaller limit: the core counts to here."""

_LONGEST = 60
_MOST_BITS = 256


def shown(value: object) -> str:
    """Return a value for a message, however large it is.

    Examples
    --------
    >>> shown("a"), shown(1 << 20_000), shown([0] * 1000)[-6:]
    ("'a'", 'an integer of 20001 bits', ' 0,...')
    """
    # Python refuses to print integers of thousands of digits.
    if type(value) is int:
        bits = value.bit_length()
        return f"{value:_}" if bits <= _MOST_BITS else f"an integer of {bits} bits"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def integer_of(value: object) -> int | None:
    """Return an integer of any kind as ``int``; ``None`` for what is none.

    Examples
    --------
    >>> integer_of(19), integer_of(19.0), integer_of("19"), integer_of(True)
    (19, None, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # Arrays offer it, and refuse unless they hold one integer.
        return None


def checked_integer(
    label: str,
    value: object,
    *,
    least: int | None = None,
    most: int | None = None,
    error: type[ValueError] = ValueError,
) -> int:
    """Return an integer of any kind as ``int``.

    Parameters
    ----------
    label
        What the value is, as the message begins.
    value
        The value.
    least, most
        The smallest and the largest that are allowed, if there are such.
    error
        What is raised.

    Raises
    ------
    ValueError
        Or ``error``, if it is no integer, less than ``least`` or more than ``most``.

    Examples
    --------
    >>> checked_integer("slots", 2.5, least=1)
    Traceback (most recent call last):
    ...
    ValueError: slots is 2.5; it must be an integer of at least 1
    """
    number = integer_of(value)
    if (
        number is not None
        and (least is None or number >= least)
        and (most is None or number <= most)
    ):
        return number
    bounds = "" if least is None else f" of at least {least:_}"
    if most is not None:
        bounds += f"{' and' if bounds else ' of'} at most {most:_}"
    msg = f"{label} is {shown(value)}; it must be an integer{bounds}"
    raise error(msg)


def checked_integers(
    label: str,
    values: object,
    *,
    least: int | None = None,
    most: int | None = None,
    error: type[ValueError] = ValueError,
) -> tuple[int, ...]:
    """Return a list of integers of any kind as a tuple of ``int``.

    Parameters and errors are those of :func:`checked_integer`.
    """
    entries = checked_list(label, values, error=error)
    for value in entries:
        if type(value) is not int:
            break
        if (least is not None and value < least) or (most is not None and value > most):
            break
    else:  # As a rule; a graph has very many.
        return cast("tuple[int, ...]", entries)
    return tuple(
        checked_integer(
            f"entry {index} of {label}", value, least=least, most=most, error=error
        )
        for index, value in enumerate(entries)
    )


def checked_nonempty(label: str, values: tuple[object, ...]) -> None:
    """Refuse a list without an entry."""
    if not values:
        msg = f"{label} is empty; give at least one"
        raise ValueError(msg)


def entries_of(given: object) -> tuple[object, ...] | None:
    """Return the entries of a list of any kind; ``None`` for what is none."""
    if type(given) is tuple:
        return cast("tuple[object, ...]", given)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        return None
    try:
        return tuple(cast("Iterable[object]", given))
    except TypeError:  # Arrays without a dimension offer it, and refuse.
        return None


def checked_list(
    label: str, values: object, *, error: type[ValueError] = ValueError
) -> tuple[object, ...]:
    """Return the entries of a list of any kind, or raise ``error`` for what is none."""
    found = entries_of(values)
    if found is None:
        msg = f"{label} is {shown(values)}; it must be a list"
        raise error(msg)
    return found


def checked_records(
    label: str,
    values: object,
    kind: type[object] | tuple[type[object], ...],
    *,
    error: type[ValueError] = ValueError,
) -> tuple[object, ...]:
    """Return the entries of a list that holds instances of ``kind`` only."""
    found = checked_list(label, values, error=error)
    for index, value in enumerate(found):
        if not isinstance(value, kind):  # As a rule it is, and there are very many.
            checked_record(f"entry {index} of {label}", value, kind, error=error)
    return found


def checked_record(
    label: str,
    value: object,
    kind: type[object] | tuple[type[object], ...],
    *,
    error: type[ValueError] = ValueError,
) -> None:
    """Refuse what is no instance of ``kind``."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        needed = " or ".join(one.__name__ for one in kinds)
        msg = f"{label} is {shown(value)}; it must be of type {needed}"
        raise error(msg)


def checked_number(
    label: str,
    value: object,
    *,
    least: float = 0.0,
    most: float = math.inf,
    error: type[ValueError] = ValueError,
) -> float:
    """Return a finite number, an integer or not, as ``float``.

    Parameters and errors are those of :func:`checked_integer`.
    """
    number = _float_of(value)
    if number is None or not math.isfinite(number) or not least <= number <= most:
        bounds = "" if least == -math.inf else f" of at least {least:g}"
        if most < math.inf:
            bounds += f"{' and' if bounds else ' of'} at most {most:g}"
        msg = f"{label} is {shown(value)}; it must be a finite number{bounds}"
        raise error(msg)
    return number


def _float_of(value: object) -> float | None:
    if isinstance(value, float):  # numpy's doubles are floats too.
        return float(value)
    number = integer_of(value)
    try:
        return None if number is None else float(number)
    except OverflowError:
        return math.inf


def checked_flag(
    label: str, value: object, *, error: type[ValueError] = ValueError
) -> bool:
    """Return ``value`` if it is true or false, and no number or text for it."""
    if not isinstance(value, bool):
        msg = f"{label} is {shown(value)}; it must be True or False"
        raise error(msg)
    return value


def checked_text(
    label: str,
    value: object,
    *,
    may_be_empty: bool = True,
    error: type[ValueError] = ValueError,
) -> str:
    """Return ``value`` if it is text."""
    if not isinstance(value, str) or not (value or may_be_empty):
        needed = "text" if may_be_empty else "text, and not empty"
        msg = f"{label} is {shown(value)}; it must be {needed}"
        raise error(msg)
    return value


def checked_callable(label: str, value: object) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        msg = f"{label} is {shown(value)}; it must be a function"
        raise TypeError(msg)


def checked_word(
    label: str, value: object, words: type[W], *, error: type[ValueError] = ValueError
) -> W:
    """Return the member of ``words`` that ``value`` is, or is the word of.

    Examples
    --------
    >>> class Size(StrEnum):
    ...     SMALL = "small"
    ...     LARGE = "large"
    >>> checked_word("size", "small", Size)
    <Size.SMALL: 'small'>
    >>> checked_word("size", "huge", Size)
    Traceback (most recent call last):
    ...
    ValueError: size is 'huge'; it must be one of 'small', 'large'
    """
    if isinstance(value, str) and value in list(words):
        return words(value)
    known = ", ".join(repr(str(word)) for word in words)
    msg = f"{label} is {shown(value)}; it must be one of {known}"
    raise error(msg)


def keep_integers(
    record: object,
    *names: str,
    of: str = "",
    least: int | None = None,
    most: int | None = None,
    optional: bool = False,
    error: type[ValueError] = ValueError,
) -> None:
    """Check fields of a frozen dataclass, and keep them as ``int``.

    Parameters
    ----------
    record
        The instance, in its ``__post_init__``.
    names
        The fields.
    of
        What the record is, for messages, such as ``"storage 'x'"``.
    least, most, error
        As for :func:`checked_integer`.
    optional
        Whether ``None`` is allowed as well.
    """
    for name in names:
        value = getattr(record, name)
        if type(value) is int:
            if value > LARGEST and most is None:
                most = LARGEST
            if (least is None or value >= least) and (most is None or value <= most):
                continue
        elif value is None and optional:
            continue
        label = f"{name} of {of}" if of else name
        number = checked_integer(label, value, least=least, most=most, error=error)
        object.__setattr__(record, name, number)


def keep_integer_lists(
    record: object,
    *names: str,
    of: str,
    least: int | None = None,
    most: int | None = None,
    error: type[ValueError] = ValueError,
) -> None:
    """Check fields of a frozen dataclass, and keep them as tuples of ``int``."""
    for name in names:
        label, values = f"{name} of {of}", getattr(record, name)
        numbers = checked_integers(label, values, least=least, most=most, error=error)
        object.__setattr__(record, name, numbers)


def keep_records(
    record: object,
    kind: type[object] | tuple[type[object], ...],
    name: str,
    *,
    of: str,
    error: type[ValueError] = ValueError,
) -> None:
    """Check a field that lists instances of ``kind``, and keep it as a tuple."""
    records = checked_records(
        f"{name} of {of}", getattr(record, name), kind, error=error
    )
    object.__setattr__(record, name, records)


def keep_flags(
    record: object, *names: str, of: str = "", error: type[ValueError] = ValueError
) -> None:
    """Check fields of a dataclass that are true or false; see :func:`keep_integers`."""
    for name in names:
        checked_flag(
            f"{name} of {of}" if of else name, getattr(record, name), error=error
        )


def keep_words(
    record: object,
    words: type[StrEnum],
    *names: str,
    of: str = "",
    error: type[ValueError] = ValueError,
) -> None:
    """Check fields of a frozen dataclass, and keep them as members of ``words``."""
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, words):
            word = checked_word(
                f"{name} of {of}" if of else name, value, words, error=error
            )
            object.__setattr__(record, name, word)


def keep_seconds(
    record: object,
    *names: str,
    of: str = "",
    optional: bool = False,
    error: type[ValueError] = ValueError,
) -> None:
    """Check fields of a dataclass that are finite times above 0, in seconds."""
    for name in names:
        value = getattr(record, name)
        if value is None and optional:
            continue
        number = _float_of(value)
        if number is None or not 0 < number < math.inf:
            msg = (
                f"{name}{f' of {of}' if of else ''} is {shown(value)}; it must be a "
                f"finite number of seconds above 0{' or None' if optional else ''}"
            )
            raise error(msg)


def require(holds: bool, message: str) -> None:  # noqa: FBT001 - it is a condition
    """Raise a ``ValueError`` with the message unless the condition holds."""
    if not holds:
        raise ValueError(message)
