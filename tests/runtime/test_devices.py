"""Schedules on several devices compute what one device computes, bit for bit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device_schedules import logical, run_by, scattered
from tests.modules import CASES, make_case
from tests.runtime.test_exactness import recompute_everything

from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY
from remat.core.platform import Platform
from remat.core.schedule import Boundary, Compute, Copy, Schedule
from remat.training.verification import TrainingStep, compare

PAIR = logical("cpu", "cpu:1")
WITH_HOST = logical("cpu", "host")
THREE = logical("cpu", "slow:1", "host")


def assert_bitwise(
    name: str, platform: Platform, seed: int, *, is_recomputed: bool = False
) -> Schedule:
    """Run a schedule made by chance, and return it."""
    case = make_case(name)
    step = TrainingStep(case.model, case.args, case.kwargs, case.loss, None)

    def choose(graph: TrainingGraph, arranged: Platform) -> Schedule:
        order = recomputing_order(graph) if is_recomputed else None
        return scattered(graph, arranged, seed, order=order, eviction_share=0.8)

    fitted, made = run_by(case, platform, choose)
    with step.restored():
        found = step.outcome(fitted)
        expected = step.outcome(None)
    assert not compare(expected, found)
    assert len(expected) > 6
    return made[0][2]


def recomputing_order(graph: TrainingGraph) -> list[int]:
    """Return an order in which each backward op recomputes all that it can."""
    steps = recompute_everything(graph, is_repeated=True).steps
    computed = [s for s in steps if isinstance(s, Compute | Boundary)]
    return [s.op if isinstance(s, Compute) else BOUNDARY for s in computed]


@pytest.mark.parametrize("platform", [PAIR, WITH_HOST, THREE], ids=lambda p: p.names)
@pytest.mark.parametrize("name", CASES)
def test_scattered_ops_are_bitwise_eager(name: str, platform: Platform) -> None:
    steps = assert_bitwise(name, platform, seed=1).steps
    assert any(isinstance(step, Copy) for step in steps)
    devices = {s.device for s in steps if isinstance(s, Compute)}
    assert devices == ({0} if platform is WITH_HOST else {0, 1})


@pytest.mark.parametrize("name", CASES)
def test_scattered_recomputation_is_bitwise_eager(name: str) -> None:
    schedule = assert_bitwise(name, PAIR, seed=2, is_recomputed=True)
    assert schedule.recompute_counts()


@settings(max_examples=4)
@given(st.sampled_from(["conv net", "attention", "random ops"]), st.integers(0, 10**6))
def test_any_valid_schedule_is_bitwise_eager(name: str, seed: int) -> None:
    assert_bitwise(name, THREE, seed, is_recomputed=bool(seed % 2))
