"""Values that a step of several graphs does not keep, and that graphs make again.

Where the plan says so, a graph saves for its backward pass an empty tensor in the place
of what another graph handed to it. When backward comes to it, the graphs that made it
run forward again. What they start from is alive, as their own backward passes keep it,
so here it is only referred to: nothing lives longer for this.

A block that is written in place holds another value from then on. So values are known
by their block and by how often it had been written.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat.core.errors import ExecutionError, PlanWarning
from remat.torch_compat.attributes import (
    storage_alive,
    storage_identity,
    version_of,
)
from remat.torch_compat.names import top_saved_tensors_hooks

_LINK = "_remat_remade"

_ValueKey: TypeAlias = tuple[int, int]
"""The identity of a block, and how often it had been written in place."""


def _key_of(tensor: torch.Tensor) -> _ValueKey:
    return storage_identity(tensor), version_of(tensor)


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
    key: _ValueKey
    view: _View
    # A backward pass that would look whether it changed need not come, or comes later.
    tensor: "weakref.ref[torch.Tensor] | None"

    @classmethod
    def of(cls, tensor: torch.Tensor, *, is_read: bool = True) -> "Given":
        """Return a reference to a tensor that does not keep it.

        Where it is not read, as a batch norm's statistics are not in training, it may
        change.
        """
        storage = StorageWeakRef(tensor.untyped_storage())
        reference = weakref.ref(tensor) if is_read else None
        return cls(storage, _key_of(tensor), _View.of(tensor), reference)

    def check_unchanged(self) -> None:
        """Raise an error if the value was written in place since."""
        tensor = None if self.tensor is None else self.tensor()
        if tensor is not None and _key_of(tensor) != self.key:
            msg = (
                f"a tensor of shape {list(self.view.shape)} was changed in place between "
                "forward and backward, and a block that reads it runs again in this "
                "plan: its gradients would be wrong. Change it after backward, or raise "
                "the budget until no block runs again"
            )
            raise ExecutionError(msg)


@dataclass(frozen=True)
class _Maker:
    """How the blocks that a graph handed to others are made again."""

    run: Callable[[list[Any]], Sequence[torch.Tensor]]
    given: tuple[Given, ...]
    made: tuple[StorageWeakRef, ...]
    keys: tuple[_ValueKey, ...]


class RemadeValues:
    """What one step drops after forward and makes again in backward.

    It lives as long as something of the step's backward pass does.
    """

    def __init__(self) -> None:
        # A block's identity stays its own as long as it is referred to.
        self._makers: dict[_ValueKey, _Maker] = {}
        self._live: dict[_ValueKey, torch.UntypedStorage] = {}
        self._reader_counts: Counter[_ValueKey] = Counter()
        self._left: Counter[_ValueKey] = Counter()

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
        keys = tuple(map(_key_of, made))
        references = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in made)
        maker = _Maker(run, tuple(given), references, keys)
        self._makers.update(dict.fromkeys(keys, maker))

    def dropped(self, value: torch.Tensor) -> torch.Tensor:
        """Return what to save for a value, itself if nobody makes it again.

        Warns where that is so for a write in place that planning did not see.
        """
        is_tracing_ignored = False
        key = _key_of(value)
        # Other hooks save something of their own in the place of this.
        hooks: Any = top_saved_tensors_hooks(is_tracing_ignored)
        if hooks is not None:
            return value
        if key not in self._makers:
            if any(identity == key[0] for identity, _ in self._makers):
                msg = (
                    f"the output of a block, of shape {list(value.shape)}, was written in "
                    "place after fit had seen that it is not, so it cannot be made again "
                    "and is kept: this step may need more than its budget. Write x = x + "
                    "y in the place of x += y there, or fit an example that takes this way"
                )
                warnings.warn(msg, PlanWarning, stacklevel=2)
            return value
        self._reader_counts[key] += 1
        link = torch.empty(0, dtype=value.dtype, device=value.device)
        setattr(link, _LINK, (self, key, _View.of(value)))
        return link

    def taken(self, key: _ValueKey, view: _View) -> torch.Tensor:
        """Return a value, made again if it is not there; let go by its last reader."""
        if key not in self._live:
            self._make(key)
        storage = self._live[key]
        self._left[key] -= 1
        if self._left[key] <= 0:
            del self._live[key]
        return view.into(storage)

    def _make(self, key: _ValueKey) -> None:
        """Run graphs forward again, from the last one back whose inputs are there."""
        waiting = [key]
        while waiting:
            maker = self._makers[waiting[-1]]
            if waiting[-1] in self._live:
                waiting.pop()
                continue
            missing = [
                each.key
                for each in maker.given
                if each.key in self._makers
                and each.key not in self._live
                and each.storage.expired()
            ]
            if missing:
                waiting += missing
                continue
            with torch.no_grad():
                made = maker.run([self._value(each) for each in maker.given])
            for made_key, value in zip(maker.keys, made, strict=True):
                # What nobody saved an empty tensor for is still where it was.
                if self._reader_counts[made_key]:
                    self._live[made_key] = value.untyped_storage()
                    self._left[made_key] = self._reader_counts[made_key]
            waiting.pop()

    def _value(self, given: Given) -> torch.Tensor:
        given.check_unchanged()
        storage = self._live.get(given.key)
        if storage is None:
            storage = storage_alive(given.storage)
        if storage is None:
            msg = (
                "a block cannot run again in backward, as a tensor of shape "
                f"{list(given.view.shape)} that it was given is gone: a backward pass "
                "through what came before it is over, or parameters or inputs were "
                "replaced. Call backward() once for all losses, or first for those of "
                "later blocks; keep parameters and inputs until then; or raise the "
                "budget until no block runs again"
            )
            raise ExecutionError(msg)
        return given.view.into(storage)


def remade(value: Any) -> Any:
    """Return the value that stands behind what was saved in its place."""
    link = getattr(value, _LINK, None)
    if link is None:
        return value
    values, key, view = link
    return values.taken(key, view)
