"""Chains and joins: the native core gives the answers of its Python twins, exactly."""

import inspect
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.algorithms.chains.join_tables import join_plan, join_plan_by_branch
from remat.algorithms.chains.level_tables import disk_revolve_plan, hrevolve_plan
from remat.algorithms.chains.rotor_tables import rotor_plan
from remat.algorithms.chains.stage_join_tables import stage_join_plan

costs = st.integers(0, 9)
sizes = st.integers(0, 40)
stage_costs = st.lists(costs, min_size=1, max_size=4)
unit_costs = st.integers(1, 4).map(lambda length: [1] * length)


def same(function: Callable[..., Any], *args: Any) -> None:
    assert function(*args) == inspect.unwrap(function)(*args)


@st.composite
def joins(draw: st.DrawFn) -> tuple[Any, ...]:
    branch = draw(st.sampled_from([stage_costs, unit_costs]))
    branches = draw(st.lists(branch, min_size=1, max_size=3))
    if draw(st.booleans()):
        branches = [branches[0] for _ in branches]
    has_gradients = draw(st.booleans())
    is_strict = draw(st.booleans())
    return (
        branches,
        draw(st.integers(0, 16)),
        (
            int(has_gradients),
            int(is_strict and has_gradients),
            draw(st.booleans()),
            is_strict and not has_gradients,
        ),
    )


@settings(max_examples=300)
@given(joins())
def test_join_plan(join: tuple[Any, ...]) -> None:
    same(join_plan, *join)


@settings(max_examples=200)
@given(joins())
def test_join_plan_by_branch(join: tuple[Any, ...]) -> None:
    orders = [list(order) for order in permutations(range(len(join[0])))]
    same(join_plan_by_branch, *join, orders)


@settings(max_examples=200)
@given(
    st.integers(0, 14),
    st.lists(st.tuples(st.integers(0, 4), costs, costs), min_size=1, max_size=3),
    costs,
    costs,
)
def test_hrevolve_plan(
    length: int, levels: list[tuple[int, int, int]], forward: int, backward: int
) -> None:
    slots, write, read = (list(column) for column in zip(*levels, strict=True))
    same(hrevolve_plan, length, slots, write, read, forward, backward)


@settings(max_examples=200)
@given(st.lists(costs, min_size=1, max_size=30), costs, costs, costs)
def test_disk_revolve_plan(
    in_memory: list[int], write: int, read: int, forward: int
) -> None:
    same(disk_revolve_plan, in_memory, write, read, forward, in_memory[0])


@st.composite
def rotor_options(
    draw: st.DrawFn, least_ns: int
) -> tuple[int, int, int, bool, int, int]:
    if draw(st.integers(0, 5)) == 0:
        return (-1, draw(costs), 0, False, 0, draw(sizes))
    return (
        least_ns + draw(costs),
        draw(costs),
        draw(sizes),
        draw(st.booleans()),
        draw(sizes),
        draw(sizes),
    )


@st.composite
def rotor_chains(draw: st.DrawFn, max_stages: int = 5) -> tuple[Any, ...]:
    length = draw(st.integers(1, max_stages))

    def row(count: int, numbers: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(numbers, min_size=count, max_size=count))

    forward = row(length, costs)
    options = [
        draw(st.lists(rotor_options(least), min_size=1, max_size=2))
        for least in forward
    ]
    return (
        row(length + 1, sizes),
        row(length + 1, sizes),
        forward,
        row(length, sizes),
        options,
        (draw(costs), draw(sizes)),
    )


@settings(max_examples=300)
@given(rotor_chains(), st.integers(1, 30), st.integers(0, 40), st.booleans())
def test_rotor_plan(
    chain: tuple[Any, ...], slot_bytes: int, slots: int, beyond: bool
) -> None:
    same(rotor_plan, chain, slot_bytes, slots, beyond)


def test_cheaper_saving_is_refused() -> None:
    chain = ([1, 1], [1, 1], [5], [0], [[(4, 1, 0, True, 0, 0)]], (0, 0))
    for function in (stage_join_plan, inspect.unwrap(stage_join_plan)):
        with pytest.raises(ValueError, match="takes less time"):
            function([chain], (0, 0), 1, 20, True)


@settings(max_examples=40)
@given(
    st.lists(rotor_chains(max_stages=2), min_size=1, max_size=2),
    st.tuples(costs, sizes),
    st.integers(15, 60),
    st.integers(0, 14),
    st.booleans(),
)
def test_stage_join_plan(
    chains: list[tuple[Any, ...]],
    turn: tuple[int, int],
    slot_bytes: int,
    slots: int,
    beyond: bool,
) -> None:
    same(stage_join_plan, chains, turn, slot_bytes, slots, beyond)
