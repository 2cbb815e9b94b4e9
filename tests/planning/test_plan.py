"""Plans: figures, files, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.instances import mlp_chain, transformer_like

from remat.core.errors import FileFormatError, PlanMismatchError
from remat.core.problem import Objective, Status
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.core.units import format_ns
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import Plan, contributors, load_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    graph = transformer_like().graph
    return plan_graph(graph, budget=plain_peak_bytes(graph) * 7 // 10, fingerprint="f")


def test_figures_are_those_of_the_judge(plan: Plan) -> None:
    trace = simulate(plan.graph, plan.platform, plan.schedule)
    assert plan.peak_bytes == trace.peak_bytes[0] <= (plan.budget_bytes or 0)
    assert plan.cost_ns == trace.serial_ns
    assert plan.baseline_cost_ns == plan.cost_ns - trace.recomputed_ns
    assert plan.bound_ns <= plan.cost_ns
    assert plan.gap == (plan.cost_ns - plan.bound_ns) / plan.cost_ns
    assert plan.recomputed_op_count == len(plan.schedule.computes) - len(plan.graph.ops)
    assert plan.overhead > 0


def test_contributors_add_up_to_the_peak(plan: Plan) -> None:
    parts = contributors(plan.graph, plan.schedule, plan.trace.peak_step())
    assert sum(size for _, size in parts) == plan.peak_bytes
    assert parts == sorted(parts, key=lambda part: -part[1])


def test_summary_and_text_name_the_figures(plan: Plan) -> None:
    assert json.loads(json.dumps(plan.summary()))["peak_bytes"] == plan.peak_bytes
    text = str(plan)
    for word in ("budget", "peak", "time", "proved bound", "recomputed", "at the peak"):
        assert word in text


def test_a_bound_of_some_schedules_is_not_said_of_all(plan: Plan) -> None:
    assert plan.baseline_cost_ns < plan.floor_ns == plan.bound_ns < plan.cost_ns
    assert f"{format_ns(plan.floor_ns)}, at most" in str(plan)
    assert "that" not in str(plan)
    claimed = replace(plan, bound_ns=plan.cost_ns, status=Status.OPTIMAL)
    assert (claimed.floor_ns, claimed.gap) == (plan.floor_ns, plan.gap)
    words = f"{format_ns(plan.cost_ns)} of the schedules that {plan.solver} searches"
    assert words in str(claimed)
    assert f"{format_ns(plan.floor_ns)}, at most" in str(claimed)


def test_a_schedule_that_misses_the_bound_is_not_said_to_be_unbeaten(
    plan: Plan,
) -> None:
    assert "none takes" not in str(replace(plan, status=Status.FEASIBLE))


def test_a_schedule_that_meets_the_bound_is_said_to_be_unbeaten() -> None:
    graph = transformer_like().graph
    plan = plan_graph(graph, budget=plain_peak_bytes(graph))
    assert plan.gap == 0
    unproved = replace(plan, status=Status.FEASIBLE)
    assert f"feasible by {plan.solver}, and none takes less time)" in str(unproved)
    assert "the optimum of all schedules (proved;" in str(unproved)


def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert load_plan(path) == plan
    named = replace(plan, smallest_budget_bytes=123, settings={"\udcff": "\udcff"})
    named.save(path)
    assert load_plan(path) == named


def test_an_invalid_schedule_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="not valid"):
        replace(plan, schedule=Schedule(plan.schedule.steps[:-3]))
    with pytest.raises(PlanMismatchError, match="claims a bound"):
        replace(plan, bound_ns=plan.cost_ns + 1)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"solver": "', '"solvers": "', "solver"),
        ('"status": "feasible"', '"status": "great"', "status"),
        ('"bound_ns": ', '"bound_ns": 1.5, "x": ', "unknown keys"),
        ('"bound_ns": ', '"bound_ns": 0.', r"plan\.bound_ns is 0\."),
        ('"settings": {', '"settings": [], "was": {', "unknown keys"),
        ('_bytes": null', '_bytes": true', "true; it must be an integer or null"),
    ],
)
def test_damaged_files_are_refused(
    plan: Plan, tmp_path: Path, old: str, new: str, named: str
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(FileFormatError, match=named):
        load_plan(path)


def test_a_file_with_a_broken_schedule_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    text = path.read_text()
    first = '["boundary"]'
    assert first in text
    path.write_text(text.replace(first, '["discard", 0]', 1))
    with pytest.raises(PlanMismatchError):
        load_plan(path)


def test_a_graph_is_no_plan(tmp_path: Path) -> None:
    from remat.files.serialisation import save_graph  # noqa: PLC0415

    path = tmp_path / "graph.json"
    save_graph(path, mlp_chain().graph)
    with pytest.raises(FileFormatError, match="graph"):
        load_plan(path)


def test_a_file_of_version_1_stays_readable() -> None:
    plan = load_plan(Path(__file__).parents[1] / "data" / "plan_v1.json")
    assert plan.fingerprint == "0123abcd"
    assert plan.peak_bytes <= (plan.budget_bytes or 0)
    assert plan.recomputed_op_count > 0
    assert plan.settings["torch"] == "2.13.0"


def test_what_old_files_note_among_settings_is_read_into_fields(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "data" / "plan_v1.json").read_text()
    noted = '"objective": "overlapped", "kernels": "fused", "fused kernels": "b a"'
    path = tmp_path / "plan.json"
    path.write_text(text.replace('"settings": {', f'"settings": {{{noted}, ', 1))
    plan = load_plan(path)
    assert plan.objective is Objective.OVERLAPPED
    assert (plan.kernels, plan.fused_kernels) == ("fused", {"a", "b"})
    assert set(plan.settings) == {"torch", "costs", "solver", "seed"}
    assert plan.summary()["settings"]["fused kernels"] == "a b"
    plan.save(path)
    assert load_plan(path) == plan
    path.write_text(text.replace('"settings": {', '"settings": {"kernels": "my", ', 1))
    with pytest.raises(
        FileFormatError, match=r'settings.kernels is "my"; .* "eager" or "fused"'
    ):
        load_plan(path)
