"""What a call of a known shape costs in Python beyond the step, as shapes alternate.

``python -m studies.switching`` fits a network whose operators take next to no time, for
shapes that are planned one by one and for sizes that vary, and calls it with two shapes
in turn. Recorded is the processor's time of a call less that of the plain model's, the
median of blocks of calls that are timed in turns. Lines are added to
``studies/results/switching.jsonl``; ``--tables`` writes the newest of each into
``docs/studies.md``.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.tables import table

STUDY = "switching"
PAGE = ROOT / "docs" / "studies.md"
CASES = ("one by one", "sizes that vary", "blocks")
_ROWS = (8, 24)
_CALLS, _BLOCKS = 50, 21


def network() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))


def study(case: str) -> dict[str, Any]:
    """Return the microseconds of a call in one of the cases, and of a plain call."""
    torch.manual_seed(0)
    model = network()
    plain = copy.deepcopy(model)
    batches = [torch.randn(rows, 8) for rows in _ROWS]
    options: dict[str, Any] = {"costs": "estimated", "budget": "100%"}
    if case == "sizes that vary":
        options["dynamic"] = {0: {0: (2, _ROWS[-1])}}
    if case == "blocks":
        options["regions"] = "blocks"
    remat.fit(model, batches[-1], **options)
    for batch in batches * 3:
        model(batch).sum().backward()
        model.zero_grad()
    with ForeignLoad() as load:
        pairs = [
            [_call_us(called, batches) for called in (model, plain)]
            for _ in range(_BLOCKS)
        ]
    fitted_us, plain_us = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {
        "fitted_us": fitted_us,
        "plain_us": plain_us,
        "beyond_us": statistics.median(one - other for one, other in pairs),
        "foreign_load": load.share,
    }


def _call_us(called: nn.Module, batches: Sequence[torch.Tensor]) -> float:
    start_ns = time.process_time_ns()
    for _ in range(_CALLS):
        for batch in batches:
            called(batch)
    return (time.process_time_ns() - start_ns) / 1000 / _CALLS / len(batches)


def switching_table(results: Path) -> str:
    """Return the newest line of each case as a table."""
    newest = {line["case"]: line for line in read(results)}
    rows = [
        [case, *(f"{newest[case][key]:.0f} us" for key in _KEYS)]
        for case in CASES
        if case in newest
    ]
    return table(("planned", "fitted call", "plain call", "beyond the step"), rows)


_KEYS = ("fitted_us", "plain_us", "beyond_us")


def main(arguments: Sequence[str] | None = None) -> int:
    """Time each case in this process, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.switching", description=__doc__
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        page = PAGE.read_text(encoding="utf-8")
        page = fill_place(page, STUDY, switching_table(results))
        PAGE.write_text(page, encoding="utf-8")
        return 0
    torch.set_num_threads(1)
    for case in CASES:
        line = {"study": STUDY, "case": case, **study(case)}
        append(results, line | environment())
        print(f"{case}: {line['beyond_us']:.0f} us beyond the step", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
