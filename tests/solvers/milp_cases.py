"""Graphs for the integer and constraint programs: published oracles, small ones."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from remat.core.graph import TrainingGraph
from remat.testing.small_graphs import joint_graph

ROOT = Path(__file__).parents[2]


@cache
def published() -> list[dict[str, Any]]:
    """Return the single-device instances with proved optimum; none without the file."""
    folder = Path(os.environ.get("REMAT_SHARED", ROOT.parent / "shared"))
    file = folder / "papers" / "milp_oracle.json"
    if not file.is_file():
        return []
    instances = json.loads(file.read_text(encoding="utf-8"))["instances"]
    return [instance for instance in instances if "budget" in instance]


def graph_of(instance: dict[str, Any]) -> TrainingGraph:
    """Return an instance as a training graph: the last node's output is needed."""
    nodes = instance["nodes"]
    return joint_graph(
        [node["size"] for node in nodes],
        [node["cost"] for node in nodes],
        instance["deps"],
        forward_count=sum(not node["bwd"] for node in nodes),
    )


def unit_linear(layers: int) -> TrainingGraph:
    """Return Checkmate's unit linear net: forward layers, a loss, their gradients.

    Each gradient reads the one before it and the value of its layer.
    """
    count = 2 * layers + 1
    reads = [[k - 1] if k else [] for k in range(layers + 1)]
    reads += [[2 * layers - k, k - 1] for k in range(layers + 1, count)]
    # The last gradient is the answer: nobody reads it, and it is dropped at once.
    return joint_graph([1] * count, [1] * count, reads, layers + 1)
