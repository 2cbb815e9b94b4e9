"""A budget for a stage of a pipeline, as ``torch.distributed.pipelining`` runs it.

A stage runs several forward passes before its first backward pass, how many is said by
its schedule. Around them are the buffers into which it receives, for all microbatches,
and at the last stage the outputs of all of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from remat.capture.outputs import FakeOutputs, fake_outputs
from remat.capture.surroundings import tensors_in
from remat.core.errors import BudgetError, CaptureError
from remat.core.units import format_bytes
from remat.planning.plan import Plan
from remat.planning.several_devices import Budget
from remat.profile.described_loss import DescribedLoss
from remat.torch_compat.attributes import loss_of_schedule
from remat.torch_compat.names import tree_map
from remat.training.fitted_model import fitted_on, plain_model
from remat.training.fitting import fit_in_loop, keywords, positional
from remat.training.request import PlanOptions
from remat.training.training_loop import LoopMemory

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti

_RECEIVES_INTO_NEW = hasattr(pipelining.PipelineStage, "release_fwd_send_outputs")
"""Whether stages receive into tensors that they make then, and let go of what was sent.

From torch 2.15 on; before, there are buffers for all microbatches from the start.
"""

_FORWARD, _BACKWARD = "F", "B"
_SPLIT = {
    "I": "splits its backward passes in two",
    "W": "splits its backward passes in two",
    "OVERLAP_F_B": "runs a forward and a backward pass at once",
}


@dataclass(frozen=True)
class StageTurns:
    """What a schedule does with one stage.

    Parameters
    ----------
    microbatches
        How many microbatches each step has.
    in_flight
        How many forward passes run, at most, before the backward pass of the first.
    sends_late
        Whether all that is sent stays until the step is over.
    """

    microbatches: int
    in_flight: int
    sends_late: bool

    @property
    def ahead(self) -> int:
        """How many microbatches there are besides those in flight."""
        return self.microbatches - self.in_flight


def stage_turns(schedule: PipelineSchedule, stage_index: int) -> StageTurns:
    """Return what a schedule does with a stage.

    Parameters
    ----------
    schedule
        Of one stage (``ScheduleGPipe``, ``Schedule1F1B``) or of several
        (``ScheduleInterleaved1F1B``, ``ScheduleLoopedBFS``).
    stage_index
        Counted from 0 over the whole pipeline.

    Raises
    ------
    ValueError
        If the schedule does not run the stage, or splits its backward passes.
    """
    actions = [
        action
        for order in (schedule.pipeline_order or {}).values()
        for action in order
        if action is not None
    ]
    begun = done = in_flight = 0
    for action in actions:
        kind = action.computation_type.value
        if kind in _SPLIT:
            msg = (
                f"{type(schedule).__name__} {_SPLIT[kind]}, and a planned backward pass "
                "runs whole; use Schedule1F1B, ScheduleInterleaved1F1B or another one "
                "with full backward passes"
            )
            raise ValueError(msg)
        if action.stage_index == stage_index:
            begun += kind == _FORWARD
            done += kind == _BACKWARD
            in_flight = max(in_flight, begun - done)
    if not in_flight:
        msg = f"{type(schedule).__name__} has no passes of stage {stage_index}"
        raise ValueError(msg)
    # All others keep what they wait for to the end.
    is_one_by_one = isinstance(schedule, pipelining.Schedule1F1B)
    return StageTurns(begun, in_flight, sends_late=not is_one_by_one)


def fit_stage(  # noqa: PLR0913 - what stage and schedule do not say
    stage: pipelining.PipelineStage,
    schedule: PipelineSchedule,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: torch.Tensor | None = None,
    budget: Budget,
    return_outputs: bool = True,
    accumulate: bool = False,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Make a stage of a pipeline train within a budget, and return the plan.

    Each process calls it for its own stages, in any order, before the first step. The
    budget is for the stage alone: where a process has several, give each its part.

    Parameters
    ----------
    stage
        From ``torch.distributed.pipelining``; its module is changed as by
        :func:`remat.fit`.
    schedule
        What runs the stage. Read from it are the number of microbatches, how many
        forward passes of the stage are in flight, and the loss.
    args, kwargs
        An example of one microbatch, as the module is called with.
    target
        At the last stage, the target of one microbatch.
    budget
        As for :func:`remat.fit`, and so are the other options. A percentage is of the
        stage's peak, with all its passes in flight, without rematerialisation.
    return_outputs
        Whether the schedule's ``step`` is called so that it returns the outputs of all
        microbatches, as it does by default: the last stage keeps them, and a copy.
    accumulate
        Whether there are gradients already when some steps begin: from a ``step`` that
        no optimizer's step followed, or because ``zero_grad`` keeps them.

    Returns
    -------
    Plan
        What was decided, predicted and proved.

    Raises
    ------
    ValueError
        If the schedule splits backward passes, does not run the stage, or has no loss;
        or if the last stage has no target.
    TypeError
        If ``stage`` or ``schedule`` is something else, or if ``loss`` or ``in_flight``
        is given, which the schedule has.
    BudgetError, CaptureError, UnitError
        As from :func:`remat.fit`.

    Examples
    --------
    ::

        stage = PipelineStage(part, rank, world_size, device)
        schedule = Schedule1F1B(stage, 8, loss_fn=loss)
        plan = fit_stage(
            stage, schedule, x, target=y, budget="8 GiB", optimizer=optimizer
        )
        schedule.step(...)
    """
    if not isinstance(stage, pipelining.PipelineStage):
        _refuse_kind("stage", stage, "a torch.distributed.pipelining.PipelineStage")
    if not isinstance(schedule, PipelineSchedule):
        _refuse_kind("schedule", schedule, "one of torch.distributed.pipelining")
    loss = loss_of_schedule(schedule)
    if loss is None:
        msg = "the schedule has no loss, so it does not train; give it a loss_fn"
        raise ValueError(msg)
    part = _Part(
        module=stage.submod,
        is_first=stage.is_first,
        is_last=stage.is_last,
        turns=stage_turns(schedule, stage.stage_index),
        keeps_outputs=return_outputs,
        is_accumulated=accumulate,
    )
    given = _checked("fit_stage", options)
    return part.planned(
        positional(args), keywords(kwargs), (loss, target), budget, given
    )


