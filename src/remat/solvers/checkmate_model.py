"""Checkmate's mixed-integer program over frontier-advancing stages.

Per stage ``t``: ``R[t, k]`` says that node ``k`` runs, ``S[t, i]`` that item ``i`` is
kept into the stage, ``FREE[t, i, k]`` that it is freed right after node ``k``, and
``U[t, k]`` are the bytes live after node ``k`` has written. Two sets of rows:

*published* as in Jain et al., MLSys 2020, equations 1b, 1c, 2, 3, 7a to 7c and 8.

*tight* "presence-flow" rows. An item is present in a stage if it is kept into it or
computed in it, ``P = R + S``, and what is present flows to where it is freed or to the
next stage: a use needs presence and no earlier free; frees and keeping sum to at most
``P``; a free needs its node to run. With these ``FREE`` may be continuous. Two more
rows cut only schedules that are no better than others: nothing is both kept and
computed, and a recomputation is used or kept.

An item is freed after the node that wrote it if that node has several outputs, or is
not the last of its stage; what is live after the last node of a stage and not kept
into the next one goes at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from remat.backends.mathopt import Model, Solution
from remat.core.deadline import check_time
from remat.core.units import ceil_slots, floor_slots
from remat.solvers.frontier import Frontier

ZERO, ONE = -1, -2
"""Stand for constants where others are indices of variables."""

MOST_EXACT_SLOTS = 10_000
"""Up to this budget in greatest common divisors, sizes enter the model as integers."""

SCALED_BUDGET = 1_000.0
"""What the budget is in the model otherwise."""


LEAST_SIZE = 1e-4
"""Exact sizes of fewer units count as none: solvers fail on many magnitudes."""

LEAST_COST = 1e-5
"""Costs of fewer units count as none; their sum is 10^5 units then."""


class Rows(StrEnum):
    """The sets of rows."""

    PUBLISHED = "published"
    TIGHT = "tight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How bytes enter a model.

    Parameters
    ----------
    budget
        The budget less resident and pinned bytes, in units of the model.
    unit_bytes
        Bytes of a unit.
    is_rounded
        Whether sizes are rounded up to units, and the budget down.
    """

    budget: float
    unit_bytes: float
    is_rounded: bool

    def size(self, size_bytes: int) -> float:
        """Return a size in units of the model."""
        if self.is_rounded:
            return float(ceil_slots(size_bytes, round(self.unit_bytes)))
        size = size_bytes / self.unit_bytes
        return size if size >= LEAST_SIZE else 0.0


def scale_for(
    frontier: Frontier, memory_slots: int | None = None, allowance_percent: int = 0
) -> Scale:
    """Return the scale of a frontier with a budget.

    Parameters
    ----------
    frontier
        Its problem has a budget.
    memory_slots
        How many units the budget has, sizes rounded up; ``None`` for exact sizes:
        integers if the greatest common divisor allows it, else fractions.
    allowance_percent
        How much of the budget, less what is always live, is left unused.

    Notes
    -----
    Exact sizes lose nothing, and what the model proves holds for the problem; schedules
    can be over the budget by the solver's tolerance and the sizes that count as none,
    each below a ten-millionth of the budget. Rounded sizes lose up to a unit per item.
    """
    budget_bytes = (
        (frontier.problem.budget_bytes or 0)
        - frontier.resident_bytes
        - frontier.pinned_bytes
    )
    budget_bytes -= ceil_slots(budget_bytes * allowance_percent, 100)
    sizes = (*frontier.item_bytes, *(node.scratch_bytes for node in frontier.nodes))
    divisor = max(1, math.gcd(*sizes))
    exact = floor_slots(budget_bytes, divisor)
    if exact <= (memory_slots or MOST_EXACT_SLOTS):
        return Scale(budget=exact, unit_bytes=divisor, is_rounded=False)
    if memory_slots is None:
        unit_bytes = budget_bytes / SCALED_BUDGET
        return Scale(budget=SCALED_BUDGET, unit_bytes=unit_bytes, is_rounded=False)
    slot_bytes = ceil_slots(budget_bytes, memory_slots)
    return Scale(
        budget=floor_slots(budget_bytes, slot_bytes),
        unit_bytes=slot_bytes,
        is_rounded=True,
    )


