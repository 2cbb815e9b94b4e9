"""Frontier-advancing stages: the schedules that Checkmate and Moccasin choose from.

A stage is a run of consecutive ops of the graph that are computed for the first time,
in graph order. Before them, earlier ops may be recomputed, each at most once a stage,
again in graph order. With one op a stage these are Checkmate's stages. The boundary and
the end of the step take part as nodes that are computed once: the boundary reads the
forward outputs and writes the tangents, the end reads the final outputs. Nothing of a
pass is recomputed once the caller's work after that pass has begun.

Source: Jain et al., Checkmate, MLSys 2020, section 4 ("frontier-advancing stages");
the coarser stages: Shah et al., MONeT, ICLR 2021.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat.core.bounds import required_ops
from remat.core.deadline import check_time
from remat.core.graph import Phase
from remat.core.liveness import BOUNDARY
from remat.core.problem import Problem
from remat.search.plain_numbers import plain_numbers
from remat.search.retention_table import weigh_order
from remat.solvers.base import single_device_kind_index

END = -2
"""Stands for the end of the step, where other nodes have the index of an op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An op, the boundary or the end, over items.

    Parameters
    ----------
    op
        Index of the op, :data:`remat.core.liveness.BOUNDARY` or :data:`END`.
    reads, writes
        Items read, and items written that some node reads.
    cost_ns
        Time of a run.
    scratch_bytes
        Workspace, and outputs that nobody reads, while it runs.
    is_forward, is_external, may_rerun
        Its pass, whether it is the caller's work, whether it may run more than once.
    """

    op: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost_ns: int
    scratch_bytes: int
    is_forward: bool
    is_external: bool = False
    may_rerun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """First computations of the nodes ``first`` to ``last``, both included.

    Parameters
    ----------
    first, last
        Nodes computed for the first time.
    reruns
        Earlier nodes that may be computed again before them, ascending.
    keepable
        Items made before this stage that it or a later stage can use, ascending.
    """

    first: int
    last: int
    reruns: tuple[int, ...]
    keepable: tuple[int, ...]

    @property
    def active(self) -> tuple[int, ...]:
        """Nodes that may run in this stage, ascending."""
        return (*self.reruns, *range(self.first, self.last + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """A problem on one device, reduced to nodes, items and stages.

    Items are the storages that some node reads and that are not resident.

    Parameters
    ----------
    problem, kind_index
        The problem, and the position of the device's kind in the ops' costs.
    nodes
        In the order of their first computation.
    item_bytes
        Size of each item.
    producers, readers
        Per item, the node that writes it, and the nodes that read it, ascending.
    resident_bytes
        Bytes that are live throughout.
    stages
        In order; together they hold every node once.
    pinned
        Items that are always kept: those without bytes, and small ones if asked for.
    """

    problem: Problem
    kind_index: int
    nodes: tuple[Node, ...]
    item_bytes: tuple[int, ...]
    producers: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    resident_bytes: int
    stages: tuple[Stage, ...]
    pinned: frozenset[int]

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the items that are always kept."""
        return sum(self.item_bytes[item] for item in self.pinned)

    @property
    def first_runs_ns(self) -> int:
        """Time of computing every node once."""
        return sum(node.cost_ns for node in self.nodes)

    @property
    def row_count(self) -> int:
        """About how many rows the tight model of these stages has."""
        rows = 0
        for stage in self.stages:
            reads = sum(len(self.nodes[k].reads) for k in stage.active)
            rows += 2 * reads + 2 * len(stage.active) + 2 * len(stage.keepable)
        return rows

    def order(self, runs: Sequence[Iterable[int]]) -> list[int]:
        """Return the order of computations with these nodes run in each stage."""
        ops = [self.nodes[k].op for nodes in runs for k in sorted(set(nodes))]
        return [op for op in ops if op != END]

    def measure(self, order: Sequence[int]) -> tuple[int, int]:
        """Return cost in nanoseconds and peak in bytes of an order, freeing early."""
        numbers = plain_numbers(self.problem.graph, self.kind_index)
        return weigh_order(numbers, order)

    def complete(self, kept: Sequence[Iterable[int]]) -> list[set[int]]:
        """Return the fewest runs per stage if these items are kept into each stage.

        Parameters
        ----------
        kept
            Per stage, items kept into it from the stage before. Items that cannot be
            kept are left out, and those that could not be made again are added.

        Notes
        -----
        The second phase of Checkmate's rounding: from the last stage and its last node
        backwards, whatever is read and neither kept nor computed is recomputed.
        """
        keeps = [
            (set(items) | self.pinned) & set(stage.keepable)
            for items, stage in zip(kept, self.stages, strict=True)
        ]
        runs: list[set[int]] = [set() for _ in self.stages]
        for t in range(len(self.stages) - 1, -1, -1):
            stage, can_rerun = self.stages[t], set(self.stages[t].reruns)
            runs[t] = set(range(stage.first, stage.last + 1))
            wanted = keeps[t + 1] if t + 1 < len(self.stages) else set[int]()

            def provide(
                item: int, t: int = t, stage: Stage = stage, may: set[int] = can_rerun
            ) -> None:
                producer = self.producers[item]
                if producer >= stage.first or item in keeps[t]:
                    return
                if producer in may:
                    runs[t].add(producer)
                else:
                    keeps[t].add(item)

            for item in wanted:
                provide(item)
            for k in range(stage.last, -1, -1):
                if k in runs[t]:
                    for item in self.nodes[k].reads:
                        provide(item)
        return runs

    def kept_by(self, runs: Sequence[set[int]]) -> list[set[int]]:
        """Return the items that must be kept into each stage for these runs."""
        keeps: list[set[int]] = [set() for _ in self.stages]
        wanted: set[int] = set()
        for t in range(len(self.stages) - 1, -1, -1):
            used = wanted | {i for k in runs[t] for i in self.nodes[k].reads}
            keeps[t] = {i for i in used if self.producers[i] not in runs[t]}
            wanted = keeps[t]
        return keeps

    def runs_of_order(self, order: Sequence[int]) -> list[set[int]] | None:
        """Return runs per stage that keep what an order keeps between its stages.

        ``None`` if the order computes something for the first time out of turn.
        """
        index = {node.op: k for k, node in enumerate(self.nodes)}
        runs: list[set[int]] = [set() for _ in self.stages]
        seen = -1
        stage = 0
        for op in (*order, END):
            if op not in index:
                continue
            k = index[op]
            if k > seen:
                if k != seen + 1:
                    return None
                seen = k
            while self.stages[stage].last < seen:
                stage += 1
            is_new = k >= self.stages[stage].first
            # Recomputations for the next first computation belong to its stage.
            late = seen == self.stages[stage].last and not is_new
            target = stage + late if stage + 1 < len(self.stages) else stage
            runs[target].add(k)
        allowed = [set(stage.active) for stage in self.stages]
        trimmed = [found & may for found, may in zip(runs, allowed, strict=True)]
        return self.complete(self.kept_by(trimmed))


