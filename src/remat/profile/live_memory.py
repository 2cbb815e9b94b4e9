"""How many bytes are allocated now, from the count that an allocator keeps itself."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import ClassVar

import torch

from remat.torch_compat.accelerators import device_module, is_accelerator


class _MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns, of all arenas."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _mallinfo2() -> Callable[[], _MallInfo] | None:
    """Return glibc's function, or ``None`` with another library of C."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _MallInfo
    return found


def live_bytes(place: torch.device) -> int | None:
    """Return the bytes that are allocated on a device, by whatever and in any thread.

    Of the CPU those of the process's own heap: what is not from tensors counts too, and
    so do the heads of blocks. Microseconds, and no device is waited for.

    Returns
    -------
    int or None
        ``None`` where the CPU's allocator keeps no count, as outside of glibc. One that
        was put in the place of glibc's, such as jemalloc, is not seen: what is returned
        does not change then.

    Examples
    --------
    >>> before = live_bytes(torch.device("cpu"))
    >>> values = torch.empty(1 << 20, dtype=torch.uint8)
    >>> before is None or live_bytes(torch.device("cpu")) - before >= 1 << 20
    True
    """
    if is_accelerator(place):
        return int(device_module(place).memory_allocated(place))
    count = _mallinfo2()
    if count is None:
        return None
    found = count()
    return found.uordblks + found.hblkhd
