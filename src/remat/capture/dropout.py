"""Dropout on the CPU as eager PyTorch computes it, with a mask of one byte per element.

Eager PyTorch draws noise of the input's type, divides it by the share that is kept, and
multiplies. The tracer has one operator for that, which multiplies by the inverse of the
share instead: for about a seventh of all shares that is another number in the last
digit, and in half precision the gradient is another one too. So the steps of eager
PyTorch are traced, except that what is drawn is a mask, of bytes because they become
numbers three times faster than booleans do. The noise can be made from it again, which
is cheaper than to keep it, or to draw; and since all that is kept is divided alike, one
division will do. The native core draws large masks about five times as fast as PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from remat.native import native
from remat.torch_compat.attributes import composite_kernel, traced_kernel
from remat.torch_compat.names import disable_current_modes, unset_fake_temporarily
from remat.torch_compat.patches import patched, python_kernels
from remat.torch_compat.sharding import in_pieces_like, local_part

_aten = torch.ops.aten

_ALPHA = 1.7580993408473766
"""Of alpha dropout (Klambauer et al. 2017), to as many digits as PyTorch has."""

_LIBRARY = torch.library.Library("remat", "DEF")
_LIBRARY.define(
    "dropout_mask(SymInt[] size, SymInt[] stride, float keep) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)


def _empty_mask(size: Sequence[int], stride: Sequence[int], _: float) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.uint8, device="cpu")


def _draw_mask(size: Sequence[int], stride: Sequence[int], keep: float) -> torch.Tensor:
    mask = _empty_mask(size, stride, keep)
    in_memory = mask.as_strided((mask.numel(),), (1,))
    if mask.untyped_storage().nbytes() != mask.numel() or not _core_draws_alike():
        # The generator gives the same numbers whatever type they are stored as.
        return mask.bernoulli_(keep)
    state = torch.get_rng_state()
    draw_mask(state.numpy(), in_memory.numpy(), keep)
    torch.set_rng_state(state)
    return mask


@native
def draw_mask(state: NDArray[np.uint8], mask: NDArray[np.uint8], keep: float) -> None:
    """Fill a mask from a state of the CPU's generator, and move the state on.

    Parameters
    ----------
    state
        As ``torch.get_rng_state`` returns it.
    mask
        Shape ``(n,)``; becomes 1 with probability ``keep`` and 0 otherwise.
    keep
        Between 0 and 1.
    """
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state))
    torch.from_numpy(mask).bernoulli_(keep, generator=generator)
    state[:] = generator.get_state().numpy()


@cache
def _core_draws_alike() -> bool:
    """Return whether the native core draws what PyTorch draws here.

    PyTorch has another kernel, of MKL, which draws otherwise.
    """
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    mask = torch.empty(1001, dtype=torch.uint8, device="cpu")
    for keep in (0.9, 0.25):
        draw_mask(state.numpy(), mask.numpy(), keep)
        expected = torch.empty_like(mask).bernoulli_(keep, generator=generator)
        if not torch.equal(mask, expected):
            return False
    return torch.equal(state, generator.get_state())


_LIBRARY.impl("dropout_mask", _draw_mask, "CompositeExplicitAutograd")
torch.library.register_fake("remat::dropout_mask", _empty_mask, lib=_LIBRARY)

_TRACED = traced_kernel(_aten.dropout.default)


def _mask(input_: torch.Tensor, p: float) -> torch.Tensor:
    # The noise lies as ``empty_like`` lies, which eager PyTorch fills. Of a tensor in
    # pieces, each process draws for its own.
    like = torch.empty_like(local_part(input_))
    mask = torch.ops.remat.dropout_mask(like.shape, like.stride(), 1 - p)
    return in_pieces_like(input_, mask.to(input_.dtype))


def _noise(input_: torch.Tensor, p: float) -> torch.Tensor:
    kept = _kept(input_.dtype, 1 - p)
    # Nothing times infinity is no number, but divided by the share it is nothing.
    mask = _mask(input_, p)
    return mask / (1 - p) if math.isinf(kept) else mask * kept


def _kept(dtype: torch.dtype, keep: float) -> float:
    """Return what eager PyTorch multiplies by where it keeps."""
    with unset_fake_temporarily(), disable_current_modes():
        return torch.ones((), dtype=dtype, device="cpu").div_(keep).item()


def has_no_effect(input_: torch.Tensor, p: float, *, train: bool) -> bool:
    """Return whether dropout returns its input.

    Raises
    ------
    RuntimeError
        If the share is none, in the words of eager PyTorch.
    """
    if not 0 <= p <= 1:
        msg = f"dropout probability has to be between 0 and 1, but got {p}"
        raise RuntimeError(msg)
    return p == 0 or not train or input_.numel() == 0


def _factors(input_: torch.Tensor, p: float) -> torch.Tensor:
    if p == 1:
        return torch.zeros((), dtype=input_.dtype, device=input_.device)
    return _noise(input_, p)


def _dropout(input_: torch.Tensor, p: float) -> torch.Tensor:
    return input_.mul(_factors(input_, p))


def _dropout_in_place(input_: torch.Tensor, p: float) -> torch.Tensor:
    return input_.mul_(_factors(input_, p))


def _alpha_dropout(input_: torch.Tensor, p: float) -> torch.Tensor:
    if p == 1:
        return input_.mul(_factors(input_, p))
    scale, shift = _alpha_factors(p)
    mask = _mask(input_, p)
    return input_.mul(mask.mul(scale)).add(mask.add(-1).mul(_ALPHA * scale).add(shift))


def _alpha_factors(p: float) -> tuple[float, float]:
    scale = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    return scale, _ALPHA * scale * p


def _kernel(
    on_cpu: Callable[[torch.Tensor, float], torch.Tensor],
    elsewhere: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Return a kernel that leaves other devices to another one."""

    def kernel(input_: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001
        if input_.device.type != "cpu":
            return elsewhere(input_, p, train)
        return input_ if has_no_effect(input_, p, train=train) else on_cpu(input_, p)

    return kernel


def eager_dropout() -> AbstractContextManager[None]:
    """Trace dropout as eager PyTorch computes it."""
    in_place, alpha = _aten.dropout_.default, _aten.alpha_dropout.default
    kernels = {
        _aten.dropout.default: _kernel(_dropout, _TRACED),
        in_place: _kernel(_dropout_in_place, composite_kernel(in_place)),
        alpha: _kernel(_alpha_dropout, composite_kernel(alpha)),
    }
    return patched(python_kernels(kernels))
