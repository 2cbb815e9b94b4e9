"""Passes in flight: one pass beside a block is what all of them are, one by one."""

from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import graphs, schedules

from remat.core.graph import Op, Phase, Role, Storage, TrainingGraph
from remat.core.in_flight import (
    others_bytes,
    saved_bytes,
    with_others,
    with_passes,
)
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.schedule import Boundary, Compute, Discard, Schedule
from remat.core.simulator import simulate

SMALL = st.integers(0, 9)
OWN = (Role.OUTPUT, Role.INPUT_GRADIENT)


def with_roles(graph: TrainingGraph, roles: list[Role]) -> TrainingGraph:
    """Return the graph with other roles, repeated from the beginning."""
    storages = [
        replace(storage, role=role)
        for storage, role in zip(graph.storages, cycle(roles), strict=False)
    ]
    return replace(graph, storages=tuple(storages))


class Passes:
    """A graph in which each of some passes has blocks and ops of its own.

    All forward passes run first, then the backward passes in the same order. What the
    first leaves at its end stays, as gradients do that others are added to; of the
    others, their outputs and the gradients of their inputs stay. The optimizer steps
    after all of them.
    """

    def __init__(self, graph: TrainingGraph, count: int) -> None:
        self.one, self.count = graph, count
        self.storages = list(graph.storages)
        self.blocks = [list(range(len(graph.storages)))]
        for _ in range(count - 1):
            mapped: list[int] = []
            for number, storage in enumerate(graph.storages):
                if storage.is_resident:
                    mapped.append(number)
                    continue
                self.storages.append(storage)
                mapped.append(len(self.storages) - 1)
            self.blocks.append(mapped)
        self.ops: list[Op] = []
        self.numbers: list[dict[int, int]] = [{} for _ in range(count)]
        self.arrivals: dict[int, int] = {}
        self.ends: list[int] = []
        for phase in Phase:
            for index in range(count):
                self.add_pass(index, phase)
        # What it reads of the first pass has the gradients of all.
        self.optimizer = [
            self.add(replace(op, is_external=False))
            for op in graph.ops
            if self.is_optimizer(op)
        ]
        first = self.blocks[0]
        self.graph = TrainingGraph(
            name="passes",
            storages=tuple(self.storages),
            ops=tuple(self.ops),
            forward_outputs=tuple(
                dict.fromkeys(b[s] for b in self.blocks for s in graph.forward_outputs)
            ),
            tangents=tuple(first[storage] for storage in graph.tangents),
            final_outputs=tuple(
                dict.fromkeys(
                    blocks[storage]
                    for index, blocks in enumerate(self.blocks)
                    for storage in self.kept(index)
                )
            ),
        )

    def kept(self, index: int) -> list[int]:
        """Return what of a pass stays."""
        roles = {s: self.one.storages[s].role for s in self.one.final_outputs}
        return [s for s, role in roles.items() if not index or role in OWN]

    def add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def add_pass(self, index: int, phase: Phase) -> None:
        blocks = self.blocks[index]
        if phase is Phase.BACKWARD and index:
            # Its gradients come when it begins.
            tangents = tuple(blocks[storage] for storage in self.one.tangents)
            self.arrivals[index] = self.add(self.between((), tangents))
        for number, op in enumerate(self.one.ops):
            if op.phase is phase and not self.is_optimizer(op):
                reads = tuple(blocks[storage] for storage in op.reads)
                writes = tuple(blocks[storage] for storage in op.writes)
                copy = replace(op, reads=reads, writes=writes, is_external=False)
                self.numbers[index][number] = self.add(copy)
        if phase is Phase.BACKWARD:
            final = dict.fromkeys(blocks[s] for s in self.one.final_outputs)
            self.ends.append(self.add(self.between(tuple(final), ())))

    def is_optimizer(self, op: Op) -> bool:
        return op.is_external and op.phase is Phase.BACKWARD

    def between(self, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
        return Op(
            name="between passes",
            reads=reads,
            writes=writes,
            cost_ns=(0,),
            workspace_bytes=(0,),
            phase=Phase.BACKWARD,
            non_recomputable="it is done by the caller",
        )

    def schedule(self, one: Schedule) -> Schedule:
        """Return how all run as one does."""
        turn = one.steps.index(Boundary())
        steps: list[Compute | Discard | Boundary] = []
        for index in range(self.count):
            steps += self.steps_of(index, one.steps[:turn])
        steps.append(Boundary())
        for index in range(self.count):
            if index:
                steps.append(Compute(self.arrivals[index]))
            backward = one.steps[turn + 1 :]
            end = next(
                (
                    position
                    for position, step in enumerate(backward)
                    if isinstance(step, Compute)
                    and self.is_optimizer(self.one.ops[step.op])
                ),
                len(backward),
            )
            steps += self.steps_of(index, backward[:end])
            steps.append(Compute(self.ends[index]))
            blocks, kept = self.blocks[index], self.kept(index)
            added = [
                storage
                for storage in self.one.final_outputs
                if storage not in kept and not self.one.storages[storage].is_resident
            ]
            steps += [Discard(blocks[storage]) for storage in added]
            if index == self.count - 1:
                steps += map(Compute, self.optimizer)
            steps += [
                step
                for step in self.steps_of(index, backward[end:])
                if isinstance(step, Discard)
            ]
            steps += [
                Discard(blocks[storage])
                for storage in self.live_at_end(one)
                if storage not in kept and storage not in added
            ]
        return Schedule(tuple(steps))

    def live_at_end(self, one: Schedule) -> list[int]:
        live: dict[int, None] = {}
        for step in one.steps:
            if isinstance(step, Boundary):
                live.update(dict.fromkeys(self.one.tangents))
            elif isinstance(step, Compute):
                live.update(dict.fromkeys(self.one.ops[step.op].writes))
            elif isinstance(step, Discard):
                live.pop(step.storage, None)
        return list(live)

    def steps_of(
        self, index: int, steps: tuple[object, ...]
    ) -> list[Compute | Discard]:
        found: list[Compute | Discard] = []
        for step in steps:
            if isinstance(step, Compute):
                if not self.is_optimizer(self.one.ops[step.op]):
                    found.append(Compute(self.numbers[index][step.op]))
            elif isinstance(step, Discard):
                found.append(Discard(self.blocks[index][step.storage]))
        return found


@given(
    drawn=st.builds(
        with_roles,
        graphs(sizes=SMALL),
        st.lists(st.sampled_from([*OWN, Role.GRADIENT]), min_size=1, max_size=7),
    ).flatmap(
        lambda graph: st.tuples(st.just(graph), schedules(graph, single_device()))
    ),
    count=st.integers(1, 4),
)
def test_one_pass_beside_what_others_saved_is_what_all_passes_are(
    drawn: tuple[TrainingGraph, Schedule], count: int
) -> None:
    graph, schedule = drawn
    passes = Passes(graph, count)
    found = simulate(passes.graph, single_device(), passes.schedule(schedule))
    assert found.violation is None
    together = with_passes(graph, schedule, count)
    one = simulate(together, single_device(), schedule)
    assert one.violation is None
    alone = simulate(graph, single_device(), schedule)
    # While forward passes run, nothing is left behind yet.
    saved = (count - 1) * saved_bytes(graph, schedule, alone)
    turn = schedule.steps.index(Boundary())
    forward = [
        size - others_bytes(together) + saved for size in one.timeline_bytes[0][:turn]
    ]
    expected = max([*forward, *one.timeline_bytes[0][turn:]])
    assert found.peak_bytes[0] == expected


@pytest.mark.parametrize(
    ("before", "before_bytes", "counted_bytes"),
    [
        *((Role.GRADIENT, n, k) for n, k in ((0, 60), (30, 50), (70, 10), (80, 5))),
        (Role.GRADIENT, 81, 60),
        (Role.BUCKET, 80, 60),
    ],
)
def test_gradients_that_are_added_to_others_take_no_more(
    before: Role, before_bytes: int, counted_bytes: int
) -> None:
    # Of parameters of 80 bytes all but 20 get a gradient; each pass saves 5 bytes.
    roles = Role.PARAMETER, before, Role.ACTIVATION, Role.GRADIENT
    sizes = 80, before_bytes, 5, 60
    storages = tuple(
        Storage(name=role, size_bytes=size, role=role, is_resident=number < 2)
        for number, (role, size) in enumerate(zip(roles, sizes, strict=True))
    )
    ops = tuple(
        Op(
            name=phase,
            reads=reads,
            writes=writes,
            cost_ns=(1,),
            workspace_bytes=(0,),
            phase=phase,
        )
        for phase, reads, writes in (
            (Phase.FORWARD, (0,), (2,)),
            (Phase.BACKWARD, (0, 2), (3,)),
        )
    )
    graph = TrainingGraph(name="linear", storages=storages, ops=ops, final_outputs=(3,))
    schedule = schedule_from_order(graph, store_all_order(graph))
    assert others_bytes(with_passes(graph, schedule, 2)) == counted_bytes


def test_bytes_of_others_are_one_block() -> None:
    graph = TrainingGraph(
        name="one op",
        storages=(),
        ops=(
            Op(
                name="op",
                reads=(),
                writes=(),
                cost_ns=(1,),
                workspace_bytes=(3,),
                phase=Phase.FORWARD,
            ),
        ),
    )
    assert others_bytes(graph) == 0
    twice = with_others(with_others(graph, 5, 2), 7, 2)
    assert others_bytes(twice) == 7
    assert len(twice.storages) == 1
    schedule = schedule_from_order(graph, [0])
    assert simulate(twice, single_device(), schedule).peak_bytes == (10,)
