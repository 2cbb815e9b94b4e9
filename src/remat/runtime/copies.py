"""Copies between devices, as nodes of a graph: one for each instruction.

What is copied is a whole storage, so that every view can be made again on the other
side and the bytes are those that the plan counts.

A target block is allocated by the host in the order of the steps, like any other: a
block that a plan calls free is free then. Which queue does what, and what waits for
what, is said by the issue order (:mod:`remat.core.issue_order`). Host memory of a copy
from or to CUDA is pinned.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from remat.runtime.pinned import pinned_block
from remat.runtime.queues import CopyRun, Event, Key, queue_of
from remat.torch_compat.names import neg_view


def runnable(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the code of a pass: its own if it copies nothing, else in a copy run."""
    forward = module.forward
    if not module.graph.find_nodes(op="call_function", target=copy_bytes):
        return forward

    def run(arguments: list[Any]) -> Any:
        with CopyRun():
            return forward(arguments)

    return run


def new_block(
    tensor: torch.Tensor, source: str, target: str, target_name: str
) -> torch.Tensor:
    """Return fresh bytes on ``target``, as many as the tensor's storage has.

    Parameters
    ----------
    tensor
        What is to be copied.
    source, target
        torch's names of the devices.
    target_name
        The plan's name of the target, in whose account pinned bytes are.
    """
    size_bytes = tensor.untyped_storage().nbytes()
    if target == "cpu" and source != "cpu":
        return pinned_block(size_bytes, target_name)
    return torch.empty(size_bytes, dtype=torch.uint8, device=target)


def copy_bytes(key: Key, tensor: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Issue the copy of a tensor's storage to a block, and return the tensor there."""
    queue_of(key).copy(_bytes_of(tensor), block)
    return _like(tensor, block)


def record_event(key: Key) -> Event:
    """Return an event after all that was issued to a queue."""
    return queue_of(key).record()


def wait_event(key: Key, event: Any) -> None:
    """Let what is issued to a queue from now on come after an event."""
    queue_of(key).wait(event)


def release(*_tensors: torch.Tensor) -> None:
    """Mark where the plan gives up tensors, which are held until then."""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _like(tensor: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return the tensor that lies in ``block`` as ``tensor`` lies in its storage."""
    made = torch.empty(0, dtype=tensor.dtype, device=block.device)
    made.set_(
        block.untyped_storage(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
    )
    # Bits that say how the bytes are to be read are no part of the storage.
    if tensor.is_conj():
        made = made.conj()
    return neg_view(made) if tensor.is_neg() else made
