"""Plans of chains and joins of stages as training graphs and schedules for the judge.

A forward that saves is two ops: the forward that keeps nothing, and one that adds what
is saved. Each backward runs once, so the graph has only the backward ops of the options
that the plan uses.
"""

from collections.abc import Sequence

from remat.algorithms.chains.operations import (
    Backward,
    Forward,
    Load,
    Operation,
    Store,
    Turn,
)
from remat.algorithms.chains.stage_joins import StageJoin
from remat.algorithms.chains.stages import StageChain, StageOption
from remat.core.errors import InvalidGraphError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import insert_discards
from remat.core.schedule import Boundary, Compute, Step


class StageGraph:
    """The training graph of a chain or join as a plan runs it, and the plan's schedule.

    Parameters
    ----------
    model
        The chain or the join.
    operations
        A plan of it: every backward and the turn once, options that exist.

    Attributes
    ----------
    graph
        The training graph. Its final outputs are the gradients of the inputs.
    schedule
        The plan with every value discarded after its last use.

    Raises
    ------
    InvalidGraphError
        If the plan does not fit the chain.
    """

    def __init__(
        self, model: StageChain | StageJoin, operations: Sequence[Operation]
    ) -> None:
        if isinstance(model, StageChain):
            model = StageJoin.of_chain(model)
        self.join = model
        self._storages: list[Storage] = []
        self._ops: list[Op] = []
        self._values = [
            self._row(f"x of {branch},", chain.value_bytes)
            for branch, chain in enumerate(model.branches)
        ]
        self._gradients = [
            self._row(f"gradient of {branch},", chain.gradient_bytes)
            for branch, chain in enumerate(model.branches)
        ]
        self._saved: dict[tuple[int, int, int], int] = {}
        self._parts: dict[Operation, list[int]] = {}
        used = [
            _used_options(chain, branch, operations)
            for branch, chain in enumerate(model.branches)
        ]
        self._loads = [
            self._op("load", (), (values[0],), 0, 0, once=True)
            for values in self._values
        ]
        for branch, options in enumerate(used):
            for stage, option in enumerate(options):
                self._add_forward(branch, stage, option)
        self._add_turn()
        for branch, options in enumerate(used):
            for stage in reversed(range(len(options))):
                self._add_backward(branch, stage, options[stage])
        self.graph = TrainingGraph(
            name=f"join of {len(used)} chains of stages",
            storages=tuple(self._storages),
            ops=tuple(self._ops),
            final_outputs=tuple(gradients[0] for gradients in self._gradients),
        )
        self.schedule = insert_discards(self.graph, self._steps(operations))

    def _steps(self, operations: Sequence[Operation]) -> list[Step]:
        steps: list[Step] = [Compute(op) for op in self._loads]
        for operation in operations:
            if isinstance(operation, Store | Load):
                msg = f"{operation} is not an operation of a chain of stages"
                raise InvalidGraphError(msg)
            if isinstance(operation, Turn):
                steps.append(Boundary())
            steps += [Compute(op) for op in self._parts[operation]]
        return steps

    def _option(self, branch: int, stage: int, option: int) -> StageOption:
        return self.join.branches[branch].stages[stage].options[option]

    def _row(self, name: str, sizes: Sequence[int]) -> list[int]:
        return [self._storage(f"{name} {i}", size) for i, size in enumerate(sizes)]

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

    def _add_forward(self, branch: int, index: int, option: int) -> None:
        stage = self.join.branches[branch].stages[index]
        value, output = self._values[branch][index : index + 2]
        run = self._op(
            f"F{index} of {branch}",
            (value,),
            (output,),
            stage.forward_ns,
            stage.forward_workspace_bytes,
        )
        self._parts[Forward(index, branch)] = [run]
        chosen = stage.options[option]
        if chosen.forward_ns is None:
            return
        saved = self._storage(f"saved in {index} of {branch}", chosen.saved_bytes)
        save = self._op(
            f"S{index} of {branch}",
            (value, output),
            (saved,),
            chosen.forward_ns - stage.forward_ns,
            chosen.forward_workspace_bytes,
        )
        self._saved[branch, index, option] = saved
        self._parts[Forward(index, branch, option)] = [run, save]

    def _add_turn(self) -> None:
        self._parts[Turn()] = [
            self._op(
                "T",
                [values[-1] for values in self._values],
                [gradients[-1] for gradients in self._gradients],
                self.join.turn_ns,
                self.join.turn_workspace_bytes,
                phase=Phase.BACKWARD,
                once=True,
            )
        ]

    def _add_backward(self, branch: int, index: int, option: int) -> None:
        chosen = self._option(branch, index, option)
        values, gradients = self._values[branch], self._gradients[branch]
        reads = [values[index], gradients[index + 1]]
        if chosen.needs_output:
            reads.append(values[index + 1])
        if chosen.forward_ns is not None:
            reads.append(self._saved[branch, index, option])
        self._parts[Backward(index, branch, option)] = [
            self._op(
                f"B{index} of {branch}",
                reads,
                (gradients[index],),
                chosen.backward_ns,
                chosen.backward_workspace_bytes,
                phase=Phase.BACKWARD,
                once=True,
            )
        ]


def _used_options(
    chain: StageChain, branch: int, operations: Sequence[Operation]
) -> list[int]:
    """Return, per stage, the option that its one backward uses."""
    used: dict[int, int] = {}
    for operation in operations:
        if not isinstance(operation, Backward) or operation.branch != branch:
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
