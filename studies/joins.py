"""Joins and chains on real models: against checkpointing, and against a static split.

``python -m studies.joins measured`` trains each model with ``torch.utils.checkpoint``
in several ways and with remat within the measured peak of each, step by step in turn.
``python -m studies.joins curves`` plans the joins at many budgets, branches together
and with a fixed share of memory each. Both add lines to
``studies/results/joins.jsonl``. ``python -m studies.joins figure`` draws the curves,
``python -m studies.joins tables`` writes the tables of ``docs/chains/measured.md``.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from remat.core.errors import BudgetError
from remat.training.fitted_model import FittedModel
from remat.training.verification import Outcome, TrainingStep, compare
from studies.fresh_process import STEADY_ALLOCATION
from studies.join_curves import study_curves
from studies.join_networks import CHAINS, JOINS
from studies.join_tables import FILE, draw, write_tables
from studies.models import Options, Workload
from studies.peers import Peer, checkpointed, exactness
from studies.planned import Subject, describe_plan, make_step, plan_now
from studies.record import (
    ROOT,
    ForeignLoad,
    append,
    environment,
)

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
        self.running: Peer | None = None

    def call(self, called: Callable[..., Any] | None, number: int = 0) -> Any:
        """Run the forward pass."""
        self.switch(called if isinstance(called, Peer) else None)
        return super().call(called, number)

    def switch(self, peer: Peer | None) -> None:
        """Make the model run as a peer does, or plainly.

        Nothing is touched that is so already: a plan holds for the model as it was
        traced, and some switches replace functions that were traced.
        """
        if peer is self.running:
            return
        if self.running is not None:
            self.running.switch(False)  # noqa: FBT003
        if peer is not None:
            peer.switch(True)  # noqa: FBT003
        self.running = peer

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
        for solver in (method, "auto"):
            yield study_budget(subject, tight, solver, (eager, captured), None, repeats)


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
    step.switch(None)
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
    with ForeignLoad() as foreign:
        times = step.times_in_turn({"plain": None, "remat": fitted}, repeats)
        theirs: dict[str, list[int]] = {}
        if peer is not None:
            theirs = step.times_in_turn({"plain": None, "peer": peer}, repeats)
    line |= {
        "measured_peak_bytes": peak,
        "is_within_budget": peak <= budget,
        "processor_ns": {"pair": times, "peer pair": theirs},
        "slowdown": _ratio(times["remat"], times["plain"]),
        "foreign_load": foreign.share,
    }
    if peer is not None:
        line["peer_slowdown"] = _ratio(theirs["peer"], theirs["plain"])
        line["time_over_peer"] = line["slowdown"] / line["peer_slowdown"]
    return line


def _ratio(one: Sequence[int], other: Sequence[int]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


# --- command -------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.joins",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=("measured", "curves", "figure", "tables"))
    parser.add_argument("--models", nargs="+", metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="the small variants")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each")
    parser.add_argument("--limit", type=int, default=1200, help="seconds for a model")
    parser.add_argument("--results", type=Path, default=FILE, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.study == "figure":
        draw()
    elif options.study == "tables":
        write_tables()
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
