"""A classifier of handwritten digits, whose activations take most of its memory."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

BATCH = 256
STEPS = 10
WIDTH = 64

Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Classifier(nn.Module):
    """Returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class Model(nn.Module):
    """Returns logits, and the loss of labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Classifier()

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.classifier(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Digits(Dataset[dict[str, Any]]):
    """Digits of scikit-learn; the last ones if ``is_held_out``."""

    def __init__(self, *, is_held_out: bool = False) -> None:
        found: Any = load_digits()
        part = slice(5 * BATCH, 6 * BATCH) if is_held_out else slice(5 * BATCH)
        self.x = torch.tensor(found.data[part] / 16, dtype=torch.float32)
        self.labels = torch.tensor(found.target[part])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.labels[index]}


def loader() -> DataLoader[dict[str, torch.Tensor]]:
    """Return the batches of one pass, in a shuffled order."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Digits(), batch_size=BATCH, shuffle=True, generator=generator)
