"""What the matrix library of an accelerator keeps, once it has been called.

Torch gives each handle of cuBLAS a block of its own caching allocator, at the first
product of matrices, and never frees it. A thread has a handle of its own, and a step
multiplies in two of them: the caller's in the forward pass, and that of autograd for
the device in the backward pass. So there are two such blocks from the first step on,
which belong to no tensor (``CublasHandlePool.cpp``, torch 2.11 to 2.15). cuDNN asks for
its scratch memory at each call, which is measured with the operators.
"""

import os
import re
from collections.abc import Mapping

import torch

from remat.torch_compat.accelerators import device_module, is_accelerator

_THREADS = 2
"""The caller's, and autograd's for the device."""

_HOPPER = (9, 0)
_KIB = 1024
_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * _KIB
_HOPPER_WORKSPACE_BYTES = 8 * 4096 * _KIB
_LIGHT_WORKSPACE_KIB = 1024
"""``parseChosenWorkspaceSize`` and ``parseCUDABlasLtWorkspaceSize``."""


def library_bytes(place: torch.device) -> int:
    """Return the bytes that libraries keep on a device during training.

    They count for steps without a product as well: what ran before in the process, such
    as an evaluation, may have multiplied. The CPU's libraries keep nothing that torch
    knows of.
    """
    if not is_accelerator(place):
        return 0
    module = device_module(place)
    # That one says itself what its library keeps, which is simulated.
    own = getattr(module, "library_workspace_bytes", None)
    if own is not None:
        return _THREADS * own()
    is_hopper = module.get_device_capability(place) == _HOPPER
    return _THREADS * cublas_bytes(os.environ, is_hopper=is_hopper)


def cublas_bytes(environment: Mapping[str, str], *, is_hopper: bool) -> int:
    """Return the bytes that torch keeps for one thread that multiplies matrices.

    Parameters
    ----------
    environment
        The process's variables: ``CUBLAS_WORKSPACE_CONFIG`` (pairs of KiB and count)
        and ``CUBLASLT_WORKSPACE_SIZE`` (KiB).
    is_hopper
        Whether the card is of compute capability 9.0, which gets more.

    Examples
    --------
    >>> cublas_bytes({}, is_hopper=False)
    9568256
    >>> cublas_bytes({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, is_hopper=True)
    1179648
    """
    pairs = re.findall(
        ":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", "")
    )
    chosen = sum(int(size) * int(count) * _KIB for size, count in pairs)
    if not pairs:
        chosen = _HOPPER_WORKSPACE_BYTES if is_hopper else _WORKSPACE_BYTES
    # The sum of a product and a row goes through a second library, with a block beside
    # the first that is never larger.
    text = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    light = int(text) if text.isdecimal() else _LIGHT_WORKSPACE_KIB
    return chosen + min(chosen, light * _KIB)
