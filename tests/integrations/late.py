"""Workers of a loader of which the first is always the last: others' batches wait."""

import multiprocessing
from collections.abc import Sequence
from typing import Any

from torch.utils.data import default_collate, get_worker_info

WORKERS = 2
EACH = 2
EARLY = EACH * (WORKERS - 1)
"""Batches that wait then, each time that the first worker's next one comes."""

_TAKEN = multiprocessing.Semaphore(0)


class Late:
    """Collates samples, in the first worker not before the loader has all others' ones.

    So many wait in the loader at each batch of the first worker, however busy the
    machine is, until no others are left to ask for.

    Parameters
    ----------
    batches
        How many the loader has in all.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.count = 0
        self.taken = _TAKEN

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        batch = default_collate(list(samples))
        worker = get_worker_info()
        if worker is None:
            return batch
        if worker.id > 0:
            return _Told(batch)
        if (self.count + EACH) * WORKERS <= self.batches:
            for _ in range(EARLY if self.count == 0 else WORKERS - 1):
                assert self.taken.acquire(timeout=60)
        self.count += 1
        return batch


class _Told(dict[str, Any]):
    """A batch that tells when it comes out of the queue."""

    def __reduce__(self) -> Any:
        return _taken, (dict(self),)


def _taken(batch: dict[str, Any]) -> dict[str, Any]:
    _TAKEN.release()
    return batch
