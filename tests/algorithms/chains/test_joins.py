"""Joins: oracle table, exhaustive search, properties, the judge, counterexamples."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chain_tables import CONVENTIONS, label, oracle_table

from remat.algorithms.chains.conventions import (
    CHECKPOINTS_ONLY,
    IN_PLACE,
    STRICT,
    MemoryConvention,
)
from remat.algorithms.chains.joins import (
    join_table_bytes,
    plan_join,
    plan_join_by_branch,
    smallest_units,
)
from remat.algorithms.chains.plans import UnitPlan
from remat.algorithms.chains.revolve import chain_forwards
from remat.algorithms.chains.unit_graph import UnitGraph
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.testing.chain_oracles import best_join

conventions = st.sampled_from(CONVENTIONS)


def unit_costs(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def value(plan: UnitPlan | None) -> int | None:
    return None if plan is None else plan.forward_cost


def judged(plan: UnitPlan, costs: list[list[int]]) -> None:
    graph = UnitGraph(costs, plan.convention)
    schedule = graph.schedule(plan.operations)
    trace = simulate(graph.graph, single_device(plan.memory_units), schedule)
    assert trace.violation is None
    assert trace.serial_ns == plan.forward_cost


def oracle_conventions() -> list[MemoryConvention]:
    return [c for c in CONVENTIONS if c.counts_gradients or c.overwrites_inputs]


@pytest.mark.parametrize("convention", oracle_conventions(), ids=label)
def test_oracle_table(convention: MemoryConvention) -> None:
    table = oracle_table("join_oracle.json")["once"][label(convention)]
    searched = 0
    for shape, values in table.items():
        costs = unit_costs(*map(int, shape.split(",")))
        for units, (expected, tag) in values.items():
            plan = plan_join(costs, int(units), convention)
            assert value(plan) == expected, (shape, units, tag)
            searched += tag == "bf"
            if plan is not None:
                judged(plan, costs)
    assert searched > 500


# "values: forward steps" for joins of equal stages, by an independent program that
# exhaustive search confirmed on small joins.
@pytest.mark.parametrize(
    ("convention", "lengths", "values"),
    [
        (IN_PLACE, (8, 8), {5: 48, 6: 33, 7: 27, 8: 26, 9: 25, 18: 16}),
        (IN_PLACE, (8, 1), {4: 23, 5: 16, 6: 14, 7: 13, 11: 9}),
        (IN_PLACE, (10, 10), {5: 71, 6: 45, 7: 39, 8: 34}),
        (IN_PLACE, (6, 3, 2), {7: 18, 8: 17, 9: 16}),
        (IN_PLACE, (2, 2, 2, 2), {9: 11, 10: 10, 11: 9, 12: 8}),
        (IN_PLACE, (5, 2), {5: 11}),  # needs branches interleaved
        (IN_PLACE, (50, 50), {6: 480, 9: 272, 12: 231, 16: 186}),
        (IN_PLACE, (20, 20, 20), {8: 177, 9: 150, 13: 110, 18: 105}),
        (STRICT, (10, 10), {6: 80, 7: 48, 8: 41, 9: 35}),
        (STRICT, (5, 5, 5), {9: 29, 10: 26, 11: 25}),
        (CHECKPOINTS_ONLY, (10, 10), {4: 55, 5: 45, 6: 38, 7: 35, 8: 34}),
        (CHECKPOINTS_ONLY, (5, 5, 5), {6: 28, 7: 26, 8: 25}),
    ],
)
def test_known_values(
    convention: MemoryConvention, lengths: tuple[int, ...], values: dict[int, int]
) -> None:
    costs = unit_costs(*lengths)
    assert {m: value(plan_join(costs, m, convention)) for m in values} == values


def test_branch_by_branch_misses_what_interleaving_finds() -> None:
    costs = unit_costs(50, 50)
    assert value(plan_join(costs, 9, IN_PLACE)) == 272
    assert value(plan_join_by_branch(costs, 9, IN_PLACE)) == 278


def test_strict_accounting_is_not_one_unit_more() -> None:
    # For a chain it is; for a join the turn caps what can be stored.
    assert chain_forwards(8, 5, STRICT) == chain_forwards(8, 4, IN_PLACE)
    strict = [value(plan_join(unit_costs(8, 8), m, STRICT)) for m in (6, 7, 8, 9)]
    in_place = [value(plan_join(unit_costs(8, 8), m, IN_PLACE)) for m in (5, 6, 7, 8)]
    assert strict == [55, 35, 29, 27]
    assert in_place == [48, 33, 27, 26]


small_shapes = st.one_of(
    st.lists(st.integers(1, 7), min_size=1, max_size=1),
    st.lists(st.integers(1, 4), min_size=2, max_size=2),
    st.lists(st.integers(1, 2), min_size=3, max_size=3),
    st.just([1, 1, 1, 1]),
    st.just([2, 1, 1, 1]),
)


@st.composite
def small_joins(draw: st.DrawFn, *, unit: bool) -> list[list[int]]:
    cost = st.just(1) if unit else st.integers(0, 9)
    return [
        draw(st.lists(cost, min_size=length, max_size=length))
        for length in draw(small_shapes)
    ]


@settings(max_examples=60)
@given(small_joins(unit=True), conventions, st.integers(0, 3))
def test_equal_costs_are_the_exhaustive_optimum(
    costs: list[list[int]], convention: MemoryConvention, extra: int
) -> None:
    units = smallest_units([len(branch) for branch in costs], convention) + extra
    plan = plan_join(costs, units, convention)
    assert value(plan) == best_join(costs, units, convention)
    assert plan is not None
    judged(plan, costs)


@settings(max_examples=60)
@given(small_joins(unit=False), conventions, st.integers(0, 3))
def test_unequal_costs_are_the_exhaustive_optimum(
    costs: list[list[int]], convention: MemoryConvention, extra: int
) -> None:
    units = smallest_units([len(branch) for branch in costs], convention) + extra
    plan = plan_join(costs, units, convention)
    assert value(plan) == best_join(costs, units, convention)
    assert plan is not None
    judged(plan, costs)


@settings(max_examples=40)
@given(small_shapes, conventions)
def test_below_the_smallest_memory_nothing_is_found(
    lengths: list[int], convention: MemoryConvention
) -> None:
    units = smallest_units(lengths, convention)
    assert best_join(unit_costs(*lengths), units - 1, convention) is None
    assert plan_join(unit_costs(*lengths), units - 1, convention) is None


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_smallest_units_in_closed_form(k: int, length: int) -> None:
    lengths = [length] * k
    once_more = 0 if length == 1 else 1
    assert smallest_units(lengths, IN_PLACE) == 2 * k + once_more
    assert smallest_units(lengths, CHECKPOINTS_ONLY) == 2 * k
    strict = 3 * k if k >= 2 else 3 + once_more
    assert smallest_units(lengths, STRICT) == strict


@pytest.mark.parametrize("convention", [IN_PLACE, STRICT, CHECKPOINTS_ONLY], ids=label)
@pytest.mark.parametrize("lengths", [(6, 6), (7, 3), (4, 4, 3)])
def test_memory_for_no_recomputation_in_closed_form(
    lengths: tuple[int, ...], convention: MemoryConvention
) -> None:
    gradients = len(lengths) if convention == STRICT else 0
    units = sum(lengths) + len(lengths) + gradients
    costs = unit_costs(*lengths)
    assert value(plan_join(costs, units, convention)) == sum(lengths)
    tighter = value(plan_join(costs, units - 1, convention))
    assert tighter is not None
    assert tighter > sum(lengths)


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3), conventions, st.integers(0, 9)
)
def test_more_memory_and_other_orders_of_branches(
    lengths: list[int], convention: MemoryConvention, extra: int
) -> None:
    units = smallest_units(lengths, convention) + extra
    here = value(plan_join(unit_costs(*lengths), units, convention))
    more = value(plan_join(unit_costs(*lengths), units + 1, convention))
    turned = value(plan_join(unit_costs(*reversed(lengths)), units, convention))
    longer = [lengths[0] + 1, *lengths[1:]]
    grown = value(plan_join(unit_costs(*longer), units, convention))
    assert here is not None
    assert more is not None
    assert more <= here == turned
    assert grown is None or grown > here


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=3
    ),
    conventions,
    st.integers(0, 6),
)
def test_branch_by_branch_is_judged_and_never_better(
    costs: list[list[int]], convention: MemoryConvention, extra: int
) -> None:
    units = smallest_units([len(branch) for branch in costs], convention) + extra
    best, found = (
        plan_join(costs, units, convention),
        plan_join_by_branch(costs, units, convention),
    )
    assert best is not None
    if found is not None:
        assert found.forward_cost >= best.forward_cost
        judged(found, costs)


@pytest.mark.parametrize("convention", oracle_conventions(), ids=label)
@pytest.mark.parametrize("length", [30, 100])
def test_one_branch_is_the_closed_form(
    convention: MemoryConvention, length: int
) -> None:
    for units in (4, 7, 20):
        plan = plan_join(unit_costs(length), units, convention)
        assert value(plan) == chain_forwards(length, units, convention)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InvalidGraphError, match="at least one branch"):
        plan_join([], 5, STRICT)
    with pytest.raises(InvalidGraphError, match="branch 1 of 2 has no stage"):
        plan_join([[1], []], 5, STRICT)
    with pytest.raises(
        InvalidGraphError, match="entry 1 of the costs of branch 0 is -1"
    ):
        plan_join([[1, -1]], 5, STRICT)
    with pytest.raises(
        InvalidGraphError,
        match="memory_units is -5; it must be an integer of at least 0",
    ):
        plan_join([[1]], -5, STRICT)
    with pytest.raises(InvalidGraphError, match="at worst"):
        plan_join([[2**53] * 16], 5, STRICT)


@pytest.mark.parametrize("convention", CONVENTIONS, ids=label)
@pytest.mark.parametrize(
    "lengths",
    [[1], [2], [3], [5], [1, 1], [2, 1], [3, 3], [4, 1], [1, 1, 1], [3, 1, 2]],
)
def test_smallest_units_are_the_first_that_fit(
    lengths: list[int], convention: MemoryConvention
) -> None:
    least = smallest_units(lengths, convention)
    costs = unit_costs(*lengths)
    assert plan_join(costs, least, convention) is not None
    assert all(plan_join(costs, units, convention) is None for units in range(least))


def test_too_many_branches_for_smallest_units_are_refused_at_once() -> None:
    with pytest.raises(SolverUnsuitableError, match="12 branches") as caught:
        smallest_units([3] * 12, IN_PLACE)
    needed, limit = re.findall(r"\d[\d_]{9,}", str(caught.value))
    assert int(needed) > int(limit) == 2**30


def test_a_table_that_is_too_large_is_refused_before_it_is_made() -> None:
    costs = unit_costs(*[30] * 8)
    assert join_table_bytes([30] * 8, 40) > 2**40
    with pytest.raises(SolverUnsuitableError, match="branch by branch"):
        plan_join(costs, 40, STRICT)
    plan = plan_join_by_branch(costs, 40, STRICT)
    assert plan is not None
    judged(plan, costs)
    with pytest.raises(SolverUnsuitableError, match="at most 8"):
        plan_join_by_branch(unit_costs(*[2] * 9), 60, STRICT)
