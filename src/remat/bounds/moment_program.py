"""The moment program: a linear program whose value no schedule's time is below.

A *moment* is the time just before the first run of a node; for the boundary and the end
it is these themselves. The moments of a program are nodes of which each precedes the
next, with the boundary among them and the end last, so that they come in this order in
every schedule. *Interval* j lies between moment j, included, and moment j + 1; interval
0 begins with the step. A *window* [a, b) is made of the intervals a to b - 1: each
interval alone, and from each moment to the end. Variables, all from 0 to 1:

====== ==================================================================
S i,j  storage i is live at moment j
z k,w  op k runs in window w
T i,w  storage i is live at all times of interval w
Q w    bytes live throughout interval w, as a share of the memory
====== ==================================================================

With the time of z over the intervals made small, these rows hold for the values that
any valid schedule has, once runs and lifetimes that serve nothing are taken out of it:

* read: ``z[k,w] <= S[i,a] + z[p,w]`` for i read by k and written by p;
* keep: ``S[i,b] <= S[i,a] + z[p,w]``;
* link: ``z[k,w] <= `` the sum of z over windows that w is made of;
* first: an op whose first run lies in w runs there; it lies in one of the intervals
  that precedence leaves;
* once: an op that may not run again runs in at most one interval;
* moment: what is live at a moment, and what its node writes and needs beside, fits;
* throughout: ``T[i,w] >= S[i,b] - z[p,w]``, and Q counts T;
* run: what an op needs, and what is live throughout its window beside it, fits.

Leaving out rows, or T, keeps that true, so rows of little weight are left out. The
proof is in docs/design/bounds.md. All numbers are integers; rows that count memory are
in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from remat.bounds.instance import Instance
from remat.core.deadline import check_time
from remat.core.errors import CertificateError

Window = tuple[int, int]

_LEAST_NEED = 20
"""Ops that need less than the memory divided by this get no run rows."""

_LEAST_SIZE = 500
"""Storages smaller than the memory divided by this count in no run row."""


@dataclass(slots=True)
class Program:
    """Minimise ``cost x`` with ``A x >= right`` and ``lower <= x <= 1``, in integers.

    Parameters
    ----------
    cost, is_forced
        Per variable; a forced one is 1, others are 0 to 1.
    starts
        Per row, where its entries begin; one more than there are rows.
    columns, coefficients
        The entries, row after row.
    right
        Per row.
    is_memory
        Per row, whether it counts bytes.
    """

    cost: list[int] = field(default_factory=list[int])
    is_forced: list[bool] = field(default_factory=list[bool])
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list[int])
    coefficients: list[int] = field(default_factory=list[int])
    right: list[int] = field(default_factory=list[int])
    is_memory: list[bool] = field(default_factory=list[bool])

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(self.right)

    def variable(self, cost: int = 0, *, is_forced: bool = False) -> int:
        """Add a variable and return its index."""
        self.cost.append(cost)
        self.is_forced.append(is_forced)
        return len(self.cost) - 1

    def row(
        self,
        columns: Sequence[int],
        coefficients: Sequence[int],
        right: int,
        *,
        is_memory: bool = False,
    ) -> None:
        """Add a row; no column is given twice."""
        entries = sorted(zip(columns, coefficients, strict=True))
        self.columns += [column for column, _ in entries]
        self.coefficients += [coefficient for _, coefficient in entries]
        self.right.append(right)
        self.is_memory.append(is_memory)
        self.starts.append(len(self.columns))


class MomentProgram:
    """The moment program of a step, a budget and moments.

    Parameters
    ----------
    instance
        The step.
    memory_bytes
        Of the device, beyond resident bytes.
    moments
        Nodes, the boundary among them; the end is added.

    Attributes
    ----------
    program
        What is to be solved.
    live, runs
        Variables: per moment from 1 on those of storages that may be live then, and per
        window those of ops.
    throughout, shares
        Variables per interval: T of storages, and Q.

    Raises
    ------
    CertificateError
        If some moment does not precede the next in every schedule.
    """

    def __init__(
        self, instance: Instance, memory_bytes: int, moments: Sequence[int]
    ) -> None:
        self.instance = instance
        self.memory_bytes = memory_bytes
        self.nodes = (*moments, instance.end)
        self.count = len(self.nodes)
        self.moment_of = {node: j for j, node in enumerate(self.nodes, 1)}
        self.program = Program()
        self.first, self.last = self._first_runs()
        self.latest = self._latest_runs()
        # Per window the windows that it is made of; none for an interval.
        self.windows: dict[Window, tuple[Window, ...]] = {
            (j, j + 1): () for j in range(self.count)
        }
        for j in range(self.count - 2, 0, -1):
            self.windows[j, self.count] = ((j, j + 1), (j + 1, self.count))
        self.runs: dict[Window, dict[int, int]] = {}
        self.live: list[dict[int, int]] = []
        self.throughout: dict[Window, dict[int, int]] = {}
        self.shares: dict[Window, int] = {}
        self._add_runs()
        self._add_live()
        for window in self.windows:
            check_time()
            self._add_reads(window)
            self._add_keeps(window)
        self._add_first_and_once()
        for j in range(1, self.count + 1):
            self._add_moment(j)
        for j in range(self.count):
            check_time()
            self._add_run_memory((j, j + 1))

    # --- when ops run ----------------------------------------------------------------

    def _first_runs(self) -> tuple[list[int], list[int]]:
        """Return per node the first and the last interval that it may first run in."""
        step, moment_of = self.instance, self.moment_of
        first = [0] * (step.op_count + 2)
        for node in step.order:
            before = max((first[p] for p in step.predecessors[node]), default=0)
            own = moment_of.get(node)
            if own is not None and before != own - 1:
                msg = (
                    f"moment {own} is node {node}, which comes after moment {before} in "
                    f"every schedule, not right after moment {own - 1}; give nodes of "
                    "which each precedes the next"
                )
                raise CertificateError(msg)
            first[node] = before if own is None else own
        known = {*step.order}
        if len(moment_of) != self.count or not known.issuperset(self.nodes):
            msg = f"moments {self.nodes[:-1]} are not distinct nodes that every schedule has"
            raise CertificateError(msg)
        if step.boundary not in moment_of:
            msg = f"the boundary, node {step.boundary}, is not among {self.nodes[:-1]}"
            raise CertificateError(msg)
        last = [self.count - 1] * (step.op_count + 2)
        for node in reversed(step.order):
            own = moment_of.get(node)
            if own is None:
                for later in step.successors[node]:
                    at = moment_of.get(later)
                    limit = last[later] if at is None else at - 1
                    last[node] = min(last[node], limit)
            else:
                last[node] = own
        return first, last

    def _latest_runs(self) -> list[int]:
        """Return per node the last interval in which a run of it can serve anything."""
        step = self.instance
        latest = list(self.last)
        for node in reversed(step.order):
            if step.may_rerun[node]:
                for item in step.writes[node]:
                    for reader in step.readers[item]:
                        latest[node] = max(latest[node], self._last_use(reader, latest))
            latest[node] = min(latest[node], self.count - 1)
        return latest

    def _last_use(self, reader: int, latest: Sequence[int]) -> int:
        """Return the last interval from which a run of ``reader`` needs its reads."""
        own = self.moment_of.get(reader)
        if own is not None and not self.instance.may_rerun[reader]:
            return own - 1
        return latest[reader]

    # --- variables -------------------------------------------------------------------

    def _add_runs(self) -> None:
        step, program = self.instance, self.program
        for window, parts in self.windows.items():
            start, stop = window
            found: dict[int, int] = {}
            for op in step.ops:
                if self.first[op] < stop and self.latest[op] >= start:
                    found[op] = program.variable(
                        0 if parts else step.cost_ns[op],
                        is_forced=self.first[op] >= start and self.last[op] < stop,
                    )
            self.runs[window] = found

    def _add_live(self) -> None:
        step, program = self.instance, self.program
        until: dict[int, int] = {}
        for item in step.items:
            uses = [0]
            for reader in step.readers[item]:
                uses.append(self.moment_of.get(reader, 0))
                uses.append(self._last_use(reader, self.latest))
            until[item] = self.count if item in step.held else max(uses)
        self.live = [{} for _ in range(self.count + 1)]
        boundary = self.moment_of[step.boundary]
        for j, node in enumerate(self.nodes, 1):
            read = {*step.reads[node]}
            for item in step.items:
                if self.first[step.producer[item]] < j <= until[item]:
                    # Follows from the keep rows; said here, there are fewer of them.
                    is_held = j > boundary and item in step.held
                    self.live[j][item] = program.variable(
                        is_forced=item in read or is_held
                    )

    # --- rows ------------------------------------------------------------------------

    def _sources(self, item: int, window: Window) -> list[int] | None:
        """Return what can make an item available in a window; ``None`` if it surely is.

        That is its being live at the beginning, or a run of its producer within.
        """
        step, forced = self.instance, self.program.is_forced
        start, stop = window
        producer = step.producer[item]
        if producer == step.boundary and start <= self.moment_of[producer] < stop:
            return None
        at_start = self.live[start].get(item)
        made = self.runs[window].get(producer)
        found = [v for v in (at_start, made) if v is not None]
        return None if any(forced[v] for v in found) else found

    def _add_reads(self, window: Window) -> None:
        step, program = self.instance, self.program
        parts = self.windows[window]
        for op, run in self.runs[window].items():
            for item in step.reads[op]:
                sources = self._sources(item, window)
                if sources is not None:
                    program.row([run, *sources], [-1] + [1] * len(sources), 0)
            if parts:
                inside = [self.runs[p][op] for p in parts if op in self.runs[p]]
                program.row([run, *inside], [-1] + [1] * len(inside), 0)

    def _add_keeps(self, window: Window) -> None:
        program = self.program
        for item, live in self.live[window[1]].items():
            sources = self._sources(item, window)
            if sources is not None:
                program.row([live, *sources], [-1] + [1] * len(sources), 0)

    def _add_first_and_once(self) -> None:
        step, program = self.instance, self.program
        for op in step.ops:
            intervals = range(self.first[op], min(self.last[op], self.count - 1) + 1)
            runs = [self.runs[j, j + 1][op] for j in intervals]
            if not any(program.is_forced[run] for run in runs):
                program.row(runs, [1] * len(runs), 1)
            if not step.may_rerun[op] and len(runs) > 1:
                program.row(runs, [-1] * len(runs), -1)

    def _add_moment(self, j: int) -> None:
        step, node = self.instance, self.nodes[j - 1]
        needed = step.bytes_of(step.writes[node]) + step.workspace_bytes[node]
        live = [(v, i) for i, v in self.live[j].items() if step.size_bytes[i]]
        self.program.row(
            [v for v, _ in live],
            [-step.size_bytes[i] for _, i in live],
            needed - self.memory_bytes,
            is_memory=True,
        )

    def _add_run_memory(self, window: Window) -> None:
        """Add rows for the memory of ops that may run first in an interval."""
        step, program = self.instance, self.program
        start, stop = window
        needs = [
            (op, run, needed)
            for op, run in self.runs[window].items()
            if self.first[op] < stop
            and self.last[op] >= start
            and (needed := step.needed_bytes(op)) * _LEAST_NEED >= self.memory_bytes
        ]
        large = [
            (item, live)
            for item, live in self.live[stop].items()
            if item in self.live[start]
            and step.size_bytes[item] * _LEAST_SIZE >= self.memory_bytes
            and step.size_bytes[item]
        ]
        if not needs or not large:
            return
        throughout: dict[int, int] = {}
        for item, live in large:
            made = self.runs[window].get(step.producer[item])
            if made is None:
                # What cannot be made here is there all the time if it is at the end.
                throughout[item] = live
            else:
                throughout[item] = program.variable()
                program.row([throughout[item], live, made], [1, -1, 1], 0)
        share = program.variable()
        self.throughout[window], self.shares[window] = throughout, share
        program.row(
            [share, *throughout.values()],
            [self.memory_bytes, *(-step.size_bytes[i] for i in throughout)],
            0,
            is_memory=True,
        )
        for op, run, needed in needs:
            own = [
                i
                for i in dict.fromkeys((*step.reads[op], *step.writes[op]))
                if i in throughout
            ]
            program.row(
                [run, share, *(throughout[i] for i in own)],
                [-needed, -self.memory_bytes, *(step.size_bytes[i] for i in own)],
                -self.memory_bytes,
                is_memory=True,
            )


def default_chain(instance: Instance) -> tuple[int, ...]:
    """Return a longest chain of nodes, each preceding the next, through the boundary.

    Returns
    -------
    tuple[int, ...]
        Nodes in order, the boundary among them, the end left out; linear time.
    """
    boundary = instance.boundary
    before = _longest(instance, None)
    after = _longest(instance, boundary)
    return (*_path(before, boundary), *_path(after, instance.end)[1:-1])


def _longest(instance: Instance, source: int | None) -> dict[int, tuple[int, int]]:
    """Return per node the length of a longest chain to it, and the node before it.

    With a source, only of chains from there.
    """
    found: dict[int, tuple[int, int]] = {}
    for node in instance.order:
        if source is not None and node == source:
            found[node] = (0, -1)
            continue
        known = [(found[p][0], p) for p in instance.predecessors[node] if p in found]
        if known:
            length, previous = max(known, key=lambda entry: entry[0])
            found[node] = (length + 1, previous)
        elif source is None:
            found[node] = (0, -1)
    return found


def _path(found: dict[int, tuple[int, int]], node: int) -> tuple[int, ...]:
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        node = found[node][1]
    return tuple(reversed(nodes))
