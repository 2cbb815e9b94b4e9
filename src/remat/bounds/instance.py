"""A training step on one device, as the bounds see it: plain numbers and precedence.

Nodes are the ops by their indices, then the boundary, then the end of the step. The
boundary reads the forward outputs and writes the tangents; the end reads the final
outputs. Resident storages are left out: they are always there, and their bytes are
taken off the budget. Ops that no valid schedule needs are left out, too: a schedule
without their runs is valid, no slower, and nowhere larger.

Node a *precedes* node b if a runs for the first time before b does in every valid
schedule: b reads what a writes; both are ordered, a first; a must have run before the
boundary, and b is the boundary; a is the boundary, and b an op of backward; b is the
end; and so on through others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.core.graph import Phase, TrainingGraph


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A step on one device as plain numbers; lists are by node, or by storage.

    Parameters
    ----------
    op_count
        Number of ops; as a node it is the boundary, and the next number the end.
    order
        The nodes that every schedule has, in an order in which they can run.
    reads, writes
        Per node, storages that are not resident.
    cost_ns, workspace_bytes, may_rerun
        Per node; the boundary and the end take nothing and happen once.
    size_bytes
        Per storage.
    producer
        Per storage the node that writes it, -1 for residents.
    readers
        Per storage the nodes of ``order`` that read it.
    predecessors
        Per node, nodes that precede it; others follow from these.
    held
        Storages that stay from the boundary on.
    resident_bytes
        Live all the time.
    """

    op_count: int
    order: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    cost_ns: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    may_rerun: tuple[bool, ...]
    size_bytes: tuple[int, ...]
    producer: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    held: frozenset[int]
    resident_bytes: int

    @property
    def boundary(self) -> int:
        """The node of the boundary."""
        return self.op_count

    @property
    def end(self) -> int:
        """The node of the end."""
        return self.op_count + 1

    @cached_property
    def ops(self) -> tuple[int, ...]:
        """The ops among the nodes of ``order``."""
        return tuple(k for k in self.order if k < self.op_count)

    @cached_property
    def items(self) -> tuple[int, ...]:
        """The storages that nodes of ``order`` write, in that order."""
        return tuple(i for k in self.order for i in self.writes[k])

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Per node, the nodes that have it among their predecessors."""
        found: list[list[int]] = [[] for _ in self.predecessors]
        for node in self.order:
            for earlier in self.predecessors[node]:
                found[earlier].append(node)
        return tuple(map(tuple, found))

    def bytes_of(self, storages: Sequence[int] | frozenset[int] | set[int]) -> int:
        """Return the bytes of some storages."""
        return sum(self.size_bytes[i] for i in storages)

    def needed_bytes(self, node: int) -> int:
        """Return what a node needs while it runs: reads, writes and workspace."""
        both = {*self.reads[node], *self.writes[node]}
        return self.bytes_of(both) + self.workspace_bytes[node]

    def is_backward(self, node: int) -> bool:
        """Whether a node can only run after the boundary."""
        return node == self.end or (
            node != self.boundary and self.boundary in self.predecessors[node]
        )


def instance_of(graph: TrainingGraph, kind: str | None = None) -> Instance | None:
    """Return a step as the bounds see it; linear in the graph.

    Parameters
    ----------
    graph
        The step.
    kind
        The kind of the one device; by default the first of the graph.

    Returns
    -------
    Instance or None
        ``None`` where the bounds say nothing: a storage is at home on a second device,
        or a needed op cannot run on the first.
    """
    kind_index = 0 if kind is None else graph.kind_index(kind)
    required = graph.required_ops
    costs = [op.cost_ns[kind_index] for op in graph.ops]
    if any(s.home for s in graph.storages) or any(costs[k] is None for k in required):
        return None
    count, forward = len(graph.ops), graph.forward_count
    boundary, end = count, count + 1
    moving = [not s.is_resident for s in graph.storages]

    def of(storages: Sequence[int]) -> tuple[int, ...]:
        return tuple(i for i in storages if moving[i])

    reads = [of(op.reads) for op in graph.ops]
    writes = [op.writes for op in graph.ops]
    reads += [of(graph.forward_outputs), of(graph.final_outputs)]
    writes += [graph.tangents, ()]
    order = [k for k in range(forward) if k in required]
    order.append(boundary)
    order += [k for k in range(forward, count) if k in required]
    order.append(end)
    producer = [-1] * len(graph.storages)
    for node, written in enumerate(writes):
        for storage in written:
            producer[storage] = node
    readers: list[list[int]] = [[] for _ in graph.storages]
    for node in order:
        for storage in reads[node]:
            readers[storage].append(node)
    return Instance(
        op_count=count,
        order=tuple(order),
        reads=tuple(reads),
        writes=tuple(writes),
        cost_ns=(*(cost or 0 for cost in costs), 0, 0),
        workspace_bytes=(*(op.workspace_bytes[kind_index] for op in graph.ops), 0, 0),
        may_rerun=(*(op.is_recomputable for op in graph.ops), False, False),
        size_bytes=tuple(s.size_bytes for s in graph.storages),
        producer=tuple(producer),
        readers=tuple(map(tuple, readers)),
        predecessors=_predecessors(graph, order, reads, producer),
        held=frozenset(of(tuple(graph.held_outputs))),
        resident_bytes=graph.resident_bytes(),
    )


def _predecessors(
    graph: TrainingGraph,
    order: Sequence[int],
    reads: Sequence[Sequence[int]],
    producer: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    count = len(graph.ops)
    boundary, end = count, count + 1
    found: list[set[int]] = [set() for _ in range(count + 2)]
    last_ordered: int | None = None
    for node in order:
        found[node].update(producer[i] for i in reads[node])
        if node >= count:
            continue
        op = graph.ops[node]
        if op.is_ordered:
            if last_ordered is not None:
                found[node].add(last_ordered)
            last_ordered = node
        if op.phase is Phase.BACKWARD:
            found[node].add(boundary)
        elif op.is_ordered or not op.writes:
            # Effects of a pass happen in it.
            found[boundary].add(node)
        found[end].add(node)
    found[end].add(boundary)
    return tuple(tuple(sorted(nodes)) for nodes in found)
