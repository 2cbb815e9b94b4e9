"""The judge: replay a schedule and report peak, time and the first violation.

This module defines what a schedule means (docs/semantics.md says the same in words).
It shares no code with any solver, and every answer of every solver passes through it
before anyone sees it.

A device's memory while a step runs is: resident bytes, plus every live storage, plus
what the step itself adds. ``Compute`` adds all its outputs and its workspace while the
inputs are still held; an output that was already live is replaced by the fresh copy
after the op, so both count during it. ``Copy`` adds the storage on the target.

What the caller holds (:attr:`remat.core.graph.TrainingGraph.held_outputs`) stays where
it was handed over, on its home, from the boundary to the end. Copies of it on other
devices are the schedule's own: they may be made and discarded at any time.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import NoReturn, assert_never

from remat.core.checks import checked_record
from remat.core.errors import InvalidPlatformError
from remat.core.graph import Op, Phase, TrainingGraph
from remat.core.platform import Platform
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step


class Rule(StrEnum):
    """The rules that a schedule can break."""

    UNKNOWN_INDEX = "a step names an op, storage or device that does not exist"
    READ_NOT_LIVE = "an op reads a storage that is not live on its device"
    CANNOT_RUN = "an op has no cost on that device kind"
    PHASE = "a backward op runs before the boundary"
    RECOMPUTED = "an op that may run only once runs twice"
    ORDER = "ordered ops run first in another order than the graph's"
    AFTER_CALLER = "something runs after the caller's own work in the same pass"
    DISCARD_NOT_LIVE = "a discarded storage is not live on that device"
    DISCARD_RESIDENT = "a resident storage is discarded"
    DISCARD_HELD = "what the caller holds since the boundary is discarded on its home"
    COPY_NOT_LIVE = "a copied storage is not live on the source"
    COPY_ALREADY_LIVE = "a copied storage is already live on the target"
    NO_LINK = "no link joins the two devices of a copy"
    SECOND_BOUNDARY = "there is more than one boundary"
    OUTPUT_MISSING = "a forward output is not live at the boundary"
    NO_BOUNDARY = "there is no boundary"
    FINAL_MISSING = "a final output is not live at the end"
    EFFECT_MISSING = "an ordered op or an op without outputs has not run in its pass"
    OVER_BUDGET = "more bytes are live than the device's budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """The first rule that a schedule breaks, with where and by how much.

    ``step`` is the index of the step, or the number of steps for a rule about the
    end. Where a budget is exceeded only as steps overlap, it is that of the step that
    takes the bytes with which it is exceeded first. ``excess_bytes`` is how far over
    the budget the device is at most, else 0.
    """

    rule: Rule
    step: int
    message: str
    op: int | None = None
    storage: int | None = None
    device: int | None = None
    excess_bytes: int = 0

    def __str__(self) -> str:
        return f"step {self.step}: {self.message} ({self.rule})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happens when a schedule is replayed.

    Parameters
    ----------
    peak_bytes
        Per device, the most bytes at any time, in serial and in overlapped execution.
    serial_ns
        Sum of all op costs and copy times.
    overlapped_ns
        End of the last step when every device and every link is an in-order queue.
    timeline_bytes
        Per device, the bytes during each step of serial execution.
    live_after
        For each device, the storages (not resident ones) live after the last step.
    recomputed_ns
        The part of ``serial_ns`` spent on runs of an op after its first.
    violation
        The first rule broken, or ``None``. After a violation other than
        ``OVER_BUDGET`` the replay stops and the other fields describe the part before;
        a budget exceeded before that point is what is reported.
    """

    peak_bytes: tuple[int, ...]
    serial_ns: int
    overlapped_ns: int
    timeline_bytes: tuple[tuple[int, ...], ...]
    live_after: tuple[frozenset[int], ...]
    recomputed_ns: int
    violation: Violation | None

    def __repr__(self) -> str:
        return (
            f"<Trace: peak_bytes={self.peak_bytes}, serial_ns={self.serial_ns}, "
            f"overlapped_ns={self.overlapped_ns}, violation={self.violation}>"
        )

    @property
    def is_valid(self) -> bool:
        """Whether the schedule breaks no rule."""
        return self.violation is None

    def peak_step(self, device: int = 0) -> int:
        """Return the index of the first step at which ``device`` is fullest."""
        timeline = self.timeline_bytes[device]
        return max(range(len(timeline)), key=timeline.__getitem__, default=0)


