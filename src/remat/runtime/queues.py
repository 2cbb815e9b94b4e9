"""The queues that a pass is issued to: the host, streams, and threads that copy.

A queue takes copies, records events and waits for events, one after the other. Within
the CPU's memory a link is a thread, from and to an accelerator a stream; the
instructions are the same.

A run of a pass knows its queues (:class:`CopyRun`). Should a copy fail, none that is
issued after it begins, and whoever waits raises what happened; should the pass itself
raise or be interrupted, it leaves when no copy is under way any more.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol

import torch

from remat.core.errors import ExecutionError
from remat.torch_compat.accelerators import device_module, is_accelerator

Key = tuple[str, ...]
"""A queue in a graph: empty for the host, torch's name of a device for its own.

For a link, torch's names of source and target, and the plan's.
"""


class Event(Protocol):
    """What a queue records."""

    def synchronize(self) -> None:
        """Wait until the event has happened."""
        ...


class IssueQueue(Protocol):
    """What takes instructions, and does them in order."""

    def copy(self, source: torch.Tensor, block: torch.Tensor) -> None:
        """Copy the bytes of one block to another one of the same size."""
        ...

    def record(self) -> Event:
        """Return an event that happens after all that was issued."""
        ...

    def wait(self, event: Any) -> None:
        """Let what is issued next come after an event."""
        ...

    def join(self) -> None:
        """Wait until nothing that was issued is under way."""
        ...


def move_bytes(source: torch.Tensor, block: torch.Tensor) -> None:
    """Copy the bytes of a block of the CPU to another one, on this thread alone.

    torch would open a second team of threads beside that of the operators, on the same
    cores.
    """
    ctypes.memmove(block.data_ptr(), source.data_ptr(), source.nbytes)


class HostQueue:
    """The thread that issues: it does everything at once."""

    def copy(self, source: torch.Tensor, block: torch.Tensor) -> None:
        """Copy now."""
        block.copy_(source)

    def record(self) -> Event:
        """Refuse: what the host has done needs no event."""
        msg = "an event of the host's own queue is recorded"
        raise ExecutionError(msg)

    def wait(self, event: Any) -> None:
        """Wait now."""
        event.synchronize()

    def join(self) -> None:
        """Return: nothing is ever under way."""


class StreamQueue:
    """A stream: of a link, or the one on which a device's ops run."""

    def __init__(self, stream: Any, place: str) -> None:
        self._stream = stream
        self._module = device_module(place)

    def copy(self, source: torch.Tensor, block: torch.Tensor) -> None:
        """Copy on the stream."""
        with self._module.stream(self._stream):
            block.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """Return an event after what was issued."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        """Let what is issued next come after an event."""
        if isinstance(event, ThreadEvent):
            # A stream cannot wait for a thread: the host does, and issues what comes
            # next later.
            event.synchronize()
        else:
            self._stream.wait_event(event)

    def join(self) -> None:
        """Wait for what was issued."""
        self._stream.synchronize()


class ThreadEvent:
    """Happens when a thread comes to it."""

    def __init__(self, run: "CopyRun") -> None:
        self._run = run
        self._pending = threading.Lock()
        self._pending.acquire()

    def happen(self) -> None:
        """Let those go on who wait."""
        self._pending.release()

    def join(self) -> None:
        """Wait until the event has happened, whatever became of the copies."""
        with self._pending:
            pass

    def synchronize(self) -> None:
        """Wait until the event has happened.

        Raises
        ------
        ExecutionError
            If a copy of the run has failed.
        """
        self.join()
        self._run.check()


class ThreadQueue:
    """The copies that one run of a pass gives to the thread of a link."""

    def __init__(self, key: Key, run: "CopyRun") -> None:
        self._put = _LINKS.thread(key)
        self._run = run

    def copy(self, source: torch.Tensor, block: torch.Tensor) -> None:
        """Let the thread copy."""
        self._put(partial(self._run.attempt, partial(move_bytes, source, block)))

    def record(self) -> ThreadEvent:
        """Return an event after what was issued."""
        event = ThreadEvent(self._run)
        self._put(event.happen)
        return event

    def wait(self, event: Any) -> None:
        """Let what is issued next come after an event."""
        self._put(partial(self._run.attempt, event.synchronize))

    def join(self) -> None:
        """Wait for the copies."""
        self.record().join()


class CopyRun:
    """One run of a pass, with the queues that it issues to.

    Use it as a context manager around the run.
    """

    def __init__(self) -> None:
        self._queues: dict[Key, IssueQueue] = {}
        self._failure: BaseException | None = None
        self._is_stopped = False

    def queue(self, key: Key) -> IssueQueue:
        """Return the queue of a key; the run's own, on a thread or stream for all."""
        found = self._queues.get(key)
        if found is None:
            found = self._queues[key] = self._open(key)
        return found

    def _open(self, key: Key) -> IssueQueue:
        if not key:
            return HostQueue()
        if len(key) == 1:
            # The caller's choice, and the same until the pass ends.
            place = key[0]
            stream = device_module(place).current_stream(torch.device(place))
            return StreamQueue(stream, place)
        places = [place for place in key[:2] if is_accelerator(place)]
        if places:
            return StreamQueue(_LINKS.stream(key, places[0]), places[0])
        return ThreadQueue(key, self)

    def attempt(self, task: Callable[[], None]) -> None:
        """Do something on a thread, unless something failed before."""
        if self._failure is not None or self._is_stopped:
            return
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            if self._failure is None:  # Else this one follows from that.
                # Frames would hold the blocks for as long as the error is known.
                self._failure = error.with_traceback(None)

    def check(self) -> None:
        """Raise what a copy raised.

        Raises
        ------
        ExecutionError
            If one did.
        """
        if self._failure is not None:
            msg = (
                "a copy between devices failed, and the step with it: "
                f"{type(self._failure).__name__}: {self._failure}"
            )
            raise ExecutionError(msg) from self._failure

    def __enter__(self) -> "CopyRun":
        _runs().append(self)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        _runs().remove(self)
        if error is None:
            return  # The pass has waited for its copies.
        # What has not begun is left undone.
        self._is_stopped = True
        interruptions = [_join(queue) for queue in self._queues.values()]
        for interruption in filter(None, interruptions):
            raise interruption


