"""``remat fit``: train the user's own step within a budget, for some steps."""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import remat
from remat.cli.base import (
    WORKLOAD_HELP,
    Command,
    ExitCode,
    add_budget,
    add_output,
    add_platform,
    add_solving,
    add_workload,
    chosen_budget,
    chosen_platform,
    note,
    print_json,
    warn,
)
from remat.cli.planning import plan_options
from remat.core.errors import UsageError
from remat.core.units import format_bytes, format_ns
from remat.planning.plan import Plan, load_plan
from remat.report.progress import progress_bar

if TYPE_CHECKING:
    from remat.cli.workload import Workload
    from remat.training.device_memory import DevicePeak


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``remat fit``."""
    add_workload(parser)
    either = parser.add_mutually_exclusive_group()
    add_budget(either, is_required=False)
    either.add_argument(
        "--plan", metavar="FILE", help="install this saved plan instead of planning"
    )
    add_platform(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="training steps to run: the first warms up, the second is measured for "
        "memory, the others for time (default: 3, at least 2)",
    )
    parser.add_argument("--save", metavar="FILE", help="write the plan here")
    add_solving(parser)
    add_output(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What training some steps showed.

    Parameters
    ----------
    losses
        One per step.
    peak_bytes
        Measured peak of the second step, on the model's device.
    time_ns
        Median time of the steps after the second, or ``None`` if there was none.
    devices
        With several devices, the peak of each.
    """

    losses: tuple[float, ...]
    peak_bytes: int
    time_ns: int | None
    devices: "tuple[DevicePeak, ...]" = ()


def run(options: argparse.Namespace) -> ExitCode:
    """Fit, train, and print prediction and measurement."""
    budget, platform = chosen_budget(options.budget), chosen_platform(options)
    if budget is None and platform is None and options.plan is None:
        raise UsageError("give --budget SIZE or --plan FILE")
    if options.steps < 2:
        msg = f"--steps is {options.steps}; at least 2 are needed to measure one"
        raise UsageError(msg)
    saved = None if options.plan is None else load_plan(options.plan)
    # Imports torch, which help and usage errors do without.
    from remat.cli.workload import load_workload  # noqa: PLC0415

    workload = load_workload(options.factory, options.script_arguments)
    with progress_bar(is_quiet=options.quiet) as progress:
        plan = remat.fit(
            workload.model,
            workload.args,
            workload.kwargs,
            budget=budget,
            **plan_options(options, workload, platform=platform, progress=progress),
            plan=saved,
        )
        if options.save:
            plan.save(options.save)
            note(options, f"wrote the plan to {options.save}")
        progress(f"training {options.steps} steps", 0.0)
        # What the user's code prints is no data of ours.
        with contextlib.redirect_stdout(sys.stderr):
            trained = train(workload, options.steps, plan)
    if options.json:
        print_json({"plan": plan.summary(), "trained": _facts(plan, trained)})
    else:
        print(plan)
        print(_describe(plan, trained))
    for peak in trained.devices:
        if not peak.is_within_budget:
            warn(f"over budget: {peak}")
            return ExitCode.BROKEN_PROMISE
    budget_bytes = plan.budget_bytes
    if budget_bytes is not None and trained.peak_bytes > budget_bytes:
        excess = trained.peak_bytes - budget_bytes
        warn(f"over budget: the step takes {format_bytes(excess)} more than the budget")
        return ExitCode.BROKEN_PROMISE
    return ExitCode.OK


def train(workload: "Workload", step_count: int, plan: Plan) -> Trained:
    """Train the workload's model for some steps by its plan, and measure them."""
    # Imported here because they import torch.
    from remat.capture.surroundings import (  # noqa: PLC0415
        captured_tensors,
        plain_tensors,
        tensors_in,
    )
    from remat.training.device_memory import device_peaks  # noqa: PLC0415
    from remat.training.verification import default_loss  # noqa: PLC0415

    model, optimizer = workload.model, workload.optimizer
    loss_of: Callable[[Any], Any] = workload.loss or default_loss
    losses: list[float] = []

    def step() -> None:
        model.zero_grad()
        # Held until the step ends, as plans assume that callers do.
        outputs: Any = model(*workload.args, **workload.kwargs)
        loss: Any = loss_of(outputs)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        losses.append(float(loss.detach()))

    resident: list[object] = [
        model,
        plain_tensors(model),
        tensors_in((workload.args, workload.kwargs)),
        captured_tensors(workload.loss),
    ]
    if optimizer is not None:
        resident.append(optimizer)
    if plan.has_several_devices:
        peaks = device_peaks(step, plan, warmup=1, resident=resident)
        times: list[int] = []
        for _ in range(step_count - 2):
            start = time.perf_counter_ns()
            step()  # Reads the loss, so that all that was issued has ended.
            times.append(time.perf_counter_ns() - start)
        return Trained(
            losses=tuple(losses),
            peak_bytes=peaks[0].measured_bytes,
            time_ns=round(statistics.median(times)) if times else None,
            devices=peaks,
        )
    device = next((str(p.device) for p in model.parameters()), None)
    measured = remat.measure(
        step, warmup=1, repeats=step_count - 2, device=device, resident=resident
    )
    return Trained(
        losses=tuple(losses),
        peak_bytes=measured.peak_bytes,
        time_ns=measured.time_ns,
    )


def _facts(plan: Plan, trained: Trained) -> dict[str, Any]:
    return {
        "losses": list(trained.losses),
        "measured_peak_bytes": trained.peak_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "prediction_error": plan.peak_bytes / trained.peak_bytes - 1,
        "step_ns": trained.time_ns,
        "devices": [asdict(device) for device in trained.devices],
    }


def _describe(plan: Plan, trained: Trained) -> str:
    error = plan.peak_bytes / trained.peak_bytes - 1
    took = "" if trained.time_ns is None else f", {format_ns(trained.time_ns)} a step"
    losses = " ".join(f"{loss:.6g}" for loss in trained.losses)
    peak = (
        f"{format_bytes(trained.peak_bytes)} measured, "
        f"{format_bytes(plan.peak_bytes)} predicted ({error:+.2%})"
    )
    peaks = [f"  peak          {device}" for device in trained.devices]
    return "\n".join(
        [
            f"trained {len(trained.losses)} steps{took}",
            *(peaks or [f"  peak          {peak}"]),
            f"  losses        {losses}",
        ]
    )


FIT = Command(
    name="fit",
    summary="train for some steps within a budget, and measure",
    description=(
        "Plan your training step within a budget of bytes, train some steps by the "
        "plan, and print the plan with the measured peak. Exit code 4 says that the "
        "measured peak is over the budget."
    ),
    details=WORKLOAD_HELP,
    examples=(
        "remat fit train.py --budget 8GiB",
        "remat fit train.py --budget 60% --steps 10 --save plan.json",
        "remat fit train.py --plan plan.json",
        "remat fit train.py --budget cuda:0=6GiB --budget host=20GiB",
    ),
    add_arguments=add_arguments,
    run=run,
    writes=("--save",),
)
