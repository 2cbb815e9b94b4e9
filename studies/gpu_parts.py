"""The parts of the command for a GPU, each run in a process of its own.

``python -m studies.gpu_parts PART CASE`` measures one case of one part on one device
and adds its lines to a file of results; :mod:`studies.gpu_run` starts it.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from remat import native
from remat.core.bounds import peak_bound_bytes
from remat.core.errors import BudgetError, MissingDependencyError, RematError
from remat.memory.snapshots import replay_snapshot
from remat.planning.plan import Plan
from remat.profile.cache import CostCache
from remat.profile.links import measured_platform
from remat.profile.memory import live_storages, measure
from remat.torch_compat.accelerators import device_module, recorded_history
from remat.training.fitted_model import FittedModel
from remat.training.request import PlanRequest
from remat.training.verification import TrainingStep, compare
from studies import offload
from studies.models import MODELS, Options, Workload
from studies.peers import AOT, PeerStep, make_peer
from studies.planned import make_step
from studies.record import ROOT, append, environment
from studies.run import MODELS as TEN

SIMULATED = "sim"
PERCENTS = (80, 60, 45)
"""Budgets, of the plain step's measured allocated peak."""

TIMED = ("gpt2", "resnet50", "llama")
PEERS = ("checkpoint", "compile")
ALLOCATORS = {"default": "", "expandable": "expandable_segments:True"}
"""How the allocator is set, by name."""

_REPEATS = 7
_OFFLOAD_PERCENT = 50
_OFFLOAD_S = 10.0
_ACTIVATION_BUDGET = 0.5
_NO_LIMIT = 2**62
_OPTIONAL = ("ortools", "transformers", "triton", "pytest", "hypothesis")

Line = dict[str, Any]


def cases(part: str, device: str) -> tuple[str, ...]:
    """Return the cases of a part, in the order in which they are measured."""
    match part:
        case "device":
            return ("device",)
        case "tests":
            return tuple(test_files())
        case "peaks":
            return TEN[::-1]  # The larger ones come last there, and take longest.
        case "replay":
            models = () if device == SIMULATED else ("gpt2", "resnet50")
            return tuple(f"{m}, {s}" for s in ALLOCATORS for m in models)
        case "time":
            return tuple(f"{model}, {peer}" for peer in PEERS for model in TIMED)
        case "offload":
            return tuple(offload.MODELS)
        case _:
            msg = f"there is no part {part!r}"
            raise ValueError(msg)


def test_files() -> list[str]:
    """Return the files that have tests marked ``gpu``."""
    mark = "@pytest.mark." + "gpu\n"
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in files
        if mark in file.read_text(encoding="utf-8")
    ]


def device_lines(options: argparse.Namespace) -> Iterator[Line]:
    """Say what is there."""
    yield {
        "case": "device",
        "has_native_core": native.core() is not None,
        "absent": [name for name in _OPTIONAL if find_spec(name) is None],
        "cuda": torch.version.cuda,
        "memory_bytes": None
        if options.device == SIMULATED
        else torch.cuda.get_device_properties(0).total_memory,
    }


class _Noted:
    """A plugin of pytest that notes how tests end."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take the report of one phase of one test."""
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-1000:]
        elif report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr[-1])
        elif report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """Take the report of a file that was read."""
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-1000:]


def test_lines(options: argparse.Namespace) -> Iterator[Line]:
    """Run the tests of one file that are for accelerators."""
    noted = _Noted()
    absent = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if absent:
        noted.skipped[options.case] = f"{' and '.join(absent)} not installed"
    else:
        import pytest  # noqa: PLC0415 - other parts need none

        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu"]
        code = pytest.main([*words, str(ROOT / options.case)], [noted])
        if code not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
            msg = f"pytest ended with {code!r}"
            raise RuntimeError(msg)
    yield {
        "case": options.case,
        "passed_count": len(noted.passed),
        "failed": noted.failed,
        "skipped": noted.skipped,
    }


