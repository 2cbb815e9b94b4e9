"""What a model returns, as its caller will see it, made of fake tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from remat.capture.returned import ReturnedTensor
from remat.capture.tracing import compiled_entry
from remat.torch_compat.attributes import storage_identity, view_again, viewed
from remat.torch_compat.metadata import example_of
from remat.torch_compat.names import FakeTensorMode


@dataclass(frozen=True, kw_only=True)
class FakeOutputs:
    """A model's outputs without memory.

    Parameters
    ----------
    value
        What the model returns: a tensor or any object that holds tensors.
    tensors
        The fake tensors in it, wherever they are. What the model returns as it was
        given to it is real, and not among them.
    leaves
        What the traced step takes the gradients of: of each tensor that takes one the
        tensor itself, or what it is a view of, where the tracer leaves such views to
        autograd.
    mode
        The mode that the fake tensors belong to; it takes real tensors, too.
    """

    value: Any
    tensors: Sequence[torch.Tensor]
    leaves: Sequence[torch.Tensor]
    mode: FakeTensorMode


def fake_outputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> FakeOutputs:
    """Return what the model returns, made of fake tensors; nothing is computed.

    The call is traced, hooks included, and only what builds the returned object runs:
    hooks are not called, and whatever forward changes stays as it is.

    Notes
    -----
    Types are those under the autocast that is on.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: list[torch.Tensor] = []
    leaves: list[torch.Tensor] = []

    def return_fakes(module: fx.GraphModule, _example_inputs: Sequence[Any]) -> Any:
        (output,) = module.graph.find_nodes(op="output")
        values = [example_of(node) for node in output.args[0]]

        def run(*_inputs: Any) -> list[torch.Tensor]:
            fakes, bases = fakes_like(values, mode)
            made.extend(fakes)
            leaves.extend(fake for fake in fakes if fake.is_leaf)
            leaves.extend(bases)
            return fakes

        return run

    entry = compiled_entry(
        model, return_fakes, settings=lambda: {"replay_side_effects": False}
    )
    with torch.enable_grad():
        value = entry(*args, **kwargs)
    return FakeOutputs(value=value, tensors=made, leaves=leaves, mode=mode)


def fake_output(returned: ReturnedTensor) -> FakeOutputs:
    """Return the one tensor that a model was seen to return."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    value = fake_like(returned, mode)
    return FakeOutputs(value=value, tensors=[value], leaves=[value], mode=mode)


def fakes_like(
    values: Sequence[torch.Tensor], mode: FakeTensorMode
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return fakes of a model's outputs, and what those that are no leaves view.

    Where outputs are views of one value, the step returns that value and autograd views
    it again, so that a caller may change them in place; it also takes the gradients
    apart again. Single views and those that one operator makes together, which nobody
    may change, are outputs of the step like others.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for value in values:
        groups.setdefault(storage_identity(value), []).append(value)
    are_viewed_again = {
        storage: sum(not _is_one_of_many_views(value) for value in group) > 1
        for storage, group in groups.items()
    }
    # A value may be an output next to its views.
    sources = {id(v): fake_like(v, mode) for v in values if viewed(v) is None}
    fakes: list[torch.Tensor] = []
    bases: dict[int, torch.Tensor] = {}
    for value in values:
        base = viewed(value)
        if base is None:
            fakes.append(sources[id(value)])
        elif (
            are_viewed_again[storage_identity(value)]
            and value.requires_grad
            and base.requires_grad
        ):
            source = sources.get(id(base))
            if source is None:
                source = bases.setdefault(id(base), fake_like(base, mode))
            # Unchecked: the check would ask the mode of one about the other.
            fakes.append(view_again(value, source))
        else:
            fakes.append(fake_like(value, mode))
    return fakes, list(bases.values())


@cache
def _makers_of_many_views() -> tuple[type, ...]:
    """Return the classes of autograd's nodes of operators that make several views."""
    with torch.enable_grad():
        whole = torch.ones(2, device="cpu", requires_grad=True)
        views = (whole.split(1)[0], whole.split([1, 1])[0], whole.unbind()[0])
    return tuple(type(view.grad_fn) for view in views)


def _is_one_of_many_views(value: torch.Tensor) -> bool:
    """Return whether an operator that makes several views had part in this one."""
    base = viewed(value)
    if base is None:
        return False
    made_by, source = value.grad_fn, base.grad_fn
    while made_by is not None and made_by is not source:
        if isinstance(made_by, _makers_of_many_views()):
            return True
        made_by = made_by.next_functions[0][0] if made_by.next_functions else None
    return False


def fake_like(
    tensor: torch.Tensor | ReturnedTensor, mode: FakeTensorMode
) -> torch.Tensor:
    """Return a fake leaf of the tensor's shape, which takes a gradient if it does."""
    is_noted = isinstance(tensor, ReturnedTensor)
    with mode:
        return torch.empty_strided(
            tensor.shape,
            tensor.stride if is_noted else tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
