"""What the subcommands share: their shape, exit codes, options, output."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol, TypeAlias

from remat.core.checks import checked_number
from remat.core.errors import FileFormatError, UnitError, UsageError
from remat.core.platform import Platform
from remat.core.problem import LARGEST_SEED, Limits, check_time_limit
from remat.core.units import ANY_WHOLE_BYTES, parse_budget
from remat.files.documents import check_can_write
from remat.files.serialisation import load_platform
from remat.planning.several_devices import Budget, budgets_bytes
from remat.solvers import SOLVERS

Dynamic: TypeAlias = dict[str | int, dict[int, tuple[int, int]]]
"""Argument, by name or position -> dimension -> its smallest and its largest size."""

_VARYING = re.compile(r"(\w+):(\d+)=(\d+):(\d+)")


class ExitCode(IntEnum):
    """What the exit status of the command says."""

    OK = 0
    INFEASIBLE = 1
    USAGE = 2
    UNKNOWN = 3
    BROKEN_PROMISE = 4
    FAULT = 70
    INTERRUPTED = 130
    PIPE_CLOSED = 141


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand.

    Parameters
    ----------
    name
        The word after ``remat``.
    summary
        One line for the list of commands.
    description
        What it does, for its own help: a paragraph.
    details
        More for its own help, as it is laid out.
    examples
        Lines to copy, without a prompt.
    add_arguments
        Adds its arguments to its parser.
    run
        Does the work, prints data on the output stream, and returns the exit code.
    writes
        The options that name a file to write; :func:`check_files` looks at these
        before ``run``.
    draws
        The ones of them that name a picture.
    """

    name: str
    summary: str
    description: str
    details: str = ""
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], ExitCode]
    writes: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()


def check_files(command: Command, options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before anything slow is done.

    Raises
    ------
    UsageError
        If a file has no name, cannot be written, is no kind of picture that can be
        drawn, or is named twice.
    """
    taken: dict[Path, str] = {}
    for option in (*command.writes, *command.draws):
        # Not every action of a command has all of its options.
        name = getattr(options, option.lstrip("-").replace("-", "_"), None)
        if name is None:
            continue
        if not name:
            msg = f"{option} is empty; give the name of the file to write"
            raise UsageError(msg)
        try:
            if option in command.draws:
                # Imports matplotlib.
                from remat.report.figures import check_figure_path  # noqa: PLC0415

                check_figure_path(name)
            check_can_write(name)
        except (UsageError, FileFormatError) as error:
            msg = f"{option}: {error}"
            raise UsageError(msg) from error
        target = Path(name).resolve()
        if target in taken:
            msg = f"{taken[target]} and {option} name the same file {name!r}"
            raise UsageError(msg)
        taken[target] = option


WORKLOAD_HELP = """\
where the training step comes from:
  FACTORY is module:callable or path/to/script.py:callable; without :callable the
  function remat_workload is taken. Called without arguments, it returns (model, args),
  (model, args, kwargs), or a mapping or object with model, args, kwargs, optimizer and
  loss (all but model may be left out). loss takes the model's outputs and returns the
  scalar whose gradient is taken. The script is loaded, not run as __main__; words after
  -- are its sys.argv.
"""


def add_workload(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the argument that names the training step."""
    parser.add_argument(
        "factory",
        metavar="FACTORY",
        nargs="?" if is_optional else None,
        help="module:callable or script.py:callable that returns the training step",
    )


def add_graph(parser: argparse.ArgumentParser) -> None:
    """Add the option that takes the training step from a file instead."""
    parser.add_argument(
        "--graph",
        metavar="FILE",
        help="plan the graph in this graph or plan file instead (needs no torch)",
    )


class _TakesArguments(Protocol):
    """What a parser and a group of exclusive options have in common."""

    @property
    def add_argument(self) -> Callable[..., argparse.Action]: ...


def add_budget(parser: _TakesArguments, *, is_required: bool = True) -> None:
    """Add the budget."""
    parser.add_argument(
        "--budget",
        action="append",
        required=is_required,
        metavar="[DEVICE=]SIZE",
        help="most bytes during the whole step: 8GiB, 900MB, a number of bytes, or "
        "60%% of the predicted peak without remat; for several devices once for each, "
        "as in --budget cuda:0=6GiB --budget host=20GiB (or host=none for no limit)",
    )


def add_platform(parser: argparse.ArgumentParser) -> None:
    """Add the platform."""
    parser.add_argument(
        "--platform",
        metavar="FILE",
        help="devices and links in a platform file (remat profile-platform writes one); "
        "without it, budgets of several devices are for devices of this machine",
    )


def chosen_budget(words: Sequence[str] | None) -> Budget | None:
    """Return what one or several ``--budget`` options ask for, checked.

    Raises
    ------
    UsageError
        If several budgets are not each for a device of its own.
    UnitError
        If one is not a positive size.

    Examples
    --------
    >>> chosen_budget(["8GiB"])
    '8GiB'
    >>> chosen_budget(["cuda:0=6GiB", "host=none"])
    {'cuda:0': '6GiB', 'host': None}
    """
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        check_size(words[0])
        return words[0]
    budgets: dict[str, str | None] = {}
    for word in words:
        name, equals, size = word.rpartition("=")
        if not equals or not name or name in budgets:
            msg = (
                f"--budget {word} is one of {len(words)} budgets; each names a device of "
                "its own, as in --budget cuda:0=6GiB --budget host=20GiB"
            )
            raise UsageError(msg)
        budgets[name] = None if size.lower() == "none" else size
    budgets_bytes(budgets, ANY_WHOLE_BYTES)
    return dict(budgets)


def chosen_platform(options: argparse.Namespace) -> Platform | None:
    """Return the platform that the options name, if they do."""
    return None if options.platform is None else load_platform(options.platform)


def add_solving(parser: argparse.ArgumentParser, *, has_objective: bool = True) -> None:
    """Add the options that say how a schedule is found."""
    group = parser.add_argument_group("planning")
    group.add_argument(
        "--solver",
        default="auto",
        metavar="NAME",
        help=f"auto (the best of several, the default), {', '.join(SOLVERS)}",
    )
    if has_objective:
        group.add_argument(
            "--objective",
            choices=("serial", "overlapped"),
            default="serial",
            help="what is made small on several devices: the sum of all runs and copies "
            "(serial, the default), or the time with devices and links at work together",
        )
        group.add_argument(
            "--gap",
            type=_share,
            default=0.0,
            metavar="SHARE",
            help="on one device, stop as soon as the plan is proved to take at most this "
            "share of its time longer than the best schedule, such as 0.01 (default: 0)",
        )
    group.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="SECONDS",
        help="most time to search for a schedule (default: none)",
    )
    group.add_argument(
        "--seed",
        type=_seed,
        default=0,
        help="seed of solvers that randomise (default: 0)",
    )
    group.add_argument(
        "--estimated",
        action="store_true",
        help="estimate the time of operators instead of measuring each of them alone",
    )
    group.add_argument(
        "--kernels",
        choices=("eager", "fused"),
        default="eager",
        help="whose kernels run: eager PyTorch's (the default), or fused ones where "
        "they are quicker, with results that differ from eager in the last digits",
    )
    group.add_argument(
        "--regions",
        choices=("auto", "whole", "breaks", "blocks"),
        default="auto",
        help="plan the model as one graph, as the graphs that the tracer splits it "
        "into, or as its repeated blocks, all under one budget (default: as one graph, "
        "deep models as their blocks)",
    )
    group.add_argument(
        "--dynamic",
        action="append",
        type=_varying,
        metavar="ARGUMENT:DIMENSION=FROM:TO",
        help="a dimension of the batch that varies, as in input_ids:1=2:512; once for "
        "each. The step is planned for the largest size, and judged at others",
    )
    group.add_argument(
        "--in-flight",
        type=_passes,
        default=1,
        metavar="N",
        help="how many forward passes run before the first backward pass, as in a stage "
        "of a pipeline (default: 1)",
    )


