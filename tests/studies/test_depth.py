"""The study of deep models: a line and a row for each case."""

import json
from pathlib import Path

import pytest
from studies.depth import depth_table, main


def test_a_line_and_a_row_for_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("studies.depth.CASES", ((2, "blocks"),))
    words = ["--child", "--layers", "2", "--regions", "blocks"]
    assert main([*words, "--results", str(tmp_path)]) == 0
    path = tmp_path / "depth.jsonl"
    line = json.loads(path.read_text(encoding="utf-8"))
    assert line["peak_bytes"] <= line["budget_bytes"]
    assert line["cost_ns"] >= line["bound_ns"]
    assert f"| 2 | blocks | {line['ops']} |" in depth_table(path)


def test_a_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("studies.depth._LIMIT_S", 0)
    monkeypatch.setattr("studies.depth.CASES", ((2, "blocks"),))
    assert main(["--results", str(tmp_path)]) == 1
