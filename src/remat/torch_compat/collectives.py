"""Operators in which all processes of a group take part, and what waits for them."""

from typing import Any

from remat.torch_compat.names import OpOverload, wait_tensor

_NAMESPACES = frozenset({"_c10d_functional", "_dtensor"})
"""Where the traced operators are that exchange something with other processes."""


def is_collective(target: Any) -> bool:
    """Return whether an operator exchanges something with other processes."""
    return (
        isinstance(target, OpOverload)
        and target.namespace in _NAMESPACES
        and target is not wait_tensor
    )


def exchange_of(target: Any) -> str:
    """Return the name of a collective operator, such as ``"all_reduce"``."""
    return str(target).split(".")[1]


def is_wait(target: Any) -> bool:
    """Return whether an operator waits for the result of a collective one."""
    return target is wait_tensor
