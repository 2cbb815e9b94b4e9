"""Timelines of measurements and of plans."""

from collections.abc import Sequence

from remat.core.timelines import Timeline as Timeline
from remat.core.timelines import plain_timeline as plain_timeline
from remat.core.timelines import plain_timelines as plain_timelines
from remat.core.timelines import replayed_timeline as replayed_timeline
from remat.planning.plan import Plan


def measured_timeline(points: Sequence[tuple[int, int]]) -> Timeline:
    """Return the timeline of a measurement: pairs of time in ns and bytes."""
    return Timeline(points=tuple(points), end_ns=points[-1][0] if points else 0)


def planned_timeline(plan: Plan, device: int = 0) -> Timeline:
    """Return the predicted timeline of the planned step on a device."""
    return replayed_timeline(plan.graph, plan.platform, plan.schedule, device)
