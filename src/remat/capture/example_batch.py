"""The batch of a traced call, put together again from the inputs of its graph."""

import re
from collections.abc import Sequence
from typing import Any

from remat.capture.surroundings import describe_input
from remat.core.errors import CaptureError
from remat.core.graph import Role

_POSITIONAL = re.compile(r"L\['args'\]\[(\d+)\]")
_KEYWORD = re.compile(r"L\['kwargs'\]\['([^']+)'\]")
_NAMED = re.compile(r"L\['([^']+)'\]")
_MODEL = re.compile(r"L\['(?:self|fn)'\]|G\[")


def example_batch(
    sources: Sequence[str], inputs: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call: positional ones, and those by keyword.

    Parameters
    ----------
    sources
        The tracer's name of each input of the traced graph.
    inputs
        The inputs themselves.

    Raises
    ------
    CaptureError
        If an input is not an argument by itself, or if arguments between those that
        the graph reads are not among its inputs.

    Examples
    --------
    >>> example_batch(["L['x']", "L['self']._buffers['mean']"], [1, 2])
    ((), {'x': 1})
    >>> example_batch(["L['args'][1]", "L['args'][0]", "L['kwargs']['y']"], [1, 2, 3])
    ((2, 1), {'y': 3})
    """
    positional: dict[int, Any] = {}
    keywords: dict[str, Any] = {}
    for source, value in zip(sources, inputs, strict=True):
        if describe_input(source).role is not Role.INPUT or _MODEL.match(source):
            continue
        if match := _POSITIONAL.fullmatch(source):
            positional[int(match[1])] = value
        elif match := _KEYWORD.fullmatch(source) or _NAMED.fullmatch(source):
            keywords[match[1]] = value
        else:
            raise CaptureError(_message(f"the input {source} is inside another value"))
    if sorted(positional) != list(range(len(positional))):
        raise CaptureError(
            _message(f"of the positional arguments it sees only {sorted(positional)}")
        )
    return tuple(positional[i] for i in range(len(positional))), keywords


def _message(found: str) -> str:
    return (
        "the loss needs the model's outputs, and so the arguments of its call, but the "
        f"compiler does not show them all: {found}. Use remat.fit, which is given the "
        "example, or leave loss= out of remat.backend"
    )
