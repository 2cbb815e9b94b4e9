"""Costs of a traced step: time, workspace and true sizes of every operator."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from remat.capture.accelerator import hardware_now
from remat.capture.joint_program import (
    JointProgram,
    example_value,
    map_nodes,
    moot_positions,
    needed_arguments,
    values_of,
)
from remat.core.device_graph import CostColumn, nowhere, place_of, scaled, with_columns
from remat.core.errors import CaptureError, InvalidPlatformError, ProfileError
from remat.core.graph import Op, Storage, TrainingGraph
from remat.core.platform import DeviceKind, MeasuredCost, Platform
from remat.core.units import round_up
from remat.profile.arguments import empty_like
from remat.profile.cache import CostCache
from remat.profile.collectives import collective_cost
from remat.profile.estimate import Rates, estimate_operators, measure_rates
from remat.profile.known import KnownCosts, is_here, measured_costs
from remat.profile.operators import OperatorCall, OperatorCost, profile_operators
from remat.profile.roofline import Roofline
from remat.solvers.base import ProgressCallback
from remat.torch_compat.accelerators import is_accelerator
from remat.torch_compat.collectives import is_collective
from remat.torch_compat.names import FakeTensor, tree_map

Costs = Literal["measured", "estimated"]

_CACHING_GRANULE_BYTES = 512


def granule_bytes(device_type: str) -> int:
    """Return the multiple to which a device's allocator rounds every block up."""
    return _CACHING_GRANULE_BYTES if is_accelerator(device_type) else 1


def with_costs(
    program: JointProgram,
    costs: Costs,
    on_progress: ProgressCallback,
    *,
    known: KnownCosts | None = None,
    place: str | None = None,
    is_alone: bool = False,
) -> TrainingGraph:
    """Return the program's graph with what every operator costs.

    Besides time and workspace, the sizes of storages are set to what the operators
    really allocate: some fake kernels promise smaller blocks than the real ones make.

    Parameters
    ----------
    program
        The traced step.
    costs
        Whether to measure or to estimate what is not known.
    on_progress
        Called while operators are measured.
    known
        Costs that a platform has for the device at home.
    place
        torch's name of the device that is planned for as home, where it is none of this
        machine: then every operator must be known.
    is_alone
        Whether home is the one device that is planned for.

    While steps are traced for a device that is not here, what is not known is estimated
    from its description.

    Raises
    ------
    CaptureError
        If an operator returns a view of its input although its schema denies it.
    InvalidPlatformError
        If an operator is not known and cannot be measured, or its known cost is not one
        of such an operator.
    ProfileError
        If an operator cannot be run alone.
    """
    nodes = dict(program.calls())
    indices = list(nodes)
    calls = _calls(program)
    cache = CostCache()
    known = known or KnownCosts("home", {})
    found, missing = known.split(calls)
    looked_up = set(found)
    for position in [p for p in missing if is_collective(calls[p].target)]:
        found[position] = collective_cost(calls[position])
        missing.remove(position)
    others = [calls[position] for position in missing]
    hardware = hardware_now()
    if hardware is not None:
        estimated = estimate_operators(others, Roofline(hardware))
        found.update(zip(missing, estimated, strict=True))
    elif place is not None:
        known.refuse_missing(others, place)
    elif costs == "measured":
        measured = profile_operators(others, cache=cache, on_progress=on_progress)
        found.update(zip(missing, measured, strict=True))
    elif others:
        rates = measure_rates(program.device, cache=cache)
        found.update(zip(missing, estimate_operators(others, rates), strict=True))
    ops = list(program.graph.ops)
    storages = list(program.graph.storages)
    for position, index in enumerate(indices):
        cost = found[position]
        if cost is None:
            # Other devices may be able; with_device_costs says that home is not.
            if is_alone:
                known.refuse_unable(ops[index].name)
            continue
        known.check_outputs(calls[position], cost, len(ops[index].writes))
        if position in looked_up:
            known.check_sizes(calls[position], cost, values_of(nodes[index]))
        _check_alias(ops[index], cost)
        state = program.random_states.get(index)
        # Replaying holds the generator's present state meanwhile.
        state_bytes = 0 if state is None else storages[state].size_bytes
        ops[index] = replace(
            ops[index],
            cost_ns=(cost.cost_ns,),
            workspace_bytes=(cost.workspace_bytes + state_bytes,),
        )
        for storage, size_bytes in zip(
            ops[index].writes, cost.output_sizes_bytes, strict=True
        ):
            storages[storage] = replace(storages[storage], size_bytes=size_bytes)
    device_type = (place or program.device.type).partition(":")[0]
    granule = granule_bytes(device_type)
    if hardware is not None:
        granule = hardware.granule_bytes
    return replace(
        program.graph, ops=tuple(ops), storages=tuple(_rounded(storages, granule))
    )


