"""Curves on several devices: the first one's budget varies, the others keep theirs."""

from dataclasses import replace
from functools import cache

import pytest
from tests.device_schedules import logical, placed
from tests.instances import mlp_chain

from remat.core.errors import InvalidPlatformError, SolverUnsuitableError, UnitError
from remat.planning.curve import trade_off, trade_off_on_devices
from remat.planning.one_device import plain_peak_bytes
from remat.planning.plan import Plan

GRAPH = mlp_chain(6).graph
PLATFORM = logical("cpu", "host", speed=10**9)
WHOLE_BYTES = plain_peak_bytes(GRAPH)


@cache
def curve(host: str) -> tuple[Plan, ...]:
    return trade_off_on_devices(
        GRAPH, PLATFORM, 4, others={"host": host}, solver="device-search", time_limit=1
    )


def test_from_the_smallest_known_budget_to_the_whole() -> None:
    plans = curve("1 MiB")
    budgets = [plan.budget_bytes or 0 for plan in plans]
    assert budgets == sorted(budgets)
    assert budgets[-1] == WHOLE_BYTES
    assert plans[-1].overhead == 0
    assert budgets[0] == plans[0].peak_bytes == plans[0].smallest_budget_bytes
    assert len(plans) >= 4


def test_more_is_never_slower_and_every_budget_is_kept() -> None:
    plans = curve("1 MiB")
    costs = [plan.cost_ns for plan in plans]
    peaks = [plan.peak_bytes for plan in plans]
    assert costs == sorted(costs, reverse=True)
    assert peaks == sorted(peaks)
    for plan in plans:
        assert plan.trace.is_valid
        assert plan.platform.devices[1].budget_bytes == 2**20
        assert plan.trace.peak_bytes[1] <= 2**20
        assert plan.bound_ns <= plan.cost_ns


def test_room_elsewhere_lets_the_first_device_do_with_less() -> None:
    alone = trade_off(GRAPH, 2)[0].peak_bytes
    assert curve("1 MiB")[0].peak_bytes < alone
    assert curve("1 B")[0].peak_bytes == alone


def test_budgets_are_sizes_or_shares_and_what_fits_nothing_is_left_out() -> None:
    plans = trade_off_on_devices(
        GRAPH,
        PLATFORM.with_budgets({"host": 2**20}),
        ["1 KiB", "100%", WHOLE_BYTES - 1],
        solver="device-search",
        time_limit=1,
    )
    smallest, *others = (plan.budget_bytes or 0 for plan in plans)
    assert smallest > 1024
    assert others == [WHOLE_BYTES - 1, WHOLE_BYTES]


def test_progress_names_every_budget() -> None:
    seen: list[tuple[str, float]] = []
    trade_off_on_devices(
        GRAPH,
        PLATFORM,
        ["100%"],
        others={"host": None},
        solver="store-all",
        progress=lambda what, share: seen.append((what, share)),
    )
    assert seen[0] == ("looking for the smallest budget", 0.0)
    assert seen[-1] == ("done", 1.0)
    assert [what.split()[0] for what, _ in seen[1:-1]] == ["planning", "planning"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        InvalidPlatformError, match="device 'host' of the platform has no"
    ):
        trade_off_on_devices(GRAPH, PLATFORM, 3)
    with pytest.raises(
        InvalidPlatformError, match="'cpu', but that is the one that var"
    ):
        trade_off_on_devices(GRAPH, PLATFORM, 3, others={"cpu": "1 MiB", "host": None})
    with pytest.raises(UnitError, match="got 1"):
        trade_off_on_devices(GRAPH, PLATFORM, 1, others={"host": None})
    with pytest.raises(SolverUnsuitableError, match="unknown solver 'best'"):
        trade_off_on_devices(GRAPH, PLATFORM, 3, others={"host": None}, solver="best")


def test_an_op_that_home_cannot_run_is_named() -> None:
    graph, platform = placed(GRAPH, logical("cpu", "slow"))
    first = replace(graph.ops[0], cost_ns=(None, 5))
    graph = replace(graph, ops=(first, *graph.ops[1:]))
    words = f"step on 'cpu' alone, but op 0 '{first.name}' cannot run there"
    with pytest.raises(InvalidPlatformError, match=words):
        trade_off_on_devices(graph, platform, 3, others={"slow": None})
