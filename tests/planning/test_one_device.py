"""Planning of graphs: what fits, what an error names, and the curve over budgets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import mlp_chain, resnet_like

from remat.core.errors import BudgetError, SolverUnsuitableError, UnitError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Status
from remat.planning.curve import spread_budgets, trade_off
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.smallest_budget import smallest_budget
from remat.solvers.registry import AUTO, SOLVERS, chosen_solvers
from remat.testing.device_oracles import best_on_devices

GRAPH = mlp_chain(6).graph
WHOLE_BYTES = plain_peak_bytes(GRAPH)
FLOOR_BYTES = smallest_budget(GRAPH).budget_bytes


def test_a_name_is_one_solver_and_auto_is_several() -> None:
    assert [type(s) for s in chosen_solvers("auto")] == list(AUTO)
    for name, solver in SOLVERS.items():
        assert [type(s) for s in chosen_solvers(name)] == [solver]


def test_an_unknown_solver_is_refused_with_the_names() -> None:
    with pytest.raises(SolverUnsuitableError, match=r"'magic'; there are auto, store-"):
        plan_graph(GRAPH, budget="100%", solver="magic")


def test_a_hundred_percent_recomputes_nothing() -> None:
    plan = plan_graph(GRAPH, budget="100%", fingerprint="f", settings={"torch": "x"})
    assert plan.budget_bytes == WHOLE_BYTES == plan.peak_bytes
    assert plan.cost_ns == plan.baseline_cost_ns == plan.bound_ns
    assert plan.fingerprint == "f"
    assert plan.settings["torch"] == "x"
    assert plan.settings["solver"] == "auto"


def test_small_graphs_are_planned_exactly() -> None:
    """A large gradient is dropped and made once more at the end."""
    sizes = [2, 0, 5, 2, 1, 0, 8, 2, 2]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    rows = [
        ("f0", (0,), (1,), 1, 6, forward, None),
        ("f1", (1,), (2,), 1, 3, forward, None),
        ("f2", (2,), (3,), 9, 6, forward, None),
        ("loss", (1, 3), (), 0, 1, forward, "caller"),
        ("b2", (3, 4), (5, 6), 5, 0, backward, None),
        ("b1", (1, 2, 5), (7,), 2, 0, backward, "once"),
        ("b0", (7,), (8,), 100, 0, backward, None),
        ("optimizer", (8, 6), (), 5, 0, backward, "caller"),
    ]
    graph = TrainingGraph(
        name="small",
        storages=tuple(
            Storage(name=f"s{i}", size_bytes=size, is_resident=i == 0)
            for i, size in enumerate(sizes)
        ),
        ops=tuple(
            Op(
                name=name,
                reads=reads,
                writes=writes,
                cost_ns=(cost_ns,),
                workspace_bytes=(workspace_bytes,),
                phase=phase,
                non_recomputable=reason,
                is_external=reason == "caller",
            )
            for name, reads, writes, cost_ns, workspace_bytes, phase, reason in rows
        ),
        forward_outputs=(1, 3),
        tangents=(4,),
        final_outputs=(8, 6),
    )
    found = best_on_devices(graph, single_device(17), is_staged=False)
    assert found is not None
    plan = plan_graph(graph, budget=17)
    assert plan.cost_ns == found[0]
    assert plan.solver == "Checkmate"


@pytest.mark.parametrize("budget", ["0", "-1", "12 apples", "-5%"])
def test_a_wrong_budget_is_a_unit_error(budget: str) -> None:
    with pytest.raises(UnitError):
        plan_graph(GRAPH, budget=budget)


def test_what_an_error_names_as_possible_is_possible() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_graph(GRAPH, budget=1)
    assert caught.value.budget_bytes == 1
    required_bytes = caught.value.required_bytes
    assert f"at least {required_bytes} bytes" in str(caught.value)
    assert plan_graph(GRAPH, budget=required_bytes).peak_bytes <= required_bytes


def test_auto_falls_back_on_the_schedule_that_proves_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remat.solvers.registry.AUTO", (SOLVERS["store-all"],))
    plan = plan_graph(GRAPH, budget=FLOOR_BYTES)
    # With the native core a search around it may have found a better one.
    assert plan.solver in {"smallest_budget", "LocalSearch"}
    assert plan.status is Status.FEASIBLE
    assert plan.smallest_budget_bytes == FLOOR_BYTES >= plan.peak_bytes


@pytest.mark.parametrize("budget_bytes", [FLOOR_BYTES, WHOLE_BYTES - 1])
def test_a_named_solver_that_fails_above_the_floor_is_told_apart(
    budget_bytes: int,
) -> None:
    with pytest.raises(BudgetError) as caught:
        plan_graph(GRAPH, budget=budget_bytes, solver="store-all")
    assert caught.value.budget_bytes == budget_bytes
    assert caught.value.required_bytes == FLOOR_BYTES
    message = str(caught.value)
    assert message.startswith("solver StoreAll finds no schedule within ")
    asked, known = message.split("; a schedule of ")
    assert f"({budget_bytes:_} bytes): to keep everything takes " in asked
    assert f"({FLOOR_BYTES:_} bytes) is known (use solver='auto'), made of " in known
    assert "no schedule fits" not in message
    assert "the smallest known budget" not in message


@pytest.mark.parametrize("graph", [GRAPH, resnet_like(4).graph], ids=lambda g: g.name)
def test_curve_goes_from_the_smallest_budget_to_the_whole(graph) -> None:
    plans = trade_off(graph, 5)
    budgets = [plan.budget_bytes or 0 for plan in plans]
    assert budgets == sorted(budgets)
    assert budgets[-1] == plain_peak_bytes(graph)
    assert plans[-1].overhead == 0
    assert {plan.smallest_budget_bytes for plan in plans} == {plans[0].peak_bytes}


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 2 * WHOLE_BYTES), min_size=1, max_size=5))
def test_curve_is_monotone_and_within_every_budget(budgets: list[int]) -> None:
    plans = trade_off(GRAPH, budgets)
    costs = [plan.cost_ns for plan in plans]
    peaks = [plan.peak_bytes for plan in plans]
    assert costs == sorted(costs, reverse=True)
    assert peaks == sorted(peaks)
    for plan in plans:
        assert plan.peak_bytes <= (plan.budget_bytes or 0)
        assert plan.bound_ns <= plan.cost_ns
    assert {b for b in budgets if b > FLOOR_BYTES} <= {p.budget_bytes for p in plans}


def test_a_solver_that_finds_little_still_gives_a_curve() -> None:
    plans = trade_off(GRAPH, ["50%", "80%", "100%"], solver="store-all")
    assert [plan.solver for plan in plans[:-1]] == ["smallest_budget"] * (
        len(plans) - 1
    )
    assert plans[-1].solver == "StoreAll"


def test_progress_names_every_budget() -> None:
    seen: list[tuple[str, float]] = []
    plans = trade_off(GRAPH, 3, progress=lambda what, share: seen.append((what, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert seen[-1] == ("done", 1.0)
    assert len(seen) == len(plans) + 2


@pytest.mark.parametrize("count", [1, 0, -3])
def test_a_curve_of_less_than_two_points_is_refused(count: int) -> None:
    with pytest.raises(UnitError, match=f"got {count}"):
        trade_off(GRAPH, count)


@given(st.integers(0, 99), st.integers(100, 300), st.integers(2, 9))
def test_spread_holds_both_ends(low: int, high: int, count: int) -> None:
    sizes = spread_budgets(low, high, count)
    assert min(sizes) == low
    assert max(sizes) == high
    assert len(sizes) <= count
