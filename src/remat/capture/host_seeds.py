"""Random numbers of attention that lie on the host, though the tracer says otherwise.

The memory-efficient kernel leaves seed and offset of its dropout on the host, unless a
CUDA graph is recorded, and reads them there in the backward pass. A process that gives
it an address of the card dies (``attention.cu``, ``attention_backward.cu``).
"""

import operator
from typing import Any

from torch import fx

from remat.torch_compat.attributes import schema_of
from remat.torch_compat.names import (
    efficient_attention,
    efficient_attention_alone,
    efficient_attention_backward,
    efficient_attention_backward_alone,
)

_MAKING = frozenset({efficient_attention, efficient_attention_alone})
_READING = frozenset({efficient_attention_backward, efficient_attention_backward_alone})
_RESULTS = (2, 3)
_ARGUMENTS = ("philox_seed", "philox_offset")


def is_host_seed(node: fx.Node) -> bool:
    """Return whether a traced value is such a number."""
    return (
        node.target is operator.getitem
        and node.args[1] in _RESULTS
        and isinstance(node.args[0], fx.Node)
        and node.args[0].target in _MAKING
    )


def with_seeds_on_host(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of an operator, with such numbers among them on the host."""
    if target not in _READING:
        return args
    names = [argument.name for argument in schema_of(target).arguments]
    return tuple(
        value.cpu() if name in _ARGUMENTS else value
        for name, value in zip(names, args, strict=False)
    )
