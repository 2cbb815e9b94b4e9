"""What lives and runs around the traced step: parameters, optimizer, loss, batch."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from remat.capture.captured import captured_tensors as captured_tensors
from remat.capture.captured import plain_tensors as plain_tensors
from remat.capture.joint_program import InputSpec, JointProgram
from remat.core.gradient_pieces import ADDING, STEPPING, Piece
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.in_flight import SAVED_BY_ONE_LOSS
from remat.core.schedule import Compute, Schedule
from remat.torch_compat.attributes import storage_bytes, storage_identity
from remat.torch_compat.messages import BUFFER, ITEM, PARAMETER
from remat.torch_compat.names import tree_leaves
from remat.torch_compat.sharding import local_part

SCALARS_BYTES = 512
"""Set aside for the loss and other scalars that the caller and autograd hold."""

FREES_TANGENTS = TorchVersion(torch.__version__) >= "2.13"
"""Whether compiled backwards own the incoming gradients and free each at its last use.

Since 2.13 they do; before, autograd is taken to hold them until backward returns.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Memory and work of a training step outside the traced graph.

    Parameters
    ----------
    resident_bytes
        Bytes, per role, of everything that is on the device during the whole step
        besides what the graph itself reads.
    loss_peak_bytes
        Most bytes that the caller's work between forward and backward adds to the
        outputs, their gradients included.
    loss_held_bytes
        The part of these that stays until the end of the step: the loss value.
    loss_saved_bytes
        The part of these that stays until the backward pass begins, the loss value
        among it. Counts where other passes run before that.
    has_one_loss
        Whether one loss may be that of all passes that run before.
    loss_forward_peak_bytes
        Most of these bytes until the loss is computed.
    loss_saves_outputs
        Whether the loss may keep outputs for its backward pass that the caller lets go.
    optimizer_workspace_bytes
        Most bytes that the optimizer's step adds, when backward has returned.
    has_tangents_of_its_own
        Whether the gradients of the outputs are made for the step, and not in buffers
        that are there before it and after it, and are counted among the residents.
    holds_outputs
        Whether the caller holds the outputs until the end of the step, and not only
        until its backward pass begins. The loss is held.
    outputs_leave_with_pass
        Whether outputs that are held are let go when backward has returned, and not
        at the end of the step.
    """

    resident_bytes: Mapping[Role, int] = field(default_factory=dict[Role, int])
    loss_peak_bytes: int = 0
    loss_held_bytes: int = 0
    loss_saved_bytes: int = 0
    has_one_loss: bool = False
    loss_forward_peak_bytes: int = 0
    loss_saves_outputs: bool = True
    optimizer_workspace_bytes: int = 0
    has_tangents_of_its_own: bool = True
    holds_outputs: bool = True
    outputs_leave_with_pass: bool = False


def tensors_in(items: Any) -> list[torch.Tensor]:
    """Return the tensors nested in ``items``."""
    if type(items) in (list, tuple):  # In a call of few microseconds the usual.
        found: list[torch.Tensor] = []
        for item in items:
            if isinstance(item, torch.Tensor):
                found.append(item)
            else:
                found += tensors_in(item)
        return found
    if isinstance(items, torch.Tensor):
        return [items]
    return [leaf for leaf in tree_leaves(items) if isinstance(leaf, torch.Tensor)]


def existing_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that a leaf holds, or ``None``."""
    gradient = tensor.grad if tensor.is_leaf else None
    return None if gradient is None else local_part(gradient)


def resident_bytes(
    model: nn.Module | None,
    others: Any,
    optimizer_state_bytes: int,
    device: torch.device,
    *,
    counted: frozenset[int] = frozenset(),
) -> dict[Role, int]:
    """Return the bytes on ``device`` during the whole step, per role.

    Parameters
    ----------
    model
        Its parameters, buffers and other tensors count.
    others
        Batch, targets and whatever else is there, nested.
    optimizer_state_bytes
        Counts as it is.
    device
        Tensors elsewhere do not count.
    counted
        The storages (``InputSpec.storage``) that the graph itself accounts for. A
        storage counts once, wherever it is reached.
    """
    groups: list[tuple[Role, Iterable[torch.Tensor]]] = [
        (Role.INPUT, tensors_in(others))
    ]
    if model is not None:
        groups = [
            (Role.PARAMETER, model.parameters()),
            (Role.BUFFER, model.buffers()),
            *groups,
            (Role.INPUT, plain_tensors(model)),
        ]
    sizes: dict[Role, int] = {Role.OPTIMIZER_STATE: optimizer_state_bytes}
    seen = set(counted)
    for role, tensors in groups:
        for tensor in map(local_part, tensors):
            identity = storage_identity(tensor)
            if tensor.device.type == device.type and identity not in seen:
                seen.add(identity)
                sizes[role] = sizes.get(role, 0) + storage_bytes(tensor)
    return sizes


