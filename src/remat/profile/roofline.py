"""How long operators take on an accelerator that is not here, and their scratch memory.

An operator takes ``max(launch, flops / rate, bytes / bandwidth)``: its processor works
while the next operator is launched. Rate and bandwidth are the maker's peaks
(:class:`~remat.core.hardware.Hardware`) times the share that its class of operators
reaches; where these shares are from is said in ``docs/hardware.md``. On a CPU, which
launches and works in turn, the launch is added.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from remat.core.hardware import Hardware
from remat.profile.arguments import target_name, tensors_in
from remat.profile.operators import OperatorCall

_TYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv", "dot")
_ROWS, _COLUMNS = 128, 32
"""What the flash kernel rounds lengths and head sizes of its sums up to."""

_INDEX_COPIES = 4


def short_name(call: OperatorCall) -> str:
    """Return an operator's name without its overload."""
    return target_name(call.target).removeprefix("aten.").partition(".")[0]


def operator_class(name: str) -> str | None:
    """Return the class of operators whose share of the peak rate is reached.

    ``None`` for what is bound by the memory's bandwidth.

    Examples
    --------
    >>> operator_class("convolution_backward"), operator_class("add")
    ('convolution', None)
    """
    if name in _PRODUCTS:
        return "matmul"
    if "convolution" in name:
        return "convolution"
    return "attention" if "attention" in name else None


@dataclass(frozen=True, slots=True)
class Roofline:
    """Times on a device by its rates.

    Parameters
    ----------
    hardware
        The device.
    """

    hardware: Hardware

    def time_ns(self, call: OperatorCall, flops: int, moved_bytes: int) -> int:
        """Return the time of one run in nanoseconds.

        Parameters
        ----------
        call
            The operator and its arguments.
        flops, moved_bytes
            What it computes, and reads and writes.
        """
        hardware = self.hardware
        of_class = operator_class(short_name(call))
        rate = hardware.rate("float32")
        if of_class is not None:
            rate = hardware.rate(self._type(call, of_class))
            rate = rate * hardware.percent[of_class] // 100
        bandwidth = hardware.bytes_per_s * hardware.percent["memory"] // 100
        work_ns = max(
            math.ceil(flops * 1e9 / max(1, rate)),
            math.ceil(moved_bytes * 1e9 / max(1, bandwidth)),
        )
        if hardware.kind == "cpu":
            return hardware.launch_ns + work_ns
        return max(hardware.launch_ns, work_ns)

    def _type(self, call: OperatorCall, of_class: str) -> str:
        kinds = [
            tensor.dtype
            for tensor in tensors_in([call.args, dict(call.kwargs)])
            if tensor.dtype in _TYPES
        ]
        kind = _TYPES[kinds[0]] if kinds else "float32"
        is_rounded = (
            torch.backends.cudnn.allow_tf32
            if of_class == "convolution"
            else torch.backends.cuda.matmul.allow_tf32
        )
        if kind == "float32" and is_rounded and self.hardware.kind == "cuda":
            return "tf32"
        return kind


Rule = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], int]
"""From the tensors that an operator takes and makes to bytes of scratch memory."""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sum_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(map(_bytes, tensors))


def _if_reduced(inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> int:
    is_reduced = made[0].numel() < inputs[0].numel()
    return _bytes(inputs[0]) if is_reduced else 0


def _flash_sums(inputs: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> int:
    """Bytes of the gradient of the queries in single precision, and of its row sums."""
    batch, heads, length, width = inputs[1].shape
    rows = -(-length // _ROWS) * _ROWS
    columns = -(-width // _COLUMNS) * _COLUMNS
    return 4 * batch * heads * rows * (columns + 1)


_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"

WORKSPACES: dict[str, Rule] = {
    # Kernels for tensor cores take images with channels last, and copy others.
    "convolution": lambda inputs, made: _sum_bytes(inputs[:2]) + _sum_bytes(made),
    "convolution_backward": lambda inputs, made: (
        _sum_bytes(inputs[:3]) + _sum_bytes(made)
    ),
    # flash_api.cpp: dq_accum and softmax_d.
    _FLASH_BACKWARD: _flash_sums,
    # Embedding.cu: indices and their places, sorted, and the sort's own copies.
    "embedding_dense_backward": lambda inputs, _: _INDEX_COPIES * _bytes(inputs[1]),
    # Loss.cpp: the elements, which are then reduced.
    "mse_loss": _if_reduced,
    "smooth_l1_loss": _if_reduced,
    "huber_loss": _if_reduced,
    "logsumexp": lambda inputs, made: _bytes(inputs[0]) + _bytes(made[0]),
}
"""Operator -> its scratch memory on an accelerator; all others have none."""
