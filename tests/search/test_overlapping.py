"""Copies made to overlap: never slower, within the budgets, sometimes not at all."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.device_schedules import logical, offloading
from tests.instances import mlp_chain
from tests.strategies import Case, cases

from remat.core.device_graph import arrange, place_graph
from remat.core.platform import Platform
from remat.core.schedule import Compute, Copy
from remat.core.simulator import simulate
from remat.search.overlapping import overlapping

GRAPH = mlp_chain(8).graph


def offloaded(speed: int, room_percent: int | None = None) -> tuple[Platform, int, int]:
    """Return the platform, and the overlapped time before and after."""
    platform = arrange(logical("cpu", "host", speed=speed), 0)
    graph = place_graph(GRAPH, platform)
    schedule = offloading(graph, platform)
    before = simulate(graph, platform, schedule)
    if room_percent is not None:
        budgets = {"cpu": before.peak_bytes[0] * room_percent // 100}
        platform = platform.with_budgets(budgets)
    after = simulate(graph, platform, overlapping(graph, platform, schedule))
    assert after.is_valid
    assert before.overlapped_ns == before.serial_ns
    assert after.serial_ns <= before.serial_ns
    return platform, before.overlapped_ns, after.overlapped_ns


@pytest.mark.parametrize("room_percent", [100, 110, 130])
def test_offloading_overlaps_within_the_budget(room_percent: int) -> None:
    _, before_ns, after_ns = offloaded(10**9, room_percent)
    assert after_ns < before_ns


def test_what_need_not_leave_is_not_copied() -> None:
    platform = arrange(logical("cpu", "host"), 0)
    graph = place_graph(GRAPH, platform)
    schedule = overlapping(graph, platform, offloading(graph, platform))
    assert not any(isinstance(step, Copy) for step in schedule.steps)


@settings(max_examples=200, deadline=None)
@given(cases(is_mutated=False))
def test_any_schedule_stays_valid_and_is_no_slower(case: Case) -> None:
    platform = replace(case.platform, copies_wait=True)
    before = simulate(case.graph, platform, case.schedule)
    if not before.is_valid:
        return
    schedule = overlapping(case.graph, platform, case.schedule)
    after = simulate(case.graph, platform, schedule)
    assert after.is_valid
    assert after.overlapped_ns <= before.overlapped_ns
    assert after.serial_ns <= before.serial_ns
    computes = [step for step in case.schedule.steps if isinstance(step, Compute)]
    assert [step for step in schedule.steps if isinstance(step, Compute)] == computes
