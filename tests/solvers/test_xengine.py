"""XEngine against its authors' table, published optima, and exhaustive search."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.strategies import graphs, optimum

from remat.backends.mathopt import MipSolver, Outcome, Settings, Solution
from remat.backends.mathopt import solve as solve_model
from remat.core.bounds import required_ops
from remat.core.errors import SolverUnsuitableError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.platform import Device, Link, Platform, single_device
from remat.core.problem import Limits, Objective, Problem, Result, Status, StopReason
from remat.core.rules import Rule
from remat.core.schedule import Boundary, Compute, Copy, Schedule
from remat.core.simulator import simulate
from remat.planning.portfolio import solve
from remat.search.device_instance import DeviceInstance
from remat.solvers import XEngine, XEnginePublished
from remat.solvers.device_search import DeviceSearch
from remat.solvers.devices.published import PublishedInstance, PublishedModel
from remat.solvers.devices.slots import frontier_slots
from remat.solvers.devices.sweep_model import ModelOptions, SweepModel
from remat.testing.device_oracles import best_on_devices

ORACLE = Path(__file__).parents[3] / "shared" / "papers" / "milp_oracle.json"
SIZES = (10, 40, 10, 10, 30, 15, 10)
CHAIN = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6))
SKIPS = (*CHAIN, (1, 3), (2, 6))
COPIES = ((6, 5), (3, 8), (2, 9), (8, 3), (7, 8), (5, 1))
FAST, SLOW = (1, 1, 1, 10, 1, 1, 1), (10, 10, 10, 1, 10, 10, 10)
UNEVEN = (1, 10, 5, 1, 4, 2, 1), (0.5, 2, 1.5, 0.5, 7, 4, 2)


@dataclass(frozen=True)
class Row:
    """A row of the authors' tests: test/core/test_ilp.cpp of their repository."""

    name: str
    costs: tuple[tuple[float, ...], tuple[float, ...]]
    sizes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...]
    budget: int
    optimum: float
    is_feasible: bool = True

    @property
    def instance(self) -> PublishedInstance:
        return PublishedInstance(
            costs=list(zip(*self.costs, strict=True)),
            sizes=self.sizes,
            copy_costs={
                edge: {(0, 1): there, (1, 0): back}
                for edge, (there, back) in zip(self.edges, self.copies, strict=True)
            },
            budgets=(self.budget, self.budget),
        )

    @property
    def platform(self) -> Platform:
        return linked(("device 0", "device 1"), (self.budget, self.budget))

    def exact_instance(self) -> DeviceInstance:
        """With costs doubled to be integers; a copy costs what its first edge does."""
        graph = self.instance.graph(ns_per_unit=2)
        found = DeviceInstance.of(Problem(graph=graph, platform=self.platform))
        first: dict[int, tuple[int, int]] = {}
        for (producer, _), copy in zip(self.edges, self.copies, strict=True):
            first.setdefault(producer, copy)
        written = sorted(first)
        return replace(
            found,
            copy_ns={
                (0, 1): tuple(2 * first[i][0] for i in written),
                (1, 0): tuple(2 * first[i][1] for i in written),
            },
        )


TABLE = (
    Row("very tiny, copy", ((1, 10), (10, 1)), (10, 40), ((0, 1),), ((3, 8),), 50, 5),
    Row(
        "tiny, linear",
        ((1, 10, 1), (10, 1, 10)),
        (10, 40, 10),
        CHAIN[:2],
        ((3, 8), (5, 1)),
        50,
        7,
    ),
    Row("multi, linear", (FAST, SLOW), SIZES, CHAIN, COPIES, 50, 12),
    Row("multi, skip", UNEVEN, SIZES, SKIPS, ((0, 0),) * 8, 60, 11.5),
    Row(
        "multi, skip, copy",
        (FAST, SLOW),
        SIZES,
        SKIPS,
        (*COPIES, (7, 4), (2, 1)),
        50,
        16,
        is_feasible=False,
    ),
)


