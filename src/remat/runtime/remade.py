"""Values that a step of several graphs does not keep, and that graphs make again.

Where the plan says so, a graph saves for its backward pass an empty tensor in the place
of what another graph handed to it. When backward comes to it, the graphs that made it
run forward again. What they start from is alive, as their own backward passes keep it,
so here it is only referred to: nothing lives longer for this.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.core.errors import ExecutionError
from remat.torch_compat.attributes import storage_alive, storage_identity
from remat.torch_compat.names import top_saved_tensors_hooks

_LINK = "_remat_remade"


@dataclass(frozen=True)
class _View:
    """How a tensor lies in its block."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_View":
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
        )

    def into(self, storage: torch.UntypedStorage) -> torch.Tensor:
        bare = torch.empty(0, dtype=self.dtype, device=self.device)
        return bare.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Given:
    """What a graph starts from, kept by others."""

    storage: StorageWeakRef
    identity: int
    view: _View

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Given":
        """Return a reference to a tensor that does not keep it."""
        identity = storage_identity(tensor)
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, identity, _View.of(tensor))


@dataclass(frozen=True)
class _Maker:
    """How the blocks that a graph handed to others are made again."""

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    given: tuple[Given, ...]
    made: tuple[StorageWeakRef, ...]
    identities: tuple[int, ...]


class RemadeValues:
    """What one step drops after forward and makes again in backward.

    It lives as long as something of the step's backward pass does.
    """

    def __init__(self) -> None:
        # By the block's identity, which stays its own as long as it is referred to.
        self._makers: dict[int, _Maker] = {}
        self._live: dict[int, torch.UntypedStorage] = {}
        self._reader_counts: Counter[int] = Counter()
        self._left: Counter[int] = Counter()

    def note_maker(
        self,
        run: Callable[[list[Any]], Sequence[torch.Tensor]],
        given: Sequence[Given],
        made: Sequence[torch.Tensor],
    ) -> None:
        """Note how blocks are made again that a graph has just made.

        Parameters
        ----------
        run
            Returns a tensor in each block anew.
        given
            What it is called with; its own backward pass keeps these.
        made
            The tensors that the graph made first.
        """
        identities = tuple(map(storage_identity, made))
        references = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in made)
        maker = _Maker(run, tuple(given), references, identities)
        self._makers.update(dict.fromkeys(identities, maker))

    def dropped(self, value: torch.Tensor) -> torch.Tensor:
        """Return what to save for a value, itself if nobody makes it again."""
        is_tracing_ignored = False
        identity = storage_identity(value)
        # Other hooks save something of their own in the place of this.
        hooks: Any = top_saved_tensors_hooks(is_tracing_ignored)
        if identity not in self._makers or hooks is not None:
            return value
        self._reader_counts[identity] += 1
        link = torch.empty(0, dtype=value.dtype, device=value.device)
        setattr(link, _LINK, (self, identity, _View.of(value)))
        return link

    def taken(self, identity: int, view: _View) -> torch.Tensor:
        """Return a value, made again if it is not there; let go by its last reader."""
        if identity not in self._live:
            self._make(identity)
        storage = self._live[identity]
        self._left[identity] -= 1
        if self._left[identity] <= 0:
            del self._live[identity]
        return view.into(storage)

    def _make(self, identity: int) -> None:
        """Run graphs forward again, from the last one back whose inputs are there."""
        waiting = [identity]
        while waiting:
            maker = self._makers[waiting[-1]]
            if waiting[-1] in self._live:
                waiting.pop()
                continue
            missing = [
                each.identity
                for each in maker.given
                if each.identity in self._makers
                and each.identity not in self._live
                and each.storage.expired()
            ]
            if missing:
                waiting += missing
                continue
            with torch.no_grad():
                made = maker.run([self._value(each) for each in maker.given])
            for key, value in zip(maker.identities, made, strict=True):
                # What nobody saved an empty tensor for is still where it was.
                if self._reader_counts[key]:
                    self._live[key] = value.untyped_storage()
                    self._left[key] = self._reader_counts[key]
            waiting.pop()

    def _value(self, given: Given) -> torch.Tensor:
        storage = self._live.get(given.identity)
        if storage is None:
            storage = storage_alive(given.storage)
        if storage is None:
            raise ExecutionError(
                "what a graph was given is gone, so it cannot run again: parameters and "
                "inputs have to stay until the backward pass is over"
            )
        return given.view.into(storage)


def remade(value: Any) -> Any:
    """Return the value that stands behind what was saved in its place."""
    link = getattr(value, _LINK, None)
    if link is None:
        return value
    values, identity, view = link
    return values.taken(identity, view)
