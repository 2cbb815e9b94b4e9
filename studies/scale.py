"""A model of 8 billion parameters among up to 512 processes, planned in one.

``python -m studies.scale`` cuts a Llama-shaped model by ``fully_shard`` between 8, 64
and 512 processes, of which the first is real and the others are simulated by torch's
fake process group. It plans the step of that process, without recomputation and at the
smallest budget, each number of processes in a fresh process, and adds lines to
``studies/results/scale.jsonl``. What each plan counts for pieces, gathered weights and
buffers of gradients has to be what :mod:`studies.shard_sizes` says, to the byte: the
study fails where it is not, and names the difference. ``--tables`` writes the newest
lines into ``docs/studies.md``, and the picture beside it.
"""

import argparse
import resource
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import remat
from remat.core.graph import Role
from remat.core.platform import single_device
from remat.core.schedule import Compute, Schedule
from remat.core.simulator import simulate
from remat.core.units import format_bytes
from remat.planning.plan import Plan
from remat.report.figures import save_figure
from studies.fresh_process import run_children
from studies.meta import llama
from studies.pages import fill_place
from studies.record import RESULTS, ROOT, ForeignLoad, append, environment, read
from studies.shard_sizes import adamw_bytes, gathered_bytes, piece_bytes
from studies.tables import load, seconds, table

STUDY = "scale"
PAGE = ROOT / "docs" / "studies.md"
FIGURE = ROOT / "docs" / "images" / "study-scale.svg"
LAYERS = 32
TOKENS = 256
PROCESSES = (8, 64, 512)

FORMULAS = {
    "parameters": ("pieces of parameters", "p"),
    "optimizer_state": ("state of AdamW", "2 p + 4 bytes a parameter"),
    "layer_received": ("pieces of a layer, received", "n p of the layer"),
    "layer_whole": ("a layer, gathered", "n p of the layer"),
    "root_whole": ("embedding, norm and head, gathered", "n p of these"),
    "layer_gradients": ("gradients of a layer, to be added up", "n p of the layer"),
    "root_gradients": ("gradients of the others, to be added up", "n p of these"),
    "layer_reduced": ("piece of a layer's gradients", "p of the layer"),
    "root_reduced": ("piece of the others' gradients", "p of these"),
    "reduced": ("pieces of all gradients", "p"),
}
"""What is compared: what it is, and its formula in words."""

PARTS = {
    "parameters": ("pieces of parameters", "#0072b2"),
    "optimizer_state": ("state of AdamW", "#56b4e9"),
    "reduced": ("pieces of gradients", "#009e73"),
    "root": ("embedding, norm and head, gathered", "#e69f00"),
    "layers": ("layers, gathered", "#f0e442"),
    "gradients": ("gradients, copied together to be added up", "#cc79a7"),
    "workspace": ("workspace of the operator", "#7f7f7f"),
    "others": ("activations, gradients as computed, others", "#d55e00"),
}
"""What is there at the peak: its name in the picture, and its colour."""

_LIMIT_S = 1800
_CASE = ("layers", "processes", "tokens")
_ROOT = "the model"
_WAYS = {"plain": "without recomputation", "smallest": "smallest budget"}


