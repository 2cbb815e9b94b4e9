"""Plan a training graph on several devices, each within a budget of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from remat.core.device_graph import gathered
from remat.core.errors import (
    BudgetError,
    InvalidPlatformError,
    UnitError,
)
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Platform, single_device
from remat.core.problem import Limits, Objective, Problem, Result, Status
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, simulate
from remat.core.units import format_bytes, format_ns, parse_budget
from remat.planning.plan import (
    Plan,
    contributors,
    loss_hint,
    plan_settings,
)
from remat.planning.portfolio import solve_portfolio
from remat.planning.smallest_budget import Floor, smallest_budget
from remat.search.device_feasibility import infeasible_reason
from remat.search.device_instance import DeviceInstance
from remat.search.overlapping import overlapping
from remat.search.paging import paged, smallest_paged
from remat.solvers import chosen_solvers
from remat.solvers.base import ProgressCallback, ignore_progress

DeviceBudgets = Mapping[str, int | str | None]
"""By the devices' names: bytes, a size, a percentage, or ``None`` for no limit."""

Budget = int | str | DeviceBudgets
"""What may be given as a budget: one for the model's device, or one for each device."""


def budgets_bytes(
    budgets: DeviceBudgets, whole_bytes: int | None = None
) -> dict[str, int | None]:
    """Return budgets in bytes, rounded down.

    Parameters
    ----------
    budgets
        By the devices' names.
    whole_bytes
        What 100 % means, in bytes; needed for percentages only.

    Raises
    ------
    UnitError
        If there is none, or one is not a positive size; the message names the device.
    """
    if not budgets:
        msg = "the mapping of budgets is empty; give a budget for each device"
        raise UnitError(msg)
    sizes: dict[str, int | None] = {}
    for name, budget in budgets.items():
        if not isinstance(name, str):
            msg = (
                f"a budget is given for {name!r} ({type(name).__name__}); budgets are "
                "given by the names of devices, such as 'cuda:0' or 'cpu'"
            )
            raise UnitError(msg)
        try:
            sizes[name] = (
                None
                if budget is None
                else parse_budget(budget, whole_bytes=whole_bytes)
            )
        except UnitError as error:
            msg = f"device {name!r}: {error}"
            raise UnitError(msg) from error
    return sizes


def budget_of(plan: Plan) -> Budget:
    """Return the budget of a plan in bytes: for its device, or for each by name."""
    if plan.has_several_devices:
        return {device.name: device.budget_bytes for device in plan.platform.devices}
    return plan.budget_bytes or 0


def check_budgets(platform: Platform, budgets: DeviceBudgets | None) -> None:
    """Check that every device of the platform has a budget, and no other one has.

    A device may have its budget in the platform itself, and ``None`` in ``budgets``
    says that there is no limit.

    Raises
    ------
    InvalidPlatformError
        If not; the message names the device.
    UnitError
        If a budget is not a positive size.
    """
    given = budgets or {}
    for name in given:
        platform.index_of(name)
    for device in platform.devices:
        if device.budget_bytes is None and device.name not in given:
            msg = (
                f"device {device.name!r} of the platform has no budget; give one, such as "
                f"budget={{{device.name!r}: '8 GiB'}}, or None where there is no limit"
            )
            raise InvalidPlatformError(msg)


def plain_peak_at_home(graph: TrainingGraph, platform: Platform) -> int:
    """Return the peak of the step without rematerialisation on the first device alone.

    Whatever is at home elsewhere is then at home there.

    Raises
    ------
    InvalidPlatformError
        If some op cannot run there, so that there is no such step.
    """
    home = single_device(kind=platform.devices[0].kind)
    index = graph.kind_index(home.devices[0].kind)
    for op in graph.ops:
        if op.cost_ns[index] is None:
            msg = (
                f"a percentage is of the step on {platform.names[0]!r} alone, but op "
                f"{op.name!r} cannot run there; give budgets in bytes"
            )
            raise InvalidPlatformError(msg)
    graph = gathered(graph)
    plain = schedule_from_order(graph, store_all_order(graph))
    return simulate(graph, home, plain).peak_bytes[0]


