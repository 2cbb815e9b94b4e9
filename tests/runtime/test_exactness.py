"""What a fitted model computes is bitwise what the plain model computes.

Besides schedules that solvers find, two extreme ones are forced on every module: keep
everything, and recompute everything that may be recomputed, each value right before
each of its uses. The second reaches every way in which recomputation can go wrong.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.modules import CASES, Case, make_case

import remat
from remat.capture.joint_program import JointProgram
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import single_device
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.training.fitted_model import FittedModel
from remat.training.request import PlanRequest
from remat.training.verification import TrainingStep, compare, verify


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """Compute as people do; other tests leave the cores to each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def recompute_everything(graph: TrainingGraph, *, is_repeated: bool) -> Schedule:
    """Keep nothing that may be recomputed.

    With ``is_repeated`` each backward op recomputes all that it reads from scratch,
    so that one op runs many times; else each op is recomputed at most once.
    """
    forward = graph.forward_count
    order = [*range(forward), BOUNDARY]
    recomputed: set[int] = set()
    for op in range(forward, len(graph.ops)):
        if is_repeated:
            recomputed = set()
        needed: set[int] = set()
        pending = [graph.producers[s] for s in graph.ops[op].reads]
        while pending:
            producer = pending.pop()
            if (
                producer is None
                or producer >= forward
                or producer in needed
                or producer in recomputed
                or not graph.ops[producer].is_recomputable
            ):
                continue
            needed.add(producer)
            pending += [graph.producers[s] for s in graph.ops[producer].reads]
        recomputed |= needed
        order += [*sorted(needed), op]
    return schedule_from_order(graph, order)


def forced(case: Case, *, is_repeated: bool) -> tuple[FittedModel, list[Schedule]]:
    """Return the case's model fitted with :func:`recompute_everything`."""
    schedules: list[Schedule] = []

    def choose(program: JointProgram) -> tuple[JointProgram, Schedule]:
        schedule = recompute_everything(program.graph, is_repeated=is_repeated)
        trace = simulate(program.graph, single_device(), schedule)
        assert trace.violation is None, trace.violation
        schedules.append(schedule)
        return program, schedule

    request = PlanRequest(budget=2**50, costs="estimated")
    fitted = FittedModel(case.model, request)
    fitted.backend.choose_schedule = choose
    return fitted, schedules


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_recomputing_everything_is_bitwise_eager(name: str, is_repeated: bool) -> None:
    case = make_case(name)
    step = TrainingStep(case.model, case.args, case.kwargs, case.loss, None)
    fitted, schedules = forced(case, is_repeated=is_repeated)
    with step.restored():
        found = step.outcome(fitted)
        expected = step.outcome(None)
    assert not compare(expected, found)
    assert len(expected) > 6
    assert schedules[0].recompute_counts()


@pytest.mark.parametrize("name", CASES)
def test_smallest_budget_is_kept_and_exact(name: str) -> None:
    case = make_case(name)
    with pytest.raises(BudgetError) as refused:
        remat.plan(case.model, case.args, case.kwargs, budget=1, loss=case.loss)
    budget = refused.value.required_bytes
    report = verify(case.model, case.args, case.kwargs, budget=budget, loss=case.loss)
    assert report.is_within_budget, report
    assert report.is_exact, report
    assert not report.against_eager, report


@pytest.mark.parametrize("name", CASES)
def test_peak_of_an_ample_budget_is_predicted_to_the_byte(name: str) -> None:
    case = make_case(name)
    report = verify(case.model, case.args, case.kwargs, budget=2**40, loss=case.loss)
    assert report.is_exact, report
    assert not report.against_eager, report
    assert report.predicted_peak_bytes >= report.measured_peak_bytes
    # The generator state (5056 bytes) is counted, and as much for a replay of the op,
    # even where nothing is replayed.
    slack_bytes = 2 * 5056 + 1024
    assert report.predicted_peak_bytes <= report.measured_peak_bytes + slack_bytes


def test_recomputation_really_happens_in_the_lowered_graphs() -> None:
    case = make_case("random ops")
    fitted, schedules = forced(case, is_repeated=True)
    case.model._compiled_call_impl = fitted
    torch.manual_seed(1)
    out = case.model(*case.args)
    with torch.profiler.profile() as profile:
        out.sum().backward()
    names = [event.name for event in profile.events() or ()]
    recomputed = schedules[0].recompute_counts()
    assert sum(recomputed.values()) > 50
    # tanh runs in backward although its derivative never calls it.
    assert names.count("aten::tanh") >= 4
