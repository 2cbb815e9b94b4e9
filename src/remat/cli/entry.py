"""Parse the command line, run a subcommand, and turn errors into messages and codes."""

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence

import remat
from remat.cli.base import ExitCode, check_files, print_json
from remat.cli.commands import COMMANDS
from remat.core.errors import BudgetError, ExecutionError, RematError, SolverFault

_DESCRIPTION = "Train any PyTorch model within a byte budget."
_EPILOG = """\
examples:
  remat verify train.py --budget 8GiB    same numbers, within the budget?
  remat curve train.py --plot curve.png  time against memory
  remat plan train.py --budget 60% --output plan.json
  remat show plan.json --timeline memory.png

exit codes:
  0    done, and every promise kept
  1    the budget is too small: below the smallest for which a plan is known
  2    wrong usage or input
  3    no plan was found, but there may be one: try --solver auto, or more time
  4    a promise is broken: numbers differ, or the step took more than the budget
  70   an unforeseen failure: --debug shows where
  130  interrupted by Ctrl-C
  141  whoever read the output has left

"remat <command> --help" explains a command.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="remat",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"remat {remat.__version__}"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        lines = "\n".join(f"  {line}" for line in command.examples)
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=f"{textwrap.fill(command.description, 79)}\n\n{command.details}",
            epilog=f"examples:\n{lines}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command_of=command)
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Do what :func:`remat.cli.main` says; an interrupt is its caller's."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        make_parser().print_help(sys.stderr)
        return ExitCode.USAGE
    own, rest = words, []
    if "--" in words:
        position = words.index("--")
        own, rest = words[:position], words[position + 1 :]
    try:
        options = make_parser().parse_args(own)
    except SystemExit as stop:
        # argparse has printed help, the version, or what is wrong.
        return int(stop.code or 0)
    options.script_arguments = rest
    try:
        check_files(options.command_of, options)
        code = options.command_of.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has left; a flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PIPE_CLOSED
    except Exception as error:  # noqa: BLE001 - the outermost place: nothing is above
        return _report(error, options)
    return code


def _report(error: Exception, options: argparse.Namespace) -> ExitCode:
    """Print what went wrong and return the exit code that says so."""
    if options.debug:
        traceback.print_exception(error)
    code = _code_of(error)
    message = str(error)
    if code is ExitCode.UNKNOWN:
        message += (
            ". No plan was found, but there may be one (exit code 3): try --solver auto, "
            "or a longer --time-limit"
        )
    if not isinstance(error, RematError):
        message = f"{type(error).__name__}: {error}"
        if not options.debug:
            message += " (--debug shows the traceback)"
    print(f"remat: error: {message}", file=sys.stderr)
    if options.json:
        print_json({"error": _facts(error)})
    return code


def _code_of(error: Exception) -> ExitCode:
    match error:
        case BudgetError():
            # A schedule is known that this solver did not find, or none at all is.
            is_none_known = error.budget_by_device and not error.required_by_device
            is_unknown = error.is_known_to_fit or is_none_known
            return ExitCode.UNKNOWN if is_unknown else ExitCode.INFEASIBLE
        case SolverFault() | ExecutionError():
            return ExitCode.BROKEN_PROMISE
        case RematError():
            return ExitCode.USAGE
        case _:
            return ExitCode.FAULT


def _facts(error: Exception) -> dict[str, object]:
    facts: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, BudgetError):
        facts["budget_bytes"] = error.budget_bytes
        facts["required_bytes"] = error.required_bytes
        facts["budget_by_device"] = error.budget_by_device
        facts["required_by_device"] = error.required_by_device
    return facts
