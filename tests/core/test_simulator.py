"""The judge: exact numbers on small schedules, every rule, and a second opinion."""

from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import replay
from tests.strategies import Case, cases

from remat.core.errors import InvalidGraphError, InvalidPlatformError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.platform import Device, Link, Platform, single_device
from remat.core.rules import Rule
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.core.simulator import Trace, simulate

X, A, Y, T, G = range(5)
EMBED, DROP, COUNT, BACK = range(4)


def op(
    name: str,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    phase: Phase = Phase.FORWARD,
    cost: tuple[int | None, ...] = (10, 1),
    workspace: tuple[int, ...] = (0, 0),
    **facts: object,
) -> Op:
    made = Op(
        name=name,
        reads=reads,
        writes=writes,
        cost_ns=cost,
        workspace_bytes=workspace,
        phase=phase,
    )
    return replace(made, **facts)


GRAPH = TrainingGraph(
    name="small",
    storages=(
        Storage(name="x", size_bytes=100, is_resident=True),
        Storage(name="a", size_bytes=40),
        Storage(name="y", size_bytes=20),
        Storage(name="t", size_bytes=20),
        Storage(name="g", size_bytes=50),
    ),
    ops=(
        op("embed", (X,), (A,), workspace=(7, 8)),
        op("drop", (A,), (Y,), is_ordered=True),
        op("count", (A,), (), is_ordered=True, non_recomputable="it counts"),
        op("back", (A, T), (G,), Phase.BACKWARD, cost=(30, None), workspace=(1, 0)),
    ),
    forward_outputs=(Y,),
    tangents=(T,),
    final_outputs=(G,),
    device_kinds=("cpu", "gpu"),
)

# One byte takes 1 ns from device 0 to 1, and 2 ns back; nothing joins 2 to the others.
PLATFORM = Platform(
    devices=(
        Device(name="main", kind="cpu"),
        Device(name="other", kind="cpu"),
        Device(name="fast", kind="gpu"),
    ),
    links=(
        Link(source=0, target=1, bytes_per_s=10**9, latency_ns=5),
        Link(source=1, target=0, bytes_per_s=5 * 10**8),
    ),
)

FORWARD = (Compute(EMBED), Compute(DROP), Compute(COUNT))
PLAIN = (*FORWARD, Boundary(), Compute(BACK))


def run(
    steps: Sequence[Step], platform: Platform = PLATFORM, graph: TrainingGraph = GRAPH
) -> Trace:
    return simulate(graph, platform, Schedule(tuple(steps)))


# --- numbers --------------------------------------------------------------------------


def test_bytes_during_each_step_are_those_held_and_those_the_step_adds():
    steps = [*FORWARD, Boundary(), Discard(Y), Compute(BACK), Discard(A), Discard(T)]
    trace = run(steps, single_device())
    embed = 100 + 40 + 7  # resident, output, workspace
    drop = 100 + 40 + 20
    count = 100 + 40 + 20
    boundary = count + 20  # the tangent appears
    discard_y = boundary  # freed after the step
    back = 100 + 40 + 20 + 50 + 1
    expected = (embed, drop, count, boundary, discard_y, back, back - 1, back - 41)
    assert trace.timeline_bytes == (expected,)
    assert trace.peak_bytes == (back,)
    assert trace.peak_step() == 5
    assert trace.live_after == (frozenset({G}),)
    assert trace.violation is None
    assert trace.is_valid


def test_costs_add_up_and_recomputation_is_counted_from_the_second_run():
    steps = [*FORWARD, Discard(A), Boundary(), Compute(EMBED), Compute(BACK)]
    trace = run(steps, single_device())
    assert trace.serial_ns == 10 + 10 + 10 + 10 + 30
    assert trace.recomputed_ns == 10
    assert trace.overlapped_ns == trace.serial_ns


def test_an_output_that_is_live_counts_twice_while_its_op_runs_again():
    trace = run([Compute(EMBED), Compute(EMBED), *FORWARD[1:]], single_device())
    assert trace.timeline_bytes[0][:3] == (147, 187, 160)


def test_peak_of_a_device_without_steps_is_what_is_resident_there():
    trace = run([*PLAIN])
    assert trace.peak_bytes == (231, 0, 0)
    assert run([]).peak_bytes == (100, 0, 0)


