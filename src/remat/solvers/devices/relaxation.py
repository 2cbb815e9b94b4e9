"""Placement without memory: where ops would run if every device had room for all.

Every schedule runs each required op on some device at least once, and what an op reads
on a device was computed there, or copied there, or is at home there. The cheapest
choice of runs and copies with these properties, whatever their order and however much
memory they need, is an integer program of two binaries per op and link; its optimum is
a lower bound on the serial time of every schedule. With ample memory it is the optimum.
"""

from dataclasses import dataclass

from remat.backends.mathopt import MipSolver, Settings, solve
from remat.backends.tolerances import RELATIVE_TOLERANCE, safe_bound_ns
from remat.search.device_feasibility import runnable_devices
from remat.search.device_instance import DeviceInstance
from remat.solvers.devices.rows import ONE, ZERO, Program, Sum, term

_HALF = 0.5
_SCALE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedPlacement:
    """Where ops run, and what that proves.

    Parameters
    ----------
    placement
        Per op its devices; all it can run on for ops that need not run. ``None`` if no
        solution was found in time.
    bound_ns
        No schedule takes less time, serially.
    """

    placement: tuple[tuple[int, ...], ...] | None
    bound_ns: int


def relaxed_placement(
    instance: DeviceInstance, settings: Settings, pressure: tuple[float, ...] = ()
) -> RelaxedPlacement:
    """Return the cheapest placement without memory, with the bound that it proves.

    Parameters
    ----------
    instance
        What is trained where.
    settings
        When the solver stops.
    pressure
        Nanoseconds per byte written on each device that are added to the cost of runs,
        to move work away from a device with little memory. The bound is then 0.
    """
    graph, program = instance.graph, Program()
    model = program.model
    total = sum(
        max((c for c in costs if c is not None), default=0)
        for costs in instance.cost_ns
    )
    unit = max(total, 1) / _SCALE
    runnable = runnable_devices(instance)
    runs: dict[tuple[int, int], int] = {}
    required = set(instance.required)
    for op in instance.required:
        written = sum(instance.sizes_bytes[s] for s in graph.ops[op].writes)
        for device in runnable[op]:
            cost = float(instance.cost_ns[op][device] or 0)
            cost += pressure[device] * written if pressure else 0.0
            runs[op, device] = model.add_binary(cost / unit)
        # More than once is allowed on several devices only.
        here = ZERO.plus(*(term(runs[op, d]) for d in runnable[op]))
        upper = 1.0 if not graph.ops[op].is_recomputable else float(len(runnable[op]))
        program.between(1.0, here, upper)
    there = _presence(instance, program, runs, required, unit)
    for op in instance.required:
        for device in runnable[op]:
            for storage in graph.ops[op].reads:
                program.at_most(
                    term(runs[op, device]), there.get((storage, device), ZERO)
                )
    for storage in (*graph.forward_outputs, *graph.final_outputs):
        home = graph.storages[storage].home
        program.at_least(there.get((storage, home), ZERO), ONE)
    found = solve(model, MipSolver.HIGHS, settings)
    bound_ns = 0
    if not pressure:
        tolerance = RELATIVE_TOLERANCE * (max(found.bound, 0.0) + model.variable_count)
        bound_ns = safe_bound_ns(found.bound * unit, 1, tolerance * unit)
    if not len(found.values):
        return RelaxedPlacement(placement=None, bound_ns=bound_ns)
    placement = tuple(
        tuple(d for d in runnable[op] if found.values[runs[op, d]] > _HALF)
        if op in required
        else runnable[op]
        for op in range(len(graph.ops))
    )
    return RelaxedPlacement(placement=placement, bound_ns=bound_ns)


def _presence(
    instance: DeviceInstance,
    program: Program,
    runs: dict[tuple[int, int], int],
    required: set[int],
    unit: float,
) -> dict[tuple[int, int], Sum]:
    """Return per storage and device whether it is ever there; copies are variables."""
    graph, producers = instance.graph, instance.graph.producers
    there: dict[tuple[int, int], Sum] = {}
    for storage, block in enumerate(graph.storages):
        producer = producers[storage]
        if producer is None:
            there[storage, block.home] = ONE
        elif producer in required:
            for device in instance.devices:
                if (producer, device) in runs:
                    there[storage, device] = term(runs[producer, device])
        else:
            continue
        arriving: dict[int, list[Sum]] = {}
        leaving: list[tuple[int, Sum]] = []
        for (source, target), times in instance.copy_ns.items():
            if target == block.home and producer is None:
                continue
            copy = term(program.model.add_binary(times[storage] / unit))
            arriving.setdefault(target, []).append(copy)
            leaving.append((source, copy))
        for target, copies in arriving.items():
            there[storage, target] = there.get((storage, target), ZERO).plus(*copies)
        for source, copy in leaving:
            program.at_most(copy, there.get((storage, source), ZERO))
    return there
