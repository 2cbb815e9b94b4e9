"""Values that JSON held, as declared types, with one error for all that does not fit.

What stands in files is declared: objects as a :class:`msgspec.Struct` that forbids
unknown fields, rows of tables as a ``NamedTuple``. msgspec converts strictly (true and
1.0 are no integers) and says where it stopped; here that becomes words for people.
"""

import json
import re
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from remat.core.errors import FileFormatError

T = TypeVar("T")

_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.DictType: "an object",
    inspect.IntType: "an integer",
    inspect.ListType: "a list",
    inspect.NoneType: "null",
    inspect.StrType: "text",
    inspect.StructType: "an object",
    inspect.VarTupleType: "a list",
}


def convert(value: object, kind: type[T], where: str) -> T:
    """Return ``value`` as a ``kind``.

    Parameters
    ----------
    value
        What JSON held.
    kind
        What it must be, built of the types that :func:`_needed` has words for.
    where
        The place in the document, for the error message.

    Raises
    ------
    FileFormatError
        If anything in ``value`` is of another type, or a key is missing or unknown.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # Its text ends in the path, if it has one: "... - at `$.storages.rows[3][1]`".
        _, mark, end = str(error).rpartition(" - at `$")
        path = re.findall(r"[^.\[\]`]+", end) if mark else []
        msg = _refusal(value, inspect.type_info(kind), where, path)
        raise FileFormatError(msg) from error
    except UnicodeEncodeError as error:
        # Half of a surrogate pair, where msgspec looks a word up, and says no place.
        msg = f"{where} holds {show(error.object)} where there is no such key or word"
        raise FileFormatError(msg) from error


def differs(value: object, where: str, needed: str) -> str:
    """Return the message that a value is not what it must be."""
    return f"{where} is {show(value)}; it must be {needed}"


def show(value: object) -> str:
    """Return ``value`` as JSON, cut to what fits on a line; of objects, the size."""
    if isinstance(value, dict):
        return f"an object of {len(cast('dict[str, object]', value))} items"
    if isinstance(value, list):
        items = cast("list[object]", value)
        # Not printed in full: nesting may be as deep as the reader allowed.
        if any(isinstance(item, dict | list) for item in items):
            return f"a list of {len(items)} items"
    return shorten(json.dumps(value))


def shorten(text: str) -> str:
    """Return ``text``, cut to what fits on a line."""
    return text if len(text) <= 80 else text[:77] + "..."


def _refusal(value: Any, kind: inspect.Type, where: str, path: list[str]) -> str:
    """Return what is wrong in ``value``, at names and positions that msgspec found."""
    # Keys first: an unknown one may look like a path.
    if isinstance(kind, inspect.StructType) and (keys := _other_keys(value, kind)):
        return f"{where} {keys}"
    if path:
        key, *inside = path
        match kind:
            case inspect.StructType(fields=fields):
                item = next(f.type for f in fields if f.encode_name == key)
                return _refusal(value[key], item, f"{where}.{key}", inside)
            case inspect.NamedTupleType(fields=fields):
                at = int(key)
                place = f"{where}.{fields[at].name}"
                return _refusal(value[at], fields[at].type, place, inside)
            case (
                inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item)
            ):
                return _refusal(value[int(key)], item, f"{where}[{key}]", inside)
            case _:
                pass
    return differs(value, where, _needed(kind))


def _other_keys(value: object, kind: inspect.StructType) -> str:
    """Return which keys of an object are missing or unknown; nothing if all is well."""
    if not isinstance(value, dict):
        return ""
    given = cast("dict[str, object]", value)
    keys = [field.encode_name for field in kind.fields]
    needed = [field.encode_name for field in kind.fields if field.required]
    missing = [key for key in needed if key not in given]
    unknown = [key for key in given if key not in keys]
    if missing:
        found = f"lacks {missing}"
    elif unknown and kind.forbid_unknown_fields:
        found = f"has unknown keys {unknown}"
    else:
        return ""
    return f"{shorten(found)}; its keys are {', '.join(keys)}"


def _needed(kind: inspect.Type) -> str:
    """Return what a value of that type is, in words."""
    match kind:
        case inspect.Metadata(extra_json_schema={"description": str(words)}):
            return words
        case inspect.EnumType(cls=choices):
            return f"one of {', '.join(str(choice) for choice in choices)}"
        case inspect.LiteralType(values=choices):
            return " or ".join(map(json.dumps, choices))
        case inspect.UnionType(types=kinds):
            return " or ".join(map(_needed, kinds))
        case inspect.NamedTupleType(fields=fields):
            names = ", ".join(field.name for field in fields)
            return f"a list of {len(fields)} values ({names})"
        case _:
            return _WORDS[type(kind)]
