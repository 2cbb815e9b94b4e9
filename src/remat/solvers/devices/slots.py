"""Slots: the places in time at which the exact model may run an op or copy.

A schedule of the *frontier* class consists of stages: each ends with the first run of
one op, and before that each op runs at most once per device, in graph order. The
boundary and the end close a stage as well. This is Checkmate's class, which XEngine
shares. Schedules of the *sweeps* class are any that split into so many sweeps over the
ops in graph order, wherever the first runs fall; with enough sweeps, all schedules.

References
----------
P. Jain et al. Checkmate: breaking the memory wall with optimal tensor
rematerialization. MLSys 2020. M. Schuler et al. XEngine: optimal tensor
rematerialization for neural networks in heterogeneous environments. ACM TACO 20(1),
2022.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remat.core.graph import Phase, TrainingGraph
from remat.search.device_instance import DeviceInstance


@dataclass(frozen=True, slots=True)
class RunSlot:
    """A place where op ``op`` may run; it must if ``is_first``."""

    op: int
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class CopySlot:
    """A place where storages ``storages`` may be copied between any devices."""

    storages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundarySlot:
    """The boundary."""


Slot = RunSlot | CopySlot | BoundarySlot


def frontier_slots(instance: DeviceInstance) -> list[Slot]:
    """Return the slots of the frontier class, without copies between the stages."""
    graph = instance.graph
    slots: list[Slot] = []
    begun: list[int] = []
    is_callers_turn = False
    phase = Phase.FORWARD
    for op in instance.required:
        if phase is Phase.FORWARD and graph.ops[op].phase is Phase.BACKWARD:
            slots += _leaving(graph, begun, phase, is_callers_turn=is_callers_turn)
            slots.append(BoundarySlot())
            phase, is_callers_turn = Phase.BACKWARD, False
        is_external = graph.ops[op].is_external
        if not is_callers_turn:
            slots += _again(graph, begun)
            if is_external:
                slots.append(CopySlot(_outputs(graph, phase)))
        slots.append(RunSlot(op, is_first=True))
        is_callers_turn = is_callers_turn or is_external
        begun.append(op)
    if phase is Phase.FORWARD:
        slots += _leaving(graph, begun, phase, is_callers_turn=is_callers_turn)
        slots.append(BoundarySlot())
        is_callers_turn = False
    slots += _leaving(graph, begun, Phase.BACKWARD, is_callers_turn=is_callers_turn)
    return slots


def sweep_slots(
    instance: DeviceInstance, forward_sweeps: int, backward_sweeps: int
) -> list[Slot]:
    """Return the slots of so many sweeps before and after the boundary."""
    graph = instance.graph
    own = [op for op in instance.required if not graph.ops[op].is_external]
    forward = [op for op in own if graph.ops[op].phase is Phase.FORWARD]
    slots: list[Slot] = []
    for phase, ops, sweeps in (
        (Phase.FORWARD, forward, forward_sweeps),
        (Phase.BACKWARD, own, backward_sweeps),
    ):
        slots += [RunSlot(op) for _ in range(sweeps) for op in ops]
        slots.append(CopySlot(_outputs(graph, phase)))
        slots += [
            RunSlot(op, is_first=True)
            for op in instance.required
            if graph.ops[op].is_external and graph.ops[op].phase is phase
        ]
        if phase is Phase.FORWARD:
            slots.append(BoundarySlot())
    return slots


def with_copies_anywhere(instance: DeviceInstance, slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots with all storages copyable before each run and boundary."""
    everything = CopySlot(tuple(range(len(instance.graph.storages))))
    found: list[Slot] = []
    callers_turn = callers_turns(instance.graph, slots)
    for slot, is_callers in zip(slots, callers_turn, strict=True):
        if not isinstance(slot, CopySlot) and not is_callers:
            found.append(everything)
        found.append(slot)
    if not (callers_turn and callers_turn[-1]):
        found.append(everything)
    return found


def callers_turns(graph: TrainingGraph, slots: Sequence[Slot]) -> list[bool]:
    """Return per slot whether an external op has run before it in the same pass."""
    found: list[bool] = []
    is_callers_turn = False
    for slot in slots:
        found.append(is_callers_turn)
        if isinstance(slot, BoundarySlot):
            is_callers_turn = False
        elif isinstance(slot, RunSlot) and graph.ops[slot.op].is_external:
            is_callers_turn = True
    return found


def _outputs(graph: TrainingGraph, phase: Phase) -> tuple[int, ...]:
    return graph.forward_outputs if phase is Phase.FORWARD else graph.final_outputs


def _again(graph: TrainingGraph, begun: Sequence[int]) -> Iterator[Slot]:
    for op in begun:
        if graph.ops[op].is_recomputable:
            yield RunSlot(op)


def _leaving(
    graph: TrainingGraph, begun: Sequence[int], phase: Phase, *, is_callers_turn: bool
) -> Iterator[Slot]:
    """Yield the slots that end a pass."""
    if not is_callers_turn:
        yield from _again(graph, begun)
        yield CopySlot(_outputs(graph, phase))
