"""How the gradients of divided parameters are divided, which need not be as these are.

Of an embedding whose rows are divided among processes, each process gets the gradient
of all rows. Only the tracer knows: its graph has parts of tensors alone.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from remat.core.errors import CaptureError
from remat.torch_compat.patches import gradient_divisions, patched
from remat.torch_compat.sharding import Division, division_of


class DividedGradients:
    """What a trace says of the gradients of divided leaves.

    Parameters
    ----------
    inputs
        The arguments of the function that is traced, which are not held.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._leaves = {
            position: (id(value), division)
            for position, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
            if (division := division_of(value)) is not None
        }
        self._gradients: dict[int, Division | None] = {}

    def noted(self) -> AbstractContextManager[None]:
        """Take note of what is traced inside."""
        if not self._leaves:
            return nullcontext()
        return patched(gradient_divisions(self._gradients))

    def otherwise(self) -> dict[int, Division]:
        """Return by the id of a leaf its gradient's division, if it is not its own.

        Raises
        ------
        CaptureError
            If the trace did not say.
        """
        if not self._leaves.keys() <= self._gradients.keys():
            msg = (
                "the trace does not say how the gradients of parameters that are divided "
                "among processes (DTensor) are divided, so the memory of an optimizer is "
                "not known: please report the model and the version of torch"
            )
            raise CaptureError(msg)
        found: dict[int, Division] = {}
        for position, (leaf, own) in self._leaves.items():
            division = self._gradients[position]
            if division is not None and division.placements != own.placements:
                found[leaf] = division
        return found
