"""``remat cache``: what is kept on disk between starts, and its removal."""

import argparse
from pathlib import Path

from remat.cli.base import Command, ExitCode, add_output, print_json
from remat.core.units import format_bytes
from remat.files.cache_folder import COST_FILES, cache_directory, files_in, remove
from remat.planning.plan_cache import SIZE_VARIABLE, plan_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``remat cache``."""
    parser.add_argument(
        "--clear",
        choices=("plans", "costs", "all"),
        help="remove the plans, the measured costs, or both",
    )
    add_output(parser)


def run(options: argparse.Namespace) -> ExitCode:
    """Say what is kept, after the removal of what is to be removed."""
    plans, folder = plan_folder(), cache_directory()
    limit_bytes = plans.most_bytes
    listed = {"plans": plans.files, "costs": lambda: files_in(folder, COST_FILES)}
    removed = {
        name: sum(remove(file) for file, _ in files())
        for name, files in listed.items()
        if options.clear in (name, "all")
    }
    found = {name: files() for name, files in listed.items()}
    if options.json:
        facts = {
            name: {
                "file_count": len(files),
                "size_bytes": _total(files),
                "removed_count": removed.get(name, 0),
            }
            for name, files in found.items()
        }
        head = {"folder": str(folder), "plans_limit_bytes": limit_bytes}
        print_json({"kind": "cache", **head, **facts})
        return ExitCode.OK
    limit = (
        f"at most {format_bytes(limit_bytes)}"
        if limit_bytes
        else f"none are kept, by {SIZE_VARIABLE}"
    )
    print(f"cache in {folder}")
    for name, files in found.items():
        more = f" ({limit})" if name == "plans" else ""
        print(f"  {name}  {len(files)} files, {format_bytes(_total(files))}{more}")
    for name, count in removed.items():
        print(f"  removed {count} files of {name}")
    return ExitCode.OK


def _total(files: list[tuple[Path, int]]) -> int:
    return sum(size for _, size in files)


CACHE = Command(
    name="cache",
    summary="show or clear what is kept on disk: plans and measured costs",
    description=(
        "Show where plans and measured costs are kept, and how large they are, or remove "
        "them. Removing is always safe: they are made again. Needs no torch."
    ),
    examples=("remat cache --json", "remat cache --clear plans"),
    add_arguments=add_arguments,
    run=run,
)
