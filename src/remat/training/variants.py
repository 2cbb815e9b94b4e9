"""A backend for ``torch.compile`` itself, which plans a traced step for each state.

The tracer runs what it compiled again without asking, also when gradients of earlier
passes exist that did not before. So what this backend returns looks for itself, and
compiles the traced step once more for each amount of gradients that it finds.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from remat.capture.joint_program import InputSpec, JointProgram
from remat.core.errors import PlanWarning
from remat.core.schedule import Schedule
from remat.torch_compat.metadata import example_of
from remat.torch_compat.names import CompileContext, preserve_rng_state
from remat.training.step_backend import PlannedBackend, sources_of


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A call that the tracer saw, as far as it shows in its graph.

    Parameters
    ----------
    sources
        The tracer's names of the inputs.
    outputs
        Shapes and types of the tensors that the traced graph returns, in order.
    """

    sources: tuple[str, ...]
    outputs: tuple[str, ...]


class StepPlanner(Protocol):
    """What :class:`VariantBackend` asks."""

    def choose_schedule(self, program: JointProgram) -> tuple[JointProgram, Schedule]:
        """Return the schedule of the variant that was begun last."""
        ...

    def choose_kernels(self, joint: fx.GraphModule, forward_output_count: int) -> None:
        """Replace operators of a traced step by others, in place, where asked to."""
        ...

    def gradient_bytes_now(self, inputs: Sequence[Any]) -> int:
        """Return the bytes of the gradients that earlier passes left."""
        ...

    def begin(
        self, call: TracedCall, inputs: Sequence[Any], gradient_bytes: int
    ) -> None:
        """Be told which variant of which call is compiled next."""
        ...

    def variant_that_fits(self, call: TracedCall, gradient_bytes: int) -> int | None:
        """Return a variant of a call that will do for other gradients, or ``None``."""
        ...


class VariantBackend(PlannedBackend):
    """A backend that compiles a step anew when other gradients exist than before.

    Parameters
    ----------
    planner
        Chooses the schedules.
    name
        Name of the training graphs, for people.
    is_only_planned
        Whether what is compiled never runs.
    keeps_failure
        Whether :attr:`failure` stays until whoever called the step has read it. Its
        traceback holds the batch, and the tracer never forgets a backend.
    """

    def __init__(
        self,
        planner: StepPlanner,
        name: str,
        *,
        is_only_planned: bool = False,
        keeps_failure: bool = False,
    ) -> None:
        super().__init__(
            planner.choose_schedule,
            name,
            planner.choose_kernels,
            is_only_planned=is_only_planned,
        )
        self.planner = planner
        self.keeps_failure = keeps_failure
        self._training_frames: set[int | None] = set()

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one traced function for the gradients that exist now."""
        specs = self.describe_inputs(module, example_inputs)
        call = TracedCall(tuple(sources_of(module)), _outputs_of(module))
        returned = self.returned
        variants: dict[int, Callable[..., Any]] = {}

        def variant(inputs: Sequence[Any]) -> Callable[..., Any]:
            # Without gradients there is no plan, and one variant does.
            is_training = torch.is_grad_enabled()
            size = self.planner.gradient_bytes_now(inputs) if is_training else 0
            known = None
            if size not in variants and is_training:
                known = self.planner.variant_that_fits(call, size)
            if known is not None:
                variants[size] = variants[known]
            elif size not in variants:
                self.planner.begin(call, inputs, size)
                self.returned = returned
                with preserve_rng_state():
                    variants[size] = self.compile(module, inputs, specs)
            return variants[size]

        def run(*inputs: Any) -> Any:
            return variant(inputs)(*inputs)

        known_count = self.training_step_count
        variant(example_inputs)
        if self.training_step_count > known_count and not self.keeps_failure:
            self._tell_of_several_graphs()
        return torch.compiler.disable(run)

    def _tell_of_several_graphs(self) -> None:
        """Warn, once, when a second part of the caller's code is planned by itself."""
        compile_id = CompileContext.current_compile_id()
        self._training_frames.add(None if compile_id is None else compile_id.frame_id)
        if len(self._training_frames) == 2:
            msg = (
                f"remat.backend plans a second graph of {self.name}: the compiler splits "
                "what it compiles, or several modules share the backend. Each graph is "
                "planned for the whole budget, so that together they can exceed it. Use "
                "fullgraph=True to see where a model is split, or remat.fit, which "
                "refuses it"
            )
            warnings.warn(msg, PlanWarning, stacklevel=2)

    def compile(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        inputs: list[InputSpec],
    ) -> Callable[..., Any]:
        """Compile a traced function whose inputs are described by ``inputs``."""
        try:
            return super().compile(module, example_inputs, inputs)
        finally:
            if not self.keeps_failure:
                self.failure = None


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return shape and type of a tensor.

    Examples
    --------
    >>> describe_tensor(torch.ones(2, 3))
    'float32 [2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _outputs_of(module: fx.GraphModule) -> tuple[str, ...]:
    (output,) = module.graph.find_nodes(op="output")
    values = [example_of(node) for node in output.args[0]]
    return tuple(describe_tensor(v) for v in values if isinstance(v, torch.Tensor))
