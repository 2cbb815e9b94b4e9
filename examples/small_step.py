"""A training step for the command line, verified in seconds.

``remat verify examples/small_step.py --budget 60%``
"""

from typing import Any

import torch
from torch import nn


def remat_workload() -> dict[str, Any]:
    """Return a step of a small network with dropout, its loss and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[
            nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout())
            for _ in range(12)
        ]
    )
    x, y = torch.randn(1024, 256), torch.randn(1024, 256)
    return {
        "model": model,
        "args": (x,),
        "optimizer": torch.optim.Adam(model.parameters()),
        "loss": lambda outputs: nn.functional.mse_loss(outputs, y),
    }
