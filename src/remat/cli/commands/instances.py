"""``remat instances``: the instance library, and judging schedules against it."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from remat.cli.base import Command, ExitCode, add_output, note, print_json, warn
from remat.core.errors import CertificateError
from remat.core.units import format_bytes, format_ns
from remat.files.serialisation import save_graph
from remat.planning.one_device import plain_peak_bytes
from remat.report.tables import print_table
from remat.testing.instances.entries import comparisons, entry_of
from remat.testing.instances.library import BestKnown, Instance, load_instance, names
from remat.testing.instances.published import read_published

_RECORD = ("budget", "", "best known", "x once", "bound", "gap")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``remat instances``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(
        name: str, run: Callable[..., ExitCode], text: str
    ) -> argparse.ArgumentParser:
        found = actions.add_parser(name, help=text, description=text)
        found.set_defaults(instances_action=run)
        return found

    listed = add("list", _list, "list the instances")
    shown = add("show", _show, "print an instance and what is known of it")
    shown.add_argument("name", metavar="NAME", help="an instance")
    shown.add_argument("--output", metavar="FILE", help="write its graph")
    checked = add(
        "check",
        _check,
        "judge a schedule or plan file against its instance; without a file, all that "
        "the library claims",
    )
    checked.add_argument("file", metavar="FILE", nargs="?", help="a schedule or a plan")
    checked.add_argument("--instance", metavar="NAME", help="what a schedule is for")
    table = add("table", _table, "print the leaderboard")
    table.add_argument("name", metavar="NAME", nargs="*", help="some instances (all)")
    read = add("import", _import, "convert a published graph to a graph file")
    read.add_argument(
        "file", metavar="FILE", help="of Moccasin or the lower-set method"
    )
    read.add_argument("--output", metavar="FILE", required=True, help="the graph file")
    for each in (listed, shown, checked, table, read):
        add_output(each)


def run(options: argparse.Namespace) -> ExitCode:
    """Do what is asked for."""
    return options.instances_action(options)


def _list(options: argparse.Namespace) -> ExitCode:
    found = [load_instance(name) for name in names()]
    if options.json:
        print_json({"kind": "instances", "instances": [_facts(each) for each in found]})
        return ExitCode.OK
    table = _new_table("instance", "family", "ops", "peak", "budgets")
    for each in found:
        table.add_row(
            each.name,
            each.family,
            str(len(each.graph.ops)),
            format_bytes(plain_peak_bytes(each.graph)),
            ", ".join(each.budgets_bytes),
        )
    print_table(table)
    return ExitCode.OK


def _show(options: argparse.Namespace) -> ExitCode:
    instance = load_instance(options.name)
    if options.output:
        save_graph(options.output, instance.graph)
        note(options, f"wrote the graph to {options.output}")
    if options.json:
        print_json({"kind": "instance", **_facts(instance)})
        return ExitCode.OK
    print(f"{instance.name}: {instance.family}, {len(instance.graph.ops)} ops")
    print(f"  from          {instance.origin}")
    print(f"  peak          {format_bytes(plain_peak_bytes(instance.graph))}")
    print(f"  once          {format_ns(instance.once_ns)} for every op once")
    table = _new_table(*_RECORD, "found by", "proved by")
    for label, best in instance.best.items():
        row = _record(instance, label, best)
        table.add_row(*row, best.found_by, best.proved_by or "every op once")
    print_table(table)
    return ExitCode.OK


def _table(options: argparse.Namespace) -> ExitCode:
    found = [load_instance(name) for name in options.name or names()]
    if options.json:
        print_json({"kind": "instances", "instances": [_facts(each) for each in found]})
        return ExitCode.OK
    table = _new_table("instance", "ops", *_RECORD, "found by")
    for instance in found:
        for label, best in instance.best.items():
            table.add_row(
                instance.name,
                str(len(instance.graph.ops)),
                *_record(instance, label, best),
                best.found_by.split(",")[0].removesuffix(" of auto"),
            )
    print_table(table)
    return ExitCode.OK


def _check(options: argparse.Namespace) -> ExitCode:
    if options.file is None:
        return _check_library(options)
    entry = entry_of(Path(options.file), options.instance)
    trace, instance = entry.trace, entry.instance
    facts: dict[str, object] = {
        "kind": "entry",
        "instance": instance.name,
        "is_valid": trace.is_valid,
        "violation": None if trace.violation is None else str(trace.violation),
    }
    if trace.violation is not None:
        warn(f"the schedule fails on {instance.name}: {trace.violation}")
        if options.json:
            print_json(facts)
        return ExitCode.BROKEN_PROMISE
    found = comparisons(entry)
    if options.json:
        budgets = {
            each.label: {
                "budget_bytes": each.budget_bytes,
                "fits": each.fits,
                "best_known_ns": each.best.cost_ns,
                "bound_ns": each.best.bound_ns,
            }
            for each in found
        }
        facts |= {"peak_bytes": trace.peak_bytes[0], "cost_ns": trace.serial_ns}
        print_json(facts | {"budgets": budgets})
        return ExitCode.OK
    print(f"schedule for {instance.name}: valid, {len(entry.schedule.steps)} steps")
    print(f"  peak  {format_bytes(trace.peak_bytes[0])}")
    print(f"  time  {format_ns(trace.serial_ns)}")
    table = _new_table(*_RECORD, "this schedule")
    for each in found:
        table.add_row(*_record(instance, each.label, each.best), str(each))
    print_table(table)
    return ExitCode.OK


def _check_library(options: argparse.Namespace) -> ExitCode:
    wrong: dict[str, str] = {}
    count = 0
    for name in names():
        instance = load_instance(name)
        for label in instance.budgets_bytes:
            count += 1
            try:
                found = instance.check(label)
            except CertificateError as error:
                found = str(error)
            if found is not None:
                wrong[f"{name} {label}"] = found
                warn(f"{name} {label}: {found}")
    if options.json:
        print_json({"kind": "library", "checked_count": count, "wrong": wrong})
    else:
        print(
            f"{count} schedules replayed and bounds verified, {len(wrong)} of them wrong"
        )
    return ExitCode.BROKEN_PROMISE if wrong else ExitCode.OK


def _import(options: argparse.Namespace) -> ExitCode:
    graph = read_published(Path(options.file))
    save_graph(options.output, graph)
    if options.json:
        facts = {"name": graph.name, "op_count": len(graph.ops)}
        print_json({"kind": "graph", **facts, "file": options.output})
    else:
        print(f"wrote {graph.name}, {len(graph.ops)} ops, to {options.output}")
    return ExitCode.OK


def _facts(instance: Instance) -> dict[str, object]:
    return {
        "name": instance.name,
        "family": instance.family,
        "origin": instance.origin,
        "op_count": len(instance.graph.ops),
        "plain_peak_bytes": plain_peak_bytes(instance.graph),
        "once_ns": instance.once_ns,
        "budgets": {
            label: {
                "budget_bytes": instance.budgets_bytes[label],
                "best_known_ns": best.cost_ns,
                "peak_bytes": best.peak_bytes,
                "found_by": best.found_by,
                "bound_ns": best.bound_ns,
                "proved_by": best.proved_by,
                "gap": best.gap,
            }
            for label, best in instance.best.items()
        },
    }


def _record(instance: Instance, label: str, best: BestKnown) -> Iterable[str]:
    return (
        format_bytes(instance.budgets_bytes[label]),
        label,
        format_ns(best.cost_ns),
        f"{best.cost_ns / (instance.once_ns or 1):.4f}",
        format_ns(best.bound_ns),
        f"{best.gap:.2%}",
    )


def _new_table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, no_wrap=column in ("instance", "budget", "gap"))
    return table


INSTANCES = Command(
    name="instances",
    summary="the instance library: training graphs, the best known, and a judge",
    description=(
        "Training graphs of real models, with budgets, the best schedule that is known "
        "for each and the best bound that is proved. Judges anybody's schedule against "
        "them. Needs no torch."
    ),
    examples=(
        "remat instances table resnet50",
        "remat instances show gpt2 --output gpt2.json",
        "remat instances check my_schedule.json",
        "remat instances check",
        "remat instances import VGG16_256_224x224_train.json --output vgg16.json",
    ),
    add_arguments=add_arguments,
    run=run,
    writes=("--output",),
)