class _BrokenRuleError(Exception):
    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


@dataclass(slots=True)
class _Span:
    """Bytes on a device from ``start_ns`` up to, not including, ``end_ns``.

    The step at index ``step`` takes them. They hold a value from ``ready_ns`` on;
    ``busy_until_ns`` is when the last copy that fills or reads them ends. Ops need no
    such note: they hold up the queue in which the end of the bytes waits as well.
    """

    step: int
    device: int
    size_bytes: int
    start_ns: int
    ready_ns: int
    busy_until_ns: int
    end_ns: int | None = None


@dataclass(slots=True)
class _Replay:
    graph: TrainingGraph
    platform: Platform
    step: int = 0
    is_backward: bool = False
    serial_ns: int = 0
    recomputed_ns: int = 0
    # Per device: storage -> its bytes there (not those of a resident on its home).
    live: list[dict[int, _Span]] = field(default_factory=list[dict[int, _Span]])
    used_bytes: list[int] = field(default_factory=list[int])
    timeline: list[list[int]] = field(default_factory=list[list[int]])
    run: set[int] = field(default_factory=set[int])
    last_ordered: int = -1
    # The external op that has run in this pass.
    caller_op: int | None = None
    over_budget: Violation | None = None
    device_free_ns: list[int] = field(default_factory=list[int])
    link_free_ns: dict[tuple[int, int], int] = field(
        default_factory=dict[tuple[int, int], int]
    )
    spans: list[_Span] = field(default_factory=list[_Span])

    def __post_init__(self) -> None:
        devices = range(len(self.platform.devices))
        self.live = [{} for _ in devices]
        self.used_bytes = [self.graph.resident_bytes(d) for d in devices]
        self.timeline = [[] for _ in devices]
        self.device_free_ns = [0 for _ in devices]

    def fail(
        self,
        rule: Rule,
        message: str,
        *,
        op: int | None = None,
        storage: int | None = None,
        device: int | None = None,
    ) -> NoReturn:
        raise _BrokenRuleError(
            Violation(
                rule=rule,
                step=self.step,
                message=message,
                op=op,
                storage=storage,
                device=device,
            )
        )

    def check_device(self, device: int) -> None:
        if not 0 <= device < len(self.platform.devices):
            self.fail(Rule.UNKNOWN_INDEX, f"device {device} does not exist")

    def check_storage(self, storage: int) -> None:
        if not 0 <= storage < len(self.graph.storages):
            self.fail(Rule.UNKNOWN_INDEX, f"storage {storage} does not exist")

    def name(self, storage: int) -> str:
        return f"storage {storage} {self.graph.storages[storage].name!r}"

    def ready_ns(self, storage: int, device: int) -> int | None:
        """Return when ``storage`` may be read on ``device``; ``None`` if not live."""
        block = self.graph.storages[storage]
        if block.is_resident and block.home == device:
            return 0
        span = self.live[device].get(storage)
        return None if span is None else span.ready_ns

    def record(self, extra_bytes: dict[int, int]) -> None:
        """Append the bytes during this step and note the first budget exceeded."""
        for index, device in enumerate(self.platform.devices):
            used = self.used_bytes[index] + extra_bytes.get(index, 0)
            self.timeline[index].append(used)
            limit = device.budget_bytes
            if limit is not None and used > limit and self.over_budget is None:
                self.over_budget = self.excess(index, used, limit)

    def excess(self, device: int, used: int, limit: int) -> Violation:
        return Violation(
            rule=Rule.OVER_BUDGET,
            step=self.step,
            message=(
                f"device {device} {self.platform.devices[device].name!r} holds {used:_} "
                f"bytes, {used - limit:_} more than its budget of {limit:_}"
            ),
            device=device,
            excess_bytes=used - limit,
        )

    def make_live(
        self, storage: int, device: int, start_ns: int, ready_ns: int
    ) -> None:
        size = self.graph.storages[storage].size_bytes
        previous = self.live[device].get(storage)
        if previous is None:
            self.used_bytes[device] += size
        else:
            # A copy may still be reading, or even filling, the bytes that are replaced.
            previous.end_ns = max(previous.busy_until_ns, ready_ns)
            self.hold(device, previous.end_ns)
        span = _Span(
            self.step, device, size, start_ns, ready_ns, busy_until_ns=ready_ns
        )
        self.spans.append(span)
        self.live[device][storage] = span

    def hold(self, device: int, until_ns: int) -> None:
        """Let the device wait where copies are waited for."""
        if self.platform.copies_wait:
            free_ns = self.device_free_ns[device]
            self.device_free_ns[device] = max(free_ns, until_ns)

    def compute(self, step: Compute) -> None:
        self.check_device(step.device)
        if not 0 <= step.op < len(self.graph.ops):
            self.fail(Rule.UNKNOWN_INDEX, f"op {step.op} does not exist", op=step.op)
        op = self.graph.ops[step.op]
        label = f"op {step.op} {op.name!r}"
        kind = self.graph.kind_index(self.platform.devices[step.device].kind)
        cost = op.cost_ns[kind]
        if cost is None:
            self.fail(
                Rule.CANNOT_RUN,
                f"{label} cannot run on device {step.device}",
                op=step.op,
            )
        self.check_may_run(step, op, label)
        start = self.device_free_ns[step.device]
        for storage in op.reads:
            ready = self.ready_ns(storage, step.device)
            if ready is None:
                self.fail(
                    Rule.READ_NOT_LIVE,
                    f"{label} reads {self.name(storage)}, which is not live on device "
                    f"{step.device}",
                    op=step.op,
                    storage=storage,
                    device=step.device,
                )
            start = max(start, ready)
        outputs = sum(self.graph.storages[s].size_bytes for s in op.writes)
        self.record({step.device: outputs + op.workspace_bytes[kind]})
        end = start + cost
        workspace = op.workspace_bytes[kind]
        self.spans.append(
            _Span(self.step, step.device, workspace, start, start, end, end)
        )
        self.device_free_ns[step.device] = end
        for storage in op.writes:
            self.make_live(storage, step.device, start, end)
        self.serial_ns += cost
        self.recomputed_ns += cost if step.op in self.run else 0
        self.run.add(step.op)
        if op.is_external:
            self.caller_op = step.op

    def check_may_run(self, step: Compute, op: Op, label: str) -> None:
        if op.phase is Phase.BACKWARD and not self.is_backward:
            self.fail(Rule.PHASE, f"{label} runs before the boundary", op=step.op)
        if not op.is_external:
            self.check_before_caller(label)
        if step.op in self.run:
            if op.non_recomputable is not None:
                self.fail(
                    Rule.RECOMPUTED,
                    f"{label} runs again, but {op.non_recomputable}",
                    op=step.op,
                )
        elif op.is_ordered:
            if step.op < self.last_ordered:
                self.fail(
                    Rule.ORDER,
                    f"{label} first runs after op {self.last_ordered}",
                    op=step.op,
                )
            self.last_ordered = step.op

    def check_before_caller(self, label: str) -> None:
        """Check that the caller's work has not begun, which no plan can interrupt."""
        if self.caller_op is not None:
            name = self.graph.ops[self.caller_op].name
            self.fail(
                Rule.AFTER_CALLER,
                f"{label} comes after op {self.caller_op} {name!r}, which the caller does "
                "when the pass has ended",
                op=self.caller_op,
            )

    def discard(self, step: Discard) -> None:
        self.check_device(step.device)
        self.check_storage(step.storage)
        block = self.graph.storages[step.storage]
        if block.is_resident and block.home == step.device:
            self.fail(
                Rule.DISCARD_RESIDENT,
                f"{self.name(step.storage)} is resident",
                storage=step.storage,
                device=step.device,
            )
        if step.storage not in self.live[step.device]:
            self.fail(
                Rule.DISCARD_NOT_LIVE,
                f"{self.name(step.storage)} is not live on device {step.device}",
                storage=step.storage,
                device=step.device,
            )
        if (
            self.is_backward
            and block.home == step.device
            and step.storage in self.graph.held_outputs
        ):
            self.fail(
                Rule.DISCARD_HELD,
                f"{self.name(step.storage)} was handed over at the boundary, and the "
                f"caller's reference keeps its {block.size_bytes:_} bytes on device "
                f"{step.device} until the end",
                storage=step.storage,
                device=step.device,
            )
        self.record({})
        span = self.live[step.device].pop(step.storage)
        span.end_ns = max(self.device_free_ns[step.device], span.busy_until_ns)
        self.hold(step.device, span.end_ns)
        self.used_bytes[step.device] -= block.size_bytes

    def copy(self, step: Copy) -> None:
        for device in (step.source, step.target):
            self.check_device(device)
        self.check_storage(step.storage)
        link = self.platform.link(step.source, step.target)
        if link is None:
            self.fail(
                Rule.NO_LINK,
                f"no link from device {step.source} to {step.target}",
                storage=step.storage,
            )
        self.check_before_caller(f"the copy of {self.name(step.storage)}")
        ready = self.ready_ns(step.storage, step.source)
        if ready is None:
            self.fail(
                Rule.COPY_NOT_LIVE,
                f"{self.name(step.storage)} is not live on device {step.source}",
                storage=step.storage,
                device=step.source,
            )
        if self.ready_ns(step.storage, step.target) is not None:
            self.fail(
                Rule.COPY_ALREADY_LIVE,
                f"{self.name(step.storage)} is already live on device {step.target}",
                storage=step.storage,
                device=step.target,
            )
        size = self.graph.storages[step.storage].size_bytes
        self.record({step.target: size})
        pair = (step.source, step.target)
        start = max(self.link_free_ns.get(pair, 0), ready)
        if self.platform.copies_wait:
            start = max(start, *(self.device_free_ns[d] for d in pair))
        end = start + link.copy_ns(size)
        self.link_free_ns[pair] = end
        read = self.live[step.source].get(step.storage)
        if read is not None:
            read.busy_until_ns = max(read.busy_until_ns, end)
        self.make_live(step.storage, step.target, start, end)
        self.serial_ns += link.copy_ns(size)

    def boundary(self) -> None:
        if self.is_backward:
            self.fail(Rule.SECOND_BOUNDARY, "the boundary was passed before")
        # The caller can turn outputs into tangents once all of them have arrived.
        now = max(self.device_free_ns)
        for storage in self.graph.forward_outputs:
            ready = self.ready_ns(storage, self.graph.storages[storage].home)
            if ready is None:
                self.fail(
                    Rule.OUTPUT_MISSING,
                    f"forward output {self.name(storage)} is not live",
                    storage=storage,
                )
            now = max(now, ready)
        self.check_effects(range(self.graph.forward_count))
        self.is_backward = True
        self.caller_op = None
        appearing: dict[int, int] = {}
        for storage in self.graph.tangents:
            home = self.graph.storages[storage].home
            size = self.graph.storages[storage].size_bytes
            appearing[home] = appearing.get(home, 0) + size
        self.record(appearing)
        for storage in self.graph.tangents:
            self.make_live(storage, self.graph.storages[storage].home, now, now)

    def finish(self) -> None:
        if not self.is_backward:
            self.fail(Rule.NO_BOUNDARY, "the schedule ends before the boundary")
        for storage in self.graph.final_outputs:
            if self.ready_ns(storage, self.graph.storages[storage].home) is None:
                self.fail(
                    Rule.FINAL_MISSING,
                    f"final output {self.name(storage)} is not live",
                    storage=storage,
                )
        self.check_effects(range(len(self.graph.ops)))

    def check_effects(self, ops: range) -> None:
        """Check that what has an effect has happened in its own pass."""
        for index in ops:
            op = self.graph.ops[index]
            if (op.is_ordered or not op.writes) and index not in self.run:
                self.fail(
                    Rule.EFFECT_MISSING,
                    f"op {index} {op.name!r} has not run in its pass",
                    op=index,
                )

    def take(self, step: Step) -> None:
        match step:
            case Compute():
                self.compute(step)
            case Discard():
                self.discard(step)
            case Copy():
                self.copy(step)
            case Boundary():
                self.boundary()
            case _:
                assert_never(step)

    def overlapped_ns(self) -> int:
        return max([*self.device_free_ns, *self.link_free_ns.values()])

    def overlapped_peaks(self) -> list[int]:
        """Return per device the most bytes over the overlapped timeline."""
        peaks = [
            self.graph.resident_bytes(d) for d in range(len(self.platform.devices))
        ]
        events: list[list[tuple[int, int]]] = [[] for _ in peaks]
        for span in self.spans:
            events[span.device].append((span.start_ns, span.size_bytes))
            if span.end_ns is not None:
                events[span.device].append((span.end_ns, -span.size_bytes))
        for device, changes in enumerate(events):
            used = peaks[device]
            # Sorted, what ends at an instant comes before what starts there.
            for _, change in sorted(changes):
                used += change
                peaks[device] = max(peaks[device], used)
        return peaks

    def overlapped_excess(self, device: int, peak_bytes: int) -> Violation:
        """Return when a device exceeds its budget first, as steps overlap.

        Parameters
        ----------
        device
            A device that holds more than its budget at some moment.
        peak_bytes
            The most that it holds at any.
        """
        spans = [s for s in self.spans if s.device == device and s.end_ns != s.start_ns]
        changes = [(s.start_ns, s.size_bytes, s.step) for s in spans]
        changes += [
            (s.end_ns, -s.size_bytes, -1) for s in spans if s.end_ns is not None
        ]
        limit = self.platform.devices[device].budget_bytes or 0
        used = self.graph.resident_bytes(device)
        now_ns = at = 0
        for at_ns, group in groupby(sorted(changes), key=itemgetter(0)):
            together = list(group)
            used += sum(change for _, change, _ in together)
            if used > limit:
                # Of steps that begin at once, the one that is issued last.
                now_ns, at = at_ns, max(step for *_, step in together)
                break
        excess = self.excess(device, peak_bytes, limit)
        return replace(
            excess,
            step=at,
            message=f"{excess.message} as steps overlap, from {now_ns:_} ns on",
        )


