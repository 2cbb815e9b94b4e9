"""Joins that turn twice: exhaustive values, counterexamples, the judge, bad input."""

import pytest
from tests.chain_tables import CONVENTIONS, label, oracle_table

from remat.algorithms.chains.conventions import IN_PLACE, STRICT, MemoryConvention
from remat.algorithms.chains.joins import plan_join
from remat.algorithms.chains.operations import Turn
from remat.algorithms.chains.reexecution import plan_join_any_turns, plan_two_turns
from remat.algorithms.chains.unit_graph import UnitGraph
from remat.core.errors import SolverUnsuitableError
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.testing.chain_oracles import best_join_of_turns


def judged_total(
    costs: list[list[int]], units: int, convention: MemoryConvention
) -> int | None:
    """Return the judge's time of the best plan, all operations costing 1."""
    plan = plan_join_any_turns(costs, units, convention, turn_cost=1)
    if plan is None:
        return None
    graph = UnitGraph(costs, convention, backward_cost=1, turn_cost=1)
    trace = simulate(graph.graph, single_device(units), graph.schedule(plan.operations))
    assert trace.violation is None
    turns = sum(isinstance(operation, Turn) for operation in plan.operations)
    assert trace.serial_ns == plan.forward_cost + sum(plan.lengths) + turns
    return trace.serial_ns


def test_exhaustive_values_of_two_branches() -> None:
    table = oracle_table("join_oracle.json")["multi_exec"]
    compared = improved = 0
    for key, shapes in table.items():
        convention = next(c for c in CONVENTIONS if label(c) == key)
        for shape, rows in shapes.items():
            costs = [[1] * int(length) for length in shape.split(",")]
            if len(costs) != 2:
                continue
            for units, row in rows.items():
                best = row["multi_total_ub1_ut1"]
                assert judged_total(costs, int(units), convention) == best
                compared += 1
                improved += best != row["once_total_ub1_ut1"]
    assert compared > 250
    assert improved > 20


@pytest.mark.parametrize(
    ("convention", "length", "units", "once", "total"),
    [
        (IN_PLACE, 7, 5, 53, 52),
        (IN_PLACE, 8, 5, 65, 61),
        (IN_PLACE, 9, 5, 78, 70),
        (IN_PLACE, 10, 5, 92, 81),
        (STRICT, 6, 6, 47, 47),
        (STRICT, 8, 6, 72, 68),
    ],
)
def test_cheaper_than_one_turn(
    convention: MemoryConvention, length: int, units: int, once: int, total: int
) -> None:
    costs = [[1] * length] * 2
    plan = plan_join(costs, units, convention)
    assert plan is not None
    assert plan.forward_cost + 2 * length + 1 == once
    assert judged_total(costs, units, convention) == total


def test_feasible_where_one_turn_is_not() -> None:
    assert plan_join([[1] * 10] * 2, 4, IN_PLACE) is None
    plan = plan_two_turns([[1] * 10] * 2, 4, IN_PLACE)
    assert plan is not None
    assert plan.forward_cost == 98


@pytest.mark.parametrize(
    ("costs", "units"),
    [
        ([[0], [5, 6, 6, 5]], 9),
        ([[0], [5, 6, 6, 5]], 5),
        ([[4, 1], [2, 3]], 4),
        ([[4, 1], [2, 3]], 6),
        ([[1, 5, 2], [3, 1]], 4),
        ([[1, 5, 2], [3, 1]], 5),
        ([[6, 0, 1], [2, 2, 2]], 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("convention", [IN_PLACE, STRICT], ids=label)
def test_two_turns_are_the_exhaustive_optimum(
    costs: list[list[int]], units: int, convention: MemoryConvention
) -> None:
    plan = plan_two_turns(costs, units, convention)
    found = None if plan is None else plan.forward_cost
    assert found == best_join_of_turns(costs, units, convention)


def test_a_last_value_may_be_kept_from_turn_to_turn() -> None:
    plan = plan_two_turns([[0], [5, 6, 6, 5]], 9, IN_PLACE)
    assert plan is not None
    assert plan.forward_cost == 22


def test_unequal_costs_and_comfortable_memory() -> None:
    costs = [[3, 1, 4, 1, 5], [9, 2, 6]]
    for units in range(4, 16):
        judged_total(costs, units, IN_PLACE)
        judged_total(costs, units, STRICT)
    ample = plan_join_any_turns(costs, 30, STRICT)
    assert ample is not None
    assert ample.forward_cost == sum(map(sum, costs))


def test_bad_input_is_refused() -> None:
    with pytest.raises(SolverUnsuitableError, match="not 3"):
        plan_two_turns([[1]] * 3, 9, STRICT)
    with pytest.raises(SolverUnsuitableError, match="uncounted gradients"):
        plan_two_turns([[1]] * 2, 9, MemoryConvention(counts_gradients=False))
    free = plan_join_any_turns([[1]] * 2, 9, MemoryConvention(counts_gradients=False))
    assert free is not None
