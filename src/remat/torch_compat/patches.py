"""Torch changed for a moment: one lock, one context manager, off when tracing is over.

What is changed belongs to the whole process. So only one thread changes it at a time,
under the lock that ``torch.compile`` takes to trace: what other threads compile never
sees it, and threads that run compiled steps do not look there.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from remat.torch_compat.names import (
    DispatchKey,
    FakeTensorMode,
    MemoryFormatMeta,
    compile_lock,
)

Patch = Callable[[], Callable[[], None]]
"""Changes torch, and returns what changes it back."""

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""The keys under which the tracer finds what takes an operator apart."""


@contextmanager
def alone() -> Generator[None]:
    """Trace in one thread at a time; a thread may enter again."""
    with compile_lock:
        yield


@contextmanager
def patched(*patches: Patch) -> Generator[None]:
    """Trace with changes to torch, in one thread at a time."""
    with alone(), ExitStack() as undo:
        for patch in patches:
            undo.callback(patch())
        yield


def fake_results(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """Return a patch that wraps what runs an operator on fake tensors.

    Parameters
    ----------
    wrap
        From torch's function of the mode, the operator, its types, arguments and
        keywords to one in its place.
    """

    def patch() -> Callable[[], None]:
        dispatch = FakeTensorMode._dispatch_impl
        # What was found for fake tensors before is remembered across traces.
        FakeTensorMode.cache_clear()
        FakeTensorMode._dispatch_impl = wrap(dispatch)

        def undo() -> None:
            FakeTensorMode._dispatch_impl = dispatch
            FakeTensorMode.cache_clear()

        return undo

    return patch


def gradient_formats(
    expected: Callable[[torch.Tensor], torch.memory_format | None],
) -> Patch:
    """Return a patch that says in which format gradients of outputs are expected.

    Parameters
    ----------
    expected
        From an output to the format, ``None`` for what torch expects.
    """

    def patch() -> Callable[[], None]:
        descriptor = vars(MemoryFormatMeta)["from_tensor"]
        original = MemoryFormatMeta.from_tensor

        def from_tensor(
            t: torch.Tensor, *args: Any, **kwargs: Any
        ) -> MemoryFormatMeta | None:
            memory_format = expected(t)
            if memory_format is None:
                return original(t, *args, **kwargs)
            return MemoryFormatMeta(memory_format=memory_format)

        def undo() -> None:
            MemoryFormatMeta.from_tensor = descriptor

        MemoryFormatMeta.from_tensor = staticmethod(from_tensor)
        return undo

    return patch


def python_kernels(kernels: Mapping[Any, Callable[..., Any] | None]) -> Patch:
    """Return a patch that gives operators other Python kernels, or none.

    The dispatcher asks an operator's Python kernels first, if it has any for the key.

    Parameters
    ----------
    kernels
        From operator overloads to kernels, or ``None``.
    """

    def patch() -> Callable[[], None]:
        before = {op: {k: op.py_kernels.get(k) for k in KEYS} for op in kernels}
        _install({op: dict.fromkeys(KEYS, kernel) for op, kernel in kernels.items()})
        return lambda: _install(before)

    return patch


def _install(kernels: Mapping[Any, Mapping[Any, Callable[..., Any] | None]]) -> None:
    for op, by_key in kernels.items():
        for key, kernel in by_key.items():
            if kernel is None:
                op.py_kernels.pop(key, None)
            else:
                op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
