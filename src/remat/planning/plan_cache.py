"""Plans on disk, so that the second start of a script need not search again.

The key is a digest of all that an answer depends on: the training graph with its costs,
the platform, the budget, what else was asked for, and the code that plans. What is kept
is the answer alone. It is read onto the graph of the caller, where its schedule is
replayed and its certificate verified: a file says what to try, and not what is true.
Only what an exact solver proved about the schedules that it searches is taken from the
file, whose checksum says that it is as it was written.

Kept is also the schedule of the smallest budget that an error named, by sizes of its
step alone: with costs that are measured anew, or in less time, a search may not find it
again, and what was named is to work.
"""

import functools
import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from remat.core.contributors import contributors, largest
from remat.core.digests import digest, graph_digest
from remat.core.errors import BudgetError, FileFormatError, UnitError
from remat.core.graph import TrainingGraph
from remat.core.in_flight import with_passes
from remat.core.platform import Platform, single_device
from remat.core.problem import Objective, Status, StopReason
from remat.core.simulator import simulate
from remat.core.units import format_bytes, integer_of, is_percentage, parse_budget
from remat.files.cache_folder import DocumentFolder, cache_directory
from remat.files.conversion import convert
from remat.files.serialisation import (
    certificate_from_json,
    certificate_to_json,
    platform_to_json,
    schedule_from_json,
    schedule_to_json,
)
from remat.native import core
from remat.planning.plan import STOP_REASON, Plan
from remat.planning.proofs import unproved, with_bound
from remat.planning.regions import ComposedStep
from remat.planning.several_devices import Budget, peaks_by_device
from remat.solvers.base import ProgressCallback, ignore_progress

SIZE_VARIABLE = "REMAT_PLAN_CACHE_SIZE"
"""The environment variable with the size of all plans that are kept; 0 keeps none."""

_DEFAULT_SIZE = "100 MiB"
_SCHEMA = 1
_KIND = "kept plan"

_log = logging.getLogger(__name__)


