"""DiskRevolve and HRevolve: published values, each other, the judge, a peer."""

from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.algorithms.chains.conventions import CHECKPOINTS_ONLY
from remat.algorithms.chains.levels import (
    LevelPlan,
    StorageLevel,
    plan_disk_revolve,
    plan_hrevolve,
)
from remat.algorithms.chains.revolve import revolve_forwards
from remat.algorithms.chains.unit_graph import UnitGraph, level_platform
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.simulator import simulate
from remat.testing.chain_oracles import cheapest

LevelState = tuple[int, int | None, tuple[frozenset[int], ...]]


def judged(plan: LevelPlan, levels: list[StorageLevel], forward: int, back: int):
    if plan.length == 0:
        return
    costs = [[forward] * plan.length]
    graph = UnitGraph(costs, CHECKPOINTS_ONLY, backward_cost=back, turn_cost=back)
    schedule = graph.schedule(plan.operations)
    trace = simulate(graph.graph, level_platform(levels), schedule)
    assert trace.violation is None
    assert trace.serial_ns == plan.cost_ns
    # Copies do not overlap in these plans; one unit more for the running value.
    held = [max(bytes_, default=0) for bytes_ in trace.timeline_bytes]
    assert held[0] <= levels[0].slots + 1
    assert all(h <= lv.slots for h, lv in zip(held[1:], levels[1:], strict=True))


def best_on_levels(
    length: int, levels: list[StorageLevel], forward: int, backward: int
) -> int | None:
    """Search all schedules with one running value and slots on each level.

    Dropping costs nothing, so that nothing is dropped before its slot is needed, and
    what lies beyond the stages that are left is dropped at once.
    """

    def moves(state: LevelState):
        left, running, stored = state
        for k, level in enumerate(levels):
            for value in stored[k]:
                yield level.read_ns, (left, value, stored)
            if running is None or running in stored[k] or level.slots == 0:
                continue
            is_full = len(stored[k]) == level.slots
            for kept in (
                [stored[k] - {v} for v in stored[k]] if is_full else [stored[k]]
            ):
                more = (*stored[:k], kept | {running}, *stored[k + 1 :])
                yield level.write_ns, (left, running, more)
        if running is not None and running < left:
            yield forward, (left, running + 1, stored)
        if running == left:
            # The last reversed stage leaves nothing that could be read again.
            useful = tuple(frozenset(v for v in held if v < left) for held in stored)
            yield backward, (left - 1, None, useful)

    start: LevelState = (length, 0, tuple(frozenset() for _ in levels))
    return cheapest(start, moves, lambda state: state[0] < 0)


@pytest.mark.parametrize(
    ("slots", "copy_ns", "costs"),
    [
        (1, 5, "1 3 6 10 15 21 28 34 39 45 51 56 62"),
        (2, 5, "1 3 5 8 11 14 18 22 26 30 35 40 45"),
        (1, 2, "1 3 6 10 15 19 23 28 32 36 41 45 49"),
        (2, 2, "1 3 5 8 11 14 18 22 26 30 34 38 42"),
    ],
)
def test_published_costs_with_an_unlimited_disk(
    slots: int, copy_ns: int, costs: str
) -> None:
    disk = StorageLevel(slots=0, write_ns=copy_ns, read_ns=copy_ns)
    found = [plan_disk_revolve(length, slots, disk).cost_ns for length in range(13)]
    assert found == [int(cost) for cost in costs.split()]


def test_published_costs_with_three_slots_on_disk() -> None:
    disk = StorageLevel(slots=3, write_ns=2, read_ns=2)
    levels = [StorageLevel(slots=1), disk]
    plans = [plan_hrevolve(length, levels) for length in range(16)]
    expected = "1 3 6 10 15 19 23 28 32 36 41 45 49 54 58 63"
    assert [p.cost_ns for p in plans if p] == [int(c) for c in expected.split()]
    assert plan_disk_revolve(15, 1, disk).cost_ns == 62


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_one_level_is_revolve(length: int, slots: int) -> None:
    plan = plan_hrevolve(length, [StorageLevel(slots=slots)], backward_ns=3)
    forwards = revolve_forwards(length, slots)
    assert plan is not None
    assert forwards is not None
    assert plan.cost_ns == forwards + 3 * (length + 1)
    judged(plan, [StorageLevel(slots=slots)], 1, 3)


