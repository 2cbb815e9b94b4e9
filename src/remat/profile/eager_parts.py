"""What runs between the graphs of a step: operators in no graph, and their backward.

Their forward passes are measured in a forward pass of the model, between the regions;
their backward passes one node of autograd at a time, on zeros.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from remat.capture.gathering import Gathering
from remat.core.errors import CaptureError
from remat.planning.regions import EagerBackward, EagerForward, Slot
from remat.profile.allocations import Recording
from remat.profile.memory import GrowthRecorder, MemoryGrowth
from remat.torch_compat.attributes import (
    gradient_shapes,
    is_of_known_shapes,
    leaf_of,
    made_bytes,
    made_number,
    saved_tensors,
    storage_bytes,
    storage_identity,
    viewed,
    without_hooks_of_gradients,
)

Around = Callable[[Iterable[torch.Tensor]], AbstractContextManager[object]]
"""A context for running something that needs these tensors."""


@dataclass(kw_only=True)
class BackwardOrder:
    """How autograd goes through a step.

    Parameters
    ----------
    order
        Regions by their numbers, and nodes of operators in no graph.
    nodes
        Autograd's node of each.
    slots
        A number for each output of each node, and for each leaf.
    returned
        The slots that get a gradient from the caller.
    leaves
        The slots of leaves, and whether a leaf has a gradient already. What the caller
        computed for the model is one: that backward pass is the caller's.
    saved
        The blocks that operators in no graph keep for it.
    is_before
        Whether a node is of what the caller computed for the model.
    steps
        What the optimizers take that step leaves in backward, by their slots.
    has_gradient
        Whether the step adds to a gradient of a leaf.
    step_bytes
        What the optimizer of a leaf takes, ``None`` if it does not step in backward.
    """

    order: list["int | EagerBackward"] = field(default_factory=list[Any])
    nodes: list[Any] = field(default_factory=list[Any])
    slots: dict[tuple[Any, int], Slot] = field(default_factory=dict[Any, int])
    returned: frozenset[Slot] = frozenset()
    leaves: dict[Slot, bool] = field(default_factory=dict[int, bool])
    saved: set[int] = field(default_factory=set[int])
    steps: dict[Slot, int] = field(default_factory=dict[int, int])
    is_before: Callable[[Any], bool]
    has_gradient: Callable[[torch.Tensor], bool]
    step_bytes: Callable[[torch.Tensor], int | None]

    def ends_at(self, node: Any) -> bool:
        """Whether a node only takes gradients: a leaf's, or of the caller's making."""
        return leaf_of(node) is not None or self.is_before(node)

    def following(self, node: Any) -> list[tuple[Any, int]]:
        """Return the nodes that a node hands gradients to, with the number of each."""
        return [] if self.ends_at(node) else _following(node)

    def slot(self, node: Any, number: int) -> Slot:
        """Return where gradients of a node's output, or of a leaf, come together."""
        key = (node, number)
        if key not in self.slots:
            self.slots[key] = len(self.slots)
            if self.ends_at(node):
                leaf = leaf_of(node)
                has_gradient = leaf is not None and self.has_gradient(leaf)
                self.leaves[self.slots[key]] = has_gradient
                step_bytes = None if leaf is None else self.step_bytes(leaf)
                if step_bytes is not None:
                    self.steps[self.slots[key]] = step_bytes
        return self.slots[key]


def backward_order(
    gathering: Gathering,
    outputs: Sequence[torch.Tensor],
    has_gradient: Callable[[torch.Tensor], bool],
    step_bytes: Callable[[torch.Tensor], int | None],
    around: Around = nullcontext,
) -> BackwardOrder:
    """Return how autograd goes from outputs of the model, and measure eager nodes.

    These get a gradient from the caller; ``has_gradient`` says to which leaves' own the
    step adds, and ``step_bytes`` what the optimizer of one takes that steps in
    backward, ``None`` where none does. Each node runs in the context that ``around``
    returns for the tensors that it keeps.

    Raises
    ------
    CaptureError
        If a node cannot be run by itself.
    """
    found = BackwardOrder(
        is_before=gathering.is_before,
        has_gradient=has_gradient,
        step_bytes=step_bytes,
    )
    return _Backward(gathering, outputs, around, found).run()


