"""Joins at many budgets: branches planned together, and each with a fixed share.

Called by ``python -m studies.joins curves``. Nothing is trained: costs are measured op
by op, and every order is weighed by its true bytes.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

from remat.algorithms.chains.operations import Backward, Forward, Operation, Turn
from remat.algorithms.chains.rotor import ChainPlan, least_budget, plan_rotor
from remat.algorithms.chains.stage_joins import StageJoin, plan_stage_join
from remat.algorithms.chains.stages import StageChain
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem
from remat.planning.one_device import plain_peak_bytes
from remat.planning.portfolio import solve
from remat.planning.smallest_budget import smallest_budget
from remat.reductions.joins import JoinOfStages, reduce_to_join
from remat.search.retention import RetentionTable
from remat.solvers.join import Join
from remat.solvers.order_search import geometric_budgets
from studies.join_networks import JOINS
from studies.models import Options
from studies.planned import Subject, make_step, plan_now

Line = dict[str, Any]


def study_curves(name: str, *, tiny: bool, points: int = 14) -> Iterator[Line]:
    """Plan a join at many budgets: branches together, and with fixed shares."""
    graph = captured_graph(name, tiny=tiny)
    forms = reduce_to_join(graph)
    if forms is None or forms.join is None:
        msg = f"{name} is no join"
        raise SystemExit(msg)
    whole = forms.join.join()
    plain_bytes = plain_peak_bytes(graph)
    floor = smallest_budget(graph, kind=graph.device_kinds[0])
    least_ns = sum(op.cost_ns[0] or 0 for op in graph.ops)
    together = weighed(forms.join, plans_together(whole))
    split = weighed(forms.join, plans_split(whole))
    lowest = min(peak for peak, _ in together)
    for index in range(points):
        budget = lowest + (plain_bytes - lowest) * index // (points - 1)
        problem = Problem(graph=graph, platform=single_device(budget))
        solved = solve(problem, Join(), limits=Limits.after(60))
        yield {
            "curve": "judged",
            "budget_bytes": budget,
            "plain_peak_bytes": plain_bytes,
            "floor_bytes": floor.budget_bytes,
            "least_ns": least_ns,
            "stages": forms.join.stage_counts,
            "together_ns": cheapest(together, budget),
            "split_ns": cheapest(split, budget),
            "solver_ns": solved.cost_ns,
        }
    shares = shares_of(whole)
    for budget in budgets_of(whole, points):
        plan = plan_stage_join(whole, budget, slots=slots_of(whole))
        yield {
            "curve": "program",
            "budget_bytes": budget,
            "least_ns": whole.least_ns,
            "stages": forms.join.stage_counts,
            "together_ns": None if plan is None else plan.cost_ns,
            "split_ns": static_split_ns(whole, shares, budget),
        }


def captured_graph(name: str, *, tiny: bool) -> TrainingGraph:
    """Return the training graph of a model with measured costs."""
    workload = JOINS[name](Options(tiny=tiny))
    step = make_step(workload)
    with step.restored():
        subject = Subject(workload, step, 0)
        return plan_now(subject, subject.request(2**62, solver="store-all"))[1].graph


def weighed(
    form: JoinOfStages, plans: Iterator[Sequence[Operation]]
) -> list[tuple[int, int]]:
    """Return the true peak and time of each plan, needless runs taken out."""
    found: list[tuple[int, int]] = []
    for operations in plans:
        table = RetentionTable(form.graph, form.order(operations))
        table.drop_unread_runs()
        found.append((table.peak_bytes, table.cost_ns))
    return found


def cheapest(weights: Sequence[tuple[int, int]], budget: int) -> int | None:
    """Return the least time of those that fit."""
    return min((cost for peak, cost in weights if peak <= budget), default=None)


def plans_together(whole: StageJoin, count: int = 60) -> Iterator[Sequence[Operation]]:
    """Yield plans of all branches together, for many budgets of the program."""
    for budget in budgets_of(whole, count):
        plan = plan_stage_join(whole, budget, slots=slots_of(whole))
        if plan is not None:
            yield plan.operations


def slots_of(whole: StageJoin) -> int:
    """Return the slots that a budget is divided into: fewer for three branches."""
    return 300 if len(whole.branches) == 2 else 100


def budgets_of(whole: StageJoin, count: int) -> list[int]:
    """Return budgets from the least that the program can do with to everything."""

    def plan(budget: int) -> ChainPlan | None:
        return plan_stage_join(whole, budget, slots=64)

    def is_plain(budget: int) -> bool | None:
        found = plan(budget)
        return True if found is not None and found.cost_ns == whole.least_ns else None

    most = 2 * sum(whole.all_sizes)
    tolerance = most // 2000
    return geometric_budgets(
        least_budget(plan, most, tolerance_bytes=tolerance),
        least_budget(is_plain, most, tolerance_bytes=tolerance),
        count,
    )


def shares_of(whole: StageJoin, count: int = 24) -> list[list[tuple[int, ChainPlan]]]:
    """Return per branch the distinct plans it has alone, with their budgets.

    What all branches need at the turn is given to each; that favours the split.
    """
    found: list[list[tuple[int, ChainPlan]]] = []
    if len(whole.branches) > 2:
        count //= 2
    for branch in whole.branches:
        plans: dict[tuple[Operation, ...], tuple[int, ChainPlan]] = {}
        for budget in _budgets_alone(branch, count):
            plan = plan_rotor(branch, budget)
            if plan is not None:
                plans.setdefault(plan.operations, (budget, plan))
        found.append(list(plans.values()))
    return found


def _budgets_alone(branch: StageChain, count: int) -> list[int]:
    most = 2 * sum(branch.all_sizes)
    least = least_budget(
        lambda budget: plan_rotor(branch, budget), most, tolerance_bytes=most // 2000
    )
    return geometric_budgets(least, sum(branch.all_sizes), count)


def plans_split(whole: StageJoin) -> Iterator[Sequence[Operation]]:
    """Yield every combination of plans that branches have alone, in every order."""
    shares = [[plan for _, plan in plans] for plans in shares_of(whole)]
    branches = range(len(shares))
    for plans in product(*shares):
        for order in permutations(branches):
            forward: list[Operation] = []
            backward: list[Operation] = []
            for branch in order:
                operations = [_on_branch(o, branch) for o in plans[branch].operations]
                turn = operations.index(Turn())
                forward += operations[:turn]
                backward += operations[turn + 1 :]
            yield [*forward, Turn(), *backward]
            if len(shares) > 2:
                break


def _on_branch(operation: Operation, branch: int) -> Operation:
    match operation:
        case Forward(stage, _, option):
            return Forward(stage, branch, option)
        case Backward(stage, _, option):
            return Backward(stage, branch, option)
        case _:
            return operation


def static_split_ns(
    whole: StageJoin, shares: list[list[tuple[int, ChainPlan]]], budget: int
) -> int | None:
    """Return the best time of branches that have a fixed share of a budget each."""
    best = {0: whole.turn_ns}
    for plans in shares:
        after: dict[int, int] = {}
        for used, cost in best.items():
            for share, plan in plans:
                total = used + share
                if total <= budget:
                    new = cost + plan.cost_ns
                    after[total] = min(after.get(total, new), new)
        best = after
    return min(best.values(), default=None)
