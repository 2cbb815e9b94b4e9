"""What calls a fitted model: tracers, transforms and wrappers around the call."""

from typing import Any

import torch
from torch import nn

from remat.torch_compat.attributes import (
    active_wrapper,
    forward_hooks,
    has_backward_hooks,
    lays_out_buckets,
    must_not_be_traced,
    smallest_bucket_bytes,
    viewed,
)
from remat.torch_compat.names import (
    DispatchModeKey,
    get_dispatch_mode,
    peek_interpreter_stack,
)

_TRACING_MODES = {
    DispatchModeKey.FAKE: "a FakeTensorMode",
    DispatchModeKey.PROXY: "make_fx or torch.export",
    DispatchModeKey.FUNCTIONAL: "make_fx or torch.export",
}


def tracer_around() -> str | None:
    """Return what records the call instead of training, or ``None``."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    for key, name in _TRACING_MODES.items():
        if get_dispatch_mode(key) is not None:
            return name
    return None


def transform_around() -> str | None:
    """Return the innermost transform of ``torch.func`` around the call, or ``None``."""
    interpreter: Any = peek_interpreter_stack()
    return None if interpreter is None else interpreter.key().name.lower()


def gradient_buckets_bytes() -> int:
    """Return the bytes of the gradient buckets of the wrapper around the call.

    0 where no ``DistributedDataParallel`` is around it. Its buckets hold each gradient
    once more, during the whole step. Gradients that are views of them already count
    with the plan; those that are yet to be views do so from when they are computed.
    What passes under ``no_sync()`` left are no views, though they are to become some.
    """
    wrapper = active_wrapper()
    if wrapper is None:
        return 0
    has_views = wrapper.gradient_as_bucket_view
    return sum(
        p.nbytes
        for p in wrapper.module.parameters()
        if p.requires_grad
        and not (has_views and p.grad is not None and viewed(p.grad) is not None)
    )


def first_bucket_bytes() -> int | None:
    """Return the bytes of gradients that the wrapper around the call exchanges first.

    ``None`` where no ``DistributedDataParallel`` is around it.
    """
    wrapper = active_wrapper()
    if wrapper is None:
        return None
    return smallest_bucket_bytes(wrapper)


def notes_arrivals() -> bool:
    """Whether the wrapper around the call notes in which order gradients come.

    ``DistributedDataParallel`` does until it has laid out its buckets by it.
    """
    wrapper = active_wrapper()
    return wrapper is not None and lays_out_buckets(wrapper)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the module's own forward."""
    return any(True for _ in forward_hooks(module))


def has_untraceable_hooks(module: nn.Module) -> bool:
    """Whether the module's own hooks must stay outside of what is traced.

    Hooks for its backward pass cannot be traced; others say themselves that they must
    not be, as what ``torch.compiler.disable`` returns.
    """
    return has_backward_hooks(module) or any(
        must_not_be_traced(hook) for hook in forward_hooks(module)
    )
