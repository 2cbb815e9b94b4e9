"""All processes run one plan, or all raise an error that names who is at fault."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.core.graph import TrainingGraph
from remat.planning.one_device import plan_graph
from remat.planning.plan import Plan
from remat.planning.same_plan import Amounts, amounts_of, plan_digest
from remat.testing.small_graphs import all_graphs
from remat.training.fitted_model import fitted_on
from remat.training.same_plan import Session
from tests.distributed.models import Language, batch_of, trained
from tests.distributed.processes import of_the_first

TIMEOUT_S = 6


class Odd(Language):
    """A model that the second process cannot trace."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if dist.get_rank():
            torch._dynamo.graph_break()
        return super().forward(ids)


def attempt(call: Callable[[], object]) -> dict[str, Any]:
    """Return what a call returns or raises, and how long it takes."""
    start_s = time.monotonic()
    found: dict[str, Any] = {}
    try:
        found["value"] = call()
    except (remat.RematError, RuntimeError) as error:
        found["error"] = type(error).__name__
        found["message"] = str(error)
        found["ranks"] = getattr(error, "ranks", None)
    return {**found, "seconds": time.monotonic() - start_s}


def run(rank: int) -> dict[str, list[dict[str, Any]]]:
    """Return what both processes find, and then lose the second."""
    ids = batch_of(rank)
    patient, hasty = (
        dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
        for seconds in (600, TIMEOUT_S)
    )
    model = Language(2)
    remat.fit(model, ids, budget="80%", regions="whole")
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05, process_group=patient)
    optimizer = torch.optim.SGD(wrapped.parameters(), 1e-3)

    def fit(
        model: Language, ids: torch.Tensor = ids, budget: str = "80%", **options: Any
    ) -> str:
        options = {
            "group": patient,
            "costs": "estimated",
            "regions": "whole",
            **options,
        }
        return plan_digest(remat.fit(model, ids, budget=budget, **options))

    def planned() -> list[Any]:
        trained(wrapped, ids, optimizer, 2)
        fitted = fitted_on(model)
        assert fitted is not None
        plans = fitted.planner.plans.values()
        return [
            (plan_digest(plan), [op.cost_ns for op in plan.graph.ops]) for plan in plans
        ]

    def alone() -> int:
        before = fitted_on(model)
        assert before is not None
        trained(wrapped, ids[: 16 - 8 * rank], optimizer, 1)
        return before.planner.planned_count

    def late() -> dict[str, Any]:
        if rank:
            dist.barrier()
            return attempt(lambda: fit(Language(1), group=hasty))
        found = attempt(lambda: fit(Language(1), group=hasty))
        dist.barrier()
        return found

    calls: dict[str, Callable[[], object]] = {
        "wrapped": planned,
        "a new shape": alone,
        "shape": lambda: fit(Language(1), ids[: 16 - 8 * rank]),
        "budget": lambda: fit(Language(1), budget=f"{80 + rank}%"),
        "too small": lambda: fit(Language(1), budget="10%"),
        "each for itself": lambda: fit(Language(1), ids[: 16 - 8 * rank], group=None),
        "failure": lambda: fit(Odd(1)),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        dist.barrier()
        found[name] = attempt(call)
    found["late"] = late()
    dist.barrier()
    found["after that"] = attempt(lambda: fit(Language(1), group=hasty))
    both: list[Any] = [None, None]
    dist.all_gather_object(both, found)
    if rank:
        weight = model.get_parameter("blocks.1.norm.weight")
        weight.register_hook(lambda _gradient: os.kill(os.getpid(), signal.SIGKILL))
    lost = {
        "in a step": attempt(lambda: trained(wrapped, ids, optimizer, 1)),
        "in planning": attempt(lambda: fit(Language(1), group=hasty)),
        "alone again": attempt(lambda: fit(Language(1), group=None)),
    }
    return {
        **{name: [each[name] for each in both] for name in found},
        **{name: [each] for name, each in lost.items()},
    }


@pytest.fixture(scope="module")
def outcome() -> tuple[dict[str, list[dict[str, Any]]], list[int | None]]:
    """What both processes found, and how they ended."""
    return of_the_first(run)


Found = dict[str, list[dict[str, Any]]]


@pytest.fixture
def found(outcome: tuple[Found, list[int | None]]) -> Found:
    """What both processes found."""
    return outcome[0]


def test_the_first_step_in_a_wrapper_is_planned_by_all_for_the_slowest(
    found: Found,
) -> None:
    first, second = (each["value"] for each in found["wrapped"])
    assert len(first) == 1
    # Costs are measured in each, so they are alike only if they were exchanged.
    assert first == second


def test_a_kind_of_step_of_one_process_waits_for_nobody(found: Found) -> None:
    # The example before it was wrapped, with its buckets; then the short batch.
    assert [each["value"] for each in found["a new shape"]] == [2, 3]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("shape", "what the model is called with: int64 [8, 32]"),
        ("budget", "the budget: 81%, where process 0 has 80%"),
    ],
)
def test_a_process_that_differs_is_named_in_all(
    found: Found, case: str, words: str
) -> None:
    for each in found[case]:
        assert each["error"] == "RankError"
        assert each["ranks"] == (1,)
        assert "process 1 differs in" in each["message"]
        assert words in each["message"]


