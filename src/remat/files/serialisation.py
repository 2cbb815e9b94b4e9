"""Graphs, platforms and schedules as versioned JSON, in :mod:`remat.files.documents`.

The classes here declare what files hold; columns are written in their order. Tables
(ops, storages, steps) hold integers of bytes and nanoseconds, one row a line.
"""

import os
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Annotated, NamedTuple, TypeVar, assert_never

import msgspec
from msgspec import UNSET, UnsetType

from remat.core.allocator import AllocatorSettings
from remat.core.certificate import Certificate
from remat.core.errors import FileFormatError, InvalidGraphError, InvalidPlatformError
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.platform import (
    Device,
    DeviceAllocator,
    DeviceKind,
    Link,
    MeasuredCost,
    MeasuredCosts,
    Platform,
)
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.files.conversion import convert, differs, show
from remat.files.documents import load_document, write_document

COSTS_VERSION = 1
"""The version of measured costs in a platform file: of how operators are described."""

Record = TypeVar("Record")


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """Names of columns, and rows of one value a column: a class below says which."""

    columns: object
    rows: list[object]


class _StorageRow(NamedTuple):
    name: str
    size_bytes: int
    role: Role
    is_resident: bool
    home: int


class _OpRow(NamedTuple):
    name: str
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost_ns: tuple[int | None, ...]
    workspace_bytes: tuple[int, ...]
    non_recomputable: str | None
    is_ordered: bool
    is_external: bool
    source: str


