"""Blocks: parallel branches between two values, as one stage of a longer chain.

A join that is followed by a shared trunk, branches that leave a shared stem, and nested
joins are series of stages some of which are *blocks*: branches that start from one
value and are merged into one. :func:`block_stage` plans the inside of a block for
several memory budgets and makes a :class:`~remat.algorithms.chains.stages.Stage` of it,
with an option per plan; the series is then a chain for
:func:`~remat.algorithms.chains.rotor.plan_rotor`, and a branch of a block may contain
such stages again.

This is a decomposition, not an exact program: in a schedule of the whole, a block runs
forward at one go and backward at one go, and what it keeps in between is one of the
options. No exact polynomial program for a join with a trunk is known to us. Sizes and
peaks of the options are those of the judge, so plans hold; how far they are off is
known from exhaustive search on small instances (``studies/results/chains.jsonl``) and
bounded by :attr:`~remat.algorithms.chains.stages.StageChain.least_ns`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from remat.algorithms.chains.draft import GraphDraft
from remat.algorithms.chains.operations import Forward, Operation, Turn
from remat.algorithms.chains.rotor import least_budget
from remat.algorithms.chains.stage_graph import StageGraph
from remat.algorithms.chains.stage_joins import StageJoin, plan_stage_join
from remat.algorithms.chains.stages import Stage, StageChain, StageOption
from remat.core.checks import (
    checked_integer,
    checked_record,
    checked_text,
    keep_flags,
)
from remat.core.errors import InvalidGraphError
from remat.core.graph import Phase, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import single_device
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.core.units import keep_amounts

DEFAULT_BUDGETS = 8
"""Memory budgets for which the inside of a block is planned."""

MOST_BUDGETS = 10_000
"""Most memory budgets."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Branches that start from one value and are merged into one.

    Parameters
    ----------
    branches
        The branches. Their inputs are the block's, so ``input_bytes`` must be 0;
        ``input_gradient_bytes`` is each branch's share of the input's gradient.
    merge_forward_ns, merge_backward_ns
        Time of merging the last values, and of its backward.
    output_bytes
        Size of the merged value.
    gradient_bytes
        Size of its gradient; ``None``: that of the value.
    merge_needs_inputs
        Whether the merge's backward reads the branches' last values.
    name
        For people.

    Raises
    ------
    InvalidGraphError
        If there is no branch, a branch has a turn or an input of its own, or a number
        is no integer or out of range.
    """

    branches: tuple[StageChain, ...]
    output_bytes: int
    merge_forward_ns: int = 0
    merge_backward_ns: int = 0
    gradient_bytes: int | None = None
    merge_needs_inputs: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        checked_text("the name of a block", self.name, error=InvalidGraphError)
        branches = StageJoin(branches=self.branches).branches
        object.__setattr__(self, "branches", branches)
        for index, branch in enumerate(self.branches):
            if branch.input_bytes:
                msg = (
                    f"branch {index} of block {self.name!r} has an input of "
                    f"{branch.input_bytes} bytes; it is the block's, and counted there"
                )
                raise InvalidGraphError(msg)
        of = f"block {self.name!r}"
        error = InvalidGraphError
        times = ("merge_forward_ns", "merge_backward_ns")
        keep_amounts(self, "output_bytes", *times, of=of, error=error)
        keep_amounts(self, "gradient_bytes", of=of, optional=True, error=error)
        keep_flags(self, "merge_needs_inputs", of=of, error=error)

    @property
    def output_gradient_bytes(self) -> int:
        """Size of the merged value's gradient in bytes."""
        return self.output_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, kw_only=True)
