"""Execute a graph on several devices, each within its budget, and note the steps.

The ops run in graph order on the devices that a placement names. What an op reads and
is not on its device is copied from where that takes least time, or computed again.
Where memory is short, storages are evicted in the order of

    time to bring it back / (its bytes ^ a x its distance to the next use ^ b);

the time to bring a storage back is 0 if another device holds it and will use it, that
of a copy if another device holds it, and else the less of running its op again (with a
share of the ancestors that are gone) and of two copies, to a device with room and back.
So keep, recompute, offload and place are one decision.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, isinf

from remat.core.checks import checked_integers, checked_number, keep_integers
from remat.core.graph import Phase
from remat.core.liveness import BOUNDARY
from remat.core.problem import Limits
from remat.core.schedule import Boundary, Compute, Copy, Step
from remat.core.units import LARGEST_TOTAL
from remat.native import LARGEST_EXPONENT
from remat.search.device_execution_run import (
    END,
    LARGEST_PERCENT,
    NO_LIMIT_BYTES,
    Blocks,
    Bounds,
    Graph,
    Note,
    Ops,
    Passes,
    Prices,
    Routes,
    run_on_devices,
)
from remat.search.device_instance import DeviceInstance
from remat.search.plain_numbers import required_order

Placement = Sequence[tuple[int, ...]]
"""Per op, the devices on which it runs at its place in the graph's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRule:
    """How victims are chosen.

    Parameters
    ----------
    size_exponent, distance_exponent
        Exponents of the bytes and of the distance to the next use, at least 0.
    ancestor_share
        Share of the cost of ancestors that are not live, 0 to 1.
    copy_percent
        What a copy counts for, as a percentage of its time: above 100 prefers to
        recompute, below 100 to offload.
    limit_percent
        Percentage of each budget's room that is used.
    reserve_bytes
        Bytes per device that are left free beyond that; none if empty.

    Raises
    ------
    ValueError
        If a number is none, not finite or out of range; exponents are at most
        :data:`~remat.native.LARGEST_EXPONENT`.
    """

    size_exponent: float = 1.0
    distance_exponent: float = 1.0
    ancestor_share: float = 0.5
    copy_percent: int = 100
    limit_percent: int = 100
    reserve_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        of = type(self).__name__
        for name, most in (
            ("size_exponent", LARGEST_EXPONENT),
            ("distance_exponent", LARGEST_EXPONENT),
            ("ancestor_share", 1.0),
        ):
            label = f"{name} of {of}"
            number = checked_number(label, getattr(self, name), most=most)
            object.__setattr__(self, name, number)
        keep_integers(self, "copy_percent", of=of, least=1, most=LARGEST_PERCENT)
        keep_integers(self, "limit_percent", of=of, least=0, most=100)
        reserves = checked_integers(
            f"reserve_bytes of {of}", self.reserve_bytes, least=0, most=LARGEST_TOTAL
        )
        object.__setattr__(self, "reserve_bytes", reserves)


@dataclass(frozen=True, slots=True)
class Execution:
    """What an execution did, and how long that takes one step after the other."""

    instance: DeviceInstance
    notes: Sequence[Note]

    @property
    def serial_ns(self) -> int:
        """The time of all runs and copies."""
        costs, copies = self.instance.cost_ns, self.instance.copy_ns
        return sum(
            copies[source, target][what]
            if target >= 0
            else (costs[what][source] or 0)
            if what >= 0
            else 0
            for what, source, target in self.notes
        )

    @property
    def soonest_ns(self) -> int:
        """A time before which the last step does not end, with queues at work at once.

        As the judge counts it, but nobody waits for a discard.
        """
        instance, graph = self.instance, self.instance.graph
        device_free = [0 for _ in instance.devices]
        link_free = dict.fromkeys(instance.copy_ns, 0)
        ready: list[dict[int, int]] = [{} for _ in instance.devices]
        for what, source, target in self.notes:
            if what == BOUNDARY:
                now = max(
                    *device_free,
                    *(
                        ready[graph.storages[s].home].get(s, 0)
                        for s in graph.forward_outputs
                    ),
                )
                for storage in graph.tangents:
                    ready[graph.storages[storage].home][storage] = now
            elif target < 0:
                here, op = ready[source], graph.ops[what]
                start = device_free[source]
                for storage in op.reads:
                    start = max(start, here.get(storage, 0))
                end = start + (instance.cost_ns[what][source] or 0)
                device_free[source] = end
                here.update(dict.fromkeys(op.writes, end))
            else:
                link = source, target
                start = max(link_free[link], ready[source].get(what, 0))
                if instance.copies_wait:
                    start = max(start, device_free[source], device_free[target])
                end = start + instance.copy_ns[link][what]
                ready[target][what] = link_free[link] = end
        return max(*device_free, *link_free.values(), 0)

    def steps(self) -> Iterator[Step]:
        """Yield runs, copies and the boundary, without discards."""
        for what, source, target in self.notes:
            if what == BOUNDARY:
                yield Boundary()
            elif target < 0:
                yield Compute(what, source)
            else:
                yield Copy(what, source, target)


