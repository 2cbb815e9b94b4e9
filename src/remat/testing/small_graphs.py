"""Graphs of a few ops: one by its edges, or all that there are."""

from collections.abc import Iterator
from itertools import product

from remat.core.graph import Op, Phase, Storage, TrainingGraph


def joint_graph(
    sizes: list[int], costs: list[int], reads: list[list[int]], forward_count: int
) -> TrainingGraph:
    """Return a graph of ops with an output each; nobody keeps what nobody reads.

    Parameters
    ----------
    sizes, costs
        Bytes of an op's output, and its time in nanoseconds, per op.
    reads
        The ops whose outputs an op reads, per op.
    forward_count
        The ops of forward; the others are backward ops.
    """
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
