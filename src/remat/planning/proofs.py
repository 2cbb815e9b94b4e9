"""What is proved of a plan for one device: how far it is from the best schedule.

:mod:`remat.bounds` says how little time any schedule takes; it knows no plan and no
solver. Plans for several devices keep the bound of every step: each op runs once.
"""

import math
from dataclasses import replace

from remat.bounds.time_bound import TimeBounds
from remat.core.bounds import cost_bound_ns
from remat.core.graph import TrainingGraph
from remat.core.problem import Limits, Problem
from remat.core.schedule import Compute
from remat.planning.plan import Plan

NEGLIGIBLE_GAP = 0.001
"""Of a plan that is proved to be as near as this, no more is proved, and it is searched
around only with a time limit: then there is time."""


def is_near(bounds: TimeBounds, cost_ns: int, gap: float) -> bool:
    """Return whether a time is proved to be near the least of all schedules.

    Parameters
    ----------
    bounds
        Of the step and the budget; made better as far as that takes.
    cost_ns
        The time of a schedule.
    gap
        The share of it that the best schedule may be faster by, 0 to 1.
    """
    enough_ns = math.ceil(cost_ns * (1 - gap))
    return bounds.prove(enough_ns) >= enough_ns


def with_bound(
    plan: Plan, bounds: TimeBounds | None = None, limits: Limits | None = None
) -> Plan:
    """Return a plan with a certificate for its graph and its budget.

    Parameters
    ----------
    plan
        A plan; one for several devices, without a budget, or that computes nothing
        twice is returned as it is.
    bounds
        Of its step and budget, as far as they are known.
    limits
        When to stop.
    """
    once_ns = cost_bound_ns(Problem(graph=plan.graph, platform=plan.platform))
    if plan.has_several_devices or plan.cost_ns <= once_ns:
        return plan
    kind = plan.platform.devices[0].kind
    if bounds is None:
        bounds = TimeBounds(plan.graph, plan.budget_bytes, kind, limits)
    if bounds.prove(plan.cost_ns) < plan.cost_ns * (1 - NEGLIGIBLE_GAP):
        bounds.prove_where_full(_fullest(plan))
    if bounds.certificate is None:
        return plan
    return replace(
        plan,
        bound_ns=max(plan.bound_ns, bounds.best_ns),
        certificate=bounds.certificate,
        _judged=plan.trace,
        _proved_ns=bounds.best_ns,
        _reserved=plan.reserved,
    )


def _fullest(plan: Plan) -> list[int]:
    """Return the ops of a plan, those during whose first run most is there first."""
    first_bytes: dict[int, int] = {}
    timeline_bytes = plan.trace.timeline_bytes[0]
    for step, live_bytes in zip(plan.schedule.steps, timeline_bytes, strict=True):
        if isinstance(step, Compute):
            first_bytes.setdefault(step.op, live_bytes)
    return sorted(first_bytes, key=first_bytes.__getitem__, reverse=True)


def unproved(plan: Plan) -> Plan:
    """Return a plan of which nothing is proved but that each op runs once."""
    once_ns = cost_bound_ns(Problem(graph=plan.graph, platform=plan.platform))
    return replace(plan, bound_ns=once_ns, certificate=None)


def at_budget(plan: Plan, budget_bytes: int) -> Plan:
    """Return a plan as one for another budget of its first device, nothing proved.

    What was proved for one budget need not hold for another.
    """
    home = plan.platform.devices[0]
    platform = plan.platform.with_budgets({home.name: budget_bytes})
    return unproved(replace(plan, platform=platform, certificate=None))


def on_graph(plan: Plan, graph: TrainingGraph) -> Plan:
    """Return a plan for its step with other resident bytes.

    What is proved with some memory holds with less, and not the other way round.
    """
    known = plan.graph
    parts = [
        (g.ops, g.forward_outputs, g.tangents, g.final_outputs) for g in (known, graph)
    ]
    has_less = graph.resident_bytes() >= known.resident_bytes()
    if plan.certificate is None or (parts[0] == parts[1] and has_less):
        return replace(plan, graph=graph)
    once_ns = cost_bound_ns(Problem(graph=graph, platform=plan.platform))
    bound_ns = min(plan.bound_ns, once_ns)
    return replace(plan, graph=graph, certificate=None, bound_ns=bound_ns)
