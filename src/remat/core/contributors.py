"""What is live on a device during a step, by the layer that made it, largest first.

Blocks of the same kind and size in layers that are numbered alike count together: a
model of twelve equal blocks has one entry for the twelve outputs of their first layers.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from remat.core.graph import Op, Role, Storage, TrainingGraph
from remat.core.platform import Platform, single_device
from remat.core.schedule import Compute, Copy, Schedule
from remat.core.simulator import simulate

_GRADIENT = "gradient of "
_LABEL = re.compile(r"(?P<layer>.+) \((?P<made>[^()]+)\)\Z")
_NUMBER = re.compile(r"((_\d+)+)?(\.\d+)?\Z")


def labelled(layer: str, made: str) -> str:
    """Return the name of what an op of a layer made; the layer may be unknown.

    Examples
    --------
    >>> labelled("encoder.3.linear1", "addmm_7"), labelled("", "addmm_7")
    ('encoder.3.linear1 (addmm_7)', 'addmm_7')
    """
    return f"{layer} ({made})" if layer else made


def layer_of(name: str) -> tuple[str, str]:
    """Return the layer and the op that are in a storage's name.

    Examples
    --------
    >>> layer_of("encoder.3.linear1 (addmm_7)"), layer_of("addmm_7")
    (('encoder.3.linear1', 'addmm_7'), ('', 'addmm_7'))
    """
    found = _LABEL.match(name)
    return ("", name) if found is None else (found["layer"], found["made"])


def operator_in(name: str) -> str:
    """Return the operator behind the name of a storage or an op.

    Examples
    --------
    >>> operator_in("encoder.3.linear1 (addmm_7)"), operator_in("native_dropout_2.0")
    ('addmm', 'native_dropout')
    """
    _, made = layer_of(name)
    return _NUMBER.sub("", made) or made


@dataclass(frozen=True, slots=True)
class _Kind:
    """What entries have in common that count together.

    ``layer`` has ``*`` for its numbers. Where no layer is known, sizes may differ.
    """

    what: str
    layer: str
    operator: str
    size_bytes: int


@dataclass(slots=True)
class _Entry:
    size_bytes: int = 0
    layers: list[list[str]] = field(default_factory=list[list[str]])

    def name(self, kind: _Kind) -> str:
        parts = [kind.what, _together(self.layers), kind.operator]
        if parts[1] and parts[2]:
            parts[2] = f"({parts[2]})"
        text = " ".join(part for part in parts if part)
        return f"{text} x {len(self.layers)}" if len(self.layers) > 1 else text


class _Listing:
    def __init__(self) -> None:
        self.entries: dict[_Kind, _Entry] = {}

    def add(self, what: str, layer: str, operator: str, size_bytes: int) -> None:
        if not size_bytes:
            return
        parts = layer.split(".") if layer else []
        pattern = ".".join("*" if part.isdecimal() else part for part in parts)
        kind = _Kind(what, pattern, operator, size_bytes if layer else 0)
        entry = self.entries.setdefault(kind, _Entry())
        entry.size_bytes += size_bytes
        entry.layers.append(parts)

    def add_storage(self, storage: Storage) -> None:
        role, name, size_bytes = str(storage.role), storage.name, storage.size_bytes
        if storage.role is Role.GRADIENT and name.startswith(_GRADIENT):
            self.add(_GRADIENT.strip(), name.removeprefix(_GRADIENT), "", size_bytes)
        elif storage.is_resident:
            is_said = name.startswith(role)
            self.add("" if is_said else role, name, "", size_bytes)
        else:
            self.add(role, layer_of(name)[0], operator_in(name), size_bytes)

    def add_workspace(self, graph: TrainingGraph, op: Op, size_bytes: int) -> None:
        layer = next(
            (layer for layer, _ in map(layer_of, _names(graph, op)) if layer), ""
        )
        self.add("workspace of", layer, op.name, size_bytes)


def contributors(
    graph: TrainingGraph,
    schedule: Schedule,
    step: int,
    platform: Platform | None = None,
    device: int = 0,
) -> list[tuple[str, int]]:
    """Return what is live on a device during a step, largest first.

    Parameters, gradients and inputs are named as the model names them; other blocks by
    role, the layer that made them where it is known, and the operator. What is alike in
    layers that differ in their numbers alone is one entry. The workspace of the step's
    op is an entry of its own.

    Parameters
    ----------
    graph, schedule
        What is trained, and how.
    step
        Position in the schedule.
    platform, device
        Where; by default one device of the graph's first kind.

    Returns
    -------
    list of (name, bytes)
        Sorted by decreasing size; entries of zero bytes are left out.
    """
    platform = platform or single_device(kind=graph.device_kinds[0])
    kind = graph.kind_index(platform.devices[device].kind)
    prefix = Schedule(schedule.steps[:step])
    live = simulate(graph, platform, prefix).live_after[device]
    listing = _Listing()
    for storage in graph.storages:
        if storage.is_resident and storage.home == device:
            listing.add_storage(storage)
    current = schedule.steps[step] if step < len(schedule.steps) else None
    written: tuple[int, ...] = ()
    if isinstance(current, Compute) and current.device == device:
        op = graph.ops[current.op]
        listing.add_workspace(graph, op, op.workspace_bytes[kind])
        written = op.writes
    elif isinstance(current, Copy) and current.target == device:
        written = (current.storage,)
    for index in [*sorted(live), *written]:
        listing.add_storage(graph.storages[index])
    named = [
        (entry.name(kind), entry.size_bytes) for kind, entry in listing.entries.items()
    ]
    return sorted(named, key=lambda item: (-item[1], item[0]))


def largest(parts: Sequence[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    """Return the first entries of a sorted list, and the others as one.

    Examples
    --------
    >>> largest([("a", 5), ("b", 3), ("c", 2), ("d", 1)], 2)
    [('a', 5), ('b', 3), ('others (2)', 3)]
    """
    others = parts[count:]
    if len(others) < 2:
        return list(parts)
    rest_bytes = sum(size for _, size in others)
    return [*parts[:count], (f"others ({len(others)})", rest_bytes)]


def _names(graph: TrainingGraph, op: Op) -> Iterable[str]:
    return (graph.storages[storage].name for storage in op.writes)


def _together(layers: Sequence[Sequence[str]]) -> str:
    """Return one text for layers that differ in their numbers alone.

    Examples
    --------
    >>> _together([["h", "0", "mlp"], ["h", "1", "mlp"], ["h", "3", "mlp"]])
    'h.{0-1,3}.mlp'
    """
    parts: list[str] = []
    for at_place in zip(*layers, strict=True):
        different = list(dict.fromkeys(at_place))
        if len(different) == 1:
            parts.append(different[0])
        else:
            numbers = sorted(int(text) for text in different)
            parts.append(f"{{{','.join(_ranges(numbers))}}}")
    return ".".join(parts)


def _ranges(numbers: Sequence[int]) -> Iterable[str]:
    """Yield runs of increasing numbers, as first and last."""
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number != previous + 1:
            yield str(start) if start == previous else f"{start}-{previous}"
            start = previous if number is None else number
        previous = previous if number is None else number
