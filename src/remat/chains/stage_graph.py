"""Plans of chains of stages as training graphs and schedules for the judge.

A forward that saves is two ops: the forward that keeps nothing, and one that adds what
is saved. Each backward runs once, so the graph has only the backward ops of the options
that the plan uses.
"""

from collections.abc import Sequence

from remat.chains.operations import (
    Backward,
    Fetch,
    Forward,
    Load,
    Offload,
    Operation,
    Store,
    Turn,
)
from remat.chains.stages import StageChain, StageOption
from remat.errors import InvalidGraphError
from remat.graph import Op, Phase, Storage, TrainingGraph
from remat.liveness import insert_discards
from remat.schedule import Boundary, Compute, Copy, Step


class StageGraph:
    """The training graph of a chain as a plan runs it, and the plan's schedule.

    Parameters
    ----------
    chain
        The chain.
    operations
        A plan of it: every backward and the turn once, options that exist.

    Attributes
    ----------
    graph
        The training graph. Its final output is the gradient of the input.
    schedule
        The plan with every value discarded after its last use. The host of offloaded
        values is device 1.

    Raises
    ------
    InvalidGraphError
        If the plan does not fit the chain.
    """

    def __init__(self, chain: StageChain, operations: Sequence[Operation]) -> None:
        self.chain = chain
        self._storages: list[Storage] = []
        self._ops: list[Op] = []
        self._values = [
            self._storage(f"x{index}", size)
            for index, size in enumerate(chain.value_bytes)
        ]
        self._gradients = [
            self._storage(f"gradient of x{index}", size)
            for index, size in enumerate(chain.gradient_bytes)
        ]
        self._saved: dict[tuple[int, int], int] = {}
        self._parts: dict[Operation, list[int]] = {}
        used = _used_options(chain, operations)
        self._load = self._op("load", (), (self._values[0],), 0, 0, once=True)
        for stage, option in enumerate(used):
            self._add_forward(stage, option)
        self._add_turn()
        for stage in reversed(range(len(used))):
            self._add_backward(stage, used[stage])
        self.graph = TrainingGraph(
            name=f"chain of {len(used)} stages",
            storages=tuple(self._storages),
            ops=tuple(self._ops),
            final_outputs=(self._gradients[0],),
        )
        self.schedule = insert_discards(self.graph, self._steps(operations))

    def _steps(self, operations: Sequence[Operation]) -> list[Step]:
        steps: list[Step] = [Compute(self._load)]
        for operation in operations:
            if isinstance(operation, Store | Load):
                msg = f"{operation} is not an operation of a chain of stages"
                raise InvalidGraphError(msg)
            if isinstance(operation, Offload | Fetch):
                source, target = (0, 1) if isinstance(operation, Offload) else (1, 0)
                steps += [
                    Copy(storage, source, target) for storage in self._moved(operation)
                ]
                continue
            if isinstance(operation, Turn):
                steps.append(Boundary())
            steps += [Compute(op) for op in self._parts[operation]]
        return steps

    def _moved(self, operation: Offload | Fetch) -> list[int]:
        value = self._values[operation.stage + 1]
        if operation.option is None:
            return [value]
        saved = self._saved[operation.stage, operation.option]
        needs_output = self._option(operation.stage, operation.option).needs_output
        return [saved, value] if needs_output else [saved]

    def _option(self, stage: int, option: int) -> StageOption:
        return self.chain.stages[stage].options[option]

    def _storage(self, name: str, size_bytes: int) -> int:
        self._storages.append(Storage(name=name, size_bytes=size_bytes))
        return len(self._storages) - 1

    def _op(
        self,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        cost_ns: int,
        workspace_bytes: int,
        *,
        phase: Phase = Phase.FORWARD,
        once: bool = False,
    ) -> int:
        self._ops.append(
            Op(
                name=name,
                reads=tuple(reads),
                writes=tuple(writes),
                cost_ns=(cost_ns,),
                workspace_bytes=(workspace_bytes,),
                phase=phase,
                non_recomputable="a plan runs it once" if once else None,
            )
        )
        return len(self._ops) - 1

    def _add_forward(self, index: int, option: int) -> None:
        stage = self.chain.stages[index]
        value, output = self._values[index], self._values[index + 1]
        run = self._op(
            f"F{index}",
            (value,),
            (output,),
            stage.forward_ns,
            stage.forward_workspace_bytes,
        )
        self._parts[Forward(index)] = [run]
        chosen = stage.options[option]
        if chosen.forward_ns is None:
            return
        saved = self._storage(f"saved in {index} by {option}", chosen.saved_bytes)
        save = self._op(
            f"S{index}",
            (value, output),
            (saved,),
            chosen.forward_ns - stage.forward_ns,
            chosen.forward_workspace_bytes,
        )
        self._saved[index, option] = saved
        self._parts[Forward(index, option=option)] = [run, save]

    def _add_turn(self) -> None:
        self._parts[Turn()] = [
            self._op(
                "T",
                (self._values[-1],),
                (self._gradients[-1],),
                self.chain.turn_ns,
                self.chain.turn_workspace_bytes,
                phase=Phase.BACKWARD,
                once=True,
            )
        ]

    def _add_backward(self, index: int, option: int) -> None:
        chosen = self._option(index, option)
        reads = [self._values[index], self._gradients[index + 1]]
        if chosen.needs_output:
            reads.append(self._values[index + 1])
        if chosen.forward_ns is not None:
            reads.append(self._saved[index, option])
        self._parts[Backward(index, option=option)] = [
            self._op(
                f"B{index}",
                reads,
                (self._gradients[index],),
                chosen.backward_ns,
                chosen.backward_workspace_bytes,
                phase=Phase.BACKWARD,
                once=True,
            )
        ]


def _used_options(chain: StageChain, operations: Sequence[Operation]) -> list[int]:
    """Return, per stage, the option that its one backward uses."""
    used: dict[int, int] = {}
    for operation in operations:
        if not isinstance(operation, Backward):
            continue
        if operation.stage in used or operation.option is None:
            msg = f"{operation} has no option, or its stage has run backward before"
            raise InvalidGraphError(msg)
        used[operation.stage] = operation.option
    if sorted(used) != list(range(len(chain.stages))):
        msg = (
            f"the plan runs the backward of stages {sorted(used)}; the chain has "
            f"{len(chain.stages)} stages"
        )
        raise InvalidGraphError(msg)
    return [used[stage] for stage in range(len(chain.stages))]
