"""What the caller holds: the judge, a second opinion, and every solver for devices."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from tests.device_schedules import HandMade
from tests.oracles import brute_force_schedule, brute_force_smallest_budget, replay
from tests.solvers.test_xengine import check_against, problems
from tests.strategies import Case, cases, optimum

from remat.backends.mathopt import Settings
from remat.core.errors import FileFormatError, PlanMismatchError, SolverFault
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Device, Link, Platform
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.core.rules import Rule
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule
from remat.core.simulator import simulate
from remat.files.serialisation import load_graph, save_graph
from remat.planning.one_device import plan_graph
from remat.planning.plan import Plan, load_plan
from remat.planning.portfolio import solve
from remat.search.device_execution import execute
from remat.search.device_feasibility import infeasible_reason
from remat.search.device_instance import DeviceInstance
from remat.search.paging import paged
from remat.search.schedule_paging import HostLink, page
from remat.solvers import DeviceSearch, XEngine, registry
from remat.solvers.base import ProgressCallback, Solver
from remat.solvers.devices.relaxation import relaxed_placement
from remat.testing.device_oracles import SearchTooLargeError, best_on_devices

A, Y, G = range(3)
LINKS = tuple(Link(source=a, target=1 - a, bytes_per_s=10**9) for a in (0, 1))
FEW_FIT = (HealthCheck.filter_too_much, HealthCheck.too_slow)
HOLDS = "the caller holds its output"


def op(
    name: str,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    costs: tuple[int | None, ...],
    phase: Phase = Phase.FORWARD,
) -> Op:
    return Op(
        name=name,
        reads=reads,
        writes=writes,
        cost_ns=costs,
        workspace_bytes=(0,) * len(costs),
        phase=phase,
        non_recomputable=HOLDS if Y in writes else None,
    )


# Backward needs a and g, 20 bytes, while the caller holds 10 for y: not within 25 bytes
# at home, unless y were to wait on the other device for 2 x 10 ns. What may leave is a:
# backward runs on the other device, 100 ns, and both a and g are copied.
GRAPH = TrainingGraph(
    name="held",
    storages=tuple(Storage(name=name, size_bytes=10) for name in "ayg"),
    ops=(
        op("f", (), (A,), (1, 50)),
        op("show", (A,), (Y,), (1, 50)),
        op("b", (A,), (G,), (1, 100), Phase.BACKWARD),
    ),
    forward_outputs=(Y,),
    final_outputs=(Y, G),
    device_kinds=("cpu", "host"),
)
PLATFORM = Platform(
    devices=(
        Device(name="cpu", kind="cpu", budget_bytes=25),
        Device(name="host", kind="host", budget_bytes=25),
    ),
    links=LINKS,
    copies_wait=True,
)
PROBLEM = Problem(graph=GRAPH, platform=PLATFORM)
OPTIMUM_NS = 1 + 1 + 10 + 100 + 10
ILLEGAL = Schedule(
    (
        Compute(0),
        Compute(1),
        Boundary(),
        Copy(Y, 0, 1),
        Discard(Y),
        Compute(2),
        Discard(A),
        Copy(Y, 1, 0),
        Discard(Y, 1),
    )
)


def test_moving_the_output_away_would_be_cheaper():
    trace = simulate(GRAPH, PLATFORM, ILLEGAL)
    assert trace.violation is not None
    assert trace.violation.rule is Rule.DISCARD_HELD
    assert trace.violation.step == 4
    assert replay(GRAPH, PLATFORM, ILLEGAL).rule is Rule.DISCARD_HELD
    # Were y not asked for at the end, the same steps would be valid, and cost less.
    free = replace(GRAPH, final_outputs=(G,))
    cheaper = simulate(free, PLATFORM, ILLEGAL)
    assert cheaper.violation is None
    assert cheaper.serial_ns == 23 < OPTIMUM_NS


def test_exhaustive_search_keeps_it_in_place():
    for is_staged in (True, False):
        found = best_on_devices(GRAPH, PLATFORM, is_staged=is_staged)
        assert found is not None
        assert found[0] == OPTIMUM_NS
        assert simulate(GRAPH, PLATFORM, found[1]).is_valid


@pytest.mark.parametrize(
    "solver",
    [
        XEngine(),
        XEngine(copies_anywhere=True),
        XEngine(sweeps=(2, 2), copies_anywhere=True),
    ],
    ids=["frontier", "anywhere", "sweeps"],
)
def test_xengine_finds_the_optimum_that_keeps_it(solver: XEngine):
    result = solve(PROBLEM, solver)
    assert (result.status, result.cost_ns) == (Status.OPTIMAL, OPTIMUM_NS)
    assert result.bound_ns == OPTIMUM_NS


def test_the_program_itself_keeps_it(monkeypatch: pytest.MonkeyPatch):
    # Without the search before it, whose schedule would be taken if it cost no more.
    monkeypatch.setattr(XEngine, "_warm_start", lambda *_: None)
    result = solve(PROBLEM, XEngine(copies_anywhere=True))
    assert (result.status, result.cost_ns) == (Status.OPTIMAL, OPTIMUM_NS)


def test_the_search_keeps_it():
    assert solve(PROBLEM, DeviceSearch()).cost_ns == OPTIMUM_NS
    everything_at_home = [(0,)] * len(GRAPH.ops)
    assert execute(DeviceInstance.of(PROBLEM), everything_at_home) is None
    free = replace(PROBLEM, graph=replace(GRAPH, final_outputs=(G,)))
    assert execute(DeviceInstance.of(free), everything_at_home) is not None


def test_what_it_leaves_no_room_for_is_known_without_search():
    # Backward cannot run at home, so placement alone proves the optimum.
    instance = DeviceInstance.of(PROBLEM)
    assert instance.run_bytes(2, 0) == 30
    assert instance.run_bytes(2, 1) == 20
    assert relaxed_placement(instance, Settings()).bound_ns == OPTIMUM_NS
    alone = PLATFORM.with_budgets({"host": 15})
    reason = infeasible_reason(DeviceInstance.of(replace(PROBLEM, platform=alone)))
    assert reason is not None
    assert "op 2 'b' fits on no device: it needs 30 B" in reason
    assert best_on_devices(GRAPH, alone) is None


def test_a_solver_that_moves_it_is_found_out(monkeypatch: pytest.MonkeyPatch):
    class Away(HandMade):
        def __init__(self) -> None:
            super().__init__(choose=lambda *_: ILLEGAL)

        def solve(
            self, problem: Problem, limits: Limits, on_progress: ProgressCallback
        ) -> Proposal:
            free = replace(problem.graph, final_outputs=(G,))
            return super().solve(replace(problem, graph=free), limits, on_progress)

    monkeypatch.setattr(registry, "AUTO_DEVICES", (Away,))
    with pytest.raises(SolverFault, match="the caller's reference keeps its 10 bytes"):
        plan_graph(GRAPH, budget={"cpu": 25, "host": 25}, platform=PLATFORM)


def test_a_saved_plan_that_moves_it_is_refused(tmp_path: Path):
    plan = Plan(
        graph=replace(GRAPH, final_outputs=(G,)),
        platform=PLATFORM,
        schedule=ILLEGAL,
        solver="by hand",
        status=Status.FEASIBLE,
        bound_ns=0,
        fingerprint="",
    )
    path = tmp_path / "plan.json"
    plan.save(path)
    text = path.read_text(encoding="utf-8")
    assert '"final_outputs": [2]' in text
    path.write_text(text.replace('"final_outputs": [2]', '"final_outputs": [1, 2]'))
    with pytest.raises(PlanMismatchError, match="handed over at the boundary"):
        load_plan(path)


def test_a_file_whose_output_may_be_computed_again_is_refused(tmp_path: Path):
    path = tmp_path / "graph.json"
    save_graph(path, GRAPH)
    assert load_graph(path) == GRAPH
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(f'"{HOLDS}"', "null"))
    with pytest.raises(
        FileFormatError, match="op 1 'show' that writes it may run again"
    ):
        load_graph(path)


# --- paging --------------------------------------------------------------------------

# While "work" and "b" run there is no room for both a and y, which idle. The output is
# read last, so Belady's rule would page it.
W, PARTS = 2, (3, 4, 5)
IDLE = TrainingGraph(
    name="idle",
    storages=tuple(
        Storage(name=name, size_bytes=size)
        for name, size in zip("aywghi", (10, 10, 20, 1, 1, 1), strict=True)
    ),
    ops=(
        op("f", (), (A,), (1,)),
        op("show", (A,), (Y,), (1,)),
        op("work", (), (W,), (1,), Phase.BACKWARD),
        op("b", (W,), (3,), (1,), Phase.BACKWARD),
        op("c", (A,), (4,), (1,), Phase.BACKWARD),
        op("d", (Y,), (5,), (1,), Phase.BACKWARD),
    ),
    forward_outputs=(Y,),
    final_outputs=(Y, *PARTS),
)
WITH_HOST = Platform(
    devices=(
        Device(name="cpu", kind="cpu", budget_bytes=36),
        Device(name="host", kind="cpu", budget_bytes=100),
    ),
    links=LINKS,
    copies_wait=True,
)


def test_paging_takes_something_else():
    schedule = schedule_from_order(IDLE, store_all_order(IDLE))
    speed = HostLink(out_bytes_per_s=10**9, in_bytes_per_s=10**9)
    found = page(IDLE, schedule, 36, speed)
    assert found is not None
    assert [p.storage for p in found.pages] == [A]
    assert simulate(IDLE, WITH_HOST, found.schedule).violation is None
    free = replace(IDLE, final_outputs=PARTS)
    before = page(free, schedule_from_order(free, store_all_order(free)), 36, speed)
    assert before is not None
    assert [p.storage for p in before.pages] == [Y]


def test_what_pages_everything_leaves_it():
    found = paged(IDLE, WITH_HOST)
    assert found is not None
    assert found[1].peak_bytes[0] <= 36
    assert Copy(A, 0, 1) in found[0].steps


# --- by chance -----------------------------------------------------------------------


def handed_over(case: Case) -> list[int]:
    return sorted(
        s for s in case.graph.held_outputs if not case.graph.storages[s].is_resident
    )


@settings(max_examples=300, deadline=None, suppress_health_check=FEW_FIT)
@given(cases(is_mutated=False, holds_outputs=True), st.data())
def test_two_simulators_refuse_to_let_it_go(case: Case, data: st.DataObject):
    held = handed_over(case)
    assume(held)
    steps = list(case.schedule.steps)
    boundary = steps.index(Boundary())
    at = data.draw(st.integers(boundary + 1, len(steps)))
    storage = data.draw(st.sampled_from(held))
    home = case.graph.storages[storage].home
    steps.insert(at, Discard(storage, home))
    platform = case.platform.with_budgets(dict.fromkeys(case.platform.names))
    trace = simulate(case.graph, platform, Schedule(tuple(steps)))
    second = replay(case.graph, platform, Schedule(tuple(steps)))
    assert trace.violation is not None
    assert (trace.violation.rule, trace.violation.step) == (Rule.DISCARD_HELD, at)
    assert (second.rule, second.step) == (Rule.DISCARD_HELD, at)


@settings(max_examples=100, deadline=None, suppress_health_check=FEW_FIT)
@given(cases(max_devices=1, is_mutated=False, holds_outputs=True))
def test_on_one_device_it_never_goes_anyway(case: Case):
    # Its op may not run again, and it is asked for at the end: so no solver for one
    # device needs to know of the rule. This exhaustive search does not.
    assume(handed_over(case))
    assume(len(case.graph.ops) <= 5)
    least = brute_force_smallest_budget(case.graph)
    assume(least is not None)
    found = brute_force_schedule(case.graph, least or 0)
    assert found is not None
    device = replace(case.platform.devices[0], kind="cpu", budget_bytes=least or None)
    trace = simulate(case.graph, Platform(devices=(device,)), found)
    assert trace.violation is None


@settings(max_examples=40, deadline=None, suppress_health_check=FEW_FIT)
@given(problem=problems(max_ops=5, holds_outputs=True))
def test_staged_optima_with_held_outputs(problem: Problem):
    assume(problem.graph.held_outputs)
    found = optimum(problem.graph, problem.platform, is_staged=True)
    event("infeasible" if found is None else "feasible")
    result = solve(problem, XEngine(copies_anywhere=True))
    check_against(result, problem, None if found is None else found[0])


@settings(max_examples=40, deadline=None, suppress_health_check=FEW_FIT)
@given(problem=problems(max_ops=5, holds_outputs=True))
def test_no_search_beats_the_optimum_that_keeps_it(problem: Problem):
    assume(problem.graph.held_outputs)
    found = optimum(problem.graph, problem.platform)
    asked: list[Solver] = [DeviceSearch(candidates=20), XEngine()]
    for solver in asked:
        result = solve(problem, solver)
        if found is None:
            assert result.cost_ns is None
        elif result.cost_ns is not None:
            assert result.cost_ns >= found[0]


def test_a_search_that_is_too_large_says_so() -> None:
    with pytest.raises(SearchTooLargeError, match="more than 2 places"):
        best_on_devices(GRAPH, PLATFORM, most_places=2)
