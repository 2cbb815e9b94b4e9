"""Versioned JSON for graphs, platforms and schedules, and the envelope of every file.

A document is one JSON object with four keys::

    {"format": "remat", "kind": "schedule", "version": 1, "payload": {...}}

Tables (ops, storages, steps) are written one row a line under a header that names the
columns, so that files are small, load fast, and differ line by line. Numbers are
integers of bytes and nanoseconds. Every way in which a file can be wrong ends in one
:class:`~remat.errors.FileFormatError` that names the file and the place in it.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, assert_never, cast

from remat.errors import FileFormatError, InvalidGraphError, InvalidPlatformError
from remat.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.platform import (
    Device,
    DeviceKind,
    Link,
    MeasuredCost,
    MeasuredCosts,
    Platform,
)
from remat.schedule import Boundary, Compute, Copy, Discard, Schedule, Step

FORMAT = "remat"
"""What the ``format`` key of every document says."""

VERSION = 1
"""The version that is written, and the only one that is read."""

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

# What a path can raise: a loop of links is a RuntimeError before Python 3.13, and a
# zero character in a name is a ValueError.
_PATH_ERRORS = (OSError, RuntimeError, ValueError)

Parsed = TypeVar("Parsed")


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
        _refuse(environment, f"{where}.environment", "an object")
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
            _refuse(row, where, f"one of {_STEP_FORMS}")
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


def write_document(
    path: str | os.PathLike[str], kind: str, payload: Mapping[str, object]
) -> None:
    """Write a document so that the file is either the old one or the whole new one.

    The text goes to a temporary file in the same folder, is flushed to the disk, and
    takes the place of ``path`` in one move. On any failure, an interrupt included, the
    temporary file is removed and ``path`` is as it was.

    Parameters
    ----------
    path
        Where to write; a link is followed, the folder must exist.
    kind
        What the payload is: ``"graph"``, ``"schedule"``, ``"plan"``, ...
    payload
        Values that JSON knows, with finite numbers.

    Raises
    ------
    FileFormatError
        If the file cannot be written: the folder is missing or may not be written,
        ``path`` is a folder or a device, the disk is full.
    """
    write_bytes(path, format_document(kind, payload).encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file as :func:`write_document` does: it is the old or the whole new one.

    Parameters
    ----------
    path
        Where to write; a link is followed, the folder must exist.
    content
        All of the new file.

    Raises
    ------
    FileFormatError
        If the file cannot be written.
    """
    label = os.fspath(path)
    try:
        target = Path(path).resolve()
        is_special = target.exists() and not target.is_file()
        if not is_special:
            _replace(target, content)
    except _PATH_ERRORS as error:
        msg = f"cannot write {label!r}: {_reason(error)}"
        raise FileFormatError(msg) from error
    if is_special:
        msg = f"cannot write {label!r}: it exists and is not a regular file"
        raise FileFormatError(msg)


