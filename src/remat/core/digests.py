"""Digests that are equal for graphs, and schedules, that planning cannot tell apart."""

import hashlib
import json

from remat.core.graph import TrainingGraph


def graph_digest(graph: TrainingGraph, *, with_names: bool = False) -> str:
    """Return the SHA-256 of all of a graph that a plan depends on, in hexadecimal.

    Times, sizes, what reads and writes what, and in which order ops are listed. Source
    lines count in no case, and names only if that is asked for: solvers know none.
    """
    parts: list[object] = [
        graph.device_kinds,
        graph.forward_outputs,
        graph.tangents,
        graph.final_outputs,
        [(s.size_bytes, s.role, s.is_resident, s.home) for s in graph.storages],
        [
            (
                op.reads,
                op.writes,
                op.cost_ns,
                op.workspace_bytes,
                op.phase,
                op.is_recomputable,
                op.is_ordered,
                op.is_external,
            )
            for op in graph.ops
        ],
    ]
    if with_names:
        parts += [[s.name for s in graph.storages], [op.name for op in graph.ops]]
    return digest(parts)


def digest(value: object) -> str:
    """Return the SHA-256 of a value that JSON knows, in hexadecimal."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
