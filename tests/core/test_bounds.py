"""Bounds: by hand on small graphs, and never above what brute force finds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.oracles import brute_force_best, brute_force_smallest_budget
from tests.strategies import graphs

from remat.core.bounds import cost_bound_ns, peak_bound_bytes, required_ops
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Device, Platform, single_device
from remat.core.problem import Problem
from remat.core.simulator import simulate


def op(
    name: str,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    phase: Phase = Phase.FORWARD,
    *,
    cost_ns: tuple[int | None, ...] = (10,),
    workspace_bytes: int = 0,
    is_ordered: bool = False,
) -> Op:
    return Op(
        name=name,
        reads=reads,
        writes=writes,
        cost_ns=cost_ns,
        workspace_bytes=(workspace_bytes,) * len(cost_ns),
        phase=phase,
        is_ordered=is_ordered,
    )


def graph(
    sizes: list[int], ops: list[Op], *, resident: tuple[int, ...] = (), **lists: tuple
) -> TrainingGraph:
    return TrainingGraph(
        name="by hand",
        storages=tuple(
            Storage(name=f"s{i}", size_bytes=size, is_resident=i in resident)
            for i, size in enumerate(sizes)
        ),
        ops=tuple(ops),
        **lists,
    )


def test_required_ops_are_those_of_the_outputs_and_of_effects():
    example = graph(
        [1, 1, 1, 1, 1],
        [
            op("used", (), (0,)),
            op("unused", (), (1,)),
            op("output", (0,), (2,)),
            op("ordered", (), (3,), is_ordered=True),
            op("for effect", (1,), ()),
            op("dead end", (2,), (4,)),
        ],
        forward_outputs=(2,),
    )
    # "unused" is read by the op that runs for its effect.
    assert required_ops(example) == {0, 1, 2, 3, 4}


def test_cost_bound_takes_each_required_op_once_at_its_cheapest():
    example = TrainingGraph(
        name="two kinds",
        storages=(Storage(name="y", size_bytes=1), Storage(name="z", size_bytes=1)),
        ops=(
            op("both", (), (0,), cost_ns=(30, 20)),
            op("one", (0,), (1,), cost_ns=(None, 50)),
            op("dead", (1,), (), cost_ns=(7, 9)),
        ),
        forward_outputs=(1,),
        device_kinds=("cpu", "gpu"),
    )
    both = Platform(devices=(Device(), Device(name="gpu", kind="gpu")))
    assert cost_bound_ns(Problem(graph=example, platform=both)) == 20 + 50 + 7
    alone = single_device(kind="gpu")
    assert cost_bound_ns(Problem(graph=example, platform=alone)) == 20 + 50 + 9


@pytest.mark.parametrize(
    ("workspace_bytes", "output_bytes", "expected"),
    [
        # 100 resident; the largest op holds 5 + output + workspace.
        (0, 7, 100 + 5 + 7),
        (9, 7, 100 + 5 + 7 + 9),
        (0, 0, 100 + 5 + 3),
    ],
)
def test_peak_bound_is_the_largest_op_or_the_boundary(
    workspace_bytes: int, output_bytes: int, expected: int
):
    example = graph(
        [100, 5, output_bytes, 3],
        [
            op("f", (0,), (1,)),
            op("g", (1,), (2,), Phase.BACKWARD, workspace_bytes=workspace_bytes),
        ],
        resident=(0,),
        forward_outputs=(1,),
        tangents=(3,),
        final_outputs=(2,),
    )
    assert peak_bound_bytes(example) == expected


def test_peak_bound_counts_all_final_outputs():
    example = graph(
        [4, 4, 4],
        [op(f"o{i}", (), (i,), Phase.BACKWARD) for i in range(3)],
        final_outputs=(0, 1, 2),
    )
    assert peak_bound_bytes(example) == 12


def test_peak_bound_counts_what_the_caller_holds_in_the_backward_pass():
    ops = [
        replace(op("f", (), (0,)), non_recomputable="the caller holds its output"),
        op("g", (), (1,), Phase.BACKWARD),
        op("h", (1,), (2,), Phase.BACKWARD),
    ]
    held = graph([4, 30, 2], ops, forward_outputs=(0,), final_outputs=(0, 2))
    assert peak_bound_bytes(held) == 4 + 30 + 2
    assert peak_bound_bytes(held) == brute_force_smallest_budget(held)
    free = replace(held, final_outputs=(2,))
    assert peak_bound_bytes(free) == 30 + 2


def test_peak_bound_ignores_ops_that_nobody_needs():
    example = graph(
        [4, 1_000],
        [op("used", (), (0,)), op("unused", (), (1,))],
        forward_outputs=(0,),
    )
    assert peak_bound_bytes(example) == 4


@pytest.mark.parametrize("name", INSTANCES)
def test_bounds_are_below_store_all(name: str):
    example = INSTANCES[name]().graph
    schedule = schedule_from_order(example, store_all_order(example))
    trace = simulate(example, single_device(), schedule)
    problem = Problem(graph=example, platform=single_device())
    assert peak_bound_bytes(example) <= trace.peak_bytes[0]
    assert cost_bound_ns(problem) <= trace.serial_ns


@settings(max_examples=40)
@given(
    st.booleans().flatmap(
        lambda holds: graphs(max_ops=5, sizes=st.integers(0, 9), holds_outputs=holds)
    )
)
def test_peak_bound_never_exceeds_the_smallest_budget(example: TrainingGraph):
    smallest = brute_force_smallest_budget(example)
    assert smallest is not None
    assert peak_bound_bytes(example) <= smallest


@settings(max_examples=40)
@given(graphs(max_ops=5, sizes=st.integers(0, 9)))
def test_cost_bound_never_exceeds_the_optimum(example: TrainingGraph):
    problem = Problem(graph=example, platform=single_device())
    optimum = brute_force_best(example, 1 << 60)
    assert optimum is not None
    assert cost_bound_ns(problem) <= optimum
