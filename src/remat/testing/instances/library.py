"""The instances that come with the package, and what is known of each.

An instance is a training graph with budgets in bytes. Beside it stands, for each
budget, the best schedule that is known and the best bound that is proved, each with who
found it. Both are judged here: schedules are replayed, and certificates verified in
integers. A graph never changes, so that figures of different years compare.
"""

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from remat.bounds.certificate import certified_bound_ns
from remat.core.bounds import cost_bound_ns
from remat.core.certificate import Certificate
from remat.core.digests import graph_digest
from remat.core.errors import FileFormatError, UsageError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulator import Trace, simulate
from remat.files.conversion import convert
from remat.files.documents import format_document, parse_document, write_bytes
from remat.files.serialisation import (
    certificate_from_json,
    certificate_to_json,
    graph_from_json,
    graph_to_json,
    schedule_from_json,
    schedule_to_json,
)

INSTANCE = "instance"
BEST_KNOWN = "best known"
"""Kinds of the two documents of an instance."""

_GRAPH_SUFFIX = ".graph.json.gz"
_BEST_SUFFIX = ".best.json.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestKnown:
    """The best that is known for one budget.

    Parameters
    ----------
    schedule
        Of one device, within the budget.
    cost_ns, peak_bytes
        Its time in nanoseconds and its peak in bytes, as the judge found them.
    found_by
        Who found it: a solver and its version, or a person and a method.
    bound_ns
        No schedule within the budget takes less time, in nanoseconds.
    certificate
        What proves that; ``None`` where the bound is that every op runs once.
    proved_by
        Who proved it.
    """

    schedule: Schedule
    cost_ns: int
    peak_bytes: int
    found_by: str
    bound_ns: int
    certificate: Certificate | None
    proved_by: str

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: how far from the best of all schedules at most."""
        return (self.cost_ns - self.bound_ns) / self.cost_ns if self.cost_ns else 0.0


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A training graph with budgets.

    Parameters
    ----------
    name
        Its key.
    family
        What kind of network it is, such as ``"transformer"``.
    origin
        Which model, of which size, captured with what.
    budgets_bytes
        Budgets in bytes by label, the largest first.
    graph
        For one device.
    best
        The best that is known, by the labels of budgets.
    """

    name: str
    family: str
    origin: str
    budgets_bytes: Mapping[str, int]
    graph: TrainingGraph
    best: Mapping[str, BestKnown]

    @cached_property
    def once_ns(self) -> int:
        """Time of running every op once that is needed, in nanoseconds."""
        platform = single_device(kind=self.graph.device_kinds[0])
        return cost_bound_ns(Problem(graph=self.graph, platform=platform))

    def replay(self, schedule: Schedule, budget_bytes: int | None = None) -> Trace:
        """Judge a schedule within a budget in bytes, or without one."""
        platform = single_device(budget_bytes, kind=self.graph.device_kinds[0])
        return simulate(self.graph, platform, schedule)

    def bound_ns(self, label: str, certificate: Certificate | None) -> int:
        """Return what is proved of all schedules within a budget, in nanoseconds.

        Raises
        ------
        CertificateError
            If the certificate is none of this graph, or for less memory.
        """
        if certificate is None:
            return self.once_ns
        kind = self.graph.device_kinds[0]
        budget_bytes = self.budgets_bytes[label]
        proved_ns = certified_bound_ns(self.graph, budget_bytes, certificate, kind)
        return max(self.once_ns, proved_ns)

    def check(self, label: str) -> str | None:
        """Return what is not as the library says of a budget, or ``None``.

        Raises
        ------
        CertificateError
            If a certificate is none of this graph, or for less memory.
        """
        best = self.best[label]
        trace = self.replay(best.schedule, self.budgets_bytes[label])
        if trace.violation is not None:
            return f"the schedule fails: {trace.violation}"
        found = (trace.serial_ns, trace.peak_bytes[0])
        if found != (best.cost_ns, best.peak_bytes):
            return f"the schedule takes {found[0]:_} ns and {found[1]:_} bytes"
        proved_ns = self.bound_ns(label, best.certificate)
        if proved_ns != best.bound_ns:
            return f"the certificate proves {proved_ns:_} ns"
        return None

    def with_schedule(
        self, label: str, schedule: Schedule, found_by: str
    ) -> "Instance":
        """Return the instance with a schedule, where it is better than the known one.

        Better is less time, then a smaller peak. One that fails is left out.
        """
        trace = self.replay(schedule, self.budgets_bytes[label])
        if trace.violation is not None:
            return self
        known = self.best.get(label)
        found = (trace.serial_ns, trace.peak_bytes[0])
        if known is not None and (known.cost_ns, known.peak_bytes) <= found:
            return self
        best = BestKnown(
            schedule=schedule,
            cost_ns=found[0],
            peak_bytes=found[1],
            found_by=found_by,
            bound_ns=self.once_ns if known is None else known.bound_ns,
            certificate=None if known is None else known.certificate,
            proved_by="" if known is None else known.proved_by,
        )
        return replace(self, best={**self.best, label: best})

    def with_certificate(
        self, label: str, certificate: Certificate, proved_by: str
    ) -> "Instance":
        """Return the instance with a certificate, where it proves more than the known.

        Raises
        ------
        CertificateError
            If the certificate is none of this graph, or for less memory.
        """
        known, proved_ns = self.best[label], self.bound_ns(label, certificate)
        if proved_ns <= known.bound_ns:
            return self
        best = replace(
            known, bound_ns=proved_ns, certificate=certificate, proved_by=proved_by
        )
        return replace(self, best={**self.best, label: best})


