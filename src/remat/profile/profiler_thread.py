"""Measure beside a profiler that already records, which only another thread can do.

torch's profiler records once per process, its older one once per thread. What the
older one sees in a thread of its own is not seen by the profiler of the caller.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

from remat.torch_compat.names import (
    ExperimentalConfig,
    ProfilerConfig,
    ProfilerState,
    disable_profiler_legacy,
    enable_profiler_legacy,
)

Result = TypeVar("Result")
Progress = Callable[[str, float], None]


class InterruptedBesideError(Exception):
    """The caller was interrupted, so that its work in another thread ends."""


def run_beside(work: Callable[[Progress], Result], on_progress: Progress) -> Result:
    """Return what ``work`` returns in a thread that no profiler records.

    Parameters
    ----------
    work
        Called with a callback like ``on_progress``, which it calls now and then: an
        interrupt of the calling thread ends it there.
    on_progress
        Called, in the other thread, with what is done and the share that is done.
    """
    is_stopped = Event()

    def report(activity: str, share: float) -> None:
        if is_stopped.is_set():
            raise InterruptedBesideError
        on_progress(activity, share)

    with ThreadPoolExecutor(max_workers=1) as executor:
        future = executor.submit(work, report)
        try:
            return future.result()
        except BaseException:
            is_stopped.set()
            raise


def record_growth(function: Callable[[], object]) -> tuple[int, object]:
    """Return the largest growth of CPU memory during one call, and the result.

    The growth is in bytes, of what
    :func:`remat.profile.allocations.record_allocations` sees; the result is still held.
    """
    config = ProfilerConfig(
        ProfilerState.CPU,
        False,  # noqa: FBT003 - shapes; its arguments have no names
        True,  # noqa: FBT003 - memory
        False,  # noqa: FBT003 - stacks
        False,  # noqa: FBT003 - floating-point operations
        False,  # noqa: FBT003 - modules
        ExperimentalConfig(),
    )
    enable_profiler_legacy(config)
    try:
        result = function()
    finally:
        threads: list[list[Any]] = disable_profiler_legacy()
    used = peak = 0
    for events in threads:
        for event in events:
            if event.kind() == "memory_alloc":
                used += event.cpu_memory_usage()
                peak = max(peak, used)
    return peak, result
