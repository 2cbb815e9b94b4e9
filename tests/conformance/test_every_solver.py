"""Every solver of the table keeps the contract, on every instance."""

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.oracles import brute_force_best
from tests.strategies import graphs

from remat.core.bounds import peak_bound_bytes
from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.liveness import insert_discards, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Problem
from remat.core.schedule import Discard, Step
from remat.core.simulator import simulate
from remat.planning.portfolio import solve
from remat.solvers import SOLVERS, Checkmate, CheckmateLpRounding, Moccasin
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
TIMED: dict[str, Solver] = {
    "checkmate": Checkmate(default_time_limit_s=1),
    "checkmate-lp-rounding": CheckmateLpRounding(default_time_limit_s=1),
    "moccasin": Moccasin(default_time_limit_s=1),
}
PROVED_SOON = {"once-only"}


def made(solver: str) -> Solver:
    return TIMED.get(solver) or SOLVERS[solver]()


@cache
def instance(name: str) -> TrainingGraph:
    return INSTANCES[name]().graph


def contract(solver: str) -> SolverContract:
    return SolverContract(
        solver=made(solver),
        recomputes_always=solver in RECOMPUTES_ALWAYS,
        needs_structure=solver in NEEDS_STRUCTURE,
    )


# The large instances ask for minutes where a small one shows the same.
NETWORKS = ("resnet", "transformer", "densenet", "unet")
SMALL = ("mlp", "siamese", "once-only", "awkward-0", "awkward-1", "awkward-2")


def is_slow(solver: str, name: str) -> bool:
    """Whether a solver uses its time at each of the budgets."""
    is_small = name not in NETWORKS and (solver, name) != ("checkmate", "siamese")
    return solver in TIMED and not is_small


@pytest.mark.parametrize(
    ("solver", "name"),
    [
        pytest.param(s, n, marks=[pytest.mark.slow] if is_slow(s, n) else [])
        for s in SOLVERS
        for n in INSTANCES
    ],
)
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
    for budget in budgets_between(graph, 3):
        problem = Problem(graph=graph, platform=single_device(budget))
        try:
            found = solve(problem, made(solver)).schedule
        except SolverUnsuitableError:
            assert solver in NEEDS_STRUCTURE
            return
        if found is not None:
            tighter = insert_discards(graph, found.steps)
            assert freed_after(tighter.steps) == freed_after(found.steps)


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=25)
@given(graph=graphs(max_ops=5, sizes=st.integers(0, 9)), share=st.integers(0, 4))
def test_no_solver_beats_the_optimum(solver: str, graph: TrainingGraph, share: int):
    store_all = schedule_from_order(graph, store_all_order(graph))
    high = simulate(graph, single_device(), store_all).peak_bytes[0]
    low = peak_bound_bytes(graph)
    budget = max(1, low + (high - low) * share // 4)
    contract(solver).check_optimum(graph, budget, brute_force_best(graph, budget))


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=25)
@given(graph=graphs(max_ops=7))
def test_answers_are_valid_on_any_graph(solver: str, graph: TrainingGraph):
    contract(solver).run("answers_are_valid", graph)


PRINT_SCHEDULE = """
import sys
from remat.planning.portfolio import solve
from remat.core.platform import single_device
from remat.core.problem import Problem
from remat.solvers import SOLVERS
from remat.testing import budgets_between
from tests.instances import INSTANCES
graph = INSTANCES[sys.argv[2]]().graph
for budget in budgets_between(graph, 3):
    problem = Problem(graph=graph, platform=single_device(budget))
    schedule = solve(problem, SOLVERS[sys.argv[1]]()).schedule
    print(schedule and schedule.steps)
"""


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s not in FOR_SEVERAL_DEVICES])
def test_another_hash_seed_gives_the_same_schedules(solver: str):
    outputs = {
        subprocess.run(
            [
                sys.executable,
                "-c",
                PRINT_SCHEDULE,
                solver,
                STRUCTURES.get(
                    solver, "mlp" if solver in NEEDS_STRUCTURE else "awkward-2"
                ),
            ],
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
    assert "Compute" in outputs.pop()


def test_problem_of_a_scaled_graph_has_scaled_budgets():
    graph = instance("mlp")
    scaled = scale_graph(graph, bytes_factor=3)
    assert [3 * b for b in budgets_between(graph, 2)] == budgets_between(scaled, 2)
    assert Problem(graph=scaled, platform=single_device()).budget_bytes is None
