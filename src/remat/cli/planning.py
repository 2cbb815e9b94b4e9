"""What several subcommands do: find the training step, and plan it."""

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import remat
from remat.cli.base import Dynamic, chosen_dynamic
from remat.core.errors import FileFormatError, UsageError
from remat.core.graph import TrainingGraph
from remat.core.hardware import Hardware
from remat.core.platform import Platform
from remat.files.documents import document_kind
from remat.files.serialisation import load_graph
from remat.planning.device_estimates import DeviceComparison
from remat.planning.plan import Plan, load_plan
from remat.planning.several_devices import Budget
from remat.report.progress import progress_bar
from remat.solvers.base import ProgressCallback

if TYPE_CHECKING:
    from remat.cli.workload import Workload
    from remat.training.request import PlanOptions


def check_source(options: argparse.Namespace) -> None:
    """Refuse both or neither of a factory and a graph file.

    Raises
    ------
    UsageError
        If not exactly one of them is given.
    """
    if (options.factory is None) is (options.graph is None):
        found = "both are given" if options.graph else "none is given"
        msg = f"give either FACTORY or --graph FILE; {found}"
        raise UsageError(msg)
    if options.graph is not None and options.estimated:
        msg = "--estimated has no effect with --graph: the file holds the costs"
        raise UsageError(msg)
    if options.graph is not None and options.kernels != "eager":
        msg = "--kernels has no effect with --graph: the file holds the operators"
        raise UsageError(msg)
    if options.graph is not None and options.regions != "auto":
        msg = "--regions has no effect with --graph: the file holds one graph"
        raise UsageError(msg)
    if options.graph is not None and options.in_flight > 1:
        msg = "--in-flight has no effect with --graph: the file holds one pass"
        raise UsageError(msg)
    if options.graph is not None and options.dynamic:
        msg = "--dynamic has no effect with --graph: the file holds one size of each"
        raise UsageError(msg)


def load_graph_of(path: str) -> TrainingGraph:
    """Return the graph in a graph file or in a plan file.

    Raises
    ------
    FileFormatError
        If the file is neither, or damaged.
    """
    kind = document_kind(path)
    if kind == "plan":
        return load_plan(path).graph
    if kind == "graph":
        return load_graph(path)
    msg = f"{path}: the file holds a {kind}, but a graph or a plan is needed"
    raise FileFormatError(msg)


def plan_options(
    options: argparse.Namespace,
    workload: "Workload",
    *,
    platform: Platform | None,
    progress: ProgressCallback,
) -> "PlanOptions":
    """Return what the command line says of how to plan a training step.

    Raises
    ------
    UsageError
        If what is to vary is not in the batch, or options contradict each other.
    """
    dynamic = chosen_dynamic(options)
    if options.kernels != "eager":
        if options.regions not in ("auto", "whole"):
            msg = f"--regions {options.regions} runs eager kernels; leave out --kernels"
            raise UsageError(msg)
        if dynamic is not None:
            msg = "--dynamic runs eager kernels; leave out --kernels"
            raise UsageError(msg)
    if dynamic is not None:
        _check_dynamic(dynamic, workload)
    return {
        "optimizer": workload.optimizer,
        "loss": workload.loss,
        "platform": platform,
        "solver": options.solver,
        # A curve has none.
        "objective": getattr(options, "objective", "serial"),
        "time_limit": options.time_limit,
        "gap": getattr(options, "gap", 0.0),
        "seed": options.seed,
        "costs": "estimated" if options.estimated else "measured",
        "kernels": options.kernels,
        "regions": options.regions,
        "dynamic": dynamic,
        "in_flight": options.in_flight,
        "progress": progress,
    }


def _check_dynamic(dynamic: Dynamic, workload: "Workload") -> None:
    # Imports torch, as who loaded the workload did.
    from remat.training.shape_ranges import ShapeRanges, checked_shapes  # noqa: PLC0415

    try:
        ranges = ShapeRanges.of(workload.model, checked_shapes(dynamic))
        ranges.check(workload.args, workload.kwargs)
    except (TypeError, ValueError) as error:
        msg = f"--dynamic: {error}"
        raise UsageError(msg) from error


def plan_workload(
    options: argparse.Namespace,
    *,
    budget: Budget | None,
    platform: Platform | None = None,
    solver: str | None = None,
) -> Plan:
    """Plan the step that the factory builds; install nothing.

    ``solver`` replaces what the options say.
    """
    # Imports torch, which plans of graph files do without.
    from remat.cli.workload import load_workload  # noqa: PLC0415

    workload = load_workload(options.factory, options.script_arguments)
    devices = getattr(options, "device", None)
    with progress_bar(is_quiet=options.quiet) as progress, _autocast(options):
        how = plan_options(options, workload, platform=platform, progress=progress)
        if solver is not None:
            how["solver"] = solver
        if devices:
            how["device"] = devices[0]
        return remat.plan(
            workload.model, workload.args, workload.kwargs, budget=budget, **how
        )


def compare_workload(
    options: argparse.Namespace, devices: Sequence[Hardware]
) -> DeviceComparison:
    """Return what the step that the factory builds takes on devices."""
    # Imports torch, which plans of graph files do without.
    from remat.cli.workload import load_workload  # noqa: PLC0415

    workload = load_workload(options.factory, options.script_arguments)
    with progress_bar(is_quiet=options.quiet) as progress, _autocast(options):
        how = plan_options(options, workload, platform=None, progress=progress)
        return remat.compare_devices(
            workload.model, workload.args, workload.kwargs, devices=devices, **how
        )


def _autocast(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """Return the autocast that a step is planned under."""
    name = getattr(options, "autocast", None)
    if name is None:
        return nullcontext()
    import torch  # noqa: PLC0415

    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast("cpu", dtype=types[name])
