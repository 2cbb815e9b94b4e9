"""The execution behind :mod:`remat.search.eviction`, on plain numbers."""

import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from remat.core.checks import require
from remat.core.liveness import BOUNDARY
from remat.native import (
    MOST_TOTAL,
    check_counts,
    check_indices,
    check_rule,
    check_time,
    native,
)

END = -2
"""Marks the end of the step, where the final outputs are used."""

_NEVER = float("inf")
_PRICE_LIMIT = 24
_CLOSURE_LIMIT = 64
_RETRY_LIMIT = 12
_LAST_RESORT = 1e12
_LEAST_PRICE = 1e-9


class Ops(NamedTuple):
    """What is known of each op.

    Parameters
    ----------
    reads, writes
        Storages, without resident ones among the reads. Behind those of the ops come
        those of the end, then those of the boundary: the places -2 and -1.
    may_rerun, costs, workspaces
        Whether it may run again, its time and its workspace in bytes.
    """

    reads: Sequence[Sequence[int]]
    writes: Sequence[Sequence[int]]
    may_rerun: Sequence[bool]
    costs: Sequence[int]
    workspaces: Sequence[int]


class Blocks(NamedTuple):
    """What is known of each storage.

    Parameters
    ----------
    consumers, producers
        The ops that read it, and the one that writes it, or -1.
    sizes, weights
        Bytes, and what a price is divided by.
    """

    consumers: Sequence[Sequence[int]]
    producers: Sequence[int]
    sizes: Sequence[int]
    weights: Sequence[float]


class Scores(NamedTuple):
    """How victims are scored.

    Parameters
    ----------
    distance_weights
        What a price is divided by, for each distance to the next use from 0 to the
        number of steps.
    ancestor_share, spare_share
        As in :class:`remat.search.eviction.EvictionRule`.
    """

    distance_weights: Sequence[float]
    ancestor_share: float
    spare_share: float


class Bounds(NamedTuple):
    """What the execution has to keep to.

    Parameters
    ----------
    limit_bytes, resident_bytes
        Most bytes in use, and those in use throughout.
    run_limit
        Most runs.
    """

    limit_bytes: int
    resident_bytes: int
    run_limit: int


@native
def run_evicting(
    steps: Sequence[int],
    ops: Ops,
    blocks: Blocks,
    scores: Scores,
    bounds: Bounds,
    saved: Sequence[bool] | None,
    time_limit_s: float | None,
) -> list[int] | None:
    """Return an order of runs within the bounds, or ``None`` if it cannot go on.

    Parameters
    ----------
    steps
        Ops in the order to execute, :data:`~remat.core.liveness.BOUNDARY` among them,
        and :data:`END` at the end.
    ops, blocks, scores, bounds
        The graph, the rule and the limits, in plain numbers.
    saved
        Per storage whether forward keeps it; ``None`` to keep what fits.
    time_limit_s
        Seconds until giving up, or ``None``.
    """
    check_execution(
        steps, Ops(*ops), Blocks(*blocks), Scores(*scores), Bounds(*bounds), saved
    )
    check_time(time_limit_s)
    try:
        return _Execution(steps, ops, blocks, scores, bounds, saved, time_limit_s).run()
    except _Stuck:
        return None


def check_execution(
    steps: Sequence[int],
    ops: Ops,
    blocks: Blocks,
    scores: Scores,
    bounds: Bounds,
    saved: Sequence[bool] | None,
) -> None:
    """Refuse numbers that do not fit together or are out of range.

    Raises
    ------
    ValueError
        If there are such.
    """
    count, storages = len(ops.costs), len(blocks.sizes)
    require(
        len(ops.reads) == len(ops.writes) == count + 2
        and len(ops.may_rerun) == len(ops.workspaces) == count,
        "the lists of ops differ in length",
    )
    require(
        len(blocks.consumers) == len(blocks.producers) == storages
        and len(blocks.weights) == storages
        and (saved is None or len(saved) == storages),
        "the lists of storages differ in length",
    )
    check_indices(steps, count, "op", END)
    require(list(steps).count(BOUNDARY) == 1, "the steps need one boundary")
    for of_ops in (ops.reads, ops.writes):
        for entries in of_ops:
            check_indices(entries, storages, "storage")
    for entries in blocks.consumers:
        check_indices(entries, count, "op")
    check_indices(blocks.producers, count, "op", -1)
    check_counts(blocks.sizes, ops.workspaces, [bounds.resident_bytes])
    check_counts(ops.costs)
    weights = scores.distance_weights
    require(len(weights) > max(len(steps), 1), "a distance has no weight")
    require(
        all(0.0 < weight < _NEVER for weight in (*weights, *blocks.weights)),
        "a weight is not above 0 and finite",
    )
    check_rule([], [scores.ancestor_share, scores.spare_share])
    require(bounds.limit_bytes >= -MOST_TOTAL, "the limit is less than -2**60")
    require(bounds.run_limit >= 0, "the limit of runs is negative")


