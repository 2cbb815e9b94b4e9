"""Revolve: closed forms, recurrences, published values, the oracle table of chains."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chain_tables import CONVENTIONS, label, oracle_table

from remat.algorithms.chains.conventions import (
    CHECKPOINTS_ONLY,
    IN_PLACE,
    STRICT,
    MemoryConvention,
)
from remat.algorithms.chains.plans import UnitPlan
from remat.algorithms.chains.revolve import (
    chain_forwards,
    extra_forwards,
    first_checkpoint,
    plan_chain,
    revolve_forwards,
)
from remat.algorithms.chains.unit_graph import UnitGraph
from remat.core.errors import InvalidGraphError
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.testing.chain_oracles import best_join

CLOSED = [c for c in CONVENTIONS if c.counts_gradients or c.overwrites_inputs]


@cache
def by_recurrence(steps: int, checkpoints: int) -> int | None:
    if steps <= 1:
        return 0
    if checkpoints == 0:
        return None
    return min(
        (
            i + lower + upper
            for i in range(1, steps)
            for lower in (by_recurrence(i, checkpoints),)
            for upper in (by_recurrence(steps - i, checkpoints - 1),)
            if lower is not None and upper is not None
        ),
        default=None,
    )


def judged(plan: UnitPlan) -> UnitPlan:
    graph = UnitGraph([[1] * length for length in plan.lengths], plan.convention)
    schedule = graph.schedule(plan.operations)
    trace = simulate(graph.graph, single_device(plan.memory_units or None), schedule)
    assert trace.violation is None
    assert trace.serial_ns == plan.forward_cost == plan.forward_count
    return plan


@pytest.mark.parametrize("checkpoints", range(12))
def test_closed_form_is_the_recurrence(checkpoints: int) -> None:
    for steps in range(60):
        assert extra_forwards(steps, checkpoints) == by_recurrence(steps, checkpoints)


# Griewank and Walther's total of steps, the taping one of each included.
@pytest.mark.parametrize(
    ("steps", "checkpoints", "total"),
    [(10, 1, 55), (10, 2, 30), (10, 3, 25), (100, 3, 590), (100, 5, 416)],
)
def test_published_totals(steps: int, checkpoints: int, total: int) -> None:
    extra = extra_forwards(steps, checkpoints)
    assert extra is not None
    assert extra + steps == total


@pytest.mark.parametrize(
    ("slots", "counts"),
    [
        (1, "0 1 3 6 10 15 21 28 36 45 55 66 78 91 105 120 136 153 171 190 210"),
        (2, "0 1 2 4 6 8 11 14 17 20 24 28 32 36 40 45 50 55 60 65 70"),
        (3, "0 1 2 3 5 7 9 11 13 15 18 21 24 27 30 33 36 39 42 45 49"),
        (4, "0 1 2 3 4 6 8 10 12 14 16 18 20 22 24 27 30 33 36 39 42"),
        (5, "0 1 2 3 4 5 7 9 11 13 15 17 19 21 23 25 27 29 31 33 35"),
    ],
)
def test_published_table_of_the_adjoint_graph(slots: int, counts: str) -> None:
    found = [revolve_forwards(length, slots) for length in range(21)]
    assert found == [int(count) for count in counts.split()]


@given(st.integers(2, 1000), st.integers(1, 40))
def test_first_checkpoint_attains_the_minimum(steps: int, checkpoints: int) -> None:
    i = first_checkpoint(steps, checkpoints)
    lower = extra_forwards(i, checkpoints)
    upper = extra_forwards(steps - i, checkpoints - 1)
    assert lower is not None
    assert upper is not None
    assert i + lower + upper == extra_forwards(steps, checkpoints)


@pytest.mark.parametrize("convention", CLOSED, ids=label)
def test_oracle_table_of_chains(convention: MemoryConvention) -> None:
    table = oracle_table("join_oracle.json")["once"]
    compared = 0
    for shape, values in table[label(convention)].items():
        if "," in shape:
            continue
        for units, (value, _) in values.items():
            found = plan_chain(int(shape), int(units), convention)
            assert (None if found is None else found.forward_cost) == value
            if found is not None:
                judged(found)
            compared += 1
    assert compared > 50


@pytest.mark.parametrize(
    ("convention", "length", "values"),
    [
        (IN_PLACE, 8, {3: 29, 4: 15, 5: 12, 6: 11, 7: 10, 8: 9, 9: 8}),
        (IN_PLACE, 12, {3: 67, 4: 29, 5: 22, 6: 19}),
        (IN_PLACE, 20, {3: 191, 4: 66, 5: 46, 6: 40}),
        (IN_PLACE, 100, {3: 4951, 4: 846, 5: 491, 8: 281}),
        (STRICT, 100, {4: 4951, 5: 846, 6: 491, 9: 281}),
        (CHECKPOINTS_ONLY, 10, {2: 55, 3: 24, 4: 18}),
    ],
)
def test_unified_memory_values(
    convention: MemoryConvention, length: int, values: dict[int, int]
) -> None:
    assert {m: chain_forwards(length, m, convention) for m in values} == values


@pytest.mark.parametrize("convention", CLOSED, ids=label)
@pytest.mark.parametrize("length", range(1, 7))
def test_closed_form_is_the_exhaustive_optimum(
    convention: MemoryConvention, length: int
) -> None:
    for units in range(length + 4):
        found = chain_forwards(length, units, convention)
        assert found == best_join([[1] * length], units, convention)


@pytest.mark.parametrize("convention", CLOSED, ids=label)
@pytest.mark.parametrize("length", [50, 300, 1000])
def test_long_chains_replay_with_the_predicted_count(
    convention: MemoryConvention, length: int
) -> None:
    for units in (9, 40):
        plan = plan_chain(length, units, convention)
        assert plan is not None
        judged(plan)


@pytest.mark.parametrize(
    "call",
    [
        lambda: extra_forwards(-1, 3),
        lambda: revolve_forwards(-1, 3),
        lambda: revolve_forwards(0, -1),
        lambda: chain_forwards(0, 3, STRICT),
        lambda: plan_chain(3, -1, STRICT),
        lambda: plan_chain(3, 3, MemoryConvention(counts_gradients=False)),
    ],
)
def test_bad_input_is_refused(call) -> None:
    with pytest.raises(InvalidGraphError):
        call()
