"""Values detached from autograd's graph, which a traced step has no use for.

Backward formulas detach what forward saved. The traced step runs without autograd, and
each such operator would be called for another name of the same tensor.
"""

import torch
from torch import fx


def drop_detaching(joint: fx.GraphModule) -> None:
    """Let everything read what was detached itself, except what the step returns."""
    detach = torch.ops.aten.detach.default
    for node in joint.graph.find_nodes(op="call_function", target=detach):
        node.replace_all_uses_with(
            node.args[0], delete_user_cb=lambda user: user.op != "output"
        )
        if not node.users:
            joint.graph.erase_node(node)
    joint.recompile()
