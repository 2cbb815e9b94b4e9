"""Every training graph of a few ops: the exact solvers against exhaustive search.

``python -m studies.small_graphs --ops 6 --devices 1`` asks Checkmate with the default
rows for the optimum of every set of edges among six ops, at three budgets each, and
``--devices 2`` asks XEngine, with another device of other costs beside the first.
``--unlike`` leaves out the graphs that are an earlier one with its ops numbered
otherwise, although these are other problems: sizes and costs go by number. With
``--part 1/2`` and ``--part 2/2`` two processes share the work. Each answer is compared
with exhaustive search over the same class of schedules, and replayed by the judge.
Blocks of graphs are recorded as they are done, so that a run which was interrupted
goes on where it stopped.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice, permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from remat.backends import mathopt
from remat.core.graph import TrainingGraph
from remat.core.platform import Device, Link, Platform, single_device
from remat.core.problem import Limits, Problem, Result, Status
from remat.planning.portfolio import solve
from remat.solvers.base import Solver
from remat.solvers.checkmate import Checkmate
from remat.solvers.xengine import XEngine
from remat.testing import budgets_between
from remat.testing.device_oracles import best_on_devices
from remat.testing.frontier_oracle import FrontierOracle
from remat.testing.small_graphs import all_graphs
from studies.record import RESULTS, append, environment, read, source_digest

STUDY = "small_graphs"
BLOCK = 256
"""Graphs of a line of results."""

_BUDGETS = 3
_LIMIT_S = 60.0
_ALL_ROWS = 1 << 60
_OTHER_COSTS = (2, 6, 3, 3, 1, 4)
_CLASS_ALONE = Checkmate(
    backward_ops_per_stage=0, starts_from_known=False, improves=False
)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem, what solves it, and the optimum that exhaustive search finds."""

    problem: Problem
    solver: Solver
    optimum_ns: int | None

    def differs(self, result: Result) -> bool:
        """Return whether an answer is not the optimum of the class, and proved.

        A schedule that leaves the class may be cheaper; then nothing may be claimed
        that is not true of all schedules.
        """
        if self.optimum_ns is None:
            return result.status is not Status.INFEASIBLE
        if result.cost_ns is None:
            return True
        if result.cost_ns >= self.optimum_ns:
            claimed = (result.status, result.cost_ns, result.bound_ns)
            return claimed != (Status.OPTIMAL, self.optimum_ns, self.optimum_ns)
        best = best_on_devices(self.problem.graph, self.problem.platform)
        least_ns = self.optimum_ns if best is None else best[0]
        is_claimed = result.status is Status.OPTIMAL
        return (
            result.cost_ns < least_ns
            or result.bound_ns > least_ns
            or is_claimed != (result.bound_ns == result.cost_ns)
        )


def cases_of(graph: TrainingGraph, device_count: int) -> Iterator[Case]:
    """Yield the cases of a graph: up to three budgets, the largest one for all."""
    if device_count == 1:
        oracle = FrontierOracle(graph)
        for budget in budgets_between(graph, _BUDGETS):
            problem = Problem(graph=graph, platform=single_device(budget))
            yield Case(problem, _CLASS_ALONE, oracle.best(budget))
        return
    other = _OTHER_COSTS[: len(graph.ops)]
    ops = tuple(
        replace(
            op,
            cost_ns=(op.cost_ns[0], other[k]),
            workspace_bytes=op.workspace_bytes * 2,
        )
        for k, op in enumerate(graph.ops)
    )
    placed = replace(graph, ops=ops, device_kinds=("cpu", "gpu"))
    links = tuple(
        Link(source=a, target=1 - a, bytes_per_s=10**9, latency_ns=a) for a in (0, 1)
    )
    for budget in budgets_between(graph, _BUDGETS):
        devices = (
            Device(name="cpu", kind="cpu", budget_bytes=budget),
            Device(name="gpu", kind="gpu", budget_bytes=max(1, budget - 2)),
        )
        platform = Platform(devices=devices, links=links, copies_wait=True)
        problem = Problem(graph=placed, platform=platform)
        best = best_on_devices(placed, platform, is_staged=True)
        optimum = None if best is None else best[0]
        yield Case(problem, XEngine(copies_anywhere=True), optimum)


