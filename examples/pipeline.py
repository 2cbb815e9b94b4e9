"""Train a pipeline of two stages in two processes, each stage within a budget.

python -m torch.distributed.run --nproc-per-node 2 -m examples.pipeline
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from remat.integrations.pipelining import fit_stage

WIDTH, ROWS, MICROBATCHES = 64, 512, 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def train() -> list[float]:
    """Fit and train the stage of this process; the last one returns the losses."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    target = torch.randn(MICROBATCHES * ROWS, WIDTH)
    part = nn.Sequential(*(Block() for _ in range(6)))
    optimizer = torch.optim.AdamW(part.parameters())

    stage = PipelineStage(part, rank, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    plan = fit_stage(
        stage,
        schedule,
        x[:ROWS],  # One microbatch.
        target=target[:ROWS],
        budget="80%",
        optimizer=optimizer,
        return_outputs=False,
    )
    print(f"stage {rank}\n{plan}", flush=True)

    found: list[float] = []
    for _ in range(3):
        losses: list[torch.Tensor] = []
        schedule.step(
            *((x,) if stage.is_first else ()),
            target=target if stage.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            found.append(torch.stack(losses).mean().item())
            print(f"loss {found[-1]:.4f}", flush=True)
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