def test_peak_step_is_the_first_of_equals_and_0_without_steps():
    trace = run([*FORWARD, Boundary(), Discard(T)])
    assert trace.timeline_bytes[0] == (147, 160, 160, 180, 180)
    assert trace.peak_step() == 3
    assert run([]).peak_step() == 0


def test_a_copy_occupies_both_devices_and_takes_latency_and_transfer():
    trace = run([Compute(EMBED), Copy(A, 0, 1), Discard(A)])
    assert trace.timeline_bytes == ((147, 140, 140), (0, 40, 40), (0, 0, 0))
    assert trace.serial_ns == 10 + 5 + 40
    assert trace.live_after == (frozenset(), frozenset({A}), frozenset())


def test_a_resident_storage_may_be_copied_and_the_copy_discarded():
    trace = run([Copy(X, 0, 1), Compute(EMBED, 1), Discard(X, 1)])
    assert trace.timeline_bytes[1] == (100, 147, 140)
    assert trace.violation is not None
    assert trace.violation.rule is Rule.NO_BOUNDARY


def test_copy_time_rounds_up():
    slow = Platform(
        devices=PLATFORM.devices,
        links=(Link(source=0, target=1, bytes_per_s=3 * 10**9, latency_ns=1),),
    )
    assert run([Copy(X, 0, 1)], slow).serial_ns == 1 + 34


def test_what_was_found_cannot_be_changed_afterwards():
    trace = run([])
    assert trace.violation is not None
    with pytest.raises(FrozenInstanceError):
        trace.violation = None  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        trace.violation.step = 5  # type: ignore[misc]


# --- overlapped execution -------------------------------------------------------------


def test_devices_and_links_overlap_and_wait_only_for_what_they_read():
    steps = [
        Compute(EMBED),  # device 0: 0..10
        Copy(A, 0, 1),  # link 0-1: 10..55
        Compute(DROP),  # device 0: 10..20
        Compute(COUNT, 1),  # device 1: 55..65
    ]
    trace = run(steps)
    assert trace.serial_ns == 75
    assert trace.overlapped_ns == 65


def test_a_link_takes_copies_in_order_and_each_direction_is_its_own_queue():
    steps = [
        Copy(X, 0, 1),  # link 0-1: 0..105
        Compute(EMBED),  # device 0: 0..10
        Copy(A, 0, 1),  # link 0-1: 105..150
        Compute(
            EMBED, 1
        ),  # device 1: 105..115; another a, before the copied one is there
        Compute(DROP, 1),  # device 1: 115..125
        Copy(Y, 1, 0),  # link 1-0: 125..165
    ]
    assert run(steps).overlapped_ns == 165
    assert run(steps).serial_ns == 105 + 10 + 45 + 10 + 10 + 40


def test_bytes_that_are_being_copied_outlive_the_discard():
    steps = [
        Compute(EMBED),  # 0..10
        Copy(A, 0, 1),  # reads a: 10..55
        Discard(A),
        Compute(EMBED),  # 10..20, a second a beside the first one
    ]
    trace = run(steps)
    assert max(trace.timeline_bytes[0]) == 147
    assert trace.peak_bytes[0] == 100 + 40 + 40 + 7


def test_bytes_that_are_being_copied_outlive_a_recomputation():
    steps = [
        Compute(EMBED),  # 0..10
        Copy(A, 0, 1),  # reads a: 10..55
        Compute(EMBED),  # 10..20: a fresh a; the old one is still being read
        Compute(DROP),  # 20..30
    ]
    trace = run(steps)
    assert max(trace.timeline_bytes[0]) == 187
    assert trace.peak_bytes[0] == 100 + 40 + 40 + 20


def test_a_discard_waits_in_its_devices_queue():
    steps = [
        Compute(EMBED),  # device 0: 0..10
        Compute(DROP),  # device 0: 10..20
        Copy(X, 0, 1),  # link 0-1: 0..105
        Compute(EMBED, 1),  # device 1: 105..115
        Compute(COUNT, 1),  # device 1: 115..125
        Discard(A, 1),  # device 1: 125
        Copy(Y, 0, 1),  # link 0-1: 105..130, so y lies beside a
    ]
    trace = run(steps)
    assert max(trace.timeline_bytes[1]) == 147
    assert trace.peak_bytes[1] == 100 + 40 + 20 + 7


