"""In which order gradients come to the parameters of a traced step.

A step is traced while autograd runs over it as it does in eager PyTorch. So it comes to
the same gradients in the same order.
"""

from contextlib import AbstractContextManager

from torch import fx

from remat.torch_compat.patches import gradient_arrivals, patched

_ARRIVALS = "arrivals of gradients"


class Arrivals:
    """Notes in which order gradients come while a step is traced."""

    def __init__(self) -> None:
        # Numbers among the inputs that gradients are asked for.
        self._numbers: dict[int, None] = {}

    def noted(self) -> AbstractContextManager[None]:
        """Trace and take note."""
        return patched(gradient_arrivals(self._numbers))

    def keep(self, joint: fx.GraphModule, forward_output_count: int) -> None:
        """Keep with a joint graph, as it was traced, in which order its gradients come.

        Parameters
        ----------
        joint
            The last one that was traced.
        forward_output_count
            How many of its outputs belong to the forward pass; a gradient for each
            input follows, or ``None``.
        """
        (output,) = joint.graph.find_nodes(op="output")
        gradients = output.args[0][forward_output_count:]
        positions = [p for p, node in enumerate(gradients) if isinstance(node, fx.Node)]
        # Of inputs that get none, none has come.
        if len(positions) != len(self._numbers):
            return
        places = {number: place for place, number in enumerate(sorted(self._numbers))}
        joint.meta[_ARRIVALS] = tuple(positions[places[n]] for n in self._numbers)


def arrivals_in(joint: fx.GraphModule) -> tuple[int, ...]:
    """Return positions of gradients in the order in which autograd comes to them.

    None if no note was kept.
    """
    return joint.meta.get(_ARRIVALS, ())