def plan_on_devices(  # noqa: PLR0913 - every option that a user has
    graph: TrainingGraph,
    platform: Platform,
    budgets: DeviceBudgets | None = None,
    *,
    fingerprint: str = "",
    solver: str = "auto",
    objective: Objective = Objective.SERIAL,
    time_limit: float | None = None,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    has_assumed_loss: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Plan:
    """Solve and judge: return a plan on several devices, each within its budget.

    Parameters
    ----------
    graph
        With costs for each device, from :mod:`remat.core.device_graph`.
    platform
        From :func:`remat.core.device_graph.arrange`.
    budgets
        By the devices' names; a device that is not named has its budget in the
        platform. A percentage is of the predicted peak without rematerialisation on the
        first device alone.
    fingerprint, solver, objective, time_limit, seed
        As for :func:`remat.planning.one_device.plan_graph`.
    progress, has_assumed_loss, settings
        As for :func:`remat.planning.one_device.plan_graph`.

    Raises
    ------
    BudgetError
        If no schedule fits; names budgets with a known schedule, if one is known.
    InvalidPlatformError
        If a budget is missing or for an unknown device, or if there is no schedule
        whatever the budgets: an op runs nowhere, or a link is missing.
    SolverUnsuitableError
        If the solver is unknown or cannot treat the graph on this platform.
    UnitError
        If a budget is not a positive size.
    """
    check_budgets(platform, budgets)
    limits = Limits.after(time_limit, seed)
    if budgets is not None:
        is_share = any(isinstance(b, str) and "%" in b for b in budgets.values())
        whole_bytes = plain_peak_at_home(graph, platform) if is_share else None
        platform = platform.with_budgets(budgets_bytes(budgets, whole_bytes))
    problem = Problem(graph=graph, platform=platform)
    _check_is_possible(problem)
    if _resident_reason(graph, platform) is not None:
        progress("looking for budgets that work", 0.0)
        floor = _floor_at_home(graph, platform, limits)
        _refuse(problem, None, floor, limits, has_assumed_loss=has_assumed_loss)
    result = solve_portfolio(
        problem,
        chosen_solvers(solver, has_several_devices=True, objective=objective),
        limits=limits,
        on_progress=progress,
        objective=objective,
    )
    if result.schedule is None and solver == "auto":
        result = _paging(problem, result)
    schedule = result.schedule
    if schedule is None:
        progress("looking for budgets that work", 0.0)
        floor = _floor_at_home(graph, platform, limits)
        limit = platform.devices[0].budget_bytes
        fits = floor is not None and (limit is None or floor.budget_bytes <= limit)
        if floor is None or not fits or solver != "auto":
            _refuse(problem, result, floor, limits, has_assumed_loss=has_assumed_loss)
        # What an error would have named as possible is not refused.
        schedule = floor.schedule
        result = replace(result, solver="smallest_budget", status=Status.FEASIBLE)
    judged = result.trace if schedule is result.schedule else None
    if not limits.is_over:
        schedule, judged = overlapping(graph, platform, schedule, limits), None
    return Plan(
        graph=graph,
        platform=platform,
        schedule=schedule,
        solver=result.solver,
        status=result.status,
        bound_ns=result.bound_ns,
        fingerprint=fingerprint,
        objective=objective,
        settings=plan_settings(settings, solver, seed, result),
        _judged=judged,
    )


def _paging(problem: Problem, result: Result) -> Result:
    """Return what paging makes of a problem that the solvers found nothing for."""
    found = paged(problem.graph, problem.platform)
    if found is None:
        return result
    schedule, trace = found
    line = f"Paging: {Status.FEASIBLE}, {format_ns(trace.serial_ns)}"
    return replace(
        result,
        solver="Paging",
        status=Status.FEASIBLE,
        schedule=schedule,
        trace=trace,
        candidates=(*result.candidates, line),
    )


def _check_is_possible(problem: Problem) -> None:
    """Refuse a platform on which nothing is possible, whatever the budgets."""
    unlimited = problem.platform.with_budgets(dict.fromkeys(problem.platform.names))
    reason = infeasible_reason(DeviceInstance.of(replace(problem, platform=unlimited)))
    if reason is not None:
        raise InvalidPlatformError(reason)


def _resident_reason(graph: TrainingGraph, platform: Platform) -> str | None:
    """Return which device cannot hold what is there all the time, if one cannot."""
    for index, device in enumerate(platform.devices):
        held = graph.resident_bytes(index)
        limit = device.budget_bytes
        if limit is not None and held > limit:
            parts: dict[str, int] = {}
            for storage in graph.storages:
                if storage.is_resident and storage.home == index:
                    role = str(storage.role)
                    parts[role] = parts.get(role, 0) + storage.size_bytes
            listing = ", ".join(
                f"{format_bytes(size)} {role}"
                for role, size in sorted(parts.items(), key=lambda item: -item[1])
                if size
            )
            return (
                f"device {device.name!r} holds {format_bytes(held)} during the whole step "
                f"({listing}), which is more than its budget of {limit:_} bytes; it takes "
                "a larger one, or a smaller model, batch or optimizer"
            )
    return None


def _floor_at_home(
    graph: TrainingGraph, platform: Platform, limits: Limits
) -> Floor | None:
    """Return the smallest budget at home if the first device can do all alone."""
    if any(storage.home for storage in graph.storages):
        return None
    kind = platform.devices[0].kind
    index = graph.kind_index(kind)
    if any(op.cost_ns[index] is None for op in graph.ops):
        return None
    return smallest_budget(graph, kind=kind, limits=limits)


def _refuse(
    problem: Problem,
    result: Result | None,
    floor: Floor | None,
    limits: Limits,
    *,
    has_assumed_loss: bool,
) -> NoReturn:
    graph, platform = problem.graph, problem.platform
    reason = _resident_reason(graph, platform)
    reason = reason or infeasible_reason(DeviceInstance.of(problem))
    known, schedule = _known(problem, floor, limits)
    peaks = {} if known is None else peaks_by_device(platform, known)
    works = ", ".join(
        f"{format_bytes(size)} ({size} bytes) on {name!r}"
        for name, size in peaks.items()
        if size > 1
    )
    hint = "no schedule is known for any budgets"
    if known is not None and schedule is not None:
        least = "the smallest known budgets are"
        hint = f"{'a schedule is known for' if floor is None else least} {works}"
        if floor is not None and schedule == floor.schedule:
            parts = contributors(graph, schedule, known.peak_step(), platform)
            listing = ", ".join(
                f"{format_bytes(size)} {name}" for name, size in parts[:6]
            )
            hint += f" and nothing elsewhere, made of {listing}"
        if has_assumed_loss:
            hint += loss_hint(graph, schedule, known, platform, reason or "")
    # Each solver would say again what is proved without them.
    tried = ""
    if reason is None and result is not None:
        tried = f" (tried: {'; '.join(result.candidates)})"
    home = platform.devices[0]
    home_bytes = home.budget_bytes or 0

    def error(advice: str) -> BudgetError:
        return BudgetError(
            f"{_finding(problem, result, reason)}; {hint}; {advice}{tried}",
            budget_bytes=home_bytes,
            required_bytes=peaks.get(home.name, home_bytes),
            required_by_device=peaks,
            budget_by_device={d.name: d.budget_bytes for d in platform.devices},
            schedule=schedule,
        )

    refused = error("raise the budgets, or shrink the batch")
    if refused.is_known_to_fit:
        refused = error(
            "that is within the budgets: use solver='auto', or give more time"
        )
    raise refused


def _finding(problem: Problem, result: Result | None, reason: str | None) -> str:
    """Return what is wrong: the cause, if it is proved, and what was asked for."""
    devices = problem.platform.devices
    asked = ", ".join(
        f"{'no limit' if d.budget_bytes is None else format_bytes(d.budget_bytes)} on "
        f"{d.name!r}"
        for d in devices
    )
    if reason is not None:
        return f"{reason}; nothing fits in {asked}"
    proved = "none found"
    if result is not None and result.status is Status.INFEASIBLE:
        proved = f"none that {result.solver} searches fits"
    missing = [
        f"from {a.name!r} to {b.name!r}"
        for i, a in enumerate(devices)
        for j, b in enumerate(devices)
        if i != j and problem.platform.link(i, j) is None
    ]
    links = ""
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        links = f" with no link {', '.join(missing[:3])}{more}"
    return f"{proved} in {asked}{links}"


def _known(
    problem: Problem, floor: Floor | None, limits: Limits
) -> tuple[Trace | None, Schedule | None]:
    """Return a schedule that gets by with little, and its replay; or nothing."""
    if floor is None:
        return _known_without_limits(problem, limits)
    smaller = smallest_paged(
        problem.graph, problem.platform, floor.budget_bytes, limits
    )
    if smaller is None:
        return floor.trace, floor.schedule
    schedule, trace = smaller
    return trace, schedule


def peaks_by_device(platform: Platform, trace: Trace) -> dict[str, int]:
    """Return budgets that are enough, also on devices that a schedule leaves out."""
    peaks = [*trace.peak_bytes, *(0 for _ in platform.devices)]
    # One byte is the least that a budget can be.
    return {
        name: max(1, peak) for name, peak in zip(platform.names, peaks, strict=False)
    }


def _known_without_limits(
    problem: Problem, limits: Limits
) -> tuple[Trace | None, Schedule | None]:
    """Return a schedule for devices of any size, and its replay, if one is found."""
    unlimited = problem.platform.with_budgets(dict.fromkeys(problem.platform.names))
    result = solve_portfolio(
        replace(problem, platform=unlimited),
        chosen_solvers("auto", has_several_devices=True),
        limits=limits,
    )
    return result.trace, result.schedule