def describe_input(source: str) -> InputSpec:
    """Return what the tracer's name of an input stands for.

    Examples
    --------
    >>> describe_input("L['self']._modules['fc']._parameters['weight']")
    InputSpec(name='fc.weight', role=<Role.PARAMETER: 'parameter'>)
    >>> describe_input("L['args'][0]").role
    <Role.INPUT: 'input'>
    """
    parts = ITEM.findall(source)
    if PARAMETER in source:
        return InputSpec(".".join(parts[1:]), Role.PARAMETER)
    if BUFFER in source:
        return InputSpec(".".join(parts[1:]), Role.BUFFER)
    return InputSpec(source.replace("L['", "").replace("']", "", 1), Role.INPUT)


def add_surroundings(program: JointProgram, surroundings: Surroundings) -> JointProgram:
    """Return the program with residents and outside work added to its graph.

    The loss becomes the last forward op, the optimizer's step the last backward op;
    both are external: they occupy memory, but nothing in the traced graph runs them.
    """
    graph = program.graph
    loss_value = len(graph.storages)
    saved: list[Storage] = []
    saved_bytes = surroundings.loss_saved_bytes - surroundings.loss_held_bytes
    if surroundings.has_one_loss:
        saved.append(Storage(name=SAVED_BY_ONE_LOSS, size_bytes=max(0, saved_bytes)))
    elif saved_bytes > 0:
        saved.append(Storage(name="saved by the loss", size_bytes=saved_bytes))
    of_the_loss = tuple(range(loss_value, loss_value + 1 + len(saved)))
    in_buffers = () if surroundings.has_tangents_of_its_own else graph.tangents
    storages = [
        *(
            replace(storage, size_bytes=0) if number in in_buffers else storage
            for number, storage in enumerate(graph.storages)
        ),
        Storage(
            name="loss value",
            size_bytes=surroundings.loss_held_bytes,
            role=Role.OUTPUT,
        ),
        *saved,
        Storage(
            name="scalars of loss and autograd",
            size_bytes=SCALARS_BYTES,
            role=Role.OUTPUT,
            is_resident=True,
        ),
        *(
            Storage(
                name=f"{role} outside the graph",
                size_bytes=size_bytes,
                role=role,
                is_resident=True,
            )
            for role, size_bytes in surroundings.resident_bytes.items()
            if size_bytes > 0
        ),
    ]
    forward = graph.forward_count
    let_go = set[int]() if surroundings.holds_outputs else program.outputs_let_go()
    # What the loss does not keep either is gone when it is computed.
    kept = let_go if surroundings.loss_saves_outputs else set[int]()
    unsaved_bytes = sum(storages[s].size_bytes for s in let_go - kept)
    loss_peak_bytes = max(
        min(surroundings.loss_forward_peak_bytes, surroundings.loss_peak_bytes),
        surroundings.loss_peak_bytes - unsaved_bytes,
        sum(storages[storage].size_bytes for storage in of_the_loss),
    )
    loss = _external_op(
        "work between forward and backward (loss)",
        Phase.FORWARD,
        # Not all of them are held by the caller, but all exist before the loss begins.
        reads=graph.forward_outputs,
        writes=of_the_loss,
        workspace_bytes=loss_peak_bytes
        - sum(storages[storage].size_bytes for storage in of_the_loss),
    )
    adding = _adding_ops(program)
    handed_over = _gradients(program, chain(*program.pieces.values()))
    # Others that were added are gone when the optimizer steps. In the graph they stay
    # to the end, so that backward's outputs are what it returns.
    of_steps = _gradients(program, program.steps).keys()
    dropped = program.accumulated - handed_over.keys() - of_steps
    dropped_bytes = sum(graph.storages[s].size_bytes for s in dropped)
    gone = handed_over.keys() | let_go
    final = tuple(s for s in graph.final_outputs if s not in gone)
    # Held by autograd, or the caller, until then, but no longer.
    held_tangents = () if FREES_TANGENTS else graph.tangents
    leaving = set[int]()
    if surroundings.outputs_leave_with_pass:
        leaving = program.outputs_let_go().difference(gone)
    returned = _external_op(
        "the return of backward",
        Phase.BACKWARD,
        reads=(*final, *held_tangents),
        writes=(),
        workspace_bytes=0,
    )
    final = tuple(storage for storage in final if storage not in leaving)
    step = _external_op(
        "optimizer step",
        Phase.BACKWARD,
        reads=final,
        writes=(),
        workspace_bytes=max(
            _step_bytes(
                program, set(program.steps).difference(*program.pieces.values())
            ),
            surroundings.optimizer_workspace_bytes - dropped_bytes,
        ),
    )
    count = len(graph.ops)
    after = [returned, step] if held_tangents or leaving else [step]
    before = [(forward, loss, ()), *adding, *((count, each, ()) for each in after)]
    forward_outputs = (s for s in graph.forward_outputs if s in kept or s not in let_go)
    # Parameters have changed by then, so that no such gradient could be made again. Of
    # outputs the caller holds the blocks that they were made in.
    once = (of_steps - handed_over.keys()) | leaving
    surrounded = _with_ops(
        _made_once(program, once),
        before,
        storages=tuple(storages),
        forward_outputs=(*forward_outputs, *of_the_loss),
        final_outputs=(*final, loss_value),
    )
    return replace(surrounded, let_go=frozenset(let_go))


