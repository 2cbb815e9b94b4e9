"""Costs of a traced step: time, workspace and true sizes of every operator."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from remat.capture.joint_program import JointProgram, map_nodes
from remat.errors import CaptureError
from remat.graph import Op, Storage, TrainingGraph
from remat.profile.cache import CostCache
from remat.profile.estimate import estimate_operators, measure_rates
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
    calls = [
        OperatorCall(
            cast("Callable[..., Any]", node.target), *_fake_arguments(program, node)
        )
        for _, node in program.calls()
    ]
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


def with_known_costs(graph: TrainingGraph, known: TrainingGraph) -> TrainingGraph:
    """Return ``graph`` with the costs and sizes of an equal graph.

    What surrounds the step (residents, loss, optimizer) stays that of ``graph``.
    """
    ops = [
        op if op.is_external else same
        for op, same in zip(graph.ops, known.ops, strict=True)
    ]
    storages = list(graph.storages)
    for op in graph.ops:
        if not op.is_external:
            for storage in op.writes:
                storages[storage] = known.storages[storage]
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


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