class BlockStage:
    """A block as a stage.

    Parameters
    ----------
    stage
        The stage, one option per plan.
    plain
        What runs inside when the stage runs forward and keeps nothing.
    plans
        Per option, what runs inside: forward up to :class:`Turn`, which stands for the
        merge, and backward from it on.
    """

    stage: Stage
    plain: tuple[Operation, ...]
    plans: tuple[tuple[Operation, ...], ...]

    def forward_operations(self, option: int | None) -> tuple[Operation, ...]:
        """Return what runs inside, before the merge, when the stage runs forward."""
        if option is None:
            return self.plain
        plan = self.plans[option]
        return plan[: plan.index(Turn())]

    def backward_operations(self, option: int) -> tuple[Operation, ...]:
        """Return what runs inside, after the merge's backward, for the stage's."""
        plan = self.plans[option]
        return plan[plan.index(Turn()) + 1 :]


class BlockGraph:
    """The training graph of a block alone, and the schedule of a plan of its inside.

    The input is resident and takes nothing. The merged value leaves at the boundary,
    where its gradient appears; the final output is the input's gradient.
    """

    def __init__(self, block: Block, operations: Sequence[Operation]) -> None:
        join = StageJoin(branches=block.branches)
        inner = StageGraph(join, operations)
        inside = inner.graph.ops
        turn = next(index for index, op in enumerate(inside) if op.name == "T")
        tops, gradients = inside[turn].reads, inside[turn].writes
        draft = GraphDraft()
        draft.storages += inner.graph.storages
        merged = draft.storage("merged", block.output_bytes)
        tangent = draft.storage("gradient of merged", block.output_gradient_bytes)
        total = max(branch.input_gradient_bytes for branch in block.branches)
        self.input_gradient_bytes = total
        gradient = draft.storage("gradient of the input", total)
        # The merge and its backward take the place of the turn.
        draft.ops += inside[:turn]
        draft.op("merge", tops, (merged,), block.merge_forward_ns, Phase.FORWARD)
        reads = (tangent, *(tops if block.merge_needs_inputs else ()))
        backward_ns = block.merge_backward_ns
        draft.op("merge backward", reads, gradients, backward_ns, Phase.BACKWARD)
        draft.ops += inside[turn + 1 :]
        draft.op("sum", inner.graph.final_outputs, (gradient,), 0, Phase.BACKWARD)
        self.graph = TrainingGraph(
            name=f"block {block.name}",
            storages=tuple(draft.storages),
            ops=tuple(draft.ops),
            forward_outputs=(merged,),
            tangents=(tangent,),
            final_outputs=(gradient,),
        )
        order: list[int] = []
        for index in inner.schedule.computes:
            if index == turn:
                order += [turn, BOUNDARY, turn + 1]
            else:
                order.append(index + (index > turn))
        order.append(len(self.graph.ops) - 1)
        self.order = order

    @property
    def schedule(self) -> Schedule:
        """The plan, every value discarded after its last use."""
        return schedule_from_order(self.graph, self.order)


