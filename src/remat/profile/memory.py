"""Measure the peak memory and the time of a training step as it really runs.

The peak is absolute: the bytes of everything live on the device when the step starts,
plus the largest growth during the step. On the CPU what is live at the start is counted
as the storages of all tensors that Python knows, together with the blocks that earlier
steps of the same recording left allocated (tensors held by autograd alone); growth
comes from the allocator's events. On CUDA both come from the allocator's statistics.

See :mod:`remat.profile.allocations` for what the CPU's events do not contain. Compared
with every call of ``malloc`` in the process, the growth that they show is 0.01 to
0.25 % of the peak too low for convolutional, attention and fully connected networks of
tens to hundreds of megabytes, in float32 and under bfloat16 autocast, and 0.2 MB too
low for an LSTM. Buffers that libraries allocate once and keep are in neither figure.

The first time that a block older than a recording is released, torch itself may write
one line about a "memory block of unknown size" to stderr; the measurement accounts for
it.
"""

import gc
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.autograd.profiler import record_function

from remat.core.checks import checked_integer, checked_list, shown
from remat.core.errors import ProfileError
from remat.core.platform import COMMON_KINDS
from remat.profile.allocations import (
    Allocation,
    AllocationRecorder,
    Recording,
)
from remat.torch_compat.accelerators import (
    accelerator_in_use,
    device_count,
    device_module,
    is_accelerator,
    memory_stats,
)
from remat.torch_compat.attributes import coordinate_parts
from remat.torch_compat.names import (
    FakeTensor,
    FunctionalTensor,
    is_functorch_wrapped_tensor,
    is_traceable_wrapper_subclass,
)

MOST_REPEATS = 10**6
"""Most timed steps that can be asked for."""

