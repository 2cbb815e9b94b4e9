"""Blocks: joins with a trunk and a stem, nested; judged, against exhaustive values."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chain_strategies import stage_chains, stages
from tests.chain_tables import oracle_table

from remat.algorithms.chains.blocks import Block, BlockGraph, block_stage
from remat.algorithms.chains.operations import Turn
from remat.algorithms.chains.rotor import ChainPlan, plan_rotor
from remat.algorithms.chains.stage_graph import StageGraph
from remat.algorithms.chains.stages import Stage, StageChain, StageOption
from remat.core.errors import InvalidGraphError
from remat.core.platform import single_device
from remat.core.simulator import simulate

UNIT = Stage(
    forward_ns=1,
    output_bytes=1,
    options=(StageOption(forward_ns=None, backward_ns=0, needs_output=False),),
)


def judged(chain: StageChain, plan: ChainPlan, budget_bytes: int) -> None:
    graph = StageGraph(chain, plan.operations)
    trace = simulate(graph.graph, single_device(budget_bytes), graph.schedule)
    assert trace.violation is None
    assert trace.serial_ns == plan.cost_ns


@st.composite
def blocks(draw: st.DrawFn, max_stages: int = 3) -> Block:
    branch = stage_chains(max_stages=max_stages).map(
        lambda chain: replace(chain, input_bytes=0, turn_ns=0, turn_workspace_bytes=0)
    )
    return Block(
        branches=tuple(draw(st.lists(branch, min_size=1, max_size=3))),
        output_bytes=draw(st.integers(0, 4)),
        merge_forward_ns=draw(st.integers(0, 3)),
        merge_backward_ns=draw(st.integers(0, 3)),
        merge_needs_inputs=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(blocks())
def test_options_are_what_the_judge_measures(block: Block) -> None:
    inside = block_stage(block)
    assert inside.forward_operations(None) == inside.plain
    assert len(inside.plans) == len(inside.stage.options)
    least = sum(branch.least_ns for branch in block.branches)
    least += block.merge_forward_ns + block.merge_backward_ns
    for operations, option in zip(inside.plans, inside.stage.options, strict=True):
        index = inside.plans.index(operations)
        ahead, back = (
            inside.forward_operations(index),
            inside.backward_operations(index),
        )
        assert (*ahead, Turn(), *back) == operations
        form = BlockGraph(block, operations)
        trace = simulate(form.graph, single_device(), form.schedule)
        assert trace.violation is None
        assert option.forward_ns is not None
        assert option.forward_ns + option.backward_ns == trace.serial_ns >= least
        forward_bytes = option.saved_bytes + option.forward_workspace_bytes
        backward_bytes = option.saved_bytes + option.backward_workspace_bytes
        outside = block.output_gradient_bytes + form.input_gradient_bytes
        peak = max(forward_bytes + block.output_bytes, backward_bytes + outside)
        assert trace.peak_bytes[0] <= max(
            peak,
            option.saved_bytes + block.output_bytes + block.output_gradient_bytes,
        )


@settings(max_examples=60)
@given(blocks())
def test_no_option_is_worse_than_another_in_every_respect(block: Block) -> None:
    options = block_stage(block).stage.options

    def respects(option: StageOption) -> list[int]:
        return [
            (option.forward_ns or 0) + option.backward_ns,
            option.saved_bytes,
            option.forward_workspace_bytes,
            option.saved_bytes + option.backward_workspace_bytes,
        ]

    for one, other in permutations(map(respects, options), 2):
        assert one == other or any(a < b for a, b in zip(one, other, strict=True))


@settings(max_examples=30)
@given(blocks(), stages(), stages(), st.integers(1, 60))
def test_stem_block_and_trunk_are_a_chain(
    block: Block, stem: Stage, trunk: Stage, budget: int
) -> None:
    chain = StageChain(stages=(stem, block_stage(block).stage, trunk), input_bytes=2)
    for limit in (budget, 10**4):
        plan = plan_rotor(chain, limit)
        if plan is not None:
            judged(chain, plan, limit)
            assert plan.cost_ns >= chain.least_ns
        assert plan is not None or limit < 10**4


@settings(max_examples=15)
@given(blocks(max_stages=2), blocks(max_stages=2))
def test_blocks_may_be_nested(inner: Block, outer: Block) -> None:
    stage = block_stage(inner, budgets=3).stage
    branch = StageChain(stages=(UNIT, stage, UNIT))
    nested = replace(outer, branches=(*outer.branches, branch))
    chain = StageChain(stages=(UNIT, block_stage(nested, budgets=3).stage))
    plan = plan_rotor(chain, 10**4)
    assert plan is not None
    judged(chain, plan, 10**4)


def test_joins_with_a_trunk_against_exhaustive_values() -> None:
    compared = exact = missed = 0
    ratio = 0.0
    for key, rows in oracle_table("join_oracle.json")["trunk"]["strict"].items():
        shape, trunk = key.split("|m=")
        branches = tuple(
            StageChain(stages=(UNIT,) * int(length)) for length in shape.split(",")
        )
        block = Block(branches=branches, output_bytes=1, merge_forward_ns=1)
        chain = StageChain(
            stages=(block_stage(block).stage, *[UNIT] * int(trunk)),
            input_bytes=len(branches),
        )
        for units, best in rows.items():
            plan = plan_rotor(chain, int(units))
            if best is None:
                assert plan is None
            elif plan is None:
                missed += 1
            else:
                judged(chain, plan, int(units))
                assert plan.cost_ns >= best
                compared += 1
                exact += plan.cost_ns == best
                ratio += plan.cost_ns / best
    # A decomposition: what it loses is measured, and must not grow.
    assert missed <= 18
    assert exact / compared > 0.75
    assert ratio / compared < 1.04


def test_bad_input_is_refused() -> None:
    chain = StageChain(stages=(UNIT,))
    with pytest.raises(InvalidGraphError, match="it is the block's"):
        Block(branches=(replace(chain, input_bytes=1),), output_bytes=1)
    with pytest.raises(InvalidGraphError, match="at least one branch"):
        Block(branches=(), output_bytes=1)
    with pytest.raises(InvalidGraphError, match="output_bytes of block '' is -1"):
        Block(branches=(chain,), output_bytes=-1)
    with pytest.raises(
        InvalidGraphError, match="budgets is 1; it must be an integer of at least 2"
    ):
        block_stage(Block(branches=(chain,), output_bytes=1), budgets=1)
