"""The table of plans for many lengths, from recorded lines."""

import json
from pathlib import Path

from studies.lengths import lengths_table


def test_the_newest_lines_of_each_model_are_set_beside_each_other(
    tmp_path: Path,
) -> None:
    one = {"model": "llama", "is_many": False, "planning_s": 6.0}
    many = {
        "model": "llama",
        "is_many": True,
        "planning_s": 8.9,
        "judged_s": 0.1,
        "steps": 200,
        "unequal_steps": 1,
        "traces": 1,
        "peak_bytes": 99,
        "budget_bytes": 100,
    }
    alone = {"model": "bert", "is_many": False, "planning_s": 6.0}
    results = tmp_path / "lengths.jsonl"
    lines = [{**one, "planning_s": 1.0}, one, many, alone]
    results.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    *_, row = lengths_table(results).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        *["llama", "6.0 s", "8.9 s", "100 ms", "1.50 x", "1", "199 of 200", "99.0%"]
    ]
