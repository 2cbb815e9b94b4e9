"""Platforms of logical devices, and valid schedules on them made by chance."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from remat.capture.joint_program import JointProgram
from remat.core.device_graph import CostColumn as Column
from remat.core.device_graph import arrange, fully_linked, with_columns
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, insert_discards, store_all_order
from remat.core.platform import Device, DeviceKind, Platform
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.core.schedule import Boundary, Compute, Copy, Schedule, Step
from remat.core.simulator import Trace, simulate
from remat.planning.plan import Plan
from remat.solvers.base import ProgressCallback
from remat.training.fitted_model import FittedModel
from remat.training.request import PlanRequest
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


class Builder:
    """Makes a schedule that brings what an op reads to where it runs.

    It discards nothing: that is done at the end, right after each last use.
    """

    def __init__(self, graph: TrainingGraph, platform: Platform, seed: int = 0) -> None:
        self.graph, self.platform = graph, platform
        self.chance = random.Random(seed)
        self.held = graph.held_outputs
        self.steps: list[Step] = []
        self.where: list[set[int]] = [
            {s.home} if s.is_resident else set() for s in graph.storages
        ]

    def able(self, op: int) -> list[int]:
        """Return the devices that can run an op."""
        return [
            index
            for index, device in enumerate(self.platform.devices)
            if self.graph.ops[op].cost_ns[self.graph.kind_index(device.kind)]
            is not None
        ]

    def bring(self, storage: int, device: int) -> None:
        """Copy a storage to a device where it is not live."""
        if device not in self.where[storage]:
            source = self.chance.choice(sorted(self.where[storage]))
            self.steps.append(Copy(storage, source, device))
            self.where[storage].add(device)

    def send_away(self, storage: int, device: int, target: int) -> None:
        """Let a storage leave a device; if it is nowhere else, for another one."""
        block = self.graph.storages[storage]
        if (
            device not in self.where[storage]
            or block.is_resident
            or storage in self.held
        ):
            return
        if self.where[storage] == {device}:
            self.bring(storage, target)
        self.where[storage].discard(device)

    def evict(self) -> None:
        """Let any storage leave any device."""
        storage = self.chance.randrange(len(self.graph.storages))
        if self.where[storage]:
            device = self.chance.choice(sorted(self.where[storage]))
            others = set(range(len(self.platform.devices))) - {device}
            self.send_away(storage, device, self.chance.choice(sorted(others)))

    def run(self, op: int, device: int) -> None:
        """Run an op on a device."""
        for storage in self.graph.ops[op].reads:
            self.bring(storage, device)
        self.steps.append(Compute(op, device))
        for storage in self.graph.ops[op].writes:
            # Copies elsewhere hold the same values, and stay.
            self.where[storage].add(device)

    def cross(self) -> None:
        """Pass the boundary."""
        for storage in self.graph.forward_outputs:
            self.bring(storage, self.graph.storages[storage].home)
        self.steps.append(Boundary())
        for storage in self.graph.tangents:
            self.where[storage] = {self.graph.storages[storage].home}

    def done(self) -> Schedule:
        """Return the schedule, which is valid but for budgets."""
        for storage in self.graph.final_outputs:
            self.bring(storage, self.graph.storages[storage].home)
        schedule = insert_discards(self.graph, self.steps)
        unlimited = self.platform.with_budgets(dict.fromkeys(self.platform.names))
        trace = simulate(self.graph, unlimited, schedule)
        assert trace.violation is None, trace.violation
        return schedule


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
    builder = Builder(graph, platform, seed)
    for op in store_all_order(graph) if order is None else order:
        if op == BOUNDARY:
            builder.cross()
            continue
        while (
            not graph.ops[op].is_external and builder.chance.random() < eviction_share
        ):
            builder.evict()
        builder.run(op, builder.chance.choice(builder.able(op)))
    return builder.done()


def offloading(graph: TrainingGraph, platform: Platform) -> Schedule:
    """Return the schedule that keeps on device 1 what forward leaves for backward."""
    builder = Builder(graph, platform)
    forward = graph.forward_count
    last_use = {
        storage: max([op for op in graph.consumers[storage] if op < forward] + [made])
        for storage, made in enumerate(graph.producers)
        if made is not None and made < forward
    }
    for op in store_all_order(graph):
        if op == BOUNDARY:
            builder.cross()
            continue
        builder.run(op, 0)
        for storage in {*graph.ops[op].reads, *graph.ops[op].writes}:
            is_over = last_use.get(storage) == op
            is_needed = any(user >= forward for user in graph.consumers[storage])
            is_leaving = storage in graph.forward_outputs
            if op < forward and is_over and is_needed and not is_leaving:
                builder.send_away(storage, 0, 1)
    return builder.done()


def split(graph: TrainingGraph, platform: Platform) -> Schedule:
    """Return the schedule that runs the middle of both passes on device 1."""
    builder = Builder(graph, platform)
    forward = graph.forward_count
    backward = len(graph.ops) - forward
    middle = {
        *range(forward // 3, forward),
        *range(forward, forward + 2 * backward // 3),
    }
    for op in store_all_order(graph):
        if op == BOUNDARY:
            builder.cross()
        else:
            able = builder.able(op)
            builder.run(op, 1 if 1 in able and (op in middle or 0 not in able) else 0)
    return builder.done()


@dataclass(frozen=True)
class HandMade:
    """A solver that answers with a schedule made by hand, if it fits."""

    schedule_class: ClassVar[str] = "one schedule"
    is_exact: ClassVar[bool] = False

    choose: Callable[[TrainingGraph, Platform], Schedule] = offloading

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        schedule = self.choose(problem.graph, problem.platform)
        trace = simulate(problem.graph, problem.platform, schedule)
        if trace.violation is None:
            return Proposal(status=Status.FEASIBLE, schedule=schedule)
        return Proposal(status=Status.UNKNOWN, message=str(trace.violation))

    def trace_of(self, plan: Plan) -> Trace:
        """Return the replay of the schedule as it is made by hand."""
        schedule = self.choose(plan.graph, plan.platform)
        return simulate(plan.graph, plan.platform, schedule)


@dataclass(frozen=True)
class HandMadeSplit(HandMade):
    """Splits ops between two devices."""

    choose: Callable[[TrainingGraph, Platform], Schedule] = split


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

    request = PlanRequest(budget=2**50, costs="estimated")
    fitted = FittedModel(case.model, request)
    fitted.backend.choose_schedule = choose_schedule
    return fitted, made
