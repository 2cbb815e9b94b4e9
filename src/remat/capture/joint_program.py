"""From a traced joint graph to a training graph, with what is needed to go back.

The tracer hands over a functional ``torch.fx`` graph that computes the outputs and the
gradients of one training step, annotated with fake tensors. This module folds views
into the storages they alias, finds what each op reads and writes, marks random and
otherwise special ops, and keeps for every op the node that runs it.
"""

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import fx

from remat.capture.arrivals import arrivals_in
from remat.capture.autocast import Autocast
from remat.capture.fused_kernel import FusedKernel
from remat.capture.gradient_layouts import spanned_bytes
from remat.capture.layers import layer_name
from remat.capture.returned import ReturnedTensor
from remat.capture.varying_sizes import (
    Sizes,
    VaryingSizes,
    is_symbol,
    is_without_bytes,
    symbolic_value,
)
from remat.core.contributors import labelled
from remat.core.errors import CaptureError
from remat.core.gradient_pieces import Piece, added_pieces
from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.liveness import kept_for_backward
from remat.core.platform import Platform
from remat.core.schedule import Schedule
from remat.torch_compat.accelerators import note_random_state
from remat.torch_compat.attributes import (
    has_hooks_before_its_gradient,
    schema_of,
    storage_identity,
)
from remat.torch_compat.collectives import is_collective, is_wait
from remat.torch_compat.metadata import (
    argument_position,
    changed_inputs,
    is_backward,
    is_forward,
    is_tangent,
    may_be_one_zero,
    output_position,
)
from remat.torch_compat.names import (
    OpOverload,
    functional_batch_norm,
    functional_batch_norm_with_update,
    linalg_check_errors,
    tree_leaves,
    tree_map,
    unsafe_view,
    with_effects,
)
from remat.torch_compat.process_groups import is_fake_group
from remat.torch_compat.sharding import Division, local_part

