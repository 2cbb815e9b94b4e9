"""Integer and constraint programs on published training graphs.

``python -m studies.milp_graphs --instances FOLDER`` plans each graph at shares of its
store-all peak with every method under one time limit and one thread, and adds lines to
``studies/results/milp_graphs.jsonl``. Every answer has been judged. A case whose line
is there already is skipped. No model is run.

The graphs are those that the authors of Moccasin published: files ``*_train.json`` were
extracted from Keras by the authors of Checkmate, ``random_layered_*.json`` are drawn.
They say nothing of parameters; an op whose output nobody reads drops it at once.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remat.core.bounds import cost_bound_ns, peak_bound_bytes
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem
from remat.planning.portfolio import solve
from remat.solvers.base import Solver
from remat.solvers.checkmate import Checkmate, CheckmateLpRounding
from remat.solvers.checkmate_model import Rows
from remat.solvers.moccasin import Moccasin
from remat.solvers.store_all import StoreAll
from remat.testing.instances.published import read_node_link

STUDY = "milp_graphs"
FOLDER_VARIABLE = "REMAT_MOCCASIN_GRAPHS"
PERCENTS = (90, 80, 70, 60, 50)

METHODS: dict[str, Solver] = {
    "default": Checkmate(),
    "published rows": Checkmate(
        rows=Rows.PUBLISHED, backward_ops_per_stage=0, starts_from_known=False
    ),
    "tight rows": Checkmate(backward_ops_per_stage=0, starts_from_known=False),
    "coarse, 4": Checkmate(backward_ops_per_stage=4, starts_from_known=False),
    "LP rounding": CheckmateLpRounding(),
    "Moccasin, 2": Moccasin(computations=2, starts_from_known=False),
    "Moccasin, 3": Moccasin(computations=3, starts_from_known=False),
}
"""Only the default starts from the schedules of the heuristics."""


def measure(
    graph: TrainingGraph, budget_bytes: int, method: str, limit_s: float
) -> dict[str, Any]:
    """Return what one method finds at one budget."""
    problem = Problem(graph=graph, platform=single_device(budget_bytes))
    started = time.monotonic()
    result = solve(problem, METHODS[method], limits=Limits.after(limit_s))
    return {
        "status": result.status.value,
        "stop_reason": result.stop_reason.value,
        "cost_ns": result.cost_ns,
        "bound_ns": result.bound_ns,
        "gap": result.gap,
        "peak_bytes": None if result.trace is None else result.trace.peak_bytes[0],
        "message": result.message,
        "elapsed_s": round(time.monotonic() - started, 2),
    }


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m studies.milp_graphs", description=__doc__
    )
    default = os.environ.get(FOLDER_VARIABLE)
    found.add_argument(
        "--instances",
        type=Path,
        required=default is None,
        default=None if default is None else Path(default),
        metavar="FOLDER",
        help=f"the published graphs (also: the variable {FOLDER_VARIABLE})",
    )
    found.add_argument("--graphs", nargs="+", default=[""], metavar="PREFIX")
    found.add_argument("--percents", nargs="+", type=int, default=PERCENTS)
    found.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    found.add_argument("--limit", type=float, default=60.0, help="seconds a case")
    found.add_argument("--results", type=Path, metavar="FOLDER")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    from studies import record  # noqa: PLC0415 - imports torch, which takes a while

    options = parser().parse_args(arguments)
    results = (options.results or record.RESULTS) / f"{STUDY}.jsonl"
    done = {
        (line["model"], line["case"], line["limit_s"]) for line in record.read(results)
    }
    files = sorted(options.instances.glob("*.json"))
    graphs = [read_node_link(file) for file in files]
    graphs = [g for g in graphs if any(g.name.startswith(p) for p in options.graphs)]
    for graph in sorted(graphs, key=lambda g: len(g.ops)):
        plain = Problem(graph=graph, platform=single_device())
        trace = solve(plain, StoreAll()).trace
        assert trace is not None
        peak, floor = trace.peak_bytes[0], peak_bound_bytes(graph)
        for percent in options.percents:
            budget = peak * percent // 100
            if budget < floor:
                print(f"{graph.name}, {percent} %: below the floor", flush=True)
                continue
            for method in options.methods:
                case = f"{percent} % {method}"
                if (graph.name, case, options.limit) in done:
                    continue
                with record.ForeignLoad() as load:
                    line = measure(graph, budget, method, options.limit)
                line |= {
                    "study": STUDY,
                    "model": graph.name,
                    "case": case,
                    "method": method,
                    "percent": percent,
                    "limit_s": options.limit,
                    "ops": len(graph.ops),
                    "reads": sum(len(op.reads) for op in graph.ops),
                    "store_all_bytes": peak,
                    "floor_bytes": floor,
                    "budget_bytes": budget,
                    "plain_ns": cost_bound_ns(plain),
                    "foreign_load": load.share,
                }
                record.append(results, {**line, **record.environment()})
                print(
                    f"{graph.name}, {case}: {line['status']} {line['cost_ns']} "
                    f"(bound {line['bound_ns']}) in {line['elapsed_s']} s",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