def chosen_dynamic(options: argparse.Namespace) -> Dynamic | None:
    """Return which dimensions of the batch vary, ``None`` if none does.

    Raises
    ------
    UsageError
        If one is given twice.
    """
    if not options.dynamic:
        return None
    found: Dynamic = {}
    for argument, dimension, limits in options.dynamic:
        dims = found.setdefault(argument, {})
        if dimension in dims:
            msg = f"--dynamic gives dimension {dimension} of {argument!r} twice"
            raise UsageError(msg)
        dims[dimension] = limits
    return found


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is printed."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print data as JSON on the output stream"
    )
    group.add_argument(
        "--quiet", action="store_true", help="no progress bars and notes"
    )
    group.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )


def _varying(text: str) -> tuple[str | int, int, tuple[int, int]]:
    found = _VARYING.fullmatch(text)
    if found is None:
        msg = (
            f"{text!r} is not ARGUMENT:DIMENSION=FROM:TO: an argument of forward by name "
            "or position, a dimension counted from 0, and its smallest and largest size, "
            "as in input_ids:1=2:512"
        )
        raise argparse.ArgumentTypeError(msg)
    name, dimension, low, high = found.groups()
    argument = int(name) if name.isdecimal() else name
    return argument, int(dimension), (int(low), int(high))


def _seed(text: str) -> int:
    try:
        return Limits(seed=int(text)).seed
    except ValueError as error:
        msg = f"{text!r} is not an integer from 0 to {LARGEST_SEED}"
        raise argparse.ArgumentTypeError(msg) from error


def _passes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        msg = f"{text!r} is not a number of forward passes, at least 1"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
        check_time_limit(seconds)
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except ValueError as error:
        msg = f"{text!r} is not a number of seconds"
        raise argparse.ArgumentTypeError(msg) from error
    return seconds


def _share(text: str) -> float:
    try:
        return checked_number("the gap", float(text), most=1.0)
    except ValueError as error:
        msg = f"{text!r} is not a number from 0 to 1"
        raise argparse.ArgumentTypeError(msg) from error


def check_size(text: str) -> None:
    """Refuse what is not a size, before anything slow is done.

    Raises
    ------
    UnitError
        If it is not a positive size.
    """
    # Any whole will do: whether the size makes sense is found when it is known.
    parse_budget(text, whole_bytes=ANY_WHOLE_BYTES)


def print_json(data: object) -> None:
    """Print data for programs."""
    print(json.dumps(data, indent=2))


def note(options: argparse.Namespace, message: str) -> None:
    """Say something to people that is not data."""
    if not options.quiet:
        print(f"remat: {message}", file=sys.stderr)


def warn(message: str) -> None:
    """Say what is wrong, whether or not notes are wanted."""
    print(f"remat: {message}", file=sys.stderr)
