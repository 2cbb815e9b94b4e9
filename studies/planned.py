"""Models within budgets: peak, exactness, time and planning time of each.

Everything about one model is measured in one process, which :mod:`studies.run` starts
afresh, with a cache of operator costs of its own that is empty at first.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.core.errors import BudgetError
from remat.planning.plan import Plan
from remat.training.fitted_model import FittedModel
from remat.training.request import PlanRequest
from remat.training.verification import Outcome, TrainingStep, compare
from studies.models import MODELS, Options, Workload
from studies.record import ForeignLoad

FRACTIONS = (0.9, 0.75, 0.6, 0.5, 0.4)
ACCUMULATING_FRACTION = 0.75
"""Where two backward passes are compared; elsewhere one."""

_NO_LIMIT = 2**62


class PhaseClock:
    """Adds up the seconds of capture, profile and solve from progress reports."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = {"capture": 0.0, "profile": 0.0, "solve": 0.0, "install": 0.0}
        self._now_s = now_s
        self._phase = "capture"
        self._since = now_s()

    def __call__(self, activity: str, share: float) -> None:  # noqa: ARG002
        """Take one report: a :data:`remat.solvers.base.ProgressCallback`."""
        if activity.startswith("counting parameters"):
            self.enter("capture")
        elif activity == "done":
            self.enter("install")
        elif activity.startswith(("trying ", "looking for the smallest budget")):
            self.enter("solve")
        else:
            self.enter("profile")

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
        now = self._now_s()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def stop(self) -> dict[str, float]:
        """Return the seconds of each phase and of all."""
        self.enter(self._phase)
        rounded = {f"{name}_s": round(s, 2) for name, s in self.seconds.items()}
        return {**rounded, "planning_s": round(sum(self.seconds.values()), 2)}


@dataclass
class Subject:
    """A model under study and what its plain step does.

    Parameters
    ----------
    workload
        The model.
    step
        Its training step, inside :meth:`TrainingStep.restored`.
    plain_peak_bytes
        Measured peak of the plain eager step, the optimizer's step included.
    """

    workload: Workload
    step: TrainingStep
    plain_peak_bytes: int

    def request(self, budget: int, **settings: Any) -> PlanRequest:
        """Return the request for a plan of the whole step."""
        step = self.step
        return PlanRequest(
            budget=budget, optimizer=step.optimizer, loss=step.loss, **settings
        )


def make_step(workload: Workload) -> TrainingStep:
    """Return the training step of a workload."""
    return TrainingStep(
        workload.model,
        workload.args,
        workload.kwargs,
        workload.loss,
        workload.make_optimizer(workload.model),
    )


def study_budgets(
    name: str, options: Options, fractions: Sequence[float], repeats: int
) -> Iterator[dict[str, Any]]:
    """Plan, run, measure and compare one model at fractions of its plain peak.

    Yields
    ------
    dict
        One line per fraction, and one for the floor if a fraction lies below it.
    """
    workload = MODELS[name](options)
    step = make_step(workload)
    with step.restored():
        subject = Subject(workload, step, step.peak_bytes(None))
        eager = step.outcome(None)
        reference = subject.request(_NO_LIMIT, solver="store-all", costs="estimated")
        captured = step.outcome(FittedModel(workload.model, reference))
        yield {
            "case": "plain",
            "status": "ok",
            "plain_peak_bytes": subject.plain_peak_bytes,
            "captured_differs_from_eager": _differences(eager, captured),
        }
        floor_bytes: int | None = None
        for fraction in fractions:
            budget = int(fraction * subject.plain_peak_bytes)
            passes = 2 if fraction == ACCUMULATING_FRACTION else 1
            line = study_budget(subject, budget, (eager, captured), repeats, passes)
            yield {"case": f"{fraction:.0%}", **line}
            if line["status"] == "below floor" and floor_bytes is None:
                floor_bytes = int(line["floor_bytes"])
                yield study_floor(subject, floor_bytes, (eager, captured), repeats)


def study_floor(
    subject: Subject, floor_bytes: int, expected: tuple[Outcome, Outcome], repeats: int
) -> dict[str, Any]:
    """Check that the floor works and that one byte less is refused."""
    line = study_budget(subject, floor_bytes, expected, repeats, 1)
    request = subject.request(floor_bytes - 1)
    try:
        plan_now(subject, request)
        is_refused = False
    except BudgetError as error:
        is_refused = error.required_bytes == floor_bytes
    return {"case": "floor", **line, "is_refused_below": is_refused}


def plan_now(subject: Subject, request: PlanRequest) -> tuple[FittedModel, Plan]:
    """Plan as :func:`remat.fit` does."""
    fitted = FittedModel(subject.workload.model, request)
    return fitted, fitted.plan_now(subject.step.args, subject.step.kwargs)


