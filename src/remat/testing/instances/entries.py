"""Anybody's schedule, judged against an instance and what is known of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from remat.core.certificate import Certificate
from remat.core.digests import graph_digest
from remat.core.errors import UsageError
from remat.core.schedule import Schedule
from remat.core.simulator import Trace
from remat.files.documents import document_kind
from remat.files.serialisation import load_schedule
from remat.planning.plan import load_plan
from remat.testing.instances.library import BestKnown, Instance, load_instance, names


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A schedule for an instance, and what its file proves.

    Parameters
    ----------
    instance
        What it is for.
    schedule, certificate
        What the file holds; schedules alone prove nothing.
    trace
        The replay of the schedule without a budget.
    """

    instance: Instance
    schedule: Schedule
    certificate: Certificate | None
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A valid schedule beside the best that is known within a budget.

    Parameters
    ----------
    label, budget_bytes
        The budget.
    fits
        Whether the schedule's peak is within it.
    cost_ns
        Time of the schedule in nanoseconds.
    best
        What is known.
    """

    label: str
    budget_bytes: int
    fits: bool
    cost_ns: int
    best: BestKnown

    def __str__(self) -> str:
        if not self.fits:
            return "takes more memory"
        known_ns = self.best.cost_ns
        if self.cost_ns == known_ns:
            return "as good as the best known"
        share = abs(self.cost_ns - known_ns) / known_ns
        than = "better" if self.cost_ns < known_ns else "worse"
        return f"{share:.3%} {than} than the best known"


def entry_of(file: Path, name: str | None = None) -> Entry:
    """Return what a schedule or plan file holds, with the instance that it is for.

    Parameters
    ----------
    file
        A schedule, or a plan whose graph is that of the instance.
    name
        The instance. By default that of a plan's graph, or the one instance on whose
        graph the schedule is valid.

    Raises
    ------
    FileFormatError
        If the file cannot be read, or holds something else.
    PlanMismatchError, CertificateError
        If a plan claims what is not so.
    UsageError
        If the instance cannot be told, or a plan is of another graph than it is.
    """
    schedule, certificate, digest = _content(file)
    fitting: list[Entry] = []
    for each in [name] if name is not None else names():
        instance = load_instance(each)
        if digest is not None and graph_digest(instance.graph) != digest:
            continue
        trace = instance.replay(schedule)
        if name is not None or trace.is_valid:
            entry = Entry(
                instance=instance,
                schedule=schedule,
                certificate=certificate,
                trace=trace,
            )
            fitting.append(entry)
    if len(fitting) != 1:
        raise UsageError(_no_instance(file, name, fitting))
    return fitting[0]


def _content(file: Path) -> tuple[Schedule, Certificate | None, str | None]:
    """Return the schedule of a file, what it proves, and the digest of its graph."""
    if document_kind(file) == "plan":
        plan = load_plan(file)
        return plan.schedule, plan.certificate, graph_digest(plan.graph)
    return load_schedule(file), None, None


def _no_instance(file: Path, name: str | None, fitting: Sequence[Entry]) -> str:
    if name is not None:
        return f"{file} is a plan of another graph than that of instance {name}"
    found = ", ".join(entry.instance.name for entry in fitting) or "none"
    return (
        f"{file} is valid for {found} of the instances; name the one that it is for, "
        "such as --instance resnet50"
    )


def comparisons(entry: Entry) -> list[Comparison]:
    """Return a valid entry beside what is known of each budget, the largest first."""
    instance, trace = entry.instance, entry.trace
    return [
        Comparison(
            label=label,
            budget_bytes=budget_bytes,
            fits=trace.peak_bytes[0] <= budget_bytes,
            cost_ns=trace.serial_ns,
            best=instance.best[label],
        )
        for label, budget_bytes in instance.budgets_bytes.items()
    ]