def check_platform(graph: TrainingGraph, platform: Platform) -> None:
    """Check that ``graph`` can be placed on ``platform`` at all.

    Raises
    ------
    InvalidGraphError
        If the graph has no costs for a device's kind.
    InvalidPlatformError
        If a storage's home is not a device of the platform.
    """
    for device in platform.devices:
        graph.kind_index(device.kind)
    for index, storage in enumerate(graph.storages):
        if storage.home >= len(platform.devices):
            count = len(platform.devices)
            msg = (
                f"storage {index} {storage.name!r} has home device {storage.home}, "
                f"but the platform has {count} device{'s' * (count > 1)}, numbered from 0"
            )
            raise InvalidPlatformError(msg)


def simulate(graph: TrainingGraph, platform: Platform, schedule: Schedule) -> Trace:
    """Replay ``schedule`` and report its peak, its time and the first violation.

    Parameters
    ----------
    graph, platform
        What is trained, and where. A device without a budget is never over it.
    schedule
        Any list of steps; it need not be valid.

    Returns
    -------
    Trace
        Peak per device, serial and overlapped time, timeline, first violation.

    Raises
    ------
    InvalidGraphError
        If the graph has no costs for a device's kind.
    InvalidPlatformError
        If a storage's home is not a device of the platform.
    ValueError
        If an argument is of another type.

    Notes
    -----
    Time O(steps x reads + storages), plus sorting for the overlapped timeline.

    In overlapped execution a step starts when its queue is free and its inputs have
    arrived. A discard waits in its device's queue and for the copies that fill or read
    the bytes, but holds nothing up. Tangents appear when all devices have run what was
    issued before the boundary and the forward outputs have arrived. Where copies wait,
    see :attr:`remat.core.platform.Platform.copies_wait`.
    """
    checked_record("graph", graph, TrainingGraph)
    checked_record("platform", platform, Platform)
    checked_record("schedule", schedule, Schedule)
    check_platform(graph, platform)
    replay = _Replay(graph, platform)
    violation: Violation | None = None
    try:
        for index, step in enumerate(schedule.steps):
            replay.step = index
            replay.take(step)
        replay.step = len(schedule.steps)
        replay.finish()
    except _BrokenRuleError as broken:
        violation = broken.violation
    peaks = [
        max([overlapped, *timeline])
        for overlapped, timeline in zip(
            replay.overlapped_peaks(), replay.timeline, strict=True
        )
    ]
    # A step over the budget came before the step that ended the replay.
    violation = replay.over_budget or violation or _overlapped_excess(replay, peaks)
    return Trace(
        peak_bytes=tuple(peaks),
        serial_ns=replay.serial_ns,
        overlapped_ns=replay.overlapped_ns(),
        timeline_bytes=tuple(tuple(line) for line in replay.timeline),
        live_after=tuple(frozenset(live) for live in replay.live),
        recomputed_ns=replay.recomputed_ns,
        violation=violation,
    )


def _overlapped_excess(replay: _Replay, peaks: list[int]) -> Violation | None:
    for index, device in enumerate(replay.platform.devices):
        if device.budget_bytes is not None and peaks[index] > device.budget_bytes:
            return replay.overlapped_excess(index, peaks[index])
    return None
