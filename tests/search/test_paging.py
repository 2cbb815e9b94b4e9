"""Paging: everything runs once, within budgets that come close to the largest op."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device_schedules import logical
from tests.instances import mlp_chain, resnet_like

from remat.core.bounds import peak_bound_bytes
from remat.core.device_graph import arrange, place_graph
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.core.schedule import Compute, Copy
from remat.planning.one_device import plain_peak_bytes
from remat.planning.smallest_budget import smallest_budget
from remat.search.paging import paged, smallest_paged

GRAPHS = {"mlp": mlp_chain(8).graph, "resnet": resnet_like(6).graph}


def machine(
    graph: TrainingGraph, home_bytes: int | None, host_bytes: int | None = None
) -> tuple[TrainingGraph, Platform]:
    budgets = [home_bytes, host_bytes]
    platform = arrange(logical("cpu", "host", budgets_bytes=budgets), 0)
    return place_graph(graph, platform), platform


@pytest.mark.parametrize("name", GRAPHS)
@settings(max_examples=40)
@given(st.integers(0, 120))
def test_every_budget_is_kept_and_every_op_runs_once(name: str, percent: int) -> None:
    bound_bytes = peak_bound_bytes(GRAPHS[name])
    whole_bytes = plain_peak_bytes(GRAPHS[name])
    budget_bytes = bound_bytes + (whole_bytes - bound_bytes) * percent // 100
    graph, platform = machine(GRAPHS[name], budget_bytes)
    found = paged(graph, platform)
    if found is None:
        # Not by much: it is a rule of thumb, not an optimum.
        least = smallest_paged(graph, platform, whole_bytes)
        assert least is not None
        assert budget_bytes < 1.02 * least[1].peak_bytes[0]
        return
    schedule, trace = found
    assert trace.is_valid
    assert trace.peak_bytes[0] <= budget_bytes
    assert sorted(schedule.computes) == list(range(len(graph.ops)))
    assert {s.device for s in schedule.steps if isinstance(s, Compute)} == {0}
    copies = [step for step in schedule.steps if isinstance(step, Copy)]
    assert bool(copies) is (percent < 100)


def test_less_is_needed_than_by_recomputation_alone() -> None:
    graph, platform = machine(GRAPHS["resnet"], None)
    floor_bytes = smallest_budget(GRAPHS["resnet"]).budget_bytes
    found = smallest_paged(graph, platform, floor_bytes)
    assert found is not None
    assert peak_bound_bytes(graph) <= found[1].peak_bytes[0] < floor_bytes
    assert smallest_paged(graph, platform, found[1].peak_bytes[0] // 2) is None


def test_without_room_elsewhere_there_is_no_schedule() -> None:
    graph, platform = machine(GRAPHS["mlp"], None)
    found = smallest_paged(graph, platform, 2**40)
    assert found is not None
    home, host = found[1].peak_bytes
    assert paged(*machine(GRAPHS["mlp"], home, host)) is not None
    assert paged(*machine(GRAPHS["mlp"], home, host // 2)) is None
    assert paged(*machine(GRAPHS["mlp"], home // 4, None)) is None


def test_what_stores_must_be_linked_in_both_directions() -> None:
    graph, platform = machine(GRAPHS["mlp"], None)
    one_way = Platform(devices=platform.devices, links=platform.links[:1])
    assert paged(graph, one_way) is None