def place_name(device: torch.device) -> str:
    """Return the name of a torch device as plans write it: the CPU has one place.

    Examples
    --------
    >>> place_name(torch.device("cuda")), place_name(torch.device("cpu", 1))
    ('cuda:0', 'cpu')
    """
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def with_device_costs(
    program: JointProgram,
    graph: TrainingGraph,
    platform: Platform,
    costs: Costs,
    on_progress: ProgressCallback,
    *,
    known: Platform | None = None,
) -> TrainingGraph:
    """Return the graph with what every operator costs on each device of a platform.

    Costs that are known are taken as they are. Of the others: on logical devices of
    home's place they are those at home, and so are sizes and workspace, or times are
    estimated from the kind's rates. On another place the operators are measured or
    estimated there; one that cannot run there alone has no cost there. All times are
    scaled by the kind's ``time_percent``.

    Parameters
    ----------
    program
        The traced step.
    graph
        Its graph with the costs at home, from :func:`with_costs`.
    platform
        From :func:`remat.core.device_graph.arrange`.
    costs
        Whether to measure or to estimate on other places.
    on_progress
        Called while operators are measured.
    known
        A platform with costs that were measured before, by the names of its devices.

    Raises
    ------
    InvalidPlatformError
        If an operator can run on no device, or its cost on a device that this machine
        does not have is not known.
    ProfileError
        If an operator cannot be traced for an estimate.
    """
    at_home = CostColumn(
        cost_ns=tuple(op.cost_ns[0] for op in graph.ops),
        workspace_bytes=tuple(op.workspace_bytes[0] for op in graph.ops),
    )
    sizes: dict[int, int] = {}
    calls, home_place = _calls(program), place_of(platform, 0)
    home = KnownCosts.of(known, platform.names[0])
    home_found, _ = home.split(calls)
    at_home = _with_known(program, graph, at_home, home, home_found, home_place, sizes)
    columns: list[CostColumn] = []
    for device, name in enumerate(platform.names):
        kind, place = platform.kind_of(device), place_of(platform, device)
        if not kind.computes:
            columns.append(nowhere(len(graph.ops)))
            continue
        on_device = KnownCosts.of(known, name)
        found, missing = on_device.split(calls)
        column = at_home
        is_same = place is None or place == home_place
        if place is not None and not is_same and (is_here(place) or not kind.has_rates):
            on_progress(f"measuring operators on {name}", 0.0)
            column = _column_elsewhere(
                program,
                graph,
                place,
                costs,
                known=on_device,
                missing=missing,
                sizes=sizes,
                on_progress=on_progress,
            )
        if kind.has_rates:
            column = _estimated(program, column, kind)
        column = _with_known(program, graph, column, on_device, found, place, sizes)
        columns.append(
            CostColumn(
                cost_ns=tuple(scaled(cost, kind) for cost in column.cost_ns),
                workspace_bytes=column.workspace_bytes,
            )
        )
    storages = [
        replace(storage, size_bytes=max(storage.size_bytes, sizes.get(index, 0)))
        for index, storage in enumerate(graph.storages)
    ]
    ops = list(graph.ops)
    for index, node in program.calls():
        moot = _inputs_that_are_passed_on(program, node)
        reads = tuple(dict.fromkeys((*ops[index].reads, *moot)))
        ops[index] = replace(ops[index], reads=reads)
    return with_columns(
        replace(graph, ops=tuple(ops), storages=tuple(storages)), platform, columns
    )


def _inputs_that_are_passed_on(
    program: JointProgram, node: torch.fx.Node
) -> tuple[int, ...]:
    """Return the inputs that an operator takes although their values are moot.

    At home they are always there; elsewhere they have to be copied all the same.
    """
    passed = needed_arguments(node)
    taken = [passed[position] for position in moot_positions(node)]
    return tuple(
        storage
        for argument in taken
        if isinstance(argument, torch.fx.Node)
        for storage in program.storages_of[argument]
    )


