"""Blocks that run forward again as a whole: how much smaller the smallest budget is.

``python -m studies.reruns`` asks for the smallest budget of each model that is planned
block by block, as the error names it, and for that of plans in which no block runs
again; then it runs the step at the former and compares everything with the plain step.
Each model has a fresh process on one thread. Lines are added to
``studies/results/reruns.jsonl``; ``--tables`` writes the newest of each into
``docs/studies.md``.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

import remat
from studies.fresh_process import ONE_THREAD, STEADY_ALLOCATION, run_children
from studies.lengths import Encoder
from studies.networks import ResNet
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import mebibytes, table, times

STUDY = "reruns"
PAGE = ROOT / "docs" / "studies.md"
BLOCKS: dict[Literal["regions"], Literal["blocks"]] = {"regions": "blocks"}

Batch = dict[str, torch.Tensor]

_LIMIT_S = 900
_VOCABULARY = 256


class Classifier(nn.Module):
    """A network with the loss of its scores."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(images), labels)


def gpt2(layers: int) -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=64,
        n_head=2,
        vocab_size=_VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(0, _VOCABULARY, (16, 64))
    model = transformers.GPT2LMHeadModel(config)
    return model, {"input_ids": tokens, "labels": tokens}


def resnet(blocks: tuple[int, ...]) -> tuple[nn.Module, Batch]:
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    model = Classifier(ResNet(blocks, width=16, n_classes=10))
    return model, {"images": images, "labels": labels}


def encoder() -> tuple[nn.Module, Batch]:
    padding = torch.zeros(16, 64, dtype=torch.bool)
    tokens = torch.randint(0, 200, (16, 64))
    return Encoder(layers=12), {"ids": tokens, "padding": padding}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "gpt2, 12 layers": lambda: gpt2(12),
    "gpt2, 24 layers": lambda: gpt2(24),
    "nn.TransformerEncoder, 12 layers": encoder,
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet152": lambda: resnet((3, 8, 36, 3)),
}


def smallest(model: nn.Module, batch: Batch) -> tuple[int, int]:
    """Return the smallest budget, and that in which no block runs again."""
    try:
        remat.plan(model, kwargs=batch, budget=1, **BLOCKS)
    except remat.BudgetError as error:
        # With blocks that run again it is raised while that without is handled.
        before = error.__context__
        first = before if isinstance(before, remat.BudgetError) else error
        return error.required_bytes, first.required_bytes
    raise AssertionError("a step within one byte")


def study(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return both budgets, and what a step within the smaller one shows."""
    with ForeignLoad() as load:
        least_bytes, kept_bytes = smallest(model, batch)
        report = remat.verify(
            model, kwargs=batch, budget=least_bytes, repeats=9, **BLOCKS
        )
    return {
        "smallest_bytes": least_bytes,
        "smallest_without_bytes": kept_bytes,
        "plain_peak_bytes": report.plain_peak_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "slowdown": report.slowdown,
        "solver": report.plan.solver,
        "compared": report.compared_count,
        "unequal": len(report.against_eager),
        "unequal_to_captured": len(report.against_captured),
        "foreign_load": load.share,
    }


def reruns_table(results: Path) -> str:
    """Return the newest line of each model as a table."""
    newest = {line["model"]: line for line in read(results)}
    rows: list[Sequence[str]] = []
    for name in MODELS:
        if (line := newest.get(name)) is None:
            continue
        least_bytes, measured_bytes = (
            line["smallest_bytes"],
            line["measured_peak_bytes"],
        )
        rows.append(
            [
                name,
                mebibytes(line["plain_peak_bytes"]),
                mebibytes(line["smallest_without_bytes"]),
                mebibytes(least_bytes),
                f"{measured_bytes / least_bytes:.2%}",
                f"{line['predicted_peak_bytes'] / measured_bytes - 1:+.2%}",
                times(line["slowdown"]),
                f"{line['compared'] - line['unequal']} of {line['compared']}",
            ]
        )
    header = (
        "model",
        "plain peak",
        "smallest, each block once",
        "smallest",
        "measured / budget",
        "predicted",
        "time / plain",
        "tensors bitwise eager",
    )
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.reruns", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(
            fill_place(page, STUDY, reruns_table(results)), encoding="utf-8"
        )
        return 0
    if options.child:
        torch.set_num_threads(1)
        (name,) = options.models
        torch.manual_seed(0)
        line = study(*MODELS[name]())
        append(results, {"study": STUDY, "model": name, **line, **environment()})
        print(f"{name}: {line}")
        return 0
    cases = {
        name: ["--models", name, "--results", str(options.results)]
        for name in options.models
    }
    return run_children(
        "studies.reruns",
        cases,
        limit_s=_LIMIT_S,
        variables={**ONE_THREAD, **STEADY_ALLOCATION},
    )


if __name__ == "__main__":
    sys.exit(main())
