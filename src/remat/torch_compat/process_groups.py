"""Process groups: who is in one, how long it waits, and how words get around.

Words go through the store by which the processes found each other, not through the
devices: a process that does not come holds nobody up for longer than is said, and
operations of the group that are under way are not disturbed.
"""

import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from remat.torch_compat.attributes import active_wrapper
from remat.torch_compat.names import FakeScriptObject
from remat.torch_compat.sharding import gathered_groups

_MOST_BYTES = 1 << 20
"""Of one value in a store; the usual one takes 8 MiB."""

_LONGEST_PAUSE_S = 0.05


def group_around(model: nn.Module) -> Any:
    """Return the processes that train copies or pieces of a model.

    ``None`` if this one trains it alone. Those of the ``DistributedDataParallel`` whose
    forward runs, or those among which ``fully_shard`` divided the model. None are in a
    group that is only simulated.
    """
    wrapper = active_wrapper()
    if wrapper is None:
        found = next((each.process_group for each in gathered_groups(model)), None)
    else:
        found = wrapper.process_group
    return None if found is None or is_simulated(found) else found


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Return whether a group has this process alone, and others are made up."""
    return type(_backend_of(group)).__name__ == "FakeProcessGroup"


def is_fake_group(value: object) -> bool:
    """Return whether a constant of a trace stands for a group, or a mesh of devices."""
    return isinstance(value, FakeScriptObject) and isinstance(
        value.real_obj, dist.ProcessGroup | dist.DeviceMesh
    )


def put_real_groups(module: fx.GraphModule) -> None:
    """Put the groups and meshes themselves where constants of a trace stand for them.

    The tracer makes a mesh a constant where it is no input. torch remembers the layouts
    of earlier models, also with their mesh: one that is equal and another object.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target, None)
        if isinstance(value, FakeScriptObject) and is_fake_group(value):
            setattr(module, node.target, value.real_obj)


class Postings:
    """What the processes of a group say to one another, each word once.

    Parameters
    ----------
    group
        The processes.
    prefix
        What the names of all words begin with; no other words may have it.
    """

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.timeout_s = _timeout_s(group)
        # Annotated to take text alone, and takes bytes.
        self._store: Any = group.get_group_store()
        self._prefix = prefix

    def post(self, name: str, word: bytes) -> None:
        """Let all read a word. Takes it apart, as stores take no long values."""
        packed = zlib.compress(word, 1)
        parts = [
            packed[start : start + _MOST_BYTES]
            for start in range(0, len(packed), _MOST_BYTES)
        ]
        for number, part in enumerate(parts):
            self._store.set(f"{self._prefix}/{name}/{number}", part)
        # Last: who sees this sees the parts.
        self._store.set(f"{self._prefix}/{name}", str(len(parts)))

    def is_posted(self, name: str) -> bool:
        """Return whether a word is there."""
        return self._store.check([f"{self._prefix}/{name}"])

    def read(self, name: str) -> bytes:
        """Return a word that is there."""
        count = int(self._store.get(f"{self._prefix}/{name}"))
        packed = b"".join(
            self._store.get(f"{self._prefix}/{name}/{number}")
            for number in range(count)
        )
        return zlib.decompress(packed)

    def wait(self, name: str, until_s: float) -> bool:
        """Wait until a word is there; return whether it is.

        Parameters
        ----------
        name
            Of the word.
        until_s
            How long, on the clock of ``time.monotonic``.

        Raises
        ------
        torch.distributed.DistError
            If the store is gone.
        """
        pause_s = 0.001
        # Not the wait of the store, which Ctrl-C does not end.
        while not self.is_posted(name):
            if time.monotonic() > until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def remove(self, name: str) -> None:
        """Forget a word that all have read."""
        count = int(self._store.get(f"{self._prefix}/{name}"))
        for number in range(count):
            self._store.delete_key(f"{self._prefix}/{name}/{number}")


def _timeout_s(group: dist.ProcessGroup) -> float:
    """Return how long the operations of a group wait for others, in seconds."""
    options: Any = getattr(_backend_of(group), "options", None)
    found = dist.default_pg_timeout if options is None else options._timeout
    return found.total_seconds()


def _backend_of(group: dist.ProcessGroup) -> Any:
    types = [device.type for device in group._device_types]
    return group._get_backend(torch.device("cpu" if "cpu" in types else types[0]))