def peak_lines(options: argparse.Namespace) -> Iterator[Line]:
    """Predict and measure a model's peaks within budgets, then compare all bits."""
    # The same bits each time, where a kernel can; others are said not to repeat.
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    _, step = built(options)
    plain = peaks_of(step, None, options.device)
    yield {"case": "plain", **plain}
    planned: dict[str, FittedModel] = {}
    refusal: RematError | None = None
    for percent in PERCENTS:
        case, budget = f"{percent}%", plain["allocated_bytes"] * percent // 100
        if refusal is None:
            try:
                planned[case], line = measured_plan(step, budget, options.device)
            except REFUSALS as error:
                refusal = error
            else:
                yield {"case": case, **line}
                continue
        yield {"case": case, **refused(refusal), "budget_bytes": budget}
    if isinstance(refusal, BudgetError):
        budget = refusal.required_bytes
        planned["smallest"], line = measured_plan(step, budget, options.device)
        yield {"case": "smallest", **line}
    with step.restored():
        captured = step.outcome(reference(step), 1)
        again = step.outcome(reference(step), 1)
        eager = step.outcome(None, 1)
        for case, fitted in planned.items():
            found = step.outcome(fitted, 1)
            yield {
                "part": "bitwise",
                "case": case,
                "compared_count": len(found),
                "differs": [asdict(d) for d in compare(captured, found)],
                "differs_by_itself": [d.name for d in compare(captured, again)],
                "differs_from_eager": [d.name for d in compare(eager, found)],
            }


def built(options: argparse.Namespace) -> tuple[Workload, TrainingStep]:
    """Return a model of the studies on the device, and its step."""
    sizes = Options(tiny=options.tiny, scale=options.scale, device=options.device)
    workload = MODELS[model_of(options.case)](sizes)
    return workload, make_step(workload)


def model_of(case: str) -> str:
    """Return the model of a case."""
    return case.partition(",")[0]


def within_budget(
    step: TrainingStep, budget: int, **settings: Any
) -> tuple[FittedModel, Plan]:
    """Plan a step, by a solver that needs no more than what is installed."""
    has_ortools = find_spec("ortools") is not None
    settings.setdefault("solver", "auto" if has_ortools else "greedy-eviction")
    request = PlanRequest(
        budget=budget, optimizer=step.optimizer, loss=step.loss, **settings
    )
    fitted = FittedModel(step.model, request)
    return fitted, fitted.plan_now(step.args, step.kwargs)


REFUSALS = (BudgetError, MissingDependencyError)
"""What planning raises where nothing fits: looking for what does needs ortools."""


def refused(error: RematError) -> Line:
    """Return what to record of a budget in which nothing was found to fit."""
    known = error.required_bytes if isinstance(error, BudgetError) else None
    return {"status": "refused", "smallest_bytes": known, "message": str(error)}


def reference(step: TrainingStep) -> FittedModel:
    """Return the captured step without rematerialisation."""
    settings = {"solver": "store-all", "costs": "estimated"}
    return within_budget(step, _NO_LIMIT, **settings)[0]


def measured_plan(
    step: TrainingStep, budget: int, device: str
) -> tuple[FittedModel, Line]:
    """Plan a step, and return what runs it and its peaks, predicted and measured."""
    fitted, plan = within_budget(step, budget)
    return fitted, {
        "budget_bytes": budget,
        "predicted_bytes": plan.peak_bytes,
        "predicted_allocated_bytes": plan.reserved and plan.reserved.allocated_bytes,
        "predicted_reserved_bytes": plan.reserved and plan.reserved.reserved_bytes,
        "recomputed_op_count": plan.recomputed_op_count,
        "solver": plan.solver,
        **peaks_of(step, fitted, device),
    }


def peaks_of(step: TrainingStep, called: Any, device: str) -> Line:
    """Return the measured peaks of a step, in a process that holds nothing else.

    ``held_bytes`` is what is requested between steps beyond the tensors of the step:
    what libraries keep for themselves.
    """
    step.clear_gradients()
    gc.collect()
    device_module(device).empty_cache()
    found = measure(
        lambda: step.train(called), warmup=2, repeats=0, device=f"{device}:0"
    )
    known = live_storages(torch.device(device, 0), step.resident)
    return {
        "requested_bytes": found.peak_bytes,
        "allocated_bytes": found.allocated_peak_bytes,
        "reserved_bytes": found.reserved_peak_bytes,
        "held_bytes": found.final_bytes - sum(known.values()),
    }


