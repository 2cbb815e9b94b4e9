"""A memory budget for the ``Trainer`` of transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, cast

import torch
from torch import nn
from torch.optim import Optimizer

from remat.core.errors import CaptureError
from remat.integrations.loading import batches_early
from remat.integrations.training_budget import TrainingBudget, missing
from remat.planning.plan import Plan
from remat.planning.several_devices import Budget
from remat.profile.optimizer_copy import stepping_optimizer
from remat.training.request import PlanOptions

try:
    from transformers import (
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
except ImportError as error:
    raise missing(__name__, "transformers") from error


class MemoryBudgetCallback(TrainerCallback):
    """Lets a ``Trainer`` train within a budget of bytes.

    The model is planned for its first batch, as the ``Trainer`` calls it then: with its
    optimizer, mixed precision, accumulation of gradients and gradient buckets, and with
    the batches that it, and workers of its loader, load ahead. Evaluation and
    prediction run as without a budget, and so does the model after training.

    Parameters
    ----------
    budget, plan, options
        As for :func:`remat.fit`.
    holds_outputs
        Whether something keeps what the model returned during the backward pass, which
        ``Trainer`` does not. A warning says so once where it is kept all the same.

    Raises
    ------
    UnitError, TypeError, ValueError
        If an argument makes no sense. Errors of planning come from ``Trainer.train``.

    Examples
    --------
    ``Trainer(model, args, ..., callbacks=[MemoryBudgetCallback("24 GiB")])``
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        plan: Plan | None = None,
        holds_outputs: bool = False,
        **options: Unpack[PlanOptions],
    ) -> None:
        self.holds_outputs = holds_outputs
        self._budget = TrainingBudget(type(self).__name__, budget, plan, options)

    @property
    def plan(self) -> Plan | None:
        """The plan of the first batch, ``None`` before it came."""
        return self._budget.plan

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Let the first batch be planned for."""
        model: nn.Module = kwargs["model"]
        optimizer: Optimizer = kwargs["optimizer"]
        _check_supported(args)
        step_batches = args.gradient_accumulation_steps
        self._budget.begin(
            model,
            _optimizers(optimizer),
            accumulate=step_batches > 1,
            # It loads all batches of an optimizer's step, and the one after them.
            batches_ahead=step_batches + _copies_batches(args),
            batches_early=batches_early([kwargs.get("train_dataloader")], args.device),
            holds_outputs=self.holds_outputs,
        )

    def on_substep_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Make sure that the step was planned."""
        self._budget.check_step()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Make sure that the step was planned."""
        self._budget.check_step()

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Let the model run as before."""
        self._budget.end()


@dataclass
class MemoryBudgetArguments:
    """The budget as arguments of a command line, for ``HfArgumentParser``.

    Examples
    --------
    >>> from transformers import HfArgumentParser
    >>> parser = HfArgumentParser(MemoryBudgetArguments)
    >>> (memory,) = parser.parse_args_into_dataclasses(["--memory_budget", "24 GiB"])
    >>> [type(callback).__name__ for callback in memory.callbacks()]
    ['MemoryBudgetCallback']
    """

    memory_budget: str | None = field(
        default=None,
        metadata={
            "help": "Most bytes on the device during a training step, such as '24 GiB', "
            "or a percentage of what the step takes now, such as '60%'. Without it "
            "there is no budget."
        },
    )
    memory_solver: str = field(
        default="auto", metadata={"help": "Name of a solver of remat."}
    )
    memory_time_limit: float | None = field(
        default=None, metadata={"help": "Seconds for solving."}
    )
    memory_kernels: str = field(
        default="eager",
        metadata={
            "help": "'eager' for the kernels of eager PyTorch, 'fused' for compiled ones.",
            "choices": ["eager", "fused"],
        },
    )
    memory_regions: str = field(
        default="auto",
        metadata={
            "help": "'auto' for blocks where the model is deep, 'whole' for the model "
            "as one graph, 'breaks' for a model that breaks it, 'blocks' for a deep "
            "stack of equal blocks.",
            "choices": ["auto", "whole", "breaks", "blocks"],
        },
    )

    def callbacks(self) -> list[TrainerCallback]:
        """Return what to give to the ``Trainer`` as ``callbacks``."""
        if self.memory_budget is None:
            return []
        options: dict[str, Any] = {
            "solver": self.memory_solver,
            "time_limit": self.memory_time_limit,
            "kernels": self.memory_kernels,
            "regions": self.memory_regions,
        }
        return [MemoryBudgetCallback(self.memory_budget, **options)]


def _copies_batches(args: TrainingArguments) -> bool:
    """Whether each batch that the model is called with is a copy of one that is held.

    The device of a distributed process without accelerators is ``cpu:0``, and torch
    copies a tensor on ``cpu`` each time it is sent there.
    """
    return args.device == torch.device("cpu", 0)


def _optimizers(
    optimizer: Optimizer,
) -> Sequence[Optimizer] | Mapping[nn.Parameter, Optimizer]:
    """Return the optimizers of a trainer, by parameter if they step in backward."""
    inner = stepping_optimizer(optimizer)
    if isinstance(inner, LayerWiseDummyOptimizer):
        return cast("Any", inner).optimizer_dict
    return [optimizer]


def _check_supported(args: TrainingArguments) -> None:
    """Refuse what shards the model.

    Raises
    ------
    CaptureError
        If it does; the message names it.
    """
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            msg = (
                f"the Trainer was asked for {name}, which gathers and frees parameters "
                "around each layer, outside of what can be planned; train with "
                f"DistributedDataParallel (leave {name} out), or without a memory budget"
            )
            raise CaptureError(msg)
