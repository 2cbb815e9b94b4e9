"""Joins of two chains that run their turn twice: less memory, at times less time.

:mod:`remat.algorithms.chains.joins` is optimal among schedules that run the turn once.
If the turn may run again, the gradient of a branch that waits can be dropped, and
brought back by advancing *both* branches to the turn once more. That is feasible with
less memory than one turn needs, and cheaper at the tightest budgets for branches of six
or more stages.

:func:`plan_two_turns` returns the best schedule of this kind:

1. advance both branches, keeping values of both; turn; drop the second gradient;
2. reverse the first branch, in what the second one's ``h`` values leave; on the way
   keep one of its values, from which its last value is brought back later;
3. advance both branches to the turn again, keeping more values of the second; turn;
   drop the first gradient; reverse the second branch alone.

It is optimal among schedules of these three phases that reverse segments without
interruption (the value kept in phase 2 may lie inside a segment). No backward stage
runs twice. Exhaustive search has found nothing better than the better of this and one
turn (:func:`plan_join_any_turns`) on any pair of branches looked at; more branches,
more turns and repeated backward stages are not considered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from remat.algorithms.chains.conventions import MemoryConvention, checked_convention
from remat.algorithms.chains.join_tables import INFINITE, Segments
from remat.algorithms.chains.joins import checked_costs, plan_join, useful_units
from remat.algorithms.chains.operations import Backward, Forward, Turn, UnitOperation
from remat.algorithms.chains.plans import UnitPlan
from remat.core.checks import checked_integer
from remat.core.errors import InvalidGraphError, SolverUnsuitableError
from remat.core.units import LARGEST_TOTAL

MAX_STAGES_TWICE = 100
"""Most stages of a branch for which two turns are planned."""

MAX_WORK_TWICE = 50_000_000
"""Most steps, M^2 l^2 + M l^4, that two turns may take: about half a minute."""

_Runs = list[tuple[bool, int]]


def plan_two_turns(
    stage_costs: Sequence[Sequence[int]],
    memory_units: int,
    convention: MemoryConvention,
) -> UnitPlan | None:
    """Return the best schedule of a join of two chains that turns twice.

    Parameters
    ----------
    stage_costs
        The forward costs of each stage of two branches.
    memory_units
        Units that all counted values have to fit in at any time.
    convention
        Which values count; not the strict one with uncounted gradients.

    Returns
    -------
    UnitPlan or None
        The schedule, without pieces; ``None`` if none fits.

    Raises
    ------
    InvalidGraphError
        As for :func:`~remat.algorithms.chains.joins.plan_join`.
    SolverUnsuitableError
        If there are not two branches, one is longer than :data:`MAX_STAGES_TWICE`, the
        work is more than :data:`MAX_WORK_TWICE`, or the convention is not covered.

    Notes
    -----
    Time O(M^2 l^2 + M l^4) for the longer branch, in Python: meant for tight budgets
    and tens of stages.

    References
    ----------
    O. Beaumont, J. Herrmann, G. Pallez, A. Shilova. Optimal memory-aware
    backpropagation of deep join networks. Phil. Trans. R. Soc. A 378, 2020 (the
    problem; the program was derived here).

    Examples
    --------
    >>> from remat.algorithms.chains.conventions import IN_PLACE
    >>> plan_join([[1, 1]] * 2, 4, IN_PLACE) is None
    True
    >>> plan_two_turns([[1, 1]] * 2, 4, IN_PLACE).forward_cost
    8
    """
    checked_convention(convention)
    costs = checked_costs(stage_costs)
    units = useful_units(costs, memory_units)
    if len(costs) != 2 or convention.move_needs_two:
        msg = (
            f"two turns are planned for two branches, not {len(costs)}, and not for the "
            "strict convention with uncounted gradients; use plan_join"
        )
        raise SolverUnsuitableError(msg)
    length = max(map(len, costs))
    if length > MAX_STAGES_TWICE:
        msg = (
            f"two turns are planned for branches of at most {MAX_STAGES_TWICE} stages, "
            f"not {length}; use plan_join"
        )
        raise SolverUnsuitableError(msg)
    work = units * length**2 * (units + length**2)
    if work > MAX_WORK_TWICE:
        msg = (
            f"two turns for {units} units and branches of {length} stages take {work:_} "
            f"steps; at most {MAX_WORK_TWICE:_} are taken: use plan_join, or less memory"
        )
        raise SolverUnsuitableError(msg)
    plans = [_TwoTurns(costs, first, units, convention).plan() for first in (0, 1)]
    found = [
        replace(plan, memory_units=int(memory_units))
        for plan in plans
        if plan is not None
    ]
    return min(found, key=lambda plan: plan.forward_cost, default=None)


def plan_join_any_turns(
    stage_costs: Sequence[Sequence[int]],
    memory_units: int,
    convention: MemoryConvention,
    *,
    turn_cost: int = 0,
) -> UnitPlan | None:
    """Return the better of one turn and, for two branches, of two turns.

    Two turns are not tried where :func:`plan_two_turns` refuses them.

    Parameters
    ----------
    stage_costs
        Per branch the forward cost of each stage, as for
        :func:`~remat.algorithms.chains.joins.plan_join`.
    memory_units
        Units that all counted values have to fit in at any time.
    convention
        Which values count, and whether outputs may replace inputs.
    turn_cost
        Cost of a turn, in the unit of the stages' costs, at least 0: a second turn has
        to be worth it.

    Returns
    -------
    UnitPlan or None
        The cheaper schedule; ``None`` if neither kind fits.

    Raises
    ------
    InvalidGraphError, SolverUnsuitableError
        As for :func:`~remat.algorithms.chains.joins.plan_join`.

    Notes
    -----
    For the longer branch of l stages and M units: time O(M l^3 + M^2 l^2 + M l^4).

    References
    ----------
    O. Beaumont, J. Herrmann, G. Pallez, A. Shilova. Optimal memory-aware
    backpropagation of deep join networks. Phil. Trans. R. Soc. A 378, 2020 (the
    problem; the program was derived here).

    Examples
    --------
    >>> from remat.algorithms.chains.conventions import IN_PLACE
    >>> [plan_join_any_turns([[1] * 20] * 2, m, IN_PLACE).forward_cost for m in (5, 6)]
    [156, 123]
    """
    turn_cost = checked_integer(
        "turn_cost", turn_cost, least=0, most=LARGEST_TOTAL, error=InvalidGraphError
    )
    once = plan_join(stage_costs, memory_units, convention)
    if len(stage_costs) != 2 or convention.move_needs_two:
        return once
    try:
        twice = plan_two_turns(stage_costs, memory_units, convention)
    except SolverUnsuitableError:
        return once  # Too much work, as is said above.
    if once is None or twice is None:
        return once or twice
    return twice if twice.forward_cost + turn_cost < once.forward_cost else once


@dataclass(frozen=True, slots=True)
class _Step:
    """A segment of the first branch, and the value kept in it (-1: none)."""

    base: int
    end: int
    units: int
    kept: int


class _TwoTurns:
    def __init__(
        self,
        costs: list[list[int]],
        first: int,
        memory_units: int,
        convention: MemoryConvention,
    ) -> None:
        self.costs = costs
        self.first, self.second = first, 1 - first
        self.memory, self.convention = memory_units, convention
        self.busy = convention.gradient_units + convention.transient_units
        self.credit = int(not convention.counts_inputs)
        self.segments = [Segments(c, move_needs_two=False) for c in costs]
        self.length = len(costs[first])
        self.keeping = cache(self._keeping)
        self.before = cache(self._before)
        self.after = cache(self._after)

    def replay(self, value: int) -> int:
        until = self.segments[self.first].until
        return until[-1] - until[value]

    # --- a segment in which one value is kept -------------------------------------

    def splits_keeping(
        self, base: int, end: int, kept: int, units: int
    ) -> Iterator[tuple[int, int]]:
        segments = self.segments[self.first]
        for split in range(base + 1, end):
            sweep = segments.until[split] - segments.until[base]
            if split < kept:
                upper = self.keeping(split, end, kept, units - 1)
                lower = segments.cost(base, split, units - 1)
            elif split == kept:
                upper = segments.cost(split, end, units - 1)
                lower = segments.cost(base, split, units - 1)
            else:
                upper = segments.cost(split, end, units - 1)
                lower = self.keeping(base, split, kept, units)
            yield min(sweep + upper + lower, INFINITE), split

    def _keeping(self, base: int, end: int, kept: int, units: int) -> int:
        if units < 1:
            return INFINITE
        splits = self.splits_keeping(base, end, kept, units)
        return min((cost for cost, _ in splits), default=INFINITE)

    def reverse_keeping(self, base: int, end: int, kept: int, units: int) -> _Runs:
        segments = self.segments[self.first]
        _, split = min(self.splits_keeping(base, end, kept, units))
        sweep = [(True, stage) for stage in range(base, split)]
        if split < kept:
            upper = self.reverse_keeping(split, end, kept, units - 1)
        else:
            upper = segments.reverse(split, end, units - 1)
        if split <= kept:
            return [*sweep, *upper, *segments.reverse(base, split, units - 1)]
        return [*sweep, *upper, *self.reverse_keeping(base, split, kept, units)]

    # --- phase 2: the first branch -------------------------------------------------

    def steps(
        self, end: int, stored: int, held: int, is_kept: int
    ) -> Iterator[tuple[int, _Step, int]]:
        """Yield cost of the rest, the next step, and whether a value is then kept.

        ``stored`` values of the branch, pinned input included, ``held`` of the other.
        """
        used = stored + held - 2 * self.credit + self.busy + is_kept
        units = self.memory - used
        if units < 0:
            return
        segments = self.segments[self.first]
        for base in range(end):
            plain = segments.cost(base, end, units)
            if plain < INFINITE:
                yield plain, _Step(base, end, units, -1), is_kept
            if is_kept:
                continue
            # The pinned input is there in the end without being kept.
            if plain < INFINITE and (base > 0 or not self.credit):
                yield plain + self.replay(base), _Step(base, end, units, base), 1
            for kept in range(base + 1, end):
                cost = self.keeping(base, end, kept, units)
                if cost < INFINITE:
                    yield cost + self.replay(kept), _Step(base, end, units, kept), 1

    def _before(self, end: int, stored: int, held: int, is_kept: int) -> int:
        if end == 0:
            is_there = is_kept or self.credit
            if stored != 0 or not is_there:
                return INFINITE
            return 0 if is_kept else self.replay(0)
        if stored < 1:
            return INFINITE
        costs = (
            cost + self.before(step.base, stored - 1, held, then)
            for cost, step, then in self.steps(end, stored, held, is_kept)
        )
        return min(min(costs, default=INFINITE), INFINITE)

    def reverse_first(self, stored: int, held: int, is_kept: int) -> tuple[_Runs, int]:
        """Return what runs in phase 2, and the value from which to advance again."""
        runs: _Runs = []
        end, value = self.length, self.length if is_kept else 0
        while end:
            cost, step, then = min(
                self.steps(end, stored, held, is_kept),
                key=lambda s: s[0] + self.before(s[1].base, stored - 1, held, s[2]),
            )
            del cost
            if step.kept > step.base:
                runs += self.reverse_keeping(step.base, end, step.kept, step.units)
            else:
                segments = self.segments[self.first]
                runs += segments.reverse(step.base, end, step.units)
            value = step.kept if step.kept >= 0 else value
            end, stored, is_kept = step.base, stored - 1, then
        return runs, value

    # --- phase 3: the second branch ------------------------------------------------

    def splits_after(
        self, end: int, stored: int, held: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield cost of the rest, base and units; advancing again is in the cost."""
        segments = self.segments[self.second]
        units = self.memory - (stored - self.credit) - self.busy
        for base in range(end):
            again = 0
            if stored >= held:
                again = segments.until[end] - segments.until[base]
            here = segments.cost(base, end, units)
            if here < INFINITE:
                rest = self.after(base, stored - 1, held)
                yield min(again + here + rest, INFINITE), base, units

    def _after(self, end: int, stored: int, held: int) -> int:
        if end == 0 or stored < 1:
            return 0 if end == stored == 0 else INFINITE
        splits = self.splits_after(end, stored, held)
        return min((cost for cost, _, _ in splits), default=INFINITE)

    # --- all of it --------------------------------------------------------------------

    def fits_turn(self, stored: int, *, is_top_kept: int = 0) -> bool:
        """Whether a turn fits with ``stored`` values, the last ones not counted."""
        gradients = 2 * self.convention.gradient_units
        if self.convention.overwrites_inputs:
            return stored + max(2, is_top_kept + gradients) <= self.memory
        return stored + 2 + gradients <= self.memory

    def choices(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield cost, then values kept: of each branch at the turns, and the top."""
        most = self.memory + 2 * self.credit
        last = len(self.costs[self.second])
        for held in range(1, min(most, last) + 1):
            finals = [
                (self.after(last, stored, held), stored)
                for stored in range(held, min(most, last) + 1)
                if self.fits_turn(stored - self.credit)
            ]
            if not finals:
                continue
            final, final_stored = min(finals)
            for stored in range(1, min(most, self.length) + 1):
                for top in (0, 1):
                    at_turn = stored + held - 2 * self.credit
                    if self.fits_turn(at_turn, is_top_kept=top):
                        cost = self.before(self.length, stored, held, top)
                        if cost + final < INFINITE:
                            yield cost + final, held, stored, top, final_stored

    def plan(self) -> UnitPlan | None:
        best = min(self.choices(), default=None)
        if best is None:
            return None
        cost, held, stored, top, final_stored = best
        first = [(True, stage) for stage in range(self.length)]
        second = [(True, stage) for stage in range(len(self.costs[self.second]))]
        runs, value = self.reverse_first(stored, held, top)
        back: _Runs = []
        end, left, highest = len(second), final_stored, 0
        while end:
            _, base, units = min(self.splits_after(end, left, held))
            if left == held:
                highest = base
            back += self.segments[self.second].reverse(base, end, units)
            end, left = base, left - 1
        operations = [
            *self.named(first, self.first),
            *self.named(second, self.second),
            Turn(),
            *self.named(runs, self.first),
            *self.named(first[value:], self.first),
            *self.named(second[highest:], self.second),
            Turn(),
            *self.named(back, self.second),
        ]
        return UnitPlan(
            lengths=tuple(len(branch) for branch in self.costs),
            memory_units=self.memory,
            convention=self.convention,
            forward_cost=cost + sum(map(sum, self.costs)),
            pieces=(),
            operations=tuple(operations),
        )

    def named(self, runs: _Runs, branch: int) -> list[UnitOperation]:
        return [
            Forward(stage, branch) if is_forward else Backward(stage, branch)
            for is_forward, stage in runs
        ]
