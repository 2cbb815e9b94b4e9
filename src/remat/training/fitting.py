"""Fit a model into a byte budget: capture, profile, solve, judge, install."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from remat.capture.accelerator import traced_for
from remat.capture.tracing import check_tracer
from remat.core.errors import CaptureError
from remat.core.garbage import old_objects_left_alone
from remat.planning.plan import Plan
from remat.planning.several_devices import Budget
from remat.profile.optimizer_copy import stepping_optimizer
from remat.profile.optimizers_in_backward import OptimizersInBackward, optimizer_memory
from remat.torch_compat.names import unset_fake_temporarily
from remat.training.caller_state import unchanged
from remat.training.fitted_model import FittedModel, fitted_on, plain_model
from remat.training.fitted_regions import fitted_for
from remat.training.request import (
    PlanOptions,
    PlanRequest,
    check_budget_of,
    check_memory_holds,
    check_model,
    requested,
    shows_options,
)
from remat.training.stand_ins import where_memory_is, with_stand_ins
from remat.training.step_planning import CompilerPlanner
from remat.training.training_loop import AwaitedBatch, LoopMemory
from remat.training.variants import VariantBackend


@shows_options(after="budget")
def fit(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    plan: Plan | None = None,
    accumulate: bool = False,
    holds_outputs: bool = True,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Make a model train within a budget of bytes, and return the plan.

    The model is changed in place, as by ``nn.Module.compile``: calling it, or its
    ``forward``, runs the plan, also inside of wrappers and of ``torch.compile``.
    Parameters, buffers, gradients, optimizer, random state and mode are as before.
    Another kind of step (shape, mode, autocast, accumulation) is planned at its first
    call, with the same budget, and said in one line of the log ``remat``. Calls without
    gradients run the model's own forward. :func:`release` undoes it.

    Parameters
    ----------
    model
        Any module that ``torch.compile`` can take as one graph, or as several (see
        ``regions``); of a module that it has wrapped already, the module inside is
        fitted.
    args, kwargs
        An example batch, as the model is called with; a single tensor may be given
        for ``args``.
    budget
        Most bytes on the model's device during a whole training step: an integer of
        bytes, a size such as ``"8 GiB"`` or ``"900MB"``, or a percentage such as
        ``"60%"`` of the predicted peak without rematerialisation. For several devices
        a mapping of these by the devices' names, such as ``{"cuda:0": "6 GiB", "cpu":
        "20 GiB"}``; a percentage is then of the step on the model's device alone.
    optimizer
        Counts its state and the memory of its step. May be wrapped by a training
        library, such as by ``accelerator.prepare``. Optimizers that step in backward,
        by a hook of each parameter, are given as a mapping from parameters to them.
    loss
        The function of the model's outputs whose gradient is taken, when it is outside
        the model: its memory is then predicted exactly. Without it, a scalar is taken
        for the loss that is the only output, a field or key named ``loss``, or the
        first of a tuple; where there is none, outputs are taken to need four times
        their size.
    platform
        The devices and links, or the path of their file; their budgets are replaced by
        ``budget``. Without it, the names in ``budget`` are devices of this machine
        (``"cpu"``, ``"cpu:1"``, ``"cuda:0"``, ``"host"`` for host memory that only
        stores), and their links are measured.
    solver
        ``"auto"`` for the best judged answer, or a name in ``remat.solvers.SOLVERS``.
    objective
        What is made small on several devices: ``"serial"``, the sum of all runs and
        copies (``plan.cost_ns``), or ``"overlapped"``, the time with devices and links
        at work together (``plan.overlapped_ns``), about which nothing is proved.
    time_limit
        Seconds for solving, or ``None``.
    gap
        On one device ``"auto"`` stops as soon as its plan is proved to take at most
        this share of its time, 0 to 1, longer than the best schedule: 0.01 for 1 %.
    seed
        Seed of solvers that randomise.
    costs
        ``"measured"`` runs each distinct operator alone; ``"estimated"`` runs none,
        and predicts workspace by rules of thumb, so that the budget may be exceeded by
        some percent.
    kernels
        ``"eager"`` runs the kernels of eager PyTorch, and results are bitwise its own.
        ``"fused"`` lets ``torch.compile``'s compiler make one kernel of neighbouring
        elementwise operators, reductions and normalisations, where that is measured to
        be quicker: results are then bitwise those of the step with these kernels and
        without rematerialisation, and differ from eager in the last digits. It needs a
        compiler, and compiling takes about a second for each distinct kernel.
    regions
        ``"auto"`` plans a deep model, one of 24 or more blocks of few kinds, as
        ``"blocks"``, as it does one that ``fully_shard`` divides among processes, and
        any other as ``"whole"``. A step in which its blocks cannot
        keep the budget, or cannot be regions, is planned as one graph, as are those
        that come later; the log ``remat`` says so. ``"whole"`` takes the model as one
        graph, and refuses one that ``torch.compile`` would split. ``"breaks"`` lets the
        tracer split it, at a ``print``, ``.item()`` or a branch on values, and plans
        all graphs together under the one budget. Two forward passes are run for
        planning, with real values; what they change of the model is put back. Operators
        in no graph are measured. Graphs that the example did not lead to keep nothing,
        and are computed again as a whole. ``"blocks"`` makes a region of each repeated
        block and leaves what is outside of them as it is; equal blocks are traced,
        measured and solved once, so that a deep model is planned in about the time of a
        shallow one. So do a list of modules' names, in which ``*`` stands for any part,
        and a function of a name and a module that says whether it is a block. For one
        device and eager kernels.
    dynamic
        Which dimensions of the batch vary, and from which size to which, such as
        ``{"input_ids": {1: (2, 512)}}``: arguments of ``forward`` by name or position,
        dimensions counted from 0, and both ends included, or a ``torch.export.Dim``
        with ``min`` and ``max``. Tensors in lists and mappings are named by such, as in
        ``{"targets": [{"boxes": {0: (1, 20)}}, None]}``, with ``None`` for what does
        not vary. The step is then traced once with sizes that vary and
        planned for the largest; ``args`` may have any size in the range. At each other
        size the same schedule is judged before it first runs, and what would break the
        budget is planned by itself. A percentage is one of the largest step. Where the
        model fixes a size, the log ``remat`` says so once: the largest step is planned,
        and each other shape is traced by itself, and runs the same schedule if it is
        the same step. For one device and eager kernels.
    backward_in_autocast
        Whether ``backward()`` is called inside of the autocast context of the forward
        pass, as Lightning's manual optimization does; torch advises against it. Some
        operators compute other gradients there. Where a loop turns out to do the other,
        and it matters, a warning says so once, and later steps are planned for it.
    in_flight
        How many forward passes run before the first backward pass, as in the stages of
        a pipeline, or where one loss is over several calls of the model. Each has a
        batch of its own, like the example, and what all have saved is within the
        budget; where ``dynamic`` lets sizes vary, each counts at its largest. Where
        more passes run than was said, and do not fit, a warning says so once. For one
        graph and one device.
    group
        The processes that run the same plan, made from the largest costs and sizes of
        all: all of them call ``fit`` with equal shapes and arguments. ``"auto"`` takes
        those among which ``fully_shard`` has divided the model, and those of a
        ``DistributedDataParallel`` around it, in which case the first training step in
        the wrapper plans. ``None`` lets each process plan for itself, as each does for
        kinds of step that come later, within the same budget, and with fused kernels or
        several devices.
    progress
        Called with what is being done and the share of it that is done.
    plan
        A saved plan to install instead of making one; it has its own budget.
    accumulate
        Whether to plan the steps of gradient accumulation now, too: those that add to
        gradients of an earlier step. They are planned at their first call else.
    holds_outputs
        Whether your loop still has what the model returned, such as logits, while
        ``backward()`` runs. ``False`` where it has the loss alone by then, as after
        ``loss = model(**batch).loss``: their memory is then free for the backward pass,
        and a warning says so once if it is not.

    Returns
    -------
    Plan
        What was decided, predicted and proved.

    Raises
    ------
    BudgetError
        If no schedule fits; names the smallest known budget.
    CaptureError
        If the step cannot be traced as one graph, or does not train.
    PlanMismatchError
        If ``plan`` is for another model, shape or version.
    UnitError
        If ``budget`` is not a positive size.
    InvalidPlatformError
        If a device has no budget, does not exist, cannot be reached, or an operator can
        run on none; the message names it.
    SolverUnsuitableError
        If ``solver`` is unknown or cannot treat this graph.
    ProfileError
        If an operator cannot be run alone.
    RankError
        In all processes of a group, if one of them fails, differs or does not come
        within the timeout of the group; the message names it.
    StateChangedError
        If code of the model or the optimizer changed something while it was planned
        for; what was changed is put back.
    TypeError, ValueError
        If another argument is of the wrong type or makes no sense.

    Warns
    -----
    PlanWarning
        When the model is called, once for each cause, where the plan is not used or
        cannot count all memory; the message names cause and cure.

    Notes
    -----
    Whatever is raised, the model is as it was before the call.
    """
    _check_bool("holds_outputs", holds_outputs)
    return fit_in_loop(
        model,
        args,
        kwargs,
        loop=LoopMemory(holds_outputs=holds_outputs),
        budget=budget,
        plan=plan,
        accumulate=accumulate,
        **options,
    )


