"""The graphs of a model that the tracer splits, seen in one forward pass.

The tracer hands over the graphs, *regions*, one by one and only while the model runs.
So a first forward pass is run for planning: with real values, keeping nothing for a
backward pass. It shows which graphs there are, which tensors go from one to another,
and for how long the code in between holds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from remat.capture.joint_program import JointProgram
from remat.capture.returned import is_loss, loss_in
from remat.capture.surroundings import tensors_in
from remat.core.errors import CaptureError
from remat.torch_compat.attributes import is_compiled_step, storage_identity, viewed
from remat.torch_compat.metadata import is_tangent

_WITHOUT_MEMORY = frozenset(
    {
        "AccumulateGrad",
        "AliasBackward0",
        "PermuteBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "TBackward0",
        "TransposeBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
"""Nodes of autograd between graphs that keep and make nothing."""


@dataclass(frozen=True, eq=False)
class RegionCode:
    """Code that the tracer handed over: one graph, for one kind of inputs."""

    sources: tuple[str, ...]


@dataclass(kw_only=True)
class SeenRegion:
    """A region that ran in the forward pass for planning."""

    code: RegionCode
    program: JointProgram
    given: dict[int, int] = field(default_factory=dict[int, int])
    made: dict[int, int] = field(default_factory=dict[int, int])


class Gathering:
    """What the forward pass for planning shows.

    Attributes
    ----------
    seen
        The regions in the order in which they ran.
    """

    def __init__(self) -> None:
        self.seen: list[SeenRegion] = []
        # While a reference to a storage exists, weak or not, no other has its identity.
        self._storages: dict[int, StorageWeakRef] = {}
        self._held: dict[int, int] = {}

    def begin(
        self, code: RegionCode, program: JointProgram, values: Sequence[Any]
    ) -> None:
        """Note which blocks a region is given."""
        seen = SeenRegion(code=code, program=program)
        inputs = [
            node
            for node in program.module.graph.find_nodes(op="placeholder")
            if not is_tangent(node)
        ]
        for node, value in zip(inputs, values, strict=True):
            (storage,) = program.storages_of[node]
            seen.given[storage] = self._note(value)
        self.seen.append(seen)

    def end(self, values: Sequence[Any]) -> list[Any]:
        """Note which blocks a region made, and return its values without saved ones."""
        seen = self.seen[-1]
        nodes = seen.program.forward_values
        for node, value in zip(nodes, values, strict=False):
            if isinstance(node, fx.Node) and isinstance(value, torch.Tensor):
                storages = seen.program.storages_of[node]
                if len(storages) == 1 and not self._is_resident(seen, storages[0]):
                    seen.made[storages[0]] = self._note(value)
        self._note_held(len(self.seen) - 1)
        return [
            *values[: len(nodes)],
            *(torch.empty(0) for _ in values[len(nodes) :]),
        ]

    def _is_resident(self, seen: SeenRegion, storage: int) -> bool:
        return seen.program.graph.storages[storage].is_resident

    def _note(self, tensor: torch.Tensor) -> int:
        identity = storage_identity(tensor)
        if identity not in self._storages:
            self._storages[identity] = StorageWeakRef(tensor.untyped_storage())
        return identity

    def _note_held(self, last: int) -> None:
        for seen in self.seen:
            for block in seen.made.values():
                if not self._storages[block].expired():
                    self._held[block] = last

    def returned(self, outputs: Any) -> tuple[int, int] | None:
        """Note what is there when the model has returned; return where the loss is."""
        self._note_held(len(self.seen))
        loss = loss_in(outputs)
        if not is_loss(loss):
            return None
        identity = storage_identity(loss)
        for index, seen in enumerate(self.seen):
            for storage, block in seen.made.items():
                if block == identity:
                    return index, storage
        return None

    def held(self, seen: SeenRegion) -> dict[int, int]:
        """Return, per output of a region, the last one through whose end it is held."""
        return {storage: self._held[block] for storage, block in seen.made.items()}


def check_is_traced(outputs: Any) -> None:
    """Refuse a step of which a part with gradients runs in no graph.

    Raises
    ------
    CaptureError
        If there is one; names what autograd calls it.
    """
    # Views that are returned are made outside of the graphs, where they are one, too.
    bases = [viewed(tensor) for tensor in tensors_in(outputs)]
    found = [
        b if b is not None else t
        for b, t in zip(bases, tensors_in(outputs), strict=True)
    ]
    waiting = [tensor.grad_fn for tensor in found]
    known: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        name = type(node).__name__
        if not is_compiled_step(node) and name not in _WITHOUT_MEMORY:
            msg = (
                f"{name} is computed between the graphs into which the model is "
                "split, where no plan counts it: the tracer leaves out a function with a "
                "graph break in a loop, and modules such as nn.LSTM. Move what breaks "
                "the graph (a print, .item()) into a function of its own that the loop "
                "calls, or move the loop's body into a function"
            )
            raise CaptureError(msg)
        waiting += [following for following, _ in node.next_functions]
