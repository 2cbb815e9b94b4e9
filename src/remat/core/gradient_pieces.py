"""Which gradients leave a backward pass together, and when.

A gradient that autograd adds to an existing one is gone as soon as it has been added.
A compiled backward pass returns all gradients at its end, so that without more they
would all be there beside those that exist. They leave in pieces instead
(:mod:`remat.runtime.early_gradients`): a graph holds an op for each piece, which reads
it, so that plans know when its blocks are free. Where optimizers step in backward, each
gradient is gone as soon as its parameter has been stepped, and leaves so as well. What
hooks may change leaves when nothing reads it any more.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from remat.core.graph import TrainingGraph

Piece: TypeAlias = tuple[int, ...]
"""Positions of gradients among all that a backward pass returns."""

LEAST_BYTES = 1 << 20
"""Smaller gradients leave together: handing on a piece takes about 24 us."""

ADDING = "adding to the gradients that exist"
"""Name of the ops that hand over a piece."""

STEPPING = "hooks that step parameters in backward"
"""Name of those by which parameters may change, too."""

_MOST_PIECES = 64


def divided(ready: Sequence[tuple[Piece, int]], piece_bytes: int) -> tuple[Piece, ...]:
    """Return gradients in pieces of at least so many bytes, but not too many pieces.

    Parameters
    ----------
    ready
        What is ready at once, with its bytes, in order.
    piece_bytes
        The last piece may be smaller.
    """
    least_bytes = max(piece_bytes, sum(size for _, size in ready) // _MOST_PIECES)
    pieces: list[list[int]] = []
    held_bytes = least_bytes
    for positions, size_bytes in ready:
        if held_bytes >= least_bytes:
            pieces.append([])
            held_bytes = 0
        pieces[-1] += positions
        held_bytes += size_bytes
    return tuple(map(tuple, pieces))


def added_pieces(
    graph: TrainingGraph,
    gradients: Mapping[int, Sequence[int]],
    changed: Mapping[int, Iterable[int]],
    turns: Mapping[int, int],
) -> dict[int, Piece]:
    """Return in which pieces gradients leave that are added to existing ones.

    So do those that are let go as soon as their parameters have been stepped.

    Parameters
    ----------
    graph
        The traced step.
    gradients
        Per storage of such gradients their positions.
    changed
        Per storage of such gradients the storages that may change when it leaves, and
        that no other op reads from then on.
    turns
        Per position when autograd comes to the gradient without pieces: they leave in
        that order, or as they are ready where it is not known.

    Returns
    -------
    dict
        The pieces, by the op after which each leaves, in that order; empty where all
        together are small.
    """
    ready_ops = ready_at(graph, {*gradients, *chain(*changed.values())})
    ops = {
        storage: max(ready_ops[s] for s in (storage, *changed.get(storage, ())))
        for storage in gradients
    }

    def turn(storage: int) -> tuple[int, int]:
        return max(turns.get(p, 0) for p in gradients[storage]), ops[storage]

    at_once: dict[int, list[int]] = {}
    op = 0
    for storage in sorted(gradients, key=turn):
        op = max(op, ops[storage])
        at_once.setdefault(op, []).append(storage)
    ready: list[tuple[Piece, int]] = []
    ends: dict[int, int] = {}
    for op, storages in sorted(at_once.items()):
        positions = [position for s in storages for position in gradients[s]]
        size_bytes = sum(graph.storages[s].size_bytes for s in storages)
        ready.append((tuple(positions), size_bytes))
        ends.update(dict.fromkeys(positions, op))
    all_bytes = sum(size_bytes for _, size_bytes in ready)
    if all_bytes < LEAST_BYTES or graph.forward_count == len(graph.ops):
        return {}
    return {ends[piece[-1]]: piece for piece in divided(ready, LEAST_BYTES)}


def ready_at(graph: TrainingGraph, storages: Iterable[int]) -> dict[int, int]:
    """Return the op of the backward pass after which no other one needs a storage.

    What the forward pass has made is ready after the first.
    """
    ready = dict.fromkeys(storages, graph.forward_count)
    for index in range(graph.forward_count, len(graph.ops)):
        op = graph.ops[index]
        ready.update((s, index) for s in (*op.reads, *op.writes) if s in ready)
    return ready
