"""Figures: memory over one training step, time against memory, sizes of a batch.

Every function draws on given axes, or on new ones, and returns them; nothing is shown
or kept open. The numbers are computed in :mod:`remat.report.timelines` and by
:class:`~remat.planning.plan.Plan`.
"""

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from remat.core.errors import UsageError
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.core.schedule import Schedule
from remat.core.units import format_bytes
from remat.files.documents import write_bytes
from remat.planning.batch_sizes import BatchSizes
from remat.planning.plan import Plan
from remat.report.timelines import (
    Timeline,
    plain_timeline,
    plain_timelines,
    planned_timeline,
    replayed_timeline,
)

# Okabe and Ito's palette, which people with any colour vision can tell apart. Line
# styles differ too, so that figures survive printing in grey.
_GREY, _BLUE, _ORANGE, _GREEN, _RED = (
    "#7f7f7f",
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
)
_CYCLE = (
    (_GREY, "-"),
    (_BLUE, "-"),
    (_ORANGE, "--"),
    (_GREEN, "-."),
)
_SUFFIXES = (".png", ".pdf", ".svg")


def memory_timeline(plan: Plan | TrainingGraph, ax: Axes | None = None) -> Axes:
    """Draw the predicted memory over one step, with and without the plan.

    Of a plan for several devices it draws the first; :func:`device_timelines` draws
    all.

    Parameters
    ----------
    plan
        A plan, or a graph, of which only the plain step is drawn.
    ax
        Where to draw; by default on a new figure.
    """
    if isinstance(plan, TrainingGraph):
        timelines = {"without remat": plain_timeline(plan)}
        ax = compare_timelines(timelines, ax=ax)
        ax.set_title(f"{plan.name}: predicted memory of one training step")
        return ax
    timelines = {
        "without remat": plain_timeline(plan.graph),
        "planned": planned_timeline(plan),
    }
    ax = compare_timelines(timelines, budget_bytes=plan.budget_bytes, ax=ax)
    ax.set_title(f"{plan.graph.name}: predicted memory of one training step")
    return ax


def device_timelines(
    graph: TrainingGraph,
    platform: Platform,
    schedule: Schedule,
    *,
    label: str = "planned",
) -> tuple[Axes, ...]:
    """Draw the predicted memory on each device over one step, one below the other.

    Time is that of the steps one after the other, so that all devices share it.

    Parameters
    ----------
    graph, platform, schedule
        What runs where; each device is drawn with its budget, if it has one.
    label
        What the schedule is called.

    Returns
    -------
    tuple of Axes
        One per device, of one new figure. Beside the schedule they show the step
        without rematerialisation on the first device alone, if all ops can run there.
    """
    plain = plain_timelines(graph, platform)
    count = len(platform.devices)
    figure = Figure(figsize=(8, 1 + 3.5 * count), layout="constrained")
    rows: list[Axes] = []
    for index, device in enumerate(platform.devices):
        ax = figure.add_subplot(count, 1, index + 1)
        before = {} if plain is None else {"without remat": plain[index]}
        timeline = replayed_timeline(graph, platform, schedule, index)
        ax.spines[["top", "right"]].set_visible(False)
        compare_timelines(
            {**before, label: timeline}, budget_bytes=device.budget_bytes, ax=ax
        )
        where = "of one training step" if count == 1 else f"on {device.name}"
        ax.set_title(f"{graph.name}: predicted memory {where}")
        rows.append(ax)
    return tuple(rows)


