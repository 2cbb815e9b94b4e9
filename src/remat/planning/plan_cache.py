"""Plans on disk, so that the second start of a script need not search again.

The key is a digest of all that an answer depends on: the training graph with its costs,
the platform, the budget, what else was asked for, and the code that plans. What is kept
is the answer alone. It is read onto the graph of the caller, where its schedule is
replayed and its certificate verified: a file says what to try, and not what is true.
Only what an exact solver proved about the schedules that it searches is taken from the
file, whose checksum says that it is as it was written.
"""

import functools
import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from remat.core.digests import digest, graph_digest
from remat.core.errors import FileFormatError, UnitError
from remat.core.graph import TrainingGraph
from remat.core.in_flight import with_passes
from remat.core.platform import Platform, single_device
from remat.core.problem import Objective, Status, StopReason
from remat.core.units import integer_of, is_percentage, parse_budget
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
from remat.planning.regions import ComposedStep
from remat.planning.several_devices import Budget
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
    """

    graph: TrainingGraph
    budget: Budget | None
    platform: Platform | None = None
    fingerprint: str = ""
    in_flight: int = 1
    settings: Mapping[str, object]
    asked: Mapping[str, object]

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
    plan = make()
    if plan.settings.get(STOP_REASON) != StopReason.INTERRUPTED:
        folder.write(key, _to_json(key, plan))
    return plan


def plan_digest(plan: Plan) -> str:
    """Return a digest of what planning takes from a plan that is known."""
    return digest(
        [
            graph_digest(plan.graph, with_names=True),
            schedule_to_json(plan.schedule),
            plan.solver,
        ]
    )


def step_digest(step: ComposedStep) -> str:
    """Return a digest of how a step is put together, without its residents' numbers."""
    return digest(
        [
            graph_digest(step.graph, with_names=True),
            step.origins,
            [sorted(mapped.items()) for mapped in step.storages],
            [
                [
                    graph_digest(region.graph, with_names=True),
                    sorted(region.given),
                    sorted(region.made),
                    sorted(region.slots),
                    [storage for _, storage in region.gradients],
                ]
                for region in step.regions
            ],
        ]
    )


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
