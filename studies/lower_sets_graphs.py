"""The lower-set programs on the graphs of the paper's seven networks.

``python -m studies.lower_sets_graphs`` counts lower sets, plans each graph exactly and
approximately, times that beside a plain compiled recurrence and the Python twin, and
judges the peaks of segmentations after a liveness pass beside those of the published
method. Each network and case runs in a process of its own, on one thread; lines are
added to ``studies/results/lower_sets_graphs.jsonl``. No model is run.

What is known of the graphs beforehand: :mod:`studies.lower_sets_references`.
"""

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from remat import native
from remat.algorithms.lower_sets.canonical import (
    canonical_schedule,
    implied_training_graph,
)
from remat.algorithms.lower_sets.chen import chen_segmentation
from remat.algorithms.lower_sets.choice import (
    DEFAULT_CAP,
    approximate_family,
    choose_family,
)
from remat.algorithms.lower_sets.families import Family, all_lower_sets, ancestor_sets
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.algorithms.lower_sets.programs import (
    LowerSetObjective,
    LowerSetQuery,
    Segmentation,
    plan_lower_sets,
    smallest_budget,
    sweep_lower_sets,
)
from remat.algorithms.lower_sets.recurrences import Found, solve_lower_sets
from remat.core.liveness import insert_discards
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.testing.instances.published import read_forward
from studies.forward_graphs import (
    densenet161,
    published_file,
    resnet152,
    towers,
)
from studies.fresh_process import run_module
from studies.lower_sets_references import REFERENCES

STUDY = "lower_sets_graphs"
T = TypeVar("T")


EXPLODING = {"towers 8x6": (8, 6), "towers 6x10": (6, 10)}
"""Graphs of which the lower sets cannot be enumerated: 5.8 and 1.8 millions."""

CASES = ("exact", "approximate", "plain C++", "plain Python", "judged")
MULTIPLES = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
MOST_SETS = 40_000
PLAIN_LIMIT_S = {"plain C++": 900.0, "plain Python": 120.0}


def graph_of(network: str) -> ForwardGraph | None:
    """Return the graph; ``None`` if its file is not at hand."""
    if network in EXPLODING:
        return towers(*EXPLODING[network])
    shapes = {"resnet152": resnet152, "densenet161": densenet161}
    if network in shapes:
        return shapes[network]()
    file = published_file(network)
    return None if file is None else read_forward(file)


@dataclass(slots=True)
class Timed:
    """Seconds of a call: by the clock, and of this process alone."""

    wall_s: float
    cpu_s: float

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = float("inf")


def timed(call: Callable[[], T], clock: Timed, repeats: int = 1) -> T:
    """Return the answer of a call, and note its shortest time of some repeats."""
    while True:
        wall, cpu = time.monotonic(), time.process_time()
        answer = call()
        clock.wall_s = min(clock.wall_s, round(time.monotonic() - wall, 4))
        clock.cpu_s = min(clock.cpu_s, round(time.process_time() - cpu, 4))
        repeats -= 1
        if repeats <= 0 or clock.wall_s > 2:
            return answer


def seconds(clock: Timed) -> dict[str, float]:
    return {"wall_s": clock.wall_s, "cpu_s": clock.cpu_s}


def complete_family(graph: ForwardGraph) -> Family | None:
    return all_lower_sets(graph, MOST_SETS)


def share(graph: ForwardGraph, overhead: int) -> float:
    """Return an overhead in percent of one forward pass."""
    return round(100 * overhead / sum(graph.cost), 3)


def plan(graph: ForwardGraph, make: Callable[[ForwardGraph], Family]) -> dict[str, Any]:
    """Return smallest budget and least overheads in a family, with their times."""
    clock = Timed()
    family = timed(lambda: make(graph), clock, 3)
    line: dict[str, Any] = {"sets": len(family), "family": seconds(clock)}
    clock = Timed()
    least = timed(lambda: smallest_budget(graph, family), clock, 3).peak_bytes
    line["smallest_budget"] = {"bytes": least, **seconds(clock)}
    line["queries"] = []
    # Budgets are those of the exact program, in every case.
    exact = line if family.is_complete else None
    base = least if exact else exact_smallest(graph, least)
    for multiple in MULTIPLES:
        for objective, charge_last in (
            (LowerSetObjective.LEAST_OVERHEAD, False),
            (LowerSetObjective.LEAST_OVERHEAD, True),
            (LowerSetObjective.MOST_OVERHEAD, True),
        ):
            query = LowerSetQuery(
                budget_bytes=int(base * multiple),
                objective=objective,
                charge_last=charge_last,
            )
            clock = Timed()
            (found,) = timed(
                partial(sweep_lower_sets, graph, family, [query]), clock, 3
            )
            line["queries"].append(
                {
                    "multiple": multiple,
                    "objective": objective.value,
                    "charge_last": charge_last,
                    "overhead": None if found is None else found.overhead,
                    "overhead_percent": None
                    if found is None
                    else share(graph, found.overhead),
                    **seconds(clock),
                }
            )
    return line


