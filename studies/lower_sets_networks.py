"""The seven networks of the lower-set paper, run for real: memory against time.

``python -m studies.lower_sets_networks --threads 1`` measures plain PyTorch,
``torch.utils.checkpoint`` and each solver at falling budgets, each network and method
in a process of its own. Lines are added to ``studies/results`` as they come; what the
same sources have recorded is skipped, so that an interrupted study goes on where it
stopped. :mod:`studies.lower_sets_tables` makes the tables and figures.

The step is the paper's: gradients are cleared, forward, loss, backward; no optimizer.
As there, parameters, gradients and the batch count. The loss is inside of what is
planned.

References
----------
.. [1] M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic
   framework of recomputation algorithms for memory-efficient backpropagation. NeurIPS
   2019. The figures of :data:`NETWORKS` are those of its poster.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem
from remat.planning.portfolio import solve
from remat.planning.smallest_budget import smallest_budget
from remat.solvers import SOLVERS, chosen_solvers
from remat.training.request import PlanRequest
from remat.training.verification import Outcome, TrainingStep, compare
from studies.fresh_process import STEADY_ALLOCATION, run_module
from studies.models import MODELS, Options, Workload
from studies.peers import PeerStep, exactness, longest_chain, make_peer
from studies.planned import Subject, paired_times, plan_now, study_budget
from studies.record import (
    RESULTS,
    append,
    environment,
    read,
    source_digest,
)
from studies.run import brief, note

STUDY = "lower_sets_networks"


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the paper reports of one network, in percent of its plain peak.

    Parameters
    ----------
    exact_percent, approximate_percent, chen_percent
        How much less the exact and the approximate program (memory-centric) and Chen's
        method need.
    """

    exact_percent: int
    approximate_percent: int
    chen_percent: int

    @property
    def reduction_percent(self) -> int:
        """How much less the best variant needs."""
        return max(self.exact_percent, self.approximate_percent)


NETWORKS: dict[str, Published] = {
    name: Published(exact_percent=exact, approximate_percent=some, chen_percent=chen)
    for name, (exact, some, chen) in {
        "pspnet": (70, 71, 58),
        "unet": (48, 45, 18),
        "resnet50": (62, 62, 59),
        "resnet152": (75, 75, 74),
        "vgg19": (36, 36, 34),
        "densenet161": (80, 81, 79),
        "googlenet": (39, 39, 24),
    }.items()
}

METHODS = (
    "plain",
    "checkpoint",
    "chen-lower-sets",
    "chen-sqrt",
    "chen-greedy",
    "lower-sets-approx",
    "lower-sets",
    "auto",
)
PAPER_CASE, SMALLEST_CASE = "paper", "smallest"
PERCENTAGES = (100, 90, 80, 70, 60, 50, 40, 30, 20)
SINGLE_ANSWER = frozenset({"chen-sqrt", "chen-lower-sets"})
"""Solvers whose schedule is the same for every budget."""

_NO_LIMIT = 2**62


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m studies.lower_sets_networks", description=__doc__
    )
    found.add_argument("--models", nargs="+", default=list(NETWORKS), metavar="NAME")
    found.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME")
    found.add_argument("--cases", nargs="+", help="only these budgets or block counts")
    found.add_argument(
        "--percentages",
        nargs="*",
        type=int,
        default=list(PERCENTAGES),
        help="budgets of the curves, in percent of the plain peak",
    )
    found.add_argument("--tiny", action="store_true", help="the small variants")
    found.add_argument("--scale", type=int, default=1, help="4 is the paper's size")
    found.add_argument("--device", default="cpu")
    found.add_argument("--threads", type=int, help="default: as many as cores")
    found.add_argument("--repeats", type=int, default=3, help="timed pairs of steps")
    found.add_argument(
        "--skip",
        choices=("same-sources", "recorded", "nothing"),
        default="same-sources",
        help="what not to measure again (default: same-sources)",
    )
    found.add_argument("--limit", type=int, default=3600, help="seconds for a process")
    found.add_argument(
        "--search-limit",
        type=int,
        default=300,
        help="seconds for the search for a method's smallest budget",
    )
    found.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    found.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    check_names(options)
    if options.child:
        run_child(options)
        return 0
    for model in options.models:
        # Every method of a network plans with the same operator costs.
        with tempfile.TemporaryDirectory() as costs:
            for method in options.methods:
                start(options, model, method, Path(costs))
    return 0


def check_names(options: argparse.Namespace) -> None:
    """Refuse unknown networks and methods before anything is measured.

    Raises
    ------
    SystemExit
        If there is one.
    """
    methods = {"plain", "checkpoint", "auto", *SOLVERS}
    for kind, names, known in (
        ("model", options.models, set(NETWORKS)),
        ("method", options.methods, methods),
    ):
        if unknown := [name for name in names if name not in known]:
            sys.exit(f"there is no {kind} {unknown[0]!r}; there are {sorted(known)}")


def model_options(options: argparse.Namespace) -> Options:
    return Options(
        tiny=options.tiny,
        scale=options.scale,
        is_loss_inside=True,
        device=options.device,
    )