_ONCE = "autograd takes its gradient once"


def with_pieces(program: JointProgram) -> JointProgram:
    """Return a program with an op for each piece of gradients that leaves early.

    What leaves is made once: where it stays, since there is nothing to add it to, no
    schedule may count on its bytes.
    """
    if not program.pieces:
        return program
    handed_over = _gradients(program, chain(*program.pieces.values()))
    return _with_ops(_made_once(program, handed_over.keys()), _adding_ops(program))


def _made_once(program: JointProgram, storages: Set[int]) -> JointProgram:
    """Return a program in which no op runs again that makes one of some storages."""
    ops = tuple(
        replace(op, non_recomputable=_ONCE)
        if op.is_recomputable and not storages.isdisjoint(op.writes)
        else op
        for op in program.graph.ops
    )
    return replace(program, graph=replace(program.graph, ops=ops))


def _with_ops(
    program: JointProgram, added: Sequence[tuple[int, Op, Piece]], **changed: Any
) -> JointProgram:
    """Return a program with ops that no node runs, each before a numbered one.

    What else is changed of the graph is changed with them.
    """
    graph = program.graph
    # Each with its number in the traced step, if it has one.
    numbered: list[tuple[Op, int | None]] = []
    piece_ops: dict[int, Piece] = {}
    waiting = sorted(added, key=lambda each: each[0])[::-1]
    for number, op in [*enumerate(graph.ops), (len(graph.ops), None)]:
        while waiting and waiting[-1][0] == number:
            _, new, piece = waiting.pop()
            if piece:
                piece_ops[len(numbered)] = piece
            numbered.append((new, None))
        if op is not None:
            numbered.append((op, number))
    place = {number: index for index, (_, number) in enumerate(numbered)}
    return replace(
        program,
        graph=replace(graph, ops=tuple(op for op, _ in numbered), **changed),
        op_nodes=[
            None if number is None else program.op_nodes[number]
            for _, number in numbered
        ],
        random_states={place[op]: state for op, state in program.random_states.items()},
        piece_ops=piece_ops,
    )


def _adding_ops(program: JointProgram) -> list[tuple[int, Op, Piece]]:
    """Return the ops that hand over gradients, and which op each comes before."""
    found: list[tuple[int, Op, Piece]] = []
    last_reads = {s: n for n, op in enumerate(program.graph.ops) for s in op.reads}
    for last, piece in program.pieces.items():
        changed = _changed(program, piece)
        before = _made_by_then(program.graph, changed, last, last_reads)
        op = Op(
            name=STEPPING if changed else ADDING,
            reads=tuple(_gradients(program, piece) | before),
            writes=(),
            cost_ns=(0,),
            workspace_bytes=(_step_bytes(program, piece),),
            phase=Phase.BACKWARD,
            non_recomputable=_ONCE,
        )
        found.append((last + 1, op, piece))
    return found


