"""HiGHS through MathOpt, in this process or in one of its own that can be ended.

As a program it reads one request from standard input and writes HiGHS's log and the
answer to standard output, a line of JSON each. It ends when its standard input does, so
that it does not outlive the process that asked.
"""

import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from remat.core.errors import SolverFault

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

LineCallback = Callable[[Iterable[str]], None]
"""Called with lines of the solver's log."""

_GRACE_S = 0.3
"""How long HiGHS may overrun its time limit before its process is ended."""

_LOOK_S = 0.1
"""Seconds between two looks at whether the process has answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """When a solver stops, and how it works.

    Parameters
    ----------
    time_limit_s
        When to stop, in seconds from the start, or ``None``.
    absolute_gap
        The search is over once incumbent and bound are this close, in units of the
        objective.
    seed, threads
        Seed and number of threads of the solver.
    """

    time_limit_s: float | None = None
    absolute_gap: float = 0.0
    seed: int = 0
    threads: int = 1

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.time_limit_s is not None and self.time_limit_s <= 0

    def after(self, elapsed_s: float) -> "Settings":
        """Return the settings with what is left of the time limit after so long."""
        if self.time_limit_s is None:
            return self
        left_s = max(0.0, self.time_limit_s - elapsed_s)
        return replace(self, time_limit_s=left_s)


def parameters(settings: Settings) -> "mathopt.SolveParameters":
    """Return MathOpt's parameters: stop at the limit, or within an absolute gap."""
    from ortools.math_opt.python import mathopt  # noqa: PLC0415  # imports stay light

    limit_s = settings.time_limit_s
    return mathopt.SolveParameters(
        time_limit=None if limit_s is None else timedelta(seconds=limit_s),
        random_seed=settings.seed,
        absolute_gap_tolerance=settings.absolute_gap,
        relative_gap_tolerance=0.0,
    )


def hints(
    model: "mathopt.Model", start: Mapping[int, float]
) -> "mathopt.ModelSolveParameters":
    """Return the start as MathOpt's solution hint."""
    from ortools.math_opt.python import mathopt  # noqa: PLC0415

    if not start:
        return mathopt.ModelSolveParameters()
    values = {model.get_variable(index): value for index, value in start.items()}
    return mathopt.ModelSolveParameters(
        solution_hints=[mathopt.SolutionHint(variable_values=values)]
    )


def plain(result: "mathopt.SolveResult", variable_count: int) -> dict[str, Any]:
    """Return a result of MathOpt as plain values."""
    termination = result.termination
    values: list[float] = []
    objective = None
    if result.solutions and result.solutions[0].primal_solution is not None:
        primal = result.solutions[0].primal_solution
        if primal.feasibility_status.name == "FEASIBLE":
            values = [0.0] * variable_count
            for variable, value in primal.variable_values.items():
                values[variable.id] = value
            objective = primal.objective_value
    return {
        "reason": termination.reason.name.lower(),
        "limit": "" if termination.limit is None else termination.limit.name.lower(),
        "detail": termination.detail,
        "objective": objective,
        "bound": termination.objective_bounds.dual_bound,
        "values": values,
    }


def call_highs(
    proto: "model_pb2.ModelProto",
    settings: Settings,
    *,
    start: Mapping[int, float],
    take_lines: LineCallback,
    solution_file: Path | None = None,
) -> dict[str, Any]:
    """Solve with HiGHS in this process.

    Parameters
    ----------
    proto, settings
        The model, and when to stop.
    start
        Values of a known solution.
    take_lines
        Given HiGHS's log.
    solution_file
        To which HiGHS appends every improved solution, if given.

    Returns
    -------
    dict[str, Any]
        ``reason``, ``limit``, ``detail``, ``objective``, ``bound``, ``values``.

    Raises
    ------
    SolverFault
        If MathOpt refuses the model or the options.
    """
    from ortools.math_opt.python import mathopt  # noqa: PLC0415

    options = parameters(settings)
    options.highs.int_options["threads"] = settings.threads
    if solution_file is not None:
        options.highs.bool_options["mip_improving_solution_save"] = True
        options.highs.string_options["mip_improving_solution_file"] = str(solution_file)
        # The file tells columns by name.
        proto.variables.names.extend(f"c{i}" for i in range(len(proto.variables.ids)))
    model = mathopt.Model.from_model_proto(proto)
    try:
        result = mathopt.solve(
            model,
            mathopt.SolverType.HIGHS,
            params=options,
            model_params=hints(model, start),
            msg_cb=take_lines,
        )
    except AttributeError as error:
        # OR-tools 9.15 fails to translate its own error; the cause says what it is.
        cause = str(error.__context__ or error)
        if "kError" in cause:
            # HiGHS gave up, mostly for numbers of too many magnitudes.
            return _failed(cause)
        msg = f"MathOpt refuses the model: {cause}"
        raise SolverFault(msg) from error
    return plain(result, len(proto.variables.ids))


