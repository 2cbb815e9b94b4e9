"""The rows of XEngine as published, on its own abstraction.

An op has one size (all that it writes) and a time per device; a tensor is an edge; time
is the sum of all runs and of one copy per edge whose ends are on different devices, in
each stage anew. Stages are those of Checkmate. Binaries, for device d, stage t, op i
and edge e = (i, k): ``R[d,t,i]`` runs, ``S[d,t,i]`` kept from the stage before,
``Z[d,t,i]`` either, ``F[d,t,e]`` freed after op k; ``U[d,t,k]`` are bytes.

The published rows of discards (``F``) and of the bytes at the start of a stage are
summed over the devices. So bytes may be booked on a device that does not hold them: the
rows accept schedules that break a device's budget. ``sums_over_devices=False`` writes
them for each device; copies then still take no memory on their target, and a tensor may
be freed before a reader on another device. :mod:`remat.solvers.devices.sweep_model` is
the model without these faults.

References
----------
M. Schuler, R. Membarth, P. Slusallek. XEngine: optimal tensor rematerialization for
neural networks in heterogeneous environments. ACM TACO 20(1), article 17, 2022.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from remat.backends.mathopt import Model
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import insert_discards
from remat.core.schedule import Boundary, Compute, Copy, Schedule, Step
from remat.solvers.devices.rows import ONE, ZERO, Program, Sum, term

HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class PublishedInstance:
    """A problem as the paper has it.

    Parameters
    ----------
    costs
        Per op its time on each device; ``None`` where it cannot run.
    sizes
        Per op, the size of its output.
    copy_costs
        Per edge (producer, consumer) and pair (source device, target device), the time
        of a copy; the ops are in topological order.
    budgets
        Per device.
    """

    costs: Sequence[Sequence[float | None]]
    sizes: Sequence[float]
    copy_costs: Mapping[tuple[int, int], Mapping[tuple[int, int], float]]
    budgets: Sequence[float]

    @property
    def devices(self) -> range:
        """Indices of the devices."""
        return range(len(self.budgets))

    @property
    def ops(self) -> range:
        """Indices of the ops."""
        return range(len(self.sizes))

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the ops whose outputs it reads."""
        return tuple(
            tuple(sorted(i for i, k in self.copy_costs if k == op)) for op in self.ops
        )

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the ops that read its output."""
        return tuple(
            tuple(sorted(k for i, k in self.copy_costs if i == op)) for op in self.ops
        )

    def graph(self, bytes_per_unit: int = 1, ns_per_unit: int = 1) -> TrainingGraph:
        """Return the graph that the judge replays schedules on: device d has kind d.

        Every op has to run; what nobody reads is gone right after its op.
        """
        written = [op for op in self.ops if self.users[op]]
        storage_of = {op: index for index, op in enumerate(written)}
        sizes = [round(size * bytes_per_unit) for size in self.sizes]
        return TrainingGraph(
            name="published instance",
            storages=tuple(
                Storage(name=f"output {op}", size_bytes=sizes[op]) for op in written
            ),
            ops=tuple(
                Op(
                    name=f"op {op}",
                    reads=tuple(storage_of[i] for i in self.inputs[op]),
                    writes=(storage_of[op],) if op in storage_of else (),
                    cost_ns=tuple(
                        None if cost is None else round(cost * ns_per_unit)
                        for cost in self.costs[op]
                    ),
                    workspace_bytes=tuple(
                        0 if op in storage_of else sizes[op] for _ in self.devices
                    ),
                    phase=Phase.FORWARD,
                )
                for op in self.ops
            ),
            device_kinds=tuple(f"device {d}" for d in self.devices),
        )


_Key = tuple[int, int, int]


@dataclass
class PublishedModel:
    """The rows of an instance, and the way back to a schedule.

    Parameters
    ----------
    instance
        What is modelled.
    is_quadratic
        Whether the cost of copies is a sum of products, as printed, or its exact
        linearisation.
    sums_over_devices
        Whether rows 8 and 9 are summed over devices, as published.
    """

    instance: PublishedInstance
    is_quadratic: bool = False
    sums_over_devices: bool = True
    program: Program = field(default_factory=Program)
    run: dict[_Key, int] = field(default_factory=dict[_Key, int])
    kept: dict[_Key, int] = field(default_factory=dict[_Key, int])
    present: dict[_Key, int] = field(default_factory=dict[_Key, int])
    freed: dict[tuple[int, int, int, int], int] = field(
        default_factory=dict[tuple[int, int, int, int], int]
    )
    held: dict[_Key, int] = field(default_factory=dict[_Key, int])

    @property
    def model(self) -> Model:
        """The program."""
        return self.program.model

    def build(self) -> "PublishedModel":
        """Write all rows, and return the model itself."""
        self._variables()
        for stage in self.instance.ops:
            self._runs(stage)
            self._presence(stage)
            self._discards(stage)
            self._bytes(stage)
            self._copies(stage)
        return self

    # --- variables: rows 1 and 4 are variables that do not exist -----------------

    def _variables(self) -> None:
        instance, model = self.instance, self.model
        for stage in instance.ops:
            for device in instance.devices:
                for op in instance.ops:
                    key = (device, stage, op)
                    cost = instance.costs[op][device]
                    if op <= stage and cost is not None:
                        self.run[key] = model.add_binary(cost)
                    if op < stage:
                        self.kept[key] = model.add_binary()
                    if op <= stage:
                        self.present[key] = model.add_binary()
                    self.held[key] = model.add_variable(
                        upper=float(instance.budgets[device])
                    )
                for producer, user in instance.copy_costs:
                    self.freed[device, stage, producer, user] = model.add_binary()

    def _value(self, variables: Mapping[_Key, int], *key: int) -> Sum:
        device, stage, op = key
        variable = variables.get((device, stage, op))
        return ZERO if variable is None else term(variable)

    def _held_before(self, device: int, stage: int, op: int) -> Sum:
        """Return whether op ``op`` is on the device, run or kept, in the stage."""
        key = (device, stage, op)
        return self._value(self.run, *key).plus(self._value(self.kept, *key))

    # --- rows ----------------------------------------------------------------------

    def _runs(self, stage: int) -> None:
        """Write rows 2, 3 and 6: one first run; inputs on any device."""
        instance = self.instance
        first = [self._value(self.run, d, stage, stage) for d in instance.devices]
        self.program.equal(ZERO.plus(*first), ONE)
        for producer, user in instance.copy_costs:
            anywhere = ZERO.plus(
                *(self._held_before(d, stage, producer) for d in instance.devices)
            )
            for device in instance.devices:
                self.program.at_most(
                    self._value(self.run, device, stage, user), anywhere
                )

    def _presence(self, stage: int) -> None:
        """Write rows 5 and 7: what is kept was there; Z is R or S."""
        for device in self.instance.devices:
            for op in range(stage + 1):
                self.program.at_most(
                    self._value(self.kept, device, stage + 1, op),
                    self._held_before(device, stage, op),
                )
                present = self._value(self.present, device, stage, op)
                self.program.at_most(present, self._held_before(device, stage, op))
                for variables in (self.run, self.kept):
                    self.program.at_least(
                        present, self._value(variables, device, stage, op)
                    )

    def _discards(self, stage: int) -> None:
        """Write rows 8: freed exactly if the op ran here and nothing here needs it."""
        instance = self.instance
        is_last = stage + 1 == len(instance.ops)
        for producer, user in instance.copy_costs:
            later = [j for j in instance.users[producer] if j > user]
            most = len(later) + (1 if is_last else 2)
            held_back: list[Sum] = []
            hazards: list[Sum] = []
            for device in instance.devices:
                freed = term(self.freed[device, stage, producer, user])
                held_back.append(ONE.minus(freed))
                hazards.append(
                    ONE.minus(self._value(self.run, device, stage, user)).plus(
                        self._value(self.kept, device, stage + 1, producer),
                        *(self._value(self.run, device, stage, j) for j in later),
                    )
                )
            if self.sums_over_devices:
                held_back, hazards = [ZERO.plus(*held_back)], [ZERO.plus(*hazards)]
            for kept, hazard in zip(held_back, hazards, strict=True):
                self.program.at_most(kept, hazard)
                self.program.at_least(ZERO.plus(kept, times=float(most)), hazard)

    def _bytes(self, stage: int) -> None:
        """Write rows 9 and 10; row 11 is the bounds of U."""
        instance = self.instance
        starts: list[Sum] = []
        for device in instance.devices:
            start = ZERO.plus(
                self._value(self.run, device, stage, 0), times=float(instance.sizes[0])
            )
            for op in range(stage):
                start = start.plus(
                    self._value(self.kept, device, stage, op),
                    times=float(instance.sizes[op]),
                )
            starts.append(term(self.held[device, stage, 0]).minus(start))
            for op in instance.ops[:-1]:
                after = term(self.held[device, stage, op]).plus(
                    self._value(self.run, device, stage, op + 1),
                    times=float(instance.sizes[op + 1]),
                )
                for producer in instance.inputs[op]:
                    after = after.plus(
                        term(self.freed[device, stage, producer, op]),
                        times=-float(instance.sizes[producer]),
                    )
                self.program.equal(term(self.held[device, stage, op + 1]), after)
        if self.sums_over_devices:
            starts = [ZERO.plus(*starts)]
        for start in starts:
            self.program.equal(start, ZERO)

    def _copies(self, stage: int) -> None:
        """Write the cost of copies: from every device that holds the input."""
        for (producer, user), costs in self.instance.copy_costs.items():
            for (source, target), cost in costs.items():
                run = self.run.get((target, stage, user))
                present = self.present.get((source, stage, producer))
                if run is None or present is None or not cost:
                    continue
                if self.is_quadratic:
                    self.model.add_quadratic_cost(run, present, cost)
                    continue
                both = self.model.add_variable(cost=cost)
                self.program.at_least(
                    term(both), term(run).plus(term(present)).minus(ONE)
                )

    # --- schedules -----------------------------------------------------------------

    def runs(self, values: Sequence[float]) -> list[tuple[int, int]]:
        """Return the ops that run and their devices, in order."""
        return [
            (op, device)
            for stage in self.instance.ops
            for op in range(stage + 1)
            for device in self.instance.devices
            if (device, stage, op) in self.run
            and values[self.run[device, stage, op]] > HALF
        ]

    def schedule(self, values: Sequence[float]) -> tuple[Schedule, float]:
        """Return the schedule on :meth:`PublishedInstance.graph`, and its cost.

        Inputs that are on another device only are copied, from where it costs least,
        for the one run. The cost charges only these copies.
        """
        instance = self.instance
        storage_of: dict[int, int] = {}
        for op in instance.ops:
            if instance.users[op]:
                storage_of[op] = len(storage_of)
        steps: list[Step] = []
        total = 0.0
        for stage in instance.ops:
            for op in range(stage + 1):
                for device in instance.devices:
                    run = self.run.get((device, stage, op))
                    if run is None or values[run] < HALF:
                        continue
                    total += instance.costs[op][device] or 0
                    for producer in instance.inputs[op]:
                        source = self._source(values, (producer, op), device, stage)
                        if source != device:
                            pair = (source, device)
                            total += instance.copy_costs[producer, op].get(pair, 0)
                            steps.append(Copy(storage_of[producer], source, device))
                    steps.append(Compute(op, device))
        steps.append(Boundary())
        return insert_discards(instance.graph(), steps), total

    def _source(
        self, values: Sequence[float], edge: tuple[int, int], target: int, stage: int
    ) -> int:
        producer, _ = edge
        holders = [
            d
            for d in self.instance.devices
            if values[self.present[d, stage, producer]] > HALF
        ]
        if target in holders:
            return target
        costs = self.instance.copy_costs[edge]
        return min(holders, key=lambda d: costs.get((d, target), 0.0))
