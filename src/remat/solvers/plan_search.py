"""A search among plans of an abstraction, each lifted and weighed by its true bytes."""

from collections.abc import Callable, Iterator, Sequence

from remat.algorithms.chains.operations import Operation
from remat.algorithms.chains.rotor import ChainPlan, least_budget
from remat.solvers.order_search import OrderSearch, geometric_budgets

Program = Callable[[int], ChainPlan | None]
"""From a budget of the abstraction, in bytes, to a plan of it."""


_FEW = 3
"""Where fewer budgets than this fit, those near the least are looked at closely."""


class PlanSearch(OrderSearch):
    """The orders that plans stand for."""

    def lift(self, order: Sequence[int]) -> bool:
        """Weigh an order by its true bytes; return whether it fits."""
        return self.weigh(order).peak_bytes <= self.budget_bytes

    def sweep_budgets(
        self,
        program: Program,
        order_of: Callable[[Sequence[Operation]], list[int]],
        sizes: Sequence[int],
        *,
        count: int,
        bisection_count: int,
        coarser: Sequence[Program] = (),
    ) -> Iterator[float]:
        """Ask a program for budgets of its own, then around the largest that fits.

        The bytes that the program counts are a model of the true ones: it does not see
        what lives around the pass, so its budgets are spread from the least it can do
        with to the least for which its plan is as quick as with everything.

        ``coarser`` is the same program with fewer slots, the fewest last, asked besides
        where little has fitted: what it rounds up is room to spare.

        Yields
        ------
        float
            The share that is done.
        """
        budgets = _worthwhile(program, [program, *coarser][-1], sizes, count)
        low, fitting = 0, 0
        for index, budget in enumerate(budgets):
            if self.is_over:
                return
            if self._try(program, order_of, budget):
                low, fitting = budget, fitting + 1
            yield (index + 1) / count
        if fitting < _FEW and len(budgets) > 2:
            # Near the least, plans differ more than their budgets do.
            span = budgets[2] - budgets[0]
            for index in range(1, count):
                budget = budgets[0] + span * index // count
                for each in (program, *coarser):
                    if self.is_over:
                        return
                    self._try(each, order_of, budget)
                yield 1.0
        if not fitting:
            return
        high = min((b for b in budgets if b > low), default=low)
        for _ in range(bisection_count):
            if self.is_over:
                return
            middle = (low + high) // 2
            fits = self._try(program, order_of, middle)
            low, high = (middle, high) if fits else (low, middle)
            yield 1.0

    def _try(
        self,
        program: Program,
        order_of: Callable[[Sequence[Operation]], list[int]],
        budget: int,
    ) -> bool:
        plan = program(budget)
        return plan is not None and self.lift(order_of(plan.operations))


def _worthwhile(
    program: Program, quick_program: Program, sizes: Sequence[int], count: int
) -> list[int]:
    """Return budgets from the least of a program to where more is of no use.

    ``quick_program`` may stand for the program where it is as quick with everything.
    """
    most = 2 * sum(sizes) + 1
    best = program(most)
    if best is None:
        return []
    tolerance = max(1, most // 1000)
    least = least_budget(program, most, tolerance_bytes=tolerance)

    def is_best(budget: int) -> bool | None:
        plan = quick_program(budget)
        return True if plan is not None and plan.cost_ns <= best.cost_ns else None

    if is_best(most):
        most = least_budget(is_best, most, tolerance_bytes=tolerance)
    return geometric_budgets(least, most, count)
