"""Models put together by chance from parts that each need something of their own."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 32


class Inner(nn.Module):
    """A pair of layers, with or without dropout."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = draw.choice([nn.GELU(), nn.ReLU(inplace=True), nn.SiLU(), nn.Tanh()])
        self.dropout = nn.Dropout(draw.choice([0.0, 0.1, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x))))


class Part(nn.Module):
    """Has a pair of layers, and draws what else it does."""

    hows: tuple[Any, ...] = (None,)

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.inner = Inner(draw)
        self.how: Any = draw.choice(self.hows)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Norm(Part):
    """Normalises, behind operators that may return their input as it is."""

    hows = (nn.BatchNorm1d, nn.LayerNorm)

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.norm = self.how(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.to(torch.float32).contiguous())


class Attention(Part):
    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return (query @ key.T / 6).softmax(-1) @ value


class Break(Part):
    """Breaks the graph, and may keep a number of the batch."""

    hows = ("mean", "break", "shape")

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.how == "break":
            torch._dynamo.graph_break()
        else:
            is_mean = self.how == "mean"
            self.seen.append(float(x.detach().mean()) if is_mean else tuple(x.shape))
        return x * 2


class Masked(Part):
    """Works on as many rows as values say."""

    hows = ("joined", "assigned", "added")

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        if self.how == "joined":
            return torch.cat([x[~mask], self.inner(x[mask])])
        if self.how == "assigned":
            found = torch.zeros_like(x)
            found[mask] = self.inner(x[mask])
            return found
        rows = mask.nonzero().squeeze(1)
        return x.index_add(0, rows, self.inner(x[rows]))


class Experts(Part):
    """Three experts, each for the rows that are routed to it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Inner(draw) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen, found = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if rows.numel():
                made = expert(x[rows]) * weights[rows, number, None]
                found = found.index_add(0, rows, made)
        return found


class FirstCall(Part):
    """Sets something up in its first call, after which it does more or less."""

    hows = ((True, "attribute"), (True, "mapping"), (False, "attribute"))

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.other = Inner(draw)
        self.known: dict[str, float] = {}

    @torch.compiler.disable
    def is_first(self) -> bool:
        _, where = self.how
        kept = self.known if where == "mapping" else vars(self)
        is_first = "scale" not in kept
        if is_first:
            kept["scale"] = 2.0
        return is_first

    def forward(self, x: Tensor) -> Tensor:
        does_more, _ = self.how
        if self.is_first() == does_more:
            return self.inner(x)
        return self.other(self.inner(x))


class Shared(Part):
    """Runs the same layers two or three times."""

    hows = (2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.how):
            x = x + self.inner(x)
        return x


class Recurrent(Part):
    hows = (nn.LSTM, nn.GRU)

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.memory = self.how(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        count = len(x) // 8 * 8
        found, _ = self.memory(x[:count].view(-1, 8, WIDTH))
        return torch.cat([found.reshape(-1, WIDTH), x[count:]])


class InPlace(Part):
    """Writes to what it has made."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        found.mul_(2)
        found[:3] += 1
        return functional.relu(found, inplace=True) + x


class Exponent(torch.autograd.Function):
    """A function of a user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = x.exp()
        ctx.save_for_backward(found)
        return found.log1p()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (found,) = ctx.saved_tensors
        return gradient * found / (1 + found)


class Custom(Part):
    def forward(self, x: Tensor) -> Tensor:
        return Exponent.apply(self.inner(x).clamp(-3, 3))


class Noise(Part):
    """Draws noise and a mask."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x + 0.1 * torch.randn_like(x))
        return found * torch.bernoulli(torch.full_like(x, 0.8))


class Lazy(Part):
    """Makes a table when it is first called, or called with more rows."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x)).float()[:, None] / 100
        return self.inner(x + self.table[: len(x)])


KINDS: tuple[Callable[[random.Random], nn.Module], ...] = (
    *(Inner, Inner, Norm, Norm, Attention, Break, Break, Masked, Experts, FirstCall),
    *(Shared, Recurrent, InPlace, Custom, Noise, Lazy),
)


class RandomModel(nn.Module):
    """Three to six parts, some with a way around, of which the first may come twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        count = draw.randint(3, 6)
        self.parts = nn.ModuleList(draw.choice(KINDS)(draw) for _ in range(count))
        self.has_way_around = [draw.random() < 0.5 for _ in range(count)]
        if draw.random() < 0.2:
            self.parts.append(self.parts[0])
            self.has_way_around.append(True)
        self.reads_first_again = draw.random() < 0.3
        self.returned = draw.choice(["loss", "both", "mapping"])

    def forward(self, x: Tensor) -> Any:
        first = x
        for part, has_way_around in zip(self.parts, self.has_way_around, strict=True):
            found = part(x)
            x = x + found if has_way_around else found
        loss = (x + first if self.reads_first_again else x).square().mean()
        if self.returned == "mapping":
            return {"loss": loss, "logits": x}
        return loss if self.returned == "loss" else (loss, x.detach())


def loss_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]
