"""Runs the parts of the command for a GPU, one after the other, within a time limit.

Each case of a part is measured in a process of its own, with what is left of the time.
How it ended is a line as well, of part ``"case"``; what ended well on the same device,
with the same sources and settings, is not measured again.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from studies.fresh_process import Ended, run_module
from studies.gpu_parts import ALLOCATORS, SIMULATED, cases
from studies.record import append, environment, read

Line = dict[str, Any]

UNTIL_PERCENT = {"tests": 15, "peaks": 55, "replay": 64, "offload": 74, "time": 100}
"""The parts in their order, and how much of the time has passed when each ends: none
takes all of it. What one leaves, the next ones have."""

LEAST_S = 8
"""No process is started for less: torch alone takes some seconds to load."""

_CORES_A_JOB = 2
_MOST_JOBS = 8
_SIDE_BY_SIDE = ("tests", "peaks", "replay")
"""Parts of which cases run beside others: bytes do not change with them, times do."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of the command.

    Parameters
    ----------
    device
        torch's type of the device.
    scale, tiny
        How large the models are.
    limit_s
        The time for all.
    file
        Where lines are added.
    only
        If given, words of which a case must have one in its name.
    started_s
        When the time began, by the monotonic clock.
    """

    device: str
    scale: int
    tiny: bool
    limit_s: int
    file: Path
    only: Sequence[str] = ()
    started_s: float = field(default_factory=time.monotonic)

    def wanted(self, part: str) -> list[str]:
        """Return the cases of a part that are to be measured."""
        return [
            case
            for case in cases(part, self.device)
            if not self.only or any(word in case for word in self.only)
        ]

    def left_s(self, part: str) -> int:
        """Return the whole seconds that are left for a part."""
        until_s = self.limit_s * UNTIL_PERCENT.get(part, 100) // 100
        return int(self.started_s + until_s - time.monotonic())


def run(options: Run) -> list[Line]:
    """Measure all that is not yet recorded, and return every line of this kind."""
    ended = _process(options, "device", "device", options.limit_s)
    if not ended.is_ok:
        msg = f"no device of type {options.device!r}: {ended.message}"
        raise SystemExit(msg)
    device = [line for line in read(options.file) if line["part"] == "device"][-1]
    done = {
        line["case"]
        for line in lines_like(device, options.file)
        if line["part"] == "case" and line["status"] == "ok"
    }
    cores = os.cpu_count() or 1
    for part in UNTIL_PERCENT:
        missing = [c for c in options.wanted(part) if f"{part}: {c}" not in done]
        jobs = min(_MOST_JOBS, cores // _CORES_A_JOB) if part in _SIDE_BY_SIDE else 1
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            list(pool.map(partial(_case, options, device, part), missing))
    return lines_like(device, options.file)


def lines_like(device: Line, file: Path) -> list[Line]:
    """Return the lines that were measured as the line of part ``"device"`` was."""

    def kind(line: Line) -> list[object]:
        versions = line["versions"]["torch"]
        return [line["source"], line["device"], line["settings"], versions]

    return [line for line in read(file) if kind(line) == kind(device)]


def _case(options: Run, device: Line, part: str, case: str) -> None:
    left_s = options.left_s(part)
    name = f"{part}: {case}"
    if left_s < LEAST_S:
        line: Line = {"case": name, "status": "not run", "message": "no time was left"}
    else:
        print(name, flush=True)
        ended = _process(options, part, case, left_s)
        line = ended.line(name)
    print(f"{name}: {line['status']} {line['message'][-300:]}", flush=True)
    same = {key: device[key] for key in ("study", "device", "settings")}
    append(options.file, {"part": "case", **same, **line, **environment()})


def _process(options: Run, part: str, case: str, limit_s: int) -> Ended:
    words = [part, case, "--device", options.device, "--file", str(options.file)]
    words += ["--scale", str(options.scale), *(["--tiny"] if options.tiny else [])]
    variables = {}
    if options.device == SIMULATED:
        variables["REMAT_TEST_ACCELERATOR"] = SIMULATED
    if settings := ALLOCATORS.get(case.rpartition(", ")[2]):
        variables["PYTORCH_CUDA_ALLOC_CONF"] = settings
    with tempfile.TemporaryDirectory() as folder:
        return run_module(
            "studies.gpu_parts",
            words,
            limit_s=limit_s,
            variables={
                "REMAT_CACHE_DIR": f"{folder}/costs",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                # What cuBLAS asks of those who want the same bits each time.
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                **variables,
            },
        )
