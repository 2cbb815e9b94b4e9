"""How many bytes are allocated now, from the count that an allocator keeps itself."""

import ctypes
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar

import torch

from remat.core.garbage import old_objects_left_alone
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

_SHARE = 20
_MOST_NS = 20_000_000
"""Counts take one part of the time in so many, and so much more at first."""


class Watch:
    """What is allocated more than when a step began.

    The first steps are looked at in any case, and later ones as often as that takes a
    twentieth of the time: all of them, where they take long against the counts.

    Attributes
    ----------
    is_on
        Whether it is looked at.
    """

    def __init__(self) -> None:
        self.is_on = True
        self._place = torch.device("cpu")
        self._begun_bytes: int | None = None
        self._before_trace_bytes: int | None = None
        self._took_ns = 0
        # How long counts may take, as of when the last step began.
        self._left_ns = _MOST_NS
        self._seen_ns = time.monotonic_ns()

    def begin(self, place: torch.device) -> None:
        """Begin a step on a device."""
        before_ns, self._seen_ns = self._seen_ns, time.monotonic_ns()
        earned_ns = (self._seen_ns - before_ns) // _SHARE
        self._left_ns = min(self._left_ns + earned_ns, _MOST_NS)
        self._begun_bytes = None
        if self.is_on and self._left_ns > 0:
            self._place = place
            self._begun_bytes = self._read()

    def grown_bytes(self, *, is_over: bool) -> int | None:
        """Return the bytes more than at the beginning, ``None`` if they are not known.

        Parameters
        ----------
        is_over
            Whether nothing more is asked for in this step.
        """
        begun_bytes = self._begun_bytes
        if begun_bytes is None or (self._took_ns > _QUICK_NS and not is_over):
            return None
        now_bytes = self._read()
        return None if now_bytes is None else now_bytes - begun_bytes

    @contextmanager
    def without_traces(self) -> Generator[None]:
        """Leave out what tracing allocates inside: the tracer keeps megabytes."""
        # torch.compiler.reset() forgets them.
        if _trace_begins not in compile_callbacks.start_callbacks:
            compile_callbacks.register_start_callback(_trace_begins)
            compile_callbacks.register_end_callback(_trace_ends)
        _without_traces.append(self)
        try:
            yield
        finally:
            _without_traces.remove(self)
            if not _without_traces:
                _before_traces.close()

    def begin_trace(self) -> None:
        """Note what is allocated before a trace."""
        self._before_trace_bytes = None if self._begun_bytes is None else self._read()

    def end_trace(self) -> None:
        """Leave out what is allocated since, in traces one after the other."""
        before_bytes, self._before_trace_bytes = self._before_trace_bytes, None
        if before_bytes is None or self._begun_bytes is None:
            return
        now_bytes = self._read()
        if now_bytes is not None:
            self._begun_bytes += now_bytes - before_bytes

    def _read(self) -> int | None:
        began_ns = time.thread_time_ns()
        found = live_bytes(self._place)
        self._took_ns = time.thread_time_ns() - began_ns
        self._left_ns -= self._took_ns
        return found


_without_traces: list[Watch] = []
"""Those of the steps that run now."""

_before_traces = ExitStack()
"""Lets the garbage collector look only at what traces in these steps have made."""


# Nothing here is traced: the tracer calls it under a lock that a trace takes.
_not_traced: Any = torch.compiler.disable


@_not_traced
def _trace_begins(_trace: object) -> None:
    if _without_traces:
        _before_traces.enter_context(old_objects_left_alone())
    for watch in _without_traces:
        watch.begin_trace()


@_not_traced
def _trace_ends(_trace: object) -> None:
    for watch in _without_traces:
        watch.end_trace()


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