def _made_by_then(
    graph: TrainingGraph, changed: Set[int], last: int, last_reads: Mapping[int, int]
) -> dict[int, None]:
    """Return what is there after an op of backward and follows from some storages.

    Who reads all of it runs, in every order, after all that reads these storages until
    then, as far as something that is there follows from it.
    """
    if not changed:
        return {}
    found: dict[int, None] = {}
    follows: set[int] = set()
    for op in graph.ops[graph.forward_count : last + 1]:
        if not (changed.isdisjoint(op.reads) and follows.isdisjoint(op.reads)):
            follows.update(op.writes)
            there = (s for s in op.writes if last_reads.get(s, 0) > last)
            found.update(dict.fromkeys(there))
    return found


def _gradients(program: JointProgram, positions: Iterable[int]) -> dict[int, None]:
    """Return the storages of the gradients at these positions."""
    values = (program.backward_values[position] for position in positions)
    return {s: None for value in values for s in program.storages_of[value]}


def _changed(program: JointProgram, piece: Piece) -> set[int]:
    """Return the storages of parameters that change when a piece leaves."""
    steps = (program.steps[p] for p in piece if p in program.steps)
    return {storage for step in steps for storage in step.storages}


def _step_bytes(program: JointProgram, positions: Iterable[int]) -> int:
    """Return most bytes that steps in backward of some parameters take, in turn."""
    steps = (program.steps.get(position) for position in positions)
    return max((step.workspace_bytes for step in steps if step), default=0)


def _may_be_late(program: JointProgram) -> set[int]:
    """Return the positions of parameters that may be read behind their steps.

    To compute something of forward again that is needed there.
    """
    bits: dict[int, int] = {}
    for position, step in program.steps.items():
        for storage in step.storages:
            bits[storage] = bits.get(storage, 0) | 1 << position
    # Per storage which parameters are read when it is computed again.
    behind: dict[int, int] = {}
    changed = found = 0
    for number, op in enumerate(program.graph.ops):
        for position in program.piece_ops.get(number, ()):
            if position in program.steps:
                changed |= 1 << position
        read = 0
        for storage in op.reads:
            read |= behind.get(storage, 0)
        found |= read & changed
        if op.phase is Phase.FORWARD:
            for storage in op.reads:
                read |= bits.get(storage, 0)
            made = read if op.is_recomputable else 0
            behind.update(dict.fromkeys(op.writes, made))
    return {position for position in program.steps if found >> position & 1}


def pieces_before_changes(
    program: JointProgram, schedule: Schedule
) -> Mapping[int, Piece]:
    """Return the pieces of gradients that may leave early by a schedule.

    A step in backward changes its parameter, and a schedule may compute something of
    that parameter again behind it. Such gradients leave when backward has returned.

    Parameters
    ----------
    program
        The traced step with its surroundings.
    schedule
        One of it.
    """
    changed: dict[int, int] = {}
    late: set[int] = set()
    for step in schedule.steps:
        if not isinstance(step, Compute):
            continue
        late.update(
            changed[s] for s in program.graph.ops[step.op].reads if s in changed
        )
        for position in program.piece_ops.get(step.op, ()):
            if position in program.steps:
                changed |= dict.fromkeys(program.steps[position].storages, position)
    if late:
        # The same for each budget, so that the smallest one that is named works.
        late |= _may_be_late(program)
    pieces = {
        op: tuple(position for position in piece if position not in late)
        for op, piece in program.pieces.items()
    }
    return {op: piece for op, piece in pieces.items() if piece}


def _external_op(
    name: str,
    phase: Phase,
    *,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    workspace_bytes: int,
) -> Op:
    return Op(
        name=name,
        reads=reads,
        writes=writes,
        cost_ns=(0,),
        workspace_bytes=(workspace_bytes,),
        phase=phase,
        non_recomputable="it is done by the caller",
        is_external=True,
    )
