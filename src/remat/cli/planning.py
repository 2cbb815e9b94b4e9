"""What several subcommands do: find the training step, and plan it."""

import argparse

import remat
from remat.core.errors import FileFormatError, UsageError
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.core.problem import Objectives
from remat.files.documents import document_kind
from remat.files.serialisation import load_graph
from remat.planning.plan import Plan, load_plan
from remat.planning.several_devices import Budget
from remat.report.progress import progress_bar


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


def plan_workload(
    options: argparse.Namespace,
    *,
    budget: Budget | None,
    platform: Platform | None = None,
    solver: str | None = None,
    objective: Objectives = "serial",
) -> Plan:
    """Plan the step that the factory builds; install nothing.

    ``solver`` replaces what the options say.
    """
    # Imports torch, which plans of graph files do without.
    from remat.cli.workload import load_workload  # noqa: PLC0415

    workload = load_workload(options.factory, options.script_arguments)
    with progress_bar(is_quiet=options.quiet) as progress:
        return remat.plan(
            workload.model,
            workload.args,
            workload.kwargs,
            budget=budget,
            optimizer=workload.optimizer,
            loss=workload.loss,
            platform=platform,
            solver=solver or options.solver,
            objective=objective,
            time_limit=options.time_limit,
            seed=options.seed,
            costs="estimated" if options.estimated else "measured",
            kernels=options.kernels,
            progress=progress,
        )