def test_tangents_appear_when_all_devices_are_done_and_the_outputs_have_arrived():
    far = replace(
        GRAPH,
        storages=(
            *GRAPH.storages[:Y],
            replace(GRAPH.storages[Y], home=1),
            *GRAPH.storages[T:],
        ),
    )
    steps = [*FORWARD, Copy(Y, 0, 1), Boundary(), Compute(BACK)]
    # y leaves device 0 at 20 and is home at 45, after device 0 ended at 30.
    assert run(steps, graph=far).overlapped_ns == 45 + 30
    # With y at home, the tangent waits for the last device: 1 ends at 30 + 105 + ...
    other = [*FORWARD, Copy(X, 0, 1), Compute(EMBED, 1), Boundary(), Compute(BACK)]
    assert run(other).overlapped_ns == 105 + 10 + 30


def test_tangents_do_not_wait_for_copies_that_nobody_reads():
    steps = [*FORWARD, Copy(X, 0, 1), Boundary(), Compute(BACK)]
    assert run(steps).overlapped_ns == 105
    assert run([*FORWARD, Boundary(), Compute(BACK)]).overlapped_ns == 60


def test_an_early_copy_counts_from_its_start_and_can_break_a_budget():
    steps = [
        Compute(EMBED),  # device 0: 0..10
        Compute(DROP),  # device 0: 10..20
        Copy(X, 0, 1),  # link 0-1: 0..105
        Compute(EMBED, 1),  # device 1: 105..115, with 7 bytes of workspace
        Discard(X, 1),  # device 1: 115
        Copy(Y, 0, 1),  # link 0-1: 105..130: before x is gone
        Compute(COUNT),
        Boundary(),
        Compute(BACK),
    ]
    free = run(steps)
    assert max(free.timeline_bytes[1]) == 147
    assert free.peak_bytes[1] == 167
    tight = replace(PLATFORM.devices[1], budget_bytes=166)
    platform = replace(
        PLATFORM, devices=(PLATFORM.devices[0], tight, PLATFORM.devices[2])
    )
    violation = run(steps, platform).violation
    assert violation is not None
    # The second copy begins while the first run on device 1 is under way.
    assert (violation.rule, violation.step) == (Rule.OVER_BUDGET, 5)
    assert (violation.device, violation.excess_bytes) == (1, 1)
    assert violation.message.endswith("as steps overlap, from 105 ns on")
    roomy = replace(tight, budget_bytes=167)
    platform = replace(
        PLATFORM, devices=(PLATFORM.devices[0], roomy, PLATFORM.devices[2])
    )
    assert run(steps, platform).is_valid


def test_a_step_without_duration_holds_its_bytes_in_serial_execution_alone():
    instant = replace(
        GRAPH, ops=(replace(GRAPH.ops[EMBED], cost_ns=(0, 0)), *GRAPH.ops[1:])
    )
    trace = run([Compute(EMBED), Discard(A)], graph=instant)
    assert trace.peak_bytes[0] == 147
    assert trace.overlapped_ns == 0


# --- rules ----------------------------------------------------------------------------

