"""Every solver of the table keeps the contract, on every instance."""

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.oracles import brute_force_best
from tests.shared_answers import SharedAnswers
from tests.strategies import graphs

from remat.core.bounds import peak_bound_bytes
from remat.core.graph import TrainingGraph
from remat.core.liveness import insert_discards, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Problem
from remat.core.schedule import Discard, Step
from remat.core.simulator import simulate
from remat.solvers import (
    SOLVERS,
    Checkmate,
    CheckmateLpRounding,
    LocalSearch,
    Moccasin,
)
from remat.solvers.base import Solver
from remat.testing import SolverContract, budgets_between, scale_graph

# Baselines that may recompute, or find nothing, where storing everything fits.
RECOMPUTES_ALWAYS = {"chen-sqrt", "chen-greedy", "chen-lower-sets"}
# Solvers for several devices: with one, they store everything or decline; what they do
# with several is in test_device_solvers.py.
FOR_SEVERAL_DEVICES = {"device-search", "pofo", "xengine", "xengine-published"}
# Solvers for chains or joins, and a graph that they do not decline.
STRUCTURES = {"rotor": "mlp", "rockmate": "mlp", "revolve": "mlp", "join": "siamese"}
# These, too, decline other graphs.
NEEDS_STRUCTURE = {*STRUCTURES, *FOR_SEVERAL_DEVICES}
# Solvers that go on until time is over, or the optimum proved: little of it here, and
# where two answers are compared, instances that take none to prove.
_TIME_LIMIT_S = 0.3
TIMED: dict[str, Solver] = {
    "checkmate": Checkmate(default_time_limit_s=_TIME_LIMIT_S),
    "checkmate-lp-rounding": CheckmateLpRounding(default_time_limit_s=_TIME_LIMIT_S),
    "moccasin": Moccasin(default_time_limit_s=_TIME_LIMIT_S),
}
PROVED_SOON = {"once-only"}


# Little of what is a second for a thousand ops.
SHORT: dict[str, Solver] = {"local-search": LocalSearch(effort=50_000)}


def made(solver: str) -> Solver:
    return TIMED.get(solver) or SHORT.get(solver) or SOLVERS[solver]()


@cache
def instance(name: str) -> TrainingGraph:
    return INSTANCES[name]().graph


def contract(solver: str) -> SolverContract:
    return SharedAnswers(
        solver=made(solver),
        recomputes_always=solver in RECOMPUTES_ALWAYS,
        needs_structure=solver in NEEDS_STRUCTURE,
    )


# The large instances ask for minutes where a small one shows the same.
NETWORKS = ("resnet", "transformer", "densenet", "unet")
SMALL = ("mlp", "siamese", "once-only", "awkward-0", "awkward-1", "awkward-2")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", INSTANCES)
def test_answers_are_valid(solver: str, name: str):
    contract(solver).run("answers_are_valid", instance(name))


@pytest.mark.parametrize("check", SolverContract.CHECKS[1:])
@pytest.mark.parametrize(
    ("solver", "name"),
    [(s, n) for s in SOLVERS for n in SMALL if s not in TIMED or n in PROVED_SOON],
)
def test_contract(solver: str, name: str, check: str):
    contract(solver).run(check, instance(name))


@pytest.mark.parametrize(
    "check",
    [
        "ample_budget_costs_no_more_than_storing_all",
        "below_the_bound_there_is_no_schedule",
        "deadline_is_kept",
    ],
)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_contract_on_networks(solver: str, name: str, check: str):
    contract(solver).run(check, instance(name))


def freed_after(steps: Iterable[Step]) -> list[tuple[Step | None, set[Step]]]:
    """Return each step that is no discard, with the discards that follow it."""
    found: list[tuple[Step | None, set[Step]]] = [(None, set())]
    for step in steps:
        if isinstance(step, Discard):
            found[-1][1].add(step)
        else:
            found.append((step, set()))
    return found


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("solver", SOLVERS)
def test_everything_is_freed_right_after_its_last_use(solver: str, name: str):
    graph = instance(name)
    for budget in budgets_between(graph):
        found = contract(solver).ask(graph, budget).schedule
        if found is not None:
            tighter = insert_discards(graph, found.steps)
            assert freed_after(tighter.steps) == freed_after(found.steps)


@settings(max_examples=50)
@given(graph=graphs(max_ops=5, sizes=st.integers(0, 9)), share=st.integers(0, 4))
def test_no_solver_beats_the_optimum(graph: TrainingGraph, share: int):
    store_all = schedule_from_order(graph, store_all_order(graph))
    high = simulate(graph, single_device(), store_all).peak_bytes[0]
    low = peak_bound_bytes(graph)
    budget = max(1, low + (high - low) * share // 4)
    best = brute_force_best(graph, budget)
    for solver in SOLVERS:
        note(solver)
        contract(solver).check_optimum(graph, budget, best)


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=25)
@given(graph=graphs(max_ops=7))
def test_answers_are_valid_on_any_graph(solver: str, graph: TrainingGraph):
    contract(solver).run("answers_are_valid", graph)


PRINT_SCHEDULES = """
import sys
from remat.planning.portfolio import solve
from remat.core.platform import single_device
from remat.core.problem import Problem
from remat.solvers import SOLVERS
from remat.testing import budgets_between
from tests.instances import INSTANCES
for word in sys.argv[1:]:
    solver, name = word.split("=")
    graph = INSTANCES[name]().graph
    for budget in budgets_between(graph, 3):
        problem = Problem(graph=graph, platform=single_device(budget))
        schedule = solve(problem, SOLVERS[solver]()).schedule
        print(word, budget, schedule and schedule.steps)
"""


def test_another_hash_seed_gives_the_same_schedules():
    solvers = [solver for solver in SOLVERS if solver not in FOR_SEVERAL_DEVICES]
    words = [f"{solver}={STRUCTURES.get(solver, 'awkward-2')}" for solver in solvers]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_SCHEDULES, *words],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path]),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    lines = outputs.pop().splitlines()
    assert {line.split()[0] for line in lines if "Compute" in line} == set(words)


def test_problem_of_a_scaled_graph_has_scaled_budgets():
    graph = instance("mlp")
    scaled = scale_graph(graph, bytes_factor=3)
    assert [3 * b for b in budgets_between(graph, 2)] == budgets_between(scaled, 2)
    assert Problem(graph=scaled, platform=single_device()).budget_bytes is None