def left_behind(
    gathering: Gathering, outputs: Sequence[torch.Tensor], backward: BackwardOrder
) -> tuple[frozenset[int], frozenset[int]]:
    """Return what outputs keep for a backward pass that does not come to it.

    Returns
    -------
    regions, blocks
        The regions that keep something, by their numbers, and the blocks that operators
        in no graph keep.
    """
    regions = {seen.node: index for index, seen in enumerate(gathering.seen)}
    numbers = [seen.next_number for seen in gathering.seen]
    known = set(backward.nodes)
    found: set[int] = set()
    blocks: set[int] = set()
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    while nodes:
        node: Any = nodes.pop()
        if node in known:
            continue
        known.add(node)
        if gathering.is_before(node):
            continue
        nodes += [following for following, _ in _following(node)]
        if node in regions:
            found.add(regions[node])
        elif leaf_of(node) is None:
            before = bisect_right(numbers, made_number(node))
            kept = saved_tensors(node)
            blocks.update(gathering.note_eager(tensor, before) for tensor in kept)
    return frozenset(found), frozenset(
        block for block in blocks if not gathering.is_resident(block)
    )


def eager_forwards(
    gathering: Gathering, recording: Recording
) -> dict[int, EagerForward]:
    """Return what operators in no graph do before each region, and after the last.

    Parameters
    ----------
    gathering
        The forward pass, with all blocks that eager operators made and keep.
    recording
        Of another forward pass, with marks at the borders of regions.
    """
    made: dict[int, dict[int, int]] = {}
    growths = list(_growths(gathering, recording))
    seen = [stayed for _, stayed in growths]
    for block, before in _made_where(gathering, seen).items():
        made.setdefault(before, {})[block] = gathering.sizes_bytes[block]
    found: dict[int, EagerForward] = {}
    for before, (peak_bytes, stayed) in enumerate(growths):
        blocks = made.pop(before, {})
        for size_bytes, last in stayed:
            block = gathering.new_block(size_bytes)
            blocks[block] = size_bytes
            gathering.held[block] = last
        workspace_bytes = max(0, peak_bytes - sum(blocks.values()))
        if blocks or workspace_bytes:
            found[before] = EagerForward(made=blocks, workspace_bytes=workspace_bytes)
    return found


def _made_where(
    gathering: Gathering, stayed: Sequence[list[tuple[int, int]]]
) -> dict[int, int]:
    """Return before which region each known block of eager operators was made.

    Parameters
    ----------
    gathering
        Knows before which region a block was there, and how long it was held.
    stayed
        Per region, what a recording shows to be made before it, of which the sizes are
        known and not the blocks. What is the same is taken out.
    """
    found: dict[int, int] = {}

    def take(block: int, before: int, *, is_held_as_long: bool) -> None:
        size_bytes, last = gathering.sizes_bytes[block], gathering.held.get(block)
        same = [
            each
            for each in stayed[before]
            if each[0] == size_bytes and (each[1] == last or not is_held_as_long)
        ]
        if same and block not in found:
            stayed[before].remove(max(same))
            found[block] = before

    for is_held_as_long in (True, False):
        for block, before in gathering.eager.items():
            take(block, before, is_held_as_long=is_held_as_long)
    # What a region is given may have been made before an earlier one.
    for is_held_as_long in (True, False):
        for block, before in gathering.eager.items():
            for earlier in reversed(range(before)):
                take(block, earlier, is_held_as_long=is_held_as_long)
    return gathering.eager | found


