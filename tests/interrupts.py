"""Ctrl-C in the midst of a search, tried in a process of its own.

A signal in the test process would end the whole run when the search is quicker than
expected, and does nothing where the shell that started the tests ignores it.
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

_MOST_PROCESSOR_S = 60
_BEGUN = "begun"


def interrupted(search: Callable[..., object], *arguments: object) -> Any:
    """Return what ``search(begun, *arguments)`` returns when it is interrupted.

    SIGINT is sent as a terminal sends it, when the search calls ``begun``; what the
    search raises on it, a :class:`KeyboardInterrupt`, is returned. A search that takes
    no notice is ended after a minute of work. ``search`` is a function of a module:
    the process imports it.
    """
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(there, search, arguments))
    process.start()
    there.close()
    try:
        first = here.recv()
        assert first == _BEGUN, f"ended before it was interrupted: {first}"
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGINT)
        return here.recv()
    except EOFError:
        process.join()
        msg = f"the search took no notice of SIGINT, or failed: {process.exitcode}"
        raise AssertionError(msg) from None
    finally:
        process.kill()
        process.join()
        here.close()


def _run(
    there: Connection, search: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    """Search in this process, which a signal to its group reaches."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_PROCESSOR_S, _MOST_PROCESSOR_S))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    is_begun = threading.Event()

    def begun() -> None:
        if not is_begun.is_set():
            is_begun.set()
            there.send(_BEGUN)

    try:
        answer = search(begun, *arguments)
    except KeyboardInterrupt as interrupt:
        answer = interrupt
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    there.send(answer)


def begun_when_working(begun: Callable[[], None], processor_s: float = 0.2) -> None:
    """Call ``begun`` from a thread when the calling one has worked for so long.

    For a search that tells nobody that it has begun: a call of native code.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident())
    end_s = time.clock_gettime(clock) + processor_s

    def watch() -> None:
        while time.clock_gettime(clock) < end_s:
            time.sleep(0.01)
        begun()

    threading.Thread(target=watch, daemon=True).start()
