"""Recompute orders: from what is kept between uses to an order of computations.

Every op runs once, in graph order (the *base order*), except for ops whose value was
released and is asked for again. The time between two consecutive uses of a storage in
the base order is a *retention interval*, and one policy a retention interval decides
everything else:

* ``KEEP``: whatever is there at the start of the interval stays;
* ``RELEASE``: the value goes at the start; if anything asks for it within the interval
  it is recomputed then, and stays;
* ``TRANSIENT``: the value goes at the start, and again after each op that asks for it.

What is missing when an op is about to run is recomputed right before it, together with
the missing ancestors, in graph order. An op all of whose results are released before
their first use runs at its first demand instead of at its place in the base order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY
from remat.reductions.stage_parts import never_lost
from remat.search.plain_numbers import plain_numbers, required_order

KEEP = 0
RELEASE = 1
TRANSIENT = 2

_END = -2


@dataclass(frozen=True, slots=True, kw_only=True)
class UseTables:
    """The uses of every storage in the base order, in a form made for speed.

    Parameters
    ----------
    base
        Required ops in graph order, with the boundary in its place.
    boundary
        Position of the boundary in ``base``.
    reads, writes
        Per op, the storages that can be absent, as in
        :class:`~remat.search.plain_numbers.Numbers`.
    cost_ns, output_bytes, running_bytes
        Per op: time, bytes of the outputs, bytes of outputs and workspace.
    size_bytes
        Per storage.
    producer
        Per storage, the op that writes it, or -1.
    is_pinned
        Per storage, whether it cannot be had again once it is gone.
    reads_at
        Per position of ``base``, the storages used there.
    opens_at
        Per position of ``base``, pairs of storage and the interval that opens there.
    first_interval
        Per storage, the interval from its production to its first use, or -1 for
        storages that no required op touches. The others follow consecutively.
    interval_start, interval_end
        Per interval, the positions in ``base`` that delimit it. The last interval of a
        storage ends at ``len(base)``.
    delayed_with
        Per op, the first intervals of its outputs if its first run may be delayed,
        else nothing.
    is_external
        Per op, whether it is the caller's work: what it reads stays until the pass has
        ended, since nothing can be recomputed meanwhile.
    resident_bytes
        Bytes that are always live.
    final_outputs, tangents
        Storages, residents left out.
    """

    base: list[int]
    boundary: int
    reads: Sequence[Sequence[int]]
    writes: Sequence[Sequence[int]]
    cost_ns: Sequence[int]
    output_bytes: list[int]
    running_bytes: list[int]
    size_bytes: Sequence[int]
    producer: list[int]
    is_pinned: bytearray
    reads_at: list[Sequence[int]]
    opens_at: list[tuple[tuple[int, int], ...]]
    first_interval: list[int]
    interval_start: list[int]
    interval_end: list[int]
    delayed_with: list[tuple[int, ...]]
    is_external: list[bool]
    resident_bytes: int
    final_outputs: Sequence[int]
    tangents: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An order of computations with its cost and its memory.

    Parameters
    ----------
    order
        Op indices and the boundary, as :func:`remat.core.liveness.schedule_from_order`
        takes them.
    positions
        Per step of ``order``, the position in the base order that it is done for.
    timeline_bytes
        Per step of ``order``, the bytes during it.
    cost_ns, peak_bytes
        What :func:`remat.core.simulator.simulate` reports for the schedule of the
        order.
    """

    order: list[int]
    positions: list[int]
    timeline_bytes: list[int]
    cost_ns: int
    peak_bytes: int


