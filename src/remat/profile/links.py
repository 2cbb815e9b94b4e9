"""Platforms of this machine: bandwidth and latency of copies, measured.

A copy takes ``latency + size / bandwidth``; the two numbers come from the fastest of
several copies of a small and of a large block, made the way the runtime makes them:
within the CPU by one thread from one block to a fresh one, between CPU and accelerator
from and to pinned memory.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from remat.core.device_graph import place_of
from remat.core.errors import InvalidPlatformError, ProfileError
from remat.core.platform import COMMON_KINDS, Device, Link, Platform
from remat.profile.cache import CostCache
from remat.torch_compat.accelerators import (
    accelerator_type,
    device_count,
    device_module,
    is_accelerator,
    pinned_bytes,
)
from remat.torch_compat.names import disable_current_modes

_SMALL_BYTES = 1 << 10
_LARGE_BYTES = 1 << 26
_SAMPLES = 7


def common_device(name: str) -> Device:
    """Return the device of this machine that a name stands for.

    Names are those of :data:`remat.core.platform.COMMON_KINDS`, alone or with a number.

    Raises
    ------
    InvalidPlatformError
        If the name stands for no device, or for one that this machine lacks.

    Examples
    --------
    >>> common_device("cpu:1").kind, common_device("host").kind
    ('cpu', 'host')
    """
    kind, colon, number = name.partition(":")
    if kind not in COMMON_KINDS or (colon and not number.isdecimal()):
        msg = (
            f"unknown device {name!r}: without a platform the names are "
            f"{', '.join(COMMON_KINDS)}, alone or with a number as in 'cuda:0'; other "
            "devices need platform="
        )
        raise InvalidPlatformError(msg)
    if kind not in {"cpu", "host"} and int(number or 0) >= device_count(kind):
        msg = (
            f"device {name!r} does not exist: this machine has {device_count(kind)} "
            f"{kind.upper()} devices"
        )
        raise InvalidPlatformError(msg)
    return Device(name=name, kind=kind)


def default_devices() -> list[str]:
    """Return every accelerator of this machine, or else the CPU, and host memory."""
    kind = accelerator_type()
    found = [f"{kind}:{index}" for index in range(device_count(kind))]
    return [*(found or ["cpu"]), "host"]


def measured_platform(
    names: Sequence[str],
    *,
    cache: CostCache | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Platform:
    """Return devices of this machine with measured links between all pairs.

    Parameters
    ----------
    names
        ``"cpu"``, ``"cuda:0"``, ``"host"`` and the like; ``"cpu"``, ``"cpu:1"`` and
        ``"host"`` are logical devices that share the memory of the CPU.
    cache
        Where measurements are looked up and kept; ``None`` for neither.
    on_progress
        Called with the link in turn and the share of links that are done.

    Raises
    ------
    InvalidPlatformError
        If a name stands for no device of this machine, or is given twice.
    """
    devices = tuple(common_device(name) for name in names)
    platform = Platform(devices=devices)
    for name in names:
        platform.index_of(name)
    pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if a != b]
    links: list[Link] = []
    for position, (source, target) in enumerate(pairs):
        if on_progress is not None:
            label = f"measuring the link from {names[source]} to {names[target]}"
            on_progress(label, position / len(pairs))
        places = [place_of(platform, device) or "cpu" for device in (source, target)]
        bytes_per_s, latency_ns = measured_link(places[0], places[1], cache=cache)
        links.append(
            Link(
                source=source,
                target=target,
                bytes_per_s=bytes_per_s,
                latency_ns=latency_ns,
            )
        )
    return Platform(devices=devices, links=tuple(links))


def measured_link(
    source: str, target: str, *, cache: CostCache | None = None
) -> tuple[int, int]:
    """Return the bandwidth in bytes per second, and the latency in nanoseconds.

    Parameters
    ----------
    source, target
        torch's names of the devices.
    cache
        Where they are looked up and kept; ``None`` for neither.

    Raises
    ------
    ProfileError
        If the copy fails; the message names the devices.
    """
    key = f"link from {source} to {target}"
    for place in (source, target):
        if is_accelerator(place):
            key += f" {device_module(place).get_device_name(torch.device(place))}"
    known = None if cache is None else cache.look_up(key, Link)
    if known is not None:
        return known.bytes_per_s, known.latency_ns
    try:
        with disable_current_modes(), torch.no_grad():
            small_ns = _fastest_copy_ns(source, target, _SMALL_BYTES)
            large_ns = _fastest_copy_ns(source, target, _LARGE_BYTES)
    except RuntimeError as error:
        msg = f"a copy from {source} to {target} cannot be measured: {error}"
        raise ProfileError(msg) from error
    link = Link(
        source=0,
        target=1,
        bytes_per_s=max(1, (_LARGE_BYTES * 10**9) // max(1, large_ns - small_ns)),
        latency_ns=small_ns,
    )
    if cache is not None:
        cache.put(key, asdict(link))
        cache.save()
    return link.bytes_per_s, link.latency_ns


def _fastest_copy_ns(source: str, target: str, size_bytes: int) -> int:
    is_pinned = is_accelerator(source) or is_accelerator(target)
    block = _block(source, size_bytes, is_pinned=is_pinned).fill_(1)
    times: list[int] = []
    for _ in range(_SAMPLES):
        _synchronise(source, target)
        start = time.perf_counter_ns()
        copy = _block(target, size_bytes, is_pinned=is_pinned)
        if is_pinned:
            copy.copy_(block, non_blocking=True)
        else:
            ctypes.memmove(copy.data_ptr(), block.data_ptr(), size_bytes)
        _synchronise(source, target)
        times.append(max(1, time.perf_counter_ns() - start))
        del copy
    return min(times)


def _block(place: str, size_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    if is_pinned and place == "cpu":
        return pinned_bytes(size_bytes)
    return torch.empty(size_bytes, dtype=torch.uint8, device=place)


def _synchronise(*places: str) -> None:
    for place in places:
        if is_accelerator(place):
            device_module(place).synchronize(torch.device(place))
