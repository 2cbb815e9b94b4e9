"""Plan a step of which several forward passes run before the first backward pass.

What one pass saves counts once for each pass in flight: there a byte saved costs as
many bytes as there are passes, a byte at the peak of a pass only one. The search goes
over limits on what a pass saves. With a limit, the other passes leave a budget for one,
and solvers that know nothing of others find a schedule within both, on a graph whose
last forward op needs as much more memory as the limit is below that budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.core.bounds import cost_bound_ns
from remat.core.errors import BudgetError
from remat.core.graph import TrainingGraph
from remat.core.in_flight import beside_bytes, others_bytes, saved_bytes, with_others
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Status, StopReason
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, simulate
from remat.core.units import format_bytes, parse_budget
from remat.planning.one_device import solve_alone
from remat.planning.plan import STOP_REASON, Plan
from remat.planning.regions import frugal_order
from remat.planning.smallest_budget import smallest_budget
from remat.solvers.base import ProgressCallback, Solver, ignore_progress
from remat.solvers.greedy_eviction import CANDIDATES, GreedyEviction
from remat.solvers.min_cut_retention import MinCutRetention
from remat.solvers.registry import chosen_solvers

_LEVELS = 12
"""How many limits on what a pass saves are tried."""

_LOADS = 5
"""How many limits are tried where the smallest budget is looked for."""

_QUICK: tuple[Solver, ...] = (
    GreedyEviction(candidates=CANDIDATES[:3]),
    MinCutRetention(effort_ops=100_000),
)
"""Asked at each limit where no solver is named; all of them at the best one."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A schedule of each pass, and its replay among the others in flight."""

    solver: str
    graph: TrainingGraph
    schedule: Schedule
    trace: Trace
    saved_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.trace.peak_bytes[0]


