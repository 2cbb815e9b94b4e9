"""Put kernels that a compiler makes in the place of groups of operators."""

import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from remat.capture.fused_kernel import FusedKernel
from remat.capture.fusion_groups import (
    computed_by,
    fusion_groups,
    is_operator,
    name_of,
    results_of,
)
from remat.capture.joint_program import (
    example_value,
    moot_positions,
    needed_arguments,
)
from remat.capture.kernel_recomputation import original_of
from remat.capture.node_order import put_in_order
from remat.capture.norm_parts import (
    INSTEAD,
    REVISION,
    norm_of,
    running_statistics,
)
from remat.torch_compat.metadata import origin_of

_KNOWN: weakref.WeakValueDictionary[str, FusedKernel] = weakref.WeakValueDictionary()
"""Kernels by name: one that is in use is not compiled again."""


@dataclass(frozen=True, eq=False)
class FusionCandidate:
    """A group of operators, and the kernel that could replace it.

    Parameters
    ----------
    members
        The operators, in the graph's order.
    inputs
        The nodes whose values the kernel takes.
    results
        The nodes that stand for what the kernel returns.
    kernel
        What computes the results from the inputs.
    """

    members: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    kernel: FusedKernel


def fusion_candidates(joint: fx.GraphModule) -> list[FusionCandidate]:
    """Return what could be fused in a functional joint graph, which stays as it is.

    Operators that look alike, on tensors that look alike, share one kernel.
    """
    found: list[FusionCandidate] = []
    for members in fusion_groups(joint.graph):
        candidate = _Candidate(joint, members).made()
        if candidate is not None:
            found.append(candidate)
    return found


def recomputed_outside(
    joint: fx.GraphModule, candidates: Iterable[FusionCandidate]
) -> list[fx.Node]:
    """Return what backward computes again although none of the kernels does."""
    inside = {node for candidate in candidates for node in candidate.members}
    again = [node for node in joint.graph.nodes if original_of(node) is not None]
    return [node for node in again if node not in inside]


def bundled(candidates: Sequence[FusionCandidate]) -> list[list[FusionCandidate]]:
    """Put candidates together that hold parts of the same batch norms.

    Of a bundle all replace their operators, or none does.
    """
    bundle_of = {candidate: [candidate] for candidate in candidates}
    first_with: dict[int, FusionCandidate] = {}
    for candidate in candidates:
        numbers = [norm_of(node) for node in candidate.members]
        for number in (n for n in numbers if n is not None):
            other = bundle_of[first_with.setdefault(number, candidate)]
            mine = bundle_of[candidate]
            if other is not mine:
                other += mine
                bundle_of.update(dict.fromkeys(mine, other))
    return list({id(bundle): bundle for bundle in bundle_of.values()}.values())


def norms_outside(
    joint: fx.GraphModule, candidates: Iterable[FusionCandidate]
) -> set[int]:
    """Return the numbers of split batch norms of which a part is in no kernel."""
    inside = {node for candidate in candidates for node in candidate.members}
    return {
        number
        for node in joint.graph.nodes
        if (number := norm_of(node)) is not None
        and is_operator(node)
        and node not in inside
    }


