"""The graphs of a model that the tracer splits, seen in one forward pass.

The tracer hands over the graphs, *regions*, one by one and only while the model runs.
So a first forward pass is run for planning: with real values, keeping nothing of the
regions for a backward pass. It shows which graphs there are, which tensors go from one
to another, and for how long the code in between holds them.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from remat.capture.joint_program import JointProgram
from remat.capture.varying_sizes import Sizes
from remat.torch_compat.accelerators import note_random_state
from remat.torch_compat.attributes import (
    CAST_NODE,
    LEAF_NUMBER,
    VIEW_NODES,
    is_compiled_step,
    leaf_of,
    made_bytes,
    made_number,
    packed_tensors,
    storage_bytes,
    storage_identity,
    storage_of,
    version_of,
)
from remat.torch_compat.metadata import is_tangent
from remat.torch_compat.names import next_node_number, profiler_enabled

MARK = "remat: at the border of graph "
"""Beginning of the marks in a recording where a region begins and where it ends."""

GATE = "hands_on_for_remat"
"""Attribute of autograd's nodes through which inputs of regions go unchanged.

Those of :mod:`remat.runtime.early_gradients`; the pass for planning has none.
"""


@dataclass(frozen=True, eq=False)
class RegionCode:
    """Code that the tracer handed over: one graph, for one kind of inputs.

    Parameters
    ----------
    sources
        Where its inputs come from, those left out that are sizes.
    sizes
        What varies among its sizes, where one trace is for many.
    traced
        The same at the sizes at which it was traced, ``None`` for these themselves.
    set_up
        The numbers of the orders in which it has run.
    """

    sources: tuple[str, ...]
    sizes: Sizes = ()
    traced: "RegionCode | None" = None
    set_up: set[int] = field(default_factory=set[int], repr=False)

    @property
    def trace(self) -> "RegionCode":
        """What is the same at all sizes that were traced together."""
        return self.traced or self


@dataclass(frozen=True)
class Between:
    """What ran in no graph: autograd's nodes that lead to what comes next.

    Parameters
    ----------
    kinds
        Their kinds, each with how many others they hand gradients to.
    made_bytes
        Bytes of what their operators returned, views left out, and of the gradients
        that they hand to graphs and to leaves.
    largest_bytes
        Most that one operator returned.
    wholes_bytes
        Bytes of the gradients of all tensors of which a part was taken as a view.
    kept_bytes
        Bytes of what they keep for their backward pass, parameters and buffers left
        out.
    """

    kinds: frozenset[tuple[str, int]]
    made_bytes: int
    largest_bytes: int
    wholes_bytes: int
    kept_bytes: int


NOTHING_BETWEEN = Between(
    frozenset(), made_bytes=0, largest_bytes=0, wholes_bytes=0, kept_bytes=0
)


@dataclass(frozen=True)
class MoreThanPlanned:
    """How much more was made, and kept, than planned, up to some place in a pass.

    Parameters
    ----------
    made_bytes, kept_bytes
        In all places up to this one; less of the one makes up for more of the other
        nowhere.
    here_bytes
        What was made at this place alone, in all or in one piece, or half of what is
        in backward for views. Less of it earlier does not make up for that either.
    """

    made_bytes: int = 0
    here_bytes: int = 0
    kept_bytes: int = 0

    def then(self, found: Between, planned: Between) -> "MoreThanPlanned":
        """Return how much more it is after the next place."""
        made_bytes = found.made_bytes - planned.made_bytes
        return MoreThanPlanned(
            self.made_bytes + made_bytes,
            max(
                made_bytes,
                found.largest_bytes - planned.largest_bytes,
                # All others may be needed once more, as gradients; these are such.
                (found.wholes_bytes - planned.wholes_bytes + 1) // 2,
            ),
            self.kept_bytes + found.kept_bytes - planned.kept_bytes,
        )

    @property
    def size_bytes(self) -> int:
        """What there is more of either, in bytes."""
        return max(0, self.made_bytes, self.here_bytes) + max(0, self.kept_bytes)


AS_PLANNED = MoreThanPlanned()


def all_within(
    found: Iterable[Between], planned: Iterable[Between], room_bytes: float = 0
) -> bool:
    """Whether the same kinds ran as were planned, at all places that both have.

    Up to each of these they may have made and kept more than planned by so many bytes.
    """
    more = AS_PLANNED
    for one, other in zip(found, planned, strict=False):
        more = more.then(one, other)
        if one.kinds != other.kinds or more.size_bytes > room_bytes:
            return False
    return True


class NodesBetween:
    """The nodes that autograd makes of what runs between the graphs of one pass.

    Parameters
    ----------
    model
        Its buffers are there anyway, whether a node keeps them or not.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self.begin(())

    def begin(self, given: Iterable[Any]) -> None:
        """Begin with a forward pass that is given these values."""
        self._first = next_node_number()
        # No references, which would keep what nodes save.
        self._known = {*map(made_number, _nodes_of(given))}
        # The blocks that nodes keep, once there is one that keeps any.
        self._kept: set[int] | None = None
        self._uses: dict[int, int] = {}

    def leading_to(self, values: Iterable[Any]) -> Between:
        """Return what ran to make these values, and was not told of before."""
        kinds, new = set[tuple[str, int]](), set[int]()
        made = largest = wholes = kept = 0
        nodes: list[Any] = []
        # There may be very many: each is asked for little, and once.
        reached = [(node, -1) for node in _nodes_of(values)]
        while True:
            for edge in reached:
                node, slot = _behind_gates(*edge)
                if node is None or (number := made_number(node)) in new:
                    continue
                if number == LEAF_NUMBER:
                    made += self._leaf_bytes(node)
                elif (
                    number < self._first
                    or number in self._known
                    or is_compiled_step(node)
                ):
                    made += 0 if slot < 0 else made_bytes(node)[slot]
                else:
                    new.add(number)
                    nodes.append(node)
            if not nodes:
                break
            node = nodes.pop()
            reached = node.next_functions
            kind = node.name()
            # Autocast makes the casts of weights once in a context.
            if kind == CAST_NODE and made_number(reached[0][0]) == LEAF_NUMBER:
                reached = ()  # Nor are those gradients counted.
                continue
            kinds.add((kind, len(reached)))
            returned = made_bytes(node)
            if kind not in VIEW_NODES:
                made += sum(returned)
                largest = max(largest, sum(returned))
            else:
                # The gradient of a part of a tensor is one of the whole.
                given = (made_bytes(each)[slot] for each, slot in reached if each)
                wholes += sum(whole for whole in given if [whole] != returned)
            for tensor in packed_tensors(node):
                kept += self._kept_bytes(tensor)
        if not new and not made:
            return NOTHING_BETWEEN
        self._known |= new
        return Between(frozenset(kinds), made, largest, wholes, kept)

    def _kept_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of what a node keeps, if none before it kept that."""
        if self._kept is None:
            model = None if self._model is None else self._model()
            buffers = () if model is None else model.buffers()
            self._kept = {*map(storage_identity, buffers)}
        identity = storage_identity(tensor)
        if identity in self._kept:
            return 0
        self._kept.add(identity)
        return storage_bytes(tensor)

    def _leaf_bytes(self, node: Any) -> int:
        """Return the bytes of one more gradient of a leaf."""
        identity = id(leaf_of(node))
        self._uses[identity] = count = self._uses.get(identity, 0) + 1
        # There are no more than two at a time: what was added up, and the next.
        return 0 if count > 2 else sum(made_bytes(node))


def _nodes_of(values: Iterable[Any]) -> list[Any]:
    return [
        _behind_gates(value.grad_fn, value.output_nr)[0]
        for value in values
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]


def _behind_gates(node: Any, slot: int) -> tuple[Any, int]:
    """Return which node has made what goes through gates, and as which output."""
    while getattr(node, GATE, False):
        node, slot = node.next_functions[slot]
    return node, slot


@dataclass(frozen=True, kw_only=True)
class Route:
    """Which graphs a forward pass comes to, and what runs between them.

    Parameters
    ----------
    codes
        The graphs in order.
    between
        What runs before each, and after the last once the pass is over.
    """

    codes: list[RegionCode] = field(default_factory=list[RegionCode])
    between: list[Between] = field(default_factory=list[Between])

    def is_within(self, planned: "Route") -> bool:
        """Whether a pass that is over came to the planned graphs, and made no more."""
        return self.codes == planned.codes and all_within(self.between, planned.between)


@dataclass(kw_only=True)
class SeenRegion:
    """A region that ran in the forward pass for planning.

    Parameters
    ----------
    code, program
        Which graph it is.
    given, made
        The blocks of its inputs, and of its outputs, by their storages in the program.
    node
        Autograd's node of its backward pass, ``None`` without gradients.
    next_number
        The least number that a node has which autograd made after it.
    """

    code: RegionCode
    program: JointProgram
    given: dict[int, int] = field(default_factory=dict[int, int])
    made: dict[int, int] = field(default_factory=dict[int, int])
    node: Any = None
    next_number: int


@dataclass(frozen=True)
class _Returned:
    """What a region returned, and what it had saved for backward but tensors."""

    code: RegionCode
    values: list[Any]
    saved: list[Any]


class Gathering:
    """What the forward pass for planning shows.

    Parameters
    ----------
    resident
        Tensors that are there during the whole step: parameters, buffers, the batch.
    before
        What an equal forward pass has shown, whose regions need not run again.
    keeps_bytes
        Most bytes of what regions return that are kept for such a pass.

    Attributes
    ----------
    seen
        The regions in the order in which they ran.
    held
        Per block, the last region that ended while something held it.
    eager
        Per block that operators in no graph made, the region that was given it first.
    stay
        The blocks that the model keeps as attributes when it has returned.
    kept
        The tensors among them that may be differentiated, until readers are looked at.
    changed
        The blocks that were written in place after a region made them or was given
        them, by another one or by code in between.
    between
        What ran before each region, and after the last.
    """

    def __init__(
        self,
        resident: Iterable[torch.Tensor],
        *,
        before: "Gathering | None" = None,
        keeps_bytes: int = 0,
    ) -> None:
        self._returned = {} if before is None else before.take_returned()
        self._is_kept = before is None
        self._keeps_bytes = keeps_bytes
        self.seen: list[SeenRegion] = []
        self.between: list[Between] = []
        self.held: dict[int, int] = {}
        self.eager: dict[int, int] = {}
        self.sizes_bytes: dict[int, int] = {}
        self.stay: set[int] = set()
        self.kept: list[torch.Tensor] = []
        # While a reference to a storage exists, weak or not, no other has its identity.
        self._storages: dict[int, StorageWeakRef] = {}
        self.changed: set[int] = set()
        self._versions: dict[int, int] = {}
        self._resident = list(resident)
        # What autograd had made before, for what the model is given.
        self._first_number = next_node_number()
        self._given_nodes = {tensor.grad_fn for tensor in self._resident} - {None}
        self._known = {self.note(tensor) for tensor in self._resident}
        # Of others, what was there when a region ended last.
        self._seen_count = len(self._storages)
        self._live: dict[int, StorageWeakRef] = {}
        # Of the generators that the region that runs now may draw from.
        self._random_states: list[torch.Tensor] = []

    def note(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's block."""
        identity = storage_identity(tensor)
        if identity not in self._storages:
            self._storages[identity] = StorageWeakRef(storage_of(tensor))
            self.sizes_bytes[identity] = storage_bytes(tensor)
        return identity

    def new_block(self, size_bytes: int) -> int:
        """Return a number for a block of which no tensor is known."""
        block = -1 - len(self.sizes_bytes)
        self.sizes_bytes[block] = size_bytes
        return block

    def leave_out(self, blocks: Iterable[int]) -> None:
        """Let blocks that regions are given count as if others did."""
        for block in blocks:
            self.eager.pop(block, None)
            self._known.add(block)

    def note_eager(self, tensor: torch.Tensor, before: int) -> int:
        """Return the number of a block, made before a region if it is not known yet."""
        block = self.note(tensor)
        if block not in self._known:
            self.eager[block] = min(before, self.eager.get(block, before))
        return block

    def is_resident(self, block: int) -> bool:
        """Whether a block is there during the whole step."""
        made = (block for seen in self.seen for block in seen.made.values())
        return block not in self.eager and block not in made

    def is_before(self, node: Any) -> bool:
        """Whether a node of autograd belongs to what was computed before the pass."""
        return node in self._given_nodes or made_number(node) < self._first_number

    def begin(
        self, code: RegionCode, program: JointProgram, values: Sequence[Any]
    ) -> None:
        """Note which blocks a region is given."""
        index = len(self.seen)
        _mark(f"{index}, which begins")
        # Its own node is there already, if it has one.
        number = next_node_number()
        seen = SeenRegion(code=code, program=program, next_number=number)
        inputs = [
            node
            for node in program.module.graph.find_nodes(op="placeholder")
            if not is_tangent(node)
        ]
        for node, value in zip(inputs, values, strict=True):
            if not isinstance(value, torch.Tensor):
                continue  # A size that varies.
            (storage,) = program.storages_of[node]
            seen.given[storage] = self.note_eager(value, index)
            self._note_version(value)
        self.seen.append(seen)
        if self._is_kept:
            self._random_states = _random_states(program)

    def take_returned(self) -> "dict[int, _Returned]":
        """Return what regions returned, as far as it is kept, and keep it no more."""
        found, self._returned = self._returned, {}
        return found

    def known_values(self) -> list[Any] | None:
        """Return the values of the region that has begun, if they are known."""
        known = self._returned.pop(len(self.seen) - 1, None)
        if self._is_kept or known is None or known.code is not self.seen[-1].code:
            return None
        # Made here, and so recorded, as those of a run would be.
        return [*_copies(known.values), *known.saved]

    def _keep(self, seen: SeenRegion, values: Sequence[Any]) -> None:
        """Keep what a region returned if it may stand for another run of it."""
        count = len(seen.program.forward_values)
        tensors = [v for v in values[:count] if isinstance(v, torch.Tensor)]
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        blocks = {*map(storage_identity, tensors)}
        # A copy takes as many bytes, of a block of its own, and draws nothing.
        if (
            sizes == [tensor.nbytes for tensor in tensors]
            and len(blocks) == len(tensors)
            and blocks.isdisjoint(seen.given.values())
            # Attention may draw, and does not where it drops nothing out.
            and all(map(torch.equal, self._random_states, _random_states(seen.program)))
            and sum(sizes) <= self._keeps_bytes
        ):
            self._keeps_bytes -= sum(sizes)
            # Copies, as it is looked at how long the code holds the blocks themselves.
            self._returned[len(self.seen) - 1] = _Returned(
                seen.code,
                _copies(values[:count]),
                [None if _is_kept_tensor(v) else v for v in values[count:]],
            )

    def end(self, values: Sequence[Any]) -> list[Any]:
        """Note which blocks a region made, and return its values without saved ones."""
        seen = self.seen[-1]
        if self._is_kept:
            self._keep(seen, values)
        nodes = seen.program.forward_values
        for node, value in zip(nodes, values, strict=False):
            if isinstance(node, fx.Node) and isinstance(value, torch.Tensor):
                storages = seen.program.storages_of[node]
                resident = seen.program.graph.storages
                if len(storages) == 1 and not resident[storages[0]].is_resident:
                    seen.made[storages[0]] = self.note(value)
                    self._note_version(value)
        self._known.update(seen.made.values())
        self._note_held(len(self.seen) - 1)
        _mark(f"{len(self.seen) - 1}, which ends")
        return [
            *values[: len(nodes)],
            *(
                torch.empty(0, device="cpu") if _is_kept_tensor(value) else value
                for value in values[len(nodes) :]
            ),
        ]

    def note_node(self, outputs: Sequence[Any]) -> None:
        """Note autograd's node of the region that ran last, from what it returned."""
        tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
        looked_at: set[Any] = {None}
        while nodes:
            node = nodes.pop(0)
            if node in looked_at:
                continue
            looked_at.add(node)
            if is_compiled_step(node):
                # A view of an input is made behind the region that made the input.
                if all(node is not seen.node for seen in self.seen):
                    self.seen[-1].node = node
                    return
            elif made_number(node) >= self.seen[-1].next_number:
                # Outputs that are views are made again behind it, and inputs that it
                # writes to are copied to, behind what they were before as well.
                nodes += [following for following, _ in node.next_functions]

    def end_step(self, resident: Iterable[torch.Tensor]) -> None:
        """Note what is there when the model has returned.

        ``resident`` are parameters, buffers and the batch of now. What was one of these
        and is no more counts as changed: nobody keeps it for backward.
        """
        self._note_held(len(self.seen))
        blocks = {self.note(tensor) for tensor in resident}
        for tensor in self._resident:
            block = self.note(tensor)
            if block in self._versions:
                self._note_version(tensor)
                if block not in blocks:
                    self.changed.add(block)
        self._resident.clear()

    def _note_version(self, tensor: torch.Tensor) -> None:
        block, version = self.note(tensor), version_of(tensor)
        if self._versions.setdefault(block, version) != version:
            self.changed.add(block)

    def _note_held(self, last: int) -> None:
        new = islice(self._storages.items(), self._seen_count, None)
        self._seen_count = len(self._storages)
        live = {**self._live, **dict(new)}
        self._live = {
            b: storage for b, storage in live.items() if not storage.expired()
        }
        self.held.update(dict.fromkeys(self._live, last))


def _random_states(program: JointProgram) -> list[torch.Tensor]:
    """Return the states of the generators that a region may draw from."""
    if not program.random_states:
        return []
    return [note_random_state("cpu"), note_random_state(program.device)]


def _is_kept_tensor(saved: Any) -> bool:
    """Whether a value that is saved for backward is no size, ``None`` if it is gone."""
    return saved is None or isinstance(saved, torch.Tensor)


def _copies(values: Sequence[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in values]


def _mark(text: str) -> None:
    if profiler_enabled():
        with record_function(f"{MARK}{text}"):
            pass
