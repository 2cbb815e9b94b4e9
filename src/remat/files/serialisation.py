"""Graphs, platforms and schedules as versioned JSON, in :mod:`remat.files.documents`.

Tables (ops, storages, steps) hold integers of bytes and nanoseconds, one row a line.
"""

import os
from collections.abc import Sequence
from typing import assert_never, cast

from remat.core.errors import FileFormatError, InvalidGraphError, InvalidPlatformError
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.platform import (
    Device,
    DeviceKind,
    Link,
    MeasuredCost,
    MeasuredCosts,
    Platform,
)
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.files.documents import (
    load_document,
    parse_choice,
    parse_flag,
    parse_integer,
    parse_integers,
    parse_list,
    parse_mapping,
    parse_rows,
    parse_text,
    parse_texts,
    refuse,
    write_document,
)

_STORAGE_COLUMNS = ("name", "size_bytes", "role", "is_resident", "home")
_OP_COLUMNS = (
    "name",
    "phase",
    "reads",
    "writes",
    "cost_ns",
    "workspace_bytes",
    "non_recomputable",
    "is_ordered",
    "is_external",
    "source",
)
_DEVICE_COLUMNS = ("name", "kind", "budget_bytes")
_LINK_COLUMNS = ("source", "target", "bytes_per_s", "latency_ns")
_KIND_COLUMNS = (
    "name",
    "runs_on",
    "computes",
    "time_percent",
    "flops_per_s",
    "bytes_per_s",
    "launch_ns",
)
_COST_COLUMNS = (
    "device",
    "operator",
    "cost_ns",
    "workspace_bytes",
    "output_sizes_bytes",
    "aliases_input",
    "samples",
    "spread_ns",
)
COSTS_VERSION = 1
"""The version of measured costs in a platform file: of how operators are described."""

_STEP_FORMS = (
    '["compute", op], ["compute", op, device], ["discard", storage], '
    '["discard", storage, device], ["copy", storage, source, target] or ["boundary"]'
)


def graph_to_json(graph: TrainingGraph) -> dict[str, object]:
    """Return ``graph`` as values that JSON knows; time linear in the graph."""
    return {
        "name": graph.name,
        "device_kinds": list(graph.device_kinds),
        "forward_outputs": list(graph.forward_outputs),
        "tangents": list(graph.tangents),
        "final_outputs": list(graph.final_outputs),
        "storages": {
            "columns": list(_STORAGE_COLUMNS),
            "rows": [
                [s.name, s.size_bytes, str(s.role), s.is_resident, s.home]
                for s in graph.storages
            ],
        },
        "ops": {
            "columns": list(_OP_COLUMNS),
            "rows": [
                [
                    op.name,
                    str(op.phase),
                    list(op.reads),
                    list(op.writes),
                    list(op.cost_ns),
                    list(op.workspace_bytes),
                    op.non_recomputable,
                    op.is_ordered,
                    op.is_external,
                    op.source,
                ]
                for op in graph.ops
            ],
        },
    }


def graph_from_json(payload: object) -> TrainingGraph:
    """Return the graph that :func:`graph_to_json` wrote; time linear in the graph.

    Raises
    ------
    FileFormatError
        If a key is missing or unknown, a value has the wrong type, or the graph breaks
        a rule of the model of computation.
    """
    fields = parse_mapping(
        payload,
        "graph",
        (
            "name",
            "device_kinds",
            "forward_outputs",
            "tangents",
            "final_outputs",
            "storages",
            "ops",
        ),
    )
    storage_rows = parse_rows(fields["storages"], "graph.storages", _STORAGE_COLUMNS)
    op_rows = parse_rows(fields["ops"], "graph.ops", _OP_COLUMNS)
    try:
        return TrainingGraph(
            name=parse_text(fields["name"], "graph.name"),
            device_kinds=parse_texts(fields["device_kinds"], "graph.device_kinds"),
            forward_outputs=parse_integers(
                fields["forward_outputs"], "graph.forward_outputs"
            ),
            tangents=parse_integers(fields["tangents"], "graph.tangents"),
            final_outputs=parse_integers(
                fields["final_outputs"], "graph.final_outputs"
            ),
            storages=tuple(
                _parse_storage(row, f"graph.storages.rows[{index}]")
                for index, row in enumerate(storage_rows)
            ),
            ops=tuple(
                _parse_op(row, f"graph.ops.rows[{index}]")
                for index, row in enumerate(op_rows)
            ),
        )
    except InvalidGraphError as error:
        msg = f"the graph is not a valid training graph: {error}"
        raise FileFormatError(msg) from error


