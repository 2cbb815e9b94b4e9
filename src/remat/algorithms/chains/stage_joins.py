"""Joins of chains of unequal stages: siamese, triplet and cross-modal models.

Several chains of :class:`~remat.algorithms.chains.stages.Stage` meet in one turn, the
loss. Sizes are bytes, quantised as for :mod:`remat.algorithms.chains.rotor`; stages
have options.

What is optimal. :func:`plan_stage_join` returns the least quantised time among
schedules that compute every stage once before the turn, run the turn and every
backward once,
interleave the branches in any way between stored items, and reverse what lies between
two stored items of a branch as :func:`~remat.algorithms.chains.rotor.plan_rotor` would
in the memory that is free then. Not of this class: to leave a branch at a value that
was computed again, reverse another, come back. That may fit where nothing else does.

One thing is not part of the program's state: whether the forward pass fits before the
turn. Where the cheapest candidate's does not, in any order of branches, the next one is
tried, and ``least_ns`` of the answer says how cheap the first was: if it is the
answer's ``cost_ns``, the answer is the optimum of this class.

Shared parameters. Branches with the same parameters have the same stages; gradients of
parameters are no stage's concern, and are to be counted once, outside of the budget
given here.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod

from remat.algorithms.chains.joins import check_worst_ns
from remat.algorithms.chains.rotor import (
    DEFAULT_SLOTS,
    MAX_TABLE_BYTES,
    ChainPlan,
    chain_numbers,
    checked_request,
    everything_slots,
    operation_of,
    table_bytes,
    worst_ns,
)
from remat.algorithms.chains.stage_join_tables import MAX_BRANCHES, stage_join_plan
from remat.algorithms.chains.stages import StageChain, check_total
from remat.core.checks import checked_record, keep_records
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.units import ceil_slots, floor_slots, format_bytes, keep_amounts

MIN_SLOTS = 16
"""Fewest slots to which a large table is coarsened."""


@dataclass(frozen=True, kw_only=True)
class StageJoin:
    """Chains of stages whose last outputs meet in one turn.

    Parameters
    ----------
    branches
        The chains, at least one. Their own turns must be free: time and workspace 0.
    turn_ns, turn_workspace_bytes
        Time and scratch memory of the turn, during which all last outputs and all their
        gradients are live.

    Raises
    ------
    InvalidGraphError
        If there is no branch, a branch has a turn, a number is no integer or out of
        range, or all sizes together are more than
        :data:`~remat.core.units.LARGEST_TOTAL`.
    """

    branches: tuple[StageChain, ...]
    turn_ns: int = 0
    turn_workspace_bytes: int = 0

    def __post_init__(self) -> None:
        of, error = "a join", InvalidGraphError
        keep_records(self, StageChain, "branches", of=of, error=error)
        if not self.branches:
            msg = "a join needs at least one branch; got none"
            raise InvalidGraphError(msg)
        keep_amounts(self, "turn_ns", "turn_workspace_bytes", of=of, error=error)
        check_total(of, self.all_sizes)
        for index, branch in enumerate(self.branches):
            if branch.turn_ns or branch.turn_workspace_bytes:
                msg = (
                    f"branch {index} has a turn of {branch.turn_ns} ns and "
                    f"{branch.turn_workspace_bytes} bytes of its own; only the join has "
                    "a turn"
                )
                raise InvalidGraphError(msg)

    @classmethod
    def of_chain(cls, chain: StageChain) -> "StageJoin":
        """Return a chain as a join of one branch."""
        return cls(
            branches=(replace(chain, turn_ns=0, turn_workspace_bytes=0),),
            turn_ns=chain.turn_ns,
            turn_workspace_bytes=chain.turn_workspace_bytes,
        )

    @cached_property
    def least_ns(self) -> int:
        """Time of the step if every stage runs its cheapest option once."""
        return self.turn_ns + sum(branch.least_ns for branch in self.branches)

    @cached_property
    def all_sizes(self) -> tuple[int, ...]:
        """Every size in bytes that occurs in the join."""
        inside = (size for branch in self.branches for size in branch.all_sizes)
        return (*inside, self.turn_workspace_bytes)


@dataclass(frozen=True, kw_only=True)
class StageJoinPlan(ChainPlan):
    """A schedule of a join of chains of stages.

    Parameters
    ----------
    least_ns
        Time of the cheapest candidate, whether its forward pass fits or not: no
        schedule of the class is quicker on quantised sizes.
    """

    least_ns: int


def plan_stage_join(
    join: StageJoin,
    budget_bytes: int,
    *,
    slots: int = DEFAULT_SLOTS,
    beyond_persistence: bool = True,
    max_table_bytes: int = MAX_TABLE_BYTES,
) -> StageJoinPlan | None:
    """Return the quickest schedule of a join that the program finds.

    Parameters
    ----------
    join
        The join; at most :data:`MAX_BRANCHES` branches.
    budget_bytes
        Most bytes live at any time, the branches' inputs included; at least 0.
    slots
        Most slots that the budget is divided into, at least 1; fewer are used if the
        tables would exceed their limit.
    beyond_persistence
        Whether stored values may be dropped before their last use.
    max_table_bytes
        Limit of the tables in bytes, at most :data:`~remat.native.MOST_TABLE_BYTES`.

    Returns
    -------
    StageJoinPlan or None
        ``None`` if no schedule of the class was found within the quantised budget.

    Raises
    ------
    InvalidGraphError
        If a number is no integer or out of range, or times may overflow.
    SolverUnsuitableError
        If there are too many branches, or the tables would take more than
        ``max_table_bytes`` with 16 slots.

    Notes
    -----
    For branches of l_j stages with K options and S slots: time
    O(S K^2 (sum l_j^3 + sum l_j prod l_j K)), memory S prod(1 + l_j (1 + K)) numbers
    and the tables of Rotor for each branch.

    References
    ----------
    O. Beaumont, J. Herrmann, G. Pallez, A. Shilova. Optimal memory-aware
    backpropagation of deep join networks. Phil. Trans. R. Soc. A 378, 2020 (the
    problem; the program was derived here).

    Examples
    --------
    >>> branch = StageChain.of_lists(
    ...     forward_ns=[1] * 3, backward_ns=[0] * 3, output_bytes=[1] * 3, input_bytes=1
    ... )
    >>> join = StageJoin(branches=(branch, branch))
    >>> [plan_stage_join(join, budget).cost_ns for budget in (7, 8, 9)]
    [10, 9, 8]
    """
    budget_bytes, slots, max_table_bytes = checked_request(
        budget_bytes, slots, beyond_persistence, max_table_bytes
    )
    _check(join)
    common = gcd(*join.all_sizes)
    count = min(slots, _affordable_slots(join, max_table_bytes))
    if common and floor_slots(budget_bytes, common) <= count:
        slot_bytes = common
    else:
        slot_bytes = max(ceil_slots(budget_bytes, count), 1)
    most = sum(everything_slots(branch, slot_bytes) for branch in join.branches)
    most += ceil_slots(join.turn_workspace_bytes, slot_bytes) + 1
    found = stage_join_plan(
        [chain_numbers(branch) for branch in join.branches],
        (join.turn_ns, join.turn_workspace_bytes),
        slot_bytes,
        min(floor_slots(budget_bytes, slot_bytes), most),
        beyond_persistence,
    )
    if found is None:
        return None
    cost, least, order = found
    return StageJoinPlan(
        cost_ns=cost,
        least_ns=least,
        operations=tuple(operation_of(k, s, o, b) for k, b, s, o in order),
        slot_bytes=slot_bytes,
    )


def stage_join_table_bytes(join: StageJoin, slots: int) -> int:
    """Return the bytes that the tables of :func:`plan_stage_join` take at most."""
    nodes = (
        1 + sum(1 + len(stage.options) for stage in branch.stages)
        for branch in join.branches
    )
    own = sum(table_bytes(branch, slots) for branch in join.branches)
    return 8 * prod(nodes) * (slots + 1) + own


def _affordable_slots(join: StageJoin, max_table_bytes: int) -> int:
    one = stage_join_table_bytes(join, 0)
    count = max_table_bytes // one - 1
    if count < MIN_SLOTS:
        lengths = [len(branch.stages) for branch in join.branches]
        needed = stage_join_table_bytes(join, MIN_SLOTS)
        msg = (
            f"the tables of a join of branches of {lengths} stages take "
            f"{format_bytes(needed)} with {MIN_SLOTS} slots, more than the limit of "
            f"{format_bytes(max_table_bytes)}; merge stages, drop options, treat the "
            "join as a chain, or raise the limit"
        )
        raise SolverUnsuitableError(msg)
    return count


def _check(join: StageJoin) -> None:
    checked_record("join", join, StageJoin, error=InvalidGraphError)
    if len(join.branches) > MAX_BRANCHES:
        msg = (
            f"a join of {len(join.branches)} branches; at most {MAX_BRANCHES} are "
            "planned together: merge branches, or treat the join as a chain"
        )
        raise SolverUnsuitableError(msg)
    check_worst_ns(join.turn_ns + sum(worst_ns(branch) for branch in join.branches))
