"""A model of 8 billion parameters planned on a machine that could not hold it.

``python -m studies.meta`` plans a Llama-shaped model on the meta device, in bfloat16
and with AdamW, at 80 % of its predicted peak, from estimated costs, in a fresh process
with nothing cached. A line is added to ``studies/results/meta.jsonl``; ``--tables``
writes the newest into ``docs/studies.md``.
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
from studies.fresh_process import run_children
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import mebibytes, seconds, table

STUDY = "meta"
PAGE = ROOT / "docs" / "studies.md"
BUDGET = "80%"
LAYERS = 32

_LIMIT_S = 600


def llama(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a Llama with the widths of that of 8 billion parameters, and a batch."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    tokens = torch.empty(1, 4096, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    return model.bfloat16(), {"input_ids": tokens, "labels": tokens}


def study(layers: int) -> dict[str, Any]:
    """Plan the model; return how long that took and the most memory of the process."""
    model, batch = llama(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    with ForeignLoad() as load:
        start, start_cpu = time.monotonic(), time.process_time()
        plan = remat.plan(
            model, kwargs=batch, optimizer=optimizer, budget=BUDGET, costs="estimated"
        )
        wall_s, cpu_s = time.monotonic() - start, time.process_time() - start_cpu
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "overhead": plan.overhead,
        "ops": len(plan.graph.ops),
        "planning_s": wall_s,
        "planning_cpu_s": cpu_s,
        # In KiB on Linux; of the whole process, libraries included.
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "foreign_load": load.share,
    }


def meta_table(results: Path) -> str:
    """Return the newest line as a table."""
    lines = [line for line in read(results) if line["layers"] == LAYERS]
    rows: list[Sequence[str]] = [
        [
            f"{line['parameters'] / 1e9:.2f} billion",
            str(line["ops"]),
            mebibytes(line["budget_bytes"]),
            mebibytes(line["peak_bytes"]),
            f"{line['overhead']:+.2%}",
            seconds(line["planning_s"]),
            seconds(line["planning_cpu_s"]),
            mebibytes(line["process_bytes"]),
        ]
        for line in lines[-1:]
    ]
    header = (
        "parameters",
        "ops",
        "budget",
        "peak",
        "overhead",
        "planned in",
        "of the processor",
        "most memory of the process",
    )
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(prog="python -m studies.meta", description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(fill_place(page, STUDY, meta_table(results)), encoding="utf-8")
        return 0
    if options.child:
        line = {"study": STUDY, "layers": options.layers, **study(options.layers)}
        append(results, {**line, **environment()})
        print(line)
        return 0
    case = ["--layers", str(options.layers), "--results", str(options.results)]
    return run_children("studies.meta", {"meta": case}, limit_s=_LIMIT_S, variables={})


if __name__ == "__main__":
    sys.exit(main())
