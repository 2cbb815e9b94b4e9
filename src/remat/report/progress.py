"""A progress bar on the error stream, where there is a terminal to draw it on."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from remat.solvers.base import ProgressCallback, ignore_progress


@contextmanager
def progress_bar(
    *, is_quiet: bool = False, stream: TextIO | None = None
) -> Generator[ProgressCallback]:
    """Yield a callback that draws what is being done and the share of it done.

    Nothing is drawn if ``is_quiet`` or if the stream (the error stream) is not a
    terminal. The bar disappears at the end, also on errors and interrupts.
    """
    target = stream or sys.stderr
    if is_quiet or not target.isatty():
        yield ignore_progress
        return
    # A slow refresh: operators are being timed on the same processor.
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(file=target),
        refresh_per_second=4,
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=1.0)

        def report(activity: str, share: float) -> None:
            bar.update(task, description=activity, completed=share)

        yield report
