"""A training graph on several devices: which op may run where, and how long.

A traced step knows one device, the model's own, which is called *home* here:
parameters, batch, optimizer state and the gradients that leave the step live there, and
it is the first device of every platform that this module makes. Where two devices are
of one kind, home still differs from the other (the caller's loss and optimizer run at
home only), so each device gets a kind of its own, named as the device.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.core.errors import InvalidPlatformError
from remat.core.graph import Op, TrainingGraph
from remat.core.platform import DeviceKind, Link, Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class CostColumn:
    """What each op of a graph costs on one device.

    Parameters
    ----------
    cost_ns
        Per op its time in nanoseconds, or ``None`` where it cannot run there.
    workspace_bytes
        Per op its scratch memory there, in bytes.
    """

    cost_ns: tuple[int | None, ...]
    workspace_bytes: tuple[int, ...]


def arrange(platform: Platform, home: int) -> Platform:
    """Return the platform as plans for the runtime have it.

    Device ``home`` is the first, every device has a kind of its own, and copies wait.

    Raises
    ------
    InvalidPlatformError
        If two devices share a name, the kind of one is not known, home runs no op, or a
        device has no way from home or back to it.
    """
    for name in platform.names:
        platform.index_of(name)
    order = [home, *(d for d in range(len(platform.devices)) if d != home)]
    kinds = [replace(platform.kind_of(d), name=platform.names[d]) for d in order]
    if not kinds[0].computes:
        msg = (
            f"device {platform.names[home]!r} runs no ops, and the model is there; move "
            "the model to a device that computes"
        )
        raise InvalidPlatformError(msg)
    place = {device: position for position, device in enumerate(order)}
    arranged = Platform(
        devices=tuple(
            replace(platform.devices[d], kind=platform.names[d]) for d in order
        ),
        links=tuple(
            replace(link, source=place[link.source], target=place[link.target])
            for link in platform.links
        ),
        kinds=tuple(kinds),
        copies_wait=True,
        allocators=platform.allocators,
    )
    _check_connected(arranged)
    return arranged


def home_of(platform: Platform, runs_on: str) -> int:
    """Return the device of the platform on which a model on ``runs_on`` is.

    That is the one of that name, or else the first that computes there.

    Parameters
    ----------
    platform
        Any.
    runs_on
        torch's name of a device (``"cuda:0"``) or of its type (``"cpu"``).

    Raises
    ------
    InvalidPlatformError
        If no device that computes is there.
    """
    found = [
        device
        for device in range(len(platform.devices))
        if platform.kind_of(device).computes and place_of(platform, device) == runs_on
    ]
    for device in found:
        if platform.names[device] == runs_on:
            return device
    if found:
        return found[0]
    msg = (
        f"the model is on {runs_on}, but no device of the platform that computes is: its "
        f"devices are {', '.join(platform.names)}"
    )
    raise InvalidPlatformError(msg)


def place_of(platform: Platform, device: int) -> str | None:
    """Return torch's name of the device that a device stands for, or ``None``.

    A kind may name a type of device only; the device's own name then says which one:
    ``"cuda:1"``, and else the first. All devices on ``cpu`` are logical devices that
    share one memory.

    Raises
    ------
    InvalidPlatformError
        If the device's kind is not known.
    """
    runs_on, name = platform.kind_of(device).runs_on, platform.names[device]
    if runs_on is None or ":" in runs_on:
        return runs_on
    if runs_on == "cpu":
        return "cpu"
    number = name.removeprefix(f"{runs_on}:")
    return f"{runs_on}:{number if number.isdecimal() else 0}"


def gathered(graph: TrainingGraph) -> TrainingGraph:
    """Return the graph with every storage at home on the first device.

    That is the step as one device alone would run it.
    """
    if all(storage.home == 0 for storage in graph.storages):
        return graph
    return replace(
        graph, storages=tuple(replace(storage, home=0) for storage in graph.storages)
    )


def _check_connected(platform: Platform) -> None:
    ways = [(link.source, link.target) for link in platform.links]
    from_home = _reached(ways)
    to_home = _reached([(target, source) for source, target in ways])
    for device, name in enumerate(platform.names):
        if device not in from_home or device not in to_home:
            direction = "to" if device not in from_home else "back from"
            msg = (
                f"no links lead {direction} device {name!r}, so nothing that it holds or "
                f"computes can be used; add a link between {platform.names[0]!r} and "
                f"{name!r} in each direction, or leave the device out"
            )
            raise InvalidPlatformError(msg)


def _reached(ways: Sequence[tuple[int, int]]) -> set[int]:
    reached, waiting = {0}, deque([0])
    while waiting:
        device = waiting.popleft()
        following = {target for source, target in ways if source == device} - reached
        reached |= following
        waiting.extend(following)
    return reached


def place_graph(graph: TrainingGraph, platform: Platform) -> TrainingGraph:
    """Return a graph with known costs, on the devices of an arranged platform.

    The costs on a device are those that the graph has for its kind or, scaled by
    ``time_percent``, for what the kind runs on.

    Parameters
    ----------
    graph
        Has costs per kind of device, as ``platform`` called them before
        :func:`arrange`, or for one kind.
    platform
        From :func:`arrange`.

    Raises
    ------
    InvalidPlatformError
        If the graph has no costs from which those of a device follow, or an op can run
        on no device.
    """
    return with_columns(
        graph,
        platform,
        [_column(graph, platform, d) for d in range(len(platform.devices))],
    )


def _column(graph: TrainingGraph, platform: Platform, device: int) -> CostColumn:
    kind = platform.kind_of(device)
    place = place_of(platform, device)
    known = [platform.names[device], place, kind.runs_on, (place or "").split(":")[0]]
    found = [name for name in known if name in graph.device_kinds]
    if not kind.computes:
        return nowhere(len(graph.ops))
    if not found or kind.has_rates:
        msg = (
            f"graph {graph.name!r} has costs for {', '.join(graph.device_kinds)}, from "
            f"which those on device {platform.names[device]!r} do not follow; plan the "
            "model itself, whose operators can be timed or estimated there"
        )
        raise InvalidPlatformError(msg)
    index = graph.device_kinds.index(found[0] or "")
    return CostColumn(
        cost_ns=tuple(scaled(op.cost_ns[index], kind) for op in graph.ops),
        workspace_bytes=tuple(op.workspace_bytes[index] for op in graph.ops),
    )


def nowhere(op_count: int) -> CostColumn:
    """Return the column of a device that runs none of ``op_count`` ops."""
    return CostColumn(cost_ns=(None,) * op_count, workspace_bytes=(0,) * op_count)


def scaled(cost_ns: int | None, kind: DeviceKind) -> int | None:
    """Return a time on what a kind runs on as the time on the kind, rounded up.

    Examples
    --------
    >>> slow = DeviceKind(name="slow", runs_on="cpu", time_percent=250)
    >>> scaled(3, slow), scaled(None, slow)
    (8, None)
    """
    return None if cost_ns is None else -(-cost_ns * kind.time_percent // 100)


def with_columns(
    graph: TrainingGraph, platform: Platform, columns: Sequence[CostColumn]
) -> TrainingGraph:
    """Return the graph with costs for each device of an arranged platform.

    The caller's own work, and ops that are there for an effect, run at home alone.
    Ordered ops draw from a random number generator, so they run only where that
    generator is: on the logical devices of home's place.

    Parameters
    ----------
    graph
        A graph whose storages are all at home.
    platform
        From :func:`arrange`.
    columns
        One per device.

    Raises
    ------
    InvalidPlatformError
        If an op can run on no device.
    """
    places = [place_of(platform, d) for d in range(len(platform.devices))]
    ops: list[Op] = []
    for index, op in enumerate(graph.ops):
        allowed = [
            device == 0
            or (
                not op.is_external
                and bool(op.writes)
                and (not op.is_ordered or places[device] == places[0])
            )
            for device in range(len(columns))
        ]
        costs = tuple(
            column.cost_ns[index] if may else None
            for column, may in zip(columns, allowed, strict=True)
        )
        if all(cost is None for cost in costs):
            msg = (
                f"op {index} {op.name!r} can run on none of the devices "
                f"{', '.join(platform.names)}"
            )
            raise InvalidPlatformError(msg)
        ops.append(
            replace(
                op,
                cost_ns=costs,
                workspace_bytes=tuple(c.workspace_bytes[index] for c in columns),
            )
        )
    return replace(graph, ops=tuple(ops), device_kinds=platform.names)


def fully_linked(
    names: Sequence[str], bytes_per_s: int, latency_ns: int = 0
) -> tuple[Link, ...]:
    """Return equal links between all pairs of devices, in both directions."""
    devices = range(len(names))
    return tuple(
        Link(source=a, target=b, bytes_per_s=bytes_per_s, latency_ns=latency_ns)
        for a in devices
        for b in devices
        if a != b
    )
