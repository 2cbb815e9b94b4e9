"""What a caching allocator reserves, before and after it is planned for.

``python -m studies.reserved`` takes the training graph of each model at twice the
widths of the other studies, with estimated costs, as if it ran on a device with
PyTorch's caching allocator, set in three ways, and plans it at 90 to 40 % of its peak:
once within as many *live* bytes (``before``), and once within as many *reserved* bytes
(``after``). All is simulated (:mod:`remat.memory`), by one quick solver, each model in
a fresh process on one thread. The bound is an arena in which the blocks of the second
step are laid out greedily by size. Lines go to ``studies/results/reserved.jsonl``;
``--tables`` writes them into ``docs/studies.md``. Seconds are the processor's.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from remat.core.allocator import AllocatorSettings
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.memory import arena
from remat.memory.caching_allocator import RequestKind
from remat.memory.requests import step_requests
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import Account, Plan
from remat.planning.reserved import with_allocator
from remat.training.fitting import plan
from studies.fresh_process import run_children
from studies.models import MODELS, Options
from studies.pages import fill_place
from studies.planned import make_step
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import table

STUDY = "reserved"
PAGE = ROOT / "docs" / "studies.md"
PERCENTS = (90, 75, 60, 50, 40)
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:256")
TEN = (
    *("resnet50", "vgg19", "unet", "densenet121"),
    *("gpt2", "bert", "vit", "t5", "llama", "mamba"),
)
SCALE = 2
SOLVER = "greedy-eviction"

_LIMIT_S = 900


def captured(name: str, *, tiny: bool) -> TrainingGraph:
    """Return the training graph of a model, with estimated costs."""
    workload = MODELS[name](Options(tiny=tiny, scale=SCALE))
    step = make_step(workload)
    return plan(
        workload.model,
        workload.args,
        workload.kwargs,
        budget="100%",
        optimizer=step.optimizer,
        loss=step.loss,
        costs="estimated",
        solver="store-all",
    ).graph


def planned(
    graph: TrainingGraph, budget_bytes: int, settings: str, account: Account
) -> Plan | BudgetError:
    """Plan within a budget, as on a device with an allocator that is set so."""
    kind = graph.device_kinds[0]
    platform = single_device(None, kind, AllocatorSettings.parse(settings))
    try:
        return plan_graph(
            graph,
            budget=budget_bytes,
            platform=platform,
            solver=SOLVER,
            account=account,
        )
    except BudgetError as error:
        return error


def facts_of(found: Plan | BudgetError) -> dict[str, Any]:
    """Return what a plan and its allocator take."""
    if isinstance(found, BudgetError):
        return {"status": "budget", "required_bytes": found.required_bytes}
    return {
        "status": "ok",
        "live_bytes": found.peak_bytes,
        "reserved_bytes": reserved_of(found),
        "cost_ns": found.cost_ns,
        "primed_bytes": list(found.primed_bytes),
        "is_steady": found.reserved is not None and found.reserved.is_steady,
    }


def reserved_of(found: Plan) -> int:
    """Return what a plan's allocator reserves."""
    return 0 if found.reserved is None else found.reserved.reserved_bytes


def arena_of(found: Plan) -> int:
    """Return what an arena takes for everything that is there in the second step."""
    asked = step_requests(found.graph, found.schedule, step_count=2)
    begin = asked.ends[1]
    gone = {
        request.block
        for request in asked.requests[:begin]
        if request.kind == RequestKind.FREE
    }
    staying = [r for r in asked.requests[:begin] if r.block not in gone]
    return arena.arena_bytes([*staying, *asked.requests[begin:]])


def lines_of(graph: TrainingGraph) -> list[dict[str, Any]]:
    """Return a line for each budget and setting of a step."""
    plain_bytes = plain_peak_bytes(graph)
    fixed = {"ops": len(graph.ops), "plain_peak_bytes": plain_bytes}
    lines: list[dict[str, Any]] = []
    for percent in PERCENTS:
        budget_bytes = plain_bytes * percent // 100
        live = planned(graph, budget_bytes, "", "live")
        arena_bytes = None if isinstance(live, BudgetError) else arena_of(live)
        for settings in SETTINGS:
            before = live
            if not isinstance(live, BudgetError):
                before = with_allocator(live, AllocatorSettings.parse(settings))
            started = time.process_time()
            after = planned(graph, budget_bytes, settings, "reserved")
            lines.append(
                {
                    "case": f"{percent}%",
                    "settings": settings,
                    **fixed,
                    "budget_bytes": budget_bytes,
                    "arena_bytes": arena_bytes,
                    "before": facts_of(before),
                    "after": facts_of(after),
                    "seconds": round(time.process_time() - started, 1),
                }
            )
    return lines


