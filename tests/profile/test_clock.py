"""Waiting for a core is no cost of an operator that runs on one thread."""

import time
from collections.abc import Generator

import pytest
import torch

from remat.profile import OperatorCall, profile_operators
from remat.profile.clock import operator_clock
from remat.profile.estimate import _fastest_ns

WAIT_S = 0.02


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Generator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def waiting(x: torch.Tensor) -> torch.Tensor:
    """Do nothing for a while, as an operator does that has no core."""
    time.sleep(WAIT_S)
    return x + 1


def working(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def is_waiting_counted(time_ns: int) -> bool:
    return time_ns > WAIT_S * 1e9 / 2


def test_time_of_an_operator(threads: int) -> None:
    (cost,) = profile_operators([OperatorCall(waiting, (torch.ones(3),))])
    assert is_waiting_counted(cost.cost_ns) == (threads > 1)


def test_time_for_measured_rates(threads: int) -> None:
    found = _fastest_ns(lambda: waiting(torch.ones(3)), torch.device("cpu"))
    assert is_waiting_counted(found) == (threads > 1)


def test_work_is_counted_on_any_number_of_threads(threads: int) -> None:
    clock = operator_clock()
    start = clock()
    working(WAIT_S)
    assert clock() - start >= WAIT_S * 1e9, threads
