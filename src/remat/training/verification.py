"""Verify a plan on the user's own model: exactness, peak and time against plain."""

import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, Unpack

import torch
from torch import nn

from remat.capture.autocast import autocast_again, autocast_now
from remat.capture.returned import is_loss, loss_in
from remat.capture.surroundings import captured_tensors, plain_tensors, tensors_in
from remat.capture.tracing import check_batch, check_tracer
from remat.core.errors import BudgetError, CaptureError
from remat.core.units import format_bytes, format_ns
from remat.planning.plan import Plan
from remat.planning.several_devices import Budget
from remat.profile.memory import MOST_REPEATS, measure
from remat.profile.optimizer_copy import stepping_optimizer
from remat.profile.optimizers_in_backward import OptimizersInBackward
from remat.torch_compat.accelerators import (
    device_module,
    forked_random_state,
    is_accelerator,
)
from remat.torch_compat.attributes import install_call, installed_call, parts_of
from remat.torch_compat.names import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)
from remat.training.caller_state import (
    host_random_state,
    kept_optimizer,
    set_host_random_state,
    unchanged,
)
from remat.training.device_memory import DevicePeak, device_peaks
from remat.training.fitted_model import FittedModel, fitted_on, plain_model
from remat.training.fitted_regions import fitted_for
from remat.training.fitting import keywords, positional
from remat.training.optimizer_steps import steps_of_ours
from remat.training.request import (
    Loss,
    PlanOptions,
    PlanRequest,
    check_model,
    requested,
    shows_options,
)
from remat.training.shape_ranges import DynamicShapes, ShapeRanges, checked_shapes

Outcome = dict[str, torch.Tensor]

