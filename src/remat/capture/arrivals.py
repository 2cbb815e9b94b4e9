"""In which order gradients come to the parameters of a traced step.

A step is traced while autograd runs over it as it does in eager PyTorch. So it comes to
the same gradients in the same order.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from remat.torch_compat.patches import gradient_arrivals, patched

_ARRIVALS = "arrivals of gradients"


class Arrivals:
    """Notes in which order gradients come while a step is traced.

    Parameters
    ----------
    inputs
        The arguments of the function that is traced, which are not held.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._asked = [
            position
            for position, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        self._turns: tuple[int, ...] = ()

    def noted(self) -> AbstractContextManager[None]:
        """Trace and take note."""
        return patched(gradient_arrivals(self._note))

    def _note(self, count: int, numbers: list[int]) -> None:
        is_known = count == len(self._asked)
        self._turns = tuple(self._asked[n] for n in numbers) if is_known else ()

    def keep(self, joint: fx.GraphModule) -> None:
        """Keep with the joint graph that was traced last in which order they come."""
        joint.meta[_ARRIVALS] = self._turns


def arrivals_in(joint: fx.GraphModule) -> tuple[int, ...]:
    """Return positions of gradients in the order in which autograd comes to them.

    Also of those that do not exist then. None if no note was kept.
    """
    return joint.meta.get(_ARRIVALS, ())
