"""Measurements in processes of their own, so that none sees what another left.

Imports neither torch nor remat: a process that measures memory may import this.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEADY_ALLOCATION = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
}
"""For the processes that measure: glibc keeps freed memory, instead of giving it back
and faulting it in again at moments that depend on the process's history. It concerns
plain and planned steps alike, and no number of bytes: those are of the allocator's
events."""

_ROOT = Path(__file__).parent.parent
_MESSAGE_LENGTH = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended.

    Parameters
    ----------
    status
        ``"ok"``, ``"failed"`` or ``"timed out"``.
    message
        The end of what it wrote to standard error, unless it is ok.
    elapsed_s
        Whole seconds that it took.
    output
        What it wrote to standard output, where that was asked for.
    """

    status: str
    message: str
    elapsed_s: int
    output: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it ended well."""
        return self.status == "ok"

    def line(self, case: str) -> dict[str, Any]:
        """Return what to record of a case that did not end well."""
        return {
            "case": case,
            "status": self.status,
            "message": self.message,
            "elapsed_s": self.elapsed_s,
        }


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    limit_s: int,
    variables: Mapping[str, str],
    keeps_output: bool = False,
) -> Ended:
    """Run a module of the repository in a fresh process, and wait for it.

    Parameters
    ----------
    module, arguments
        As for ``python -m``.
    limit_s
        Seconds after which it is stopped.
    variables
        Environment variables besides those of this process.
    keeps_output
        Whether to return its standard output; by default it goes where that of this
        process goes.
    """
    started = time.monotonic()
    status, message, output = "ok", "", ""
    try:
        result = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=_ROOT,
            # What a study measures of planning is no plan of an earlier run.
            env={**os.environ, "REMAT_PLAN_CACHE_SIZE": "0", **variables},
            stdout=subprocess.PIPE if keeps_output else None,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            check=False,
        )
        output = result.stdout or ""
        if result.returncode != 0:
            status = "failed"
            message = result.stderr[-_MESSAGE_LENGTH:].replace(f"{_ROOT}/", "")
    except subprocess.TimeoutExpired:
        status, message = "timed out", f"more than {limit_s} s"
    elapsed_s = round(time.monotonic() - started)
    return Ended(status=status, message=message, elapsed_s=elapsed_s, output=output)


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run_children(
    module: str,
    cases: Mapping[str, Sequence[str]],
    *,
    limit_s: int,
    variables: Mapping[str, str] = ONE_THREAD,
) -> int:
    """Run a study's cases one after the other, and print which do not end well.

    Parameters
    ----------
    module
        The study, which measures a case when it is called with ``--child``.
    cases
        Its further arguments for each case, by a name for people.
    limit_s, variables
        For each, as for :func:`run_module`. Costs and compiled kernels are kept in a
        folder of the case's own.

    Returns
    -------
    int
        The exit code: 1 if any did not end well.
    """
    exit_code = 0
    for name, arguments in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            caches = {
                "REMAT_CACHE_DIR": f"{folder}/costs",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            }
            ended = run_module(
                module,
                ["--child", *arguments],
                limit_s=limit_s,
                variables={**caches, **variables},
            )
        if not ended.is_ok:
            exit_code = 1
            print(f"{name}: {ended.status}: {ended.message}", file=sys.stderr)
    return exit_code
