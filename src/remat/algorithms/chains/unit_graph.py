"""Unit-size plans as training graphs and schedules that the judge can replay.

The judge allocates outputs beside inputs. A convention in which outputs may replace
inputs is expressed by splitting each operation in two: one that reads the inputs and
writes an empty *token*, and one that turns the token into the output after the inputs
had a chance to go. Uncounted values have size 0, pinned inputs are resident and empty,
counted inputs are written by an operation that may run only once.
"""

from collections.abc import Sequence

from remat.algorithms.chains.conventions import MemoryConvention, checked_convention
from remat.algorithms.chains.draft import GraphDraft
from remat.algorithms.chains.joins import checked_costs
from remat.algorithms.chains.levels import StorageLevel
from remat.algorithms.chains.operations import (
    Backward,
    Forward,
    Load,
    Operation,
    Store,
    Turn,
    UnitOperation,
)
from remat.core.errors import InvalidGraphError
from remat.core.graph import Phase, Role, TrainingGraph
from remat.core.liveness import insert_discards
from remat.core.platform import Device, Link, Platform
from remat.core.schedule import Boundary, Compute, Copy, Schedule, Step


class UnitGraph:
    """The training graph of a join of chains, and the way to it from a plan.

    Parameters
    ----------
    stage_costs
        Per branch the forward cost of each stage, at least one stage each.
    convention
        What a unit of memory pays for; a unit is one byte of the graph.
    backward_cost, turn_cost
        Cost of a backward stage and of the turn.

    Attributes
    ----------
    graph
        The training graph, with times in the unit of the costs.
    """

    def __init__(
        self,
        stage_costs: Sequence[Sequence[int]],
        convention: MemoryConvention,
        *,
        backward_cost: int = 0,
        turn_cost: int = 0,
    ) -> None:
        checked_convention(convention)
        self.stage_costs = [tuple(costs) for costs in checked_costs(stage_costs)]
        self.convention = convention
        self._draft = GraphDraft()
        # Per operation, the ops that run for it.
        self._parts: dict[UnitOperation, list[int]] = {}
        self._loads: list[int] = []
        self._value = [self._input(b) for b in range(len(stage_costs))]
        self._gradient: list[list[int]] = [[] for _ in stage_costs]
        for branch in range(len(stage_costs)):
            self._add_forward(branch)
        self._add_turn(turn_cost)
        for branch in range(len(stage_costs)):
            self._add_backward(branch, backward_cost)
        self.graph = TrainingGraph(
            name=f"join of {len(stage_costs)} chains",
            storages=tuple(self._draft.storages),
            ops=tuple(self._draft.ops),
        )

    def schedule(self, operations: Sequence[Operation]) -> Schedule:
        """Return the schedule that runs ``operations`` and frees at the last use.

        Storage level ``k`` is device ``k``; level 0 is the device that computes.
        """
        steps: list[Step] = [Compute(op) for op in self._loads]
        has_turned = False
        for operation in operations:
            if isinstance(operation, Store | Load):
                steps += self._copy(operation)
                continue
            if isinstance(operation, Turn) and not has_turned:
                has_turned = True
                steps.append(Boundary())
            if operation not in self._parts:
                msg = f"{operation} is no operation of {self.graph.name}"
                raise InvalidGraphError(msg)
            steps += [Compute(op) for op in self._parts[operation]]
        return insert_discards(self.graph, steps)

    def _copy(self, operation: Store | Load) -> list[Step]:
        if operation.level == 0:
            return []
        storage = self._value[0][operation.stage]
        if isinstance(operation, Store):
            return [Copy(storage, 0, operation.level)]
        return [Copy(storage, operation.level, 0)]

    def _add(
        self,
        operation: UnitOperation,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        cost: int,
    ) -> None:
        draft = self._draft
        phase = Phase.FORWARD if isinstance(operation, Forward) else Phase.BACKWARD
        if not self.convention.overwrites_inputs:
            self._parts[operation] = [draft.op(name, reads, writes, cost, phase)]
            return
        tokens = [draft.storage(f"{name} token {i}", 0) for i in range(len(writes))]
        parts = [draft.op(name, reads, tokens, cost, phase)]
        parts += [
            draft.op(f"{name} emits", (token,), (output,), 0, phase)
            for token, output in zip(tokens, writes, strict=True)
        ]
        self._parts[operation] = parts

    def _input(self, branch: int) -> list[int]:
        name, draft, phase = f"x0 of {branch}", self._draft, Phase.FORWARD
        if not self.convention.counts_inputs:
            return [draft.storage(name, 0, role=Role.INPUT, is_resident=True)]
        storage, why = draft.storage(name, 1), "it is an input"
        load = draft.op(f"load {branch}", (), (storage,), 0, phase, once=why)
        self._loads.append(load)
        return [storage]

    def _add_forward(self, branch: int) -> None:
        for stage, cost in enumerate(self.stage_costs[branch]):
            name = f"F{stage} of {branch}"
            output = self._draft.storage(f"x{stage + 1} of {branch}", 1)
            reads = (self._value[branch][stage],)
            self._add(Forward(stage, branch), name, reads, (output,), cost)
            self._value[branch].append(output)

    def _add_turn(self, cost: int) -> None:
        size = self.convention.gradient_units
        writes = [
            self._draft.storage(f"top gradient of {branch}", size)
            for branch in range(len(self.stage_costs))
        ]
        self._add(Turn(), "T", [v[-1] for v in self._value], writes, cost)
        self._gradient = [[storage] for storage in writes]

    def _add_backward(self, branch: int, cost: int) -> None:
        size = self.convention.gradient_units
        for stage in reversed(range(len(self.stage_costs[branch]))):
            output = self._draft.storage(f"gradient of x{stage} of {branch}", size)
            reads = (self._value[branch][stage], self._gradient[branch][-1])
            name = f"B{stage} of {branch}"
            self._add(Backward(stage, branch), name, reads, (output,), cost)
            self._gradient[branch].append(output)


def level_platform(levels: Sequence[StorageLevel]) -> Platform:
    """Return a device that computes and, per further level, one that only stores.

    Parameters
    ----------
    levels
        The levels of a plan; level 0 is the memory of the device that computes.

    Raises
    ------
    InvalidGraphError
        If level 0 costs time, or another level costs less than 1 ns: copies of one byte
        cannot be free.
    """
    links: list[Link] = []
    for index, level in enumerate(levels):
        least = min(level.write_ns, level.read_ns)
        if (index == 0 and level.write_ns + level.read_ns > 0) or (index and not least):
            msg = (
                f"level {index} has write_ns={level.write_ns} and "
                f"read_ns={level.read_ns}; a platform has 0 for level 0, and at least "
                "1 for others"
            )
            raise InvalidGraphError(msg)
        if index:
            # A byte takes the last nanosecond.
            fast = 10**9
            links += [
                Link(source=a, target=b, bytes_per_s=fast, latency_ns=time_ns - 1)
                for a, b, time_ns in (
                    (0, index, level.write_ns),
                    (index, 0, level.read_ns),
                )
            ]
    devices = tuple(Device(name=f"level {index}") for index in range(len(levels)))
    return Platform(devices=devices, links=tuple(links))