_CALL = "remat: a measured call "


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Peak memory and time of one step.

    Parameters
    ----------
    device
        Where the memory was measured, for example ``"cpu"`` or ``"cuda:0"``.
    peak_bytes
        Most bytes live on the device at one time, as requested by tensors.
    baseline_bytes
        Bytes live when the step started.
    final_bytes
        Bytes live when the step ended.
    allocated_peak_bytes, reserved_peak_bytes
        On CUDA, the peak of the allocator's blocks (requests rounded up) and of the
        memory it holds from the driver; ``None`` on the CPU.
    time_ns
        Median time of one step without recording, in nanoseconds; ``None`` if it was
        not timed.
    times_ns
        Every timed run, in nanoseconds.
    timeline
        Pairs of the time since the step began, in nanoseconds, and the bytes live from
        then on; it holds each change.
    """

    device: str
    peak_bytes: int
    baseline_bytes: int
    final_bytes: int
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    time_ns: int | None = None
    times_ns: tuple[int, ...] = ()
    timeline: tuple[tuple[int, int], ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """What one call added to the memory in use.

    Parameters
    ----------
    peak_bytes
        Most bytes in use during the call beyond those before it, at least 0.
    retained_bytes
        Bytes in use after the call, its result still held, beyond those before it.
    """

    peak_bytes: int
    retained_bytes: int


def measure(
    step: Callable[[], object],
    *,
    warmup: int = 1,
    repeats: int = 3,
    device: torch.device | str | None = None,
    resident: Sequence[object] | None = None,
) -> Measurement:
    """Measure peak memory and time of ``step``.

    The step runs ``warmup + 1 + repeats`` times: to warm up, once recorded, and timed
    without recording. It should release before it returns, or at its start, what it
    makes anew each time (``zero_grad``).

    Parameters
    ----------
    step
        One training step: forward, backward, optimizer.
    warmup
        Runs before the recorded one, at least 0. With 0, gradients and optimizer state
        that the first step creates count as growth, and the release of tensors that
        are older than the recording cannot be seen on the CPU, so the peak may be too
        high; one run is enough to avoid both.
    repeats
        Timed runs, at least 0.
    device
        Where to measure; by default the current accelerator if any tensor is
        allocated there, else the CPU.
    resident
        If given, only the tensors of these objects (modules, optimizers, tensors, and
        nestings of them) and what the warm-up left behind count as live at the start,
        for processes that hold other tensors too.

    Raises
    ------
    ProfileError
        If a torch profiler is already recording, or if an entry of ``resident`` holds
        no tensors that can be found.
    TypeError
        If ``step`` cannot be called.
    ValueError
        If ``warmup`` or ``repeats`` is no integer of at least 0, or ``resident`` is no
        list.
    """
    if not callable(step):
        msg = f"step is {step!r}; it must be a function that runs one training step"
        raise TypeError(msg)
    warmup = checked_integer("warmup", warmup, least=0)
    repeats = checked_integer("repeats", repeats, least=0, most=MOST_REPEATS)
    place = _device(device)
    if resident is not None:
        # Wrong entries are refused before anything runs.
        tensors_of(checked_list("resident", resident))
    if is_accelerator(place):
        measurement = _measure_accelerator(step, warmup, place, resident)
    else:
        measurement = _measure_cpu(step, warmup, resident)
    times = tuple(_time(step, place) for _ in range(repeats))
    time_ns = round(statistics.median(times)) if times else None
    return replace(measurement, device=str(place), time_ns=time_ns, times_ns=times)


def memory_growth(
    function: Callable[[], object], *, device: torch.device | str | None = None
) -> MemoryGrowth:
    """Measure how much memory one call adds, at most and at the end.

    Parameters
    ----------
    function
        Called once; its result is held until the end is measured, then dropped.
    device
        As for :func:`measure`.

    Raises
    ------
    ProfileError
        If a torch profiler is already recording.

    Notes
    -----
    The release of a tensor that is older than the call cannot be seen on the CPU: a
    function that replaces such tensors appears to add memory.
    """
    with GrowthRecorder(device=device) as recorder:
        recorder.measure(function)
    return recorder.growths[0]


class GrowthRecorder:
    """Measure how much memory each of several calls adds, in one recording.

    Use it as a context manager; after the block, :attr:`growths` holds the results. To
    start a recording and to end it takes longer than most operators.

    Parameters
    ----------
    device
        As for :func:`measure`.
    """

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        self._place = _device(device)
        self._recorder = AllocationRecorder(mark_prefix=_CALL)
        self._open = ExitStack()
        self.growths: list[MemoryGrowth] = []

    def __enter__(self) -> "GrowthRecorder":
        """Begin to record.

        Raises
        ------
        ProfileError
            If a torch profiler is already recording.
        """
        if self._place.type == "cpu":
            self._open.enter_context(self._recorder)
            self._open.enter_context(self._recorder.region())
        return self

    def __exit__(self, *_exception: object) -> None:
        self._open.close()
        if self._place.type == "cpu":
            self.growths = _growths(self._recorder.recording)

    def measure(self, function: Callable[[], object]) -> None:
        """Call a function once, and hold its result until the end is measured."""
        if self._place.type == "cpu":
            with record_function(f"{_CALL}begins"):
                pass
            result = function()
            with record_function(f"{_CALL}ends"):
                pass
            del result
            return
        before = memory_stats(self._place, reset=True)["requested_bytes.all.current"]
        result = function()
        after = memory_stats(self._place)
        del result
        growth = MemoryGrowth(
            peak_bytes=after["requested_bytes.all.peak"] - before,
            retained_bytes=after["requested_bytes.all.current"] - before,
        )
        self.growths.append(growth)


def _growths(recording: Recording) -> list[MemoryGrowth]:
    """Return what each call added, between one mark and the next."""
    times = [time_ns for time_ns, _ in recording.marks]
    calls: list[list[Allocation]] = [[] for _ in times[::2]]
    for allocation in recording.inside:
        section = bisect_right(times, allocation.time_ns)
        if section % 2:
            calls[section // 2].append(allocation)
    return [_growth(call) for call in calls]


def _growth(call: Iterable[Allocation]) -> MemoryGrowth:
    used = peak = 0
    made: set[int] = set()
    for allocation in call:
        if allocation.change_bytes > 0:
            made.add(allocation.address)
        elif allocation.address not in made:
            # Older than the call, as others whose release a recording does not show.
            continue
        used += allocation.change_bytes
        peak = max(peak, used)
    return MemoryGrowth(peak_bytes=peak, retained_bytes=used)


def tensors_of(items: Iterable[object]) -> list[torch.Tensor]:
    """Return the tensors that modules, optimizers, and nestings of them hold.

    Parameters
    ----------
    items
        Modules (parameters, buffers), optimizers (state), tensors, mappings and
        sequences of these; gradients of any of these tensors are included.

    Raises
    ------
    ProfileError
        If an item is none of these.
    """
    found: list[torch.Tensor] = []
    for item in items:
        match item:
            case torch.Tensor():
                grad = _grad_of(item)
                found += [item] if grad is None else [item, grad]
            case torch.nn.Module():
                found += tensors_of([*item.parameters(), *item.buffers()])
            case torch.optim.Optimizer():
                groups: list[Any] = [
                    list(group.values()) for group in item.param_groups
                ]
                found += tensors_of([dict(item.state), groups])
            case Mapping():
                found += tensors_of(cast("Mapping[object, object]", item).values())
            case list() | tuple() | set() | frozenset():
                found += tensors_of(
                    cast("Sequence[object] | AbstractSet[object]", item)
                )
            case None | bool() | int() | float() | complex() | str():
                continue
            case _:
                msg = (
                    f"cannot find the tensors of a {type(item).__qualname__}; give "
                    "modules, optimizers, tensors, or lists and dicts of them"
                )
                raise ProfileError(msg)
    return found


def live_storages(
    device: torch.device, resident: Sequence[object] | None = None
) -> dict[int, int]:
    """Return the size in bytes of each live storage on ``device``, by address.

    Parameters
    ----------
    device
        The device.
    resident
        Where to look, as for :func:`measure`; by default everywhere. For that, what
        ``gc.freeze`` has put aside comes back: nothing is found there.
    """
    if resident is None:
        gc.unfreeze()
        objects = [item for item in gc.get_objects() if _is_tensor(item)]
        tensors = cast("list[torch.Tensor]", objects)
        grads = [_grad_of(tensor) for tensor in tensors]
        tensors += [grad for grad in grads if grad is not None]
    else:
        tensors = tensors_of(resident)
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in _parts(tensor):
            if part.device != device:
                continue
            storage = part.untyped_storage()
            size_bytes = storage.nbytes()
            if size_bytes:
                address = storage.data_ptr()
                sizes[address] = max(size_bytes, sizes.get(address, 0))
    return sizes


def _is_tensor(item: object) -> bool:
    # Not isinstance: it asks proxies for their class, which may run user code.
    return issubclass(type(item), torch.Tensor)


def _grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the bytes of ``tensor``."""
    if isinstance(tensor, FakeTensor | FunctionalTensor) or tensor.is_meta:
        return []
    if is_functorch_wrapped_tensor(tensor):
        return []
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        # A DTensor names its mesh among them, too.
        return [p for part in inner if _is_tensor(part) for p in _parts(part)]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return coordinate_parts(tensor)
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = accelerator_in_use() or "cpu"
    try:
        place = torch.device(device)
    # What torch says of other types and words names no argument.
    except (RuntimeError, TypeError, ValueError) as error:
        msg = (
            f"device is {shown(device)}; it must be a device such as 'cpu' or 'cuda:0'"
        )
        raise ProfileError(msg) from error
    if place.type not in COMMON_KINDS:
        msg = f"memory can be measured on cpu and cuda, not on {place.type!r}"
        raise ProfileError(msg)
    if not is_accelerator(place):
        return place
    if not device_count(place.type):
        msg = (
            f"device is {shown(device)}, but this torch has no "
            f"{place.type.upper()} device"
        )
        raise ProfileError(msg)
    if ":" in str(place):
        return place
    return torch.device(place.type, device_module(place).current_device())