_Batch: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that is not bitwise equal in two runs.

    ``largest`` is the largest absolute difference, as a float; ``nan`` where shapes,
    types, or whether an output takes a gradient differ.
    """

    name: str
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeReport:
    """What :func:`verify` found at one more shape of a batch whose sizes vary.

    Parameters
    ----------
    shapes
        Names and shapes of what varies, in words.
    against_captured, against_eager, compared_count
        As in :class:`VerifyReport`, of one backward pass.
    budget_bytes, measured_peak_bytes
        The budget, and the measured peak of the planned step.
    """

    shapes: str
    against_captured: tuple[Difference, ...]
    against_eager: tuple[Difference, ...]
    compared_count: int
    budget_bytes: int
    measured_peak_bytes: int

    @property
    def is_within_budget(self) -> bool:
        """Whether the measured peak is at most the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        verdict = "" if self.is_within_budget else ", budget BROKEN"
        return (
            f"{self.shapes}: {format_bytes(self.measured_peak_bytes)} measured{verdict}; "
            f"{_verdict(self.against_captured, self.compared_count)} the captured step, "
            f"{_verdict(self.against_eager, self.compared_count)} eager PyTorch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What :func:`verify` found.

    Parameters
    ----------
    plan
        The plan that was verified.
    against_captured
        Tensors that differ from the same captured step without rematerialisation.
    against_eager
        Tensors that differ from eager PyTorch.
    compared_count
        How many tensors were compared each time: outputs, gradients, buffers, random
        state, after each backward pass.
    pass_count
        2, or 1 where a second backward pass onto existing gradients (gradient
        accumulation) does not fit the budget.
    budget_bytes, predicted_peak_bytes, measured_peak_bytes, plain_peak_bytes
        The budget, the plan's prediction, the measured peak of the planned step, and
        that of the plain eager step.
    planned_ns, plain_ns
        Median time of one step.
    slowdown
        Median over pairs of planned time / plain time.
    devices
        With several devices, the peak of each; the figures above are then those of the
        first. Empty with one.
    shapes
        With ``dynamic=``, what was found at the smallest sizes and at the example's;
        the figures above are then those of the largest.
    steps_in_backward
        Whether optimizers stepped in the backward passes: of parameters that they have
        stepped, these were compared, and not gradients.
    """

    plan: Plan
    against_captured: tuple[Difference, ...]
    against_eager: tuple[Difference, ...]
    compared_count: int
    pass_count: int
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    plain_peak_bytes: int
    planned_ns: int
    plain_ns: int
    slowdown: float
    devices: tuple[DevicePeak, ...] = ()
    shapes: tuple[ShapeReport, ...] = ()
    steps_in_backward: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether all is bitwise equal to the captured step without remat."""
        return not self.against_captured and not any(
            shape.against_captured for shape in self.shapes
        )

    @property
    def is_within_budget(self) -> bool:
        """Whether the measured peak is at most the budget, on every device."""
        if self.devices:
            return all(device.is_within_budget for device in self.devices)
        return self.measured_peak_bytes <= self.budget_bytes and all(
            shape.is_within_budget for shape in self.shapes
        )

    @property
    def prediction_error(self) -> float:
        """Predicted / measured peak - 1: negative where too little is predicted."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    def summary(self) -> dict[str, Any]:
        """Return the report's figures as a dictionary that JSON can hold."""
        return {
            "is_exact": self.is_exact,
            "is_within_budget": self.is_within_budget,
            "compared_count": self.compared_count,
            "pass_count": self.pass_count,
            "against_captured": [asdict(d) for d in self.against_captured],
            "against_eager": [asdict(d) for d in self.against_eager],
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "prediction_error": self.prediction_error,
            "plain_peak_bytes": self.plain_peak_bytes,
            "planned_ns": self.planned_ns,
            "plain_ns": self.plain_ns,
            "slowdown": self.slowdown,
            "devices": [asdict(device) for device in self.devices],
            "shapes": [asdict(shape) for shape in self.shapes],
            "plan": self.plan.summary(),
        }

    def __repr__(self) -> str:
        exact = "exact" if self.is_exact else "not exact"
        kept = "kept" if self.is_within_budget else "exceeded"
        return (
            f"<VerifyReport of {self.plan.graph.name}: {exact}, budget "
            f"{format_bytes(self.budget_bytes)} {kept}, {self.slowdown:.2f} x the plain "
            "step's time; print(report) says more>"
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                f"verification of {self.plan.graph.name}",
                *self._peak_lines(),
                (
                    f"  time        {format_ns(self.planned_ns)} a step, plain step "
                    f"{format_ns(self.plain_ns)}: {self.slowdown:.2f} x"
                ),
                (
                    f"  exact       {_verdict(self.against_captured, self.compared_count)} "
                    "the captured step without remat"
                ),
                (
                    f"  eager       {_verdict(self.against_eager, self.compared_count)} "
                    "eager PyTorch"
                ),
                (
                    "  passes      two, and the steps of all parameters in each"
                    if self.steps_in_backward
                    else "  passes      gradients accumulated over two"
                    if self.pass_count > 1
                    else "  passes      one: accumulation does not fit this budget"
                ),
                *(
                    f"  {'shapes' if not i else '':<12}{x}"
                    for i, x in enumerate(self.shapes)
                ),
            ]
        )

    def _peak_lines(self) -> list[str]:
        plain = f"plain step {format_bytes(self.plain_peak_bytes)}"
        if self.devices:
            label = "  devices     "
            lines = [str(device) for device in self.devices]
            return [
                *(f"{label if not i else ' ' * 14}{x}" for i, x in enumerate(lines)),
                f"  peak        {plain}",
            ]
        verdict = "kept" if self.is_within_budget else "BROKEN"
        return [
            f"  budget      {format_bytes(self.budget_bytes)}: {verdict}",
            (
                f"  peak        {format_bytes(self.measured_peak_bytes)} measured, "
                f"{format_bytes(self.predicted_peak_bytes)} predicted "
                f"({self.prediction_error:+.2%}); {plain}"
            ),
        ]


def _verdict(differences: tuple[Difference, ...], count: int) -> str:
    if not differences:
        return f"all {count} tensors bitwise equal to"
    worst = max(differences, key=lambda d: d.largest)
    return (
        f"{len(differences)} of {count} tensors differ (largest {worst.largest:.3g} in "
        f"{worst.name}) from"
    )


