"""Gradients that leave a backward pass as they are ready, piece by piece.

Autograd takes the gradients of a compiled step when all of its backward pass has run.
``DistributedDataParallel`` exchanges a bucket of gradients as soon as they have been
added up, so inside of it nothing would be exchanged before the end. Here the inputs of
a step whose gradients are asked for go through gates: nodes of autograd that hand on
the same tensors, one gate for a piece of all gradients. In backward the step itself
hands on nothing; each gate runs the backward code up to where its piece is ready, and
hands that on. Autograd runs the gate that was made last first, and adds gradients up
before it runs the next. The code runs in the same order, so results are bitwise the
same, and no gradient lives longer than before, unless hooks wait for it.

Gradients that are added to existing ones leave so as well, in the pieces that the plan
counts on: none is there beside all of those. So do those that a hook of their parameter
takes, which steps it in backward.

While ``DistributedDataParallel`` notes in which order gradients come, to lay out its
buckets by it, each leaves alone and in its turn: in the order in which autograd would
come to it (:mod:`remat.capture.arrivals`). Where an element is in a bucket decides in
which order three or more processes add it up.
"""

import re
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, pairwise, zip_longest
from typing import Any

import torch
from torch import fx

from remat.capture.arrivals import arrivals_in
from remat.capture.autocast import autocast_again
from remat.capture.gathering import GATE
from remat.capture.joint_program import InputSpec, is_view
from remat.capture.surroundings import existing_gradient
from remat.capture.varying_sizes import varies
from remat.core.errors import ExecutionError
from remat.core.gradient_pieces import Piece, divided
from remat.runtime.copies import copy_bytes
from remat.runtime.lowering import HANDED_OVER, PARAMETERS, PIECES
from remat.runtime.undefined import Tell, place_of
from remat.torch_compat.attributes import (
    block_lives,
    has_hooks_before_its_gradient,
    has_hooks_of_its_gradient,
    storage_identity,
    version_of,
)
from remat.torch_compat.metadata import changed_inputs
from remat.torch_compat.names import BoxedCodeGen, current_backward_number

Code = Callable[[list[Any]], Generator[list[Any]]]

_HOOKED = (
    "has hooks of its parameters' gradients (as by register_post_accumulate_grad_hook, "
    "or parameter.register_hook), and they were not there when it was planned. "
    "Gradients then wait until nothing reads what they are of, and steps may need more "
    "than the budget: register such hooks before remat.fit"
)

_UNHOOKED = (
    "was planned for optimizers that step in backward, by a hook of each parameter, and "
    "such hooks are gone: gradients stay, and steps may need that much more than the "
    "budget. Register them before remat.fit, or fit with the optimizer that steps later"
)

_CHANGED = (
    "a parameter was changed in the middle of a backward pass that reads it again, as by "
    "a hook on the node that accumulates its gradient "
    "(torch.distributed.optim._apply_optimizer_in_backward makes such). Step it by a hook "
    "that register_post_accumulate_grad_hook registers, and before remat.fit; then "
    "gradients wait for the last use of what they are of"
)

_OUT_OF_TURN = (
    "hands on gradients in another order than eager PyTorch, and these are the first ones "
    "that DistributedDataParallel exchanges. So that its buckets are laid out as without "
    "remat, all of them wait for the end of this backward pass, which may need that much "
    "more than the budget. Let the first backward pass be one outside of no_sync()"
)

_UNKNOWN_TURNS = (
    "was traced so that the order is not known in which its gradients come in eager "
    "PyTorch, and DistributedDataParallel lays out its buckets by it. With three or more "
    "processes, or hooks that look at buckets, gradients may differ in the last digits. "
    "find_unused_parameters=True lets it lay them out by the parameters instead"
)

_TAKEN = (
    "has a plan for a backward() that adds to existing gradients, and others were taken, "
    "as by torch.autograd.grad or backward(inputs=...): these are in memory besides, and "
    "such steps may need that much more than the budget. Clear the gradients before, or "
    "leave that room"
)


