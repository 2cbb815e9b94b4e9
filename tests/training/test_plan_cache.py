"""The second start of a script: traced again, and not planned again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.modules import ConvNet
from tests.training.test_blocks import Stack, X
from tests.training.test_dynamic import Layers
from torch import nn

import remat
from remat.planning.plan import Plan
from remat.training import region_planning, step_planning


@pytest.fixture(autouse=True)
def _cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", "10 MB")


def start(make: Callable[[], nn.Module], x: torch.Tensor, **options: Any) -> Plan:
    """Plan as a script does when it starts."""
    torch.compiler.reset()
    torch.manual_seed(0)
    return remat.plan(make(), x, budget="70%", **options)


@pytest.mark.parametrize(
    ("make", "x", "options"),
    [
        (lambda: ConvNet(depth=3), torch.randn(8, 3, 24, 24), {}),
        (lambda: Stack(depth=3), X, {"costs": "estimated", "regions": "blocks"}),
        (
            lambda: Layers(count=2),
            torch.randn(4, 48, 32),
            {"dynamic": {"x": {1: (2, 64)}}},
        ),
    ],
    ids=["measured costs", "blocks", "dynamic"],
)
def test_the_second_start_takes_the_plan_of_the_first(
    make: Callable[[], nn.Module],
    x: torch.Tensor,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = start(make, x, **options)
    assert first.recomputed_op_count > 0

    def refuse(*_: object, **__: object) -> Plan:
        raise AssertionError("planned again")

    for module in (step_planning, region_planning):
        monkeypatch.setattr(module, "plan_graph", refuse)
    again = start(make, x, **options)
    assert again == first
    assert (again.settings, again.proved_ns) == (first.settings, first.proved_ns)
