"""The study of all graphs of a few ops, on some that need care."""

import argparse
import json
from pathlib import Path

import pytest
from studies.small_graphs import cases_of, main, part, unlike

from remat.backends import mathopt
from remat.planning.portfolio import solve
from remat.testing.small_graphs import joint_graph
from studies import small_graphs

# What is cheapest on two devices leaves the class of the exact model.
LEAVING = [
    [[], [], [0], [1], [0, 1]],
    [[], [0], [], [1], [0]],
    [[], [], [], [], [0]],
]


@pytest.mark.parametrize("reads", LEAVING)
def test_what_leaves_the_class_claims_nothing_of_it(reads: list[list[int]]):
    graph = joint_graph([3, 1, 2, 4, 1], [5, 2, 7, 3, 4], reads, 3)
    is_left = False
    for case in cases_of(graph, device_count=2):
        result = solve(case.problem, case.solver)
        assert not case.differs(result)
        if case.optimum_ns is not None and result.cost_ns is not None:
            is_left |= result.cost_ns < case.optimum_ns
    assert is_left


@pytest.mark.parametrize("devices", [1, 2])
def test_blocks_are_recorded_once(devices: int, tmp_path: Path):
    words = ["--ops", "3", "--devices", str(devices), "--results", str(tmp_path)]
    assert main(words) == 0
    assert main(words) == 0
    (line,) = (tmp_path / "small_graphs.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["graphs"] == 8
    assert found["cases"] >= 8
    assert found["differing"] == []


def test_one_graph_of_each_numbering(tmp_path: Path):
    # Acyclic graphs with unlabelled vertices: OEIS A003087.
    assert [int(unlike(count).sum()) for count in range(1, 7)] == [
        1,
        2,
        6,
        31,
        302,
        5984,
    ]
    limit = mathopt.IN_PROCESS_ROWS
    assert main(["--ops", "3", "--unlike", "--results", str(tmp_path)]) == 0
    assert limit == mathopt.IN_PROCESS_ROWS
    (line,) = (tmp_path / "small_graphs.jsonl").read_text().splitlines()
    assert json.loads(line)["graphs"] == 6


def test_parts_share_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(small_graphs, "BLOCK", 3)
    words = ["--ops", "3", "--results", str(tmp_path), "--part"]
    file = tmp_path / "small_graphs.jsonl"
    blocks: list[list[int]] = []
    for text in ("2/2", "1/2"):
        assert main([*words, text]) == 0
        lines = file.read_text().splitlines()
        blocks.append([json.loads(line)["block"] for line in lines])
    assert blocks == [[1], [1, 0, 2]]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/x", "-1/2", ""])
def test_parts_that_cannot_be(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="written as 1/2"):
        part(text)
