"""What the matrix library of an accelerator keeps, once it has been called.

Torch gives each handle of cuBLAS a block of its own caching allocator, at the first
product of matrices, and never frees it. A thread has a handle of its own, and a step
multiplies in two of them: the caller's in the forward pass, and that of autograd for
the device in the backward pass. So there are two such blocks from the first step on,
which belong to no tensor (``CublasHandlePool.cpp``, torch 2.11 to 2.15); and more, if
other threads multiplied before, or the same on other streams. cuDNN asks for
its scratch memory at each call, which is measured with the operators.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from remat.torch_compat.accelerators import device_module, is_accelerator
from remat.torch_compat.attributes import schema_of

_PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "linear",
        "matmul",
        "_addmm_activation",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "_int_mm",
    ]
)
"""Names of the operators that call cuBLAS."""

_THREADS = 2
"""The caller's, and autograd's for the device."""

_HOPPER = (9, 0)
"""Compute capability. Newer cards get as much from newer versions of torch."""

_KIB = 1024
_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * _KIB
_HOPPER_WORKSPACE_BYTES = 8 * 4096 * _KIB
_LIGHT_WORKSPACE_KIB = 1024
"""``parseChosenWorkspaceSize`` and ``parseCUDABlasLtWorkspaceSize``."""


def library_bytes(modules: Iterable[fx.GraphModule], place: torch.device) -> int:
    """Return the bytes that libraries keep on a device during traced steps.

    They count for steps without a product where they are there already: an evaluation,
    or another model, may have multiplied before.

    Parameters
    ----------
    modules
        The traced steps.
    place
        Where they run. The CPU's libraries keep nothing that torch knows of.
    """
    if not is_accelerator(place):
        return 0
    module = device_module(place)
    # That one says itself what its library keeps, which is simulated.
    own = getattr(module, "library_workspace_bytes", None)
    if own is not None:
        return own(_THREADS)
    is_hopper_or_newer = module.get_device_capability(place) >= _HOPPER
    size_bytes = cublas_bytes(os.environ, is_hopper_or_newer=is_hopper_or_newer)
    block_bytes = workspace_bytes(os.environ, is_hopper_or_newer=is_hopper_or_newer)
    count = block_count(block_bytes, module.memory_snapshot())
    is_used = count > 0 or any(map(has_product, modules))
    return max(count, _THREADS) * size_bytes if is_used else 0


def has_product(module: fx.GraphModule) -> bool:
    """Return whether a traced step multiplies matrices."""
    schemas = map(schema_of, {node.target for node in module.graph.nodes})
    return any(s and s.name.partition("::")[2] in _PRODUCTS for s in schemas)


def block_count(size_bytes: int, segments: Iterable[Mapping[str, Any]]) -> int:
    """Return how many blocks that were asked for with this size are in use.

    ``segments`` are those of ``torch.cuda.memory_snapshot()``.
    """
    return sum(
        block["state"] == "active_allocated" and block["requested_size"] == size_bytes
        for segment in segments
        for block in segment["blocks"]
    )


def workspace_bytes(environment: Mapping[str, str], *, is_hopper_or_newer: bool) -> int:
    """Return the bytes that torch gives cuBLAS in each thread that uses it.

    Examples
    --------
    >>> workspace_bytes({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, is_hopper_or_newer=True)
    131072
    """
    pairs = re.findall(
        ":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", "")
    )
    if pairs:
        return sum(int(size) * int(count) * _KIB for size, count in pairs)
    return _HOPPER_WORKSPACE_BYTES if is_hopper_or_newer else _WORKSPACE_BYTES


def cublas_bytes(environment: Mapping[str, str], *, is_hopper_or_newer: bool) -> int:
    """Return the bytes that torch keeps for one thread that multiplies matrices.

    Parameters
    ----------
    environment
        The process's variables: ``CUBLAS_WORKSPACE_CONFIG`` (pairs of KiB and count)
        and ``CUBLASLT_WORKSPACE_SIZE`` (KiB).
    is_hopper_or_newer
        Whether the card is a Hopper or newer, which gets more.

    Examples
    --------
    >>> cublas_bytes({}, is_hopper_or_newer=False)
    9568256
    >>> cublas_bytes({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, is_hopper_or_newer=True)
    262144
    """
    chosen = workspace_bytes(environment, is_hopper_or_newer=is_hopper_or_newer)
    # The sum of a product and a row goes through a second library, with a block beside
    # the first that is never larger.
    text = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    light = int(text) if text.isdecimal() else _LIGHT_WORKSPACE_KIB
    return chosen + min(chosen, light * _KIB)