def exact_smallest(graph: ForwardGraph, otherwise: int) -> int:
    family = complete_family(graph)
    if family is None:
        return otherwise
    return smallest_budget(graph, family).peak_bytes


def plan_exactly(graph: ForwardGraph) -> dict[str, Any]:
    """Return the case of the complete family."""
    if complete_family(graph) is None:
        return {"status": "exploded", "message": f"more than {MOST_SETS:_} lower sets"}

    def make(graph: ForwardGraph) -> Family:
        family = complete_family(graph)
        assert family is not None
        return family

    return plan(graph, make)


def plan_approximately(graph: ForwardGraph) -> dict[str, Any]:
    """Return the case of the approximate family, and the paper's own beside it."""
    line = plan(graph, approximate_family)
    pruned = ancestor_sets(graph)
    least = smallest_budget(graph, pruned, refinements=0).peak_bytes
    query = LowerSetQuery(budget_bytes=least, charge_last=True)
    line["pruned"] = {
        "sets": len(pruned),
        "smallest_budget_bytes": least,
        "overhead_percent": share(
            graph, plan_lower_sets(graph, pruned, query, refinements=0).overhead
        ),
        "overhead_percent_here": share(
            graph, plan_lower_sets(graph, approximate_family(graph), query).overhead
        ),
    }
    line["chosen"] = choose_family(graph).label
    return line


def plan_plainly(graph: ForwardGraph, case: str) -> dict[str, Any]:
    """Return times of an implementation of the recurrence without any bounds."""
    family = complete_family(graph)
    if family is None:
        return {"status": "exploded", "message": f"more than {MOST_SETS:_} lower sets"}
    core = native.core()
    if core is None:
        return {"status": "failed", "message": "there is no native core"}
    run: Callable[..., Any] = core.plain_solve_lower_sets
    if case == "plain Python":
        run = inspect.unwrap(solve_lower_sets)
    least = smallest_budget(graph, family).peak_bytes
    arrays = (graph.memory_bytes, graph.cost, graph.charged_bytes, graph.edges, 0)
    queries: list[dict[str, Any]] = []
    for multiple in (1.0, 1.1):
        query = (int(least * multiple), 0, False)
        call = partial(run, arrays, family.rows, [query], [], PLAIN_LIMIT_S[case])
        clock = Timed()
        ((found, overhead, *_),) = timed(call, clock)
        ended = found == Found.OPTIMAL
        queries.append(
            {
                "multiple": multiple,
                "objective": LowerSetObjective.LEAST_OVERHEAD.value,
                "charge_last": False,
                "overhead": overhead if ended else None,
                "timed_out": not ended,
                **seconds(clock),
            }
        )
        if not ended:
            break
    return {"sets": len(family), "queries": queries}


class Judge:
    """The peak and the overhead that the judge finds after the liveness pass."""

    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = graph
        self.training = implied_training_graph(graph)

    def __call__(self, found: Segmentation) -> tuple[int, float]:
        """Return the peak in bytes, and the overhead in percent of a forward pass."""
        schedule = canonical_schedule(self.graph, found.segment_of)
        tighter = insert_discards(self.training, schedule.steps)
        trace = simulate(self.training, single_device(), tighter)
        if trace.violation is not None:
            msg = f"{self.graph.name}: {trace.violation}"
            raise RuntimeError(msg)
        return trace.peak_bytes[0], share(self.graph, trace.recomputed_ns)


def candidates(graph: ForwardGraph, budgets: int = 40) -> Iterator[Segmentation]:
    """Yield segmentations over a range of budgets, for the judge.

    A segment is charged as in the paper, ``2 M_v`` a value, and then ``M_v`` alone:
    after the liveness pass, gradients come and go, and the values are what remains.
    """
    family = choose_family(graph)
    objectives = {
        None: (*LowerSetObjective,),
        graph.memory_bytes: (
            LowerSetObjective.LEAST_OVERHEAD,
            LowerSetObjective.MOST_OVERHEAD,
        ),
    }
    for segment_bytes, wanted in objectives.items():
        charged = replace(graph, segment_bytes=segment_bytes)
        least = smallest_budget(charged, family).peak_bytes
        most = sum(charged.charged_bytes)
        ratio = (most / least) ** (1 / (budgets - 1))
        queries = [
            LowerSetQuery(
                budget_bytes=int(least * ratio**step) + 1,
                objective=objective,
                charge_last=objective is LowerSetObjective.MOST_OVERHEAD,
            )
            for step, objective in product(range(budgets), wanted)
        ]
        for found in sweep_lower_sets(charged, family, queries, refinements=1):
            if found is not None:
                yield found