class _Candidate:
    """Writes the graph of one group."""

    def __init__(self, joint: fx.GraphModule, members: Sequence[fx.Node]) -> None:
        self.joint = joint
        self.members = tuple(members)
        self.own = set(members)
        self.graph = fx.Graph()
        self.inputs: list[fx.Node] = []
        self.copies: dict[fx.Node, fx.Node] = {}

    def made(self) -> FusionCandidate | None:
        results = tuple(
            result
            for node in self.members
            for result in results_of(node)
            if self.is_needed_outside(result)
        )
        if not results:
            return None
        self.take_inputs()
        for node in self.members:
            self.copy(node)
        self.graph.output(tuple(self.copy(result) for result in results))
        module = fx.GraphModule(self.joint, self.graph)
        kernel = FusedKernel(
            module,
            operators=[name_of(node) for node in self.members],
            revision=REVISION,
            inputs=[example_value(self.joint, node) for node in self.inputs],
            moot_inputs=self.moot_inputs(),
        )
        kernel = _KNOWN.setdefault(repr(kernel), kernel)
        return FusionCandidate(self.members, tuple(self.inputs), results, kernel)

    def is_needed_outside(self, value: fx.Node) -> bool:
        """Return whether what is no member reads ``value``, or a view of it."""
        return any(
            (self.is_needed_outside(user) if _is_name(user) else user not in self.own)
            for user in value.users
        )

    def take_inputs(self) -> None:
        """Name the values from outside, views of them as they are."""
        needed = [s for n in self.members for s in _sources(needed_arguments(n), n)]
        while needed:
            node = needed.pop(0)
            if node in self.copies:
                continue
            if computed_by(node) not in self.own:
                name = f"x{len(self.inputs)}"
                self.copies[node] = self.graph.placeholder(name)
                self.copies[node].meta["val"] = example_value(self.joint, node)
                self.inputs.append(node)
            elif node not in self.own:
                needed.extend(node.all_input_nodes)

    def copy(self, node: fx.Node) -> fx.Node:
        """Return the node of the group's graph that is ``node``, views included."""
        if node not in self.copies:
            args = fx.map_arg(needed_arguments(node), self.copy)
            kwargs = fx.map_arg(dict(node.kwargs), self.copy)
            # A name of its own, so that equal groups have equal code.
            target = INSTEAD.get(node.target, node.target)
            new = self.graph.create_node(
                node.op, target, args, kwargs, name=f"v{len(self.copies)}"
            )
            new.meta["val"] = node.meta["val"]
            self.copies[node] = new
        return self.copies[node]

    def moot_inputs(self) -> tuple[int, ...]:
        """Return the positions of running statistics among the inputs."""
        moot: list[Any] = []
        for node in self.members:
            if node.target is running_statistics:
                moot += node.args[2:4]
            else:
                moot += [node.args[position] for position in moot_positions(node)]
        return tuple(i for i, node in enumerate(self.inputs) if node in moot)


def _is_name(node: fx.Node) -> bool:
    """Return whether a node only names or views what another one computes."""
    return node.op == "call_function" and not is_operator(node)


def _sources(arguments: Any, node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((arguments, dict(node.kwargs)), found.append)
    return found


def fuse(joint: fx.GraphModule, chosen: Sequence[FusionCandidate]) -> None:
    """Let kernels compute what the operators of their groups computed, in place.

    Parameters
    ----------
    joint
        The graph that the candidates are of.
    chosen
        Candidates of :func:`fusion_candidates`, in any number.
    """
    rank = {node: float(i) for i, node in enumerate(joint.graph.nodes)}
    # What one kernel computes may be what the next one reads.
    new: dict[fx.Node, fx.Node] = {}
    for candidate in chosen:
        _replace(joint.graph, candidate, rank, new)
    put_in_order(joint.graph, rank)
    gone = {node for candidate in chosen for node in candidate.members}
    for node in reversed(list(joint.graph.nodes)):
        if not node.users and (node in gone or _is_name(node)):
            joint.graph.erase_node(node)
    joint.recompile()


def _replace(
    graph: fx.Graph,
    candidate: FusionCandidate,
    rank: dict[fx.Node, float],
    new: dict[fx.Node, fx.Node],
) -> None:
    own = set(candidate.members)
    last = candidate.members[-1]
    with graph.inserting_after(last):
        inputs = tuple(new.get(node, node) for node in candidate.inputs)
        call = graph.call_function(candidate.kernel, inputs)
    values = tuple(result.meta["val"] for result in candidate.results)
    call.meta = {**origin_of(last), "val": values}
    rank[call] = rank[last]
    before = call
    for position, result in enumerate(candidate.results):
        with graph.inserting_after(before):
            before = graph.call_function(operator.getitem, (call, position))
        before.meta = dict(result.meta)
        rank[before] = rank[last]
        new[result] = before
        result.replace_all_uses_with(before, delete_user_cb=lambda u: u not in own)
