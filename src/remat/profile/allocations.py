"""Every allocation and release that torch makes on a device, in order.

The records come from torch's own profiler, which is told of each block that torch's
allocator hands out or takes back, temporaries inside operators included. What the
profiler cannot see, this module cannot report:

* the release of a block that was allocated while no recording was on;
* memory that libraries take from the system directly (packing buffers of MKL,
  scratchpads that oneDNN manages itself, ``std::vector`` inside kernels);
* allocations made by OpenMP worker threads inside one operator;
* the release of a block by a thread of a process group that holds it last: gloo's do
  where another thread runs instead of them just after an exchange.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from remat.core.errors import ProfileError
from remat.torch_compat.names import profiler_enabled

_MARK = "remat: recorded region"

_MEMORY = "[memory]"
"""What torch names each change of the memory in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One change of the memory in use.

    Parameters
    ----------
    time_ns
        When, on the profiler's clock.
    address
        Of the block; an address is used again once its block is released.
    change_bytes
        Size of the block, negative when it is released.
    """

    time_ns: int
    address: int
    change_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What happened before and inside the marked region of a recording.

    Parameters
    ----------
    before, inside
        The changes, in order of time.
    start_ns, end_ns
        The marked region on the profiler's clock.
    marks
        Pairs of time and text of what the program noted, in order of time.
    """

    before: tuple[Allocation, ...] = field(repr=False)
    inside: tuple[Allocation, ...] = field(repr=False)
    start_ns: int
    end_ns: int
    marks: tuple[tuple[int, str], ...] = field(default=(), repr=False)

    def final_bytes(self) -> int:
        """Return the growth at the end of the region, in bytes."""
        return sum(allocation.change_bytes for allocation in self.inside)

    def peak_bytes(self) -> int:
        """Return the largest growth inside the region, in bytes, at least 0."""
        used = peak = 0
        for allocation in self.inside:
            used += allocation.change_bytes
            peak = max(peak, used)
        return peak


def check_no_profiler() -> None:
    """Check that no torch profiler is recording: only one can.

    Raises
    ------
    ProfileError
        If one is.
    """
    if profiler_enabled():
        msg = (
            "a torch profiler is already recording, and only one can: leave its block "
            "before measuring memory"
        )
        raise ProfileError(msg)


class AllocationRecorder:
    """Record the allocations on one kind of device.

    Use it as a context manager, and mark inside it the region of interest, once, with
    :meth:`region`. After the block, :attr:`recording` holds the result.

    Parameters
    ----------
    device_type
        ``"cpu"`` or ``"cuda"``.
    mark_prefix
        Events of the program (``torch.profiler.record_function``) whose name begins
        with it are marks, and what follows it is their text.

    Raises
    ------
    ProfileError
        If another torch profiler is recording in this process.
    """

    def __init__(
        self, device_type: str = "cpu", mark_prefix: str | None = None
    ) -> None:
        self._device_type = device_type
        self._mark_prefix = mark_prefix
        self._profile: Any = None
        self._ahead = ExitStack()
        self.recording = Recording(before=(), inside=(), start_ns=0, end_ns=0)

    def __enter__(self) -> "AllocationRecorder":
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to record.

        Raises
        ------
        ProfileError
            If another torch profiler is recording in this process.
        """
        check_no_profiler()
        # Not torch.profiler.profile, which reads all events of operators at its end,
        # or warns that it does not: of these nothing is needed here.
        self._profile = profile(profile_memory=True)
        with _quiet_profiler():
            self._profile.__enter__()
        self._ahead.enter_context(_exchanging_threads_ahead())

    def stop(self) -> None:
        """End the recording and read its events."""
        with self._ahead, _quiet_profiler():
            self._profile.__exit__(None, None, None)
        tree = self._profile.kineto_results.experimental_event_tree()
        self._profile = None
        self.recording = _read(tree, self._device_type, self._mark_prefix)

    @contextmanager
    def region(self) -> Generator[None]:
        """Mark what runs inside as the region of interest."""
        with record_function(_MARK):
            yield


def record_allocations(
    function: Callable[[], object], device_type: str = "cpu"
) -> tuple[Recording, object]:
    """Return the allocations of one call, and its result (still held).

    Parameters
    ----------
    function
        Called once.
    device_type
        ``"cpu"`` or ``"cuda"``.

    Raises
    ------
    ProfileError
        If another torch profiler is recording in this process.
    """
    recorder = AllocationRecorder(device_type)
    with recorder, recorder.region():
        result = function()
    return recorder.recording, result


@contextmanager
def _quiet_profiler() -> Generator[None]:
    # The profiler library writes a line to stderr at each start and stop unless its
    # log level is raised; it reads the variable when it is first started.
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _exchanging_threads_ahead() -> Generator[None]:
    """Let threads of process groups let go before what waits for them runs on.

    Then the caller's thread is the last that holds a block, and its release is seen.
    """
    if sys.platform != "linux" or not (dist.is_available() and dist.is_initialized()):
        yield
        return
    # A thread of this kind takes no processor from the one that wakes it.
    is_common = os.sched_getscheduler(0) == os.SCHED_OTHER
    if is_common:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        if is_common and os.sched_getscheduler(0) == os.SCHED_BATCH:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _flatten(events: Iterable[Any]) -> Generator[Any]:
    # A stack, not recursion: user code can nest deeper than Python's limit.
    stack = list(events)[::-1]
    while stack:
        event = stack.pop()
        yield event
        stack.extend(reversed(event.children))


def _read(tree: Iterable[Any], device_type: str, mark_prefix: str | None) -> Recording:
    start_ns = end_ns = 0
    marks: list[tuple[int, str]] = []
    allocations: list[Allocation] = []
    for event in _flatten(tree):
        # Made anew at each access, and there are many events.
        name = event.name
        if name == _MARK:
            start_ns, end_ns = event.start_time_ns, event.end_time_ns
        elif mark_prefix is not None and name.startswith(mark_prefix):
            marks.append((event.start_time_ns, name.removeprefix(mark_prefix)))
        elif name == _MEMORY and str(event.tag).endswith("Allocation"):
            fields = event.extra_fields
            if str(fields.device).partition(":")[0] == device_type:
                allocations.append(
                    Allocation(
                        time_ns=event.start_time_ns,
                        address=fields.ptr or 0,
                        change_bytes=fields.alloc_size,
                    )
                )
    allocations.sort(key=lambda allocation: allocation.time_ns)
    return Recording(
        before=tuple(a for a in allocations if a.time_ns < start_ns),
        inside=tuple(a for a in allocations if start_ns <= a.time_ns <= end_ns),
        start_ns=start_ns,
        end_ns=end_ns,
        marks=tuple(sorted(marks)),
    )
