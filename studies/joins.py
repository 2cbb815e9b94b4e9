"""Joins and chains on real models: against checkpointing, and against a static split.

``python -m studies.joins measured`` trains each model with ``torch.utils.checkpoint``
in several ways and with remat within the measured peak of each, step by step in turn.
``python -m studies.joins curves`` plans the joins at many budgets, branches together
and with a fixed share of memory each. Both add lines to
``studies/results/joins.jsonl``. ``python -m studies.joins figure`` draws the curves.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from remat.chains.operations import Backward, Forward, Operation, Turn
from remat.chains.rotor import ChainPlan, least_budget, plan_rotor
from remat.chains.stage_joins import StageJoin, plan_stage_join
from remat.chains.stages import StageChain
from remat.errors import BudgetError
from remat.fitting import FittedModel
from remat.floor import smallest_budget
from remat.graph import TrainingGraph
from remat.graph_planning import plain_peak_bytes
from remat.planning import solve
from remat.platform import single_device
from remat.problem import Limits, Problem
from remat.reductions.joins import JoinOfStages, reduce_to_join
from remat.retention import RetentionTable
from remat.solvers.join import Join
from remat.solvers.order_search import geometric_budgets
from remat.verification import Outcome, TrainingStep, compare
from studies.fresh_process import STEADY_ALLOCATION
from studies.join_networks import CHAINS, JOINS
from studies.models import Options, Workload
from studies.peers import Peer, checkpointed, exactness
from studies.planned import Subject, describe_plan, make_step, plan_now
from studies.record import (
    RESULTS,
    ROOT,
    ForeignLoad,
    append,
    environment,
    read,
)

FILE = RESULTS / "joins.jsonl"
FIGURE = ROOT / "docs" / "images" / "joins-overhead.svg"
MODELS = {**JOINS, **CHAINS}
SEGMENTS = (2, 4)
"""What ``checkpoint_sequential`` is asked for on convolutional encoders."""
GROUPS = {"vgg19": (1, 2), "resnet101": (1, 3), "gpt2": (1,)}
"""Consecutive blocks that are checkpointed together on the other models."""
BELOW = 0.85
"""The tight budget, over the smallest peak that checkpointing reaches."""

Line = dict[str, Any]


# --- measured ------------------------------------------------------------------------


def peers_of(name: str, workload: Workload) -> dict[str, Peer]:
    """Return the ways of checkpointing a model, by name."""
    model: Any = workload.model
    call: Callable[..., Any] = getattr(model, "_call_impl")  # noqa: B009
    if name == "clip":
        inner = checkpointed(model.model)
        return {"per block": Peer(call, inner.switch)}
    if name in JOINS:
        return {
            f"checkpoint_sequential, {count} segments": Peer(
                call, _sequential(model.encoder.features, count)
            )
            for count in SEGMENTS
        }
    return {
        "per block" if count == 1 else f"per {count} blocks": checkpointed(model, count)
        for count in GROUPS[name]
    }


def _sequential(features: nn.Sequential, count: int) -> Callable[[bool], object]:
    # A convolution, its normalisation and its activation are one function.
    units: list[nn.Sequential] = []
    for layer in features:
        if isinstance(layer, nn.Conv2d) or not units:
            units.append(nn.Sequential())
        units[-1].append(layer)

    def forward(x: torch.Tensor) -> Any:
        segments = min(count, len(units))
        return checkpoint_sequential(units, segments, x, use_reentrant=False)

    def switch(is_on: bool) -> None:  # noqa: FBT001
        if is_on:
            vars(features)["forward"] = forward
        else:
            vars(features).pop("forward", None)

    return switch


class SwitchedStep(TrainingStep):
    """A training step that runs plainly, as a peer does, or by a plan."""

    def __init__(self, plain: TrainingStep, peers: dict[str, Peer]) -> None:
        vars(self).update(vars(plain))
        self.peers = peers

    def call(self, called: Callable[..., Any] | None) -> Any:
        """Run the forward pass."""
        self.switch_off()
        if isinstance(called, Peer):
            called.switch(True)  # noqa: FBT003
        return super().call(called)

    def switch_off(self) -> None:
        """Make the model plain."""
        for peer in self.peers.values():
            peer.switch(False)  # noqa: FBT003

    def times_in_turn(self, ways: dict[str, Any], repeats: int) -> dict[str, list[int]]:
        """Return nanoseconds of processor time of steps of each way, in turn."""
        found: dict[str, list[int]] = {way: [] for way in ways}
        for position in range(repeats + 1):
            for way, called in ways.items():
                start = time.process_time_ns()
                self.train(called)
                if position:
                    found[way].append(time.process_time_ns() - start)
        return found


def study_measured(name: str, repeats: int, *, tiny: bool) -> Iterator[Line]:
    """Compare remat with every way of checkpointing, at the peak of each."""
    workload = MODELS[name](Options(tiny=tiny))
    step = SwitchedStep(make_step(workload), peers_of(name, workload))
    method = "join" if name in JOINS else "rotor"
    with step.restored():
        subject = Subject(workload, step, step.peak_bytes(None))
        eager = step.outcome(None, 1)
        request = subject.request(2**62, solver="store-all", costs="estimated")
        captured = step.outcome(FittedModel(workload.model, request), 1)
        peaks = {label: step.peak_bytes(p) for label, p in step.peers.items()}
        tightest = min(peaks, key=peaks.__getitem__)
        for label, peer in step.peers.items():
            differs = exactness(eager, step.outcome(peer, 1))
            for solver in (method, "auto") if label == tightest else (method,):
                yield {
                    "peer": label,
                    "peer_peak_bytes": peaks[label],
                    "peer_differs_from_eager": differs,
                    **study_budget(
                        subject, peaks[label], solver, (eager, captured), peer, repeats
                    ),
                }
        tight = int(BELOW * peaks[tightest])
        yield study_budget(subject, tight, method, (eager, captured), None, repeats)


def study_budget(
    subject: Subject,
    budget: int,
    solver: str,
    expected: tuple[Outcome, Outcome],
    peer: Peer | None,
    repeats: int,
) -> Line:
    """Plan, run, measure and compare at one budget in bytes."""
    step = subject.step
    assert isinstance(step, SwitchedStep)
    step.reset()
    step.switch_off()
    line: Line = {
        "solver": solver,
        "budget_bytes": budget,
        "plain_peak_bytes": subject.plain_peak_bytes,
    }
    started = time.perf_counter()
    try:
        fitted, plan = plan_now(subject, subject.request(budget, solver=solver))
    except BudgetError as error:
        return line | {"status": "no schedule", "message": str(error)[:300]}
    line |= {"status": "ok", "planning_s": round(time.perf_counter() - started, 1)}
    line |= {"solve_s": plan.settings["solve_s"], **describe_plan(plan)}
    found = step.outcome(fitted, 1)
    eager, captured = expected
    line |= {
        "differs_from_eager": len(compare(eager, found)),
        "differs_from_captured": len(compare(captured, found)),
        "compared_count": len(found),
    }
    del found
    peak = step.peak_bytes(fitted)
    ways: dict[str, Any] = {"plain": None, "remat": fitted}
    if peer is not None:
        ways["peer"] = peer
    with ForeignLoad() as foreign:
        times = step.times_in_turn(ways, repeats)
    line |= {
        "measured_peak_bytes": peak,
        "is_within_budget": peak <= budget,
        "processor_ns": times,
        "slowdown": _ratio(times["remat"], times["plain"]),
        "foreign_load": foreign.share,
    }
    if peer is not None:
        line["peer_slowdown"] = _ratio(times["peer"], times["plain"])
        line["time_over_peer"] = _ratio(times["remat"], times["peer"])
    return line


def _ratio(one: Sequence[int], other: Sequence[int]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


# --- curves --------------------------------------------------------------------------


def study_curves(name: str, *, tiny: bool, points: int = 14) -> Iterator[Line]:
    """Plan a join at many budgets: branches together, and with fixed shares."""
    graph = captured_graph(name, tiny=tiny)
    forms = reduce_to_join(graph)
    if forms is None or forms.join is None:
        msg = f"{name} is no join"
        raise SystemExit(msg)
    whole = forms.join.join()
    plain_bytes = plain_peak_bytes(graph)
    floor = smallest_budget(graph, kind=graph.device_kinds[0])
    least_ns = sum(op.cost_ns[0] or 0 for op in graph.ops)
    together = weighed(forms.join, plans_together(whole))
    split = weighed(forms.join, plans_split(whole))
    lowest = min(peak for peak, _ in together)
    for index in range(points):
        budget = lowest + (plain_bytes - lowest) * index // (points - 1)
        problem = Problem(graph=graph, platform=single_device(budget))
        solved = solve(problem, Join(), limits=Limits.after(60))
        yield {
            "curve": "judged",
            "budget_bytes": budget,
            "plain_peak_bytes": plain_bytes,
            "floor_bytes": floor.budget_bytes,
            "least_ns": least_ns,
            "stages": forms.join.stage_counts,
            "together_ns": cheapest(together, budget),
            "split_ns": cheapest(split, budget),
            "solver_ns": solved.cost_ns,
        }
    shares = shares_of(whole)
    for budget in budgets_of(whole, points):
        plan = plan_stage_join(whole, budget, slots=slots_of(whole))
        yield {
            "curve": "program",
            "budget_bytes": budget,
            "least_ns": whole.least_ns,
            "stages": forms.join.stage_counts,
            "together_ns": None if plan is None else plan.cost_ns,
            "split_ns": static_split_ns(whole, shares, budget),
        }


def captured_graph(name: str, *, tiny: bool) -> TrainingGraph:
    """Return the training graph of a model with measured costs."""
    workload = JOINS[name](Options(tiny=tiny))
    step = make_step(workload)
    with step.restored():
        subject = Subject(workload, step, 0)
        return plan_now(subject, subject.request(2**62, solver="store-all"))[1].graph


def weighed(
    form: JoinOfStages, plans: Iterator[Sequence[Operation]]
) -> list[tuple[int, int]]:
    """Return the true peak and time of each plan, needless runs taken out."""
    found: list[tuple[int, int]] = []
    for operations in plans:
        table = RetentionTable(form.graph, form.order(operations))
        table.drop_unread_runs()
        found.append((table.peak_bytes, table.cost_ns))
    return found


def cheapest(weights: Sequence[tuple[int, int]], budget: int) -> int | None:
    """Return the least time of those that fit."""
    return min((cost for peak, cost in weights if peak <= budget), default=None)


def plans_together(whole: StageJoin, count: int = 60) -> Iterator[Sequence[Operation]]:
    """Yield plans of all branches together, for many budgets of the program."""
    for budget in budgets_of(whole, count):
        plan = plan_stage_join(whole, budget, slots=slots_of(whole))
        if plan is not None:
            yield plan.operations


def slots_of(whole: StageJoin) -> int:
    """Return the slots that a budget is divided into: fewer for three branches."""
    return 300 if len(whole.branches) == 2 else 100


def budgets_of(whole: StageJoin, count: int) -> list[int]:
    """Return budgets from the least that the program can do with to everything."""

    def plan(budget: int) -> ChainPlan | None:
        return plan_stage_join(whole, budget, slots=64)

    def is_plain(budget: int) -> bool | None:
        found = plan(budget)
        return True if found is not None and found.cost_ns == whole.least_ns else None

    most = 2 * sum(whole.all_sizes)
    tolerance = most // 2000
    return geometric_budgets(
        least_budget(plan, most, tolerance_bytes=tolerance),
        least_budget(is_plain, most, tolerance_bytes=tolerance),
        count,
    )


def shares_of(whole: StageJoin, count: int = 24) -> list[list[tuple[int, ChainPlan]]]:
    """Return per branch the distinct plans it has alone, with their budgets.

    What all branches need at the turn is given to each; that favours the split.
    """
    found: list[list[tuple[int, ChainPlan]]] = []
    if len(whole.branches) > 2:
        count //= 2
    for branch in whole.branches:
        plans: dict[tuple[Operation, ...], tuple[int, ChainPlan]] = {}
        for budget in _budgets_alone(branch, count):
            plan = plan_rotor(branch, budget)
            if plan is not None:
                plans.setdefault(plan.operations, (budget, plan))
        found.append(list(plans.values()))
    return found


def _budgets_alone(branch: StageChain, count: int) -> list[int]:
    most = 2 * sum(branch.all_sizes)
    least = least_budget(
        lambda budget: plan_rotor(branch, budget), most, tolerance_bytes=most // 2000
    )
    return geometric_budgets(least, sum(branch.all_sizes), count)


def plans_split(whole: StageJoin) -> Iterator[Sequence[Operation]]:
    """Yield every combination of plans that branches have alone, in every order."""
    shares = [[plan for _, plan in plans] for plans in shares_of(whole)]
    branches = range(len(shares))
    for plans in product(*shares):
        for order in permutations(branches):
            forward: list[Operation] = []
            backward: list[Operation] = []
            for branch in order:
                operations = [_on_branch(o, branch) for o in plans[branch].operations]
                turn = operations.index(Turn())
                forward += operations[:turn]
                backward += operations[turn + 1 :]
            yield [*forward, Turn(), *backward]
            if len(shares) > 2:
                break


def _on_branch(operation: Operation, branch: int) -> Operation:
    match operation:
        case Forward(stage, _, option):
            return Forward(stage, branch, option)
        case Backward(stage, _, option):
            return Backward(stage, branch, option)
        case _:
            return operation


def static_split_ns(
    whole: StageJoin, shares: list[list[tuple[int, ChainPlan]]], budget: int
) -> int | None:
    """Return the best time of branches that have a fixed share of a budget each."""
    best = {0: whole.turn_ns}
    for plans in shares:
        after: dict[int, int] = {}
        for used, cost in best.items():
            for share, plan in plans:
                total = used + share
                if total <= budget:
                    new = cost + plan.cost_ns
                    after[total] = min(after.get(total, new), new)
        best = after
    return min(best.values(), default=None)


# --- figure --------------------------------------------------------------------------


def draw() -> None:
    """Draw overhead against memory: branches together and with fixed shares."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    lines = [line for line in read(FILE) if line.get("curve")]
    names = [name for name in JOINS if any(line["model"] == name for line in lines)]
    figure, rows = plt.subplots(
        1,
        len(names),
        figsize=(4 * len(names), 3.4),
        squeeze=False,
        layout="constrained",
    )
    labels = {
        "split_ns": "a fixed share for each branch",
        "together_ns": "branches together",
        "solver_ns": "solver 'join'",
    }
    for ax, name in zip(rows[0], names, strict=True):
        newest = [line for line in lines if line["model"] == name]
        commit = newest[-1]["commit"]
        found = [
            line
            for line in newest
            if line["curve"] == "judged" and line["commit"] == commit
        ]
        for key, label in labels.items():
            points = [
                (line["budget_bytes"] / line["plain_peak_bytes"], line[key])
                for line in found
                if line[key] is not None
            ]
            least = found[0]["least_ns"]
            ax.plot(
                [100 * share for share, _ in points],
                [100 * (cost / least - 1) for _, cost in points],
                marker=".",
                label=label,
            )
        ax.set_title(name)
        ax.set_xlabel("budget, % of the plain peak")
        ax.grid(visible=True, alpha=0.3)
    rows[0][0].set_ylabel("more time than the plain step, %")
    rows[0][0].legend(fontsize="small")
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