def cases_of(
    method: str, workload: Workload, percentages: Sequence[int] = PERCENTAGES
) -> list[str]:
    """Return the budgets, or the numbers of blocks, at which a method is measured."""
    if method == "plain":
        return ["plain"]
    if method == "checkpoint":
        longest = longest_chain(workload.model)
        counts = {min(2**power, longest) for power in range(longest.bit_length() + 1)}
        return [str(count) for count in sorted(counts)]
    if method in SINGLE_ANSWER:
        return [SMALLEST_CASE]
    return [*(f"{percent}%" for percent in percentages), PAPER_CASE, SMALLEST_CASE]


def start(options: argparse.Namespace, model: str, method: str, costs: Path) -> None:
    """Measure what is wanted in a fresh process; record if it does not end well."""
    workload = MODELS[model](model_options(options))
    cases = options.cases or cases_of(method, workload, options.percentages)
    if options.skip != "nothing":
        done = recorded(options, model, method)
        cases = [case for case in cases if case not in done]
    if not cases:
        return
    note(f"{model}, {method}: {' '.join(cases)}")
    command = ["--child", "--models", model, "--methods", method, "--cases", *cases]
    for name in ("scale", "device", "repeats", "search_limit", "results"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.threads:
        command += ["--threads", str(options.threads)]
    if options.tiny:
        command.append("--tiny")
    ended = run_module(
        "studies.lower_sets_networks",
        command,
        limit_s=options.limit,
        variables=STEADY_ALLOCATION | {"REMAT_CACHE_DIR": str(costs)},
    )
    if not ended.is_ok:
        report(options, model, method, ended.line("all"))


def recorded(options: argparse.Namespace, model: str, method: str) -> set[str]:
    """Return the cases that need not be measured again."""
    digest = source_digest()
    return {
        line["case"]
        for line in read(results_file(options))
        if (line["model"], line["method"]) == (model, method)
        and line["settings"]["model"] == asdict(model_options(options))
        and line["status"] not in {"failed", "timed out"}
        and (options.skip == "recorded" or line["source"] == digest)
    }


def run_child(options: argparse.Namespace) -> None:
    """Measure one method on one network in this process."""
    (model,), (method,) = options.models, options.methods
    for line in measure(options, model, method):
        report(options, model, method, line)


def report(
    options: argparse.Namespace, model: str, method: str, line: dict[str, Any]
) -> None:
    """Print a line and add it, with what it was measured on, to the results."""
    settings = {"model": asdict(model_options(options)), "repeats": options.repeats}
    full = {"study": STUDY, "model": model, "method": method, **line}
    append(results_file(options), full | {"settings": settings} | environment())
    note("  " + "  ".join(brief(line)))


def results_file(options: argparse.Namespace) -> Path:
    return options.results / f"{STUDY}.jsonl"


def measure(
    options: argparse.Namespace, model: str, method: str
) -> Iterable[dict[str, Any]]:
    """Yield one line for each case of one method on one network."""
    workload = MODELS[model](model_options(options))
    step = make_bare_step(workload)
    with step.restored():
        if method == "plain":
            yield measure_plain(workload, step, options.repeats)
        elif method == "checkpoint":
            yield from measure_checkpoint(
                workload, step, options.cases, options.repeats
            )
        else:
            subject = SolverSubject(
                workload, step, step.peak_bytes(None), solver=method
            )
            yield from measure_solver(
                subject,
                options.cases,
                NETWORKS[model],
                repeats=options.repeats,
                search_limit_s=options.search_limit,
            )


def make_bare_step(workload: Workload) -> TrainingStep:
    """Return a workload's step without an optimizer, as the paper measures it."""
    return TrainingStep(
        workload.model, workload.args, workload.kwargs, workload.loss, None
    )


class SolverSubject(Subject):
    """A network under study by one solver.

    Parameters
    ----------
    solver
        A name in :data:`remat.solvers.SOLVERS`, or ``"auto"``.
    """

    def __init__(
        self,
        workload: Workload,
        step: TrainingStep,
        plain_peak_bytes: int,
        *,
        solver: str,
    ) -> None:
        super().__init__(workload, step, plain_peak_bytes)
        self.solver = solver

    def request(self, budget: int, **settings: Any) -> PlanRequest:
        """Return the request for a plan of the whole step by the solver."""
        return super().request(budget, **({"solver": self.solver} | settings))


def captured_step(subject: Subject) -> tuple[TrainingGraph, Outcome]:
    """Return the traced step without recomputation: its graph, and its results."""
    subject.step.reset()
    fitted, plan = plan_now(subject, subject.request(_NO_LIMIT, solver="store-all"))
    return plan.graph, subject.step.outcome(fitted, 1)


def measure_plain(
    workload: Workload, step: TrainingStep, repeats: int
) -> dict[str, Any]:
    """Return peak and time of the plain step, and what is in the captured one."""
    subject = SolverSubject(workload, step, step.peak_bytes(None), solver="store-all")
    eager = step.outcome(None, 1)
    graph, captured = captured_step(subject)
    differences = compare(eager, captured)
    times_ns = [time_plain(step) for _ in range(repeats)]
    image = next(iter(workload.kwargs.values()))
    return {
        "case": "plain",
        "status": "ok",
        "plain_peak_bytes": subject.plain_peak_bytes,
        "plain_ns": round(statistics.median(times_ns)),
        "parameter_bytes": sum(
            p.numel() * p.element_size() for p in workload.model.parameters()
        ),
        "image_shape": list(image.shape),
        "op_count": len(graph.ops),
        "captured_differs_from_eager": {
            "count": len(differences),
            "largest": max((d.largest for d in differences), default=None),
        },
    }


def time_plain(step: TrainingStep) -> int:
    """Return the time of one plain step in nanoseconds."""
    start = time.perf_counter_ns()
    step.train(None)
    step.synchronise()
    return time.perf_counter_ns() - start


def measure_checkpoint(
    workload: Workload, step: TrainingStep, cases: Sequence[str], repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield peak, time and exactness for each number of blocks."""
    plain_peak_bytes = step.peak_bytes(None)
    eager = step.outcome(None, 1)
    for case in cases:
        peer_step = PeerStep(step, make_peer(f"checkpoint@{case}", workload.model))
        found = peer_step.outcome(peer_step.peer, 1)
        line = {
            "case": case,
            "status": "ok",
            "plain_peak_bytes": plain_peak_bytes,
            **exactness(eager, found),
        }
        del found
        yield {
            **line,
            "measured_peak_bytes": peer_step.peak_bytes(peer_step.peer),
            **paired_times(peer_step, peer_step.peer, repeats),
        }
        peer_step.peer.switch(False)  # noqa: FBT003 - the switch takes nothing else


def measure_solver(
    subject: SolverSubject,
    cases: Sequence[str],
    published: Published,
    *,
    repeats: int,
    search_limit_s: int,
) -> Iterator[dict[str, Any]]:
    """Yield what happens at each budget, the smallest of the solver among them.

    A budget below the smallest that the solver's search found is planned only where the
    solver itself has an answer.
    """
    step = subject.step
    eager = step.outcome(None, 1)
    graph, captured = captured_step(subject)
    started = time.monotonic()
    floor_bytes = solver_floor_bytes(graph, subject.solver, search_limit_s)
    floor_search_s = round(time.monotonic() - started, 1)
    for case in cases:
        budget = case_bytes(case, subject.plain_peak_bytes, published, floor_bytes)
        # The search may have run out of time above it.
        if budget < floor_bytes and answers(graph, subject.solver, budget):
            floor_bytes = budget
        if budget < floor_bytes:
            yield {
                "case": case,
                "status": "below floor",
                "plain_peak_bytes": subject.plain_peak_bytes,
                "budget_bytes": budget,
                "floor_bytes": floor_bytes,
                "floor_search_s": floor_search_s,
            }
            continue
        line = study_budget(subject, budget, (eager, captured), repeats)
        # The operators' costs are known by now: what is not capture is search.
        search_s = round(line["profile_s"] + line["solve_s"], 2)
        yield {
            "case": case,
            **line,
            "search_s": search_s,
            "solver_floor_bytes": floor_bytes,
            "floor_search_s": floor_search_s,
        }


def case_bytes(
    case: str, plain_peak_bytes: int, published: Published, floor_bytes: int
) -> int:
    """Return the budget of a case in bytes, rounded down.

    Examples
    --------
    >>> vgg19 = NETWORKS["vgg19"]
    >>> case_bytes("90%", 1000, vgg19, 300), case_bytes("paper", 1000, vgg19, 300)
    (900, 640)
    """
    if case == SMALLEST_CASE:
        return floor_bytes
    percent = (
        100 - published.reduction_percent
        if case == PAPER_CASE
        else int(case.removesuffix("%"))
    )
    return plain_peak_bytes * percent // 100


def solver_floor_bytes(graph: TrainingGraph, solver: str, limit_s: int) -> int:
    """Return the smallest budget for which bisection finds an answer of a solver.

    Where the solver then fails at exactly the peak of that answer, a budget some
    percent above it.
    """
    limits = Limits.after(limit_s)
    kind = graph.device_kinds[0]
    if solver == "auto":
        return smallest_budget(graph, kind=kind, limits=limits).budget_bytes
    solvers = chosen_solvers(solver)
    budget = smallest_budget(
        graph, kind=kind, solvers=solvers, refining_solvers=(), limits=limits
    ).budget_bytes
    while not answers(graph, solver, budget):
        budget += budget // 100
    return budget


def answers(graph: TrainingGraph, solver: str, budget: int) -> bool:
    """Return whether a solver finds a schedule within a budget in bytes."""
    platform = single_device(budget, graph.device_kinds[0])
    for each in chosen_solvers(solver):
        try:
            if solve(Problem(graph=graph, platform=platform), each).schedule:
                return True
        except SolverUnsuitableError:  # One of several, and not for this graph.
            continue
    return False


if __name__ == "__main__":
    sys.exit(main())