def newest(results: Path) -> list[dict[str, Any]]:
    """Return the newest line of each case, models in their order."""
    found = {
        (line["model"], line["case"], line["settings"]): line
        for line in read(results)
        if not line["tiny"]
    }
    cases = [f"{percent}%" for percent in PERCENTS]
    keys = [(m, c, s) for m in TEN for c in cases for s in SETTINGS]
    return [found[key] for key in keys if key in found]


def ratio(facts: dict[str, Any]) -> float | None:
    """Return reserved over live bytes, or ``None`` without a plan."""
    if facts["status"] != "ok":
        return None
    return facts["reserved_bytes"] / facts["live_bytes"]


def extra_time(line: dict[str, Any]) -> float | None:
    """Return how much longer the plan for reserved bytes takes than that for live."""
    before, after = line["before"], line["after"]
    if before["status"] != "ok" or after["status"] != "ok":
        return None
    return after["cost_ns"] / before["cost_ns"] - 1


def reserved_table(results: Path) -> str:
    """Return reserved over live bytes of each case, before and after."""
    rows: dict[tuple[str, str], list[str]] = {}
    for line in newest(results):
        before, after = line["before"], line["after"]
        key = (line["model"], line["case"])
        if key not in rows:
            bound = "-"
            if before["status"] == "ok":
                bound = f"{line['arena_bytes'] / before['live_bytes']:.3f}"
            rows[key] = [*key, bound]
        extra = extra_time(line)
        words = "smallest: " + _mib(after.get("required_bytes", 0))
        if (found := ratio(after)) is not None and extra is not None:
            words = f"{found:.3f} ({extra:+.1%})"
        was = ratio(before)
        rows[key] += ["-" if was is None else f"{was:.3f}", words]
    names = ("default", "expandable", "max_split 256")
    columns = [f"{name}, {when}" for name in names for when in ("before", "after")]
    return table(("model", "budget", "arena", *columns), rows.values())


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def summary_table(results: Path) -> str:
    """Return for each setting the ratios before and after, over all cases."""
    rows: list[Sequence[str]] = []
    for settings in SETTINGS:
        lines = [line for line in newest(results) if line["settings"] == settings]
        both = [line for line in lines if extra_time(line) is not None]
        if not both:
            continue
        before = sorted(ratio(line["before"]) or 0.0 for line in both)
        after = sorted(ratio(line["after"]) or 0.0 for line in both)
        extra = sorted(extra_time(line) or 0.0 for line in both)
        middle = len(both) // 2
        rows.append(
            [
                f"`{settings}`" if settings else "default",
                f"{len(both)} of {len(lines)}",
                f"{before[middle]:.3f}, {before[-1]:.3f}",
                f"{after[middle]:.3f}, {after[-1]:.3f}",
                str(sum(value <= 1.02 for value in after)),
                str(sum(value <= 1.05 for value in after)),
                f"{extra[middle]:+.1%}, {extra[-1]:+.1%}",
            ]
        )
    head = (
        *("setting", "plans", "before: median, largest", "after: median, largest"),
        *("after ≤ 1.02", "after ≤ 1.05", "more time: median, largest"),
    )
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan each model in a process of its own, or write the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.reserved", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*TEN])
    parser.add_argument("--tiny", action="store_true", help="the small variants")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the tables only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, "reserved", reserved_table(results))
        page = fill_place(page, "reserved-summary", summary_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.child:
        torch.set_num_threads(1)
        (name,) = options.models
        with ForeignLoad() as load:
            lines = lines_of(captured(name, tiny=options.tiny))
        fixed = {"study": STUDY, "model": name, "tiny": options.tiny}
        for line in lines:
            facts = {**fixed, **line, "foreign_load": load.share}
            append(results, {**facts, **environment()})
        print(f"{name}: {len(lines)} plans", flush=True)
        return 0
    rest = ["--results", str(options.results), *(["--tiny"] if options.tiny else [])]
    cases = {name: ["--models", name, *rest] for name in options.models}
    return run_children("studies.reserved", cases, limit_s=_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
