"""The memory of a loss that the caller described, also for batches of another size."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from remat.capture.outputs import FakeOutputs
from remat.core.errors import CaptureError
from remat.profile.optimizer_memory import LossMemory, loss_bytes


class DescribedLoss:
    """A loss, and what it was found to need.

    A loss with its targets inside accepts outputs for these targets alone. For a batch
    whose outputs are nowhere larger, what it needs for its own is enough.

    Parameters
    ----------
    loss
        From the model's outputs to a scalar.
    """

    def __init__(self, loss: Callable[[Any], torch.Tensor]) -> None:
        self.loss = loss
        self._known: dict[tuple[int, ...], LossMemory] = {}

    def memory(self, outputs: FakeOutputs) -> LossMemory:
        """Return what the loss needs for these outputs, or more.

        Raises
        ------
        CaptureError
            If the loss cannot be predicted for them, and for no larger ones either.
        """
        sizes = tuple(output.untyped_storage().nbytes() for output in outputs.tensors)
        try:
            memory = loss_bytes(self.loss, outputs)
        except CaptureError as error:
            enough = [
                known
                for other, known in self._known.items()
                if len(other) == len(sizes)
                and all(one >= now for one, now in zip(other, sizes, strict=True))
            ]
            if enough:
                return min(enough, key=lambda known: known.peak_bytes)
            if not self._known:
                raise
            shapes = [tuple(output.shape) for output in outputs.tensors]
            msg = (
                f"{error}. It worked for the example, but not for outputs of the shapes "
                f"{shapes}, which are larger: fit the largest batch first, or let the "
                "loss take its targets for as many rows as it is given (y[:len(outputs)])"
            )
            raise CaptureError(msg) from error
        # The tensors may be those of one batch, which must not stay.
        self._known[sizes] = replace(memory, read=())
        return memory