class _Instance(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    family: str
    origin: str
    budgets_bytes: dict[str, int]
    graph: object


class _Best(msgspec.Struct, forbid_unknown_fields=True):
    schedule: object
    cost_ns: int
    peak_bytes: int
    found_by: str
    bound_ns: int
    proved_by: str
    certificate: object = None


class _BestKnown(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    graph_digest: str
    budgets: dict[str, _Best]


def folder() -> Traversable:
    """Return the folder of the package with the instances."""
    return files("remat.testing.instances") / "data"


def names() -> list[str]:
    """Return the names of all instances, in order."""
    found = (entry.name for entry in folder().iterdir())
    return sorted(
        name.removesuffix(_GRAPH_SUFFIX)
        for name in found
        if name.endswith(_GRAPH_SUFFIX)
    )


def load_instance(name: str) -> Instance:
    """Return an instance with what is known of it.

    Raises
    ------
    FileFormatError
        If a file is damaged, or what is known is of another graph.
    UsageError
        If there is no such instance.
    """
    if name not in names():
        _refuse(name)
    fields = convert(_payload(f"{name}{_GRAPH_SUFFIX}", INSTANCE), _Instance, INSTANCE)
    graph = graph_from_json(fields.graph)
    best: dict[str, BestKnown] = {}
    if (folder() / f"{name}{_BEST_SUFFIX}").is_file():
        payload = _payload(f"{name}{_BEST_SUFFIX}", BEST_KNOWN)
        known = convert(payload, _BestKnown, BEST_KNOWN)
        if known.graph_digest != graph_digest(graph):
            msg = f"{name}{_BEST_SUFFIX} is of another graph than {name}{_GRAPH_SUFFIX}"
            raise FileFormatError(msg)
        best = {label: _best(each) for label, each in known.budgets.items()}
    return Instance(
        name=fields.name,
        family=fields.family,
        origin=fields.origin,
        budgets_bytes=fields.budgets_bytes,
        graph=graph,
        best=best,
    )


def save_instance(target: Path, instance: Instance) -> None:
    """Write the two files of an instance into a folder.

    Raises
    ------
    FileFormatError
        If a file cannot be written.
    """
    head = {
        "name": instance.name,
        "family": instance.family,
        "origin": instance.origin,
        "budgets_bytes": dict(instance.budgets_bytes),
    }
    whole = {**head, "graph": graph_to_json(instance.graph)}
    _write(target / f"{instance.name}{_GRAPH_SUFFIX}", INSTANCE, whole)
    budgets = {label: _best_to_json(best) for label, best in instance.best.items()}
    known = {
        "name": instance.name,
        "graph_digest": graph_digest(instance.graph),
        "budgets": budgets,
    }
    _write(target / f"{instance.name}{_BEST_SUFFIX}", BEST_KNOWN, known)


def _refuse(name: str) -> NoReturn:
    msg = f"there is no instance {name!r}; remat instances list names all"
    raise UsageError(msg)


def _payload(file: str, kind: str) -> dict[str, object]:
    try:
        text = gzip.decompress((folder() / file).read_bytes()).decode()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        msg = f"{file} cannot be read: {error}"
        raise FileFormatError(msg) from error
    try:
        return parse_document(text, kind)
    except FileFormatError as error:
        msg = f"{file}: {error}"
        raise FileFormatError(msg) from error


def _write(path: Path, kind: str, payload: Mapping[str, object]) -> None:
    text = format_document(kind, payload)
    # Without a time, so that equal contents are equal files.
    write_bytes(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))


def _best(fields: _Best) -> BestKnown:
    certificate = None
    if fields.certificate is not None:
        certificate, _ = certificate_from_json(fields.certificate, BEST_KNOWN)
    return BestKnown(
        schedule=schedule_from_json(fields.schedule),
        cost_ns=fields.cost_ns,
        peak_bytes=fields.peak_bytes,
        found_by=fields.found_by,
        bound_ns=fields.bound_ns,
        certificate=certificate,
        proved_by=fields.proved_by,
    )


def _best_to_json(best: BestKnown) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "schedule": schedule_to_json(best.schedule),
        "cost_ns": best.cost_ns,
        "peak_bytes": best.peak_bytes,
        "found_by": best.found_by,
        "bound_ns": best.bound_ns,
        "proved_by": best.proved_by,
    }
    if best.certificate is not None:
        fields["certificate"] = certificate_to_json(best.certificate, best.bound_ns)
    return fields
