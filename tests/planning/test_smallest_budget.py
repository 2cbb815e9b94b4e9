"""The smallest budget: it works, nothing tried below did; it brackets the truth."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES, mlp_chain, transformer_like
from tests.oracles import brute_force_smallest_budget
from tests.strategies import graphs

from remat.bounds.memory_bound import least_budget_bytes
from remat.core.bounds import peak_bound_bytes
from remat.core.errors import SolverFault
from remat.core.graph import Role, Storage, TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.native import core
from remat.planning.smallest_budget import FLOOR_SOLVERS, smallest_budget
from remat.solvers import ChenGreedy, ChenSqrt, StoreAll
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.testing import store_all_peak_bytes


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer", "unet", "once-only"])
def test_the_floor_is_proved_by_its_schedule(name: str):
    graph = INSTANCES[name]().graph
    floor = smallest_budget(graph)
    trace = simulate(graph, single_device(floor.budget_bytes), floor.schedule)
    assert trace == floor.trace
    assert trace.is_valid
    assert trace.peak_bytes[0] == floor.budget_bytes
    assert floor.bound_bytes == least_budget_bytes(graph) >= peak_bound_bytes(graph)
    assert floor.bound_bytes <= floor.budget_bytes <= store_all_peak_bytes(graph)


@pytest.mark.parametrize(
    ("name", "percent"),
    [("mlp", 70), ("resnet", 32), ("transformer", 45), ("unet", 38)],
)
def test_the_floor_is_far_below_store_all(name: str, percent: int):
    graph = INSTANCES[name]().graph
    budget = smallest_budget(graph).budget_bytes
    assert budget <= store_all_peak_bytes(graph) * percent // 100


@settings(max_examples=30)
@given(graph=graphs(max_ops=5, sizes=st.integers(0, 9)))
def test_the_floor_brackets_the_smallest_budget(graph: TrainingGraph):
    floor = smallest_budget(graph, tolerance_percent=0)
    smallest = brute_force_smallest_budget(graph)
    assert smallest is not None
    assert floor.bound_bytes <= smallest <= floor.budget_bytes


def test_solvers_that_find_nothing_leave_store_all(monkeypatch: pytest.MonkeyPatch):
    graph = mlp_chain().graph
    searched = smallest_budget(graph, solvers=[], refining_solvers=[])
    # Without the native core there is no search either.
    monkeypatch.setattr("remat.planning.smallest_budget.core", lambda: None)
    floor = smallest_budget(graph, solvers=[], refining_solvers=[])
    assert floor.budget_bytes == store_all_peak_bytes(graph)
    if core() is not None:
        assert searched.budget_bytes < floor.budget_bytes


def test_the_solvers_that_are_given_are_asked():
    graph = transformer_like(4).graph
    segments, both = (
        smallest_budget(graph, solvers=solvers, refining_solvers=[]).budget_bytes
        for solvers in ([ChenGreedy()], [ChenGreedy(), *FLOOR_SOLVERS])
    )
    assert both < segments < store_all_peak_bytes(graph)


def test_a_finer_tolerance_is_no_worse():
    graph = transformer_like(2).graph
    coarse, fine = (
        smallest_budget(graph, tolerance_percent=percent, refining_solvers=[])
        for percent in (20, 0)
    )
    assert fine.budget_bytes <= coarse.budget_bytes


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer", "unet"])
@pytest.mark.parametrize("share", [1, 20])
def test_bytes_that_are_always_there_add_what_they_are(name: str, share: int):
    graph = INSTANCES[name]().graph
    floor = smallest_budget(graph)
    more_bytes = share * floor.budget_bytes + 1
    more = Storage(
        name="more", size_bytes=more_bytes, role=Role.GRADIENT, is_resident=True
    )
    shifted = smallest_budget(replace(graph, storages=(*graph.storages, more)))
    assert shifted.budget_bytes == floor.budget_bytes + more_bytes
    assert shifted.schedule == floor.schedule


def test_refining_never_makes_the_floor_higher():
    graph = transformer_like(3).graph
    plain = smallest_budget(graph, refining_solvers=[])
    refined = smallest_budget(graph)
    assert refined.budget_bytes <= plain.budget_bytes
    assert refined.trace.violation is None


def test_without_time_it_is_what_takes_linear_time():
    graph = mlp_chain().graph
    floor = smallest_budget(graph, limits=Limits.after(0))
    unlimited = Problem(graph=graph, platform=single_device())
    halves = ChenSqrt().solve(unlimited, Limits(), ignore_progress).schedule
    assert floor.schedule == halves
    assert floor.budget_bytes < store_all_peak_bytes(graph)
    assert smallest_budget(graph).budget_bytes <= floor.budget_bytes


def test_a_budget_near_the_bound_is_found():
    graph = INSTANCES["awkward-0"]().graph
    floor = smallest_budget(graph, tolerance_percent=1)
    assert floor.budget_bytes <= floor.bound_bytes * 101 // 100


@dataclass(frozen=True)
class Liar:
    schedule_class: ClassVar[str] = "none"
    is_exact: ClassVar[bool] = False

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        return Proposal(status=Status.FEASIBLE, schedule=Schedule(()))


def test_a_liar_is_found_out():
    with pytest.raises(SolverFault):
        smallest_budget(mlp_chain().graph, solvers=[StoreAll(), Liar()])