def frontier(
    problem: Problem, backward_ops_per_stage: int = 0, *, pinned_bytes: int = 0
) -> Frontier:
    """Return the frontier of a problem, by Checkmate's stages or by coarser ones.

    Parameters
    ----------
    problem
        For device 0 alone.
    backward_ops_per_stage
        0 for a stage per op. Otherwise forward, with the boundary, is one stage, each
        later stage holds that many backward ops, and backward ops run once only.
    pinned_bytes
        The smallest items are always kept, as many as have these bytes in all.

    Raises
    ------
    SolverUnsuitableError
        If an op cannot run on device 0, or a storage lives elsewhere.
    ValueError
        If ``backward_ops_per_stage`` is negative.

    Notes
    -----
    Time and memory O(stages x reads).
    """
    if backward_ops_per_stage < 0:
        msg = f"backward_ops_per_stage={backward_ops_per_stage}; need 0 or more"
        raise ValueError(msg)
    graph, kind_index = problem.graph, single_device_kind_index(problem)
    required = sorted(required_ops(graph))
    read = set(graph.forward_outputs) | set(graph.final_outputs)
    read.update(s for op in required for s in graph.ops[op].reads)
    storages = [s for s in sorted(read) if not graph.storages[s].is_resident]
    item_of = {s: i for i, s in enumerate(storages)}

    def items(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(item_of[s] for s in indices if s in item_of)

    nodes: list[Node] = []
    boundary_at = sum(op < graph.forward_count for op in required)
    for position, op_index in enumerate([*required, None]):
        if position == boundary_at:
            unread = [s for s in graph.tangents if s not in item_of]
            nodes.append(
                Node(
                    op=BOUNDARY,
                    reads=items(graph.forward_outputs),
                    writes=items(graph.tangents),
                    cost_ns=0,
                    scratch_bytes=sum(graph.storages[s].size_bytes for s in unread),
                    is_forward=True,
                )
            )
        if op_index is None:
            break
        op = graph.ops[op_index]
        unread = [s for s in op.writes if s not in item_of]
        is_forward = op.phase is Phase.FORWARD
        nodes.append(
            Node(
                op=op_index,
                reads=items(op.reads),
                writes=items(op.writes),
                cost_ns=op.cost_ns[kind_index] or 0,
                scratch_bytes=op.workspace_bytes[kind_index]
                + sum(graph.storages[s].size_bytes for s in unread),
                is_forward=is_forward,
                is_external=op.is_external,
                may_rerun=op.is_recomputable
                and (is_forward or not backward_ops_per_stage),
            )
        )
    nodes.append(
        Node(
            op=END,
            reads=items(graph.final_outputs),
            writes=(),
            cost_ns=0,
            scratch_bytes=0,
            is_forward=False,
        )
    )
    producers = [-1] * len(storages)
    readers: list[list[int]] = [[] for _ in storages]
    for k, node in enumerate(nodes):
        for item in node.writes:
            producers[item] = k
        for item in node.reads:
            readers[item].append(k)
    spans = _spans(nodes, backward_ops_per_stage)
    item_bytes = tuple(graph.storages[s].size_bytes for s in storages)
    return Frontier(
        problem=problem,
        kind_index=kind_index,
        nodes=tuple(nodes),
        item_bytes=item_bytes,
        producers=tuple(producers),
        readers=tuple(tuple(found) for found in readers),
        resident_bytes=graph.resident_bytes(),
        stages=tuple(_stage(nodes, producers, span) for span in spans),
        pinned=_smallest(item_bytes, pinned_bytes),
    )


def _smallest(item_bytes: Sequence[int], total_bytes: int) -> frozenset[int]:
    found: set[int] = set()
    for item in sorted(range(len(item_bytes)), key=lambda i: item_bytes[i]):
        total_bytes -= item_bytes[item]
        if total_bytes < 0:
            break
        found.add(item)
    return frozenset(found)


def _spans(nodes: Sequence[Node], backward_ops_per_stage: int) -> list[tuple[int, int]]:
    count = len(nodes)
    if not backward_ops_per_stage:
        return [(k, k) for k in range(count)]
    boundary = next(k for k, node in enumerate(nodes) if node.op == BOUNDARY)
    # The end belongs to the last stage: what it reads, gradients, is rarely dropped.
    starts = range(boundary + 1, max(boundary + 2, count - 1), backward_ops_per_stage)
    ends = [*(start - 1 for start in starts[1:]), count - 1]
    return [(0, boundary), *zip(starts, ends, strict=True)]


def _stage(
    nodes: Sequence[Node], producers: Sequence[int], span: tuple[int, int]
) -> Stage:
    """Return the stage of these first computations, with all that can help it."""
    check_time()
    first, last = span
    keepable: set[int] = set()
    useful: set[int] = set()
    pending = list(range(first, len(nodes)))
    while pending:
        for item in nodes[pending.pop()].reads:
            producer = producers[item]
            if producer < first:
                keepable.add(item)
                if nodes[producer].may_rerun and producer not in useful:
                    useful.add(producer)
                    pending.append(producer)
    reruns = [k for k in sorted(useful) if _may_rerun(nodes, k, first)]
    return Stage(
        first=first,
        last=last,
        reruns=tuple(reruns),
        keepable=tuple(sorted(keepable)),
    )


def _may_rerun(nodes: Sequence[Node], k: int, first: int) -> bool:
    """Return whether node ``k`` may run again just before node ``first`` first runs."""
    is_same_pass = nodes[k].is_forward == nodes[first].is_forward
    if nodes[k].is_external:
        return is_same_pass
    # The caller's work is done in one go: then only more of it may follow.
    previous = nodes[first - 1]
    begun = previous.is_external and previous.is_forward == nodes[first].is_forward
    return not begun
