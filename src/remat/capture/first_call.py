"""What libraries prepare when a model is first called, done before it is traced.

Some install hooks at the first call, under a lock, where the tracer cannot follow. A
call on fake tensors installs them, too, and computes nothing.
"""

import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from remat.capture.captured import reached_put_back
from remat.torch_compat.attributes import plain_call
from remat.torch_compat.names import (
    FakeTensor,
    FakeTensorMode,
    preserve_rng_state,
    tree_leaves,
    tree_map_only,
)

_prepared: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()


def prepared_count(model: nn.Module) -> int:
    """Return how often :func:`prepare` was called for a model."""
    return _prepared.get(model, 0)


class _Plain(nn.Module):
    """Calls a model as Python does, whatever was compiled or fitted for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return plain_call(self.model)(*args, **kwargs)


def prepare(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call a model once on fake tensors, so that it prepares what it prepares once.

    Parameters, buffers, gradients and random state stay as they are, and so does every
    attribute that would hold a fake tensor. Hooks of the model run, on fake tensors; if
    they keep any, what they reach is put back.

    Notes
    -----
    A call that needs values ends early. What it has prepared until then mostly
    suffices; the trace that follows finds out.
    """
    _prepared[model] = prepared_count(model) + 1
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(tensor.detach())

    plain = _Plain(model)
    state = {
        name: fake(tensor)
        for named in (plain.named_parameters(), plain.named_buffers())
        for name, tensor in named
    }
    inputs = tree_map_only(torch.Tensor, fake, (args, dict(kwargs)))
    with (
        _without_fakes(model),
        reached_put_back(model, lambda value: isinstance(value, FakeTensor)),
        preserve_rng_state(),
        torch.no_grad(),
        mode,
        # Whatever a model raises that looks for values.
        suppress(Exception),
    ):
        functional_call(plain, state, *inputs)


@contextmanager
def _without_fakes(model: nn.Module) -> Generator[None]:
    """Put attributes that hold fake tensors at the end back as they were."""
    before = {
        module: {name: (value, _items(value)) for name, value in vars(module).items()}
        for module in model.modules()
    }
    try:
        yield
    finally:
        for module, attributes in before.items():
            for name, value in dict(vars(module)).items():
                if not _has_fakes(value):
                    continue
                if name not in attributes:
                    del vars(module)[name]
                    continue
                vars(module)[name], items = attributes[name]
                if isinstance(items, list):
                    attributes[name][0][:] = items
                elif isinstance(items, dict):
                    attributes[name][0].clear()
                    attributes[name][0].update(items)


def _items(value: Any) -> Any:
    """Return what a list or a mapping holds now, ``None`` of anything else."""
    return value.copy() if isinstance(value, list | dict) else None


def _has_fakes(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))