@shows_options(after="plan")
def fit_in_loop(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    *,
    loop: LoopMemory,
    budget: Budget | None = None,
    plan: Plan | None = None,
    accumulate: bool = False,
    is_installed: bool = True,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Fit a model for a loop that has more in memory than the batch of a step.

    Parameters
    ----------
    model, args, kwargs, budget, plan, accumulate
        As for :func:`fit`, like the other options, and what is raised.
    loop
        What it has in memory.
    is_installed
        Whether the plan is to be installed on the model, or only returned.
    """
    kwargs = keywords(kwargs)
    request = requested("fit", options, budget=budget, plan=plan)
    _check_accumulate(request, accumulate=accumulate)
    check_model(model)
    check_tracer()
    model = plain_model(model)
    with (
        old_objects_left_alone(),
        unset_fake_temporarily(),
        unchanged(model, request.optimizer),
    ):
        fitted = fitted_for(model, request, is_only_planned=not is_installed)
        fitted.count(loop)
        result = fitted.plan_now(positional(args), kwargs, accumulate=accumulate)
    if is_installed:
        fitted.install()
    return result


@shows_options(after="plan")
def fit_at_first_batch(
    model: nn.Module,
    *,
    budget: Budget | None = None,
    plan: Plan | None = None,
    accumulate: bool = False,
    loop: LoopMemory | None = None,
    **options: Unpack[PlanOptions],
) -> FittedModel:
    """Let a model be fitted by its first call that trains, for what it is called with.

    For whoever starts a training loop and does not see its batches. All that is around
    that call counts: autocast, gradients, the wrapper ``DistributedDataParallel`` with
    its buckets. Errors of planning come from the call, before it runs.

    Parameters
    ----------
    model, budget, plan, accumulate
        As for :func:`fit`, like the other options, and what is raised.
    loop
        What it has in memory besides the batch.

    Returns
    -------
    FittedModel
        What is installed on the model.
    """
    request = requested("fit_at_first_batch", options, budget=budget, plan=plan)
    _check_accumulate(request, accumulate=accumulate)
    check_model(model)
    check_tracer()
    fitted = fitted_for(plain_model(model), request)
    loop = loop or LoopMemory()
    fitted.await_batch(AwaitedBatch(request.optimizer, accumulate, loop))
    fitted.install()
    return fitted


@shows_options(after="budget")
def plan(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Return the plan that :func:`fit` would install, and install nothing.

    Parameters and exceptions are those of :func:`fit`. The model and the example may
    be without memory, on the ``meta`` device or made under ``FakeTensorMode``: the step
    is then planned as on the CPU, and with ``costs="estimated"`` this takes no more
    memory than its graph. ``fit(..., plan=plan)`` installs the plan on the model once
    it has its weights. One process may plan alone: others take part only if ``group``
    is given.
    """
    kwargs = keywords(kwargs)
    request = requested("plan", options, budget=budget)
    if request.group == "auto":
        request = replace(request, group=None)
    check_model(model)
    check_tracer()
    with (
        unset_fake_temporarily(),
        where_memory_is(),
        traced_for(request.device),
    ):
        inside = plain_model(model)
        model, example, kwargs, optimizer = with_stand_ins(
            inside, positional(args), kwargs, request.optimizer
        )
        if request.device is not None:
            check_memory_holds(model, request.device)
            request = replace(request, regions="whole")
        if model is not inside and request.regions == "auto":
            request = replace(request, regions="whole")
        if model is not inside and request.regions != "whole":
            msg = (
                f"regions={request.regions!r} needs a forward pass to see the graphs, and "
                "tensors without memory have none; plan the model as one graph, or give "
                "it memory first"
            )
            raise CaptureError(msg)
        with unchanged(model, optimizer):
            request = replace(request, optimizer=optimizer)
            fitted = fitted_for(model, request, is_only_planned=True)
            made = fitted.plan_now(example, kwargs)
            if request.device is not None:
                check_budget_of(request.device, made.peak_bytes)
            return made


def release(model: nn.Module) -> nn.Module:
    """Undo :func:`fit`: the model's calls run as before. Returns the model.

    A model that was not fitted is left as it is.

    Raises
    ------
    TypeError
        If ``model`` is no module.
    """
    check_model(model)
    fitted = fitted_on(plain_model(model))
    if fitted is not None:
        fitted.uninstall()
    return model


@shows_options(after="model")
def backend(
    *,
    budget: Budget,
    model: nn.Module | None = None,
    **options: Unpack[PlanOptions],
) -> VariantBackend:
    """Return a backend for ``torch.compile(model, backend=..., dynamic=False)``.

    The compiler sees the traced graph only: parameters it does not read and the
    optimizer's state count only if ``model`` and ``optimizer`` are given here. A
    budget that is too small shows at the first call, as ``inner_exception`` of the
    compiler's ``BackendCompilerFailed``. While gradients of an earlier pass exist
    their bytes count: that kind of step is planned at its first call, which raises
    ``BudgetError`` itself. Parameters are those of :func:`fit`; ``loss`` needs
    ``model``, and a model that is called with tensors only.

    Raises
    ------
    UnitError
        If ``budget`` is not a positive size.
    CaptureError
        If the optimizer's step cannot be predicted without running it.
    ValueError, TypeError
        If an argument makes no sense, or ``loss`` is given without ``model``.
    """
    if options.get("loss") is not None and model is None:
        msg = (
            "loss= needs model=, whose outputs the loss is tried on; give "
            "remat.backend(..., model=model, loss=loss)"
        )
        raise ValueError(msg)
    regions = options.get("regions", "whole")
    if regions not in ("auto", "whole"):
        msg = (
            f"regions is {regions!r}, but torch.compile hands each graph to "
            "its backend alone; use remat.fit(model, ..., regions=...)"
        )
        raise ValueError(msg)
    request = requested("backend", options, budget=budget)
    if request.group not in ("auto", None):
        msg = (
            "group= is for remat.fit: each process compiles by itself what torch.compile "
            "hands to its backend; leave it out"
        )
        raise ValueError(msg)
    if request.dynamic is not None:
        msg = (
            "dynamic= is for remat.fit: torch.compile itself decides which sizes vary "
            "in what it hands to its backend; leave it out, and give dynamic=False there"
        )
        raise ValueError(msg)
    if model is not None:
        check_model(model)
    memory = optimizer_memory(request.optimizer)
    # The compiler never forgets a backend: it must not keep the optimizer alive.
    optimizer = request.optimizer
    if optimizer is not None:
        optimizer = stepping_optimizer(optimizer)
    planner = CompilerPlanner(
        model, replace(request, optimizer=None), memory, optimizer
    )
    name = "compiled step" if model is None else type(model).__name__
    return VariantBackend(
        planner, name, backward_in_autocast=request.backward_in_autocast
    )


def _check_accumulate(request: PlanRequest, *, accumulate: object) -> None:
    _check_bool("accumulate", accumulate)
    if accumulate and isinstance(request.optimizer, OptimizersInBackward):
        msg = (
            "accumulate=True, but optimizers that step in backward leave no gradients to "
            "add to: leave accumulate out, or give one optimizer of all parameters"
        )
        raise ValueError(msg)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        msg = f"{name} is {value!r}; it must be True or False"
        raise TypeError(msg)


def positional(args: Any) -> tuple[Any, ...]:
    """Return example arguments as a tuple; a single value stands for itself."""
    return tuple(args) if isinstance(args, tuple | list) else (args,)


def keywords(kwargs: Any) -> dict[str, Any]:
    """Return example arguments by keyword.

    Raises
    ------
    TypeError
        If they are no mapping.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        hint = "several positional ones are a tuple: args=(x, y)"
        if isinstance(kwargs, str | int):
            hint = f"a budget is given by its name: budget={kwargs!r}"
        elif isinstance(kwargs, torch.optim.Optimizer):
            hint = "an optimizer is given by its name: optimizer=optimizer"
        msg = (
            f"kwargs is a {type(kwargs).__name__}; it must be a mapping of the model's "
            f"keyword arguments ({hint})"
        )
        raise TypeError(msg)
    unnamed = [key for key in kwargs if not isinstance(key, str)]
    if unnamed:
        msg = f"kwargs has the key {unnamed[0]!r}; keys are names of arguments"
        raise TypeError(msg)
    return dict(kwargs)