def unlike(op_count: int) -> NDArray[np.bool_]:
    """Tell of each of :func:`all_graphs` if it is the first but for its numbering.

    Returns
    -------
    NDArray[np.bool_]
        Shape ``(2 ** pairs,)``; the number of those set is that of acyclic graphs with
        ``op_count`` unlabelled vertices (OEIS A003087).
    """
    pairs = [(i, k) for k in range(op_count) for i in range(k)]
    numbers = np.arange(1 << len(pairs))
    # The first pair is the highest bit, as in the order of the product.
    edges = [(numbers >> bit) & 1 for bit in reversed(range(len(pairs)))]
    names = np.full(len(numbers), np.iinfo(np.int64).max)
    for order in permutations(range(op_count)):
        name = np.zeros(len(numbers), np.int64)
        for (i, k), is_in in zip(pairs, edges, strict=True):
            name |= is_in << (order[i] * op_count + order[k])
        np.minimum(names, name, out=names)
    is_first = np.zeros(len(numbers), np.bool_)
    is_first[np.unique(names, return_index=True)[1]] = True
    return is_first


def study_block(graphs: Sequence[TrainingGraph], device_count: int) -> dict[str, Any]:
    """Return how many cases there are, and those that disagree."""
    started = time.process_time()
    counts = {"cases": 0, "infeasible": 0}
    differing: list[str] = []
    for graph in graphs:
        for case in cases_of(graph, device_count):
            result = solve(case.problem, case.solver, limits=Limits.after(_LIMIT_S))
            counts["cases"] += 1
            counts["infeasible"] += case.optimum_ns is None
            if case.differs(result):
                reads = [op.reads for op in graph.ops]
                budgets = [d.budget_bytes for d in case.problem.platform.devices]
                differing.append(
                    f"{reads} at {budgets}: {result.status}, {result.cost_ns} and "
                    f"{result.bound_ns} instead of {case.optimum_ns}"
                )
    seconds = round(time.process_time() - started, 1)
    return {**counts, "differing": differing, "graphs": len(graphs), "seconds": seconds}


def part(text: str) -> tuple[int, int]:
    """Return ``(1, 2)`` of ``"1/2"``: the first of two parts."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        message = f"a part is written as 1/2, the first of two, not as {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(number), int(count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 if an answer differs."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.small_graphs", description=__doc__
    )
    parser.add_argument("--ops", type=int, default=6, choices=range(1, 7))
    parser.add_argument("--devices", type=int, default=1, choices=(1, 2))
    parser.add_argument(
        "--every", type=int, default=1, help="only each so-many-th graph"
    )
    parser.add_argument(
        "--unlike",
        action="store_true",
        help="one graph of those that differ in numbering",
    )
    parser.add_argument(
        "--part", type=part, default=(1, 1), help="only these blocks, as 1/2"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    file = options.results / f"{STUDY}.jsonl"
    names = ("ops", "devices", "every", "unlike")
    key = {name: getattr(options, name) for name in names}
    digest = source_digest()
    done = {
        line["block"]
        for line in read(file)
        if {name: line.get(name, False) for name in key} == key
        and line["source"] == digest
    }
    graphs = all_graphs(options.ops)
    if options.unlike:
        graphs = compress(graphs, unlike(options.ops))
    graphs = islice(graphs, 0, None, options.every)
    block, is_clean = 0, True
    while chunk := list(islice(graphs, BLOCK)):
        number, count = options.part
        if block % count == number - 1 and block not in done:
            # A process for each solve, for Ctrl-C's sake, would take most of the time.
            with patch.object(mathopt, "IN_PROCESS_ROWS", _ALL_ROWS):
                line = study_block(chunk, options.devices)
            full = {"study": STUDY, "block": block, **key, **line, **environment()}
            append(file, full)
            is_clean = is_clean and not line["differing"]
            print(
                f"block {block}: {line['cases']} cases, {line['seconds']} s",
                *line["differing"],
                sep="\n  ",
                file=sys.stderr,
            )
        block += 1
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
