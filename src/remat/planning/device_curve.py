"""Time against memory on several devices: the budget of the first one varies."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remat.core.bounds import cost_bound_ns
from remat.core.checks import checked_record
from remat.core.errors import BudgetError, InvalidPlatformError
from remat.core.graph import TrainingGraph
from remat.core.platform import Platform
from remat.core.problem import Limits, Problem, Status, check_time_limit
from remat.core.units import format_bytes, parse_budget
from remat.planning.one_device import asked_budgets, placed_on, spread_budgets
from remat.planning.plan import Plan
from remat.planning.several_devices import (
    DeviceBudgets,
    budgets_bytes,
    check_budgets,
    plain_peak_at_home,
    plan_on_devices,
)
from remat.planning.smallest_budget import smallest_budget
from remat.search.paging import smallest_paged
from remat.solvers import chosen_solvers
from remat.solvers.base import ProgressCallback, ignore_progress


def trade_off_on_devices(  # noqa: PLR0913 - every option that a user has
    graph: TrainingGraph,
    platform: Platform,
    budgets: Sequence[int | str] | int,
    *,
    others: DeviceBudgets | None = None,
    fingerprint: str = "",
    solver: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Plan, ...]:
    """Plan a graph at several budgets of the first device, the others keeping theirs.

    More budget is never slower, one thing at a time, and less never takes more memory
    on the first device: each budget gets the cheapest of all schedules found that fits.

    Parameters
    ----------
    graph, platform
        As for :func:`remat.planning.one_device.plan_graph`. The first device is home:
        where parameters and batch are.
    budgets
        Of the first device: bytes, sizes, percentages of the peak without
        rematerialisation there; or how many to spread evenly from the smallest with a
        known schedule to that peak (at least 2). The smallest is always added; budgets
        for which nothing is found are left out.
    others
        Budgets of the other devices, by name, where the platform has none.
    fingerprint, solver, time_limit, seed, settings
        As for :func:`remat.planning.one_device.plan_graph`; the time limit is for each
        budget.
    progress
        Called with the budget in turn and the share of budgets that are done.

    Returns
    -------
    tuple of Plan
        One per budget, by increasing budget of the first device.

    Raises
    ------
    InvalidPlatformError
        If some op cannot run on the first device, so that there is no step to compare
        with; if a device but the first has no budget, or the first is given one.
    SolverUnsuitableError
        If the solver is unknown or cannot treat the graph on this platform.
    UnitError
        If a budget is not a positive size, or fewer than 2 points are asked for.
    ValueError
        If the seed is no integer or out of range, or an argument of another type.
    """
    check_time_limit(time_limit)
    checked_record("graph", graph, TrainingGraph)
    checked_record("platform", platform, Platform)
    Limits(seed=seed)
    budgets = asked_budgets(budgets)
    chosen_solvers(solver, has_several_devices=True)
    platform, graph = placed_on(graph, platform)
    home = platform.devices[0]
    platform = _with_others(platform, others)
    _check_runs_at_home(graph, platform)
    whole_bytes = plain_peak_at_home(graph, platform)
    # Wrong sizes are refused before the search begins.
    sizes = (
        spread_budgets(0, whole_bytes, budgets)
        if isinstance(budgets, int)
        else {parse_budget(budget, whole_bytes=whole_bytes) for budget in budgets}
    )
    progress("looking for the smallest budget", 0.0)
    smallest = _smallest(graph, platform, fingerprint, settings)
    least_bytes = smallest.peak_bytes
    if isinstance(budgets, int):
        sizes = spread_budgets(least_bytes, whole_bytes, budgets)
    ordered = sorted({*sizes, least_bytes})
    staying = {device.name: device.budget_bytes for device in platform.devices}
    found: list[Plan] = [smallest]
    for position, size in enumerate(ordered):
        progress(f"planning for {format_bytes(size)}", position / len(ordered))
        if size < graph.resident_bytes(0):
            continue
        try:
            plan = plan_on_devices(
                graph,
                platform,
                {**staying, home.name: size},
                fingerprint=fingerprint,
                solver=solver,
                time_limit=time_limit,
                seed=seed,
                settings=settings,
            )
        except BudgetError:
            # What another budget was planned for may fit.
            continue
        found.append(plan)
    progress("done", 1.0)
    least_bytes = min(plan.peak_bytes for plan in found)
    return tuple(
        replace(_best_within(size, found), smallest_budget_bytes=least_bytes)
        for size in ordered
        if size >= least_bytes
    )


def _with_others(platform: Platform, others: DeviceBudgets | None) -> Platform:
    """Return the platform with the budgets of all devices but the first.

    Raises
    ------
    InvalidPlatformError
        If one is missing, for an unknown device or for the first.
    UnitError
        If one is not a positive size.
    """
    home = platform.devices[0]
    given = dict(others or {})
    if home.name in given:
        msg = (
            f"a budget is given for {home.name!r}, but that is the one that varies: name "
            "its budgets as those of the curve"
        )
        raise InvalidPlatformError(msg)
    check_budgets(platform, {home.name: None, **given})
    return platform.with_budgets(budgets_bytes(given) if given else {})


def _check_runs_at_home(graph: TrainingGraph, platform: Platform) -> None:
    home = platform.devices[0]
    for index, storage in enumerate(graph.storages):
        if storage.home:
            msg = (
                f"a curve compares with the step on {home.name!r} alone, but storage "
                f"{index} {storage.name!r} is at home on device {storage.home}; plan for "
                "one budget at a time"
            )
            raise InvalidPlatformError(msg)
    kind = graph.kind_index(home.kind)
    for index, op in enumerate(graph.ops):
        if op.cost_ns[kind] is None:
            msg = (
                f"a curve compares with the step on {home.name!r} alone, but op {index} "
                f"{op.name!r} cannot run there; plan for one budget at a time"
            )
            raise InvalidPlatformError(msg)


def _smallest(
    graph: TrainingGraph,
    platform: Platform,
    fingerprint: str,
    settings: Mapping[str, Any] | None,
) -> Plan:
    """Return the plan of the smallest budget of the first device that is known."""
    home = platform.devices[0]
    floor = smallest_budget(graph, kind=home.kind)
    schedule, peak_bytes, name = floor.schedule, floor.budget_bytes, "smallest_budget"
    paged = smallest_paged(graph, platform, floor.budget_bytes)
    if paged is not None:
        schedule, peak_bytes, name = paged[0], paged[1].peak_bytes[0], "Paging"
    platform = platform.with_budgets({home.name: peak_bytes})
    return Plan(
        graph=graph,
        platform=platform,
        schedule=schedule,
        solver=name,
        status=Status.FEASIBLE,
        bound_ns=cost_bound_ns(Problem(graph=graph, platform=platform)),
        fingerprint=fingerprint,
        settings=settings or {},
    )


def _best_within(budget_bytes: int, plans: Sequence[Plan]) -> Plan:
    """Return the cheapest plan that fits, as a plan for the budget of device 0."""
    fitting = [plan for plan in plans if plan.peak_bytes <= budget_bytes]
    best = min(fitting, key=lambda p: (p.cost_ns, p.overlapped_ns, p.peak_bytes))
    if best.budget_bytes == budget_bytes:
        return best
    # What was proved for another budget is not proved for this one.
    home = best.platform.devices[0]
    platform = best.platform.with_budgets({home.name: budget_bytes})
    return replace(
        best,
        platform=platform,
        status=Status.FEASIBLE,
        bound_ns=cost_bound_ns(Problem(graph=best.graph, platform=platform)),
    )
