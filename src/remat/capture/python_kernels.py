"""Other Python kernels for operators while a step is traced.

The dispatcher asks an operator's Python kernels first, if it has any for the key. They
are everybody's, so they are replaced for as short as can be, by one thread at a time.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

KEYS = (
    torch._C.DispatchKey.Autograd,
    torch._C.DispatchKey.CompositeImplicitAutograd,
)
"""The keys under which the tracer finds what takes an operator apart."""

_LOCK = threading.RLock()


@contextmanager
def python_kernels(
    kernels: Mapping[Any, Callable[..., Any] | None],
) -> Generator[None]:
    """Trace with these Python kernels: operator overload -> kernel, or ``None``."""
    with _LOCK:
        before = {op: {k: op.py_kernels.get(k) for k in KEYS} for op in kernels}
        _install({op: dict.fromkeys(KEYS, kernel) for op, kernel in kernels.items()})
        try:
            yield
        finally:
            _install(before)


def _install(kernels: Mapping[Any, Mapping[Any, Callable[..., Any] | None]]) -> None:
    for op, by_key in kernels.items():
        for key, kernel in by_key.items():
            if kernel is None:
                op.py_kernels.pop(key, None)
            else:
                op.py_kernels[key] = kernel
        op._dispatch_cache.clear()
