"""A plan: a judged schedule for one model, one set of input shapes, one budget."""

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from remat.bounds.certificate import certified_bound_ns
from remat.core.allocator import ENVIRONMENT
from remat.core.bounds import cost_bound_ns
from remat.core.certificate import Certificate
from remat.core.contributors import contributors as contributors
from remat.core.contributors import largest
from remat.core.device_graph import gathered
from remat.core.device_use import DeviceUse, LinkUse, device_uses, link_uses
from remat.core.errors import PlanMismatchError
from remat.core.graph import Phase, TrainingGraph
from remat.core.in_flight import others_bytes, plain_with_passes, with_passes
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Platform, single_device
from remat.core.problem import Objective, Problem, Result, Status, StopReason
from remat.core.schedule import Compute, Schedule
from remat.core.simulator import Trace, simulate
from remat.core.timelines import plain_timelines, replayed_timeline
from remat.core.units import format_bytes, format_ns
from remat.files.conversion import convert
from remat.files.documents import load_document, write_document
from remat.files.serialisation import (
    certificate_from_json,
    certificate_to_json,
    graph_from_json,
    graph_to_json,
    platform_from_json,
    platform_to_json,
    schedule_from_json,
    schedule_to_json,
)
from remat.memory.requests import AllocatorReplay, ReservedUse, reserved_use
from remat.planning.notebook import html_page, html_section, memory_picture

Kernels = Literal["eager", "fused"]
"""Whose kernels a step runs: eager PyTorch's, or fused ones where they are quicker."""

Account = Literal["live", "reserved"]
"""Whose bytes a budget counts: blocks in use, or what the caching allocator holds."""

