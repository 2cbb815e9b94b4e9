"""The study of planning times: a line and a row for each model."""

import json
from pathlib import Path

import pytest
from studies.planning_time import main, planning_time_table


def test_a_line_and_a_row_for_each_model(tmp_path: Path):
    words = ["--tiny", "--models", "vgg19", "--budget", "97%"]
    assert main([*words, "--results", str(tmp_path)]) == 0
    path = tmp_path / "planning_time.jsonl"
    line = json.loads(path.read_text(encoding="utf-8"))
    phases = ("capture_s", "profile_s", "solve_s", "install_s")
    assert line["planning_s"] == pytest.approx(sum(line[p] for p in phases), abs=0.05)
    assert line["capture_s"] > 0
    assert line["cost_ns"] >= line["bound_ns"]
    # The small variants are for tests only.
    assert "vgg19" not in planning_time_table(path)
    path.write_text(json.dumps({**line, "tiny": False}), encoding="utf-8")
    assert f"| vgg19 | {line['ops']} |" in planning_time_table(path)


def test_a_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("studies.planning_time._LIMIT_S", 0)
    assert main(["--tiny", "--models", "gpt2", "--results", str(tmp_path)]) == 1
