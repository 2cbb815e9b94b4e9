"""Plans of models say what the caching allocator of their device reserves."""

import logging

import pytest
import torch
from torch import nn

import remat
from remat.core.allocator import AllocatorSettings
from remat.core.platform import Device, DeviceAllocator, Platform
from remat.training.allocator_settings import settings_on


def test_settings_are_those_of_the_environment_on_cuda_alone() -> None:
    said = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    cuda = torch.device("cuda", 0)
    assert settings_on(torch.device("cpu"), said) is None
    assert settings_on(cuda, said) == AllocatorSettings(expandable_segments=True)
    assert settings_on(cuda, {}) == AllocatorSettings()


def test_settings_that_are_not_modelled_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    with caplog.at_level(logging.WARNING, logger="remat"):
        assert settings_on(torch.device("cuda"), said) is None
    assert "is not predicted" in caplog.text
    assert "backend:cudaMallocAsync, which is not modelled" in caplog.text


class Broken(nn.Module):
    """Two layers, in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        x = first(x).relu()
        torch._dynamo.graph_break()
        return second(x)


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_plan_of_a_model_prints_live_allocated_and_reserved(
    *, is_broken: bool
) -> None:
    whole = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    platform = Platform(
        devices=(Device(name="cpu"),),
        allocators=(DeviceAllocator(device="cpu"),),
    )
    plan = remat.plan(
        Broken() if is_broken else whole,
        torch.randn(256, 64),
        budget="100%",
        platform=platform,
        regions="breaks" if is_broken else "auto",
        costs="estimated",
    )
    assert ("graphs" in plan.settings) is is_broken
    assert plan.reserved is not None
    assert plan.account == "live"
    # Everything is small: one segment of 2 MiB.
    assert plan.reserved.reserved_bytes == 2 * 2**20
    assert plan.peak_bytes <= plan.reserved.allocated_bytes < 2 * 2**20
    text = str(plan)
    assert ", of live bytes" in text
    assert "2.00 MiB by the caching allocator" in text
    assert "more than the budget, which counts live bytes" in text
