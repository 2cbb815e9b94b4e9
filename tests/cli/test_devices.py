"""The remat command with several devices: budgets, platforms, what is printed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.device_schedules import HandMadeSplit, logical
from tests.instances import mlp_chain

from remat.cli import main
from remat.core.units import format_bytes
from remat.files.serialisation import load_platform, save_graph, save_platform
from remat.planning.plan import load_plan
from remat.solvers import registry

SCRIPT = str(Path(__file__).parent / "workloads.py")
BUDGETS = ["--budget", "cpu=1MB", "--budget", "cpu:1=none"]


@pytest.fixture(autouse=True)
def _hand_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "AUTO_DEVICES", (HandMadeSplit,))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a graph and a platform."""
    save_graph(tmp_path / "graph.json", mlp_chain(4).graph)
    save_platform(tmp_path / "machine.json", logical("cpu", "cpu:1", "host"))
    return tmp_path


def test_a_graph_is_planned_on_a_platform(files: Path, capsys: Any) -> None:
    words = ["plan", "--graph", str(files / "graph.json")]
    words += ["--platform", str(files / "machine.json"), "--budget", "host=none"]
    words += [*BUDGETS, "--output", str(files / "plan.json")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "  devices       cpu: peak " in text
    assert "                host: peak 0 B of any size, runs nothing\n" in text
    assert "  copies        cpu to cpu:1: " in text
    plan = load_plan(files / "plan.json")
    assert plan.platform.names == ("cpu", "cpu:1", "host")
    assert main(["show", str(files / "plan.json"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [device["name"] for device in facts["devices"]] == ["cpu", "cpu:1", "host"]
    assert facts["copies"][0]["copy_count"] == plan.link_uses[0].copy_count


def test_a_plan_and_its_schedule_are_drawn(files: Path, capsys: Any) -> None:
    plan, steps = str(files / "plan.json"), str(files / "steps.json")
    words = ["plan", "--graph", str(files / "graph.json"), *BUDGETS]
    words += ["--platform", str(files / "machine.json"), "--budget", "host=none"]
    assert main([*words, "--output", plan, "--save-schedule", steps]) == 0
    drawn = files / "memory.svg"
    assert main(["show", plan, "--timeline", str(drawn)]) == 0
    pictured = drawn.read_text(encoding="utf-8")
    assert all(f"memory on {name} " in pictured for name in ("cpu", "cpu:1", "host"))
    capsys.readouterr()
    assert main(["show", steps, "--graph", plan, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    peaks = load_plan(plan).trace.peak_bytes
    assert list(facts["peak_bytes_by_device"].values()) == list(peaks)
    assert facts["violation"] is None
    again = files / "again.svg"
    assert main(["show", steps, "--graph", plan, "--timeline", str(again)]) == 0
    assert (
        f"peak          cpu {format_bytes(peaks[0])}, cpu:1 " in capsys.readouterr().out
    )
    assert again.is_file()
    assert main(["show", steps, "--graph", str(files / "graph.json")]) == 2
    error = capsys.readouterr().err
    assert "uses devices 0 to 1" in error
    assert "--graph plan.json" in error


@pytest.mark.parametrize("source", [["--graph", "graph.json"], [SCRIPT, "--estimated"]])
def test_a_curve_is_of_the_first_device(
    files: Path, source: list[str], capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(files)
    save_platform("two.json", logical("cpu", "host", budgets_bytes=(None, 10**8)))
    words = ["curve", *source, "--platform", "two.json", "--points", "2"]
    assert main([*words, "--plot", "curve.svg", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "on cpu" in text
    assert "on host" in text
    assert "at once" in text
    assert "peak memory on cpu" in Path("curve.svg").read_text(encoding="utf-8")
    assert main([*words, "--budget", "host=1B", "--json", "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out)
    devices = [point["devices"] for point in facts["points"]]
    assert [[d["name"] for d in each] for each in devices] == [["cpu", "host"]] * 2
    assert {each[1]["budget_bytes"] for each in devices} == {1}
    assert facts["points"][0]["peak_bytes"] < facts["points"][1]["peak_bytes"]
    assert facts["points"][1]["overlapped_ns"] == facts["baseline_cost_ns"]


def test_a_model_is_fitted_and_measured(files: Path, capsys: Any) -> None:
    saved = str(files / "plan.json")
    assert main(["fit", SCRIPT, *BUDGETS, "--save", saved, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    cpu, other = facts["trained"]["devices"]
    assert cpu["measured_bytes"] <= cpu["budget_bytes"] == 1_000_000
    assert 0 < other["measured_bytes"] <= other["predicted_bytes"]
    assert main(["fit", SCRIPT, "--plan", saved, "--steps", "2", "--quiet"]) == 0
    assert "  peak          cpu:1: " in capsys.readouterr().out


def test_a_model_is_verified(files: Path, capsys: Any) -> None:
    platform = ["--platform", str(files / "machine.json"), "--budget", "host=9MB"]
    words = ["verify", SCRIPT, *BUDGETS, *platform, "--repeats", "1", "--quiet"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "  devices     cpu: " in text
    assert ": kept\n" in text
    assert "bitwise equal to the captured step without remat" in text


def test_a_platform_is_measured_and_written(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "machine.json"
    words = ["profile-platform", "--device", "cpu", "--device", "cpu:1"]
    words += ["--device", "host", "--budget", "cpu=1GB", "--time-percent", "cpu:1=250"]
    assert main([*words, "--output", str(file), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "planned with 250 % of the time" in text
    assert "  host: no budget; stores only" in text
    platform = load_platform(file)
    assert platform.names == ("cpu", "cpu:1", "host")
    assert platform.kind_of(1).time_percent == 250
    assert [device.budget_bytes for device in platform.devices] == [10**9, None, None]
    assert len(platform.links) == 6
    assert all(10**6 < link.bytes_per_s < 10**13 for link in platform.links)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", SCRIPT, "--budget", "1MB", "--budget", "2MB"], "one of 2 budgets"),
        (["plan", SCRIPT, "--budget", "a=1MB", "--budget", "a=2MB"], "one of 2"),
        (["plan", SCRIPT, "--budget", "=1MB"], "each names a device of its own"),
        (["plan", SCRIPT, "--budget", "cpu=1apple"], "device 'cpu': unknown unit"),
        (["plan", SCRIPT, "--budget", "a=1MB", "--budget", "b=1MB"], "device 'a'"),
        (["plan", SCRIPT, "--platform", "absent.json"], "cannot read 'absent.json'"),
        (["plan", SCRIPT, "--platform", "graph.json"], "a platform is needed"),
        (["plan", SCRIPT], "give --budget SIZE"),
        (["verify", SCRIPT], "give --budget SIZE"),
        (["fit", SCRIPT], "give --budget SIZE or --plan FILE"),
        (["curve", SCRIPT, "--budget", "host=1MB"], "the budgets of the curve are"),
        (["curve", SCRIPT, "--platform", "machine.json", "--budget", "5"], "--budgets"),
        (
            ["curve", "--graph", "graph.json", "--platform", "machine.json"],
            "device 'cpu:1' of the platform has no budget",
        ),
        (["profile-platform", "--budget", "1GB"], "names no device"),
        (["profile-platform", "--device", "x"], "unknown device 'x'"),
        (["profile-platform", "--time-percent", "cpu"], "is not DEVICE=PERCENT"),
        (["profile-platform", "--time-percent", "cpu=0"], "is not DEVICE=PERCENT"),
    ],
    ids=lambda value: (
        " ".join(value[:1] + value[2:]) if isinstance(value, list) else ""
    ),
)
def test_one_message_and_exit_code_2(
    files: Path, words: list[str], message: str, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len([line for line in error.splitlines() if "error" in line]) == 1
    assert sorted(files.iterdir()) == before


def test_below_the_floor_is_exit_code_1(files: Path, capsys: Any) -> None:
    words = ["plan", "--graph", str(files / "graph.json"), "--json", "--quiet"]
    words += ["--platform", str(files / "machine.json")]
    budgets = [f"--budget={name}=1kB" for name in ("cpu", "cpu:1", "host")]
    assert main([*words, *budgets]) == 1
    facts = json.loads(capsys.readouterr().out)["error"]
    assert facts["required_bytes"] > facts["budget_bytes"] == 1000
    assert set(facts["required_by_device"]) <= {"cpu", "cpu:1", "host"}
