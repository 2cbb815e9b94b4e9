"""The study of fused kernels: what its table says."""

import json
from pathlib import Path
from typing import Any

from studies.fused_kernels import fused_table

LINE: dict[str, Any] = {
    "model": "mamba",
    "tiny": False,
    "case": "inductor@1.0",
    "peer_peak_bytes": 176 << 20,
    "peer_slowdown": 0.76,
    "eager_slowdown": 1.07,
    "fused_slowdown": 0.5,
    "fused_peak_bytes": 175 << 20,
    "fused_prediction_error": 0.001,
    "fused_over_peer": 1.25,
}


def table_of(tmp_path: Path, *lines: dict[str, Any]) -> str:
    file = tmp_path / "fused_kernels.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return fused_table(file)


def test_the_newest_line_of_a_case_is_a_row(tmp_path: Path) -> None:
    table = table_of(
        tmp_path, LINE, LINE | {"fused_slowdown": 0.77}, LINE | {"tiny": True}
    )
    assert "| mamba | inductor 1.0 | 176.0 MiB | 0.76 x | 1.07 x | 0.77 x |" in table
    assert "| 175.0 MiB | +0.10% | 1.25 |" in table
    assert "0.50 x" not in table


def test_a_budget_below_a_floor_is_said(tmp_path: Path) -> None:
    line = {k: v for k, v in LINE.items() if not k.startswith(("fused", "eager"))}
    table = table_of(tmp_path, line | {"fused_floor_bytes": 200 << 20})
    assert "| below its floor | below its floor | floor 200.0 MiB |" in table
