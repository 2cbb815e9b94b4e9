"""Bounds on the memory of every schedule: a search backwards over what is live.

Look at a valid schedule when some node runs: what it reads is live. Going back from
there, of the nodes that made the live copies one ran last, and while it did, all the
others' copies were live beside what it read, wrote and needed. Before it, what it read
and those copies had to be live; and so on, until nothing is. So every schedule contains
a path of sets of storages, from what the node reads to the empty set, and its peak is
at least the largest sum on that path. A best-first search finds the path whose largest
sum is smallest; stopped early, the smallest sum that it has not gone beyond is a bound
all the same.

Of two sets, what leads to the larger leads to the smaller as well, so a set is dropped
if a part of it has been looked at. That holds for sums and for the one rule about
order: a node that may run only once is not the last to have run if what another one
made can only be made after it.
"""

import heapq
from collections.abc import Iterator

from remat.bounds.instance import Instance, instance_of
from remat.core.graph import TrainingGraph

_STARTS = 12
"""The nodes that need most are started from."""

_EXPANSIONS = 200
"""Sets that are looked at from each of them."""

_MOST_WORK = 2_000_000
"""Storages in the sets that are made from each of them."""


def least_budget_bytes(
    graph: TrainingGraph,
    kind: str | None = None,
    *,
    starts: int = _STARTS,
    expansions: int = _EXPANSIONS,
) -> int:
    """Return bytes below which it is certain that no schedule on one device fits.

    Parameters
    ----------
    graph, kind
        The step, and the kind of the one device; by default the first of the graph.
    starts, expansions
        From how many nodes the search starts, those with the largest needs, and at how
        many sets it looks from each, both at least 0. More can only make the bound
        better.

    Returns
    -------
    int
        Resident bytes included; 0 where a step is not for one device.

    Notes
    -----
    The same in every run. Each set that is looked at leads to one for each node that
    made something in it; where sets are large, fewer are looked at, so that it takes
    tenths of a second.
    """
    instance = instance_of(graph, kind)
    if instance is None:
        return 0
    search = _SetSearch(instance)
    alone = {node: search.bytes_at(node, frozenset()) for node in instance.order}
    best = max(alone.values())
    for node in sorted(alone, key=lambda node: (-alone[node], node))[:starts]:
        best = max(best, search.bottleneck_bytes(node, expansions))
    return instance.resident_bytes + best


class _SetSearch:
    """The search, and what it needs to know of the step."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.held_at = [
            instance.held if instance.is_backward(node) else frozenset[int]()
            for node in range(instance.op_count + 2)
        ]
        self.own = [
            frozenset(instance.reads[node]) | frozenset(instance.writes[node])
            for node in range(instance.op_count + 2)
        ]
        self._later: dict[int, frozenset[int]] = {}

    def bytes_at(self, node: int, beside: frozenset[int]) -> int:
        """Return what is live while a node runs, with some storages beside it."""
        live = self.own[node] | beside | self.held_at[node]
        return self.instance.bytes_of(live) + self.instance.workspace_bytes[node]

    def bottleneck_bytes(self, node: int, expansions: int) -> int:
        """Return a bound on the peak of every schedule, as the node runs in it."""
        first = self.bytes_at(node, frozenset())
        heap = [(first, 0, frozenset(self.instance.reads[node]))]
        bound, pushed, work = first, 0, 0
        closed: list[frozenset[int]] = []
        while heap and len(closed) < expansions and work < _MOST_WORK:
            least, _, live = heapq.heappop(heap)
            if any(known <= live for known in closed):
                continue
            closed.append(live)
            bound = max(bound, least)
            if not live:
                break
            for before, needed in self._steps_back(live):
                pushed += 1
                work += len(before) + 1
                # Of equal sums the newest first, to come to an end.
                heapq.heappush(heap, (max(least, needed), -pushed, before))
        return bound

    def _steps_back(self, live: frozenset[int]) -> Iterator[tuple[frozenset[int], int]]:
        """Yield what was live before the last node that made any, and its bytes."""
        instance = self.instance
        size_bytes = instance.size_bytes
        live_bytes = instance.bytes_of(live)
        for node in sorted({instance.producer[item] for item in live}):
            rest = live.difference(instance.writes[node])
            if not instance.may_rerun[node] and not self._can_be_last(node, rest):
                continue
            added = (self.own[node] | self.held_at[node]).difference(rest)
            needed = live_bytes + instance.workspace_bytes[node]
            needed += sum(size_bytes[item] for item in added)
            needed -= sum(size_bytes[i] for i in instance.writes[node] if i in live)
            yield rest.union(instance.reads[node]), needed

    def _can_be_last(self, node: int, rest: frozenset[int]) -> bool:
        later = self._later.get(node)
        if later is None:
            later = self._later[node] = self._descendants(node)
        return not any(self.instance.producer[item] in later for item in rest)

    def _descendants(self, node: int) -> frozenset[int]:
        """Return the nodes that a node precedes."""
        found: set[int] = set()
        pending = [node]
        while pending:
            for later in self.instance.successors[pending.pop()]:
                if later not in found:
                    found.add(later)
                    pending.append(later)
        return frozenset(found)