class _Stuck(Exception):  # noqa: N818 - control flow inside this module
    """The execution cannot go on within the limit."""


class _Execution:
    """Executes a graph in its own order within a limit, and notes what it runs."""

    def __init__(
        self,
        steps: Sequence[int],
        ops: Ops,
        blocks: Blocks,
        scores: Scores,
        bounds: Bounds,
        saved: Sequence[bool] | None,
        time_limit_s: float | None,
    ) -> None:
        self.steps = steps
        self.reads, self.writes, may_rerun, self.cost, self.workspace = ops
        self.may_rerun = list(may_rerun)
        self.consumers, self.producers, self.size, weights = blocks
        distance_weights, self.ancestor_share, self.spare_share = scores
        self.limit_bytes, self.used_bytes, self.run_limit = bounds
        self.saved = saved
        self.deadline_s = (
            _NEVER if time_limit_s is None else time.monotonic() + time_limit_s
        )
        self.order: list[int] = []
        self.now = 0
        self.boundary_step = steps.index(BOUNDARY)
        self.uses = self.remaining_uses()
        self.make_arrays(weights, distance_weights)

    def remaining_uses(self) -> list[list[int]]:
        """Return per storage the steps that read it, the next one last."""
        uses: list[list[int]] = [[] for _ in self.size]
        for step in range(len(self.steps) - 1, -1, -1):
            for storage in self.reads[self.steps[step]]:
                uses[storage].append(step)
        return uses

    def make_arrays(
        self, size_weights: Sequence[float], distance_weights: Sequence[float]
    ) -> None:
        """Share each byte or number between a fast sequence and a NumPy view."""
        count = len(self.size)
        self.live = bytearray(count)
        self.pinned = bytearray(count)
        self.evictable = bytearray(
            producer >= 0 and self.may_rerun[producer] for producer in self.producers
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
        self.weight_view = np.array(size_weights, dtype=np.float64)
        self.distance_weight_view = np.array(distance_weights, dtype=np.float64)
        self.stale: set[int] = set()

    def run(self) -> list[int]:
        """Return the order of all runs.

        Raises
        ------
        _Stuck
            If the limit is too small for this rule.
        """
        for step, op in enumerate(self.steps):
            self.now = step
            if time.monotonic() >= self.deadline_s:
                raise _Stuck
            self.demand(op)
            self.after_base(op)
        return self.order

    def after_base(self, op: int) -> None:
        for storage in self.reads[op]:
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
            and not self.saved[storage]
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
            missing = [s for s in self.reads[op] if not self.live[s]]
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
        for storage in self.reads[op]:
            self.wanted[storage] += change

    def has_what_is_wanted(self, op: int) -> bool:
        return all(self.live[s] or not self.wanted[s] for s in self.writes[op])

    def missing_ancestors(self, missing: list[int]) -> set[int]:
        found: set[int] = set()
        pending = list(missing)
        while pending:
            op = self.producers[pending.pop()]
            if op < 0 or not self.may_rerun[op]:
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
        writes = self.writes[op]
        needed = sum(self.size[s] for s in writes)
        needed += 0 if op == BOUNDARY else self.workspace[op]
        excess = self.used_bytes + needed - self.limit_bytes
        if excess > 0:
            reads = self.reads[op]
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
        return () if producer < 0 else self.reads[producer]

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
        if op < 0:
            return
        is_paid = any(not self.live[s] and self.uses[s] for s in self.writes[op])
        price = self.ancestors_price(op) + (0 if is_paid else self.cost[op])
        # Losing what is free to recompute still counts for more than losing nothing.
        price = max(price, _LEAST_PRICE)
        if not self.uses[storage]:
            self.next_use[storage], is_needed = self.use_of_others(storage)
            price *= 1.0 if is_needed else self.spare_share
        self.price[storage] = price

    def ancestors_price(self, op: int) -> float:
        """Return the share of the cost of the ancestors of ``op`` that are not live."""
        live, uses, reads, producers = self.live, self.uses, self.reads, self.producers
        share, price = self.ancestor_share, 0.0
        seen = {op}
        pending = [op]
        for current in pending:
            for storage in reads[current]:
                if live[storage]:
                    continue
                ancestor = producers[storage]
                if ancestor < 0 or ancestor in seen:
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
        distance = self.next_use_view[candidates] - self.now
        is_reused = np.isfinite(distance)
        steps = np.where(is_reused, np.maximum(distance, 1.0), 1.0)
        steps[is_wanted] = 1.0
        weights = self.distance_weight_view[steps.astype(np.int64)]
        weights[~is_reused & ~is_wanted] = _NEVER
        scores = (
            self.price_view[candidates]
            * np.where(is_wanted, _LAST_RESORT, 1.0)
            / self.weight_view[candidates]
            / weights
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
