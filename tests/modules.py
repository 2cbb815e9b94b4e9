"""Small modules, each with one feature that capture or the runtime must get right."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 16


@dataclass(frozen=True)
class Case:
    """A module with an example batch; ``loss`` is ``None`` where it returns one."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    loss: Callable[[Any], Tensor] | None = None


class ConvNet(nn.Module):
    """In-place activation, batch norm with running statistics, dropout."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(depth))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = torch.relu_(norm(conv(x)))
            x = x + self.dropout(y)
        return self.head(x.mean((2, 3)))


class SharedBlock(nn.Module):
    """One block called twice, tied weights, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.block = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        )
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(requires_grad=False)
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.out(self.frozen(self.block(self.block(x))))


class Attention(nn.Module):
    """Views, scaled dot product attention, layer norm, gelu, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        heads = [
            t.view(batch, length, 2, width // 2).transpose(1, 2) for t in (q, k, v)
        ]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, width)
        x = x + functional.dropout(self.out(y), 0.1, self.training)
        return x + self.down(functional.gelu(self.up(x)))


class NestedOutputs(nn.Module):
    """Keyword arguments, integer inputs, nested outputs, an output that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, *, index: Tensor, scale: float = 2.0
    ) -> dict[str, Any]:
        hidden = torch.sigmoid(self.first(x)) * scale
        chosen = hidden[index]
        return {
            "chosen": self.second(chosen),
            "pair": (hidden.t(), [index, x]),
            "none": None,
        }


class LossInside(nn.Module):
    """Returns the loss next to its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 5)
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class MutatedBuffer(nn.Module):
    """A counter and a moving average that forward updates and also uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y = torch.tanh(self.linear(x) - self.average)
        return torch.tanh(self.linear(y)).pow(2)


class RandomOps(nn.Module):
    """Noise, random masks and dropouts in sequence: the generator's order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x + 0.1 * torch.randn_like(x)))
            x = functional.dropout(x, 0.2, self.training)
            x = x * torch.rand(x.shape[-1]).bernoulli()
        return x


class Autocast(nn.Module):
    """Runs its body in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 64),
            nn.GELU(),
            nn.Linear(64, 64),
            nn.GELU(),
            nn.Linear(64, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.body(x).float()


class InplaceInput(nn.Module):
    """In-place operations on intermediate values and slices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, :4] = 0.5
        y.mul_(2.0).clamp_(-1.0, 1.0)
        z = self.second(torch.exp(y))
        z += y
        return z.sigmoid_()


def _image() -> Tensor:
    return torch.randn(4, 3, 16, 16)


def _square(outputs: Tensor) -> Tensor:
    return outputs.float().pow(2).mean()


def _nested_loss(outputs: dict[str, Any]) -> Tensor:
    return outputs["chosen"].pow(2).sum() + outputs["pair"][0].sum()


CASES: dict[str, Callable[[], Case]] = {
    "conv net": lambda: Case(ConvNet(), (_image(),), loss=_square),
    "shared block": lambda: Case(
        SharedBlock(), (torch.randint(0, 11, (32,)),), loss=_square
    ),
    "attention": lambda: Case(
        nn.Sequential(Attention(), Attention(), Attention()),
        (torch.randn(2, 12, WIDTH),),
        loss=_square,
    ),
    "nested outputs": lambda: Case(
        NestedOutputs(),
        (torch.randn(8, WIDTH),),
        {"index": torch.tensor([0, 3, 5])},
        _nested_loss,
    ),
    "loss inside": lambda: Case(
        LossInside(), (torch.randn(32, WIDTH),), {"labels": torch.randint(0, 5, (32,))}
    ),
    "mutated buffer": lambda: Case(
        MutatedBuffer(), (torch.randn(32, WIDTH),), loss=_square
    ),
    "random ops": lambda: Case(RandomOps(), (torch.randn(32, WIDTH),), loss=_square),
    "autocast": lambda: Case(Autocast(), (torch.randn(32, WIDTH),), loss=_square),
    "in-place": lambda: Case(InplaceInput(), (torch.randn(32, WIDTH),), loss=_square),
}


def make_case(name: str) -> Case:
    """Return a case with fixed random parameters and batch."""
    torch.manual_seed(0)
    return CASES[name]()
