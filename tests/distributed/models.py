"""A small language model of equal blocks, and steps of it in several processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import remat

WIDTH = 64
WORDS = 200


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.wide(self.norm(x)))
        return x + nn.functional.dropout(self.narrow(inner), 0.1, self.training)


class Language(nn.Module):
    """Blocks between an embedding and a head, with the loss inside."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids.flatten())


def language() -> Language:
    """Return a model with the same parameters in all processes."""
    torch.manual_seed(0)
    return Language()


def batch_of(rank: int) -> torch.Tensor:
    """Return a batch, another one in each process."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(0, WORDS, (16, 32), generator=generator)


def trained(
    model: Any, ids: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int = 3
) -> list[torch.Tensor]:
    """Return losses, and then what this process holds of the parameters."""
    torch.manual_seed(5)
    found: list[torch.Tensor] = []
    for _ in range(steps):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    for parameter in model.parameters():
        held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.append(held.detach().clone())
    return found


def peak_bytes(model: Any, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> int:
    """Return the measured peak of a step."""

    def step() -> None:
        trained(model, ids, optimizer, 1)

    resident = [model, ids, optimizer]
    return remat.measure(step, warmup=1, repeats=0, resident=resident).peak_bytes


def smallest(bytes_here: int) -> int:
    """Return the smallest number that a process has: all ask for the same budget."""
    found = torch.tensor(bytes_here)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether all are bitwise equal."""
    return len(some) == len(others) and all(map(torch.equal, some, others))
