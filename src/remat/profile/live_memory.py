"""How many bytes are allocated now, from the count that an allocator keeps itself."""

import ctypes
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch

from remat.torch_compat.accelerators import device_module, is_accelerator
from remat.torch_compat.names import compile_callbacks


class _MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns, of all arenas."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _mallinfo2() -> Callable[[], _MallInfo] | None:
    """Return glibc's function, or ``None`` with another library of C."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _MallInfo
    return found


_QUICK_NS = 100_000
"""A count that takes longer is asked for twice in a step: glibc's looks at each free
block, of which there may be a million."""

_SLOW_NS = 1_000_000
_REST = 200
"""Where one takes longer, no step is looked at during this many times as long."""


class Watch:
    """What is allocated more than when a step began.

    Where the count is slow it takes a hundredth of the time.

    Attributes
    ----------
    is_on
        Whether it is looked at.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._begun_bytes: int | None = None
        self._took_ns = 0
        self._rests_until_ns = 0

    def begin(self, place: torch.device) -> None:
        """Begin a step."""
        self._begun_bytes = None
        if self.is_on and time.monotonic_ns() >= self._rests_until_ns:
            self._begun_bytes = self._read(place)
            if self._took_ns > _SLOW_NS:
                rest_ns = _REST * self._took_ns
                self._rests_until_ns = time.monotonic_ns() + rest_ns

    def grown_bytes(self, place: torch.device, *, is_over: bool) -> int | None:
        """Return the bytes more than at the beginning, ``None`` if they are not known.

        Parameters
        ----------
        place
            The device.
        is_over
            Whether nothing more is asked for in this step.
        """
        begun_bytes = self._begun_bytes
        if begun_bytes is None or (self._took_ns > _QUICK_NS and not is_over):
            return None
        now_bytes = self._read(place)
        return None if now_bytes is None else now_bytes - begun_bytes

    @contextmanager
    def without_traces(self, place: torch.device) -> Generator[None]:
        """Leave out what tracing allocates inside: the tracer keeps megabytes."""
        count = _TraceCount(self, place)
        compile_callbacks.register_start_callback(count.begin)
        compile_callbacks.register_end_callback(count.end)
        try:
            yield
        finally:
            # torch.compiler.reset() has forgotten them.
            if count.begin in compile_callbacks.start_callbacks:
                compile_callbacks.remove_start_callback(count.begin)
                compile_callbacks.remove_end_callback(count.end)

    def leave_out(self, grown_bytes: int) -> None:
        """Let so many bytes be no part of what the step allocates."""
        if self._begun_bytes is not None:
            self._begun_bytes += grown_bytes

    def read(self, place: torch.device) -> int | None:
        """Return what is allocated now, ``None`` if no step is looked at."""
        return None if self._begun_bytes is None else self._read(place)

    def _read(self, place: torch.device) -> int | None:
        began_ns = time.thread_time_ns()
        found = live_bytes(place)
        self._took_ns = time.thread_time_ns() - began_ns
        return found


# Its type is one for functions.
_not_traced: Any = torch.compiler.disable


class _TraceCount:
    """Tells a watch what traces allocate, one after the other.

    Nothing of it is traced: the tracer calls it under a lock that a trace takes.
    """

    def __init__(self, watch: Watch, place: torch.device) -> None:
        self._watch, self._place = watch, place
        self._before_bytes: int | None = None

    @_not_traced
    def begin(self, _trace: object) -> None:
        """Note what is allocated before a trace."""
        self._before_bytes = self._watch.read(self._place)

    @_not_traced
    def end(self, _trace: object) -> None:
        """Leave out what is allocated since."""
        now_bytes = self._watch.read(self._place)
        if self._before_bytes is not None and now_bytes is not None:
            self._watch.leave_out(now_bytes - self._before_bytes)


def live_bytes(place: torch.device) -> int | None:
    """Return the bytes that are allocated on a device, by whatever and in any thread.

    Of the CPU those of the process's own heap: what is not from tensors counts too, and
    so do the heads of blocks. Some microseconds, or some for each thousand free blocks
    of the heap; no device is waited for.

    Returns
    -------
    int or None
        ``None`` where the CPU's allocator keeps no count, as outside of glibc. One that
        was put in the place of glibc's, such as jemalloc, is not seen: what is returned
        does not change then.

    Examples
    --------
    >>> before = live_bytes(torch.device("cpu"))
    >>> values = torch.empty(1 << 20, dtype=torch.uint8)
    >>> before is None or live_bytes(torch.device("cpu")) - before >= 1 << 20
    True
    """
    if is_accelerator(place):
        return int(device_module(place).memory_allocated(place))
    count = _mallinfo2()
    if count is None:
        return None
    found = count()
    return found.uordblks + found.hblkhd
