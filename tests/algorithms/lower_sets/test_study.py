"""The study of graphs measures what it says, and its tables say what was measured."""

from pathlib import Path
from typing import Any

import pytest
from studies.forward_graphs import resnet
from studies.lower_sets_graphs_tables import (
    dominating,
    judged_table,
    latest,
    planning_table,
    rewrite,
)
from studies.lower_sets_references import REFERENCES

from remat.algorithms.lower_sets.families import all_lower_sets
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.algorithms.lower_sets.programs import smallest_budget
from studies import lower_sets_graphs as study


def tiny() -> ForwardGraph:
    return resnet((1, 1), batch=1, name="tiny")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], dict[str, Any]]:
    monkeypatch.setattr(study, "graph_of", lambda _network: tiny())
    return {
        ("resnet50", case): {
            "model": "resnet50",
            "case": case,
            **study.measure("resnet50", case),
        }
        for case in study.CASES
    }


def test_cases_measure_the_same_thing(
    lines: dict[tuple[str, str], dict[str, Any]],
) -> None:
    graph = tiny()
    family = all_lower_sets(graph, 1_000)
    assert family is not None
    least = smallest_budget(graph, family).peak_bytes
    exact = lines["resnet50", "exact"]
    assert exact["sets"] == len(family)
    assert exact["smallest_budget"]["bytes"] == least
    assert 0 < exact["rss_before_bytes"] <= exact["rss_bytes"]
    best = {
        query["multiple"]: query["overhead"]
        for query in exact["queries"]
        if query["objective"] == "least overhead" and not query["charge_last"]
    }
    for case in ("plain C++", "plain Python"):
        for query in lines["resnet50", case]["queries"]:
            assert not query["timed_out"]
            assert query["overhead"] == best[query["multiple"]]
    for query in lines["resnet50", "approximate"]["queries"]:
        if query["objective"] == "least overhead" and not query["charge_last"]:
            assert query["overhead"] >= best[query["multiple"]]


def test_judged_points_are_a_front(
    lines: dict[tuple[str, str], dict[str, Any]],
) -> None:
    line = lines["resnet50", "judged"]
    points = [(p["peak_bytes"], p["overhead_percent"]) for p in line["points"]]
    assert points == sorted(points)
    overheads = [overhead for _, overhead in points]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 0
    assert points[-1][0] <= line["plain_bytes"]
    assert points[0][0] <= line["chen"]["peak_bytes"] <= line["chen"]["formula_bytes"]


def test_tables_hold_what_was_measured(
    lines: dict[tuple[str, str], dict[str, Any]],
) -> None:
    planning = planning_table(lines)
    assert f"| {lines['resnet50', 'exact']['sets']} |" in planning
    assert "| the same |" in planning
    judged = judged_table(lines)
    assert judged.count("| resnet50 |") == 5
    # The tiny network is below every peak of the large one.
    assert "**no**" not in judged


def test_dominating_points() -> None:
    line = {
        "points": [
            {"peak_bytes": 1_000_000_000, "overhead_percent": 50.0},
            {"peak_bytes": 2_000_000_000, "overhead_percent": 10.0},
        ]
    }
    assert dominating(line, 1.5, 60) == ("1.000", "50.0 %", True)
    assert dominating(line, 1.5, 20) == ("2.000", "50.0 %", False)
    assert dominating(line, 0.5, 5) == ("none", "none", False)


def test_towers_explode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "MOST_SETS", 1_000)
    for case in ("exact", "plain C++"):
        line = study.measure("towers 8x6", case)
        assert line["status"] == "exploded"
    line = study.measure("towers 8x6", "approximate")
    assert line["status"] == "ok"
    assert line["smallest_budget"]["bytes"] < line["pruned"]["smallest_budget_bytes"]


def test_missing_graphs_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_SHARED", "/nowhere")
    assert study.measure("vgg19", "exact")["status"] == "missing"
    assert set(REFERENCES) >= {"resnet152", "densenet161"}


def test_the_page_is_rewritten_in_its_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- lower-sets-graphs -->\nold\n<!-- end lower-sets-graphs -->\nb"
    )
    rewrite(page, tmp_path / "none.jsonl")
    content = page.read_text()
    assert content.startswith("a\n<!-- lower-sets-graphs -->\n\nSeconds are")
    assert content.endswith("<!-- end lower-sets-graphs -->\nb")
    assert "old" not in content
    page.write_text("no place")
    with pytest.raises(ValueError, match="no <!-- lower-sets-graphs -->"):
        rewrite(page, tmp_path / "none.jsonl")
    assert latest([{"model": "a", "case": "b", "status": "failed"}]) == {}