# --- command -------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.joins",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=("measured", "curves", "figure"))
    parser.add_argument("--models", nargs="+", metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="the small variants")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each")
    parser.add_argument("--limit", type=int, default=1200, help="seconds for a model")
    parser.add_argument("--results", type=Path, default=FILE, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.study == "figure":
        draw()
    elif options.child:
        run_child(options)
    else:
        every = JOINS if options.study == "curves" else MODELS
        for name in options.models or every:
            start(options, name)
    return 0


def start(options: argparse.Namespace, name: str) -> None:
    """Study one model in a fresh process."""
    command = [sys.executable, "-m", "studies.joins", options.study, "--child", name]
    command += ["--repeats", str(options.repeats), "--results", str(options.results)]
    command += ["--tiny"] if options.tiny else []
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **STEADY_ALLOCATION, "REMAT_CACHE_DIR": folder}
        variables |= {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, cwd=ROOT, env=variables, timeout=options.limit, check=True
        )


def run_child(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    name = options.child
    lines = (
        study_measured(name, options.repeats, tiny=options.tiny)
        if options.study == "measured"
        else study_curves(name, tiny=options.tiny)
    )
    for line in lines:
        full = {"study": options.study, "model": name, "tiny": options.tiny, **line}
        append(options.results, full | environment())
        print("  ".join(brief(name, line)), flush=True)


def brief(name: str, line: Line) -> Iterator[str]:
    """Yield what a person wants to see at once."""
    yield f"{name}: {line.get('peer') or line.get('curve') or 'tight'}"
    for key, value in line.items():
        if key.endswith("_bytes"):
            yield f"{key.removesuffix('_bytes')} {value / 2**20:.1f} MiB"
        elif key.endswith("_ns") and isinstance(value, int):
            yield f"{key} {value / 1e6:.1f} ms"
        elif key in {"solver", "status", "message", "is_within_budget"} or (
            key.startswith("differs")
        ):
            yield f"{key} {value}"
        elif key in {"slowdown", "peer_slowdown", "time_over_peer", "planning_s"}:
            yield f"{key} {value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
