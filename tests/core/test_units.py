"""Sizes and times: what is read, which way it is rounded, what is printed."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.core.errors import UnitError
from remat.core.units import (
    LARGEST_BUDGET,
    ceil_slots,
    floor_slots,
    format_bytes,
    format_ns,
    is_percentage,
    parse_budget,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8 GiB", 8 * 2**30),
        ("900MB", 900 * 10**6),
        ("1.5 KiB", 1536),
        ("0.5kB", 500),
        ("3 TiB", 3 * 2**40),
        ("3TB", 3 * 10**12),
        ("2 MiB", 2 * 2**20),
        ("1 GB", 10**9),
        ("12", 12),
        ("12 B", 12),
        ("1_000 B", 1000),
        ("  7 b  ", 7),
        ("+7", 7),
        ("8gib", 8 * 2**30),
        # Rounded down, exactly: a tenth of a KiB is 102.4 bytes.
        ("0.1 KiB", 102),
        ("0.9999999999999999999999 TiB", 2**40 - 1),
    ],
)
def test_text_is_read_exactly_and_rounded_down(text: str, size_bytes: int):
    assert parse_budget(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "whole_bytes", "size_bytes"),
    [
        ("60%", 1000, 600),
        ("60 %", 1001, 600),
        ("100%", 7, 7),
        ("0.1%", 10_000, 10),
        ("150%", 10, 15),
        ("33.3 %", 3 * 2**50, 3 * 2**50 * 333 // 1000),
    ],
)
def test_a_percentage_is_of_the_whole(text: str, whole_bytes: int, size_bytes: int):
    assert parse_budget(text, whole_bytes=whole_bytes) == size_bytes
    assert is_percentage(text)


@given(st.integers(1, LARGEST_BUDGET))
def test_integers_are_bytes(size_bytes: int):
    assert parse_budget(size_bytes) == size_bytes
    assert not is_percentage(size_bytes)


def test_a_whole_changes_nothing_but_percentages():
    assert parse_budget("1 KiB", whole_bytes=10) == 1024
    assert not is_percentage("1 KiB")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a size"),
        ("GiB", "is not a size"),
        ("8 GiB!", "is not a size"),
        ("8 GiB 3", "is not a size"),
        ("1e9", "is not a size"),
        ("1.5.5", "is not a size"),
        (".5 GiB", "is not a size"),
        ("nan", "is not a size"),
        ("inf", "is not a size"),
        ("0x10", "is not a size"),
        ("8 GiB\n\n;", "is not a size"),
        ("9" * 5000, "is not a size"),
        ("8 GiX", "unknown unit 'GiX'"),
        ("8 Gb/s", "is not a size"),
        ("8 bytes", "unknown unit 'bytes'"),
        ("60%", "nothing says of what"),
        ("0", "must be positive"),
        ("0 GiB", "must be positive"),
        ("-8 GiB", "must be positive"),
        ("0.5 B", "is 0 bytes"),
    ],
)
def test_bad_text_is_refused(text: str, words: str):
    with pytest.raises(UnitError, match=words) as caught:
        parse_budget(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("budget", [0, -1, -(2**70)])
def test_budgets_are_positive(budget: int):
    with pytest.raises(UnitError, match="must be positive"):
        parse_budget(budget)


def test_a_share_of_nothing_is_refused():
    with pytest.raises(UnitError, match="'60%' is 0 bytes"):
        parse_budget("60%", whole_bytes=1)


@pytest.mark.parametrize("budget", [True, False, 1.5, None, [1], b"8 GiB"])
def test_other_types_are_refused(budget: object):
    with pytest.raises(UnitError, match="integer of bytes or text") as caught:
        parse_budget(budget)  # type: ignore[arg-type]
    assert type(budget).__name__ in str(caught.value)


@given(st.integers(0, 2**60), st.integers(1, 2**40))
def test_slots_hold_sizes_and_fit_budgets(size_bytes: int, slot_bytes: int):
    up, down = ceil_slots(size_bytes, slot_bytes), floor_slots(size_bytes, slot_bytes)
    assert (up - 1) * slot_bytes < size_bytes <= up * slot_bytes
    assert down * slot_bytes <= size_bytes < (down + 1) * slot_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-1024, "-1.00 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4096.00 TiB"),
        # What would print as 1024.00 of a unit is 1.00 of the next.
        (2**20 - 1, "1.00 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**20 - 2**10, "1023.00 KiB"),
    ],
)
def test_sizes_for_people(size_bytes: int, text: str):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 us"),
        (-2500, "-2.50 us"),
        (10**6, "1.00 ms"),
        (10**9, "1.00 s"),
        (90 * 10**9, "90.00 s"),
        (999_999, "1.00 ms"),
        (999_999_999, "1.00 s"),
    ],
)
def test_times_for_people(time_ns: int, text: str):
    assert format_ns(time_ns) == text


@given(st.integers(0, 2**62))
def test_a_printed_size_is_within_half_a_hundredth(size_bytes: int):
    number, unit = format_bytes(size_bytes).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    error = abs(Fraction(number) - Fraction(size_bytes, factor))
    assert error <= Fraction(51, 10_000)