def _growths(
    gathering: Gathering, recording: Recording
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield what is allocated before each region, and after the last.

    That is the most bytes that are added, and the sizes of the blocks that stay, each
    with the last region that ends before it is released.
    """
    count = len(gathering.seen)
    if len(recording.marks) != 2 * count:
        msg = (
            f"the model ran {count} graphs in one forward pass and "
            f"{len(recording.marks) // 2} in the next with the same inputs: what its "
            "Python code does changes between calls, so no plan holds for it"
        )
        raise CaptureError(msg)
    # Even sections are between regions, odd ones are regions.
    times = [mark[0] for mark in recording.marks]
    used, peaks = [0] * (2 * count + 1), [0] * (2 * count + 1)
    live: dict[int, tuple[int, int]] = {}
    stayed: list[list[tuple[int, int]]] = [[] for _ in peaks]
    for allocation in recording.inside:
        section = bisect_left(times, allocation.time_ns)
        size_bytes, born = live.pop(allocation.address, (0, section))
        if born < section:
            # What was there before goes when it is not held any more, or stays, as
            # what a backward pass needs: not seen here, where there is none.
            stayed[born].append((size_bytes, (section - 1) // 2))
        else:
            used[section] += allocation.change_bytes
            peaks[section] = max(peaks[section], used[section])
        if allocation.change_bytes > 0:
            live[allocation.address] = (allocation.change_bytes, section)
    for size_bytes, born in live.values():
        stayed[born].append((size_bytes, count))
    yield from zip(peaks[::2], stayed[::2], strict=True)


class _Backward:
    def __init__(
        self,
        gathering: Gathering,
        outputs: Sequence[torch.Tensor],
        around: Around,
        found: BackwardOrder,
    ) -> None:
        self.gathering = gathering
        self.around = around
        self.found = found
        self.regions = {
            seen.node: index
            for index, seen in enumerate(gathering.seen)
            if seen.node is not None
        }
        # To tell before which region a node was made.
        self.numbers = [seen.next_number for seen in gathering.seen]
        self.roots = _roots(outputs)
        self.defined: set[Slot] = set()
        # How gradients lie in memory that one node hands on, without their values.
        self.layouts: dict[Slot, torch.Tensor | None] = {}
        self.growths = GrowthRecorder()

    def run(self) -> BackwardOrder:
        with self.growths:
            self.visit()
        growths = iter(self.growths.growths)
        self.found.order = [
            part if isinstance(part, int) else _with_workspace(part, next(growths))
            for part in self.found.order
        ]
        return self.found

    def visit(self) -> None:
        found = self.found
        roots = [found.slot(*root) for root in self.roots]
        found.returned = frozenset(roots)
        self.defined.update(roots)
        waiting = self.dependence()
        self.dependent = _dependent_nodes(waiting, found.following)
        # The caller's values may have been computed from one another.
        self.dependent |= {
            node
            for node in waiting
            if len({f for f, _ in found.following(node) if found.is_before(f)}) > 1
        }
        # As autograd: of all nodes that are ready, that which was made last.
        ready = [
            (-made_number(node), position, node)
            for position, node in enumerate(dict.fromkeys(n for n, _ in self.roots))
            if not waiting[node]
        ]
        heapq.heapify(ready)
        position = len(ready)
        while ready:
            _, _, node = heapq.heappop(ready)
            self.take(node)
            for following, _ in found.following(node):
                if found.ends_at(following):
                    continue
                waiting[following] -= 1
                if not waiting[following]:
                    position += 1
                    entry = (-made_number(following), position, following)
                    heapq.heappush(ready, entry)

    def dependence(self) -> Counter[Any]:
        """Return how many gradients each node of the backward pass waits for."""
        waiting: Counter[Any] = Counter()
        known: set[Any] = set()
        nodes = [node for node, _ in self.roots]
        while nodes:
            node = nodes.pop()
            if node in known:
                continue
            known.add(node)
            waiting[node] += 0
            for following, _ in self.found.following(node):
                waiting[following] += 1
                nodes.append(following)
        return waiting

    def take(self, node: Any) -> None:
        if node in self.regions:
            self.found.order.append(self.regions[node])
            self.found.nodes.append(node)
            for following, number in _following(node):
                self.defined.add(self.found.slot(following, number))
        elif not self.found.ends_at(node):
            self.take_eager(node)

    def take_eager(self, node: Any) -> None:
        name = type(node).__name__
        if not is_of_known_shapes(node):
            msg = (
                f"{name} is computed between the graphs into which the model is split, "
                "on nested tensors, of which no gradient can be made to measure it; pad "
                "them (torch.nested.to_padded_tensor), or loop over their tensors"
            )
            raise CaptureError(msg)
        slots = [self.found.slot(node, n) for n in range(len(gradient_shapes(node)))]
        given = [
            self.zeros(slot, shape, dtype, device) if slot in self.defined else None
            for slot, (shape, dtype, device) in zip(
                slots, gradient_shapes(node), strict=True
            )
        ]
        if all(value is None for value in given):
            return
        saved, results = self.saved(node), list[Any]()
        inputs = [GradientEdge(*edge) for edge in _following(node)]
        outputs = [
            (GradientEdge(node, number), value)
            for number, value in enumerate(given)
            if value is not None
        ]

        def run_alone() -> object:
            # As autograd does, unless it is to derive what a backward pass computes.
            with torch.no_grad():
                made = getattr(node, "apply", node)(*given)
            found = made if isinstance(made, tuple) else (made,)
            results.extend(
                value
                for value, edge in zip(found, node.next_functions, strict=False)
                if edge[0] is not None
            )
            return results

        def run_last() -> object:
            edges, values = zip(*outputs, strict=True)
            leaves = (leaf_of(following) for following, _ in _following(node))
            with without_hooks_of_gradients(leaves):
                made = torch.autograd.grad(edges, inputs, values, allow_unused=True)
            results.extend(made)
            return results

        try:
            with self.around(saved_tensors(node)):
                # The first call of some kernels makes more than others do.
                run_alone()
                results.clear()
                # Some keep more where they may be asked again. The engine would go on
                # from one input to another that it depends on.
                self.growths.measure(run_alone if node in self.dependent else run_last)
        # Whatever an operator's backward, or the user's own, raises.
        except Exception as error:
            msg = (
                f"{name} is computed between the graphs into which the model is split, "
                f"and its backward pass cannot be run alone: {type(error).__name__}: "
                f"{error}; move that operator into a graph"
            )
            raise CaptureError(msg) from error
        gradients, views = self.gradients(node, given, results)
        self.found.nodes.append(node)
        self.found.order.append(
            EagerBackward(
                name=name,
                slots=[
                    (slot, storage_bytes(value))
                    for slot, value in zip(slots, given, strict=True)
                    if value is not None
                ],
                saved=saved,
                gradients=gradients,
                views=views,
            )
        )

    def zeros(
        self, slot: Slot, shape: Any, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a gradient to try a node with; kernels copy what lies otherwise."""
        like = self.layouts.get(slot)
        if like is None or like.shape != torch.Size(shape) or like.dtype != dtype:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.zeros_like(like, device=device)

    def note_layout(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Remember how a gradient lies in memory, if no other one is added to it."""
        is_first = slot not in self.layouts
        is_plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
        self.layouts[slot] = (
            torch.empty_like(gradient, device="meta") if is_first and is_plain else None
        )

    def gradients(
        self, node: Any, given: Sequence[Any], made: Sequence[Any]
    ) -> tuple[list[tuple[Slot, int]], frozenset[Slot]]:
        """Return the slots that a node hands gradients to, with their sizes.

        And which of them get a view.
        """
        known = {
            storage_identity(value): position
            for position, value in enumerate(v for v in given if v is not None)
        }
        found: list[tuple[Slot, int]] = []
        views: set[Slot] = set()
        for (following, number), value in zip(_following(node), made, strict=True):
            if value is None:
                continue
            slot = self.found.slot(following, number)
            self.defined.add(slot)
            shape, *_ = gradient_shapes(following)[number]
            if is_of_known_shapes(following) and value.shape != torch.Size(shape):
                # Of what was broadcast, as a bias is, the engine makes a sum.
                found.append((slot, made_bytes(following)[number]))
                continue
            self.note_layout(slot, value)
            position = known.get(storage_identity(value))
            size_bytes = storage_bytes(value)
            found.append((slot, size_bytes if position is None else -1 - position))
            if viewed(value) is not None:
                views.add(slot)
        return found, frozenset(views)

    def saved(self, node: Any) -> list[int]:
        """Return the blocks, but resident ones, that a node keeps."""
        before = bisect_right(self.numbers, made_number(node))
        blocks = [
            self.gathering.note_eager(tensor, before) for tensor in saved_tensors(node)
        ]
        found = [b for b in dict.fromkeys(blocks) if not self.gathering.is_resident(b)]
        self.found.saved.update(found)
        return found


def _with_workspace(part: EagerBackward, growth: MemoryGrowth) -> EagerBackward:
    new_bytes = sum(max(0, size) for _, size in part.gradients)
    return replace(part, workspace_bytes=max(0, growth.peak_bytes - new_bytes))


def _following(node: Any) -> list[tuple[Any, int]]:
    return [edge for edge in node.next_functions if edge[0] is not None]


_Following = Callable[[Any], list[tuple[Any, int]]]


def _dependent_nodes(
    waiting: Mapping[Any, int], following_of: _Following = _following
) -> set[Any]:
    """Return the nodes of which one input was computed from another one.

    Parameters
    ----------
    waiting
        Of all nodes, how many inputs of others they are.
    following_of
        What the inputs of a node were computed by.
    """
    numbers = {node: number for number, node in enumerate(waiting)}
    # For each node the set of those that it was computed from, one bit each, until the
    # last one that was computed from it has it.
    origins: dict[Any, int] = {}
    unread = dict(waiting)
    found: set[Any] = set()
    for node in reversed(_from_the_last(waiting, following_of)):
        inputs = sources = 0
        for following, _ in following_of(node):
            inputs |= 1 << numbers[following]
            sources |= origins[following]
            unread[following] -= 1
            if not unread[following]:
                del origins[following]
        if inputs & sources:
            found.add(node)
        origins[node] = inputs | sources
    return found


def _from_the_last(waiting: Mapping[Any, int], following_of: _Following) -> list[Any]:
    """Return all nodes, each one behind those that were computed from it."""
    left = dict(waiting)
    order = [node for node, count in left.items() if not count]
    for node in order:
        for following, _ in following_of(node):
            left[following] -= 1
            if not left[following]:
                order.append(following)
    return order


def _roots(outputs: Sequence[torch.Tensor]) -> list[tuple[Any, int]]:
    """Return the nodes and outputs where the caller's backward pass begins."""
    # Views that are returned are made again behind what they view.
    bases = [viewed(tensor) for tensor in outputs]
    # What a region computes without gradients, such as a sum, may be a view inside.
    found = [
        t if b is None or b.grad_fn is None else b
        for t, b in zip(outputs, bases, strict=True)
    ]
    return list(
        dict.fromkeys((t.grad_fn, t.output_nr) for t in found if t.grad_fn is not None)
    )
