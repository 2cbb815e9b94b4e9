"""The study of a model on the meta device: a line, and a row for the whole model."""

import json
from pathlib import Path

import pytest
from studies.meta import main, meta_table


def test_a_line_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # What the head takes fits 80 % of all layers' peak, and not of one's.
    monkeypatch.setattr("studies.meta.BUDGET", "100%")
    assert main(["--child", "--layers", "1", "--results", str(tmp_path)]) == 0
    path = tmp_path / "meta.jsonl"
    line = json.loads(path.read_text(encoding="utf-8"))
    assert line["peak_bytes"] <= line["budget_bytes"]
    assert line["process_bytes"] > 0
    assert "billion" not in meta_table(path)
    monkeypatch.setattr("studies.meta.LAYERS", 1)
    assert f"| {line['ops']} |" in meta_table(path)
