"""Figures: what is drawn where; one picture of each is rendered."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from tests.device_schedules import logical
from tests.instances import KIB, mlp_chain

from remat.core.errors import FileFormatError, UsageError
from remat.core.units import format_bytes
from remat.planning.curve import trade_off
from remat.planning.one_device import plan_graph
from remat.report.figures import (
    compare_timelines,
    device_timelines,
    memory_timeline,
    save_figure,
    trade_off_curve,
)
from remat.report.timelines import Timeline, measured_timeline

GRAPH = mlp_chain(6).graph
PLAN = plan_graph(GRAPH, budget="75%")
PNG = b"\x89PNG\r\n\x1a\n"


def labels(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def xs_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def ys_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def horizontal_lines(ax: Axes) -> list[float]:
    return [ys_of(line)[0] for line in ax.get_lines() if xs_of(line) == [0, 1]]


def test_plan_is_drawn_with_its_baseline_and_its_budget() -> None:
    ax = memory_timeline(PLAN)
    assert [text.split(":")[0] for text in labels(ax)] == [
        "without remat",
        "planned",
        "budget",
    ]
    assert PLAN.budget_bytes is not None
    assert horizontal_lines(ax) == [pytest.approx(PLAN.budget_bytes / KIB)]
    assert ax.get_ylabel() == "memory (KiB)"
    assert ax.get_xlabel() == "time (ms)"
    drawn = ys_of(ax.get_lines()[0])
    assert max(drawn) * KIB == pytest.approx(PLAN.baseline_peak_bytes)


def test_each_device_is_drawn_with_its_own_budget() -> None:
    plan = plan_graph(
        GRAPH,
        budget={"cpu": PLAN.budget_bytes, "host": "1 MiB"},
        platform=logical("cpu", "host"),
        solver="device-search",
        time_limit=5,
    )
    first, second = device_timelines(plan.graph, plan.platform, plan.schedule)
    assert first.get_figure() is second.get_figure()
    assert first.get_title().endswith("predicted memory on cpu")
    assert second.get_title().endswith("predicted memory on host")
    assert first.get_xlim() == second.get_xlim()
    for ax, peak in zip((first, second), plan.trace.peak_bytes, strict=True):
        plain, planned, _budget = labels(ax)
        assert plain.startswith("without remat")
        assert planned == f"planned: peak {format_bytes(peak)}"
    assert plan.trace.peak_bytes[1] > 0
    assert labels(second)[0] == "without remat: peak 0 B"
    assert horizontal_lines(second) == [pytest.approx(1)]


def test_graph_is_drawn_alone() -> None:
    ax = memory_timeline(GRAPH)
    assert [text.split(":")[0] for text in labels(ax)] == ["without remat"]
    assert not horizontal_lines(ax)


def test_given_axes_are_drawn_on() -> None:
    ax = Figure().subplots()
    assert memory_timeline(PLAN, ax) is ax
    assert compare_timelines({}, ax=ax) is ax


@pytest.mark.parametrize(
    ("size_bytes", "unit"),
    [(1023, "bytes"), (1024, "KiB"), (5 * 2**20, "MiB"), (3 * 2**30, "GiB")],
)
def test_axis_is_in_the_largest_unit_that_fits(size_bytes: int, unit: str) -> None:
    ax = compare_timelines({"a": measured_timeline([(0, size_bytes), (1, 0)])})
    assert ax.get_ylabel() == f"memory ({unit})"


@pytest.mark.parametrize(
    ("end_ns", "unit"), [(999, "ns"), (1000, "us"), (10**6, "ms"), (10**9, "s")]
)
def test_time_is_in_the_largest_unit_that_fits(end_ns: int, unit: str) -> None:
    ax = compare_timelines({"a": measured_timeline([(0, 1), (end_ns, 1)])})
    assert ax.get_xlabel() == f"time ({unit})"


def test_nothing_is_drawn_without_complaint() -> None:
    compare_timelines({"a": Timeline(points=(), end_ns=0)}, budget_bytes=7)


def test_curve_shows_every_plan_and_the_plain_step() -> None:
    plans = trade_off(GRAPH, 4)
    ax = trade_off_curve(plans)
    points = next(line for line in ax.get_lines() if line.get_label() == "planned")
    assert xs_of(points) == [p.peak_bytes / KIB for p in plans]
    assert ys_of(points) == [1 + p.overhead for p in plans]
    plain = next(line for line in ax.get_lines() if line.get_label() == "without remat")
    assert xs_of(plain) == [plans[0].baseline_peak_bytes / KIB]


def test_a_curve_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one plan"):
        trade_off_curve([])


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_the_same_picture_is_the_same_file(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path in paths:
        save_figure(memory_timeline(PLAN), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_each_format_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"memory.{suffix}"
    save_figure(memory_timeline(PLAN), path)
    start = path.read_bytes()[:8]
    assert {
        "png": start == PNG,
        "pdf": start[:4] == b"%PDF",
        "svg": start[:2] == b"<?",
    }[suffix]


def test_curve_renders(tmp_path: Path) -> None:
    save_figure(trade_off_curve(trade_off(GRAPH, 3)), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:8] == PNG


@pytest.mark.parametrize("name", ["memory", "memory.txt", "memory.png.bak"])
def test_an_unknown_format_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"end it with \.png, \.pdf, \.svg"):
        save_figure(memory_timeline(PLAN), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot write"):
        save_figure(memory_timeline(PLAN), tmp_path / "missing" / "memory.png")


def test_no_figure_is_kept_open() -> None:
    memory_timeline(PLAN)
    trade_off_curve([PLAN])
    assert not plt.get_fignums()
