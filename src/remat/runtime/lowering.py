"""From a schedule to two ``torch.fx`` graphs, forward and backward.

Recomputation is a repeated node, order is node order, and a tensor dies at its last
use: the generated code drops each variable there. Views are created again from
whichever copy of their storage is live. What passes from forward to backward is the
storages' own tensors, so that no view keeps a discarded block alive.

An operator whose argument dies with it writes over that argument where it can, except
at the step that is fullest: there the schedule's own way is kept, so that the peak is
the predicted one and not less.

With several devices a storage has a tensor on each device on which it is live, and an
op works on those of its own device. The graphs follow an issue order
(:mod:`remat.core.issue_order`), instruction by instruction: what works at once are the
queues of CUDA devices and the copies beside them, and before a graph is made of it, the
order is proved to have no race.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from remat.capture.host_seeds import is_host_seed
from remat.capture.joint_program import JointProgram, map_nodes, needed_arguments
from remat.capture.varying_sizes import (
    is_symbol,
    is_without_bytes,
    restore_symbols,
    symbolic_value,
)
from remat.core.device_graph import place_of
from remat.core.errors import ExecutionError
from remat.core.gradient_pieces import Piece
from remat.core.issue_order import (
    HOST,
    Allocate,
    Free,
    HandOver,
    IssueOrder,
    Record,
    Run,
    Wait,
)
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import single_device
from remat.core.races import check_no_race
from remat.core.schedule import Boundary, Compute, Copy, Schedule, Step
from remat.core.simulator import simulate
from remat.runtime.copies import (
    copy_bytes,
    new_block,
    record_event,
    release,
    wait_event,
)
from remat.runtime.exchanges import exchange
from remat.runtime.issuing import (
    LEAST_BYTES_BESIDE,
    Place,
    dying_at_once,
    issue_orders,
)
from remat.runtime.marks import mark_device
from remat.runtime.overwriting import overwritable_argument, overwritten_storage
from remat.runtime.random_state import replay
from remat.torch_compat.accelerators import device_count, note_random_state
from remat.torch_compat.collectives import is_collective
from remat.torch_compat.metadata import is_tangent, is_unchecked, leave_unchecked

PIECES = "pieces"
"""What a backward module's ``meta`` calls the pieces in which gradients leave it."""

HANDED_OVER = "handed over"
"""What it calls the nodes, by their names, after which each of these pieces leaves."""

PARAMETERS = "parameters"
"""What it calls the inputs, by their names, in the memory that gradients are of."""


@dataclass(frozen=True, slots=True)
class LoweredStep:
    """The two modules that run one schedule."""

    forward: fx.GraphModule
    backward: fx.GraphModule


def lower(
    program: JointProgram,
    schedule: Schedule,
    fullest: frozenset[int] | None = None,
) -> LoweredStep:
    """Return the forward and backward modules that execute ``schedule``.

    Parameters
    ----------
    program
        The traced step that the schedule is for.
    schedule
        A valid schedule of ``program.graph`` on the program's platform.
    fullest
        Positions of the steps at which nothing is overwritten; by default those at
        which the schedule's own device is fullest.

    Raises
    ------
    ExecutionError
        If the schedule uses a value that is not live, or a device that is not there.
    RaceError
        If two queues could meet in one block: a fault of ours.
    """
    places = torch_places(program)
    boundary = schedule.steps.index(Boundary())
    repeated = schedule.recompute_counts()
    replayed = {s for op, s in program.random_states.items() if op in repeated}
    if fullest is None:
        fullest = fullest_steps(program, schedule)

    def overwritten(position: int, dying: frozenset[int]) -> int | None:
        step = schedule.steps[position]
        node = program.op_nodes[step.op] if isinstance(step, Compute) else None
        if node is None or position in fullest:
            return None
        return overwritten_storage(program, node, dying)

    def has_value(storage: int) -> bool:
        return bool(bases_of(program, storage)) or storage in replayed

    orders = issue_orders(
        program.graph,
        schedule,
        [place == "cpu" for place in places],
        overwritten=overwritten,
        has_value=has_value,
        least_bytes_beside=LEAST_BYTES_BESIDE,
    )
    for order in orders:
        check_no_race(order, program.graph, device_names(program))
    forward = _Pass(program, places, schedule.steps, orders[0], set(), replayed)
    forward.add_inputs()
    forward.emit()
    first_runs = {s.op for s in schedule.steps[:boundary] if isinstance(s, Compute)}
    backward = _Pass(
        program,
        places,
        schedule.steps,
        orders[1],
        already_run=first_runs,
        replayed=replayed,
        at_boundary=frozenset(forward.live),
    )
    backward.add_tangents()
    backward.emit()
    backward_values = [
        backward.handed_over.get(position) or backward.resolve_output(value)
        for position, value in enumerate(program.backward_values)
    ]
    saved = backward.order_saved()
    forward_values = forward.returned or [
        forward.resolve_output(value) for value in program.forward_values
    ]
    # Autograd's wrapper takes sizes last, and gives them back first.
    saved_values = [
        *(forward.saved_value(place) for place in saved),
        *(forward.numbers[node] for node in backward.saved_meshes),
        *(forward.numbers[node] for node in backward.saved_sizes),
    ]
    forward.graph.output((*forward_values, *saved_values))
    backward.graph.output(tuple(backward_values))
    lowered = LoweredStep(
        forward=_module(program.module, forward.graph),
        backward=_module(program.module, backward.graph),
    )
    lowered.backward.meta[PIECES] = tuple(backward.pieces)
    lowered.backward.meta[HANDED_OVER] = tuple(backward.handed_over_after)
    lowered.backward.meta[PARAMETERS] = backward.parameters()
    restore_symbols(lowered.forward)
    restore_symbols(lowered.backward)
    return lowered


