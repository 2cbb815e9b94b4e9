"""Copies between devices: of logical devices of the CPU, and to and from CUDA.

What is copied is a whole storage, so that every view can be made again on the other
side and the bytes are those that the plan counts.

On CUDA a copy runs on a stream of its own, beside computation. Its target block is
allocated in the order of the computation, like any other, and the copy waits for what
was issued before it: a block that a plan calls free is free then, and no stream reads
or writes it any more. In turn, whoever reads the copy, or reuses the source's bytes,
waits for the copy's event. Host memory of such a copy is pinned.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.runtime.pinned import pinned_block
from remat.torch_compat.names import neg_view


@dataclass(frozen=True, slots=True)
class Landing:
    """A copy under way: the tensor it fills, and the event after which it is there."""

    tensor: torch.Tensor
    event: Any


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a CPU tensor, with the whole storage behind it, on the CPU."""
    storage = tensor.untyped_storage()
    block = torch.empty(storage.nbytes(), dtype=torch.uint8)
    block.copy_(_bytes_of(tensor))
    return _like(tensor, block)


def start_copy(
    tensor: torch.Tensor, target: str, target_name: str, after: Sequence[Any] = ()
) -> Landing:
    """Begin to copy a tensor's storage to ``target``; one side at least is CUDA.

    Parameters
    ----------
    tensor
        What is copied.
    target
        torch's name of the target device.
    target_name
        The plan's name of it, in whose account pinned bytes are.
    after
        Events of copies that must have ended: those that fill the source.
    """
    place = torch.device(target)
    size_bytes = tensor.untyped_storage().nbytes()
    if place.type == "cpu":
        block = pinned_block(size_bytes, target_name)
    else:
        block = torch.empty(size_bytes, dtype=torch.uint8, device=place)
    on_cuda = [d for d in (tensor.device, place) if d.type == "cuda"]
    stream = _stream(str(tensor.device), str(place))
    for device in on_cuda:
        stream.wait_stream(torch.cuda.current_stream(device))
    for event in after:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        block.copy_(_bytes_of(tensor), non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return Landing(_like(tensor, block), event)


def landed_tensor(landing: Landing) -> torch.Tensor:
    """Return the tensor that a copy fills; it holds its values after the event."""
    return landing.tensor


def landing_event(landing: Landing) -> Any:
    """Return the event after which a copy has ended."""
    return landing.event


def await_copy(event: Any, place: str, *_held: torch.Tensor) -> None:
    """Let what is issued on ``place`` from now on come after a copy.

    Parameters
    ----------
    event
        Of the copy.
    place
        torch's name of the device: work on CUDA waits there, the CPU waits here.
    _held
        Tensors whose bytes the copy reads or fills, held until now.
    """
    device = torch.device(place)
    if device.type == "cpu":
        event.synchronize()
    else:
        torch.cuda.current_stream(device).wait_event(event)


def release(_tensor: torch.Tensor) -> None:
    """Mark where the plan gives up a tensor, which is held until then."""


@functools.cache
def _stream(source: str, target: str) -> Any:
    """Return the stream of a link: one for each direction between two devices."""
    on_cuda = source if source.startswith("cuda") else target
    return torch.cuda.Stream(torch.device(on_cuda))


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
