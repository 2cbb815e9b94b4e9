"""The solvers for several devices keep the contract on two and on three of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES, mlp_chain
from tests.shared_answers import SharedAnswers
from tests.strategies import graphs

from remat.core.bounds import peak_bound_bytes
from remat.core.errors import SolverFault
from remat.core.graph import TrainingGraph
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.core.schedule import Compute, Copy
from remat.solvers import SOLVERS, DeviceSearch, GreedyEviction, XEngine
from remat.solvers.base import ProgressCallback, Solver, ignore_progress
from remat.testing import SolverContract, budgets_between, store_all_peak_bytes
from remat.testing.contract import IN_PAIR, IN_THREES, WITH_STORE, Setting
from remat.testing.device_oracles import best_on_devices
from remat.testing.small_graphs import joint_graph

SETTINGS = {"store": WITH_STORE, "pair": IN_PAIR, "threes": IN_THREES}
# PoFo uses one device that stores. The published rows never do, and do not promise that
# what they find is no dearer than it needs to be.
CASES = {
    "device-search": (tuple(SETTINGS), ("mlp", "once-only", "awkward-1")),
    "pofo": (("store", "threes"), ("mlp", "siamese", "once-only", "awkward-2")),
    "xengine": (tuple(SETTINGS), ("crossed",)),
    "xengine-published": (("pair", "threes"), ("crossed", "short mlp")),
}
PROMISES_NOTHING = {"xengine-published"}


def crossed() -> TrainingGraph:
    """Return three layers, whose values backward reads in reverse."""
    return joint_graph(
        sizes=[6, 10, 4, 2, 4, 6, 2],
        costs=[30, 20, 50, 10, 40, 30, 20],
        reads=[[], [0], [1], [2], [3, 2], [4, 1], [5, 0]],
        forward_count=4,
    )


@cache
def instance(name: str) -> TrainingGraph:
    if name == "crossed":
        return crossed()
    if name == "short mlp":
        return mlp_chain(2).graph
    return INSTANCES[name]().graph


def contract(solver: str, setting: Setting) -> SolverContract:
    return SharedAnswers(
        solver=SOLVERS[solver](),
        recomputes_always=solver in PROMISES_NOTHING,
        setting=setting,
    )


@pytest.mark.parametrize("check", SolverContract.CHECKS)
@pytest.mark.parametrize(
    ("solver", "setting", "name"),
    [(s, d, n) for s, (places, names) in CASES.items() for d in places for n in names],
)
def test_contract(solver: str, setting: str, name: str, check: str):
    contract(solver, SETTINGS[setting]).run(check, instance(name))


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_settings_force_copies_and_choices(setting: str):
    """Budgets are met by copies, by running again, and where an op is the quicker."""
    seen: set[str] = set()
    for name in ("mlp", "once-only"):
        graph = instance(name)
        found = contract("device-search", SETTINGS[setting])
        for budget in (peak_bound_bytes(graph) * 9 // 10, *budgets_between(graph)):
            schedule = found.ask(graph, budget).schedule
            for step in schedule.steps if schedule else ():
                match step:
                    case Copy(source=source, target=target):
                        seen.add(f"copy {source} to {target}")
                    case Compute(device=device):
                        seen.add(f"run on {device}")
                    case _:
                        pass
    assert {"copy 0 to 1", "copy 1 to 0", "run on 0"} <= seen
    assert ("run on 1" in seen) is (setting != "store")


SEARCHES: dict[str, Solver] = {
    "device-search": DeviceSearch(candidates=100),
    "pofo": SOLVERS["pofo"](),
    "xengine": XEngine(),
    "xengine-published": SOLVERS["xengine-published"](),
}


@pytest.mark.parametrize("setting", SETTINGS)
@settings(max_examples=10)
@given(data=st.data(), percent=st.integers(40, 100))
def test_no_solver_beats_the_optimum(setting: str, data: st.DataObject, percent: int):
    # All schedules of four ops on three devices take a minute.
    most = 3 if setting == "threes" else 4
    graph = data.draw(graphs(max_ops=most, sizes=st.integers(0, 9)))
    budget = max(1, store_all_peak_bytes(graph) * percent // 100)
    problem = SETTINGS[setting].problem(graph, budget)
    best = best_on_devices(problem.graph, problem.platform)
    for name, solver in SEARCHES.items():
        note(name)
        checked = SolverContract(
            solver=solver, needs_structure=True, setting=SETTINGS[setting]
        )
        checked.check_optimum(graph, budget, None if best is None else best[0])
        result = checked.ask(graph, budget)
        checked.check_claims(result, problem)
        if result.status is Status.INFEASIBLE:
            staged = best_on_devices(problem.graph, problem.platform, is_staged=True)
            assert staged is None


# --- the checks can fail -------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """The search for several devices, with its answers changed."""

    schedule_class: ClassVar[str] = DeviceSearch.schedule_class
    is_exact: ClassVar[bool] = False

    change: Callable[[Problem, Proposal], Proposal]

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        search = DeviceSearch(candidates=60)
        return self.change(problem, search.solve(problem, limits, on_progress))


def nothing(message: str) -> Proposal:
    return Proposal(status=Status.UNKNOWN, message=message)


def alone(problem: Problem, _: Proposal) -> Proposal:
    return GreedyEviction().solve(problem, Limits(), ignore_progress)


def boastful(problem: Problem, proposal: Proposal) -> Proposal:
    return replace(proposal, bound_ns=1 << 60)


def without_budgets(problem: Problem, _: Proposal) -> Proposal:
    platform = problem.platform
    devices = tuple(replace(d, budget_bytes=None) for d in platform.devices)
    free = replace(problem, platform=replace(platform, devices=devices))
    return DeviceSearch().solve(free, Limits(), ignore_progress)


def at_a_loss(problem: Problem, proposal: Proposal) -> Proposal:
    is_tight = problem.platform.devices[0].budget_bytes is not None
    return proposal if is_tight else nothing("")


def refuting(problem: Problem, proposal: Proposal) -> Proposal:
    return Proposal(status=Status.INFEASIBLE, message="so there")


def reader_of_names(problem: Problem, proposal: Proposal) -> Proposal:
    return proposal if problem.graph.ops[0].name != "o0" else nothing("renamed")


def coarse(problem: Problem, proposal: Proposal) -> Proposal:
    largest = max(s.size_bytes for s in problem.graph.storages)
    return proposal if largest <= 10 else nothing("too many bytes")


def hasty(problem: Problem, proposal: Proposal) -> Proposal:
    longest = max(op.cost_ns[0] or 0 for op in problem.graph.ops)
    return proposal if longest <= 100 else nothing("too long")


def fickle(_: Problem, proposal: Proposal) -> Proposal:
    calls.append(1)
    return proposal if len(calls) % 2 else nothing("not today")


calls: list[int] = []


@pytest.mark.parametrize(
    ("check", "change", "error"),
    [
        ("answers_are_valid", boastful, SolverFault),
        ("answers_are_valid", refuting, AssertionError),
        ("below_the_bound_there_is_no_schedule", without_budgets, SolverFault),
        ("ample_budget_costs_no_more_than_storing_all", at_a_loss, AssertionError),
        ("unit_of_bytes_does_not_matter", coarse, AssertionError),
        ("unit_of_time_does_not_matter", hasty, AssertionError),
        ("names_do_not_matter", reader_of_names, AssertionError),
        ("same_question_same_answer", fickle, AssertionError),
        ("other_devices_are_of_use", alone, AssertionError),
    ],
)
def test_the_checks_can_fail(check: str, change, error: type[Exception]):
    graph = crossed()
    checked = SolverContract(solver=Broken(change), setting=IN_PAIR)
    with pytest.raises(error):
        checked.run(check, graph)
    right = Broken(lambda _, proposal: proposal)
    SolverContract(solver=right, setting=IN_PAIR).run(check, graph)
