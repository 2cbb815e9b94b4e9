"""Graphs whose storages are at home on several devices: planned, or refused rightly."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.device_schedules import logical
from tests.instances import mlp_chain

from remat import cli
from remat.core.errors import BudgetError, InvalidPlatformError
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.files.serialisation import save_graph, save_platform
from remat.planning.curve import trade_off_on_devices
from remat.planning.one_device import plain_peak_bytes, plan_graph

PLAIN = mlp_chain(4).graph
PAIR = logical("cpu", "cpu:1")


def spread(graph: TrainingGraph = PLAIN, device: int = 1) -> TrainingGraph:
    """Return the graph with every other parameter at home on another device."""
    residents = [i for i, s in enumerate(graph.storages) if s.is_resident]
    return replace(
        graph,
        storages=tuple(
            replace(storage, home=device) if index in residents[::2] else storage
            for index, storage in enumerate(graph.storages)
        ),
    )


def known_for_both(graph: TrainingGraph) -> TrainingGraph:
    return replace(
        graph,
        device_kinds=PAIR.names,
        ops=tuple(
            replace(
                op,
                cost_ns=op.cost_ns * 2,
                workspace_bytes=op.workspace_bytes * 2,
            )
            for op in graph.ops
        ),
    )


@pytest.mark.parametrize("graph", [spread(), known_for_both(spread())])
@pytest.mark.parametrize("budget", ["200%", "80%", 10**6, None])
def test_a_plan_has_everything_where_it_is_at_home(
    graph: TrainingGraph, budget: int | str | None
) -> None:
    plan = plan_graph(
        graph, budget=dict.fromkeys(PAIR.names, budget), platform=PAIR, time_limit=0.5
    )
    assert plan.trace.is_valid
    assert min(plan.trace.peak_bytes) > 0
    # What 100 % means: the step with everything on the first device.
    assert plan.baseline_peak_bytes == plain_peak_bytes(PLAIN)
    if budget == "80%":
        assert plan.budget_bytes == plain_peak_bytes(PLAIN) * 80 // 100
    assert "on cpu alone" in str(plan)


def test_below_what_is_needed_both_devices_are_named() -> None:
    graph = spread()
    budget = {"cpu": graph.resident_bytes(0) + 1, "cpu:1": graph.resident_bytes(1) + 1}
    with pytest.raises(BudgetError, match=r"on 'cpu', .* on 'cpu:1'; ") as refused:
        plan_graph(graph, budget=budget, platform=PAIR, time_limit=0.5)
    known = refused.value.required_by_device
    assert set(known) == {"cpu", "cpu:1"}
    plan = plan_graph(graph, budget=known, platform=PAIR, time_limit=5)
    assert all(
        peak <= known[name]
        for name, peak in zip(PAIR.names, plan.trace.peak_bytes, strict=True)
    )


@pytest.mark.parametrize(
    ("platform", "home", "words"),
    [
        (PAIR, 2, "has home device 2, but the platform has 2 devices, numbered from 0"),
        (None, 1, "is at home on device 1, but one device is planned for"),
        (logical("host", "cpu"), 1, "first device, 'host', .*; put 'cpu' first"),
    ],
)
def test_a_home_that_is_not_there(
    platform: Platform | None, home: int, words: str
) -> None:
    budget = dict.fromkeys(platform.names, 10**6) if platform else 10**6
    with pytest.raises(InvalidPlatformError, match=words):
        plan_graph(spread(device=home), budget=budget, platform=platform)


def test_a_curve_is_of_steps_at_one_home() -> None:
    words = (
        r"on 'cpu' alone, but storage .* is at home on device 1; plan for one budget"
    )
    with pytest.raises(InvalidPlatformError, match=words):
        trade_off_on_devices(spread(), PAIR, 2, others={"cpu:1": None}, time_limit=1)


def test_the_command_plans_such_a_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, machine = tmp_path / "graph.json", tmp_path / "machine.json"
    save_graph(graph, spread())
    save_platform(machine, PAIR)
    words = ["plan", "--graph", str(graph), "--platform", str(machine), "--quiet"]
    words += ["--time-limit", "0.5", "--budget", "cpu=80%", "--budget", "cpu:1=80%"]
    assert cli.main(words) == 0
    assert "cpu:1: peak " in capsys.readouterr().out