def lower_again(
    program: JointProgram, ops: Sequence[int], storages: Sequence[int]
) -> tuple[fx.GraphModule, list[int], list[fx.Node]]:
    """Return a module that runs a part of the forward pass again.

    Parameters
    ----------
    program
        The traced step, on its own device.
    ops
        What runs, in order: all that the storages follow from.
    storages
        What is made.

    Returns
    -------
    module
        Returns a tensor in the block of each of the storages.
    list
        The storages that it is given, each as the tensor that the step keeps it in.
    list
        The inputs of the step that it is given before these: sizes that vary.
    """
    kept = replace(program.graph, final_outputs=tuple(storages))
    order = [*range(kept.forward_count), BOUNDARY, *ops]
    schedule = schedule_from_order(kept, order)
    replayed = {s for op, s in program.random_states.items() if op in ops}
    # Nothing is overwritten, so that it takes what the schedule says.
    _, issue = issue_orders(
        kept, schedule, [place == "cpu" for place in _home(program)]
    )
    again = _Pass(
        program,
        _home(program),
        schedule.steps,
        issue,
        already_run=set(range(kept.forward_count)),
        replayed=replayed,
    )
    again.add_tangents()
    again.emit()
    made = tuple(again.value((storage, 0)) for storage in storages)
    given = [storage for storage, _ in again.order_saved()]
    for tangent in again.tangents:
        again.graph.erase_node(tangent)
    again.graph.output(made)
    return _module(program.module, again.graph), given, again.saved_sizes


def _home(program: JointProgram) -> tuple[str, ...]:
    return (str(program.device),)


def saved_name(storage: int) -> str:
    """Return what the backward module calls a storage that forward saves for it."""
    return f"saved_{storage}"


def torch_places(program: JointProgram) -> tuple[str, ...]:
    """Return torch's name of each device that the program runs on, its own first.

    Raises
    ------
    ExecutionError
        If this machine lacks a device.
    """
    if program.platform is None:
        return (str(program.device),)
    places: list[str] = []
    for device, name in enumerate(program.platform.names):
        place = place_of(program.platform, device)
        if place is None or not _exists(place):
            msg = (
                f"the plan uses device {name!r}, which "
                + (
                    f"is {place}, and this machine has none"
                    if place
                    else "is none here"
                )
                + "; plan for the devices of this machine"
            )
            raise ExecutionError(msg)
        places.append(place)
    return tuple(places)


def device_names(program: JointProgram) -> tuple[str, ...]:
    """Return the plan's names of the devices, the step's own first."""
    platform = program.platform
    return (str(program.device),) if platform is None else platform.names


def bases_of(program: JointProgram, storage: int) -> list[fx.Node]:
    """Return the nodes of the joint graph whose value is the storage's own tensor."""
    known = program.base_nodes
    # What surrounds the step, such as the loss value, comes last and has none.
    return known[storage] if storage < len(known) else []


def _exists(place: str) -> bool:
    kind, _, number = place.partition(":")
    if kind == "cpu":
        return True
    return int(number or 0) < device_count(kind)


