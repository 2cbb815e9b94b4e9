"""The study of repeated blocks: a line for each solver and budget."""

import json
from pathlib import Path

from studies.repeated_blocks import SOLVERS, main


def test_a_line_for_each_solver_and_budget(tmp_path: Path):
    words = ["--models", "gpt2", "--tiny", "--shares", "75", "--results", str(tmp_path)]
    assert main(words) == 0
    lines = [
        json.loads(line)
        for line in (tmp_path / "repeated_blocks.jsonl").read_text().splitlines()
    ]
    found = {line["solver"]: line for line in lines}
    assert set(found) == set(SOLVERS)
    assert found["rockmate"]["cost_ns"] <= found["rotor"]["cost_ns"]
    assert all(line["over_store_all"] >= 1 for line in lines)
