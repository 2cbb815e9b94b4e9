"""A small GPT-2 and the texts that it is trained on: descriptions of data sets."""

from pathlib import Path
from typing import Any

import sklearn.datasets
import torch
import transformers
from torch.utils.data import Dataset

BATCH = 16
LENGTH = 64


class Texts(Dataset[dict[str, Any]]):
    """Pieces of the descriptions of scikit-learn's data sets; each byte is a token."""

    def __init__(self, count: int) -> None:
        folder = Path(sklearn.datasets.__file__).parent / "descr"
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.rst")))
        self.pieces = torch.tensor(list(text[: count * LENGTH])).view(count, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def gpt2(layers: int = 2) -> transformers.GPT2LMHeadModel:
    """Return a model whose activations take most of the memory of its step."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=layers,
            n_embd=64,
            n_head=4,
            vocab_size=256,
            n_positions=LENGTH,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
