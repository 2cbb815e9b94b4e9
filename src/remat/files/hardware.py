"""Accelerators in files: those that come with the package, and others.

One versioned document of kind ``hardware`` for each device, in the folder ``devices``.
"""

import difflib
import os
from functools import cache
from pathlib import Path

import msgspec

from remat.core.errors import FileFormatError, InvalidPlatformError
from remat.core.hardware import Hardware
from remat.files.conversion import convert
from remat.files.documents import load_document, write_document

_FOLDER = Path(__file__).parent / "devices"


class _Hardware(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    title: str
    kind: str
    memory_bytes: int
    context_bytes: int
    bytes_per_s: int
    link_bytes_per_s: int
    l2_bytes: int
    launch_ns: int
    resident_threads: int
    flops_per_s: dict[str, int]
    percent: dict[str, int]
    sources: dict[str, str]


def hardware_names() -> tuple[str, ...]:
    """Return the names of the devices that the package describes, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@cache
def hardware_named(name: str) -> Hardware:
    """Return the device that the package describes under a name.

    Raises
    ------
    InvalidPlatformError
        If there is none; the message lists all.
    """
    names = hardware_names()
    if name not in names:
        near = [known for known in names if name and known.startswith(name.lower())]
        near = near or difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        msg = (
            f"there is no device {name!r}; {hint}known are {', '.join(names)}; or give "
            "the path of a file that describes one, whose name ends in .json"
        )
        raise InvalidPlatformError(msg)
    return load_hardware(_FOLDER / f"{name}.json")


def load_hardware(path: str | os.PathLike[str]) -> Hardware:
    """Return the device that a file describes.

    Raises
    ------
    FileFormatError
        If the file cannot be read, or holds anything but a device of a known version.
    """
    return load_document(path, "hardware", hardware_from_json)


def save_hardware(path: str | os.PathLike[str], hardware: Hardware) -> None:
    """Write a device to ``path``, atomically; see :func:`write_document`."""
    fields = {name: getattr(hardware, name) for name in _Hardware.__struct_fields__}
    write_document(path, "hardware", fields)


def hardware_from_json(payload: object) -> Hardware:
    """Return the device that :func:`save_hardware` wrote.

    Raises
    ------
    FileFormatError
        If a key is missing or unknown, or a value makes no sense.
    """
    fields = convert(payload, _Hardware, "hardware")
    try:
        return Hardware(**msgspec.structs.asdict(fields))
    except InvalidPlatformError as error:
        raise FileFormatError(str(error)) from error


def chosen_hardware(device: Hardware | str | os.PathLike[str]) -> Hardware:
    """Return a device: as it is, by its name, or from a file.

    Raises
    ------
    FileFormatError
        If the file cannot be read or is no device.
    InvalidPlatformError
        If there is no device of that name.
    TypeError
        If it is neither a device nor a name nor a path.
    """
    if isinstance(device, Hardware):
        return device
    if isinstance(device, str) and not device.endswith(".json"):
        return hardware_named(device)
    if isinstance(device, str | os.PathLike):
        return load_hardware(device)
    msg = (
        f"device is a {type(device).__name__}; it must be a name such as 'h100-80gb', the "
        "path of a file, or a remat.core.hardware.Hardware"
    )
    raise TypeError(msg)
