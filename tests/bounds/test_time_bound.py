"""Bounds on time: when they are made, for what, and known cases."""

import math
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instances import INSTANCES
from tests.strategies import graphs, optimum

from remat.bounds import time_bound
from remat.bounds.instance import instance_of
from remat.bounds.moment_program import MomentProgram, default_chain
from remat.bounds.time_bound import TimeBounds, solved, spread_moments
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Status
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import Plan
from remat.planning.proofs import with_bound
from remat.testing.instances.library import load_instance
from remat.testing.small_graphs import joint_graph

EVERYTHING = 1 << 62


@settings(max_examples=60, deadline=None)
@given(graph=graphs(max_ops=5, sizes=st.integers(0, 9)), extra=st.integers(0, 12))
def test_no_bound_is_above_the_best_of_all_schedules(graph: TrainingGraph, extra: int):
    budget = max(1, graph.resident_bytes() + extra)
    found = optimum(graph, single_device(budget))
    bounds = TimeBounds(graph, budget)
    if found is not None:
        assert bounds.prove(EVERYTHING) <= found[0]
        assert bounds.prove_where_full(range(len(graph.ops))) <= found[0]


def unit_chain(length: int) -> TrainingGraph:
    """Return a chain whose op l of backward reads what op l of forward wrote."""
    reads: list[list[int]] = [[], *([k] for k in range(length - 1))]
    reads.append([length - 1])
    reads += [[length - 1 - k, length + k - 1] for k in range(1, length)]
    return joint_graph([1] * 2 * length, [1] * 2 * length, reads, length)


@pytest.mark.parametrize("length", [8, 20])
@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_of_a_chain_each_byte_that_is_missing_costs_a_run(length: int, missing: int):
    # Gradient l needs activation l: all of them, a gradient in and one out fit at the
    # first backward step with length + 1 bytes. With k less, k activations at least are
    # made again, each by one run if the one before it is there.
    graph = unit_chain(length)
    plain = plain_peak_bytes(graph)
    bounds = TimeBounds(graph, plain - missing)
    assert bounds.prove(EVERYTHING) == 2 * length + missing
    assert plan_graph(graph, budget=plain - missing).cost_ns == 2 * length + missing


def test_the_second_program_is_solved_only_where_the_first_is_not_enough():
    graph = INSTANCES["unet"]().graph
    bounds = TimeBounds(graph, plain_peak_bytes(graph) // 2)
    first = bounds.prove(1)
    assert bounds.certificate is not None
    edge = len(bounds.certificate.moments)
    assert edge <= 2
    assert bounds.prove(first) == first
    assert bounds.prove(EVERYTHING) > first
    assert len(bounds.certificate.moments) > edge
    assert bounds.prove(EVERYTHING) == bounds.best_ns


def test_of_a_step_too_long_for_more_moments_one_program_is_solved(
    monkeypatch: pytest.MonkeyPatch,
):
    graph = INSTANCES["unet"]().graph
    sizes: list[int] = []

    def noted(program: MomentProgram, time_limit_s: float | None = None):
        sizes.append(len(program.nodes))
        return solved(program, time_limit_s)

    monkeypatch.setattr(time_bound, "solved", noted)
    for most in (time_bound._MOST_NODES, len(graph.ops)):
        monkeypatch.setattr(time_bound, "_MOST_NODES", most)
        TimeBounds(graph, plain_peak_bytes(graph) // 2).prove(EVERYTHING)
    # Around the boundary; then with moments of backward; and in the longer step.
    assert sizes == [3, 7, 3]


def test_the_same_question_gets_the_same_certificate():
    graph = INSTANCES["unet"]().graph
    found = [TimeBounds(graph, plain_peak_bytes(graph) // 2) for _ in range(2)]
    for bounds in found:
        bounds.prove(EVERYTHING)
    assert found[0].certificate == found[1].certificate


def test_moments_lie_along_a_chain_from_the_boundary_on():
    step = instance_of(INSTANCES["transformer"]().graph)
    assert step is not None
    chain, moments = default_chain(step), spread_moments(step)
    assert step.boundary in moments[:2]
    places = [chain.index(node) for node in moments]
    assert places == sorted(places)
    boundary = chain.index(step.boundary)
    distances = [place - boundary for place in places if place > boundary]
    assert len(distances) == 4
    assert distances[0] <= math.ceil((len(chain) - boundary) / 64) + 1


def test_the_step_is_looked_at_where_its_loss_is_computed():
    # Beside the logits the loss needs as much once more, which nothing after it does.
    instance = load_instance("gpt2")
    step = instance_of(instance.graph)
    assert step is not None
    before, boundary = spread_moments(step)[:2]
    assert boundary == step.boundary
    assert before == default_chain(step)[default_chain(step).index(boundary) - 1]
    assert step.needed_bytes(before) > step.needed_bytes(boundary)
    bounds = TimeBounds(instance.graph, instance.budgets_bytes["40%"])
    known = instance.best["40%"]
    assert known.cost_ns - bounds.prove(EVERYTHING) <= 0.002 * known.cost_ns


@pytest.mark.parametrize(
    ("name", "label", "most"), [("ddpm-unet", "50%", 0.02), ("googlenet", "40%", 0.01)]
)
def test_where_a_schedule_is_fullest_more_is_proved(name: str, label: str, most: float):
    instance = load_instance(name)
    known, budget_bytes = instance.best[label], instance.budgets_bytes[label]
    without = TimeBounds(instance.graph, budget_bytes).prove(EVERYTHING)
    plan = with_bound(
        Plan(
            graph=instance.graph,
            platform=single_device(budget_bytes, instance.graph.device_kinds[0]),
            schedule=known.schedule,
            solver="known",
            status=Status.FEASIBLE,
            bound_ns=0,
            fingerprint="",
        )
    )
    assert plan.bound_ns > without
    assert known.cost_ns - plan.bound_ns <= most * known.cost_ns


class TestNothingIsProved:
    def test_without_a_budget(self):
        assert TimeBounds(INSTANCES["mlp"]().graph, None).prove(EVERYTHING) == 0

    def test_below_the_resident_bytes(self):
        graph = INSTANCES["mlp"]().graph
        resident = graph.resident_bytes()
        assert resident > 0
        assert TimeBounds(graph, resident - 1).prove(EVERYTHING) == 0

    def test_for_several_devices(self):
        graph = INSTANCES["mlp"]().graph
        first, *others = graph.storages
        away = replace(graph, storages=(replace(first, home=1), *others))
        assert TimeBounds(away, 10**9).prove(EVERYTHING) == 0

    def test_when_time_is_over(self):
        graph = INSTANCES["mlp"]().graph
        bounds = TimeBounds(graph, plain_peak_bytes(graph) // 2, limits=Limits.after(0))
        assert bounds.prove(EVERYTHING) == 0

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "ortools.math_opt.python.mathopt", None)
        graph = INSTANCES["mlp"]().graph
        plan = plan_graph(graph, budget="75%", solver="greedy-eviction")
        assert plan.recomputed_op_count
        assert plan.certificate is None
        assert plan.floor_ns == plan.baseline_cost_ns
