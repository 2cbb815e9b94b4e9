"""What is known of a training loop before its first batch comes."""

from dataclasses import dataclass

from torch.optim import Optimizer


@dataclass(frozen=True)
class AwaitedBatch:
    """How a model is planned once its training loop calls it for the first time.

    Parameters
    ----------
    optimizer
        Must be as it was after planning; ``None`` if none is known.
    accumulate
        Whether steps that add to gradients of an earlier one are planned, too.
    batches_ahead
        How many batches the loop holds besides the one that it trains on.
    """

    optimizer: Optimizer | None
    accumulate: bool = False
    batches_ahead: int = 0
