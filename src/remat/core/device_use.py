"""What a schedule does on each device and on each link, in figures for people."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from remat.core.contributors import operator_in
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.core.schedule import Compute, Copy, Schedule
from remat.core.simulator import Trace
from remat.core.units import format_bytes, format_ns

_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What happens on one device.

    Parameters
    ----------
    name, budget_bytes, peak_bytes
        The device, what it may hold (``None`` for no limit), and what it does at most.
    run_count, recomputed_count
        Runs of ops, and how many of them repeat a run on whichever device.
    time_ns
        Time of these runs.
    operators
        The operators that run, each with its number of runs, most runs first.
    """

    name: str
    budget_bytes: int | None
    peak_bytes: int
    run_count: int
    recomputed_count: int
    time_ns: int
    operators: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        limit = "" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        peak = f"{self.name}: peak {format_bytes(self.peak_bytes)}"
        runs = f"runs {self.run_count} ops in {format_ns(self.time_ns)}"
        if self.recomputed_count:
            runs += f", {self.recomputed_count} of them again"
        if not self.run_count:
            runs = "runs nothing"
        return f"{peak} of {limit or 'any size'}, {runs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """What is copied over one link.

    Parameters
    ----------
    source, target
        Names of the devices.
    copy_count, size_bytes, time_ns
        How often, how many bytes in all, and how long.
    storages
        What is copied, by the operators that made it, with the bytes, most first.
    """

    source: str
    target: str
    copy_count: int
    size_bytes: int
    time_ns: int
    storages: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        names = ", ".join(
            f"{format_bytes(size)} of {name}" for name, size in self.storages[:_NAMED]
        )
        rest = ", ..." if len(self.storages) > _NAMED else ""
        copies = "copy" if self.copy_count == 1 else "copies"
        return (
            f"{self.source} to {self.target}: {self.copy_count} {copies}, "
            f"{format_bytes(self.size_bytes)} in {format_ns(self.time_ns)} "
            f"({names}{rest})"
        )


def device_uses(
    graph: TrainingGraph, platform: Platform, schedule: Schedule, trace: Trace
) -> tuple[DeviceUse, ...]:
    """Return what the schedule does on each device, in the platform's order.

    Time O(steps).
    """
    seen: set[int] = set()
    again: Counter[int] = Counter()
    runs: list[Counter[int]] = [Counter() for _ in platform.devices]
    for step in schedule.steps:
        if isinstance(step, Compute):
            runs[step.device][step.op] += 1
            again[step.device] += step.op in seen
            seen.add(step.op)
    uses: list[DeviceUse] = []
    for index, device in enumerate(platform.devices):
        kind = graph.kind_index(device.kind)
        operators: Counter[str] = Counter()
        for op, count in runs[index].items():
            operators[operator_in(graph.ops[op].name)] += count
        uses.append(
            DeviceUse(
                name=device.name,
                budget_bytes=device.budget_bytes,
                peak_bytes=trace.peak_bytes[index],
                run_count=runs[index].total(),
                recomputed_count=again[index],
                time_ns=sum(
                    count * (graph.ops[op].cost_ns[kind] or 0)
                    for op, count in runs[index].items()
                ),
                operators=tuple(operators.most_common()),
            )
        )
    return tuple(uses)


def link_uses(
    graph: TrainingGraph, platform: Platform, schedule: Schedule
) -> tuple[LinkUse, ...]:
    """Return what the schedule copies over each link that it uses."""
    copied: dict[tuple[int, int], list[int]] = {}
    for step in schedule.steps:
        if isinstance(step, Copy):
            copied.setdefault((step.source, step.target), []).append(step.storage)
    return tuple(
        _link_use(graph, platform, pair, storages)
        for pair, storages in sorted(copied.items())
    )


def _link_use(
    graph: TrainingGraph,
    platform: Platform,
    pair: tuple[int, int],
    storages: Iterable[int],
) -> LinkUse:
    link = platform.link(*pair)
    blocks = [graph.storages[s] for s in storages]
    sizes: Counter[str] = Counter()
    for block in blocks:
        sizes[operator_in(block.name)] += block.size_bytes
    times = [0 if link is None else link.copy_ns(b.size_bytes) for b in blocks]
    return LinkUse(
        source=platform.names[pair[0]],
        target=platform.names[pair[1]],
        copy_count=len(blocks),
        size_bytes=sum(b.size_bytes for b in blocks),
        time_ns=sum(times),
        storages=tuple(sizes.most_common()),
    )
