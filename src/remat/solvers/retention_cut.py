"""What to keep across the boundary, at given prices, as a minimum cut.

Each op of forward has a node (on the sink's side: it is recomputed) and each storage
that it writes has one (on the sink's side: backward can read it). What separates them:

* source -> op, at the op's cost: on the sink's side it runs again;
* op -> storage it writes, at the storage's price: kept if it is cut;
* storage -> op that reads it, without limit: to run again, an op needs what it reads;
* storage -> sink, without limit, where backward reads the storage.

Ops that may not run again hang on the source without limit, and ops that forward does
not need cost nothing, for their first run can wait until backward.
"""

from collections.abc import Sequence
from itertools import accumulate

from remat.backends.max_flow import FlowNetwork, min_cut_source_side
from remat.core.deadline import check_time
from remat.core.graph import TrainingGraph
from remat.solvers.recompute_order import RELEASE, UseTables

_CAPACITY_UNITS = 1 << 60
"""What all capacities together come to, so that they fit in 63 bits."""


class RetentionCut:
    """The closure problem of a graph: which storages to keep at given prices."""

    def __init__(self, graph: TrainingGraph, tables: UseTables) -> None:
        check_time()
        self.tables = tables
        forward = tables.base[: tables.boundary]
        self._op_node = {op: 2 + i for i, op in enumerate(forward)}
        self.storages = [s for op in forward for s in tables.writes[op]]
        offset = 2 + len(forward)
        self._node = {s: offset + i for i, s in enumerate(self.storages)}
        needed_forward = _needed_in_forward(graph, tables)
        self.is_postponable = {
            op: op not in needed_forward and bool(tables.delayed_with[op])
            for op in forward
        }
        self.crossing = {s: self._crossing_interval(s) for s in self.storages}
        tails: list[int] = []
        heads: list[int] = []
        costs: list[int | None] = []
        for op in forward:
            node = self._op_node[op]
            tails.append(0)
            heads.append(node)
            is_pinned = any(tables.is_pinned[s] for s in tables.writes[op])
            free = self.is_postponable[op]
            costs.append(None if is_pinned else 0 if free else tables.cost_ns[op])
            for storage in tables.reads[op]:
                tails.append(self._node[storage])
                heads.append(node)
                costs.append(None)
        read_in_backward = {
            s for reads in tables.reads_at[tables.boundary + 1 :] for s in reads
        } | set(tables.final_outputs)
        for storage in self.storages:
            if storage in read_in_backward:
                tails.append(self._node[storage])
                heads.append(1)
                costs.append(None)
        self._fixed_costs = costs
        for storage in self.storages:
            tails.append(self._op_node[tables.producer[storage]])
            heads.append(self._node[storage])
        self._network = FlowNetwork(tuple(tails), tuple(heads))
        self.first_need = self._first_needs()
        self._crossed_bytes = self._crossing_bytes()

    def _crossing_interval(self, storage: int) -> int:
        tables = self.tables
        interval = tables.first_interval[storage]
        while tables.interval_end[interval] <= tables.boundary:
            interval += 1
        return interval

    def _first_needs(self) -> dict[int, int]:
        """Return per storage the position in backward that asks for it first.

        That is its own first use there, or else the first need among what is
        computed from it.
        """
        tables = self.tables
        end = len(tables.base)
        needs = {s: tables.interval_end[self.crossing[s]] for s in self.storages}
        for op in reversed(tables.base[: tables.boundary]):
            need = min((needs[s] for s in tables.writes[op]), default=end)
            for storage in tables.reads[op]:
                if tables.interval_end[self.crossing[storage]] == end:
                    needs[storage] = min(needs[storage], need)
        return needs

    def separators(self, segment_bytes: int) -> frozenset[int]:
        """Return storages that cut forward into segments of about so many bytes.

        A position of forward is cut by keeping everything that is made before it and
        read by forward after it; then nothing after it needs what came before. Each
        cut is at the cheapest position among those at which the bytes made since the
        last one are between half of ``segment_bytes`` and all of them.
        """
        tables = self.tables
        kept: set[int] = set()
        made = 0
        choice: tuple[int, int] | None = None
        for position in range(tables.boundary):
            made += tables.output_bytes[tables.base[position]]
            if 2 * made >= segment_bytes:
                crossed = self._crossed_bytes[position]
                if choice is None or crossed <= choice[0]:
                    choice = (crossed, position)
            if made >= segment_bytes and choice is not None:
                kept |= self._crossed(choice[1])
                made = 0
                choice = None
        return frozenset(kept)

    def _crossed(self, position: int) -> set[int]:
        """Return the storages made up to ``position`` and read by forward after it."""
        check_time()
        tables = self.tables
        return {
            s
            for s in self.storages
            if tables.interval_start[tables.first_interval[s]] <= position
            and tables.interval_start[self.crossing[s]] > position
        }

    def _crossing_bytes(self) -> list[int]:
        """Return per forward position the bytes read by forward after it."""
        tables = self.tables
        change = [0] * (tables.boundary + 2)
        for s in self.storages:
            change[tables.interval_start[tables.first_interval[s]]] += (
                tables.size_bytes[s]
            )
            change[tables.interval_start[self.crossing[s]]] -= tables.size_bytes[s]
        return list(accumulate(change[: tables.boundary]))

    def kept(
        self, price_of_position: Sequence[float], free: frozenset[int] = frozenset()
    ) -> frozenset[int]:
        """Return the storages to keep when bytes cost ``price_of_position``.

        Parameters
        ----------
        price_of_position
            Nanoseconds per byte, at least 0, per position of the base order.
        free
            Storages that are kept in any case.
        """
        tables = self.tables
        total = [0.0, *accumulate(price_of_position), 0.0]
        prices = [
            0.0
            if s in free
            else tables.size_bytes[s]
            * max(
                0.0,
                total[self.first_need[s]]
                - total[tables.interval_start[self.crossing[s]] + 1],
            )
            for s in self.storages
        ]
        # A cut is computed on integers. All finite capacities together get about
        # ``whole`` units, as far as floats can tell, and each unlimited one twice that.
        count = 1 + len(self._fixed_costs) + len(prices)
        whole = _CAPACITY_UNITS // count
        finite = sum(prices) + sum(c for c in self._fixed_costs if c is not None)
        unit = whole / max(1.0, finite)
        unlimited = 2 * whole
        capacities = [
            unlimited if cost is None else round(cost * unit)
            for cost in self._fixed_costs
        ]
        # One unit a storage makes equal cuts keep fewer bytes.
        capacities.extend((price > 0) + round(price * unit) for price in prices)
        source_side = min_cut_source_side(self._network, capacities)
        return free | frozenset(
            s
            for s in self.storages
            if self._node[s] not in source_side
            and self._op_node[tables.producer[s]] in source_side
        )

    def kept_by(self, policies: Sequence[int]) -> frozenset[int]:
        """Return the storages that ``policies`` keep across the boundary."""
        return frozenset(s for s in self.storages if not policies[self.crossing[s]])

    def policies(self, kept: frozenset[int]) -> bytearray:
        """Return the policies that keep ``kept`` across the boundary."""
        tables = self.tables
        policies = bytearray(len(tables.interval_start))
        for storage in self.storages:
            if storage in kept or tables.is_pinned[storage]:
                continue
            policies[self.crossing[storage]] = RELEASE
            if self.is_postponable[tables.producer[storage]]:
                first = tables.first_interval[storage]
                policies[first : self.crossing[storage]] = bytes(
                    [RELEASE] * (self.crossing[storage] - first)
                )
        return policies


def _needed_in_forward(graph: TrainingGraph, tables: UseTables) -> set[int]:
    """Return the forward ops that must have run before the boundary."""
    forward = tables.base[: tables.boundary]
    pending = [op for op in forward if not tables.delayed_with[op]]
    pending += [
        tables.producer[s] for s in graph.forward_outputs if tables.producer[s] >= 0
    ]
    needed = set[int]()
    while pending:
        op = pending.pop()
        if op not in needed:
            needed.add(op)
            pending.extend(
                tables.producer[s] for s in tables.reads[op] if tables.producer[s] >= 0
            )
    return needed
