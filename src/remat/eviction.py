"""Eviction: execute a graph within a limit, losing what is cheapest to lose.

The ops run in graph order. Before each run, storages are evicted until the run fits;
a read that is not live is recomputed first, with the ancestors that are not live
either. The victim has the smallest

    time to recompute it / (its bytes ^ a x its distance to the next use ^ b),

where the future is known: the remaining uses are those of the graph's own order. The
time to recompute counts the op and a share of its ancestors that are not live. An
ancestor that the rest of the step will use in its own right is recomputed sooner or
later anyway, hence the share; one that nobody else needs counts in full.

This is the shape of dynamic tensor rematerialisation [1]_ with Belady's knowledge of
the future [2]_ in the place of staleness.

An op that may run once is never lost while it is needed: its outputs are evicted only
when they have no use left and everything computed from them is live; what was computed
from them is then kept in their place.

References
----------
.. [1] M. Kirisame et al. Dynamic tensor rematerialization. ICLR 2021.
.. [2] L. A. Belady. A study of replacement algorithms for a virtual-storage computer.
   IBM Systems Journal 5(2), 1966.
"""

from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from remat.bounds import required_ops
from remat.graph import TrainingGraph
from remat.liveness import BOUNDARY, store_all_order
from remat.problem import Limits

END = -2
"""Marks the end of the step, where the final outputs are used."""

_NEVER = float("inf")
_PRICE_LIMIT = 24
_CLOSURE_LIMIT = 64
_RETRY_LIMIT = 12
_LAST_RESORT = 1e12
_LEAST_PRICE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRule:
    """How victims are scored.

    Parameters
    ----------
    size_exponent, distance_exponent
        Exponents of the bytes and of the distance to the next use, at least 0.
    ancestor_share
        Share, 0 to 1, of the cost of ancestors that are not live but will be used
        again anyway.
    spare_share
        Share, 0 to 1, of the cost of a storage without uses of its own, as long as
        everything that could be recomputed from it is live.
    """

    size_exponent: float = 1.0
    distance_exponent: float = 1.0
    ancestor_share: float = 0.5
    spare_share: float = 0.01


class _Stuck(Exception):  # noqa: N818 - control flow inside this module
    """The execution cannot go on within the limit."""


