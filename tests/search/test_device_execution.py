"""Execution within budgets, and the bound of placement without memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.strategies import graphs, optimum

from remat.backends.mathopt import Settings
from remat.core.bounds import required_ops
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import insert_discards
from remat.core.platform import Device, Link, Platform
from remat.core.problem import Problem
from remat.core.schedule import Boundary, Compute, Copy, Step
from remat.core.simulator import simulate
from remat.search.device_execution import ExecutionRule, execute
from remat.search.device_feasibility import infeasible_reason
from remat.search.device_instance import DeviceInstance
from remat.search.device_placements import Placements
from remat.solvers.devices.relaxation import relaxed_placement
from remat.testing.device_oracles import best_on_devices

RULES = (
    ExecutionRule(),
    ExecutionRule(copy_percent=10_000, distance_exponent=0.0),
    ExecutionRule(limit_percent=70, ancestor_share=1.0),
)


@st.composite
def problems(draw: st.DrawFn, max_ops: int = 7) -> Problem:
    """Two devices; in some graphs the caller works at the end of each pass."""
    homes = draw(st.sampled_from([1, 2]))
    graph = draw(
        graphs(
            max_ops=max_ops,
            kind_count=2,
            device_count=homes,
            sizes=st.integers(0, 5),
            holds_outputs=draw(st.booleans()),
        )
    )
    # Half the links work in one direction only.
    links = tuple(
        Link(source=a, target=1 - a, bytes_per_s=10**9, latency_ns=1)
        for a in draw(st.sampled_from([(0,), (0, 1), (0, 1), (1,)]))
    )
    devices = tuple(
        Device(name=kind, kind=kind, budget_bytes=draw(st.integers(10, 40)))
        for kind in graph.device_kinds
    )
    platform = Platform(devices=devices, links=links, copies_wait=True)
    return Problem(graph=graph, platform=platform)


@settings(max_examples=150)
@given(problem=problems(), rule=st.sampled_from(RULES))
def test_what_is_executed_keeps_to_every_budget(problem: Problem, rule: ExecutionRule):
    instance = DeviceInstance.of(problem)
    assume(infeasible_reason(instance) is None)
    for placement in Placements(instance).starts():
        steps = execute(instance, placement, rule)
        if steps is not None:
            schedule = insert_discards(problem.graph, steps)
            trace = simulate(problem.graph, problem.platform, schedule)
            assert trace.violation is None


def once_only(
    phase: Phase, reads: Sequence[int] = (), writes: Sequence[int] = ()
) -> Op:
    return Op(
        name="op",
        reads=tuple(reads),
        writes=tuple(writes),
        cost_ns=(1, 1),
        workspace_bytes=(0, 0),
        phase=phase,
        non_recomputable="it draws random numbers",
    )


def executed(
    graph: TrainingGraph, cpu_bytes: int, gpu_bytes: int = 6
) -> list[Step] | None:
    """Return the steps on two devices, with all ops on the first; judged."""
    platform = Platform(
        devices=(
            Device(name="cpu", kind="cpu", budget_bytes=cpu_bytes),
            Device(name="gpu", kind="gpu", budget_bytes=gpu_bytes),
        ),
        links=tuple(
            Link(source=a, target=1 - a, bytes_per_s=10**9, latency_ns=1)
            for a in (0, 1)
        ),
        copies_wait=True,
    )
    instance = DeviceInstance.of(Problem(graph=graph, platform=platform))
    steps = execute(instance, [(0,)] * len(graph.ops))
    if steps is not None:
        schedule = insert_discards(graph, steps)
        assert simulate(graph, platform, schedule).violation is None
    return steps


def test_nothing_is_copied_between_the_callers_work_and_the_boundary():
    graph = TrainingGraph(
        name="room for tangents",
        storages=(
            Storage(name="input", size_bytes=1, is_resident=True),
            Storage(name="activation", size_bytes=3),
            Storage(name="tangent", size_bytes=3),
        ),
        ops=(
            once_only(Phase.FORWARD, (0,), (1,)),
            replace(once_only(Phase.FORWARD), is_external=True),
            once_only(Phase.BACKWARD, (2,)),
            once_only(Phase.BACKWARD, (1,)),
        ),
        tangents=(2,),
        device_kinds=("cpu", "gpu"),
    )
    steps = executed(graph, 6)
    assert steps is not None
    assert steps.index(Copy(1, 0, 1)) < steps.index(Compute(1, 0))
    assert executed(graph, 6, gpu_bytes=2**62) == steps


def test_nothing_is_brought_back_between_two_works_of_the_caller():
    work = replace(once_only(Phase.FORWARD), is_external=True)
    graph = TrainingGraph(
        name="two works",
        storages=(
            Storage(name="input", size_bytes=1, is_resident=True),
            Storage(name="activation", size_bytes=3),
        ),
        ops=(
            once_only(Phase.FORWARD, (0,), (1,)),
            replace(work, workspace_bytes=(3, 0)),
            replace(work, reads=(1,)),
        ),
        device_kinds=("cpu", "gpu"),
    )
    assert executed(graph, 6) is None
    assert executed(graph, 7) == [
        Compute(0, 0),
        Compute(1, 0),
        Compute(2, 0),
        Boundary(),
    ]


@settings(max_examples=100)
@given(problem=problems())
def test_with_ample_memory_every_placement_is_executed(problem: Problem):
    both = tuple(
        Link(source=a, target=1 - a, bytes_per_s=10**9, latency_ns=1) for a in (0, 1)
    )
    platform = replace(
        problem.platform,
        devices=tuple(replace(d, budget_bytes=None) for d in problem.platform.devices),
        links=both,
    )
    problem = Problem(graph=problem.graph, platform=platform)
    instance = DeviceInstance.of(problem)
    for placement in Placements(instance).starts():
        steps = execute(instance, placement)
        assert steps is not None
        schedule = insert_discards(problem.graph, steps)
        assert simulate(problem.graph, platform, schedule).violation is None


@settings(max_examples=60)
@given(problem=problems(max_ops=5))
def test_placement_without_memory_bounds_every_schedule(problem: Problem):
    assume(required_ops(problem.graph))
    instance = DeviceInstance.of(problem)
    assume(infeasible_reason(instance) is None)
    found = relaxed_placement(instance, Settings())
    assert found.placement is not None
    best = optimum(problem.graph, problem.platform)
    if best is not None:
        assert found.bound_ns <= best[0]
    unlimited = replace(
        problem.platform,
        devices=tuple(replace(d, budget_bytes=None) for d in problem.platform.devices),
    )
    ample = optimum(problem.graph, unlimited)
    assert ample is not None
    # A device without a limit takes ops that did not fit there before.
    instance = DeviceInstance.of(Problem(graph=problem.graph, platform=unlimited))
    assert relaxed_placement(instance, Settings()).bound_ns <= ample[0]


@pytest.mark.parametrize("largest_ns", [10**9, 10**10, 10**12])
def test_what_is_tiny_beside_the_largest_cost_is_no_reason_for_too_high_a_bound(
    largest_ns: int,
):
    def op(writes: Sequence[int], reads: Sequence[int], *cost_ns: int | None) -> Op:
        return Op(
            name=f"op of {writes[0]}",
            reads=tuple(reads),
            writes=tuple(writes),
            cost_ns=cost_ns,
            workspace_bytes=(0, 0),
            phase=Phase.FORWARD,
            is_ordered=True,
        )

    graph = TrainingGraph(
        name="magnitudes",
        storages=(
            Storage(name="input", size_bytes=1, is_resident=True),
            *(Storage(name=f"s{i}", size_bytes=0) for i in range(3)),
        ),
        ops=(op((1, 2), (), 1, largest_ns), op((3,), (0, 1, 2), largest_ns, 0)),
        device_kinds=("cpu", "gpu"),
    )
    platform = Platform(
        devices=(Device(name="cpu", kind="cpu"), Device(name="gpu", kind="gpu")),
        links=tuple(
            Link(source=a, target=1 - a, bytes_per_s=10**9, latency_ns=1)
            for a in (0, 1)
        ),
    )
    instance = DeviceInstance.of(Problem(graph=graph, platform=platform))
    best = best_on_devices(graph, platform)
    assert best is not None
    assert best[0] == 1 + (1 + 1) + 1 + 1
    bound_ns = relaxed_placement(instance, Settings()).bound_ns
    assert bound_ns <= best[0]
    if largest_ns <= 10**10:
        assert bound_ns == best[0]


@settings(max_examples=60)
@given(problem=problems(max_ops=5))
def test_reasons_are_proofs(problem: Problem):
    reason = infeasible_reason(DeviceInstance.of(problem))
    if reason is not None:
        assert optimum(problem.graph, problem.platform) is None
