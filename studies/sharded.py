"""A sharded Llama in two processes: remat beside full checkpointing, at its peak.

``python -m studies.sharded`` divides a Llama by ``fully_shard`` between two processes
on the CPU, and adds a line for each way to ``studies/results/sharded.jsonl``: the step
as it is, with weights that stay gathered, every layer checkpointed, and plans with the
peak of each of these and with 70 % of the plain one. A plan decides which layers'
weights stay gathered between their passes. Steps are timed in turns, in one run;
``--tables`` writes the newest run into ``docs/studies.md``.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import remat
from remat.core.units import format_bytes
from remat.training.fitted_model import fitted_on
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, append, environment, read
from studies.tables import table

STUDY = "sharded"
PAGE = ROOT / "docs" / "studies.md"
PROCESSES = 2
KEPT = "weights kept (reshard_after_forward=False)"
_PORT = "29617"


def sharded_llama(*, is_let_go: bool) -> Any:
    """Return a small Llama of which each process has a piece.

    The weights of its layers go after their forward pass, or stay gathered.
    """
    config = transformers.LlamaConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=is_let_go)
    fully_shard(model, mesh=mesh)
    return model


class Way:
    """One way to train the model."""

    def __init__(self, name: str, tokens: torch.Tensor, budget: Any = None) -> None:
        self.name = name
        self.model = sharded_llama(is_let_go=name != KEPT)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.tokens = tokens
        self.plan = None
        if name == "checkpointed":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if budget is not None:
            batch = {"input_ids": tokens, "labels": tokens}
            options: dict[str, Any] = {
                "kwargs": batch,
                "optimizer": self.optimizer,
                "regions": "blocks",
                "holds_outputs": False,
            }
            self.plan = remat.fit(self.model, budget=budget, **options)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self) -> None:
        """Train for one step."""
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def kept_layers(self) -> int | None:
        """Return how many layers' weights stay gathered in the plan."""
        steps = getattr(fitted_on(self.model), "steps", ())
        return sum(steps[0].kept.values()) if steps else None

    def timed(self) -> None:
        """Train for one step, timed from when all processes have come."""
        dist.barrier()
        start = time.perf_counter()
        self.step()
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)

    def peak_bytes(self) -> int:
        """Return the largest of a few measured peaks, of all processes."""
        resident = [self.model, self.tokens, self.optimizer]
        peaks = [
            remat.measure(self.step, warmup=1, repeats=0, resident=resident).peak_bytes
            for _ in range(3)
        ]
        peak = torch.tensor(max(peaks))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak)


def study(rank: int, results: Path, repeats: int) -> None:
    """Measure all ways in one process of several, and record them in the first."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=_PORT)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 512, (8, 128), generator=generator)
    ways = [Way(name, tokens) for name in ("plain", KEPT, "checkpointed")]
    peaks = {way.name: way.peak_bytes() for way in ways}
    budgets = {
        "remat, peak of checkpointed": peaks["checkpointed"],
        "remat, 70 % of plain": peaks["plain"] * 7 // 10,
        "remat, peak of plain": peaks["plain"],
        "remat, peak of weights kept": peaks[KEPT],
    }
    for name, budget in budgets.items():
        ways.append(Way(name, tokens, budget))
        peaks[name] = ways[-1].peak_bytes()
    _in_turns(ways, repeats)
    if rank == 0:
        for way in ways:
            append(
                results,
                {
                    "study": STUDY,
                    "way": way.name,
                    "peak_bytes": peaks[way.name],
                    "budget_bytes": None if way.plan is None else way.plan.budget_bytes,
                    "predicted_bytes": None
                    if way.plan is None
                    else way.plan.peak_bytes,
                    "kept_layers": way.kept_layers(),
                    "is_as_plain": way.losses[:6] == ways[0].losses[:6],
                    "time": _ratio(way, ways[0]),
                    "seconds": round(statistics.median(way.seconds), 4),
                    **environment(),
                },
            )
            print(way.name, peaks[way.name], round(_ratio(way, ways[0]), 3))
    dist.destroy_process_group()


def _in_turns(ways: Sequence[Way], repeats: int) -> None:
    for position in range(repeats + 1):
        for way in ways:
            way.timed()
            if not position:
                way.seconds.clear()


def _ratio(way: Way, plain: Way) -> float:
    ratios = [a / b for a, b in zip(way.seconds, plain.seconds, strict=True)]
    return round(statistics.median(ratios), 4)


def sharded_table(results: Path) -> str:
    """Return the newest line of each way as a table."""
    rows: list[Sequence[str]] = []
    for way, line in {line["way"]: line for line in read(results)}.items():
        predicted = line["predicted_bytes"]
        rows.append(
            [
                way,
                "" if predicted is None else format_bytes(line["budget_bytes"]),
                "" if predicted is None else format_bytes(predicted),
                format_bytes(line["peak_bytes"]),
                "" if predicted is None else str(line["kept_layers"]),
                f"{line['time']:.2f}",
                "yes" if line["is_as_plain"] else "no",
            ]
        )
    head = (
        "way",
        "budget",
        "predicted",
        "measured",
        "layers kept",
        "time / plain",
        "losses as plain",
    )
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the processes, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.sharded", description=__doc__
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, STUDY, sharded_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    run: Callable[..., Any] = multiprocessing.spawn
    run(study, (results, options.repeats), nprocs=PROCESSES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