def linked(
    kinds: tuple[str, ...],
    budgets: tuple[int | None, ...],
    bytes_per_s: int = 10**9,
    latency_ns: int = 0,
    *,
    copies_wait: bool = True,
) -> Platform:
    devices = range(len(kinds))
    return Platform(
        devices=tuple(
            Device(name=kind, kind=kind, budget_bytes=budget)
            for kind, budget in zip(kinds, budgets, strict=True)
        ),
        links=tuple(
            Link(source=a, target=b, bytes_per_s=bytes_per_s, latency_ns=latency_ns)
            for a in devices
            for b in devices
            if a != b
        ),
        copies_wait=copies_wait,
    )


def list_peaks(graph: TrainingGraph, platform: Platform, schedule: Schedule):
    """Most bytes per device, the steps one after the other."""
    trace = simulate(graph, platform, schedule)
    assert trace.violation is None or trace.violation.rule is Rule.OVER_BUDGET
    return tuple(max(line) for line in trace.timeline_bytes)


# --- the rows as published -----------------------------------------------------------


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("is_quadratic", [True, False])
def test_published_rows_have_the_published_optima(row: Row, is_quadratic: bool):
    model = PublishedModel(row.instance, is_quadratic=is_quadratic).build()
    solver = MipSolver.SCIP if is_quadratic else MipSolver.HIGHS
    found = solve_model(model.model, solver, Settings(time_limit_s=100))
    assert found.outcome is Outcome.OPTIMAL
    assert found.objective == pytest.approx(row.optimum)
    schedule, cost = model.schedule(found.values)
    assert cost == pytest.approx(row.optimum)
    peaks = list_peaks(row.instance.graph(), row.platform, schedule)
    assert (max(peaks) <= row.budget) is row.is_feasible


def test_published_rows_break_a_budget_in_the_authors_own_test():
    row = TABLE[-1]
    found = solve_model(PublishedModel(row.instance).build().model)
    schedule, _ = PublishedModel(row.instance).build().schedule(found.values)
    trace = simulate(row.instance.graph(), row.platform, schedule)
    assert trace.peak_bytes == (60, 0)
    assert trace.violation is not None
    assert trace.violation.excess_bytes == 10


# --- the corrected model on the same table -------------------------------------------


def minimised(
    instance: DeviceInstance, *, is_transient: bool, solver: MipSolver = MipSolver.HIGHS
) -> tuple[SweepModel, Solution]:
    options = ModelOptions(is_transient=is_transient)
    model = SweepModel(instance, frontier_slots(instance), options).build()
    settings = Settings(time_limit_s=120, absolute_gap=0.5)
    return model, solve_model(model.program.model, solver, settings)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("is_transient", [True, False])
def test_corrected_rows_on_the_authors_table(row: Row, is_transient: bool):
    instance = row.exact_instance()
    model, found = minimised(instance, is_transient=is_transient)
    if not row.is_feasible:
        assert found.outcome is Outcome.INFEASIBLE
        return
    assert found.objective == pytest.approx(2 * row.optimum)
    schedule = model.schedule(found.values)
    peaks = list_peaks(instance.graph, row.platform, schedule)
    assert max(peaks) <= row.budget


# --- optima of the digest ------------------------------------------------------------


@cache
def oracle_entries() -> list[dict]:
    if not ORACLE.is_file():
        return []
    entries = json.loads(ORACLE.read_text(encoding="utf-8"))["instances"]
    return [entry for entry in entries if entry["name"].endswith("-2dev")]


def oracle_instance(entry: dict) -> tuple[DeviceInstance, Platform]:
    nodes = entry["nodes"]
    users = {i for deps in entry["deps"] for i in deps}
    place = {node: index for index, node in enumerate(sorted(users))}
    graph = TrainingGraph(
        name=entry["name"],
        storages=tuple(
            Storage(name=f"{i}", size_bytes=nodes[i]["size"]) for i in sorted(users)
        ),
        ops=tuple(
            Op(
                name=f"{i}",
                reads=tuple(place[j] for j in entry["deps"][i]),
                writes=(place[i],) if i in place else (),
                cost_ns=(node["cost"], node["cost_dev1"]),
                workspace_bytes=(0 if i in place else node["size"],) * 2,
                phase=Phase.FORWARD,
            )
            for i, node in enumerate(nodes)
        ),
        device_kinds=("first", "second"),
    )
    platform = linked(("first", "second"), tuple(entry["budgets"]), 10**15)
    copies = [nodes[i]["copy_01_10"] for i in sorted(users)]
    instance = replace(
        DeviceInstance.of(Problem(graph=graph, platform=platform)),
        copy_ns={
            (0, 1): tuple(copy[0] for copy in copies),
            (1, 0): tuple(copy[1] for copy in copies),
        },
    )
    return instance, platform


