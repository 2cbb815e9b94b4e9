"""Which of the user's modules an operator of a traced step belongs to."""

import re
from collections.abc import Mapping
from typing import Any

from torch import fx

_ROOT = re.compile(r"\AL\['\w+'\](?:\.__self__)?")
_ITEM = re.compile(r"(?:\._modules)?\[['\"]?([^'\"\]]+)['\"]?\]")


_ORIGIN = (
    "partitioner_tag",
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
)


def origin_of(node: fx.Node) -> dict[str, Any]:
    """Return what ``meta`` says of a node's pass, module and source line.

    A node that takes its place says the same.
    """
    return {key: node.meta[key] for key in _ORIGIN if key in node.meta}


def layer_name(node: fx.Node) -> str:
    """Return the path of the innermost module that made a node, or ``""``.

    An operator of the backward pass belongs to the module whose forward pass it
    differentiates, and says so.
    """
    forward = _path(node.meta.get("nn_module_stack"))
    if forward:
        return forward
    backward = _path(node.meta.get("fwd_nn_module_stack"))
    return f"{backward} backward" if backward else ""


def _path(stack: Mapping[Any, tuple[str, Any]] | None) -> str:
    """Return the last path of the tracer's stack of modules, as the user writes it.

    Examples
    --------
    >>> _path({"a": ("L['model'].blocks.0", None)})
    'blocks.0'
    >>> _path({"a": ("L['self']._modules['blocks']._modules['0']", None)})
    'blocks.0'
    >>> _path({"a": ("L['run'].__self__._modules['blocks']", None)})
    'blocks'
    >>> _path({"a": ("L['model']", None)}), _path(None)
    ('', '')
    """
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _ITEM.sub(r".\1", _ROOT.sub("", path)).strip(".")
