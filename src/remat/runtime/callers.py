"""What calls a fitted model: tracers, transforms and wrappers around the call."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel

_TRACING_MODES = {
    torch._C._TorchDispatchModeKey.FAKE: "a FakeTensorMode",
    torch._C._TorchDispatchModeKey.PROXY: "make_fx or torch.export",
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "make_fx or torch.export",
}


def tracer_around() -> str | None:
    """Return what records the call instead of training, or ``None``."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    for key, name in _TRACING_MODES.items():
        if torch._C._get_dispatch_mode(key) is not None:
            return name
    return None


def transform_around() -> str | None:
    """Return the innermost transform of ``torch.func`` around the call, or ``None``."""
    interpreter: Any = peek_interpreter_stack()
    return None if interpreter is None else interpreter.key().name.lower()


def gradient_buckets_bytes() -> int:
    """Return the bytes of the gradient buckets of the wrapper around the call.

    0 where no ``DistributedDataParallel`` is around it. Its buckets hold each gradient
    once more, unless gradients are views of them.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or wrapper.gradient_as_bucket_view:
        return 0
    return sum(p.nbytes for p in wrapper.module.parameters() if p.requires_grad)


def _forward_hooks(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    yield from modules._global_forward_hooks.values()
    yield from modules._global_forward_pre_hooks.values()


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after the module's own forward."""
    return any(True for _ in _forward_hooks(module))


def has_untraceable_hooks(module: nn.Module) -> bool:
    """Whether the module's own hooks must stay outside of what is traced.

    Hooks for its backward pass cannot be traced; others say themselves that they must
    not be, as those of ``fully_shard``.
    """
    for_backward: Iterable[Any] = (
        module._backward_hooks,
        module._backward_pre_hooks,
        modules._global_backward_hooks,
        modules._global_backward_pre_hooks,
    )
    return any(for_backward) or any(
        getattr(hook, "_torchdynamo_disable", False) for hook in _forward_hooks(module)
    )
