"""The study of reserved bytes: a line for each budget and setting, and tables."""

import json
from pathlib import Path

import pytest
from studies.reserved import (
    SETTINGS,
    TEN,
    lines_of,
    reserved_table,
    summary_table,
)
from tests.instances import resnet_like

from remat.core.allocator import MIB
from studies import reserved


def test_a_line_for_each_budget_and_setting_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    percents = (90, 40)
    monkeypatch.setattr(reserved, "PERCENTS", percents)
    lines = lines_of(resnet_like(4, 33 * MIB).graph)
    assert [line["settings"] for line in lines] == [*SETTINGS] * len(percents)
    for line in lines:
        before, after = line["before"], line["after"]
        if before["status"] == "ok":
            assert before["live_bytes"] <= line["budget_bytes"]
            assert before["live_bytes"] <= before["reserved_bytes"]
            assert before["live_bytes"] <= 1.01 * line["arena_bytes"]
        if after["status"] == "ok":
            assert after["reserved_bytes"] <= line["budget_bytes"]
        else:
            assert after["required_bytes"] > line["budget_bytes"]
    assert any(line["after"]["status"] == "ok" for line in lines)
    assert any(line["after"]["status"] == "budget" for line in lines)
    path = tmp_path / "reserved.jsonl"
    for is_tiny in (True, False):
        named = [{**line, "model": TEN[0], "tiny": is_tiny} for line in lines]
        path.write_text("\n".join(map(json.dumps, named)))
        rows = reserved_table(path).count(f"| {TEN[0]} |")
        # The small variants are for tests only.
        assert rows == (0 if is_tiny else len(percents))
    assert "smallest: " in reserved_table(path)
    assert f"of {len(percents)} |" in summary_table(path)
