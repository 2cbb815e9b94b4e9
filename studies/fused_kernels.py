"""Fused kernels within a budget, beside ``torch.compile`` at the same measured peak.

``python -m studies.fused_kernels`` runs every model, each in a fresh process on one
thread: ``torch.compile`` with inductor and one ``activation_memory_budget``, remat with
the kernels of eager PyTorch, and remat with ``kernels="fused"``, both at the measured
peak of the former. Steps of the three and plain ones are timed in turn, in seconds of
the processor. Lines go to ``studies/results/fused_kernels.jsonl``; ``--tables`` writes
the newest of each case into ``docs/studies.md``.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from remat.core.errors import BudgetError
from remat.planning.plan import Plan
from remat.training.fitted_model import FittedModel
from remat.training.verification import compare
from studies.fresh_process import ONE_THREAD, STEADY_ALLOCATION, run_children
from studies.models import MODELS, Options
from studies.pages import fill_place
from studies.peers import PeerStep, exactness, make_peer
from studies.planned import Subject, make_step, plan_now
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import mebibytes, table

STUDY = "fused_kernels"
PAGE = ROOT / "docs" / "studies.md"
ACTIVATION_BUDGETS = (1.0, 0.5)
REPEATS = 7
_NO_LIMIT = 2**62
_LIMIT_S = 1500


def study(name: str, activation_budget: float, *, tiny: bool) -> dict[str, Any]:
    """Measure the three ways to run one model, and return peaks and times."""
    workload = MODELS[name](Options(tiny=tiny))
    case = f"inductor@{activation_budget}"
    step = PeerStep(make_step(workload), make_peer(case, workload.model))
    line: dict[str, Any] = {"case": case}
    with step.restored():
        subject = Subject(workload, step, step.peak_bytes(None))
        step.outcome(step.peer, 1)
        budget = step.peak_bytes(step.peer)
        line |= {
            "plain_peak_bytes": subject.plain_peak_bytes,
            "peer_peak_bytes": budget,
        }
        ways: dict[str, Callable[..., Any] | None] = {"plain": None, "peer": step.peer}
        for kernels in ("eager", "fused"):
            found, fitted = within(subject, budget, kernels)
            line |= {f"{kernels}_{key}": value for key, value in found.items()}
            if fitted is not None:
                ways[kernels] = fitted
        with ForeignLoad() as load:
            times = in_turn(step, ways)
        line |= {f"{way}_ns": round(statistics.median(ns)) for way, ns in times.items()}
        for way in ("peer", "eager", "fused"):
            if way in times:
                ratios = [
                    a / b for a, b in zip(times[way], times["plain"], strict=True)
                ]
                line[f"{way}_slowdown"] = statistics.median(ratios)
        if "fused" in times:
            pairs = zip(times["fused"], times["peer"], strict=True)
            line["fused_over_peer"] = statistics.median(a / b for a, b in pairs)
    return line | {"foreign_load": load.share, "repeats": REPEATS}


def within(
    subject: Subject, budget: int, kernels: str
) -> tuple[dict[str, Any], FittedModel | None]:
    """Plan with some kernels, and return what was measured and what runs the plan."""
    step = subject.step
    step.reset()
    start = time.process_time()
    try:
        fitted, plan = plan_now(subject, subject.request(budget, kernels=kernels))
    except BudgetError as error:
        return {"floor_bytes": error.required_bytes}, None
    line: dict[str, Any] = {"planning_s": round(time.process_time() - start, 1)}
    peak_bytes = step.peak_bytes(fitted)
    line |= {
        "peak_bytes": peak_bytes,
        "is_within_budget": peak_bytes <= budget,
        "prediction_error": plan.peak_bytes / peak_bytes - 1,
        "predicted_slowdown": 1 + plan.overhead,
        "op_count": len(plan.graph.ops),
        "recomputed_op_count": plan.recomputed_op_count,
        "kernel_count": kernel_count(plan),
    }
    request = subject.request(
        _NO_LIMIT, solver="store-all", costs="estimated", kernels=kernels
    )
    expected = step.outcome(FittedModel(subject.workload.model, request), 1)
    found = step.outcome(fitted, 1)
    line["differs_from_captured"] = len(compare(expected, found))
    del expected
    line |= exactness(step.outcome(None, 1), found)
    return line, fitted


def kernel_count(plan: Plan) -> int:
    """Return how many ops of a plan are fused kernels."""
    return sum(op.name.startswith("fused_") for op in plan.graph.ops)


def in_turn(
    step: PeerStep, ways: dict[str, Callable[..., Any] | None]
) -> dict[str, list[int]]:
    """Return the processor's nanoseconds of steps, one of each way after the other."""
    times: dict[str, list[int]] = {way: [] for way in ways}
    for repeat in range(-1, REPEATS):
        for way, called in ways.items():
            step.reset()
            start = time.process_time_ns()
            step.train(called)
            if repeat >= 0:  # The first round warms up.
                times[way].append(time.process_time_ns() - start)
    return times


def fused_table(results: Path) -> str:
    """Return the newest line of each case as a table."""
    newest = {
        (line["model"], line["case"]): line
        for line in read(results)
        if not line["tiny"]
    }
    rows: list[Sequence[str]] = []
    for name in MODELS:
        for budget in ACTIVATION_BUDGETS:
            line = newest.get((name, f"inductor@{budget}"))
            if line is not None:
                rows.append(_row(line))
    head = (
        "model",
        "peer",
        "its peak",
        "its time",
        "eager kernels",
        "fused kernels",
        "peak",
        "predicted",
        "fused / peer",
    )
    return table(head, rows)


def _row(line: dict[str, Any]) -> Sequence[str]:
    def slowdown(way: str) -> str:
        found = line.get(f"{way}_slowdown")
        return "below its floor" if found is None else f"{found:.2f} x"

    columns = [line["model"], line["case"].replace("@", " ")]
    columns += [mebibytes(line["peer_peak_bytes"]), slowdown("peer")]
    columns += [slowdown("eager"), slowdown("fused")]
    if "fused_peak_bytes" in line:
        columns += [
            mebibytes(line["fused_peak_bytes"]),
            f"{line['fused_prediction_error']:+.2%}",
            f"{line['fused_over_peer']:.2f}",
        ]
    else:
        columns += [f"floor {mebibytes(line['fused_floor_bytes'])}", "", ""]
    return columns


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each case in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.fused_kernels", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument(
        "--budgets", nargs="+", type=float, default=ACTIVATION_BUDGETS, metavar="SHARE"
    )
    parser.add_argument("--tiny", action="store_true", help="the small variants")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, "fused-kernels", fused_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.child:
        torch.set_num_threads(1)
        (name,), (budget,) = options.models, options.budgets
        line = study(name, budget, tiny=options.tiny)
        fixed = {"study": STUDY, "model": name, "tiny": options.tiny}
        append(results, {**fixed, **line, **environment()})
        print(
            f"{name}, {line['case']}: "
            + " ".join(f"{k} {v:.3g}" for k, v in line.items() if "slowdown" in k),
            flush=True,
        )
        return 0
    rest = ["--results", str(options.results), *(["--tiny"] if options.tiny else [])]
    cases = {
        f"{name}, {budget}": ["--models", name, "--budgets", str(budget), *rest]
        for name in options.models
        for budget in options.budgets
    }
    return run_children(
        "studies.fused_kernels",
        cases,
        limit_s=_LIMIT_S,
        variables={**ONE_THREAD, **STEADY_ALLOCATION},
    )


if __name__ == "__main__":
    sys.exit(main())
