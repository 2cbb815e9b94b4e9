"""Segments: from segments of the forward pass to an order of computations.

Every required forward op has a *segment*, a number that never decreases along what the
ops read. Forward runs segment by segment. What a later segment reads is kept, and so is
the last segment, since backward starts in it; everything else goes, and is recomputed,
as far as backward needs it, when backward first asks for it. Backward runs segment by
segment too, the last one first.

The paper's canonical strategy [1]_ is of this form; what differs here:

* a segment is of ops and what is kept are storages, so of an op with several outputs
  only those are kept that a later segment reads;
* only what backward goes on to use is recomputed;
* outputs of ops that may run only once are kept wherever they lie;
* freeing is that of :mod:`remat.core.liveness`, so memory is counted on true bytes.

References
----------
.. [1] M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama. A graph theoretic
   framework of recomputation algorithms for memory-efficient backpropagation. NeurIPS
   2019: canonical strategies.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from remat.core.bounds import required_ops
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY


class SegmentedGraph:
    """A training graph, ready to be cut into segments of forward in many ways."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        required = required_ops(graph)
        self.forward = [op for op in range(graph.forward_count) if op in required]
        """Required forward ops, in graph order."""
        self.backward = [
            op for op in range(graph.forward_count, len(graph.ops)) if op in required
        ]
        """Required backward ops, in graph order."""

    @cached_property
    def predecessors(self) -> dict[int, tuple[int, ...]]:
        """Per required op, the ops that must have run before its first run.

        These are the producers of what it reads; for an op that advances hidden state,
        the one before it that does; and for work of the caller, everything before it,
        as it is itself before everything after it.
        """
        ops, producers = self.graph.ops, self.graph.producers
        found: dict[int, tuple[int, ...]] = {}
        for phase in (self.forward, self.backward):
            ordered: int | None = None
            barrier: int | None = None
            since: list[int] = []
            for op in phase:
                before = [producers[storage] for storage in ops[op].reads]
                before.append(barrier)
                if ops[op].is_ordered:
                    before.append(ordered)
                    ordered = op
                if ops[op].is_external:
                    before.extend(since)
                    barrier, since = op, []
                since.append(op)
                found[op] = tuple({p for p in before if p is not None and p != op})
        return found

    def order(
        self, segment_of: Mapping[int, int], *, reorders_backward: bool = True
    ) -> list[int]:
        """Return the order that keeps what crosses segments and recomputes the rest.

        Parameters
        ----------
        segment_of
            The segment of every required forward op, 0 or more; an op's segment is at
            least that of each of its :attr:`predecessors`.
        reorders_backward
            Whether backward runs segment by segment; if not, in graph order.

        Returns
        -------
        list[int]
            Op indices and the boundary, for
            :func:`remat.core.liveness.schedule_from_order`. Ops that no output needs
            are left out.

        Notes
        -----
        Each forward op runs at most twice. Time O(total reads of the graph), apart
        from sorting.
        """
        forward = sorted(self.forward, key=lambda op: (segment_of[op], op))
        is_kept = self._kept(segment_of)
        backward = self.backward
        if reorders_backward:
            lost = {
                storage: segment_of[producer]
                for storage, producer in enumerate(self.graph.producers)
                if producer is not None and not is_kept[storage]
            }
            turn = self.backward_segments(segment_of, lost)
            backward = sorted(backward, key=lambda op: (-turn[op], op))
        order = [*forward, BOUNDARY]
        is_live = list(is_kept)
        for op in backward:
            order += self._recomputed(self.graph.ops[op].reads, is_live)
            order.append(op)
        return order + self._recomputed(self.graph.final_outputs, is_live)

    def kept(self, segment_of: Mapping[int, int]) -> frozenset[int]:
        """Return the storages that stay from forward to their last use."""
        kept = self._kept(segment_of)
        return frozenset(storage for storage, stays in enumerate(kept) if stays)

    def _kept(self, segment_of: Mapping[int, int]) -> list[bool]:
        """Return per storage whether it stays from forward to its last use."""
        graph = self.graph
        last = max(segment_of.values(), default=0)
        at_boundary = set(graph.forward_outputs)
        return [
            producer is None
            or storage in at_boundary
            or producer not in segment_of
            or segment_of[producer] == last
            or not graph.ops[producer].is_recomputable
            or any(
                reader in segment_of and segment_of[reader] != segment_of[producer]
                for reader in graph.consumers[storage]
            )
            for storage, producer in enumerate(graph.producers)
        ]

    def backward_segments(
        self, segment_of: Mapping[int, int], latest: Mapping[int, int]
    ) -> dict[int, int]:
        """Return the segment in whose turn each backward op runs.

        The latest in which what the op reads is there, and no later than what it
        depends on. Work of the caller comes last.

        Parameters
        ----------
        segment_of
            As for :meth:`order`.
        latest
            Per storage that is not there all the time, the latest segment in whose
            turn it is.
        """
        last = max(segment_of.values(), default=0)
        turn: dict[int, int] = {}
        for op in self.backward:
            turns = [turn[p] for p in self.predecessors[op] if p in turn]
            reads = self.graph.ops[op].reads
            turns += [latest[storage] for storage in reads if storage in latest]
            is_last = self.graph.ops[op].is_external
            turn[op] = 0 if is_last else min(turns, default=last)
        return turn

    def _recomputed(self, storages: Sequence[int], is_live: list[bool]) -> list[int]:
        """Return the forward ops to run again for ``storages``, in graph order."""
        ops, producers = self.graph.ops, self.graph.producers
        missing = [s for s in storages if not is_live[s]]
        again: set[int] = set()
        while missing:
            producer = producers[missing.pop()]
            if producer is None or producer in again:
                continue
            again.add(producer)
            missing.extend(s for s in ops[producer].reads if not is_live[s])
        for producer in again:
            for storage in ops[producer].writes:
                is_live[storage] = True
        return sorted(again)
