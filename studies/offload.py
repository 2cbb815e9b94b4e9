"""Several devices: host memory beside one, and two that share the work.

The smallest budget that recomputation alone can honour, the *floor*, is found first,
and the *bound*, which no plan can undercut since one operator alone needs that much.
Then the step is planned between the two: with host memory that only stores
(``offload``), and on two logical devices of which neither could hold the step alone,
equal (``pair``) and unequal (``unequal``: the second takes three times as long for
every operator, which is a model and not a measurement). Each plan is run: gradients are
compared bit for bit, and the peak of each device is measured.

All devices are logical ones of this machine's CPU, with real copies between them at
measured bandwidth. They share its cores, so that ops do not overlap, and copies do
where a core is free; the overlapped time is predicted.

Run as ``python -m studies.offload`` from the repository; lines go to
``studies/results/offload.jsonl``.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import remat
from remat.core.bounds import peak_bound_bytes
from remat.core.errors import BudgetError
from remat.core.platform import Device, DeviceKind, Platform
from remat.core.units import format_bytes, format_ns
from remat.planning.plan import Plan
from remat.planning.smallest_budget import smallest_budget
from remat.profile.cache import CostCache
from remat.profile.links import measured_platform
from remat.training.device_memory import device_peaks
from remat.training.fitted_model import FittedModel
from remat.training.request import PlanRequest
from remat.training.verification import TrainingStep, compare
from studies.record import RESULTS, ForeignLoad, append, environment, source_digest


def encoder(*, tiny: bool, device: str = "cpu") -> TrainingStep:
    """Return the step of a transformer encoder of eight layers, with Adam."""
    depth, width, batch = (2, 32, 2) if tiny else (8, 256, 8)
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return _step(model, torch.randn(batch, width, width), device)


def conv_chain(*, tiny: bool, device: str = "cpu") -> TrainingStep:
    """Return the step of sixteen equal blocks of convolution, norm and ReLU."""
    depth, side, batch = (4, 16, 2) if tiny else (16, 64, 8)
    blocks = [
        nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )
        for _ in range(depth)
    ]
    return _step(nn.Sequential(*blocks), torch.randn(batch, 32, side, side), device)


def _step(model: nn.Module, batch: torch.Tensor, device: str) -> TrainingStep:
    target = torch.randn_like(batch).to(device)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs, target)

    optimizer = torch.optim.Adam(model.to(device).parameters())
    return TrainingStep(model, (batch.to(device),), {}, loss, optimizer)


MODELS = {"encoder": encoder, "conv chain": conv_chain}
"""A transformer and a convolutional network."""

CASES: dict[str, tuple[tuple[str, ...], int, int]] = {
    "offload 70%": (("cpu", "host"), 70, 100),
    "offload 40%": (("cpu", "host"), 40, 100),
    "pair 90%": (("cpu", "cpu:1"), 90, 100),
    "pair 70%": (("cpu", "cpu:1"), 70, 100),
    "unequal 90%": (("cpu", "cpu:1"), 90, 300),
    "unequal 70%": (("cpu", "cpu:1"), 70, 300),
}
"""Case -> devices; budget, in percent of the way from the bound to the floor; time of
the second device in percent of the first's."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Plans for several devices, run.")
    made.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    made.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    made.add_argument("--time-limit", type=float, default=40.0)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--tiny", action="store_true")
    made.add_argument("--solver", default="auto")
    made.add_argument("--output", type=Path, default=RESULTS / "offload.jsonl")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    for name in options.models:
        for found in study(name, options):
            line = {
                "study": "offload",
                "model": name,
                **found,
                "threads": torch.get_num_threads(),
                "source": source_digest(),
                **environment(),
            }
            append(options.output, line)
            print(f"{name} {line['case']}: {line['status']} {brief(line)}", flush=True)
    return 0


