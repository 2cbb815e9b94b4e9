"""Planning deep models: how long, and how good, block by block and as one graph.

``python -m studies.depth`` plans Llama-shaped models of several depths at 60 % of their
predicted peak, each in a fresh process on one thread with nothing cached, and adds
lines to ``studies/results/depth.jsonl``; ``--tables`` writes the newest of each into
``docs/studies.md``. Seconds are the processor's.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

import remat
from studies.fresh_process import run_children
from studies.pages import fill_place
from studies.planned import PhaseClock
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import seconds, table

STUDY = "depth"
PAGE = ROOT / "docs" / "studies.md"
BUDGET = "60%"
CASES: tuple[tuple[int, Literal["whole", "blocks"]], ...] = (
    (8, "whole"),
    (32, "whole"),
    (8, "blocks"),
    (32, "blocks"),
    (128, "blocks"),
)
"""How many layers, and what is a region."""

_LIMIT_S = 600


def llama(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a narrow Llama with random weights, and what it is called with."""
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=1024,
        use_cache=False,
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (4, 128))
    model = transformers.LlamaForCausalLM(config)
    return model, {"input_ids": tokens, "labels": tokens}


def study(layers: int, regions: Literal["whole", "blocks"]) -> dict[str, Any]:
    """Plan a model, and return the seconds of each phase and the plan's figures."""
    model, batch = llama(layers)
    clock = PhaseClock(time.process_time)
    with ForeignLoad() as load:
        plan = remat.fit(
            model, kwargs=batch, budget=BUDGET, regions=regions, progress=clock
        )
    return {
        "budget": BUDGET,
        "ops": len(plan.graph.ops),
        "cost_ns": plan.cost_ns,
        "bound_ns": plan.bound_ns,
        "peak_bytes": plan.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "solver": plan.solver,
        **clock.stop(),
        "foreign_load": load.share,
    }


def depth_table(results: Path) -> str:
    """Return the newest line of each case as a table."""
    newest = {(line["layers"], line["regions"]): line for line in read(results)}
    rows: list[Sequence[str]] = []
    for case in CASES:
        if (line := newest.get(case)) is not None:
            overhead = line["cost_ns"] / line["bound_ns"] - 1
            rows.append(
                [
                    str(line["layers"]),
                    line["regions"],
                    str(line["ops"]),
                    seconds(line["planning_s"]),
                    f"{overhead:+.2%}",
                ]
            )
    return table(("layers", "regions", "ops", "first plan", "overhead"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan each case in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.depth", description=__doc__
    )
    parser.add_argument("--layers", type=int, help="only models of this depth")
    parser.add_argument("--regions", choices=("whole", "blocks"), help="only these")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, "depth", depth_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.child:
        torch.set_num_threads(1)
        line = study(options.layers, options.regions)
        fixed = {"study": STUDY, "layers": options.layers, "regions": options.regions}
        append(results, {**fixed, **line, **environment()})
        print(f"{options.layers} layers, {options.regions}: {line['planning_s']} s")
        return 0
    cases = {
        f"{layers} {regions}": [
            *("--layers", str(layers), "--regions", regions),
            *("--results", str(options.results)),
        ]
        for layers, regions in CASES
        if options.layers in (None, layers) and options.regions in (None, regions)
    }
    return run_children("studies.depth", cases, limit_s=_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