def fullest_steps(program: JointProgram, schedule: Schedule) -> frozenset[int]:
    """Return the positions of the steps during which their device is fullest."""
    platform = program.platform or single_device(kind=program.graph.device_kinds[0])
    trace = simulate(program.graph, platform, schedule)
    peaks = [max(timeline, default=0) for timeline in trace.timeline_bytes]
    return frozenset(
        position
        for position, step in enumerate(schedule.steps)
        if isinstance(step, Compute)
        and trace.timeline_bytes[step.device][position] == peaks[step.device]
    )


def _module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(root, graph)


@dataclass
class _Pass:
    """Emits one of the two graphs."""

    program: JointProgram
    # torch's names of the devices.
    torch_places: tuple[str, ...]
    # The schedule's, and those of this pass in the order in which they are issued.
    steps: tuple[Step, ...]
    order: IssueOrder
    already_run: set[int]
    # The generator states that some recomputation reads.
    replayed: set[int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    # Place -> how often it was computed in this pass; views remember the count.
    version: dict[Place, int] = field(default_factory=dict[Place, int])
    live: dict[Place, fx.Node] = field(default_factory=dict[Place, fx.Node])
    views: dict[tuple[fx.Node, int], tuple[tuple[int, ...], Any]] = field(
        default_factory=dict[tuple[fx.Node, int], tuple[tuple[int, ...], Any]]
    )
    constants: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    tangents: list[fx.Node] = field(default_factory=list[fx.Node])
    # Backward only: what it takes from forward, keyed by place.
    saved: dict[Place, fx.Node] = field(default_factory=dict[Place, fx.Node])
    discarded: set[Place] = field(default_factory=set[Place])
    # The block of the issue order that a place is in, and the value that an op
    # replaces.
    block_at: dict[Place, int] = field(default_factory=dict[Place, int])
    replaced: dict[Place, fx.Node] = field(default_factory=dict[Place, fx.Node])
    # Fresh blocks that a copy will fill, and events, by their numbers.
    fresh: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    events: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    # The places that copies beside the host read or fill.
    copied: set[Place] = field(default_factory=set[Place])
    # Backward only: the places that were live when forward ended.
    at_boundary: frozenset[Place] = frozenset()
    # The device that was marked last.
    marked: int = 0
    # What takes no memory, free in both passes: numbers that follow from sizes that
    # vary, and meshes of devices.
    numbers: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    # Backward only: those among them that it takes from forward.
    saved_sizes: list[fx.Node] = field(default_factory=list[fx.Node])
    saved_meshes: list[fx.Node] = field(default_factory=list[fx.Node])
    # Forward only: what it returns, as it is when the caller's work begins.
    returned: list[Any] = field(default_factory=list[Any])
    # Backward only: gradients that leave before it ends, by their positions, and the
    # pieces in which they do.
    handed_over: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    pieces: list[Piece] = field(default_factory=list[Piece])
    handed_over_after: list[str] = field(default_factory=list[str])

    def add_inputs(self) -> None:
        for node in self.program.module.graph.find_nodes(op="placeholder"):
            if is_tangent(node):
                continue
            copy = self.graph.node_copy(node)
            if is_without_bytes(symbolic_value(node)):
                self.numbers[node] = copy
            else:
                (storage,) = self.program.storages_of[node]
                self.live[storage, 0] = copy

    def add_tangents(self) -> None:
        for node in self.program.module.graph.find_nodes(op="placeholder"):
            if not is_tangent(node):
                continue
            copy = self.graph.node_copy(node)
            self.tangents.append(copy)
            if is_without_bytes(symbolic_value(node)):
                self.numbers[node] = copy
            else:
                (storage,) = self.program.storages_of[node]
                self.live[storage, 0] = copy

    def emit(self) -> None:
        """Emit the instructions of the issue order."""
        for instruction in self.order.instructions:
            match instruction:
                case Allocate():
                    self.allocate(instruction)
                case Run():
                    step = self.steps[instruction.step]
                    if isinstance(step, Compute):
                        self.mark(step.device)
                        self.compute(instruction, step)
                    elif isinstance(step, Copy):
                        self.copy(instruction, step)
                case Free():
                    self.free(instruction)
                case HandOver():
                    self.hold_copied(instruction)
                case Record():
                    self.events[instruction.event] = self.graph.call_function(
                        record_event, (self.key(instruction.queue),)
                    )
                case Wait():
                    event = self.events[instruction.event]
                    self.graph.call_function(
                        wait_event, (self.key(instruction.queue), event)
                    )
        self.mark(0)

    def key(self, queue: int) -> tuple[str, ...]:
        """Return what the graph calls a queue."""
        devices = self.order.queues[queue]
        places = tuple(self.torch_places[device] for device in devices)
        if len(devices) < 2:
            return places
        return (*places, *(device_names(self.program)[device] for device in devices))

    def mark(self, device: int) -> None:
        """Emit a note that what follows is on ``device``, where that is news."""
        if device != self.marked:
            self.graph.call_function(mark_device, (device,))
            self.marked = device

    def allocate(self, instruction: Allocate) -> None:
        """Emit the allocation of what a copy fills; operators make their own."""
        step = self.steps[instruction.step]
        if not isinstance(step, Copy):
            return
        self.mark(step.target)
        source, target = (self.torch_places[d] for d in (step.source, step.target))
        value = self.value((step.storage, step.source))
        name = device_names(self.program)[step.target]
        self.fresh[instruction.block] = self.graph.call_function(
            new_block, (value, source, target, name)
        )

    def free(self, instruction: Free) -> None:
        """Emit that a block is given up, which holds it until then."""
        block = self.order.blocks[instruction.block]
        place = block.storage, block.device
        if self.block_at.get(place, instruction.block) == instruction.block:
            value = self.live.pop(place, None)
            self.discarded.add(place)
        else:
            value = self.replaced.pop(place, None)
        if value is not None and self.program.platform is not None:
            self.graph.call_function(release, (value,))

    def hold_copied(self, instruction: HandOver) -> None:
        """Emit that blocks are held until here which copies beside the host touched."""
        blocks = [self.order.blocks[block] for block in instruction.blocks]
        places = self.copied & {(block.storage, block.device) for block in blocks}
        # What is not there is a constant of the module.
        values = [self.live[place] for place in sorted(places) if place in self.live]
        if values:
            self.graph.call_function(release, tuple(values))

    def compute(self, instruction: Run, step: Compute) -> None:
        """Emit one run of an op."""
        op, device = step.op, step.device
        for block in instruction.writes:
            self.note_block(block)
        node = self.program.op_nodes[op]
        writes = self.program.graph.ops[op].writes
        dying = dying_at_once(self.steps, instruction.step, device)
        if node is None:
            if self.program.graph.ops[op].is_external and not self.tangents:
                # The caller takes them over, and may let them go before others.
                values = self.program.forward_values
                self.returned = [self.resolve_output(value) for value in values]
            self.hand_over(self.program.piece_ops.get(op, ()))
            self.note_random_state(writes, device, dying)
            return
        state = self.program.random_states.get(op)
        if state is not None and op in self.already_run:
            new = self.replay_random(node, self.value((state, device)), device)
        else:
            over = set(instruction.reads) & set(instruction.writes)
            storages = {self.order.blocks[block].storage for block in over}
            new = self.run(node, storages, device)
        self.already_run.add(op)
        for storage in writes:
            place = storage, device
            if storage in dying:
                self.live.pop(place, None)
                continue
            self.version[place] = self.version.get(place, 0) + 1
            bases = bases_of(self.program, storage)
            if bases:  # Without one, no node of the joint graph uses this output.
                self.live[place] = (
                    new
                    if bases[0] is node
                    else self.graph.node_copy(bases[0], lambda _: new)
                )

    def hand_over(self, piece: Piece) -> None:
        """Take gradients as they are now: the caller gets them here."""
        if piece:
            self.pieces.append(piece)
            self.handed_over_after.append(next(iter(reversed(self.graph.nodes))).name)
        for position in piece:
            value = self.program.backward_values[position]
            self.handed_over[position] = self.resolve_output(value)

    def run(self, node: fx.Node, free: set[int], device: int) -> fx.Node:
        """Emit a copy of ``node`` on the values that are live on ``device`` now."""
        target = node.target
        args = map_nodes(needed_arguments(node), lambda n: self.resolve(n, device))
        kwargs = map_nodes(dict(node.kwargs), lambda n: self.resolve(n, device))
        found = overwritable_argument(self.program, node, free)
        if found is not None:
            variant, position = found
            target = variant.target
            if variant.keyword is not None:
                kwargs[variant.keyword] = args[position]
        if self.is_elsewhere(device):
            kwargs = self.made_on(kwargs, device)
        if is_collective(target):
            target, args = exchange, cast("tuple[Any, ...]", (target, *args))
        new = self.graph.create_node(node.op, target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        return new

    def is_elsewhere(self, device: int) -> bool:
        """Whether a device has another memory than the step's own."""
        return self.torch_places[device] != self.torch_places[0]

    def made_on(self, kwargs: dict[str, Any], device: int) -> dict[str, Any]:
        """Return arguments with the op's device in place of the step's own."""
        here = torch.device(self.torch_places[device])
        return {
            name: here
            if isinstance(value, torch.device) and value.type == self.home_type
            else value
            for name, value in kwargs.items()
        }

    @property
    def home_type(self) -> str:
        """The type of the step's own device."""
        return self.program.device.type

    def note_block(self, block: int) -> None:
        """Note that a step fills a block; what was there before has one of its own."""
        made = self.order.blocks[block]
        place = made.storage, made.device
        if self.block_at.get(place) != block and place in self.live:
            self.replaced[place] = self.live[place]
        self.block_at[place] = block

    def copy(self, instruction: Run, step: Copy) -> None:
        """Emit a copy of a storage's bytes to another device."""
        source, target = (step.storage, step.source), (step.storage, step.target)
        (block,) = instruction.writes
        value = self.value(source)
        if instruction.queue != HOST:
            self.copied |= {source, target}
        self.note_block(block)
        fresh = self.fresh.pop(block)
        if any(map(is_host_seed, bases_of(self.program, step.storage))):
            new = value  # Wherever the plan has it.
        else:
            new = self.graph.call_function(
                copy_bytes, (self.key(instruction.queue), value, fresh)
            )
            new.meta = self.meta_of(step.storage, step.target)
        self.live[target] = new
        self.version[target] = self.version.get(target, 0) + 1
        self.discarded.discard(target)

    def meta_of(self, storage: int, device: int) -> dict[str, Any]:
        """Return what is known of the tensor that a storage has on a device."""
        bases = bases_of(self.program, storage)
        if not bases:
            return {}
        meta = dict(bases[0].meta)
        value = meta.get("val")
        if isinstance(value, torch.Tensor) and self.is_elsewhere(device):
            with value.fake_mode:  # type: ignore[attr-defined]
                meta["val"] = torch.empty_strided(
                    value.shape,
                    value.stride(),
                    dtype=value.dtype,
                    device=self.torch_places[device],
                )
        return meta

    def note_random_state(
        self, writes: tuple[int, ...], device: int, dying: frozenset[int]
    ) -> None:
        for storage in writes:
            if storage in self.replayed and storage not in dying:
                self.live[storage, device] = self.graph.call_function(
                    note_random_state, (self.program.device.type,)
                )

    def replay_random(self, node: fx.Node, state: fx.Node, device: int) -> fx.Node:
        args = map_nodes(tuple(node.args), lambda n: self.resolve(n, device))
        kwargs = map_nodes(dict(node.kwargs), lambda n: self.resolve(n, device))
        first: Any = (node.target, self.program.device.type, state)
        new = self.graph.call_function(replay, (*first, *args), kwargs)
        new.meta = dict(node.meta)
        return new

    def value(self, place: Place) -> fx.Node:
        """Return the emitted node that holds a storage on a device now."""
        found = self.live.get(place)
        if found is not None:
            return found
        storage, device = place
        constant = self.constant_of(storage) if device == 0 else None
        if constant is not None:
            return self.constant(constant)
        if not self.tangents or place in self.discarded or place in self.version:
            name = self.program.graph.storages[storage].name
            where = f" on device {device}" if device else ""
            msg = f"storage {storage} {name!r} is used while it is not live{where}"
            raise ExecutionError(msg)
        return self.take_from_forward(place)

    def constant_of(self, storage: int) -> fx.Node | None:
        """Return the node that gets a constant of the module, if the storage is one."""
        bases = bases_of(self.program, storage)
        return bases[0] if bases and bases[0].op == "get_attr" else None

    def constant(self, node: fx.Node) -> fx.Node:
        """Return the emitted node of a constant of the module."""
        if node not in self.constants:
            self.constants[node] = self.graph.node_copy(node)
        return self.constants[node]

    def take_from_forward(self, place: Place) -> fx.Node:
        """Add an input of backward for a storage that is live at the boundary."""
        storage, device = place
        bases = bases_of(self.program, storage)
        with self.graph.inserting_before(self.tangents[0]):
            name = saved_name(storage) + (f"_on_{device}" if device else "")
            node = self.graph.placeholder(name)
        if bases:
            node.meta = self.meta_of(storage, device)
            if device == 0 and bases[0] in self.program.unchecked_inputs:
                leave_unchecked(node)
        else:  # The state of a random generator.
            size_bytes = self.program.graph.storages[storage].size_bytes
            with symbolic_value(self.tangents[0]).fake_mode:
                node.meta["val"] = torch.empty(
                    size_bytes, dtype=torch.uint8, device="cpu"
                )
        self.saved[place] = node
        self.live[place] = node
        return node

    def order_saved(self) -> list[Place]:
        """Put version-checked saved values first, as autograd's wrapper expects."""

        def unchecked(place: Place) -> bool:
            return is_unchecked(self.saved[place])

        ordered = sorted(self.saved, key=unchecked)
        for node in self.saved_sizes:
            self.tangents[0].prepend(self.numbers[node])
        for place in ordered:
            self.tangents[0].prepend(self.saved[place])
        for node in self.saved_meshes:
            self.tangents[0].prepend(self.numbers[node])
        return ordered

    def number(self, node: fx.Node) -> fx.Node:
        """Return the emitted node of what takes no memory."""
        if node not in self.numbers:
            if node.op == "placeholder":
                with self.graph.inserting_before(self.tangents[0]):
                    self.numbers[node] = self.graph.node_copy(node)
                is_size = is_symbol(symbolic_value(node))
                saved = self.saved_sizes if is_size else self.saved_meshes
                saved.append(node)
            else:
                self.numbers[node] = self.graph.node_copy(node, self.number)
        return self.numbers[node]

    def saved_value(self, place: Place) -> fx.Node:
        node = self.live.get(place)
        storage, device = place
        if node is None:
            name = self.program.graph.storages[storage].name
            msg = f"backward reads storage {storage} {name!r}, which forward freed"
            raise ExecutionError(msg)
        bases = bases_of(self.program, storage)
        if device == 0 and bases and bases[0] in self.program.unchecked_inputs:
            leave_unchecked(node)
        return node

    def resolve(self, node: fx.Node, device: int) -> Any:
        """Return the emitted node with the value of ``node`` of the joint graph."""
        if is_without_bytes(symbolic_value(node)):
            return self.number(node)
        storages = self.program.storages_of[node]
        if len(storages) == 1 and node in self.program.base_nodes[storages[0]]:
            return self.value(self.readable(storages[0], device))
        places = [self.readable(storage, device) for storage in storages]
        versions = tuple(self.version_of(place) for place in places)
        known = self.views.get((node, device))
        if known is not None and known[0] == versions:
            return known[1]
        new = self.graph.node_copy(node, lambda n: self.resolve(n, device))
        self.views[node, device] = (versions, new)
        return new

    def readable(self, storage: int, device: int) -> Place:
        """Return where an op on ``device`` finds a storage.

        That is the device itself, except for an input whose value is moot: logical
        devices of one memory then take it where it is.
        """
        here = storage, device
        is_input = self.program.graph.storages[storage].is_resident
        if device == 0 or not is_input or self.is_elsewhere(device):
            return here
        is_copied = here in self.live or (
            here in self.at_boundary and here not in self.discarded
        )
        return here if is_copied else (storage, 0)

    def version_of(self, place: Place) -> int:
        self.value(place)
        return self.version.get(place, 0)

    def parameters(self) -> dict[int, tuple[str, ...]]:
        """Return, per position of a gradient, the inputs in the memory it is of.

        As far as the pass reads them.
        """
        inputs = self.program.module.graph.find_nodes(op="placeholder")
        found: dict[int, tuple[str, ...]] = {}
        for position, (value, node) in enumerate(
            zip(self.program.backward_values, inputs, strict=False)
        ):
            own = self.program.storages_of[node]
            others = (s for each in own for s in self.program.shared.get(each, ()))
            saved = (self.saved.get((storage, 0)) for storage in (*own, *others))
            if isinstance(value, fx.Node):
                found[position] = tuple(each.name for each in saved if each is not None)
        return found

    def resolve_output(self, value: Any) -> Any:
        return self.resolve(value, 0) if isinstance(value, fx.Node) else value
