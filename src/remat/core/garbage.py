"""The garbage collector while planning, which makes very many objects that stay."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def old_objects_left_alone() -> Generator[None]:
    """Let the garbage collector look only at objects that are made inside.

    Its full walks go through all that a process has imported, a quarter of a second
    with torch, and the objects of a deep step bring about several. Where objects are
    left alone already, that stays as it is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
