"""Rotor: oracle tables, exhaustive search, quantisation, the judge, bad input."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chain_strategies import stage_chains
from tests.chain_tables import oracle_table

from remat.algorithms.chains.operations import Backward, Forward, Turn
from remat.algorithms.chains.rotor import ChainPlan, plan_rotor, slot_size, table_bytes
from remat.algorithms.chains.stage_graph import StageGraph
from remat.algorithms.chains.stages import Stage, StageChain, StageOption
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.testing.chain_oracles import best_chain


def oracle_chain(
    forward: Sequence[int],
    backward: Sequence[int],
    values: Sequence[int],
    insides: Sequence[int],
) -> StageChain:
    """Return a chain as in the tables: what a stage saves includes its output."""
    stages = tuple(
        Stage(
            forward_ns=f,
            output_bytes=out,
            options=(
                StageOption(forward_ns=f, backward_ns=b, saved_bytes=inside - out),
            ),
        )
        for f, b, out, inside in zip(
            forward, backward, values[1:], insides, strict=True
        )
    )
    return StageChain(
        stages=stages, input_bytes=values[0], input_gradient_bytes=values[0]
    )


def value(plan: ChainPlan | None) -> int | None:
    return None if plan is None else plan.cost_ns


def judged(chain: StageChain, plan: ChainPlan, budget_bytes: int) -> None:
    graph = StageGraph(chain, plan.operations)
    trace = simulate(graph.graph, single_device(budget_bytes), graph.schedule)
    assert trace.violation is None
    assert trace.serial_ns == plan.cost_ns


def oracle_rows() -> list[tuple[StageChain, int, int | None, int | None]]:
    rows: list[tuple[StageChain, int, int | None, int | None]] = []
    for case in oracle_table("rotor_oracle.json")["instances"]:
        chain = oracle_chain(case["uf"], case["ub"], case["wa"], case["wA"])
        rows += [(chain, *row) for row in case["rows"]]
    return rows


def test_persistent_program_is_the_published_one() -> None:
    for chain, budget, published, _ in oracle_rows():
        plan = plan_rotor(chain, budget, beyond_persistence=False)
        assert value(plan) == published


def test_beyond_persistence_against_the_optimum() -> None:
    feasible = exact = 0
    gap = 0.0
    for chain, budget, published, best in oracle_rows():
        plan = plan_rotor(chain, budget)
        if best is None or published is None:
            assert plan is None
            continue
        assert plan is not None
        judged(chain, plan, budget)
        assert best <= plan.cost_ns <= published
        feasible += 1
        exact += plan.cost_ns == best
        gap += plan.cost_ns / best - 1
    assert feasible > 500
    assert exact / feasible > 0.98
    assert gap / feasible < 0.001


def test_equal_stages_of_the_oracle_table() -> None:
    compared = 0
    for name, rows in oracle_table("rotor_homog.json").items():
        inside, length = (
            int(part[2:] if "A" in part else part[1:]) for part in name.split("_")
        )
        chain = oracle_chain(
            [1] * length, [0] * length, [1] * (length + 1), [inside] * length
        )
        for budget, (published, best) in rows.items():
            persistent = plan_rotor(chain, int(budget), beyond_persistence=False)
            assert value(persistent) == published
            plan = plan_rotor(chain, int(budget))
            if plan is None:
                assert best is None
                continue
            assert persistent is not None
            assert plan.cost_ns <= persistent.cost_ns
            assert best is None or plan.cost_ns >= best
            judged(chain, plan, int(budget))
            compared += 1
    assert compared > 100


# Costs, sizes, and "budget: persistent optimum / optimum" by exhaustive search over the
# operations of Beaumont et al. 2019.
@pytest.mark.parametrize(
    ("forward", "backward", "values", "insides", "rows"),
    [
        (
            [1, 1, 1],
            [2, 2, 2],
            [1, 2, 2, 2],
            [4, 3, 5],
            {12: (11, 11), 13: (11, 10), 15: (10, 10), 17: (9, 9)},
        ),
        (
            [2, 3, 1, 4],
            [4, 6, 2, 8],
            [1, 2, 1, 3, 1],
            [3, 4, 3, 5],
            {
                13: (39, 37),
                14: (35, 35),
                16: (34, 33),
                17: (33, 32),
                19: (32, 32),
                20: (30, 30),
            },
        ),
        (
            [1] * 5,
            [2] * 5,
            [1] * 6,
            [2] * 5,
            {6: (25, 25), 7: (20, 20), 8: (19, 18), 9: (18, 17), 10: (17, 17)},
        ),
    ],
)
def test_counterexamples_to_persistence(
    forward: list[int],
    backward: list[int],
    values: list[int],
    insides: list[int],
    rows: dict[int, tuple[int, int]],
) -> None:
    chain = oracle_chain(forward, backward, values, insides)
    for budget, (persistent, best) in rows.items():
        found = plan_rotor(chain, budget, beyond_persistence=False)
        assert value(found) == persistent
        assert value(plan_rotor(chain, budget)) == best


def test_smallest_counterexample_drops_an_input_and_brings_it_back() -> None:
    chain = oracle_chain([1, 1, 1], [2, 2, 2], [1, 2, 2, 2], [4, 3, 5])
    plan = plan_rotor(chain, 13)
    assert plan is not None
    assert plan.operations == (
        Forward(0),
        Forward(1, option=0),
        Forward(2, option=0),
        Turn(),
        Backward(2, option=0),
        Forward(0, option=0),
        Backward(1, option=0),
        Backward(0, option=0),
    )


@settings(max_examples=60)
@given(stage_chains(max_stages=3), st.integers(1, 30))
def test_against_exhaustive_search(chain: StageChain, budget: int) -> None:
    best = best_chain(chain, budget)
    plan = plan_rotor(chain, budget)
    persistent = plan_rotor(chain, budget, beyond_persistence=False)
    if best is None:
        assert plan is None
        return
    assert plan is not None
    assert best <= plan.cost_ns
    judged(chain, plan, budget)
    if persistent is not None:
        assert plan.cost_ns <= persistent.cost_ns
        judged(chain, persistent, budget)


@settings(max_examples=60)
@given(stage_chains(max_stages=8), st.integers(10, 400), st.integers(1, 40))
def test_coarse_slots_stay_within_the_budget(
    chain: StageChain, budget: int, slots: int
) -> None:
    coarse = plan_rotor(chain, budget, slots=slots)
    fine = plan_rotor(chain, budget, slots=budget)
    if coarse is not None:
        assert fine is not None
        judged(chain, coarse, budget)
        assert coarse.cost_ns >= chain.least_ns


@settings(max_examples=40)
@given(stage_chains(max_stages=7), st.integers(10, 80))
def test_more_memory_is_never_slower(chain: StageChain, budget: int) -> None:
    here, more = plan_rotor(chain, budget), plan_rotor(chain, budget + 1)
    if here is not None:
        assert more is not None
        assert more.cost_ns <= here.cost_ns
    ample = plan_rotor(chain, 2 * sum(chain.all_sizes), slots=10**6)
    assert ample is not None
    assert ample.cost_ns == chain.least_ns


def test_slots_are_exact_where_sizes_have_a_common_divisor() -> None:
    chain = oracle_chain([1] * 3, [2] * 3, [1000] * 4, [3000] * 3)
    assert slot_size(chain, 20_500, 500) == 1000
    assert slot_size(chain, 20_500, 7) == 2929
    plan = plan_rotor(chain, 20_500)
    assert plan is not None
    assert plan.slot_bytes == 1000


def refused(message: str) -> Any:
    return pytest.raises(InvalidGraphError, match=message)


def test_bad_input_is_refused() -> None:
    option = StageOption(forward_ns=3, backward_ns=1)
    stage = Stage(forward_ns=3, output_bytes=1, options=(option,))
    with refused("saved_bytes of a stage's option is -1"):
        StageOption(forward_ns=3, backward_ns=1, saved_bytes=-1)
    with refused("can have neither"):
        StageOption(forward_ns=None, backward_ns=1)
    with refused("has no option"):
        Stage(forward_ns=3, output_bytes=1, options=())
    with refused("output_bytes of stage '' is -1"):
        Stage(forward_ns=3, output_bytes=-1, options=(option,))
    with refused("use the smaller of the two"):
        Stage(forward_ns=4, output_bytes=1, options=(option,))
    with refused("at least one stage"):
        StageChain(stages=())
    with refused("input_bytes of a chain is -1"):
        StageChain(stages=(stage,), input_bytes=-1)
    with refused("budget_bytes is -1"):
        plan_rotor(StageChain(stages=(stage,)), -1)
    slow = Stage(
        forward_ns=2**53,
        output_bytes=1,
        options=(StageOption(forward_ns=2**53, backward_ns=1),),
    )
    with refused("at worst"):
        plan_rotor(StageChain(stages=(slow,) * 16), 10)
    with refused("has no option, or"):
        StageGraph(StageChain(stages=(stage,)), [Turn(), Backward(0)])
    with refused("runs the backward of stages"):
        StageGraph(StageChain(stages=(stage,)), [Turn()])


def test_tables_that_are_too_large_are_refused_before_they_are_made() -> None:
    chain = oracle_chain([1] * 999, [1] * 999, [7, *range(7, 1006)], [2000] * 999)
    assert table_bytes(chain, 500) > 2**31
    with pytest.raises(SolverUnsuitableError, match="merge stages"):
        plan_rotor(chain, 10**6)
