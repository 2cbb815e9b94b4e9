"""Runs a function in two processes that know each other; returns what each found."""

import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


def in_processes(function: Callable[..., Any], *args: Any, count: int = 2) -> list[Any]:
    """Return what the function returns in each of some processes of one group.

    It is called with the rank, and must be importable. An error in one ends all.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (count, _free_port(), folder, function, args)
        multiprocessing.spawn(_run, given, nprocs=count)
        return [_found(folder, rank) for rank in range(count)]


def of_the_first(function: Callable[..., Any]) -> tuple[Any, list[int | None]]:
    """Return what the function returns in the first of two processes, and exit codes.

    The second may end as it likes. ``None`` for one that was still there after all.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (2, _free_port(), folder, function, ())
        started: Any = multiprocessing.spawn(_run, given, nprocs=2, join=False)
        for process in started.processes:
            process.join(_LONGEST_S)
        codes = [process.exitcode for process in started.processes]
        for process in started.processes:
            process.kill()
        return _found(folder, 0), codes


_LONGEST_S = 60


def _found(folder: str, rank: int) -> Any:
    return pickle.loads((Path(folder) / str(rank)).read_bytes())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _run(
    rank: int,
    count: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    try:
        found = function(rank, *args)
        (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
    finally:
        dist.destroy_process_group()