def study(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Find the floor, then plan, run and measure each case.

    Yields
    ------
    dict
        One line for the floor, one per case.
    """
    torch.manual_seed(0)
    step = MODELS[name](tiny=options.tiny)
    with step.restored():
        floor_bytes, plain = floor_of(step)
        bound_bytes = peak_bound_bytes(plain.graph)
        yield {
            "case": "floor",
            "status": "ok",
            "floor_bytes": floor_bytes,
            "peak_bound_bytes": bound_bytes,
            "predicted_plain_peak_bytes": plain.peak_bytes,
            "baseline_cost_ns": plain.cost_ns,
            "op_count": len(plain.graph.ops),
            "resident_bytes": plain.graph.resident_bytes(),
        }
        expected = step.outcome(None, 1)
        for case in options.cases:
            devices, percent, second = CASES[case]
            platform = machine(devices, second)
            size_bytes = bound_bytes + (floor_bytes - bound_bytes) * percent // 100
            budget = {d: None if d == "host" else size_bytes for d in devices}
            with ForeignLoad() as load:
                line = run_case(step, platform, budget, options, expected)
            yield {
                "case": case,
                "floor_bytes": floor_bytes,
                "time_limit_s": options.time_limit,
                **line,
                "foreign_load": load.share,
            }


def floor_of(step: TrainingStep) -> tuple[int, Plan]:
    """Return the smallest known budget of one device, and the plan without a limit."""
    plain = remat.plan(
        step.model,
        step.args,
        step.kwargs,
        budget=2**62,
        optimizer=step.optimizer,
        loss=step.loss,
        solver="store-all",
    )
    return smallest_budget(
        plain.graph, kind=plain.graph.device_kinds[0]
    ).budget_bytes, plain


def machine(names: Sequence[str], second_percent: int) -> Platform:
    """Return logical devices with measured links, the second scaled in time."""
    platform = measured_platform(names, cache=CostCache())
    if second_percent == 100:
        return platform
    slow = DeviceKind(name="slow", runs_on="cpu", time_percent=second_percent)
    return replace(
        platform,
        devices=(platform.devices[0], Device(name=names[1], kind="slow")),
        kinds=(slow,),
    )


def run_case(
    step: TrainingStep,
    platform: Platform,
    budget: Mapping[str, int | None],
    options: argparse.Namespace,
    expected: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Plan one case, run it, and return what was found."""
    request = PlanRequest(
        budget=budget,
        platform=platform,
        optimizer=step.optimizer,
        loss=step.loss,
        time_limit=options.time_limit,
        solver=options.solver,
    )
    step.reset()
    fitted = FittedModel(step.model, request)
    started = time.perf_counter()
    try:
        plan = fitted.plan_now(step.args, step.kwargs)
    except BudgetError as error:
        return {"status": "none found", "message": str(error), "budget": dict(budget)}
    planning_s = time.perf_counter() - started
    differences = compare(dict(expected), step.outcome(fitted, 1))
    step.reset()
    peaks = device_peaks(
        lambda: step.train(fitted), plan, warmup=1, resident=step.resident
    )
    plain, planned = step.paired_times(fitted, options.repeats)
    slowdowns = [b / a for a, b in zip(plain, planned, strict=True)]
    return {
        "status": "ok",
        "budget": dict(budget),
        "differences": [asdict(d) for d in differences],
        "compared_count": len(expected),
        "devices": [asdict(peak) for peak in peaks],
        "is_within_budget": all(peak.is_within_budget for peak in peaks),
        "uses": [asdict(use) for use in plan.device_uses],
        "copies": [asdict(use) for use in plan.link_uses],
        "cost_ns": plan.cost_ns,
        "overlapped_ns": plan.overlapped_ns,
        "bound_ns": plan.bound_ns,
        "gap": plan.gap,
        "solver": plan.solver,
        "plan_status": str(plan.status),
        "recomputed_op_count": plan.recomputed_op_count,
        "planning_s": round(planning_s, 1),
        "time_ns": round(statistics.median(planned)),
        "plain_ns": round(statistics.median(plain)),
        "slowdown": statistics.median(slowdowns),
    }


def brief(line: Mapping[str, Any]) -> str:
    """Return what a line says in short."""
    if line["case"] == "floor":
        return f"floor {format_bytes(line['floor_bytes'])}, bound " + format_bytes(
            line["peak_bound_bytes"]
        )
    if line["status"] != "ok":
        return str(line["message"])[:120]
    peaks = ", ".join(
        f"{d['name']} {format_bytes(d['measured_bytes'])} (predicted "
        f"{format_bytes(d['predicted_bytes'])})"
        for d in line["devices"]
    )
    return (
        f"{peaks}; {len(line['differences'])} differences, within budget "
        f"{line['is_within_budget']}, {format_ns(line['cost_ns'])} serial, "
        f"{format_ns(line['overlapped_ns'])} overlapped, {line['slowdown']:.2f} x"
    )


if __name__ == "__main__":
    sys.exit(main())
