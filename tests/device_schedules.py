"""Platforms of logical devices, and valid schedules on them made by chance."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from remat.capture.joint_program import JointProgram
from remat.device_graph import arrange, fully_linked, with_columns
from remat.device_graph import CostColumn as Column
from remat.device_planning import held_outputs
from remat.fitting import FittedModel
from remat.graph import TrainingGraph
from remat.liveness import BOUNDARY, insert_discards, store_all_order
from remat.plan_request import PlanRequest
from remat.platform import Device, DeviceKind, Platform
from remat.schedule import Boundary, Compute, Copy, Schedule, Step
from remat.simulator import simulate
from tests.modules import Case

SLOW = DeviceKind(name="slow", runs_on="cpu", time_percent=300)


def logical(
    *names: str, budgets_bytes: Sequence[int | None] | None = None, speed: int = 10**10
) -> Platform:
    """Return logical devices of the CPU with equal links; ``host...`` only store."""
    budgets = budgets_bytes or [None] * len(names)
    devices = tuple(
        Device(name=name, kind=name.rstrip("0123456789:"), budget_bytes=budget)
        for name, budget in zip(names, budgets, strict=True)
    )
    return Platform(
        devices=devices, links=fully_linked(names, speed, 1000), kinds=(SLOW,)
    )


def placed(graph: TrainingGraph, platform: Platform) -> tuple[TrainingGraph, Platform]:
    """Return a captured graph on the platform: equal costs wherever ops may run."""
    arranged = arrange(platform, 0)
    columns = [
        Column(
            cost_ns=tuple(
                op.cost_ns[0] if arranged.kind_of(device).computes else None
                for op in graph.ops
            ),
            workspace_bytes=tuple(op.workspace_bytes[0] for op in graph.ops),
        )
        for device in range(len(arranged.devices))
    ]
    return with_columns(graph, arranged, columns), arranged


def scattered(
    graph: TrainingGraph,
    platform: Platform,
    seed: int,
    *,
    order: Sequence[int] | None = None,
    eviction_share: float = 0.3,
) -> Schedule:
    """Return a valid schedule that runs ops, and keeps values, wherever chance says.

    Each op runs on any device that can run it; what it reads is copied there. Now and
    then a value leaves a device, for another one if it is nowhere else.
    """
    chance = random.Random(seed)
    devices = range(len(platform.devices))
    held = held_outputs(graph)
    where: list[set[int]] = [
        {s.home} if s.is_resident else set() for s in graph.storages
    ]
    steps: list[Step] = []

    def bring(storage: int, device: int) -> None:
        if device not in where[storage]:
            source = chance.choice(sorted(where[storage]))
            steps.append(Copy(storage, source, device))
            where[storage].add(device)

    def evict() -> None:
        storage = chance.randrange(len(graph.storages))
        block = graph.storages[storage]
        if not where[storage] or block.is_resident or storage in held:
            return
        device = chance.choice(sorted(where[storage]))
        if where[storage] == {device}:
            bring(storage, chance.choice([d for d in devices if d != device]))
        where[storage].discard(device)

    for index in store_all_order(graph) if order is None else order:
        if index == BOUNDARY:
            for storage in graph.forward_outputs:
                bring(storage, graph.storages[storage].home)
            steps.append(Boundary())
            for storage in graph.tangents:
                where[storage] = {graph.storages[storage].home}
            continue
        op = graph.ops[index]
        able = [
            device
            for device in devices
            if op.cost_ns[graph.kind_index(platform.devices[device].kind)] is not None
        ]
        device = chance.choice(able)
        while not op.is_external and chance.random() < eviction_share:
            evict()
        for storage in op.reads:
            bring(storage, device)
        steps.append(Compute(index, device))
        for storage in op.writes:
            # Copies elsewhere hold the same values, and stay.
            where[storage].add(device)
    for storage in graph.final_outputs:
        bring(storage, graph.storages[storage].home)
    schedule = insert_discards(graph, steps)
    trace = simulate(graph, platform, schedule)
    assert trace.violation is None, trace.violation
    return schedule


Chooser = Callable[[TrainingGraph, Platform], Schedule]


def run_by(
    case: Case, platform: Platform, choose: Chooser
) -> tuple[FittedModel, list[tuple[TrainingGraph, Platform, Schedule]]]:
    """Return the case's model fitted with schedules that ``choose`` makes."""
    made: list[tuple[TrainingGraph, Platform, Schedule]] = []

    def choose_schedule(program: JointProgram) -> tuple[JointProgram, Schedule]:
        graph, arranged = placed(program.graph, platform)
        schedule = choose(graph, arranged)
        trace = simulate(graph, arranged, schedule)
        assert trace.violation is None, trace.violation
        made.append((graph, arranged, schedule))
        program.graph, program.platform = graph, arranged
        return program, schedule

    class Forced(FittedModel):
        def entry(self, gradient_bytes: int) -> Any:
            planner, backend, compiled = super().entry(gradient_bytes)
            backend.choose_schedule = choose_schedule
            return planner, backend, compiled

    request = PlanRequest(budget=2**50, costs="estimated")
    return Forced(case.model, request), made
