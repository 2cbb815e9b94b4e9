"""The study of several devices, on the smallest step."""

from pathlib import Path
from typing import Any

from studies.record import read

from studies import offload


def test_a_pair_is_planned_run_and_recorded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "lines.jsonl"
    words = ["--tiny", "--models", "conv chain", "--cases", "pair 90%"]
    words += ["--time-limit", "3", "--repeats", "1", "--output", str(file)]
    assert offload.main(words) == 0
    floor, pair = read(file)
    assert floor["peak_bound_bytes"] <= floor["floor_bytes"]
    assert pair["case"] == "pair 90%"
    assert pair["status"] == "ok"
    assert pair["budget"]["cpu"] < floor["floor_bytes"]
    assert pair["is_within_budget"]
    assert not pair["differences"]
    assert pair["machine"]["threads"] > 0
