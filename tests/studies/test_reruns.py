"""The study of blocks that run again: a line and a row for each model."""

import json
from pathlib import Path

import pytest
from studies.reruns import main, reruns_table, resnet


def test_a_line_and_a_row_for_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("studies.reruns.MODELS", {"small": lambda: resnet((3,))})
    words = ["--child", "--models", "small", "--results", str(tmp_path)]
    assert main(words) == 0
    path = tmp_path / "reruns.jsonl"
    line = json.loads(path.read_text(encoding="utf-8"))
    assert line["smallest_bytes"] <= line["smallest_without_bytes"]
    assert line["measured_peak_bytes"] <= line["smallest_bytes"]
    assert line["unequal"] == line["unequal_to_captured"] == 0
    assert f"{line['compared']} of {line['compared']} |" in reruns_table(path)


def test_a_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("studies.reruns._LIMIT_S", 0)
    words = ["--models", "resnet50", "--results", str(tmp_path)]
    assert main(words) == 1
