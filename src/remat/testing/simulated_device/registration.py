"""The simulated device as torch knows it."""

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from remat.core.platform import COMMON_KINDS, DeviceKind
from remat.testing.simulated_device import kernels, random_numbers, streams
from remat.testing.simulated_device.kernels import MEMORY
from remat.torch_compat.names import setup_python_backend

DEVICE_TYPE = "sim"

_LIBRARIES: list[Any] = []


class _Module(ModuleType):
    """``torch.sim``: what ``torch.cuda`` is for cards."""

    Stream = streams.Stream
    Event = streams.Event
    stream = staticmethod(streams.stream)
    current_stream = staticmethod(streams.current_stream)
    synchronize = staticmethod(streams.synchronize)
    get_rng_state = staticmethod(random_numbers.get_rng_state)
    set_rng_state = staticmethod(random_numbers.set_rng_state)

    def is_available(self) -> bool:
        """Return that there is one."""
        return True

    def is_initialized(self) -> bool:
        """Return that nothing is left to prepare."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return how many there are."""
        return 1

    def current_device(self) -> int:
        """Return the number of the one in use."""
        return 0

    def device(self, _device: Any) -> AbstractContextManager[None]:
        """Return a context in which a device is the current one: it always is."""
        return nullcontext()

    def get_device_name(self, _device: Any = None) -> str:
        """Return what it is called."""
        return "simulated device"

    def manual_seed(self, seed: int) -> None:
        """Seed the generator."""
        random_numbers.GENERATOR.manual_seed(int(seed))

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Return the seed."""
        return random_numbers.GENERATOR.seed

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types of autocast."""
        return [torch.bfloat16, torch.float16]

    def memory_stats(self, _device: Any = None) -> dict[str, int]:
        """Return the allocator's statistics."""
        return MEMORY.statistics()

    def memory_allocated(self, _device: Any = None) -> int:
        """Return the bytes of blocks in use."""
        return MEMORY.statistics()["allocated_bytes.all.current"]

    def reset_peak_memory_stats(self, _device: Any = None) -> None:
        """Let the peaks start from what is in use."""
        MEMORY.reset_peaks()

    def pinned_bytes(self, size_bytes: int) -> torch.Tensor:
        """Return bytes of the host that torch's allocator for it does not know."""
        return torch.frombuffer(bytearray(size_bytes), dtype=torch.uint8)

    def library_workspace_bytes(self, thread_count: int) -> int:
        """Return what its library keeps once so many threads multiply matrices."""
        return kernels.LIBRARY_BYTES * max(thread_count, kernels.Handle.count)

    def empty_cache(self) -> None:
        """Give back what is not in use."""
        MEMORY.empty_cache()


def register(capacity_bytes: int | None = None) -> None:
    """Let torch know the device type ``"sim"``, once in a process.

    Parameters
    ----------
    capacity_bytes
        How much memory it has; ``None`` for as much as the host gives.

    Examples
    --------
    ::

        register()
        x = torch.ones(3, device="sim")
    """
    MEMORY.capacity_bytes = capacity_bytes
    if _LIBRARIES:
        return
    setup_python_backend(DEVICE_TYPE, backend_module=_Module(f"torch.{DEVICE_TYPE}"))
    COMMON_KINDS[DEVICE_TYPE] = DeviceKind(name=DEVICE_TYPE, runs_on=DEVICE_TYPE)
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels.kernels().items():
        library.impl(name, kernel, "PrivateUse1")
    for name, kernel in kernels.autocast_kernels().items():
        library.impl(name, kernel, "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(kernels.run_on_host, "PrivateUse1")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend((library, others))
