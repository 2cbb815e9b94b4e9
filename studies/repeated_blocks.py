"""Networks of repeated blocks: each block solved once, beside Rotor and the portfolio.

Captured models with estimated costs, planned at shares of the way from the bound on the
peak to the peak of storing everything; what is recorded is the time of the planned step
over that of storing everything, and the seconds that planning took. Nothing is trained.

    python -m studies.repeated_blocks --models gpt2 bert
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import remat
from remat.core.bounds import cost_bound_ns, peak_bound_bytes
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Problem
from remat.planning.portfolio import solve_portfolio
from remat.solvers import chosen_solvers
from remat.testing import store_all_peak_bytes
from studies.models import MODELS, Options
from studies.record import RESULTS, ForeignLoad, append, environment

STUDY = "repeated_blocks"
SHARES = (20, 40, 60)
SOLVERS = ("rotor", "rockmate", "auto")


def captured(name: str, *, tiny: bool) -> TrainingGraph:
    """Return the training graph of a model of the studies, with estimated costs."""
    workload = MODELS[name](Options(tiny=tiny))
    plan = remat.plan(
        workload.model,
        workload.args,
        workload.kwargs,
        loss=workload.loss,
        budget="100%",
        solver="store-all",
        costs="estimated",
    )
    return plan.graph


def study_graph(
    graph: TrainingGraph, shares: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Return what each solver finds at each share, in percent."""
    low, high = peak_bound_bytes(graph), store_all_peak_bytes(graph)
    for share in shares:
        budget = low + (high - low) * share // 100
        problem = Problem(
            graph=graph, platform=single_device(budget, graph.device_kinds[0])
        )
        least_ns = cost_bound_ns(problem)
        for solver in SOLVERS:
            with ForeignLoad() as load:
                result = solve_portfolio(problem, chosen_solvers(solver))
            cost_ns = result.cost_ns
            yield {
                "share": share,
                "budget_bytes": budget,
                "solver": solver,
                "cost_ns": cost_ns,
                "over_store_all": None if cost_ns is None else cost_ns / least_ns,
                "found_by": result.solver,
                "message": result.message,
                "seconds": round(result.elapsed_s, 2),
                "foreign_load": load.share,
            }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and append a line for each solver and budget."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.repeated_blocks", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["gpt2"])
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    for name in options.models:
        graph = captured(name, tiny=options.tiny)
        fixed = {"study": STUDY, "model": name, "tiny": options.tiny}
        fixed["ops"] = len(graph.ops)
        for line in study_graph(graph, options.shares):
            append(
                options.results / f"{STUDY}.jsonl", {**fixed, **line, **environment()}
            )
            print(
                f"{name} {line['share']} % {line['solver']}: {line['over_store_all']}, "
                f"{line['seconds']} s, {line['message']}",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
