"""The contract that every solver keeps, as checks that any test runner can call.

A package that brings its own solver runs the same checks as this one's:

    @pytest.mark.parametrize("check", SolverContract.CHECKS)
    def test_my_solver(check):
        SolverContract(MySolver()).run(check, graph)

Each check raises ``AssertionError`` with what was found and what was needed. Checks ask
the solver at budgets between the proved bound on the peak and the store-all peak.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from typing import ClassVar

from remat.core.bounds import cost_bound_ns, peak_bound_bytes
from remat.core.errors import SolverUnsuitableError
from remat.core.graph import Op, TrainingGraph
from remat.core.platform import Device, Link, Platform, single_device
from remat.core.problem import Limits, Problem, Proposal, Result, Status
from remat.core.schedule import Compute, Copy, Step
from remat.planning.portfolio import judge, solve
from remat.solvers.base import Solver
from remat.solvers.store_all import StoreAll

_SCALE = 4
_NS_PER_S = 10**9
_QUICK_S = 5.0  # of processor time, which no other process takes away


def budgets_between(graph: TrainingGraph, count: int = 4) -> list[int]:
    """Return budgets from the bound on the peak to the store-all peak, in bytes.

    Parameters
    ----------
    graph
        The graph to train.
    count
        Number of budgets, at least 2; both ends are among them.
    """
    low = peak_bound_bytes(graph)
    high = store_all_peak_bytes(graph)
    found = {low + (high - low) * k // (count - 1) for k in range(count)}
    return sorted({max(1, budget) for budget in found})


def store_all_peak_bytes(graph: TrainingGraph) -> int:
    """Return the peak of running every op once, in graph order."""
    trace = solve(ALONE.problem(graph, None), StoreAll()).trace
    if trace is None:
        msg = f"graph {graph.name!r} has no store-all schedule"
        raise AssertionError(msg)
    return trace.peak_bytes[0]


def scale_graph(
    graph: TrainingGraph, *, bytes_factor: int = 1, ns_factor: int = 1
) -> TrainingGraph:
    """Return ``graph`` with all sizes, workspaces and costs multiplied."""

    def scaled(op: Op) -> Op:
        return replace(
            op,
            cost_ns=tuple(None if c is None else c * ns_factor for c in op.cost_ns),
            workspace_bytes=tuple(w * bytes_factor for w in op.workspace_bytes),
        )

    return replace(
        graph,
        storages=tuple(
            replace(s, size_bytes=s.size_bytes * bytes_factor) for s in graph.storages
        ),
        ops=tuple(scaled(op) for op in graph.ops),
    )


def rename_graph(graph: TrainingGraph) -> TrainingGraph:
    """Return ``graph`` with other names for its ops and storages."""
    return replace(
        graph,
        name=f"renamed {graph.name}",
        storages=tuple(
            replace(s, name=f"s{len(graph.storages) - i}")
            for i, s in enumerate(graph.storages)
        ),
        ops=tuple(replace(op, name=f"o{i % 7}") for i, op in enumerate(graph.ops)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A device beside the first one, for the checks of solvers for several devices.

    Parameters
    ----------
    kind
        Its kind and name.
    computes
        Whether it runs ops: in turn in half the time that they take on the first
        device, in the same time, and in one and a half times that. Else it only stores.
    budget_times
        Its budget, as a multiple of the first device's; ``None`` for no limit.
    """

    kind: str
    computes: bool
    budget_times: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The devices that a solver is checked on: one alone, or others beside it.

    Links join all devices, each byte taking ``ns_per_byte`` after a latency; copies
    wait for what frees memory. Time of an op on the first device is twice the graph's.
    """

    beside: tuple[Beside, ...] = ()
    ns_per_byte: int = 1
    latency_ns: int = 5

    def problem(
        self,
        graph: TrainingGraph,
        budget_bytes: int | None,
        *,
        bytes_factor: int = 1,
        ns_factor: int = 1,
    ) -> Problem:
        """Return the problem of a graph of one kind of device.

        Parameters
        ----------
        graph, budget_bytes
            The graph, and the budget of the first device; without one, none has.
        bytes_factor, ns_factor
            What sizes and times of the graph were multiplied by: links are as well.
        """
        first = graph.device_kinds[0]
        if not self.beside:
            return Problem(graph=graph, platform=single_device(budget_bytes, first))
        devices = [Device(name=first, kind=first, budget_bytes=budget_bytes)]
        devices += [
            Device(
                name=other.kind,
                kind=other.kind,
                budget_bytes=None
                if budget_bytes is None or other.budget_times is None
                else budget_bytes * other.budget_times,
            )
            for other in self.beside
        ]
        ns_per_byte = Fraction(self.ns_per_byte * ns_factor, bytes_factor)
        links = tuple(
            Link(
                source=source,
                target=target,
                bytes_per_s=int(_NS_PER_S / ns_per_byte),
                latency_ns=self.latency_ns * ns_factor,
            )
            for source, target in permutations(range(len(devices)), 2)
        )
        return Problem(
            graph=self._placed(graph),
            platform=Platform(devices=tuple(devices), links=links, copies_wait=True),
        )

    def _placed(self, graph: TrainingGraph) -> TrainingGraph:
        def placed(index: int, op: Op) -> Op:
            time_ns = op.cost_ns[0] or 0
            beside = [
                time_ns * (1 + (index + place) % 3) if other.computes else None
                for place, other in enumerate(self.beside)
            ]
            return replace(
                op,
                cost_ns=(2 * time_ns, *beside),
                workspace_bytes=op.workspace_bytes * (1 + len(beside)),
            )

        return replace(
            graph,
            ops=tuple(placed(index, op) for index, op in enumerate(graph.ops)),
            device_kinds=(*graph.device_kinds, *(other.kind for other in self.beside)),
        )


ALONE = Setting()
"""One device."""

WITH_STORE = Setting(beside=(Beside(kind="host", computes=False, budget_times=2),))
"""A device that computes, and one of twice its memory that only stores."""

IN_PAIR = Setting(beside=(Beside(kind="other", computes=True, budget_times=1),))
"""Two devices of equal memory, each of which is the quicker one for some ops."""

IN_THREES = Setting(
    beside=(
        Beside(kind="other", computes=True, budget_times=1),
        Beside(kind="host", computes=False, budget_times=2),
    ),
    ns_per_byte=2,
)
"""Two devices that compute, and one that only stores, behind slower links."""


def _is_beside(step: Step) -> bool:
    """Return whether a step runs an op or puts a copy beside the first device."""
    match step:
        case Compute(device=device) | Copy(target=device):
            return device > 0
        case _:
            return False


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 - reads like assert
    if not holds:
        raise AssertionError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverContract:
    """Checks of one solver; each takes a graph.

    Parameters
    ----------
    solver
        The solver to check.
    recomputes_always
        Whether the solver recomputes even where memory is ample (a baseline).
    needs_structure
        Whether the solver may decline graphs without the structure that it is for; a
        declined graph counts as an answer without a schedule.
    setting
        The devices. A solver for several is checked on several: alone, it may store
        everything, or decline.
    """

    CHECKS: ClassVar[tuple[str, ...]] = (
        "answers_are_valid",
        "ample_budget_costs_no_more_than_storing_all",
        "below_the_bound_there_is_no_schedule",
        "unit_of_bytes_does_not_matter",
        "unit_of_time_does_not_matter",
        "names_do_not_matter",
        "same_question_same_answer",
        "input_is_left_alone",
        "deadline_is_kept",
        "exact_cost_falls_with_the_budget",
        "other_devices_are_of_use",
    )

    solver: Solver
    recomputes_always: bool = False
    needs_structure: bool = False
    setting: Setting = ALONE

    def run(self, check: str, graph: TrainingGraph) -> None:
        """Run the check of that name on ``graph``.

        Raises
        ------
        AssertionError
            If the solver breaks the contract.
        KeyError
            If there is no such check.
        """
        checks: dict[str, Callable[[TrainingGraph], None]] = {
            "answers_are_valid": self.answers_are_valid,
            "ample_budget_costs_no_more_than_storing_all": self.ample_budget,
            "below_the_bound_there_is_no_schedule": self.below_the_bound,
            "unit_of_bytes_does_not_matter": self.unit_of_bytes,
            "unit_of_time_does_not_matter": self.unit_of_time,
            "names_do_not_matter": self.names,
            "same_question_same_answer": self.same_question,
            "input_is_left_alone": self.input_unchanged,
            "deadline_is_kept": self.deadline,
            "exact_cost_falls_with_the_budget": self.exact_is_monotone,
            "other_devices_are_of_use": self.others_are_used,
        }
        checks[check](graph)

    def ask(
        self,
        graph: TrainingGraph,
        budget_bytes: int | None,
        limits: Limits | None = None,
    ) -> Result:
        """Return the judged answer of the solver with a budget of the first device."""
        return self.answer(self.setting.problem(graph, budget_bytes), limits)

    def answer(self, problem: Problem, limits: Limits | None = None) -> Result:
        """Return the judged answer of the solver to a problem."""
        try:
            return solve(problem, self.solver, limits=limits)
        except SolverUnsuitableError as error:
            if not self.needs_structure:
                raise
            declined = Proposal(status=Status.UNKNOWN, message=str(error))
            return judge(problem, type(self.solver).__name__, declined)

    def answers_are_valid(self, graph: TrainingGraph) -> None:
        """Check peak, cost, bound and status at several budgets."""
        for budget in budgets_between(graph):
            result = self.ask(graph, budget)
            self.check_claims(result, self.setting.problem(graph, budget))

    def check_claims(self, result: Result, problem: Problem) -> None:
        """Check what one answer claims against its own replay.

        Raises
        ------
        AssertionError
            If a claim does not hold.
        """
        _require(
            result.status.has_schedule is (result.trace is not None),
            f"status {result.status} with trace {result.trace is not None}",
        )
        if not self.solver.is_exact:
            _require(
                result.status in {Status.FEASIBLE, Status.UNKNOWN},
                f"a solver that is not exact claims {result.status}",
            )
        if result.trace is None:
            _require(bool(result.message), "no schedule, and no message says why")
            return
        cost_ns = result.trace.serial_ns
        _require(result.trace.is_valid, f"invalid: {result.trace.violation}")
        for device, peak in zip(
            problem.platform.devices, result.trace.peak_bytes, strict=True
        ):
            budget = device.budget_bytes
            _require(
                budget is None or peak <= budget,
                f"peak {peak:_} over budget {budget} of device {device.name!r}",
            )
        _require(
            result.bound_ns <= cost_ns, f"bound {result.bound_ns:_} over {cost_ns:_}"
        )
        _require(
            result.status is not Status.OPTIMAL or result.bound_ns == cost_ns,
            f"OPTIMAL with bound {result.bound_ns:_} and cost {cost_ns:_}",
        )

    def ample_budget(self, graph: TrainingGraph) -> None:
        """Check that nothing is recomputed when everything fits.

        Raises
        ------
        AssertionError
            If the answer is missing or costs more than storing everything.
        """
        peak = store_all_peak_bytes(graph)
        plain = solve(self.setting.problem(graph, None), StoreAll()).cost_ns
        for budget in (peak, None):
            cost_ns = self.ask(graph, budget).cost_ns
            if cost_ns is None and self.recomputes_always:
                continue
            _require(cost_ns is not None, f"no schedule with a budget of {budget}")
            _require(
                self.recomputes_always or (cost_ns or 0) <= (plain or 0),
                f"cost {cost_ns} over the store-all cost {plain} at budget {budget}",
            )

    def below_the_bound(self, graph: TrainingGraph) -> None:
        """Check the answer for a budget that is proved to be too small.

        Raises
        ------
        AssertionError
            If there is a schedule.
        """
        # With others beside it, a device needs less than the bound for one alone.
        largest = 1 if self.setting.beside else peak_bound_bytes(graph) - 1
        for budget in {1, max(1, largest)}:
            result = self.ask(graph, budget)
            _require(
                result.status in {Status.INFEASIBLE, Status.UNKNOWN},
                f"{result.status} with a budget of {budget:_} bytes",
            )

    def unit_of_bytes(self, graph: TrainingGraph) -> None:
        """Check that multiplying sizes and budget leaves the schedule.

        Raises
        ------
        AssertionError
            If the cost differs.
        """
        larger = scale_graph(graph, bytes_factor=_SCALE)
        for budget in budgets_between(graph, 3):
            cost_ns = self.ask(graph, budget).cost_ns
            scaled = self.setting.problem(larger, budget * _SCALE, bytes_factor=_SCALE)
            other_ns = self.answer(scaled).cost_ns
            _require(
                cost_ns == other_ns,
                f"cost {cost_ns} at {budget:_} bytes, but {other_ns} with all sizes "
                f"times {_SCALE}",
            )

    def unit_of_time(self, graph: TrainingGraph) -> None:
        """Check that multiplying all costs multiplies the cost.

        Raises
        ------
        AssertionError
            If it does not.
        """
        slower = scale_graph(graph, ns_factor=_SCALE)
        for budget in budgets_between(graph, 3):
            cost_ns = self.ask(graph, budget).cost_ns
            scaled = self.setting.problem(slower, budget, ns_factor=_SCALE)
            other_ns = self.answer(scaled).cost_ns
            _require(
                other_ns == (None if cost_ns is None else cost_ns * _SCALE),
                f"cost {cost_ns} at {budget:_} bytes, but {other_ns} with all costs "
                f"times {_SCALE}",
            )

    def names(self, graph: TrainingGraph) -> None:
        """Check that renaming changes nothing.

        Raises
        ------
        AssertionError
            If the schedule differs.
        """
        for budget in budgets_between(graph, 3):
            first = self.ask(graph, budget).schedule
            second = self.ask(rename_graph(graph), budget).schedule
            _require(first == second, f"other names, other schedule at {budget:_}")

    def same_question(self, graph: TrainingGraph) -> None:
        """Check that asking twice gives one answer.

        Raises
        ------
        AssertionError
            If the schedules differ.
        """
        for budget in budgets_between(graph, 3):
            first = self.ask(graph, budget, Limits(seed=3)).schedule
            second = self.ask(graph, budget, Limits(seed=3)).schedule
            _require(first == second, f"two schedules for budget {budget:_}")

    def input_unchanged(self, graph: TrainingGraph) -> None:
        """Check that solving leaves the problem as it was.

        Raises
        ------
        AssertionError
            If it does not.
        """
        before = deepcopy(graph)
        self.ask(graph, budgets_between(graph, 3)[0])
        _require(graph == before, "the graph was changed")

    def deadline(self, graph: TrainingGraph) -> None:
        """Check that a deadline in the past ends the search at once.

        Raises
        ------
        AssertionError
            If it works for more than a few seconds or the answer is invalid.
        """
        budget = budgets_between(graph, 3)[0]
        started = time.process_time()
        result = self.ask(graph, budget, Limits.after(0))
        worked_s = time.process_time() - started
        _require(
            worked_s < _QUICK_S,
            f"took {worked_s:.1f} s of processor time with no time at all",
        )
        self.check_claims(result, self.setting.problem(graph, budget))

    def others_are_used(self, graph: TrainingGraph) -> None:
        """Check that a solver for several devices uses more than the first one.

        Raises
        ------
        AssertionError
            If no answer at a budget below what storing everything takes has a step on
            another device, or an answer is without one where the first device alone
            has too little memory for any schedule.
        """
        if not self.setting.beside:
            return
        is_used = False
        bound = peak_bound_bytes(graph)
        for budget in (bound * 9 // 10, *budgets_between(graph)[:-1]):
            result = self.ask(graph, budget)
            if result.schedule is None:
                continue
            moved = sum(_is_beside(step) for step in result.schedule.steps)
            _require(moved > 0 or budget >= bound, f"device 0 alone within {budget:_}")
            is_used |= moved > 0
        _require(is_used, "nothing is copied to another device, and nothing runs there")

    def exact_is_monotone(self, graph: TrainingGraph) -> None:
        """Check that an exact solver's cost never rises with the budget.

        Raises
        ------
        AssertionError
            If it does.
        """
        if not self.solver.is_exact:
            return
        costs = [self.ask(graph, budget).cost_ns for budget in budgets_between(graph)]
        found = [cost for cost in costs if cost is not None]
        _require(
            costs[len(costs) - len(found) :] == found
            and found == sorted(found, reverse=True),
            f"costs over rising budgets: {costs}",
        )

    def check_optimum(
        self, graph: TrainingGraph, budget_bytes: int, optimum_ns: int | None
    ) -> None:
        """Compare with the least cost over all schedules of the setting's devices.

        Parameters
        ----------
        graph, budget_bytes
            The question.
        optimum_ns
            The least cost, found by other means; ``None`` if no schedule fits.

        Raises
        ------
        AssertionError
            If the solver beats the optimum, or a bound or INFEASIBLE contradicts it.
        """
        result = self.ask(graph, budget_bytes)
        if optimum_ns is None:
            _require(result.cost_ns is None, "found a schedule where there is none")
            return
        _require(
            result.cost_ns is None or result.cost_ns >= optimum_ns,
            f"cost {result.cost_ns} below the optimum {optimum_ns}",
        )
        _require(
            cost_bound_ns(self.setting.problem(graph, budget_bytes)) <= optimum_ns,
            f"the bound on every schedule exceeds the optimum {optimum_ns}",
        )