def use_tables(graph: TrainingGraph, kind_index: int = 0) -> UseTables:
    """Tabulate the base order of a graph whose required ops run on one device.

    Notes
    -----
    Time and memory O(reads and writes of the graph).
    """
    ops, numbers = graph.ops, plain_numbers(graph, kind_index)
    reads, writes, sizes = numbers.reads, numbers.writes, numbers.sizes
    base = required_order(graph)
    events: list[list[int]] = [[] for _ in sizes]
    for position, op in enumerate(base):
        for storage in (*reads[op], *writes[op]):
            events[storage].append(position)
    opens: list[list[tuple[int, int]]] = [[] for _ in base]
    first_interval = [-1] * len(sizes)
    starts: list[int] = []
    ends: list[int] = []
    for storage, positions in enumerate(events):
        if not positions:
            continue
        first_interval[storage] = len(starts)
        for position in positions:
            opens[position].append((storage, len(starts)))
            starts.append(position)
        ends.extend([*positions[1:], len(base)])
    outputs = [sum(sizes[s] for s in op.writes) for op in ops]
    return UseTables(
        base=base,
        boundary=base.index(BOUNDARY),
        reads=reads,
        writes=writes,
        cost_ns=numbers.costs,
        output_bytes=outputs,
        running_bytes=[
            size + workspace
            for size, workspace in zip(outputs, numbers.workspaces, strict=True)
        ],
        size_bytes=sizes,
        producer=[-1 if p is None else p for p in graph.producers],
        is_pinned=bytearray(never_lost(graph)),
        reads_at=[reads[op] for op in base],
        opens_at=[tuple(pairs) for pairs in opens],
        first_interval=first_interval,
        interval_start=starts,
        interval_end=ends,
        delayed_with=[
            ()
            if op.is_ordered
            or not op.is_recomputable
            or index not in graph.required_ops
            else tuple(first_interval[s] for s in op.writes)
            for index, op in enumerate(ops)
        ],
        is_external=[op.is_external for op in ops],
        resident_bytes=numbers.resident_bytes,
        final_outputs=reads[_END],
        tangents=graph.tangents,
    )


class _Builder:
    """The order under construction, and the memory it takes."""

    __slots__ = ("born", "change", "cost", "last", "order", "running", "tables")

    def __init__(self, tables: UseTables) -> None:
        self.tables = tables
        self.order: list[int] = []
        # Bytes by which step k differs from step k - 1, before what step k adds.
        self.change = [0]
        self.running: list[int] = []
        self.born = bytearray(len(tables.size_bytes))
        self.last = [0] * len(tables.size_bytes)
        self.cost = 0

    def step(self, op: int) -> None:
        """Append one op; a storage written again is freed after its last use so far."""
        tables, last, change = self.tables, self.last, self.change
        k = len(self.order)
        self.order.append(op)
        for storage in tables.reads[op]:
            last[storage] = k
        self.write(tables.writes[op], k)
        change.append(tables.output_bytes[op])
        self.running.append(tables.running_bytes[op])
        self.cost += tables.cost_ns[op]

    def write(self, storages: Sequence[int], k: int) -> None:
        born, last, size = self.born, self.last, self.tables.size_bytes
        for storage in storages:
            if born[storage]:
                self.change[last[storage] + 1] -= size[storage]
            else:
                born[storage] = 1
            last[storage] = k

    def pass_boundary(self, outputs: Sequence[int]) -> None:
        k = len(self.order)
        self.order.append(BOUNDARY)
        for storage in outputs:
            self.last[storage] = k
        tangents = self.tables.tangents
        self.write(tangents, k)
        appearing = sum(self.tables.size_bytes[s] for s in tangents)
        self.change.append(appearing)
        self.running.append(appearing)

    def timeline(self) -> list[int]:
        """Free everything after its last use and return the bytes during each step."""
        tables, change = self.tables, self.change
        for storage in tables.final_outputs:
            self.last[storage] = len(self.order)
        change.append(0)
        for storage, is_born in enumerate(self.born):
            if is_born:
                change[self.last[storage] + 1] -= tables.size_bytes[storage]
        held = accumulate(change[: len(self.order)], initial=tables.resident_bytes)
        next(held)
        return list(map(add, held, self.running))