needs_oracle = pytest.mark.skipif(
    not ORACLE.is_file(), reason="the folder with published optima is not there"
)


# HiGHS takes twice as long as SCIP to prove these optima.
PROVED_BY_SCIP = {("resid-3-2dev", 32), ("unet-2x1-2dev", 48)}


def check_oracle_entry(entry: dict) -> None:
    instance, platform = oracle_instance(entry)
    is_for_scip = (entry["name"], entry["budgets"][0]) in PROVED_BY_SCIP
    solver = MipSolver.SCIP if is_for_scip else MipSolver.HIGHS
    model, found = minimised(instance, is_transient=True, solver=solver)
    assert found.outcome is Outcome.OPTIMAL
    assert found.objective == pytest.approx(entry["optimum"])
    schedule = model.schedule(found.values)
    peaks = list_peaks(instance.graph, platform, schedule)
    assert all(p <= b for p, b in zip(peaks, entry["budgets"], strict=True))
    costs = [
        instance.cost_ns[s.op][s.device]
        if isinstance(s, Compute)
        else instance.copy_ns[s.source, s.target][s.storage]
        for s in schedule.steps
        if isinstance(s, Compute | Copy)
    ]
    assert sum(cost or 0 for cost in costs) == entry["optimum"]


@needs_oracle
def test_two_device_optima():
    entries = oracle_entries()
    small = [entry for entry in entries if entry["n"] <= 15]
    assert 0 < len(small) < len(entries)
    for entry in small:
        check_oracle_entry(entry)


# One by one: two of them take six to eight seconds each.
@needs_oracle
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "entry",
    [entry for entry in oracle_entries() if entry["n"] > 15],
    ids=lambda entry: f"{entry['name']}-{entry['budgets'][0]}",
)
def test_two_device_optima_of_larger_graphs(entry: dict):
    check_oracle_entry(entry)


@needs_oracle
def test_copies_that_stay_cost_no_more_than_transient_ones():
    entries = [e for e in oracle_entries() if e["n"] <= 13][:4]
    savings = []
    for entry in entries:
        instance, platform = oracle_instance(entry)
        model, found = minimised(instance, is_transient=False)
        assert found.objective is not None
        schedule = model.schedule(found.values)
        peaks = list_peaks(instance.graph, platform, schedule)
        assert all(p <= b for p, b in zip(peaks, entry["budgets"], strict=True))
        savings.append(entry["optimum"] - round(found.objective))
    assert min(savings) >= 0
    assert max(savings) > 0


# --- exhaustive search ---------------------------------------------------------------


@st.composite
def problems(
    draw: st.DrawFn,
    max_ops: int = 6,
    *,
    copies_wait: bool = True,
    holds_outputs: bool = False,
) -> Problem:
    """Two devices with budgets near what the largest op needs; some links missing."""
    graph = draw(
        graphs(
            max_ops=max_ops,
            kind_count=2,
            device_count=2,
            sizes=st.integers(0, 5),
            holds_outputs=holds_outputs,
        )
    )
    assume(required_ops(graph))
    # Next to 10^12, a nanosecond is below what floating-point solvers tell apart.
    assume(all((c or 0) < 10**6 for op in graph.ops for c in op.cost_ns))
    links = tuple(
        Link(
            source=a,
            target=1 - a,
            bytes_per_s=draw(st.sampled_from([5 * 10**8, 10**9, 4 * 10**9])),
            latency_ns=draw(st.integers(0, 2)),
        )
        for a in (0, 1)
        if draw(st.integers(0, 5))
    )
    need = max(
        sum(graph.storages[s].size_bytes for s in {*op.reads, *op.writes})
        + max(op.workspace_bytes)
        for op in graph.ops
    )
    devices = tuple(
        Device(
            name=kind,
            kind=kind,
            budget_bytes=max(
                1, graph.resident_bytes(d) + need + draw(st.integers(-2, 6))
            ),
        )
        for d, kind in enumerate(graph.device_kinds)
    )
    platform = Platform(devices=devices, links=links, copies_wait=copies_wait)
    return Problem(graph=graph, platform=platform)


