"""Time and scratch memory of single operators, measured on real tensors.

Each distinct operator runs alone, on tensors made for it and released right after: the
memory that planning needs is that of the largest operator, never that of the model.
Distinct means: name and overload, dtype, shape, strides, storage and device of each
tensor, and every other argument.
"""

import statistics
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from remat.capture.host_seeds import with_seeds_on_host
from remat.core.errors import ProfileError
from remat.profile.allocations import record_allocations
from remat.profile.arguments import (
    FILLS,
    ArgumentMaker,
    Description,
    describe,
    target_name,
    tensors_in,
)
from remat.profile.cache import CostCache
from remat.profile.clock import operator_clock
from remat.profile.profiler_thread import Progress, record_growth, run_beside
from remat.torch_compat.accelerators import (
    device_count,
    device_module,
    forked_random_state,
    is_accelerator,
    memory_stats,
)
from remat.torch_compat.names import (
    DisableTorchFunction,
    disable_current_modes,
    no_python_dispatcher,
    profiler_enabled,
    tree_leaves,
)

_LEAST_SAMPLES = 3
_MOST_SAMPLES = 15
_MANY_SAMPLES = 9
_LONG_RUN_NS = 40_000_000
_SAMPLING_NS = 30_000_000
_DISTURBED_RATIO = 1.5
_NO_KWARGS: dict[str, Any] = {}

_T = TypeVar("_T")

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Type, shape, strides and offset of a tensor."""


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """An operator and what it is called with.

    Parameters
    ----------
    target
        An overload of a torch operator, or another callable.
    args, kwargs
        Arguments; tensors may be fake, only their shapes and types matter.
    source
        Where the call stands in the user's code, for errors.
    outputs
        What the call returns, made of fake tensors, if that is known.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: _NO_KWARGS)
    source: str = ""
    outputs: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """What one run of an operator costs.

    Parameters
    ----------
    cost_ns
        Median time of one undisturbed run, in nanoseconds, by
        :func:`remat.profile.clock.operator_clock`.
    workspace_bytes
        Most bytes in use during the run beyond its inputs and its outputs.
    output_bytes
        Bytes allocated by the run and held by its outputs.
    output_sizes_bytes
        The same for each output tensor in order; 0 for one that shares the storage of
        an input or of an earlier output.
    aliases_input
        Whether an output shares the storage of an input.
    samples
        Number of timed runs, disturbed ones included; 0 for an estimate.
    spread_ns
        Median distance of the samples from their median, in nanoseconds.
    """

    cost_ns: int
    workspace_bytes: int
    output_bytes: int
    output_sizes_bytes: tuple[int, ...]
    aliases_input: bool
    samples: int
    spread_ns: int


def _silent(_activity: str, _share: float) -> None:
    return


def profile_operators(
    calls: Sequence[OperatorCall],
    *,
    cache: CostCache | None = None,
    on_progress: Callable[[str, float], None] = _silent,
) -> list[OperatorCost]:
    """Measure each distinct operator once, alone, and return the cost of each call.

    Random number generators, autograd mode and all other state of torch are as before
    when it returns. While a torch profiler records, another thread measures, and the
    profiler sees nothing of it.

    Parameters
    ----------
    calls
        Any number of calls; equal ones are measured once.
    cache
        Where costs are looked up and kept; ``None`` for neither.
    on_progress
        Called with the operator that is measured next, in words, and the share done,
        between 0 and 1.

    Returns
    -------
    list[OperatorCost]
        One for each call, in order.

    Raises
    ------
    ProfileError
        If an operator cannot run alone; the message names it, its arguments and the
        error.
    """
    descriptions = [describe(c.target, c.args, c.kwargs) for c in calls]
    keys = [
        _key(description, position) for position, description in enumerate(descriptions)
    ]
    costs: dict[str, OperatorCost] = {}
    missing: dict[str, int] = {}
    for position, key in enumerate(keys):
        if key in costs or key in missing:
            continue
        known = None
        if cache is not None and descriptions[position].is_complete:
            known = cache.look_up(key, OperatorCost)
        if known is None:
            missing[key] = position
        else:
            costs[key] = known

    def measure_missing(report: Progress) -> None:
        with _isolated({t for d in descriptions for t in d.device_types}):
            for count, (key, position) in enumerate(missing.items()):
                call = calls[position]
                report(f"measuring {target_name(call.target)}", count / len(missing))
                costs[key] = _profile_operator(call, descriptions[position])
                if cache is not None and descriptions[position].is_complete:
                    cache.put(key, asdict(costs[key]))

    try:
        if missing and profiler_enabled():
            run_beside(measure_missing, on_progress)
        else:
            measure_missing(on_progress)
    finally:
        # What was measured before an interruption or an error is not lost.
        if cache is not None:
            cache.save()
    on_progress("operators measured", 1.0)
    return [costs[key] for key in keys]


