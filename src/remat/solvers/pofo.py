"""PoFo: keep, recompute, or copy to a device that stores, on a chain of stages.

For a platform of a device that computes and one that stores, with a link each way.
The training graph is a chain of stages (:mod:`remat.reductions.stages`). Rotor plans it
for *virtual* budgets between the real one and everything; each plan is lifted to an
order of the real ops, and paging (:mod:`remat.search.schedule_paging`) brings that
order within the real budget: what lies idle longest is copied away while the device
computes, and copied back in time. The judge says how long each takes, copies
overlapping with computation; the quickest is the answer.

That is the model of [1]_ (where it is called partial offloading): persistent
recomputation, copies on links of their own. It is not that paper's dynamic program,
whose states are the transfers in flight: here recomputation is chosen as if memory were
larger, and copies after that. Without links it would be Rotor; with links of unlimited
speed it has no overhead wherever single operations fit.

References
----------
.. [1] O. Beaumont, L. Eyraud-Dubois, A. Shilova. Efficient combination of
   rematerialization and offloading for training DNNs. NeurIPS 2021.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from remat.algorithms.chains.rotor import least_budget, plan_rotor
from remat.core.best import Best
from remat.core.bounds import cost_bound_ns
from remat.core.checks import keep_integers
from remat.core.deadline import TimeIsUpError, check_time, in_time
from remat.core.errors import SolverUnsuitableError
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Platform
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, simulate
from remat.core.units import format_bytes
from remat.reductions.stages import ChainOfStages
from remat.search.plain_numbers import plain_numbers
from remat.search.retention import improve_order
from remat.search.retention_table import without_unread_runs
from remat.search.schedule_paging import HostLink, page
from remat.solvers.base import (
    ProgressCallback,
    ignore_progress,
    single_device_kind_index,
)
from remat.solvers.order_search import geometric_budgets, stop_reason
from remat.solvers.rotor import Rotor, chain_of

_Judged = tuple[Schedule, Trace]
"""A schedule, and what the judge says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoFo:
    """Recompute, or copy to a device that stores, whichever is quicker.

    **Guarantee** never slower than :class:`~remat.solvers.rotor.Rotor`; beyond that,
    none but the judge's bytes and time, and the bound on every schedule. What is made
    small is the *overlapped* time, in which copies run beside computation; the serial
    time counts every copy in full.

    **Complexity** that of Rotor, O(slots x stages^3), for each virtual budget, and of
    paging, O(steps x values that lie idle), for each order.

    Parameters
    ----------
    max_stages
        Neighbouring stages are merged until there are no more than this.
    budget_count
        Virtual budgets that are tried.
    slots
        Slots that a virtual budget is divided into.
    """

    schedule_class: ClassVar[str] = (
        "a chain of stages on device 0, each run any number of times, what lies idle "
        "copied to a device that stores"
    )
    is_exact: ClassVar[bool] = False

    max_stages: int = 64
    budget_count: int = 16
    slots: int = 160

    def __post_init__(self) -> None:
        keep_integers(
            self, "max_stages", "budget_count", "slots", of=type(self).__name__, least=1
        )

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the quickest schedule found, or UNKNOWN if none fits.

        Raises
        ------
        SolverUnsuitableError
            If there is no device to store on, the graph is no chain of stages, an op
            cannot run on device 0, or a storage lives elsewhere.
        """
        graph = problem.graph
        kind_index = single_device_kind_index(problem)
        bound_ns = cost_bound_ns(problem)
        on_progress("trying budgets", 0.0)
        plain = store_all_order(graph)
        best = Best[_Judged]()
        _offer(best, problem, schedule_from_order(graph, plain))
        budget = problem.platform.devices[0].budget_bytes
        if best.answer is None and budget is not None:
            host, link = _storing_device(problem.platform)
            chain = chain_of(graph, kind_index, self.max_stages)
            recomputing = self._recomputing(problem, limits)
            if recomputing is not None:
                _offer(best, problem, recomputing)
            with suppress(TimeIsUpError), in_time(limits.deadline_s):
                orders = self._orders(chain, kind_index, budget, plain, limits)
                for index, order in enumerate(orders):
                    check_time()
                    paged = page(
                        graph,
                        schedule_from_order(graph, order),
                        budget,
                        link,
                        host=host,
                        kind_index=kind_index,
                    )
                    if paged is not None:
                        _offer(best, problem, paged.schedule)
                    on_progress("trying budgets", index / (2 * self.budget_count + 1))
        stop = stop_reason(limits)
        if best.answer is None:
            return Proposal(
                status=Status.UNKNOWN,
                bound_ns=bound_ns,
                stop_reason=stop,
                message="no plan of the chain fits with all that lies idle copied away; "
                f"the budget is {format_bytes(budget or 0)}",
            )
        schedule, trace = best.answer
        return Proposal(
            status=Status.FEASIBLE,
            schedule=schedule,
            bound_ns=bound_ns,
            stop_reason=stop,
            message=f"{trace.overlapped_ns:_} ns with copies beside computation, "
            f"{trace.serial_ns:_} ns one after the other",
        )

    def _recomputing(self, problem: Problem, limits: Limits) -> Schedule | None:
        """Return what recomputation alone comes to."""
        rotor = Rotor(max_stages=self.max_stages, slots=self.slots)
        return rotor.solve(problem, limits, ignore_progress).schedule

    def _orders(
        self,
        chain: ChainOfStages,
        kind_index: int,
        budget: int,
        plain: Sequence[int],
        limits: Limits,
    ) -> Iterator[Sequence[int]]:
        """Yield orders for virtual budgets, the one that recomputes nothing first.

        Each is given as the program plans it, and with what it need not recompute
        within the peak it has.
        """
        yield plain
        graph, stages = chain.graph, chain.chain
        most = 2 * sum(stages.all_sizes) + 1
        if limits.is_over or plan_rotor(stages, most, slots=self.slots) is None:
            return
        least = least_budget(
            lambda virtual: plan_rotor(stages, virtual, slots=self.slots),
            most,
            tolerance_bytes=max(1, most // 1000),
        )
        seen: set[tuple[int, ...]] = set()
        for virtual in geometric_budgets(least, most, self.budget_count):
            plan = plan_rotor(stages, virtual, slots=self.slots)
            if limits.is_over:
                return
            if plan is None:
                continue
            order, _, peak = without_unread_runs(
                plain_numbers(graph, kind_index), chain.order(plan.operations)
            )
            better = improve_order(
                graph, order, max(peak, budget), kind_index=kind_index, limits=limits
            )
            for each in (order, better):
                if tuple(each) not in seen:
                    seen.add(tuple(each))
                    yield each


def _storing_device(platform: Platform) -> tuple[int, HostLink]:
    """Return a device with links from and to device 0, the fastest first.

    Raises
    ------
    SolverUnsuitableError
        If there is none.
    """
    found: list[tuple[int, int, HostLink]] = []
    for device in range(1, len(platform.devices)):
        out, back = platform.link(0, device), platform.link(device, 0)
        if out is not None and back is not None:
            slower = min(out.bytes_per_s, back.bytes_per_s)
            speeds = HostLink(
                out_bytes_per_s=out.bytes_per_s,
                in_bytes_per_s=back.bytes_per_s,
                out_latency_ns=out.latency_ns,
                in_latency_ns=back.latency_ns,
            )
            found.append((-slower, device, speeds))
    if not found:
        msg = (
            f"the platform has {len(platform.devices)} devices, and none with links from "
            "and to device 0 to store on; add one (such as host memory) and its links, "
            "or use solver 'rotor', which only recomputes"
        )
        raise SolverUnsuitableError(msg)
    _, host, link = min(found, key=lambda entry: entry[:2])
    return host, link


def _offer(best: Best[_Judged], problem: Problem, schedule: Schedule) -> None:
    """Judge a schedule; keep it if it keeps every budget and is the quickest so far."""
    trace = simulate(problem.graph, problem.platform, schedule)
    if trace.violation is None:
        best.offer((schedule, trace), trace.overlapped_ns, trace.serial_ns)
