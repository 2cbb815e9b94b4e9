"""What other ways of saving memory reach on models that break the graph.

``python -m studies.peers_breaks`` runs each model in each way, in a process of its own:

* ``compile@<budget>``: ``torch.compile`` with ``activation_memory_budget``, and the
  backend of its partitioner that runs eager kernels;
* ``checkpoint``: ``torch.utils.checkpoint`` around each block, without re-entrance;
* ``remat@<percent>``: ``regions="breaks"`` at so much of the plain step's peak.

Peaks and times of the plain step are measured in the same process, and steps are timed
in turn. Lines go to ``studies/results/peers_breaks.jsonl``; ``--tables`` writes the
newest of each case into ``docs/studies.md``.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.core.errors import BudgetError
from remat.training.fitted_regions import fitted_for
from remat.training.request import PlanRequest
from remat.training.verification import TrainingStep
from studies.fresh_process import STEADY_ALLOCATION, run_module
from studies.peers import (
    AOT,
    Peer,
    PeerStep,
    checkpointed,
    checkpointed_blocks,
    compiled,
    exactness,
)
from studies.planned import paired_times
from studies.record import RESULTS, append, environment

STUDY = "peers_breaks"
CASES = (
    *(f"compile@{budget}" for budget in (0.5, 0.2, 0.0)),
    "checkpoint",
    *(f"remat@{percent}" for percent in (90, 70, 50)),
)
WIDTH, ROWS, WORDS = 256, 1024, 1000
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[], Peer]]
"""Model, arguments, keyword arguments, and how to checkpoint it block by block."""


def block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(4 * width, width),
    )


class Residual(nn.Module):
    """Six residual blocks, and a look at the values after two and after four."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 10)

    def stage(self, x: Tensor, first: int) -> Tensor:
        for part in self.blocks[first : first + 2]:
            x = x + part(x)
        return x

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.looked_at(self.stage(x, 0))
        x = self.looked_at(self.stage(x, 2))
        return functional.cross_entropy(self.head(self.stage(x, 4)), labels)

    def looked_at(self, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ValueError("a value is no number")
        return x


class Shared(nn.Module):
    """One block that is called three times, with a break in front of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(block(), block())
        self.head = nn.Linear(WIDTH, 10)

    def part(self, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ValueError("a value is no number")
        return x + self.block(x)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        one = self.part(x)
        other = self.part(x + 1)
        both = self.part(one + other)
        return functional.cross_entropy(self.head(both), labels)


class Tagger(nn.Module):
    """Tags of words: blocks, an ``nn.LSTM`` of both directions, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.before = nn.ModuleList(block() for _ in range(3))
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.after = nn.ModuleList(block() for _ in range(3))
        self.tags = nn.Linear(WIDTH, 10)

    def through(self, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for part in blocks:
            x = x + part(x)
        return x

    def recurrent(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        x = self.recurrent(self.through(self.embed(ids), self.before))
        scores = self.tags(self.through(x, self.after))
        return functional.cross_entropy(scores.flatten(0, 1), tags.flatten())


def residual() -> Example:
    model = Residual()
    args = torch.randn(ROWS, WIDTH), torch.randint(0, 10, (ROWS,))
    return model, args, {}, lambda: checkpointed_blocks(model, model.blocks)


def shared() -> Example:
    model = Shared()
    args = torch.randn(ROWS, WIDTH), torch.randint(0, 10, (ROWS,))
    return model, args, {}, lambda: checkpointed_blocks(model, [model.block])


def tagger() -> Example:
    model = Tagger()
    args = torch.randint(0, WORDS, (32, 32)), torch.randint(0, 10, (32, 32))
    blocks = [*model.before, *model.after]
    return model, args, {}, lambda: checkpointed_blocks(model, blocks)


def gpt2() -> Example:
    from studies.definitions_transformers import made  # noqa: PLC0415

    model = made(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=WORDS,
        n_embd=128,
        n_layer=6,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    ids = torch.randint(3, WORDS, (8, 128))
    kwargs = {"input_ids": ids, "labels": ids.clone()}
    return model, (), kwargs, lambda: checkpointed(model)


MODELS: Mapping[str, Callable[[], Example]] = {
    "residual": residual,
    "gpt2": gpt2,
    "shared": shared,
    "tagger": tagger,
}


def study(name: str, case: str, repeats: int) -> dict[str, Any]:
    """Measure one model in one way, beside the plain step.

    Raises
    ------
    ValueError
        If there is no such case.
    """
    if case not in CASES:
        msg = f"there is no case {case!r}; there are {', '.join(CASES)}"
        raise ValueError(msg)
    torch.manual_seed(0)
    model, args, kwargs, checkpointing = MODELS[name]()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = TrainingStep(model, args, kwargs, None, optimizer)
    way, _, number = case.partition("@")
    with step.restored():
        plain_bytes = step.peak_bytes(None)
        line: dict[str, Any] = {
            "study": STUDY,
            "model": name,
            "case": case,
            "plain_peak_bytes": plain_bytes,
        }
        if way == "remat":
            budget = plain_bytes * int(number) // 100
            return line | remat_figures(step, budget, repeats)
        peer = checkpointing() if way == "checkpoint" else None
        peer = peer or compiled(model, AOT, float(number))
        return line | figures(PeerStep(step, peer), peer, repeats)


def remat_figures(step: TrainingStep, budget: int, repeats: int) -> dict[str, Any]:
    """Return what remat reaches within a budget."""
    request = PlanRequest(budget=budget, optimizer=step.optimizer, regions="breaks")
    fitted = fitted_for(step.model, request)
    line: dict[str, Any] = {"budget_bytes": budget}
    try:
        plan = fitted.plan_now(step.args, step.kwargs)
    except BudgetError as error:
        required_bytes = error.required_bytes
        return {**line, "status": "refused", "required_bytes": required_bytes}
    line |= {"predicted_peak_bytes": plan.peak_bytes, "overhead": plan.overhead}
    return line | figures(step, fitted, repeats)


def figures(step: TrainingStep, called: Any, repeats: int) -> dict[str, Any]:
    """Return peak, exactness and time of one way."""
    found = exactness(step.outcome(None, 1), step.outcome(called, 1))
    return {
        "status": "ok",
        "measured_peak_bytes": step.peak_bytes(called),
        **found,
        **paired_times(step, called, repeats),
    }


def start(name: str, case: str, repeats: int, results: Path, limit_s: int) -> None:
    """Measure in a fresh process; record a failure if it does not end well."""
    with tempfile.TemporaryDirectory() as folder:
        child = ["--models", name, "--cases", case, "--child"]
        child += ["--repeats", str(repeats), "--results", str(results)]
        ended = run_module(
            "studies.peers_breaks",
            child,
            limit_s=limit_s,
            variables=STEADY_ALLOCATION | {"REMAT_CACHE_DIR": f"{folder}/costs"},
        )
    if not ended.is_ok:
        record({"study": STUDY, "model": name, **ended.line(case)}, results)


def record(line: dict[str, Any], results: Path) -> None:
    append(results / f"{STUDY}.jsonl", line | environment())
    text = f"{line['model']} {line['case']}: {line['status']}"
    if line["status"] == "ok":
        share = line["measured_peak_bytes"] / line["plain_peak_bytes"]
        text += f", {share:.0%} of plain, {line['slowdown']:.2f} x"
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m studies.peers_breaks", description=__doc__
    )
    found.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    found.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    found.add_argument("--repeats", type=int, default=9)
    found.add_argument("--limit", type=int, default=300, metavar="SECONDS")
    found.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    found.add_argument("--tables", action="store_true", help="write the table only")
    found.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every model in every way, or write the table."""
    options = parser().parse_args(arguments)
    if options.tables:
        from studies.breaks_tables import fill_page  # noqa: PLC0415

        fill_page()
        return 0
    for name in options.models:
        for case in options.cases:
            if options.child:
                torch.set_num_threads(1)
                warnings.simplefilter("ignore")
                record(study(name, case, options.repeats), options.results)
            else:
                start(name, case, options.repeats, options.results, options.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