@dataclass(frozen=True)
class _Part:
    """A stage: its module, its place, and what is done with it."""

    module: nn.Module
    is_first: bool
    is_last: bool
    turns: StageTurns
    keeps_outputs: bool
    is_accumulated: bool = False

    def planned(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_and_target: tuple[Callable[..., torch.Tensor], Any],
        budget: Budget,
        options: Mapping[str, Any],
        *,
        is_installed: bool = True,
    ) -> Plan:
        """Plan one microbatch of it among the others."""
        loss, target = loss_and_target
        if self.is_last and target is None:
            msg = (
                "the last stage has the loss, which needs a target: give target=, that "
                "of one microbatch"
            )
            raise ValueError(msg)
        if fitted_on(plain_model(self.module)) is not None:
            msg = (
                f"{type(plain_model(self.module)).__name__} has a budget already; call "
                "remat.release on it before"
            )
            raise ValueError(msg)
        # A part of a larger batch would count as the whole of it.
        args, kwargs, target = tree_map(_alone, (args, kwargs, target))
        if not self.is_first:
            args = tuple(map(_received, args))
        given: dict[str, Any] = {**options, "in_flight": self.turns.in_flight}

        def described(outputs: Any) -> torch.Tensor:
            return loss(outputs, target)

        if self.is_last:
            given["loss"] = described
        return fit_in_loop(
            self.module,
            args,
            kwargs,
            loop=self.loop(args, kwargs, target, described),
            budget=budget,
            # Within a step: where passes begin after the first backward pass.
            accumulate=self.turns.ahead > 0 or self.is_accumulated,
            is_installed=is_installed,
            **given,
        )

    def loop(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss: Callable[[Any], torch.Tensor],
    ) -> LoopMemory:
        """Return what is in memory around the passes that are in flight."""
        outputs = _outputs(self.module, args, kwargs)
        output_bytes = _total_bytes(outputs.tensors)
        turns = self.turns
        # What was sent is there until that is waited for.
        keeps_all = turns.sends_late and not _RECEIVES_INTO_NEW
        sent = turns.ahead if keeps_all else min(1, turns.ahead)
        batches_ahead, receive_buffers = turns.ahead, turns.microbatches
        held_bytes = merged_bytes = 0
        if _RECEIVES_INTO_NEW:
            receive_buffers = 1
            # Outputs that are kept for the caller keep what was received, too.
            if not (self.is_first or (self.is_last and self.keeps_outputs)):
                # Of microbatches ahead there is what the caller gave, not what comes.
                batches_ahead = 0
                given = tensors_in((kwargs, target if self.is_last else ()))
                held_bytes += turns.ahead * _total_bytes(given)
        if self.is_last:
            # The schedule keeps the losses of all microbatches until the step is over.
            held_bytes += turns.ahead * DescribedLoss(loss).memory(outputs).held_bytes
            if self.keeps_outputs:
                held_bytes += turns.ahead * output_bytes
                merged_bytes = turns.microbatches * output_bytes
        else:
            held_bytes += sent * output_bytes
        if not self.is_first:
            held_bytes += sent * _total_bytes(a for a in args if _takes_gradient(a))
        return LoopMemory(
            batches_ahead=batches_ahead,
            tensors=target if self.is_last else (),
            held_bytes=held_bytes,
            tangent_bytes=(None if self.is_last else receive_buffers * output_bytes),
            merged_bytes=merged_bytes,
            has_microbatches=turns.microbatches > 1,
            joins_passes=False,
            outputs_leave_with_pass=self.is_last and not self.keeps_outputs,
        )


