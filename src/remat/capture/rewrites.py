"""All that makes a traced step the one that eager PyTorch runs."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import fx

from remat.capture.accelerator import accelerator_operators, is_accelerated
from remat.capture.cudnn_batch_norm import correct_reserves, cudnn_batch_norm
from remat.capture.detached import drop_detaching
from remat.capture.dropout import eager_dropout
from remat.capture.gradient_layouts import add_zeros_last, dense_gradients
from remat.capture.norm_statistics import correct_statistics
from remat.capture.real_layouts import real_layouts
from remat.capture.recurrent import run_layers, whole_layers
from remat.capture.slice_gradients import join_gradient_pieces
from remat.capture.undecomposed import whole_operators
from remat.torch_compat.names import inductor_config


@contextmanager
def eager_tracing() -> Generator[None]:
    """Trace what eager PyTorch runs here, or on the accelerator that is planned for."""
    operators = accelerator_operators() if is_accelerated() else eager_dropout()
    with (
        real_layouts(),
        dense_gradients(),
        whole_operators(),
        whole_layers(),
        cudnn_batch_norm(),
        # Else those that nothing uses are left out, and others would be drawn later.
        inductor_config.patch(fallback_random=True),
        operators,
    ):
        yield


def rewrite(joint: fx.GraphModule, loss: int | None) -> None:
    """Make a traced step, in place, do what eager PyTorch does and no more.

    ``loss`` is the position of the only output that is differentiated, if one is.
    """
    run_layers(joint)
    drop_detaching(joint)
    join_gradient_pieces(joint)
    add_zeros_last(joint, loss)
    correct_statistics(joint)
    correct_reserves(joint)