def _parse_storage(row: Sequence[object], where: str) -> Storage:
    name, size_bytes, role, is_resident, home = row
    return Storage(
        name=parse_text(name, f"{where}.name"),
        size_bytes=parse_integer(size_bytes, f"{where}.size_bytes"),
        role=Role(parse_choice(role, f"{where}.role", list(Role))),
        is_resident=parse_flag(is_resident, f"{where}.is_resident"),
        home=parse_integer(home, f"{where}.home"),
    )


def _parse_op(row: Sequence[object], where: str) -> Op:
    name, phase, reads, writes, cost, workspace, reason, ordered, external, source = row
    return Op(
        name=parse_text(name, f"{where}.name"),
        phase=Phase(parse_choice(phase, f"{where}.phase", list(Phase))),
        reads=parse_integers(reads, f"{where}.reads"),
        writes=parse_integers(writes, f"{where}.writes"),
        cost_ns=tuple(
            None if item is None else parse_integer(item, f"{where}.cost_ns[{index}]")
            for index, item in enumerate(parse_list(cost, f"{where}.cost_ns"))
        ),
        workspace_bytes=parse_integers(workspace, f"{where}.workspace_bytes"),
        non_recomputable=(
            None if reason is None else parse_text(reason, f"{where}.non_recomputable")
        ),
        is_ordered=parse_flag(ordered, f"{where}.is_ordered"),
        is_external=parse_flag(external, f"{where}.is_external"),
        source=parse_text(source, f"{where}.source"),
    )


def platform_to_json(platform: Platform) -> dict[str, object]:
    """Return ``platform`` as values that JSON knows.

    Descriptions of device kinds and measured costs are left out where there are none,
    and the flag ``copies_wait`` where it is false.
    """
    kinds = {
        "columns": list(_KIND_COLUMNS),
        "rows": [[getattr(k, name) for name in _KIND_COLUMNS] for k in platform.kinds],
    }
    return {
        **({"kinds": kinds} if platform.kinds else {}),
        **({"copies_wait": True} if platform.copies_wait else {}),
        "devices": {
            "columns": list(_DEVICE_COLUMNS),
            "rows": [[d.name, d.kind, d.budget_bytes] for d in platform.devices],
        },
        "links": {
            "columns": list(_LINK_COLUMNS),
            "rows": [
                [k.source, k.target, k.bytes_per_s, k.latency_ns]
                for k in platform.links
            ],
        },
        **({} if platform.costs is None else {"costs": _costs_to_json(platform.costs)}),
    }


def _costs_to_json(costs: MeasuredCosts) -> dict[str, object]:
    return {
        "version": COSTS_VERSION,
        "environment": dict(costs.environment),
        "operators": {
            "columns": list(_COST_COLUMNS),
            "rows": [
                [
                    cost.device,
                    cost.operator,
                    cost.cost_ns,
                    cost.workspace_bytes,
                    list(cost.output_sizes_bytes),
                    cost.aliases_input,
                    cost.samples,
                    cost.spread_ns,
                ]
                for cost in costs.operators
            ],
        },
    }


def platform_from_json(payload: object) -> Platform:
    """Return the platform that :func:`platform_to_json` wrote.

    Raises
    ------
    FileFormatError
        If a key is missing or unknown, a value has the wrong type, or the devices and
        links are inconsistent.
    """
    # Older files have none of the optional keys.
    optional = ("kinds", "copies_wait", "costs")
    given = cast("dict[str, object]", payload) if isinstance(payload, dict) else {}
    keys = [*(key for key in optional if key in given), "devices", "links"]
    fields = parse_mapping(cast("object", payload), "platform", keys)
    kinds = (
        parse_rows(fields["kinds"], "platform.kinds", _KIND_COLUMNS)
        if "kinds" in fields
        else []
    )
    devices = parse_rows(fields["devices"], "platform.devices", _DEVICE_COLUMNS)
    links = parse_rows(fields["links"], "platform.links", _LINK_COLUMNS)
    try:
        return Platform(
            devices=tuple(
                _parse_device(row, f"platform.devices.rows[{index}]")
                for index, row in enumerate(devices)
            ),
            links=tuple(
                _parse_link(row, f"platform.links.rows[{index}]")
                for index, row in enumerate(links)
            ),
            kinds=tuple(
                _parse_kind(row, f"platform.kinds.rows[{index}]")
                for index, row in enumerate(kinds)
            ),
            copies_wait=parse_flag(
                fields.get("copies_wait", False), "platform.copies_wait"
            ),
            costs=_parse_costs(fields["costs"]) if "costs" in fields else None,
        )
    except InvalidPlatformError as error:
        msg = f"the platform is inconsistent: {error}"
        raise FileFormatError(msg) from error


