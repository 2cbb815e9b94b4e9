"""Train two real models plainly and within a budget, and compare every bit.

Run it from the root of the repository: ``python -m examples.demo``. For each model the
same steps are trained twice from the same start: once as PyTorch does it, once within a
fraction of the memory that the first run was measured to take. Printed are the measured
peak and time of both, and whether losses, parameters and buffers are bitwise the same;
a picture of memory over one step is written too. The exit code is not 0 if the budget
is exceeded or a bit differs.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

import remat
from examples.workloads import TASKS, TrainingTask
from remat.core.units import format_bytes, format_ns, parse_budget
from remat.planning.plan import Plan
from remat.report.figures import compare_timelines, save_figure
from remat.report.progress import progress_bar
from remat.report.timelines import measured_timeline

WARM_UP_STEPS = 2
BUDGETS = {"gpt": "60%", "resnet": "70%"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What training some steps gave.

    Parameters
    ----------
    measured
        Peak and time of a step.
    losses
        One per step.
    state
        Parameters and buffers after the last step, by name.
    plan
        The plan that was followed, or ``None`` for a plain run.
    """

    measured: remat.Measurement
    losses: tuple[Tensor, ...]
    state: dict[str, Tensor]
    plan: Plan | None


def train(task: TrainingTask, step_count: int, budget_bytes: int | None) -> Run:
    """Train a fresh model for some steps, within a budget if there is one."""
    model = task.make_model()
    optimizer = task.make_optimizer(model)
    # Read before measuring: the data set itself is no part of the step.
    batches = list(islice(task.batches(), step_count))
    plan = None
    if budget_bytes is not None:
        inputs, targets = batches[0]
        with progress_bar() as progress:
            plan = remat.fit(
                model,
                (inputs,),
                budget=budget_bytes,
                optimizer=optimizer,
                loss=lambda outputs: task.loss(outputs, targets),
                progress=progress,
            )
    losses: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        inputs, targets = batches[len(losses)]
        # A fresh copy, as a data loader would make: the model's batch is part of the
        # step. Targets are not: what the loss reads besides outputs, no plan counts.
        loss = task.loss(model(inputs.clone()), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    # The same dropout masks in both runs.
    torch.manual_seed(0)
    measured = remat.measure(
        step,
        warmup=WARM_UP_STEPS,
        repeats=step_count - WARM_UP_STEPS - 1,
        device="cpu",
        resident=[model, optimizer],
    )
    state = {name: value.detach() for name, value in model.state_dict().items()}
    return Run(measured=measured, losses=tuple(losses), state=state, plan=plan)


def is_bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same bits: NaN equals NaN, 0.0 not -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(left, right)


def differing(plain: Run, planned: Run) -> list[str]:
    """Return the names of losses, parameters and buffers that differ in a bit."""
    names = [
        f"loss of step {position}"
        for position, pair in enumerate(zip(plain.losses, planned.losses, strict=True))
        if not is_bitwise_equal(*pair)
    ]
    names += [
        name
        for name in sorted({*plain.state, *planned.state})
        if name not in plain.state
        or name not in planned.state
        or not is_bitwise_equal(plain.state[name], planned.state[name])
    ]
    return names


def report(task: TrainingTask, plain: Run, planned: Run) -> bool:
    """Print both runs side by side; return whether every promise is kept."""
    plan = planned.plan
    if plan is None or plan.budget_bytes is None:
        msg = "the second run has no plan to compare with"
        raise ValueError(msg)
    one, other = plain.measured, planned.measured
    print(f"\n{task.name}: {len(plain.losses)} steps")
    rows = [
        ("", "plain", "within the budget", "ratio"),
        ("budget", "none", format_bytes(plan.budget_bytes), ""),
        ("peak, predicted", "", format_bytes(plan.peak_bytes), ""),
        (
            "peak, measured",
            format_bytes(one.peak_bytes),
            format_bytes(other.peak_bytes),
            f"{other.peak_bytes / one.peak_bytes:.2f}",
        ),
        (
            "time of a step",
            format_ns(one.time_ns or 0),
            format_ns(other.time_ns or 0),
            f"{(other.time_ns or 0) / (one.time_ns or 1):.2f}",
        ),
        ("first loss", f"{plain.losses[0]:.6f}", f"{planned.losses[0]:.6f}", ""),
        ("last loss", f"{plain.losses[-1]:.6f}", f"{planned.losses[-1]:.6f}", ""),
    ]
    print_rows(rows)
    different = differing(plain, planned)
    is_within = other.peak_bytes <= plan.budget_bytes
    print(
        f"  {'kept' if is_within else 'BROKEN'}: the measured peak is "
        f"{format_bytes(abs(plan.budget_bytes - other.peak_bytes))} "
        f"{'under' if is_within else 'over'} the budget"
    )
    if different:
        print(f"  BROKEN: {len(different)} values differ: {', '.join(different[:5])}")
    else:
        print(
            f"  kept: all {len(plain.losses)} losses and all {len(plain.state)} "
            "parameters and buffers after the last step are bitwise the same"
        )
    return is_within and not different


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for first, *others in rows:
        cells = [text.rjust(w) for text, w in zip(others, widths[1:], strict=True)]
        print("  " + "   ".join([first.ljust(widths[0]), *cells]).rstrip())


def draw(runs: Sequence[tuple[str, Run, Run]], path: Path) -> None:
    """Draw the measured memory over one step of each model, plain and planned."""
    figure = Figure(figsize=(9, 4.2 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), squeeze=False)[:, 0]
    for ax, (name, plain, planned) in zip(axes, runs, strict=True):
        compare_timelines(
            {
                "plain": measured_timeline(plain.measured.timeline),
                "remat": measured_timeline(planned.measured.timeline),
            },
            budget_bytes=planned.plan.budget_bytes if planned.plan else None,
            ax=ax,
        )
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(f"{name}: measured memory of one training step")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(axes[0], path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if every promise is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME"
    )
    parser.add_argument(
        "--budget",
        help="size, or percentage of the plain run's peak (default: "
        f"{', '.join(f'{size} for {name}' for name, size in BUDGETS.items())})".replace(
            "%", "%%"
        ),
    )
    parser.add_argument("--steps", type=int, default=6, help="training steps, >= 4")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args(argv)
    if options.steps <= WARM_UP_STEPS + 1:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}")
    started = time.monotonic()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    runs: list[tuple[str, Run, Run]] = []
    is_kept = True
    for name in options.models:
        task = TASKS[name]
        print(f"\ntraining the {task.name}, plainly ...", flush=True)
        plain = train(task, options.steps, None)
        budget_bytes = parse_budget(
            options.budget or BUDGETS[name], whole_bytes=plain.measured.peak_bytes
        )
        print(f"... and again within {format_bytes(budget_bytes)}", flush=True)
        planned = train(task, options.steps, budget_bytes)
        is_kept = report(task, plain, planned) and is_kept
        runs.append((task.name, plain, planned))
    picture = options.output / "memory.png"
    draw(runs, picture)
    print(f"\nmemory over one step is drawn in {picture}")
    print(
        f"{'every promise kept' if is_kept else 'A PROMISE IS BROKEN'}, in "
        f"{time.monotonic() - started:.0f} s"
    )
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
