"""The study of what a call takes beyond the step: a line and rows for each depth."""

import json
from pathlib import Path

import pytest
from studies.switching import WAYS, main, switching_table


def test_a_line_and_rows_for_each_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("studies.switching.DEPTHS", (2,))
    assert main(["--turns", "2", "--results", str(tmp_path)]) == 0
    path = tmp_path / "switching.jsonl"
    line = json.loads(path.read_text(encoding="utf-8"))
    for way in WAYS:
        assert 0 < line[f"{way}_call_us"] < line[f"{way}_step_us"]
        assert f"| 2 | {way} |" in switching_table(path)
