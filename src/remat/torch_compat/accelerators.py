"""What a device other than the CPU offers, whatever its type: torch's module of it.

CUDA's is ``torch.cuda``. That of another type offers the same under the same names:
streams and events, statistics of memory, random state.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from remat.core.platform import COMMON_KINDS
from remat.torch_compat import names

HOST_TYPES = frozenset({"cpu", "meta"})
"""Types of device that have no module of this kind."""

_MOST_ENTRIES = 1_000_000


def is_accelerator(place: torch.device | str) -> bool:
    """Return whether a device, or torch's name of one, is neither CPU nor meta.

    Examples
    --------
    >>> is_accelerator("cuda:0"), is_accelerator("cpu")
    (True, False)
    """
    return type_of(place) not in HOST_TYPES


def type_of(place: torch.device | str) -> str:
    """Return the type of a device, or of torch's name of one.

    Examples
    --------
    >>> type_of("cuda:1")
    'cuda'
    """
    if isinstance(place, torch.device):
        return place.type
    return place.partition(":")[0]


def device_module(place: torch.device | str) -> Any:
    """Return torch's module of the type of an accelerator, such as ``torch.cuda``.

    Examples
    --------
    >>> device_module("cuda:1").__name__
    'torch.cuda'
    """
    return torch.get_device_module(type_of(place))


def accelerator_type() -> str:
    """Return the type of this machine's accelerator.

    It is ``"cuda"`` where there is none, or one of a type that no plan is made for.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in COMMON_KINDS else "cuda"


def accelerator_in_use() -> str | None:
    """Return the type of the accelerator if tensors are on it, without waking it."""
    found = accelerator_type()
    if not device_count(found) or not device_module(found).is_initialized():
        return None
    return found if memory_stats(found)["allocated_bytes.all.current"] else None


def device_count(device_type: str) -> int:
    """Return how many devices of a type this machine has."""
    if device_type != accelerator_type():
        return 0
    return int(device_module(device_type).device_count())


def memory_stats(place: torch.device | str, *, reset: bool = False) -> dict[str, int]:
    """Return the statistics of a device's allocator when all work on it is done.

    Parameters
    ----------
    place
        An accelerator.
    reset
        Whether peaks start anew, from what is in use.
    """
    module, device = device_module(place), torch.device(place)
    module.synchronize(device)
    if reset:
        module.reset_peak_memory_stats(device)
    return dict(module.memory_stats(device))


@contextmanager
def recorded_history() -> Generator[Callable[[], dict[str, Any]]]:
    """Record what CUDA's allocator is asked for, and what it asks of the driver.

    Yields what returns the history until now, for :mod:`remat.memory.snapshots`.
    """
    names.record_memory_history(max_entries=_MOST_ENTRIES, context=None)
    try:
        yield cast("Callable[[], dict[str, Any]]", names.memory_snapshot)
    finally:
        names.record_memory_history(enabled=None)


def release_library_blocks(device_type: str) -> None:
    """Give back what torch keeps for CUDA's matrix library, which it makes again."""
    if device_type == "cuda":
        cast("Any", torch._C)._cuda_clearCublasWorkspaces()


def pinned_bytes(size_bytes: int) -> torch.Tensor:
    """Return fresh bytes of the host that the accelerator copies from and to."""
    # torch asks the accelerator's own code, which one written in Python has not.
    make = getattr(device_module(accelerator_type()), "pinned_bytes", None)
    if make is not None:
        return make(size_bytes)
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


@contextmanager
def forked_random_state(devices: Iterable[torch.device]) -> Generator[None]:
    """Put the random state of the CPU, and of these accelerators, back at the end."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=()))
        for device in devices:
            stack.enter_context(
                torch.random.fork_rng(devices=[device], device_type=device.type)
            )
        yield


def note_random_state(place: torch.device | str) -> torch.Tensor:
    """Return a copy of the state of a device's default generator."""
    if is_accelerator(place):
        return device_module(place).get_rng_state(place)
    return torch.get_rng_state()


def set_random_state(place: torch.device | str, state: torch.Tensor) -> None:
    """Put back what :func:`note_random_state` returned.

    A schedule may have copied it to the accelerator; generators take it from the host.
    """
    state = state.cpu()
    if is_accelerator(place):
        device_module(place).set_rng_state(state, place)
    else:
        torch.set_rng_state(state)


def resident_threads(place: torch.device) -> int:
    """Return how many threads a CUDA device runs at once; 0 if it is none."""
    if place.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return 0
    found = torch.cuda.get_device_properties(place)
    return found.multi_processor_count * found.max_threads_per_multi_processor
