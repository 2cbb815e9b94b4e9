"""The networks of XEngine on two logical devices: planned, run, measured.

For each network a step (forward, loss and backward) is planned on ``cpu`` and ``cpu:1``
and run there by :func:`remat.verify`. The devices' kinds have the rates of the GPU-like
and the CPU-like device of :mod:`studies.two_devices`, so times are estimated, while all
kernels are the same, and their workspaces measured; the home is the one that is quicker
alone. Recorded are budget, predicted and measured peak of each device, and what differs
from the step on one device and from eager PyTorch.

    python -m studies.two_devices_run [--networks resnet18 ...] [--seconds 20]
    python -m studies.two_devices_run --table

Budgets are those at which neither device alone fits: of each device's floor what is
always there and nine tenths of the rest. Where that floor is nearly all parameters and
gradients, or one device alone fits after all, three quarters of what storing everything
takes beyond those.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import remat
from remat.core.device_graph import fully_linked
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.platform import Device, Platform
from remat.core.problem import Limits
from remat.planning.smallest_budget import smallest_budget
from remat.testing import store_all_peak_bytes
from studies.record import RESULTS, append, environment, read
from studies.two_devices import (
    NETWORKS,
    PROFILES,
    Network,
    alone,
    budgets_of,
    fixed_bytes,
    loss_of,
    movable,
)

FILE = RESULTS / "two_devices_run.jsonl"
NAMES = ("cpu", "cpu:1")
BATCHES = {
    "resnet18": 8,
    "resnet34": 16,
    "resnet50": 16,
    "vgg16": 4,
    "vgg19": 4,
    "googlenet": 1,
    "unet": 4,
}
HOMES = {"googlenet": "cpu-like"}
"""The quicker device alone, with the integrated profile; else it is ``gpu-like``."""

_WHOLE = 1 << 50
_SHARE_PERCENT = 75
_LEAST_REST_PERCENT = 1


def machine(home: str, profile_name: str = "integrated") -> Platform:
    """Return two logical devices of the CPU with the rates of a profile."""
    profile = PROFILES[profile_name]
    kinds = {
        "gpu-like": replace(profile.gpu, name="gpu-like", runs_on="cpu"),
        "cpu-like": replace(profile.cpu, name="cpu-like", runs_on="cpu"),
    }
    names = [home, *(name for name in kinds if name != home)]
    return Platform(
        devices=tuple(
            Device(name=device, kind=kind)
            for device, kind in zip(NAMES, names, strict=True)
        ),
        links=fully_linked(NAMES, profile.bytes_per_s, profile.latency_ns),
        kinds=tuple(kinds[name] for name in names),
    )


def images_of(network: Network, batch: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, 3, network.side, network.side)


def options_of(
    platform: Platform, budgets: Mapping[str, int], seconds: float
) -> dict[str, Any]:
    return {
        "platform": platform,
        "budget": budgets,
        "loss": loss_of,
        "solver": "device-search",
        "time_limit": seconds,
        "costs": "measured",
    }


def captured(network: Network, batch: int, platform: Platform) -> TrainingGraph:
    options = options_of(platform, dict.fromkeys(NAMES, _WHOLE), 2)
    return remat.plan(network.make(), (images_of(network, batch),), **options).graph


def cases_of(graph: TrainingGraph, seconds: float) -> dict[str, list[int]]:
    """Return the budgets to try, the hardest first."""
    kinds = graph.device_kinds
    floors = [
        smallest_budget(movable(graph), kind=kind, limits=Limits.after(15)).budget_bytes
        for kind in kinds
    ]
    fixed, whole = fixed_bytes(graph), store_all_peak_bytes(graph)
    cases: dict[str, list[int]] = {}
    below = budgets_of(graph, 0, floors)
    is_mostly_fixed = (min(floors) - fixed) * 100 < _LEAST_REST_PERCENT * fixed
    if not is_mostly_fixed and not any(
        alone(graph, kind, budget, seconds)
        for kind, budget in zip(kinds, below, strict=True)
    ):
        cases["below both floors"] = below
    rest = (whole - fixed) * _SHARE_PERCENT // 100
    cases[f"{_SHARE_PERCENT}% of what is not fixed"] = [fixed + rest] * 2
    return cases


def measure(name: str, batch: int, seconds: float) -> dict[str, Any]:
    """Plan and run a network at the smallest of its budgets that is planned."""
    network = NETWORKS[name]
    platform = machine(HOMES.get(name, "gpu-like"))
    graph = captured(network, batch, platform)
    line: dict[str, Any] = {
        "model": name,
        "batch": batch,
        "side": network.side,
        "ops": len(graph.ops),
        "fixed_bytes": fixed_bytes(graph),
        "plain_peak_bytes": store_all_peak_bytes(graph),
        "seconds": seconds,
        **environment(),
    }
    refused: dict[str, str] = {}
    for case, budgets in cases_of(graph, 4).items():
        torch.manual_seed(0)
        try:
            report = remat.verify(
                network.make(),
                (images_of(network, batch),),
                repeats=1,
                **options_of(platform, dict(zip(NAMES, budgets, strict=True)), seconds),
            )
        except BudgetError as error:
            refused[case] = str(error)
            continue
        facts = report.summary()
        facts["plan"].pop("settings", None)
        return {**line, "refused": refused, "case": case, "report": facts}
    return {**line, "refused": refused}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as rows of a Markdown table, sizes in MiB."""
    rows: list[str] = []
    for line in lines:
        if "report" not in line:
            rows.append(f"| {line['model']} | {line['batch']} | none found |")
            continue
        report = line["report"]
        devices, plan = report["devices"], report["plan"]
        budgets = ", ".join(_mib(device["budget_bytes"]) for device in devices)
        peaks = ", ".join(
            f"{_mib(device['measured_bytes'])} ({_mib(device['predicted_bytes'])})"
            for device in devices
        )
        runs = ", ".join(str(device["run_count"]) for device in plan["devices"])
        again = sum(device["recomputed_count"] for device in plan["devices"])
        copies = sum(link["copy_count"] for link in plan["copies"])
        rows.append(
            f"| {line['model']} | {line['batch']} | {_mib(line['plain_peak_bytes'])} "
            f"| {line['case']}: {budgets} | {peaks} | {runs} | {again} | {copies} "
            f"| {_verdict(report['against_captured'], report)} "
            f"| {_verdict(report['against_eager'], report)} |"
        )
    return "\n".join(rows)


HEADER = """\
| network | batch | one device, all stored | budgets | measured (predicted) peaks \
| runs of ops | again | copies | against one device | against eager |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _verdict(differences: Sequence[dict[str, Any]], report: dict[str, Any]) -> str:
    if not differences:
        return f"all {report['compared_count']} equal"
    worst = max(difference["largest"] for difference in differences)
    return f"{len(differences)} of {report['compared_count']} differ, by {worst:.2g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.two_devices_run")
    parser.add_argument("--networks", nargs="+", default=list(BATCHES))
    parser.add_argument("--batch", type=int, help="instead of the paper's")
    parser.add_argument("--seconds", type=float, default=20.0, help="per plan")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    options = parser.parse_args(arguments)
    if options.table:
        print(HEADER)
        print(table(read(FILE)))
        return 0
    for name in options.networks:
        line = measure(name, options.batch or BATCHES[name], options.seconds)
        append(FILE, line)
        print(table([line]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
