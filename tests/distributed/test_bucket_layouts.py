"""Buckets of DistributedDataParallel hold the same gradients as without remat.

Their order decides in which order three or more processes add up an element, and what
hooks such as PowerSGD's make of a bucket.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.core.errors import PlanWarning
from tests.distributed.processes import in_processes

ROWS, WIDTH = 256, 192

CASES: dict[str, dict[str, Any]] = {
    "whole": {"regions": "whole"},
    "blocks": {"regions": "blocks"},
    "breaks": {"regions": "breaks"},
    "static graph": {"regions": "whole", "static_graph": True},
    "bucket views": {"regions": "whole", "gradient_as_bucket_view": True},
    "accumulated": {"regions": "whole", "accumulate": True},
    "accumulated blocks": {"regions": "blocks", "accumulate": True},
}


class Block(nn.Module):
    """A projection whose bias and weight autograd comes to at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.narrow = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.addmm(self.bias, self.norm(x), self.weight).relu())


class Crossed(nn.Module):
    """What is used first comes last, and several parameters get one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.one = nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.other = nn.Parameter(torch.zeros(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late = self.late(x)
        x = x + self.one + self.other
        for block in self.blocks:
            x = x + block(x) * self.scale
        return (x + late * self.scale).square().mean()


def layout(case: str, *, is_fitted: bool) -> list[list[str]]:
    """Return the names of what is in each bucket at the end."""
    options = dict(CASES[case])
    regions = options.pop("regions")
    accumulates = options.pop("accumulate", False)
    torch.manual_seed(0)
    model = Crossed()
    x = torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1, **options)
    if is_fitted:
        remat.fit(
            model,
            x,
            budget="150%",
            optimizer=optimizer,
            regions=regions,
            accumulate=accumulates,
            costs="estimated",
        )
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters()
    }
    found: dict[int, list[str]] = {}

    def note(
        _state: None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        found[bucket.index()] = [names[p] for p in bucket.parameters()]
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, note)
    for _ in range(3):
        found.clear()
        if accumulates:
            with wrapped.no_sync():
                wrapped(x).backward()
        wrapped(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [found[index] for index in sorted(found)]


def run(_rank: int) -> dict[str, tuple[list[list[str]], list[list[str]]]]:
    """Return each layout without and with a plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        return {
            case: (layout(case, is_fitted=False), layout(case, is_fitted=True))
            for case in CASES
        }


@pytest.fixture(scope="module")
def layouts() -> list[dict[str, tuple[list[list[str]], list[list[str]]]]]:
    """What two processes found."""
    return in_processes(run)


@pytest.mark.parametrize("case", CASES)
def test_buckets_are_laid_out_as_without_a_plan(
    layouts: list[dict[str, tuple[list[list[str]], list[list[str]]]]], case: str
) -> None:
    for found in layouts:
        plain, planned = found[case]
        assert len(plain) > 4
        assert planned == plain


def encoded(_rank: int) -> list[bool]:
    """Train before buckets have gradients of as many bytes; return what is equal."""
    found: list[list[torch.Tensor]] = []
    for is_fitted in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        model = nn.TransformerEncoder(layer, 4)
        x = torch.randn(16, 32, 128)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)
        if is_fitted:
            options: dict[str, Any] = {"regions": "whole", "costs": "estimated"}
            options |= {"optimizer": optimizer, "accumulate": True}
            remat.fit(model, x, budget="75%", **options)
        torch.manual_seed(1)
        for _ in range(2):
            with wrapped.no_sync():
                wrapped(x).square().mean().backward()
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(model.parameters()))
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


def test_buckets_are_not_taken_for_gradients_of_as_many_bytes() -> None:
    for are_equal in in_processes(encoded):
        assert all(are_equal)
