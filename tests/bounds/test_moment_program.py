"""The moment program: it lets every schedule pass, and little else."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bounds.drawn_graphs import solved_cases
from tests.bounds.points import broken_rows, point_of, trimmed
from tests.instances import INSTANCES
from tests.oracles import brute_force_schedule
from tests.strategies import graphs, schedules

from remat.bounds.instance import Instance, instance_of
from remat.bounds.moment_program import MomentProgram, default_chain
from remat.bounds.time_bound import solved, spread_moments
from remat.core.errors import CertificateError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.core.units import LARGEST_TOTAL
from remat.solvers import GreedyEviction, MinCutRetention, StoreAll
from remat.solvers.base import Solver, ignore_progress


def instance(graph: TrainingGraph) -> Instance:
    found = instance_of(graph)
    assert found is not None
    return found


def some_of(
    chain: tuple[int, ...], step: Instance, chooser: random.Random
) -> tuple[int, ...]:
    """Return some nodes of a chain, the boundary among them."""
    share = chooser.choice([0.3, 0.7, 1.0])
    return tuple(
        node for node in chain if node == step.boundary or chooser.random() < share
    )


def any_chain(step: Instance, chooser: random.Random) -> tuple[int, ...]:
    """Return nodes of which each precedes the next, through the boundary.

    Off a chain, where much is, ops may run first in many intervals.
    """
    before, after, node = [], [step.boundary], step.boundary
    while step.predecessors[node]:
        node = chooser.choice(step.predecessors[node])
        before.append(node)
    while later := [k for k in step.successors[after[-1]] if k != step.end]:
        after.append(chooser.choice(later))
    return (*reversed(before), *after)


def check_point(program: MomentProgram, graph: TrainingGraph, schedule: Schedule):
    cut = trimmed(graph, schedule)
    before = simulate(graph, single_device(), schedule)
    after = simulate(graph, single_device(), cut)
    assert after.is_valid
    assert after.serial_ns <= before.serial_ns
    assert after.peak_bytes[0] <= before.peak_bytes[0]
    values = point_of(program, cut)
    assert not broken_rows(program, values)
    cost = sum(v * c for v, c in zip(values, program.program.cost, strict=True))
    assert cost <= after.serial_ns


@pytest.fixture
def all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for all memory, however little."""
    monkeypatch.setattr("remat.bounds.moment_program._LEAST_NEED", LARGEST_TOTAL)
    monkeypatch.setattr("remat.bounds.moment_program._LEAST_SIZE", LARGEST_TOTAL)


@pytest.mark.usefixtures("all_counted")
def test_best_schedules_of_drawn_graphs_keep_every_row():
    chooser = random.Random(1)
    for case in solved_cases(100):
        step = instance(case.graph)
        schedule = brute_force_schedule(case.graph, case.budget_bytes)
        assert schedule is not None
        for chain in (default_chain(step), any_chain(step, chooser)):
            moments = some_of(chain, step, chooser)
            program = MomentProgram(step, case.memory_bytes, moments)
            check_point(program, case.graph, schedule)


@pytest.mark.usefixtures("all_counted")
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_schedules_with_detours_keep_every_row(data: st.DataObject):
    graph = data.draw(graphs(holds_outputs=data.draw(st.booleans())))
    schedule = data.draw(schedules(graph, single_device()))
    trace = simulate(graph, single_device(), schedule)
    step = instance(graph)
    chooser = random.Random(data.draw(st.integers(0, 9)))
    moments = some_of(any_chain(step, chooser), step, chooser)
    memory_bytes = trace.peak_bytes[0] - graph.resident_bytes()
    check_point(MomentProgram(step, memory_bytes, moments), graph, schedule)


@pytest.mark.parametrize("name", ["mlp", "transformer", "unet", "once-only"])
@pytest.mark.parametrize("percent", [50, 75])
def test_schedules_of_solvers_keep_every_row(name: str, percent: int):
    graph = INSTANCES[name]().graph
    step = instance(graph)
    peak = StoreAll().solve(
        Problem(graph=graph, platform=single_device()), Limits(), ignore_progress
    )
    assert peak.schedule is not None
    whole = simulate(graph, single_device(), peak.schedule).peak_bytes[0]
    solvers: list[Solver] = [GreedyEviction(), MinCutRetention(effort_ops=20_000)]
    for solver in solvers:
        problem = Problem(graph=graph, platform=single_device(whole * percent // 100))
        found = solver.solve(problem, Limits(), ignore_progress)
        if found.schedule is None:
            continue
        used = simulate(graph, single_device(), found.schedule).peak_bytes[0]
        for moments in (spread_moments(step), default_chain(step)[::5]):
            chosen = {*moments, step.boundary}
            ordered = tuple(k for k in default_chain(step) if k in chosen)
            program = MomentProgram(step, used - graph.resident_bytes(), ordered)
            check_point(program, graph, found.schedule)


@pytest.mark.usefixtures("all_counted")
def test_the_bound_of_drawn_graphs_is_never_above_the_optimum_and_often_near():
    chooser = random.Random(2)
    shares: list[float] = []
    for case in solved_cases(100):
        step = instance(case.graph)
        moments = some_of(default_chain(step), step, chooser)
        program = MomentProgram(step, case.memory_bytes, moments)
        found = solved(program)
        assert found is not None
        assert found[0] <= case.optimum_ns
        if case.must_recompute:
            extra = max(0, found[0] - case.once_ns)
            shares.append(extra / (case.optimum_ns - case.once_ns))
    # What is proved of the extra time, measured: less if any kind of row is lost.
    assert (len(shares), sum(share > 0.999 for share in shares)) == (73, 19)
    assert sum(shares) / len(shares) > 0.565


def test_moments_out_of_order_are_refused():
    graph = INSTANCES["mlp"]().graph
    step = instance(graph)
    chain = default_chain(step)
    boundary = chain.index(step.boundary)
    early, late = chain[boundary - 1], chain[boundary + 1]
    wrong = [
        (),
        (early,),
        (late, step.boundary),
        (step.boundary, early),
        (step.boundary, step.boundary),
        (step.boundary, late, late),
        (step.boundary, step.end),
        (step.boundary, 10**6),
        (step.boundary, -2),
    ]
    for moments in wrong:
        with pytest.raises(CertificateError, match=r"moment|boundary"):
            MomentProgram(step, 10**9, moments)
    assert MomentProgram(step, 10**9, (early, step.boundary, late)).count == 4


def test_rows_and_variables_grow_with_the_graph_alone():
    small = instance(INSTANCES["mlp"]().graph)
    program = MomentProgram(small, 10**9, (small.boundary,)).program
    assert len(program.cost) <= 5 * len(small.order)
    assert program.row_count <= 5 * len(small.order)
    assert replace(small) == small
