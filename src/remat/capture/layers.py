"""Which of the user's modules an operator of a traced step belongs to."""

from torch import fx

from remat.torch_compat.messages import CHILD_MODULE, ROOT_MODULE
from remat.torch_compat.metadata import Stack, modules_around, modules_differentiated


def layer_name(node: fx.Node) -> str:
    """Return the path of the innermost module that made a node, or ``""``.

    An operator of the backward pass belongs to the module whose forward pass it
    differentiates, and says so.
    """
    forward = _path(modules_around(node))
    if forward:
        return forward
    backward = _path(modules_differentiated(node))
    return f"{backward} backward" if backward else ""


def _path(stack: Stack | None) -> str:
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
    return CHILD_MODULE.sub(r".\1", ROOT_MODULE.sub("", path)).strip(".")
