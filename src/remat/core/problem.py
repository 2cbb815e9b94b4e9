"""Problems, results, and what a status proves."""

import math
import sys
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from remat.core.checks import (
    checked_number,
    checked_record,
    keep_integers,
    keep_words,
    shown,
)
from remat.core.errors import UnitError
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, check_platform


class Status(StrEnum):
    """What a solver has proved; the schedule class is the solver's own."""

    OPTIMAL = "optimal"
    """A schedule is given; no cheaper one of the solver's class fits."""

    FEASIBLE = "feasible"
    """A schedule is given; nothing is proved about cheaper ones beyond the bound."""

    INFEASIBLE = "infeasible"
    """No schedule is given; it is proved that none of the class fits."""

    UNKNOWN = "unknown"
    """No schedule is given and nothing is proved."""

    @property
    def has_schedule(self) -> bool:
        """Whether a result of this status carries a schedule."""
        return self in {Status.OPTIMAL, Status.FEASIBLE}


class StopReason(StrEnum):
    """Why a solver stopped."""

    COMPLETED = "completed"
    TIME_LIMIT = "time limit"
    INTERRUPTED = "interrupted"


class Objective(StrEnum):
    """What is to be small."""

    SERIAL = "serial"
    """The sum of all runs and copies, one after the other."""

    OVERLAPPED = "overlapped"
    """The end of the last step when devices and links work at the same time."""


ObjectiveName = Literal["serial", "overlapped"]
"""The name of an objective, as it is given in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Train ``graph`` on ``platform``, within the devices' budgets, in least time.

    Raises
    ------
    InvalidGraphError
        If the graph has no costs for a device's kind.
    InvalidPlatformError
        If a storage's home is not a device of the platform.
    ValueError
        If the graph is no graph, or the platform no platform.
    """

    graph: TrainingGraph
    platform: Platform

    def __post_init__(self) -> None:
        checked_record("graph of a problem", self.graph, TrainingGraph)
        checked_record("platform of a problem", self.platform, Platform)
        check_platform(self.graph, self.platform)

    @property
    def budget_bytes(self) -> int | None:
        """The budget of device 0, in bytes; ``None`` for no limit."""
        return self.platform.devices[0].budget_bytes


def check_time_limit(seconds: object) -> None:
    """Refuse what is no time limit that a user can mean.

    Parameters
    ----------
    seconds
        Seconds, finite and more than 0, or ``None`` for no limit.

    Raises
    ------
    TypeError
        If it is no number.
    UnitError
        If it is zero, negative, infinite or not a number.
    """
    needed = "a finite number of seconds above 0, or left out (None) for no limit"
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        msg = (
            f"time_limit is {seconds!r} ({type(seconds).__name__}); it must be {needed}"
        )
        raise TypeError(msg)
    # Integers may be larger than any float.
    if not 0 < seconds <= sys.float_info.max:
        msg = f"time_limit is {shown(seconds)}; it must be {needed}"
        raise UnitError(msg)


LARGEST_SEED = 2**31 - 1
"""What every solver library takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a solver must stop, and the seed of what it randomises.

    Parameters
    ----------
    deadline_s
        A value of ``time.monotonic()`` after which to stop, or ``None``.
    seed
        Two runs with one seed and no deadline give the same answer; 0 to
        :data:`LARGEST_SEED`.

    Raises
    ------
    ValueError
        If the deadline is no finite number, or the seed no integer or out of range.
    """

    deadline_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.deadline_s is not None:
            checked_number("deadline_s", self.deadline_s, least=-math.inf)
        keep_integers(self, "seed", least=0, most=LARGEST_SEED)

    @staticmethod
    def after(time_limit_s: float | None, seed: int = 0) -> "Limits":
        """Return limits that end ``time_limit_s`` seconds from now."""
        if time_limit_s is None:
            return Limits(seed=seed)
        return Limits(deadline_s=time.monotonic() + time_limit_s, seed=seed)

    def share(self, share: float) -> "Limits":
        """Return limits that end when this share, 0 to 1, of what is left is over."""
        remaining_s = self.remaining_s
        if remaining_s is None:
            return self
        return Limits.after(share * remaining_s, self.seed)

    def at_least(self, seconds: float) -> "Limits":
        """Return limits that end no sooner than this many seconds from now."""
        remaining_s = self.remaining_s
        if remaining_s is None or remaining_s >= seconds:
            return self
        return Limits.after(seconds, self.seed)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, at least 0; ``None`` for no deadline."""
        if self.deadline_s is None:
            return None
        return max(0.0, self.deadline_s - time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a solver answers, before it is judged.

    Raises
    ------
    ValueError
        If presence of a schedule and status disagree, the bound is no integer of at
        least 0, or a field is of another type.
    """

    status: Status
    schedule: Schedule | None = None
    bound_ns: int = 0
    stop_reason: StopReason = StopReason.COMPLETED
    message: str = ""

    def __post_init__(self) -> None:
        keep_words(self, Status, "status", of="a proposal")
        keep_words(self, StopReason, "stop_reason", of="a proposal")
        keep_integers(self, "bound_ns", of="a proposal", least=0)
        if self.schedule is not None:
            checked_record("schedule of a proposal", self.schedule, Schedule)
        if self.status.has_schedule is not (self.schedule is not None):
            msg = f"status {self.status} with schedule {self.schedule is not None}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A judged answer.

    Parameters
    ----------
    solver
        Name of the solver that found the schedule (or proved there is none).
    status, stop_reason, message
        What was proved, why the solver stopped, and its own words.
    schedule, trace
        The schedule and its replay, or ``None``.
    bound_ns
        Proved lower bound on the cost of any schedule of the solver's class.
    elapsed_s
        Time spent solving.
    candidates
        One line per solver that was tried, for people.
    """

    solver: str
    status: Status
    stop_reason: StopReason
    schedule: Schedule | None
    trace: Trace | None
    bound_ns: int
    message: str = ""
    elapsed_s: float = 0.0
    candidates: tuple[str, ...] = field(default=())

    @property
    def cost_ns(self) -> int | None:
        """Serial time of the schedule in nanoseconds, or ``None`` without one."""
        return None if self.trace is None else self.trace.serial_ns

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost, between 0 and 1, or ``None`` without a schedule."""
        if self.cost_ns is None:
            return None
        return (self.cost_ns - self.bound_ns) / self.cost_ns if self.cost_ns else 0.0
