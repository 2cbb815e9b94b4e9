"""Plan a step that differs from a planned one in sizes only; never imports torch.

A plan that has room for the gradients of an earlier pass holds when they exist, too. In
the middle of training, planning is time lost. Where the graph is that of a known
plan, op for op, only with other sizes or other resident bytes, the solver that was best
there is asked first, and the known schedule is tried as it is. Their answer is taken if
the step recomputes hardly more than the known one does; else all solvers are asked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from remat.bounds.time_bound import TimeBounds
from remat.core.bounds import cost_bound_ns
from remat.core.gradient_pieces import ADDING
from remat.core.graph import Role, Storage, TrainingGraph
from remat.core.in_flight import others_bytes, with_others, with_passes
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Proposal, Status
from remat.core.simulator import simulate
from remat.planning.plan import Plan, plan_settings
from remat.planning.portfolio import judge, solve
from remat.planning.proofs import on_graph, with_bound
from remat.solvers import SOLVERS
from remat.solvers.base import Solver
from remat.solvers.store_all import StoreAll

TOLERATED_OVERHEAD = 0.01
"""How much more of the step's time than the known plan an answer may recompute."""


def equal_plan(graph: TrainingGraph, known: Iterable[Plan]) -> Plan | None:
    """Return the last plan of a graph with the same ops, or ``None``."""
    ops = [(op.name, op.reads, op.writes, op.phase) for op in graph.ops]
    found: Plan | None = None
    for plan in known:
        others = [(op.name, op.reads, op.writes, op.phase) for op in plan.graph.ops]
        if not plan.has_several_devices and others == ops:
            found = plan
    return found


def with_gradients(
    plan: Plan, known_bytes: int, gradient_bytes: int, bucket_bytes: int = 0
) -> Plan | None:
    """Return a plan with the gradients of earlier passes that exist, if it holds then.

    Parameters
    ----------
    plan
        A plan for one device of a step that starts with gradients of ``known_bytes``.
    known_bytes, gradient_bytes
        Bytes of gradients that were counted, and those to be counted instead. With
        fewer of them another plan could be faster, unless this one computes nothing
        twice, and unless it counts on them being there, to be added to; passes in
        flight keep theirs, as they share one.
    bucket_bytes
        How many of them are buckets, to which no gradient is added.
    """
    if plan.has_several_devices:
        return None
    once_ns = cost_bound_ns(Problem(graph=plan.graph, platform=plan.platform))
    is_best = plan.in_flight > 1 or plan.cost_ns <= once_ns
    is_added = plan.in_flight == 1 and any(op.name == ADDING for op in plan.graph.ops)
    if gradient_bytes < known_bytes and (is_added or not is_best):
        return None
    storages = list(plan.graph.storages)
    apart_bytes = min(bucket_bytes, gradient_bytes)
    for role, size_bytes in (
        (Role.GRADIENT, gradient_bytes - apart_bytes),
        (Role.BUCKET, apart_bytes),
    ):
        held = Storage(
            name=f"{role} outside the graph",
            size_bytes=size_bytes,
            role=role,
            is_resident=True,
        )
        places = [
            place
            for place, storage in enumerate(storages)
            if storage.is_resident and storage.role is role
        ]
        if places:
            storages[places[0]] = held
        elif size_bytes or role is Role.GRADIENT:
            storages.append(held)
    graph = replace(plan.graph, storages=tuple(storages))
    if plan.in_flight > 1:
        graph = with_passes(graph, plan.schedule, plan.in_flight)
    if simulate(graph, plan.platform, plan.schedule).violation is not None:
        return None
    return on_graph(plan, graph)


def at_sizes(plan: Plan, graph: TrainingGraph) -> Plan | None:
    """Return a plan with its step at other sizes, if its schedule holds there.

    Parameters
    ----------
    plan
        A plan of the step.
    graph
        The graph of the step, op for op, at other sizes, and with other residents.

    Notes
    -----
    Nothing is proved of other sizes but that every op runs once. Other passes in flight
    may be of any size, so they take as much as at those of the plan, or at these.
    """
    if plan.in_flight > 1:
        graph = with_passes(graph, plan.schedule, plan.in_flight)
        most_bytes = max(map(others_bytes, (plan.graph, graph)))
        graph = with_others(graph, most_bytes, plan.in_flight)
    trace = simulate(graph, plan.platform, plan.schedule)
    if trace.violation is not None:
        return None
    floor_ns = cost_bound_ns(Problem(graph=graph, platform=plan.platform))
    return replace(
        plan,
        graph=graph,
        bound_ns=min(plan.bound_ns, floor_ns),
        certificate=None,
        status=Status.FEASIBLE if plan.recomputed_op_count else plan.status,
        _judged=trace,
    )


def replan(
    graph: TrainingGraph,
    budget_bytes: int,
    known: Plan,
    *,
    fingerprint: str,
    limits: Limits,
    settings: Mapping[str, Any],
) -> Plan | None:
    """Return a plan made from what a known one says, or ``None`` if it is no good.

    Parameters
    ----------
    graph
        A training step for one device, op for op that of ``known``.
    budget_bytes
        The budget of the device.
    known
        A plan of an equal step, from :func:`equal_plan`.
    fingerprint, settings
        As for :func:`remat.planning.one_device.plan_graph`.
    limits
        When to stop.

    Notes
    -----
    Good enough is store-all, or what recomputes for at most 1 % of the step's time
    longer than ``known`` does.
    """
    kind = graph.device_kinds[0]
    problem = Problem(graph=graph, platform=single_device(budget_bytes, kind))
    results = [solve(problem, StoreAll(), limits=limits)]
    if results[0].schedule is None:
        trace = simulate(graph, problem.platform, known.schedule)
        if trace.violation is None:
            proposal = Proposal(status=Status.FEASIBLE, schedule=known.schedule)
            results.append(judge(problem, known.solver, proposal))
        results += [solve(problem, best, limits=limits) for best in _solver_of(known)]
    found = [r for r in results if r.schedule is not None and r.trace is not None]
    if not found:
        return None
    result = min(found, key=lambda r: r.cost_ns or 0)
    if result.schedule is None:
        return None
    plan = Plan(
        graph=graph,
        platform=problem.platform,
        schedule=result.schedule,
        solver=result.solver,
        status=result.status,
        bound_ns=result.bound_ns,
        fingerprint=fingerprint,
        settings=plan_settings(settings, "auto", limits.seed, result),
    )
    is_good = plan.overhead <= known.overhead + TOLERATED_OVERHEAD
    if result is not results[0] and not is_good:
        return None
    # A training step waits: milliseconds may go into the bound, and not seconds.
    bounds = TimeBounds(graph, budget_bytes, kind, limits, is_quick=True)
    return with_bound(plan, bounds)


def _solver_of(plan: Plan) -> list[Solver]:
    return [make() for make in SOLVERS.values() if make.__name__ == plan.solver]