def plan_folder() -> DocumentFolder:
    """Return where plans are kept; none are if it may hold no bytes.

    Raises
    ------
    UnitError
        If the environment variable of the size holds none.
    """
    size = os.environ.get(SIZE_VARIABLE, "").strip() or _DEFAULT_SIZE
    try:
        most_bytes = 0 if size == "0" else parse_budget(size)
    except UnitError as error:
        msg = f"{SIZE_VARIABLE}: {error}; 0 keeps no plans"
        raise UnitError(msg) from error
    return DocumentFolder(
        path=cache_directory() / "kept-plans", kind=_KIND, most_bytes=most_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCall:
    """What is planned, and what the answer depends on.

    Parameters
    ----------
    graph
        A training step with its costs; in flight, one pass of it.
    budget
        Bytes, a size, a percentage, or a mapping of these by the devices' names.
    platform
        The devices, if there are several; the graph has costs for each.
    fingerprint
        Of the traced step. Equal graphs of other steps get the same answer.
    in_flight
        How many passes run before the first backward pass.
    settings
        What the plan says that it was made with.
    asked
        What else the answer depends on, as values that JSON knows.
    parts
        Returns a digest of how the step is put together, if it is, without costs.
    """

    graph: TrainingGraph
    budget: Budget | None
    platform: Platform | None = None
    fingerprint: str = ""
    in_flight: int = 1
    settings: Mapping[str, object]
    asked: Mapping[str, object]
    parts: Callable[[], str] = str

    def key(self) -> str:
        """Return what the answer is kept under."""
        platform = None
        if self.platform is not None:
            platform = platform_to_json(self.platform)
            # They are in the graph.
            platform.pop("costs", None)
        budget: object = _plain(self.budget)
        if isinstance(self.budget, Mapping):
            budget = {name: _plain(size) for name, size in self.budget.items()}
        return digest(
            {
                "schema": _SCHEMA,
                "code": code_digest(),
                "graph": graph_digest(self.graph),
                "budget": budget,
                "platform": platform,
                "in flight": self.in_flight,
                "settings": dict(self.settings),
                "asked": dict(self.asked),
            }
        )

    def smallest_key(self) -> str:
        """Return what the schedule of its smallest known budget is kept under."""
        platform = self.platform
        return digest(
            {
                "schema": _SCHEMA,
                "smallest": graph_digest(_without_costs(self.graph)),
                "parts": self.parts(),
                "in flight": self.in_flight,
                "devices": None if platform is None else _wiring(platform),
            }
        )


def _wiring(platform: Platform) -> list[object]:
    """Return what devices and links there are, without how fast they are."""
    links = sorted([link.source, link.target] for link in platform.links)
    devices = [[each.name, each.kind] for each in platform.devices]
    return [devices, links, platform.copies_wait]


def planned_once(
    call: PlanCall,
    make: Callable[[], Plan],
    progress: ProgressCallback = ignore_progress,
) -> Plan:
    """Return the plan that is kept for a call, or make it and keep it.

    Parameters
    ----------
    call
        What is planned.
    make
        Makes the plan. What it raises is raised, and not kept; a plan whose search was
        ended by Ctrl-C is returned, and not kept.
    progress
        Told if a plan is kept.
    """
    folder = plan_folder()
    if not folder.most_bytes:
        return make()
    key = call.key()
    found = folder.read(key, functools.partial(_read, call, key))
    if found is not None:
        progress("took the plan of an earlier start", 1.0)
        _log.info("the plan of %s is read from %s", call.graph.name, folder.path)
        return found
    plan = planned_if_named(call, make)
    if plan.settings.get(STOP_REASON) != StopReason.INTERRUPTED:
        folder.write(key, _to_json(key, plan))
    return plan


def planned_if_named(call: PlanCall, make: Callable[[], Plan]) -> Plan:
    """Make a plan, or take the schedule of an earlier error that named its budget.

    Raises
    ------
    BudgetError
        As ``make`` does; it names what an earlier one named, if that is less.
    """
    try:
        return make()
    except BudgetError as error:
        folder = plan_folder()
        if error.is_known_to_fit or not folder.most_bytes:
            raise
        platform = _unlimited(call)
        required, asked = error.required_by_device, error.budget_by_device
        if not asked:
            required = {platform.names[0]: error.required_bytes}
            asked = {platform.names[0]: error.budget_bytes}
        key = call.smallest_key()
        named = replace(call, budget=None, platform=call.platform and platform)
        known = folder.read(key, functools.partial(_read, named, key))
        needed = {} if known is None else peaks_by_device(platform, known.trace)
        if known is None or (required and _are_within(required, needed)):
            found = None if required == needed else _named_by(call, error, required)
            if found is not None:
                folder.write(key, _to_json(key, found))
            raise
        if not _are_within(needed, asked) or call.asked.get("solver") != "auto":
            raise _error_of(error, known, asked) from None
        made_with = {name: call.asked.get(name) for name in ("solver", "seed")}
        plan = unproved(
            replace(
                known,
                platform=platform.with_budgets(asked),
                objective=Objective(str(call.asked.get("objective", Objective.SERIAL))),
                settings={**call.settings, **made_with},
            )
        )
        # A bound beside other passes would hold for these others only.
        return plan if call.in_flight > 1 else with_bound(plan)


def _unlimited(call: PlanCall) -> Platform:
    """Return the devices of a call, without budgets."""
    if call.platform is None:
        return single_device(None, kind=call.graph.device_kinds[0])
    return call.platform.with_budgets(dict.fromkeys(call.platform.names))


def _are_within(
    peaks: Mapping[str, int], budgets_bytes: Mapping[str, int | None]
) -> bool:
    limits = ((size, budgets_bytes[name]) for name, size in peaks.items())
    return all(limit is None or size <= limit for size, limit in limits)


def _named_by(
    call: PlanCall, error: BudgetError, required: Mapping[str, int]
) -> Plan | None:
    """Return the plan of the budget that an error names, if its schedule is known."""
    if error.schedule is None:
        return None
    graph, platform = call.graph, _unlimited(call)
    if call.in_flight > 1:
        graph = with_passes(graph, error.schedule, call.in_flight)
    trace = simulate(graph, platform, error.schedule)
    # It may be of a step in which graphs run again.
    if trace.violation is not None or not _are_within(
        peaks_by_device(platform, trace), required
    ):
        return None
    return Plan(
        graph=graph,
        platform=platform,
        schedule=error.schedule,
        solver="smallest_budget",
        status=Status.FEASIBLE,
        bound_ns=0,
        fingerprint=call.fingerprint,
        in_flight=call.in_flight,
    )


def _error_of(
    error: BudgetError, known: Plan, budgets_bytes: Mapping[str, int | None]
) -> BudgetError:
    """Return an error that names what is known of an earlier search."""
    needed = peaks_by_device(known.platform, known.trace)
    is_one = len(needed) == 1
    parts = contributors(
        known.graph, known.schedule, known.trace.peak_step(), known.platform
    )
    advice = (
        "use solver='auto'"
        if _are_within(needed, budgets_bytes)
        else f"raise the budget to at least {known.peak_bytes} bytes, or shrink the batch"
        if is_one
        else "raise the budgets, or shrink the batch"
    )
    used = {name: size for name, size in needed.items() if is_one or size > 1}
    asked, least = (
        _listing(each, has_names=not is_one) for each in (budgets_bytes, used)
    )
    made_of = [f"{format_bytes(size)} {name}" for name, size in largest(parts, 6)]
    msg = (
        f"no schedule was found within {asked}: the smallest known "
        f"{'budget is' if is_one else 'budgets are'} {least}, which an "
        f"earlier search found, made of {', '.join(made_of)}; {advice}"
    )
    return BudgetError(
        msg,
        budget_bytes=error.budget_bytes,
        required_bytes=known.peak_bytes,
        required_by_device={} if is_one else needed,
        budget_by_device=error.budget_by_device,
        schedule=known.schedule,
    )


def _listing(budgets_bytes: Mapping[str, int | None], *, has_names: bool) -> str:
    sizes: list[str] = []
    for name, size in budgets_bytes.items():
        text = "no limit"
        if size is not None:
            text = f"{format_bytes(size)} ({size} bytes)"
        sizes.append(f"{text} on {name!r}" if has_names else text)
    return ", ".join(sizes)


def plan_digest(plan: Plan) -> str:
    """Return a digest of what planning takes from a plan that is known."""
    return digest(
        [
            graph_digest(plan.graph, with_names=True),
            schedule_to_json(plan.schedule),
            plan.solver,
        ]
    )


def step_digest(step: ComposedStep, *, with_costs: bool = True) -> str:
    """Return a digest of how a step is put together, without its residents' numbers."""
    # Equal regions share a graph.
    graphs = {id(region.graph): region.graph for region in step.regions}
    if not with_costs:
        step = replace(step, graph=_without_costs(step.graph))
        graphs = {key: _without_costs(graph) for key, graph in graphs.items()}
    digests = {key: graph_digest(g, with_names=True) for key, g in graphs.items()}
    return digest(
        [
            graph_digest(step.graph, with_names=True),
            step.origins,
            [sorted(mapped.items()) for mapped in step.storages],
            [
                [
                    digests[id(region.graph)],
                    sorted(region.given),
                    sorted(region.made),
                    sorted(region.slots),
                    [storage for _, storage in region.gradients],
                ]
                for region in step.regions
            ],
        ]
    )


def _without_costs(graph: TrainingGraph) -> TrainingGraph:
    """Return a graph whose ops take no time where they can run."""
    ops = (
        replace(op, cost_ns=tuple(None if ns is None else 0 for ns in op.cost_ns))
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


_ROOMS = (
    *(
        "core",
        "native",
        "backends",
        "files",
        "memory",
        "bounds",
        "search",
        "algorithms",
    ),
    *("reductions", "solvers", "planning"),
)
"""Those whose code an answer depends on."""

_LIBRARIES = ("numpy", "ortools", "remat")


@functools.cache
def code_digest() -> str:
    """Return a digest of the code that plans: this package's, and its libraries'."""
    package = Path(__file__).parents[1]
    files = [*package.glob("__init__.py")]
    for room in _ROOMS:
        files += (package / room).rglob("*.py")
    # The native core is not always beside the code, and may be switched off.
    native = core()
    if native is not None:
        files.append(Path(str(native.__file__)))
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(f"{file.name}\n".encode())
        found.update(file.read_bytes())
    for library in _LIBRARIES:
        found.update(f"{library} {_version(library)}\n".encode())
    return found.hexdigest()


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        # Where programs are frozen into one file.
        return "unknown"


def _plain(budget: object) -> object:
    """Return an integer of any library as Python's, and anything else as it is."""
    number = integer_of(budget)
    return budget if number is None else number


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    budgets_bytes: list[int | None]
    schedule: object
    solver: str
    status: Literal["optimal", "feasible"]
    bound_ns: int
    smallest_budget_bytes: int | None
    objective: Objective
    settings: dict[str, Any]
    certificate: object = None


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    checksum: str
    answer: dict[str, Any]


def _to_json(key: str, plan: Plan) -> dict[str, object]:
    answer: dict[str, object] = {
        "budgets_bytes": [device.budget_bytes for device in plan.platform.devices],
        "schedule": schedule_to_json(plan.schedule),
        "solver": plan.solver,
        "status": str(plan.status),
        "bound_ns": plan.bound_ns,
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "objective": str(plan.objective),
        "settings": dict(plan.settings),
    }
    if plan.certificate is not None:
        answer["certificate"] = certificate_to_json(
            plan.certificate, plan.proved_ns or 0
        )
    return {"key": key, "checksum": digest(answer), "answer": answer}


def _read(call: PlanCall, key: str, payload: object) -> Plan:
    """Return a plan for a call, judged; raise an error of the package if it is none."""
    kept = convert(payload, _Kept, _KIND)
    if kept.key != key or kept.checksum != digest(kept.answer):
        msg = "it is not as it was written: key or checksum is another one"
        raise FileFormatError(msg)
    answer = convert(kept.answer, _Answer, _KIND)
    certificate, claimed_ns = None, 0
    if answer.certificate is not None:
        certificate, claimed_ns = certificate_from_json(
            answer.certificate, f"{_KIND}.certificate"
        )
    schedule = schedule_from_json(answer.schedule)
    graph = call.graph
    if call.in_flight > 1:
        graph = with_passes(graph, schedule, call.in_flight)
    plan = Plan(
        graph=graph,
        platform=_platform(call, answer.budgets_bytes),
        schedule=schedule,
        solver=answer.solver,
        status=Status(answer.status),
        bound_ns=answer.bound_ns,
        fingerprint=call.fingerprint,
        certificate=certificate,
        smallest_budget_bytes=answer.smallest_budget_bytes,
        objective=answer.objective,
        in_flight=call.in_flight,
        settings=answer.settings,
    )
    if _asked_budgets(call, plan) != answer.budgets_bytes:
        msg = f"it is for {answer.budgets_bytes} bytes, and {call.budget} is asked for"
        raise FileFormatError(msg)
    if (plan.proved_ns or 0) < claimed_ns:
        msg = f"it proves {plan.proved_ns or 0:_} ns, and claims {claimed_ns:_} ns"
        raise FileFormatError(msg)
    return plan


def _platform(call: PlanCall, budgets_bytes: list[int | None]) -> Platform:
    count = 1 if call.platform is None else len(call.platform.devices)
    if len(budgets_bytes) != count:
        msg = f"it is for {len(budgets_bytes)} devices, and {count} are planned for"
        raise FileFormatError(msg)
    if call.platform is None:
        return single_device(budgets_bytes[0], kind=call.graph.device_kinds[0])
    budgets = dict(zip(call.platform.names, budgets_bytes, strict=True))
    return call.platform.with_budgets(budgets)


def _asked_budgets(call: PlanCall, plan: Plan) -> list[int | None]:
    """Return what is asked for in bytes; percentages are of the plan's baseline."""
    budget = call.budget
    if not isinstance(budget, Mapping):
        budget = {plan.platform.names[0]: budget}
    given = call.platform or plan.platform
    return [
        _in_bytes(budget.get(device.name, device.budget_bytes), plan)
        for device in given.devices
    ]


def _in_bytes(budget: int | str | None, plan: Plan) -> int | None:
    if budget is None:
        return None
    whole_bytes = plan.baseline_peak_bytes if is_percentage(budget) else None
    return parse_budget(budget, whole_bytes=whole_bytes)