def _estimated(
    program: JointProgram, column: CostColumn, kind: DeviceKind
) -> CostColumn:
    """Return a column with times from a kind's rates instead of measured ones."""
    rates = Rates(
        flops_per_s=kind.flops_per_s or 1,
        bytes_per_s=kind.bytes_per_s or 1,
        launch_ns=kind.launch_ns,
    )
    indices = [index for index, _ in program.calls()]
    found = estimate_operators(_calls(program), rates)
    costs = list(column.cost_ns)
    for index, cost in zip(indices, found, strict=True):
        costs[index] = None if costs[index] is None else cost.cost_ns
    return replace(column, cost_ns=tuple(costs))


def _column_elsewhere(  # noqa: PLR0913 - a column of costs has that many sources
    program: JointProgram,
    graph: TrainingGraph,
    place: str,
    costs: Costs,
    *,
    known: KnownCosts,
    missing: Sequence[int],
    sizes: dict[int, int],
    on_progress: ProgressCallback,
) -> CostColumn:
    """Return what the calls ``missing`` cost on a place other than the step's own.

    ``sizes`` grows by the bytes that their outputs take there, per storage.
    """
    cost_ns: list[int | None] = [None] * len(graph.ops)
    workspaces = [0] * len(graph.ops)
    indices, calls = [index for index, _ in program.calls()], _calls(program)
    # Random numbers come from the generator at home.
    missing = [m for m in missing if not graph.ops[indices[m]].is_ordered]
    if not missing:
        return CostColumn(cost_ns=tuple(cost_ns), workspace_bytes=tuple(workspaces))
    if not is_here(place):
        known.refuse_missing([calls[position] for position in missing], place)
    device = torch.device(place)
    cache = CostCache()
    rates = None if costs == "measured" else measure_rates(device, cache=cache)
    granule = granule_bytes(device.type)
    for count, position in enumerate(missing):
        index, call = indices[position], calls[position]
        on_progress(
            f"measuring {graph.ops[index].name} on {place}", count / len(missing)
        )
        moved = _moved(call, program.device, device)
        try:
            (cost,) = (
                profile_operators([moved], cache=cache)
                if rates is None
                else estimate_operators([moved], rates)
            )
        except ProfileError:
            continue  # It cannot run there, which is what no cost says.
        made = (*cost.output_sizes_bytes,)
        if cost.aliases_input or len(made) != len(graph.ops[index].writes):
            continue  # It does not do there what it does at home.
        cost_ns[index] = cost.cost_ns
        workspaces[index] = cost.workspace_bytes
        for storage, size_bytes in zip(graph.ops[index].writes, made, strict=True):
            rounded = round_up(size_bytes, granule)
            sizes[storage] = max(sizes.get(storage, 0), rounded)
    return CostColumn(cost_ns=tuple(cost_ns), workspace_bytes=tuple(workspaces))


def _with_known(
    program: JointProgram,
    graph: TrainingGraph,
    column: CostColumn,
    known: KnownCosts,
    found: Mapping[int, OperatorCost | None],
    place: str | None,
    sizes: dict[int, int],
) -> CostColumn:
    """Return a column with what is known in the place of what it says.

    ``sizes`` grows by the bytes that outputs are known to take, per storage.
    """
    device_type = (place or "").partition(":")[0]
    granule = granule_bytes(device_type)
    cost_ns, workspaces = list(column.cost_ns), list(column.workspace_bytes)
    nodes, all_calls = list(program.calls()), _calls(program)
    for position, cost in found.items():
        index, node = nodes[position]
        writes = graph.ops[index].writes
        # An alias is not what the operator returns at home.
        cost_ns[index] = None
        if cost is None or cost.aliases_input:
            continue
        known.check_outputs(all_calls[position], cost, len(writes))
        known.check_sizes(all_calls[position], cost, values_of(node))
        cost_ns[index] = cost.cost_ns
        state = program.random_states.get(index)
        state_bytes = 0 if state is None else graph.storages[state].size_bytes
        workspaces[index] = cost.workspace_bytes + state_bytes
        for storage, size_bytes in zip(writes, cost.output_sizes_bytes, strict=True):
            rounded = round_up(size_bytes, granule)
            sizes[storage] = max(sizes.get(storage, 0), rounded)
    return CostColumn(cost_ns=tuple(cost_ns), workspace_bytes=tuple(workspaces))


