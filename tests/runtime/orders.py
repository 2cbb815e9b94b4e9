"""Random plans of several queues, what can be taken out of them, and two oracles.

The oracles share nothing with the vector clocks: one closes the relation "comes after"
over all instructions, the other runs the queues in every way in which they can run.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from tests.device_schedules import scattered

from remat.core.device_graph import arrange, fully_linked
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.issue_order import (
    HOST,
    Free,
    Instruction,
    IssueOrder,
    Record,
    Wait,
    accesses,
)
from remat.core.platform import Device, Platform
from remat.core.schedule import Schedule
from remat.runtime.issuing import issue_orders

NAMES = ("cpu", "cpu:1", "host")


def random_graph(chance: random.Random, device_count: int, op_count: int) -> TrainingGraph:
    """Return a graph that runs anywhere, with parameters, tangents and gradients."""
    forward_count = op_count // 2
    storages = [
        Storage(name=f"weight{i}", size_bytes=chance.randrange(1, 9), is_resident=True)
        for i in range(2)
    ]
    ops: list[Op] = []
    tangent = -1
    for number in range(op_count):
        if number == forward_count:
            tangent = len(storages)
            storages.append(Storage(name="tangent", size_bytes=4))
        first = [tangent] if number == forward_count else []
        few = chance.sample(range(len(storages)), min(len(storages), chance.randrange(1, 4)))
        reads = tuple(dict.fromkeys([*first, *few]))
        writes = tuple(range(len(storages), len(storages) + chance.choice((1, 1, 2))))
        storages += [
            Storage(name=f"value{i}", size_bytes=chance.randrange(1, 9)) for i in writes
        ]
        ops.append(
            Op(
                name=f"op{number}",
                reads=reads,
                writes=writes,
                cost_ns=(5,) * device_count,
                workspace_bytes=(0,) * device_count,
                phase=Phase.FORWARD if number < forward_count else Phase.BACKWARD,
            )
        )
    return TrainingGraph(
        name="random",
        storages=tuple(storages),
        ops=tuple(ops),
        device_kinds=tuple(f"kind{d}" for d in range(device_count)),
        forward_outputs=(ops[forward_count - 1].writes[0],),
        tangents=(tangent,),
        final_outputs=(ops[-1].writes[0],),
    )


def random_case(
    seed: int, op_count: int = 8
) -> tuple[TrainingGraph, Schedule, tuple[bool, ...]]:
    """Return a graph, a valid schedule of it, and which devices are the host's."""
    chance = random.Random(seed)
    count = chance.choice((2, 2, 3))
    graph = random_graph(chance, count, op_count)
    names = [f"device{d}" for d in range(count)]
    platform = Platform(
        devices=tuple(Device(name=n, kind=f"kind{d}") for d, n in enumerate(names)),
        links=fully_linked(tuple(names), 10**9, 10),
        copies_wait=True,
    )
    # Ops run again: what is nowhere any more, or just so.
    schedule = scattered(graph, platform, seed, eviction_share=0.6)
    return graph, schedule, tuple(chance.random() < 0.5 for _ in names)