def _parse_device(row: Sequence[object], where: str) -> Device:
    name, kind, budget = row
    return Device(
        name=parse_text(name, f"{where}.name"),
        kind=parse_text(kind, f"{where}.kind"),
        budget_bytes=(
            None if budget is None else parse_integer(budget, f"{where}.budget_bytes")
        ),
    )


def _parse_kind(row: Sequence[object], where: str) -> DeviceKind:
    name, runs_on, computes, time_percent, flops, bandwidth, launch_ns = row

    def rate(value: object, column: str) -> int | None:
        return None if value is None else parse_integer(value, f"{where}.{column}")

    return DeviceKind(
        name=parse_text(name, f"{where}.name"),
        runs_on=None if runs_on is None else parse_text(runs_on, f"{where}.runs_on"),
        computes=parse_flag(computes, f"{where}.computes"),
        time_percent=parse_integer(time_percent, f"{where}.time_percent"),
        flops_per_s=rate(flops, "flops_per_s"),
        bytes_per_s=rate(bandwidth, "bytes_per_s"),
        launch_ns=parse_integer(launch_ns, f"{where}.launch_ns"),
    )


def _parse_costs(value: object) -> MeasuredCosts:
    where = "platform.costs"
    fields = parse_mapping(value, where, ("version", "environment", "operators"))
    version = parse_integer(fields["version"], f"{where}.version")
    if version != COSTS_VERSION:
        msg = (
            f"{where} are of version {version}, but this release reads version "
            f"{COSTS_VERSION} only; measure them again with remat profile-platform, or "
            "remove them"
        )
        raise FileFormatError(msg)
    environment = fields["environment"]
    if not isinstance(environment, dict):
        refuse(environment, f"{where}.environment", "an object")
    rows = parse_rows(fields["operators"], f"{where}.operators", _COST_COLUMNS)
    return MeasuredCosts(
        environment=tuple(
            (name, parse_text(text, f"{where}.environment[{name!r}]"))
            for name, text in cast("dict[str, object]", environment).items()
        ),
        operators=tuple(
            _parse_cost(row, f"{where}.operators.rows[{index}]")
            for index, row in enumerate(rows)
        ),
    )


def _parse_cost(row: Sequence[object], where: str) -> MeasuredCost:
    device, operator, cost_ns, workspace, sizes, aliases, samples, spread_ns = row
    return MeasuredCost(
        device=parse_text(device, f"{where}.device"),
        operator=parse_text(operator, f"{where}.operator"),
        cost_ns=None if cost_ns is None else parse_integer(cost_ns, f"{where}.cost_ns"),
        workspace_bytes=parse_integer(workspace, f"{where}.workspace_bytes"),
        output_sizes_bytes=parse_integers(sizes, f"{where}.output_sizes_bytes"),
        aliases_input=parse_flag(aliases, f"{where}.aliases_input"),
        samples=parse_integer(samples, f"{where}.samples"),
        spread_ns=parse_integer(spread_ns, f"{where}.spread_ns"),
    )


def _parse_link(row: Sequence[object], where: str) -> Link:
    source, target, bytes_per_s, latency_ns = (
        parse_integer(value, f"{where}.{column}")
        for value, column in zip(row, _LINK_COLUMNS, strict=True)
    )
    return Link(
        source=source, target=target, bytes_per_s=bytes_per_s, latency_ns=latency_ns
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
    fields = parse_mapping(payload, "schedule", ("steps",))
    rows = parse_list(fields["steps"], "schedule.steps")
    return Schedule(
        tuple(
            _parse_step(row, f"schedule.steps[{index}]")
            for index, row in enumerate(rows)
        )
    )


def _parse_step(value: object, where: str) -> Step:
    row = parse_list(value, where)
    numbers = [parse_integer(item, f"{where}, a number of it,") for item in row[1:]]
    step: Step
    match row[:1], numbers:
        case ["compute"], [op]:
            step = Compute(op)
        case ["compute"], [op, device]:
            step = Compute(op, device)
        case ["discard"], [storage]:
            step = Discard(storage)
        case ["discard"], [storage, device]:
            step = Discard(storage, device)
        case ["copy"], [storage, source, target]:
            step = Copy(storage, source, target)
        case ["boundary"], []:
            step = Boundary()
        case _:
            refuse(row, where, f"one of {_STEP_FORMS}")
    return step


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
