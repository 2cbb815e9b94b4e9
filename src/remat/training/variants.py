"""A backend for ``torch.compile`` itself, which plans a traced step for each state.

The tracer runs what it compiled again without asking, also when gradients of earlier
passes exist that did not before. So what this backend returns looks for itself, and
compiles the traced step once more for each amount of gradients that it finds, and where
it changes which parameters are trained.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from remat.capture.joint_program import InputSpec, JointProgram
from remat.capture.varying_sizes import (
    FixedSizesError,
    SizeInputs,
    Sizes,
    UnequalRangesError,
    VaryingSizes,
    size_inputs,
    varies,
)
from remat.core.errors import BudgetError, PlanWarning
from remat.core.schedule import Schedule
from remat.planning.plan import Plan
from remat.torch_compat.metadata import example_of
from remat.torch_compat.names import (
    CompileContext,
    dynamo_config,
    preserve_rng_state,
)
from remat.training.callers import first_bucket_bytes
from remat.training.passes_in_flight import Pass, PassesInFlight
from remat.training.step_backend import PlannedBackend, differentiated, sources_of

_PASSES: weakref.WeakSet[Pass] = weakref.WeakSet()
"""What is in flight of all that ``torch.compile`` hands to backends of ours."""


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


Kind: TypeAlias = tuple[Sizes, int]
"""The sizes of a call, as far as they vary, and the bytes of gradients that exist."""


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

    def has_gradient(self, leaf: torch.Tensor) -> bool:
        """Return whether the step that is planned adds to a gradient of a leaf."""
        ...

    def step_bytes_of(self, leaf: torch.Tensor) -> int | None:
        """Return what the optimizer of a leaf takes that steps in backward."""
        ...

    @property
    def has_several_devices(self) -> bool:
        """Whether steps are planned for more than one device."""
        ...

    @property
    def plans_ahead(self) -> bool:
        """Whether a step is planned that is not about to run."""
        ...

    @property
    def has_described_loss(self) -> bool:
        """Whether it was said what the loss is computed from."""
        ...

    @property
    def running_plan(self) -> Plan | None:
        """The plan of the variant that was asked for last."""
        ...

    @property
    def planned_sizes(self) -> Sizes:
        """The sizes for which the last variant was planned."""
        ...

    def begin(
        self,
        call: TracedCall,
        inputs: Sequence[Any],
        gradient_bytes: int,
        sizes: Sizes | None = None,
    ) -> None:
        """Be told which variant of which call is compiled next.

        ``sizes`` are those to plan for, ``None`` for the largest.
        """
        ...

    def choose_sizes(self, varying: VaryingSizes) -> Sizes:
        """Return the sizes for which the variant is planned that was begun last."""
        ...

    def variant_that_fits(
        self, call: TracedCall, kind: Kind, inputs: Sequence[Any]
    ) -> Kind | None:
        """Return a variant of a call that will do for another kind, or ``None``."""
        ...

    def sizes_that_break(
        self, call: TracedCall, gradient_bytes: int, inputs: Sequence[Any]
    ) -> Sizes | None:
        """Return sizes at which no variant of a call will do, ``None`` if none is."""
        ...

    def note_running(self, call: TracedCall, kind: Kind) -> None:
        """Be told which kind of call runs next, by the latest plan if it is new."""
        ...

    def settle(self, call: TracedCall, kind: Kind) -> None:
        """Be told which kind of call was planned ahead."""
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
    backward_in_autocast
        Whether backward passes are called under the autocast of their forward pass.
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
        backward_in_autocast: bool = False,
    ) -> None:
        super().__init__(
            planner.choose_schedule,
            name,
            planner.choose_kernels,
            is_only_planned=is_only_planned,
            backward_in_autocast=backward_in_autocast,
        )
        self.planner = planner
        self.keeps_failure = keeps_failure
        # Of the planned graphs: the functions that they are of, and what they read.
        self._frames: set[int | None] = set()
        self._parameters: Any = WeakIdKeyDictionary()
        self._has_told_of_several = False
        self._in_flight = PassesInFlight(
            name,
            self._tell_of_several,
            is_plannable=False,
            cure="Use remat.fit, which plans all graphs of a model together",
            passes=_PASSES,
        )

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one traced function for the gradients that exist now."""
        variants = _Variants(self, module, example_inputs)
        places = [isinstance(value, nn.Parameter) for value in example_inputs]
        place = places.index(True) if any(places) else None

        def run(*inputs: Any) -> Any:
            outputs = variants.of(inputs)(*inputs)
            if self.keeps_failure or not torch.is_grad_enabled():
                return outputs
            plan = self.planner.running_plan
            if plan is not None:
                # Of equal modules the compiler takes the first one's graph.
                if place is not None and inputs[place] not in self._parameters:
                    self._look_for_several_graphs(inputs)
                self._in_flight.note(outputs, plan)
            return outputs

        known_count = self.training_step_count
        variants.of(example_inputs)
        if self.training_step_count > known_count and not self.keeps_failure:
            compile_id = CompileContext.current_compile_id()
            self._frames.add(None if compile_id is None else compile_id.frame_id)
            self._look_for_several_graphs(example_inputs)
        return run

    def _look_for_several_graphs(self, inputs: Sequence[Any]) -> None:
        """Tell when a second part of the caller's code is planned by itself."""
        read = [value for value in inputs if isinstance(value, nn.Parameter)]
        # A module may get single ones anew.
        has_known = bool(read) and len(self._parameters) > 0
        has_others = has_known and not any(p in self._parameters for p in read)
        for parameter in read:
            self._parameters[parameter] = True
        if len(self._frames) > 1 or has_others:
            self._tell_of_several(
                f"remat.backend plans a second graph of {self.name}: the compiler splits "
                "what it compiles, or several modules share the backend. Each graph is "
                "planned for the whole budget, so that together they can exceed it. Use "
                "fullgraph=True to see where a model is split, or remat.fit, which "
                "plans all graphs of a model together"
            )

    def _tell_of_several(self, message: str) -> None:
        """Warn, once, that others are in memory beside what is planned by itself."""
        if not self._has_told_of_several:
            self._has_told_of_several = True
            warnings.warn(message, PlanWarning, stacklevel=2)

    def compile(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        inputs: list[InputSpec],
        sizes: SizeInputs | None = None,
    ) -> Callable[..., Any]:
        """Compile a traced function whose inputs are described by ``inputs``."""
        try:
            return super().compile(module, example_inputs, inputs, sizes)
        finally:
            if not self.keeps_failure:
                self.failure = None

    def piece_bytes(self) -> int | None:
        """Return the size of the first bucket in which gradients are exchanged now."""
        return first_bucket_bytes()

    def has_gradient(self, leaf: torch.Tensor) -> bool:
        """Return whether the step that is planned adds to a gradient of a leaf."""
        return self.planner.has_gradient(leaf)

    def step_bytes(self, leaf: torch.Tensor) -> int | None:
        """Return what the optimizer of a leaf takes that steps in backward."""
        return self.planner.step_bytes_of(leaf)

    def only_differentiated(self, loss: int | None) -> int | None:
        """Return the loss among the outputs, unless another one was described."""
        return None if self.planner.has_described_loss else loss

    @property
    def may_expand_zeros(self) -> bool:
        """Whether gradients that do not exist may be one zero, expanded."""
        # A copy of it on another device would be as large as its shape.
        return not self.planner.has_several_devices

    def choose_sizes(self, varying: VaryingSizes) -> Sizes:
        """Return the sizes for which a step is planned whose sizes vary."""
        return self.planner.choose_sizes(varying)