times = st.integers(1, 6)


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(0, 3), times, times, times, times)
def test_unlimited_disk_is_a_level_with_a_slot_for_everything(
    length: int, slots: int, write: int, read: int, forward: int, backward: int
) -> None:
    disk = StorageLevel(slots=length, write_ns=write, read_ns=read)
    levels = [StorageLevel(slots=slots), disk]
    first = plan_disk_revolve(
        length, slots, disk, forward_ns=forward, backward_ns=backward
    )
    second = plan_hrevolve(length, levels, forward_ns=forward, backward_ns=backward)
    if second is None:
        assert length > 0 == slots
        return
    assert first.cost_ns == second.cost_ns
    judged(first, levels, forward, backward)
    judged(second, levels, forward, backward)


@given(
    st.integers(0, 6),
    st.lists(
        st.builds(StorageLevel, slots=st.integers(0, 2), write_ns=times, read_ns=times),
        min_size=1,
        max_size=2,
    ),
    st.integers(0, 2),
    times,
    times,
)
def test_levels_are_the_exhaustive_optimum(
    length: int,
    further: list[StorageLevel],
    slots: int,
    forward: int,
    backward: int,
) -> None:
    further.sort(key=lambda level: (level.write_ns, level.read_ns))
    levels = [StorageLevel(slots=slots), *further]
    plan = plan_hrevolve(length, levels, forward_ns=forward, backward_ns=backward)
    best = best_on_levels(length, levels, forward, backward)
    assert (None if plan is None else plan.cost_ns) == best
    if plan is not None:
        judged(plan, levels, forward, backward)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidGraphError, match="slots of a storage level is -1"):
        StorageLevel(slots=-1)
    with pytest.raises(InvalidGraphError, match="at least one storage level"):
        plan_hrevolve(3, [])
    with pytest.raises(InvalidGraphError, match="length is -3"):
        plan_disk_revolve(-3, 1, StorageLevel(slots=1))
    with pytest.raises(InvalidGraphError, match="memory_slots is -1"):
        plan_disk_revolve(3, -1, StorageLevel(slots=1))
    with pytest.raises(SolverUnsuitableError, match="DiskRevolve"):
        plan_hrevolve(10**5, [StorageLevel(slots=10**5)])
    with pytest.raises(InvalidGraphError, match="a platform has 0 for level 0"):
        level_platform([StorageLevel(slots=1, write_ns=1)])


# --- the peer: checkpoint_schedules, where it is installed ---------------------------


def peer(name: str) -> Any:
    pytest.importorskip("checkpoint_schedules", reason="the peer is not installed")
    return import_module(f"checkpoint_schedules.hrevolve_sequences.{name}")


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_peer_agrees_on_revolve(slots: int) -> None:
    table = peer("revolve").get_opt_0_table(60, slots, uf=3, ub=2)
    for length in range(61):
        forwards = revolve_forwards(length, slots)
        assert forwards is not None
        assert table[slots][length] == 3 * forwards + 2 * (length + 1)


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize(("write", "read"), [(5, 5), (2, 3), (1, 9)])
def test_peer_agrees_on_disk_revolve(slots: int, write: int, read: int) -> None:
    table = peer("disk_revolve").get_opt_inf_table(
        50, slots, uf=3, ub=2, rd=read, wd=write, one_read_disk=False
    )
    disk = StorageLevel(slots=0, write_ns=write, read_ns=read)
    for length in range(51):
        plan = plan_disk_revolve(length, slots, disk, forward_ns=3, backward_ns=2)
        assert plan.cost_ns == table[length]


@pytest.mark.parametrize("slots", [(1, 1), (1, 3), (2, 2), (3, 5), (2, 2, 2)])
@pytest.mark.parametrize("copy_ns", [1, 2, 5])
def test_peer_agrees_on_hrevolve(slots: tuple[int, ...], copy_ns: int) -> None:
    writes = [copy_ns * k for k in range(len(slots))]
    reads = [copy_ns * k + (k > 0) for k in range(len(slots))]
    # By name: the peer's own callers pass uf and ub in the other order.
    _, table = peer("hrevolve").get_hopt_table(
        30, slots, tuple(writes), tuple(reads), ub=2, uf=3
    )
    levels = [
        StorageLevel(slots=s, write_ns=w, read_ns=r)
        for s, w, r in zip(slots, writes, reads, strict=True)
    ]
    for length in range(31):
        plan = plan_hrevolve(length, levels, forward_ns=3, backward_ns=2)
        assert plan is not None
        assert plan.cost_ns == table[-1][length][slots[-1]]
