"""Memory of the simulated device: blocks of the host that torch takes for another's.

torch makes a tensor of any block that is described to it in DLPack's words, on a device
of an unknown kind too, and says when the last tensor of the block is gone. So each
storage on the device is one block, and it is known to the byte what is in use.

A block that is given back is filled with bytes that no computation makes, and handed
out again: whoever reads too late, or writes too late, is seen in the results.
"""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from remat.core.units import format_bytes, round_up
from remat.testing.simulated_device.faults import FAULTS

GRANULE_BYTES = 512
_EXTENSION_DEVICE = 12  # DLPack's kDLExtDev, which torch calls PrivateUse1.
_POISON = 0xCB
_CODES = {"float": 2, "bfloat": 4, "int": 0, "uint": 1, "complex": 5, "bool": 6}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (  # It names itself.
    ("tensor", _Tensor),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
)


class DeviceMemory:
    """The allocator: blocks in multiples of 512 bytes, kept for the next request.

    Parameters
    ----------
    capacity_bytes
        The most that may be allocated at once; ``None`` for what the host has.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.RLock()
        self._spare: defaultdict[int, list[ctypes.Array[ctypes.c_char]]] = defaultdict(
            list
        )
        self._held: dict[int, tuple[_Managed, ctypes.Array[ctypes.c_char], int]] = {}
        self._deleter = _Deleter(self._released)
        self._statistics = dict.fromkeys(
            (
                f"{what}_bytes.all.{which}"
                for what in ("requested", "allocated", "reserved")
                for which in ("current", "peak")
            ),
            0,
        )

    def tensor(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor on the device, on a block of its own.

        Raises
        ------
        torch.OutOfMemoryError
            If the capacity does not suffice, or a fault is due.
        """
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        size_bytes = (last + 1) * dtype.itemsize if prod(shape) else 0
        block = self.block(size_bytes)
        rank = len(shape)
        sizes, steps = (ctypes.c_int64 * max(1, rank) for _ in range(2))
        managed = _Managed(
            _Tensor(
                ctypes.addressof(block),
                _Device(_EXTENSION_DEVICE, 0),
                rank,
                _type_of(dtype),
                sizes(*shape),
                steps(*strides),
                0,
            ),
            None,
            self._deleter,
        )
        with self._lock:
            self._held[ctypes.addressof(managed)] = (managed, block, size_bytes)
        return torch.from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))

    def statistics(self) -> dict[str, int]:
        """Return what torch's allocators tell, under the same names."""
        with self._lock:
            return dict(self._statistics)

    def reset_peaks(self) -> None:
        """Let the peaks start from what is in use."""
        with self._lock:
            for name in self._statistics:
                if name.endswith(".peak"):
                    current = name.removesuffix("peak") + "current"
                    self._statistics[name] = self._statistics[current]

    def empty_cache(self) -> None:
        """Give back to the host what is not in use."""
        with self._lock:
            for size_bytes, blocks in self._spare.items():
                self._count("reserved", -size_bytes * len(blocks))
            self._spare.clear()

    def block(self, size_bytes: int) -> "ctypes.Array[ctypes.c_char]":
        """Return memory that belongs to no tensor.

        Raises
        ------
        torch.OutOfMemoryError
            As for :meth:`tensor`.
        """
        whole = max(GRANULE_BYTES, round_up(size_bytes, GRANULE_BYTES))
        with self._lock:
            used = self._statistics["allocated_bytes.all.current"]
            limit = self.capacity_bytes
            if FAULTS.on_request() or (limit is not None and used + whole > limit):
                of = "" if limit is None else f" of {format_bytes(limit)}"
                msg = (
                    f"the simulated device is out of memory: {format_bytes(whole)} were "
                    f"asked for, {format_bytes(used)}{of} are in use"
                )
                raise torch.OutOfMemoryError(msg)
            spare = self._spare[whole]
            if not spare:
                self._count("reserved", whole)
            block = spare.pop() if spare else ctypes.create_string_buffer(whole)
            self._count("requested", size_bytes)
            self._count("allocated", whole)
            return block

    def _released(self, managed: Any) -> None:
        with self._lock:
            address = ctypes.addressof(managed.contents)
            _, block, size_bytes = self._held.pop(address)
            whole = ctypes.sizeof(block)
            ctypes.memset(block, _POISON, whole)
            self._spare[whole].append(block)
            self._count("requested", -size_bytes)
            self._count("allocated", -whole)

    def _count(self, what: str, change_bytes: int) -> None:
        current, peak = (f"{what}_bytes.all.{which}" for which in ("current", "peak"))
        self._statistics[current] += change_bytes
        self._statistics[peak] = max(self._statistics[peak], self._statistics[current])


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _type_of(dtype: torch.dtype) -> _Type:
    name = str(dtype).removeprefix("torch.").rstrip("0123456789")
    return _Type(_CODES[name], dtype.itemsize * 8, 1)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the CPU on the memory of one of the device: for kernels."""
    storage = tensor.untyped_storage()
    host = torch.empty(0, dtype=tensor.dtype, device="cpu")
    if not storage.nbytes():
        return host.as_strided(tensor.shape, tensor.stride())
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    block = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return host.set_(block, tensor.storage_offset(), tensor.shape, tensor.stride())
