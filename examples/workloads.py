"""The two models of the demo and their data, both found on every machine.

A small GPT learns the bytes of Python's own standard library; a network of
ResNet-50's shape learns the digit images bundled with scikit-learn. Nothing is
downloaded, and the batches are the same on every run.
"""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from studies.networks import ResNet
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

TEXT_BYTES = 2_000_000
DIGITS_SIDE = 64


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """A model, its batches, its loss and its optimizer.

    Parameters
    ----------
    name
        For people.
    make_model
        Builds the model in training mode, the same parameters every time.
    batches
        Endless (inputs, targets) pairs, the same ones on every call.
    loss
        From the model's output and the targets to a scalar.
    make_optimizer
        From the model to its optimizer.
    """

    name: str
    make_model: Callable[[], nn.Module]
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    loss: Callable[[Tensor, Tensor], Tensor]
    make_optimizer: Callable[[nn.Module], Optimizer]


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Parameters
    ----------
    width
        Features per position, a multiple of ``n_heads``.
    n_heads
        Attention heads, at least 1.
    dropout
        Probability that an attention weight or an output is dropped.
    """

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.dropout = dropout
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project_in(x).unflatten(2, (3, self.n_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.project_out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer layer: attention, then a feed-forward network."""

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, n_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class GPT(nn.Module):
    """A decoder-only language model over bytes, input and output weights tied.

    Parameters
    ----------
    n_layers, width, n_heads
        Depth, features per position, attention heads.
    length
        Longest sequence in bytes.
    dropout
        Probability of every dropout in the model.
    """

    def __init__(
        self,
        n_layers: int = 8,
        width: int = 192,
        n_heads: int = 6,
        length: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(256, width)
        self.embed_position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, n_heads, dropout) for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed_byte.weight
        nn.init.normal_(self.embed_byte.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed_byte(tokens) + self.embed_position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def standard_library_bytes(limit_bytes: int = TEXT_BYTES) -> Tensor:
    """Concatenate Python's own source files, sorted by name, up to a limit.

    Only the modules at the top of the standard library are read: they are there on
    every installation, unlike its tests.

    Parameters
    ----------
    limit_bytes
        Most bytes to return, at least 1.

    Returns
    -------
    Tensor
        The bytes as unsigned 8-bit integers, shape (at most ``limit_bytes``,).
    """
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def text_batches(
    batch: int = 8, length: int = 256, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows of the standard library and the bytes that follow.

    Parameters
    ----------
    batch, length
        Windows per batch and bytes per window, at least 1.
    seed
        Seed of the windows.
    """
    text = standard_library_bytes().long()
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
        windows = text[starts + offsets]
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def digit_batches(batch: int = 96, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scikit-learn's 8 x 8 digits, enlarged to 64 x 64 pixels in three channels.

    Parameters
    ----------
    batch
        Images per batch, at least 1.
    seed
        Seed of the order.
    """
    # Imported here: the text task needs no scikit-learn.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    pixels, classes = load_digits(return_X_y=True)
    # Pixels are integers from 0 to 16.
    images = torch.tensor(pixels).float().reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(classes)
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(images), (batch,), generator=generator)
        enlarged = functional.interpolate(
            images[chosen], size=DIGITS_SIDE, mode="bilinear", align_corners=False
        )
        yield enlarged.repeat(1, 3, 1, 1), labels[chosen]


def text_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy of every following byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_gpt() -> nn.Module:
    """Build the GPT with the same parameters every time."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return GPT()


def make_resnet() -> nn.Module:
    """Build the network of ResNet-50's shape, half as wide, for ten classes."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return ResNet(width=32, n_classes=10)


TASKS: dict[str, TrainingTask] = {
    "gpt": TrainingTask(
        name="small GPT on Python's standard library",
        make_model=make_gpt,
        batches=text_batches,
        loss=text_loss,
        make_optimizer=lambda model: AdamW(model.parameters(), lr=1e-3),
    ),
    "resnet": TrainingTask(
        name="ResNet-50-shaped network on scikit-learn's digits",
        make_model=make_resnet,
        batches=digit_batches,
        loss=functional.cross_entropy,
        make_optimizer=lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    ),
}
