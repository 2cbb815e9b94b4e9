"""Liveness: where discards go, and that they never do harm."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import Case, cases, graphs, without_budgets

from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import (
    BOUNDARY,
    insert_discards,
    schedule_from_order,
    store_all_order,
)
from remat.core.platform import single_device
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.core.simulator import simulate


def op(name: str, reads: tuple[int, ...], writes: tuple[int, ...], phase: Phase) -> Op:
    return Op(
        name=name,
        reads=reads,
        writes=writes,
        cost_ns=(1,),
        workspace_bytes=(0,),
        phase=phase,
    )


X, A, MASK, Y, T, G = range(6)
GRAPH = TrainingGraph(
    name="two outputs",
    storages=(
        Storage(name="x", size_bytes=8, is_resident=True),
        Storage(name="a", size_bytes=4),
        Storage(name="mask", size_bytes=1),
        Storage(name="y", size_bytes=2),
        Storage(name="t", size_bytes=2),
        Storage(name="g", size_bytes=4),
    ),
    ops=(
        op("drop", (X,), (A, MASK), Phase.FORWARD),
        op("head", (A,), (Y,), Phase.FORWARD),
        op("back", (MASK, T), (G,), Phase.BACKWARD),
    ),
    forward_outputs=(Y,),
    tangents=(T,),
    final_outputs=(G,),
)


def test_store_all_order_runs_every_op_once_with_the_boundary_between():
    assert store_all_order(GRAPH) == [0, 1, BOUNDARY, 2]


def test_each_storage_goes_right_after_its_last_use():
    assert schedule_from_order(GRAPH, store_all_order(GRAPH)) == Schedule(
        (
            Compute(0),
            Compute(1),
            Discard(A),
            Boundary(),
            Discard(Y),
            Compute(2),
            Discard(T),
            Discard(MASK),
        )
    )


def test_an_output_that_nobody_wants_goes_right_after_its_op():
    order = [0, 1, BOUNDARY, 0, 2]
    steps = schedule_from_order(GRAPH, order).steps
    again = steps.index(Compute(0), 1)
    # The first mask dies at once, the second a as well: one is read before, one after.
    assert steps[1] == Discard(MASK)
    assert steps[again + 1] == Discard(A)


def test_orders_run_on_the_device_that_is_named():
    steps = schedule_from_order(GRAPH, store_all_order(GRAPH), device=1).steps
    assert {step.device for step in steps if isinstance(step, Compute)} == {1}


def test_discards_that_are_there_already_are_moved_not_kept():
    late: list[Step] = [Compute(0), Compute(1), Boundary(), Compute(2)]
    late += [Discard(A), Discard(MASK), Discard(Y), Discard(T)]
    assert insert_discards(GRAPH, late) == schedule_from_order(
        GRAPH, store_all_order(GRAPH)
    )


def test_tangents_that_nobody_reads_go_at_the_boundary():
    steps: list[Step] = [Compute(0), Compute(1), Boundary()]
    assert insert_discards(GRAPH, steps).steps[-3:] == (
        Boundary(),
        Discard(Y),
        Discard(T),
    )


def test_a_copy_that_nobody_reads_goes_at_once_and_residents_stay_at_home():
    steps: list[Step] = [Copy(X, 0, 1), Compute(0)]
    assert insert_discards(GRAPH, steps).steps[:3] == (
        Copy(X, 0, 1),
        Discard(X, 1),
        Compute(0),
    )


def test_nothing_is_done_to_no_steps():
    assert insert_discards(GRAPH, []) == Schedule(())


def without_discards(schedule: Schedule) -> list[Step]:
    return [step for step in schedule.steps if not isinstance(step, Discard)]


@settings(max_examples=300, deadline=None)
@given(cases(is_mutated=False))
def test_discards_never_raise_a_peak_nor_break_a_schedule(case: Case):
    platform = without_budgets(case.platform)
    before = simulate(case.graph, platform, case.schedule)
    assert before.violation is None
    tidy = insert_discards(case.graph, case.schedule.steps)
    after = simulate(case.graph, platform, tidy)
    assert after.violation is None
    assert without_discards(tidy) == without_discards(case.schedule)
    pairs = zip(before.peak_bytes, after.peak_bytes, strict=True)
    assert all(new <= old for old, new in pairs)
    assert after.serial_ns == before.serial_ns
    assert after.overlapped_ns == before.overlapped_ns


@settings(max_examples=300, deadline=None)
@given(cases(is_mutated=True))
def test_any_schedule_that_is_valid_stays_valid(case: Case):
    platform = without_budgets(case.platform)
    before = simulate(case.graph, platform, case.schedule)
    if before.violation is None:
        tidy = insert_discards(case.graph, case.schedule.steps)
        after = simulate(case.graph, platform, tidy)
        assert after.violation is None
        pairs = zip(before.peak_bytes, after.peak_bytes, strict=True)
        assert all(new <= old for old, new in pairs)


@settings(max_examples=200, deadline=None)
@given(cases(is_mutated=False))
def test_inserting_discards_twice_is_inserting_them_once(case: Case):
    once = insert_discards(case.graph, case.schedule.steps)
    assert insert_discards(case.graph, once.steps) == once


@settings(max_examples=200, deadline=None)
@given(graphs(max_ops=9))
def test_store_all_is_valid_and_keeps_only_final_outputs(graph: TrainingGraph):
    schedule = schedule_from_order(graph, store_all_order(graph))
    trace = simulate(graph, single_device(), schedule)
    assert trace.violation is None
    assert trace.recomputed_ns == 0
    resident = {s for s, block in enumerate(graph.storages) if block.is_resident}
    assert trace.live_after[0] == set(graph.final_outputs) - resident


@settings(max_examples=200, deadline=None)
@given(graphs(max_ops=9), st.data())
def test_an_order_with_repeats_is_freed_as_early_as_can_be(
    graph: TrainingGraph, data: st.DataObject
):
    order = store_all_order(graph)
    again = [i for i, op in enumerate(graph.ops) if op.is_recomputable]
    for index in (
        data.draw(st.lists(st.sampled_from(again), max_size=4)) if again else ()
    ):
        # Its inputs may have gone by then; liveness keeps them, since it sees the read.
        first = order.index(index)
        places = [
            place
            for place in range(first + 1, len(order) + 1)
            if order[place - 1] == BOUNDARY
            or not graph.ops[order[place - 1]].is_external
        ]
        order.insert(data.draw(st.sampled_from(places)), index)
    schedule = schedule_from_order(graph, order)
    trace = simulate(graph, single_device(), schedule)
    assert trace.violation is None
    counts = Counter(step for step in schedule.steps if isinstance(step, Discard))
    for position, step in enumerate(schedule.steps):
        if isinstance(step, Discard):
            # Dropping it never breaks anything; moving it before its cause does.
            cause = max(
                i
                for i, earlier in enumerate(schedule.steps[:position])
                if not isinstance(earlier, Discard)
            )
            uses = schedule.steps[cause]
            assert step.storage in touched(graph, uses)
    assert sum(counts.values()) <= len(order) * len(graph.storages)


def touched(graph: TrainingGraph, step: Step) -> set[int]:
    if isinstance(step, Compute):
        return {*graph.ops[step.op].reads, *graph.ops[step.op].writes}
    assert isinstance(step, Boundary)
    return {*graph.forward_outputs, *graph.tangents}
