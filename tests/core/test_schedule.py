"""Schedules are plain data."""

from dataclasses import FrozenInstanceError

import pytest

from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule

SCHEDULE = Schedule(
    (
        Compute(2),
        Compute(0, 1),
        Discard(3),
        Copy(2, 0, 1),
        Boundary(),
        Compute(2),
        Compute(2, 1),
    )
)


def test_computes_are_in_order_and_repeat():
    assert SCHEDULE.computes == (2, 0, 2, 2)


def test_only_runs_after_the_first_count_as_recomputation():
    assert SCHEDULE.recompute_counts() == {2: 2}
    assert Schedule(()).recompute_counts() == {}


def test_steps_are_equal_by_value_and_by_kind():
    assert Compute(1) == Compute(1, 0)
    assert Compute(1) != Discard(1)
    assert Boundary() == Boundary()
    assert len({Compute(1), Compute(1, 0), Discard(1), Boundary(), Boundary()}) == 3


def test_steps_cannot_change():
    with pytest.raises(FrozenInstanceError):
        Compute(1).op = 2  # type: ignore[misc]
