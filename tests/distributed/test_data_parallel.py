"""DistributedDataParallel around a fitted model: bitwise, within budget, and early."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import remat
from tests.distributed.models import (
    Language,
    are_equal,
    batch_of,
    language,
    peak_bytes,
    smallest,
    trained,
)
from tests.distributed.processes import in_processes

OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"regions": "whole", "costs": "estimated"},
    "blocks": {"regions": "blocks"},
    "views": {"regions": "blocks", "costs": "estimated"},
}


ACCUMULATED = ["whole", "views"]
"""Kinds that are tried with passes under ``no_sync()`` as well."""


def parallel(model: Language, kind: str) -> DistributedDataParallel:
    """Wrap a model in small buckets."""
    return DistributedDataParallel(
        model, bucket_cap_mb=0.05, gradient_as_bucket_view=kind == "views"
    )


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer with state."""
    return torch.optim.AdamW(model.parameters(), 1e-3)


def events_of(wrapped: DistributedDataParallel, ids: torch.Tensor) -> list[str]:
    """Return when buckets are exchanged, and when backward comes to the first block."""
    events: list[str] = []

    def exchange(
        _state: None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        events.append("exchange")
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    def note(_gradient: torch.Tensor) -> None:
        events.append("first block")

    wrapped.register_comm_hook(None, exchange)
    # The first part of a block to have its gradient.
    wrapped.module.get_parameter("blocks.0.narrow.bias").register_hook(note)
    wrapped(ids).backward()
    return events


def accumulated(
    wrapped: DistributedDataParallel, ids: torch.Tensor, optimizer: Any
) -> None:
    """Train on two passes, of which the second one exchanges gradients."""
    torch.manual_seed(5)
    optimizer.zero_grad()
    with wrapped.no_sync():
        wrapped(ids).backward()
    wrapped(ids).backward()
    optimizer.step()


def after_accumulating(rank: int, kind: str) -> dict[str, Any]:
    """Return what one process finds at the smallest budget of two passes."""
    ids, options = batch_of(rank), OPTIONS[kind]
    budget = 1
    while True:
        model = language()
        optimizer = optimizer_of(model)
        wrapped = parallel(model, kind)
        try:
            remat.fit(model, ids, budget=budget, optimizer=optimizer, **options)
            accumulated(wrapped, ids, optimizer)
            break
        except remat.BudgetError as error:
            # The largest that a process has.
            budget = -smallest(-error.required_bytes)

    def step() -> None:
        accumulated(wrapped, ids, optimizer)

    resident = [wrapped, optimizer, ids]
    measured = remat.measure(step, warmup=1, repeats=0, resident=resident)
    plain = parallel(language(), kind)
    optimizer_of_plain = optimizer_of(plain)
    for _ in range(3):
        accumulated(plain, ids, optimizer_of_plain)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {
        "budget": budget,
        "measured": measured.peak_bytes,
        "is_equal": all(torch.equal(*pair) for pair in pairs),
    }


def run(rank: int) -> dict[str, dict[str, Any]]:
    """Return what one process finds."""
    ids = batch_of(rank)
    found: dict[str, dict[str, Any]] = {}
    for kind, options in OPTIONS.items():
        plain = parallel(language(), kind)
        optimizer = optimizer_of(plain)
        expected = trained(plain, ids, optimizer)
        budget = smallest(peak_bytes(plain, ids, optimizer)) * 7 // 10
        model = language()
        optimizer = optimizer_of(model)
        remat.fit(model, ids, budget=budget, optimizer=optimizer, **options)
        wrapped = parallel(model, kind)
        found[kind] = {
            "is_equal": are_equal(trained(wrapped, ids, optimizer), expected),
            "measured": peak_bytes(wrapped, ids, optimizer),
            "budget": budget,
        }
        if kind != "views":
            found[kind]["events"] = events_of(wrapped, ids)
    for kind in ACCUMULATED:
        found[f"{kind}, accumulated"] = after_accumulating(rank, kind)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    """What two processes found."""
    return in_processes(run)


@pytest.mark.parametrize("kind", ACCUMULATED)
def test_the_smallest_budget_of_passes_without_exchange_works(
    results: list[dict[str, dict[str, Any]]], kind: str
) -> None:
    for found in (result[f"{kind}, accumulated"] for result in results):
        assert found["is_equal"]
        assert 0.98 * found["budget"] <= found["measured"] <= found["budget"]


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_parallel_step_is_within_its_budget_and_bitwise(
    results: list[dict[str, dict[str, Any]]], kind: str
) -> None:
    for found in (result[kind] for result in results):
        assert found["is_equal"]
        assert found["measured"] <= found["budget"]


@pytest.mark.parametrize("kind", ["whole", "blocks"])
def test_gradients_of_late_blocks_are_exchanged_while_early_ones_are_computed(
    results: list[dict[str, dict[str, Any]]], kind: str
) -> None:
    for result in results:
        events = result[kind]["events"]
        before = events[: events.index("first block")]
        assert len(before) >= 2
        assert len(before) < events.count("exchange")