class Executor:
    """Executes one instance again and again; its numbers are prepared once."""

    def __init__(self, instance: DeviceInstance) -> None:
        self.instance = instance

    def execute(
        self,
        placement: Placement,
        rule: ExecutionRule | None = None,
        *,
        runs_per_op: int = 12,
        limits: Limits | None = None,
    ) -> Execution | None:
        """Return what keeps to every device's budget, one step after the other.

        Parameters
        ----------
        placement
            Where each op runs for the first time; at least one device each.
        rule
            How victims are chosen.
        runs_per_op
            Give up once the runs exceed this multiple of the ops.
        limits
            When to give up.

        Returns
        -------
        Execution | None
            Steps for :func:`remat.core.liveness.insert_discards`; ``None`` if the rule
            does not get by with the memory.

        Notes
        -----
        Time O(runs x live storages).
        """
        rule = rule or ExecutionRule()
        notes = run_on_devices(
            self._base,
            placement,
            self._graph,
            self._routes,
            Prices(
                float(rule.size_exponent),
                float(rule.distance_exponent),
                float(rule.ancestor_share),
                rule.copy_percent,
            ),
            Bounds(self._room(rule), runs_per_op * len(self.instance.graph.ops)),
            None if limits is None else limits.remaining_s,
        )
        return None if notes is None else Execution(self.instance, notes)

    def _room(self, rule: ExecutionRule) -> list[int]:
        reserves = rule.reserve_bytes or (0,) * len(self.instance.devices)
        return [
            NO_LIMIT_BYTES
            if budget is None
            else min(NO_LIMIT_BYTES, budget) * rule.limit_percent // 100 - reserve
            for budget, reserve in zip(
                self.instance.budgets_bytes, reserves, strict=True
            )
        ]

    @cached_property
    def _base(self) -> list[int]:
        return [*required_order(self.instance.graph), END]

    @cached_property
    def _graph(self) -> Graph:
        instance, graph = self.instance, self.instance.graph
        ops, storages = graph.ops, graph.storages
        return Graph(
            Ops(
                reads=[op.reads for op in ops],
                writes=[op.writes for op in ops],
                is_recomputable=[op.is_recomputable for op in ops],
                is_external=[op.is_external for op in ops],
                is_forward=[op.phase is Phase.FORWARD for op in ops],
                costs=[
                    [-1 if cost is None else cost for cost in costs]
                    for costs in instance.cost_ns
                ],
                workspaces=instance.workspace_bytes,
            ),
            Blocks(
                sizes=instance.sizes_bytes,
                homes=[storage.home for storage in storages],
                is_resident=[storage.is_resident for storage in storages],
                producers=[-1 if op is None else op for op in graph.producers],
            ),
            Passes(
                forward_outputs=graph.forward_outputs,
                tangents=graph.tangents,
                final_outputs=graph.final_outputs,
                held_outputs=sorted(graph.held_outputs),
            ),
        )

    @cached_property
    def _routes(self) -> Routes:
        """Shortest paths by R. Floyd's algorithm; links may be missing or unequal."""
        instance = self.instance
        count, blocks = len(instance.devices), range(len(instance.sizes_bytes))
        times = [[inf for _ in blocks] for _ in range(count * count)]
        nexts = [[-1 for _ in blocks] for _ in range(count * count)]
        for (source, target), link_ns in instance.copy_ns.items():
            times[source * count + target] = [float(time) for time in link_ns]
            nexts[source * count + target] = [target for _ in blocks]
        for middle, source, target in product(range(count), repeat=3):
            if len({middle, source, target}) < 3:
                continue
            way, first = source * count + target, source * count + middle
            second = middle * count + target
            for block in blocks:
                time = times[first][block] + times[second][block]
                if not isinf(time) and time < times[way][block]:
                    times[way][block] = time
                    nexts[way][block] = nexts[first][block]
        return Routes(times=times, nexts=nexts)


def execute(
    instance: DeviceInstance,
    placement: Placement,
    rule: ExecutionRule | None = None,
    *,
    limits: Limits | None = None,
) -> list[Step] | None:
    """Return the steps of :meth:`Executor.execute`, of one execution."""
    done = Executor(instance).execute(placement, rule, limits=limits)
    return None if done is None else [*done.steps()]