def _failed(cause: str) -> dict[str, Any]:
    return {
        "reason": "numerical_error",
        "limit": "",
        "detail": f"HiGHS gave up: {cause}",
        "objective": None,
        "bound": -math.inf,
        "values": [],
    }


# --- the asking side -----------------------------------------------------------------


def run_highs_apart(
    proto: "model_pb2.ModelProto",
    settings: Settings,
    *,
    start: Mapping[int, float],
    take_lines: LineCallback,
) -> dict[str, Any]:
    """Solve with HiGHS in a process of its own; parameters as :func:`call_highs`.

    Returns
    -------
    dict[str, Any]
        As :func:`call_highs`; ``reason`` is ``"killed"`` if HiGHS had to be ended after
        its time limit and ``"interrupted"`` after Ctrl-C, with the last ``values``.

    Raises
    ------
    SolverFault
        If the process ends without an answer (out of memory, a crash).
    """
    with tempfile.TemporaryDirectory(prefix="remat-highs-") as folder:
        file = Path(folder) / "improving.sol"
        head = {
            "settings": asdict(settings),
            "start": [list(start), list(start.values())],
            "solution_file": str(file),
            "asked_s": time.time(),
        }
        process = subprocess.Popen(  # noqa: S603 - this very file
            # By path, not by name: the solvers need not be imported there.
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Its own group: Ctrl-C in a terminal is for this process to handle.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        reason = ""
        try:
            answer = _talk(process, head, proto, settings.time_limit_s, take_lines)
            if answer is not None:
                return answer
            reason = "killed"
        except KeyboardInterrupt:
            reason = "interrupted"
        finally:
            process.kill()
            process.wait()
            # What was not sent to a process that is gone is of no use to anyone.
            with suppress(BrokenPipeError):
                if process.stdin is not None:
                    process.stdin.close()
        return {"reason": reason, "values": last_solution(file)}


def _talk(
    process: "subprocess.Popen[bytes]",
    head: dict[str, Any],
    proto: "model_pb2.ModelProto",
    time_limit_s: float | None,
    take_lines: LineCallback,
) -> dict[str, Any] | None:
    """Send the request and return the answer; ``None`` if it does not come in time."""
    if process.stdin is None or process.stdout is None:
        msg = "the process of HiGHS was started without pipes"
        raise SolverFault(msg)
    started_s = time.monotonic()
    request, source = process.stdin, process.stdout
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        # Closed here: nobody else can know when nothing is being read from it.
        with source:
            for line in source:
                lines.put(line)
        lines.put(b"")

    threading.Thread(target=listen, name="remat highs log", daemon=True).start()
    body = proto.SerializeToString()
    # If it ends before it has read the request, its exit status says how, below.
    with suppress(BrokenPipeError):
        request.write(json.dumps({**head, "bytes": len(body)}).encode() + b"\n")
        request.write(body)
        request.flush()
    end_s = None if time_limit_s is None else started_s + time_limit_s + _GRACE_S
    while end_s is None or time.monotonic() < end_s:
        try:
            line = lines.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if not line:
            msg = f"the process of HiGHS ended with status {process.wait()}, no answer"
            raise SolverFault(msg)
        message = json.loads(line)
        if "answer" in message:
            return message["answer"]
        if "error" in message:
            raise SolverFault(message["error"])
        take_lines(message["log"])
    return None


def last_solution(file: Path) -> list[float]:
    """Return the values of the last complete solution of a file; empty if none is."""
    if not file.is_file():
        return []
    blocks = re.split(r"(?m)^# Columns ", file.read_text(encoding="ascii"))[1:]
    for block in reversed(blocks):
        count, *rest = block.splitlines()
        pairs = [line.split() for line in rest[: int(count)]]
        values = [0.0] * int(count)
        if len(pairs) == int(count) and all(len(pair) == 2 for pair in pairs):
            for name, value in pairs:
                values[int(name[1:])] = float(value)
            return values
    return []


# --- the program ---------------------------------------------------------------------


def main() -> None:
    """Answer one request."""
    from ortools.math_opt import model_pb2  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # HiGHS prints to standard output of its own accord; only messages may go there.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    source = sys.stdin.buffer
    head = json.loads(source.readline())
    proto = model_pb2.ModelProto()
    proto.ParseFromString(source.read(head["bytes"]))
    threading.Thread(target=_end_with, args=(source,), daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    try:
        answer = call_highs(
            proto,
            # To start this process and to read the model takes time, too.
            Settings(**head["settings"]).after(time.time() - head["asked_s"]),
            start=dict(zip(*head["start"], strict=True)),
            take_lines=lambda lines: send({"log": list(lines)}),
            solution_file=Path(head["solution_file"]),
        )
        send({"answer": answer})
    except SolverFault as error:
        send({"error": str(error)})


def _end_with(source: BinaryIO) -> None:
    """End this process when the one that asked has gone, or has heard enough."""
    source.read()
    os._exit(0)


if __name__ == "__main__":
    main()
