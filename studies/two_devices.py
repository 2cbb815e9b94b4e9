"""Two devices against the better one alone: the networks of XEngine, planned.

For each network and batch the step (forward, loss and backward) is captured on fake
tensors, with analytic costs of two hand-written devices, and planned at several budgets
per device. Nothing is run. Recorded are the time of the best plan found on each device
alone within its own budget, and of the plans for both: least serial time (with its
proved bound), and least time with devices and links at work together.

    python -m studies.two_devices [--networks resnet18 ...] [--seconds 4]
    python -m studies.two_devices --table

Two profiles: ``integrated``, a GPU that shares memory with a CPU of about its speed, as
in the paper, and ``discrete``, a GPU twenty times as fast as the CPU behind a PCIe
link. The model and its batch are at the device that is faster alone, and for the other
alone, at the other. Copies wait for their turn in the list, as the runtime's do. The
search for the least overlapped time has twice the seconds, as half of it is the search
for the least serial time over again.

References
----------
M. Schuler, R. Membarth, P. Slusallek. XEngine: optimal tensor rematerialization for
neural networks in heterogeneous environments. ACM TACO 20(1), article 17, 2022.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.core.graph import TrainingGraph
from remat.core.platform import Device, DeviceKind, Link, Platform, single_device
from remat.core.problem import Limits, Objective, Problem, Result
from remat.core.schedule import Copy
from remat.planning.portfolio import solve_portfolio
from remat.planning.smallest_budget import smallest_budget
from remat.solvers import GreedyEviction, MinCutRetention, StoreAll
from remat.solvers.device_search import DeviceSearch
from remat.testing import store_all_peak_bytes
from studies.networks import VGG, GoogLeNet, ResNet, UNet
from studies.record import RESULTS, append, environment, read

FILE = RESULTS / "two_devices.jsonl"
RESNET18_BLOCKS, RESNET34_BLOCKS = (2, 2, 2, 2), (3, 4, 6, 3)
VGG16_CONVOLUTIONS = (2, 2, 3, 3, 3)
CASES = {"ample": 100, "75%": 75, "50%": 50, "below both floors": 0}
BELOW_FLOOR_PERCENT = 90
_WHOLE = 1 << 50


class BasicBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h)) + self.shortcut(x)
        return functional.relu(h)


def basic_resnet(blocks: Sequence[int]) -> nn.Module:
    """Return a residual network of basic blocks, as published (K. He et al. 2016)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 64
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(BasicBlock(channels, 64 << stage, stride))
            channels = 64 << stage
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)
    )


@dataclass(frozen=True)
class Network:
    """A network, the side of its images, and the batches of the paper's tables."""

    make: Callable[[], nn.Module]
    side: int
    batches: tuple[int, ...]


NETWORKS = {
    "resnet18": Network(lambda: basic_resnet(RESNET18_BLOCKS), 224, (8, 64)),
    "resnet34": Network(lambda: basic_resnet(RESNET34_BLOCKS), 224, (16,)),
    "resnet50": Network(ResNet, 224, (16,)),
    "vgg16": Network(lambda: VGG(VGG16_CONVOLUTIONS), 224, (4,)),
    "vgg19": Network(VGG, 224, (4,)),
    "googlenet": Network(GoogLeNet, 224, (1,)),
    "unet": Network(UNet, 252, (1, 4)),
}


@dataclass(frozen=True)
class Profile:
    """A GPU-like and a CPU-like device, and the link between them; home comes first."""

    gpu: DeviceKind
    cpu: DeviceKind
    bytes_per_s: int
    latency_ns: int
    names: tuple[str, str] = ("gpu", "cpu")

    def platform(self, budgets: Mapping[str, int | None]) -> Platform:
        kinds = {"gpu": self.gpu, "cpu": self.cpu}
        return Platform(
            devices=tuple(
                Device(name=name, kind=name, budget_bytes=budgets[name])
                for name in self.names
            ),
            links=tuple(
                Link(
                    source=source,
                    target=1 - source,
                    bytes_per_s=self.bytes_per_s,
                    latency_ns=self.latency_ns,
                )
                for source in (0, 1)
            ),
            kinds=tuple(
                replace(kinds[name], runs_on="cpu" if name == self.names[0] else None)
                for name in self.names
            ),
            copies_wait=True,
        )