def default_loss(outputs: Any) -> torch.Tensor:
    """Return the loss that outputs hold, or the sum of all that take a gradient.

    Raises
    ------
    CaptureError
        If nothing in the outputs takes a gradient.
    """
    held = loss_in(outputs)
    if is_loss(held):
        return held
    leaves = [leaf for _, leaf in tree_flatten_with_path(outputs)[0]]
    terms = [
        leaf.float().sum()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not terms:
        raise CaptureError("the model does not train: no output takes a gradient")
    return torch.stack(terms).sum()


@shows_options(after="budget")
def verify(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    repeats: int = 3,
    **options: Unpack[PlanOptions],
) -> VerifyReport:
    """Run the step plainly and within the budget, and compare everything.

    Afterwards the model, its gradients, the optimizer, the batch and the random state
    are as before; a model that was fitted or compiled still is.

    Parameters
    ----------
    model, args, kwargs, budget, optimizer, loss, platform
        As for :func:`remat.fit`. Without ``loss``, a scalar output or one named
        ``loss`` is taken, or else the sum of the outputs.
    solver, objective, time_limit, gap, seed, costs, kernels, regions
        As for :func:`remat.fit`.
    dynamic
        As for :func:`remat.fit`. Compared and measured is the step of the largest
        sizes, whose batch has the example's values, repeated; results, and the peak
        with the budget, at the smallest sizes and the example's as well.
    in_flight
        As for :func:`remat.fit`. As many forward passes run before the first backward
        pass, on copies of the batch.
    progress
        Called with what is being done and the share of it that is done.
    repeats
        How many pairs of steps are timed.

    Returns
    -------
    VerifyReport
        Differences, predicted and measured peak, time of both.

    Raises
    ------
    BudgetError, CaptureError, ProfileError, SolverUnsuitableError, UnitError
        As :func:`remat.fit`.
    TypeError, ValueError
        If another argument is of the wrong type or makes no sense.

    Notes
    -----
    The plain step runs too, so the machine must have the memory for it. Compared are
    outputs, gradients, buffers and random state after one and after two backward
    passes (gradient accumulation, where it fits the budget), from the same start.
    """
    kwargs = keywords(kwargs)
    request = requested("verify", options, budget=budget)
    check_repeats(repeats)
    check_model(model)
    check_tracer()
    model = plain_model(model)
    example = positional(args), kwargs
    check_batch(model, *example, may_be_sharded=request.regions != "whole")
    examples = _examples(model, example, request.dynamic)
    step, *others = (
        TrainingStep(
            model,
            *each,
            request.loss,
            request.optimizer,
            backward_in_autocast=request.backward_in_autocast,
            in_flight=request.in_flight,
        )
        for each in examples.values()
    )
    reference = PlanRequest(
        budget=_NO_LIMIT,
        solver="store-all",
        costs="estimated",
        kernels=request.kernels,
        loss=request.loss,
        backward_in_autocast=request.backward_in_autocast,
        in_flight=request.in_flight,
        group=None,
    )
    with unset_fake_temporarily(), step.restored():
        # Each step that is compared begins without gradients.
        step.clear_gradients()
        with unchanged(model, request.optimizer):
            planned = fitted_for(model, request)
            plan = planned.plan_now(step.args, step.kwargs)
        request.progress("comparing", 0.0)
        mine, pass_count = step.longest_outcome(planned)
        reference = replace(reference, regions=planned.regions)
        captured = step.outcome(fitted_for(model, reference), pass_count)
        against_captured = compare(captured, mine)
        del captured
        against_eager = compare(step.outcome(None, pass_count), mine)
        count = len(mine)
        del mine
        request.progress("measuring", 0.5)
        plain_peak = step.peak_bytes(None)
        peaks: tuple[DevicePeak, ...] = ()
        if plan.has_several_devices:
            peaks = step.device_peaks(planned, plan)
            planned_peak = peaks[0].measured_bytes
        else:
            planned_peak = step.peak_bytes(planned)
        plain_times, planned_times = step.paired_times(planned, repeats)
        found = [
            _shape_report(*pair, planned, reference, plan.budget_bytes or 0)
            for pair in zip(list(examples)[1:], others, strict=True)
        ]
    return VerifyReport(
        plan=plan,
        against_captured=against_captured,
        against_eager=against_eager,
        compared_count=count,
        pass_count=pass_count,
        steps_in_backward=step.steps_in_backward,
        budget_bytes=plan.budget_bytes or 0,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=planned_peak,
        plain_peak_bytes=plain_peak,
        planned_ns=round(statistics.median(planned_times)),
        plain_ns=round(statistics.median(plain_times)),
        slowdown=statistics.median(
            mine / plain for mine, plain in zip(planned_times, plain_times, strict=True)
        ),
        devices=peaks,
        shapes=tuple(found),
    )


def _examples(
    model: nn.Module, example: _Batch, dynamic: DynamicShapes | None
) -> dict[str, _Batch]:
    """Return the batches to verify by their shapes in words, the planned one first."""
    if dynamic is None:
        return {"": example}
    ranges = ShapeRanges.of(model, checked_shapes(dynamic))
    ranges.check(*example)
    batches = [ranges.largest(*example), ranges.smallest(*example), example]
    found: dict[str, _Batch] = {}
    for args, kwargs in batches:
        found.setdefault(ranges.words_of(args, kwargs), (args, dict(kwargs)))
    return found


def _shape_report(
    shapes: str,
    step: "TrainingStep",
    planned: FittedModel,
    reference: PlanRequest,
    budget_bytes: int,
) -> ShapeReport:
    with step.restored():
        mine = step.outcome(planned, 1)
        captured = step.outcome(fitted_for(step.model, reference), 1)
        against_captured = compare(captured, mine)
        del captured
        return ShapeReport(
            shapes=shapes,
            against_captured=against_captured,
            against_eager=compare(step.outcome(None, 1), mine),
            compared_count=len(mine),
            budget_bytes=budget_bytes,
            measured_peak_bytes=step.peak_bytes(planned),
        )


_NO_LIMIT = 2**62


def check_repeats(repeats: object) -> None:
    """Refuse what is no number of timed steps.

    Raises
    ------
    TypeError
        If it is no integer.
    ValueError
        If it is not positive, or more than :data:`MOST_REPEATS`.
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int):
        msg = f"repeats is {repeats!r}; it must be an integer, at least 1"
        raise TypeError(msg)
    if repeats < 1:
        msg = f"repeats is {repeats}; at least one pair of steps must be timed"
        raise ValueError(msg)
    if repeats > MOST_REPEATS:
        msg = f"repeats is {repeats}; it must be at most {MOST_REPEATS}"
        raise ValueError(msg)


def compare(expected: Outcome, found: Outcome) -> tuple[Difference, ...]:
    """Return the tensors of two runs that are not bitwise equal, by name."""
    differences: list[Difference] = []
    for name in sorted({*expected, *found}):
        one, other = expected.get(name), found.get(name)
        if one is None or other is None or not _are_alike(one, other):
            differences.append(Difference(name=name, largest=float("nan")))
        elif not _is_bitwise_equal(one, other):
            gap = (
                (one.to_dense().double() - other.to_dense().double()).abs().max().item()
            )
            differences.append(Difference(name=name, largest=gap))
    return tuple(differences)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.requires_grad is other.requires_grad


def _is_bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.layout != other.layout:
        return False
    # Compares bits: equal NaNs are equal, and 0.0 differs from -0.0.
    pairs = zip(_parts(one.detach()), _parts(other.detach()), strict=True)
    return all(
        torch.equal(_flat(left).view(torch.uint8), _flat(right).view(torch.uint8))
        for left, right in pairs
    )


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return parts_of(tensor) or (tensor.to_dense(),)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as one dimension of stride 1.

    Dimensions of size 1 may have any stride, which ``contiguous`` and ``reshape`` keep.
    """
    flat = tensor.reshape(-1)
    if flat.stride(0) == 1:
        return flat
    return flat.clone(memory_format=torch.contiguous_format)


def _copied(batch: _Batch) -> _Batch:
    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    args, kwargs = batch
    return tree_map(copied, args), tree_map(copied, kwargs)


class TrainingStep:
    """One training step of a model, run plainly or by a plan.

    Parameters
    ----------
    model, args, kwargs
        The model and its batch.
    loss
        From the model's outputs to a scalar; :func:`default_loss` if ``None``.
    optimizer
        Steps at the end of the step, unless ``None``.
    backward_in_autocast
        Whether ``backward()`` is called under the autocast of the forward pass.
    in_flight
        How many forward passes run before the first backward pass, each on a copy of
        the batch.

    Notes
    -----
    Its methods take what to call instead of the model, or ``None`` for eager PyTorch,
    and are for use inside :meth:`restored`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
        *,
        backward_in_autocast: bool = False,
        in_flight: int = 1,
    ) -> None:
        self.model = model
        self.args = args
        self.kwargs = kwargs
        self.batches: list[_Batch] = [
            (args, kwargs),
            *(_copied((args, kwargs)) for _ in range(in_flight - 1)),
        ]
        self.loss = loss or default_loss
        self.backward_in_autocast = backward_in_autocast
        self.resident: list[Any] = [
            model,
            plain_tensors(model),
            tensors_in(self.batches),
            captured_tensors(loss),
        ]
        # Wrappers of training libraries step in their own loops only.
        self.optimizer = None if optimizer is None else stepping_optimizer(optimizer)
        if self.optimizer is not None:
            self.resident.append(self.optimizer)
        self.devices = sorted(
            {p.device for p in model.parameters() if is_accelerator(p.device)}, key=str
        )

    @contextmanager
    def restored(self) -> Generator[None]:
        """Put the model, optimizer, gradients and random state back at the end."""
        state = {
            name: value.detach().clone()
            for name, value in self.model.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        batch = [t.detach().clone() for t in tensors_in(self.batches)]
        extra = {k: b.detach().clone() for k, b in self.model.named_buffers()}
        fitted, call = fitted_on(self.model), installed_call(self.model)
        if fitted is not None:
            fitted.uninstall()
        leaves = [*self.model.parameters(), *self.leaves()]
        gradients = [leaf.grad for leaf in leaves]
        with (
            kept_optimizer(self.optimizer),
            forked_random_state(self.devices),
        ):
            self.state, self.buffers, self.batch = state, extra, batch
            self.random_state = torch.get_rng_state()
            self.host_random_state = host_random_state()
            self.device_states = [
                device_module(d).get_rng_state(d) for d in self.devices
            ]
            try:
                yield
            finally:
                self.reset()
                install_call(self.model, call)
                if fitted is not None:
                    fitted.install()
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    leaf.grad = gradient

    def reset(self) -> None:
        """Go back to the start: parameters, buffers, random state, no gradients."""
        with torch.no_grad():
            live = self.model.state_dict(keep_vars=True)
            for name, value in self.state.items():
                live[name].detach().copy_(value)
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])
            for tensor, value in zip(tensors_in(self.batches), self.batch, strict=True):
                # A model that changes its input in place started from other values.
                if not torch.equal(tensor, value):
                    tensor.detach().copy_(value)
        self.clear_gradients()
        torch.set_rng_state(self.random_state)
        set_host_random_state(self.host_random_state)
        for device, state in zip(self.devices, self.device_states, strict=True):
            device_module(device).set_rng_state(state, device)

    def clear_gradients(self) -> None:
        """Drop the gradients of parameters and of example inputs."""
        for leaf in [*self.model.parameters(), *self.leaves()]:
            leaf.grad = None

    def call(self, called: Callable[..., Any] | None, number: int = 0) -> Any:
        """Run the forward pass of a batch, plainly or by a plan."""
        args, kwargs = self.batches[number]
        install_call(self.model, called)
        try:
            return self.model(*args, **kwargs)
        finally:
            install_call(self.model, None)

    def passes(self, called: Callable[..., Any] | None) -> Generator[Any]:
        """Run all forward passes and losses, plainly or by a plan, then go backward.

        Yields the outputs of each pass when its backward pass has ended.
        """
        begun: list[tuple[Any, torch.Tensor]] = []
        for number in range(len(self.batches)):
            outputs = self.call(called, number)
            begun.append((outputs, self.loss(outputs)))
            del outputs
        while begun:
            outputs, loss = begun.pop(0)
            # They are to be under the autocast of the forward pass, or under none.
            with autocast_again(autocast_now() if self.backward_in_autocast else ()):
                loss.backward()
            yield outputs
            del outputs, loss

    def outcome(self, called: Callable[..., Any] | None, passes: int = 2) -> Outcome:
        """Return all results of some backward passes from the start."""
        self.reset()
        found: Outcome = {}
        # Those that step in backward start with the same state as well.
        with kept_optimizer(self.optimizer if self.steps_in_backward else None):
            for position in range(1, passes + 1):
                for number, outputs in enumerate(self.passes(called), 1):
                    batch = f", batch {number}" if len(self.batches) > 1 else ""
                    self.collect(found, outputs, f"pass {position}{batch}: ")
        return found

    @property
    def steps_in_backward(self) -> bool:
        """Whether parameters change in backward passes, and gradients are gone then."""
        return isinstance(self.optimizer, OptimizersInBackward)

    def longest_outcome(self, fitted: FittedModel) -> tuple[Outcome, int]:
        """Return the results of two passes and 2, or of one if two do not fit.

        Gradients of the first pass are held while the second computes new ones, so
        accumulation needs more than a single pass.
        """
        try:
            return self.outcome(fitted, 2), 2
        except BudgetError:
            return self.outcome(fitted, 1), 1

    def collect(self, found: Outcome, outputs: Any, prefix: str) -> None:
        """Add copies of all that the last pass left to ``found``."""
        for path, leaf in tree_flatten_with_path(outputs)[0]:
            if isinstance(leaf, torch.Tensor):
                copy = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                found[f"{prefix}output{keystr(path)}"] = copy
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"{prefix}gradient of {name}"] = parameter.grad.clone()
            elif self.steps_in_backward:
                found[f"{prefix}parameter {name}"] = parameter.detach().clone()
        for name, buffer in self.model.named_buffers():
            found[f"{prefix}buffer {name}"] = buffer.clone()
        for leaf_name, leaf in self.input_gradients():
            found[f"{prefix}gradient of {leaf_name}"] = leaf.clone()
        found[f"{prefix}random state"] = torch.get_rng_state()
        for device in self.devices:
            state = device_module(device).get_rng_state(device)
            found[f"{prefix}random state of {device}"] = state

    def leaves(self) -> list[torch.Tensor]:
        """Return the example inputs that take a gradient."""
        return [
            leaf
            for leaf in tree_leaves(self.batches)
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad
        ]

    def input_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Return the gradients of the example inputs, with names."""
        return [
            (f"input {keystr(path)}", leaf.grad)
            for path, leaf in tree_flatten_with_path((self.args, self.kwargs))[0]
            if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.grad is not None
        ]

    def train(self, called: Callable[..., Any] | None) -> None:
        """Run one whole training step, the optimizer's included."""
        self.clear_gradients()
        for _ in self.passes(called):
            pass
        # The caller's autocast would keep the casts of eager steps for all that follow.
        torch.clear_autocast_cache()
        if self.optimizer is not None:
            with steps_of_ours():
                self.optimizer.step()

    def peak_bytes(self, called: Callable[..., Any] | None) -> int:
        """Return the measured peak of a whole training step, in bytes."""
        self.reset()
        peak = measure(
            lambda: self.train(called), warmup=2, repeats=0, resident=self.resident
        ).peak_bytes
        self.reset()
        return peak

    def device_peaks(
        self, called: Callable[..., Any], plan: Plan
    ) -> tuple[DevicePeak, ...]:
        """Return the measured peak of a whole training step on each device."""
        self.reset()
        peaks = device_peaks(
            lambda: self.train(called), plan, warmup=2, resident=self.resident
        )
        self.reset()
        return peaks

    def paired_times(
        self,
        called: Callable[..., Any],
        repeats: int,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> tuple[list[int], list[int]]:
        """Time plain and planned steps in turn; one pair more runs to warm up."""
        plain: list[int] = []
        planned: list[int] = []
        for position in range(repeats + 1):
            for times, which in ((plain, None), (planned, called)):
                start = clock_ns()
                self.train(which)
                self.synchronise()
                if position:
                    times.append(clock_ns() - start)
        return plain, planned

    def synchronise(self) -> None:
        """Wait for what was issued to the devices."""
        for device in self.devices:
            device_module(device).synchronize(device)