def compare_timelines(
    timelines: Mapping[str, Timeline],
    *,
    budget_bytes: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw several timelines over each other, and the budget as a line.

    Parameters
    ----------
    timelines
        By name; drawn in this order, the second one filled.
    budget_bytes
        The budget, or ``None`` for no line.
    ax
        Where to draw; by default on a new figure.
    """
    ax = ax or _new_axes()
    top_bytes = max([budget_bytes or 0, *(t.peak_bytes for t in timelines.values())])
    factor, unit = _memory_unit(top_bytes)
    end_ns = max((t.end_ns for t in timelines.values()), default=0)
    per_unit, time_unit = _time_unit(end_ns)
    for position, (name, timeline) in enumerate(timelines.items()):
        colour, style = _CYCLE[position % len(_CYCLE)]
        points = _closed(timeline)
        times = [time_ns / per_unit for time_ns, _ in points]
        sizes = [size / factor for _, size in points]
        if position == 1:
            ax.fill_between(times, sizes, step="post", color=colour, alpha=0.15, lw=0)
        ax.step(
            times,
            sizes,
            where="post",
            color=colour,
            linestyle=style,
            linewidth=1.3,
            label=f"{name}: peak {format_bytes(timeline.peak_bytes)}",
        )
        if timeline.boundary_ns is not None:
            at = timeline.boundary_ns / per_unit
            ax.plot(
                [at, at], [0, 0.03], transform=ax.get_xaxis_transform(), color=colour
            )
            ax.annotate(
                "backward" if position == 0 else "",
                (at, 0.035),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize="small",
                color=colour,
            )
    if budget_bytes is not None:
        ax.axhline(
            budget_bytes / factor,
            color=_RED,
            linestyle=(0, (6, 2)),
            linewidth=1.6,
            label=f"budget: {format_bytes(budget_bytes)}",
        )
    ax.set_xlim(0, end_ns / per_unit or 1)
    ax.set_ylim(0, 1.08 * top_bytes / factor or 1)
    ax.set_xlabel(f"time ({time_unit})")
    ax.set_ylabel(f"memory ({unit})")
    _legend_below(ax)
    return ax


def trade_off_curve(plans: Sequence[Plan], ax: Axes | None = None) -> Axes:
    """Draw time against memory for plans of one graph at several budgets.

    Parameters
    ----------
    plans
        At least one, by increasing budget.
    ax
        Where to draw; by default on a new figure.

    Raises
    ------
    UsageError
        If there is no plan.
    """
    if not plans:
        msg = "a curve needs at least one plan; got none"
        raise UsageError(msg)
    ax = ax or _new_axes()
    baseline = plans[0]
    largest = max(baseline.baseline_peak_bytes, *(p.peak_bytes for p in plans), 1)
    factor, unit = _memory_unit(largest)
    # Between two points the schedule for the smaller budget is the one that fits.
    peaks = [plan.peak_bytes / factor for plan in plans]
    slowdowns = [1 + plan.overhead for plan in plans]
    plain = baseline.baseline_peak_bytes / factor
    ax.step(
        [*peaks, max(plain, *peaks)],
        [*slowdowns, slowdowns[-1]],
        where="post",
        color=_BLUE,
        linewidth=1.3,
    )
    is_for_several = baseline.has_several_devices
    label = "planned, one thing at a time" if is_for_several else "planned"
    ax.plot(peaks, slowdowns, "o", color=_BLUE, label=label)
    if is_for_several:
        at_once = [p.overlapped_ns / (p.baseline_cost_ns or 1) for p in plans]
        ax.step(
            peaks,
            at_once,
            "^--",
            where="post",
            color=_GREEN,
            label="devices and links at once",
        )
        slowdowns += at_once
    ax.plot(plain, 1.0, "s", color=_GREY, label="without remat")
    smallest = baseline.smallest_budget_bytes
    if smallest is not None:
        ax.axvline(
            smallest / factor,
            color=_RED,
            linestyle=(0, (6, 2)),
            label=f"smallest budget: {format_bytes(smallest)}",
        )
    ax.set_xlim(0, 1.05 * max(plain, *peaks))
    ax.set_ylim(bottom=min(0.98, *slowdowns))
    where = (
        f"on {baseline.platform.names[0]}" if is_for_several else "of the whole step"
    )
    ax.set_xlabel(f"peak memory {where} ({unit})")
    ax.set_ylabel("time of operators / without remat")
    ax.set_title(f"{baseline.graph.name}: time against memory")
    _legend_below(ax)
    return ax


def batch_curve(sizes: BatchSizes, ax: Axes | None = None) -> Axes:
    """Draw time for each unit and memory against the size of the batch.

    Parameters
    ----------
    sizes
        What :func:`remat.max_batch` returned.
    ax
        Where to draw; by default on a new figure.
    """
    ax = ax or _new_axes()
    factor, unit = _memory_unit(sizes.budget_bytes)
    fitting = [(each.size, each.plan) for each in sizes.tried if each.plan is not None]
    largest = [size for size, _ in fitting]
    plain = [plan.baseline_peak_bytes / factor for _, plan in fitting]
    needed = [plan.peak_bytes / factor for _, plan in fitting]
    ax.plot(largest, plain, "s-", color=_GREY, label="without remat")
    ax.plot(largest, needed, "o-", color=_BLUE, label="planned")
    beyond = [each for each in sizes.tried if not each.fits]
    if beyond:
        ax.plot(
            [each.size for each in beyond],
            [each.needed_bytes / factor for each in beyond],
            "x",
            color=_RED,
            label="smallest known, does not fit",
        )
    ax.axhline(
        sizes.budget_bytes / factor,
        color=_RED,
        linestyle=(0, (6, 2)),
        label=f"budget: {format_bytes(sizes.budget_bytes)}",
    )
    slow = ax.twinx()
    slow.spines[["top"]].set_visible(False)
    times = [plan.cost_ns / size for size, plan in fitting]
    time_factor, time_unit = _time_unit(round(max(times)))
    slow.plot(
        largest,
        [time / time_factor for time in times],
        "^--",
        color=_GREEN,
        label="time a unit",
    )
    slow.set_ylabel(f"time of operators / size ({time_unit})", color=_GREEN)
    slow.set_ylim(bottom=0)
    # The first size that is too large may be far off.
    ax.set_xlim(0, 1.2 * sizes.size)
    ax.set_ylim(bottom=0, top=1.6 * sizes.budget_bytes / factor)
    ax.set_xlabel("size of the batch")
    ax.set_ylabel(f"peak memory of the whole step ({unit})")
    ax.set_title(f"{sizes.plan.graph.name}: the largest size that fits is {sizes.size}")
    _legend_below(ax)
    return ax


def check_figure_path(path: str | os.PathLike[str]) -> None:
    """Refuse a file name that no figure can be written to, before work is done.

    Raises
    ------
    UsageError
        If the suffix is not that of a format that can be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        msg = (
            f"cannot tell the format of the picture {os.fspath(path)!r}: its name ends "
            f"with {suffix!r}; end it with {', '.join(_SUFFIXES)}"
        )
        raise UsageError(msg)


def save_figure(ax: Axes, path: str | os.PathLike[str]) -> None:
    """Write the figure of ``ax`` as PNG, PDF or SVG, by the suffix of ``path``.

    The file is either the old one or the whole new one.

    Raises
    ------
    UsageError
        If the suffix is not that of a format that can be written.
    FileFormatError
        If the file cannot be written.
    """
    check_figure_path(path)
    figure = ax.get_figure(root=True)
    if figure is None:
        msg = "the axes belong to no figure"
        raise UsageError(msg)
    picture = BytesIO()
    kind = Path(path).suffix[1:].lower()
    # The same picture makes the same file: no dates in it, and no random names.
    date = {"svg": "Date", "pdf": "CreationDate"}.get(kind)
    with rc_context({"svg.hashsalt": "remat"}):
        figure.savefig(
            picture, format=kind, dpi=150, metadata={date: None} if date else None
        )
    write_bytes(path, picture.getvalue())


def _new_axes() -> Axes:
    # Not through pyplot, which would keep the figure alive and choose a window system.
    ax = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _legend_below(ax: Axes) -> None:
    # Below the axes it never hides data, whatever the curves do.
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        ncols=3,
        frameon=False,
        fontsize="small",
    )


def _closed(timeline: Timeline) -> list[tuple[int, int]]:
    """Return the points with one more at the end, so that the last has a width."""
    points = list(timeline.points)
    return [*points, (timeline.end_ns, points[-1][1])] if points else []


def _memory_unit(size_bytes: int) -> tuple[int, str]:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes >= 1024**power:
            return 1024**power, unit
    return 1, "bytes"


def _time_unit(time_ns: int) -> tuple[int, str]:
    for factor, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "us")):
        if time_ns >= factor:
            return factor, unit
    return 1, "ns"