def kind(name: str, tera_flops: float, giga_bytes: int, launch_ns: int) -> DeviceKind:
    return DeviceKind(
        name=name,
        flops_per_s=round(tera_flops * 1e12),
        bytes_per_s=giga_bytes * 10**9,
        launch_ns=launch_ns,
    )


PROFILES = {
    "integrated": Profile(
        kind("gpu", 1.6, 30, 30_000), kind("cpu", 0.8, 50, 3_000), 25 * 10**9, 5_000
    ),
    "discrete": Profile(
        kind("gpu", 20.0, 900, 8_000), kind("cpu", 1.0, 40, 3_000), 12 * 10**9, 10_000
    ),
}


def loss_of(outputs: Any) -> Tensor:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    total = torch.zeros(())
    for part in parts:
        total = total + part.square().mean()
    return total


def captured(network: Network, batch: int, profile: Profile) -> TrainingGraph:
    """Return the step of a network with what every op costs on both devices."""
    model = network.make()
    images = torch.zeros(batch, 3, network.side, network.side)
    plan = remat.plan(
        model,
        (images,),
        platform=profile.platform({"gpu": None, "cpu": None}),
        budget={"gpu": _WHOLE, "cpu": _WHOLE},
        loss=loss_of,
        solver="device-search",
        time_limit=2,
        costs="estimated",
    )
    return plan.graph


def movable(graph: TrainingGraph) -> TrainingGraph:
    """Return the graph with what only runs at home, the caller's work, anywhere."""
    return replace(
        graph,
        ops=tuple(
            replace(
                op,
                cost_ns=tuple(op.cost_ns[0] if c is None else c for c in op.cost_ns),
            )
            for op in graph.ops
        ),
    )


def alone(
    graph: TrainingGraph, device: str, budget_bytes: int, seconds: float
) -> int | None:
    """Return the time of the best plan found on one device, ``None`` without one."""
    problem = Problem(
        graph=movable(graph), platform=single_device(budget_bytes, device)
    )
    solvers = [StoreAll(), GreedyEviction(), MinCutRetention()]
    return solve_portfolio(problem, solvers, limits=Limits.after(seconds)).cost_ns


def together(
    graph: TrainingGraph, platform: Platform, objective: Objective, seconds: float
) -> Result:
    problem = Problem(graph=graph, platform=platform)
    solver = DeviceSearch(objective=objective, candidates=10**6, op_runs=10**9)
    return solve_portfolio(problem, [solver], limits=Limits.after(seconds))


def described(result: Result) -> dict[str, Any]:
    if result.trace is None or result.schedule is None:
        return {"message": result.message}
    return {
        "serial_ns": result.trace.serial_ns,
        "overlapped_ns": result.trace.overlapped_ns,
        "bound_ns": result.bound_ns,
        "peak_bytes": list(result.trace.peak_bytes),
        "copies": sum(isinstance(s, Copy) for s in result.schedule.steps),
        "recomputed_runs": sum(result.schedule.recompute_counts().values()),
        "elapsed_s": round(result.elapsed_s, 1),
    }


def fixed_bytes(graph: TrainingGraph) -> int:
    """Return what is at home at the end whatever the plan: parameters and gradients."""
    leaving = {*graph.final_outputs, *graph.held_outputs}
    return graph.resident_bytes(0) + sum(
        graph.storages[storage].size_bytes
        for storage in leaving
        if not graph.storages[storage].is_resident
    )


