"""Rotor: chains of unequal stages, by dynamic programming over memory.

What is optimal. :func:`plan_rotor` with ``beyond_persistence=False`` returns the least
time among *persistent* schedules: every backward runs once, and a value that is stored
for a later backward stays until its last use. This is the published program, with every
operation's own need checked where the published one checks that of the whole sweep, so
it may be quicker, never slower. Sizes are quantised: see :func:`slot_size`.

With unequal sizes persistence costs something. By default the program therefore also
considers schedules that keep what a stage saved inside but drop the stage's input, and
bring the input back later (:mod:`remat.algorithms.chains.rotor_tables`); the answer is
never slower than the persistent one. It is not always the optimum over all schedules,
but on short random chains it nearly is (``studies/results/chains.jsonl``).

References
----------
O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova. Optimal checkpointing
for heterogeneous chains: how to train deep neural networks with limited memory.
arXiv:1911.13214, 2019; ACM TOMS.
X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O. Beaumont. Rockmate: an efficient,
fast, automatic and generic tool for re-materialization in PyTorch. ICML 2023 (several
options per stage).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from remat.algorithms.chains.conventions import checked_budget
from remat.algorithms.chains.joins import check_worst_ns, checked_table_bytes
from remat.algorithms.chains.operations import Backward, Forward, Operation, Turn
from remat.algorithms.chains.rotor_tables import (
    ADVANCE,
    BACKWARD,
    SAVE,
    TURN,
    ChainNumbers,
    Option,
    rotor_plan,
)
from remat.algorithms.chains.stages import StageChain, StageOption
from remat.core.checks import checked_flag, checked_integer, checked_record
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.units import LARGEST_TOTAL, ceil_slots, floor_slots, format_bytes

DEFAULT_SLOTS = 500
"""Slots that the budget is divided into, unless sizes have a common divisor."""

MAX_TABLE_BYTES = 2**30
"""Default limit of the tables, in bytes."""


@dataclass(frozen=True, kw_only=True)
class ChainPlan:
    """A schedule of a chain of stages.

    Parameters
    ----------
    cost_ns
        Time of everything that runs.
    operations
        What runs, in order; values are discarded at their last use.
    slot_bytes
        Unit to which sizes were rounded up.
    """

    cost_ns: int
    operations: tuple[Operation, ...]
    slot_bytes: int


def plan_rotor(
    chain: StageChain,
    budget_bytes: int,
    *,
    slots: int = DEFAULT_SLOTS,
    beyond_persistence: bool = True,
    max_table_bytes: int = MAX_TABLE_BYTES,
) -> ChainPlan | None:
    """Return the quickest schedule of a chain that the program finds.

    Parameters
    ----------
    chain
        The chain.
    budget_bytes
        Most bytes live at any time, the chain's input included; at least 0.
    slots
        Most slots that the budget is divided into, at least 1.
    beyond_persistence
        Whether stored values may be dropped before their last use.
    max_table_bytes
        Limit of the tables in bytes, at most :data:`~remat.native.MOST_TABLE_BYTES`.

    Returns
    -------
    ChainPlan or None
        ``None`` if no schedule of the class fits the quantised budget.

    Raises
    ------
    InvalidGraphError
        If a number is no integer or out of range, or times may overflow.
    SolverUnsuitableError
        If the tables would take more than ``max_table_bytes``.

    Notes
    -----
    For L stages, S slots and K options: time O(S L^3) for persistent schedules and
    O(S L^3 K^2) beyond, memory O(S L^2) and O(S L^2 K).

    References
    ----------
    O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova. Optimal
    checkpointing for heterogeneous chains. arXiv:1911.13214, 2019.

    Examples
    --------
    >>> chain = StageChain.of_lists(
    ...     forward_ns=[1] * 5, backward_ns=[0] * 5, output_bytes=[1] * 5, input_bytes=1
    ... )
    >>> plans = [plan_rotor(chain, budget) for budget in (4, 5, 6, 7, 8)]
    >>> [plan and plan.cost_ns for plan in plans]
    [None, 11, 7, 6, 5]
    """
    budget_bytes, slots, max_table_bytes = checked_request(
        budget_bytes, slots, beyond_persistence, max_table_bytes
    )
    checked_record("chain", chain, StageChain, error=InvalidGraphError)
    check_worst_ns(worst_ns(chain))
    slot_bytes = slot_size(chain, budget_bytes, slots)
    count = min(
        floor_slots(budget_bytes, slot_bytes), everything_slots(chain, slot_bytes)
    )
    needed = table_bytes(chain, count, beyond_persistence=beyond_persistence)
    if needed > max_table_bytes:
        msg = (
            f"the tables of Rotor for {len(chain.stages)} stages and {count} slots take "
            f"{format_bytes(needed)}, more than the limit of "
            f"{format_bytes(max_table_bytes)}; merge stages, use fewer slots or options, "
            "or raise the limit"
        )
        raise SolverUnsuitableError(msg)
    found = rotor_plan(chain_numbers(chain), slot_bytes, count, beyond_persistence)
    if found is None:
        return None
    cost, order = found
    operations = tuple(operation_of(*entry) for entry in order)
    return ChainPlan(cost_ns=cost, operations=operations, slot_bytes=slot_bytes)


def least_budget(
    plan: Callable[[int], object | None], most_bytes: int, *, tolerance_bytes: int = 0
) -> int:
    """Return the least budget for which a program finds a plan, by bisection.

    Parameters
    ----------
    plan
        Takes a budget in bytes and returns a plan or ``None``.
    most_bytes
        A budget for which there is a plan, such as the sum of all sizes twice.
    tolerance_bytes
        How far above the least the answer may be.

    Raises
    ------
    InvalidGraphError
        If a number is no integer of at least 0.

    Notes
    -----
    Quantisation may make a program fail above a budget for which it succeeds; the
    answer is then a budget for which it succeeds, not always the least.

    Examples
    --------
    >>> least_budget(lambda budget: True if budget >= 37 else None, 1000)
    37
    """
    low, high = (
        -1,
        checked_integer("most_bytes", most_bytes, least=0, error=InvalidGraphError),
    )
    tolerance_bytes = checked_integer(
        "tolerance_bytes", tolerance_bytes, least=0, error=InvalidGraphError
    )
    while high - low > max(tolerance_bytes, 1):
        middle = (low + high) // 2
        if plan(middle) is None:
            low = middle
        else:
            high = middle
    return high


def slot_size(chain: StageChain, budget_bytes: int, slots: int) -> int:
    """Return the bytes of a slot: as coarse as is exact, or as fine as is allowed.

    If the greatest common divisor of all sizes divides the budget into no more than
    ``slots`` slots, rounding loses nothing. Otherwise a slot is the budget over
    ``slots``, rounded up; sizes round up and the budget rounds down, so schedules stay
    within it.

    Examples
    --------
    >>> from remat.algorithms.chains.stages import Stage, StageOption
    >>> option = StageOption(forward_ns=1, backward_ns=2, saved_bytes=600)
    >>> stage = Stage(forward_ns=1, output_bytes=300, options=(option,))
    >>> chain = StageChain(stages=(stage,))
    >>> slot_size(chain, 3000, 500), slot_size(chain, 3001, 5)
    (300, 601)
    """
    budget_bytes = checked_budget(budget_bytes)
    slots = checked_integer("slots", slots, least=1, error=InvalidGraphError)
    common = gcd(*chain.all_sizes)
    if common and floor_slots(budget_bytes, common) <= slots:
        return common
    return max(ceil_slots(budget_bytes, slots), 1)


def everything_slots(chain: StageChain, slot_bytes: int) -> int:
    """Return slots that hold all values, gradients and workspaces at once."""
    total = sum(ceil_slots(size, slot_bytes) for size in chain.all_sizes)
    return total + len(chain.stages)


def table_bytes(
    chain: StageChain, slots: int, *, beyond_persistence: bool = True
) -> int:
    """Return the bytes that the tables of :func:`plan_rotor` take at most."""
    length = len(chain.stages) + 1
    cells = length * (length + 1) // 2
    if beyond_persistence:
        cells += sum(
            (index + 1) * len(stage.options) for index, stage in enumerate(chain.stages)
        )
    return 8 * cells * (slots + 1)


def checked_request(
    budget_bytes: object, slots: object, beyond: object, max_table_bytes: object
) -> tuple[int, int, int]:
    """Return budget, slots and limit of the tables, or raise ``InvalidGraphError``."""
    checked_flag("beyond_persistence", beyond, error=InvalidGraphError)
    return (
        checked_budget(budget_bytes),
        checked_integer(
            "slots", slots, least=1, most=LARGEST_TOTAL, error=InvalidGraphError
        ),
        checked_table_bytes(max_table_bytes),
    )


def worst_ns(chain: StageChain) -> int:
    """Return a time that no schedule without needless work exceeds."""
    # A stage is advanced over at most once per stage above it.
    forward = max(
        max(stage.forward_ns, *(o.forward_ns or 0 for o in stage.options))
        for stage in chain.stages
    )
    backward = max(o.backward_ns for stage in chain.stages for o in stage.options)
    length = len(chain.stages) + 1
    return length * length * forward + length * backward + chain.turn_ns


def chain_numbers(chain: StageChain) -> ChainNumbers:
    """Return a chain as :mod:`remat.algorithms.chains.rotor_tables` takes it."""
    return (
        list(chain.value_bytes),
        list(chain.gradient_bytes),
        [stage.forward_ns for stage in chain.stages],
        [stage.forward_workspace_bytes for stage in chain.stages],
        [[_numbers(option) for option in stage.options] for stage in chain.stages],
        (chain.turn_ns, chain.turn_workspace_bytes),
    )


def _numbers(option: StageOption) -> Option:
    return (
        -1 if option.forward_ns is None else option.forward_ns,
        option.backward_ns,
        option.saved_bytes,
        option.needs_output,
        option.forward_workspace_bytes,
        option.backward_workspace_bytes,
    )


def operation_of(kind: int, stage: int, option: int, branch: int = 0) -> Operation:
    """Return what an entry of an answer of the tables says."""
    if kind == ADVANCE:
        return Forward(stage, branch)
    if kind == SAVE:
        return Forward(stage, branch, option)
    if kind == BACKWARD:
        return Backward(stage, branch, option)
    if kind == TURN:
        return Turn()
    msg = f"unknown kind of operation {kind}"
    raise AssertionError(msg)
