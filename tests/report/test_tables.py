"""Tables and progress: what a terminal and a pipe get."""

import io

import pytest
from tests.instances import mlp_chain

from remat.core.units import format_bytes, format_ns
from remat.planning.curve import trade_off
from remat.planning.one_device import plan_graph
from remat.report.progress import progress_bar
from remat.report.tables import (
    curve_table,
    operators_table,
    print_table,
    recomputed_table,
    roles_table,
)
from remat.solvers.base import ignore_progress

GRAPH = mlp_chain(6).graph


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(table) -> str:
    stream = io.StringIO()
    print_table(table, stream)
    return stream.getvalue()


def cells(table, column: str) -> list[str]:
    return list(next(c for c in table.columns if c.header == column).cells)


def test_curve_has_a_row_per_budget() -> None:
    plans = trade_off(GRAPH, 4)
    table = curve_table(plans)
    assert cells(table, "budget") == [format_bytes(p.budget_bytes or 0) for p in plans]
    assert cells(table, "time") == [format_ns(p.cost_ns) for p in plans]
    assert cells(table, "x plain")[-1] == "1.000"
    assert cells(table, "recomputed")[-1] == "0 ops"


def test_a_pipe_gets_no_colours_and_whole_rows() -> None:
    text = text_of(curve_table(trade_off(GRAPH, 4)))
    assert "\x1b" not in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_recomputations_add_up_to_the_overhead() -> None:
    plan = plan_graph(GRAPH, budget="70%")
    table = recomputed_table(plan)
    assert sum(map(int, cells(table, "runs"))) == plan.recomputed_op_count > 0


def test_roles_add_up_to_all_storages() -> None:
    counts = cells(roles_table(GRAPH), "storages")
    assert sum(map(int, counts)) == len(GRAPH.storages)


def test_operators_are_sorted_by_time() -> None:
    table = operators_table(GRAPH)
    assert len(table.rows) == 10
    assert cells(table, "operator")[0].startswith("linear")
    assert cells(table, "ops") == ["1"] * 10


def test_names_with_brackets_are_printed_as_they_are() -> None:
    table = operators_table(GRAPH)
    table.add_row("[bold]x[/bold]", "1", "1 ns", "0 B")
    assert "[bold]x[/bold]" in text_of(table)


def test_progress_is_silent_in_a_pipe() -> None:
    stream = io.StringIO()
    with progress_bar(stream=stream) as report:
        assert report is ignore_progress
    assert stream.getvalue() == ""


def test_progress_is_silent_when_quiet() -> None:
    with progress_bar(is_quiet=True, stream=Terminal()) as report:
        assert report is ignore_progress


def test_progress_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress_bar(stream=stream) as report:
        report("timing [mm]", 0.5)
    assert "timing [mm]" in stream.getvalue()


def test_the_bar_goes_away_on_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), progress_bar(stream=Terminal()):
        raise KeyboardInterrupt