ALIASING_WITHOUT_SCHEMA = frozenset(
    {
        unsafe_view,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
"""Ops that return views of their first argument although their schema denies it."""

HELD_OUTPUT = "the caller holds its output"
"""Why an op runs once whose output the caller has a reference to."""

RNG_STATE = "rng_state"
"""Name prefix of the ops that note the random number generator's state."""


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Where a batch norm op takes running statistics, and when their value is moot.

    ``training`` is the position of the flag with which no needed output depends on
    the statistics, or ``None`` if none ever does. ``outputs`` are the positions of
    the statistics' new values. ``is_optional`` says whether ``None`` may be passed.
    """

    inputs: tuple[int, ...]
    training: int | None
    outputs: tuple[int, ...] = ()
    is_optional: bool = False


_STATISTICS: dict[Any, _Statistics] = {
    functional_batch_norm: _Statistics((3, 4), training=5, outputs=(3, 4)),
    functional_batch_norm_with_update: _Statistics(
        (3, 4), training=None, outputs=(4, 5)
    ),
    torch.ops.aten.native_batch_norm_backward.default: _Statistics(
        (3, 4), training=7, is_optional=True
    ),
    torch.ops.aten.batch_norm_backward.default: _Statistics(
        (3, 4), training=7, is_optional=True
    ),
}


def _statistics_of(node: fx.Node) -> _Statistics | None:
    if isinstance(node.target, FusedKernel):
        return _Statistics(node.target.moot_inputs, training=None)
    return _STATISTICS.get(node.target)


def moot_positions(node: fx.Node) -> tuple[int, ...]:
    """Return the positions of arguments whose value no needed output depends on."""
    statistics = _statistics_of(node)
    if statistics is None:
        return ()
    if statistics.training is not None and node.args[statistics.training] is not True:
        return ()
    return statistics.inputs


def needed_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the node's arguments with ``None`` for those that may be left out."""
    statistics = _statistics_of(node)
    if statistics is None or not statistics.is_optional:
        return tuple(node.args)
    moot = moot_positions(node)
    return tuple(None if i in moot else a for i, a in enumerate(node.args))


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What an input of the traced function is.

    ``role`` is parameter, buffer or input; ``name`` is for people. ``storage``
    identifies the storage of the tensor that is given, while it exists, and
    ``has_gradient`` says whether it holds a gradient, or will, which the step adds to.
    ``step_bytes`` is what its optimizer takes when it steps in backward, ``None`` if it
    steps later, and ``is_hooked`` says whether hooks of it run there, which may change
    whatever has its gradient. ``size_bytes`` is what of the storage this input counts
    for, ``None`` for all.
    """

    name: str
    role: Role
    storage: int | None = field(default=None, repr=False)
    has_gradient: bool = field(default=False, repr=False)
    step_bytes: int | None = field(default=None, repr=False)
    is_hooked: bool = field(default=False, repr=False)
    size_bytes: int | None = field(default=None, repr=False)

    def given(
        self, value: torch.Tensor, *, has_gradient: bool, step_bytes: int | None = None
    ) -> "InputSpec":
        """Return the description with what is known of the tensor itself."""
        return replace(
            self,
            storage=storage_identity(value),
            has_gradient=has_gradient,
            step_bytes=step_bytes,
            is_hooked=has_hooks_before_its_gradient(value),
        )


@dataclass(frozen=True, slots=True)
class ParameterStep:
    """A step of one parameter in backward, by its optimizer or another hook.

    It takes ``workspace_bytes``, and changes what is in the parameter's memory: the
    inputs in ``storages``.
    """

    workspace_bytes: int
    storages: tuple[int, ...]


def counted_once(
    specs: Sequence[InputSpec], values: Sequence[torch.Tensor]
) -> list[InputSpec]:
    """Return descriptions of inputs in which parts of one block do not count it again.

    Each counts for what it spans, so that other inputs of the same shapes, each in a
    block of its own, take no more; the first counts for what no other one spans, too.
    """
    found = list(specs)
    groups: dict[int | None, list[int]] = {}
    for position, spec in enumerate(specs):
        groups.setdefault(spec.storage, []).append(position)
    for storage, positions in groups.items():
        if storage is None or len(positions) == 1:
            continue
        parts = [local_part(values[position]) for position in positions]
        sizes_bytes = [spanned_bytes(part) for part in parts]
        block_bytes = parts[0].untyped_storage().nbytes()
        sizes_bytes[0] = max(sizes_bytes[0], block_bytes - sum(sizes_bytes[1:]))
        for position, size_bytes in zip(positions, sizes_bytes, strict=True):
            found[position] = replace(found[position], size_bytes=size_bytes)
    return found


def inputs_of_parts(
    joint: fx.GraphModule, specs: Sequence[InputSpec]
) -> list[InputSpec]:
    """Return a description for each input of a joint graph that is no tangent.

    Parameters
    ----------
    joint
        The joint graph, in which a ``DTensor`` is several inputs: what this process
        holds of it, and the mesh that it is divided over.
    specs
        One description for each argument of the traced function.
    """
    inputs = [
        node
        for node in joint.graph.find_nodes(op="placeholder")
        if not is_tangent(node)
    ]
    if len(inputs) == len(specs):
        return list(specs)
    positions = map(argument_position, inputs)
    return [specs[position] for position in positions if position is not None]


class SizedBy(NamedTuple):
    """What the size of a storage follows from: a node, and which of its outputs.

    ``is_spanned`` says whether it is the bytes from the tensor's first element to its
    last, and not those of the block in which the tensor lies.
    """

    node: fx.Node
    output: int = 0
    is_spanned: bool = False

    def symbolic_bytes(self) -> Any:
        """Return the size, with symbols in the place of what varies."""
        value = symbolic_value(self.node)
        tensor = value if isinstance(value, torch.Tensor) else value[self.output]
        if self.is_spanned:
            return spanned_bytes(tensor)
        return tensor.untyped_storage().nbytes()


@dataclass(kw_only=True)
class JointProgram:
    """A joint graph and its analysis.

    Parameters
    ----------
    module
        The traced module; its graph is never changed.
    graph
        The training graph; costs are zero until :mod:`remat.profile.costing` sets them.
    op_nodes
        Per op the node that runs it; ``None`` for ops that no node runs (noting the
        generator's state, work outside the model).
    base_nodes
        Per storage the nodes whose value is the storage's own tensor.
    storages_of
        Per node the storages that its value lives in.
    forward_values, backward_values
        The nodes returned by the two passes, ``None`` where there is no value.
    random_states
        Per random op the storage that holds the generator's state before its run.
    unchecked_inputs
        Inputs that backward may read although the step changes them, because the
        value does not matter there (running statistics of batch norm).
    accumulated
        The storages of gradients that autograd adds to existing ones, and then drops,
        when backward has returned; or that are dropped when their parameters have been
        stepped.
    pieces
        The positions of such gradients, piece by piece, that leave before that, by the
        op of the traced step after which each does, in that order.
    piece_ops
        The ops of the graph that hand over a piece, once it has them.
    steps
        The steps of parameters that happen in backward, by the positions of gradients,
        which are gone then as well.
    shared
        Per storage of an input those of other inputs in the same memory.
    changed_count
        How many of ``forward_values`` come before the outputs of the traced function:
        new values of inputs that it changes.
    returned_storages
        The storages of what the model returns, but for its loss, where there are no
        ``forward_values``.
    let_go
        Those of outputs that the caller is taken to let go when backward begins.
    gradients
        By the id of a parameter in pieces, how its gradient is divided if otherwise
        than itself.
    given_storages
        The storages of the inputs (``InputSpec.storage``), as far as they are known.
    autocast
        What was on when the step was called; the tracer switches it off.
    returned
        The tensor that the call returns, if it is known to return one alone.
    loss
        The position, among the outputs of the traced function, of the loss that the
        call returns; ``None`` if none is known, or if the caller described another.
    platform
        The devices on which the step runs, its own first; ``None`` for its own alone.
    varying
        The sizes that vary, ``None`` if none does.
    sizes
        The values of these that the graph is for.
    sized_by
        Per storage of the traced graph what its size follows from, as sizes vary.
    """

    module: fx.GraphModule
    graph: TrainingGraph
    op_nodes: list[fx.Node | None]
    base_nodes: list[list[fx.Node]]
    storages_of: dict[fx.Node, tuple[int, ...]]
    forward_values: list[Any]
    backward_values: list[Any]
    random_states: dict[int, int]
    unchecked_inputs: frozenset[fx.Node]
    device: torch.device
    fingerprint: str = field(default="")
    accumulated: frozenset[int] = frozenset()
    pieces: Mapping[int, Piece] = field(default_factory=dict[int, Piece])
    piece_ops: Mapping[int, Piece] = field(default_factory=dict[int, Piece])
    steps: Mapping[int, ParameterStep] = field(default_factory=dict[int, ParameterStep])
    shared: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict[int, tuple[int, ...]]
    )
    changed_count: int = 0
    returned_storages: frozenset[int] | None = None
    let_go: frozenset[int] = frozenset()
    gradients: Mapping[int, Division] = field(default_factory=dict[int, Division])
    given_storages: frozenset[int] = frozenset()
    autocast: tuple[Autocast, ...] = ()
    returned: ReturnedTensor | None = None
    loss: int | None = None
    platform: Platform | None = None
    varying: VaryingSizes | None = None
    sizes: Sizes = ()
    sized_by: tuple[SizedBy | None, ...] = ()

    def __repr__(self) -> str:
        return f"<JointProgram of {self.graph!r} on {self.device}>"

    def outputs_let_go(self) -> set[int]:
        """Return the storages of outputs that nobody holds if the caller does not."""
        held = set(self.graph.held_outputs.difference(self.graph.tangents))
        if self.returned_storages is not None:
            return held & self.returned_storages
        # What a buffer becomes may be an output as well.
        kept = self.forward_values[: self.changed_count]
        if self.loss is not None:
            kept.append(self.forward_values[self.changed_count + self.loss])
        for value in kept:
            if isinstance(value, fx.Node):
                held.difference_update(self.storages_of[value])
        return held

    def unread_outputs(self, schedule: Schedule) -> list[int]:
        """Return the positions of outputs let go that a schedule does not keep."""
        gone = self.let_go - kept_for_backward(self.graph, schedule)
        return [
            position
            for position, value in enumerate(self.forward_values[self.changed_count :])
            if isinstance(value, fx.Node) and gone.intersection(self.storages_of[value])
        ]

    def inner_outputs(self) -> list[int]:
        """Return the positions of outputs with a gradient that others are made of."""
        values = self.forward_values[self.changed_count :]
        positions = map(output_position, filter(is_tangent, self.module.graph.nodes))
        bits = {values[p]: 1 << p for p in positions if p is not None}
        # Per node the outputs that it is computed of.
        behind: dict[fx.Node, int] = {}
        found = 0
        for node in self.module.graph.nodes:
            behind[node] = 0
            for source in node.all_input_nodes:
                behind[node] |= behind[source] | bits.get(source, 0)
            if node in bits:
                found |= behind[node] & ~bits[node]
        return [position for position in range(len(values)) if found >> position & 1]

    def tangent_values(self) -> list[torch.Tensor]:
        """Return a fake tensor for the gradient of each output that takes one."""
        nodes = [self.base_nodes[tangent][0] for tangent in self.graph.tangents]
        if self.varying is None:
            return [node.meta["val"] for node in nodes]
        return [self.varying.value_at(node, self.sizes) for node in nodes]

    def calls(self) -> Iterator[tuple[int, fx.Node]]:
        """Yield the ops that a node runs, with that node."""
        for index, node in enumerate(self.op_nodes):
            if node is not None:
                yield index, node


# The default device is given to functions by one of torch that runs in between.
_NOT_THE_USERS = ("remat/capture/tracing.py", "torch/utils/_device.py")


def user_source_line(node: fx.Node) -> str:
    """Return the innermost line of the user's code that created ``node``, or ``""``.

    Lines inside torch do not count: the tracer leaves them out.
    """
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    for position in range(len(lines) - 1, -1, -1):
        line = lines[position]
        if line.startswith("File ") and not any(
            each in line for each in _NOT_THE_USERS
        ):
            code = lines[position + 1] if position + 1 < len(lines) else ""
            return f"{line}: {code}"
    return ""


def is_view(node: fx.Node) -> bool:
    """Return whether the node's value is a view of one of its inputs."""
    target = node.target
    if target in ALIASING_WITHOUT_SCHEMA:
        return True
    schema = schema_of(target)
    if schema is None:
        return False
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )


def is_random(node: fx.Node) -> bool:
    """Return whether the node draws from a random number generator."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def example_value(module: fx.GraphModule, node: fx.Node) -> Any:
    """Return a node's fake value, or the tensor itself if it is a constant."""
    if node.op == "get_attr":
        return getattr(module, str(node.target))
    return node.meta["val"]


def values_of(node: fx.Node) -> list[torch.Tensor | None]:
    """Return the fake tensors that the node produces, one per output."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [item if isinstance(item, torch.Tensor) else None for item in value]
    return []


def analyse(
    module: fx.GraphModule,
    *,
    forward_output_count: int,
    inputs: Sequence[InputSpec],
    name: str,
    varying: VaryingSizes | None = None,
    is_alone: bool = True,
) -> JointProgram:
    """Return the training graph of a joint graph.

    Parameters
    ----------
    module
        A functional joint graph whose placeholders are the inputs, then the tangents.
    forward_output_count
        How many of the graph's outputs belong to the forward pass.
    inputs
        One description per input, in the order of the placeholders.
    name
        Name of the training graph.
    varying
        The sizes that vary in the joint graph, which is taken as it is set.
    is_alone
        Whether no other graph of the step may differentiate what this one returns, so
        that what :func:`remat.capture.gradient_layouts.expand_zeros` marks takes none.

    Raises
    ------
    CaptureError
        If the graph holds an operation that cannot be treated; the message names it
        and the user's source line.
    """
    return _Analysis(
        module, forward_output_count, inputs, name, varying, is_alone=is_alone
    ).run()


_NOTHING = Op(
    name="nothing but views",
    reads=(),
    writes=(),
    cost_ns=(0,),
    workspace_bytes=(0,),
    phase=Phase.FORWARD,
)


class _Analysis:
    def __init__(
        self,
        module: fx.GraphModule,
        forward_output_count: int,
        inputs: Sequence[InputSpec],
        name: str,
        varying: VaryingSizes | None,
        *,
        is_alone: bool,
    ) -> None:
        self.module = module
        self.varying = varying
        self.is_alone = is_alone
        self.sized_by: list[SizedBy | None] = []
        self.inputs = inputs
        self.name = name
        outputs = next(iter(module.graph.find_nodes(op="output")))
        self.forward_values = list(outputs.args[0][:forward_output_count])
        self.backward_values = list(outputs.args[0][forward_output_count:])
        self.changed_inputs = changed_inputs(outputs)
        self.storages: list[Storage] = []
        self.base_nodes: list[list[fx.Node]] = []
        self.storages_of: dict[fx.Node, tuple[int, ...]] = {}
        # For a node with several outputs: its storage per output (None: no tensor).
        self.outputs_of: dict[fx.Node, list[int | None]] = {}
        self.tangents: list[int] = []
        self.forward_ops: list[tuple[Op, fx.Node | None]] = []
        self.backward_ops: list[tuple[Op, fx.Node | None]] = []
        self.states: dict[fx.Node, int] = {}
        # The storages of the inputs that the step changes in place.
        self.mutated_inputs: set[int] = set()
        self.unchecked: set[fx.Node] = set()
        self.digest = hashlib.sha256()

    def run(self) -> JointProgram:
        position = 0
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.take_placeholder(node, position)
                position += 1
            elif node.op == "get_attr":
                self.take_constant(node)
            elif node.op == "call_function":
                self.take_call(node)
        self.mark_gradients()
        self.pin_held_outputs()
        if not self.forward_ops and not self.backward_ops:
            self.forward_ops.append((_NOTHING, None))
        pairs = [*self.forward_ops, *self.backward_ops]
        op_nodes = [node for _, node in pairs]
        index_of = {node: i for i, node in enumerate(op_nodes) if node is not None}
        graph = TrainingGraph(
            name=self.name,
            storages=tuple(self.storages),
            ops=tuple(op for op, _ in pairs),
            forward_outputs=self.transient_storages(self.forward_values),
            tangents=tuple(self.tangents),
            final_outputs=tuple(
                dict.fromkeys(
                    [
                        *self.transient_storages(self.held_outputs()),
                        *self.transient_storages(self.backward_values),
                    ]
                )
            ),
            device_kinds=(self.device().type,),
        )
        # Steps of the same operators may return, or hand on, other values of them.
        returned = f"{graph.forward_outputs}|{graph.final_outputs}\n"
        self.digest.update(returned.encode())
        self.shared = self.find_shared()
        self.steps = self.find_steps()
        accumulated = self.find_accumulated()
        return JointProgram(
            module=self.module,
            graph=graph,
            op_nodes=op_nodes,
            base_nodes=self.base_nodes,
            storages_of=self.storages_of,
            forward_values=self.forward_values,
            backward_values=self.backward_values,
            random_states={index_of[n]: state for n, state in self.states.items()},
            unchecked_inputs=frozenset(self.unchecked),
            accumulated=accumulated,
            changed_count=sum(
                changed is not None
                for changed in self.changed_inputs[: len(self.forward_values)]
            ),
            pieces=self.find_pieces(graph, accumulated),
            steps=self.steps,
            shared=self.shared,
            given_storages=frozenset(
                spec.storage for spec in self.inputs if spec.storage is not None
            ),
            device=self.device(),
            fingerprint=self.digest.hexdigest(),
            varying=self.varying,
            sizes=() if self.varying is None else self.varying.sizes,
            sized_by=tuple(self.sized_by),
        )

    def device(self) -> torch.device:
        devices = {
            value.device
            for node in self.module.graph.nodes
            for value in values_of(node)
            if value is not None
        }
        accelerators = sorted(devices - {torch.device("cpu")}, key=str)
        return accelerators[0] if accelerators else torch.device("cpu")

    def held_outputs(self) -> list[Any]:
        """Return the forward values that the caller holds until the step ends."""
        return [
            value
            for value, changed in zip(
                self.forward_values, self.changed_inputs, strict=False
            )
            if changed is None
        ]

    def add_storage(
        self, storage: Storage, *nodes: fx.Node, sized_by: SizedBy | None = None
    ) -> int:
        self.storages.append(storage)
        self.base_nodes.append(list(nodes))
        self.sized_by.append(sized_by)
        return len(self.storages) - 1

    def take_placeholder(self, node: fx.Node, position: int) -> None:
        if self.is_without_bytes(node):
            self.storages_of[node] = ()
            return
        values = values_of(node)
        if not values or values[0] is None:
            self.fail(node, "an input that is not a tensor")
        size_bytes = values[0].untyped_storage().nbytes()
        if position < len(self.inputs):
            spec = self.inputs[position]
            if spec.size_bytes is not None:
                size_bytes = spec.size_bytes
            storage = Storage(
                name=spec.name, size_bytes=size_bytes, role=spec.role, is_resident=True
            )
            sized_by: SizedBy | None = SizedBy(node)
        else:
            # A block of its own, also where the output is a part of a larger one.
            is_expanded = self.is_alone and may_be_one_zero(node)
            storage = Storage(
                name=f"gradient of output {position - len(self.inputs)}",
                size_bytes=0 if is_expanded else spanned_bytes(values[0]),
                role=Role.TANGENT,
            )
            self.tangents.append(len(self.storages))
            sized_by = SizedBy(node, is_spanned=True)
            if is_expanded:
                sized_by = None
                self.digest.update(b"one zero")
        number = self.add_storage(storage, node, sized_by=sized_by)
        self.storages_of[node] = (number,)
        if argument_position(node) in set(self.changed_inputs) - {None}:
            self.mutated_inputs.add(number)
        self.note("placeholder", values, self.symbolic_shape(node))

    def is_size(self, node: fx.Node) -> bool:
        """Return whether a node's value is a number that follows from sizes."""
        return is_symbol(symbolic_value(node))

    def is_without_bytes(self, node: fx.Node) -> bool:
        """Return whether a node's value takes no memory."""
        return is_without_bytes(symbolic_value(node))

    def symbolic_shape(self, node: fx.Node) -> list[str]:
        """Return the shape of an input in words, where sizes vary."""
        if self.varying is None:
            return []
        return [self.varying.words(size) for size in symbolic_value(node).shape]

    def take_constant(self, node: fx.Node) -> None:
        value = getattr(self.module, str(node.target))
        if is_fake_group(value):
            # As an input: what was traced before decides which of the two it is.
            node.meta["val"] = value
            self.storages_of[node] = ()
            return
        if not isinstance(value, torch.Tensor):
            self.fail(node, f"a constant of type {type(value).__name__}")
        storage = Storage(
            name=str(node.target),
            size_bytes=value.untyped_storage().nbytes(),
            role=Role.BUFFER,
            is_resident=True,
        )
        self.storages_of[node] = (self.add_storage(storage, node),)
        self.note("constant", [value])

    def take_call(self, node: fx.Node) -> None:
        if self.is_without_bytes(node):
            self.storages_of[node] = ()
            return
        for value in values_of(node):
            if value is not None and not all(type(size) is int for size in value.shape):
                self.fail(node, "the size of its result depends on values")
        self.note(
            str(node.target),
            values_of(node),
            [self.describe(leaf) for leaf in tree_leaves((node.args, node.kwargs))],
        )
        if node.target is with_effects:
            self.fail_for_effect(node)
        elif node.target is operator.getitem:
            self.take_getitem(node)
        elif is_wait(node.target):
            self.take_wait(node)
        elif is_view(node):
            self.storages_of[node] = self.read_storages(node)
        else:
            self.take_op(node)

    def take_getitem(self, node: fx.Node) -> None:
        parent, index = cast("tuple[fx.Node, int]", node.args)
        outputs = self.outputs_of.get(parent)
        if outputs is None:
            self.storages_of[node] = self.storages_of[parent]
            return
        storage = outputs[index]
        if storage is None:
            self.storages_of[node] = ()
            return
        self.storages_of[node] = (storage,)
        self.base_nodes[storage].append(node)

    def take_wait(self, node: fx.Node) -> None:
        """Take the tensor that is waited for as that which the exchange returns.

        Each exchange is waited for where it is begun, as it is in what is traced.
        """
        (source,) = node.all_input_nodes
        (storage,) = self.storages_of[node] = self.storages_of[source]
        if source in self.base_nodes[storage]:
            self.base_nodes[storage].append(node)

    def read_storages(self, node: fx.Node) -> tuple[int, ...]:
        read = [s for source in node.all_input_nodes for s in self.storages_of[source]]
        return tuple(dict.fromkeys(read))

    def take_op(self, node: fx.Node) -> None:
        schema = schema_of(node.target)
        if schema is not None and schema.is_mutable:
            self.fail(node, "an operation that changes its input in place")
        phase = self.phase_of(node)
        ops = self.forward_ops if phase is Phase.FORWARD else self.backward_ops
        reads = self.reads_that_matter(node)
        if is_random(node):
            reads = (*reads, self.add_rng_state(node, phase))
        source = user_source_line(node)
        values = values_of(node)
        is_tuple = not isinstance(node.meta.get("val"), torch.Tensor)
        layer = layer_name(node)
        outputs: list[int | None] = []
        for index, value in enumerate(values):
            if value is None:
                outputs.append(None)
                continue
            if value.layout is not torch.strided:
                self.fail(
                    node,
                    f"its result is sparse ({value.layout}), which no plan counts; "
                    "make it dense (for an embedding: sparse=False)",
                )
            made = f"{node.name}.{index}" if is_tuple else node.name
            storage = Storage(
                name=labelled(layer, made),
                size_bytes=value.untyped_storage().nbytes(),
                role=Role.ACTIVATION,
            )
            nodes = () if is_tuple else (node,)
            sized_by = SizedBy(node, index)
            outputs.append(self.add_storage(storage, *nodes, sized_by=sized_by))
        if is_tuple:
            self.outputs_of[node] = outputs
        writes = tuple(storage for storage in outputs if storage is not None)
        self.storages_of[node] = writes
        ops.append(
            (
                Op(
                    name=node.name,
                    reads=reads,
                    writes=writes,
                    cost_ns=(0,),
                    workspace_bytes=(0,),
                    phase=phase,
                    non_recomputable=self.why_once(node, values),
                    is_ordered=is_random(node) or is_collective(node.target),
                    source=source,
                ),
                node,
            )
        )

    def reads_that_matter(self, node: fx.Node) -> tuple[int, ...]:
        """Return the storages that must be live when the node runs.

        Statistics that are inputs of the step are always there, and where none need be
        passed, none is. Statistics that another op of the step wrote must be live,
        because the first run updates them.
        """
        moot = {
            argument
            for argument in (node.args[p] for p in moot_positions(node))
            if isinstance(argument, fx.Node)
            and (argument.op == "placeholder" or needed_arguments(node) != node.args)
        }
        self.unchecked |= {n for n in moot if n.op == "placeholder"}
        read = [
            storage
            for source in node.all_input_nodes
            if source not in moot
            for storage in self.storages_of[source]
        ]
        return tuple(dict.fromkeys(read))

    def sources_that_matter(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes whose values the node's needed outputs depend on."""
        moot = moot_positions(node)
        kept = [a for i, a in enumerate(node.args) if i not in moot]
        leaves = tree_leaves((kept, dict(node.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def why_once(
        self, node: fx.Node, values: Sequence[torch.Tensor | None]
    ) -> str | None:
        """Return why the op may run only once, or ``None``."""
        if is_collective(node.target):
            return "all processes of a group take part in it, in one order"
        if not any(value is not None for value in values):
            return "it has an effect besides its outputs"
        if not isinstance(node.target, OpOverload | FusedKernel):
            return f"{node.target} is not a plain operator"
        changed = [
            self.storages[storage].name
            for source in self.sources_that_matter(node)
            for storage in self.storages_of[source]
            if storage in self.mutated_inputs
        ]
        if changed:
            return f"it reads {changed[0]}, which the step changes"
        statistics = _statistics_of(node)
        if statistics is not None and any(
            self.is_read(user)
            for user in node.users
            if user.args[1] in statistics.outputs
        ):
            return "its new running statistics are read again"
        return None

    def is_read(self, value: fx.Node) -> bool:
        """Return whether some op's result depends on ``value``."""
        return any(
            value not in (user.args[p] for p in moot_positions(user))
            for user in value.users
            if user.op != "output"
        )

    def add_rng_state(self, node: fx.Node, phase: Phase) -> int:
        """Add the op that notes the generator's state before a random op."""
        device = values_of(node)[0]
        state = note_random_state("cpu" if device is None else device.device.type)
        storage = self.add_storage(
            Storage(name=f"{RNG_STATE} of {node.name}", size_bytes=state.numel())
        )
        ops = self.forward_ops if phase is Phase.FORWARD else self.backward_ops
        ops.append(
            (
                Op(
                    name=f"{RNG_STATE} of {node.name}",
                    reads=(),
                    writes=(storage,),
                    cost_ns=(0,),
                    workspace_bytes=(0,),
                    phase=phase,
                    non_recomputable="it notes the state of the random generator",
                    is_ordered=True,
                    source=user_source_line(node),
                ),
                None,
            )
        )
        self.states[node] = storage
        return storage

    def phase_of(self, node: fx.Node) -> Phase:
        if is_backward(node):
            return Phase.BACKWARD
        if is_forward(node):
            return Phase.FORWARD
        # Untagged nodes stem from passes over the joint graph: they belong to the
        # backward if anything they read does.
        reads_backward = any(
            s in self.tangents or self.is_written_in_backward(s)
            for s in self.read_storages(node)
        )
        return Phase.BACKWARD if reads_backward else Phase.FORWARD

    def is_written_in_backward(self, storage: int) -> bool:
        return any(storage in op.writes for op, _ in self.backward_ops)

    def transient_storages(self, nodes: Sequence[Any]) -> tuple[int, ...]:
        found = [
            storage
            for node in nodes
            if isinstance(node, fx.Node)
            for storage in self.storages_of[node]
            if not self.storages[storage].is_resident
        ]
        return tuple(dict.fromkeys(found))

    def find_accumulated(self) -> frozenset[int]:
        """Return the gradients that are gone when backward has returned."""
        groups: dict[bool, set[int]] = {True: set(), False: set()}
        for spec, node in zip(self.inputs, self.backward_values, strict=False):
            is_gone = spec.has_gradient or spec.step_bytes is not None
            groups[is_gone].update(self.transient_storages([node]))
        stay = groups[False].union(self.transient_storages(self.held_outputs()))
        return frozenset(groups[True] - stay)

    def find_pieces(
        self, graph: TrainingGraph, accumulated: frozenset[int]
    ) -> dict[int, Piece]:
        """Return in which pieces gradients leave before backward has returned.

        None do where the step writes to what it takes a gradient of: autograd has to
        know of it, and knows only gates (:mod:`remat.runtime.early_gradients`).
        """
        written = set(self.changed_inputs)
        if any(
            position in written and isinstance(gradient, fx.Node)
            for position, gradient in enumerate(self.backward_values)
        ):
            return {}
        positions: dict[int, list[int]] = {}
        for position, node in enumerate(self.backward_values):
            for storage in accumulated.intersection(self.transient_storages([node])):
                positions.setdefault(storage, []).append(position)
        changed = {
            storage: [
                s for p in found if p in self.steps for s in self.steps[p].storages
            ]
            for storage, found in positions.items()
        }
        # What is stepped in backward waits for nothing else, to leave room.
        arrivals = () if self.steps else arrivals_in(self.module)
        turns = {position: turn for turn, position in enumerate(arrivals)}
        return added_pieces(graph, positions, changed, turns)

    def find_steps(self) -> dict[int, ParameterStep]:
        """Return the steps that happen in backward, by the positions of gradients.

        Hooks of one parameter may change others as well, once these have a gradient.
        """
        nodes = self.module.graph.find_nodes(op="placeholder")
        is_hooked = any(spec.is_hooked for spec in self.inputs)
        return {
            position: ParameterStep(
                spec.step_bytes or 0, tuple(self.in_memory_of(node))
            )
            for position, (spec, node, value) in enumerate(
                zip(self.inputs, nodes, self.backward_values, strict=False)
            )
            if isinstance(value, fx.Node)
            and (spec.step_bytes is not None or (is_hooked and spec.has_gradient))
        }

    def in_memory_of(self, node: fx.Node) -> list[int]:
        """Return the storages of an input, and of others in the same memory."""
        own = self.storages_of[node]
        return [*own, *(s for each in own for s in self.shared.get(each, ()))]

    def find_shared(self) -> dict[int, tuple[int, ...]]:
        """Return per storage of an input those of other inputs in the same memory."""
        nodes = self.module.graph.find_nodes(op="placeholder")
        blocks: dict[int, dict[int, None]] = {}
        for spec, node in zip(self.inputs, nodes, strict=False):
            if spec.storage is not None:
                blocks.setdefault(spec.storage, {}).update(
                    dict.fromkeys(self.storages_of[node])
                )
        return {
            storage: tuple(other for other in found if other != storage)
            for found in blocks.values()
            if len(found) > 1
            for storage in found
        }

    def mark_gradients(self) -> None:
        """Give outputs and gradients their role and readable names."""
        for storage in self.transient_storages(self.held_outputs()):
            self.storages[storage] = replace(self.storages[storage], role=Role.OUTPUT)
        for position, node in enumerate(self.backward_values):
            of = self.inputs[position]
            role = Role.INPUT_GRADIENT if of.role is Role.INPUT else Role.GRADIENT
            for storage in self.transient_storages([node]):
                if self.storages[storage].role is Role.ACTIVATION:
                    self.storages[storage] = replace(
                        self.storages[storage],
                        role=role,
                        name=f"gradient of {of.name}",
                    )

    def pin_held_outputs(self) -> None:
        """Let no op run again that wrote what the caller holds from the boundary on.

        These are the graph's ``held_outputs``: the caller's own reference keeps their
        blocks, so another run would write others beside them.
        """
        final = [*self.held_outputs(), *self.backward_values]
        held = set(self.transient_storages(self.forward_values))
        held.intersection_update(self.transient_storages(final))
        self.forward_ops = [
            (replace(op, non_recomputable=HELD_OUTPUT), node)
            if op.is_recomputable and held.intersection(op.writes)
            else (op, node)
            for op, node in self.forward_ops
        ]

    def describe(self, leaf: object) -> str:
        if isinstance(leaf, fx.Node):
            if self.varying is not None and self.is_size(leaf):
                return self.varying.words(symbolic_value(leaf))
            return f"%{self.storages_of[leaf]}"
        # Each process has its own device, and all run the same step.
        return repr(torch.device(leaf.type) if isinstance(leaf, torch.device) else leaf)

    def note(
        self,
        label: str,
        values: Sequence[torch.Tensor | None],
        arguments: Sequence[str] = (),
    ) -> None:
        """Add one node to the fingerprint."""
        shapes = [
            None
            if v is None
            else (tuple(v.shape), tuple(v.stride()), str(v.dtype), v.device.type)
            for v in values
        ]
        self.digest.update(f"{label}|{shapes}|{','.join(arguments)}\n".encode())

    def fail_for_effect(self, node: fx.Node) -> NoReturn:
        _token, op = node.args[:2]
        hint = "; use the variant that returns its errors, such as torch.linalg.inv_ex"
        self.fail(
            node,
            f"{op} does something beyond returning values, in an order that must be "
            f"kept{hint if op is linalg_check_errors else ''}",
        )

    def fail(self, node: fx.Node, found: str) -> NoReturn:
        msg = (
            f"cannot take {node.target} ({node.name}): {found}; "
            f"{user_source_line(node) or 'no source line is known'}"
        )
        raise CaptureError(msg)


def map_nodes(value: Any, function: Any) -> Any:
    """Apply ``function`` to every node inside nested arguments."""
    return tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, fx.Node) else leaf, value
    )