@dataclass
class Passes:
    """One forward pass, and the backward pass of it that runs."""

    pieces: tuple[Piece, ...]
    # Whether hooks may change parameters as soon as their gradients are there.
    is_hooked: bool
    # By position, the leaves among the inputs: others need not live that long.
    leaves: Mapping[int, weakref.ref[torch.Tensor]]
    generator: Generator[list[Any]] | None = None
    # Autograd's number of that backward pass.
    number: int = -1
    undefined: frozenset[int] = frozenset()
    next_piece: int = 0
    # Per piece the positions whose inputs are read when it has left.
    read_later: Sequence[Piece] = ()
    # Those that have left so far, each with how often it was written before.
    left: list[tuple[torch.Tensor, int]] = field(
        default_factory=list[tuple[torch.Tensor, int]]
    )

    def begin(
        self,
        generator: Generator[list[Any]],
        undefined: frozenset[int],
        read_later: Sequence[Piece],
    ) -> None:
        """Let gates run backward code from now on."""
        self.generator = generator
        self.number = current_backward_number()
        self.undefined = undefined
        self.next_piece = 0
        self.read_later = read_later
        self.left.clear()

    def take(self, number: int) -> list[Any]:
        """Return the gradients of a piece, computed by now.

        Pieces are taken in order, but not all: others are let go where gradients of
        some inputs alone are asked for. There are none in a backward pass that comes
        from nothing that was computed.
        """
        if self.number != current_backward_number():
            self.generator = None
            return [None] * len(self.pieces[number])
        if self.generator is None or number < self.next_piece:
            msg = f"piece {number} of the gradients is asked for out of turn"
            raise ExecutionError(msg)
        if any(version_of(value) != version for value, version in self.left):
            raise ExecutionError(_CHANGED)
        found = next(self.generator)
        while self.next_piece < number:
            found = next(self.generator)
            self.next_piece += 1
        self.next_piece += 1
        for place, position in enumerate(self.pieces[number]):
            if position in self.undefined:
                found[place] = None
        for position in self.read_later[number]:
            leaf = self.leaves[position]() if position in self.leaves else None
            if leaf is not None:
                self.left.append((leaf, version_of(leaf)))
        if self.next_piece == len(self.pieces):
            self.left.clear()
            for _ in self.generator:
                pass
            self.generator = None
        return found