def study_budget(
    subject: Subject,
    budget: int,
    expected: tuple[Outcome, Outcome] | None,
    repeats: int,
    passes: int = 1,
) -> dict[str, Any]:
    """Return what happens at one budget in bytes.

    Parameters
    ----------
    subject
        The model.
    budget
        In bytes.
    expected
        Results of the eager and of the captured step, or ``None`` to compare nothing.
    repeats
        Pairs of plain and planned steps that are timed.
    passes
        Backward passes that are compared, at most those of ``expected``.
    """
    step = subject.step
    step.reset()
    clock = PhaseClock()
    line: dict[str, Any] = {
        "budget_bytes": budget,
        "plain_peak_bytes": subject.plain_peak_bytes,
    }
    try:
        fitted, plan = plan_now(subject, subject.request(budget, progress=clock))
    except BudgetError as error:
        line |= {"status": "below floor", "floor_bytes": error.required_bytes}
        return line | clock.stop() | {"message": str(error)}
    line |= {"status": "ok", **clock.stop(), **describe_plan(plan)}
    if expected is not None:
        found, passes = results_of(step, fitted, passes)
        eager, captured = (_passes(outcome, passes) for outcome in expected)
        line |= {
            "compared_count": len(found),
            "compared_passes": passes,
            "differs_from_eager": _differences(eager, found),
            "differs_from_captured": _differences(captured, found),
        }
        del found
    peak_bytes = step.peak_bytes(fitted)
    return line | {
        "measured_peak_bytes": peak_bytes,
        "is_within_budget": peak_bytes <= budget,
        "prediction_error": plan.peak_bytes / peak_bytes - 1,
        **paired_times(step, fitted, repeats),
    }


def results_of(
    step: TrainingStep, fitted: FittedModel, passes: int
) -> tuple[Outcome, int]:
    """Return the results of ``passes`` passes, or of one if more do not fit.

    Gradients of an earlier pass are held from the start of the next, so that the
    smallest budget of accumulation is higher.
    """
    try:
        return step.outcome(fitted, passes), passes
    except BudgetError:
        return step.outcome(fitted, 1), 1


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan's figures for a line of results."""
    return {
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_plain_peak_bytes": plan.baseline_peak_bytes,
        "predicted_slowdown": 1 + plan.overhead,
        "cost_ns": plan.cost_ns,
        "baseline_cost_ns": plan.baseline_cost_ns,
        "bound_ns": plan.bound_ns,
        "gap": plan.gap,
        "solver": plan.solver,
        "plan_status": str(plan.status),
        "candidates": plan.settings["candidates"],
        "op_count": len(plan.graph.ops),
        "recomputed_op_count": plan.recomputed_op_count,
        "seed": plan.settings["seed"],
    }


def paired_times(step: TrainingStep, called: Any, repeats: int) -> dict[str, Any]:
    """Time plain steps and others in turn, and how busy the machine was besides.

    Where one thread of the CPU does all the work, the time is that of the processor,
    which other processes disturb less.
    """
    load_before = os.getloadavg()[0]
    is_one_thread = torch.get_num_threads() == 1 and not step.devices
    clock_ns = time.process_time_ns if is_one_thread else time.perf_counter_ns
    with ForeignLoad() as foreign:
        plain, other = step.paired_times(called, repeats, clock_ns)
    pairs = zip(plain, other, strict=True)
    return {
        "clock": "processor" if is_one_thread else "wall",
        "plain_times_ns": plain,
        "times_ns": other,
        "plain_ns": round(statistics.median(plain)),
        "time_ns": round(statistics.median(other)),
        "slowdown": statistics.median(b / a for a, b in pairs),
        "load_before": round(load_before, 2),
        "foreign_load": foreign.share,
    }


def study_overhead(name: str, options: Options, repeats: int) -> dict[str, Any]:
    """Compare the step time at the measured plain peak with that of the plain step."""
    workload = MODELS[name](options)
    step = make_step(workload)
    with step.restored():
        subject = Subject(workload, step, step.peak_bytes(None))
        line = study_budget(subject, subject.plain_peak_bytes, None, repeats)
    return {"case": "100%", **line}


def _passes(outcome: Outcome, passes: int) -> Outcome:
    prefixes = tuple(f"pass {position}: " for position in range(1, passes + 1))
    return {k: v for k, v in outcome.items() if k.startswith(prefixes)}


def _differences(expected: Outcome, found: Outcome) -> dict[str, Any]:
    """Return how many tensors are not bitwise equal, and the worst of them."""
    differences = compare(expected, found)
    worst = max(differences, key=lambda d: d.largest, default=None)
    return {
        "count": len(differences),
        "worst": worst and worst.name,
        "largest": worst and worst.largest,
    }
