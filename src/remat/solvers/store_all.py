"""StoreAll: run every op once and keep what backward reads.

Also known as plain training. Its cost is a lower bound for every schedule on one
device; its peak is the budget above which nothing need be recomputed.
"""

from dataclasses import dataclass
from typing import ClassVar

from remat.core.bounds import cost_bound_ns, required_ops
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.core.schedule import Schedule
from remat.core.simulator import simulate
from remat.search.plain_numbers import plain_numbers
from remat.search.retention_table import weigh_order
from remat.solvers.base import ProgressCallback


@dataclass(frozen=True, slots=True)
class StoreAll:
    """Run every op once, in graph order, and free each storage after its last use.

    **Optimal among** all schedules of one device whenever its peak fits the budget and
    every op is needed: then each runs exactly once.

    **Complexity** linear in the graph.
    """

    schedule_class: ClassVar[str] = "every op once, in graph order"
    is_exact: ClassVar[bool] = True

    def solve(
        self, problem: Problem, limits: Limits, on_progress: ProgressCallback
    ) -> Proposal:
        """Return the store-all schedule, or INFEASIBLE if it does not fit."""
        graph, devices = problem.graph, problem.platform.devices
        order = store_all_order(graph)
        schedule: Schedule | None = None
        bound_ns = cost_bound_ns(problem)
        kind_index = graph.kind_index(devices[0].kind)
        if len(devices) == 1 and None not in {
            op.cost_ns[kind_index] for op in graph.ops
        }:
            # To weigh an order takes a small part of the time of a replay.
            numbers = plain_numbers(graph, kind_index)
            cost_ns, peak = weigh_order(numbers, order)
            budget = problem.budget_bytes
            reason = ""
            if budget is not None and peak > budget:
                reason = (
                    f"to keep everything takes {peak:_} bytes; the budget is "
                    f"{budget:_} bytes"
                )
        else:
            schedule = schedule_from_order(graph, order)
            trace = simulate(graph, problem.platform, schedule)
            cost_ns = trace.serial_ns
            reason = "" if trace.violation is None else trace.violation.message
        if reason:
            return Proposal(status=Status.INFEASIBLE, bound_ns=bound_ns, message=reason)
        is_needed = len(required_ops(graph)) == len(graph.ops)
        return Proposal(
            status=Status.OPTIMAL if is_needed else Status.FEASIBLE,
            schedule=schedule or schedule_from_order(graph, order),
            bound_ns=cost_ns if is_needed else bound_ns,
        )
