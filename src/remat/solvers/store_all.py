"""StoreAll: run every op once and keep what backward reads.

Also known as plain training. Its cost is a lower bound for every schedule on one
device; its peak is the budget above which nothing need be recomputed.
"""

from dataclasses import dataclass
from typing import ClassVar

from remat.bounds import cost_bound_ns, required_ops
from remat.liveness import schedule_from_order, store_all_order
from remat.problem import Limits, Problem, Proposal, Status
from remat.simulator import simulate
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
        schedule = schedule_from_order(problem.graph, store_all_order(problem.graph))
        trace = simulate(problem.graph, problem.platform, schedule)
        if trace.violation is None:
            is_needed = len(required_ops(problem.graph)) == len(problem.graph.ops)
            return Proposal(
                status=Status.OPTIMAL if is_needed else Status.FEASIBLE,
                schedule=schedule,
                bound_ns=trace.serial_ns if is_needed else cost_bound_ns(problem),
            )
        return Proposal(
            status=Status.INFEASIBLE,
            bound_ns=cost_bound_ns(problem),
            message=trace.violation.message,
        )