def result_layouts(call: OperatorCall) -> list[Layout]:
    """Run an operator once, alone, and return how its results lie in memory.

    Everything of torch's is as before when it returns.

    Raises
    ------
    ProfileError
        If it cannot run alone.
    """
    description = describe(call.target, call.args, call.kwargs)

    def run(maker: ArgumentMaker) -> list[Layout]:
        args, kwargs = _made(call, maker)
        outputs = call.target(*args, **kwargs)
        return [layout_of(tensor) for tensor in tensors_in(outputs)]

    with _isolated(description.device_types):
        return _with_some_values(call, description, run)


def measured_workspace(call: OperatorCall) -> int:
    """Run an operator of the CPU alone, and return its scratch memory in bytes.

    Everything of torch's is as before when it returns, and no profiler sees anything.

    Raises
    ------
    ProfileError
        If it cannot run alone.
    """
    description = describe(call.target, call.args, call.kwargs)

    def run(maker: ArgumentMaker) -> int:
        args, kwargs = _made(call, maker)
        call.target(*args, **kwargs)
        growth_bytes, outputs = record_growth(lambda: call.target(*args, **kwargs))
        sizes, _ = _output_sizes((args, kwargs), _results(call, outputs))
        return max(0, growth_bytes - sum(sizes))

    def measure(_report: Progress) -> int:
        with _isolated(description.device_types):
            return _with_some_values(call, description, run)

    return run_beside(measure, _silent)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return type, shape, strides and offset of a tensor."""
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
    )


def _key(description: Description, position: int) -> str:
    text = description.text
    for device_type in filter(is_accelerator, sorted(description.device_types)):
        text += f" on {device_module(device_type).get_device_name()}"
    # A call that the text does not fully describe is like no other.
    return text if description.is_complete else f"{text} #{position}"


@contextmanager
def _isolated(device_types: set[str]) -> Generator[None]:
    """Shield the operators from the caller's modes, and the caller from them."""
    devices = [
        torch.device(device_type, index)
        for device_type in filter(is_accelerator, device_types)
        for index in range(device_count(device_type))
    ]
    with ExitStack() as stack:
        stack.enter_context(forked_random_state(devices))
        stack.enter_context(disable_current_modes())
        stack.enter_context(DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        # While a step is traced, Python kernels take some operators apart.
        stack.enter_context(no_python_dispatcher())
        for device_type in sorted(device_types - {"meta"} | {"cpu"}):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _profile_operator(call: OperatorCall, description: Description) -> OperatorCost:
    return _with_some_values(
        call,
        description,
        lambda maker: _measure_operator(call, description.device_types, maker),
    )


def _with_some_values(
    call: OperatorCall, description: Description, run: Callable[[ArgumentMaker], _T]
) -> _T:
    """Return what ``run`` makes of the first values that the operator accepts."""
    first: Exception | None = None
    for fill in FILLS:
        try:
            return run(ArgumentMaker(fill))
        # Any operator may refuse the values with any exception; the next fill is
        # tried, and the first error is reported if none is accepted.
        except Exception as error:  # noqa: BLE001
            # Tracebacks hold the frames of all callers, and with them their values.
            first = first or error.with_traceback(None)
    msg = (
        f"operator {target_name(call.target)} cannot be measured alone: called as "
        f"{description.text} on made-up values it raised "
        f"{type(first).__name__}: {first}"
    )
    if call.source:
        msg += f"; the call comes from {call.source}"
    msg += "; if model(*batch) raises the same, the example does not fit the model"
    raise ProfileError(msg) from first


def _made(
    call: OperatorCall, maker: ArgumentMaker
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return real arguments for a call, each where the operator takes it."""
    args = with_seeds_on_host(call.target, maker.make(tuple(call.args)))
    return args, maker.make(dict(call.kwargs))


def _measure_operator(
    call: OperatorCall, device_types: set[str], maker: ArgumentMaker
) -> OperatorCost:
    args, kwargs = _made(call, maker)

    def run() -> object:
        return call.target(*args, **kwargs)

    place = _accelerator_of(args, kwargs, device_types)
    with nullcontext() if place is None else device_module(place).device(place):
        # The first run pays for what is made once: compiled primitives, handles.
        run()
        growth_bytes, outputs = _growth_of(run, place)
        sizes, aliases_input = _output_sizes((args, kwargs), _results(call, outputs))
        del outputs
        times = _time_cpu(run) if place is None else _time_accelerator(run, place)
    undisturbed = _undisturbed(times)
    median = statistics.median(undisturbed)
    return OperatorCost(
        cost_ns=round(median),
        workspace_bytes=max(0, growth_bytes - sum(sizes)),
        output_bytes=sum(sizes),
        output_sizes_bytes=sizes,
        aliases_input=aliases_input,
        samples=len(times),
        spread_ns=round(statistics.median(abs(t - median) for t in times)),
    )


def _accelerator_of(
    args: object, kwargs: Mapping[str, object], device_types: set[str]
) -> torch.device | None:
    """Return the accelerator that a call works on, or ``None``."""
    types = list(filter(is_accelerator, sorted(device_types)))
    if not types:
        return None
    devices = [tensor.device for tensor in tensors_in([args, kwargs])]
    devices += [d for d in kwargs.values() if isinstance(d, torch.device)]
    found = [device for device in devices if device.type == types[0]]
    return found[0] if found else torch.device(types[0])


def _growth_of(
    run: Callable[[], object], place: torch.device | None
) -> tuple[int, object]:
    """Return the most memory that a call takes, in bytes, and its result."""
    if place is not None:
        before = memory_stats(place, reset=True)["requested_bytes.all.current"]
        outputs = run()
        return memory_stats(place)["requested_bytes.all.peak"] - before, outputs
    if threading.current_thread() is not threading.main_thread():
        # The main thread may hold the one profiler that a process can have.
        return record_growth(run)
    recording, outputs = record_allocations(run)
    return recording.peak_bytes(), outputs


def _results(call: OperatorCall, outputs: object) -> list[torch.Tensor | None]:
    """Return the tensors of a result that the step knows of.

    Some kernels also compute what they were told to leave out, such as the gradient of
    a frozen weight beside that of its bias. It is let go at once, and is workspace.
    Others leave out what nobody will read, such as cuDNN's attention what only its
    backward pass needs, and the tracer does not know of that: it has no bytes.
    """
    made, traced = tree_leaves(outputs), tree_leaves(call.outputs)
    if call.outputs is None or len(made) != len(traced):
        return [*tensors_in(outputs)]
    return [
        found if isinstance(found, torch.Tensor) else None
        for found, value in zip(made, traced, strict=True)
        if isinstance(value, torch.Tensor)
    ]


def _output_sizes(
    inputs: object, outputs: Sequence[torch.Tensor | None]
) -> tuple[tuple[int, ...], bool]:
    of_inputs = {t.untyped_storage().data_ptr() for t in tensors_in(inputs)}
    seen = set(of_inputs)
    sizes: list[int] = []
    aliases_input = False
    for tensor in outputs:
        if tensor is None:
            sizes.append(0)
            continue
        storage = tensor.untyped_storage()
        address, size_bytes = storage.data_ptr(), storage.nbytes()
        sizes.append(0 if address in seen else size_bytes)
        aliases_input = aliases_input or (size_bytes > 0 and address in of_inputs)
        seen.add(address)
    return tuple(sizes), aliases_input


def _has_enough(times: list[int]) -> bool:
    if len(times) < _LEAST_SAMPLES or sum(times) < _SAMPLING_NS:
        return len(times) >= _MOST_SAMPLES
    # Several short runs in a row may all have waited for a core.
    return min(times) >= _LONG_RUN_NS or len(times) >= _MANY_SAMPLES


def _undisturbed(times: list[int]) -> list[int]:
    """Return the samples that nothing else on the machine seems to have delayed.

    Other work only ever adds time, often a multiple, to some samples and not others.
    """
    return [t for t in times if t <= _DISTURBED_RATIO * min(times)]


def _time_cpu(run: Callable[[], object]) -> list[int]:
    clock = operator_clock()
    times: list[int] = []
    while not _has_enough(times):
        start = clock()
        outputs = run()
        times.append(clock() - start)
        # Released outside the timed part, as in a schedule.
        del outputs
    return times


def _time_accelerator(run: Callable[[], object], place: torch.device) -> list[int]:
    event = device_module(place).Event
    times: list[int] = []
    while not _has_enough(times):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        outputs = run()
        end.record()
        end.synchronize()
        times.append(round(start.elapsed_time(end) * 1e6))
        del outputs
    return times
