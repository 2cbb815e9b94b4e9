"""Costs of a traced step: time, workspace and true sizes of every operator."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from remat.capture.joint_program import (
    JointProgram,
    map_nodes,
    moot_positions,
    needed_arguments,
)
from remat.device_graph import CostColumn, nowhere, place_of, scaled, with_columns
from remat.errors import CaptureError, ProfileError
from remat.graph import Op, Storage, TrainingGraph
from remat.platform import DeviceKind, Platform
from remat.profile.cache import CostCache
from remat.profile.estimate import Rates, estimate_operators, measure_rates
from remat.profile.operators import OperatorCall, OperatorCost, profile_operators
from remat.solvers.base import ProgressCallback
from remat.units import round_up

Costs = Literal["measured", "estimated"]

ALLOCATION_GRANULES_BYTES = {"cuda": 512}
"""Device kind -> the multiple to which its allocator rounds every block up."""


def with_costs(
    program: JointProgram, costs: Costs, on_progress: ProgressCallback
) -> TrainingGraph:
    """Return the program's graph with what every operator costs.

    Besides time and workspace, the sizes of storages are set to what the operators
    really allocate: some fake kernels promise smaller blocks than the real ones make.

    Raises
    ------
    CaptureError
        If an operator returns a view of its input although its schema denies it.
    ProfileError
        If an operator cannot be run alone.
    """
    indices = [index for index, _ in program.calls()]
    calls = _calls(program)
    cache = CostCache()
    if costs == "measured":
        found = profile_operators(calls, cache=cache, on_progress=on_progress)
    else:
        found = estimate_operators(calls, measure_rates(program.device, cache=cache))
    ops = list(program.graph.ops)
    storages = list(program.graph.storages)
    for index, cost in zip(indices, found, strict=True):
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
    granule = ALLOCATION_GRANULES_BYTES.get(program.device.type, 1)
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
) -> TrainingGraph:
    """Return the graph with what every operator costs on each device of a platform.

    On logical devices of home's place the costs are those at home, and so are sizes and
    workspace; time is scaled by the kind's ``time_percent``, or estimated from its
    rates. On another place the operators are measured or estimated there; one that
    cannot run there alone has no cost there.

    Parameters
    ----------
    program
        The traced step.
    graph
        Its graph with the costs at home, from :func:`with_costs`.
    platform
        From :func:`remat.device_graph.arrange`.
    costs
        Whether to measure or to estimate on other places.
    on_progress
        Called while operators are measured.

    Raises
    ------
    InvalidPlatformError
        If an operator can run on no device.
    ProfileError
        If an operator cannot be traced for an estimate.
    """
    at_home = CostColumn(
        cost_ns=tuple(op.cost_ns[0] for op in graph.ops),
        workspace_bytes=tuple(op.workspace_bytes[0] for op in graph.ops),
    )
    sizes: dict[int, int] = {}
    columns: list[CostColumn] = []
    for device, name in enumerate(platform.names):
        kind, place = platform.kind_of(device), place_of(platform, device)
        if not kind.computes:
            columns.append(nowhere(len(graph.ops)))
            continue
        column = at_home
        if place not in {None, place_name(program.device)}:
            on_progress(f"operators on {name}", 0.0)
            column = _column_elsewhere(
                program, graph, cast("str", place), costs, sizes, on_progress
            )
        if kind.has_rates:
            column = _estimated(program, column, kind)
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


def _column_elsewhere(
    program: JointProgram,
    graph: TrainingGraph,
    place: str,
    costs: Costs,
    sizes: dict[int, int],
    on_progress: ProgressCallback,
) -> CostColumn:
    """Return what the ops cost on a place other than the step's own.

    ``sizes`` grows by the bytes that their outputs take there, per storage.
    """
    device = torch.device(place)
    cost_ns: list[int | None] = [None] * len(graph.ops)
    workspaces = [0] * len(graph.ops)
    cache = CostCache()
    rates = None if costs == "measured" else measure_rates(device, cache=cache)
    indices = [index for index, _ in program.calls()]
    granule = ALLOCATION_GRANULES_BYTES.get(device.type, 1)
    calls = _calls(program)
    for position, (index, call) in enumerate(zip(indices, calls, strict=True)):
        if graph.ops[index].is_ordered:
            continue  # Its random numbers come from the generator at home.
        on_progress(graph.ops[index].name, position / len(calls))
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


def _moved(
    call: OperatorCall, source: torch.device, target: torch.device
) -> OperatorCall:
    """Return a call whose tensors and device arguments are on another device."""

    def on_target(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device == source:
            if isinstance(value, FakeTensor):
                with value.fake_mode:
                    return _empty_like_on(value, target)
            return _empty_like_on(value, target)
        return target if value == source else value

    args, kwargs = tree_map(on_target, (call.args, dict(call.kwargs)))
    return OperatorCall(call.target, args, cast("Mapping[str, Any]", kwargs))


def _empty_like_on(value: torch.Tensor, target: torch.device) -> torch.Tensor:
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=target
    )


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
        if argument.op == "get_attr":
            return getattr(program.module, str(argument.target))
        return argument.meta["val"]

    return map_nodes(tuple(node.args), value), map_nodes(dict(node.kwargs), value)


def _check_alias(op: Op, cost: OperatorCost) -> None:
    if cost.aliases_input:
        msg = (
            f"operator {op.name} returns a view of its input although its schema says "
            f"it does not, so it cannot be planned safely ({op.source})"
        )
        raise CaptureError(msg)
