"""Holding back what a library writes to the error stream although nothing is wrong.

Libraries in C write to the descriptor itself, so that is what is redirected, for the
whole process, and therefore for as short a time as can be: from the call to the first
sign of life. All that is not known to be harmless is passed on then.
"""

import os
import sys
import tempfile
import threading
from types import TracebackType
from typing import IO, Self

_DESCRIPTOR = 2
_ONE_AT_A_TIME = threading.Lock()


class HeldErrorStream:
    """Holds the error stream back until :meth:`release` or the end of the block.

    Parameters
    ----------
    harmless
        Lines that hold one of these are dropped; all others are passed on, in order.
        Without any, nothing is held back.

    Notes
    -----
    One block at a time holds the stream; others wait for it at their beginning.
    """

    def __init__(self, *harmless: str) -> None:
        self.harmless = tuple(text.encode() for text in harmless)
        self.lock = threading.Lock()
        self.real: int | None = None
        self.held: IO[bytes] | None = None

    def __enter__(self) -> Self:
        if not self.harmless:
            return self
        _ONE_AT_A_TIME.acquire()
        try:
            self.real = os.dup(_DESCRIPTOR)
        except OSError:
            # The stream is closed, so there is nothing to hold back.
            _ONE_AT_A_TIME.release()
            return self
        try:
            self._flush()
            self.held = tempfile.TemporaryFile()
            os.dup2(self.held.fileno(), _DESCRIPTOR)
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let the stream go, and pass on what was held; later calls do nothing."""
        with self.lock:
            real, held, self.real, self.held = self.real, self.held, None, None
        if real is None:
            return
        try:
            self._flush()
            os.dup2(real, _DESCRIPTOR)
            if held is not None:
                self._pass_on(held)
        finally:
            os.close(real)
            _ONE_AT_A_TIME.release()

    def _pass_on(self, held: IO[bytes]) -> None:
        with held:
            held.seek(0)
            for line in held:
                if not any(text in line for text in self.harmless):
                    os.write(_DESCRIPTOR, line)

    @staticmethod
    def _flush() -> None:
        # ``None`` where a program runs without a console.
        if sys.stderr is not None:
            sys.stderr.flush()
