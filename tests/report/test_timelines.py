"""The numbers that figures draw."""

from dataclasses import replace

from hypothesis import given
from tests.instances import mlp_chain
from tests.strategies import graphs

from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Device, Link, Platform, single_device
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule
from remat.core.simulator import simulate
from remat.planning.one_device import plan_graph
from remat.report.timelines import (
    Timeline,
    measured_timeline,
    plain_timeline,
    plain_timelines,
    planned_timeline,
    replayed_timeline,
)


def op(name: str, reads, writes, phase: Phase, cost_ns: int, workspace: int = 0) -> Op:
    return Op(
        name=name,
        reads=reads,
        writes=writes,
        cost_ns=(cost_ns,),
        workspace_bytes=(workspace,),
        phase=phase,
    )


GRAPH = TrainingGraph(
    name="one layer",
    storages=(
        Storage(name="x", size_bytes=100, is_resident=True),
        Storage(name="activation", size_bytes=8),
        Storage(name="gradient", size_bytes=4),
    ),
    ops=(
        op("forward", (0,), (1,), Phase.FORWARD, 5, workspace=3),
        op("backward", (1,), (2,), Phase.BACKWARD, 7),
    ),
    final_outputs=(2,),
)
STEPS = (Compute(0), Boundary(), Compute(1), Discard(1))


def test_timeline_by_hand() -> None:
    timeline = replayed_timeline(GRAPH, single_device(), Schedule(STEPS))
    assert timeline.points == ((0, 111), (5, 108), (5, 112), (12, 112))
    assert timeline.end_ns == 12
    assert timeline.boundary_ns == 5
    assert timeline.peak_bytes == 112
    assert timeline.peak_ns == 5


def test_a_copy_takes_the_time_of_its_link() -> None:
    platform = Platform(
        devices=(Device(), Device()),
        links=(Link(source=0, target=1, bytes_per_s=10**9, latency_ns=2),),
    )
    steps = (Compute(0), Copy(1, 0, 1), *STEPS[1:])
    timeline = replayed_timeline(GRAPH, platform, Schedule(steps))
    assert timeline.end_ns == 12 + 2 + 8


def test_each_device_has_a_timeline_of_its_own() -> None:
    platform = Platform(
        devices=(Device(name="a"), Device(name="b")),
        links=(
            Link(source=0, target=1, bytes_per_s=10**9),
            Link(source=1, target=0, bytes_per_s=10**9),
        ),
    )
    steps = (
        Compute(0),
        Copy(1, 0, 1),
        Discard(1),
        Boundary(),
        Copy(1, 1, 0),
        Discard(1, 1),
        Compute(1),
    )
    here, there = (
        replayed_timeline(GRAPH, platform, Schedule(steps), device) for device in (0, 1)
    )
    assert here.points == (
        *((0, 111), (5, 108), (13, 108), (13, 100)),
        *((13, 108), (21, 108), (21, 112)),
    )
    assert there.points == (
        *((0, 0), (5, 8), (13, 8), (13, 8)),
        *((13, 8), (21, 8), (21, 0)),
    )
    assert here.end_ns == there.end_ns == 28
    assert here.boundary_ns == there.boundary_ns == 13


def test_without_remat_everything_is_on_the_first_device() -> None:
    storages = (*GRAPH.storages, Storage(name="far", size_bytes=9, is_resident=True))
    graph = replace(GRAPH, storages=(*storages[:3], replace(storages[3], home=1)))
    platform = Platform(devices=(Device(name="a"), Device(name="b")))
    timelines = plain_timelines(graph, platform)
    assert timelines is not None
    here, there = timelines
    assert (here.peak_bytes, here.end_ns) == (112, 12)
    assert (there.peak_bytes, there.end_ns) == (9, 12)
    # Device 1 can run what device 0 cannot: then there is no such step.
    ops = tuple(
        replace(op, cost_ns=(cost, 1), workspace_bytes=(0, 0))
        for op, cost in zip(GRAPH.ops, (5, None), strict=True)
    )
    kinds = replace(GRAPH, ops=ops, device_kinds=("cpu", "gpu"))
    other = Platform(devices=(Device(kind="cpu"), Device(name="g", kind="gpu")))
    assert plain_timelines(kinds, other) is None


@given(graphs())
def test_timeline_agrees_with_the_judge(graph: TrainingGraph) -> None:
    platform = single_device(kind=graph.device_kinds[0])
    schedule = schedule_from_order(graph, store_all_order(graph))
    trace = simulate(graph, platform, schedule)
    timeline = plain_timeline(graph)
    assert timeline.end_ns == trace.serial_ns
    assert timeline.peak_bytes == trace.peak_bytes[0]
    times = [time_ns for time_ns, _ in timeline.points]
    assert times == sorted(times)


def test_planned_timeline_is_that_of_the_plan() -> None:
    graph = mlp_chain(6).graph
    plan = plan_graph(graph, budget="75%")
    timeline = planned_timeline(plan)
    assert timeline.end_ns == plan.cost_ns > plain_timeline(graph).end_ns
    assert timeline.peak_bytes == plan.peak_bytes < plain_timeline(graph).peak_bytes


def test_measured_points_are_kept() -> None:
    timeline = measured_timeline([(0, 5), (3, 9), (10, 5)])
    assert (timeline.peak_bytes, timeline.peak_ns, timeline.end_ns) == (9, 3, 10)
    assert timeline.boundary_ns is None


def test_nothing_measured_is_a_timeline_of_nothing() -> None:
    assert measured_timeline([]) == Timeline(points=(), end_ns=0)
    assert measured_timeline([]).peak_bytes == 0
