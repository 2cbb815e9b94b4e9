"""Constraint programs by index: intervals under a capacity, stopping, errors."""

import random
from collections.abc import Callable

import pytest
from tests.interrupts import interrupted

from remat.backends.cp_sat import CpModel
from remat.backends.highs_process import Settings
from remat.backends.mathopt import Incumbent, Outcome, Solution


def two_jobs(capacity: int) -> tuple[CpModel, list[int]]:
    """Return two jobs of 3 units of time, that take 2 and 3 of the capacity."""
    model = CpModel()
    starts: list[int] = []
    for demand in (2, 3):
        start, end = model.add_integer(0, 20), model.add_integer(0, 20)
        model.add_precedence(start, end, 3)
        model.add_interval(start, end, demand)
        model.add_cost(end, 1)
        starts.append(start)
    model.add_capacity(capacity)
    return model, starts


@pytest.mark.parametrize(("capacity", "cost"), [(5, 6), (4, 9)])
def test_intervals_share_a_capacity(capacity: int, cost: int):
    model, starts = two_jobs(capacity)
    found = model.solve(Settings())
    assert found.outcome is Outcome.OPTIMAL
    assert found.objective == found.bound == cost
    apart = abs(found.integer(starts[0]) - found.integer(starts[1])) >= 3
    assert apart == (capacity < 5)


def test_too_little_capacity_is_infeasible():
    found = two_jobs(2)[0].solve(Settings())
    assert found.outcome is Outcome.INFEASIBLE
    assert not found.values


def test_an_absent_interval_takes_nothing():
    model = CpModel()
    start, end, presence = (
        model.add_constant(0),
        model.add_constant(4),
        model.add_bool(),
    )
    model.add_interval(start, end, 9, presence)
    model.add_capacity(5)
    model.add_cost(presence, -1)
    found = model.solve(Settings())
    assert found.integer(presence) == 0


def test_conditions_choose_and_order():
    model = CpModel()
    condition, first, second = (model.add_bool() for _ in range(3))
    model.add_exactly_one([first, second], condition)
    early, late = model.add_choice([2, 7]), model.add_choice([1, 5])
    model.add_precedence(early, late, 1, literals=[first])
    model.add_some([first], condition)
    model.add_implication(first, condition)
    model.add_cost(condition, -10)
    model.add_cost(early, 1)
    model.add_cost(late, 1)
    found = model.solve(Settings())
    chosen = [found.integer(v) for v in (condition, first, second, early, late)]
    assert chosen == [1, 1, 0, 2, 5]


def test_no_time_means_no_answer():
    found = two_jobs(5)[0].solve(Settings(time_limit_s=0))
    assert found.outcome is Outcome.UNKNOWN
    assert found.is_over_time


def test_wrong_numbers_are_named():
    model = CpModel()
    with pytest.raises(ValueError, match="bounds 2, 1"):
        model.add_integer(2, 1)
    with pytest.raises(ValueError, match="no value to take"):
        model.add_choice([])


def hard() -> CpModel:
    """Return jobs of random demands whose last end is to be early: a bin packing."""
    draw = random.Random(1)
    model = CpModel()
    last = model.add_integer(0, 10_000)
    for _ in range(60):
        start, end = model.add_integer(0, 10_000), model.add_integer(0, 10_000)
        model.add_precedence(start, end, draw.randint(5, 90))
        model.add_precedence(end, last, 0)
        model.add_interval(start, end, draw.randint(10, 60))
    model.add_capacity(100)
    model.add_cost(last, 1)
    return model


def solve_hard(begun: Callable[[], None]) -> tuple[Solution, Incumbent]:
    told: list[Incumbent] = []

    def tell(incumbent: Incumbent) -> None:
        told.append(incumbent)
        if incumbent.gap is not None:
            begun()

    return hard().solve(Settings(), tell), told[-1]


def test_ctrl_c_returns_the_incumbent():
    found, told = interrupted(solve_hard)
    assert found.is_interrupted
    assert found.outcome is Outcome.FEASIBLE
    assert found.objective is not None
    assert 0 < found.bound <= found.objective
    assert told.gap is not None


def test_the_same_question_has_the_same_answer():
    answers = {tuple(two_jobs(4)[0].solve(Settings(seed=3)).values) for _ in range(2)}
    assert len(answers) == 1
