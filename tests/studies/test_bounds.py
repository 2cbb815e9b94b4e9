"""The study of proved gaps: a line for each budget, and tables of them."""

import json
from pathlib import Path

import pytest
from studies.bounds import (
    CASES,
    bounds_table,
    gap_of,
    main,
    memory_table,
    summary_table,
)


def test_a_line_for_each_budget_and_tables_of_them(tmp_path: Path) -> None:
    words = ["--tiny", "--models", "vgg19", "--results", str(tmp_path)]
    assert main(words) == 0
    path = tmp_path / "bounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["case"] for line in lines] == list(CASES)
    planned = [line for line in lines if line["status"] == "ok"]
    assert planned
    for line in planned:
        assert line["boundary_ns"] <= line["moments_ns"] <= line["cost_ns"]
        assert 0 <= gap_of(line, "moments_ns") <= gap_of(line, "boundary_ns") < 1
        assert line["least_bytes"] <= line["smallest_bytes"]
    # The small variants are for tests only.
    assert "vgg19" not in bounds_table(path)
    path.write_text("\n".join(json.dumps({**line, "tiny": False}) for line in lines))
    assert bounds_table(path).count("| vgg19 (") == len(CASES)
    assert memory_table(path).count("| vgg19 |") == 1
    for line in lines:
        row = f"| {line['case']} | 1 |"
        assert (row in summary_table(path)) is (line["status"] == "ok")


def test_a_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.bounds._LIMIT_S", 0)
    assert main(["--tiny", "--models", "gpt2", "--results", str(tmp_path)]) == 1
