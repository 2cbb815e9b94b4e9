"""What stays in memory until Python collects its garbage."""

import gc
import weakref
from collections.abc import Callable


def holds_its_callers(call: Callable[[], object]) -> bool:
    """Return whether a value of a caller outlives the call, until it is collected.

    An error that is kept refers to the frames of all callers, these to their values.
    """

    def caller() -> weakref.ref[set[int]]:
        value = {1}
        call()
        return weakref.ref(value)

    gc.collect()
    gc.disable()
    try:
        return caller()() is not None
    finally:
        gc.enable()