BROKEN: list[tuple[Rule, Sequence[Step], int, str]] = [
    (Rule.UNKNOWN_INDEX, [Compute(4)], 0, "op 4 does not exist"),
    (Rule.UNKNOWN_INDEX, [Compute(-1)], 0, "op -1 does not exist"),
    (Rule.UNKNOWN_INDEX, [Compute(EMBED, 3)], 0, "device 3 does not exist"),
    (Rule.UNKNOWN_INDEX, [Compute(EMBED, -1)], 0, "device -1 does not exist"),
    (Rule.UNKNOWN_INDEX, [Discard(5)], 0, "storage 5 does not exist"),
    (Rule.UNKNOWN_INDEX, [Discard(-1)], 0, "storage -1 does not exist"),
    (Rule.UNKNOWN_INDEX, [Discard(X, 3)], 0, "device 3 does not exist"),
    (Rule.UNKNOWN_INDEX, [Copy(5, 0, 1)], 0, "storage 5 does not exist"),
    (Rule.UNKNOWN_INDEX, [Copy(X, 0, 3)], 0, "device 3 does not exist"),
    (Rule.UNKNOWN_INDEX, [Copy(X, 3, 0)], 0, "device 3 does not exist"),
    (Rule.READ_NOT_LIVE, [Compute(DROP)], 0, "op 1 'drop' reads storage 1 'a'"),
    (Rule.READ_NOT_LIVE, [Compute(EMBED, 1)], 0, "which is not live on device 1"),
    (
        Rule.READ_NOT_LIVE,
        [Compute(EMBED), Discard(A), Compute(DROP)],
        2,
        "reads storage 1 'a', which is not live on device 0",
    ),
    (
        Rule.CANNOT_RUN,
        [*FORWARD, Boundary(), Compute(BACK, 2)],
        4,
        "op 3 'back' cannot run on device 2",
    ),
    (Rule.PHASE, [*FORWARD, Compute(BACK)], 3, "op 3 'back' runs before the boundary"),
    (
        Rule.RECOMPUTED,
        [*FORWARD, Compute(COUNT)],
        3,
        "'count' runs again, but it counts",
    ),
    (
        Rule.ORDER,
        [Compute(EMBED), Compute(COUNT), Compute(DROP)],
        2,
        "op 1 'drop' first runs after op 2",
    ),
    (Rule.DISCARD_NOT_LIVE, [Discard(A)], 0, "storage 1 'a' is not live on device 0"),
    (
        Rule.DISCARD_NOT_LIVE,
        [Discard(X, 1)],
        0,
        "storage 0 'x' is not live on device 1",
    ),
    (Rule.DISCARD_RESIDENT, [Discard(X)], 0, "storage 0 'x' is resident"),
    (Rule.COPY_NOT_LIVE, [Copy(A, 0, 1)], 0, "storage 1 'a' is not live on device 0"),
    (
        Rule.COPY_ALREADY_LIVE,
        [Copy(X, 0, 1), Copy(X, 0, 1)],
        1,
        "storage 0 'x' is already live on device 1",
    ),
    (
        Rule.COPY_ALREADY_LIVE,
        [Copy(X, 0, 1), Copy(X, 1, 0)],
        1,
        "storage 0 'x' is already live on device 0",
    ),
    (Rule.NO_LINK, [Copy(X, 0, 2)], 0, "no link from device 0 to 2"),
    (Rule.NO_LINK, [Copy(X, 0, 0)], 0, "no link from device 0 to 0"),
    (
        Rule.SECOND_BOUNDARY,
        [*FORWARD, Boundary(), Boundary()],
        4,
        "the boundary was passed before",
    ),
    (Rule.OUTPUT_MISSING, [Boundary()], 0, "forward output storage 2 'y' is not live"),
    (Rule.NO_BOUNDARY, [*FORWARD], 3, "the schedule ends before the boundary"),
    (
        Rule.FINAL_MISSING,
        [*FORWARD, Boundary()],
        4,
        "final output storage 4 'g' is not live",
    ),
    (
        Rule.EFFECT_MISSING,
        [*FORWARD[:2], Boundary(), Compute(BACK)],
        2,
        "op 2 'count' has not run in its pass",
    ),
]


@pytest.mark.parametrize(
    ("rule", "steps", "index", "message"),
    BROKEN,
    ids=[f"{rule.name}-{index}" for index, (rule, *_) in enumerate(BROKEN)],
)
def test_each_rule_is_named_with_its_step(
    rule: Rule, steps: Sequence[Step], index: int, message: str
):
    trace = run(steps)
    assert trace.violation is not None
    assert trace.violation.rule is rule
    assert trace.violation.step == index
    assert message in trace.violation.message
    assert trace.violation.excess_bytes == 0
    assert not trace.is_valid
    assert all(len(line) == index for line in trace.timeline_bytes)
    assert str(trace.violation) == (f"step {index}: {trace.violation.message} ({rule})")


def test_every_rule_has_a_case():
    tested = {rule for rule, *_ in BROKEN}
    elsewhere = {Rule.OVER_BUDGET, Rule.AFTER_CALLER, Rule.DISCARD_HELD}
    assert tested | elsewhere == set(Rule)


