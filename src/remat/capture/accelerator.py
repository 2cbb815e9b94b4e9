"""Steps traced on the CPU as an accelerator would run them.

A build of torch without CUDA cannot take a gradient of a tensor that says it is on a
CUDA device, not even of a fake one: autograd looks for the device's streams. So a step
is traced on tensors of the CPU, and where the two devices take a composite operator
apart otherwise, it is taken apart as on an accelerator:

* attention becomes the flash or the memory-efficient kernel, by the rules of torch's
  ``sdp_utils.cpp``, with what these save: the sums of exponentials, seed and offset;
* dropout is one operator that leaves a mask of one byte an element;
* autocast computes in single precision what CUDA's lists say (``autocast_mode.h``),
  and ``torch.autocast("cuda")`` is in force.

:data:`TRACED_OTHERWISE` says what differs all the same.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from remat.capture.dropout import has_no_effect
from remat.core.hardware import Hardware
from remat.torch_compat.attributes import composite_kernel, schema_of
from remat.torch_compat.names import (
    attention_of_products,
    efficient_attention,
    flash_attention,
)
from remat.torch_compat.patches import (
    autocast_kernels,
    autocast_of_cuda,
    patched,
    python_kernels,
)

_aten = torch.ops.aten

TRACED_OTHERWISE = (
    "batch norm is traced as torch's own kernel, not cuDNN's, whose reserve is not counted",
    "what cuBLAS keeps is not counted: 66 MiB from Hopper cards on, 18 MiB on others",
    "attention is torch's flash kernel also where a Hopper card would take cuDNN's",
    "recurrent layers and nn.RMSNorm are traced as on the CPU",
    "layer norm of low precision keeps its statistics in that precision",
    "layouts are those of the CPU's kernels",
    "convolutions take copies of their arguments as scratch memory, as upper bound",
)
"""In what a traced step is known to differ from one on the accelerator."""

_HALVES = (torch.float16, torch.bfloat16)
_MOST_HEAD_DIM = 256
_ALIGNED = 8

_hardware: ContextVar[Hardware | None] = ContextVar("hardware", default=None)


def hardware_now() -> Hardware | None:
    """Return the device that steps are traced for, ``None`` for that which is here."""
    return _hardware.get()


def is_accelerated() -> bool:
    """Return whether steps are traced for an accelerator that is not here."""
    hardware = _hardware.get()
    return hardware is not None and hardware.kind != "cpu"


@contextmanager
def traced_for(hardware: Hardware | None) -> Generator[None]:
    """Trace steps for a device until the end of the block; ``None`` changes nothing."""
    token = _hardware.set(hardware)
    try:
        if is_accelerated():
            # Other threads that compile wait.
            with patched(autocast_of_cuda), accelerator_operators():
                yield
        else:
            yield
    finally:
        _hardware.reset(token)


@contextmanager
def costed_for(hardware: Hardware) -> Generator[None]:
    """Take the costs of what is traced already from another device of the same kind."""
    token = _hardware.set(hardware)
    try:
        yield
    finally:
        _hardware.reset(token)


@contextmanager
def accelerator_operators() -> Generator[None]:
    """Trace composite operators as an accelerator takes them apart."""
    kernels: dict[Any, Callable[..., Any]] = {
        _aten.dropout.default: _dropout,
        _aten.scaled_dot_product_attention.default: _attention,
    }
    in_single = {op: _in_single_precision(op) for op in _single_precision()}
    in_single |= {op: _with_single_result(op) for op in _single_results()}
    with patched(python_kernels(kernels), autocast_kernels(in_single)):
        yield


def _dropout(input_: Tensor, p: float, train: bool) -> Tensor:  # noqa: FBT001
    if has_no_effect(input_, p, train=train):
        return input_
    if p == 1:
        return composite_kernel(_aten.dropout.default)(input_, p, train)
    return _aten.native_dropout.default(input_, p, train)[0]


def _attention(  # noqa: PLR0913 - the operator has that many
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Take attention apart as ``sdp_utils.cpp`` chooses."""
    given = (query, key, value)
    is_square = query.size(-2) == key.size(-2)
    if _takes_flash(given, attn_mask) and (is_square or not is_causal):
        scale = query.size(-1) ** -0.5 if scale is None else scale
        padded = [_padded(t) for t in given]
        out = flash_attention(
            *padded, dropout_p, is_causal, return_debug_mask=False, scale=scale
        )[0]
        return out[..., : value.size(-1)]
    if _takes_efficient(given):
        bias = _bias(attn_mask, query, key)
        needs_sums = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        return efficient_attention(
            *given, bias, needs_sums, dropout_p, is_causal, scale=scale
        )[0]
    return attention_of_products(
        *given, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _takes_flash(given: tuple[Tensor, ...], mask: Tensor | None) -> bool:
    query, key, value = given
    return (
        mask is None
        and all(t.dim() == 4 and t.dtype in _HALVES for t in given)
        and query.size(-1) == key.size(-1) == value.size(-1) <= _MOST_HEAD_DIM
        and query.dtype == key.dtype == value.dtype
        and all(t.stride(-1) == 1 for t in given)
    )


def _takes_efficient(given: tuple[Tensor, ...]) -> bool:
    query, key, value = given
    align = _ALIGNED if query.dtype in _HALVES else _ALIGNED // 2
    return (
        all(t.dim() == 4 and t.dtype in (*_HALVES, torch.float32) for t in given)
        and query.dtype == key.dtype == value.dtype
        and query.size(-1) == key.size(-1)
        and query.size(-3) == key.size(-3)
        and query.size(-1) % align == value.size(-1) % align == 0
        and all(t.stride(-1) == 1 for t in given)
    )


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.size(-1) % _ALIGNED
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask as the memory-efficient kernel takes it: added, and aligned."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        added = torch.zeros_like(mask, dtype=query.dtype)
        mask = added.masked_fill(mask.logical_not(), float("-inf"))
    missing = -mask.size(-1) % _ALIGNED
    if missing:
        mask = functional.pad(mask, (0, missing))[..., : -missing or None]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


# --- autocast -----------------------------------------------------------

_SINGLE = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist cdist renorm logsumexp
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
"""
"""``AT_FORALL_FP32`` of ``ATen/autocast_mode.h``, torch 2.13."""

_SINGLE_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
sum sum.dim_IntList
"""
"""``AT_FORALL_FP32_SET_OPT_DTYPE`` of the same file."""


def _overloads(names: str) -> list[Any]:
    pairs = [name.partition(".") for name in names.split()]
    return [getattr(getattr(_aten, name), over or "default") for name, _, over in pairs]


def _single_precision() -> list[Any]:
    return _overloads(_SINGLE)


def _single_results() -> list[Any]:
    return _overloads(_SINGLE_RESULT)


def _in_single_precision(operator: Any) -> Callable[..., Any]:
    """Return a kernel that casts what is of low precision before it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # Other threads may run meanwhile, which are of the CPU.
        if not is_accelerated():
            return operator(*args, **kwargs)
        single = {name: _to_single(value) for name, value in kwargs.items()}
        return operator(*map(_to_single, args), **single)

    return run


def _to_single(value: Any) -> Any:
    is_low = isinstance(value, Tensor) and value.dtype in _HALVES
    return value.to(torch.float32) if is_low else value


def _with_single_result(operator: Any) -> Callable[..., Any]:
    """Return a kernel that asks for a result in single precision."""
    names = [argument.name for argument in schema_of(operator).arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        is_free = "dtype" not in names[: len(args)] and kwargs.get("dtype") is None
        if is_accelerated() and is_free and args[0].dtype in _HALVES:
            kwargs["dtype"] = torch.float32
        return operator(*args, **kwargs)

    return run