class _Variants:
    """What one traced function was compiled to, for each kind of call."""

    def __init__(
        self, backend: VariantBackend, module: fx.GraphModule, inputs: Sequence[Any]
    ) -> None:
        self.backend = backend
        self.module = module
        self.specs = backend.describe_inputs(module, inputs)
        self.call = TracedCall(tuple(sources_of(module)), _outputs_of(module))
        # Where the tracer does not look for parameters that are frozen or unfrozen.
        self.is_unguarded = dynamo_config.skip_tensor_guards_with_matching_dict_tags
        self.state = self.state_now(inputs)
        self.returned = backend.returned
        try:
            self.sizes = size_inputs(module, inputs, backend.asked)
        except UnequalRangesError as error:
            backend.fail(error)
        self.check_vary(inputs)
        self.is_traced = False
        self.compiled: dict[Kind, Callable[..., Any]] = {}
        # Per amount of gradients the largest sizes, once they are planned.
        self.largest: dict[int, Sizes] = {}
        # The same in other states.
        self.others: dict[Any, Any] = {}

    def state_now(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what makes another step of a traced function, beside its gradients."""
        trained = differentiated(inputs) if self.is_unguarded else ()
        return self.backend.backward_autocast, trained

    def check_vary(self, inputs: Sequence[Any]) -> None:
        """Refuse to plan ahead for sizes that the model's code takes for one number."""
        if not self.backend.planner.plans_ahead:
            return
        fixed: list[str] = []
        for tensor, dims in self.backend.asked:
            for node, spec, value in zip(
                self.module.graph.find_nodes(op="placeholder"),
                self.specs,
                inputs,
                strict=True,
            ):
                if value is tensor:
                    shape = example_of(node).shape
                    found = [dim for dim in dims if not varies(shape[dim])]
                    fixed += [f"dimension {dim} of {spec.name}" for dim in found]
        if fixed:
            self.backend.fail(FixedSizesError(", ".join(fixed)))

    def of(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the variant for a call, compiled if there is none that will do."""
        planner = self.backend.planner
        state = self.state_now(inputs)
        if state != self.state:
            self.others[self.state] = self.call, self.compiled, self.largest
            known = self.others.get(state, (replace(self.call), {}, {}))
            self.state, (self.call, self.compiled, self.largest) = state, known
        # Without gradients there is no plan, and one variant does.
        if not torch.is_grad_enabled():
            return self.compiled.get(_NO_PLAN) or self.compile(inputs, *_NO_PLAN)
        gradient_bytes = planner.gradient_bytes_now(inputs)
        if self.has_sizes and planner.plans_ahead:
            return self.ahead(gradient_bytes, inputs)
        kind = self.sizes_of(inputs), gradient_bytes
        if kind not in self.compiled:
            self.compiled[kind] = self.found(kind, inputs)
        planner.note_running(self.call, kind)
        return self.compiled[kind]

    @property
    def has_sizes(self) -> bool:
        """Whether some sizes vary."""
        return self.sizes is not None and bool(self.sizes.symbols)

    def sizes_of(self, inputs: Sequence[Any]) -> Sizes:
        """Return the sizes that vary, as they are in a call."""
        if self.sizes is None:
            return ()
        # While it is traced, the inputs hold symbols.
        return self.sizes.sizes_in(inputs) if self.is_traced else self.sizes.first

    def ahead(self, gradient_bytes: int, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the variant for the largest sizes, whatever those of the call are."""
        sizes = next(iter(self.largest.values()), None)
        if sizes is not None:
            kind = sizes, gradient_bytes
            known = self.backend.planner.variant_that_fits(self.call, kind, inputs)
            if known is not None:
                self.largest[gradient_bytes] = sizes
                return self.compiled.setdefault(kind, self.compiled[known])
        compiled = self.compile(inputs, None, gradient_bytes)
        planner = self.backend.planner
        for _ in range(_MOST_AHEAD):
            broken = planner.sizes_that_break(self.call, gradient_bytes, inputs)
            if broken is None:
                break
            self.compile(inputs, broken, gradient_bytes)
        planner.settle(self.call, (self.largest[gradient_bytes], gradient_bytes))
        return compiled

    def found(self, kind: Kind, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a known variant that will do, or a new one."""
        sizes, gradient_bytes = kind
        known = self.backend.planner.variant_that_fits(self.call, kind, inputs)
        if known is None and self.has_sizes and gradient_bytes not in self.largest:
            self.compile_largest(kind, inputs)
            known = self.backend.planner.variant_that_fits(self.call, kind, inputs)
        if known is not None:
            return self.compiled[known]
        return self.compile(inputs, sizes, gradient_bytes)

    def compile_largest(self, kind: Kind, inputs: Sequence[Any]) -> None:
        """Compile a variant that is planned for the largest sizes, if that fits.

        Where it does not in the middle of training, the call itself may.
        """
        _, gradient_bytes = kind
        try:
            self.compile(inputs, None, gradient_bytes)
        except Exception:
            failure = self.backend.failure
            if self.backend.planner.plans_ahead or not isinstance(failure, BudgetError):
                raise
            self.backend.failure = None

    def compile(
        self, inputs: Sequence[Any], sizes: Sizes | None, gradient_bytes: int
    ) -> Callable[..., Any]:
        """Compile a variant that is planned for these sizes, or for the largest."""
        backend = self.backend
        backend.planner.begin(self.call, inputs, gradient_bytes, sizes)
        backend.returned = self.returned
        if self.sizes is not None:
            for fake, value in zip(self.sizes.traced, inputs, strict=True):
                if isinstance(value, nn.Parameter):
                    fake.requires_grad_(value.requires_grad)
        with preserve_rng_state():
            compiled = backend.compile(self.module, inputs, self.specs, self.sizes)
        self.is_traced = True
        if sizes is None:
            sizes = self.largest[gradient_bytes] = backend.planner.planned_sizes
        self.compiled[sizes, gradient_bytes] = compiled
        return compiled


_NO_PLAN: Kind = ((), -1)
_MOST_AHEAD = 4
"""How many sizes are planned besides the largest before the first step."""


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
