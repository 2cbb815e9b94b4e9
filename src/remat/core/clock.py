"""The clock of the judge: when steps run as every device and every link is a queue.

:mod:`remat.core.simulator` says which steps are allowed; this module says when each
begins and ends, and from when to when its bytes are taken. A step starts when its queue
is free and its inputs have arrived. A discard waits in its device's queue and for the
copies that fill or read the bytes, but holds nothing up. Where copies wait, see
:attr:`remat.core.platform.Platform.copies_wait`.
"""

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from remat.core.graph import Op, TrainingGraph
from remat.core.platform import Platform
from remat.core.schedule import Compute, Copy, Discard


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


class OverlappedClock:
    """Takes the steps of a replay, each after it was allowed, and times them.

    Parameters
    ----------
    graph, platform
        As for :func:`remat.core.simulator.simulate`.
    """

    def __init__(self, graph: TrainingGraph, platform: Platform) -> None:
        devices = range(len(platform.devices))
        self._graph = graph
        self._platform = platform
        self._spans: list[_Span] = []
        # Per device: storage -> its bytes there (not those of a resident on its home).
        self._live: list[dict[int, _Span]] = [{} for _ in devices]
        self._device_free_ns = [0 for _ in devices]
        self._link_free_ns: dict[tuple[int, int], int] = {}

    @property
    def makespan_ns(self) -> int:
        """The end of the last step."""
        return max([*self._device_free_ns, *self._link_free_ns.values()])

    def compute(self, index: int, step: Compute, op: Op, kind: int) -> None:
        """Run an op, of the costs of this kind, as the step at this index."""
        device = step.device
        start = self._device_free_ns[device]
        for storage in op.reads:
            start = max(start, self._ready_ns(storage, device))
        end = start + (op.cost_ns[kind] or 0)
        workspace = op.workspace_bytes[kind]
        self._spans.append(_Span(index, device, workspace, start, start, end, end))
        self._device_free_ns[device] = end
        for storage in op.writes:
            self._take(index, storage, device, start, end)

    def copy(self, index: int, step: Copy, copy_ns: int) -> None:
        """Copy a storage, in the queue of its link."""
        pair = (step.source, step.target)
        start = self._ready_ns(step.storage, step.source)
        start = max(start, self._link_free_ns.get(pair, 0))
        if self._platform.copies_wait:
            start = max(start, *(self._device_free_ns[device] for device in pair))
        end = start + copy_ns
        self._link_free_ns[pair] = end
        read = self._live[step.source].get(step.storage)
        if read is not None:
            read.busy_until_ns = max(read.busy_until_ns, end)
        self._take(index, step.storage, step.target, start, end)

    def discard(self, step: Discard) -> None:
        """Free bytes, once nothing issued before and no copy needs them."""
        span = self._live[step.device].pop(step.storage)
        span.end_ns = max(self._device_free_ns[step.device], span.busy_until_ns)
        self._hold(step.device, span.end_ns)

    def boundary(self, index: int) -> None:
        """Let tangents appear: when all before has run and all outputs have arrived."""
        home_of = [storage.home for storage in self._graph.storages]
        outputs = self._graph.forward_outputs
        arrivals = [self._ready_ns(storage, home_of[storage]) for storage in outputs]
        now = max([*self._device_free_ns, *arrivals])
        for storage in self._graph.tangents:
            self._take(index, storage, home_of[storage], now, now)

    def peaks(self) -> list[int]:
        """Return per device the most bytes at any time."""
        peaks: list[int] = []
        for device in range(len(self._live)):
            used = peak = self._graph.resident_bytes(device)
            # Sorted, what ends at an instant comes before what starts there.
            for _, change, _ in sorted(self._changes(device)):
                used += change
                peak = max(peak, used)
            peaks.append(peak)
        return peaks

    def first_over(self, device: int, budget_bytes: int) -> tuple[int, int]:
        """Return the step and the time, in ns, at which a device first holds more.

        Of steps that begin at once it is the one that is issued last.
        """
        used = self._graph.resident_bytes(device)
        for at_ns, group in groupby(sorted(self._changes(device)), key=itemgetter(0)):
            together = list(group)
            used += sum(change for _, change, _ in together)
            if used > budget_bytes:
                return max(step for *_, step in together), at_ns
        return 0, 0

    def _changes(self, device: int) -> list[tuple[int, int, int]]:
        """Return time, change of bytes, and step (-1 for bytes that are freed)."""
        spans = [
            span
            for span in self._spans
            if span.device == device and span.end_ns != span.start_ns
        ]
        taken = [(span.start_ns, span.size_bytes, span.step) for span in spans]
        freed = [
            (span.end_ns, -span.size_bytes, -1)
            for span in spans
            if span.end_ns is not None
        ]
        return taken + freed

    def _ready_ns(self, storage: int, device: int) -> int:
        span = self._live[device].get(storage)
        return (
            0 if span is None else span.ready_ns
        )  # A resident is there from the start.

    def _take(
        self, index: int, storage: int, device: int, start_ns: int, ready_ns: int
    ) -> None:
        previous = self._live[device].get(storage)
        if previous is not None:
            # A copy may still be reading, or even filling, the bytes that are replaced.
            previous.end_ns = max(previous.busy_until_ns, ready_ns)
            self._hold(device, previous.end_ns)
        size_bytes = self._graph.storages[storage].size_bytes
        span = _Span(index, device, size_bytes, start_ns, ready_ns, ready_ns)
        self._spans.append(span)
        self._live[device][storage] = span

    def _hold(self, device: int, until_ns: int) -> None:
        """Let the device wait where copies are waited for."""
        if self._platform.copies_wait:
            free_ns = self._device_free_ns[device]
            self._device_free_ns[device] = max(free_ns, until_ns)
