"""The exception tree: one base class, and the built-in type that fits each."""

import pickle

import pytest

from remat.core import errors
from remat.core.errors import BudgetError, RematError

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type)
    and issubclass(value, Exception)
    and not issubclass(value, Warning)
]


def test_there_are_errors():
    assert len(ALL) > 10


@pytest.mark.parametrize("error", ALL)
def test_every_error_is_ours_and_documented(error: type[Exception]):
    assert issubclass(error, RematError)
    assert error.__doc__


@pytest.mark.parametrize("error", [e for e in ALL if e is not RematError])
def test_every_error_is_also_what_callers_expect(error: type[Exception]):
    assert issubclass(error, ValueError | RuntimeError | ImportError | OSError)


def budget_error() -> BudgetError:
    return BudgetError("8 bytes are too few", budget_bytes=8, required_bytes=9)


def test_a_budget_error_carries_its_numbers():
    error = budget_error()
    assert str(error) == "8 bytes are too few"
    assert (error.budget_bytes, error.required_bytes) == (8, 9)


def test_a_budget_error_survives_another_process():
    copy = pickle.loads(pickle.dumps(budget_error()))
    assert str(copy) == "8 bytes are too few"
    assert (copy.budget_bytes, copy.required_bytes) == (8, 9)