def check_against(result: Result, problem: Problem, optimum: int | None) -> None:
    if optimum is None:
        assert result.status is Status.INFEASIBLE
        assert result.message
        return
    assert result.status is Status.OPTIMAL
    assert result.cost_ns == result.bound_ns == optimum


@settings(max_examples=60)
@given(problem=problems())
def test_staged_optima_of_all_kinds_of_graphs(problem: Problem):
    found = optimum(problem.graph, problem.platform, is_staged=True)
    result = solve(problem, XEngine(copies_anywhere=True))
    check_against(result, problem, None if found is None else found[0])
    if found is not None and result.status is Status.OPTIMAL:
        peaks = list_peaks(problem.graph, problem.platform, found[1])
        assert all(
            d.budget_bytes is None or p <= d.budget_bytes
            for p, d in zip(peaks, problem.platform.devices, strict=True)
        )


@settings(max_examples=25)
@given(problem=problems(max_ops=3))
def test_unrestricted_optima_of_tiny_graphs(problem: Problem):
    found = optimum(problem.graph, problem.platform)
    count = len(problem.graph.ops) + 1
    result = solve(problem, XEngine(sweeps=(count, count), copies_anywhere=True))
    check_against(result, problem, None if found is None else found[0])


@settings(max_examples=40)
@given(problem=problems(max_ops=5, copies_wait=False))
def test_copies_that_run_ahead_may_cost_the_proof_but_no_more(problem: Problem):
    found = optimum(problem.graph, problem.platform, is_staged=True)
    result = solve(problem, XEngine(copies_anywhere=True))
    if found is None:
        assert result.status is Status.INFEASIBLE
        return
    assert result.bound_ns <= found[0]
    if result.status is Status.OPTIMAL:
        assert result.cost_ns == found[0]
    else:
        # The list fits, but not when copies run ahead of it.
        assert "refused" in result.message
        assert result.cost_ns is None or result.cost_ns >= found[0]


@settings(max_examples=30)
@given(problem=problems())
def test_no_answer_beats_the_optimum(problem: Problem):
    found = optimum(problem.graph, problem.platform)
    for solver in (XEngine(), XEnginePublished(), DeviceSearch(candidates=20)):
        result = solve(problem, solver)
        if found is None:
            assert result.cost_ns is None
        elif result.cost_ns is not None:
            assert result.cost_ns >= found[0]


# --- several devices, and devices that only store ------------------------------------


def chain(
    costs: list[tuple[int | None, ...]], sizes: list[int], kinds: tuple[str, ...]
) -> TrainingGraph:
    """Forward ops one after the other, backward ops that read what forward wrote."""
    count = len(sizes)
    storages = [Storage(name=f"x{i}", size_bytes=s) for i, s in enumerate(sizes)]
    storages += [
        Storage(name=f"g{i}", size_bytes=min(5, s)) for i, s in enumerate(sizes)
    ]
    ops = [
        Op(
            name=f"f{i}",
            reads=(i - 1,) if i else (),
            writes=(i,),
            cost_ns=costs[i],
            workspace_bytes=(0,) * len(kinds),
            phase=Phase.FORWARD,
        )
        for i in range(count)
    ]
    ops += [
        Op(
            name=f"b{i}",
            reads=(i, *((count + i + 1,) if i + 1 < count else ())),
            writes=(count + i,),
            cost_ns=costs[i],
            workspace_bytes=(0,) * len(kinds),
            phase=Phase.BACKWARD,
        )
        for i in reversed(range(count))
    ]
    return TrainingGraph(
        name="chain",
        storages=tuple(storages),
        ops=tuple(ops),
        forward_outputs=(count - 1,),
        final_outputs=(count,),
        device_kinds=kinds,
    )


OFFLOADED = chain([(100, None)] * 4, [10, 40, 10, 10], ("gpu", "host"))


