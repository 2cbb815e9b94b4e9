"""Find what torch has, and say exactly what another version of it lacks."""

import functools
import importlib
import inspect
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.torch_version import TorchVersion

from remat.core.errors import UnsupportedTorchError
from remat.torch_compat.table import NAMES, TESTED, Private, everything

_logger = logging.getLogger("remat")


def is_tested(version: str) -> bool:
    """Return whether the tests have run on a version of torch.

    Examples
    --------
    >>> is_tested("2.13.1+cpu"), is_tested("2.1.0")
    (True, False)
    """
    return ".".join(version.split(".")[:2]) in TESTED


def place_in(version: str, private: Private) -> str:
    """Return where a version of torch has something.

    Examples
    --------
    >>> moved = Private({"2.11": "torch._a:f", "2.14": "torch._b:f"}, "an example")
    >>> place_in("2.13.0", moved), place_in("2.15.0", moved)
    ('torch._a:f', 'torch._b:f')
    """
    place = private.place
    if isinstance(place, str):
        return place
    now = TorchVersion(version)
    known = [since for since in place if now >= since]
    # An older version than any is asked for what the oldest has.
    return place[max(known, key=TorchVersion)] if known else next(iter(place.values()))


def find(place: str) -> Any:
    """Return what is at a place, as :class:`Private` writes it.

    Raises
    ------
    ImportError, AttributeError
        If there is nothing.
    """
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part.removesuffix("()"))
        if part.endswith("()"):
            found = found()
    return found


def lacking(table: Iterable[Private], version: str) -> list[Private]:
    """Return what the installed torch, of this version, does not have."""
    return [private for private in table if not _has(private, version)]


def _has(private: Private, version: str) -> bool:
    try:
        found = find(place_in(version, private))
    except (ImportError, AttributeError):
        return False
    return private.text is None or private.text in _source_of(found)


@functools.cache
def _source_of(module: Any) -> str:
    return inspect.getsource(module)


def check(version: str, table: Iterable[Private] | None = None) -> None:
    """Check that the installed torch, of this version, has all that is used of it.

    Parameters
    ----------
    version
        As ``torch.__version__``.
    table
        What is used; by default everything.

    Raises
    ------
    UnsupportedTorchError
        If it does not; names the version, what is missing, what that is needed for,
        and the versions that have it.
    """
    missing = lacking(everything() if table is None else table, version)
    if missing:
        raise UnsupportedTorchError(_message(missing, version))


def check_installed() -> None:
    """Check a version of torch that no test has run on; takes about a second.

    Raises
    ------
    UnsupportedTorchError
        As :func:`check`.
    """
    version = str(torch.__version__)
    if not is_tested(version):
        check(version)
        _logger.info(
            "torch %s is none of the tested versions (%s), but has all that is used",
            version,
            _tested_versions(),
        )


def name_of_torch(name: str, table: Mapping[str, Private] = NAMES) -> Any:
    """Return what torch has under a public name of the table.

    Raises
    ------
    AttributeError
        If the table has no such name.
    UnsupportedTorchError
        If torch lacks it; names everything else that it lacks, too.
    """
    if name not in table:
        msg = f"no private name of torch is known as {name!r} here"
        raise AttributeError(msg)
    version = str(torch.__version__)
    try:
        return find(place_in(version, table[name]))
    except (ImportError, AttributeError):
        missing = [table[name], *(p for p in lacking(everything(), version))]
        raise UnsupportedTorchError(
            _message(list(dict.fromkeys(missing)), version)
        ) from None


def _message(missing: Iterable[Private], version: str) -> str:
    lines = [
        f"{_described(private, version)}, needed for {private.needed_for}"
        for private in missing
    ]
    return (
        f"torch {version} lacks what remat uses of its internals: {'; '.join(lines)}. "
        f"Install torch {_tested_versions()}, which remat is tested with, or a newer remat"
    )


def _described(private: Private, version: str) -> str:
    place = place_in(version, private).replace(":", ".").replace("()", "")
    return place if private.text is None else f"{private.text!r} in {place}"


def _tested_versions() -> str:
    return f"{TESTED[0]} to {TESTED[-1]}"
