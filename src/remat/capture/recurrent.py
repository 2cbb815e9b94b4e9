"""``nn.LSTM`` on the CPU, traced as what eager PyTorch runs: one operator a layer.

By default the tracer refuses recurrent modules; if made to take them, it writes their loop
over time out, in thousands of operators that round otherwise. Eager PyTorch runs each layer
and direction of an ``nn.LSTM`` by one kernel of oneDNN, whose backward pass is one as well,
and so do traced steps: then layers are recomputed, kept and measured as any operator. What
oneDNN does not take (:func:`_is_of_kernels`), and all of ``nn.GRU`` and ``nn.RNN``, splits
the graph.
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
    disable_current_modes,
    dynamo_config,
    no_python_dispatcher,
    tree_map_only,
    unset_fake_temporarily,
)
from remat.torch_compat.patches import ThreadKernels

_aten = torch.ops.aten

_LSTM = _aten.lstm.input
_LAYER = _aten.mkldnn_rnn_layer.default
_WORKSPACE = 3
"""Which result of a layer is what its backward pass needs besides."""

_LIBRARY = torch.library.Library("remat", "FRAGMENT")
_LIBRARY.define(
    str(schema_of(_LAYER)).replace("aten::mkldnn_rnn_layer", "lstm_layer"),
    tags=(torch.Tag.pt2_compliant_tag,),
)

_splits: ContextVar[bool] = ContextVar("_splits", default=False)


def _run_layer(*args: Any) -> Any:
    """Run a layer, and keep what its backward pass needs.

    The kernel does so if gradients are on; a graph runs with gradients off.
    """
    with torch.enable_grad(), BelowAutograd():
        return _LAYER(*args)


_LIBRARY.impl("lstm_layer", _run_layer, "CPU")
_LIBRARY.impl("lstm_layer", _LAYER, "Meta")


def _lstm(theirs: Callable[..., Any], *args: Any) -> Any:
    if _is_of_kernels(*args[:3]):
        return composite_kernel(_LSTM)(*args)
    return _refused(_LSTM)(theirs, *args)


def _is_of_kernels(
    values: torch.Tensor, hidden: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
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


def recurrent_layers(model: nn.Module) -> AbstractContextManager[None]:
    """Let a model's call be traced into its recurrent modules, or be split at them."""
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return _splitting() if is_recurrent else nullcontext()


@contextmanager
def _splitting() -> Generator[None]:
    before = _splits.set(True)
    try:
        with dynamo_config.patch(allow_rnn=True), _KERNELS.seen():
            yield
    finally:
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


def keep_workspaces(joint: fx.GraphModule) -> None:
    """Let the layers of a joint graph keep what their backward passes need, in place.

    The tracer's formula knows nothing of its size; each layer is run once, on zeros.
    """
    for node in joint.graph.find_nodes(op="call_function", target=_LAYER):
        node.target = torch.ops.remat.lstm_layer.default
        values = node.meta["val"]
        size_bytes = _workspace_bytes(node)
        with values[0].fake_mode:
            workspace = values[_WORKSPACE].new_empty(size_bytes)
        node.meta["val"] = (*values[:_WORKSPACE], workspace)
        for user in node.users:
            if user.args[1] == _WORKSPACE:
                user.meta["val"] = workspace
    joint.recompile()


def _workspace_bytes(node: fx.Node) -> int:
    """Return the size of what a layer keeps."""
    args = fx.map_arg(node.args, lambda argument: argument.meta["val"])
    with unset_fake_temporarily(), disable_current_modes(), no_python_dispatcher():
        return _run_layer(*tree_map_only(torch.Tensor, _zeros, args))[_WORKSPACE].nbytes


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype)
