"""What a model returns, as its caller will see it, made of fake tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.capture.returned import ReturnedTensor
from remat.capture.tracing import compiled_entry


@dataclass(frozen=True, kw_only=True)
class FakeOutputs:
    """A model's outputs without memory.

    Parameters
    ----------
    value
        What the model returns: a tensor or any object that holds tensors.
    tensors
        The fake tensors in it, wherever they are; those that take a gradient are
        leaves. What the model returns as it was given to it is real, and not among
        them.
    mode
        The mode that the fake tensors belong to; it takes real tensors, too.
    """

    value: Any
    tensors: Sequence[torch.Tensor]
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

    def return_fakes(module: fx.GraphModule, _example_inputs: Sequence[Any]) -> Any:
        (output,) = module.graph.find_nodes(op="output")
        values = [node.meta["example_value"] for node in output.args[0]]

        def run(*_inputs: Any) -> list[torch.Tensor]:
            made.extend(fake_like(value, mode) for value in values)
            return list(made)

        return run

    with (
        torch._dynamo.config.patch(replay_side_effects=False),
        torch.enable_grad(),
    ):
        value = compiled_entry(model, return_fakes)(*args, **kwargs)
    return FakeOutputs(value=value, tensors=made, mode=mode)


def fake_output(returned: ReturnedTensor) -> FakeOutputs:
    """Return the one tensor that a model was seen to return."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    value = fake_like(returned, mode)
    return FakeOutputs(value=value, tensors=[value], mode=mode)


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
