"""How long the first plan of a model takes, capture and profile included.

``python -m studies.planning_time`` plans every model at half of its predicted peak,
each in a fresh process on one thread with nothing cached, and adds lines to
``studies/results/planning_time.jsonl``; ``--tables`` writes the newest of each model
into ``docs/studies.md``. Seconds are the processor's, so that other processes on the
machine count for little.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from remat.training.fitting import plan
from studies.fresh_process import run_children
from studies.models import MODELS, Options
from studies.pages import fill_place
from studies.planned import PhaseClock, make_step
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import seconds, table

STUDY = "planning_time"
PAGE = ROOT / "docs" / "studies.md"
BUDGET = "50%"
ROOMIER = {"vgg19": "60%"}
"""What does not work within half of its peak."""

_LIMIT_S = 600


def study(name: str, budget: str, *, tiny: bool) -> dict[str, Any]:
    """Plan a model within a budget and return the seconds of each phase."""
    workload = MODELS[name](Options(tiny=tiny))
    step = make_step(workload)
    clock = PhaseClock(time.process_time)
    with ForeignLoad() as load:
        found = plan(
            workload.model,
            workload.args,
            workload.kwargs,
            budget=budget,
            optimizer=step.optimizer,
            loss=step.loss,
            progress=clock,
        )
    return {
        "budget": budget,
        "ops": len(found.graph.ops),
        "cost_ns": found.cost_ns,
        "bound_ns": found.bound_ns,
        "solver": found.solver,
        **clock.stop(),
        "foreign_load": load.share,
    }


def planning_time_table(results: Path) -> str:
    """Return the newest line of each model as a table."""
    newest = {line["model"]: line for line in read(results) if not line["tiny"]}
    rows: list[Sequence[str]] = []
    for name in MODELS:
        if (line := newest.get(name)) is not None:
            phases = ("planning", "capture", "profile", "solve", "install")
            columns = [seconds(line[f"{phase}_s"]) for phase in phases]
            rows.append([name, str(line["ops"]), *columns])
    head = ("model", "ops", "first plan", "capture", "profile", "solve", "lowering")
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.planning_time", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--tiny", action="store_true", help="the small variants")
    parser.add_argument("--budget", help=f"default: {BUDGET} of the predicted peak")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, "planning-time", planning_time_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.child:
        torch.set_num_threads(1)
        (name,) = options.models
        budget = options.budget or ROOMIER.get(name, BUDGET)
        line = study(name, budget, tiny=options.tiny)
        fixed = {"study": STUDY, "model": name, "tiny": options.tiny}
        append(results, {**fixed, **line, **environment()})
        print(f"{name}: {line['planning_s']} s for {line['ops']} ops", flush=True)
        return 0
    rest = ["--results", str(options.results)]
    rest += ["--tiny"] if options.tiny else []
    rest += ["--budget", options.budget] if options.budget else []
    cases = {name: ["--models", name, *rest] for name in options.models}
    return run_children("studies.planning_time", cases, limit_s=_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