class _Execution:
    """Executes a graph in its own order within a limit, and notes what it runs."""

    def __init__(
        self,
        graph: TrainingGraph,
        kind_index: int,
        limit_bytes: int,
        rule: EvictionRule,
        *,
        run_limit: int,
        saved: Container[int] | None,
        limits: Limits,
    ) -> None:
        self.limits = limits
        self.rule = rule
        self.saved = saved
        self.limit_bytes = limit_bytes
        self.run_limit = run_limit
        self.order: list[int] = []
        self.now = 0
        self.storages = graph.storages
        self.is_resident = [s.is_resident for s in graph.storages]
        self.size = [s.size_bytes for s in graph.storages]
        self.reads = [self.transient(op.reads) for op in graph.ops]
        self.writes = [op.writes for op in graph.ops]
        self.cost = [op.cost_ns[kind_index] or 0 for op in graph.ops]
        self.workspace = [op.workspace_bytes[kind_index] for op in graph.ops]
        self.producers = graph.producers
        self.consumers = graph.consumers
        self.may_rerun = [op.is_recomputable for op in graph.ops]
        self.used_bytes = sum(s.size_bytes for s in graph.storages if s.is_resident)
        self.base = self.base_steps(graph)
        self.uses = self.remaining_uses(graph)
        self.make_arrays()

    def transient(self, storages: Sequence[int]) -> tuple[int, ...]:
        return tuple(s for s in storages if not self.is_resident[s])

    @staticmethod
    def base_steps(graph: TrainingGraph) -> list[int]:
        required = required_ops(graph)
        steps = [
            op for op in store_all_order(graph) if op == BOUNDARY or op in required
        ]
        return [*steps, END]

    def remaining_uses(self, graph: TrainingGraph) -> list[list[int]]:
        """Return per storage the base steps that read it, the next one last."""
        uses: list[list[int]] = [[] for _ in graph.storages]
        self.boundary_step = self.base.index(BOUNDARY)
        self.boundary_reads = self.transient(graph.forward_outputs)
        self.boundary_writes = graph.tangents
        self.final_reads = self.transient(graph.final_outputs)
        for step in range(len(self.base) - 1, -1, -1):
            for storage in self.reads_of(self.base[step]):
                uses[storage].append(step)
        return uses

    def reads_of(self, op: int) -> tuple[int, ...]:
        if op == BOUNDARY:
            return self.boundary_reads
        return self.final_reads if op == END else self.reads[op]

    def writes_of(self, op: int) -> tuple[int, ...]:
        if op == BOUNDARY:
            return self.boundary_writes
        return () if op == END else self.writes[op]

    def make_arrays(self) -> None:
        """Share each byte or number between a fast sequence and a NumPy view."""
        count = len(self.size)
        self.live = bytearray(count)
        self.pinned = bytearray(count)
        self.evictable = bytearray(
            producer is not None and self.may_rerun[producer]
            for producer in self.producers
        )
        self.next_use = array("d", [float(u[-1]) if u else _NEVER for u in self.uses])
        self.wanted = array("q", [0]) * count
        self.price = array("d", [0.0]) * count
        self.live_view = np.frombuffer(self.live, dtype=np.uint8)
        self.pinned_view = np.frombuffer(self.pinned, dtype=np.uint8)
        self.evictable_view = np.frombuffer(self.evictable, dtype=np.uint8)
        self.next_use_view = np.frombuffer(self.next_use)
        self.wanted_view = np.frombuffer(self.wanted, dtype=np.int64)
        self.price_view = np.frombuffer(self.price)
        sizes = np.array(self.size, dtype=np.float64)
        self.weight_view = np.maximum(sizes, 1.0) ** self.rule.size_exponent
        self.stale: set[int] = set()

    def run(self) -> list[int]:
        """Return the order of all runs.

        Raises
        ------
        _Stuck
            If the limit is too small for this rule.
        """
        for step, op in enumerate(self.base):
            self.now = step
            if self.limits.is_over:
                raise _Stuck
            self.demand(op)
            self.after_base(op)
        return self.order

    def after_base(self, op: int) -> None:
        for storage in self.reads_of(op):
            uses = self.uses[storage]
            uses.pop()
            if uses:
                self.next_use[storage] = float(uses[-1])
            else:
                self.stale.add(storage)
        if self.saved is not None and op >= 0 and self.now < self.boundary_step:
            for storage in (*self.reads[op], *self.writes[op]):
                self.drop_early(storage)

    def drop_early(self, storage: int) -> None:
        """Drop a storage that forward is done with, unless it is to be saved."""
        if (
            self.saved is not None
            and storage not in self.saved
            and self.live[storage]
            and self.evictable[storage]
            and not (
                self.uses[storage] and self.uses[storage][-1] <= self.boundary_step
            )
        ):
            self.drop(storage)

    def use_of_others(self, storage: int) -> tuple[float, bool]:
        """Return when something computed from ``storage`` is used next, and if lost.

        For a storage without uses of its own. What is lost, and has a use, makes the
        storage needed; what is live and has a use might be lost later.
        """
        lost_use, live_use = _NEVER, _NEVER
        seen = {storage}
        pending = [storage]
        while pending and len(seen) < _CLOSURE_LIMIT:
            source = pending.pop()
            for op in self.consumers[source]:
                if not self.may_rerun[op]:
                    continue
                for output in self.writes[op]:
                    uses = self.uses[output]
                    if self.live[output]:
                        if uses and source == storage:
                            live_use = min(live_use, uses[-1])
                    elif uses:
                        lost_use = min(lost_use, uses[-1])
                    elif output not in seen:
                        seen.add(output)
                        pending.append(output)
        is_needed = lost_use < _NEVER
        return (lost_use if is_needed else live_use), is_needed

    def demand(self, target: int) -> None:
        """Run ``target`` after whatever it reads that is not live."""
        stack = [target]
        self.want(target, 1)
        retries: dict[int, int] = {}
        while stack:
            op = stack[-1]
            missing = [s for s in self.reads_of(op) if not self.live[s]]
            if missing:
                retries[op] = retries.get(op, 0) + 1
                if retries[op] > _RETRY_LIMIT:
                    raise _Stuck
                for ancestor in sorted(self.missing_ancestors(missing), reverse=True):
                    self.want(ancestor, 1)
                    stack.append(ancestor)
                continue
            stack.pop()
            self.want(op, -1)
            if op == target or not self.has_what_is_wanted(op):
                self.execute(op)

    def want(self, op: int, change: int) -> None:
        for storage in self.reads_of(op):
            self.wanted[storage] += change

    def has_what_is_wanted(self, op: int) -> bool:
        return all(self.live[s] or not self.wanted[s] for s in self.writes[op])

    def missing_ancestors(self, missing: list[int]) -> set[int]:
        found: set[int] = set()
        pending = list(missing)
        while pending:
            op = self.producers[pending.pop()]
            if op is None or not self.may_rerun[op]:
                raise _Stuck
            if op not in found:
                found.add(op)
                pending.extend(s for s in self.reads[op] if not self.live[s])
        return found

    def execute(self, op: int) -> None:
        if op == END:
            return
        if len(self.order) >= self.run_limit:
            raise _Stuck
        writes = self.writes_of(op)
        needed = sum(self.size[s] for s in writes)
        needed += 0 if op == BOUNDARY else self.workspace[op]
        excess = self.used_bytes + needed - self.limit_bytes
        if excess > 0:
            reads = self.reads_of(op)
            for storage in reads:
                self.pinned[storage] = 1
            self.evict(excess)
            for storage in reads:
                self.pinned[storage] = 0
        self.order.append(op)
        for storage in writes:
            if not self.live[storage]:
                self.live[storage] = 1
                self.used_bytes += self.size[storage]
                self.mark_stale(storage)

    def mark_stale(self, storage: int) -> None:
        """Note whose price changes with the liveness of ``storage``."""
        self.stale.add(storage)
        self.mark_around(storage, self.ancestors_of)
        self.mark_around(storage, self.results_of)

    def ancestors_of(self, storage: int) -> Sequence[int]:
        producer = self.producers[storage]
        return () if producer is None else self.reads[producer]

    def results_of(self, storage: int) -> list[int]:
        return [s for op in self.consumers[storage] for s in self.writes[op]]

    def mark_around(
        self, storage: int, neighbours: Callable[[int], Sequence[int]]
    ) -> None:
        """Mark the first live storages in one direction, looking through lost ones."""
        seen: set[int] = set()
        pending = [storage]
        while pending and len(seen) < _CLOSURE_LIMIT:
            for other in neighbours(pending.pop()):
                if self.live[other]:
                    self.stale.add(other)
                elif other not in seen:
                    seen.add(other)
                    pending.append(other)

    def update_price(self, storage: int) -> None:
        op = self.producers[storage]
        if op is None:
            return
        is_paid = any(not self.live[s] and self.uses[s] for s in self.writes[op])
        price = self.ancestors_price(op) + (0 if is_paid else self.cost[op])
        # Losing what is free to recompute still counts for more than losing nothing.
        price = max(price, _LEAST_PRICE)
        if not self.uses[storage]:
            self.next_use[storage], is_needed = self.use_of_others(storage)
            price *= 1.0 if is_needed else self.rule.spare_share
        self.price[storage] = price

    def ancestors_price(self, op: int) -> float:
        """Return the share of the cost of the ancestors of ``op`` that are not live."""
        live, uses, reads, producers = self.live, self.uses, self.reads, self.producers
        share, price = self.rule.ancestor_share, 0.0
        seen = {op}
        pending = [op]
        for current in pending:
            for storage in reads[current]:
                if live[storage]:
                    continue
                ancestor = producers[storage]
                if ancestor is None or ancestor in seen:
                    continue
                if uses[storage]:
                    if not share:
                        continue
                    price += share * self.cost[ancestor]
                else:
                    price += self.cost[ancestor]
                seen.add(ancestor)
                pending.append(ancestor)
            if len(seen) > _PRICE_LIMIT:
                break
        return price

    def evict(self, excess_bytes: int) -> None:
        """Evict the cheapest victims until ``excess_bytes`` are free.

        Raises
        ------
        _Stuck
            If everything that may go has gone and it is not enough.
        """
        excess_bytes = self.lose_what_runs_once(excess_bytes, freely=True)
        if excess_bytes <= 0:
            return
        candidates = np.flatnonzero(
            self.live_view & self.evictable_view & (self.pinned_view ^ 1)
        )
        self.stale.update(
            candidates[self.next_use_view[candidates] <= self.now].tolist()
        )
        for storage in self.stale:
            if self.live[storage]:
                self.update_price(storage)
        self.stale.clear()
        is_wanted = self.wanted_view[candidates] > 0
        distance = np.maximum(self.next_use_view[candidates] - self.now, 1.0)
        distance = np.where(is_wanted, 1.0, distance)
        if self.rule.distance_exponent == 0.0:
            distance = np.where(np.isinf(distance), distance, 1.0)
        elif self.rule.distance_exponent != 1.0:
            distance **= self.rule.distance_exponent
        scores = (
            self.price_view[candidates]
            * np.where(is_wanted, _LAST_RESORT, 1.0)
            / self.weight_view[candidates]
            / distance
        )
        for index in np.argsort(scores, kind="stable"):
            if excess_bytes <= 0:
                return
            storage = int(candidates[index])
            if self.size[storage]:
                excess_bytes -= self.size[storage]
                self.drop(storage)
        if self.lose_what_runs_once(excess_bytes, freely=False) > 0:
            raise _Stuck

    def drop(self, storage: int) -> None:
        self.live[storage] = 0
        self.used_bytes -= self.size[storage]
        self.mark_stale(storage)

    def lose_what_runs_once(self, excess_bytes: int, *, freely: bool) -> int:
        """Evict values that cannot come back and that nothing depends on any more.

        With ``freely``, only where that gives back at least the bytes of what it
        forces to stay: then keeping the results instead costs nothing at all. In
        backward it might: losing a tangent for free would force gradients to stay.
        """
        if freely and self.now > self.boundary_step:
            return excess_bytes
        for storage in np.flatnonzero(
            self.live_view & (self.evictable_view ^ 1) & (self.pinned_view ^ 1)
        ).tolist():
            if excess_bytes <= 0:
                break
            if (
                self.size[storage]
                and self.can_lose(storage)
                and (not freely or self.frozen_bytes(storage) <= self.size[storage])
            ):
                for op in self.consumers[storage]:
                    self.freeze(op)
                excess_bytes -= self.size[storage]
                self.drop(storage)
        return excess_bytes

    def frozen_bytes(self, storage: int) -> int:
        """Return the bytes that could be evicted until ``storage`` is lost."""
        outputs = {s for op in self.consumers[storage] for s in self.writes[op]}
        return sum(self.size[s] for s in outputs if self.uses[s] and self.evictable[s])

    def can_lose(self, storage: int) -> bool:
        if self.uses[storage] or self.wanted[storage]:
            return False
        return not self.use_of_others(storage)[1]

    def freeze(self, op: int) -> None:
        """Make ``op`` one that may not run again."""
        self.may_rerun[op] = False
        for output in self.writes[op]:
            self.evictable[output] = 0