def _replace(target: Path, content: bytes) -> None:
    # Created by hand: tempfile would make the file readable by its owner alone, and
    # the move would carry that over to the document.
    temporary = target.with_name(f".{target.name[:80]}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def document_kind(path: str | os.PathLike[str]) -> str:
    """Return what the document ``path`` says it is: ``"graph"``, ``"plan"``, ...

    The payload is not looked at.

    Raises
    ------
    FileFormatError
        If the file cannot be read, is damaged, or is not a document of this package.
    """
    label = os.fspath(path)
    text = _read_text(path, "file")
    try:
        return parse_text(_parse_envelope(text).get("kind"), "kind")
    except FileFormatError as error:
        msg = f"{label}: {error}"
        raise FileFormatError(msg) from error


def read_document(path: str | os.PathLike[str], kind: str) -> dict[str, object]:
    """Return the payload of the document ``path``, which must be of kind ``kind``.

    Raises
    ------
    FileFormatError
        If the file is missing, may not be read, is damaged or cut short, is not a
        document of this package, is of another kind, or of an unknown version.
    """
    label = os.fspath(path)
    text = _read_text(path, kind)
    try:
        return parse_document(text, kind)
    except FileFormatError as error:
        msg = f"{label}: {error}"
        raise FileFormatError(msg) from error


def _read_text(path: str | os.PathLike[str], kind: str) -> str:
    label = os.fspath(path)
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        msg = f"{label}: this is not a {FORMAT} {kind}: it is not UTF-8 text ({error})"
        raise FileFormatError(msg) from error
    except _PATH_ERRORS as error:
        msg = f"cannot read {label!r}: {_reason(error)}"
        raise FileFormatError(msg) from error


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def load_document(
    path: str | os.PathLike[str], kind: str, parse: Callable[[object], Parsed]
) -> Parsed:
    """Return what ``parse`` makes of the payload of the document ``path``.

    Raises
    ------
    FileFormatError
        As :func:`read_document`, or what ``parse`` raised, with the file's name.
    """
    payload = read_document(path, kind)
    try:
        return parse(payload)
    except FileFormatError as error:
        msg = f"{os.fspath(path)}: {error}"
        raise FileFormatError(msg) from error


def format_document(kind: str, payload: Mapping[str, object]) -> str:
    """Return the text of a document: objects indented, tables one row a line."""
    document = {
        "format": FORMAT,
        "kind": kind,
        "version": VERSION,
        "payload": payload,
    }
    return _format(document, "") + "\n"


def _format(value: object, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        items = cast("Mapping[str, object]", value).items()
        lines = [
            f"{inner}{_compact(key)}: {_format(item, inner)}" for key, item in items
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list | tuple):
        rows = cast("Sequence[object]", value)
        if any(isinstance(row, list | tuple | Mapping) for row in rows):
            lines = [inner + _compact(row) for row in rows]
            return "[\n" + ",\n".join(lines) + f"\n{indent}]"
        return _compact(rows)
    return _compact(cast("object", value))


def _compact(value: object) -> str:
    # Other letters than ASCII are escaped: names come from file names and may hold
    # halves of surrogate pairs, which UTF-8 cannot express.
    return json.dumps(value, allow_nan=False)


def parse_document(text: str, kind: str) -> dict[str, object]:
    """Return the payload of a document given as text.

    Raises
    ------
    FileFormatError
        If the text is no document of kind ``kind`` and of a known version.
    """
    fields = _parse_envelope(text)
    if "version" not in fields:
        msg = "there is no key 'version'"
        raise FileFormatError(msg)
    version = parse_integer(fields["version"], "version")
    if version != VERSION:
        msg = (
            f"the file is of version {version}, but this release reads version "
            f"{VERSION} only; upgrade remat, or write the file again with this release"
        )
        raise FileFormatError(msg)
    parse_mapping(fields, "document", ("format", "kind", "version", "payload"))
    found = parse_text(fields["kind"], "kind")
    if found != kind:
        msg = f"the file holds a {_shorten(found)}, but a {kind} is needed"
        raise FileFormatError(msg)
    payload = fields["payload"]
    if not isinstance(payload, dict):
        _refuse(payload, "payload", "an object")
    return cast("dict[str, object]", payload)


def _parse_envelope(text: str) -> dict[str, object]:
    document = _parse_json(text)
    if not isinstance(document, dict) or "format" not in document:
        msg = f"this is JSON, but not a {FORMAT} file: there is no key 'format'"
        raise FileFormatError(msg)
    fields = cast("dict[str, object]", document)
    if fields["format"] != FORMAT:
        msg = f"the format is {_show(fields['format'])}, not {FORMAT!r}"
        raise FileFormatError(msg)
    return fields


def _parse_json(text: str) -> object:
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
        )
    except RecursionError as error:
        msg = "the file is damaged: lists or objects are nested too deeply"
        raise FileFormatError(msg) from error
    except json.JSONDecodeError as error:
        msg = (
            f"the file is damaged or cut short: line {error.lineno}, column "
            f"{error.colno}: {error.msg}"
        )
        raise FileFormatError(msg) from error
    except FileFormatError:
        raise
    except ValueError as error:
        # Python refuses to read integers of thousands of digits.
        msg = f"the file is damaged: {error}"
        raise FileFormatError(msg) from error


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        msg = f"the file is damaged: key {_show(twice)} is given twice in one object"
        raise FileFormatError(msg)
    return fields


def _refuse_constant(name: str) -> NoReturn:
    msg = f"the file is damaged: {name} is not a number that JSON knows"
    raise FileFormatError(msg)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse_constant(text)
    return number


def parse_mapping(
    value: object, where: str, keys: Collection[str]
) -> dict[str, object]:
    """Return ``value`` if it is an object with exactly the keys ``keys``.

    Parameters
    ----------
    value
        What JSON held.
    where
        The place in the document, for the error message.
    keys
        The keys that must be there; no other may.

    Raises
    ------
    FileFormatError
        If it is no object, a key is missing, or a key is unknown.
    """
    if not isinstance(value, dict):
        _refuse(value, where, "an object")
    fields = cast("dict[str, object]", value)
    missing = [key for key in keys if key not in fields]
    unknown = [key for key in fields if key not in keys]
    if missing or unknown:
        found = f"lacks {missing}" if missing else f"has unknown keys {unknown}"
        msg = f"{where} {_shorten(found)}; its keys are {', '.join(keys)}"
        raise FileFormatError(msg)
    return fields


def parse_rows(value: object, where: str, columns: Sequence[str]) -> list[list[object]]:
    """Return the rows of a table whose header must be ``columns``.

    Raises
    ------
    FileFormatError
        If the header differs, or a row has not one value per column.
    """
    fields = parse_mapping(value, where, ("columns", "rows"))
    if fields["columns"] != list(columns):
        _refuse(fields["columns"], f"{where}.columns", f"exactly {list(columns)}")
    rows: list[list[object]] = []
    for index, item in enumerate(parse_list(fields["rows"], f"{where}.rows")):
        row = parse_list(item, f"{where}.rows[{index}]")
        if len(row) != len(columns):
            needed = f"{len(columns)} values ({', '.join(columns)})"
            _refuse(row, f"{where}.rows[{index}]", needed)
        rows.append(row)
    return rows


def parse_list(value: object, where: str) -> list[object]:
    """Return ``value`` if it is a list.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if not isinstance(value, list):
        _refuse(value, where, "a list")
    return cast("list[object]", value)


def parse_integer(value: object, where: str) -> int:
    """Return ``value`` if it is an integer; true, false and 1.0 are not.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(value, where, "an integer")
    return value


def parse_number(value: object, where: str) -> float:
    """Return ``value`` if it is an integer or a fraction; true and false are not.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(value, where, "a number")
    return value


def parse_text(value: object, where: str) -> str:
    """Return ``value`` if it is text.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if not isinstance(value, str):
        _refuse(value, where, "text")
    return value


def parse_flag(value: object, where: str) -> bool:
    """Return ``value`` if it is true or false; 0 and 1 are not.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if not isinstance(value, bool):
        _refuse(value, where, "true or false")
    return value


def parse_choice(value: object, where: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if not isinstance(value, str) or value not in choices:
        _refuse(value, where, f"one of {', '.join(choices)}")
    return value


def parse_integers(value: object, where: str) -> tuple[int, ...]:
    """Return ``value`` as a tuple if it is a list of integers.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    return tuple(
        parse_integer(item, f"{where}[{index}]")
        for index, item in enumerate(parse_list(value, where))
    )


def parse_texts(value: object, where: str) -> tuple[str, ...]:
    """Return ``value`` as a tuple if it is a list of texts.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    return tuple(
        parse_text(item, f"{where}[{index}]")
        for index, item in enumerate(parse_list(value, where))
    )


def _refuse(value: object, where: str, needed: str) -> NoReturn:
    msg = f"{where} is {_show(value)}; it must be {needed}"
    raise FileFormatError(msg)


def _show(value: object) -> str:
    """Return ``value`` as JSON, cut to what fits on a line."""
    if isinstance(value, dict | list):
        # Not printed in full: nesting may be as deep as the reader allowed.
        kind = "an object" if isinstance(value, dict) else "a list"
        count = len(cast("dict[str, object] | list[object]", value))
        return f"{kind} of {count} items"
    return _shorten(json.dumps(value))


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
