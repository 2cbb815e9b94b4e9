"""Gradients that do not exist stay ``None``, as in eager PyTorch.

Where the loss does not depend on an output, autograd has no gradient for it, hands
zeros to compiled code instead, and compiled code computes zeros from them: parameters
that nothing reached would get a gradient of zeros, and optimizers that decay or keep
moments would move them. Here a hook on the compiled step notes which gradients exist,
and what depends only on others is ``None`` again. Zeros that are only added to others
are one zero, expanded, which takes no memory.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from remat.core.units import format_bytes
from remat.torch_compat.attributes import block_lives, is_compiled_step, is_watched
from remat.torch_compat.metadata import (
    are_parts,
    is_tangent,
    may_be_one_zero,
    output_position,
)
from remat.torch_compat.names import keeps_graph_now

Tell = Callable[[str, str], None]
"""Warns of a cause, once, in words that follow on the name of the step."""


def held_words(held_bytes: int) -> str:
    """Say that outputs are there while backward runs which the plan says are not."""
    return (
        "has a plan for a loop that lets go of what the model returns, besides its loss, "
        f"before the backward pass begins, but {format_bytes(held_bytes)} of it are still "
        "there: steps may need as much more than the budget. Give holds_outputs=True, or "
        "del the outputs before backward()"
    )


class DefinedTangents:
    """Which incoming gradients exist, handed from autograd to the backward code.

    One belongs to one traced step: :meth:`read` looks at its joint graph,
    :meth:`watch` at the outputs of a forward pass, and :meth:`undefined` says what the
    backward code is not to return.

    Parameters
    ----------
    tell
        Warns, once for each cause.
    """

    def __init__(self, tell: Tell) -> None:
        # Per gradient that the step returns: a bit for each tangent it depends on.
        self.dependence: list[int] = []
        # Per tangent: the position of the output whose gradient it is, if known.
        self.output_of: list[int | None] = []
        # Whether some of those that do not exist take no memory.
        self.has_expanded_zeros = False
        # A bit for each tangent that no plan reckons with.
        self.unexpected = 0
        # Positions of outputs of which the step makes others.
        self.inner: Sequence[int] = ()
        # Positions of outputs that nobody is to hold any more when backward begins.
        self.let_go: Sequence[int] = ()
        self.tell = tell
        self._noted = threading.local()

    def read(self, joint: fx.GraphModule, forward_output_count: int) -> None:
        """Find which gradients depend on which tangents."""
        masks: dict[fx.Node, int] = {}
        self.output_of = []
        for node in joint.graph.nodes:
            if node.op == "placeholder" and is_tangent(node):
                masks[node] = 1 << len(self.output_of)
                self.output_of.append(output_position(node))
                continue
            mask = 0
            for source in node.all_input_nodes:
                mask |= masks[source]
            masks[node] = mask
        (output,) = joint.graph.find_nodes(op="output")
        # A gradient that is put together from parts cannot be left out here.
        self.dependence = [
            masks[value] if isinstance(value, fx.Node) and not is_part else 0
            for value, is_part in zip(
                output.args[0][forward_output_count:],
                are_parts(output)[forward_output_count:],
                strict=True,
            )
        ]

    def expect_only(self, output: int | None) -> None:
        """Warn, once, when another output than this one has a gradient.

        Parameters
        ----------
        output
            The position of the loss among the outputs, ``None`` to expect any.
        """
        self.unexpected = 0
        if output is not None and output in self.output_of:
            self.unexpected = sum(
                1 << tangent
                for tangent, position in enumerate(self.output_of)
                # One of an input that the step changes is of no output.
                if position not in {output, None}
            )

    def expect_let_go(self, positions: Sequence[int]) -> None:
        """Warn, once, when one of these outputs is there while backward begins."""
        self.let_go = positions

    def expect_unwatched(self, positions: Sequence[int]) -> None:
        """Warn, once, when there is a hook of the gradient of one of these outputs."""
        self.inner = positions

    def watch(self, outputs: Sequence[Any]) -> None:
        """Note, when the backward pass of these outputs begins, which gradients exist.

        Parameters
        ----------
        outputs
            What one forward pass of the step returned.
        """
        # The one there is may not exist: DistributedDataParallel goes backward from all
        # that the model returns.
        if not self.output_of:
            return
        step: Any = None
        places: list[tuple[int, int]] = []
        for tangent, position in enumerate(self.output_of):
            found = None if position is None else place_of(outputs[position])
            if found is not None:
                step, place = found
                places.append((tangent, place))
        if step is None:
            return
        noted = self._noted
        if self.has_expanded_zeros:
            # :class:`MissingTangents` makes them.
            step.set_materialize_grads(False)
        positions = self.output_of if self.has_expanded_zeros else ()
        shapes = [None if p is None else outputs[p].shape for p in positions]

        let_go = HeldOutputs(outputs[position] for position in self.let_go)
        inner = {p: weakref.ref(outputs[p]) for p in self.inner}

        def note(gradients: Sequence[torch.Tensor | None]) -> None:
            noted.shapes = shapes
            noted.undefined = sum(1 << t for t, p in places if gradients[p] is None)
            unexpected = self.unexpected & ~noted.undefined
            if unexpected:
                self.unexpected = 0
                self.tell("differentiated", self.words_of(unexpected))
            noted.is_twice = torch.is_grad_enabled()
            watched = [p for p, found in inner.items() if _is_watched(found())]
            if watched:
                self.tell("watched", _WATCHED.format(watched))
            if self.let_go:
                held_bytes = let_go.held_bytes()
                if held_bytes:
                    self.let_go = ()
                    self.tell("held", held_words(held_bytes))

        step.register_prehook(note)

    def _look_at_retained(self) -> None:
        """Tell, once a backward pass has begun, if it does not let go what it reads."""
        # Gradients that take gradients retain what they are of.
        if getattr(self._noted, "is_twice", False):
            self.tell("twice", _TWICE)
        elif keeps_graph_now():
            self.tell("retained", _RETAINED)

    def words_of(self, unexpected: int) -> str:
        """Say that outputs besides the loss have a gradient."""
        others = [
            position
            for tangent, position in enumerate(self.output_of)
            if unexpected >> tangent & 1
        ]
        return (
            "returns a loss, and its plan is for a step that "
            f"differentiates this alone, but here tensors {others} of those that it "
            "returns are differentiated too: the gradients are right, but what was "
            "computed from these tensors outside the model is in no plan, and the "
            "budget may be exceeded by it. Give it as remat.fit(..., loss=...), a "
            "function from the model's outputs to the scalar whose backward() is called"
        )

    def undefined(self) -> tuple[Sequence[torch.Size | None], frozenset[int]]:
        """Return shapes of tangents, and which gradients are undefined, once a pass.

        Those are that depend on undefined tangents only. A tangent that has no output
        has no shape here.
        """
        self._look_at_retained()
        undefined = getattr(self._noted, "undefined", 0)
        shapes = getattr(self._noted, "shapes", ())
        self._noted.undefined, self._noted.shapes = 0, ()
        if not undefined:
            return shapes, frozenset()
        return shapes, frozenset(
            position
            for position, mask in enumerate(self.dependence)
            if mask and not mask & ~undefined
        )


_TWICE = (
    "is differentiated with create_graph=True: its gradients are right, but cannot be "
    "differentiated again, and no plan counts what is retained for that. If they are "
    "part of a loss, such as a gradient penalty, put what computes it, with all that it "
    "differentiates, into a function under @torch.compiler.disable that the model calls, "
    "and give regions='breaks'; or call remat.release(model)"
)

_RETAINED = (
    "is differentiated with retain_graph=True: what its forward pass saved stays beside "
    "all that backward makes, and no plan counts that, so this step may need up to as much "
    "more than the budget. Call backward() once, of the sum of what is differentiated; "
    "or leave retain_graph out of the last call, and that room in the budget"
)

_WATCHED = (
    "returns tensors {}, of which it makes others that it returns, and hooks or "
    "retain_grad() of them see a part of their gradients alone: what comes through the "
    "rest of the model goes past them in a compiled step. Make the modules that compute "
    "them graphs of their own: remat.fit(..., regions=[their names])"
)


def _is_watched(output: torch.Tensor | None) -> bool:
    return output is not None and is_watched(output)


class MissingTangents:
    """Zeros for the tangents that autograd does not make, in one backward pass's code.

    Parameters
    ----------
    backward
        The code.
    """

    def __init__(self, backward: fx.GraphModule) -> None:
        nodes = backward.graph.find_nodes(op="placeholder")
        # Per tangent its place among the inputs, what it looks like, and whether one
        # zero is enough.
        self._tangents = [
            (place, node.meta["val"], may_be_one_zero(node))
            for place, node in enumerate(nodes)
            if is_tangent(node)
        ]
        self._is_needed = any(is_expanded for _, _, is_expanded in self._tangents)

    def fill(self, values: list[Any], shapes: Sequence[torch.Size | None]) -> None:
        """Put zeros, in place, where a tangent is missing."""
        if not self._is_needed:
            return
        for number, (place, like, is_expanded) in enumerate(self._tangents):
            if values[place] is not None:
                continue
            shape = shapes[number] if number < len(shapes) else None
            how = {"dtype": like.dtype, "device": like.device}
            if is_expanded:
                zero = torch.zeros((), **how)
                values[place] = zero.expand(like.shape if shape is None else shape)
            else:
                block = torch.empty_strided(like.shape, like.stride(), **how)
                values[place] = block.zero_()


class HeldOutputs:
    """Looks later which outputs are still there, and holds none of them.

    Parameters
    ----------
    outputs
        Tensors that somebody else may let go.
    """

    def __init__(self, outputs: Iterable[torch.Tensor]) -> None:
        self._outputs = [(output.nbytes, block_lives(output)) for output in outputs]

    def held_bytes(self) -> int:
        """Return the bytes of those that are still there."""
        return sum(size for size, lives in self._outputs if lives())


def without(gradients: Sequence[Any], undefined: frozenset[int]) -> Sequence[Any]:
    """Return gradients with ``None`` for those that do not exist."""
    if not undefined:
        return gradients
    return tuple(
        None if position in undefined else gradient
        for position, gradient in enumerate(gradients)
    )


def place_of(output: Any) -> tuple[Any, int] | None:
    """Return the compiled step that made an output, and which of its outputs it is."""
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    place = 0 if node is None else output.output_nr
    while node is not None:
        if is_compiled_step(node):
            return node, place
        following = node.next_functions
        # Views that autograd makes anew have one source.
        node, place = following[0] if len(following) == 1 else (None, 0)
    return None
