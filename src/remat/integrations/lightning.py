"""A memory budget for the ``Trainer`` of Lightning."""

from math import inf
from typing import Any, Unpack

from torch import nn

from remat.core.errors import CaptureError
from remat.integrations.loading import batches_early
from remat.integrations.training_budget import TrainingBudget, missing
from remat.planning.plan import Plan
from remat.planning.several_devices import Budget
from remat.training.request import PlanOptions

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import (
        DeepSpeedStrategy,
        FSDPStrategy,
    )
    from lightning.pytorch.strategies.xla import XLAStrategy
    from lightning.pytorch.utilities import CombinedLoader
except ImportError as error:
    raise missing(__name__, "lightning") from error

_SHARDING = DeepSpeedStrategy, FSDPStrategy, XLAStrategy


class MemoryBudget(Callback):
    """Lets a ``Trainer`` train within a budget of bytes.

    The network is planned for its first batch, as ``training_step`` calls it then: with
    the optimizers, the precision, accumulation of gradients and gradient buckets, and
    with the batches that workers of the loader load ahead. Optimization may be
    automatic or manual. Validation, testing and prediction run as without a budget, and
    so does the network after training.

    Parameters
    ----------
    budget, plan, options
        As for :func:`remat.fit`.
    holds_outputs
        ``False`` where ``training_step`` returns and keeps the loss alone, so that what
        the network returned besides is not there during the backward pass.
    module
        Name of the network in the ``LightningModule``, such as ``"model"``. By default
        its only child with parameters; if there are several, the ``LightningModule``
        itself, whose ``forward`` ``training_step`` has to call, as ``self(x)``.

    Raises
    ------
    UnitError, TypeError, ValueError
        If an argument makes no sense. Errors of planning come from ``Trainer.fit``.

    Examples
    --------
    ``Trainer(..., callbacks=[MemoryBudget("24 GiB")])``
    """

    def __init__(
        self,
        budget: Budget | None = None,
        *,
        module: str | None = None,
        plan: Plan | None = None,
        holds_outputs: bool = True,
        **options: Unpack[PlanOptions],
    ) -> None:
        self.module = module
        self.holds_outputs = holds_outputs
        self._budget = TrainingBudget(type(self).__name__, budget, plan, options)

    @property
    def plan(self) -> Plan | None:
        """The plan of the first batch, ``None`` before it came."""
        return self._budget.plan

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the first batch be planned for."""
        _check_supported(trainer)
        self._budget.begin(
            network_of(pl_module, self.module),
            trainer.optimizers,
            # Automatic optimization clears gradients after the forward pass.
            accumulate=pl_module.automatic_optimization,
            # Without a length, the next batch tells whether this one is the last.
            batches_ahead=int(trainer.num_training_batches == inf),
            batches_early=batches_early(
                CombinedLoader(trainer.train_dataloader).flattened,
                trainer.strategy.root_device,
            ),
            # ``training_step`` may return them, or keep them for its hooks.
            holds_outputs=self.holds_outputs,
            # All of a step is under autocast then.
            backward_in_autocast=not pl_module.automatic_optimization,
        )

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the whole batch."""
        self._budget.hold(batch)

    def on_train_batch_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Make sure that the step was planned."""
        self._budget.hold(())
        self._budget.check_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the network run as before."""
        self._budget.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Let the network run as before."""
        self._budget.end()


def network_of(module: LightningModule, name: str | None) -> nn.Module:
    """Return the part of a ``LightningModule`` that a budget is for.

    Raises
    ------
    ValueError
        If there is no such part, or it is not clear which one to take.
    """
    children = {
        key: child
        for key, child in module.named_children()
        if any(True for _ in child.parameters())
    }
    names = ", ".join(map(repr, children)) or "none"
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError as error:
            msg = (
                f"module={name!r}, but {type(module).__name__} has no such part; its "
                f"parts with parameters are: {names}"
            )
            raise ValueError(msg) from error
    if len(children) == 1 and not any(True for _ in module.parameters(recurse=False)):
        (child,) = children.values()
        return child
    if type(module).forward is not LightningModule.forward:
        return module
    msg = (
        f"{type(module).__name__} has several parts with parameters, {names}, and no "
        "forward of its own; name the part that has the budget, as "
        "MemoryBudget(..., module='model'), or write a forward that calls them all and "
        "call it in training_step, as self(x)"
    )
    raise ValueError(msg)


def _check_supported(trainer: Trainer) -> None:
    """Refuse what shards the model.

    Raises
    ------
    CaptureError
        If it does; the message names it.
    """
    strategy = trainer.strategy
    if isinstance(strategy, _SHARDING):
        msg = (
            f"the Trainer's strategy is {type(strategy).__name__}, which gathers and "
            "frees parameters outside of what can be planned; train with "
            "strategy='ddp', with ModelParallelStrategy and fully_shard in "
            "configure_model, or on one device, or without MemoryBudget"
        )
        raise CaptureError(msg)
