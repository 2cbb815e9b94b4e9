"""Optimizers of one parameter each, that step in backward.

A hook of each parameter (``register_post_accumulate_grad_hook``) steps its optimizer as
soon as the gradient has been added up, and lets the gradient go. So gradients of all
parameters are never there together, and the optimizer's step takes what that of one
parameter takes.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer

from remat.profile.optimizer_copy import stepping_optimizer
from remat.profile.optimizer_memory import optimizer_bytes
from remat.torch_compat.sharding import Division

Kind: TypeAlias = tuple[torch.Size, torch.dtype]
"""What tells apart the steps of one parameter each: its shape and type."""


class OptimizerMemory(NamedTuple):
    """What an optimizer takes.

    Parameters
    ----------
    state_bytes
        Bytes of its state.
    step_bytes
        Most bytes that its step takes beyond that, when backward has returned.
    in_backward
        What the steps of single parameters take that happen in backward, by their
        shapes and types.
    """

    state_bytes: int = 0
    step_bytes: int = 0
    in_backward: tuple[tuple[Kind, int], ...] = ()


def optimizer_memory(
    optimizer: Optimizer | None, gradients: Mapping[int, Division] | None = None
) -> OptimizerMemory:
    """Return what an optimizer takes.

    ``gradients`` says, by the id of a parameter, how its gradient is divided among
    processes if otherwise than itself. Those that step in backward have none divided.

    Raises
    ------
    CaptureError
        If the optimizer's step cannot be predicted without running it.
    """
    if optimizer is None:
        return OptimizerMemory()
    if isinstance(optimizer, OptimizersInBackward):
        return optimizer.memory()
    return OptimizerMemory(*optimizer_bytes(optimizer, gradients=gradients))


class OptimizersInBackward(Optimizer):
    """Many optimizers as one, of which each steps in backward by itself.

    Parameters
    ----------
    optimizers
        Per parameter the optimizer of that alone.

    Raises
    ------
    TypeError
        If a key is no tensor or a value no optimizer.
    ValueError
        If there is none, or an optimizer steps another parameter than its key.
    """

    def __init__(self, optimizers: Mapping[Any, Any]) -> None:
        # The state is that of the optimizers: there is nothing to set up.
        for parameter, optimizer in optimizers.items():
            _check(parameter, optimizer)
        if not optimizers:
            msg = "optimizer= is an empty mapping; give the optimizer of each parameter"
            raise ValueError(msg)
        self.optimizers = list(map(stepping_optimizer, optimizers.values()))
        # One group for all: they are looked at before each call.
        self.param_groups = [{"params": list(optimizers)}]

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """The state of all, by parameter."""
        return {p: state for each in self.optimizers for p, state in each.state.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "OptimizersInBackward":
        """Return one of copies; optimizers pickle nothing but groups and state."""
        optimizers = copy.deepcopy(self.optimizers, memo)
        parameters = copy.deepcopy(self.param_groups[0]["params"], memo)
        return OptimizersInBackward(dict(zip(parameters, optimizers, strict=True)))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: each has stepped in backward."""

    def memory(self) -> OptimizerMemory:
        """Return the bytes of all states, and what the steps of parameters take.

        Equal optimizers of equal parameters are looked at once. Raises what
        :func:`~remat.profile.optimizer_memory.optimizer_bytes` raises.
        """
        known: dict[Any, tuple[int, int]] = {}
        step_bytes: dict[Kind, int] = {}
        all_bytes = 0
        for optimizer in self.optimizers:
            (parameter,) = (p for g in optimizer.param_groups for p in g["params"])
            kind = parameter.shape, parameter.dtype
            group = {
                k: v for k, v in optimizer.param_groups[0].items() if k != "params"
            }
            key = (
                type(optimizer),
                *kind,
                parameter.stride(),
                parameter.device,
                parameter.requires_grad,
                len(optimizer.state),
                repr(group),
            )
            if key not in known:
                known[key] = optimizer_bytes(optimizer)
            state_bytes, workspace_bytes = known[key]
            all_bytes += state_bytes
            step_bytes[kind] = max(workspace_bytes, step_bytes.get(kind, 0))
        return OptimizerMemory(all_bytes, 0, tuple(step_bytes.items()))


def _check(parameter: Any, optimizer: Any) -> None:
    what = (
        "optimizer= as a mapping has the optimizer of each parameter that steps in "
        "backward, such as {p: AdamW([p]) for p in model.parameters()}"
    )
    if not isinstance(parameter, torch.Tensor):
        msg = f"{what}; it has a {type(parameter).__name__} where a parameter is needed"
        raise TypeError(msg)
    if not isinstance(optimizer, Optimizer):
        msg = (
            f"{what}; it has a {type(optimizer).__name__} where an optimizer is needed"
        )
        raise TypeError(msg)
    stepped = [
        p
        for group in stepping_optimizer(optimizer).param_groups
        for p in group["params"]
    ]
    if len(stepped) != 1 or stepped[0] is not parameter:
        msg = (
            f"{what}; that of a parameter of shape {tuple(parameter.shape)} steps "
            f"{len(stepped)} parameters, or another one"
        )
        raise ValueError(msg)
