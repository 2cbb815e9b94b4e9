"""What a call of a planned shape takes in Python beyond the step itself.

``python -m studies.switching`` times steps of a stack of tiny blocks, whose operators
take next to no time, with two batches of different lengths by turns: the plain model,
the same compiled by ``torch.compile`` with the backend ``aot_eager``, which runs the
operators as they are, as a whole or block by block (``regional``), and the model fitted
in several ways, within a budget that asks for nothing. All are timed in turns of a few
steps in one process, on one thread. Lines are added to
``studies/results/switching.jsonl``; ``--tables`` writes the newest of each depth into
``docs/studies.md``.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import remat
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import table

STUDY = "switching"
PAGE = ROOT / "docs" / "studies.md"
DEPTHS = (2, 16)
WAYS = ("plain", "compiled", "regional", "fitted", "dynamic", "breaks", "blocks")
BESIDE = {"blocks": "regional"}
"""What a way is compared with that is not one graph."""

_WIDTH = 8
_LENGTHS = (4, 6)
_WARMUP = 20
_TURN = 8
_SETTLING = 2
"""Steps of a turn, and how many at its beginning are not counted: caches hold what the
way before has left."""
_BUDGET = "1 GiB"


class Block(nn.Module):
    """A residual block of two small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Stack(nn.Module):
    """Blocks one after the other, and a loss."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def called(
    way: str, model: nn.Module, example: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what is called in one of the ways."""
    options: dict[str, Any] = {"budget": _BUDGET, "costs": "estimated"}
    match way:
        case "plain":
            return model
        case "compiled":
            return torch.compile(model, backend="aot_eager", dynamic=False)
        case "regional":
            for block in model.get_submodule("blocks").children():
                block.compile(backend="aot_eager", dynamic=False)
            return model
        case "dynamic":
            options["dynamic"] = {"x": {0: (2, max(_LENGTHS))}}
        case "breaks" | "blocks":
            options["regions"] = way
        case _:
            pass
    remat.fit(model, example, **options)
    return model


def study(depth: int, turns: int) -> dict[str, Any]:
    """Time steps in all ways by turns; return medians in microseconds.

    What is beyond another way is the median of the differences within a turn, as the
    machine's speed changes between turns.
    """
    torch.manual_seed(0)
    first = Stack(depth)
    batches = [torch.randn(length, _WIDTH) for length in _LENGTHS]
    models = {way: copy.deepcopy(first) for way in WAYS}
    calls = {way: called(way, model, batches[0]) for way, model in models.items()}
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with ForeignLoad() as load:
        for _ in range(_WARMUP + turns):
            for way, call in calls.items():
                turn = [timed(call, models[way], batches[i % 2]) for i in range(_TURN)]
                calls_ns, steps_ns = zip(*turn[_SETTLING:], strict=True)
                taken[way].append((median(calls_ns) / 1000, median(steps_ns) / 1000))
    line: dict[str, Any] = {"turns": turns, "foreign_load": load.share}
    calls_us = {way: [each[0] for each in taken[way][_WARMUP:]] for way in WAYS}
    steps_us = {way: [each[1] for each in taken[way][_WARMUP:]] for way in WAYS}
    for way in WAYS:
        line[f"{way}_call_us"] = median(calls_us[way])
        line[f"{way}_step_us"] = median(steps_us[way])
        for other in ("plain", "compiled", "regional"):
            pairs = zip(steps_us[way], steps_us[other], strict=True)
            line[f"{way}_beyond_{other}_us"] = median(one - two for one, two in pairs)
    return line


def timed(
    call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, batch: torch.Tensor
) -> tuple[int, int]:
    """Return the nanoseconds of a call, and of the whole step."""
    start = time.perf_counter_ns()
    loss = call(batch)
    middle = time.perf_counter_ns()
    loss.backward()
    end = time.perf_counter_ns()
    model.zero_grad()
    return middle - start, end - start


def switching_table(results: Path) -> str:
    """Return the newest line of each depth as a table."""
    newest = {line["depth"]: line for line in read(results)}
    rows: list[Sequence[str]] = []
    for depth in DEPTHS:
        if (line := newest.get(depth)) is None:
            continue
        for way in WAYS:
            other = BESIDE.get(way, "compiled")
            rows.append(
                [
                    str(depth),
                    way,
                    f"{line[f'{way}_call_us']:.0f} μs",
                    f"{line[f'{way}_step_us']:.0f} μs",
                    f"{line[f'{way}_beyond_plain_us']:+.0f} μs",
                    f"{line[f'{way}_beyond_{other}_us']:+.0f} μs",
                ]
            )
    header = ("blocks", "way", "call", "step", "beyond plain", "beyond compiled")
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time each depth, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.switching", description=__doc__
    )
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        filled = fill_place(page, STUDY, switching_table(results))
        PAGE.write_text(filled, encoding="utf-8")
        return 0
    torch.set_num_threads(1)
    for depth in DEPTHS:
        line = {"study": STUDY, "depth": depth, **study(depth, options.turns)}
        append(results, {**line, **environment()})
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
