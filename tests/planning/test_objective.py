"""The overlapped objective, asked for in Python and on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.cli import main
from remat.core.device_graph import fully_linked
from remat.core.errors import SolverUnsuitableError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.platform import Device, DeviceKind, Platform
from remat.core.problem import Objective
from remat.files.serialisation import save_graph, save_platform
from remat.planning.one_device import plan_graph
from remat.planning.plan import load_plan

READS = [(), (0,), (0,), (1,), (2,), (3, 4)]
BUDGETS = {"a": 20, "b": 20}


def branches() -> TrainingGraph:
    """Two branches of equal length: together they take half the time."""
    return TrainingGraph(
        name="branches",
        storages=tuple(Storage(name=f"s{i}", size_bytes=1) for i in range(6)),
        ops=tuple(
            Op(
                name=f"o{i}",
                reads=reads,
                writes=(i,),
                cost_ns=(100, 100),
                workspace_bytes=(0, 0),
                phase=Phase.FORWARD,
            )
            for i, reads in enumerate(READS)
        ),
        forward_outputs=(5,),
        device_kinds=("a", "b"),
    )


def pair(kinds: tuple[DeviceKind, ...] = ()) -> Platform:
    return Platform(
        devices=tuple(Device(name=name, kind=name) for name in BUDGETS),
        links=fully_linked(tuple(BUDGETS), 10**9, 0),
        kinds=kinds,
        copies_wait=bool(kinds),
    )


def test_the_overlapped_plan_lets_devices_work_together(tmp_path: Path):
    serial = plan_graph(branches(), budget=BUDGETS, platform=pair())
    plan = plan_graph(
        branches(),
        budget=BUDGETS,
        platform=pair(),
        objective=Objective.OVERLAPPED,
        time_limit=3,
    )
    assert (serial.cost_ns, serial.overlapped_ns) == (600, 600)
    # 100 on both, then 200 on each, 100 on one; and one copy.
    assert plan.overlapped_ns == 401
    assert plan.bound_ns <= 600 < plan.cost_ns
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    assert again.objective is Objective.OVERLAPPED
    assert serial.objective is Objective.SERIAL
    assert "objective" not in serial.settings


class Branches(nn.Module):
    """Two equal branches over one input."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (side(x) for side in self.sides)
        return (left + right).square().mean()


def test_a_model_is_planned_and_run_by_the_overlapped_objective(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    kinds = tuple(
        DeviceKind(
            name=name,
            runs_on="cpu",
            flops_per_s=10**9,
            bytes_per_s=10**10,
            launch_ns=1000,
        )
        for name in BUDGETS
    )
    platform = Platform(
        devices=(Device(name="cpu", kind="a"), Device(name="cpu:1", kind="b")),
        links=fully_linked(("cpu", "cpu:1"), 10**10, 100),
        kinds=kinds,
    )
    options: dict[str, Any] = {
        "platform": platform,
        "budget": {"cpu": "1 GiB", "cpu:1": "1 GiB"},
        "costs": "estimated",
        "time_limit": 2,
    }
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(256, 64)
    serial = remat.plan(model, x, **options)
    report = remat.verify(model, x, objective="overlapped", repeats=1, **options)
    assert report.is_exact
    plan = report.plan
    # Nearly all of the work can be shared; no plan for the serial time does it.
    assert plan.overlapped_ns < 0.7 * serial.overlapped_ns
    assert {use.run_count > 10 for use in plan.device_uses} == {True}


def test_one_device_has_no_overlapped_objective():
    model, x = Branches(), torch.randn(4, 64)
    for budget in ("90%", {"cpu": "90%"}):
        with pytest.raises(SolverUnsuitableError, match="there is one device; give"):
            remat.plan(model, x, budget=budget, objective="overlapped")
    with pytest.raises(SolverUnsuitableError, match="there is one device; give"):
        plan_graph(branches(), budget=20, objective=Objective.OVERLAPPED)


def test_solvers_of_the_serial_time_are_not_asked():
    for name in ("moccasin", "xengine-published"):
        with pytest.raises(SolverUnsuitableError, match=f"'{name}' knows the serial"):
            remat.plan(
                Branches(),
                torch.randn(4, 64),
                budget={"cpu": "1 GiB", "host": "1 GiB"},
                solver=name,
                objective="overlapped",
            )


def test_what_is_no_objective_is_refused():
    budget = {"cpu": "1 GiB", "host": "1 GiB"}
    model, x = Branches(), torch.randn(4, 64)
    with pytest.raises(ValueError, match="must be one of 'serial', 'overlapped'"):
        remat.plan(model, x, budget=budget, objective="parallel")  # pyright: ignore[reportArgumentType] - the mistake that is tested


def test_command_line(tmp_path: Path, capsys: Any):
    save_graph(tmp_path / "graph.json", branches())
    save_platform(tmp_path / "machine.json", pair())
    words = ["plan", "--graph", str(tmp_path / "graph.json"), "--json"]
    words += ["--time-limit", "3"]
    together = ["--platform", str(tmp_path / "machine.json")]
    together += ["--budget", "a=20", "--budget", "b=20"]
    times: dict[str, int] = {}
    for objective in ("serial", "overlapped"):
        assert main([*words, *together, "--objective", objective]) == 0
        times[objective] = json.loads(capsys.readouterr().out)["overlapped_ns"]
    assert times == {"serial": 600, "overlapped": 401}
    assert main([*words, "--budget", "20", "--objective", "overlapped"]) != 0
    assert "there is one device" in capsys.readouterr().err
