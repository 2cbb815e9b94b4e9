"""What a loader of batches has in memory besides those that it gave out."""

from collections.abc import Iterable
from typing import cast

import torch
from torch.utils.data import DataLoader


def batches_early(loaders: Iterable[object], device: torch.device) -> int:
    """Return how many batches a loader may hold at most that came before their turn.

    Those of its workers come in shared memory, and count on the CPU once the process
    has taken them from the workers' queue. On accelerators they wait outside of the
    device's memory.

    Parameters
    ----------
    loaders
        Of parts of each batch. Those that are no ``DataLoader`` are taken to hold none.
    device
        Whose memory is counted.
    """
    if device.type != "cpu":
        return 0
    return max(map(_early, loaders), default=0)


def _early(found: object) -> int:
    if not isinstance(found, DataLoader):
        return 0
    loader = cast("DataLoader[object]", found)
    workers, each = loader.num_workers, loader.prefetch_factor or 0
    if loader.pin_memory and torch.accelerator.is_available():
        # A thread takes what comes, and the loader asks for no more than this in all.
        return each * workers
    if not loader.in_order:
        return 0
    # The loader asks workers in turn for ``each * workers`` batches after the last that
    # it gave out (`_try_put_index`). Only where the next one is not there does it take
    # others from the queue and keep them (`_next_data`). That one's worker does its
    # tasks in order, so none of its ``each`` later batches can be among them.
    return each * (workers - 1) if workers else 0