@dataclass(frozen=True)
class StageReport:
    """What each stage of a pipeline needs under one budget; printed as a table.

    Parameters
    ----------
    plans
        One for each stage, in order.
    """

    plans: tuple[Plan, ...]

    def __str__(self) -> str:
        rows = [
            (
                str(index),
                str(plan.in_flight),
                format_bytes(plan.baseline_peak_bytes),
                format_bytes(plan.peak_bytes),
                f"{100 * plan.overhead:+.1f} %",
            )
            for index, plan in enumerate(self.plans)
        ]
        head = ("stage", "in flight", "plain peak", "planned peak", "time")
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) for cell, width in zip(row, widths, strict=True)
            )
            for row in (head, *rows)
        )


def plan_stages(  # noqa: PLR0913 - what the stages and the schedule say elsewhere
    stages: Sequence[nn.Module],
    args: Any,
    *,
    microbatches: int,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    target: Any,
    budget: Budget,
    schedule: str = "1F1B",
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    return_outputs: bool = True,
    **options: Unpack[PlanOptions],
) -> StageReport:
    """Return what each stage of a pipeline would need under one budget per process.

    Nothing is installed and no other process is needed.

    Parameters
    ----------
    stages
        The modules of all stages, in order.
    args
        One microbatch of the first one. What the others receive is computed.
    microbatches
        How many each step has, at least one.
    loss_fn, target
        Of the last stage: the loss takes its outputs and the target of one microbatch.
    optimizers
        One for each stage, if they count.
    budget, options
        As for :func:`remat.fit`.
    schedule
        ``"1F1B"``: a stage with ``s`` stages behind it has ``min(microbatches, s + 1)``
        passes in flight; or ``"GPipe"``: it has all.
    return_outputs
        As for :func:`fit_stage`.

    Raises
    ------
    ValueError
        If there are no stages or microbatches, no such schedule, or not as many
        optimizers as stages.
    BudgetError
        For the first stage that has no plan within the budget; a note names it.

    Notes
    -----
    Takes as long as planning the stages one after the other. Equal stages differ in
    their passes in flight, and so do their plans.
    """
    if not stages or microbatches < 1:
        msg = (
            f"there are {len(stages)} stages and {microbatches} microbatches; give some"
        )
        raise ValueError(msg)
    if optimizers is not None and len(optimizers) != len(stages):
        msg = f"there are {len(stages)} stages and {len(optimizers)} optimizers"
        raise ValueError(msg)
    given = _checked("plan_stages", options)
    inputs = positional(args)
    plans: list[Plan] = []
    for index, module in enumerate(stages):
        part = _Part(
            module=module,
            is_first=index == 0,
            is_last=index == len(stages) - 1,
            turns=_named_turns(schedule, microbatches, len(stages) - index),
            keeps_outputs=return_outputs,
        )
        optimizer = None if optimizers is None else optimizers[index]
        try:
            plan = part.planned(
                inputs,
                {},
                (loss_fn, target),
                budget,
                {**given, "optimizer": optimizer},
                is_installed=False,
            )
        except BudgetError as error:
            error.add_note(f"in stage {index} of {len(stages)}")
            raise
        plans.append(plan)
        inputs = tuple(map(_untouched, _outputs(module, inputs, {}).tensors))
    return StageReport(tuple(plans))


def _named_turns(schedule: str, microbatches: int, remaining: int) -> StageTurns:
    if schedule == "1F1B":
        return StageTurns(microbatches, min(microbatches, remaining), sends_late=False)
    if schedule == "GPipe":
        return StageTurns(microbatches, microbatches, sends_late=True)
    msg = f"schedule is {schedule!r}; it must be '1F1B' or 'GPipe'"
    raise ValueError(msg)


def _checked(owner: str, options: PlanOptions) -> dict[str, Any]:
    for name in ("loss", "in_flight"):
        if name in options:
            msg = f"{owner} takes {name} from the schedule; leave {name}= out"
            raise TypeError(msg)
    if options.get("regions", "auto") not in ("auto", "whole"):
        msg = f"{owner} plans a stage as one graph; leave regions= out"
        raise ValueError(msg)
    if options.get("dynamic") is not None:
        msg = f"{owner} plans microbatches of one shape; leave dynamic= out"
        raise ValueError(msg)
    return {**options, "regions": "whole"}


def _refuse_kind(name: str, given: object, wanted: str) -> None:
    msg = f"{name} is of type {type(given).__name__}; give {wanted}"
    raise TypeError(msg)


def _outputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> FakeOutputs:
    """Return what one microbatch returns, without values."""
    with torch.enable_grad():
        outputs = fake_outputs(plain_model(module), args, kwargs)
    if not outputs.tensors:
        msg = f"{type(module).__name__} returns no tensor, and a stage must"
        raise CaptureError(msg)
    return outputs


def _takes_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.is_floating_point() or value.is_complex()
    )


def _alone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _received(value: Any) -> Any:
    """Return an example as a stage receives it: a tensor that takes a gradient."""
    return value.requires_grad_() if _takes_gradient(value) else value


def _untouched(fake: torch.Tensor) -> torch.Tensor:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)


def _total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
