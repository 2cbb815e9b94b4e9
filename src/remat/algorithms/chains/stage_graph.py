"""Plans of chains and joins of stages as training graphs and schedules for the judge.

A forward that saves is two ops: the forward that keeps nothing, and one that adds what
is saved. Each backward runs once, so the graph has only the backward ops of the options
that the plan uses.
"""

from collections.abc import Sequence

from remat.algorithms.chains.draft import GraphDraft
from remat.algorithms.chains.operations import (
    Backward,
    Forward,
    Load,
    Operation,
    Store,
    Turn,
)
from remat.algorithms.chains.stage_joins import StageJoin
from remat.algorithms.chains.stages import StageChain
from remat.core.errors import InvalidGraphError
from remat.core.graph import Phase, TrainingGraph
from remat.core.liveness import insert_discards
from remat.core.schedule import Boundary, Compute, Step

_ONCE = "a plan runs it once"


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
        self._draft = GraphDraft()
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
            self._draft.op("load", (), (values[0],), 0, Phase.FORWARD, once=_ONCE)
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
            storages=tuple(self._draft.storages),
            ops=tuple(self._draft.ops),
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

    def _row(self, name: str, sizes: Sequence[int]) -> list[int]:
        return [
            self._draft.storage(f"{name} {i}", size) for i, size in enumerate(sizes)
        ]

    def _add_forward(self, branch: int, index: int, option: int) -> None:
        stage = self.join.branches[branch].stages[index]
        value, output = self._values[branch][index : index + 2]
        run = self._draft.op(
            f"F{index} of {branch}",
            (value,),
            (output,),
            stage.forward_ns,
            Phase.FORWARD,
            workspace_bytes=stage.forward_workspace_bytes,
        )
        self._parts[Forward(index, branch)] = [run]
        chosen = stage.options[option]
        if chosen.forward_ns is None:
            return
        saved = self._draft.storage(f"saved in {index} of {branch}", chosen.saved_bytes)
        save = self._draft.op(
            f"S{index} of {branch}",
            (value, output),
            (saved,),
            chosen.forward_ns - stage.forward_ns,
            Phase.FORWARD,
            workspace_bytes=chosen.forward_workspace_bytes,
        )
        self._saved[branch, index, option] = saved
        self._parts[Forward(index, branch, option)] = [run, save]

    def _add_turn(self) -> None:
        self._parts[Turn()] = [
            self._draft.op(
                "T",
                [values[-1] for values in self._values],
                [gradients[-1] for gradients in self._gradients],
                self.join.turn_ns,
                Phase.BACKWARD,
                workspace_bytes=self.join.turn_workspace_bytes,
                once=_ONCE,
            )
        ]

    def _add_backward(self, branch: int, index: int, option: int) -> None:
        chosen = self.join.branches[branch].stages[index].options[option]
        values, gradients = self._values[branch], self._gradients[branch]
        reads = [values[index], gradients[index + 1]]
        if chosen.needs_output:
            reads.append(values[index + 1])
        if chosen.forward_ns is not None:
            reads.append(self._saved[branch, index, option])
        self._parts[Backward(index, branch, option)] = [
            self._draft.op(
                f"B{index} of {branch}",
                reads,
                (gradients[index],),
                chosen.backward_ns,
                Phase.BACKWARD,
                workspace_bytes=chosen.backward_workspace_bytes,
                once=_ONCE,
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
