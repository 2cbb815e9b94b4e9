"""Moccasin: retention intervals in a constraint program.

Every computation of an op opens one interval per output, from the computation to its
last use. An op has its first computation, at a fixed event, and up to
``computations - 1`` optional ones, whose events are chosen. The number of variables is
linear in the number of ops, where Checkmate's is quadratic.

Departures from the paper [1]_ and its program:

* ops may have several outputs and workspace; the boundary and the end of the step are
  nodes; sizes are exact; nothing of a pass runs after the caller's own work;
* a use is served by one computation of what it reads, said with Booleans, where the
  program has a reservoir constraint per use; both have the same solutions;
* lengths of intervals are free, where the program restricts them to a few values, so
  that OPTIMAL is optimal for this number of computations;
* there is no first phase that minimises the peak: the search starts from the best
  schedule of two heuristics.

References
----------
.. [1] B. Bartan, H. Li, H. Teague, C. Lott, B. Dilkina. Moccasin: efficient tensor
   rematerialization for neural networks. ICML 2023.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from remat.backends.cp_sat import CpModel
from remat.backends.highs_process import Settings
from remat.backends.mathopt import NOTHING_IN_TIME, Outcome, Solution
from remat.backends.tolerances import safe_bound_ns
from remat.core.checks import keep_flags, keep_integers, keep_seconds
from remat.core.deadline import TimeIsUpError, in_time
from remat.core.errors import SolverUnsuitableError
from remat.core.problem import Limits, Problem, Proposal
from remat.solvers.base import ProgressCallback
from remat.solvers.frontier import Frontier, frontier
from remat.solvers.frontier_search import (
    FrontierSearch,
    best_start,
    incumbent_report,
    with_deadline,
)
from remat.solvers.order_search import stop_reason

LARGEST_LITERALS = 2_000_000
"""Models with more serving Booleans are declined."""

LARGEST_OPS = 2_000
"""Graphs of more ops are declined: half their square is the number of events."""


@dataclass(slots=True)
class _Run:
    """One computation of a node: its event, whether it happens, and its intervals."""

    start: int
    presence: int | None
    ends: dict[int, int]
    serves: list[int] = field(default_factory=list[int])


class _Program:
    """The constraint program of a frontier with a stage per node."""

    def __init__(self, staged: Frontier, computations: int) -> None:
        self.staged = staged
        self.model = CpModel()
        self.events: list[tuple[int, int]] = []
        self.choices: defaultdict[int, list[int]] = defaultdict(list)
        self.first_event: dict[int, int] = {}
        for t, stage in enumerate(staged.stages):
            for k in stage.active:
                if k >= stage.first:
                    self.first_event[k] = len(self.events)
                else:
                    self.choices[k].append(len(self.events))
                self.events.append((t, k))
        costs = [staged.nodes[k].cost_ns for k in self.choices]
        self.divisor_ns = max(1, math.gcd(*costs))
        self.runs = [self._runs_of(k, computations) for k in range(len(staged.nodes))]
        for k in range(len(staged.nodes)):
            for run in self.runs[k]:
                self._serve(k, run)
        for runs in self.runs:
            for run in runs[1:]:
                if run.presence is not None:
                    self.model.add_some(run.serves, run.presence)
        self._add_capacity()

    def _runs_of(self, k: int, computations: int) -> list[_Run]:
        """Add the computations of a node, in the order of their events."""
        model, node, end = self.model, self.staged.nodes[k], len(self.events)
        first = self.first_event[k]
        runs = [_Run(model.add_constant(first), None, {})]
        for _ in range(min(computations - 1, len(self.choices[k]))):
            start = model.add_choice(self.choices[k])
            runs.append(_Run(start, model.add_bool(), {}))
        for j, run in enumerate(runs):
            for item in node.writes:
                run.ends[item] = model.add_integer(first + 1, end)
            if run.presence is None:
                continue
            model.add_cost(run.presence, node.cost_ns // self.divisor_ns)
            previous = runs[j - 1]
            literals = [run.presence]
            if previous.presence is not None:
                model.add_implication(run.presence, previous.presence)
                literals.append(previous.presence)
            model.add_precedence(previous.start, run.start, 1, literals=literals)
            for item in node.writes:
                # A fresh copy makes the one before it useless.
                model.add_precedence(
                    previous.ends[item], run.start, 0, literals=literals
                )
        return runs

    def _serve(self, k: int, run: _Run) -> None:
        """Let each read of a computation be served by one computation before it."""
        model = self.model
        for item in self.staged.nodes[k].reads:
            makers = self.runs[self.staged.producers[item]]
            if len(makers) == 1:
                self._order(makers[0], run, item, [])
                continue
            literals: list[int] = []
            for maker in makers:
                literal = model.add_bool()
                literals.append(literal)
                maker.serves.append(literal)
                if maker.presence is not None:
                    model.add_implication(literal, maker.presence)
                self._order(maker, run, item, [literal])
            model.add_exactly_one(literals, run.presence)

    def _order(self, maker: _Run, user: _Run, item: int, literals: list[int]) -> None:
        given = list(literals)
        if not given and user.presence is not None:
            given = [user.presence]
        self.model.add_precedence(maker.start, user.start, 1, literals=given)
        self.model.add_precedence(user.start, maker.ends[item], 1, literals=given)

    def _add_capacity(self) -> None:
        staged, model = self.staged, self.model
        for k, runs in enumerate(self.runs):
            node = staged.nodes[k]
            for run in runs:
                for item in node.writes:
                    model.add_interval(
                        run.start,
                        run.ends[item],
                        staged.item_bytes[item],
                        run.presence,
                    )
                if node.scratch_bytes:
                    after = model.add_integer(0, len(self.events) + 1)
                    model.add_precedence(run.start, after, 1)
                    model.add_interval(
                        run.start, after, node.scratch_bytes, run.presence
                    )
        budget = (staged.problem.budget_bytes or 0) - staged.resident_bytes
        model.add_capacity(budget)

    def stage_runs(self, found: Solution) -> list[set[int]]:
        """Return the nodes that a solution runs in each stage."""
        chosen: list[set[int]] = [set() for _ in self.staged.stages]
        for runs in self.runs:
            for run in runs:
                if run.presence is None or found.integer(run.presence):
                    t, k = self.events[found.integer(run.start)]
                    chosen[t].add(k)
        return chosen

    def hint(self, stage_runs: Sequence[set[int]]) -> None:
        """Start from runs per stage, as far as the number of computations allows."""
        event = {pair: index for index, pair in enumerate(self.events)}
        values: dict[int, int] = {}
        for k, runs in enumerate(self.runs):
            again = [
                event[t, k]
                for t, found in enumerate(stage_runs)
                if k in found and k < self.staged.stages[t].first
            ]
            for run, start in zip(runs[1:], again, strict=False):
                values[run.start] = start
            for j, run in enumerate(runs[1:]):
                if run.presence is not None:
                    values[run.presence] = int(j < len(again))
        self.model.hint(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moccasin:
    """The cheapest schedule with a few computations per op, by constraint programming.

    **Guarantee** OPTIMAL and INFEASIBLE are proved for the class, and the bound holds
    for it. Tight budgets need more than two computations of some ops; then the answer
    is INFEASIBLE, or worse than another class's.

    **Complexity** exponential in the worst case; O(ops x computations) intervals and
    O(reads x computations^2) Booleans. Good schedules come early on graphs of hundreds
    of ops, proofs rarely.

    Parameters
    ----------
    computations
        Most computations of an op, the first included, at least 1; 2 in the paper.
    starts_from_known
        Whether to start from the best schedule of two heuristics.
    improves
        Whether memory that a schedule leaves over is spent on recomputing less.
    threads
        Threads of the solver; the answer does not depend on them.
    default_time_limit_s
        When to stop if the caller sets no deadline, in seconds.
    """

    schedule_class: ClassVar[str] = (
        "first runs in graph order, and between two of them every earlier op at most "
        "once, in graph order; no op more often than `computations`; on one device"
    )
    is_exact: ClassVar[bool] = True

    computations: int = 2
    starts_from_known: bool = True
    improves: bool = True
    threads: int = 1
    default_time_limit_s: float = 120.0

    def __post_init__(self) -> None:
        keep_integers(self, "computations", "threads", of=type(self).__name__, least=1)
        keep_flags(self, "starts_from_known", "improves", of=type(self).__name__)
        keep_seconds(self, "default_time_limit_s", of=type(self).__name__)

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the cheapest schedule found, with what is proved.

        Raises
        ------
        SolverUnsuitableError
            If an op cannot run on device 0, a storage lives elsewhere, or the model
            would be too large.
        """
        limits = with_deadline(limits, self.default_time_limit_s)
        search = FrontierSearch(problem, limits, improves=self.improves)
        if (answer := search.at_once()) is not None:
            return answer
        if refusal := self.refusal(problem):
            raise SolverUnsuitableError(refusal)
        if self.starts_from_known:
            on_progress("looking for a first schedule", 0.0)
            search.start_from_known()
        if search.is_over:
            return search.proved(
                bound_ns=None,
                stop_reason=stop_reason(limits),
                message="no time was left for the constraint program",
            )
        found, bound_ns = self.improve(search, limits, on_progress)
        return search.proved(
            bound_ns=bound_ns,
            stop_reason=stop_reason(limits, is_interrupted=found.is_interrupted),
            message=f"cp-sat, {self.computations} computations per op: {found.outcome}",
            is_proved_empty=found.outcome is Outcome.INFEASIBLE,
        )

    def improve(
        self, search: FrontierSearch, limits: Limits, on_progress: ProgressCallback
    ) -> tuple[Solution, int]:
        """Run the constraint program from and to the incumbent of a search.

        Parameters
        ----------
        search
            What it knows is hinted at; what is found is adopted.
        limits, on_progress
            As for :meth:`solve`.

        Returns
        -------
        tuple[Solution, int]
            The program's solution, and its bound on the class in nanoseconds; 0 if
            time was over before the program was written down.
        """
        try:
            with in_time(limits.deadline_s):
                staged = frontier(search.problem)
                program = _Program(staged, self.computations)
                if (start := best_start(search, staged)) is not None:
                    program.hint(start)
        except TimeIsUpError:
            return NOTHING_IN_TIME, 0
        found = program.model.solve(
            Settings(
                time_limit_s=limits.remaining_s, seed=limits.seed, threads=self.threads
            ),
            incumbent_report(on_progress, staged.first_runs_ns, program.divisor_ns),
        )
        if len(found.values):
            search.start_from_order(staged.order(program.stage_runs(found)))
        raw_ns = 0.0
        if found.outcome is not Outcome.INFEASIBLE:
            raw_ns = found.bound * program.divisor_ns
        bound_ns = safe_bound_ns(raw_ns, program.divisor_ns, 1e-3)
        return found, staged.first_runs_ns + bound_ns

    def refusal(self, problem: Problem) -> str:
        """Return why the program of a graph would be too large; empty if it is not."""
        ops = problem.graph.ops
        reads = sum(len(op.reads) for op in ops)
        literals = reads * self.computations**2
        if literals <= LARGEST_LITERALS and len(ops) <= LARGEST_OPS:
            return ""
        return (
            f"graph {problem.graph.name!r} has {len(ops):_} ops (at most "
            f"{LARGEST_OPS:_}) and {reads:_} reads; {self.computations} computations "
            f"per op make about {literals:_} Booleans, and at most "
            f"{LARGEST_LITERALS:_} are tried: lower computations, or use "
            "min-cut-retention or greedy-eviction"
        )
