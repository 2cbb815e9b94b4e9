"""What a fitted model costs where no plan runs, and in the Trainer of transformers.

``python -m studies.callers`` measures, in turn with the model as it was before,

* generation and evaluation, each call of a length that was not seen before;
* eight steps of the Trainer with accumulation and evaluation in between, all planning
  after ``fit`` included: once with every kind of step planned by ``fit``, and once with
  an example that lacks what the Trainer adds, so that two kinds are planned in the
  middle of training;

and adds a line each to ``studies/results/callers.jsonl``; ``--tables`` writes the
newest of each into ``docs/studies.md``. Times are the processor's, and the figures
medians of the ratios of pairs.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

import remat
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import table

STUDY = "callers"
PAGE = ROOT / "docs" / "studies.md"
BATCH, LENGTH, STEPS = 16, 64, 8


def llama() -> Any:
    """Return a small model of the Llama kind."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=500,
            # As the Trainer sets it.
            use_cache=False,
        )
    )


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random tokens of one length."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, 500, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def fitted(model: Any, **more: Any) -> Any:
    """Return a copy of a model, fitted at 90 % of its peak."""
    model = copy.deepcopy(model)
    tokens = Texts(BATCH).tokens
    batch = {"input_ids": tokens, "labels": tokens, **more}
    remat.fit(model, (), batch, budget="90%", accumulate=bool(more))
    return model


def generate(model: Any) -> None:
    """Generate from prompts of many lengths."""
    model.eval()
    for length in range(5, 25, 4):
        model.generate(Texts(4).tokens[:, :length], max_new_tokens=12, do_sample=False)


def evaluate(model: Any) -> None:
    """Evaluate on batches of many lengths."""
    model.eval()
    with torch.no_grad():
        for length in range(20, 60):
            tokens = Texts(BATCH).tokens[:, :length]
            model(input_ids=tokens, labels=tokens)


def train(model: Any) -> None:
    """Train by the Trainer, with accumulation and evaluation."""
    model.train()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            eval_strategy="steps",
            eval_steps=STEPS // 2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        transformers.Trainer(
            model,
            arguments,
            train_dataset=Texts(2 * BATCH * STEPS),
            eval_dataset=Texts(BATCH),
        ).train()


def seconds_of(run: Callable[[Any], None], model: Any) -> float:
    """Return the processor time of one run, on a model of its own."""
    start = time.process_time()
    run(model)
    return time.process_time() - start


CASES: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
    "generation, 5 lengths": (generate, fitted),
    "evaluation, 40 lengths": (evaluate, fitted),
    "Trainer, all kinds planned by fit": (
        train,
        lambda model: fitted(model, num_items_in_batch=torch.tensor(2048.0)),
    ),
    "Trainer, two kinds planned in the middle": (train, fitted),
}


def study(name: str, repeats: int) -> dict[str, Any]:
    """Return the times of plain and fitted model, in pairs, each model new."""
    run, prepare = CASES[name]
    model = llama()
    seconds_of(run, copy.deepcopy(model))
    plain: list[float] = []
    mine: list[float] = []
    with ForeignLoad() as load:
        for position in range(repeats):
            torch.compiler.reset()
            turns = [(plain, copy.deepcopy(model)), (mine, prepare(model))]
            # Whichever runs first is at an advantage of some percent.
            for times, other in turns if position % 2 else reversed(turns):
                times.append(seconds_of(run, other))
    ratios = [one / other for one, other in zip(mine, plain, strict=True)]
    return {
        "case": name,
        "plain_s": statistics.median(plain),
        "fitted_s": statistics.median(mine),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "foreign_load": load.share,
    }


def callers_table(results: Path) -> str:
    """Return the newest line of each case as a table."""
    newest = {line["case"]: line for line in read(results)}
    rows = [
        (
            name,
            f"{newest[name]['plain_s']:.2f} s",
            f"{newest[name]['fitted_s']:.2f} s",
            f"{newest[name]['ratio']:.2f}",
        )
        for name in CASES
        if name in newest
    ]
    return table(("case", "plain", "fitted", "ratio"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.callers", description=__doc__
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, "callers", callers_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    torch.set_num_threads(1)
    for name in options.cases:
        line = study(name, options.repeats)
        append(results, {"study": STUDY, **line, **environment()})
        print(f"{name}: {line['ratio']:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
