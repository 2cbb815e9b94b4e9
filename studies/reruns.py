"""Budgets below what blocks hand to each other: blocks that run again as a whole.

``python -m studies.reruns`` asks for the smallest budget of each model block by block,
once without and once with blocks that run again as a whole, then verifies the step at
both and half way between: peak, results bit for bit, and time over that of the plain
step. Each model runs in a fresh process on one thread. Lines are added to
``studies/results/reruns.jsonl``; ``--tables`` writes the newest of each into
``docs/studies.md``.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.core.errors import BudgetError
from studies.fresh_process import STEADY_ALLOCATION, run_module
from studies.networks import ResNet
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, append, environment, read
from studies.tables import mebibytes, table, times

STUDY = "reruns"
PAGE = ROOT / "docs" / "studies.md"
_LIMIT_S = 900
WIDTH, LENGTH, WORDS = 64, 128, 256
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Classified(nn.Module):
    """A network for images with its loss inside."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.network(images), labels)


def labelled(model: nn.Module) -> Example:
    tokens = torch.randint(0, WORDS, (16, LENGTH))
    return model, (), {"input_ids": tokens, "labels": tokens}


def llama() -> Example:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=24,
        num_attention_heads=4,
        vocab_size=WORDS,
        use_cache=False,
    )
    return labelled(transformers.LlamaForCausalLM(config))


def gpt2() -> Example:
    config = transformers.GPT2Config(
        n_embd=WIDTH,
        n_layer=24,
        n_head=4,
        n_positions=LENGTH,
        vocab_size=WORDS,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return labelled(transformers.GPT2LMHeadModel(config))


def resnet() -> Example:
    model = Classified(ResNet((3, 4, 12, 3), width=16, n_classes=10))
    return model, (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))), {}


MODELS: Mapping[str, Callable[[], Example]] = {
    "llama": llama,
    "gpt2": gpt2,
    "resnet": resnet,
}


def study(name: str) -> list[dict[str, Any]]:
    """Return a line for each budget of a model."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    model.train()
    kept_bytes, least_bytes = smallest_budgets(model, args, kwargs)
    lines: list[dict[str, Any]] = []
    for where, budget in (
        ("kept", kept_bytes),
        ("half way", (kept_bytes + least_bytes) // 2),
        ("smallest", least_bytes),
    ):
        report = remat.verify(
            model, args, kwargs, budget=budget, regions="blocks", repeats=5
        )
        lines.append(
            {
                "where": where,
                "budget_bytes": budget,
                "is_exact": report.is_exact,
                "differs_from_eager": len(report.against_eager),
                "is_within_budget": report.is_within_budget,
                "prediction_error": report.prediction_error,
                "summary": report.summary(),
            }
        )
    return lines


def smallest_budgets(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the smallest budgets without and with blocks that run again."""
    try:
        remat.plan(model, args, kwargs, budget=1, regions="blocks")
    except BudgetError as error:
        before = error.__context__
        kept = before if isinstance(before, BudgetError) else error
        return kept.required_bytes, error.required_bytes
    raise RuntimeError("a budget of one byte was kept")


def reruns_table(results: Path) -> str:
    """Return the newest line of each case as a table."""
    newest = {(line["model"], line["where"]): line for line in read(results)}
    rows: list[Sequence[str]] = []
    for model in MODELS:
        for where in ("kept", "half way", "smallest"):
            line = newest.get((model, where))
            if line is None:
                continue
            summary = line["summary"]
            rows.append(
                [
                    model,
                    where,
                    mebibytes(line["budget_bytes"]),
                    mebibytes(summary["measured_peak_bytes"]),
                    f"{100 * line['prediction_error']:+.2f} %",
                    times(summary["slowdown"]),
                    "bitwise" if line["is_exact"] else "**differs**",
                ]
            )
    head = (
        "model",
        "budget",
        "bytes",
        "measured peak",
        "predicted less measured",
        "time / plain",
        "results",
    )
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Study each model in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.reruns", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, STUDY, reruns_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.child:
        torch.set_num_threads(1)
        (name,) = options.models
        for line in study(name):
            append(results, {"study": STUDY, "model": name, **line, **environment()})
            print(f"{name}: {line}", flush=True)
        return 0
    failures = 0
    for name in options.models:
        child = ["--child", "--models", name, "--results", str(options.results)]
        with tempfile.TemporaryDirectory() as cache:
            ended = run_module(
                "studies.reruns",
                child,
                limit_s=_LIMIT_S,
                variables=STEADY_ALLOCATION
                | {"REMAT_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"},
            )
        if not ended.is_ok:
            failures += 1
            print(f"{name}: {ended.status}: {ended.message}", file=sys.stderr)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
