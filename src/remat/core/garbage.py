"""The garbage collector while planning, which makes very many objects that stay."""

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = [0]
"""How often what is there is left alone now, in all threads."""
_others_do = [False]
"""Whether others have been found to leave objects alone: counting them takes long."""


@contextmanager
def old_objects_left_alone() -> Generator[None]:
    """Let the garbage collector look only at objects that are made inside.

    Its full walks go through all that a process has imported, a quarter of a second
    with torch, and the objects of a deep step bring about several. Where others leave
    objects alone already, that stays as it is, for good.
    """
    with _lock:
        if not (_inside[0] or _others_do[0]):
            _others_do[0] = gc.get_freeze_count() > 0
        is_ours = not _others_do[0]
        if is_ours:
            # What is made inside may hold values of a forward pass, and is looked at.
            if not _inside[0]:
                gc.freeze()
            _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            if is_ours:
                _inside[0] -= 1
                if not _inside[0]:
                    gc.unfreeze()
