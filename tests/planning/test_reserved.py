"""Budgets of reserved bytes: kept on the model of the allocator, and said."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.instances import resnet_like, unet_like

from remat.core.allocator import MIB, AllocatorSettings
from remat.core.errors import BudgetError, InvalidPlatformError, PlanMismatchError
from remat.core.graph import TrainingGraph
from remat.core.platform import Device, DeviceAllocator, Link, Platform, single_device
from remat.files.serialisation import load_platform, save_platform
from remat.memory.requests import ReservedUse, reserved_use
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import Account, Plan, load_plan

RESNET = resnet_like(8, 33 * MIB).graph
UNET = unet_like(4, 37 * MIB).graph
SETTINGS = ("", "expandable_segments:True")


def caching(text: str = "") -> Platform:
    return single_device(None, "cpu", AllocatorSettings.parse(text))


def planned(
    graph: TrainingGraph, percent: int, text: str = "", account: Account | None = None
) -> Plan:
    return plan_graph(
        graph,
        budget=plain_peak_bytes(graph) * percent // 100,
        platform=caching(text),
        solver="greedy-eviction",
        account=account,
    )


def use_of(plan: Plan) -> ReservedUse:
    assert plan.reserved is not None
    return plan.reserved


@pytest.mark.parametrize("graph", [RESNET, UNET], ids=["resnet", "unet"])
@pytest.mark.parametrize("text", SETTINGS)
def test_what_the_allocator_reserves_is_within_the_budget(
    graph: TrainingGraph, text: str
) -> None:
    plan = planned(graph, 60, text)
    live = planned(graph, 60, text, "live")
    assert plan.account == "reserved"
    use = reserved_use(
        graph, plan.schedule, AllocatorSettings.parse(text), kind="cpu",
        primed_bytes=plan.primed_bytes,
    )  # fmt: skip
    assert use == plan.reserved
    assert plan.budget_bytes is not None
    assert use.reserved_bytes <= plan.budget_bytes
    # The plan for live bytes does not keep it: that is what the budget is for.
    assert use_of(live).reserved_bytes > plan.budget_bytes
    assert plan.cost_ns <= 1.05 * live.cost_ns


def test_little_more_is_reserved_than_is_live() -> None:
    for percent in (90, 60):
        default, grown = (planned(RESNET, percent, text) for text in SETTINGS)
        assert use_of(default).reserved_bytes <= 1.05 * default.peak_bytes
        assert use_of(grown).reserved_bytes <= 1.021 * grown.peak_bytes


def test_a_plan_says_what_is_reserved_and_what_would_help() -> None:
    plan = planned(UNET, 60)
    text = str(plan)
    assert ", of reserved bytes" in text
    assert "by the caching allocator" in text
    assert "default (PYTORCH_ALLOC_CONF)" in text
    assert "fragmentation costs +" in text
    assert "are allocated and freed before the first step" in text
    assert plan.summary()["reserved_bytes"] <= plan.summary()["budget_bytes"]
    live = planned(UNET, 60, account="live")
    assert ", of reserved bytes" not in str(live)
    assert "by the caching allocator" in str(live)
    plain = plan_graph(UNET, budget="60%", solver="greedy-eviction")
    assert plain.reserved is None
    assert "allocator" not in str(plain)


def test_the_share_of_a_budget_is_of_what_the_plain_step_reserves() -> None:
    plan = plan_graph(UNET, budget="100%", platform=caching())
    assert plan.budget_bytes == use_of(plan).reserved_bytes
    assert plan.cost_ns == plan.baseline_cost_ns


def test_an_error_names_what_is_reserved_and_the_setting_that_helps() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_graph(
            UNET,
            budget=220 * MIB,
            platform=caching(),
            solver="greedy-eviction",
        )
    error = caught.value
    assert error.required_bytes > error.budget_bytes == 220 * MIB
    again = plan_graph(
        UNET,
        budget=error.required_bytes,
        platform=caching(),
        solver="greedy-eviction",
    )
    assert use_of(again).reserved_bytes <= error.required_bytes


def test_a_plan_that_reserves_too_much_is_refused() -> None:
    live = planned(UNET, 60, account="live")
    with pytest.raises(PlanMismatchError, match="allocator reserves"):
        replace(live, account="reserved")
    with pytest.raises(PlanMismatchError, match="needs one device"):
        replace(live, account="reserved", platform=single_device(2**40))


def test_plans_and_platforms_are_files(tmp_path: Path) -> None:
    plan = planned(UNET, 60)
    plan.save(tmp_path / "plan.json")
    read = load_plan(tmp_path / "plan.json")
    assert (read.account, read.primed_bytes) == ("reserved", plan.primed_bytes)
    assert read.reserved == plan.reserved
    assert str(read) == str(plan)
    platform = caching("max_split_size_mb:128")
    save_platform(tmp_path / "platform.json", platform)
    assert load_platform(tmp_path / "platform.json") == platform
    text = (tmp_path / "platform.json").read_text()
    assert '"max_split_size_mb:128"' in text


def test_accounts_of_several_devices_and_those_that_cannot_be_kept() -> None:
    with pytest.raises(InvalidPlatformError, match="says of no device"):
        plan_graph(UNET, budget="60%", account="reserved")
    with pytest.raises(ValueError, match="'reserved', 'live'"):
        planned(UNET, 60, account=cast("Account", "both"))
    two = Platform(
        devices=(Device(name="cpu"), Device(name="host", kind="host")),
        links=(
            Link(source=0, target=1, bytes_per_s=10**9),
            Link(source=1, target=0, bytes_per_s=10**9),
        ),
        allocators=(DeviceAllocator(device="cpu"),),
    )
    with pytest.raises(InvalidPlatformError, match="several devices"):
        plan_graph(RESNET, budget={"cpu": "2 GiB"}, platform=two, account="reserved")
    plan = plan_graph(RESNET, budget={"cpu": "2 GiB", "host": "2 GiB"}, platform=two)
    assert use_of(plan).reserved_bytes >= plan.peak_bytes
    assert plan.reserved_uses[1] is None
    assert "by the caching allocator of cpu" in str(plan)
    for wrong, said in (
        ((DeviceAllocator(device="x"),), "called 'x'"),
        ((DeviceAllocator(device="cpu"),) * 2, "two allocators"),
    ):
        with pytest.raises(InvalidPlatformError, match=said):
            replace(single_device(), allocators=wrong)
