"""Values detached from autograd's graph, which a traced step has no use for.

Backward formulas detach what forward saved. The traced step runs without autograd, and
each such operator would be called for another name of the same tensor.
"""

import torch
from torch import fx

from remat.capture.joint_program import is_view


def drop_detaching(joint: fx.GraphModule) -> None:
    """Let everything read what was detached itself.

    Not where the step returns it, or a view of it: a tensor that the caller gets says
    whether it has a gradient.
    """
    detach = torch.ops.aten.detach.default
    for node in joint.graph.find_nodes(op="call_function", target=detach):
        if not is_returned(node):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
    joint.recompile()


def is_returned(node: fx.Node) -> bool:
    """Return whether the step returns a node's value, or a view of it."""
    return any(
        user.op == "output" or (is_view(user) and is_returned(user))
        for user in node.users
    )
