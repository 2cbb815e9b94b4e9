"""One plan for many lengths: what it takes to plan, and whether it keeps its promises.

``python -m studies.lengths`` plans each model for one length of 201, and once for all
from 2 to 201, each in a fresh process on one thread with nothing cached. Models planned
for all are then called with 200 lengths, in random order: every output and gradient is
compared with eager PyTorch's, the judge's time is added up, and the peak over all steps
is measured. Lines are added to ``studies/results/lengths.jsonl``; ``--tables`` writes
the newest of each into ``docs/studies.md``. Seconds are the processor's.
"""

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import remat
from remat.training.fitted_model import FittedModel, fitted_on
from studies.fresh_process import run_children
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import seconds, table

STUDY = "lengths"
PAGE = ROOT / "docs" / "studies.md"
BUDGET = "70%"
LONGEST = 201
LENGTHS = range(2, LONGEST + 1)

Batch = dict[str, torch.Tensor]
Case = tuple[nn.Module, Callable[[int], Batch]]

_LIMIT_S = 600
_VOCABULARY = 200


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` with an embedding, dropout and a padding mask."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        inner = self.layers(self.embed(ids), src_key_padding_mask=padding)
        return inner.square().mean()


def _tokens(length: int) -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (2, length))


def _labelled(length: int) -> Batch:
    tokens = _tokens(length)
    return {"input_ids": tokens, "labels": tokens}


def encoder() -> Case:
    def batch(length: int) -> Batch:
        padding = torch.zeros(2, length, dtype=torch.bool)
        return {"ids": _tokens(length), "padding": padding}

    return Encoder(), batch


def llama() -> Case:
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return transformers.LlamaForCausalLM(config), _labelled


def bert() -> Case:
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return transformers.BertForMaskedLM(config), _labelled


MODELS: dict[str, Callable[[], Case]] = {
    "nn.TransformerEncoder": encoder,
    "llama": llama,
    "bert": bert,
}


def study(name: str, *, is_many: bool) -> dict[str, Any]:
    """Plan a model for one length or for all; call the latter with all."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    plain = copy.deepcopy(model)
    example = batch(LONGEST)
    dynamic = {argument: {1: (LENGTHS[0], LONGEST)} for argument in example}
    with ForeignLoad() as load:
        start = time.process_time()
        plan = remat.fit(
            model,
            kwargs=batch(LONGEST // 2) if is_many else example,
            budget=BUDGET,
            dynamic=dynamic if is_many else None,
        )
        line: dict[str, Any] = {"planning_s": time.process_time() - start}
    line |= {"budget_bytes": plan.budget_bytes, "foreign_load": load.share}
    if is_many:
        line |= trained(model, plain, batch)
    return line


def trained(
    model: nn.Module, plain: nn.Module, batch: Callable[[int], Batch]
) -> dict[str, Any]:
    """Run a step of each length, and return what that showed."""
    fitted = fitted_on(model)
    assert isinstance(fitted, FittedModel)
    judged_s = 0.0
    judge = fitted.planner.variant_that_fits

    def timed(*arguments: Any) -> Any:
        nonlocal judged_s
        start = time.process_time()
        try:
            return judge(*arguments)
        finally:
            judged_s += time.process_time() - start

    lengths = list(LENGTHS)
    random.Random(0).shuffle(lengths)  # noqa: S311 - an order, no secret
    batches = [batch(length) for length in lengths]
    fitted.planner.variant_that_fits = timed  # type: ignore[method-assign]
    unequal = 0
    for each in batches:
        found = [_step(called, each) for called in (model, plain)]
        unequal += not all(map(torch.equal, *found))
    del fitted.planner.variant_that_fits

    def run() -> None:
        for each in batches:
            # What the loop drops before the next step is in no plan.
            model.zero_grad()
            _loss(model(**each)).backward()

    # Of the batches one is in the plan; the others are here as well.
    sizes = [sum(t.nbytes for t in each.values()) for each in batches]
    measured = remat.measure(run, warmup=1, repeats=0, resident=[model, batches])
    return {
        "judged_s": judged_s,
        "steps": len(batches),
        "unequal_steps": unequal,
        "traces": fitted.backend.training_step_count,
        "plans": fitted.planner.planned_count,
        "peak_bytes": measured.peak_bytes - sum(sizes) + max(sizes),
    }


def _loss(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs.loss


def _step(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    loss = _loss(model(**batch))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def lengths_table(results: Path) -> str:
    """Return the newest lines of each model as a table."""
    newest = {(line["model"], line["is_many"]): line for line in read(results)}
    rows: list[Sequence[str]] = []
    for name in MODELS:
        one, many = newest.get((name, False)), newest.get((name, True))
        if one is None or many is None:
            continue
        whole_s = many["planning_s"] + many["judged_s"]
        rows.append(
            [
                name,
                seconds(one["planning_s"]),
                seconds(many["planning_s"]),
                f"{1e3 * many['judged_s']:.0f} ms",
                f"{whole_s / one['planning_s']:.2f} x",
                str(many["traces"]),
                f"{many['steps'] - many['unequal_steps']} of {many['steps']}",
                f"{many['peak_bytes'] / many['budget_bytes']:.1%}",
            ]
        )
    header = (
        "model",
        "plan of one length",
        "plan of all",
        "judging 200 lengths",
        "together",
        "traces",
        "steps bitwise eager",
        "highest peak / budget",
    )
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan each case in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.lengths", description=__doc__
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", choices=("one", "many"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, STUDY, lengths_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.child:
        torch.set_num_threads(1)
        (name,) = options.models
        is_many = options.child == "many"
        line = study(name, is_many=is_many)
        fixed = {"study": STUDY, "model": name, "is_many": is_many}
        append(results, {**fixed, **line, **environment()})
        print(f"{name}, {options.child}: {line}")
        return 0
    cases = {
        f"{name} {kind}": [kind, "--models", name, "--results", str(options.results)]
        for name in options.models
        for kind in ("one", "many")
    }
    return run_children("studies.lengths", cases, limit_s=_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
