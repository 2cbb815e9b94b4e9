"""The exception tree: every error says what was found, what was needed, what to do.

All exceptions derive from :class:`RematError`, and each also derives from the
built-in type that fits it, so that callers who do not know this package still catch
what they expect.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat.core.schedule import Schedule


class RematError(Exception):
    """Base class of every error that this package raises on purpose."""


class InvalidGraphError(RematError, ValueError):
    """A training graph breaks a rule of the model of computation."""


class InvalidPlatformError(RematError, ValueError):
    """A platform description is inconsistent (devices, links, budgets)."""


class StateChangedError(RematError, RuntimeError):
    """Planning changed something that belongs to the caller; the message names it."""


class UnitError(RematError, ValueError):
    """A size or a time could not be parsed, or is out of range."""


class PlanWarning(UserWarning):
    """A promise of a plan cannot be kept as the model is called: why, and the cure."""


class BudgetError(RematError, ValueError):
    """No schedule fits the budget.

    Attributes
    ----------
    budget_bytes
        The budget that was asked for, in bytes.
    required_bytes
        The smallest budget for which a schedule is known, in bytes.
    required_by_device
        With several devices, budgets in bytes by the devices' names for which a
        schedule is known; empty if none is, and with one device.
    budget_by_device
        With several devices, what was asked for, in bytes by name, ``None`` for no
        limit; empty with one device.
    schedule
        A schedule that ``required_bytes`` are enough for, where one is known.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        required_bytes: int,
        required_by_device: Mapping[str, int] | None = None,
        budget_by_device: Mapping[str, int | None] | None = None,
        schedule: "Schedule | None" = None,
    ) -> None:
        super().__init__(message)
        self.schedule = schedule
        self.budget_bytes = budget_bytes
        self.required_bytes = required_bytes
        self.required_by_device = dict(required_by_device or {})
        self.budget_by_device = dict(budget_by_device or {})

    @property
    def is_known_to_fit(self) -> bool:
        """Whether a schedule is known all the same that fits what was asked for.

        A solver that was named, or had no more time, did not find it.
        """
        if not self.budget_by_device:
            return self.required_bytes <= self.budget_bytes
        return bool(self.required_by_device) and all(
            budget is None or self.required_by_device.get(name, 0) <= budget
            for name, budget in self.budget_by_device.items()
        )

    def __reduce__(self) -> tuple[Callable[..., "BudgetError"], tuple[str]]:
        # Without it, what multiprocessing sends back cannot be unpickled.
        make = partial(
            type(self),
            budget_bytes=self.budget_bytes,
            required_bytes=self.required_bytes,
            required_by_device=self.required_by_device,
            budget_by_device=self.budget_by_device,
            schedule=self.schedule,
        )
        return make, (str(self),)


class CaptureError(RematError, RuntimeError):
    """A model cannot be traced as one training graph.

    The message names the operation and the user's source line.
    """


class ProfileError(RematError, RuntimeError):
    """An operator could not be run alone to measure its cost."""


class PlanMismatchError(RematError, ValueError):
    """A saved plan was made for another model, shape or set of versions."""


class CertificateError(RematError, ValueError):
    """A certificate of a bound is none of this step, or proves less than is claimed."""


class SolverFault(RematError, RuntimeError):  # noqa: N818 - a fault of ours, not of the caller
    """A solver returned a schedule that the simulator refutes: a bug of ours."""


class SolverUnsuitableError(RematError, ValueError):
    """A solver was named that cannot treat this graph or platform."""


class ExecutionError(RematError, RuntimeError):
    """A plan cannot be run: a value or a device is not there, or the model is gone."""


class RaceError(RematError, RuntimeError):
    """Two queues could meet in one block as a plan runs: a fault of ours.

    Attributes
    ----------
    storage, device
        What lies in the block, and where.
    steps
        The positions in the schedule of the two accesses that have no order.
    """

    def __init__(
        self, message: str, *, storage: int, device: int, steps: tuple[int, int]
    ) -> None:
        super().__init__(message)
        self.storage = storage
        self.device = device
        self.steps = steps

    def __reduce__(self) -> tuple[Callable[..., "RaceError"], tuple[str]]:
        # Without it, what multiprocessing sends back cannot be unpickled.
        make = partial(
            type(self), storage=self.storage, device=self.device, steps=self.steps
        )
        return make, (str(self),)


class RankError(RematError, RuntimeError):
    """Processes that are to run one plan could not agree on it.

    Attributes
    ----------
    ranks
        Who failed, differs or did not come, by the ranks in the process group.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[Callable[..., "RankError"], tuple[str]]:
        # Without it, what multiprocessing sends back cannot be unpickled.
        return partial(type(self), ranks=self.ranks), (str(self),)


class FileFormatError(RematError, ValueError):
    """A file is missing, damaged, of another kind or version, or cannot be written."""


class UsageError(RematError, ValueError):
    """A command was called with something that does not exist or does not fit."""


class UnsupportedTorchError(RematError, ImportError):
    """The installed torch lacks what is used of it; the message says what."""


class MissingDependencyError(RematError, ImportError):
    """An optional package is absent; the message names the extra to install."""
