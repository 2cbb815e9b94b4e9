"""Hypothesis strategies: graphs, platforms, schedules that work, schedules that don't.

Schedules are made by :func:`schedules`, which plays a training step with random
detours, and :func:`mutated`, which damages one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import assume, reject
from hypothesis import strategies as st

from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import insert_discards
from remat.core.platform import Device, Link, Platform
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.testing.device_oracles import SearchTooLargeError, best_on_devices

KINDS = ("cpu", "gpu")

# Zeros, near ties, and one block larger than all the others together.
sizes_bytes = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 7, 2**40]))
costs_ns = st.one_of(st.integers(0, 9), st.sampled_from([0, 100, 10**12]))


@st.composite
def graphs(
    draw: st.DrawFn,
    *,
    max_ops: int = 7,
    kind_count: int = 1,
    device_count: int = 1,
    sizes: st.SearchStrategy[int] = sizes_bytes,
    holds_outputs: bool = False,
) -> TrainingGraph:
    """Training graphs of 1 to ``max_ops`` ops that some order of steps can train.

    To those come, in some graphs, a loss and an optimizer step of the caller's. With
    ``holds_outputs`` the caller holds all forward outputs and tangents.
    """
    storages: list[Storage] = []

    def add(name: str, *, is_resident: bool = False) -> int:
        storage = Storage(
            name=f"{name}{len(storages)}",
            size_bytes=draw(sizes),
            is_resident=is_resident,
            home=draw(st.integers(0, device_count - 1)),
        )
        storages.append(storage)
        return len(storages) - 1

    def some_of(indices: Sequence[int], most: int) -> tuple[int, ...]:
        if not indices:
            return ()
        chosen = st.lists(st.sampled_from(indices), max_size=most, unique=True)
        return tuple(draw(chosen))

    available = [
        add("resident", is_resident=True) for _ in range(draw(st.integers(0, 2)))
    ]
    op_count = draw(st.integers(1, max_ops))
    forward_count = draw(st.integers(0, op_count))
    ops: list[Op] = []
    forward_outputs: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()

    def callers(name: str, phase: Phase, reads: tuple[int, ...]) -> Op:
        return Op(
            name=name,
            reads=reads,
            writes=(),
            cost_ns=(draw(costs_ns),) * kind_count,
            workspace_bytes=tuple(draw(sizes) for _ in range(kind_count)),
            phase=phase,
            non_recomputable="it is done by the caller",
            is_external=True,
        )

    has_caller = device_count == 1 and draw(st.booleans())
    for index in range(op_count + 1):
        if index == forward_count:
            forward_outputs = some_of(available, 2)
            if has_caller:
                ops.append(callers("loss", Phase.FORWARD, forward_outputs))
            tangents = tuple(add("tangent") for _ in range(draw(st.integers(0, 2))))
            available += tangents
        if index == op_count:
            break
        reads = some_of(available, 3)
        writes = tuple(add("value") for _ in range(draw(st.sampled_from([1, 1, 2, 0]))))
        costs: list[int | None] = [draw(costs_ns) for _ in range(kind_count)]
        if kind_count > 1 and draw(st.integers(0, 4)) == 0:
            costs[draw(st.integers(0, kind_count - 1))] = None
        ops.append(
            Op(
                name=f"op{index}",
                reads=reads,
                writes=writes,
                cost_ns=tuple(costs),
                workspace_bytes=tuple(draw(sizes) for _ in range(kind_count)),
                phase=Phase.FORWARD if index < forward_count else Phase.BACKWARD,
                non_recomputable=draw(
                    st.sampled_from([None, None, None, "it may not"])
                ),
                is_ordered=draw(st.integers(0, 4)) == 0,
            )
        )
        available += writes
    final_outputs = some_of(available, 3)
    if holds_outputs:
        final_outputs = tuple({*forward_outputs, *tangents, *final_outputs})
    held = {*forward_outputs}.intersection(final_outputs)
    ops = [
        replace(op, non_recomputable="its output is held")
        if held.intersection(op.writes)
        else op
        for op in ops
    ]
    if has_caller:
        ops.append(callers("optimizer", Phase.BACKWARD, final_outputs))
    return TrainingGraph(
        name="drawn",
        storages=tuple(storages),
        ops=tuple(ops),
        forward_outputs=forward_outputs,
        tangents=tangents,
        final_outputs=final_outputs,
        device_kinds=KINDS[:kind_count],
    )


@st.composite
def platforms(
    draw: st.DrawFn, *, device_count: int = 1, kind_count: int = 1
) -> Platform:
    """Platforms with and without budgets, most pairs of devices joined."""
    pairs = [
        (source, target)
        for source in range(device_count)
        for target in range(device_count)
        if source != target
    ]
    budgets = st.one_of(st.none(), st.none(), st.integers(1, 80), st.just(2**41))
    return Platform(
        devices=tuple(
            Device(
                name=f"device{index}",
                kind=draw(st.sampled_from(KINDS[:kind_count])),
                budget_bytes=draw(budgets),
            )
            for index in range(device_count)
        ),
        links=tuple(
            Link(
                source=source,
                target=target,
                bytes_per_s=draw(st.sampled_from([1, 10**9, 3 * 10**8, 10**12])),
                latency_ns=draw(st.sampled_from([0, 0, 5])),
            )
            for source, target in pairs
            if draw(st.integers(0, 7)) > 0
        ),
    )


def without_budgets(platform: Platform) -> Platform:
    """The same devices and links, with no limit on memory."""
    devices = tuple(replace(d, budget_bytes=None) for d in platform.devices)
    return Platform(devices=devices, links=platform.links)


@dataclass
class Player:
    """Plays a training step: keeps what is live, and brings back what is missing."""

    draw: st.DrawFn
    graph: TrainingGraph
    platform: Platform
    live: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    run: set[int] = field(default_factory=set[int])
    steps: list[Step] = field(default_factory=list[Step])

    def is_live(self, storage: int, device: int) -> bool:
        block = self.graph.storages[storage]
        is_home = block.is_resident and block.home == device
        return is_home or (storage, device) in self.live

    def devices_for(self, op: Op) -> list[int]:
        return [
            index
            for index, device in enumerate(self.platform.devices)
            if op.cost_ns[self.graph.kind_index(device.kind)] is not None
        ]

    def bring(self, storage: int, device: int) -> None:
        """Make ``storage`` live on ``device``, or give the example up."""
        if self.is_live(storage, device):
            return
        producer = self.graph.producers[storage]
        sources = [
            index
            for index in range(len(self.platform.devices))
            if self.is_live(storage, index) and self.platform.link(index, device)
        ]
        may_run = producer is not None and (
            producer not in self.run or self.graph.ops[producer].is_recomputable
        )
        if sources and (not may_run or self.draw(st.booleans())):
            source = self.draw(st.sampled_from(sources))
            self.steps.append(Copy(storage, source, device))
            self.live.add((storage, device))
            return
        assume(may_run)
        assert producer is not None
        places = self.devices_for(self.graph.ops[producer])
        here = device in places
        place = device if here else self.draw(st.sampled_from(places or [device]))
        self.compute(producer, place)
        if not here:
            assume(self.platform.link(place, device) is not None)
            self.bring(storage, device)

    def compute(self, index: int, device: int) -> None:
        op = self.graph.ops[index]
        for storage in op.reads:
            self.bring(storage, device)
        # Bringing one input may have cost another its place: no, nothing is discarded
        # while inputs are gathered.
        self.steps.append(Compute(index, device))
        self.run.add(index)
        self.live.update((storage, device) for storage in op.writes)

    def forget_some(self) -> None:
        losable = sorted(self.live)
        for key in losable:
            storage, device = key
            is_held = (
                Boundary() in self.steps
                and storage in self.graph.held_outputs
                and device == self.graph.storages[storage].home
            )
            if not is_held and self.draw(st.integers(0, 3)) == 0:
                self.steps.append(Discard(*key))
                self.live.discard(key)

    def play(self) -> None:
        graph = self.graph
        for index in range(len(graph.ops) + 1):
            if index == graph.forward_count:
                for storage in graph.forward_outputs:
                    self.bring(storage, graph.storages[storage].home)
                self.steps.append(Boundary())
                self.live.update((s, graph.storages[s].home) for s in graph.tangents)
            if index == len(graph.ops):
                break
            op = graph.ops[index]
            # Dead code may be left out, and what a detour has run need not run again.
            wanted = index not in self.run and (
                op.is_ordered or not op.writes or self.draw(st.integers(0, 7)) > 0
            )
            if op.is_external:
                # Where what leaves with the pass is at home: nothing comes after it.
                self.compute(index, 0)
                continue
            if wanted:
                self.compute(index, self.draw(st.sampled_from(self.devices_for(op))))
            if self.draw(st.integers(0, 2)) == 0:
                self.forget_some()
        for storage in graph.final_outputs:
            self.bring(storage, graph.storages[storage].home)


@st.composite
def schedules(draw: st.DrawFn, graph: TrainingGraph, platform: Platform) -> Schedule:
    """Schedules that break no rule but perhaps a budget."""
    player = Player(draw, graph, platform)
    assume(all(player.devices_for(op) for op in graph.ops))
    player.play()
    schedule = Schedule(tuple(player.steps))
    return insert_discards(graph, schedule.steps) if draw(st.booleans()) else schedule


@st.composite
def steps(draw: st.DrawFn, graph: TrainingGraph, platform: Platform) -> Step:
    """Any step at all, now and then about something that does not exist."""

    def index(length: int) -> int:
        return draw(
            st.one_of(st.integers(0, max(length - 1, 0)), st.integers(-1, length))
        )

    op, storage = index(len(graph.ops)), index(len(graph.storages))
    device, other = index(len(platform.devices)), index(len(platform.devices))
    return draw(
        st.sampled_from(
            [
                Compute(op, device),
                Discard(storage, device),
                Copy(storage, device, other),
                Boundary(),
            ]
        )
    )


@st.composite
def mutated(
    draw: st.DrawFn, graph: TrainingGraph, platform: Platform, schedule: Schedule
) -> Schedule:
    """``schedule`` with one to three faults: steps lost, moved, doubled, changed."""
    changed = list(schedule.steps)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(changed) - 1, 0)))
        to = draw(st.integers(0, max(len(changed) - 1, 0)))
        action = draw(
            st.sampled_from(["insert", "drop", "swap", "move", "double", "change"])
        )
        if action == "insert" or not changed:
            changed.insert(at, draw(steps(graph, platform)))
        elif action == "drop":
            del changed[at]
        elif action == "swap":
            changed[at], changed[to] = changed[to], changed[at]
        elif action == "move":
            changed.insert(to, changed.pop(at))
        elif action == "double":
            changed.insert(to, changed[at])
        else:
            changed[at] = draw(steps(graph, platform))
    return Schedule(tuple(changed))


@dataclass(frozen=True)
class Case:
    """A graph, where it is trained, and a schedule for it."""

    graph: TrainingGraph
    platform: Platform
    schedule: Schedule


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_devices: int = 3,
    is_mutated: bool | None = None,
    holds_outputs: bool = False,
) -> Case:
    """Cases of one to ``max_devices`` devices, damaged or not (``None``: either)."""
    device_count = draw(st.integers(1, max_devices))
    kind_count = draw(st.integers(1, len(KINDS)))
    graph = draw(
        graphs(
            kind_count=kind_count,
            device_count=device_count,
            holds_outputs=holds_outputs,
        )
    )
    platform = draw(platforms(device_count=device_count, kind_count=kind_count))
    schedule = draw(schedules(graph, platform))
    if is_mutated or (is_mutated is None and draw(st.booleans())):
        schedule = draw(mutated(graph, platform, schedule))
    return Case(graph, platform, schedule)


def optimum(
    graph: TrainingGraph, platform: Platform, *, is_staged: bool = False
) -> tuple[int, Schedule] | None:
    """Return the optimum of what was drawn; draw again if it takes too long to find."""
    try:
        return best_on_devices(graph, platform, is_staged=is_staged, most_places=20_000)
    except SearchTooLargeError:
        reject()