def budgets_of(graph: TrainingGraph, percent: int, floors: Sequence[int]) -> list[int]:
    """Return the budgets per device: a share of the plain peak, or below the floors.

    Below each floor by a tenth of what it has beyond parameters and gradients.
    """
    if percent:
        return [store_all_peak_bytes(graph) * percent // 100] * 2
    fixed = fixed_bytes(graph)
    return [fixed + (floor - fixed) * BELOW_FLOOR_PERCENT // 100 for floor in floors]


def measure(name: str, batch: int, profile: str, seconds: float) -> None:
    chosen = PROFILES[profile]
    graph = captured(NETWORKS[name], batch, chosen)
    times = [sum(op.cost_ns[d] or 0 for op in graph.ops) for d in (0, 1)]
    if times[1] < times[0]:
        chosen = replace(chosen, names=("cpu", "gpu"))
        graph = captured(NETWORKS[name], batch, chosen)
    floors = [
        smallest_budget(
            movable(graph), kind=device, limits=Limits.after(30)
        ).budget_bytes
        for device in ("gpu", "cpu")
    ]
    for case, percent in CASES.items():
        budgets = budgets_of(graph, percent, floors)
        platform = chosen.platform(dict(zip(("gpu", "cpu"), budgets, strict=True)))
        line = {
            "model": name,
            "batch": batch,
            "profile": profile,
            "home": chosen.names[0],
            "case": case,
            "ops": len(graph.ops),
            "budgets_bytes": budgets,
            "floors_bytes": floors,
            "fixed_bytes": fixed_bytes(graph),
            "seconds": seconds,
            "plain_peak_bytes": store_all_peak_bytes(graph),
            "alone_ns": [
                alone(graph, device, budget, seconds)
                for device, budget in zip(("gpu", "cpu"), budgets, strict=True)
            ],
            "serial": described(together(graph, platform, Objective.SERIAL, seconds)),
            "overlapped": described(
                together(graph, platform, Objective.OVERLAPPED, 2 * seconds)
            ),
            **environment(),
        }
        append(FILE, line)
        print(table([line]), flush=True)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as rows of a Markdown table, times in ms."""
    rows: list[str] = []
    for line in lines:
        gpu, cpu = (_ms(time) for time in line["alone_ns"])
        best = min((t for t in line["alone_ns"] if t is not None), default=None)
        serial, overlapped = line["serial"], line["overlapped"]
        sizes = sorted({size >> 20 for size in line["budgets_bytes"]})
        budgets = " and ".join(str(size) for size in sizes)
        rows.append(
            f"| {line['model']} | {line['batch']} | {line['profile']} | {line['case']}: "
            f"{budgets} | {gpu} | {cpu} | {_ms(serial.get('serial_ns'))} "
            f"| {_ms(serial.get('bound_ns'))} | {_gain(best, serial.get('serial_ns'))} "
            f"| {serial.get('copies', '-')} | {serial.get('recomputed_runs', '-')} "
            f"| {_ms(overlapped.get('overlapped_ns'))} "
            f"| {_gain(best, overlapped.get('overlapped_ns'))} |"
        )
    return "\n".join(rows)


HEADER = """\
| network | batch | profile | budget per device, MiB | GPU alone | CPU alone | both, serial \
| bound | faster by | copies | run again | both, overlapped | faster by |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def _ms(time_ns: int | None) -> str:
    return "does not fit" if time_ns is None else f"{time_ns / 1e6:.1f}"


def _gain(alone_ns: int | None, both_ns: int | None) -> str:
    if alone_ns is None or both_ns is None:
        return "-"
    return f"{100 * (alone_ns / both_ns - 1):.1f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.two_devices")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES))
    parser.add_argument("--seconds", type=float, default=4.0, help="per plan")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    options = parser.parse_args(arguments)
    if options.table:
        print(HEADER)
        print(table(read(FILE)))
        return 0
    for name in options.networks:
        for batch in NETWORKS[name].batches:
            for profile in options.profiles:
                measure(name, batch, profile, options.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