def _time(step: Callable[[], object], device: torch.device) -> int:
    if is_accelerator(device):
        device_module(device).synchronize(device)
    start = time.perf_counter_ns()
    step()
    if is_accelerator(device):
        device_module(device).synchronize(device)
    return time.perf_counter_ns() - start


def _measure_cpu(
    step: Callable[[], object], warmup: int, resident: Sequence[object] | None
) -> Measurement:
    recorder = AllocationRecorder("cpu")
    with recorder:
        for _ in range(warmup):
            step()
        # Garbage of the caller must not vanish at a moment of Python's choice.
        gc.collect()
        live = live_storages(torch.device("cpu"), resident)
        with recorder.region():
            result = step()
    del result
    return _replay(live, recorder.recording)


def _replay(live: dict[int, int], recording: Recording) -> Measurement:
    """Follow the bytes in use from ``live`` (size by address) through the region."""
    left: dict[int, int] = {}
    for allocation in recording.before:
        _apply(allocation, left)
    # What warm-up runs left allocated is live even if only autograd holds it.
    sizes = {
        address: max(live.get(address, 0), left.get(address, 0))
        for address in live.keys() | left.keys()
    }
    used = baseline = peak = sum(sizes.values())
    timeline = [(0, used)]
    for allocation in recording.inside:
        used += _apply(allocation, sizes)
        peak = max(peak, used)
        timeline.append((allocation.time_ns - recording.start_ns, used))
    return Measurement(
        device="cpu",
        peak_bytes=peak,
        baseline_bytes=baseline,
        final_bytes=used,
        timeline=tuple(timeline),
    )


def _apply(allocation: Allocation, sizes: dict[int, int]) -> int:
    """Update the live blocks and return the change in bytes."""
    # An address that is handed out anew was released before, seen or not.
    previous = sizes.pop(allocation.address, 0)
    if allocation.change_bytes > 0:
        sizes[allocation.address] = allocation.change_bytes
        return allocation.change_bytes - previous
    return -previous


def _measure_accelerator(
    step: Callable[[], object],
    warmup: int,
    device: torch.device,
    resident: Sequence[object] | None,
) -> Measurement:
    for _ in range(warmup):
        step()
    gc.collect()
    before = memory_stats(device, reset=True)
    # Blocks that belong to others than the resident objects are subtracted; what the
    # warm-up left to autograd alone cannot be told apart from them here.
    others = 0
    if resident is not None:
        everywhere = live_storages(device)
        named = live_storages(device, resident)
        others = sum(
            size for address, size in everywhere.items() if address not in named
        )
    recorder = AllocationRecorder(device.type)
    with recorder, recorder.region():
        result = step()
        device_module(device).synchronize(device)
    after = memory_stats(device)
    del result
    used = before["requested_bytes.all.current"] - others
    timeline = [(0, used)]
    for allocation in recorder.recording.inside:
        used += allocation.change_bytes
        elapsed_ns = allocation.time_ns - recorder.recording.start_ns
        timeline.append((elapsed_ns, used))
    return Measurement(
        device=str(device),
        peak_bytes=after["requested_bytes.all.peak"] - others,
        baseline_bytes=before["requested_bytes.all.current"] - others,
        final_bytes=after["requested_bytes.all.current"] - others,
        timeline=tuple(timeline),
        allocated_peak_bytes=after["allocated_bytes.all.peak"],
        reserved_peak_bytes=after["reserved_bytes.all.peak"],
    )