def evicting_order(
    graph: TrainingGraph,
    limit_bytes: int,
    *,
    kind_index: int = 0,
    rule: EvictionRule | None = None,
    runs_per_op: int = 8,
    saved: Container[int] | None = None,
    limits: Limits | None = None,
) -> list[int] | None:
    """Return an order whose peak is at most ``limit_bytes``, or ``None``.

    Parameters
    ----------
    graph
        The graph to execute.
    limit_bytes
        Most bytes at any moment, resident bytes included.
    kind_index
        Position of the device's kind in the ops' costs.
    rule
        How victims are chosen; by default as :class:`EvictionRule` has it.
    runs_per_op
        Give up once the runs exceed this multiple of the graph's ops.
    saved
        If given, forward drops everything else as soon as it has read it for the
        last time, instead of waiting until memory is short.
    limits
        When to give up.

    Returns
    -------
    list[int] | None
        Op indices and the boundary, for :func:`remat.liveness.schedule_from_order`;
        ``None`` when the rule does not get by with the limit.

    Notes
    -----
    Time O(runs x live storages), at the speed of vectorised arithmetic.
    """
    execution = _Execution(
        graph,
        kind_index,
        limit_bytes,
        rule or EvictionRule(),
        run_limit=runs_per_op * len(graph.ops),
        saved=saved,
        limits=limits or Limits(),
    )
    try:
        return execution.run()
    except _Stuck:
        return None