ADVICE = "allocator advice"
"""The key of a plan's settings for words about its caching allocator."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule for one training graph, with what is proved about it.

    Parameters
    ----------
    graph, platform, schedule
        What is trained, where, and how.
    solver, status
        The solver that found the schedule, and what it proved.
    bound_ns
        No schedule that the solver searches takes less serial time.
    fingerprint
        Identifies the traced step that the plan is for.
    certificate
        What proves how little time any schedule at all takes at least, on one device;
        ``None`` where nothing is proved beyond that every op runs once.
    smallest_budget_bytes
        The smallest budget for which a schedule is known, or ``None`` if it was not
        looked for.
    objective
        What was to be small.
    kernels, fused_kernels
        Whose kernels the step runs, and the names of those that are fused.
    in_flight
        How many forward passes run before the first backward pass; what all but one
        take is a block of the graph (:mod:`remat.core.in_flight`).
    account
        Whose bytes the budget counts; ``"reserved"`` on one device whose memory has a
        caching allocator.
    primed_bytes
        The sizes of blocks that are allocated, and then freed, before the first step,
        so that the allocator has segments that all that follows shares.
    settings
        What the plan was made with, for people: versions, solver, profile. Nothing is
        read back from it.

    Raises
    ------
    PlanMismatchError
        If the schedule breaks a rule or the budget when replayed, or is cheaper than
        the bound; or if its allocator reserves more than a budget of reserved bytes.
    """

    graph: TrainingGraph
    platform: Platform
    schedule: Schedule
    solver: str
    status: Status
    bound_ns: int
    fingerprint: str
    certificate: Certificate | None = None
    smallest_budget_bytes: int | None = None
    objective: Objective = Objective.SERIAL
    kernels: Kernels = "eager"
    fused_kernels: frozenset[str] = frozenset()
    in_flight: int = 1
    account: Account = "live"
    primed_bytes: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    _judged: InitVar[Trace | None] = None
    """The replay of the schedule on the platform, where it is known."""
    _proved_ns: InitVar[int | None] = None
    """What the certificate proves, where that has been verified."""
    _reserved: InitVar[ReservedUse | None] = None
    """What the allocator reserves, where it has been replayed."""

    def __post_init__(
        self,
        _judged: Trace | None,
        _proved_ns: int | None,
        _reserved: ReservedUse | None,
    ) -> None:
        if _judged is not None:
            # To replay thousands of steps once more would take longer than it may.
            self.__dict__["trace"] = _judged
        if _proved_ns is not None:
            self.__dict__["proved_ns"] = _proved_ns
        if _reserved is not None:
            self.__dict__["reserved"] = _reserved
        if self.trace.violation is not None:
            msg = f"the plan's schedule is not valid: {self.trace.violation}"
            raise PlanMismatchError(msg)
        if self.bound_ns > self.trace.serial_ns:
            msg = (
                f"the plan claims a bound of {self.bound_ns:_} ns, but its schedule "
                f"takes {self.trace.serial_ns:_} ns"
            )
            raise PlanMismatchError(msg)
        if self.in_flight > 1:
            self._check_in_flight()
        if self.account == "reserved":
            self._check_reserved()

    def _check_reserved(self) -> None:
        use, budget = self.reserved, self.budget_bytes
        if use is None or budget is None or self.has_several_devices:
            msg = (
                "the plan's budget counts reserved bytes, which needs one device, with a "
                "budget, whose memory has a caching allocator"
            )
            raise PlanMismatchError(msg)
        if use.reserved_bytes > budget:
            msg = (
                f"the plan's allocator reserves {use.reserved_bytes:_} bytes, more than "
                f"the budget of {budget:_} bytes"
            )
            raise PlanMismatchError(msg)

    def _check_in_flight(self) -> None:
        needed = with_passes(self.graph, self.schedule, self.in_flight)
        needed_bytes, counted_bytes = others_bytes(needed), others_bytes(self.graph)
        if counted_bytes < needed_bytes:
            msg = (
                f"the plan counts {counted_bytes:_} bytes for {self.in_flight - 1} other "
                f"passes in flight, which take {needed_bytes:_} bytes"
            )
            raise PlanMismatchError(msg)

    @cached_property
    def trace(self) -> Trace:
        """The replay of the schedule."""
        return simulate(self.graph, self.platform, self.schedule)

    @cached_property
    def baseline(self) -> Trace:
        """The replay of the same step without rematerialisation and without budget.

        With several devices, on the first alone, with everything at home there; it is
        not valid where some op cannot run there.
        """
        platform = single_device(kind=self.platform.devices[0].kind)
        graph = gathered(self._plain_graph)
        schedule = schedule_from_order(graph, store_all_order(graph))
        return simulate(graph, platform, schedule)

    @property
    def _plain_graph(self) -> TrainingGraph:
        """The graph as it is when nothing is rematerialised in other passes either."""
        if self.in_flight == 1:
            return self.graph
        return plain_with_passes(self.graph, self.in_flight)

    @cached_property
    def reserved(self) -> ReservedUse | None:
        """What the first device's caching allocator reserves over several steps.

        ``None`` where its memory has no such allocator.
        """
        settings = self.platform.allocator_of(0)
        if settings is None:
            return None
        kind = self.platform.devices[0].kind
        return reserved_use(
            self.graph,
            self.schedule,
            settings,
            kind=kind,
            primed_bytes=self.primed_bytes,
        )

    @cached_property
    def reserved_uses(self) -> tuple[ReservedUse | None, ...]:
        """What is reserved on each device, ``None`` where nothing is cached."""
        others: list[ReservedUse | None] = []
        for device in range(1, len(self.platform.devices)):
            settings = self.platform.allocator_of(device)
            kind = self.platform.devices[device].kind
            if settings is None:
                others.append(None)
                continue
            replay = AllocatorReplay(
                self.graph, self.schedule, settings, kind=kind, device=device
            )
            others.append(replay.use())
        return (self.reserved, *others)

    @property
    def budget_bytes(self) -> int | None:
        """The budget of the first device in bytes, or ``None`` for no limit."""
        return self.platform.devices[0].budget_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the whole step on the first device, in bytes."""
        return self.trace.peak_bytes[0]

    @property
    def baseline_peak_bytes(self) -> int:
        """Predicted peak without rematerialisation, in bytes."""
        return self.baseline.peak_bytes[0]

    @cached_property
    def device_uses(self) -> tuple[DeviceUse, ...]:
        """What happens on each device."""
        return device_uses(self.graph, self.platform, self.schedule, self.trace)

    @cached_property
    def link_uses(self) -> tuple[LinkUse, ...]:
        """What is copied over each link that is used."""
        return link_uses(self.graph, self.platform, self.schedule)

    @property
    def cost_ns(self) -> int:
        """Predicted serial time of operators and copies in nanoseconds."""
        return self.trace.serial_ns

    @property
    def overlapped_ns(self) -> int:
        """Predicted time if devices and links work at once, in nanoseconds."""
        return self.trace.overlapped_ns

    @property
    def baseline_cost_ns(self) -> int:
        """Predicted time without rematerialisation, in nanoseconds."""
        return self.baseline.serial_ns

    @property
    def overhead(self) -> float:
        """Extra time over the baseline as a fraction of it."""
        return (
            self.cost_ns / self.baseline_cost_ns - 1 if self.baseline_cost_ns else 0.0
        )

    @cached_property
    def proved_ns(self) -> int | None:
        """What the certificate proves for this graph and budget, in nanoseconds.

        The verifier's answer, in exact arithmetic; ``None`` without a certificate, and
        where none applies: with several devices, or without a budget.

        Raises
        ------
        CertificateError
            If the certificate is none of this graph, or for less memory.
        """
        if self.certificate is None or self.budget_bytes is None:
            return None
        if self.has_several_devices:
            return None
        kind = self.platform.devices[0].kind
        return certified_bound_ns(self.graph, self.budget_bytes, self.certificate, kind)

    @cached_property
    def floor_ns(self) -> int:
        """A time in nanoseconds that no schedule at all can beat.

        The larger of what the certificate proves and the time of running every op once.
        ``bound_ns`` may be larger: then it holds for the schedules that the solver
        searches, which is its ``schedule_class``.
        """
        once_ns = cost_bound_ns(Problem(graph=self.graph, platform=self.platform))
        return max(once_ns, self.proved_ns or 0)

    @property
    def gap(self) -> float:
        """(cost - floor) / cost: how far from the best of all schedules at most."""
        return (self.cost_ns - self.floor_ns) / self.cost_ns if self.cost_ns else 0.0

    @property
    def recomputed_op_count(self) -> int:
        """How many runs of ops are recomputations."""
        return sum(self.schedule.recompute_counts().values())

    def __str__(self) -> str:
        return "\n".join(
            [
                self._title(),
                *(f"  {label:<12}  {text}" for label, text in self._facts()),
                f"  {self._peak_title()}:",
                *(f"    {size:>12}  {name}" for size, name in self._peak_rows()),
            ]
        )

    def __repr__(self) -> str:
        if self.has_several_devices:
            peaks = [f"peak of {u.name} {_within(u)}" for u in self.device_uses]
        else:
            plain = format_bytes(self.baseline_peak_bytes)
            peaks = [f"peak {_within(self.device_uses[0])}, without remat {plain}"]
        return (
            f"<Plan for {self.graph.name}: {', '.join(peaks)}; time "
            f"{format_ns(self.cost_ns)}, {self.recomputed_op_count} of "
            f"{len(self.graph.ops)} ops recomputed; print(plan) says more>"
        )

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it: a table, and memory over the step."""
        plain = plain_timelines(self._plain_graph, self.platform)
        pictures: list[str] = []
        for index, device in enumerate(self.platform.devices):
            before = {} if plain is None else {"without remat": plain[index]}
            planned = replayed_timeline(self.graph, self.platform, self.schedule, index)
            where = f" on {device.name}" if self.has_several_devices else ""
            pictures.append(
                memory_picture(
                    f"predicted memory of one training step{where}",
                    {**before, "planned": planned},
                    budget_bytes=device.budget_bytes,
                )
            )
        at_the_peak = html_section(self._peak_title(), self._peak_rows())
        return html_page(self._title(), self._facts(), *pictures, at_the_peak)

    def _title(self) -> str:
        return f"plan for {self.graph.name}"

    def _facts(self) -> list[tuple[str, str]]:
        """Return what people want to know: labels and text, no label for more text."""
        graphs = self.settings.get("graphs")
        facts = [
            *([] if graphs is None else [("graphs", str(graphs))]),
            *([] if self.in_flight == 1 else [("in flight", self._in_flight_words())]),
            *(self._place_facts() if self.has_several_devices else self._peak_facts()),
            *self._reserved_facts(),
            *self._bound_facts(),
            ("recomputed", f"{self.recomputed_op_count} of {len(self.graph.ops)} ops"),
        ]
        if self.smallest_budget_bytes is not None:
            smallest = (
                f"{format_bytes(self.smallest_budget_bytes)} is the "
                "smallest budget with a known schedule"
                + (" on the first device alone" if self.has_several_devices else "")
            )
            facts.append(("smallest", smallest))
        return facts

    def _in_flight_words(self) -> str:
        held = format_bytes(others_bytes(self.graph))
        return f"{self.in_flight} forward passes; all but one take {held}"

    def _peak_title(self) -> str:
        first = self.platform.names[0]
        return "at the peak" + (f" of {first}" if self.has_several_devices else "")

    def _peak_rows(self) -> list[tuple[str, str]]:
        return [
            (format_bytes(size), name)
            for name, size in largest(self._contributors(), 8)
        ]

    def _contributors(self) -> list[tuple[str, int]]:
        step = self.trace.peak_step()
        return contributors(self.graph, self.schedule, step, self.platform)

    @property
    def has_several_devices(self) -> bool:
        """Whether the plan is for more than one device."""
        return len(self.platform.devices) > 1

    def _bound_facts(self) -> list[tuple[str, str]]:
        claim = f"{self.status} by {self.solver}"
        if self.status is Status.FEASIBLE and self.cost_ns == self.floor_ns:
            claim += ", and none takes less time"
        bound = f"{format_ns(self.floor_ns)}, {self.distance} (proved; {claim})"
        facts = [("proved bound", bound)]
        if self.bound_ns > self.floor_ns:
            more = f"{format_ns(self.bound_ns)} of the schedules that {self.solver} searches"
            facts.append(("", more))
        return facts

    @property
    def distance(self) -> str:
        """How far from the best of all schedules at most, in words; rounded up."""
        if not self.floor_ns:
            return f"gap {self.gap:.1%}"
        # Of the optimum, which is at least the bound.
        above = -((self.floor_ns - self.cost_ns) * 1000 // self.floor_ns)
        if not above:
            return "the optimum of all schedules"
        return f"at most {above / 10} % above the optimum of all schedules"

    def _peak_facts(self) -> list[tuple[str, str]]:
        budget = self.budget_bytes
        peak = (
            f"{format_bytes(self.peak_bytes)} predicted for the whole step "
            f"(without remat {format_bytes(self.baseline_peak_bytes)})"
        )
        time = (
            f"{format_ns(self.cost_ns)} in operators, {self.overhead:+.1%} over the step "
            f"without remat ({format_ns(self.baseline_cost_ns)})"
        )
        return [
            ("budget", "none" if budget is None else self._budget_words(budget)),
            ("peak", peak),
            ("time", time),
        ]

    def _budget_words(self, budget: int) -> str:
        is_cached = self.platform.allocator_of(0) is not None
        return format_bytes(budget) + (f", of {self.account} bytes" * is_cached)

    def _reserved_facts(self) -> list[tuple[str, str]]:
        """Return what caching allocators make of the plan."""
        facts: list[tuple[str, str]] = []
        devices = self.platform.devices
        for device, use, live in zip(
            devices, self.reserved_uses, self.trace.peak_bytes, strict=True
        ):
            if use is None:
                continue
            where = f" of {device.name}" if len(devices) > 1 else ""
            facts += [
                ("reserved", _reserved_words(use, live, where)),
                ("allocator", str(use.settings) or f"default ({ENVIRONMENT[0]})"),
            ]
            if not use.is_steady:
                steps = ", ".join(map(format_bytes, use.step_reserved_bytes))
                facts.append(("", f"what is reserved still grows, by steps: {steps}"))
            budget = device.budget_bytes
            if budget is not None and use.reserved_bytes > budget:
                more = format_bytes(use.reserved_bytes - budget)
                facts.append(
                    ("", f"{more} more than the budget, which counts live bytes")
                )
        advice = self.settings.get(ADVICE)
        return facts if advice is None else [*facts, ("", str(advice))]

    def _place_facts(self) -> list[tuple[str, str]]:
        copies = [str(use) for use in self.link_uses] or ["nothing is copied"]
        time = (
            f"{format_ns(self.cost_ns)} one thing at a time, "
            f"{format_ns(self.overlapped_ns)} with devices and links at once"
        )
        facts = [
            *_labelled("devices", [str(use) for use in self.device_uses]),
            *_labelled("copies", copies),
            ("time", time),
        ]
        if self.baseline.is_valid:
            alone = (
                f"{format_bytes(self.baseline_peak_bytes)} and "
                f"{format_ns(self.baseline_cost_ns)} without remat"
            )
            facts.append((f"on {self.platform.names[0]} alone", alone))
        return facts

    def summary(self) -> dict[str, Any]:
        """Return the plan's figures as a dictionary that JSON can hold."""
        return {
            "name": self.graph.name,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "cost_ns": self.cost_ns,
            "baseline_cost_ns": self.baseline_cost_ns,
            "overhead": self.overhead,
            "bound_ns": self.bound_ns,
            "gap": self.gap,
            "status": str(self.status),
            "solver": self.solver,
            "op_count": len(self.graph.ops),
            "recomputed_op_count": self.recomputed_op_count,
            "smallest_budget_bytes": self.smallest_budget_bytes,
            "fingerprint": self.fingerprint,
            "settings": {**self.settings, **_noted(self)},
            "overlapped_ns": self.overlapped_ns,
            "devices": [asdict(use) for use in self.device_uses],
            "copies": [asdict(use) for use in self.link_uses],
            **self._reserved_summary(),
        }

    def _reserved_summary(self) -> dict[str, Any]:
        use = self.reserved
        if use is None:
            return {}
        return {
            "account": self.account,
            "allocator": str(use.settings),
            "reserved_bytes": use.reserved_bytes,
            "allocated_bytes": use.allocated_bytes,
            "primed_bytes": list(self.primed_bytes),
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as versioned JSON, atomically.

        Raises
        ------
        FileFormatError
            If the file cannot be written; an existing file is then unchanged.
        """
        write_document(path, "plan", plan_to_json(self))


_FUSED_KERNELS = "fused kernels"
_IN_FLIGHT = "in flight"
_PRIMED = "primed bytes"


class _Payload(msgspec.Struct, forbid_unknown_fields=True):
    """What a file of a plan holds; older files have no certificate."""

    graph: object
    platform: object
    schedule: object
    solver: str
    status: Literal["optimal", "feasible"]
    bound_ns: int
    fingerprint: str
    smallest_budget_bytes: int | None
    settings: dict[str, Any]
    certificate: object = None


class _Noted(msgspec.Struct):
    """What stands among the settings of a file, and is not one of them."""

    objective: Objective = Objective.SERIAL
    kernels: Kernels = "eager"
    fused_kernels: str = msgspec.field(default="", name=_FUSED_KERNELS)
    in_flight: int = msgspec.field(default=1, name=_IN_FLIGHT)
    account: Account = "live"
    primed_bytes: tuple[int, ...] = msgspec.field(default=(), name=_PRIMED)


def plan_to_json(plan: Plan) -> dict[str, object]:
    """Return what :func:`plan_from_json` reads, of values that JSON can hold."""
    found: dict[str, object] = {
        "graph": graph_to_json(plan.graph),
        "platform": platform_to_json(plan.platform),
        "schedule": schedule_to_json(plan.schedule),
        "solver": plan.solver,
        "status": str(plan.status),
        "bound_ns": plan.bound_ns,
        "fingerprint": plan.fingerprint,
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "settings": {**plan.settings, **_noted(plan)},
    }
    if plan.certificate is not None:
        proved_ns = plan.proved_ns or 0
        found["certificate"] = certificate_to_json(plan.certificate, proved_ns)
    return found


def load_plan(path: str | Path) -> Plan:
    """Read a plan and judge it again.

    Raises
    ------
    FileFormatError
        If the file is missing, damaged, not a plan, or of an unknown version.
    PlanMismatchError
        If its schedule breaks a rule or its budget when replayed, or its certificate
        proves less than the file says.
    CertificateError
        If its certificate is none of its graph.
    """
    return load_document(path, "plan", plan_from_json)


def plan_from_json(payload: object) -> Plan:
    """Return the plan that :func:`plan_to_json` wrote, judged again.

    Raises
    ------
    FileFormatError, PlanMismatchError, CertificateError
        As for :func:`load_plan`.
    """
    fields = convert(payload, _Payload, "plan")
    noted: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in fields.settings.items():
        (noted if name in _Noted.__struct_encode_fields__ else settings)[name] = value
    known = convert(noted, _Noted, "plan.settings")
    certificate, claimed_ns = None, 0
    if fields.certificate is not None:
        certificate, claimed_ns = certificate_from_json(
            fields.certificate, "plan.certificate"
        )
    plan = Plan(
        graph=graph_from_json(fields.graph),
        platform=platform_from_json(fields.platform),
        schedule=schedule_from_json(fields.schedule),
        solver=fields.solver,
        status=Status(fields.status),
        bound_ns=fields.bound_ns,
        fingerprint=fields.fingerprint,
        certificate=certificate,
        smallest_budget_bytes=fields.smallest_budget_bytes,
        objective=known.objective,
        kernels=known.kernels,
        fused_kernels=frozenset(known.fused_kernels.split()),
        in_flight=known.in_flight,
        account=known.account,
        primed_bytes=known.primed_bytes,
        settings=settings,
    )
    if (plan.proved_ns or 0) < claimed_ns:
        msg = (
            f"the plan's certificate is said to prove {claimed_ns:_} ns, but it proves "
            f"{plan.proved_ns or 0:_} ns"
        )
        raise PlanMismatchError(msg)
    return plan


def _noted(plan: Plan) -> dict[str, str | int | list[int]]:
    """Return what files and figures of a plan hold among its settings.

    Only what is not the default, as files had it before these were fields.
    """
    noted: dict[str, str | int | list[int]] = {}
    if plan.in_flight > 1:
        noted[_IN_FLIGHT] = plan.in_flight
    if plan.account != "live":
        noted["account"] = plan.account
    if plan.primed_bytes:
        noted[_PRIMED] = list(plan.primed_bytes)
    if plan.objective is not Objective.SERIAL:
        noted["objective"] = str(plan.objective)
    if plan.kernels != "eager":
        noted["kernels"] = plan.kernels
        noted[_FUSED_KERNELS] = " ".join(sorted(plan.fused_kernels))
    return noted


def _reserved_words(use: ReservedUse, live_bytes: int, where: str) -> str:
    share = f" ({use.reserved_bytes / live_bytes:.3f} x live)" if live_bytes else ""
    return (
        f"{format_bytes(use.reserved_bytes)} by the caching allocator{where}{share}, "
        f"{format_bytes(use.allocated_bytes)} of them allocated"
    )


def _within(use: DeviceUse) -> str:
    budget = use.budget_bytes
    limit = "no budget" if budget is None else f"budget {format_bytes(budget)}"
    return f"{format_bytes(use.peak_bytes)} ({limit})"


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [("" if position else label, line) for position, line in enumerate(lines)]


STOP_REASON = "stop reason"
"""The setting that says that Ctrl-C ended a search; other plans have none."""


def plan_settings(
    settings: Mapping[str, Any] | None, solver: str, seed: int, result: Result
) -> dict[str, Any]:
    """Return what a plan was made with: the caller's settings and how it was solved."""
    interrupted = result.stop_reason is StopReason.INTERRUPTED
    return {
        **(settings or {}),
        **({STOP_REASON: str(result.stop_reason)} if interrupted else {}),
        "solver": solver,
        "seed": seed,
        "candidates": list(result.candidates),
        "solve_s": round(result.elapsed_s, 3),
    }


_LEAST_SHARE = 100


def loss_hint(
    graph: TrainingGraph,
    schedule: Schedule,
    trace: Trace,
    platform: Platform | None = None,
    reason: str = "",
) -> str:
    """Return advice to describe the loss, to end a message with, where that may help.

    Empty where less than a hundredth of the peak on the first device is set aside for
    the loss, and the loss is not what fits nowhere.

    Parameters
    ----------
    graph
        Of a step whose loss nobody described: what it needs is assumed.
    schedule, trace, platform
        A schedule, its replay, and where; by default one device of the first kind.
    reason
        Why nothing fits, which may begin with the op at fault.
    """
    platform = platform or single_device(kind=graph.device_kinds[0])
    kind = graph.kind_index(platform.devices[0].kind)
    step = trace.peak_step()
    live = simulate(graph, platform, Schedule(schedule.steps[:step])).live_after[0]
    current = schedule.steps[step]
    assumed_bytes = 0
    for index, op in enumerate(graph.ops):
        if not op.is_external or op.phase is not Phase.FORWARD:
            continue
        is_now = isinstance(current, Compute) and current.op == index
        is_now = is_now or reason.startswith(f"op {index} ")
        if is_now:
            assumed_bytes += op.workspace_bytes[kind]
        assumed_bytes += sum(
            graph.storages[storage].size_bytes
            for storage in op.writes
            if is_now or storage in live
        )
    if assumed_bytes * _LEAST_SHARE < trace.peak_bytes[0] or not assumed_bytes:
        return ""
    return (
        f"; the loss is not described, so {format_bytes(assumed_bytes)} for it are a "
        "guess: give loss=, the function of the outputs whose gradient is taken, and what "
        "it needs is predicted"
    )