LOSS, BACK_OF_LOSS, OPTIMIZER = 3, 4, 5
CALLED = replace(
    GRAPH,
    ops=(
        *GRAPH.ops[:BACK],
        op("loss", (Y,), (), is_external=True),
        GRAPH.ops[BACK],
        op("optimizer", (G,), (), Phase.BACKWARD, is_external=True),
    ),
)


@pytest.mark.parametrize(
    ("steps", "index", "message"),
    [
        ([*FORWARD, Compute(LOSS), Compute(EMBED)], 4, "op 0 'embed' comes after op 3"),
        ([*FORWARD, Compute(LOSS), Copy(A, 0, 1)], 4, "the copy of storage 1 'a'"),
        (
            [
                *FORWARD,
                Compute(LOSS),
                Boundary(),
                Compute(BACK_OF_LOSS),
                Compute(OPTIMIZER),
                Compute(EMBED),
            ],
            7,
            "op 0 'embed' comes after op 5 'optimizer', which the caller does when the",
        ),
    ],
)
def test_nothing_runs_after_the_work_of_the_caller(
    steps: Sequence[Step], index: int, message: str
):
    trace = run(steps, graph=CALLED)
    assert trace.violation is not None
    assert trace.violation.rule is Rule.AFTER_CALLER
    assert trace.violation.step == index
    assert message in trace.violation.message


def test_a_pass_begins_anew_after_the_boundary():
    steps = [
        *FORWARD,
        Compute(LOSS),
        Discard(A),
        Boundary(),
        Compute(EMBED),
        Compute(BACK_OF_LOSS),
        Compute(OPTIMIZER),
    ]
    assert run(steps, graph=CALLED).violation is None


# The caller holds y, which is handed over, and t, which it made.
HELD = replace(
    GRAPH,
    ops=(
        GRAPH.ops[EMBED],
        replace(GRAPH.ops[DROP], non_recomputable="the caller holds its output"),
        *GRAPH.ops[COUNT:],
    ),
    final_outputs=(G, Y, T),
)


@pytest.mark.parametrize("storage", [Y, T])
def test_what_the_caller_holds_stays_where_it_was_handed_over(storage: int):
    away = (Copy(storage, 0, 1), Discard(storage), Copy(storage, 1, 0))
    steps = [*FORWARD, Boundary(), *away, Compute(BACK)]
    violation = run(steps, graph=HELD).violation
    assert violation is not None
    assert violation.rule is Rule.DISCARD_HELD
    assert (violation.step, violation.storage, violation.device) == (5, storage, 0)
    assert "keeps its 20 bytes on device 0 until the end" in violation.message
    # What nobody asks for at the end is nobody's: the same steps are allowed.
    assert run(steps).is_valid


def test_before_it_is_handed_over_an_output_may_leave():
    away = (Copy(Y, 0, 1), Discard(Y), Copy(Y, 1, 0))
    assert run([*FORWARD, *away, Boundary(), Compute(BACK)], graph=HELD).is_valid


def test_copies_on_other_devices_are_not_the_caller_s():
    steps = [*FORWARD, Boundary(), Copy(Y, 0, 1), Discard(Y, 1), Compute(BACK)]
    trace = run(steps, graph=HELD)
    assert trace.is_valid
    assert trace.live_after == (frozenset({A, Y, T, G}), frozenset(), frozenset())


def test_every_rule_is_in_the_written_semantics():
    page = Path(__file__).parents[2] / "docs" / "semantics.md"
    words = page.read_text(encoding="utf-8")
    assert [rule.name for rule in Rule if f"`{rule.name}`" not in words] == []


@pytest.mark.parametrize(
    ("steps", "facts"),
    [
        ([Compute(4)], {"op": 4}),
        ([Compute(DROP)], {"op": DROP, "storage": A, "device": 0}),
        ([*FORWARD, Boundary(), Compute(BACK, 2)], {"op": BACK}),
        ([Compute(BACK)], {"op": BACK}),
        ([*FORWARD, Compute(COUNT)], {"op": COUNT}),
        ([Compute(EMBED), Compute(COUNT), Compute(DROP)], {"op": DROP}),
        ([Discard(A, 1)], {"storage": A, "device": 1}),
        ([Discard(X)], {"storage": X, "device": 0}),
        ([Copy(A, 1, 0)], {"storage": A, "device": 1}),
        ([Copy(X, 0, 1), Copy(X, 0, 1)], {"storage": X, "device": 1}),
        ([Copy(X, 0, 2)], {"storage": X}),
        ([Boundary()], {"storage": Y}),
        ([*FORWARD, Boundary()], {"storage": G}),
        ([*FORWARD[:2], Boundary(), Compute(BACK)], {"op": COUNT}),
    ],
)
def test_a_violation_names_what_it_is_about(
    steps: Sequence[Step], facts: dict[str, int]
):
    violation = run(steps).violation
    assert violation is not None
    found = {
        key: value
        for key in ("op", "storage", "device")
        if (value := getattr(violation, key)) is not None
    }
    assert found == facts


