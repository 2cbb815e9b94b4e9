"""Memory over time as numbers: what figures and notebooks draw."""

from dataclasses import dataclass

from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Platform, single_device
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.core.simulator import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes in use over one training step.

    Parameters
    ----------
    points
        Pairs of the time since the step began, in nanoseconds, and the bytes in use
        from then on, by increasing time. Several may share one time.
    end_ns
        When the step ends.
    boundary_ns
        When forward gives way to backward, or ``None`` if it is not known.
    """

    points: tuple[tuple[int, int], ...]
    end_ns: int
    boundary_ns: int | None = None

    def __repr__(self) -> str:
        return (
            f"<Timeline: {len(self.points)} points, peak_bytes={self.peak_bytes}, "
            f"end_ns={self.end_ns}>"
        )

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at any time."""
        return max((size for _, size in self.points), default=0)

    @property
    def peak_ns(self) -> int:
        """The first time at which the most bytes are in use."""
        return next((t for t, size in self.points if size == self.peak_bytes), 0)


def replayed_timeline(
    graph: TrainingGraph, platform: Platform, schedule: Schedule, device: int = 0
) -> Timeline:
    """Return the bytes on a device over serial time when replayed.

    Every step of the schedule, on whichever device, gives one point, at its start.
    """
    trace = simulate(graph, platform, schedule)
    points: list[tuple[int, int]] = []
    now_ns, boundary_ns = 0, None
    # A broken schedule is followed up to the step that breaks it.
    for step, size in zip(schedule.steps, trace.timeline_bytes[device], strict=False):
        points.append((now_ns, size))
        if isinstance(step, Boundary):
            boundary_ns = now_ns
        now_ns += _duration_ns(graph, platform, step)
    return Timeline(points=tuple(points), end_ns=now_ns, boundary_ns=boundary_ns)


def _duration_ns(graph: TrainingGraph, platform: Platform, step: Step) -> int:
    match step:
        case Compute(op, device):
            kind = graph.kind_index(platform.devices[device].kind)
            return graph.ops[op].cost_ns[kind] or 0
        case Copy(storage, source, target):
            link = platform.link(source, target)
            size_bytes = graph.storages[storage].size_bytes
            return 0 if link is None else link.copy_ns(size_bytes)
        case Discard() | Boundary():
            return 0


def plain_timeline(graph: TrainingGraph) -> Timeline:
    """Return the predicted timeline of the step without rematerialisation."""
    schedule = schedule_from_order(graph, store_all_order(graph))
    return replayed_timeline(graph, single_device(kind=graph.device_kinds[0]), schedule)


def plain_timelines(
    graph: TrainingGraph, platform: Platform
) -> tuple[Timeline, ...] | None:
    """Return the timelines of the step without rematerialisation on device 0 alone.

    One per device of the platform; on the others there is what is resident there.
    ``None`` if some op cannot run on device 0, so that there is no such step.
    """
    kind = graph.kind_index(platform.devices[0].kind)
    if any(op.cost_ns[kind] is None for op in graph.ops):
        return None
    schedule = schedule_from_order(graph, store_all_order(graph))
    return tuple(
        replayed_timeline(graph, platform, schedule, device)
        for device in range(len(platform.devices))
    )