def test_offload_when_recomputation_is_dear():
    platform = linked(("gpu", "host"), (60, None), 4 * 10**9)
    problem = Problem(graph=OFFLOADED, platform=platform)
    best = best_on_devices(OFFLOADED, platform, is_staged=True)
    assert best is not None
    for solver in (XEngine(), DeviceSearch(candidates=100)):
        result = solve(problem, solver)
        assert result.schedule is not None
        assert any(isinstance(step, Copy) for step in result.schedule.steps)
        assert result.schedule.recompute_counts() == {}
        assert result.cost_ns is not None
        slack = 1.0 if isinstance(solver, XEngine) else 1.05
        assert best[0] <= result.cost_ns <= slack * best[0]


def test_offload_is_refused_where_copies_run_ahead():
    platform = linked(("gpu", "host"), (60, None), 4 * 10**9, copies_wait=False)
    problem = Problem(graph=OFFLOADED, platform=platform)
    result = solve(problem, XEngine())
    assert "was refused: device 0 'gpu' holds" in result.message
    waiting = solve(
        replace(problem, platform=replace(platform, copies_wait=True)), XEngine()
    )
    assert waiting.cost_ns is not None
    assert result.cost_ns is None or result.cost_ns > waiting.cost_ns


def test_recomputation_when_offload_is_dear():
    graph = chain([(3, None)] * 5, [10, 40, 10, 10, 10], ("gpu", "host"))
    platform = linked(("gpu", "host"), (60, None), 10**8)
    result = solve(Problem(graph=graph, platform=platform), XEngine())
    assert result.schedule is not None
    assert result.status is Status.OPTIMAL
    assert result.schedule.recompute_counts()
    assert not any(isinstance(step, Copy) for step in result.schedule.steps)


def test_three_devices_that_each_run_a_part():
    costs: list[tuple[int | None, ...]] = [
        (1, None, 9),
        (None, 2, None),
        (9, 9, 1),
        (None, 1, None),
    ]
    graph = chain(costs, [4, 6, 5, 3], ("a", "b", "c"))
    platform = Platform(
        devices=tuple(
            Device(name=k, kind=k, budget_bytes=30) for k in graph.device_kinds
        ),
        # From a to c and back through b only, and dearer back.
        links=(
            Link(source=0, target=1, bytes_per_s=4 * 10**9),
            Link(source=1, target=0, bytes_per_s=10**9, latency_ns=1),
            Link(source=1, target=2, bytes_per_s=4 * 10**9),
            Link(source=2, target=1, bytes_per_s=10**9),
        ),
    )
    problem = Problem(graph=graph, platform=platform)
    best = best_on_devices(graph, platform, is_staged=True)
    result = solve(problem, XEngine(copies_anywhere=True))
    assert best is not None
    assert result.status is Status.OPTIMAL
    assert result.cost_ns == best[0]
    assert solve(problem, DeviceSearch(candidates=100)).cost_ns == best[0]


def test_overlapped_objective_lets_devices_work_together():
    # Two branches of equal length: together they take half the time.
    storages = [Storage(name=f"s{i}", size_bytes=1) for i in range(7)]
    reads = [(), (0,), (0,), (1,), (2,), (3, 4)]
    ops = tuple(
        Op(
            name=f"o{i}",
            reads=reads[i],
            writes=(i,),
            cost_ns=(100, 100),
            workspace_bytes=(0, 0),
            phase=Phase.FORWARD,
        )
        for i in range(6)
    )
    graph = TrainingGraph(
        name="branches",
        storages=tuple(storages[:6]),
        ops=ops,
        forward_outputs=(5,),
        device_kinds=("a", "b"),
    )
    platform = linked(("a", "b"), (20, 20))
    problem = Problem(graph=graph, platform=platform)
    serial = solve(problem, XEngine())
    assert serial.status is Status.OPTIMAL
    assert serial.cost_ns == 600
    for solver in (
        XEngine(objective=Objective.OVERLAPPED, time_limit_s=5),
        DeviceSearch(objective=Objective.OVERLAPPED),
    ):
        found = solve(problem, solver)
        assert found.trace is not None
        # 100 on both, then 200 on each, 100 on one; and one copy.
        assert found.trace.overlapped_ns == 401


@settings(max_examples=25)
@given(problem=problems(max_ops=4))
def test_overlapped_answer_is_no_slower_than_the_serial_one(problem: Problem):
    serial = solve(problem, XEngine())
    overlapped = solve(problem, XEngine(objective=Objective.OVERLAPPED))
    assert (serial.status is Status.INFEASIBLE) is (
        overlapped.status is Status.INFEASIBLE
    )
    if serial.trace is None or overlapped.trace is None:
        return
    assert overlapped.trace.overlapped_ns <= serial.trace.overlapped_ns


