"""Run operators in which all processes of a group take part, until they have ended.

Traced code waits for each right where it began it. On CPUs the threads of gloo hold on
to what they were given, and to what they made, until they come to let go of it, which
is a moment after they said that it is done. A schedule may count these bytes as free by
then, so here that moment is waited for as well.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from remat.torch_compat.attributes import holder_count
from remat.torch_compat.collectives import exchange_of
from remat.torch_compat.names import tree_leaves, wait_tensor

_PATIENCE_NS = 50_000_000
_MOMENT_S = 20e-6


def exchange(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a collective operator and wait for what it makes; return that.

    Parameters
    ----------
    target
        The operator.
    args, kwargs
        Its arguments.
    """
    given = _tensors_in((args, kwargs))
    before = [holder_count(tensor) for tensor in given]
    result = target(*args, **kwargs)
    made = _tensors_in(result)
    for tensor in made:
        wait_tensor(tensor)
    if made[0].device.type != "cpu":
        return result
    if exchange_of(target).startswith("reduce_scatter"):
        # It adds up in a copy of its own, and who holds that shows nowhere.
        time.sleep(_MOMENT_S)
    end_ns = time.monotonic_ns() + _PATIENCE_NS
    while time.monotonic_ns() < end_ns:
        is_given_back = all(
            holder_count(tensor) <= count
            for tensor, count in zip(given, before, strict=True)
        )
        if is_given_back and all(holder_count(tensor) == 1 for tensor in made):
            break
        time.sleep(_MOMENT_S)
    return result


def _tensors_in(items: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(items) if isinstance(leaf, torch.Tensor)]
