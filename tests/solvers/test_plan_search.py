"""The sweep of a program's budgets: which are asked for, and in what range."""

from tests.instances import joined_towers

from remat.algorithms.chains.rotor import ChainPlan
from remat.algorithms.chains.stage_joins import plan_stage_join
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem
from remat.reductions.joins import reduce_to_join
from remat.solvers.plan_search import PlanSearch
from remat.testing import store_all_peak_bytes


def asked(share: int, slots: tuple[int, ...]) -> dict[int, list[int]]:
    """Return the budgets that programs are asked for on two towers, by slots."""
    graph = joined_towers((12, 12), is_shared=False).graph
    forms = reduce_to_join(graph)
    assert forms is not None
    assert forms.join is not None
    whole = forms.join.join()
    budget = store_all_peak_bytes(graph) * share // 100
    problem = Problem(graph=graph, platform=single_device(budget))
    search = PlanSearch(problem, Limits())
    found: dict[int, list[int]] = {count: [] for count in slots}
    is_sweeping = False

    def program(count: int, budget: int) -> ChainPlan | None:
        if is_sweeping:
            found[count].append(budget)
        return plan_stage_join(whole, budget, slots=count)

    programs = [lambda b, count=count: program(count, b) for count in slots]
    sweep = search.sweep_budgets(
        programs[0],
        forms.join.order,
        whole.all_sizes,
        count=8,
        bisection_count=3,
        coarser=programs[1:],
    )
    next(sweep)
    is_sweeping = True
    list(sweep)
    # Where the plan is as quick as any, more memory is of no use.
    plain = plan_stage_join(whole, 2 * sum(whole.all_sizes), slots=slots[0])
    assert plain is not None
    enough = plan_stage_join(whole, max(found[slots[0]]), slots=slots[0])
    assert enough is not None
    assert enough.cost_ns == plain.cost_ns
    fewer = plan_stage_join(whole, max(found[slots[0]]) * 9 // 10, slots=slots[-1])
    assert fewer is None or fewer.cost_ns > plain.cost_ns
    return found


def test_budgets_end_where_nothing_is_recomputed() -> None:
    found = asked(70, (100, 64))
    assert not found[64]
    assert len(found[100]) == 7 + 3


def test_tight_budgets_are_looked_at_closely_with_every_rounding() -> None:
    found = asked(22, (100, 80, 64))
    assert len(found[80]) == len(found[64]) == 7
    assert len(found[100]) >= 7 + 7
