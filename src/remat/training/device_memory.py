"""Measure the peak on each device of a plan while its step really runs.

Logical devices of the CPU share one memory. The passes of a plan note on which device
they go on (:mod:`remat.runtime.marks`); every block, temporaries inside operators
included, is charged to the device that was noted last when it was allocated, until it
is released. What the caller allocates is charged to the first device. Accelerators have
statistics of their own; pinned host memory has none, so each block that is pinned or
given back is a mark as well.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter

import torch

from remat.core.device_graph import place_of
from remat.core.errors import ProfileError
from remat.core.platform import Platform
from remat.core.units import format_bytes
from remat.planning.plan import Plan
from remat.profile.allocations import Allocation, AllocationRecorder, Recording
from remat.profile.memory import live_storages
from remat.runtime.marks import PREFIX
from remat.runtime.pinned import PINNED_BYTES
from remat.torch_compat.accelerators import device_module, is_accelerator, memory_stats


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """The peak of one device of a plan.

    Parameters
    ----------
    name
        The plan's name of it.
    budget_bytes
        Its budget, or ``None`` for no limit.
    predicted_bytes
        The most bytes of the plan's serial timeline: the runtime issues one step at a
        time, and what its copies overlap with takes no memory beyond that.
    measured_bytes
        What :func:`measure_devices` found.
    """

    name: str
    budget_bytes: int | None
    predicted_bytes: int
    measured_bytes: int

    @property
    def is_within_budget(self) -> bool:
        """Whether the measured peak is at most the budget."""
        return self.budget_bytes is None or self.measured_bytes <= self.budget_bytes

    @property
    def prediction_error(self) -> float:
        """Predicted / measured peak - 1: negative where too little is predicted."""
        return (
            self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0
        )

    def __str__(self) -> str:
        limit = "any size"
        if self.budget_bytes is not None:
            verdict = "kept" if self.is_within_budget else "BROKEN"
            limit = f"{format_bytes(self.budget_bytes)}: {verdict}"
        return (
            f"{self.name}: {format_bytes(self.measured_bytes)} measured, "
            f"{format_bytes(self.predicted_bytes)} predicted "
            f"({self.prediction_error:+.2%}), of {limit}"
        )


def device_peaks(
    step: Callable[[], object],
    plan: Plan,
    *,
    warmup: int = 1,
    resident: Sequence[object] | None = None,
) -> tuple[DevicePeak, ...]:
    """Return the peak of each device of a plan, predicted and measured.

    Parameters and exceptions are those of :func:`measure_devices`.
    """
    measured = measure_devices(step, plan.platform, warmup=warmup, resident=resident)
    timelines = plan.trace.timeline_bytes
    return tuple(
        DevicePeak(
            name=device.name,
            budget_bytes=device.budget_bytes,
            predicted_bytes=max(timelines[index], default=0),
            measured_bytes=measured[index],
        )
        for index, device in enumerate(plan.platform.devices)
    )


def measure_devices(
    step: Callable[[], object],
    platform: Platform,
    *,
    warmup: int = 1,
    resident: Sequence[object] | None = None,
) -> tuple[int, ...]:
    """Return the measured peak of each device of a platform, in bytes.

    Parameters
    ----------
    step
        One training step of a model that runs by a plan for this platform.
    platform
        The plan's, its own device first.
    warmup
        Runs before the recorded one, at least 1: see :func:`remat.measure`.
    resident
        What counts as live at the start, as for :func:`remat.measure`.

    Raises
    ------
    ProfileError
        If a device is not here, two of them are on one accelerator, or a torch profiler
        is recording.
    """
    places = _places(platform)
    others = {place: 0 for place in places if is_accelerator(place)}
    recorder = AllocationRecorder("cpu", mark_prefix=PREFIX)
    with recorder:
        for _ in range(warmup):
            step()
        # Garbage of the caller must not vanish at a moment of Python's choice.
        gc.collect()
        live = {} if places[0] in others else live_storages(_CPU, resident)
        for place in others:
            others[place] = _others_bytes(place, resident)
            memory_stats(place, reset=True)
        pinned = dict(PINNED_BYTES)
        with recorder.region():
            step()
            for place in others:
                device_module(place).synchronize(torch.device(place))
    charged = charged_peaks(live, recorder.recording, platform.names, pinned)
    return tuple(
        memory_stats(place)["requested_bytes.all.peak"] - others[place]
        if place in others
        else charged[device]
        for device, place in enumerate(places)
    )


_CPU = torch.device("cpu")


def _places(platform: Platform) -> list[str]:
    places: list[str] = []
    for device, name in enumerate(platform.names):
        place = place_of(platform, device)
        if place is None:
            msg = f"device {name!r} is not on this machine, so it cannot be measured"
            raise ProfileError(msg)
        if place != "cpu" and place in places:
            msg = (
                f"device {name!r} and another one are both {place}, whose memory cannot "
                "be told apart"
            )
            raise ProfileError(msg)
        places.append(place)
    return places


def _others_bytes(place: str, resident: Sequence[object] | None) -> int:
    """Return the bytes of tensors on an accelerator that do not count."""
    if resident is None:
        return 0
    device = torch.device(place)
    named = live_storages(device, resident)
    return sum(
        size for address, size in live_storages(device).items() if address not in named
    )


def charged_peaks(
    live: Mapping[int, int],
    recording: Recording,
    names: Sequence[str],
    pinned: Mapping[str, int],
) -> tuple[int, ...]:
    """Return the most bytes charged to each device inside the recorded region.

    Parameters
    ----------
    live
        Size by address of what is live at the start, on the first device.
    recording
        What was allocated and released; its marks are indices of devices, and names of
        devices with changes of their pinned bytes.
    names
        Of the devices.
    pinned
        Pinned bytes at the start, by the name of the device.
    """
    left: dict[int, int] = {}
    for allocation in recording.before:
        left.pop(allocation.address, None)
        if allocation.change_bytes > 0:
            left[allocation.address] = allocation.change_bytes
    # Address -> (device, size) of each block. What warm-up runs left allocated is live
    # even if only autograd holds it.
    blocks = {
        address: (0, max(live.get(address, 0), left.get(address, 0)))
        for address in live.keys() | left.keys()
    }
    used = [pinned.get(name, 0) for name in names]
    for device, size in blocks.values():
        used[device] += size
    peaks = list(used)
    inside = range(recording.start_ns, recording.end_ns + 1)
    marks = [mark for mark in recording.marks if mark[0] in inside]
    device = 0
    # At the same time a mark comes first.
    for _, event in merge(
        marks, ((a.time_ns, a) for a in recording.inside), key=itemgetter(0)
    ):
        if isinstance(event, Allocation):
            # An address that is handed out anew was released before, seen or not.
            owner, size = blocks.pop(event.address, (0, 0))
            used[owner] -= size
            changed, change_bytes = device, max(0, event.change_bytes)
            if change_bytes:
                blocks[event.address] = (device, change_bytes)
        elif event.isdecimal():
            device = int(event)
            continue
        else:
            name, _, change = event.rpartition(" ")
            if name not in names:
                continue  # Of another plan.
            changed, change_bytes = names.index(name), int(change)
        used[changed] += change_bytes
        peaks[changed] = max(peaks[changed], used[changed])
    return tuple(peaks)
