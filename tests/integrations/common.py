"""What the tests of all frameworks share: how a loop is measured, and a quick plan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import remat

QUICK: dict[str, Any] = {"solver": "local-search"}
"""Whatever costs are measured, it meets the budgets that tests ask for."""


@dataclass(frozen=True)
class Trained:
    """What a loop left behind, and its peak."""

    parameters: list[torch.Tensor]
    peak_bytes: int

    @property
    def budget_bytes(self) -> int:
        """70 percent of the peak."""
        return self.peak_bytes * 7 // 10

    def is_bitwise(self, other: "Trained") -> bool:
        return len(self.parameters) == len(other.parameters) and all(
            map(torch.equal, self.parameters, other.parameters)
        )


def trained(model: nn.Module, train: Callable[[], object], *resident: Any) -> Trained:
    """Return what a training loop did to a model."""
    torch.manual_seed(7)
    measured = remat.measure(train, warmup=0, repeats=0, resident=[model, *resident])
    parameters = [p.detach().clone() for p in model.parameters()]
    return Trained(parameters, measured.peak_bytes)
