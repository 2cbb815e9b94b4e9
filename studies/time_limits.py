"""Time limits: what planning takes beyond them, and what it finds within them.

``python -m studies.time_limits`` plans ten drawn graphs of 100 to 10 000 ops, each half
way between the bound on the peak and the peak of storing everything, under limits of 1,
5 and 20 seconds: with ``solver="auto"``, and with each of the cheap solvers alone. It
adds a line for each to ``studies/results/time_limits.jsonl``; ``--tables`` writes the
newest of them into ``docs/studies.md``. Seconds are the processor's, of this process
and of those that it started, so that other processes on the machine count for little.
A limit itself is a time on the clock: on a busy machine less is found within it.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from remat.core.bounds import peak_bound_bytes
from remat.core.errors import BudgetError, SolverUnsuitableError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.simulator import simulate
from remat.native import core
from remat.planning.one_device import plain_peak_bytes, plan_graph
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import table

STUDY = "time_limits"
PAGE = ROOT / "docs" / "studies.md"
LIMITS_S = (1, 5, 20)
CHEAP = ("chen-sqrt", "chen-greedy", "greedy-eviction", "revolve")
"""Solvers whose time is about linear in the graph."""

ALLOWED_S = 1.0
"""What planning may take beyond its limit, besides one replay."""


def differentiated(
    name: str, reads: Sequence[Sequence[int]], rng: random.Random
) -> TrainingGraph:
    """Return the training graph of a forward pass with drawn times and sizes.

    The backward of an op reads what the op read and wrote, and the gradients of all
    that read it; it writes a gradient for what is before, and one for a parameter.
    """
    count = len(reads)
    sizes = [rng.randint(1, 100) * 1024 for _ in reads]
    costs = [rng.randint(1, 100) * 1000 for _ in reads]
    readers: list[list[int]] = [[] for _ in reads]
    for op, values in enumerate(reads):
        for value in values:
            readers[value].append(op)
    kinds = (("value", sizes), ("gradient", sizes), ("parameter", [16] * count))
    storages = [
        Storage(name=f"{kind} {i}", size_bytes=size)
        for kind, known in kinds
        for i, size in enumerate(known)
    ]

    def made(
        name: str, read: set[int], writes: tuple[int, ...], cost_ns: int, phase: Phase
    ) -> Op:
        return Op(
            name=name,
            reads=tuple(sorted(read)),
            writes=writes,
            cost_ns=(cost_ns,),
            workspace_bytes=(0,),
            phase=phase,
        )

    ops = [
        made(f"f{i}", set(reads[i]), (i,), costs[i], Phase.FORWARD)
        for i in range(count)
    ]
    for i in reversed(range(count)):
        read = {*reads[i], i, *(count + reader for reader in readers[i])}
        gradients = (count + i, 2 * count + i)
        ops.append(made(f"b{i}", read, gradients, 2 * costs[i], Phase.BACKWARD))
    return TrainingGraph(
        name=name,
        storages=tuple(storages),
        ops=tuple(ops),
        final_outputs=tuple(range(2 * count, 3 * count)),
    )


def chain(ops: int) -> TrainingGraph:
    """Return a chain."""
    reads = [[i - 1] if i else [] for i in range(ops // 2)]
    return differentiated(f"chain-{ops}", reads, random.Random(0))  # noqa: S311


def layered(ops: int, width: int = 8) -> TrainingGraph:
    """Return layers of up to ``width`` ops that read one or two of the layer before.

    One op in five reads something of the last six layers as well.
    """
    rng = random.Random(ops)  # noqa: S311 - not a secret
    reads: list[list[int]] = []
    layers: list[list[int]] = []
    while len(reads) < ops // 2:
        first = len(reads)
        layer = list(range(first, min(first + rng.randint(1, width), ops // 2)))
        for _ in layer:
            read: set[int] = set()
            if layers:
                most = min(len(layers[-1]), rng.randint(1, 2))
                read.update(rng.sample(layers[-1], most))
                if rng.random() < 0.2:
                    read.add(rng.choice(rng.choice(layers[-6:])))
            reads.append(sorted(read))
        layers.append(layer)
    return differentiated(f"layered-{ops}-{width}", reads, rng)


def residual(ops: int) -> TrainingGraph:
    """Return blocks of four ops with a sum behind each."""
    reads: list[list[int]] = [[]]
    while len(reads) < ops // 2:
        start = len(reads) - 1
        reads += [[start + step] for step in range(4)]
        reads.append([start, start + 4])
    return differentiated(f"residual-{ops}", reads[: ops // 2], random.Random(1))  # noqa: S311


def towers(ops: int) -> TrainingGraph:
    """Return three chains that meet, and a trunk behind them."""
    length = ops // 8
    reads = [
        [step - 1 + length * tower] if step else []
        for tower in range(3)
        for step in range(length)
    ]
    reads.append([length - 1, 2 * length - 1, 3 * length - 1])
    while len(reads) < ops // 2:
        reads.append([len(reads) - 1])
    return differentiated(f"towers-{ops}", reads, random.Random(2))  # noqa: S311


GRAPHS: tuple[Callable[[], TrainingGraph], ...] = (
    lambda: layered(100),
    lambda: layered(300),
    lambda: towers(600),
    lambda: layered(1000),
    lambda: chain(1000),
    lambda: layered(2000, 64),
    lambda: layered(3000),
    lambda: residual(5000),
    lambda: layered(10_000),
    lambda: chain(10_000),
)


def processor_s() -> float:
    """Return the seconds that this process and those it started have used."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def measure(
    graph: TrainingGraph, budget_bytes: int, solver: str, limit_s: float
) -> dict[str, Any]:
    """Return what one solver finds within a limit, and what it takes."""
    started = processor_s()
    line: dict[str, Any] = {"found_by": None, "cost_ns": None}
    with ForeignLoad() as load:
        try:
            plan = plan_graph(
                graph, budget=budget_bytes, solver=solver, time_limit=limit_s
            )
        except (BudgetError, SolverUnsuitableError) as error:
            ended = processor_s()
            line["message"] = str(error)
        else:
            ended = processor_s()
            line |= {"found_by": plan.solver, "cost_ns": plan.cost_ns}
            line["plain_ns"] = plan.baseline_cost_ns
            replayed = time.process_time()
            simulate(graph, plan.platform, plan.schedule)
            line["replay_s"] = round(time.process_time() - replayed, 3)
    return {
        **line,
        "processor_s": round(ended - started, 3),
        "foreign_load": load.share,
    }


