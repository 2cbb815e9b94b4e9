"""Joins of chains of stages: exhaustive search, one branch, the judge, bad input."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.chain_strategies import stage_chains

from remat.algorithms.chains.conventions import STRICT
from remat.algorithms.chains.joins import plan_join
from remat.algorithms.chains.rotor import plan_rotor
from remat.algorithms.chains.stage_graph import StageGraph
from remat.algorithms.chains.stage_joins import (
    StageJoin,
    StageJoinPlan,
    plan_stage_join,
    stage_join_table_bytes,
)
from remat.algorithms.chains.stages import Stage, StageChain, StageOption
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.testing.chain_oracles import best_stage_join


@st.composite
def stage_joins(draw: st.DrawFn, max_stages: int, max_branches: int) -> StageJoin:
    branch = stage_chains(max_stages=max_stages).map(
        lambda chain: replace(chain, turn_ns=0, turn_workspace_bytes=0)
    )
    branches = draw(st.lists(branch, min_size=1, max_size=max_branches))
    if draw(st.booleans()):
        branches = [branches[0] for _ in branches]
    return StageJoin(
        branches=tuple(branches),
        turn_ns=draw(st.integers(0, 3)),
        turn_workspace_bytes=draw(st.integers(0, 3)),
    )


def judged(join: StageJoin, plan: StageJoinPlan, budget_bytes: int) -> None:
    graph = StageGraph(join, plan.operations)
    trace = simulate(graph.graph, single_device(budget_bytes), graph.schedule)
    assert trace.violation is None
    assert trace.serial_ns == plan.cost_ns


TURNS_IN_BETWEEN = StageJoin(
    branches=(
        StageChain(
            stages=(
                Stage(
                    forward_ns=0,
                    output_bytes=3,
                    options=(
                        StageOption(
                            backward_ns=0, forward_ns=0, backward_workspace_bytes=2
                        ),
                    ),
                ),
            ),
            input_bytes=4,
            input_gradient_bytes=4,
        ),
        StageChain(
            stages=(
                Stage(
                    forward_ns=0,
                    output_bytes=1,
                    gradient_bytes=0,
                    options=(
                        StageOption(backward_ns=0, forward_ns=None, needs_output=False),
                    ),
                ),
                Stage(
                    forward_ns=0,
                    output_bytes=3,
                    options=(
                        StageOption(backward_ns=0, forward_ns=None, needs_output=False),
                    ),
                ),
            ),
            input_bytes=1,
            input_gradient_bytes=2,
        ),
    )
)
"""Fits in 17 bytes if the first branch is reversed between the second's two stages.

Its value between them is not stored: there is no room for it at the turn.
"""


@settings(max_examples=25)
@example(TURNS_IN_BETWEEN, 17)
@given(stage_joins(max_stages=2, max_branches=2), st.integers(5, 40))
def test_against_exhaustive_search(join: StageJoin, budget: int) -> None:
    best = best_stage_join(join, budget, in_class=True)
    plan = plan_stage_join(join, budget)
    if best is None:
        assert plan is None
        return
    # Not proved, and true of some thousand instances that were drawn.
    assert plan is not None
    assert best <= plan.cost_ns <= 1.1 * best
    judged(join, plan, budget)


def test_branches_take_turns_at_stored_values_only() -> None:
    assert best_stage_join(TURNS_IN_BETWEEN, 17) == 0
    assert best_stage_join(TURNS_IN_BETWEEN, 17, in_class=True) is None
    assert plan_stage_join(TURNS_IN_BETWEEN, 17) is None
    assert plan_stage_join(TURNS_IN_BETWEEN, 18) is not None


@settings(max_examples=60)
@given(stage_joins(max_stages=5, max_branches=3), st.integers(1, 120))
def test_plans_are_judged(join: StageJoin, budget: int) -> None:
    plan = plan_stage_join(join, budget)
    persistent = plan_stage_join(join, budget, beyond_persistence=False)
    coarse = plan_stage_join(join, 97 * budget, slots=20)
    for found, limit in ((plan, budget), (persistent, budget), (coarse, 97 * budget)):
        if found is not None:
            judged(join, found, limit)
            assert join.least_ns <= found.cost_ns
            assert found.least_ns <= found.cost_ns
    if plan is not None and persistent is not None:
        assert plan.least_ns <= persistent.least_ns


@settings(max_examples=60)
@given(stage_joins(max_stages=6, max_branches=1), st.integers(1, 60))
def test_one_branch_is_a_chain(join: StageJoin, budget: int) -> None:
    chain = replace(
        join.branches[0],
        turn_ns=join.turn_ns,
        turn_workspace_bytes=join.turn_workspace_bytes,
    )
    alone, joined = plan_rotor(chain, budget), plan_stage_join(join, budget)
    assert (alone is None) == (joined is None)
    if alone is not None and joined is not None:
        assert alone.cost_ns <= joined.cost_ns
        assert joined.least_ns <= alone.cost_ns


@pytest.mark.parametrize("lengths", [(3, 3), (5, 2), (6, 6), (3, 2, 2)])
def test_unit_sizes_are_the_unit_size_program(lengths: tuple[int, ...]) -> None:
    # A backward from the input alone and one unit for everything: the strict join.
    option = StageOption(forward_ns=None, backward_ns=0, needs_output=False)
    stage = Stage(forward_ns=1, output_bytes=1, options=(option,))
    join = StageJoin(
        branches=tuple(
            StageChain(stages=(stage,) * length, input_bytes=1) for length in lengths
        )
    )
    costs = [[1] * length for length in lengths]
    for units in range(3 * len(lengths) - 1, 3 * len(lengths) + 6):
        expected = plan_join(costs, units, STRICT)
        found = plan_stage_join(join, units)
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert found.cost_ns == expected.forward_cost


def test_bad_input_is_refused() -> None:
    option = StageOption(forward_ns=1, backward_ns=1)
    stage = Stage(forward_ns=1, output_bytes=1, options=(option,))
    chain = StageChain(stages=(stage,))
    with pytest.raises(InvalidGraphError, match="at least one branch"):
        StageJoin(branches=())
    with pytest.raises(InvalidGraphError, match="branch 1 has a turn"):
        StageJoin(branches=(chain, replace(chain, turn_ns=1)))
    with pytest.raises(InvalidGraphError, match="turn_ns of a join is -1"):
        StageJoin(branches=(chain,), turn_ns=-1)
    with pytest.raises(InvalidGraphError, match="budget_bytes is -1"):
        plan_stage_join(StageJoin(branches=(chain,)), -1)
    with pytest.raises(SolverUnsuitableError, match="at most 6"):
        plan_stage_join(StageJoin(branches=(chain,) * 7), 10)
    wide = StageJoin(branches=(StageChain(stages=(stage,) * 40),) * 5)
    assert stage_join_table_bytes(wide, 16) > 2**30
    with pytest.raises(SolverUnsuitableError, match="treat the join as a chain"):
        plan_stage_join(wide, 10)
