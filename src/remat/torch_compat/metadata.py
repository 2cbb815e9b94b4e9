"""What the tracer writes at the nodes of its graphs, under keys that it may rename.

``"val"`` and ``"stack_trace"`` are documented, and read where they are needed.
"""

from collections.abc import Mapping
from typing import Any

from torch import fx

from remat.torch_compat.names import (
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)

_PASS, _FORWARD, _BACKWARD = "partitioner_tag", "is_forward", "is_backward"
_MODULES, _FORWARD_MODULES = "nn_module_stack", "fwd_nn_module_stack"
_UNCHECKED = "saved_tensor_with_no_vc_check"
_ONE_ZERO = "remat_one_zero"
_DESCRIPTION = "desc"
_EXAMPLE = "example_value"
_ARGUMENT = "grapharg"

Stack = Mapping[Any, tuple[str, Any]]
"""The modules around a call, outermost first: the tracer's path, and the class."""


# --- the pass and the module of a node -----------------------------------------------


def is_forward(node: fx.Node) -> bool:
    """Return whether a node is tagged as one of the forward pass."""
    return node.meta.get(_PASS) == _FORWARD


def is_backward(node: fx.Node) -> bool:
    """Return whether a node is tagged as one of the backward pass."""
    return node.meta.get(_PASS) == _BACKWARD


def pass_of(node: fx.Node) -> object:
    """Return what is equal for nodes of one pass, ``None`` of those with no tag."""
    return node.meta.get(_PASS)


def in_backward(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``meta`` tagged as that of a node of the backward pass."""
    return {**meta, _PASS: _BACKWARD}


def origin_of(node: fx.Node) -> dict[str, Any]:
    """Return what ``meta`` says of a node's pass, module and source line.

    A node that takes its place says the same.
    """
    keys = (_PASS, "stack_trace", _MODULES, _FORWARD_MODULES)
    return {key: node.meta[key] for key in keys if key in node.meta}


def modules_around(node: fx.Node) -> Stack | None:
    """Return the modules in whose forward a node was made, if it says so."""
    return node.meta.get(_MODULES)


def modules_differentiated(node: fx.Node) -> Stack | None:
    """Return the modules whose forward a node of backward differentiates."""
    return node.meta.get(_FORWARD_MODULES)


# --- inputs and outputs of a step ----------------------------------------------------


def _whole(description: Any) -> Any:
    """Return what a description says of the tensor that something is a part of.

    A tensor such as a ``DTensor`` is several inputs and outputs of a joint graph: the
    plain tensor that a process holds, and how it belongs to those of the others.
    """
    while isinstance(description, SubclassGetAttrAOTInput | SubclassGetAttrAOTOutput):
        description = description.base
    return description


def argument_position(placeholder: fx.Node) -> int | None:
    """Return which argument of the traced function an input is, or is a part of.

    ``None`` where it is none, as the gradient of an output.
    """
    described = _whole(placeholder.meta.get(_DESCRIPTION))
    return described.idx if isinstance(described, PlainAOTInput) else None


def is_tangent(node: fx.Node) -> bool:
    """Return whether an input of a joint graph is the gradient of an output."""
    return isinstance(_whole(node.meta.get(_DESCRIPTION)), TangentAOTInput)


def output_position(tangent: fx.Node) -> int | None:
    """Return the position of the output that a tangent belongs to.

    Outputs that are views share the tangent of what they are views of, named after the
    first of them. Tangents of inputs that the step changes have no output.
    """
    description = _whole(tangent.meta[_DESCRIPTION]).output
    described = getattr(description, "base_of", description)
    return described.idx if isinstance(described, PlainAOTOutput) else None


def outputs_of_tangents(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return, per tangent of a joint graph, which of the values it returns it is of.

    Tangents of inputs that the step changes are left out.
    """
    (output,) = graph.find_nodes(op="output")
    found: dict[fx.Node, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        if is_tangent(node):
            described = _whole(node.meta[_DESCRIPTION]).output
            for position, value in enumerate(output.meta.get(_DESCRIPTION, ())):
                if _whole(value) == described and not isinstance(
                    described, InputMutationAOTOutput
                ):
                    found[node] = position
                    break
    return found


def changed_inputs(output: fx.Node) -> list[int | None]:
    """Return, for each value that a joint graph returns, whose new value it is.

    That is the position of an argument of the traced function, or ``None``.
    """
    described = map(_whole, output.meta.get(_DESCRIPTION, ()))
    return [
        _position_of(each.mutated_input)
        if isinstance(each, InputMutationAOTOutput)
        else None
        for each in described
    ]


def _position_of(argument: Any) -> int:
    return argument.idx


def are_parts(output: fx.Node) -> list[bool]:
    """Return, for each value that a joint graph returns, whether it is a part of one.

    What is put together from parts, such as a ``DTensor``, has to have all of them.
    """
    return [
        isinstance(each, SubclassGetAttrAOTOutput)
        for each in output.meta.get(_DESCRIPTION, ())
    ]


def leave_unchecked(node: fx.Node) -> None:
    """Let a value be saved for backward although the step changes it later."""
    node.meta[_UNCHECKED] = True


def is_unchecked(node: fx.Node) -> bool:
    """Return whether :func:`leave_unchecked` was called for a node."""
    return bool(node.meta.get(_UNCHECKED))


def let_be_one_zero(tangent: fx.Node) -> None:
    """Let the zeros in place of a gradient that does not exist be one, expanded."""
    tangent.meta[_ONE_ZERO] = True


def may_be_one_zero(tangent: fx.Node) -> bool:
    """Return whether :func:`let_be_one_zero` was called for a tangent."""
    return bool(tangent.meta.get(_ONE_ZERO))


# --- what the tracer saw -------------------------------------------------------------


def example_of(node: fx.Node) -> Any:
    """Return the fake value of a node of the graph that the tracer hands over."""
    return node.meta.get(_EXAMPLE)


def set_example(node: fx.Node, other: fx.Node) -> None:
    """Let a node's fake value be one of its own, of the memory of another one's."""
    value = example_of(other)
    example = value.detach().requires_grad_(value.requires_grad)
    node.meta = {**other.meta, _EXAMPLE: example}


def source_of(placeholder: fx.Node) -> str:
    """Return the tracer's name of an input, ``""`` where it has none.

    It has them only while it calls the backend.
    """
    argument = placeholder.meta.get(_ARGUMENT)
    source = "" if argument is None else argument.source.name
    return source if isinstance(source, str) else source()
