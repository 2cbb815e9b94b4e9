"""From a training graph to the published abstraction, and back to a schedule."""

from collections.abc import Iterable

from remat.core.graph import Phase
from remat.core.liveness import insert_discards
from remat.core.schedule import Boundary, Compute, Copy, Schedule, Step
from remat.search.device_instance import DeviceInstance
from remat.solvers.devices.published import PublishedInstance

_SCALE = 1e4
_NO_LINK = 1e9


def published_instance(
    instance: DeviceInstance,
) -> tuple[PublishedInstance, tuple[int, ...]]:
    """Return what the paper would see of an instance, and the op of each of its ops.

    Sizes and times are scaled to numbers of moderate size. A missing link costs more
    than everything else together; a device without a budget has room for everything.
    """
    graph, ops = instance.graph, instance.required
    place = {op: index for index, op in enumerate(ops)}
    total_bytes = sum(instance.sizes_bytes) or 1
    given = [b for b in instance.budgets_bytes if b is not None and b > 0]
    byte = max(given, default=total_bytes) / _SCALE
    longest = max((c for costs in instance.cost_ns for c in costs if c), default=1)
    moment = longest / _SCALE
    edges: dict[tuple[int, int], set[int]] = {}
    for op in ops:
        for storage in graph.ops[op].reads:
            producer = graph.producers[storage]
            if producer is not None:
                edges.setdefault((place[producer], place[op]), set()).add(storage)
    pairs = [(s, t) for s in instance.devices for t in instance.devices if s != t]
    return PublishedInstance(
        costs=[
            [None if c is None else c / moment for c in instance.cost_ns[op]]
            for op in ops
        ],
        sizes=[
            sum(instance.sizes_bytes[s] for s in graph.ops[op].writes) / byte
            for op in ops
        ],
        copy_costs={
            edge: {
                pair: sum(instance.copy_ns[pair][s] for s in storages) / moment
                if pair in instance.copy_ns
                else _NO_LINK
                for pair in pairs
            }
            for edge, storages in edges.items()
        },
        budgets=[
            (total_bytes if b is None else max(0, b)) / byte
            for b in instance.budgets_bytes
        ],
    ), ops


def lifted(instance: DeviceInstance, runs: Iterable[tuple[int, int]]) -> Schedule:
    """Return the schedule of runs (op, device), with the copies that they need.

    What a run reads and is not on its device is copied for that run alone, from where
    it takes least time; outputs are brought home. A read that is nowhere, or that no
    link brings, is left for the judge to name.
    """
    graph = instance.graph
    steps: list[Step] = []
    live = {
        (index, storage.home)
        for index, storage in enumerate(graph.storages)
        if storage.is_resident
    }

    def fetch(storage: int, device: int) -> bool:
        sources = [
            (times[storage], source)
            for (source, target), times in instance.copy_ns.items()
            if target == device and (storage, source) in live
        ]
        if (storage, device) in live or not sources:
            return False
        steps.append(Copy(storage, min(sources)[1], device))
        return True

    def bring_home(storages: Iterable[int]) -> None:
        for storage in storages:
            home = graph.storages[storage].home
            if fetch(storage, home):
                live.add((storage, home))

    def cross() -> None:
        bring_home(graph.forward_outputs)
        steps.append(Boundary())
        live.update((s, graph.storages[s].home) for s in graph.tangents)

    is_backward = False
    for op, device in runs:
        if graph.ops[op].phase is Phase.BACKWARD and not is_backward:
            cross()
            is_backward = True
        if graph.ops[op].is_external:
            bring_home(graph.final_outputs if is_backward else graph.forward_outputs)
        for storage in graph.ops[op].reads:
            fetch(storage, device)
        steps.append(Compute(op, device))
        live.update((storage, device) for storage in graph.ops[op].writes)
    if not is_backward:
        cross()
    bring_home(graph.final_outputs)
    return insert_discards(graph, steps)
