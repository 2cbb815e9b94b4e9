"""The canonical strategy as a schedule that the judge can execute.

A segmentation stands for a strategy: forward segment by segment, dropping after each
what no later segment reads; backward from the last segment to the first, recomputing
what was dropped. The paper's cost formulas are statements about exactly this schedule
on the training graph that a forward graph implies, so that
:func:`remat.core.simulator.simulate` reports the formula's peak and overhead.
"""

from collections.abc import Sequence

from remat.algorithms.lower_sets.formula import cached_values, check_segmentation
from remat.algorithms.lower_sets.forward_graph import ForwardGraph, Owed
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.schedule import Boundary, Compute, Discard, Schedule, Step


def implied_training_graph(graph: ForwardGraph) -> TrainingGraph:
    """Return the training graph that the method assumes behind a forward graph.

    With ``n`` values ``v`` in the graph's topological order at positions ``p(v)``: op
    ``p(v)`` computes storage ``v`` from the values it reads, at cost ``T_v``. Op
    ``2 n - 1 - p(v)`` computes its gradient, storage ``n + v`` of ``M_v`` bytes, at
    cost 0; it reads, for every consumer of ``v``, the consumer's gradient and all that
    the consumer reads. It also writes storage ``2 n + v`` of zero bytes, a final
    output, so that no valid schedule leaves a gradient out.

    Raises
    ------
    ValueError
        If the graph charges a segment otherwise than the paper does.
    """
    default = tuple(2 * size for size in graph.memory_bytes)
    if graph.charged_bytes != default or graph.owed is not Owed.CONSUMERS:
        msg = (
            f"{graph.name}: segment_bytes or owed differ from the paper's, for which "
            "alone the implied training graph has the formula's peak"
        )
        raise ValueError(msg)
    count = graph.node_count
    label = [graph.node_name(node) for node in range(count)]
    storages = [
        *(
            Storage(name=label[v], size_bytes=graph.memory_bytes[v])
            for v in range(count)
        ),
        *(
            Storage(name=f"gradient of {label[v]}", size_bytes=graph.memory_bytes[v])
            for v in range(count)
        ),
        *(Storage(name=f"{label[v]} is done", size_bytes=0) for v in range(count)),
    ]
    ops = [
        Op(
            name=label[v],
            reads=graph.predecessors[v],
            writes=(v,),
            cost_ns=(graph.cost[v],),
            workspace_bytes=(0,),
            phase=Phase.FORWARD,
        )
        for v in graph.topological_order
    ]
    for v in reversed(graph.topological_order):
        consumers = graph.successors[v]
        values = {u for w in consumers for u in graph.predecessors[w]}
        ops.append(
            Op(
                name=f"backward of {label[v]}",
                reads=(*sorted(values), *(count + w for w in consumers)),
                writes=(count + v, 2 * count + v),
                cost_ns=(0,),
                workspace_bytes=(0,),
                phase=Phase.BACKWARD,
            )
        )
    return TrainingGraph(
        name=graph.name,
        storages=tuple(storages),
        ops=tuple(ops),
        final_outputs=tuple(range(2 * count, 3 * count)),
    )


def canonical_schedule(
    graph: ForwardGraph, segment_of: Sequence[int], *, charge_last: bool = False
) -> Schedule:
    """Return the canonical strategy of a segmentation, discards at segment ends only.

    Parameters
    ----------
    graph, segment_of
        The graph and a valid segmentation of it.
    charge_last
        Whether the last segment is dropped and recomputed as well, as in the paper.

    Returns
    -------
    Schedule
        For :func:`implied_training_graph`; its peak is the formula's, its recomputation
        the formula's overhead. :func:`remat.core.liveness.insert_discards` moves each
        discard to the last use.
    """
    return Schedule(tuple(_Writer(graph, segment_of).write(charge_last=charge_last)))


class _Writer:
    def __init__(self, graph: ForwardGraph, segment_of: Sequence[int]) -> None:
        self.graph = graph
        self.count = check_segmentation(graph, segment_of)
        self.segment_of = segment_of
        self.members: list[list[int]] = [[] for _ in range(self.count)]
        for v in graph.topological_order:
            self.members[segment_of[v]].append(v)
        position = {v: p for p, v in enumerate(graph.topological_order)}
        self.forward_op = position
        self.backward_op = {
            v: 2 * graph.node_count - 1 - p for v, p in position.items()
        }
        self.values: set[int] = set()
        self.gradients: set[int] = set()
        self.steps: list[Step] = []

    def write(self, *, charge_last: bool) -> list[Step]:
        kept = set(cached_values(self.graph, self.segment_of))
        for segment, members in enumerate(self.members):
            self.compute(members)
            if charge_last or segment < self.count - 1:
                self.discard_values(set(members) - kept)
        self.steps.append(Boundary())
        for segment in reversed(range(self.count)):
            self.run_backward(segment)
        return self.steps

    def compute(self, members: Sequence[int]) -> None:
        for v in members:
            if v not in self.values:
                self.steps.append(Compute(self.forward_op[v]))
                self.values.add(v)

    def discard_values(self, values: set[int]) -> None:
        self.steps += [Discard(v) for v in sorted(values)]
        self.values -= values

    def run_backward(self, segment: int) -> None:
        graph = self.graph
        self.compute(self.members[segment])
        for v in reversed(self.members[segment]):
            self.steps.append(Compute(self.backward_op[v]))
            self.gradients.add(v)
        before = {v for v in range(graph.node_count) if self.segment_of[v] < segment}
        owed = {w for v in before for w in graph.successors[v]} - before
        read = {u for w in owed for u in graph.predecessors[w]}
        self.discard_values(self.values - before - read)
        dead = sorted(self.gradients - owed)
        self.steps += [Discard(graph.node_count + v) for v in dead]
        self.gradients -= set(dead)
