"""A budget that a callback keeps, from the first batch of a loop to its end."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from remat.core.errors import ExecutionError, MissingDependencyError
from remat.planning.plan import Plan
from remat.planning.several_devices import Budget
from remat.training.fitted_model import FittedModel, fitted_on, plain_model
from remat.training.fitting import fit_at_first_batch
from remat.training.request import AnyOptimizer, PlanOptions, requested
from remat.training.training_loop import LoopMemory


class TrainingBudget:
    """What a callback was asked for, and the model that it is kept for.

    Parameters
    ----------
    owner
        Name of the callback, for messages.
    budget, plan, options
        As for :func:`remat.fit`; the optimizer is the training loop's.

    Raises
    ------
    UnitError, TypeError, ValueError
        If one makes no sense.
    """

    def __init__(
        self,
        owner: str,
        budget: Budget | None,
        plan: Plan | None,
        options: PlanOptions,
    ) -> None:
        if "optimizer" in options:
            msg = (
                f"{owner} counts the optimizer with which the model is trained; leave "
                "optimizer= out"
            )
            raise TypeError(msg)
        requested(owner, options, budget=budget, plan=plan)
        self.owner = owner
        self.budget = budget
        self.given_plan = plan
        self.options = options
        self._fitted: FittedModel | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the first batch, ``None`` before it came."""
        return None if self._fitted is None else self._fitted.first_plan

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] | Mapping[nn.Parameter, Optimizer],
        *,
        accumulate: bool,
        batches_ahead: int,
        batches_early: int,
        holds_outputs: bool,
        backward_in_autocast: bool = False,
    ) -> None:
        """Let the first batch be planned for.

        Optimizers that step in backward are given by their parameters. Batches that
        come early are held beside those that the loop has loaded ahead.

        Raises
        ------
        ValueError
            If the model has a budget already.
        """
        known = fitted_on(plain_model(model))
        if known is not None and known is not self._fitted:
            msg = (
                f"{type(known.model).__name__} has a budget already, from remat.fit or "
                f"from another {self.owner}; give it one: leave this callback out, or "
                "call remat.release(model) before training"
            )
            raise ValueError(msg)
        options: dict[str, Any] = {
            "backward_in_autocast": backward_in_autocast,
            **self.options,
        }
        self._fitted = fit_at_first_batch(
            model,
            budget=self.budget,
            plan=self.given_plan,
            accumulate=accumulate,
            loop=LoopMemory(
                batches_ahead=batches_ahead + batches_early,
                batches_early=batches_early,
                holds_outputs=holds_outputs,
            ),
            optimizer=_together(optimizers),
            **options,
        )

    def hold(self, batch: object) -> None:
        """Count all that the loop has of a batch, given to the model or not."""
        if self._fitted is not None:
            self._fitted.hold(batch)

    def check_step(self) -> None:
        """Make sure, after a step, that it was planned.

        Raises
        ------
        ExecutionError
            If the step did not call the model.
        """
        if self._fitted is not None and self._fitted.is_awaiting:
            name = type(self._fitted.model).__name__
            msg = (
                f"{self.owner} planned nothing: the training step did not call {name} "
                "with gradients, but perhaps a part of it, or the forward of its class. "
                "Call the module that has the budget, or give the budget to the module "
                "that is called"
            )
            self.end()
            raise ExecutionError(msg)

    def end(self) -> None:
        """Let the model run as before; the plan can still be looked at."""
        if self._fitted is not None and fitted_on(self._fitted.model) is self._fitted:
            self._fitted.uninstall()


def missing(module: str, package: str) -> MissingDependencyError:
    """Return the error for a framework that is not installed."""
    msg = f"{module} needs the package {package}, which is not installed: pip install {package}"
    return MissingDependencyError(msg)


class _Together(Optimizer):
    """Several optimizers as one, of which remat counts state and step."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Not the base's: there are no groups of its own to make.
        self.optimizers = list(optimizers)
        self.param_groups = [group for o in optimizers for group in o.param_groups]
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.optimizers:
            optimizer.step()


def _together(
    optimizers: Sequence[Optimizer] | Mapping[nn.Parameter, Optimizer],
) -> AnyOptimizer | None:
    if isinstance(optimizers, Mapping):
        return optimizers
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    return _Together(optimizers)