def test_ordered_ops_may_run_again_in_any_order():
    again = [*FORWARD, Boundary(), Compute(DROP), Compute(BACK)]
    assert run(again).is_valid


def test_an_effect_may_wait_but_an_ordered_op_with_outputs_must_run_too():
    graph = replace(
        GRAPH,
        forward_outputs=(),
        ops=(
            *GRAPH.ops[:COUNT],
            replace(GRAPH.ops[COUNT], is_ordered=False),
            *GRAPH.ops[BACK:],
        ),
    )
    steps = [Compute(EMBED), Compute(COUNT), Boundary(), Compute(BACK)]
    violation = run(steps, graph=graph).violation
    assert violation is not None
    assert (violation.rule, violation.op) == (Rule.EFFECT_MISSING, DROP)


def test_dead_code_need_not_run():
    graph = replace(
        GRAPH,
        forward_outputs=(),
        ops=(
            GRAPH.ops[EMBED],
            replace(GRAPH.ops[DROP], is_ordered=False),
            *GRAPH.ops[COUNT:],
        ),
    )
    steps = [Compute(EMBED), Compute(COUNT), Boundary(), Compute(BACK)]
    assert run(steps, graph=graph).is_valid


# --- budgets --------------------------------------------------------------------------


def test_the_budget_itself_fits_and_one_byte_less_does_not():
    assert run(PLAIN, single_device(231)).is_valid
    violation = run(PLAIN, single_device(230)).violation
    assert violation is not None
    assert violation.rule is Rule.OVER_BUDGET
    assert violation.step == 4
    assert violation.device == 0
    assert violation.excess_bytes == 1
    assert "device 0 'cpu' holds 231 bytes, 1 more than its budget of 230" in (
        violation.message
    )


def test_the_first_step_over_the_budget_is_named_and_the_replay_goes_on():
    trace = run(PLAIN, single_device(150))
    assert trace.violation is not None
    assert (trace.violation.step, trace.violation.excess_bytes) == (1, 10)
    assert len(trace.timeline_bytes[0]) == len(PLAIN)
    assert trace.peak_bytes == (231,)


def test_a_budget_is_reported_before_a_rule_that_is_broken_later():
    trace = run([*FORWARD, Compute(BACK)], single_device(150))
    assert trace.violation is not None
    assert (trace.violation.rule, trace.violation.step) == (Rule.OVER_BUDGET, 1)
    assert len(trace.timeline_bytes[0]) == 3


def test_a_step_that_breaks_a_rule_is_not_weighed():
    trace = run([Compute(EMBED), Compute(BACK)], single_device(150))
    assert trace.violation is not None
    assert trace.violation.rule is Rule.PHASE


def test_residents_over_the_budget_are_reported_at_the_first_step():
    trace = run(PLAIN, single_device(99))
    assert trace.violation is not None
    assert (trace.violation.rule, trace.violation.step) == (Rule.OVER_BUDGET, 0)


def test_each_device_has_its_own_budget():
    fits = replace(PLATFORM.devices[0], budget_bytes=231)
    small = replace(PLATFORM.devices[1], budget_bytes=39)
    platform = replace(PLATFORM, devices=(fits, small, PLATFORM.devices[2]))
    assert run(PLAIN, platform).is_valid
    violation = run([Compute(EMBED), Copy(A, 0, 1)], platform).violation
    assert violation is not None
    assert (violation.rule, violation.step, violation.device) == (
        Rule.OVER_BUDGET,
        1,
        1,
    )


# --- what cannot be replayed at all ---------------------------------------------------


