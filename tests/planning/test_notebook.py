"""Plans in a notebook, and the short texts of objects that hold much."""

import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.instances import mlp_chain, transformer_like

from remat.core.graph import TrainingGraph
from remat.core.platform import Device, Link, MeasuredCosts, Platform
from remat.core.problem import Problem
from remat.core.timelines import Timeline, replayed_timeline
from remat.core.units import format_bytes
from remat.planning.notebook import memory_picture
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import Plan
from remat.planning.portfolio import solve
from remat.planning.several_devices import plan_on_devices
from remat.profile.memory import Measurement
from remat.solvers import StoreAll

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    graph = transformer_like().graph
    return plan_graph(graph, budget=plain_peak_bytes(graph) * 7 // 10)


@pytest.fixture(scope="module")
def plan_of_two() -> Plan:
    graph = mlp_chain(2).graph
    devices = (Device(name="cpu"), Device(name="cpu:1"))
    links = tuple(
        Link(source=a, target=1 - a, bytes_per_s=10**9, latency_ns=0) for a in (0, 1)
    )
    platform = Platform(devices=devices, links=links)
    half = plain_peak_bytes(graph) * 3 // 4
    budgets = {"cpu": half, "cpu:1": None}
    return plan_on_devices(graph, platform, budgets)


class TestShortTexts:
    def test_a_plan_is_one_line_with_its_figures(self, plan: Plan) -> None:
        text = repr(plan)
        assert "\n" not in text
        assert len(text) < 300
        for figure in (plan.peak_bytes, plan.budget_bytes, plan.baseline_peak_bytes):
            assert format_bytes(figure or 0) in text
        assert f"{plan.recomputed_op_count} of {len(plan.graph.ops)} ops" in text
        assert plan.graph.name in text

    def test_a_plan_without_a_limit_says_so(self, plan: Plan) -> None:
        free = replace(
            plan,
            platform=plan.platform.with_budgets(dict.fromkeys(plan.platform.names)),
        )
        assert "no budget" in repr(free)

    def test_a_plan_for_several_devices_names_them(self, plan_of_two: Plan) -> None:
        text = repr(plan_of_two)
        assert "peak of cpu " in text
        assert "peak of cpu:1 " in text
        assert "\n" not in text

    @pytest.mark.parametrize("layer_count", [2, 40])
    def test_size_does_not_grow_with_the_graph(self, layer_count: int) -> None:
        graph = mlp_chain(layer_count).graph
        plan = plan_graph(graph, budget="100%")
        problem = Problem(graph=graph, platform=plan.platform)
        result = solve(problem, StoreAll())
        timeline = replayed_timeline(graph, plan.platform, plan.schedule)
        shown = [
            plan, graph, plan.schedule, plan.trace, problem, result, timeline,
            MeasuredCosts(),
        ]  # fmt: skip
        for each in shown:
            assert "\n" not in repr(each)
            assert len(repr(each)) < 1000
            assert type(each).__name__ in repr(each)

    def test_a_measurement_does_not_print_its_timeline(self) -> None:
        points = tuple((time_ns, 1) for time_ns in range(10_000))
        measured = Measurement(
            device="cpu",
            peak_bytes=1,
            baseline_bytes=0,
            final_bytes=0,
            allocated_peak_bytes=None,
            reserved_peak_bytes=None,
            time_ns=None,
            times_ns=(),
            timeline=points,
        )
        assert len(repr(measured)) < 300
        assert "peak_bytes=1" in repr(measured)

    def test_what_is_counted_is_true(self, plan: Plan) -> None:
        graph, schedule = plan.graph, plan.schedule
        assert f"{len(graph.ops)} ops, {len(graph.storages)} storages" in repr(graph)
        runs, ops = len(schedule.computes), len(set(schedule.computes))
        assert runs > ops
        assert f"{runs} runs of {ops} ops" in repr(schedule)
        assert f"peak_bytes={plan.trace.peak_bytes}" in repr(plan.trace)


class _Tags(HTMLParser):
    """Checks that every tag that opens closes, in order, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def named(plan: Plan, name: str) -> Plan:
    graph: TrainingGraph = replace(plan.graph, name=name)
    return replace(plan, graph=graph)


class TestNotebook:
    def test_the_table_holds_what_the_text_says(self, plan: Plan) -> None:
        tags = _Tags()
        tags.feed(plan._repr_html_())
        tags.close()
        assert not tags.open
        assert {"table", "svg", "path"} <= tags.seen
        shown = "".join("".join(tags.text).split())
        for line in str(plan).splitlines():
            assert "".join(line.rstrip(":").split()) in shown

    def test_it_is_well_formed_and_has_a_picture_for_each_device(
        self, plan: Plan, plan_of_two: Plan
    ) -> None:
        for each, count in ((plan, 1), (plan_of_two, 2)):
            root = ET.fromstring(each._repr_html_())
            pictures = root.findall(f".//{SVG}svg")
            assert len(pictures) == count
            labels = [picture.get("aria-label") or "" for picture in pictures]
            if count > 1:
                assert [label.split()[-1] for label in labels] == ["cpu", "cpu:1"]

    def test_names_are_escaped(self, plan: Plan) -> None:
        name = "<script>alert('a & b')</script>"
        root = ET.fromstring(named(plan, name)._repr_html_())
        assert root.find(".//script") is None
        assert name in "".join(root.itertext())

    def test_it_needs_no_torch_no_drawing_library_no_display(
        self, plan: Plan, tmp_path: Path
    ) -> None:
        plan.save(tmp_path / "plan.json")
        code = """
import sys
sys.modules["torch"] = None
sys.modules["matplotlib"] = None
import remat
assert "<svg" in remat.load_plan(sys.argv[1])._repr_html_()
"""
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "plan.json")],
            check=True,
            env={"PATH": ""},
        )


class TestPicture:
    @given(
        st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 2**50)), min_size=1),
        st.none() | st.integers(0, 2**50),
    )
    def test_every_curve_reaches_its_peak_and_stays_inside(
        self, drawn: list[tuple[int, int]], budget_bytes: int | None
    ) -> None:
        points = tuple(sorted(drawn))
        timeline = Timeline(points=points, end_ns=points[-1][0], boundary_ns=0)
        text = memory_picture("", {"planned": timeline}, budget_bytes=budget_bytes)
        path = ET.fromstring(text).findall(f".//{SVG}path[@stroke='#0072b2']")
        (line,) = [p for p in path if p.get("fill") == "none"]
        steps = (line.get("d") or "").split("H")
        heights = [float(step.split("V")[1]) for step in steps[1:]]
        columns = [int(step.split("V")[0]) for step in steps[1:]]
        top_bytes = max(timeline.peak_bytes, budget_bytes or 0, 1)
        assert min(heights) == round(180 * (1 - timeline.peak_bytes / top_bytes), 1)
        assert all(0 <= height <= 180 for height in heights)
        assert columns == sorted(set(columns))
        assert 0 <= columns[0] <= columns[-1] <= 560

    def test_a_long_step_has_a_small_picture(self) -> None:
        points = tuple((time_ns, time_ns % 97) for time_ns in range(100_000))
        timeline = Timeline(points=points, end_ns=100_000)
        text = memory_picture("", {"planned": timeline}, budget_bytes=None)
        assert len(text) < 30_000
