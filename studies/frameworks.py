"""What a budget costs in each training framework, beside a loop written by hand.

``python -m studies.frameworks`` trains a small GPT-2 on the descriptions of
scikit-learn's data sets, ten steps in each framework: plainly, and within 70 % of the
peak that this took. It compares the measured peak with the budget and the parameters
bit by bit, and then the time of a step with that of ``remat.fit`` in a loop written by
hand, in pairs. Each framework adds a line to ``studies/results/frameworks.jsonl``;
``--tables`` writes the newest of each into ``docs/frameworks.md``. Times are the
processor's.
"""

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import sklearn.datasets
import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

import remat
from remat.core.units import format_bytes
from remat.integrations.lightning import MemoryBudget
from remat.integrations.transformers import MemoryBudgetCallback
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import table

STUDY = "frameworks"
PAGE = ROOT / "docs" / "frameworks.md"
BATCH, LENGTH, STEPS, TIMED_STEPS = 16, 64, 10, 30

Batch = dict[str, torch.Tensor]


class Texts(Dataset[Batch]):
    """Pieces of the descriptions of scikit-learn's data sets; each byte is a token."""

    def __init__(self, count: int) -> None:
        folder = Path(sklearn.datasets.__file__).parent / "descr"
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.rst")))
        tokens = torch.tensor(list(text[: count * BATCH * LENGTH]))
        self.pieces = tokens.view(count * BATCH, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def gpt2() -> Any:
    """Return a small GPT-2 with a token for each byte."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2,
            n_embd=128,
            n_head=4,
            vocab_size=256,
            n_positions=LENGTH,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


@dataclass
class Run:
    """One training, with a budget or without."""

    steps: int
    budget: int | None = None
    model: Any = field(default_factory=gpt2)
    stamps_s: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer.register_step_post_hook(
            lambda *_: self.stamps_s.append(time.process_time())
        )
        self.texts = Texts(self.steps)

    def batches(self) -> Any:
        """Return the batches."""
        return DataLoader(self.texts, batch_size=BATCH)

    def example(self) -> Batch:
        """Return a batch."""
        return {name: v.clone() for name, v in next(iter(self.batches())).items()}

    def step_s(self) -> float:
        """Return the time of a step, planning and the first steps left out."""
        pairs = list(zip(self.stamps_s[2:], self.stamps_s[3:], strict=False))
        return statistics.median(after - before for before, after in pairs)


def by_hand(run: Run) -> Callable[[], object]:
    """Return a loop that is written by hand."""
    model, optimizer = run.model, run.optimizer
    if run.budget is not None:
        remat.fit(model, (), run.example(), budget=run.budget, optimizer=optimizer)

    def train() -> None:
        for batch in run.batches():
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def by_trainer(run: Run) -> Callable[[], object]:
    """Return the loop of transformers' Trainer."""
    callbacks: list[transformers.TrainerCallback] = []
    if run.budget is not None:
        callbacks.append(MemoryBudgetCallback(run.budget))
    rate = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=run.steps,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
    return transformers.Trainer(
        run.model,
        arguments,
        train_dataset=run.texts,
        callbacks=callbacks,
        optimizers=(run.optimizer, rate),
    ).train


class Module(lightning.LightningModule):
    """What people write around a model for Lightning."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model = run.model
        self.run_ = run

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.run_.optimizer

    def training_step(self, batch: Batch, _index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.model(**batch).loss


def by_lightning(run: Run) -> Callable[[], object]:
    """Return the loop of Lightning's Trainer."""
    callbacks: list[Any] = [] if run.budget is None else [MemoryBudget(run.budget)]
    trainer = lightning.Trainer(
        max_steps=run.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    return lambda: trainer.fit(Module(run), run.batches())


def by_accelerate(run: Run) -> Callable[[], object]:
    """Return a loop with accelerate."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(
        run.model, run.optimizer, run.batches()
    )
    if run.budget is not None:
        example = run.example()
        # accelerate has loaded the next batch already.
        budget = run.budget - sum(value.nbytes for value in example.values())
        remat.fit(model, (), example, budget=budget, optimizer=optimizer)

    def train() -> None:
        for batch in batches:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    return train


def by_compiler(run: Run) -> Callable[[], object]:
    """Return a loop around ``torch.compile``, as tools have it."""
    model: Any = run.model
    if run.budget is not None:
        # The compiler does not know the optimizer.
        state_bytes = 2 * sum(p.nbytes for p in model.parameters())
        options: dict[str, Any] = {"budget": run.budget - state_bytes}
        model = torch.compile(model, backend="remat", options=options, dynamic=False)

    def train() -> None:
        for batch in run.batches():
            model(**batch).loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    return train


LOOPS: dict[str, Callable[[Run], Callable[[], object]]] = {
    "a loop by hand, `remat.fit`": by_hand,
    "transformers, `MemoryBudgetCallback`": by_trainer,
    "Lightning, `MemoryBudget`": by_lightning,
    "accelerate, `remat.fit`": by_accelerate,
    '`torch.compile(backend="remat")`': by_compiler,
}


def measured(loop: Callable[[Run], Callable[[], object]], run: Run) -> int:
    """Train, and return the measured peak."""
    torch.compiler.reset()
    train = loop(run)
    torch.manual_seed(7)
    resident = [run.model, run.optimizer]
    return remat.measure(train, warmup=0, repeats=0, resident=resident).peak_bytes


def timed_s(loop: Callable[[Run], Callable[[], object]], budget: int) -> float:
    """Train within a budget, and return the time of a step."""
    torch.compiler.reset()
    run = Run(TIMED_STEPS, budget)
    loop(run)()
    return run.step_s()


def study(name: str, repeats: int) -> dict[str, Any]:
    """Return peaks, bits and times of one framework."""
    loop = LOOPS[name]
    plain = Run(STEPS)
    plain_bytes = measured(loop, plain)
    budget = plain_bytes * 7 // 10
    planned = Run(STEPS, budget)
    peak_bytes = measured(loop, planned)
    parameters = [copy.deepcopy(list(r.model.parameters())) for r in (plain, planned)]
    ratios: list[float] = []
    with ForeignLoad() as load:
        for position in range(repeats if loop is not by_hand else 0):
            turns = [loop, by_hand] if position % 2 else [by_hand, loop]
            times = {turn: timed_s(turn, budget) for turn in turns}
            ratios.append(times[loop] / times[by_hand])
    return {
        "case": name,
        "plain_bytes": plain_bytes,
        "budget_bytes": budget,
        "peak_bytes": peak_bytes,
        "is_bitwise": all(map(torch.equal, *parameters)),
        "ratio": statistics.median(ratios) if ratios else 1.0,
        "ratios": ratios,
        "foreign_load": load.share,
    }


def frameworks_table(results: Path) -> str:
    """Return the newest line of each framework as a table."""
    newest = {line["case"]: line for line in read(results)}
    rows = [
        (
            name,
            format_bytes(line["plain_bytes"]),
            format_bytes(line["budget_bytes"]),
            format_bytes(line["peak_bytes"]),
            "yes" if line["is_bitwise"] else "no",
            f"{line['ratio']:.2f} x",
        )
        for name in LOOPS
        if (line := newest.get(name)) is not None
    ]
    head = ("framework", "plain peak", "budget", "peak", "bitwise", "time")
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all frameworks, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.frameworks", description=__doc__
    )
    parser.add_argument("--cases", nargs="+", choices=LOOPS, default=[*LOOPS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, STUDY, frameworks_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    torch.set_num_threads(1)
    for name in options.cases:
        line = study(name, options.repeats)
        append(results, {"study": STUDY, **line, **environment()})
        print(
            f"{name}: {line['peak_bytes']} of {line['budget_bytes']} bytes, bitwise "
            f"{line['is_bitwise']}, {line['ratio']:.2f} x",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
