"""Marks in a recording: where a pass works, and what is pinned and given back.

Logical devices share one memory, and an allocation does not say whose it is. So the
two passes of a plan for several devices say where they go on, whenever that changes;
what is allocated until the next mark belongs to that device's account. Pinned blocks
come from an allocator that tells no recording of them. Without a recording a mark costs
next to nothing.
"""

from torch.profiler import record_function

from remat.torch_compat.names import profiler_enabled

PREFIX = "remat: on device "
"""Name of a mark, before the index of the device, or the name and the change there."""


def mark_device(device: int) -> None:
    """Note, if a profiler records, that what follows is on a device of the plan."""
    _mark(str(device))


def mark_pinned(name: str, change_bytes: int) -> None:
    """Note, if a profiler records, that bytes of a device are pinned, or given back."""
    _mark(f"{name} {change_bytes}")


def _mark(text: str) -> None:
    if profiler_enabled():
        with record_function(f"{PREFIX}{text}"):
            pass
