"""A search among plans of an abstraction, each lifted and weighed by its true bytes."""

from collections.abc import Callable, Iterator, Sequence

from remat.chains.operations import Operation
from remat.chains.rotor import ChainPlan, least_budget
from remat.solvers.order_search import OrderSearch, geometric_budgets

Program = Callable[[int], ChainPlan | None]
"""From a budget of the abstraction, in bytes, to a plan of it."""


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
        coarse: Program | None = None,
    ) -> Iterator[float]:
        """Ask a program for budgets of its own, then around the largest that fits.

        The bytes that the program counts are a model of the true ones: it does not see
        what lives around the pass, so its budgets are spread from the least it can do
        with to everything.

        ``coarse`` is the same program with fewer slots, asked besides where nothing has
        fitted: what it rounds up is room to spare.

        Yields
        ------
        float
            The share that is done.
        """
        most = 2 * sum(sizes) + 1
        if program(most) is None:
            return
        least = least_budget(program, most, tolerance_bytes=max(1, most // 1000))
        budgets = geometric_budgets(least, most, count)
        low = budgets[0]
        for index, budget in enumerate(budgets):
            if self.is_over:
                return
            if self._try(program, order_of, budget):
                low = budget
            yield (index + 1) / count
        if self.best is None and len(budgets) > 2:
            # Near the least, plans differ more than their budgets do.
            span = budgets[2] - budgets[0]
            for index in range(1, count):
                budget = budgets[0] + span * index // count
                for each in (program, coarse):
                    if self.is_over:
                        return
                    if each is not None:
                        self._try(each, order_of, budget)
                yield 1.0
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