def time_limits_table(results: Path) -> str:
    """Return, per graph and limit, seconds and what was found beside the cheap ones."""
    newest = {
        (line["model"], line["limit_s"], line["solver"]): line for line in read(results)
    }
    rows: list[Sequence[str]] = []
    for (name, limit_s, solver), line in newest.items():
        if solver != "auto":
            continue
        alone = [newest.get((name, limit_s, cheap)) for cheap in CHEAP]
        found = [one for one in alone if one is not None and one["cost_ns"] is not None]
        best = min(found, key=lambda one: one["cost_ns"], default=None)
        slowest = max(
            one["processor_s"] - one.get("replay_s", 0.0)
            for one in (line, *alone)
            if one is not None
        )
        rows.append(
            [
                name,
                str(limit_s),
                f"{line['processor_s']:.1f}",
                f"{slowest:.1f}",
                _shown(line),
                "—" if best is None else f"{_shown(best)} ({best['solver']})",
            ]
        )
    head = (
        "graph",
        "limit, s",
        "`auto` took, s",
        "the slowest of all, s",
        "`auto`: time of the step",
        "the best cheap solver alone",
    )
    return table(head, rows)


def _shown(line: dict[str, Any]) -> str:
    if line["cost_ns"] is None:
        return "—"
    return f"{line['cost_ns'] / line['plain_ns']:.4f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every graph, or write the table; 1 if a limit was not kept."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.time_limits", description=__doc__
    )
    parser.add_argument("--graphs", nargs="+", default=[""], metavar="PREFIX")
    parser.add_argument("--limits", nargs="+", type=float, default=LIMITS_S)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, "time-limits", time_limits_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    core()
    is_late = False
    for make in GRAPHS:
        graph = make()
        if not any(graph.name.startswith(prefix) for prefix in options.graphs):
            continue
        low, high = peak_bound_bytes(graph), plain_peak_bytes(graph)
        budget = (low + high) // 2
        for limit_s in options.limits:
            for solver in ("auto", *CHEAP):
                line = measure(graph, budget, solver, limit_s)
                over_s = line["processor_s"] - line.get("replay_s", 0.0) - limit_s
                is_late |= over_s > ALLOWED_S
                line |= {
                    "study": STUDY,
                    "model": graph.name,
                    "case": f"{limit_s:g} s {solver}",
                    "solver": solver,
                    "limit_s": limit_s,
                    "ops": len(graph.ops),
                    "budget_bytes": budget,
                }
                append(results, {**line, **environment()})
                print(
                    f"{graph.name}, {limit_s:g} s, {solver}: {line['processor_s']} s, "
                    f"{line['found_by']} {_shown(line)}",
                    flush=True,
                )
    return int(is_late)


if __name__ == "__main__":
    sys.exit(main())