def _moved(
    call: OperatorCall, source: torch.device, target: torch.device
) -> OperatorCall:
    """Return a call whose tensors and device arguments are on another device."""

    def on_target(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device == source:
            if isinstance(value, FakeTensor):
                with value.fake_mode:
                    return empty_like(value, target)
            return empty_like(value, target)
        return target if value == source else value

    args, kwargs = tree_map(on_target, (call.args, dict(call.kwargs)))
    kwargs = cast("Mapping[str, Any]", kwargs)
    return OperatorCall(call.target, args, kwargs, outputs=call.outputs)


def platform_costs(
    program: JointProgram, platform: Platform, on_progress: ProgressCallback
) -> tuple[MeasuredCost, ...]:
    """Measure every distinct operator of a step on each device of a platform.

    Devices that only store, or whose kind has rates in the place of measurements, have
    no costs. Ops that draw random numbers are measured at home's place alone.

    Parameters
    ----------
    program
        The traced step.
    platform
        With devices of this machine, in any order.
    on_progress
        Called while operators are measured.

    Raises
    ------
    InvalidPlatformError
        If a device is not on this machine.
    ProfileError
        If an operator cannot be run alone at home.
    """
    home = place_name(program.device)
    indices, calls = [index for index, _ in program.calls()], _calls(program)
    movable = [
        call
        for index, call in zip(indices, calls, strict=True)
        if not program.graph.ops[index].is_ordered
    ]
    cache = CostCache()
    rows: list[MeasuredCost] = []
    for device, name in enumerate(platform.names):
        kind, place = platform.kind_of(device), place_of(platform, device)
        if not kind.computes or kind.has_rates or place is None:
            continue
        if not is_here(place):
            msg = f"device {name!r} ({place}) is not on this machine; measure it there"
            raise InvalidPlatformError(msg)
        is_home = place == home
        # Other processes would have to take part.
        alone = [call for call in calls if not is_collective(call.target)]
        chosen = alone if is_home else movable
        target = torch.device(place)
        moved = (
            chosen
            if is_home
            else [_moved(call, program.device, target) for call in chosen]
        )
        rows += measured_costs(
            chosen,
            moved,
            name,
            is_home=is_home,
            cache=cache,
            on_progress=on_progress,
        )
    return tuple(rows)


def _calls(program: JointProgram) -> list[OperatorCall]:
    return [
        OperatorCall(
            cast("Callable[..., Any]", node.target),
            *_fake_arguments(program, node),
            source=program.graph.ops[index].source,
            outputs=node.meta.get("val"),
        )
        for index, node in program.calls()
    ]


def with_known_costs(graph: TrainingGraph, known: TrainingGraph) -> TrainingGraph:
    """Return ``graph`` with the costs and sizes of an equal graph.

    What surrounds the step (residents, loss, optimizer) stays that of ``graph``, on
    the first device.
    """
    others = len(known.device_kinds) - 1
    ops = [
        replace(
            op,
            cost_ns=(*op.cost_ns, *(None for _ in range(others))),
            workspace_bytes=(*op.workspace_bytes, *(0 for _ in range(others))),
        )
        if op.is_external
        else same
        for op, same in zip(graph.ops, known.ops, strict=True)
    ]
    storages = list(graph.storages)
    for op in graph.ops:
        if not op.is_external:
            for storage in op.writes:
                storages[storage] = known.storages[storage]
    return replace(
        graph,
        ops=tuple(ops),
        storages=tuple(storages),
        device_kinds=known.device_kinds,
    )


def _rounded(storages: Sequence[Storage], granule_bytes: int) -> Iterable[Storage]:
    for storage in storages:
        yield replace(storage, size_bytes=round_up(storage.size_bytes, granule_bytes))


def _fake_arguments(
    program: JointProgram, node: torch.fx.Node
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def value(argument: torch.fx.Node) -> Any:
        return example_value(program.module, argument)

    return map_nodes(tuple(node.args), value), map_nodes(dict(node.kwargs), value)


def _check_alias(op: Op, cost: OperatorCost) -> None:
    if cost.aliases_input:
        msg = (
            f"operator {op.name} returns a view of its input although its schema says "
            f"it does not, so it cannot be planned safely ({op.source})"
        )
        raise CaptureError(msg)
