"""A model of 8 billion parameters, planned before it has memory.

``python -m studies.meta_model`` plans a step of a Llama-shaped model of 32 layers on
the meta device, with AdamW, at 60 % of its predicted peak, in a fresh process. Recorded
are seconds by the clock and of the processor, and the most memory that the process had.
Lines are added to ``studies/results/meta_model.jsonl``; ``--tables`` writes the newest
into ``docs/studies.md``.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import remat
from studies.fresh_process import run_module
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import seconds, table

STUDY = "meta_model"
PAGE = ROOT / "docs" / "studies.md"
BUDGET = "60%"
_LIMIT_S = 900


def study() -> dict[str, Any]:
    """Plan the model, and return what that took."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(1, 2048, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    start_s, processor_s = time.perf_counter(), time.process_time()
    with ForeignLoad() as load:
        plan = remat.plan(
            model,
            kwargs={"input_ids": tokens, "labels": tokens},
            budget=BUDGET,
            optimizer=optimizer,
            costs="estimated",
        )
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "budget": BUDGET,
        "ops": len(plan.graph.ops),
        "peak_bytes": plan.peak_bytes,
        "overhead": plan.overhead,
        "planning_s": time.perf_counter() - start_s,
        "processor_s": time.process_time() - processor_s,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "foreign_load": load.share,
    }


def meta_table(results: Path) -> str:
    """Return the newest line as a table."""
    rows = [
        [
            f"{line['parameters'] / 1e9:.1f} billion",
            str(line["ops"]),
            f"{line['peak_bytes'] / 2**30:.1f} GiB",
            f"{100 * line['overhead']:.1f} %",
            seconds(line["planning_s"]),
            seconds(line["processor_s"]),
            f"{line['rss_bytes'] / 2**30:.2f} GiB",
        ]
        for line in list(read(results))[-1:]
    ]
    head = (
        "parameters",
        "ops",
        "planned peak",
        "recomputation",
        "planned in",
        "of the processor",
        "memory of the process",
    )
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the model in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.meta_model", description=__doc__
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, STUDY, meta_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.child:
        line = study()
        append(results, {"study": STUDY, **line, **environment()})
        print(line)
        return 0
    child = ["--child", "--results", str(options.results)]
    ended = run_module("studies.meta_model", child, limit_s=_LIMIT_S, variables={})
    if not ended.is_ok:
        print(f"{ended.status}: {ended.message}", file=sys.stderr)
    return 0 if ended.is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
