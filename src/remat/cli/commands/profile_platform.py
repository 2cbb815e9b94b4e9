"""``remat profile-platform``: measure the devices and links of this machine."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from remat.cli.base import (
    WORKLOAD_HELP,
    Command,
    ExitCode,
    add_output,
    add_workload,
    chosen_budget,
    note,
    print_json,
)
from remat.core.errors import UsageError
from remat.core.platform import DeviceKind, Platform
from remat.core.units import format_bytes, format_ns
from remat.files.serialisation import platform_to_json, save_platform
from remat.planning.several_devices import budgets_bytes
from remat.report.progress import progress_bar

if TYPE_CHECKING:
    from remat.profile.estimate import Rates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``remat profile-platform``."""
    add_workload(parser, is_optional=True)
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="a device of this machine: cpu, cpu:1 (another logical device of the same "
        "memory), cuda:0, host (host memory that only stores); may be given several "
        "times (default: every CUDA device, or else cpu; and host)",
    )
    parser.add_argument(
        "--budget",
        action="append",
        metavar="DEVICE=SIZE",
        help="most bytes on a device, written into the file",
    )
    parser.add_argument(
        "--time-percent",
        action="append",
        metavar="DEVICE=PERCENT",
        help="plan with ops on a device taking this percentage of their measured time: a "
        "model of a slower or faster device, not a measurement",
    )
    parser.add_argument("--output", metavar="FILE", help="write the platform here")
    add_output(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Measure, print, and write the platform."""
    percents = _percents(options.time_percent or [])
    budget = chosen_budget(options.budget)
    if isinstance(budget, int | str):
        msg = f"--budget {budget} names no device; write for example cpu={budget}"
        raise UsageError(msg)
    # These import torch, which help and usage errors do without.
    from remat.core.device_graph import place_of  # noqa: PLC0415
    from remat.profile.cache import CostCache  # noqa: PLC0415
    from remat.profile.estimate import measure_rates  # noqa: PLC0415
    from remat.profile.links import default_devices, measured_platform  # noqa: PLC0415

    workload = None
    if options.factory is not None:
        from remat.cli.workload import load_workload  # noqa: PLC0415

        workload = load_workload(options.factory, options.script_arguments)
    names = options.device or default_devices()
    with progress_bar(is_quiet=options.quiet) as progress:
        cache = CostCache()
        platform = measured_platform(names, cache=cache, on_progress=progress)
        platform = _with_percents(platform, percents)
        if budget is not None:
            platform = platform.with_budgets(budgets_bytes(budget))
        places = [place_of(platform, d) for d in range(len(names))]
        rates = {
            place: measure_rates(place, cache=cache)
            for place in dict.fromkeys(places)
            if place is not None
        }
        if workload is not None:
            from remat.training.platform_profile import with_measured_costs  # noqa: PLC0415

            platform = with_measured_costs(
                platform,
                workload.model,
                workload.args,
                workload.kwargs,
                progress=progress,
            )
        progress("done", 1.0)
    if options.json:
        print_json(platform_to_json(platform))
    else:
        print("\n".join(_lines(platform, [rates.get(p or "") for p in places])))
    if options.output:
        save_platform(options.output, platform)
        note(options, f"wrote the platform to {options.output}")
    return ExitCode.OK


def _percents(words: Sequence[str]) -> dict[str, int]:
    percents: dict[str, int] = {}
    for word in words:
        name, _, percent = word.rpartition("=")
        if not name or not percent.isdecimal() or int(percent) < 1:
            msg = (
                f"--time-percent {word} is not DEVICE=PERCENT with a whole number of at "
                "least 1, such as cpu:1=300"
            )
            raise UsageError(msg)
        percents[name] = int(percent)
    return percents


def _with_percents(platform: Platform, percents: dict[str, int]) -> Platform:
    """Return the platform with a kind of its own for each device that is scaled."""
    kinds: list[DeviceKind] = []
    devices = list(platform.devices)
    for name, percent in percents.items():
        index = platform.index_of(name)
        kind = replace(platform.kind_of(index), name=name, time_percent=percent)
        kinds.append(kind)
        devices[index] = replace(devices[index], kind=name)
    return replace(platform, devices=tuple(devices), kinds=tuple(kinds))


def _lines(platform: Platform, rates: "Sequence[Rates | None]") -> list[str]:
    lines = ["devices"]
    for index, (device, rate) in enumerate(zip(platform.devices, rates, strict=True)):
        kind = platform.kind_of(index)
        limit = "no budget"
        if device.budget_bytes is not None:
            limit = format_bytes(device.budget_bytes)
        what = "stores only"
        if kind.computes and rate is not None:
            what = (
                f"{rate.flops_per_s / 1e9:.4g} Gflop/s, "
                f"{format_bytes(rate.bytes_per_s)}/s, launch {format_ns(rate.launch_ns)}"
            )
            if kind.time_percent != 100:
                what += f"; planned with {kind.time_percent} % of the time"
        lines.append(f"  {device.name}: {limit}; {what}")
    lines.append("links")
    lines += [
        f"  {platform.names[link.source]} to {platform.names[link.target]}: "
        f"{format_bytes(link.bytes_per_s)}/s, latency {format_ns(link.latency_ns)}"
        for link in platform.links
    ]
    if platform.costs is not None:
        lines.append("operators")
        for name in platform.names:
            costs = platform.costs_on(name).values()
            times = [cost.cost_ns for cost in costs if cost.cost_ns is not None]
            unable = len(costs) - len(times)
            if costs:
                more = f", and {unable} that cannot run there" if unable else ""
                lines.append(
                    f"  {name}: {len(times)} distinct, {format_ns(sum(times))} for one "
                    f"run of each{more}"
                )
    return lines


PROFILE_PLATFORM = Command(
    name="profile-platform",
    summary="measure the devices and links of this machine",
    description=(
        "Measure how fast copies between the devices of this machine are, and write a "
        "platform file for --platform. With a training step, measure what each of its "
        "operators takes on each device as well: plans for the file then measure "
        "nothing, and can be made on machines without these devices. Without one, "
        "operators are measured when a model is planned. The file is text: edit it for "
        "machines that you do not have."
    ),
    details=WORKLOAD_HELP,
    examples=(
        "remat profile-platform --output machine.json",
        "remat profile-platform train.py --device cuda:0 --device host --output gpu.json",
        "remat profile-platform --device cuda:0 --device host --budget cuda:0=6GiB",
        "remat profile-platform --device cpu --device cpu:1 --time-percent cpu:1=300",
    ),
    add_arguments=add_arguments,
    run=run,
    writes=("--output",),
)