def judge_all(graph: ForwardGraph) -> dict[str, Any]:
    """Return what the judge finds: the best points, and those of Chen's method."""
    judge = Judge(graph)
    wall = time.monotonic()
    seen = {found.segment_of: found for found in candidates(graph)}
    planning_s = time.monotonic() - wall
    points = sorted({judge(found) for found in seen.values()})
    best: list[tuple[int, float]] = []
    for peak_bytes, percent in points:
        if not best or percent < best[-1][1]:
            best.append((peak_bytes, percent))
    family = complete_family(graph) or approximate_family(graph)
    chen = chen_segmentation(graph, family)
    chen_bytes, chen_percent = judge(chen)
    return {
        "judged": len(seen),
        "planning_s": round(planning_s, 2),
        "points": [{"peak_bytes": b, "overhead_percent": p} for b, p in best],
        "chen": {
            "formula_bytes": chen.peak_bytes,
            "peak_bytes": chen_bytes,
            "overhead_percent": chen_percent,
        },
        "plain_bytes": judge(one_segment(graph))[0],
    }


def one_segment(graph: ForwardGraph) -> Segmentation:
    """Return the segmentation that keeps everything."""
    return plan_lower_sets(
        graph, ancestor_sets(graph), LowerSetQuery(budget_bytes=2**60)
    )


def measure(network: str, case: str) -> dict[str, Any]:
    """Return the line of a network and case, without its surroundings."""
    graph = graph_of(network)
    if graph is None:
        return {"status": "missing", "message": "the published graph is not at hand"}
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "exact": lambda: plan_exactly(graph),
        "approximate": lambda: plan_approximately(graph),
        "plain C++": lambda: plan_plainly(graph, case),
        "plain Python": lambda: plan_plainly(graph, case),
        "judged": lambda: judge_all(graph),
    }
    before = peak_rss_bytes()
    line = {
        "status": "ok",
        "nodes": graph.node_count,
        "edges": len(graph.edges),
        "memory_bytes": sum(graph.memory_bytes),
        "cost": sum(graph.cost),
        **runs[case](),
    }
    return {**line, "rss_before_bytes": before, "rss_bytes": peak_rss_bytes()}


def peak_rss_bytes() -> int:
    """Return the most memory that this process has used; 0 where it cannot be told."""
    # Not getrusage: it begins with the memory of the process that started this one.
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    fields = dict(
        line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines()
    )
    return 1024 * int(fields["VmHWM"].split()[0])


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m studies.lower_sets_graphs", description=__doc__
    )
    everything = (*REFERENCES, *EXPLODING)
    found.add_argument("--networks", nargs="+", default=everything, metavar="NAME")
    found.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    found.add_argument("--results", type=Path, metavar="FOLDER")
    found.add_argument("--limit", type=int, default=2_400, help="seconds a process")
    found.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.child:
        print(json.dumps(measure(options.networks[0], options.cases[0])))
        return 0
    # Not in the children: torch would count in their memory.
    from studies import record  # noqa: PLC0415

    file = (options.results or record.RESULTS) / f"{STUDY}.jsonl"
    for network, case in product(options.networks, options.cases):
        line = start(network, case, options.limit)
        line |= {"study": STUDY, "model": network, "case": case}
        settings = {"multiples": MULTIPLES, "cap": DEFAULT_CAP, "threads": 1}
        record.append(file, {**line, "settings": settings, **record.environment()})
        print(f"{network}, {case}: {line['status']}", flush=True)
    return 0


def start(network: str, case: str, limit_s: int) -> dict[str, Any]:
    """Measure in a fresh process."""
    ended = run_module(
        "studies.lower_sets_graphs",
        ["--child", "--networks", network, "--cases", case],
        limit_s=limit_s,
        variables={"OMP_NUM_THREADS": "1"},
        keeps_output=True,
    )
    return json.loads(ended.output) if ended.is_ok else ended.line(case)


if __name__ == "__main__":
    sys.exit(main())
