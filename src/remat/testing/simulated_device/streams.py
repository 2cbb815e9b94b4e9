"""Streams and events of the simulated device.

Ops run on the default stream when they are issued. What is issued to another stream
happens when somebody waits for it, and not before, as on a device whose link is slow;
or at once, with the switch ``copies_are_late`` off. A copy that waits holds addresses
and no tensors: a block that was given back meanwhile has other contents, as on a card.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from remat.testing.simulated_device.faults import FAULTS


class Stream:
    """A queue of work on the device.

    Parameters
    ----------
    device
        Ignored: there is one.
    """

    def __init__(self, device: Any = None, **_options: Any) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self.device = device
        _STREAMS.add(self)

    @property
    def is_default(self) -> bool:
        """Whether it is the one on which ops run."""
        return self is DEFAULT

    def issue(self, task: Callable[[], object]) -> None:
        """Do something after all that was issued, now or later."""
        FAULTS.on_use()
        self._waiting.append(task)
        if self.is_default or not FAULTS.copies_are_late:
            self.synchronize()

    def synchronize(self) -> None:
        """Do all that was issued."""
        FAULTS.on_use()
        while self._waiting:
            self._waiting.popleft()()

    def advance_to(self, event: "Event") -> None:
        """Do what was issued before an event."""
        FAULTS.on_use()
        while self._waiting and not event.query():
            self._waiting.popleft()()

    def wait_event(self, event: "Event") -> None:
        """Let what is issued next come after an event."""
        self.issue(event.synchronize)

    def wait_stream(self, stream: "Stream") -> None:
        """Let what is issued next come after all that was issued to another stream."""
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event after what was issued."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all that was issued has been done."""
        return not self._waiting


class Event:
    """A place in a stream.

    Parameters
    ----------
    enable_timing
        Ignored: the time is always noted.
    """

    def __init__(self, enable_timing: bool = False, **_options: Any) -> None:
        del enable_timing
        self._stream: Stream | None = None
        self.happened_ns = 0

    def record(self, stream: Stream | None = None) -> None:
        """Happen after what was issued to a stream, by default the current one."""
        self._stream, self.happened_ns = stream or current_stream(), 0
        self._stream.issue(self._happen)

    def _happen(self) -> None:
        self.happened_ns = time.perf_counter_ns()

    def query(self) -> bool:
        """Return whether it has happened, or was never recorded."""
        return self._stream is None or bool(self.happened_ns)

    def synchronize(self) -> None:
        """Let its stream come to it."""
        if not self.query() and self._stream is not None:
            self._stream.advance_to(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Let what a stream does next come after it."""
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds until another one."""
        return (end.happened_ns - self.happened_ns) / 1e6


_STREAMS: "weakref.WeakSet[Stream]" = weakref.WeakSet()
DEFAULT = Stream()


class _Chosen(threading.local):
    def __init__(self) -> None:
        self.streams = [DEFAULT]


_CHOSEN = _Chosen()


def current_stream(_device: Any = None) -> Stream:
    """Return the stream that this thread issues to."""
    return _CHOSEN.streams[-1]


@contextmanager
def stream(chosen: Stream) -> Generator[None]:
    """Issue to a stream."""
    _CHOSEN.streams.append(chosen)
    try:
        yield
    finally:
        _CHOSEN.streams.pop()


def synchronize(_device: Any = None) -> None:
    """Do all that was issued to any stream."""
    FAULTS.on_use()
    for each in list(_STREAMS):
        each.synchronize()