def _join(queue: IssueQueue) -> KeyboardInterrupt | None:
    """Wait for a queue, and return what interrupted that: it comes after."""
    interruption = None
    while True:
        try:
            queue.join()
        except KeyboardInterrupt as error:
            interruption = error
        else:
            return interruption


class _Running(threading.local):
    def __init__(self) -> None:
        self.runs: list[CopyRun] = []


_RUNNING = _Running()


def _runs() -> list[CopyRun]:
    return _RUNNING.runs


def queue_of(key: Key) -> IssueQueue:
    """Return a queue of the pass that runs in this thread."""
    return _runs()[-1].queue(key)


_Put = Callable[[Callable[[], None]], None]


class _Links:
    """The thread or the stream of each link: one in the process, for all plans."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all: a process that was forked has none of the threads."""
        self._opening = threading.Lock()
        self._threads: dict[Key, _Put] = {}
        self._streams: dict[Key, Any] = {}

    def thread(self, key: Key) -> _Put:
        """Return what gives tasks to the thread of a link."""
        with self._opening:
            if key not in self._threads:
                tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
                # A daemon, which ends with the process: no step leaves it work to do.
                threading.Thread(
                    target=_work, args=(tasks,), name=f"remat {key}", daemon=True
                ).start()
                self._threads[key] = tasks.put
            return self._threads[key]

    def stream(self, key: Key, place: str) -> Any:
        """Return the stream of a link, on an accelerator."""
        with self._opening:
            if key not in self._streams:
                self._streams[key] = device_module(place).Stream(torch.device(place))
            return self._streams[key]


def _work(tasks: "SimpleQueue[Callable[[], None]]") -> None:
    while True:
        task = tasks.get()
        task()
        # Before the next one says that this is done: its tensors are not held.
        del task


_LINKS = _Links()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LINKS.begin)
