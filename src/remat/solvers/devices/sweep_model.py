"""The exact model: which op runs and what is copied at every slot, on every device.

Variables, per slot (see :mod:`remat.solvers.devices.slots`):

* ``R[d]``, binary: the slot's op runs on device d;
* ``C[s, d, i]``, binary: storage i is copied from device s to d, before the op reads it
  or after it was used there;
* ``P[d, i]`` in [0, 1]: storage i is live on d after the slot. Only storages that the
  slot touches get a new one: nothing is discarded but right after a use;
* ``M[d]``: bytes live on d after the slot, at most the budget.

Rows: an op reads what is live on its device; a copy reads what is live on its source;
what is live after a slot was live before, or the slot wrote it there, or a copy brought
it there; bytes during each step, with outputs, workspace and arriving copies added
while the inputs are still held, are within the budget of each device.

``P`` need not be integer: with integer R and C the least P that the rows allow is.

What is corrected compared with the published rows [1]_: each device has its own bytes
and its own discards; copies occupy memory on their target, last until discarded, and
are paid once; a copy comes from whichever device holds the storage, the cheapest first;
a storage stays while a copy still has to read it. What the caller holds stays at home
from the boundary on: ``P`` is 1 there.

References
----------
.. [1] M. Schuler, R. Membarth, P. Slusallek. XEngine: optimal tensor rematerialization
   for neural networks in heterogeneous environments. ACM TACO 20(1), 2022.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from remat.core.graph import Phase
from remat.core.liveness import insert_discards
from remat.core.schedule import Boundary, Compute, Copy, Discard, Schedule, Step
from remat.search.device_instance import DeviceInstance
from remat.solvers.devices.clock_rows import ClockRows
from remat.solvers.devices.rows import INFINITY, ONE, ZERO, Program, Sum, term
from remat.solvers.devices.slots import (
    BoundarySlot,
    CopySlot,
    RunSlot,
    Slot,
    callers_turns,
)

HALF = 0.5

_SERIAL_WEIGHT = 1e-3
"""What serial time counts beside overlapped time: of two, the one that does less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the model allows.

    Parameters
    ----------
    is_transient
        Copies serve the one run that reads them and are gone after it, as in the paper;
        otherwise they stay until discarded.
    horizon_ns
        If given, the objective is the time with devices and links at work together,
        and a best schedule has ended by then.
    """

    is_transient: bool = False
    horizon_ns: int | None = None


@dataclass
class SweepModel:
    """The program of an instance, and the way back from its values to a schedule.

    Parameters
    ----------
    instance, slots, options
        What is modelled.
    cost_unit_ns, size_unit_bytes
        What 1 means in the program's objective and in its bytes.
    """

    instance: DeviceInstance
    slots: Sequence[Slot]
    options: ModelOptions
    cost_unit_ns: float = 1.0
    size_unit_bytes: float = 1.0
    program: Program = field(default_factory=Program)
    # What each binary stands for, in the order of time.
    events: list[tuple[int, Step]] = field(default_factory=list[tuple[int, Step]])
    runs: defaultdict[int, list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict[int, list[tuple[int, int]]](list)
    )
    live: list[dict[int, Sum]] = field(default_factory=list[dict[int, Sum]])
    # Of each device: what of each storage its bytes count, and those bytes.
    counted: list[dict[int, Sum]] = field(default_factory=list[dict[int, Sum]])
    held: list[Sum] = field(default_factory=list[Sum])
    # What stays at home from here on: once handed over, what the caller holds.
    staying: frozenset[int] = frozenset()

    clock: ClockRows | None = None

    def build(self) -> "SweepModel":
        """Write all rows, and return the model itself."""
        graph = self.instance.graph
        if self.options.horizon_ns is not None:
            horizon = self.options.horizon_ns / self.cost_unit_ns
            self.clock = ClockRows(
                self.program,
                horizon,
                len(self.instance.devices),
                copies_wait=self.instance.copies_wait,
            )
        self.live = [
            {
                index: ONE
                for index, storage in enumerate(graph.storages)
                if storage.is_resident and storage.home == device
            }
            for device in self.instance.devices
        ]
        self.counted = [{} for _ in self.instance.devices]
        self.held = [ZERO for _ in self.instance.devices]
        is_callers = callers_turns(graph, self.slots)
        for number, slot in enumerate(self.slots):
            if isinstance(slot, CopySlot):
                if not self.options.is_transient:
                    self._copies(slot.storages, self.instance.devices)
                    self._keep(slot.storages)
            elif isinstance(slot, BoundarySlot):
                self._boundary()
            else:
                self._run(number, slot, may_copy=not is_callers[number])
        for storage in graph.final_outputs:
            self._must_be_live(storage, graph.storages[storage].home)
        self._whole_schedule_rows()
        if self.clock is not None:
            self.clock.finish(1.0)
        return self

    # --- slots -------------------------------------------------------------------

    def _run(self, number: int, slot: RunSlot, *, may_copy: bool) -> None:
        instance, op = self.instance, self.instance.graph.ops[slot.op]
        able = [d for d in instance.devices if instance.cost_ns[slot.op][d] is not None]
        touched = tuple(dict.fromkeys((*op.reads, *op.writes)))
        before = (
            [dict(live) for live in self.live],
            [dict(counted) for counted in self.counted],
            list(self.held),
        )
        if may_copy:
            self._copies(op.reads, able, with_rows=False)
        ran: dict[int, Sum] = {}
        for device in able:
            cost = instance.cost_ns[slot.op][device] or 0
            variable = self._choice(Compute(slot.op, device), cost)
            self.runs[slot.op].append((number, variable))
            ran[device] = term(variable)
            if self.clock is not None:
                duration = cost / self.cost_unit_ns
                self.clock.run(device, ran[device], duration, op.reads, op.writes)
            self._read(ran[device], op.reads, device)
            added = instance.workspace_bytes[slot.op][device] + sum(
                instance.sizes_bytes[s] for s in op.writes
            )
            self._within(
                device, self.held[device].plus(ran[device], times=self._size(added))
            )
            if op.writes and op.is_recomputable:
                # Some output is missing: running for nothing is never better.
                missing = Sum(float(len(op.writes))).minus(
                    *(self.live[device].get(s, ZERO) for s in op.writes)
                )
                self.program.at_most(ran[device], missing)
        if self.options.is_transient:
            # What arrived for the run goes with it.
            self.live, self.counted, self.held = before
        if slot.is_first:
            may_repeat = op.is_recomputable and not self.options.is_transient
            total = ZERO.plus(*ran.values())
            self.program.between(1.0, total, float(len(ran)) if may_repeat else 1.0)
        for device, run in ran.items():
            for storage in op.writes:
                self.live[device][storage] = (
                    self.live[device].get(storage, ZERO).plus(run)
                )
        self._keep(touched)
        can_copy = may_copy and not op.is_external and bool(instance.copy_ns)
        if can_copy and not self.options.is_transient:
            self._copies(touched, instance.devices)
            self._keep(touched)

    def _boundary(self) -> None:
        graph = self.instance.graph
        for storage in graph.forward_outputs:
            self._must_be_live(storage, graph.storages[storage].home)
        if self.clock is not None:
            homes = [storage.home for storage in graph.storages]
            self.clock.boundary(
                [(s, homes[s]) for s in graph.forward_outputs],
                [(s, homes[s]) for s in graph.tangents],
            )
        for storage in graph.tangents:
            self._arrive(storage, graph.storages[storage].home, ONE)
        for device in self.instance.devices:
            self._within(device, self.held[device])
        self.staying = graph.held_outputs
        self._keep((*graph.forward_outputs, *graph.tangents))
        self.events.append((-1, Boundary()))

    def _copies(
        self, storages: Iterable[int], targets: Iterable[int], *, with_rows: bool = True
    ) -> None:
        """Let ``storages`` be copied to ``targets``, over as many links as it takes."""
        instance, goals = self.instance, set(targets)
        arrived: list[tuple[int, int]] = []
        for hops_left in reversed(range(self._hops())):
            copies: list[tuple[int, int, Sum]] = []
            for storage in storages:
                for (source, target), times in instance.copy_ns.items():
                    origin = self.live[source].get(storage, ZERO)
                    if (not hops_left and target not in goals) or origin == ZERO:
                        continue
                    if self._stays(storage, target):
                        continue
                    step = Copy(storage, source, target)
                    copy = term(self._choice(step, times[storage]))
                    self.program.at_most(copy, origin)
                    copies.append((storage, target, copy))
                    if self.clock is not None:
                        duration = times[storage] / self.cost_unit_ns
                        self.clock.copy(storage, (source, target), copy, duration)
            for storage, target, copy in copies:
                self._arrive(storage, target, copy)
                arrived.append((storage, target))
        for storage, target in dict.fromkeys(arrived):
            self.program.at_most(self.live[target][storage], ONE)
        for device in sorted({target for _, target in arrived}):
            if with_rows or device not in goals:
                self._within(device, self.held[device])

    def _choice(self, step: Step, cost_ns: int) -> int:
        """Add the binary that says whether a step is taken."""
        weight = 1.0 if self.clock is None else _SERIAL_WEIGHT
        variable = self.program.model.add_binary(weight * cost_ns / self.cost_unit_ns)
        self.events.append((variable, step))
        return variable

    def _hops(self) -> int:
        count = len(self.instance.device_names)
        if len(self.instance.copy_ns) == count * (count - 1):
            return 1
        return max(1, count - 1)

    # --- what is live ------------------------------------------------------------

    def _read(self, run: Sum, storages: Iterable[int], device: int) -> None:
        for storage in storages:
            self.program.at_most(run, self.live[device].get(storage, ZERO))

    def _must_be_live(self, storage: int, device: int) -> None:
        self.program.at_least(self.live[device].get(storage, ZERO), ONE)

    def _stays(self, storage: int, device: int) -> bool:
        """Return whether a storage is on a device for good."""
        block = self.instance.graph.storages[storage]
        is_held = block.is_resident or storage in self.staying
        return is_held and block.home == device

    def _arrive(self, storage: int, device: int, arrival: Sum) -> None:
        """Make a storage live, and count its bytes."""
        size = self._size(self.instance.sizes_bytes[storage])
        self.live[device][storage] = self.live[device].get(storage, ZERO).plus(arrival)
        counted = self.counted[device].get(storage, ZERO)
        self.counted[device][storage] = counted.plus(arrival)
        self.held[device] = self.held[device].plus(arrival, times=size)

    def _keep(self, storages: Iterable[int]) -> None:
        """Decide which of ``storages`` stay live, wherever they are."""
        storages = tuple(storages)
        for device in self.instance.devices:
            held, has_changed = self.held[device], False
            for storage in storages:
                now = self.live[device].get(storage, ZERO)
                if now == ZERO or self.instance.is_home(storage, device):
                    continue
                kept = ONE
                if not self._stays(storage, device):
                    kept = term(self.program.model.add_variable())
                self.program.at_most(kept, now)
                size = self._size(self.instance.sizes_bytes[storage])
                counted = self.counted[device].get(storage, ZERO)
                held = held.plus(kept.minus(counted), times=size)
                self.live[device][storage] = self.counted[device][storage] = kept
                has_changed = True
            if has_changed:
                self.held[device] = self._as_variable(device, held)

    # --- bytes -------------------------------------------------------------------

    def _size(self, size_bytes: int) -> float:
        return size_bytes / self.size_unit_bytes

    def _budget(self, device: int) -> float:
        budget = self.instance.budgets_bytes[device]
        return INFINITY if budget is None else self._size(budget)

    def _within(self, device: int, held: Sum) -> None:
        budget = self._budget(device)
        if budget < INFINITY:
            self.program.between(-INFINITY, held, budget)

    def _as_variable(self, device: int, held: Sum) -> Sum:
        budget = self._budget(device)
        if budget == INFINITY:
            return held
        variable = self.program.model.add_variable(upper=max(0.0, budget))
        self.program.equal(term(variable), held)
        return term(variable)

    # --- the whole schedule ------------------------------------------------------

    def _whole_schedule_rows(self) -> None:
        """Write what the slots alone do not say: how often, and in which order."""
        graph = self.instance.graph
        first = {s.op for s in self.slots if isinstance(s, RunSlot) and s.is_first}
        boundary = next(
            n for n, slot in enumerate(self.slots) if isinstance(slot, BoundarySlot)
        )
        previous: int | None = None
        for index in self.instance.required:
            op = graph.ops[index]
            if index in first:
                continue
            runs = self.runs[index]
            total = ZERO.plus(*(term(v) for _, v in runs))
            if not op.is_recomputable:
                self.program.at_most(total, ONE)
            if op.is_ordered or not op.writes:
                in_pass = [
                    term(v)
                    for n, v in runs
                    if n < boundary or op.phase is Phase.BACKWARD
                ]
                self.program.at_least(ZERO.plus(*in_pass), ONE)
            if op.is_ordered:
                if previous is not None:
                    self._after_first_run(index, previous)
                previous = index

    def _after_first_run(self, op: int, earlier: int) -> None:
        for number, variable in self.runs[op]:
            done = [term(v) for n, v in self.runs[earlier] if n < number]
            self.program.at_most(term(variable), ZERO.plus(*done))

    # --- schedules ---------------------------------------------------------------

    def schedule(self, values: Sequence[float]) -> Schedule:
        """Return the schedule that the values of the variables stand for."""
        steps = [
            step
            for variable, step in self.events
            if variable < 0 or values[variable] > HALF
        ]
        return insert_discards(self.instance.graph, steps)

    def forbid_arrivals(self, values: Sequence[float], device: int) -> bool:
        """Forbid the chosen copy to or from ``device`` that holds most bytes longest.

        Returns
        -------
        bool
            Whether there was one.
        """
        filled: dict[tuple[int, int], int] = {}
        worst: tuple[int, int] | None = None
        for position, (variable, step) in enumerate(self.events):
            if variable < 0 or values[variable] <= HALF:
                continue
            if isinstance(step, Compute):
                for storage in self.instance.graph.ops[step.op].writes:
                    filled[storage, step.device] = position
            elif isinstance(step, Copy):
                since = filled.get((step.storage, step.source), 0)
                filled[step.storage, step.target] = position
                if device in {step.source, step.target}:
                    size = self.instance.sizes_bytes[step.storage]
                    found = (size * (1 + position - since), variable)
                    worst = found if worst is None else max(worst, found)
        if worst is None:
            return False
        self.program.model.upper[worst[1]] = 0.0
        self.program.model.start.pop(worst[1], None)
        return True

    def values_of(self, schedule: Schedule) -> dict[int, float] | None:
        """Return the values of all binaries for a schedule; ``None`` outside the class.

        Each run and copy takes the first slot that is left for it.
        """
        values = {variable: 0.0 for variable, _ in self.events if variable >= 0}
        position = 0
        for step in schedule.steps:
            if isinstance(step, Discard):
                continue
            while position < len(self.events) and self.events[position][1] != step:
                position += 1
            if position == len(self.events):
                return None
            if self.events[position][0] >= 0:
                values[self.events[position][0]] = 1.0
            position += 1
        return values