class _Gate(torch.autograd.Function):
    """Hands on inputs, which it is given twice, and in backward gradients of one piece.

    Where the model returns one of the inputs, or a view of it, a gradient may come from
    there as well. Autograd adds up both, with others of the input, and in the order in
    which it would without gates: that of the piece comes last.
    """

    @staticmethod
    def forward(ctx: Any, passes: Passes, number: int, *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.passes, ctx.number = passes, number
        setattr(ctx, GATE, True)
        return tuple(value.detach() for value in values[: len(values) // 2])

    @staticmethod
    def backward(ctx: Any, *returned: Any) -> Any:
        with torch.no_grad(), autocast_again(()):
            found = ctx.passes.take(ctx.number)
            # Autograd takes over a gradient that nobody else holds, and copies others.
            gradients = (None, None, *returned, *found)
            found.clear()
            return gradients


class EarlyGradients:
    """Gates around one traced step, and its backward code in pieces.

    Parameters
    ----------
    tell
        Warns, once for each cause.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._planned: tuple[Piece, ...] = ()
        # Whether the plan knows of hooks that take gradients, and of others.
        self._knows_hooks = False
        self._knows_others = False
        # The nodes after which they leave, by their names.
        self._planned_after: tuple[str, ...] = ()
        # Gradients that are in none of the planned pieces.
        self._rest: Piece = ()
        # Positions of inputs that the step writes to, which can be behind no gate:
        # autograd would know nothing of it.
        self._written: Set[int | None] = frozenset()
        # Positions of gradients, in the order in which autograd would come to them.
        self._turns: Sequence[int] = ()
        self._sizes_bytes: list[tuple[Piece, int]] = []
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._module: fx.GraphModule | None = None
        # Per position of a gradient, the names of the inputs in the memory it is of.
        self._parameters: dict[int, tuple[str, ...]] = {}
        self._codes: dict[tuple[tuple[Piece, ...], bool], tuple[Code, list[Piece]]] = {}
        self._begun = threading.local()
        # Of the gradient that the first planned piece is added to: its leaf, and its
        # block and how often that was written, when the last backward pass began, and
        # the number of that pass.
        self._first: Callable[[], torch.Tensor | None] = lambda: None
        self._begun_at: tuple[Callable[[], bool], int, int, int] | None = None

    def read(
        self,
        joint: fx.GraphModule,
        backward: fx.GraphModule,
        inputs: Iterable[InputSpec],
        *,
        is_hooked: bool,
    ) -> None:
        """Look when which gradients are ready in the backward pass of a traced step.

        ``is_hooked`` says whether hooks take gradients in the step that was planned.
        """
        (output,) = joint.graph.find_nodes(op="output")
        self._written = frozenset(changed_inputs(output)) - {None}
        self._pieces.clear()
        self._knows_hooks = is_hooked
        self._knows_others = any(spec.is_hooked for spec in inputs)
        self._turns = arrivals_in(joint)
        self._planned = backward.meta[PIECES]
        self._parameters = backward.meta[PARAMETERS]
        self._planned_after = backward.meta[HANDED_OVER]
        self._sizes_bytes = _sizes_bytes(backward)
        planned = {position for piece in self._planned for position in piece}
        positions = {p for piece, _ in self._sizes_bytes for p in piece}
        self._rest = tuple(sorted(positions - planned))

    def read_code(self, backward: fx.GraphModule) -> None:
        """Take the code of the backward pass, once there is one."""
        self._module = backward
        self._codes.clear()

    def pieces(self, piece_bytes: int | None) -> tuple[Piece, ...]:
        """Return all gradients in pieces, as they are ready, or none.

        In those that are planned, and the rest at the end; else in pieces of about so
        many bytes, where it is not ``None`` and they are several.
        """
        if self._planned:
            return (*self._planned, self._rest) if self._rest else self._planned
        if piece_bytes is None:
            return ()
        if piece_bytes not in self._pieces:
            found = divided(self._sizes_bytes, piece_bytes)
            self._pieces[piece_bytes] = found if len(found) > 1 else ()
        return self._pieces[piece_bytes]

    def one_by_one(
        self, values: Sequence[Any], positions: Iterable[int] | None = None
    ) -> tuple[Any, ...]:
        """Return inputs to which gradients come one by one, in autograd's order.

        Those at these positions, or all that gradients are asked for.
        """
        chosen = None if positions is None else set(positions)
        found = list(values)
        if not self._turns and any(_is_asked(found, p) for p in range(len(found))):
            self._tell("turns", _UNKNOWN_TURNS)
        # What is made last runs first.
        for position in reversed(self._turns):
            is_chosen = chosen is None or position in chosen
            if (
                is_chosen
                and position not in self._written
                and _is_asked(found, position)
            ):
                found[position] = torch.ops.aten.alias.default(found[position])
        return tuple(found)

    def _leave_in_turn(self, pieces: Iterable[Piece]) -> bool:
        """Whether all gradients of a piece come before those of the next."""
        turns = {position: turn for turn, position in enumerate(self._turns)}
        if not turns.keys() >= {position for piece in pieces for position in piece}:
            return False
        spans = [sorted(turns[position] for position in piece) for piece in pieces]
        return all(one[-1] < next_one[0] for one, next_one in pairwise(spans))

    def gated(
        self, values: tuple[Any, ...], piece_bytes: int | None, *, in_turn: bool = False
    ) -> tuple[tuple[Any, ...], Passes | None]:
        """Return the inputs of a forward pass behind gates, and what the gates share.

        Without gates, and ``None``, where all gradients leave together, or one that is
        not planned to leave before is of what autograd does not differentiate, or of
        what the step writes to. If they come ``in_turn``, each leaves alone.

        Raises
        ------
        ExecutionError
            If one that is planned to is of that: a fault of ours.
        """
        pieces = self.pieces(piece_bytes)
        if in_turn and not self._leave_in_turn(pieces):
            if self._planned:
                self._tell("out of turn", _OUT_OF_TURN)
            pieces = ()
        asked = [position for piece in pieces for position in piece]
        are_asked = all(_is_asked(values, each) for each in asked)
        if not are_asked and self._planned:
            raise ExecutionError("gradients leave early of what requires none")
        if not pieces or not are_asked or not self._written.isdisjoint(asked):
            return self.one_by_one(values) if in_turn else values, None
        leaves = [values[each] for each in asked]
        is_hooked = any(map(has_hooks_of_its_gradient, leaves))
        has_others = any(map(has_hooks_before_its_gradient, leaves))
        weak = {p: weakref.ref(values[p]) for p in asked if values[p].is_leaf}
        passes = Passes(pieces, is_hooked or has_others, weak)
        found = list(values)
        if self._planned:
            is_new = is_hooked and not self._knows_hooks
            if is_new or (has_others and not self._knows_others):
                self._tell("hooked", _HOOKED)
            if self._knows_hooks and not is_hooked:
                self._tell("unhooked", _UNHOOKED)
            self._check_added(leaves[0])
        # What is made last runs first.
        for number in reversed(range(len(pieces))):
            piece = pieces[number]
            given = self.one_by_one(values, piece) if in_turn else values
            inputs = [given[position] for position in piece]
            gated: Any = _Gate.apply(passes, number, *inputs, *inputs)
            for position, value in zip(piece, gated, strict=True):
                found[position] = value
        return tuple(found), passes

    def _check_added(self, leaf: torch.Tensor) -> None:
        """Tell if the last backward pass added nothing to the gradient of a leaf."""
        gradient = existing_gradient(leaf)
        if gradient is None:
            return
        if self._begun_at is not None:
            lives, *known, _ = self._begun_at
            # Another one may be in the place of one that is gone.
            if lives() and known == [storage_identity(gradient), version_of(gradient)]:
                self._tell("taken", _TAKEN)
        self._begun_at = None
        self._first = weakref.ref(leaf)

    def watch(self, outputs: Sequence[Any], passes: Passes) -> None:
        """Let gates have the gradients when the backward pass of outputs begins."""

        def begin(_gradients: Sequence[Any]) -> None:
            self._begun.passes = passes

        for output in outputs:
            found = place_of(output)
            if found is not None:
                step, _ = found
                step.register_prehook(begin)
                return

    def begins(self, values: list[Any], undefined: frozenset[int]) -> bool:
        """Whether gates run the backward pass that begins now, on these values.

        Parameters
        ----------
        values
            What the backward code is called with; emptied if gates have it.
        undefined
            Positions of gradients that do not exist.
        """
        passes: Passes | None = getattr(self._begun, "passes", None)
        self._begun.passes = None
        if passes is None or self._module is None:
            return False
        key = passes.pieces, passes.is_hooked
        if key not in self._codes:
            # What hooks take at another time would come on top of what is there then.
            after = self._planned_after if self._knows_hooks else ()
            self._codes[key] = _in_pieces(
                self._module,
                passes.pieces,
                self._parameters,
                after,
                waits=passes.is_hooked,
            )
        code, read_later = self._codes[key]
        passes.begin(code(list(values)), undefined, read_later)
        leaf = self._first()
        gradient = None if leaf is None else existing_gradient(leaf)
        # In one pass through several forward passes, gradients are added at its end.
        if leaf is not None and self._begun_at and self._begun_at[-1] != passes.number:
            self._check_added(leaf)
        if self._planned and gradient is not None and not undefined:
            identity, version = storage_identity(gradient), version_of(gradient)
            lives = block_lives(gradient)
            self._begun_at = lives, identity, version, passes.number
        values.clear()
        return True


def _is_asked(values: Sequence[Any], position: int) -> bool:
    value = values[position] if position < len(values) else None
    return isinstance(value, torch.Tensor) and value.requires_grad


def _sizes_bytes(backward: fx.GraphModule) -> list[tuple[Piece, int]]:
    """Return what is ready at once, with its bytes, in the order of the code."""
    graph = backward.graph
    if graph.find_nodes(op="call_function", target=copy_bytes):
        return []
    (output,) = graph.find_nodes(op="output")
    positions: dict[fx.Node, list[int]] = {}
    sizes_bytes: dict[fx.Node, int] = {}
    for position, value in enumerate(output.args[0]):
        if isinstance(value, fx.Node):
            made = _views_of(value)[0]
            positions.setdefault(made, []).append(position)
            sizes_bytes[made] = max(sizes_bytes.get(made, 0), _size_bytes(value))
    return [
        (tuple(positions[node]), sizes_bytes[node])
        for node in graph.nodes
        if node in positions
    ]


def _views_of(value: fx.Node) -> list[fx.Node]:
    """Return what a gradient is a view of, the views in between, and itself."""
    found = [value]
    while is_view(found[0]) and len(found[0].all_input_nodes) == 1:
        found.insert(0, found[0].all_input_nodes[0])
    return found


def _users(value: fx.Node) -> list[fx.Node]:
    """Return what reads a value or a view of it."""
    users = list(value.users)
    return users + [further for u in users if is_view(u) for further in _users(u)]


def _size_bytes(value: fx.Node) -> int:
    example = value.meta.get("val")
    if not isinstance(example, torch.Tensor):
        return 0
    # Sizes vary of activations alone, and pieces are for gradients of parameters.
    return 0 if any(map(varies, example.shape)) else example.nbytes


def _in_pieces(
    module: fx.GraphModule,
    pieces: Sequence[Piece],
    parameters: Mapping[int, Sequence[str]],
    after: Sequence[str] = (),
    *,
    waits: bool = False,
) -> tuple[Code, list[Piece]]:
    """Return backward code that yields pieces, each when its last gradient is made.

    It yields them in the order of ``pieces``, also where a later one is ready before,
    and if it ``waits`` none before the last use of the ``parameters`` that its
    gradients are of: the names of inputs, by the positions of gradients. The first ones
    come no sooner than ``after`` the nodes of these names. Per piece, the positions are
    returned as well whose parameters are used when it has left.
    Whoever takes a piece empties the list: nothing else holds the gradients then.
    """
    (output,) = module.graph.find_nodes(op="output")
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    inputs = graph.find_nodes(op="placeholder")
    for piece in pieces:
        for position in piece:
            # Views of what is returned are made when all is done.
            made = _views_of(output.args[0][position])
            source, *views = [copies[node] for node in made]
            source = inputs[-1] if source.op == "placeholder" else source
            for view in views:
                source.append(view)
                source = view
    order = {node: place for place, node in enumerate(graph.nodes)}
    named = {node.name: copies[node] for node in module.graph.nodes if node in copies}
    anchor = inputs[-1]
    read_later: list[Piece] = []
    for piece, least in zip_longest(pieces, [named[name] for name in after]):
        made = [copies[output.args[0][position]] for position in piece]
        users = {
            position: [
                user
                for name in parameters.get(position, ())
                for user in _users(named[name])
            ]
            for position in piece
        }
        planned = [] if least is None else [least]
        if waits:
            planned += chain.from_iterable(users.values())
        anchor = max([*made, *planned, anchor], key=lambda node: order[node])
        place = order[anchor]
        read_later.append(
            tuple(p for p in piece if any(order[user] > place for user in users[p]))
        )
        last = anchor
        # After what was put behind the same node before.
        while last.next.target in (_gathered, _yielded):
            last = last.next
        with graph.inserting_after(last):
            gathered = graph.call_function(_gathered, tuple(made))
        with graph.inserting_after(gathered):
            graph.call_function(_yielded, (gathered,))
    graph.output(None)
    graph.set_codegen(BoxedCodeGen())
    written = graph.python_code("self")
    names = [n for n, value in written.globals.items() if value is _yielded]
    pattern = rf"^(\s*)\w+ = {re.escape(names[0])}\((\w+)\)"
    text, count = re.subn(pattern, r"\1yield \2", written.src, flags=re.MULTILINE)
    if count != len(pieces):
        msg = f"{len(pieces)} pieces, but {count} were found in the code"
        raise ExecutionError(msg)
    found: dict[str, Any] = dict(written.globals)
    exec(compile(text, "<backward pass in pieces>", "exec"), found)  # noqa: S102
    forward: Any = found["forward"]
    return (lambda values: forward(module, values)), read_later


def _gathered(*gradients: Any) -> list[Any]:
    """Return a list of what is ready."""
    return list(gradients)


def _yielded(piece: list[Any]) -> None:
    """Stand for the place where a piece is handed on."""
