"""The deadline of what runs now, for loops deep down that may take long.

A solver gets its time with :class:`remat.core.problem.Limits` and looks at them between
the steps of its search. What such a step is made of (reductions, rows of a model,
families of lower sets, the native core) knows no limits: now and then it calls
:func:`check_time`, which raises :class:`TimeIsUpError` once the deadline that is in
force has passed. Whoever set the deadline answers with the best known by then.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_DEADLINE_S: ContextVar[float | None] = ContextVar("remat deadline", default=None)


class TimeIsUpError(TimeoutError):
    """The deadline in force has passed; caught by whoever set it."""


@contextmanager
def in_time(deadline_s: float | None) -> Generator[None]:
    """Have :func:`check_time` raise from ``deadline_s`` on, as long as the block runs.

    Within a block that has an earlier deadline, that one stays in force.

    Parameters
    ----------
    deadline_s
        A value of ``time.monotonic()``, or ``None`` to change nothing.
    """
    outer_s = _DEADLINE_S.get()
    known = [at_s for at_s in (outer_s, deadline_s) if at_s is not None]
    token = _DEADLINE_S.set(min(known, default=None))
    try:
        yield
    finally:
        _DEADLINE_S.reset(token)


def check_time() -> None:
    """Do nothing until the deadline in force has passed.

    Raises
    ------
    TimeIsUpError
        From then on.
    """
    deadline_s = _DEADLINE_S.get()
    if deadline_s is not None and time.monotonic() >= deadline_s:
        raise TimeIsUpError("the deadline has passed")
