"""What can go wrong on the simulated device, switched on by tests."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class DeviceLostError(RuntimeError):
    """The simulated device has disappeared: nothing on it runs any more."""


@dataclass(slots=True)
class Faults:
    """Switches. All are off at first.

    Parameters
    ----------
    failing_request
        How many requests for memory from now on are served before one fails as if
        memory had run out, or ``None``.
    copies_are_late
        Whether what is issued to streams other than the default one waits until
        somebody waits for it; else it happens when it is issued.
    random_operator
        Name of an operator (``"aten.mm"``) of whose results every second one differs in
        the last bit, or ``None``.
    is_lost
        Whether the device has disappeared.
    """

    failing_request: int | None = None
    copies_are_late: bool = True
    random_operator: str | None = None
    is_lost: bool = False
    _run_count: int = 0

    @contextmanager
    def set(self, **switches: Any) -> Generator[None]:
        """Set switches, and put them back at the end."""
        before = {name: getattr(self, name) for name in switches}
        for name, value in switches.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def on_request(self) -> bool:
        """Count a request for memory, and return whether it is to fail."""
        self.on_use()
        if self.failing_request is None:
            return False
        self.failing_request -= 1
        return self.failing_request < 0

    def disturbs(self, operator: str) -> bool:
        """Count a run of an operator, and return whether its result is to differ."""
        if operator.rpartition(".")[0] != self.random_operator:
            return False
        self._run_count += 1
        return self._run_count % 2 == 0

    def on_use(self) -> None:
        """Refuse whatever is asked of a device that is lost.

        Raises
        ------
        DeviceLostError
            If it is.
        """
        if self.is_lost:
            msg = "the simulated device is lost"
            raise DeviceLostError(msg)


FAULTS = Faults()
"""The device's."""
