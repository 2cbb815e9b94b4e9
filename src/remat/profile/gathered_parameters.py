"""Memory of parameters that are gathered from pieces around parts of a backward pass.

``fully_shard`` gathers the parameters of a module when the gradient of its output is
there, and then begins to gather those of the module before. When its backward pass has
ended, the whole parameters go, and their gradients are copied to one block, of which
each process keeps a piece once all have added theirs. That block stays until the next
one is needed. In forward passes the same is measured; backward passes follow this rule
of ``torch.distributed.fsdp._fully_shard``, in which nothing is decided by the plan.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from remat.capture.gathering import Gathering
from remat.core.errors import CaptureError
from remat.planning.regions import EagerBackward, EagerForward, EagerWork, Slot
from remat.profile.collectives import exchange_ns, exchange_workspace_bytes
from remat.profile.eager_parts import BackwardOrder
from remat.torch_compat.attributes import leaf_of, made_number, storage_identity
from remat.torch_compat.sharding import Gathered, GatheredGroup


def check_groups(groups: list[GatheredGroup]) -> None:
    """Refuse ways to divide parameters whose memory is not known.

    Raises
    ------
    CaptureError
        Naming the part of the model, and what to change.
    """
    for group in groups:
        if group.unsupported is not None:
            msg = (
                f"{group.name} is sharded with {group.unsupported}, whose memory is not "
                "predicted; shard over one dimension, with pieces on the device"
            )
            raise CaptureError(msg)


def leave_out(gathering: Gathering, groups: list[GatheredGroup]) -> frozenset[int]:
    """Let gathered parameters count as :class:`GatheredBackward` says; return them."""
    blocks = {
        storage_identity(parameter)
        for group in groups
        for parameter in group.parameters
    }
    gathering.leave_out(blocks)
    return frozenset(blocks)


@contextmanager
def held_for(
    groups: list[GatheredGroup], tensors: Iterable[torch.Tensor]
) -> Generator[None]:
    """Let those whole parameters be there inside that are among tensors, and no others.

    What a step gathers for its backward pass counts by itself.
    """
    needed = {storage_identity(tensor) for tensor in tensors}
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(group.left_alone())
            if any(storage_identity(p) in needed for p in group.parameters):
                stack.enter_context(group.held())
        yield


class ChosenToKeep:
    """Groups of parameters that may stay whole between their passes, or go and come.

    Parameters
    ----------
    gathering, gathered, between
        What the forward pass for planning showed.

    Attributes
    ----------
    groups
        Those of which either may be chosen, in the order of their forward passes.
    """

    def __init__(
        self,
        gathering: Gathering,
        gathered: Gathered,
        between: Mapping[int, EagerForward],
    ) -> None:
        self._gathered = gathered
        self._last = len(gathering.seen)
        self._held = gathering.held
        self._blocks: dict[GatheredGroup, list[int]] = {}
        # Of what is in pieces between its passes, the region that needs it last.
        self._ends: dict[GatheredGroup, int] = {}
        once = [g for g in gathered.order if gathered.order.count(g) == 1]
        for group in filter(lambda group: group.may_be_kept, once):
            whole = {storage_identity(p) for p in group.parameters}
            needed = [
                index
                for index, seen in enumerate(gathering.seen)
                if not whole.isdisjoint(seen.given.values())
            ]
            if not needed:
                continue
            held = self._last if group in gathered.kept else needed[-1]
            found = self._made(group, between.get(needed[0]), held)
            if found is not None:
                self._blocks[group], self._ends[group] = found, needed[-1]

    def _made(
        self, group: GatheredGroup, eager: EagerForward | None, held: int
    ) -> list[int] | None:
        """Return the blocks of whole parameters among those made, if found."""
        left = {} if eager is None else dict(eager.made)
        found: list[int] = []
        for size_bytes in group.sizes_bytes:
            same = [
                block
                for block, size in left.items()
                if size == size_bytes and self._held.get(block) == held
            ]
            if not same:
                return None
            found.append(same[0])
            del left[same[0]]
        return found

    @property
    def groups(self) -> list[GatheredGroup]:
        """Those of which either may be chosen, in the order of their forward passes."""
        return list(self._blocks)

    @property
    def kept(self) -> frozenset[GatheredGroup]:
        """Those among them that are kept now."""
        return frozenset(self._blocks).intersection(self._gathered.kept)

    def held(self, kept: frozenset[GatheredGroup]) -> dict[int, int]:
        """Return how long blocks are held that would be for another time otherwise."""
        return {
            block: self._last if group in kept else self._ends[group]
            for group, blocks in self._blocks.items()
            for block in blocks
        }

    def whole(self, kept: frozenset[GatheredGroup]) -> dict[GatheredGroup, list[int]]:
        """Return the blocks that are there when the backward pass begins."""
        return {
            group: list(blocks)
            for group, blocks in self._blocks.items()
            if group in kept
        }


class GatheredBackward:
    """What gathering takes in a backward pass, put between its parts.

    Parameters
    ----------
    backward
        How autograd goes through the step.
    gathering
        Numbers the blocks.
    gathered
        What the forward pass did.
    between
        What stays of it.
    choice, kept
        The groups that may be kept whole, and those of them that are.

    Attributes
    ----------
    stay
        The blocks of the pieces of gradients.
    """

    def __init__(
        self,
        backward: BackwardOrder,
        gathering: Gathering,
        gathered: Gathered,
        between: Mapping[int, EagerForward],
        choice: ChosenToKeep,
        kept: frozenset[GatheredGroup],
    ) -> None:
        self.backward = backward
        self.gathering = gathering
        # A module that is called several times is expected as often.
        self.order = list(gathered.order)
        self.whole = choice.whole(kept)
        for group in gathered.kept:
            if group not in choice.groups:
                self.whole[group] = self._blocks_in(group, between)
        self.stay: set[int] = set()
        self.fetched: dict[GatheredGroup, int] = {}
        self.waiting: list[int] = []
        self.slots = self._slots()
        self.first = {
            group: min(
                (made_number(n) for n in backward.nodes if group.is_last_node(n)),
                default=-1,
            )
            for group in self.order
        }

    def parts(self) -> list[int | EagerBackward | EagerWork]:
        """Return the backward pass with what gathering does between its parts."""
        if not self.order:
            return list(self.backward.order)
        outer = [group for group in self.order if group.is_outermost]
        inner = [group for group in dict.fromkeys(self.order) if group not in outer]
        inner.sort(key=lambda group: self.first[group])
        found: list[int | EagerBackward | EagerWork] = []
        for group in outer:
            found += self.begin(group)
        done: set[GatheredGroup] = set()
        begun: set[GatheredGroup] = set()
        of_regions = {
            self._group_of(inner, node)
            for part, node in zip(self.backward.order, self.backward.nodes, strict=True)
            if isinstance(part, int)
        }
        for part, node in zip(self.backward.order, self.backward.nodes, strict=True):
            group = self._group_of(inner, node)
            # What comes after a module's graphs may be outside of it.
            is_inside = isinstance(part, int) or group not in of_regions
            if group is not None and is_inside and group not in begun:
                begun.add(group)
                found += self.begin(group)
            found.append(part)
            for group in inner:
                if group.is_last_node(node):
                    found += self.end(group)
                    done.add(group)
        for group in [*outer, *inner]:
            if group not in done:
                found += self.end(group)
        found.append(EagerWork(name="the end of gathering", reads=[*self.waiting]))
        return found

    def _group_of(
        self, inner: list[GatheredGroup], node: object
    ) -> GatheredGroup | None:
        """Return the group of the module whose forward pass made a node, or later."""
        number = made_number(node)
        before = [group for group in inner if self.first[group] <= number]
        return before[-1] if before else None

    def begin(self, group: GatheredGroup) -> Iterator[EagerWork]:
        """Yield what happens when the gradient of a module's output is there."""
        if group not in self.whole:
            yield from self.fetch(group)
            sizes = {self._block(size): size for size in group.sizes_bytes}
            self.whole[group] = list(sizes)
            yield EagerWork(
                name=f"gathering of {group.name}",
                reads=[self.fetched[group]],
                made=sizes,
            )
            del self.fetched[group]
        position = max(i for i, known in enumerate(self.order) if known == group)
        if position:
            yield from self.fetch(self.order[position - 1])

    def fetch(self, group: GatheredGroup) -> Iterator[EagerWork]:
        """Yield how pieces come from other processes, unless they did already."""
        if group in self.whole or group in self.fetched:
            return
        size_bytes = sum(group.sizes_bytes) if group.world_size > 1 else 0
        scratch_bytes = exchange_workspace_bytes(
            "all_gather", size_bytes // group.world_size, size_bytes, group.device_type
        )
        self.fetched[group] = self._block(size_bytes)
        yield EagerWork(
            name=f"pieces of {group.name}",
            made={self.fetched[group]: size_bytes},
            workspace_bytes=group.cast_bytes + scratch_bytes,
            cost_ns=exchange_ns(size_bytes, group.device_type) if size_bytes else 0,
        )

    def end(self, group: GatheredGroup) -> Iterator[EagerWork]:
        """Yield what happens when the backward pass of a module has ended."""
        if group not in self.whole:
            yield from self.begin(group)
        count = max(0, len(self.waiting) + 1 - group.most_waiting)
        gone, self.waiting = self.waiting[:count], self.waiting[count:]
        yield EagerWork(
            name=f"the end of {group.name}", reads=[*self.whole[group], *gone]
        )
        sizes = self.slots.get(group, {})
        if not sizes:
            return
        if not group.reduces_gradients:
            yield from self.keep(group, sizes)
            return
        # Where an earlier pass left whole gradients, each was added as it came.
        slots = [slot for slot in sizes if not self.backward.leaves[slot]]
        if group.kept_dtype is not None and group.whole_gradients:
            yield from self.keep(group, sizes)
            slots = []
        whole_bytes, own_bytes, copied_bytes = group.reduced_bytes
        whole, own = self._block(whole_bytes), self._block(own_bytes)
        self.waiting.append(whole)
        yield EagerWork(
            name=f"gradients of {group.name}", takes=slots, made={whole: whole_bytes}
        )
        if not group.has_gradients:
            self.stay.add(own)
        sent_bytes = whole_bytes if group.world_size > 1 else 0
        scratch_bytes = exchange_workspace_bytes(
            "reduce_scatter", sent_bytes, own_bytes, group.device_type
        )
        yield EagerWork(
            name=f"pieces of gradients of {group.name}",
            made={own: own_bytes},
            workspace_bytes=copied_bytes + scratch_bytes,
        )

    def keep(
        self, group: GatheredGroup, sizes: Mapping[Slot, int]
    ) -> Iterator[EagerWork]:
        """Yield how gradients are cast one by one, if they are, to stay or be added."""
        if group.kept_dtype is None:
            return
        has_gradients = bool(group.whole_gradients)
        for slot, count in sizes.items():
            size_bytes = count * group.kept_dtype.itemsize
            made = {} if has_gradients else {self._block(size_bytes): size_bytes}
            self.stay.update(made)
            yield EagerWork(
                name=f"gradients of {group.name}",
                takes=[slot],
                made=made,
                workspace_bytes=size_bytes if has_gradients else 0,
            )

    def _block(self, size_bytes: int) -> int:
        return self.gathering.new_block(size_bytes)

    def _blocks_in(
        self, group: GatheredGroup, between: Mapping[int, EagerForward]
    ) -> list[int]:
        """Return the blocks of whole parameters among what stayed after forward."""
        held = self.gathering.held
        last = len(self.gathering.seen)
        left = {
            block: size_bytes
            for eager in between.values()
            for block, size_bytes in eager.made.items()
            if held.get(block) == last
        }
        found: list[int] = []
        for size_bytes in group.sizes_bytes:
            block = next((b for b, size in left.items() if size == size_bytes), None)
            if block is not None:
                found.append(block)
                del left[block]
        return found

    def _slots(self) -> dict[GatheredGroup, dict[Slot, int]]:
        """Return where gradients of whole parameters come together, and their sizes."""
        groups = {
            storage_identity(parameter): group
            for group in self.order
            for parameter in group.parameters
        }
        found: dict[GatheredGroup, dict[Slot, int]] = {}
        for (node, _), slot in self.backward.slots.items():
            leaf = leaf_of(node)
            if leaf is not None and storage_identity(leaf) in groups:
                group = groups[storage_identity(leaf)]
                found.setdefault(group, {})[slot] = leaf.numel()
        return found
