"""``remat instances``: prints what is known, and judges what it is given."""

import json
from pathlib import Path

import pytest

from remat.cli import main
from remat.core.schedule import Schedule
from remat.files.serialisation import load_graph, save_schedule
from remat.testing.instances import library
from remat.testing.instances.library import load_instance, save_instance

SMALL = "message-passing"
INSTANCE = load_instance(SMALL)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    save_instance(tmp_path / "data", INSTANCE)
    monkeypatch.setattr(library, "folder", lambda: tmp_path / "data")


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["instances", *words]) == 0
    return capsys.readouterr().out


def test_instances_are_listed_and_shown(capsys, tmp_path: Path) -> None:
    assert SMALL in output(capsys, "list")
    graph = tmp_path / "graph.json"
    text = output(capsys, "show", SMALL, "--output", str(graph))
    assert "Gilmer et al. 2017" in text
    assert load_graph(graph) == INSTANCE.graph
    facts = json.loads(output(capsys, "show", SMALL, "--json"))
    assert facts["op_count"] == len(INSTANCE.graph.ops)
    assert list(facts["budgets"]) == list(INSTANCE.budgets_bytes)


def test_the_table_has_a_row_for_each_budget(capsys) -> None:
    text = output(capsys, "table")
    assert text.count(SMALL) == len(INSTANCE.budgets_bytes)
    for best in INSTANCE.best.values():
        assert f"{best.gap:.2%}" in text
    assert output(capsys, "table", SMALL) == text
    facts = json.loads(output(capsys, "table", "--json"))["instances"]
    assert [each["name"] for each in facts] == [SMALL]


def test_a_schedule_is_judged(capsys, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    label = list(INSTANCE.budgets_bytes)[-1]
    best = INSTANCE.best[label]
    save_schedule(file, best.schedule)
    text = output(capsys, "check", str(file))
    assert text.startswith(f"schedule for {SMALL}: valid, {len(best.schedule.steps)} ")
    facts = json.loads(output(capsys, "check", str(file), "--json"))
    assert (facts["cost_ns"], facts["is_valid"]) == (best.cost_ns, True)
    assert facts["budgets"][label]["best_known_ns"] == best.cost_ns
    save_schedule(file, Schedule(best.schedule.steps[:40]))
    assert main(["instances", "check", str(file)]) == 2
    assert "name the one that it is for" in capsys.readouterr().err
    words = ["instances", "check", str(file), "--instance", SMALL, "--json"]
    assert main(words) == 4
    captured = capsys.readouterr()
    assert f"the schedule fails on {SMALL}: " in captured.err
    assert json.loads(captured.out)["is_valid"] is False


def test_what_the_library_claims_is_checked(capsys, tmp_path: Path) -> None:
    count = len(INSTANCE.budgets_bytes)
    expected = f"{count} schedules replayed and bounds verified, 0 of them wrong\n"
    assert output(capsys, "check") == expected
    label, best = next(iter(INSTANCE.best.items()))
    object.__setattr__(best, "cost_ns", best.cost_ns - 1)
    try:
        save_instance(tmp_path / "data", INSTANCE)
    finally:
        object.__setattr__(best, "cost_ns", best.cost_ns + 1)
    assert main(["instances", "check", "--json"]) == 4
    assert list(json.loads(capsys.readouterr().out)["wrong"]) == [f"{SMALL} {label}"]


def test_published_graphs_are_converted(capsys, tmp_path: Path) -> None:
    file, target = tmp_path / "cg_x.txt", tmp_path / "x.json"
    text = "2 1\n0 8 x\n1 4 _\nforward\n1 1\n0 data\n1\nReLU\n_\n"
    file.write_text(text, encoding="utf-8")
    words = ("import", str(file), "--output", str(target))
    assert output(capsys, *words) == f"wrote x, 1 ops, to {target}\n"
    assert len(load_graph(target).ops) == 1
    assert main(["instances", "import", str(file), "--output", "no/folder/x.json"]) == 2