def evaluate(tables: UseTables, policies: Sequence[int]) -> Evaluation:
    """Build the order that ``policies`` give, with its exact cost and peak.

    Parameters
    ----------
    tables
        Made by :func:`use_tables`.
    policies
        Per interval, ``KEEP``, ``RELEASE`` or ``TRANSIENT``. Intervals of pinned
        storages count as ``KEEP`` whatever is given.

    Notes
    -----
    Time O(reads and writes of the resulting order).
    """
    builder = _Builder(tables)
    is_live = bytearray(len(tables.size_bytes))
    is_pinned = tables.is_pinned
    interval = list(tables.first_interval)
    positions: list[int] = []
    for position, op in enumerate(tables.base):
        if op != BOUNDARY:
            firsts = tables.delayed_with[op]
            if firsts and all(policies[first] for first in firsts):
                for storage, opened in tables.opens_at[position]:
                    interval[storage] = opened
                    if policies[opened] and not is_pinned[storage]:
                        is_live[storage] = 0
                continue
        missing = [s for s in tables.reads_at[position] if not is_live[s]]
        if missing:
            _recompute(builder, missing, is_live, policies, interval)
        if op == BOUNDARY:
            builder.pass_boundary(tables.reads_at[position])
        else:
            builder.step(op)
        positions.extend([position] * (len(builder.order) - len(positions)))
        stays = tables.is_external[op] if op != BOUNDARY else False
        for storage, opened in tables.opens_at[position]:
            interval[storage] = opened
            is_live[storage] = stays or is_pinned[storage] or not policies[opened]
    missing = [s for s in tables.final_outputs if not is_live[s]]
    if missing:
        _recompute(builder, missing, is_live, policies, interval)
    positions.extend([len(tables.base)] * (len(builder.order) - len(positions)))
    timeline = builder.timeline()
    at_end = tables.resident_bytes + sum(
        tables.size_bytes[s] for s in tables.final_outputs
    )
    return Evaluation(
        order=builder.order,
        positions=positions,
        timeline_bytes=timeline,
        cost_ns=builder.cost,
        peak_bytes=max(at_end, *timeline),
    )


def _recompute(
    builder: _Builder,
    missing: list[int],
    is_live: bytearray,
    policies: Sequence[int],
    interval: list[int],
) -> None:
    """Run the producers of ``missing`` and of what those lack, in graph order.

    Transient values are marked as gone at once: the op that asked for them is next,
    and what it reads is marked anew afterwards.
    """
    tables = builder.tables
    producer, reads, writes = tables.producer, tables.reads, tables.writes
    needed: set[int] = set()
    while missing:
        op = producer[missing.pop()]
        if op not in needed:
            needed.add(op)
            missing.extend(s for s in reads[op] if not is_live[s])
    for op in sorted(needed):
        builder.step(op)
        for storage in writes[op]:
            is_live[storage] = policies[interval[storage]] != TRANSIENT


def policies_of_order(tables: UseTables, order: Sequence[int]) -> bytearray:
    """Return policies under which :func:`evaluate` comes close to a given order.

    Parameters
    ----------
    tables
        Made by :func:`use_tables`.
    order
        Op indices and the boundary: every required op at least once, first runs in
        graph order except where they are delayed.

    Returns
    -------
    bytearray
        One policy an interval. What differs from ``order``: each storage missing for
        an op is recomputed right before it, in graph order, and never earlier.

    Notes
    -----
    Time O(reads and writes of the order).
    """
    policies = bytearray(len(tables.interval_start))
    base = tables.base
    place = {op: position for position, op in enumerate(base)}
    is_pinned = tables.is_pinned
    interval = list(tables.first_interval)
    # Per storage: whether the latest copy was made since the interval opened, and how
    # many copies made since then were read. A copy is counted at its first read.
    is_new = bytearray(b"\x01") * len(tables.size_bytes)
    is_read = bytearray(len(tables.size_bytes))

    def read(storage: int) -> None:
        if is_new[storage] and not is_read[storage] and not is_pinned[storage]:
            current = interval[storage]
            policies[current] = TRANSIENT if policies[current] else RELEASE
        is_read[storage] = 1

    def open_at(position: int) -> None:
        for storage, opened in tables.opens_at[position]:
            interval[storage] = opened
            is_new[storage] = 0
            is_read[storage] = 0

    position = 0
    for op in order:
        target = place[op]
        for storage in tables.reads[op]:
            read(storage)
        if op != BOUNDARY:
            for storage in tables.writes[op]:
                is_new[storage] = 1
                is_read[storage] = 0
        if target >= position:
            for skipped in range(position, target):
                # A delayed op: its outputs appear within their first interval.
                open_at(skipped)
            open_at(target)
            position = target + 1
    return policies
