"""Lower bounds on peak and on cost, independent of every solver."""

from remat.core.graph import Phase, TrainingGraph
from remat.core.problem import Problem


def required_ops(graph: TrainingGraph) -> frozenset[int]:
    """Return the ops that every valid schedule runs at least once.

    See :attr:`remat.core.graph.TrainingGraph.required_ops`.
    """
    return graph.required_ops


def cost_bound_ns(problem: Problem) -> int:
    """Return a time that no schedule of the problem can beat, serially.

    Every required op runs at least once, each at best on its cheapest device.
    """
    graph = problem.graph
    kinds = {graph.kind_index(device.kind) for device in problem.platform.devices}
    total = 0
    for index in required_ops(graph):
        costs = [graph.ops[index].cost_ns[kind] for kind in kinds]
        total += min((cost for cost in costs if cost is not None), default=0)
    return total


def peak_bound_bytes(graph: TrainingGraph, kind: str | None = None) -> int:
    """Return bytes that every schedule on one device needs at some moment.

    The largest of: resident bytes plus one required op's inputs, outputs and
    workspace, beside what the caller holds if the op is of the backward pass; resident
    bytes plus what must be live at the boundary; resident bytes plus what must be live
    at the end.
    """
    kind_index = 0 if kind is None else graph.kind_index(kind)

    def transient(storages: set[int]) -> int:
        return sum(
            graph.storages[s].size_bytes
            for s in storages
            if not graph.storages[s].is_resident
        )

    resident = sum(s.size_bytes for s in graph.storages if s.is_resident)
    needs = [
        transient({*graph.forward_outputs, *graph.tangents}),
        transient(set(graph.final_outputs)),
    ]
    for index in required_ops(graph):
        op = graph.ops[index]
        live = {*op.reads, *op.writes}
        if op.phase is Phase.BACKWARD:
            live |= graph.held_outputs
        needs.append(transient(live) + op.workspace_bytes[kind_index])
    return resident + max(needs)
