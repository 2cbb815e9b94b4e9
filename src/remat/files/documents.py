"""The envelope of every file: versioned JSON, written atomically, parsed with care.

A document is one JSON object with four keys::

    {"format": "remat", "kind": "schedule", "version": 1, "payload": {...}}

Tables are written one row a line under a header that names the columns, so that files
are small, load fast, and differ line by line. Every way in which a file can be wrong
ends in one :class:`~remat.core.errors.FileFormatError` that names file and place.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from remat.core.errors import FileFormatError

FORMAT = "remat"
"""What the ``format`` key of every document says."""

VERSION = 1
"""The version that is written, and the only one that is read."""

# What a path can raise: a loop of links is a RuntimeError before Python 3.13, and a
# zero character in a name is a ValueError.
_PATH_ERRORS = (OSError, RuntimeError, ValueError)

Parsed = TypeVar("Parsed")


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


def check_can_write(path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written, before the work whose result it holds.

    A file is made beside ``path``, and removed; ``path`` itself is not touched.

    Raises
    ------
    FileFormatError
        If the folder is missing or may not be written, or ``path`` is no file.
    """
    label, target = os.fspath(path), Path(path)
    try:
        target = target.resolve()
        if not target.parent.is_dir():
            reason = f"there is no folder {str(target.parent)!r}"
        elif target.is_dir():
            reason = "it is a folder"
        elif target.exists() and not target.is_file():
            reason = "it exists and is not a regular file"
        else:
            beside = _beside(target)
            beside.touch(exist_ok=False)
            beside.unlink()
            return
    except _PATH_ERRORS as error:
        reason = _reason(error)
    msg = f"cannot write {label!r}: {reason}"
    raise FileFormatError(msg)


def _beside(target: Path) -> Path:
    """Return a new name in the same folder."""
    return target.with_name(f".{target.name[:80]}.{secrets.token_hex(6)}.tmp")


def _replace(target: Path, content: bytes) -> None:
    # Created by hand: tempfile would make the file readable by its owner alone, and
    # the move would carry that over to the document.
    temporary = _beside(target)
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
        refuse(payload, "payload", "an object")
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
        refuse(value, where, "an object")
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
        refuse(fields["columns"], f"{where}.columns", f"exactly {list(columns)}")
    rows: list[list[object]] = []
    for index, item in enumerate(parse_list(fields["rows"], f"{where}.rows")):
        row = parse_list(item, f"{where}.rows[{index}]")
        if len(row) != len(columns):
            needed = f"{len(columns)} values ({', '.join(columns)})"
            refuse(row, f"{where}.rows[{index}]", needed)
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
        refuse(value, where, "a list")
    return cast("list[object]", value)


def parse_integer(value: object, where: str) -> int:
    """Return ``value`` if it is an integer; true, false and 1.0 are not.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(value, where, "an integer")
    return value


def parse_number(value: object, where: str) -> float:
    """Return ``value`` if it is an integer or a fraction; true and false are not.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(value, where, "a number")
    return value


def parse_text(value: object, where: str) -> str:
    """Return ``value`` if it is text.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if not isinstance(value, str):
        refuse(value, where, "text")
    return value


def parse_flag(value: object, where: str) -> bool:
    """Return ``value`` if it is true or false; 0 and 1 are not.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if not isinstance(value, bool):
        refuse(value, where, "true or false")
    return value


def parse_choice(value: object, where: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``.

    Raises
    ------
    FileFormatError
        If it is anything else.
    """
    if not isinstance(value, str) or value not in choices:
        refuse(value, where, f"one of {', '.join(choices)}")
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


def refuse(value: object, where: str, needed: str) -> NoReturn:
    """Raise what a value in a file that is not what it must be means.

    Raises
    ------
    FileFormatError
        Always: says where it stands, what it is and what was needed.
    """
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
