"""``remat check``: confirms what is so, refuses what is not, and asks no solver."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.instances import INSTANCES

from remat.cli import main
from remat.planning.one_device import plan_graph
from remat.planning.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_graph(INSTANCES["unet"]().graph, budget="60%")


@pytest.fixture
def path(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def test_what_is_so_is_confirmed_without_a_solver(
    plan: Plan, path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a solver was asked")

    monkeypatch.setattr("remat.bounds.time_bound.row_multipliers", fail)
    assert main(["check", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"valid: {len(plan.schedule.steps)} steps replayed" in text
    assert "6 moments and " in text
    assert text.endswith(f"so            {plan.distance}\n")
    assert main(["check", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["is_valid"] is True
    assert facts["floor_ns"] == facts["proved_ns"] == plan.floor_ns
    assert facts["gap"] == plan.gap


def test_without_a_certificate_every_op_runs_once(plan: Plan, capsys, tmp_path) -> None:
    path = tmp_path / "plan.json"
    replace(plan, certificate=None).save(path)
    assert main(["check", str(path)]) == 0
    assert "(every op runs once at least)" in capsys.readouterr().out


def corrupted(document: dict[str, dict[str, object]], what: str) -> None:
    """Make a plan's file claim what is not so."""
    payload = document["payload"]
    certificate = payload["certificate"]
    assert isinstance(certificate, dict)
    match what:
        case "claim":
            certificate["bound_ns"] += 1
        case "memory":
            certificate["memory_bytes"] -= 1
        case "moment":
            certificate["moments"] = certificate["moments"][::-1]
        case "multiplier":
            certificate["multipliers"][0] *= -1
        case "row":
            certificate["rows"][-1] = 10**9
        case "version":
            certificate["version"] += 1
        case _:
            steps = payload["schedule"]
            assert isinstance(steps, dict)
            steps["steps"] = steps["steps"][1:]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("claim", "is said to prove"),
        ("memory", "is proved for"),
        ("moment", "moment"),
        ("multiplier", "must be at least 0"),
        ("row", "rows ascend"),
        ("version", "plan again"),
        ("schedule", "schedule is not valid"),
    ],
)
def test_what_is_not_so_is_exit_code_4(
    path: Path, capsys, what: str, words: str
) -> None:
    document = json.loads(path.read_text())
    corrupted(document, what)
    path.write_text(json.dumps(document))
    assert main(["check", str(path)]) == 4
    assert words in capsys.readouterr().err
    assert main(["check", str(path), "--json"]) == 4
    facts = json.loads(capsys.readouterr().out)
    assert facts["is_valid"] is False
    assert words in facts["message"]


def test_what_is_no_plan_is_exit_code_2(path: Path, capsys) -> None:
    document = json.loads(path.read_text())
    document["payload"]["certificate"]["rows"] = [1]
    path.write_text(json.dumps(document))
    assert main(["check", str(path)]) == 2
    assert "multipliers are" in capsys.readouterr().err