@dataclass(slots=True)
class _Sum:
    """A linear expression: terms, and a constant."""

    terms: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    constant: float = 0.0

    def add(self, reference: int, coefficient: float) -> "_Sum":
        if reference == ONE:
            self.constant += coefficient
        elif reference != ZERO:
            self.terms.append((reference, coefficient))
        return self


@dataclass(slots=True)
class FrontierModel:
    """The program of a frontier, and where its variables are.

    Attributes
    ----------
    model
        The program; its objective is the time of recomputations in ``cost_unit_ns``.
    divisor_ns
        Every schedule's time of recomputations is a multiple of this.
    runs, keeps
        Per stage, the variable (or :data:`ZERO`, :data:`ONE`) that says whether a node
        runs, and whether an item is kept into the stage.
    frees
        By stage, item and node, the variable of freeing the item after the node.
    used
        By stage and node, the variable of the bytes live.
    """

    frontier: Frontier
    scale: Scale
    rows: Rows
    cost_unit_ns: float
    divisor_ns: int
    model: Model = field(default_factory=Model)
    runs: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    keeps: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    frees: dict[tuple[int, int, int], int] = field(
        default_factory=dict[tuple[int, int, int], int]
    )
    used: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])

    def run(self, t: int, k: int) -> int:
        """Return the reference of "node ``k`` runs in stage ``t``"."""
        return self.runs[t].get(k, ZERO)

    def order(self, found: Solution) -> list[int]:
        """Return the order of a solution; empty without one."""
        if not len(found.values):
            return []
        runs = [
            {
                k
                for k, variable in stage.items()
                if variable == ONE or found.integer(variable)
            }
            for stage in self.runs
        ]
        return self.frontier.order(runs)

    def keep(self, t: int, item: int) -> int:
        """Return the reference of "the item is kept into stage ``t``"."""
        return self.keeps[t].get(item, ZERO) if t < len(self.keeps) else ZERO

    # --- building --------------------------------------------------------------------

    def build(self) -> None:
        """Add all variables and rows."""
        frontier = self.frontier
        for stage in frontier.stages:
            runs: dict[int, int] = {}
            for k in stage.reruns:
                cost = frontier.nodes[k].cost_ns / self.cost_unit_ns
                runs[k] = self.model.add_binary(cost if cost >= LEAST_COST else 0.0)
            runs.update((k, ONE) for k in range(stage.first, stage.last + 1))
            self.runs.append(runs)
            self.keeps.append(
                {
                    item: ONE if item in frontier.pinned else self.model.add_binary()
                    for item in stage.keepable
                }
            )
        for t in range(len(frontier.stages)):
            check_time()
            readers = self._readers(t)
            for item, used_by in readers.items():
                self._add_frees(t, item, used_by)
            if self.rows is Rows.TIGHT:
                self._add_flow(t, readers)
            else:
                self._add_published(t, readers)
            self._add_memory(t)

    def _readers(self, t: int) -> dict[int, list[int]]:
        """Return per item that may be present in a stage the nodes that may read it."""
        stage = self.frontier.stages[t]
        readers: dict[int, list[int]] = {
            item: [] for item in stage.keepable if item not in self.frontier.pinned
        }
        for k in stage.active:
            for item in self.frontier.nodes[k].writes:
                if item not in self.frontier.pinned:
                    readers.setdefault(item, [])
        for k in stage.active:
            for item in self.frontier.nodes[k].reads:
                if item not in self.frontier.pinned:
                    readers[item].append(k)
        return readers

    def _is_freed_unread(self, t: int, item: int) -> bool:
        """Whether the item may be freed right after the node that wrote it."""
        stage, producer = self.frontier.stages[t], self.frontier.producers[item]
        if self.run(t, producer) == ZERO or producer == stage.last:
            return False
        is_one_of_many = len(self.frontier.nodes[producer].writes) > 1
        return is_one_of_many or producer >= stage.first

    def _add_frees(self, t: int, item: int, used_by: Sequence[int]) -> None:
        last = self.frontier.stages[t].last
        is_published = self.rows is Rows.PUBLISHED
        after = [k for k in used_by if k != last or is_published]
        if self._is_freed_unread(t, item):
            after.insert(0, self.frontier.producers[item])
        for k in after:
            self.frees[t, item, k] = self.model.add_variable(is_integer=is_published)

    def _present(self, t: int, item: int, sign: float = -1.0) -> _Sum:
        """Return ``sign x P``; what is computed for the first time is present."""
        found = _Sum().add(self.run(t, self.frontier.producers[item]), sign)
        return found.add(self.keep(t, item), sign)

    def _add(self, found: _Sum, *, upper: float = 0.0) -> None:
        """Add the row ``expression <= upper``, unless constants alone satisfy it."""
        if found.terms or found.constant > upper:
            self.model.add_row(found.terms, upper=upper - found.constant)

    def _add_flow(self, t: int, readers: dict[int, list[int]]) -> None:
        frontier = self.frontier
        for item, used_by in readers.items():
            producer = frontier.producers[item]
            freed: list[int] = []
            for k in (producer, *used_by):
                if k != producer:
                    row = self._present(t, item).add(self.run(t, k), 1.0)
                    for variable in freed:
                        row.add(variable, 1.0)
                    self._add(row)
                variable = self.frees.get((t, item, k))
                if variable is None:
                    continue
                if self.run(t, k) != ONE:
                    self._add(_Sum().add(variable, 1.0).add(self.run(t, k), -1.0))
                freed.append(variable)
            row = self._present(t, item).add(self.keep(t + 1, item), 1.0)
            for variable in freed:
                row.add(variable, 1.0)
            self._add(row)
            if self.run(t, producer) != ZERO and self.keep(t, item) != ZERO:
                self._add(self._present(t, item, 1.0), upper=1.0)
        for k in frontier.stages[t].reruns:
            self._add_purpose(t, k, readers)

    def _add_purpose(self, t: int, k: int, readers: dict[int, list[int]]) -> None:
        """Require that what a recomputation writes is read, or kept."""
        row = _Sum().add(self.run(t, k), 1.0)
        for item in self.frontier.nodes[k].writes:
            if item in self.frontier.pinned:
                return
            row.add(self.keep(t + 1, item), -1.0)
            for reader in readers[item]:
                row.add(self.run(t, reader), -1.0)
        self._add(row)

    def _add_published(self, t: int, readers: dict[int, list[int]]) -> None:
        for item, used_by in readers.items():
            for k in used_by:
                self._add(self._present(t, item).add(self.run(t, k), 1.0))
            if self.keep(t + 1, item) != ZERO:
                self._add(self._present(t, item).add(self.keep(t + 1, item), 1.0))
            for k in (self.frontier.producers[item], *used_by):
                variable = self.frees.get((t, item, k))
                if variable is not None:
                    self._add_hazards(t, item, k, variable, used_by)

    def _add_hazards(
        self, t: int, item: int, k: int, variable: int, used_by: Sequence[int]
    ) -> None:
        """Add 7b and 7c: the item is freed after ``k`` iff there is no hazard."""
        later = [j for j in used_by if j > k]
        hazards = _Sum(constant=1.0).add(self.run(t, k), -1.0)
        hazards.add(self.keep(t + 1, item), 1.0)
        for j in later:
            hazards.add(self.run(t, j), 1.0)
        most = 1.0 + len(later) + (self.keep(t + 1, item) != ZERO)
        negated = [(v, -c) for v, c in hazards.terms]
        self._add(_Sum([(variable, -1.0), *negated], 1.0 - hazards.constant))
        self._add(
            _Sum([(variable, most), *hazards.terms], hazards.constant), upper=most
        )

    def _size(self, item: int) -> float:
        """Return the units that an item takes; none if it always stays."""
        is_pinned = item in self.frontier.pinned
        return 0.0 if is_pinned else self.scale.size(self.frontier.item_bytes[item])

    def _add_memory(self, t: int) -> None:
        frontier, scale, size = self.frontier, self.scale, self._size
        stage = frontier.stages[t]
        before = _Sum()
        for item in stage.keepable:
            before.add(self.keep(t, item), size(item))
        for k in stage.active:
            node = frontier.nodes[k]
            variable = self.model.add_variable(0.0, scale.budget)
            self.used[t, k] = variable
            written = sum(size(item) for item in node.writes)
            before.add(self.run(t, k), written).add(variable, -1.0)
            terms = [term for term in before.terms if term[1]]
            self.model.add_row(terms, lower=-before.constant, upper=-before.constant)
            if node.scratch_bytes:
                row = _Sum([(variable, 1.0)])
                row.add(self.run(t, k), scale.size(node.scratch_bytes))
                self._add(row, upper=scale.budget)
            before = _Sum([(variable, 1.0)])
            for item in {*node.reads, *node.writes}:
                freed = self.frees.get((t, item, k))
                if freed is not None:
                    before.add(freed, -size(item))

    # --- values ----------------------------------------------------------------------

    def start(self, runs: Sequence[set[int]]) -> dict[int, float]:
        """Return the value of every variable for these runs, freeing early."""
        frontier = self.frontier
        kept = frontier.kept_by(runs)
        values: dict[int, float] = {}
        for t in range(len(frontier.stages)):
            for k, variable in self.runs[t].items():
                values[variable] = float(k in runs[t])
            for item, variable in self.keeps[t].items():
                values[variable] = float(item in kept[t])
            following = kept[t + 1] if t + 1 < len(kept) else set[int]()
            for item, used_by in self._readers(t).items():
                uses = [k for k in used_by if k in runs[t]]
                producer = frontier.producers[item]
                if not uses and producer in runs[t]:
                    uses = [producer]
                for k in (producer, *used_by):
                    variable = self.frees.get((t, item, k))
                    if variable is None:
                        continue
                    is_last = k == uses[-1] if uses else False
                    values[variable] = float(is_last and item not in following)
            self._start_memory(t, runs[t], kept[t], values)
        return {index: value for index, value in values.items() if index >= 0}

    def _start_memory(
        self, t: int, runs: set[int], kept: set[int], values: dict[int, float]
    ) -> None:
        frontier, size = self.frontier, self._size
        used = sum(size(item) for item in kept)
        for k in frontier.stages[t].active:
            node = frontier.nodes[k]
            used += sum(size(item) for item in node.writes) * (k in runs)
            values[self.used[t, k]] = used
            for item in {*node.reads, *node.writes}:
                freed = self.frees.get((t, item, k))
                if freed is not None:
                    used -= size(item) * values[freed]


def build_model(
    frontier: Frontier,
    rows: Rows,
    memory_slots: int | None = None,
    *,
    allowance_percent: int = 0,
) -> FrontierModel:
    """Return the program of a frontier with a budget; see :func:`scale_for`."""
    reruns = {k for stage in frontier.stages for k in stage.reruns}
    costs = [frontier.nodes[k].cost_ns for k in reruns]
    divisor = max(1, math.gcd(*costs))
    total = sum(costs)
    unit = float(divisor) if total <= 10**6 * divisor else total / 10**5
    scale = scale_for(frontier, memory_slots, allowance_percent)
    built = FrontierModel(frontier, scale, rows, unit, divisor)
    built.build()
    return built