class _Graph(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    device_kinds: tuple[str, ...]
    forward_outputs: tuple[int, ...]
    tangents: tuple[int, ...]
    final_outputs: tuple[int, ...]
    storages: _Table
    ops: _Table


class _KindRow(NamedTuple):
    name: str
    runs_on: str | None
    computes: bool
    time_percent: int
    flops_per_s: int | None
    bytes_per_s: int | None
    launch_ns: int


class _DeviceRow(NamedTuple):
    name: str
    kind: str
    budget_bytes: int | None


class _LinkRow(NamedTuple):
    source: int
    target: int
    bytes_per_s: int
    latency_ns: int


class _CostRow(NamedTuple):
    device: str
    operator: str
    cost_ns: int | None
    workspace_bytes: int
    output_sizes_bytes: tuple[int, ...]
    aliases_input: bool
    samples: int
    spread_ns: int


class _Costs(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    environment: dict[str, object]
    operators: _Table


class _Platform(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    # Older files have none of the optional keys.
    kinds: _Table | UnsetType = UNSET
    copies_wait: bool = False
    devices: _Table
    links: _Table
    costs: _Costs | UnsetType = UNSET
    allocators: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class _Step(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    pass


class _Compute(_Step, tag="compute"):
    op: int
    device: int = 0


class _Discard(_Step, tag="discard"):
    storage: int
    device: int = 0


class _Copy(_Step, tag="copy"):
    storage: int
    source: int
    target: int


class _Boundary(_Step, tag="boundary"):
    pass


_STEP_FORMS = (
    'one of ["compute", op], ["compute", op, device], ["discard", storage], '
    '["discard", storage, device], ["copy", storage, source, target] or ["boundary"]'
)
_STEPS: dict[type[_Step], Callable[..., Step]] = {
    _Compute: Compute,
    _Discard: Discard,
    _Copy: Copy,
    _Boundary: Boundary,
}


class _Schedule(msgspec.Struct, forbid_unknown_fields=True):
    steps: list[
        Annotated[
            _Compute | _Discard | _Copy | _Boundary,
            msgspec.Meta(description=_STEP_FORMS),
        ]
    ]


class _Certificate(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    bound_ns: int
    memory_bytes: int
    moments: tuple[int, ...]
    rows: tuple[int, ...]
    multipliers: tuple[int, ...]


def _table(row: type[NamedTuple], records: Iterable[object]) -> dict[str, object]:
    values = attrgetter(*row._fields)
    return {
        "columns": list(row._fields),
        "rows": [values(record) for record in records],
    }


def _records(
    table: _Table, row: type[NamedTuple], make: Callable[..., Record], where: str
) -> tuple[Record, ...]:
    """Return what ``make`` makes of the rows, with the columns as keywords."""
    columns = list(row._fields)
    if table.columns != columns:
        msg = differs(table.columns, f"{where}.columns", f"exactly {columns}")
        raise FileFormatError(msg)
    rows = convert(table.rows, list[row], f"{where}.rows")
    return tuple(make(**values._asdict()) for values in rows)


def graph_to_json(graph: TrainingGraph) -> dict[str, object]:
    """Return ``graph`` as values that JSON knows; time linear in the graph."""
    return {
        "name": graph.name,
        "device_kinds": graph.device_kinds,
        "forward_outputs": graph.forward_outputs,
        "tangents": graph.tangents,
        "final_outputs": graph.final_outputs,
        "storages": _table(_StorageRow, graph.storages),
        "ops": _table(_OpRow, graph.ops),
    }


def graph_from_json(payload: object) -> TrainingGraph:
    """Return the graph that :func:`graph_to_json` wrote; time linear in the graph.

    Raises
    ------
    FileFormatError
        If a key is missing or unknown, a value has the wrong type, or the graph breaks
        a rule of the model of computation.
    """
    fields = convert(payload, _Graph, "graph")
    try:
        return TrainingGraph(
            name=fields.name,
            device_kinds=fields.device_kinds,
            forward_outputs=fields.forward_outputs,
            tangents=fields.tangents,
            final_outputs=fields.final_outputs,
            storages=_records(fields.storages, _StorageRow, Storage, "graph.storages"),
            ops=_records(fields.ops, _OpRow, Op, "graph.ops"),
        )
    except InvalidGraphError as error:
        msg = f"the graph is not a valid training graph: {error}"
        raise FileFormatError(msg) from error


def platform_to_json(platform: Platform) -> dict[str, object]:
    """Return ``platform`` as values that JSON knows.

    Descriptions of device kinds and measured costs are left out where there are none,
    and the flag ``copies_wait`` where it is false. Allocators are texts by the devices'
    names, as ``PYTORCH_ALLOC_CONF`` has them.
    """
    payload: dict[str, object] = {}
    if platform.kinds:
        payload["kinds"] = _table(_KindRow, platform.kinds)
    if platform.copies_wait:
        payload["copies_wait"] = True
    payload["devices"] = _table(_DeviceRow, platform.devices)
    payload["links"] = _table(_LinkRow, platform.links)
    if platform.costs is not None:
        payload["costs"] = {
            "version": COSTS_VERSION,
            "environment": dict(platform.costs.environment),
            "operators": _table(_CostRow, platform.costs.operators),
        }
    if platform.allocators:
        payload["allocators"] = {a.device: str(a.settings) for a in platform.allocators}
    return payload


def platform_from_json(payload: object) -> Platform:
    """Return the platform that :func:`platform_to_json` wrote.

    Raises
    ------
    FileFormatError
        If a key is missing or unknown, a value has the wrong type, or the devices and
        links are inconsistent.
    """
    fields = convert(payload, _Platform, "platform")
    kinds, costs = fields.kinds, fields.costs
    try:
        return Platform(
            devices=_records(fields.devices, _DeviceRow, Device, "platform.devices"),
            links=_records(fields.links, _LinkRow, Link, "platform.links"),
            kinds=()
            if kinds is UNSET
            else _records(kinds, _KindRow, DeviceKind, "platform.kinds"),
            copies_wait=fields.copies_wait,
            costs=None if costs is UNSET else _measured_costs(costs),
            allocators=tuple(
                DeviceAllocator(device=name, settings=AllocatorSettings.parse(text))
                for name, text in fields.allocators.items()
            ),
        )
    except InvalidPlatformError as error:
        msg = f"the platform is inconsistent: {error}"
        raise FileFormatError(msg) from error


def _measured_costs(costs: _Costs) -> MeasuredCosts:
    where = "platform.costs"
    if costs.version != COSTS_VERSION:
        msg = (
            f"{where} are of version {show(costs.version)}, but this release reads version "
            f"{COSTS_VERSION} only; measure them again with remat profile-platform, or "
            "remove them"
        )
        raise FileFormatError(msg)
    return MeasuredCosts(
        environment=tuple(
            (name, convert(text, str, f"{where}.environment[{name!r}]"))
            for name, text in costs.environment.items()
        ),
        operators=_records(
            costs.operators, _CostRow, MeasuredCost, f"{where}.operators"
        ),
    )


def schedule_to_json(schedule: Schedule) -> dict[str, object]:
    """Return ``schedule`` as values that JSON knows; device 0 is left out."""
    return {"steps": [_step_to_json(step) for step in schedule.steps]}


def _step_to_json(step: Step) -> list[object]:
    match step:
        case Compute(op, device):
            return ["compute", op] if device == 0 else ["compute", op, device]
        case Discard(storage, device):
            return ["discard", storage] if device == 0 else ["discard", storage, device]
        case Copy():
            return ["copy", step.storage, step.source, step.target]
        case Boundary():
            return ["boundary"]
        case _:
            assert_never(step)


def schedule_from_json(payload: object) -> Schedule:
    """Return the schedule that :func:`schedule_to_json` wrote.

    The steps need not form a valid schedule: that is for the simulator to say.

    Raises
    ------
    FileFormatError
        If a key is missing or unknown, or a step has none of the known forms.
    """
    rows = convert(payload, _Schedule, "schedule").steps
    return Schedule(
        tuple(_STEPS[type(row)](*msgspec.structs.astuple(row)) for row in rows)
    )


def certificate_to_json(certificate: Certificate, bound_ns: int) -> dict[str, object]:
    """Return ``certificate``, and the bound that it proves, as values that JSON knows.

    What stands of the bound is for people: readers verify it.
    """
    return {
        "version": certificate.version,
        "bound_ns": bound_ns,
        "memory_bytes": certificate.memory_bytes,
        "moments": certificate.moments,
        "rows": [row for row, _ in certificate.multipliers],
        "multipliers": [multiplier for _, multiplier in certificate.multipliers],
    }


def certificate_from_json(payload: object, where: str) -> tuple[Certificate, int]:
    """Return the certificate that :func:`certificate_to_json` wrote, and the bound.

    Nothing is verified here.

    Raises
    ------
    FileFormatError
        If a key is missing or unknown, a value has the wrong type, or there is not one
        multiplier a row.
    """
    fields = convert(payload, _Certificate, where)
    if len(fields.rows) != len(fields.multipliers):
        found = f"{len(fields.multipliers)} numbers"
        msg = f"{where}.multipliers are {found}; there are {len(fields.rows)} rows"
        raise FileFormatError(msg)
    certificate = Certificate(
        version=fields.version,
        memory_bytes=fields.memory_bytes,
        moments=fields.moments,
        multipliers=tuple(zip(fields.rows, fields.multipliers, strict=True)),
    )
    return certificate, fields.bound_ns


def save_graph(path: str | os.PathLike[str], graph: TrainingGraph) -> None:
    """Write ``graph`` to ``path``, atomically; see :func:`write_document`."""
    write_document(path, "graph", graph_to_json(graph))


def load_graph(path: str | os.PathLike[str]) -> TrainingGraph:
    """Return the graph in the file ``path``.

    Raises
    ------
    FileFormatError
        If the file cannot be read, or holds anything but a graph of a known version.
    """
    return load_document(path, "graph", graph_from_json)


def save_platform(path: str | os.PathLike[str], platform: Platform) -> None:
    """Write ``platform`` to ``path``, atomically; see :func:`write_document`."""
    write_document(path, "platform", platform_to_json(platform))


def load_platform(path: str | os.PathLike[str]) -> Platform:
    """Return the platform in the file ``path``.

    Raises
    ------
    FileFormatError
        If the file cannot be read, or holds anything but a platform of a known version.
    """
    return load_document(path, "platform", platform_from_json)


def save_schedule(path: str | os.PathLike[str], schedule: Schedule) -> None:
    """Write ``schedule`` to ``path``, atomically; see :func:`write_document`."""
    write_document(path, "schedule", schedule_to_json(schedule))


def load_schedule(path: str | os.PathLike[str]) -> Schedule:
    """Return the schedule in the file ``path``.

    Raises
    ------
    FileFormatError
        If the file cannot be read, or holds anything but a schedule of a known version.
    """
    return load_document(path, "schedule", schedule_from_json)
