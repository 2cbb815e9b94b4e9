"""Graphs for the integer and constraint programs: published oracles, small ones."""

import json
import os
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from remat.graph import Op, Phase, Storage, TrainingGraph

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


def joint_graph(
    sizes: list[int], costs: list[int], reads: list[list[int]], forward_count: int
) -> TrainingGraph:
    """Return a graph of ops with an output each; nobody keeps what nobody reads."""
    read = {s for sources in reads for s in sources}
    storages = [Storage(name=f"s{k}", size_bytes=sizes[k]) for k in sorted(read)]
    index = {k: i for i, k in enumerate(sorted(read))}
    ops = [
        Op(
            name=f"op{k}",
            reads=tuple(index[s] for s in sources),
            writes=(index[k],) if k in read else (),
            cost_ns=(costs[k],),
            workspace_bytes=(0 if k in read else sizes[k],),
            phase=Phase.FORWARD if k < forward_count else Phase.BACKWARD,
        )
        for k, sources in enumerate(reads)
    ]
    return TrainingGraph(name="joint", storages=tuple(storages), ops=tuple(ops))


def all_graphs(op_count: int) -> Iterator[TrainingGraph]:
    """Yield a graph for every set of edges among ``op_count`` ops."""
    pairs = [(i, k) for k in range(op_count) for i in range(k)]
    for chosen in product((False, True), repeat=len(pairs)):
        edges = [pair for pair, is_in in zip(pairs, chosen, strict=True) if is_in]
        reads = [[i for i, k in edges if k == op] for op in range(op_count)]
        yield joint_graph(
            [3, 1, 2, 4, 1, 2][:op_count],
            [5, 2, 7, 3, 4, 1][:op_count],
            reads,
            (op_count + 1) // 2,
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