# --- what cannot be ------------------------------------------------------------------


def pair(graph: TrainingGraph, budgets: tuple[int | None, int | None]) -> Problem:
    return Problem(graph=graph, platform=linked(("a", "b"), budgets))


@pytest.mark.parametrize("solver", [XEngine(), XEnginePublished(), DeviceSearch()])
def test_budget_below_what_an_op_needs_names_op_and_devices(solver):
    graph = chain([(1, 1)] * 3, [10, 20, 30], ("a", "b"))
    result = solve(pair(graph, (40, 45)), solver)
    assert result.schedule is None
    assert "op 2 'f2' fits on no device" in result.message
    assert "'a', which has 40 B" in result.message
    assert "50 B" in result.message


@pytest.mark.parametrize("solver", [XEngine(), XEnginePublished(), DeviceSearch()])
def test_op_that_no_device_can_run_is_named(solver):
    graph = chain([(1, None, 1), (None, None, 1)], [1, 1], ("a", "b", "c"))
    result = solve(pair(graph, (40, 45)), solver)
    assert result.schedule is None
    assert "op 1 'f1' can run on no device of the platform ('a', 'b')" in result.message


@pytest.mark.parametrize("solver", [XEngine(), XEnginePublished(), DeviceSearch()])
def test_missing_link_is_named(solver):
    graph = chain([(1, None), (None, 1)], [1, 1], ("a", "b"))
    platform = replace(linked(("a", "b"), (9, 9)), links=())
    result = solve(Problem(graph=graph, platform=platform), solver)
    assert result.schedule is None
    assert "op 1 'f1' can run on 'b', but no links bring" in result.message


def test_residents_over_the_budget_name_the_device():
    graph = chain([(1, 1)], [1], ("a", "b"))
    weights = Storage(name="w", size_bytes=100, is_resident=True, home=1)
    graph = replace(graph, storages=(*graph.storages, weights))
    result = solve(pair(graph, (40, 45)), XEngine())
    assert result.status is Status.INFEASIBLE
    assert "device 'b' holds 100 B of parameters" in result.message


@pytest.mark.parametrize("solver", [XEngine(), DeviceSearch()])
def test_time_limit_of_zero(solver):
    graph = chain([(1, 1)] * 3, [10, 20, 30], ("a", "b"))
    result = solve(pair(graph, (90, 90)), solver, limits=Limits.after(0))
    assert result.stop_reason is StopReason.TIME_LIMIT
    assert result.message


def test_large_graphs_are_declined_with_what_to_use_instead():
    graph = chain([(1, 1)] * 200, [1] * 200, ("a", "b"))
    with pytest.raises(SolverUnsuitableError, match="use solver='device-search'"):
        solve(pair(graph, (90, 90)), XEngine())


def test_one_device_is_for_other_solvers():
    graph = replace(chain([(1,)] * 3, [10, 20, 30], ("a",)), device_kinds=("a",))
    problem = Problem(graph=graph, platform=single_device(60, "a"))
    with pytest.raises(SolverUnsuitableError, match="checkmate"):
        solve(problem, XEngine())


def test_published_solver_says_what_the_judge_refused():
    graph = chain([(1, 9)] * 5, [10, 40, 10, 10, 10], ("a", "b"))
    problem = pair(graph, (60, 60))
    result = solve(problem, XEnginePublished())
    assert result.status is Status.UNKNOWN
    assert "the published rows accept a schedule that the judge refuses" in (
        result.message
    )
    assert "device 0 'a' holds" in result.message
    corrected = solve(problem, XEngine())
    assert corrected.trace is not None
    assert max(corrected.trace.peak_bytes) <= 60


def test_boundary_and_outputs_are_at_home():
    graph = chain([(9, 1)] * 3, [3, 4, 5], ("a", "b"))
    result = solve(pair(graph, (30, 30)), XEngine())
    assert result.schedule is not None
    steps = result.schedule.steps
    boundary = steps.index(Boundary())
    assert Copy(2, 1, 0) in steps[:boundary]
    assert Copy(3, 1, 0) in steps[boundary:]