def plan_in_flight(  # noqa: PLR0913 - every option that a user has
    graph: TrainingGraph,
    in_flight: int,
    *,
    budget: int | str,
    fingerprint: str = "",
    solver: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Return a plan that each of the passes in flight runs by.

    Parameters
    ----------
    graph
        One pass, for one device. What is there during the whole step has the batches
        of all passes in it.
    in_flight
        How many forward passes run before the first backward pass, at least 1.
    budget
        Bytes, a size, or a percentage of the predicted peak of as many passes without
        rematerialisation.
    fingerprint, solver, time_limit, seed, progress, settings
        As for :func:`remat.planning.one_device.plan_graph`.

    Raises
    ------
    BudgetError
        If no schedule was found; it names the smallest budget with a known one.

    Notes
    -----
    Nothing is proved but that no op runs less than once. Takes 12 times as long as the
    quick solvers do for one pass, and as long as those that are asked for do once.
    """
    limits = Limits.after(time_limit, seed)
    search = _Search(graph, in_flight)
    budget_bytes = parse_budget(budget, whole_bytes=search.plain.peak_bytes)
    solvers = chosen_solvers(solver, is_timed=time_limit is not None)
    best = search.best(budget_bytes)
    if best is not search.plain:
        quick = _QUICK if solver == "auto" else solvers
        for level in range(_LEVELS):
            progress(f"planning {in_flight} passes in flight", level / (_LEVELS + 1))
            search.limit(level, budget_bytes, quick, limits)
        best = search.best(budget_bytes)
        if best is not None and solver == "auto":
            progress(f"planning {in_flight} passes in flight", 1 - 1 / _LEVELS)
            search.solve(best.saved_bytes, budget_bytes, solvers, limits)
            best = search.best(budget_bytes)
    if best is None:
        progress("looking for the smallest budget", 0.0)
        search.look_for_the_smallest(limits)
        best = search.best(budget_bytes)
    if best is None:
        raise _budget_error(search.smallest, in_flight, budget_bytes)
    platform = single_device(budget_bytes, kind=graph.device_kinds[0])
    bound_ns = cost_bound_ns(Problem(graph=best.graph, platform=platform))
    is_optimal = best.trace.serial_ns <= bound_ns
    return Plan(
        graph=best.graph,
        platform=platform,
        schedule=best.schedule,
        solver=best.solver,
        status=Status.OPTIMAL if is_optimal else Status.FEASIBLE,
        bound_ns=bound_ns,
        fingerprint=fingerprint,
        in_flight=in_flight,
        settings={
            **(settings or {}),
            **search.stop_setting,
            "solver": solver,
            "seed": seed,
        },
    )


class _Search:
    def __init__(self, graph: TrainingGraph, in_flight: int) -> None:
        self.graph = with_others(graph, 0, in_flight)
        self.in_flight = in_flight
        self.kind = graph.device_kinds[0]
        self.resident_bytes = sum(s.size_bytes for s in graph.storages if s.is_resident)
        self.candidates: list[_Candidate] = []
        self.stop_setting: dict[str, str] = {}
        self.plain = self.add("StoreAll", store_all_order(graph))
        self.frugal = self.add("frugal", frugal_order(graph))

    def add(self, solver: str, found: Schedule | Sequence[int]) -> _Candidate:
        """Judge a schedule, or an order of ops, and keep it."""
        schedule = (
            found
            if isinstance(found, Schedule)
            else schedule_from_order(self.graph, found)
        )
        platform = single_device(kind=self.kind)
        alone = simulate(self.graph, platform, schedule)
        saved = saved_bytes(self.graph, schedule, alone)
        graph = with_others(self.graph, self.beside_bytes(saved), self.in_flight)
        trace = simulate(graph, platform, schedule)
        self.candidates.append(_Candidate(solver, graph, schedule, trace, saved))
        return self.candidates[-1]

    def beside_bytes(self, saved_bytes: int) -> int:
        """Return what other passes take if each saves so much."""
        return beside_bytes(self.graph, saved_bytes, self.in_flight)

    def best(self, budget_bytes: int) -> _Candidate | None:
        """Return the quickest one that keeps a budget."""
        return min(
            (each for each in self.candidates if each.peak_bytes <= budget_bytes),
            key=lambda each: (each.trace.serial_ns, each.peak_bytes),
            default=None,
        )

    @property
    def smallest(self) -> _Candidate:
        """The one that needs the least memory."""
        return min(self.candidates, key=lambda each: each.peak_bytes)

    def limit(
        self, level: int, budget_bytes: int, solvers: Sequence[Solver], limits: Limits
    ) -> None:
        """Solve for one pass that saves no more than a level says."""
        least_bytes = self.frugal.saved_bytes
        span_bytes = self.plain.saved_bytes - least_bytes
        self.solve(
            least_bytes + span_bytes * level // _LEVELS, budget_bytes, solvers, limits
        )

    def solve(
        self,
        most_saved_bytes: int,
        budget_bytes: int,
        solvers: Sequence[Solver],
        limits: Limits,
    ) -> None:
        """Solve for one pass that saves no more than a limit, within the budget."""
        beside_bytes = self.beside_bytes(most_saved_bytes)
        left_bytes = budget_bytes - beside_bytes - self.resident_bytes
        if left_bytes <= 0 or limits.is_over:
            return
        graph = self.loaded(beside_bytes, left_bytes - most_saved_bytes)
        result = solve_alone(graph, budget_bytes, solvers, limits)
        if result.stop_reason is StopReason.INTERRUPTED:
            self.stop_setting = {STOP_REASON: str(result.stop_reason)}
        if result.schedule is not None:
            self.add(result.solver, result.schedule)

    def loaded(self, beside_bytes: int, load_bytes: int) -> TrainingGraph:
        """Return one pass beside others, whose last forward op needs more memory."""
        graph = with_others(self.graph, beside_bytes, self.in_flight)
        last = graph.forward_count - 1
        if last < 0:
            return graph
        op = graph.ops[last]
        workspace = tuple(size + max(0, load_bytes) for size in op.workspace_bytes)
        loaded = replace(op, workspace_bytes=workspace)
        return replace(graph, ops=(*graph.ops[:last], loaded, *graph.ops[last + 1 :]))

    def look_for_the_smallest(self, limits: Limits) -> None:
        """Look for small peaks of one pass that saves less and less."""
        beside_bytes = self.beside_bytes(self.frugal.saved_bytes)
        for part in range(_LOADS):
            load_bytes = self.plain.saved_bytes * part // (_LOADS - 1)
            floor = smallest_budget(
                self.loaded(beside_bytes, load_bytes), kind=self.kind, limits=limits
            )
            self.add("smallest_budget", floor.schedule)


def _budget_error(
    smallest: _Candidate, in_flight: int, budget_bytes: int
) -> BudgetError:
    peak_bytes = smallest.peak_bytes
    msg = (
        f"no schedule was found within {format_bytes(budget_bytes)} ({budget_bytes:_} "
        f"bytes) with {in_flight} passes in flight: the smallest known budget is "
        f"{format_bytes(peak_bytes)} ({peak_bytes:_} bytes), of which "
        f"{format_bytes(others_bytes(smallest.graph))} belong to {in_flight - 1} of them; raise the "
        f"budget to at least {peak_bytes} bytes, shrink the batch of each pass, or let "
        "fewer passes be in flight"
    )
    return BudgetError(
        msg,
        budget_bytes=budget_bytes,
        required_bytes=peak_bytes,
        schedule=smallest.schedule,
    )