def block_stage(block: Block, *, budgets: int = DEFAULT_BUDGETS) -> BlockStage:
    """Return a block as a stage whose options are plans of its inside.

    Parameters
    ----------
    block
        The block.
    budgets
        Budgets to plan for, from the least that is found feasible up to everything; at
        least 2. Plans that are worse in every respect are left out.

    Raises
    ------
    InvalidGraphError
        If ``budgets`` is no integer of 2 to :data:`MOST_BUDGETS`.
    SolverUnsuitableError
        As for :func:`~remat.algorithms.chains.stage_joins.plan_stage_join`.

    Notes
    -----
    For B budgets: time O(B) times that of
    :func:`~remat.algorithms.chains.stage_joins.plan_stage_join`, and of some ten more
    with 100 slots for the least budget.

    References
    ----------
    X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O. Beaumont. Rockmate: an
    efficient, fast, automatic and generic tool for re-materialization in PyTorch. ICML
    2023 (options per stage; the decomposition of joins was derived here).

    Examples
    --------
    >>> branch = StageChain.of_lists(
    ...     forward_ns=[5] * 3, backward_ns=[9] * 3, output_bytes=[2] * 3
    ... )
    >>> inside = block_stage(Block(branches=(branch, branch), output_bytes=2))
    >>> [(option.saved_bytes, option.backward_ns) for option in inside.stage.options]
    [(4, 79), (6, 69), (12, 54)]
    """
    checked_record("block", block, Block, error=InvalidGraphError)
    budgets = checked_integer(
        "budgets", budgets, least=2, most=MOST_BUDGETS, error=InvalidGraphError
    )
    extra = block.output_bytes + block.output_gradient_bytes
    join = StageJoin(branches=block.branches, turn_workspace_bytes=extra)
    most = 2 * sum(join.all_sizes)
    least = least_budget(
        lambda budget: plan_stage_join(join, budget, slots=100),
        most,
        tolerance_bytes=most // 1000,
    )
    found: dict[tuple[Operation, ...], StageOption] = {}
    for index in range(budgets):
        budget = least + (most - least) * index * index // (budgets - 1) ** 2
        plan = plan_stage_join(join, budget)
        if plan is not None:
            found[plan.operations] = _option(block, plan.operations)
    kept = [
        (operations, option)
        for operations, option in found.items()
        if not any(_is_better(other, option) for other in found.values())
    ]
    plain = tuple(
        Forward(stage, branch)
        for branch, chain in enumerate(block.branches)
        for stage in range(len(chain.stages))
    )
    stage = Stage(
        forward_ns=_plain_forward_ns(block),
        output_bytes=block.output_bytes,
        gradient_bytes=block.gradient_bytes,
        forward_workspace_bytes=_plain_workspace(block),
        options=tuple(option for _, option in kept),
        name=block.name,
    )
    return BlockStage(
        stage=stage, plain=plain, plans=tuple(operations for operations, _ in kept)
    )


def _plain_forward_ns(block: Block) -> int:
    inside = (stage.forward_ns for branch in block.branches for stage in branch.stages)
    return block.merge_forward_ns + sum(inside)


def _plain_workspace(block: Block) -> int:
    """Return the most bytes beyond the output while a block runs and keeps nothing."""
    done = most = 0
    for branch in block.branches:
        for index, stage in enumerate(branch.stages):
            source = branch.value_bytes[index]
            own = source + stage.output_bytes + stage.forward_workspace_bytes
            most = max(most, done + own)
        done += branch.value_bytes[-1]
    return max(most - block.output_bytes, done)


def _option(block: Block, operations: tuple[Operation, ...]) -> StageOption:
    """Return what a plan of the inside means outside, measured by the judge."""
    form = BlockGraph(block, operations)
    trace = simulate(form.graph, single_device(), form.schedule)
    if trace.violation is not None:
        msg = f"the plan of block {block.name!r} does not replay: {trace.violation}"
        raise AssertionError(msg)
    kinds = [type(step).__name__ for step in form.schedule.steps]
    boundary = kinds.index("Boundary")
    used = trace.timeline_bytes[0]
    tangent, output = block.output_gradient_bytes, block.output_bytes
    # Before the boundary the merged value is live; at it the gradient is as well.
    saved = used[boundary] - output - tangent
    forward = sum(
        form.graph.ops[op].cost_ns[0] or 0
        for op in form.order[: form.order.index(BOUNDARY)]
    )
    outside = tangent + form.input_gradient_bytes
    return StageOption(
        forward_ns=forward,
        backward_ns=trace.serial_ns - forward,
        saved_bytes=saved,
        needs_output=False,
        forward_workspace_bytes=max(max(used[:boundary]) - saved - output, 0),
        backward_workspace_bytes=max(max(used[boundary + 1 :]) - saved - outside, 0),
    )


def _is_better(one: StageOption, other: StageOption) -> bool:
    """Whether an option is at least as good in every respect, and better in one."""

    def respects(option: StageOption) -> tuple[int, ...]:
        return (
            (option.forward_ns or 0) + option.backward_ns,
            option.saved_bytes,
            option.forward_workspace_bytes,
            option.saved_bytes + option.backward_workspace_bytes,
        )

    pairs = list(zip(respects(one), respects(other), strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
