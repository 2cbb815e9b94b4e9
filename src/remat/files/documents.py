"""The envelope of every file: versioned JSON, written atomically, parsed with care.

A document is one JSON object with four keys::

    {"format": "remat", "kind": "schedule", "version": 1, "payload": {...}}

Tables are written one row a line under a header that names the columns, so that files
are small, load fast, and differ line by line. Every way in which a file can be wrong
ends in one :class:`~remat.core.errors.FileFormatError` that names file and place.
"""

import errno
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn, TypeVar, cast

import msgspec

from remat.core.errors import FileFormatError
from remat.files.conversion import convert, shorten, show

FORMAT = "remat"
"""What the ``format`` key of every document says."""

VERSION = 1
"""The version that is written, and the only one that is read."""

# What a path can raise: a loop of links is a RuntimeError before Python 3.13, and a
# zero character in a name is a ValueError.
_PATH_ERRORS = (OSError, RuntimeError, ValueError)

Parsed = TypeVar("Parsed")


class _Head(msgspec.Struct):
    """What the documents of all versions have, whatever else they have."""

    format: Literal["remat"]
    version: int


class _Document(_Head, forbid_unknown_fields=True):
    """All that a document of this version has."""

    kind: str
    payload: dict[str, object]


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
        target = _followed(path)
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
    label = os.fspath(path)
    try:
        target = _followed(path)
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


def _followed(path: str | os.PathLike[str]) -> Path:
    """Return where a path leads; ``OSError`` if its links lead in a circle."""
    target = Path(path).resolve()
    # Up to Python 3.12 it is a RuntimeError; newer ones leave the circle in the path.
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(target))
    return target


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

    What the payload holds is not looked at.

    Raises
    ------
    FileFormatError
        If the file cannot be read, is damaged, is not a document of this package, or is
        of an unknown version.
    """
    return _load(path, lambda text: _parse_envelope(text).kind)


def load_document(
    path: str | os.PathLike[str], kind: str, parse: Callable[[object], Parsed]
) -> Parsed:
    """Return what ``parse`` makes of the payload of the document ``path``.

    Raises
    ------
    FileFormatError
        If the file is missing, may not be read, is damaged or cut short, is not a
        document of this package, is of another kind, or of an unknown version; or what
        ``parse`` raised, with the file's name.
    """
    return _load(path, lambda text: parse(parse_document(text, kind)))


def _load(path: str | os.PathLike[str], parse: Callable[[str], Parsed]) -> Parsed:
    label = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        msg = f"{label}: this is not a {FORMAT} file: it is not UTF-8 text ({error})"
        raise FileFormatError(msg) from error
    except _PATH_ERRORS as error:
        msg = f"cannot read {label!r}: {_reason(error)}"
        raise FileFormatError(msg) from error
    try:
        return parse(text)
    except FileFormatError as error:
        msg = f"{label}: {error}"
        raise FileFormatError(msg) from error


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


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
    document = _parse_envelope(text)
    if document.kind != kind:
        msg = f"the file holds a {shorten(document.kind)}, but a {kind} is needed"
        raise FileFormatError(msg)
    return document.payload


def _parse_envelope(text: str) -> _Document:
    values = _parse_json(text)
    try:
        version = convert(values, _Head, "document").version
    except FileFormatError as error:
        msg = f"this is JSON, but not a {FORMAT} file: {error}"
        raise FileFormatError(msg) from error
    if version != VERSION:
        msg = (
            f"the file is of version {show(version)}, but this release reads version "
            f"{VERSION} only; upgrade remat, or write the file again with this release"
        )
        raise FileFormatError(msg)
    return convert(values, _Document, "document")


def _parse_json(text: str) -> object:
    # Not msgspec's reader: it takes keys given twice, and no half surrogate pairs.
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
    except ValueError as error:
        # Also of Python, for integers of thousands of digits.
        msg = f"the file is damaged or cut short: {error}"
        raise FileFormatError(msg) from error


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        msg = f"key {show(twice)} is given twice in one object"
        raise ValueError(msg)
    return fields


def _refuse_constant(name: str) -> NoReturn:
    msg = f"{name} is not a number that JSON knows"
    raise ValueError(msg)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse_constant(text)
    return number
