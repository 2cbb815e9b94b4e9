"""Runs functions in two processes that know each other; returns what each found."""

import faulthandler
import gc
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

_COUNT = 2
_groups: list["_Group"] = []


def in_processes(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what the function returns in each of two processes of one group.

    It is called with the rank, and must be importable. An error in one ends both. The
    processes are those of the calls before: to start some takes as long as a test.
    """
    if not _groups:
        _groups.append(_Group())
    return _groups[0].run(function, args)


def end_processes() -> None:
    """End the processes, if there are any; the next call starts others."""
    while _groups:
        _groups.pop().end()


def of_the_first(function: Callable[..., Any]) -> tuple[Any, list[int | None]]:
    """Return what the function returns in the first of two processes, and exit codes.

    The second may end as it likes. ``None`` for one that was still there after all.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (_free_port(), folder, function)
        started: Any = multiprocessing.spawn(_run, given, nprocs=_COUNT, join=False)
        for process in started.processes:
            process.join(_LONGEST_S)
        codes = [process.exitcode for process in started.processes]
        for process in started.processes:
            process.kill()
        return pickle.loads((Path(folder) / "0").read_bytes()), codes


_LONGEST_S = 250


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _join(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=_COUNT)


def _run(rank: int, port: int, folder: str, function: Callable[..., Any]) -> None:
    _join(rank, port)
    gc.freeze()
    try:
        (Path(folder) / str(rank)).write_bytes(pickle.dumps(function(rank)))
    finally:
        dist.destroy_process_group()


class _Group:
    """Two processes that wait for functions to run."""

    def __init__(self) -> None:
        port = _free_port()
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(_COUNT):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for connection in self.connections:
            connection.send_bytes(pickle.dumps((function, args)))
        found: dict[int, Any] = {}
        while len(found) < _COUNT:
            left = [each for r, each in enumerate(self.connections) if r not in found]
            for connection in wait(left):
                rank = self.connections.index(connection)  # type: ignore[arg-type]
                try:
                    found[rank], error = pickle.loads(
                        self.connections[rank].recv_bytes()
                    )
                except EOFError:
                    self.processes[rank].join(_LONGEST_S)
                    exit_code = self.processes[rank].exitcode
                    error = f"the process has ended with exit code {exit_code}"
                if error:
                    end_processes()
                    msg = f"in process {rank}: {error}"
                    raise RuntimeError(msg)
        return [found[rank] for rank in range(_COUNT)]

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()


def _leave_alone(phase: str, about: dict[str, int]) -> None:
    """Let the next full collection look only at what is made from now on."""
    if phase == "stop" and about["generation"] == 2:
        gc.freeze()


def _serve(rank: int, port: int, connection: Connection) -> None:
    faulthandler.enable()
    _join(rank, port)
    # What is measured is preceded by a collection: not of all that is imported, nor of
    # what was traced, again and again.
    gc.callbacks.append(_leave_alone)
    while True:
        function, args = pickle.loads(connection.recv_bytes())
        gc.freeze()
        # A test's own code, which may raise anything, pytest's failures among it.
        try:
            answer: tuple[Any, str] = function(rank, *args), ""
        except BaseException:  # noqa: BLE001
            answer = None, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
        # The next function finds what a process that is started finds.
        torch.compiler.reset()
        gc.unfreeze()
        gc.collect()
