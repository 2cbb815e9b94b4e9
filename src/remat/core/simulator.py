"""The judge: replay a schedule and report peak, time and the first violation.

:func:`simulate` defines what a schedule means (docs/semantics.md says the same in
words). It shares no code with any solver, and every answer of every solver passes
through it before anyone sees it. It is made of three parts: the rules
(:mod:`remat.core.rules`), the serial replay, which says what is allowed and what memory
it takes (:mod:`remat.core.replay`), and the clock, which says when steps run where
devices and links work at the same time (:mod:`remat.core.clock`).
"""

from dataclasses import dataclass, replace

from remat.core.checks import checked_record
from remat.core.errors import InvalidPlatformError
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.core.replay import Replay
from remat.core.rules import BrokenRuleError, Violation
from remat.core.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happens when a schedule is replayed.

    Parameters
    ----------
    peak_bytes
        Per device, the most bytes at any time, in serial and in overlapped execution.
    serial_ns
        Sum of all op costs and copy times.
    overlapped_ns
        End of the last step when every device and every link is an in-order queue.
    timeline_bytes
        Per device, the bytes during each step of serial execution.
    live_after
        For each device, the storages (not resident ones) live after the last step.
    recomputed_ns
        The part of ``serial_ns`` spent on runs of an op after its first.
    violation
        The first rule broken, or ``None``. After a violation other than
        ``OVER_BUDGET`` the replay stops and the other fields describe the part before;
        a budget exceeded before that point is what is reported.
    """

    peak_bytes: tuple[int, ...]
    serial_ns: int
    overlapped_ns: int
    timeline_bytes: tuple[tuple[int, ...], ...]
    live_after: tuple[frozenset[int], ...]
    recomputed_ns: int
    violation: Violation | None

    def __repr__(self) -> str:
        return (
            f"<Trace: peak_bytes={self.peak_bytes}, serial_ns={self.serial_ns}, "
            f"overlapped_ns={self.overlapped_ns}, violation={self.violation}>"
        )

    @property
    def is_valid(self) -> bool:
        """Whether the schedule breaks no rule."""
        return self.violation is None

    def peak_step(self, device: int = 0) -> int:
        """Return the index of the first step at which ``device`` is fullest."""
        timeline = self.timeline_bytes[device]
        return max(range(len(timeline)), key=timeline.__getitem__, default=0)


def check_platform(graph: TrainingGraph, platform: Platform) -> None:
    """Check that ``graph`` can be placed on ``platform`` at all.

    Raises
    ------
    InvalidGraphError
        If the graph has no costs for a device's kind.
    InvalidPlatformError
        If a storage's home is not a device of the platform.
    """
    for device in platform.devices:
        graph.kind_index(device.kind)
    for index, storage in enumerate(graph.storages):
        if storage.home >= len(platform.devices):
            count = len(platform.devices)
            msg = (
                f"storage {index} {storage.name!r} has home device {storage.home}, "
                f"but the platform has {count} device{'s' * (count > 1)}, numbered from 0"
            )
            raise InvalidPlatformError(msg)


def simulate(graph: TrainingGraph, platform: Platform, schedule: Schedule) -> Trace:
    """Replay ``schedule`` and report its peak, its time and the first violation.

    Parameters
    ----------
    graph, platform
        What is trained, and where. A device without a budget is never over it.
    schedule
        Any list of steps; it need not be valid.

    Returns
    -------
    Trace
        Peak per device, serial and overlapped time, timeline, first violation.

    Raises
    ------
    InvalidGraphError
        If the graph has no costs for a device's kind.
    InvalidPlatformError
        If a storage's home is not a device of the platform.
    ValueError
        If an argument is of another type.

    Notes
    -----
    Time O(steps x reads + storages), plus sorting for the overlapped timeline.

    When steps run as devices and links work together is said by
    :mod:`remat.core.clock`.
    """
    checked_record("graph", graph, TrainingGraph)
    checked_record("platform", platform, Platform)
    checked_record("schedule", schedule, Schedule)
    check_platform(graph, platform)
    replay = Replay(graph, platform)
    violation: Violation | None = None
    try:
        for index, step in enumerate(schedule.steps):
            replay.step = index
            replay.take(step)
        replay.step = len(schedule.steps)
        replay.finish()
    except BrokenRuleError as broken:
        violation = broken.violation
    peaks = [
        max([overlapped, *timeline])
        for overlapped, timeline in zip(
            replay.clock.peaks(), replay.timeline, strict=True
        )
    ]
    # A step over the budget came before the step that ended the replay.
    violation = replay.over_budget or violation or _overlapped_excess(replay, peaks)
    return Trace(
        peak_bytes=tuple(peaks),
        serial_ns=replay.serial_ns,
        overlapped_ns=replay.clock.makespan_ns,
        timeline_bytes=tuple(tuple(line) for line in replay.timeline),
        live_after=tuple(frozenset(live) for live in replay.live),
        recomputed_ns=replay.recomputed_ns,
        violation=violation,
    )


def _overlapped_excess(replay: Replay, peaks: list[int]) -> Violation | None:
    """Return which device exceeds its budget as steps overlap, where and when."""
    for index, device in enumerate(replay.platform.devices):
        limit = device.budget_bytes
        if limit is not None and peaks[index] > limit:
            step, at_ns = replay.clock.first_over(index, limit)
            excess = replay.excess(index, peaks[index], limit)
            message = f"{excess.message} as steps overlap, from {at_ns:_} ns on"
            return replace(excess, step=step, message=message)
    return None
