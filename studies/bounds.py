"""How near the plans are to what is proved of all schedules.

``python -m studies.bounds`` plans every model at 90, 70, 50 and 40 % of its predicted
peak and at 1.05 of the smallest known budget, with estimated costs, each model in a
fresh process on one thread; and bounds the time of all schedules within each budget,
with the boundary alone and with more moments, and the smallest budget. It adds lines to
``studies/results/bounds.jsonl``; ``--tables`` writes the newest of each into
``docs/studies.md``. Seconds are the processor's. With ``--limit 60`` planning has that
many seconds for each budget, by the clock.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from remat.bounds.memory_bound import least_budget_bytes
from remat.bounds.time_bound import TimeBounds
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.smallest_budget import smallest_budget
from remat.training.fitting import plan
from studies.fresh_process import run_children
from studies.models import MODELS, Options
from studies.pages import fill_place
from studies.planned import make_step
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import table

STUDY = "bounds"
PAGE = ROOT / "docs" / "studies.md"
PERCENTS = (90, 70, 50, 40)
NEAR_SMALLEST = "1.05 x smallest"
CASES = (*(f"{percent}%" for percent in PERCENTS), NEAR_SMALLEST)
ALL = sys.maxsize

_LIMIT_S = 900


def captured(name: str, *, tiny: bool) -> TrainingGraph:
    """Return the training graph of a model, with estimated costs."""
    workload = MODELS[name](Options(tiny=tiny))
    step = make_step(workload)
    return plan(
        workload.model,
        workload.args,
        workload.kwargs,
        budget="100%",
        optimizer=step.optimizer,
        loss=step.loss,
        costs="estimated",
    ).graph


def time_line(
    graph: TrainingGraph, budget_bytes: int, limit_s: float | None = None
) -> dict[str, Any]:
    """Plan for a budget, and bound the time of all schedules within it."""
    try:
        found = plan_graph(graph, budget=budget_bytes, time_limit=limit_s)
    except BudgetError as error:
        return {"status": "budget", "required_bytes": error.required_bytes}
    clock = time.process_time
    started = clock()
    bounds = TimeBounds(graph, budget_bytes)
    boundary_ns = bounds.prove(1)
    between = clock()
    moments_ns = bounds.prove(found.cost_ns)
    ended = clock()
    certificate = found.certificate
    return {
        "status": "ok",
        "budget_bytes": budget_bytes,
        "solver": found.solver,
        "cost_ns": found.cost_ns,
        "once_ns": found.baseline_cost_ns,
        "boundary_ns": boundary_ns,
        "boundary_s": round(between - started, 3),
        "moments_ns": moments_ns,
        "moments_s": round(ended - between, 3),
        "floor_ns": found.floor_ns,
        "multipliers": 0 if certificate is None else len(certificate.multipliers),
        "solve_s": found.settings["solve_s"],
    }


def study(
    name: str, *, tiny: bool, limit_s: float | None = None
) -> list[dict[str, Any]]:
    """Return a line for each budget of a model."""
    graph = captured(name, tiny=tiny)
    plain_bytes = plain_peak_bytes(graph)
    started = time.process_time()
    least_bytes = least_budget_bytes(graph)
    least_s = round(time.process_time() - started, 3)
    smallest_bytes = smallest_budget(graph).budget_bytes
    fixed = {
        "ops": len(graph.ops),
        "plain_peak_bytes": plain_bytes,
        "resident_bytes": graph.resident_bytes(),
        "least_bytes": least_bytes,
        "least_s": least_s,
        "smallest_bytes": smallest_bytes,
    }
    budgets = [plain_bytes * percent // 100 for percent in PERCENTS]
    budgets.append(smallest_bytes * 105 // 100)
    return [
        {"case": case, **fixed, **time_line(graph, budget, limit_s)}
        for case, budget in zip(CASES, budgets, strict=True)
    ]


def gap_of(line: dict[str, Any], bound: str) -> float:
    """Return how much of a plan's time a bound leaves open."""
    floor_ns = max(line[bound], line["once_ns"])
    return (line["cost_ns"] - floor_ns) / line["cost_ns"]


def proved_share(line: dict[str, Any]) -> float:
    """Return the part of a plan's extra time that every schedule has."""
    extra_ns = line["cost_ns"] - line["once_ns"]
    proved_ns = max(0, line["floor_ns"] - line["once_ns"])
    return 1.0 if extra_ns <= 0 else proved_ns / extra_ns


