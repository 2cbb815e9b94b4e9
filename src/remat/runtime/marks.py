"""Marks in a recording: on which device of the plan the running pass works.

Logical devices share one memory, and an allocation does not say whose it is. So the
two passes of a plan for several devices say where they go on, whenever that changes;
what is allocated until the next mark belongs to that device's account. Without a
recording a mark costs next to nothing.
"""

from torch.profiler import record_function

from remat.torch_compat.names import profiler_enabled

PREFIX = "remat: on device "
"""Name of a mark, before the index of the device."""


def mark_device(device: int) -> None:
    """Note, if a profiler records, that what follows is on a device of the plan."""
    if profiler_enabled():
        with record_function(f"{PREFIX}{device}"):
            pass
