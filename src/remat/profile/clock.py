"""The clock that operators on the CPU are timed with."""

import time
from collections.abc import Callable

import torch


def operator_clock() -> Callable[[], int]:
    """Return a clock, in nanoseconds, for operators that run on the CPU.

    On one thread it counts the time that the thread itself ran: what an operator waits
    for a core that another process uses is no cost of the operator, and no number of
    samples tells it apart where the machine is busy throughout. Operators on several
    threads wait for each other, so that there only the time that passes is theirs.
    """
    return time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