def newest(results: Path, *, is_limited: bool = False) -> list[dict[str, Any]]:
    """Return the newest line of each case, models in their order."""
    found = {
        (line["model"], line["case"]): line
        for line in read(results)
        if not line["tiny"] and (line.get("limit_s") is not None) == is_limited
    }
    return [
        found[name, case] for name in MODELS for case in CASES if (name, case) in found
    ]


def bounds_table(results: Path) -> str:
    """Return the newest line of each case as a table."""
    rows: list[Sequence[str]] = []
    for line in newest(results):
        name = f"{line['model']} ({line['ops']} ops)"
        if line["status"] != "ok":
            rows.append([name, line["case"], *["-"] * 6])
            continue
        rows.append(
            [
                name,
                line["case"],
                f"{line['cost_ns'] / line['once_ns'] - 1:+.2%}",
                f"{gap_of(line, 'boundary_ns'):.2%}",
                f"{gap_of(line, 'floor_ns'):.2%}",
                f"{proved_share(line):.3f}",
                f"{line['boundary_s']:.2f}",
                f"{line['moments_s']:.2f}",
            ]
        )
    head = (
        "model",
        "budget",
        "extra time",
        "gap, boundary",
        "gap, moments",
        "proved share of extra",
        "boundary, s",
        "moments, s",
    )
    return table(head, rows)


def summary_table(results: Path) -> str:
    """Return median, 90th percentile and largest gap by kind of budget."""
    lines = [line for line in newest(results) if line["status"] == "ok"]
    groups = {
        "70 to 40 %": [line for line in lines if line["case"] in {"70%", "50%", "40%"}],
        **{case: [line for line in lines if line["case"] == case] for case in CASES},
    }
    limited = [
        line for line in newest(results, is_limited=True) if line["status"] == "ok"
    ]
    for case in ("70 to 40 %", NEAR_SMALLEST):
        cases = {case} if case == NEAR_SMALLEST else {"70%", "50%", "40%"}
        group = [line for line in limited if line["case"] in cases]
        names = sorted({line["model"] for line in group})
        groups[f"{case}, 60 s: {', '.join(names)}"] = group
    rows: list[Sequence[str]] = []
    for label, group in groups.items():
        gaps = sorted(gap_of(line, "floor_ns") for line in group)
        if gaps:
            nearly_all = gaps[min(len(gaps) - 1, int(len(gaps) * 0.9))]
            spread = (median(gaps), nearly_all, gaps[-1])
            rows.append([label, str(len(gaps)), *(f"{gap:.2%}" for gap in spread)])
    return table(("budgets", "plans", "median gap", "90th percentile", "largest"), rows)


def memory_table(results: Path) -> str:
    """Return what is proved of the smallest budget of each model."""
    rows: list[Sequence[str]] = []
    for line in newest(results):
        if line["case"] == NEAR_SMALLEST:
            least, smallest = line["least_bytes"], line["smallest_bytes"]
            resident = line["resident_bytes"]
            rows.append(
                [
                    line["model"],
                    f"{least / smallest:.3f}",
                    f"{(least - resident) / (smallest - resident):.3f}",
                    f"{line['least_s']:.2f}",
                ]
            )
    head = ("model", "bound / smallest known", "of what is not resident", "seconds")
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Bound each model in a process of its own, or write the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.bounds", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of each plan")
    parser.add_argument("--tiny", action="store_true", help="the small variants")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the tables only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, "bounds", bounds_table(results))
        page = fill_place(page, "bounds-summary", summary_table(results))
        page = fill_place(page, "bounds-memory", memory_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.child:
        torch.set_num_threads(1)
        (name,) = options.models
        with ForeignLoad() as load:
            lines = study(name, tiny=options.tiny, limit_s=options.limit)
        fixed = {"study": STUDY, "model": name, "tiny": options.tiny}
        fixed["limit_s"] = options.limit
        for line in lines:
            facts = {**fixed, **line, "foreign_load": load.share}
            append(results, {**facts, **environment()})
        print(f"{name}: {len(lines)} budgets", flush=True)
        return 0
    rest = ["--results", str(options.results), *(["--tiny"] if options.tiny else [])]
    rest += [] if options.limit is None else ["--limit", str(options.limit)]
    cases = {name: ["--models", name, *rest] for name in options.models}
    return run_children("studies.bounds", cases, limit_s=_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
