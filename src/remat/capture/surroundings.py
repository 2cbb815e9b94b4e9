"""What lives and runs around the traced step: parameters, optimizer, loss, batch."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from remat.capture.joint_program import InputSpec, JointProgram
from remat.graph import Op, Phase, Role, Storage, TrainingGraph

SCALARS_BYTES = 512
"""Set aside for the loss and other scalars that the caller and autograd hold."""

FREES_TANGENTS = TorchVersion(torch.__version__) >= "2.13"
"""Whether compiled backwards own the incoming gradients and free each at its last use.

Since 2.13 they do; before, autograd is taken to hold them until backward returns.
"""

_ITEM = re.compile(r"\['([^']*)'\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Memory and work of a training step outside the traced graph.

    Parameters
    ----------
    resident_bytes
        Bytes, per role, of everything that is on the device during the whole step,
        what the graph itself reads included.
    loss_peak_bytes
        Most bytes that the caller's work between forward and backward adds to the
        outputs, their gradients included.
    loss_held_bytes
        The part of these that stays until the end of the step: the loss value.
    optimizer_workspace_bytes
        Most bytes that the optimizer's step adds.
    """

    resident_bytes: Mapping[Role, int] = field(default_factory=dict[Role, int])
    loss_peak_bytes: int = 0
    loss_held_bytes: int = 0
    optimizer_workspace_bytes: int = 0


def storage_bytes(values: Iterable[Any], device: torch.device) -> int:
    """Return the bytes of the distinct storages behind the tensors in ``values``."""
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in values
        if isinstance(tensor, torch.Tensor) and tensor.device.type == device.type
    }
    return sum(sizes.values())


def tensors_in(items: Any) -> list[torch.Tensor]:
    """Return the tensors nested in ``items``."""
    return [leaf for leaf in tree_leaves(items) if isinstance(leaf, torch.Tensor)]


def existing_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that a leaf holds, or ``None``."""
    return tensor.grad if tensor.is_leaf else None


def plain_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return tensors that modules hold as plain attributes.

    Some modules keep what they computed last, such as a normalised weight.
    """
    return [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor)
    ]


def resident_bytes(
    model: nn.Module | None,
    batch: Any,
    optimizer_state_bytes: int,
    device: torch.device,
    *,
    counts_gradients: bool,
) -> dict[Role, int]:
    """Return the bytes on ``device`` during the whole step, per role.

    With ``counts_gradients``, gradients that exist now are counted: they stay while new
    ones are computed (gradient accumulation).
    """
    sizes: dict[Role, int] = {}
    inputs = tensors_in(batch)
    gradients = [existing_gradient(tensor) for tensor in inputs]
    if model is not None:
        parameters = list(model.parameters())
        gradients += [p.grad for p in parameters]
        inputs += plain_tensors(model)
        sizes[Role.PARAMETER] = storage_bytes(parameters, device)
        sizes[Role.BUFFER] = storage_bytes(model.buffers(), device)
    if counts_gradients:
        sizes[Role.GRADIENT] = storage_bytes(gradients, device)
    sizes[Role.INPUT] = storage_bytes(inputs, device)
    sizes[Role.OPTIMIZER_STATE] = optimizer_state_bytes
    return sizes


def captured_tensors(function: Any) -> list[torch.Tensor]:
    """Return the tensors that a function closes over, names globally, or has bound."""
    cells = [
        cell.cell_contents for cell in getattr(function, "__closure__", None) or ()
    ]
    bound = [getattr(function, "args", ()), getattr(function, "keywords", {})]
    defaults = list(getattr(function, "__defaults__", None) or ())
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_names
    namespace = getattr(function, "__globals__", {})
    used = [namespace[name] for name in names if name in namespace]
    return tensors_in([cells, bound, defaults, used])


def describe_input(source: str) -> InputSpec:
    """Return what the tracer's name of an input stands for.

    Examples
    --------
    >>> describe_input("L['self']._modules['fc']._parameters['weight']")
    InputSpec(name='fc.weight', role=<Role.PARAMETER: 'parameter'>)
    >>> describe_input("L['args'][0]").role
    <Role.INPUT: 'input'>
    """
    parts = _ITEM.findall(source)
    if "._parameters[" in source:
        return InputSpec(".".join(parts[1:]), Role.PARAMETER)
    if "._buffers[" in source:
        return InputSpec(".".join(parts[1:]), Role.BUFFER)
    return InputSpec(source.replace("L['", "").replace("']", "", 1), Role.INPUT)


def add_surroundings(program: JointProgram, surroundings: Surroundings) -> JointProgram:
    """Return the program with residents and outside work added to its graph.

    The loss becomes the last forward op, the optimizer's step the last backward op;
    both are external: they occupy memory, but nothing in the traced graph runs them.
    """
    graph = program.graph
    loss_value = len(graph.storages)
    storages = [
        *graph.storages,
        Storage(
            name="loss value",
            size_bytes=surroundings.loss_held_bytes,
            role=Role.OUTPUT,
        ),
        Storage(
            name="scalars of loss and autograd",
            size_bytes=SCALARS_BYTES,
            role=Role.OUTPUT,
            is_resident=True,
        ),
        *_missing_residents(graph, surroundings),
    ]
    forward = graph.forward_count
    loss = _external_op(
        "work between forward and backward (loss)",
        Phase.FORWARD,
        # Not all of them are held by the caller, but all exist before the loss begins.
        reads=graph.forward_outputs,
        writes=(loss_value,),
        workspace_bytes=surroundings.loss_peak_bytes - surroundings.loss_held_bytes,
    )
    held_tangents = () if FREES_TANGENTS else graph.tangents
    step = _external_op(
        "optimizer step",
        Phase.BACKWARD,
        reads=graph.final_outputs,
        writes=(),
        workspace_bytes=surroundings.optimizer_workspace_bytes,
    )
    return replace(
        program,
        graph=replace(
            graph,
            storages=tuple(storages),
            ops=(*graph.ops[:forward], loss, *graph.ops[forward:], step),
            forward_outputs=(*graph.forward_outputs, loss_value),
            final_outputs=(*graph.final_outputs, *held_tangents, loss_value),
        ),
        op_nodes=[
            *program.op_nodes[:forward],
            None,
            *program.op_nodes[forward:],
            None,
        ],
        random_states={
            op + (op >= forward): state for op, state in program.random_states.items()
        },
    )


def _missing_residents(
    graph: TrainingGraph, surroundings: Surroundings
) -> list[Storage]:
    """Return storages for resident bytes that no input of the graph accounts for."""
    counted: dict[Role, int] = {}
    for storage in graph.storages:
        if storage.is_resident:
            counted[storage.role] = counted.get(storage.role, 0) + storage.size_bytes
    missing: list[Storage] = []
    for role, size_bytes in surroundings.resident_bytes.items():
        extra = size_bytes - counted.get(role, 0)
        if extra > 0:
            missing.append(
                Storage(
                    name=f"{role} outside the graph",
                    size_bytes=extra,
                    role=role,
                    is_resident=True,
                )
            )
    return missing


def _external_op(
    name: str,
    phase: Phase,
    *,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    workspace_bytes: int,
) -> Op:
    return Op(
        name=name,
        reads=reads,
        writes=writes,
        cost_ns=(0,),
        workspace_bytes=(workspace_bytes,),
        phase=phase,
        non_recomputable="it is done by the caller",
        is_external=True,
    )
