"""Structure: a forward pass as series of stages and forks of branches that meet.

What is looked for is the series-parallel form of networks: an item of a series is a
*stage* or a *fork*, and a fork consists of branches that are series themselves. Two
branches count only if each takes a noticeable share of forward's time; a shortcut, a
mask or an auxiliary head is part of the stage that it belongs to.

* Series: forward can be cut at a storage if, of the ops before the cut, all but a
  negligible part lead to it, and of those after, all but a negligible part come from
  it. That is what makes it an articulation point when negligible paths are left out.
* Forks: between two cuts, ops are joined into components as they read one another. An
  op that reads two noticeable components is where branches meet; it and all that
  depends on it follow the fork.

An op that reads a storage which is negligible beside its other operands, such as the
running statistics of a normalisation that two branches share, is not connected by it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.core.deadline import check_time
from remat.reductions.segments import SegmentedGraph
from remat.reductions.stage_parts import cost_ns
from remat.reductions.stages import (
    is_read_back,
    merged_neighbours,
    narrow_crossings,
)

NOTICEABLE_SHARE = 32
"""Branches take at least forward's time over this."""

_WEAK_SHARE = 32
"""A storage this many times smaller than the op's largest operand connects nothing."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Forward ops, ascending, that form one stage, and the storages it ends in."""

    ops: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """Branches that have nothing to do with one another; at least two."""

    branches: tuple["Series", ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The storages that the branches end in."""
        return tuple(end for branch in self.branches for end in branch[-1].ends)


Series = tuple[Leaf | Fork, ...]
"""Stages and forks, one after the other."""


class ForwardStructure:
    """The series-parallel structure of a graph's forward pass.

    Attributes
    ----------
    series
        The structure. Every required forward op is in one stage of it; the last stage
        ends in nothing: it is the turn.

    Notes
    -----
    Time O(ops^2 / 64 + ops x cuts) for sets of ancestors and descendants.
    """

    def __init__(self, segmented: SegmentedGraph, kind_index: int) -> None:
        self.graph = segmented.graph
        self.segmented = segmented
        self._kind = kind_index
        self._costs = [op.cost_ns[kind_index] or 0 for op in self.graph.ops]
        total = cost_ns(self.graph, segmented.forward, kind_index)
        self.noticeable_ns = max(1, -(-total // NOTICEABLE_SHARE))
        self.series = self._series(segmented.forward, is_whole=True)

    @cached_property
    def _before(self) -> dict[int, tuple[int, ...]]:
        """Per required forward op, those it is connected to by what it reads."""
        required = set(self.segmented.forward)
        graph = self.graph
        found: dict[int, tuple[int, ...]] = {}
        for op in self.segmented.forward:
            reads, writes = graph.ops[op].reads, graph.ops[op].writes
            moving = [s for s in reads if graph.producers[s] is not None]
            largest = max(
                (graph.storages[s].size_bytes for s in (*moving, *writes)), default=0
            )
            producers = (
                graph.producers[s]
                for s in moving
                if graph.storages[s].size_bytes * _WEAK_SHARE > largest
            )
            found[op] = tuple({p for p in producers if p is not None and p in required})
        return found

    @cached_property
    def _ancestors(self) -> dict[int, int]:
        """Per op, itself and all it depends on, as bits."""
        found: dict[int, int] = {}
        for op in self.segmented.forward:
            check_time()
            bits = 1 << op
            for before in self._before[op]:
                bits |= found[before]
            found[op] = bits
        return found

    @cached_property
    def _descendants(self) -> dict[int, int]:
        """Per op, itself and all that depends on it, as bits."""
        found = {op: 1 << op for op in self.segmented.forward}
        for op in reversed(self.segmented.forward):
            check_time()
            for before in self._before[op]:
                found[before] |= found[op]
        return found

    def _cost(self, ops: Iterable[int]) -> int:
        return sum(self._costs[op] for op in ops)

    def _series(self, ops: Sequence[int], *, is_whole: bool = False) -> Series:
        """Return the structure of some ops, ascending, of which nothing is outside."""
        items: list[Leaf | Fork] = []
        segments = list(self._segments(ops))
        for index, (segment, crossing) in enumerate(segments):
            is_last = index + 1 == len(segments)
            ends = self._exits(ops) if is_last and not is_whole else crossing
            branches, after = self._branches(segment)
            if branches:
                items.append(Fork(tuple(self._series(branch) for branch in branches)))
            if after or is_last:
                items.append(Leaf(tuple(after), ends))
        return tuple(items)

    def _exits(self, ops: Iterable[int]) -> tuple[int, ...]:
        """Return what ops outside of ``ops`` are connected by to these."""
        inside = set(ops)
        graph = self.graph
        return tuple(
            storage
            for op in sorted(inside)
            for storage in graph.ops[op].writes
            if any(
                reader not in inside and op in self._before.get(reader, ())
                for reader in graph.consumers[storage]
            )
        )

    def _segments(
        self, ops: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], tuple[int, ...]]]:
        """Yield the ops between cuts, and the storage at the end of each."""
        start = 0
        crossings = narrow_crossings(self.segmented, ops)
        for position in range(1, len(ops)):
            storage = crossings.get(ops[position])
            if (
                storage is not None
                and is_read_back(self.graph, storage)
                and self._is_articulation(ops, start, position, storage)
            ):
                yield ops[start:position], (storage,)
                start = position
        yield ops[start:], ()

    def _is_articulation(
        self, ops: Sequence[int], start: int, position: int, storage: int
    ) -> bool:
        check_time()
        producer = self.graph.producers[storage]
        if producer is None or not ops[start] <= producer < ops[position]:
            return False
        above, below = self._ancestors[producer], self._descendants[producer]
        beside = (op for op in ops[start:position] if not above >> op & 1)
        if self._cost(beside) >= self.noticeable_ns:
            return False
        unrelated = (op for op in ops[position:] if not below >> op & 1)
        return self._cost(unrelated) < self.noticeable_ns

    # --- forks -----------------------------------------------------------------------

    def _branches(self, ops: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """Return the branches of a segment, if any, and the ops that follow them."""
        meetings = self._meetings(ops)
        best: tuple[list[list[int]], list[int]] = ([], list(ops))
        least: int | None = None
        for index in reversed(range(len(meetings))):
            check_time()
            after = self._dependent(ops, meetings[index:])
            branches, rest = self._split(ops, after)
            if len(branches) < 2:
                continue
            cost = self._cost(rest)
            least = cost if least is None else least
            if cost > least + self.noticeable_ns:
                break
            if len(branches) > len(best[0]):
                best = branches, rest
        return best

    def _components(self, ops: Sequence[int]) -> Iterator[tuple[int, dict[int, int]]]:
        """Yield each op with the costs of the components that it joins, by root."""
        root = {op: op for op in ops}
        cost: dict[int, int] = {}

        for op in ops:
            joined = {
                _find(root, before) for before in self._before[op] if before in root
            }
            yield op, {component: cost[component] for component in joined}
            for component in joined:
                root[component] = op
            cost[op] = self._costs[op] + sum(
                cost.pop(component) for component in joined
            )

    def _meetings(self, ops: Sequence[int]) -> list[int]:
        """Return the ops that read two noticeable components."""
        return [
            op
            for op, joined in self._components(ops)
            if sum(cost >= self.noticeable_ns for cost in joined.values()) >= 2
        ]

    def _dependent(self, ops: Sequence[int], meetings: Sequence[int]) -> set[int]:
        """Return the ops that depend on any of some, in whatever way."""
        found = set(meetings)
        for op in ops:
            if op not in found:
                reads = self.graph.ops[op].reads
                if any(self.graph.producers[s] in found for s in reads):
                    found.add(op)
        return found

    def _split(
        self, ops: Sequence[int], after: set[int]
    ) -> tuple[list[list[int]], list[int]]:
        """Return the noticeable components without some ops, and all other ops.

        Ops of other components go to the first branch that reads what they make, or
        else after the branches.
        """
        inside = [op for op in ops if op not in after]
        owner = self._owners(inside)
        members: dict[int, list[int]] = {}
        for op in inside:
            members.setdefault(owner[op], []).append(op)
        names = {
            name
            for name, found in members.items()
            if self._cost(found) >= self.noticeable_ns
        }
        branches: dict[int, list[int]] = {name: [] for name in members if name in names}
        rest = sorted(after)
        for name, found in members.items():
            if name in names:
                branches[name] += found
                continue
            home = self._home(found, owner, names, after)
            (rest if home is None else branches[home]).extend(found)
        found = sorted(sorted(branch) for branch in branches.values())
        return found, sorted(rest)

    def _owners(self, ops: Sequence[int]) -> dict[int, int]:
        """Return per op the first op of its component."""
        owner = {op: op for op in ops}

        for op in ops:
            for before in self._before[op]:
                if before in owner:
                    first, second = sorted((_find(owner, before), _find(owner, op)))
                    owner[second] = first
        return {op: _find(owner, op) for op in ops}

    def _home(
        self,
        ops: Sequence[int],
        owner: dict[int, int],
        names: set[int],
        after: set[int],
    ) -> int | None:
        """Return the branch that negligible ops belong to, or ``None`` for after."""
        readers = sorted(
            reader
            for op in ops
            for storage in self.graph.ops[op].writes
            for reader in self.graph.consumers[storage]
        )
        for reader in readers:
            if reader in after:
                return None
            if owner.get(reader) in names:
                return owner[reader]
        return None


def _find(root: dict[int, int], op: int) -> int:
    """Return what stands for the component of an op, and shorten the way to it."""
    while root[op] != op:
        root[op] = root[root[op]]
        op = root[op]
    return op


def most_branches(segmented: SegmentedGraph, *, kind_index: int = 0) -> int:
    """Return the most branches that meet in a graph's forward pass; 0 if none do."""

    def widest(series: Series) -> int:
        forks = [item for item in series if isinstance(item, Fork)]
        inside = (widest(branch) for fork in forks for branch in fork.branches)
        return max([0, *inside, *(len(fork.branches) for fork in forks)])

    return widest(ForwardStructure(segmented, kind_index).series)


def merged_series(
    series: Series, most: int, costs: Sequence[int], *, keeps_last: bool
) -> Series:
    """Merge neighbouring stages, cheapest first, until a series has few enough items.

    Parameters
    ----------
    series
        The series; forks are never merged, nor entered.
    most
        Items wanted, at least 1.
    costs
        Time of each op of the graph.
    keeps_last
        Whether the last stage stays as it is.
    """
    prices = [
        sum(costs[op] for op in item.ops) if isinstance(item, Leaf) else None
        for item in series
    ]
    if keeps_last:
        prices[-1:] = [None]
    return tuple(
        _merged(series[run.start : run.stop]) for run in merged_neighbours(prices, most)
    )


def _merged(items: Series) -> Leaf | Fork:
    """Return neighbouring stages as one; a fork comes alone."""
    if len(items) == 1:
        return items[0]
    ops = (op for item in items if isinstance(item, Leaf) for op in item.ops)
    return Leaf(tuple(sorted(ops)), items[-1].ends)