def test_a_device_of_a_kind_without_costs_is_refused():
    with pytest.raises(InvalidGraphError, match="no costs for device kind 'tpu'"):
        run(PLAIN, single_device(kind="tpu"))


def test_even_a_device_that_nothing_uses_must_have_costs():
    platform = Platform(devices=(Device(), Device(name="spare", kind="tpu")))
    with pytest.raises(InvalidGraphError, match="no costs for device kind 'tpu'"):
        run(PLAIN, platform)


def test_a_home_that_does_not_exist_is_refused():
    far = replace(
        GRAPH, storages=(*GRAPH.storages[:G], Storage(name="g", size_bytes=50, home=1))
    )
    with pytest.raises(InvalidPlatformError, match="storage 4 'g' has home device 1"):
        run(PLAIN, single_device(), far)
    assert run([*PLAIN, Copy(G, 0, 1)], graph=far).is_valid


# --- properties -----------------------------------------------------------------------


def check_agreement(case: Case, *, copies_wait: bool = False) -> Trace:
    case = replace(case, platform=replace(case.platform, copies_wait=copies_wait))
    trace = simulate(case.graph, case.platform, case.schedule)
    second = replay(case.graph, case.platform, case.schedule)
    violation = trace.violation
    assert (violation.rule if violation else None) == second.rule
    assert (violation.step if violation else None) == second.step
    assert trace.peak_bytes == second.peak_bytes
    assert trace.timeline_bytes == second.timeline_bytes
    assert trace.serial_ns == second.serial_ns
    assert trace.recomputed_ns == second.recomputed_ns
    assert trace.overlapped_ns == second.overlapped_ns
    assert trace.live_after == second.live_after
    return trace


@settings(max_examples=500, deadline=None)
@given(cases(is_mutated=False), st.booleans())
def test_two_simulators_agree_on_schedules_that_work(case: Case, copies_wait: bool):
    trace = check_agreement(case, copies_wait=copies_wait)
    assert trace.violation is None or trace.violation.rule is Rule.OVER_BUDGET


@settings(max_examples=500, deadline=None)
@given(cases(is_mutated=True), st.booleans())
def test_two_simulators_agree_on_mutated_schedules(case: Case, copies_wait: bool):
    check_agreement(case, copies_wait=copies_wait)


@settings(max_examples=200, deadline=None)
@given(cases(max_devices=1))
def test_on_one_device_overlapped_execution_is_serial_execution(case: Case):
    trace = simulate(case.graph, case.platform, case.schedule)
    assert trace.overlapped_ns == trace.serial_ns
    resident = case.graph.resident_bytes()
    assert trace.peak_bytes[0] == max([resident, *trace.timeline_bytes[0]])


@settings(max_examples=200, deadline=None)
@given(cases())
def test_overlapped_execution_is_never_slower_than_serial(case: Case):
    trace = simulate(case.graph, case.platform, case.schedule)
    assert trace.overlapped_ns <= trace.serial_ns
    assert trace.recomputed_ns <= trace.serial_ns


@settings(max_examples=300, deadline=None)
@given(cases(is_mutated=False))
def test_copies_that_wait_take_no_more_memory_than_serial_execution(case: Case):
    waiting = replace(case.platform, copies_wait=True)
    trace = simulate(case.graph, waiting, case.schedule)
    ahead = simulate(case.graph, case.platform, case.schedule)
    for device, timeline in enumerate(trace.timeline_bytes):
        resident = case.graph.resident_bytes(device)
        assert trace.peak_bytes[device] == max([resident, *timeline])
    assert ahead.overlapped_ns <= trace.overlapped_ns <= trace.serial_ns
    assert trace.serial_ns == ahead.serial_ns


def test_copies_that_wait_overlap_with_what_is_issued_after_them():
    platform = replace(PLATFORM, copies_wait=True)
    steps = [
        Compute(EMBED),  # device 0: 0..10
        Compute(DROP),  # device 0: 10..20
        Copy(A, 0, 1),  # link 0-1: 20..65, though a was there at 10
        Compute(EMBED),  # device 0: 20..30, and waits for the copy of the old a
        Compute(DROP),  # device 0: 65..75
    ]
    assert run(steps, platform).overlapped_ns == 75
    assert run(steps).overlapped_ns == 55
