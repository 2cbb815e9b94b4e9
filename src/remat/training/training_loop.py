"""What is known of a training loop besides the batch that it calls the model with."""

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True)
class LoopMemory:
    """What a training loop has in memory besides the batch of the step that runs.

    Parameters
    ----------
    batches_ahead
        How many batches like that one.
    batches_early
        How many of these may be there only because a loader's workers brought them
        before their turn; for messages.
    tensors
        What else it holds of each batch, nested.
    held_bytes
        What else it holds during the whole step.
    tangent_bytes
        Buffers for gradients of outputs, from which backward passes take theirs;
        ``None`` where each gradient is a tensor of its own, made by the loss.
    merged_bytes
        Most bytes that are there after the last backward pass, besides what the
        optimizer's step makes, and not during that.
    has_microbatches
        Whether most passes of a step add to the gradients of those before: these count
        in the peak that a percentage is of.
    joins_passes
        Whether one backward pass may go through several forward passes in flight:
        gradients of all wait in autograd then before they are added to existing ones.
    holds_outputs
        Whether what the model has returned, besides its loss, is there until the step
        ends, and not let go before the backward pass begins.
    outputs_leave_with_pass
        Whether it is let go when that pass has returned, and not when the step ends.
    """

    batches_ahead: int = 0
    batches_early: int = 0
    tensors: Any = ()
    held_bytes: int = 0
    tangent_bytes: int | None = None
    merged_bytes: int = 0
    has_microbatches: bool = False
    joins_passes: bool = True
    holds_outputs: bool = True
    outputs_leave_with_pass: bool = False


@dataclass(frozen=True)
class AwaitedBatch:
    """How a model is planned once its training loop calls it for the first time.

    Parameters
    ----------
    optimizer
        Must be as it was after planning; ``None`` if none is known.
    accumulate
        Whether steps that add to gradients of an earlier one are planned, too.
    loop
        What the loop holds.
    """

    optimizer: Optimizer | None
    accumulate: bool = False
    loop: LoopMemory = field(default_factory=LoopMemory)
