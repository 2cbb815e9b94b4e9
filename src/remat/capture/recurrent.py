"""``nn.LSTM`` on the CPU, traced as what eager PyTorch runs: one operator a layer.

By default the tracer refuses recurrent modules; if made to take them, it writes their
loop over time out, in thousands of operators that round otherwise. Eager PyTorch runs
each layer and direction of an ``nn.LSTM`` by one kernel of oneDNN, whose backward pass
is one as well, and so do traced steps: then layers are recomputed, kept and measured as
any operator. What oneDNN does not take (:func:`_is_of_kernels`), and all of ``nn.GRU``
and ``nn.RNN``, splits the graph. So does every layer in several graphs whose sizes are
said to vary: else its first size would be cut otherwise than all later ones.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn

from remat.torch_compat.attributes import composite_kernel, schema_of
from remat.torch_compat.names import (
    BelowAutograd,
    UnsupportedOperatorException,
    no_dispatch,
    tree_map_only,
)
from remat.torch_compat.patches import ThreadKernels, tracer_settings

_aten = torch.ops.aten

_LSTM = _aten.lstm.input
_LAYER = _aten.mkldnn_rnn_layer.default
_LAYER_BACKWARD = _aten.mkldnn_rnn_layer_backward.default

_FIRST_BIAS = 3
"""Which of a layer's gradients is that of the first of its two biases."""

_LIBRARY = torch.library.Library("remat", "FRAGMENT")
for _operator, _name in (
    (_LAYER, "lstm_layer"),
    (_LAYER_BACKWARD, "lstm_layer_backward"),
):
    _LIBRARY.define(
        _name + str(schema_of(_operator)).removeprefix(_operator.name()),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
RUNNABLE: dict[Any, Any] = {
    _LAYER: torch.ops.remat.lstm_layer.default,
    _LAYER_BACKWARD: torch.ops.remat.lstm_layer_backward.default,
}
"""Operator of a layer -> one that may be called by itself, and does the same."""

_splits: ContextVar[bool] = ContextVar("_splits", default=False)
_takes_layers: ContextVar[bool] = ContextVar("_takes_layers", default=True)


def _run_layer(*args: Any) -> Any:
    """Run a layer, and keep what its backward pass needs.

    The kernel does so if gradients are on; a graph runs with gradients off.
    """
    with torch.enable_grad(), BelowAutograd():
        return _LAYER(*args)


def _run_layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    return _apart(_LAYER_BACKWARD(*args))


def _apart(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return gradients of which no two are one tensor.

    Those of the two biases are, and each will be the gradient of a parameter.
    """
    place = _FIRST_BIAS + 1
    copy = gradients[_FIRST_BIAS].clone()
    return *gradients[:place], copy, *gradients[place + 1 :]


_LIBRARY.impl("lstm_layer", _run_layer, "CPU")
_LIBRARY.impl("lstm_layer_backward", _run_layer_backward, "CPU")


def _lstm(theirs: Callable[..., Any], *args: Any) -> Any:
    if _takes_layers.get() and _is_of_kernels(*args[:3]):
        return composite_kernel(_LSTM)(*args)
    return _refused(_LSTM)(theirs, *args)


def _is_of_kernels(
    values: torch.Tensor,
    hidden: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> bool:
    """Whether eager PyTorch runs an LSTM by kernels of oneDNN, and bits are known.

    Then it is on the CPU, in single precision, without projections.
    """
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
        and all(
            tensor.device.type == "cpu" and tensor.dtype == torch.float32
            for tensor in (values, *hidden, *weights)
        )
        # Sizes that vary are not for these kernels.
        and all(isinstance(size, int) for size in values.shape)
        and values.numel() > 0
        and hidden[0].shape[2] == hidden[1].shape[2]
    )


def _refused(operator: Any) -> Callable[..., Any]:
    def kernel(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _splits.get():
            raise UnsupportedOperatorException(operator)
        return theirs(*args, **kwargs)

    return kernel


_REFUSED = (
    _aten.lstm.data,
    _aten.gru.input,
    _aten.gru.data,
    _aten.rnn_tanh.input,
    _aten.rnn_tanh.data,
    _aten.rnn_relu.input,
    _aten.rnn_relu.data,
)
_KERNELS = ThreadKernels({_LSTM: _lstm} | {op: _refused(op) for op in _REFUSED})


def recurrent_layers(
    model: nn.Module, *, takes_layers: bool = True
) -> AbstractContextManager[None]:
    """Let a model's call be traced into its recurrent modules, or be split at them.

    At all of them if it does not take any layer.
    """
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return _splitting(takes_layers=takes_layers) if is_recurrent else nullcontext()


@contextmanager
def _splitting(*, takes_layers: bool) -> Generator[None]:
    before, taken_before = _splits.set(True), _takes_layers.set(takes_layers)
    try:
        with tracer_settings(allow_rnn=True), _KERNELS.seen():
            yield
    finally:
        _takes_layers.reset(taken_before)
        _splits.reset(before)


@contextmanager
def whole_layers() -> Generator[None]:
    """Trace layers of an ``nn.LSTM`` as the operators that eager PyTorch runs."""
    before = _splits.set(False)
    try:
        with _KERNELS.seen():
            yield
    finally:
        _splits.reset(before)


def _with_workspace(
    results: Sequence[torch.Tensor], *args: Any
) -> tuple[torch.Tensor, ...]:
    """Return what a layer makes, with all that it keeps for its backward pass.

    The tracer's formula knows nothing of its size: the layer is run once, on zeros.
    """
    with no_dispatch():
        reals = _run_layer(*tree_map_only(torch.Tensor, _zeros, args))
    return *results[:-1], results[-1].new_empty(reals[-1].shape)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


REAL_RESULTS: dict[Any, Callable[..., tuple[torch.Tensor, ...]]] = {
    _LAYER: _with_workspace,
    _LAYER_BACKWARD: lambda results, *_args: _apart(results),
}
"""Operator -> from the tracer's results and the arguments to those that there are."""


def run_layers(joint: fx.GraphModule) -> None:
    """Let the layers of a joint graph run here as they are traced, in place."""
    for operator, ours in RUNNABLE.items():
        for node in joint.graph.find_nodes(op="call_function", target=operator):
            node.target = ours
    joint.recompile()