def replay_lines(options: argparse.Namespace) -> Iterator[Line]:
    """Record all that a planned step asks of CUDA's allocator, and replay it."""
    with recorded_history() as history:
        _, step = built(options)
        free = within_budget(step, _NO_LIMIT, solver="store-all")[1]
        fitted, _ = within_budget(step, free.peak_bytes * PERCENTS[0] // 100)
        for _ in range(3):
            step.train(fitted)
        step.synchronise()
        snapshot = history()
    yield replay_line(options.case, snapshot)


def replay_line(case: str, snapshot: Mapping[str, Any]) -> Line:
    """Return how a recorded history and its replay compare."""
    replay = replay_snapshot(snapshot)
    return {
        "case": case,
        "request_count": replay.request_count,
        "call_count": replay.call_count,
        "reserved_bytes": replay.reserved_bytes,
        "differences": list(replay.differences),
    }


def time_lines(options: argparse.Namespace) -> Iterator[Line]:
    """Time eager steps, a peer's, and remat's at the peer's measured peak, in turn."""
    workload, plain_step = built(options)
    peer = options.case.partition(", ")[2]
    is_compiled = peer == "compile"
    if is_compiled:
        backend = AOT if options.device == SIMULATED else "inductor"
        peer = f"{backend}@{_ACTIVATION_BUDGET}"
    step = PeerStep(plain_step, make_peer(peer, workload.model))
    line: Line = {"case": options.case, "peer": peer}
    # The simulated device gives memory back by Python code, which cannot run while the
    # exception is under way that stops a recomputation early.
    stops_early = options.device != SIMULATED
    with step.restored(), set_checkpoint_early_stop(stops_early):
        line["plain_peak_bytes"] = step.peak_bytes(None)
        line["peer_peak_bytes"] = budget = step.peak_bytes(step.peer)
        ways: dict[str, Callable[..., Any] | None] = {"plain": None, "peer": step.peer}
        fuses = is_compiled and options.device != SIMULATED
        for kernels in ("eager", "fused") if fuses else ("eager",):
            step.reset()
            try:
                ways[kernels], plan = within_budget(step, budget, kernels=kernels)
            except REFUSALS as error:
                line[kernels] = refused(error)
            else:
                line[kernels] = {
                    "predicted_bytes": plan.peak_bytes,
                    "peak_bytes": step.peak_bytes(ways[kernels]),
                    "recomputed_op_count": plan.recomputed_op_count,
                }
        times = in_turn(step, ways, 1 if options.tiny else _REPEATS)
    for way, times_ns in times.items():
        pairs = zip(times_ns, times["plain"], strict=True)
        line[f"{way}_ns"] = round(statistics.median(times_ns))
        line[f"{way}_slowdown"] = statistics.median(a / b for a, b in pairs)
    yield line


def in_turn(
    step: PeerStep, ways: Mapping[str, Callable[..., Any] | None], repeats: int
) -> dict[str, list[int]]:
    """Return the nanoseconds of steps, one of each way after the other."""
    times: dict[str, list[int]] = {way: [] for way in ways}
    for repeat in range(-1, repeats):
        for way, called in ways.items():
            step.reset()
            step.synchronise()
            start = time.perf_counter_ns()
            step.train(called)
            step.synchronise()
            if repeat >= 0:  # The first round warms up.
                times[way].append(time.perf_counter_ns() - start)
    return times


def offload_lines(options: argparse.Namespace) -> Iterator[Line]:
    """Plan with pinned memory of the host, half-way down to what must be there."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    home = f"{options.device}:0"
    step = offload.MODELS[options.case](tiny=options.tiny, device=options.device)
    platform = measured_platform([home, "host"], cache=CostCache())
    free = within_budget(step, _NO_LIMIT, solver="store-all")[1]
    bound_bytes = peak_bound_bytes(free.graph)
    budget = bound_bytes + (free.peak_bytes - bound_bytes) * _OFFLOAD_PERCENT // 100
    settings = argparse.Namespace(
        solver="pofo", time_limit=_OFFLOAD_S, repeats=1 if options.tiny else _REPEATS
    )
    with step.restored():
        expected = step.outcome(reference(step), 1)
        budgets = {home: budget, "host": None}
        found = offload.run_case(step, platform, budgets, settings, expected)
    yield {
        "case": options.case,
        "predicted_plain_peak_bytes": free.peak_bytes,
        "links": [asdict(link) for link in platform.links],
        **found,
    }


LINES: dict[str, Callable[[argparse.Namespace], Iterator[Line]]] = {
    "device": device_lines,
    "tests": test_lines,
    "peaks": peak_lines,
    "replay": replay_lines,
    "time": time_lines,
    "offload": offload_lines,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one case of one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=LINES)
    parser.add_argument("case")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--file", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.device == SIMULATED:
        from remat.testing import simulated_device  # noqa: PLC0415

        simulated_device.register()
    name = device_module(options.device).get_device_name(0)
    fixed = {
        "study": "gpu",
        "part": options.part,
        "status": "ok",
        "device": {"type": options.device, "name": name},
        "settings": {"scale": options.scale, "tiny": options.tiny},
    }
    # The parts that measure models; what they are measured by comes first in a case.
    if model_of(options.case) in MODELS:
        fixed["model"] = model_of(options.case)
    for line in LINES[options.part](options):
        append(options.file, {**fixed, **line, **environment()})
        print(f"  {line['case']}: {line.get('status', 'ok')}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
