"""From a schedule to two ``torch.fx`` graphs, forward and backward.

Recomputation is a repeated node, order is node order, and a tensor dies at its last
use: the generated code drops each variable there. Views are created again from
whichever copy of their storage is live. What passes from forward to backward is the
storages' own tensors, so that no view keeps a discarded block alive.

An operator whose argument dies with it writes over that argument where it can, except
at the step that is fullest: there the schedule's own way is kept, so that the peak is
the predicted one and not less.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from remat.capture.joint_program import JointProgram, map_nodes, needed_arguments
from remat.errors import ExecutionError
from remat.platform import single_device
from remat.runtime.overwriting import overwritable_argument
from remat.runtime.random_state import note_state, replay
from remat.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.simulator import simulate


@dataclass(frozen=True, slots=True)
class LoweredStep:
    """The two modules that run one schedule."""

    forward: fx.GraphModule
    backward: fx.GraphModule


def lower(program: JointProgram, schedule: Schedule) -> LoweredStep:
    """Return the forward and backward modules that execute ``schedule``.

    Parameters
    ----------
    program
        The traced step that the schedule is for.
    schedule
        A valid single-device schedule of ``program.graph``.

    Raises
    ------
    ExecutionError
        If the schedule uses a value that is not live, or copies between devices.
    """
    boundary = schedule.steps.index(Boundary())
    repeated = schedule.recompute_counts()
    replayed = {s for op, s in program.random_states.items() if op in repeated}
    fullest = fullest_steps(program, schedule)
    forward = _Pass(
        program,
        schedule.steps[:boundary],
        already_run=set(),
        replayed=replayed,
        fullest=fullest,
    )
    forward.add_inputs()
    forward.emit()
    first_runs = {s.op for s in forward.steps if isinstance(s, Compute)}
    backward = _Pass(
        program,
        schedule.steps[boundary + 1 :],
        already_run=first_runs,
        replayed=replayed,
        fullest=frozenset(position - boundary - 1 for position in fullest),
    )
    backward.add_tangents()
    backward.emit()
    backward_values = [backward.resolve_output(v) for v in program.backward_values]
    saved = backward.order_saved()
    forward_values = [forward.resolve_output(v) for v in program.forward_values]
    forward.graph.output(
        (*forward_values, *(forward.saved_value(key) for key in saved))
    )
    backward.graph.output(tuple(backward_values))
    return LoweredStep(
        forward=_module(program.module, forward.graph),
        backward=_module(program.module, backward.graph),
    )


def fullest_steps(program: JointProgram, schedule: Schedule) -> frozenset[int]:
    """Return the positions of the steps during which most bytes are in use."""
    kind = program.graph.device_kinds[0]
    (timeline,) = simulate(
        program.graph, single_device(kind=kind), schedule
    ).timeline_bytes
    peak_bytes = max(timeline, default=0)
    return frozenset(
        position
        for position, size_bytes in enumerate(timeline)
        if size_bytes == peak_bytes
    )


def _module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(root, graph)


@dataclass
class _Pass:
    """Emits one of the two graphs."""

    program: JointProgram
    steps: tuple[Step, ...]
    already_run: set[int]
    # The generator states that some recomputation reads.
    replayed: set[int]
    # Positions in `steps` at which nothing is overwritten.
    fullest: frozenset[int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    # Storage -> how often it was computed in this pass; views remember the count.
    version: dict[int, int] = field(default_factory=dict[int, int])
    live: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    views: dict[fx.Node, tuple[tuple[int, ...], Any]] = field(
        default_factory=dict[fx.Node, tuple[tuple[int, ...], Any]]
    )
    constants: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    tangents: list[fx.Node] = field(default_factory=list[fx.Node])
    # Backward only: what it takes from forward, keyed by storage.
    saved: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    discarded: set[int] = field(default_factory=set[int])

    def add_inputs(self) -> None:
        tangents = set(self.program.graph.tangents)
        for node in self.program.module.graph.find_nodes(op="placeholder"):
            (storage,) = self.program.storages_of[node]
            if storage not in tangents:
                self.live[storage] = self.graph.node_copy(node)

    def add_tangents(self) -> None:
        for storage in self.program.graph.tangents:
            (node,) = self.program.base_nodes[storage]
            copy = self.graph.node_copy(node)
            self.live[storage] = copy
            self.tangents.append(copy)

    def emit(self) -> None:
        for position, step in enumerate(self.steps):
            match step:
                case Compute():
                    dying = self.dying_at_once(position)
                    own = dying & self.version.keys()
                    free = set[int]() if position in self.fullest else own
                    self.compute(step.op, dying, free)
                case Discard():
                    self.live.pop(step.storage, None)
                    self.discarded.add(step.storage)
                case Copy():
                    msg = (
                        f"step {position} copies storage {step.storage} to device "
                        f"{step.target}; this runtime executes one device only"
                    )
                    raise ExecutionError(msg)
                case Boundary():
                    raise ExecutionError("the schedule has a second boundary")

    def dying_at_once(self, position: int) -> set[int]:
        """Return the storages discarded right after the step at ``position``."""
        dying: set[int] = set()
        for step in self.steps[position + 1 :]:
            if not isinstance(step, Discard):
                break
            dying.add(step.storage)
        return dying

    def compute(self, op: int, dying: set[int], free: set[int]) -> None:
        """Emit one run of ``op``.

        ``dying`` are the storages discarded right after it; ``free`` those among them
        that it may overwrite.
        """
        node = self.program.op_nodes[op]
        writes = self.program.graph.ops[op].writes
        if node is None:
            self.note_random_state(writes, dying)
            return
        state = self.program.random_states.get(op)
        if state is not None and op in self.already_run:
            new = self.replay_random(node, self.value(state))
        else:
            new = self.run(node, free)
        self.already_run.add(op)
        for storage in writes:
            if storage in dying:
                self.live.pop(storage, None)
                continue
            self.version[storage] = self.version.get(storage, 0) + 1
            bases = self.program.base_nodes[storage]
            if bases:  # Without one, no node of the joint graph uses this output.
                self.live[storage] = (
                    new
                    if bases[0] is node
                    else self.graph.node_copy(bases[0], lambda _: new)
                )

    def run(self, node: fx.Node, free: set[int]) -> fx.Node:
        """Emit a copy of ``node`` on the values that are live now."""
        target = node.target
        args = map_nodes(needed_arguments(node), self.resolve)
        kwargs = map_nodes(dict(node.kwargs), self.resolve)
        found = overwritable_argument(self.program, node, free)
        if found is not None:
            variant, position = found
            target = variant.target
            if variant.keyword is not None:
                kwargs[variant.keyword] = args[position]
        new = self.graph.create_node(node.op, target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        return new

    def note_random_state(self, writes: tuple[int, ...], dying: set[int]) -> None:
        for storage in writes:
            if storage in self.replayed and storage not in dying:
                self.live[storage] = self.graph.call_function(
                    note_state, (self.program.device.type,)
                )

    def replay_random(self, node: fx.Node, state: fx.Node) -> fx.Node:
        args = map_nodes(tuple(node.args), self.resolve)
        kwargs = map_nodes(dict(node.kwargs), self.resolve)
        first: Any = (node.target, self.program.device.type, state)
        new = self.graph.call_function(replay, (*first, *args), kwargs)
        new.meta = dict(node.meta)
        return new

    def value(self, storage: int) -> fx.Node:
        """Return the emitted node that holds ``storage`` now."""
        found = self.live.get(storage)
        if found is not None:
            return found
        if not self.tangents or storage in self.discarded or storage in self.version:
            name = self.program.graph.storages[storage].name
            msg = f"storage {storage} {name!r} is used while it is not live"
            raise ExecutionError(msg)
        return self.take_from_forward(storage)

    def take_from_forward(self, storage: int) -> fx.Node:
        """Add an input of backward for a storage that is live at the boundary."""
        bases = self.program.base_nodes[storage]
        with self.graph.inserting_before(self.tangents[0]):
            name = f"saved_{storage}"
            node = self.graph.placeholder(name)
        if bases:
            node.meta = dict(bases[0].meta)
            if bases[0] in self.program.unchecked_inputs:
                node.meta["saved_tensor_with_no_vc_check"] = True
        else:  # The state of a random generator.
            size_bytes = self.program.graph.storages[storage].size_bytes
            with self.tangents[0].meta["val"].fake_mode:
                node.meta["val"] = torch.empty(size_bytes, dtype=torch.uint8)
        self.saved[storage] = node
        self.live[storage] = node
        return node

    def order_saved(self) -> list[int]:
        """Put version-checked saved values first, as autograd's wrapper expects."""

        def unchecked(storage: int) -> bool:
            return bool(self.saved[storage].meta.get("saved_tensor_with_no_vc_check"))

        ordered = sorted(self.saved, key=unchecked)
        for storage in ordered:
            self.tangents[0].prepend(self.saved[storage])
        return ordered

    def saved_value(self, storage: int) -> fx.Node:
        node = self.live.get(storage)
        if node is None:
            name = self.program.graph.storages[storage].name
            msg = f"backward reads storage {storage} {name!r}, which forward freed"
            raise ExecutionError(msg)
        bases = self.program.base_nodes[storage]
        if bases and bases[0] in self.program.unchecked_inputs:
            node.meta["saved_tensor_with_no_vc_check"] = True
        return node

    def resolve(self, node: fx.Node) -> Any:
        """Return the emitted node with the value of ``node`` of the joint graph."""
        if node.op == "get_attr":
            if node not in self.constants:
                self.constants[node] = self.graph.node_copy(node)
            return self.constants[node]
        storages = self.program.storages_of[node]
        if len(storages) == 1 and node in self.program.base_nodes[storages[0]]:
            return self.value(storages[0])
        versions = tuple(self.version_of(s) for s in storages)
        known = self.views.get(node)
        if known is not None and known[0] == versions:
            return known[1]
        new = self.graph.node_copy(node, self.resolve)
        self.views[node] = (versions, new)
        return new

    def version_of(self, storage: int) -> int:
        self.value(storage)
        return self.version.get(storage, 0)

    def resolve_output(self, value: Any) -> Any:
        return self.resolve(value) if isinstance(value, fx.Node) else value
