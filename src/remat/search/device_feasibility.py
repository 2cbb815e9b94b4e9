"""Reasons why no schedule can exist, found without searching.

Each is a proof: an op that no device can run, residents that do not fit, an op whose
inputs, outputs and workspace exceed every device that could run it, a value that no
chain of links brings to where it is needed.
"""

from collections.abc import Iterable

from remat.core.units import format_bytes
from remat.search.device_instance import DeviceInstance


def runnable_devices(instance: DeviceInstance) -> tuple[tuple[int, ...], ...]:
    """Return per op the devices on which some schedule may run it.

    Empty for an op that no schedule can run. A device is left out if the op has no cost
    there, does not fit there on its own, or a value that it reads cannot arrive there.
    """
    return _spread(instance)[0]


def _spread(
    instance: DeviceInstance,
) -> tuple[tuple[tuple[int, ...], ...], list[set[int]]]:
    """Return per op where it may run, and per storage where its value may come."""
    graph = instance.graph
    places = [set[int]() for _ in graph.storages]
    for index, storage in enumerate(graph.storages):
        if storage.is_resident or index in graph.tangents:
            places[index] = _reachable(instance, {storage.home})
    found: list[tuple[int, ...]] = []
    for index, op in enumerate(graph.ops):
        devices = tuple(
            d
            for d in instance.devices
            if instance.cost_ns[index][d] is not None
            and _fits(instance, instance.run_bytes(index, d), d)
            and all(d in places[s] for s in op.reads)
        )
        found.append(devices)
        for storage in op.writes:
            places[storage] = _reachable(instance, set(devices))
    return tuple(found), places


def infeasible_reason(instance: DeviceInstance) -> str | None:
    """Return why no schedule exists, in one sentence; ``None`` if nothing is wrong."""
    return (
        _resident_reason(instance)
        or _cost_reason(instance)
        or _run_reason(instance)
        or _output_reason(instance)
    )


def _reachable(instance: DeviceInstance, start: set[int]) -> set[int]:
    found, pending = set(start), list(start)
    while pending:
        here = pending.pop()
        for source, target in instance.copy_ns:
            if source == here and target not in found:
                found.add(target)
                pending.append(target)
    return found


def _named(instance: DeviceInstance, devices: Iterable[int]) -> str:
    return ", ".join(repr(instance.device_names[d]) for d in sorted(devices))


def _fits(instance: DeviceInstance, size_bytes: int, device: int) -> bool:
    budget = instance.budgets_bytes[device]
    return budget is None or size_bytes <= budget


def _resident_reason(instance: DeviceInstance) -> str | None:
    for device in instance.devices:
        budget = instance.budgets_bytes[device]
        if budget is not None and budget < 0:
            resident = instance.graph.resident_bytes(device)
            return (
                f"device {instance.device_names[device]!r} holds "
                f"{format_bytes(resident)} of parameters, inputs and the like during "
                f"the whole step, {format_bytes(-budget)} more than its budget: raise "
                "it to more than that, or give them another home"
            )
    return None


def _cost_reason(instance: DeviceInstance) -> str | None:
    for index in instance.required:
        if all(cost is None for cost in instance.cost_ns[index]):
            names = ", ".join(repr(name) for name in instance.device_names)
            return (
                f"op {index} {instance.graph.ops[index].name!r} can run on no device of "
                f"the platform ({names}): add a device of a kind that it has a cost for"
            )
    return None


def _run_reason(instance: DeviceInstance) -> str | None:
    graph = instance.graph
    runnable, places = _spread(instance)
    for index in instance.required:
        if runnable[index]:
            continue
        op = graph.ops[index]
        able = [d for d in instance.devices if instance.cost_ns[index][d] is not None]
        fitting = [d for d in able if _fits(instance, instance.run_bytes(index, d), d)]
        if not fitting:
            needs = ", ".join(
                f"{format_bytes(instance.run_bytes(index, d))} beside the residents of "
                f"{instance.device_names[d]!r}, which has "
                f"{format_bytes(instance.budgets_bytes[d] or 0)} left for it"
                for d in able
            )
            return f"op {index} {op.name!r} fits on no device: it needs {needs}"
        names = _named(instance, fitting)
        lacking = [
            f"storage {s} {graph.storages[s].name!r} from {_named(instance, places[s])} "
            f"to {instance.device_names[d]!r}"
            for d in fitting
            for s in [s for s in op.reads if d not in places[s]][:1]
        ]
        return (
            f"op {index} {op.name!r} can run on {names}, but no links bring "
            f"{', or '.join(lacking)}: add a link"
        )
    return None


def _output_reason(instance: DeviceInstance) -> str | None:
    graph, runnable = instance.graph, runnable_devices(instance)
    producers = graph.producers
    for storage in (*graph.forward_outputs, *graph.final_outputs):
        producer, block = producers[storage], graph.storages[storage]
        if producer is not None and block.home not in _reachable(
            instance, set(runnable[producer])
        ):
            return (
                f"storage {storage} {block.name!r} must be on device "
                f"{instance.device_names[block.home]!r}, but no links lead there from "
                f"where it can be computed, {_named(instance, runnable[producer])}: add "
                "a link"
            )
    leaving = (
        ("at the boundary", {*graph.forward_outputs, *graph.tangents}),
        ("at the end", set(graph.final_outputs)),
    )
    for when, storages in leaving:
        for device in instance.devices:
            size = sum(
                instance.sizes_bytes[s]
                for s in storages
                if graph.storages[s].home == device
                and not graph.storages[s].is_resident
            )
            if not _fits(instance, size, device):
                return (
                    f"device {instance.device_names[device]!r} must hold "
                    f"{format_bytes(size)} {when} beside its residents, but has "
                    f"{format_bytes(instance.budgets_bytes[device] or 0)} left for it"
                )
    return None
