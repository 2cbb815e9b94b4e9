"""The two pictures of docs/lower-sets.md: segments, and memory over one step.

``python -m studies.lower_sets_pictures`` captures the study's U-Net, measures its
operators, and draws it at 80 % of its plain peak. Nothing is trained.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import remat
from remat.algorithms.lower_sets.families import all_lower_sets
from remat.algorithms.lower_sets.programs import (
    LowerSetObjective,
    LowerSetQuery,
    plan_lower_sets,
    smallest_budget,
)
from remat.core.graph import TrainingGraph
from remat.planning.one_device import plan_graph
from remat.reductions.forward_values import reduce_to_forward_values
from remat.report.figures import compare_timelines, save_figure
from remat.report.segments import segments_figure
from remat.report.timelines import plain_timeline, planned_timeline
from studies.models import MODELS, Options
from studies.record import ROOT

IMAGES = ROOT / "docs" / "images"
MODEL = "unet"
BUDGET_PERCENT = 80
SLACK = 1.25
"""Budget of the segments drawn, over the smallest that the program can keep to."""


def captured() -> TrainingGraph:
    """Return the training graph of the study's U-Net."""
    workload = MODELS[MODEL](Options())
    plan = remat.plan(
        workload.model,
        workload.args,
        workload.kwargs,
        budget=2**50,
        loss=workload.loss,
        solver="store-all",
    )
    return replace(plan.graph, name="U-Net")


def draw_segments(graph: TrainingGraph) -> None:
    values = reduce_to_forward_values(graph)
    family = None if values is None else all_lower_sets(values.graph, 100_000)
    if values is None or family is None:
        msg = f"{graph.name} cannot be enumerated; choose another model"
        raise SystemExit(msg)
    forward = replace(values.graph, name=graph.name)
    least = smallest_budget(forward, family).peak_bytes
    # The coarsest segments that fit are the easiest to see.
    query = LowerSetQuery(
        budget_bytes=int(SLACK * least), objective=LowerSetObjective.MOST_OVERHEAD
    )
    found = plan_lower_sets(forward, family, query)
    ax = segments_figure(forward, found.segment_of)
    save_figure(ax, IMAGES / "lower-sets-segments.svg")


def draw_memory(graph: TrainingGraph) -> None:
    plain = plain_timeline(graph)
    budget_bytes = plain.peak_bytes * BUDGET_PERCENT // 100
    timelines = {"plain": plain}
    # Chen's method has one answer, whatever the budget.
    for label, solver, limit_bytes in (
        ("lower sets", "lower-sets", budget_bytes),
        ("Chen", "chen-lower-sets", plain.peak_bytes - 1),
    ):
        plan = plan_graph(graph, budget=limit_bytes, solver=solver)
        timelines[label] = planned_timeline(plan)
    ax = compare_timelines(timelines, budget_bytes=budget_bytes)
    ax.set_title(f"{graph.name}: memory of one training step within {BUDGET_PERCENT} %")
    save_figure(ax, IMAGES / "lower-sets-memory.svg")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw both pictures."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    graph = captured()
    draw_segments(graph)
    draw_memory(graph)
    print(f"wrote {IMAGES / 'lower-sets-segments.svg'} and lower-sets-memory.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