def test_a_budget_that_is_too_small_is_so_in_all(found: Found) -> None:
    first, second = found["too small"]
    assert first["error"] == second["error"] == "BudgetError"
    assert first["message"] == second["message"]


def test_without_a_group_each_process_plans_for_itself(found: Found) -> None:
    first, second = (each["value"] for each in found["each for itself"])
    assert first != second


def test_a_failure_of_one_process_ends_planning_in_all(found: Found) -> None:
    first, second = found["failure"]
    assert second["error"] == "CaptureError"
    assert first["error"] == "RankError"
    assert first["ranks"] == (1,)
    assert second["message"] in first["message"]


def test_nobody_waits_longer_than_the_timeout_and_all_recover(found: Found) -> None:
    for each in found["late"]:
        assert each["error"] == "RankError"
        assert each["ranks"] == (1,)
        assert f"within {TIMEOUT_S} s" in each["message"]
    first, second = (each["value"] for each in found["after that"])
    assert first == second


def test_a_killed_process_is_an_error_in_the_other_and_leaves_no_orphan(
    outcome: tuple[Found, list[int | None]],
) -> None:
    found, codes = outcome
    assert codes == [0, -signal.SIGKILL]
    assert found["in a step"][0]["error"] in ("RuntimeError", "DistBackendError")
    assert found["in planning"][0]["error"] == "RankError"
    assert found["in planning"][0]["ranks"] == (1,)
    assert "value" in found["alone again"][0]


class Hearing(Session):
    """The first process, which hears what another one says of the same step."""

    def __init__(self, amounts: Amounts, budget_bytes: int) -> None:
        super().__init__(cast("Any", None), {})
        self.said = {"amounts": asdict(amounts), "budget_bytes": budget_bytes}

    def _ask(
        self,
        said: dict[str, Any],
        answer: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> dict[str, Any]:
        return answer([said, self.said])


def test_the_plan_is_for_the_largest_numbers_and_the_smallest_budget() -> None:
    graph = list(all_graphs(3))[-1]
    storages = [replace(s, size_bytes=s.size_bytes + 1) for s in graph.storages]
    larger = replace(graph, storages=tuple(storages))
    asked: list[tuple[TrainingGraph, int]] = []

    def solve(step: TrainingGraph, budget: int) -> Plan:
        asked.append((step, budget))
        return plan_graph(step, budget=budget, fingerprint="")

    session = Hearing(amounts_of(larger), 10**6)
    session.plan(graph, {}, 2 * 10**6, solve)
    ((step, budget),) = asked
    assert [s.size_bytes for s in step.storages] == [s.size_bytes for s in storages]
    assert budget == 10**6
