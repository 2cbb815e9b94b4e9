"""``remat plan --device``: what a step takes on cards that are not here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from remat.cli import main
from remat.cli.base import ExitCode
from remat.files.hardware import hardware_named, save_hardware
from remat.planning.plan import load_plan

SCRIPT = """
import torch
from torch import nn

def remat_workload():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        return model, torch.empty(512, 64)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_several_devices_are_one_table(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "l4", "--device", "b200", "--autocast", "bf16", "--quiet"]
    assert main(["plan", str(script), *words]) == ExitCode.OK
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["device", "l4", "b200"]
    assert main(["plan", str(script), "--device", "l4", "--json", "--quiet"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["devices"]
    assert (row["device"], row["fits"]) == ("l4", "yes")


def test_a_budget_or_a_file_to_write_makes_a_plan(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(script), "--device", "l4", "--quiet"]
    assert main([*words, "--budget", "100%", "--output", "plan.json"]) == ExitCode.OK
    assert "plan for Sequential" in capsys.readouterr().out
    assert load_plan("plan.json").settings["device"] == "l4"


def test_a_device_that_is_too_small_is_no_fault(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(hardware_named("l4"), memory_bytes=200_000, context_bytes=0)
    save_hardware("tiny.json", tiny)
    words = ["plan", str(script), "--device", "tiny.json", "--quiet"]
    assert main(words) == ExitCode.INFEASIBLE
    assert "  no  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "h9000"], "--device: there is no device 'h9000'"),
        (["--device", "l4", "--device", "b200", "--budget", "1GiB"], "given 2 times"),
        (["--autocast", "bf16", "--budget", "1GiB"], "--autocast is for --device"),
        (["--device", "l4", "--budget", "99GiB"], "the budget is 99.00 GiB, but l4"),
    ],
)
def test_mistakes_get_one_line(
    script: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["plan", str(script), *words, "--quiet"]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_graph_file_has_its_own_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--graph", "g.json", "--device", "l4"]) == ExitCode.USAGE
    assert "--device has no effect with --graph" in capsys.readouterr().err