@contextmanager
def simulated_processes(count: int) -> Generator[None]:
    """Let this process be the first of many inside, and the only one."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_llama(layers: int, processes: int) -> Any:
    """Return the first process's pieces of a Llama, with whatever values."""
    model: Any = llama(layers)[0]
    mesh = init_device_mesh("cpu", (processes,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def study(layers: int, processes: int, tokens: int) -> dict[str, Any]:
    """Plan the step of one process twice, and compare what is counted."""
    with simulated_processes(processes), ForeignLoad() as other:
        model = sharded_llama(layers, processes)
        expected = expected_bytes(model, processes)
        words = torch.zeros(1, tokens, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def plan(budget: int | str) -> tuple[Plan, float]:
            start = time.monotonic()
            made = remat.plan(
                model,
                kwargs={"input_ids": words, "labels": words},
                optimizer=optimizer,
                budget=budget,
                costs="estimated",
            )
            return made, time.monotonic() - start

        plans = {"plain": plan("100%")}
        try:
            plans["smallest"] = plan(1)
        except remat.BudgetError as error:
            plans["smallest"] = plan(error.required_bytes)
        count = sum(parameter.numel() for parameter in model.parameters())
    found = {way: found_bytes(made) for way, (made, _) in plans.items()}
    return {
        "parameters": count,
        "formula_bytes": expected,
        "plans": {
            way: {
                "bytes": {name: max(sizes) for name, sizes in found[way].items()},
                "peak_bytes": made.peak_bytes,
                "peak_parts_bytes": parts_at_peak(made),
                "peak_at": _op_at_peak(made),
                "overhead": made.overhead,
                "ops": len(made.graph.ops),
                "recomputed_ops": made.recomputed_op_count,
                "planning_s": round(planning_s, 1),
            }
            for way, (made, planning_s) in plans.items()
        },
        "differences": [
            f"{_WAYS[way]}: {difference}"
            for way, sizes in found.items()
            for difference in differences(sizes, expected)
        ],
        # In KiB on Linux; of the whole process, libraries included.
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "foreign_load": other.share,
    }


def expected_bytes(model: Any, processes: int) -> dict[str, int]:
    """Return what the formulas say, by the names of :data:`FORMULAS`."""
    everything = list(model.parameters())
    layer = list(model.model.layers[0].parameters())
    inside = {id(parameter) for parameter in model.model.layers.parameters()}
    outside = [p for p in everything if id(p) not in inside]
    return {
        "parameters": piece_bytes(everything, processes),
        "optimizer_state": adamw_bytes(everything, processes),
        "layer_received": gathered_bytes(layer, processes),
        "layer_whole": gathered_bytes(layer, processes),
        "root_whole": gathered_bytes(outside, processes),
        "layer_gradients": gathered_bytes(layer, processes),
        "root_gradients": gathered_bytes(outside, processes),
        "layer_reduced": piece_bytes(layer, processes),
        "root_reduced": piece_bytes(outside, processes),
        "reduced": piece_bytes(everything, processes),
    }


def found_bytes(plan: Plan) -> dict[str, set[int]]:
    """Return what a plan counts, by the names of :data:`FORMULAS`.

    Each is a set of one number unless layers differ, and zero if the plan has no such
    thing.
    """
    found: dict[str, set[int]] = {name: set() for name in FORMULAS}
    for key, role in (
        ("parameters", Role.PARAMETER),
        ("optimizer_state", Role.OPTIMIZER_STATE),
    ):
        found[key].add(sum(s.size_bytes for s in plan.graph.storages if s.role is role))
    reduced_bytes = 0
    for kind, owner, storages in _gathering(plan):
        size_bytes = _size_bytes(plan, storages)
        name = f"{'root' if owner == _ROOT else 'layer'}_{kind}"
        if name in found:
            found[name].add(size_bytes)
        if kind == "reduced":
            reduced_bytes += size_bytes
    found["reduced"].add(reduced_bytes)
    return {name: sizes or {0} for name, sizes in found.items()}


def _gathering(plan: Plan) -> Iterator[tuple[str, str, set[int]]]:
    """Yield the kind of what is gathered or reduced, of which part, and its blocks."""
    kinds = {
        "pieces of gradients of ": "reduced",
        "gradients of ": "gradients",
        "pieces of ": "received",
        "gathering of ": "whole",
    }
    added_up: set[int] = set()
    for op in plan.graph.ops:
        for words, kind in kinds.items():
            if op.name.startswith(words):
                if kind == "gradients":
                    added_up.update(op.writes)
                yield kind, op.name.removeprefix(words), set(op.writes)
                break
        # It is whole since the forward pass, with what operators there made besides.
        if op.name == f"the end of {_ROOT}":
            yield "whole", _ROOT, set(op.reads) - added_up


def _size_bytes(plan: Plan, storages: set[int]) -> int:
    return sum(plan.graph.storages[storage].size_bytes for storage in storages)


def differences(
    found: Mapping[str, set[int]], expected: Mapping[str, int]
) -> list[str]:
    """Return where a plan's bytes are not those of the formulas, for people."""
    return [
        f"{FORMULAS[name][0]}: {', '.join(map(str, sorted(found[name])))} bytes "
        f"in the plan, {size_bytes} by the formula"
        for name, size_bytes in expected.items()
        if found[name] != {size_bytes}
    ]


def parts_at_peak(plan: Plan) -> dict[str, int]:
    """Return what is there when a plan's step is fullest, by names of :data:`PARTS`."""
    parts = dict.fromkeys(PARTS, 0)
    position = plan.trace.peak_step()
    before = Schedule(plan.schedule.steps[:position])
    platform = single_device(kind=plan.graph.device_kinds[0])
    live = set(simulate(plan.graph, platform, before).live_after[0])
    step = plan.schedule.steps[position]
    if isinstance(step, Compute):
        live.update(plan.graph.ops[step.op].writes)
        parts["workspace"] = plan.graph.ops[step.op].workspace_bytes[0]
    known: dict[int, str] = {}
    for kind, owner, storages in _gathering(plan):
        is_whole = kind in ("received", "whole")
        part = ("root" if owner == _ROOT else "layers") if is_whole else kind
        known.update(dict.fromkeys(storages, part))
    roles = {Role.PARAMETER: "parameters", Role.OPTIMIZER_STATE: "optimizer_state"}
    for index, storage in enumerate(plan.graph.storages):
        if storage.is_resident or index in live:
            part = known.get(index) or roles.get(storage.role, "others")
            parts[part] += storage.size_bytes
    return parts


def _op_at_peak(plan: Plan) -> str:
    step = plan.schedule.steps[plan.trace.peak_step()]
    return plan.graph.ops[step.op].name if isinstance(step, Compute) else ""


def newest_lines(results: Path) -> list[dict[str, Any]]:
    """Return the newest line of each number of processes, of the whole model."""
    lines = (line for line in read(results) if line["layers"] == LAYERS)
    newest = {line["processes"]: line for line in lines}
    return [newest[count] for count in sorted(newest)]


def scale_table(results: Path) -> str:
    """Return what each number of processes takes, a column for each."""
    lines = newest_lines(results)
    plain = [line["plans"]["plain"] for line in lines]
    smallest = [line["plans"]["smallest"] for line in lines]
    rows: list[Sequence[str]] = [
        [name, formula, *(_compared(line, key) for line in lines)]
        for key, (name, formula) in FORMULAS.items()
    ]
    peaks = [format_bytes(plan["peak_bytes"]) for plan in plain]
    budgets = [format_bytes(plan["peak_bytes"]) for plan in smallest]
    rows += [
        ["peak without recomputation", "", *peaks],
        ["smallest budget", "", *budgets],
        ["more time within it", "", *(f"{plan['overhead']:+.2%}" for plan in smallest)],
        [
            "planned in, without recomputation",
            "",
            *(seconds(plan["planning_s"]) for plan in plain),
        ],
        [
            "most memory of the process that plans",
            "",
            *(format_bytes(line["process_bytes"]) for line in lines),
        ],
        ["other load while planning", "", *map(load, lines)],
    ]
    counts = [f"{line['processes']} processes" for line in lines]
    return table(["bytes of each process", "formula", *counts], rows)


def _compared(line: Mapping[str, Any], key: str) -> str:
    """Return bytes if both plans have those of the formula, otherwise all of them."""
    formula = line["formula_bytes"][key]
    found = [plan["bytes"][key] for plan in line["plans"].values()]
    if all(size_bytes == formula for size_bytes in found):
        return format_bytes(formula)
    return f"**{' and '.join(map(str, found))} B, by the formula {formula} B**"


def scale_figure(results: Path) -> Axes:
    """Draw what is there at the peak over the number of processes."""
    ax = Figure(figsize=(8, 4.5), layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    lines = newest_lines(results)
    plans = [line["plans"][way] for line in lines for way in _WAYS]
    places = [3 * i + j for i in range(len(lines)) for j in range(len(_WAYS))]
    heights = [0.0] * len(plans)
    for key, (name, colour) in PARTS.items():
        sizes = [plan["peak_parts_bytes"][key] / 2**30 for plan in plans]
        ax.bar(places, sizes, 0.9, bottom=heights, color=colour, label=name)
        heights = [a + b for a, b in zip(heights, sizes, strict=True)]
    ax.set_xticks(
        [place + 0.5 for place in places[:: len(_WAYS)]],
        [f"{line['processes']} processes" for line in lines],
    )
    ax.set_ylabel("at the peak of each process, GiB")
    ax.set_title(f"left: {_WAYS['plain']}; right: {_WAYS['smallest']}", fontsize=10)
    entries = ax.get_legend_handles_labels()
    ax.legend(
        *(found[::-1] for found in entries),
        frameon=False,
        fontsize="small",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return ax


def write(results: Path) -> None:
    """Write the table of the page, and the picture beside it."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(fill_place(page, STUDY, scale_table(results)), encoding="utf-8")
    save_figure(scale_figure(results), FIGURE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan for each number of processes in a process of its own, or write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.scale", description=__doc__
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--processes", type=int, help="only so many")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = options.results / f"{STUDY}.jsonl"
    if options.tables:
        write(results)
        return 0
    if options.child:
        case = {name: getattr(options, name) for name in _CASE}
        line = {"study": STUDY, **case, **study(**case)}
        append(results, {**line, **environment()})
        print(line)
        for difference in line["differences"]:
            print(difference, file=sys.stderr)
        return 1 if line["differences"] else 0
    cases = {
        f"{count} processes": [
            *("--layers", str(options.layers), "--tokens", str(options.tokens)),
            *("--processes", str(count), "--results", str(options.results)),
        ]
        for count in ([options.processes] if options.processes else PROCESSES)
    }
    return run_children("studies.scale", cases, limit_s=_LIMIT_S, variables={})


if __name__ == "__main__":
    sys.exit(main())
