"""Paging of a schedule: copy idle storages to the host, and back in time.

Given a schedule of one device, whatever its peak, :func:`page` copies storages that are
idle for a while to the host, so that the device stays within a budget; copies run while
the device computes. In the static order of steps, a storage that is paged out

* occupies the device until the step before which its copy out is *awaited*: the first
  step that needs the room, or at which the copy has ended anyway;
* occupies it again from the step before which its copy in is *issued*: early enough to
  arrive in time, as far as there is room;

so the budget holds whatever the copies' real speed; a slow copy only makes the device
wait. Copies out and copies in each go one after the other (a link in each direction).

:mod:`remat.search.paging` makes a schedule of its own, step by step, and so gets by
with less memory; here the schedule is given, and copies overlap with it.

Which storages: at the first step over the budget, of what is idle then the storage
whose next use is farthest, and so on (Belady). Time is what an exact simulation of the
queues of device and links gives.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from remat.core.checks import checked_integer, checked_record, keep_integers
from remat.core.deadline import check_time
from remat.core.errors import InvalidGraphError
from remat.core.graph import TrainingGraph
from remat.core.platform import LARGEST_RATE
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.core.units import LARGEST_TOTAL


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Speeds and latencies of the links between device and host.

    Parameters
    ----------
    out_bytes_per_s, in_bytes_per_s
        Bytes per second to the host and back; 0 means that there is no such link, so
        that nothing can be paged.
    out_latency_ns, in_latency_ns
        Time that each copy takes besides.

    Raises
    ------
    InvalidGraphError
        If a number is no integer, negative, or too large to be counted.
    """

    out_bytes_per_s: int
    in_bytes_per_s: int
    out_latency_ns: int = 0
    in_latency_ns: int = 0

    def __post_init__(self) -> None:
        for kind, most in (
            ("bytes_per_s", LARGEST_RATE),
            ("latency_ns", LARGEST_TOTAL),
        ):
            keep_integers(
                self,
                f"out_{kind}",
                f"in_{kind}",
                of="a host link",
                least=0,
                most=most,
                error=InvalidGraphError,
            )

    @property
    def is_usable(self) -> bool:
        """Whether there is a link in both directions."""
        return min(self.out_bytes_per_s, self.in_bytes_per_s) > 0

    def out_ns(self, size_bytes: int) -> int:
        """Return the time of a copy to the host, rounded up."""
        return self.out_latency_ns - (-size_bytes * 10**9 // self.out_bytes_per_s)

    def in_ns(self, size_bytes: int) -> int:
        """Return the time of a copy to the device, rounded up."""
        return self.in_latency_ns - (-size_bytes * 10**9 // self.in_bytes_per_s)


@dataclass(slots=True)
class Page:
    """A storage that is on the host between two uses; indices are of stops.

    A stop is a computation or the boundary. The copy out is issued after stop ``start``
    and is awaited before ``awaited``; the copy in is issued before ``issued`` and
    awaited before ``end``.
    """

    storage: int
    size_bytes: int
    start: int
    end: int
    awaited: int = 0
    issued: int = 0

    @property
    def is_away(self) -> bool:
        """Whether the storage is off the device at any stop."""
        return self.awaited < self.issued


@dataclass(frozen=True, kw_only=True)
class PagedSchedule:
    """A schedule with paging.

    Parameters
    ----------
    time_ns
        Time with copies overlapping computations.
    serial_ns
        Time with one thing after the other.
    paged_bytes
        Bytes copied out; as many are copied in.
    stops
        Computations and the boundary, in order.
    pages
        What is paged.
    schedule
        Everything as steps.
    """

    time_ns: int
    serial_ns: int
    paged_bytes: int
    stops: tuple[Step, ...]
    pages: tuple[Page, ...]
    schedule: Schedule


@dataclass(slots=True)
class _Line:
    """The stops of a schedule: what they take, and what lies idle between uses."""

    graph: TrainingGraph
    kind_index: int = 0
    stops: list[Step] = field(default_factory=list[Step])
    # Discards after each stop.
    discards: list[list[Discard]] = field(default_factory=list[list[Discard]])
    used_bytes: list[int] = field(default_factory=list[int])
    cost_ns: list[int] = field(default_factory=list[int])
    writes: list[Sequence[int]] = field(default_factory=list[Sequence[int]])
    gaps: list[Page] = field(default_factory=list[Page])

    def read(self, schedule: Schedule) -> None:
        held = self.graph.resident_bytes()
        last_use: dict[int, int] = {}
        # What may not leave: once handed over, what the caller holds.
        staying: frozenset[int] = frozenset()
        for step in schedule.steps:
            if isinstance(step, Discard):
                if last_use.pop(step.storage, None) is not None:
                    held -= self.size(step.storage)
                if self.discards:
                    self.discards[-1].append(step)
                continue
            if isinstance(step, Copy):
                msg = "paging starts from a schedule without copies"
                raise InvalidGraphError(msg)
            here = len(self.stops)
            reads, writes, cost, workspace = self.effect(step)
            self.stops.append(step)
            self.discards.append([])
            self.cost_ns.append(cost)
            self.writes.append(writes)
            self.used_bytes.append(held + workspace + sum(map(self.size, writes)))
            for storage in (*reads, *writes):
                before = last_use.get(storage)
                is_idle = before is not None and here - before > 1
                if before is not None and is_idle and storage not in staying:
                    size = self.size(storage)
                    self.gaps.append(Page(storage, size, before, here))
                if before is None and storage in writes:
                    held += self.size(storage)
                if before is not None or storage in writes:
                    last_use[storage] = here
            if isinstance(step, Boundary):
                staying = self.graph.held_outputs

    def size(self, storage: int) -> int:
        return self.graph.storages[storage].size_bytes

    def effect(self, step: Step) -> tuple[Sequence[int], Sequence[int], int, int]:
        if isinstance(step, Compute):
            op = self.graph.ops[step.op]
            cost = op.cost_ns[self.kind_index]
            if cost is None:
                kind = self.graph.device_kinds[self.kind_index]
                msg = f"op {op.name!r} has no cost on {kind!r}"
                raise InvalidGraphError(msg)
            workspace = op.workspace_bytes[self.kind_index]
            return op.reads, op.writes, cost, workspace
        return self.graph.forward_outputs, self.graph.tangents, 0, 0


def page(
    graph: TrainingGraph,
    schedule: Schedule,
    budget_bytes: int,
    link: HostLink,
    *,
    host: int = 1,
    kind_index: int = 0,
) -> PagedSchedule | None:
    """Return ``schedule`` with paging that keeps the device within a budget.

    Parameters
    ----------
    graph, schedule
        A valid schedule of device 0 alone.
    budget_bytes
        Most bytes live on the device at any time.
    link
        Speeds of the copies.
    host
        Index of the device to copy to.
    kind_index
        Position of device 0's kind in the ops' costs.

    Returns
    -------
    PagedSchedule or None
        ``None`` if some computation does not fit even with everything idle paged out,
        or something would have to be paged and there is no link.

    Raises
    ------
    InvalidGraphError
        If the schedule has copies, an op no cost on that kind, or a number is no
        integer or out of range.

    Notes
    -----
    Time O(stops * gaps) for as many gaps as there are idle times of storages.
    """
    error = InvalidGraphError
    checked_record("graph", graph, TrainingGraph, error=error)
    checked_record("schedule", schedule, Schedule, error=error)
    checked_record("link", link, HostLink, error=error)
    budget_bytes = checked_integer("budget_bytes", budget_bytes, error=error)
    host = checked_integer("host", host, least=1, error=error)
    last_kind = len(graph.device_kinds) - 1
    kind_index = checked_integer(
        "kind_index", kind_index, least=0, most=last_kind, error=error
    )
    line = _Line(graph, kind_index)
    line.read(schedule)
    chosen = _choose(line, budget_bytes)
    if chosen is None or (chosen and not link.is_usable):
        return None
    pages = _place(line, chosen, budget_bytes, link) if chosen else []
    steps = _steps(line, pages, host)
    serial = sum(line.cost_ns)
    serial += sum(link.out_ns(p.size_bytes) + link.in_ns(p.size_bytes) for p in pages)
    return PagedSchedule(
        time_ns=_time_ns(line, pages, link),
        serial_ns=serial,
        paged_bytes=sum(p.size_bytes for p in pages),
        stops=tuple(line.stops),
        pages=tuple(pages),
        schedule=Schedule(tuple(steps)),
    )


def _choose(line: _Line, budget_bytes: int) -> list[Page] | None:
    """Return the gaps to page, and take them out of the bytes used at each stop."""
    used = line.used_bytes
    chosen: list[Page] = []
    starting: defaultdict[int, list[Page]] = defaultdict(list)
    for gap in line.gaps:
        if gap.size_bytes:
            starting[gap.start + 1].append(gap)
    idle: list[Page] = []
    for stop in range(len(used)):
        check_time()
        idle = [gap for gap in idle if gap.end > stop] + starting[stop]
        idle.sort(key=lambda gap: (gap.end, gap.size_bytes, -gap.storage))
        while used[stop] > budget_bytes:
            if not idle:
                return None
            gap = idle.pop()
            chosen.append(gap)
            for inside in range(gap.start + 1, gap.end):
                used[inside] -= gap.size_bytes
    return chosen


def _place(
    line: _Line, chosen: list[Page], budget_bytes: int, link: HostLink
) -> list[Page]:
    """Set when copies are awaited and issued, as room and need allow."""
    used = line.used_bytes
    ends = list(accumulate(line.cost_ns))
    free_ns = 0
    for gap in sorted(chosen, key=lambda gap: (gap.start, gap.end)):
        free_ns = max(free_ns, ends[gap.start]) + link.out_ns(gap.size_bytes)
        gap.awaited = gap.start + 1
        # A stop starts when the one before it ends.
        while (
            gap.awaited < gap.end
            and ends[gap.awaited - 1] < free_ns
            and used[gap.awaited] + gap.size_bytes <= budget_bytes
        ):
            used[gap.awaited] += gap.size_bytes
            gap.awaited += 1
    latest_ns = ends[-1]
    for gap in sorted(chosen, key=lambda gap: (gap.end, gap.start), reverse=True):
        latest_ns = min(latest_ns, ends[gap.end - 1]) - link.in_ns(gap.size_bytes)
        gap.issued = gap.end
        wanted = bisect_right(ends, latest_ns)
        while (
            gap.issued > max(gap.awaited, wanted)
            and used[gap.issued - 1] + gap.size_bytes <= budget_bytes
        ):
            gap.issued -= 1
            used[gap.issued] += gap.size_bytes
    return [gap for gap in chosen if gap.is_away]


def _by(pages: Sequence[Page], key: str) -> defaultdict[int, list[Page]]:
    found: defaultdict[int, list[Page]] = defaultdict(list)
    for entry in sorted(pages, key=lambda p: (p.end, p.start, p.storage)):
        found[getattr(entry, key)].append(entry)
    return found


def _time_ns(line: _Line, pages: Sequence[Page], link: HostLink) -> int:
    """Return the time at which the device ends, everything in its queue."""
    starts, awaits = _by(pages, "start"), _by(pages, "awaited")
    issues, ends = _by(pages, "issued"), _by(pages, "end")
    out_ns: dict[int, int] = {}
    in_ns: dict[int, int] = {}
    # When a storage's bytes on the device were written: a copy out need not wait for
    # their last use.
    ready: defaultdict[int, int] = defaultdict(int)
    now = out_free = in_free = 0
    for stop, cost in enumerate(line.cost_ns):
        for p in awaits[stop]:
            now = max(now, out_ns[id(p)])
        for p in issues[stop]:
            in_free = max(in_free, now, out_ns[id(p)]) + link.in_ns(p.size_bytes)
            in_ns[id(p)] = ready[p.storage] = in_free
        for p in ends[stop]:
            now = max(now, in_ns[id(p)])
        now += cost
        for storage in line.writes[stop]:
            ready[storage] = now
        for p in starts[stop]:
            out_free = max(out_free, ready[p.storage]) + link.out_ns(p.size_bytes)
            out_ns[id(p)] = out_free
    return now


def _steps(line: _Line, pages: Sequence[Page], host: int) -> Iterator[Step]:
    starts, awaits = _by(pages, "start"), _by(pages, "awaited")
    issues, ends = _by(pages, "issued"), _by(pages, "end")
    for stop, step in enumerate(line.stops):
        for p in awaits[stop]:
            yield Discard(p.storage, 0)
        for p in issues[stop]:
            yield Copy(p.storage, host, 0)
        yield step
        yield from line.discards[stop]
        # The copy back has arrived: it was read. Earlier, freeing the host's bytes
        # would have to wait for it.
        for p in ends[stop]:
            yield Discard(p.storage, host)
        for p in starts[stop]:
            yield Copy(p.storage, 0, host)
