"""One traced step: captured, planned, lowered, and handed back as code that runs."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from remat.capture.arrivals import Arrivals
from remat.capture.autocast import (
    Autocast,
    autocast_again,
    autocast_now,
    backward_traced_under,
)
from remat.capture.divided_gradients import DividedGradients
from remat.capture.gradient_layouts import expand_zeros
from remat.capture.joint_program import (
    InputSpec,
    JointProgram,
    analyse,
    counted_once,
    inputs_of_parts,
)
from remat.capture.returned import Returned
from remat.capture.rewrites import eager_tracing, rewrite
from remat.capture.surroundings import describe_input, existing_gradient
from remat.capture.tracing import check_sizes
from remat.capture.varying_sizes import Range, SizeInputs, Sizes, VaryingSizes
from remat.core.errors import CaptureError, PlanWarning, RematError
from remat.core.graph import Role
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.schedule import Schedule
from remat.runtime.copies import runnable
from remat.runtime.early_gradients import EarlyGradients, Passes
from remat.runtime.lowering import LoweredStep, lower
from remat.runtime.undefined import DefinedTangents, MissingTangents, without
from remat.torch_compat.attributes import (
    boxed,
    has_hooks_of_its_gradient,
    without_cast_gradients,
)
from remat.torch_compat.metadata import example_of, may_be_one_zero, source_of
from remat.torch_compat.names import BoxedCodeGen, aot_autograd, preserve_rng_state
from remat.torch_compat.process_groups import put_real_groups
from remat.training.backward_autocast import BackwardAutocast
from remat.training.callers import notes_arrivals


class StoppedBeforeRunningError(Exception):
    """The traced step was about to run for the first time; nothing has run."""


class _TracedError(Exception):
    """The step is traced, and no more is wanted."""


def sources_of(module: fx.GraphModule) -> list[str]:
    """Return the tracer's name of each input, ``""`` where it has none.

    It has them only while it calls the backend.
    """
    return [source_of(node) for node in module.graph.find_nodes(op="placeholder")]


def keep_kernels(joint: fx.GraphModule, forward_output_count: int) -> None:
    """Leave every operator of a traced step as it is."""


def differentiated(inputs: Sequence[Any]) -> tuple[bool, ...]:
    """Return which tensors among the inputs of a traced function get gradients.

    torch 2.11 does not trace again where that changes of a parameter.
    """
    return tuple([v.requires_grad for v in inputs if isinstance(v, torch.Tensor)])


class PlannedBackend:
    """A ``torch.compile`` backend that runs each training step by a schedule.

    Parameters
    ----------
    choose_schedule
        Called once per traced training step, before anything runs; returns the
        schedule and may raise.
    name
        Name of the training graphs, for people.
    choose_kernels
        Called once per traced training step before that, with the joint graph and the
        count of its forward outputs; may put other operators in the place of some, and
        raise.
    is_only_planned
        Whether what is compiled never runs.
    backward_in_autocast
        Whether backward passes are called under the autocast of their forward pass.

    Attributes
    ----------
    backward_autocast
        The settings that backward passes are called under, ``None`` for those of their
        forward pass. What was compiled for others is of no use once they change.
    failure
        The error that planning raised, kept because the tracer wraps it.
    training_step_count
        How many training steps were traced.
    returned
        What is known of what the call being traced returns.
    """

    def __init__(
        self,
        choose_schedule: Callable[[JointProgram], tuple[JointProgram, Schedule]],
        name: str,
        choose_kernels: Callable[[fx.GraphModule, int], None] = keep_kernels,
        *,
        is_only_planned: bool = False,
        backward_in_autocast: bool = False,
    ) -> None:
        self.backward_autocast: tuple[Autocast, ...] | None = (
            None if backward_in_autocast else ()
        )
        self._has_told_of_autocast = False
        self._told: set[str] = set()
        self.choose_schedule = choose_schedule
        self.choose_kernels = choose_kernels
        self.name = name
        self.failure: RematError | None = None
        self.training_step_count = 0
        self.stop_before_running = False
        self.is_only_planned = is_only_planned
        self.returned = Returned()
        # Tensors of the call that is being traced whose dimensions may vary.
        self.asked: Sequence[tuple[torch.Tensor, Mapping[int, Range]]] = ()

    def note_returned(self, returned: Returned) -> None:
        """Take what the call that is being traced returns."""
        self.returned = returned

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one traced function."""
        inputs = self.describe_inputs(module, example_inputs)
        return self.compile(module, example_inputs, inputs)

    def compile(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        inputs: list[InputSpec],
        sizes: SizeInputs | None = None,
    ) -> Callable[..., Any]:
        """Compile a traced function whose inputs are described by ``inputs``.

        ``sizes`` are those among them that are sizes, where some vary.
        """
        if torch.is_grad_enabled():
            try:
                check_sizes(module)
            except CaptureError as error:
                self.fail(error)
        autocast = autocast_now()
        (output,) = module.graph.find_nodes(op="output")
        names = [node.name for node in output.args[0]]
        loss = names.index(self.returned.loss) if self.returned.loss in names else None
        inputs = self.given_inputs(inputs, example_inputs)

        traced_under = self.backward_autocast_now()

        def differs(settings: tuple[Autocast, ...]) -> bool:
            return traces[0] != self.joint_hash(module, sizes, autocast, settings)

        traces: list[int] = []
        divided, arrivals = DividedGradients(example_inputs), Arrivals(example_inputs)
        context = BackwardAutocast(traced_under, differs, self.tell_of_autocast)

        def partition(
            joint: fx.GraphModule,
            _joint_inputs: Any,
            *,
            num_fwd_outputs: int,
            **_options: Any,
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            traces.append(hash(str(joint.graph)))
            arrivals.keep(joint)
            passes = self.partition(
                joint,
                num_fwd_outputs,
                inputs,
                defined,
                divided=divided,
                tracing=tracing,
                autocast=autocast,
                loss=loss,
                sizes=sizes,
                is_hooked=is_hooked,
            )
            early.read(joint, passes[1], inputs, is_hooked=is_hooked)
            inputs_of_backward = passes[1].graph.find_nodes(op="placeholder")
            defined.has_expanded_zeros = any(map(may_be_one_zero, inputs_of_backward))
            return passes

        def compile_backward(
            module: fx.GraphModule, backward_inputs: Sequence[Any]
        ) -> Callable[[list[Any]], Any]:
            backward = self.compile_backward(module, backward_inputs)
            early.read_code(module)
            (output,) = module.graph.find_nodes(op="output")
            count = len(output.args[0])

            zeros, begin = MissingTangents(module), self.before_backward(module)

            def run(values: list[Any]) -> Any:
                begin(values)
                shapes, undefined = defined.undefined()
                zeros.fill(values, shapes)
                if early.begins(values, undefined):
                    return [None] * count
                # What the trace found out is not to be done twice.
                with autocast_again(()):
                    return without(backward(values), undefined)

            return boxed(run)

        defined, early = DefinedTangents(self.tell), EarlyGradients(self.tell)
        is_hooked = any(
            has_hooks_of_its_gradient(value)
            for value in example_inputs
            if isinstance(value, torch.Tensor)
        )
        compiler = aot_autograd(
            fw_compiler=self.compile_forward,
            bw_compiler=compile_backward,
            inference_compiler=self.compile_inference,
            partition_fn=partition,
        )
        with ExitStack() as tracing:
            tracing.enter_context(eager_tracing())
            for setting in (
                arrivals.noted(),
                backward_traced_under(traced_under),
                without_cast_gradients(example_inputs),
                divided.noted(),
            ):
                tracing.enter_context(setting)
            # Numbers for the sizes would make it a trace of one shape.
            compiled = compiler(module, sizes.traced if sizes else example_inputs)

        def run(*values: Any) -> Any:
            values, passes = self.behind_gates(early, values)
            outputs = compiled(*values)
            defined.watch(outputs)
            context.watch(outputs)
            if passes is not None:
                early.watch(outputs, passes)
            return outputs

        return run

    def behind_gates(
        self, early: EarlyGradients, values: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Passes | None]:
        """Return inputs of a step such that gradients come to them when they are to."""
        if not torch.is_grad_enabled():
            return values, None
        in_turn = notes_arrivals()
        if self.may_hand_over:
            return early.gated(values, self.piece_bytes(), in_turn=in_turn)
        return early.one_by_one(values) if in_turn else values, None

    def piece_bytes(self) -> int | None:
        """Return in pieces of how many bytes gradients leave before backward has ended.

        ``None`` if all leave together, at the end.
        """
        return None

    def backward_autocast_now(self) -> tuple[Autocast, ...]:
        """Return the settings that the backward pass of a step made now is under."""
        known = self.backward_autocast
        return autocast_now() if known is None else known

    def joint_hash(
        self,
        module: fx.GraphModule,
        sizes: SizeInputs | None,
        autocast: tuple[Autocast, ...],
        backward_autocast: tuple[Autocast, ...],
    ) -> int:
        """Return a number for the joint graph of a step under these settings."""
        traces: list[int] = []

        def keep(
            joint: fx.GraphModule, *_inputs: Any, **_options: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            traces.append(hash(str(joint.graph)))
            raise _TracedError

        placeholders = module.graph.find_nodes(op="placeholder")
        values = sizes.traced if sizes else [example_of(node) for node in placeholders]
        compiler = aot_autograd(fw_compiler=self.compile_forward, partition_fn=keep)
        with (
            preserve_rng_state(),
            torch.enable_grad(),
            autocast_again(autocast),
            eager_tracing(),
            backward_traced_under(backward_autocast),
            suppress(_TracedError),
        ):
            compiler(module, values)
        return traces[0]

    def tell(self, cause: str, words: str) -> None:
        """Warn of something that the step does otherwise than planned, once."""
        if cause not in self._told:
            self._told.add(cause)
            warnings.warn(f"{self.name} {words}", PlanWarning, stacklevel=2)

    def tell_of_autocast(self, settings: tuple[Autocast, ...]) -> None:
        """Compile steps from now on for backward passes under these settings."""
        self.backward_autocast = settings
        if self._has_told_of_autocast:
            return
        self._has_told_of_autocast = True
        found, cure = (
            ("inside of an autocast context", "backward_in_autocast=True to remat")
            if settings
            else ("outside of autocast", "backward_in_autocast=False to remat")
        )
        msg = (
            f"backward() of {self.name} was called {found}, and its step was traced for "
            "the other, which gives other gradients here: those of this step differ from "
            "eager PyTorch's in the last digits of the lower precision. The next steps "
            f"are planned anew and are exact. Give {cure}, or call backward() where the "
            "step was traced for"
        )
        warnings.warn(msg, PlanWarning, stacklevel=2)

    def describe_inputs(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> list[InputSpec]:
        """Return what each input of a traced function is."""
        specs: list[InputSpec] = []
        for node, source in zip(
            module.graph.find_nodes(op="placeholder"), sources_of(module), strict=True
        ):
            specs.append(
                describe_input(source) if source else InputSpec(node.name, Role.INPUT)
            )
        for value, spec in zip(example_inputs, specs, strict=True):
            if isinstance(value, int | float | torch.SymInt) and not self.takes_sizes:
                msg = (
                    f"input {spec.name!r} is a {type(value).__name__}, not a tensor: the "
                    "step was traced with dynamic shapes; compile with dynamic=False, "
                    "so that each input shape gets a plan of its own, and pass a copy "
                    "(x.clone()) of a batch that another torch.compile has seen in "
                    "several shapes, which marks the tensor itself"
                )
                self.fail(CaptureError(msg))
        return specs

    @property
    def takes_sizes(self) -> bool:
        """Whether sizes may be among the inputs of a traced function."""
        return bool(self.asked)

    def given_inputs(
        self, inputs: Sequence[InputSpec], values: Sequence[Any]
    ) -> list[InputSpec]:
        """Return the descriptions of inputs with what is known of their tensors."""
        given = [
            spec.given(
                value,
                has_gradient=self.has_gradient(value),
                step_bytes=self.step_bytes(value),
            )
            if isinstance(value, torch.Tensor)
            else spec
            for spec, value in zip(inputs, values, strict=True)
        ]
        # Where sizes vary, those of the largest count, and these are the example's.
        has_sizes = any(isinstance(value, torch.SymInt | int) for value in values)
        return given if has_sizes else counted_once(given, values)

    def has_gradient(self, leaf: torch.Tensor) -> bool:
        """Return whether the step that is planned adds to a gradient of a leaf."""
        return existing_gradient(leaf) is not None

    def step_bytes(self, leaf: torch.Tensor) -> int | None:  # noqa: ARG002
        """Return what the optimizer of a leaf takes that steps in backward.

        ``None`` if none does.
        """
        return None

    def fail(self, error: RematError) -> None:
        """Keep ``error`` for whoever called the compiled model, and raise it."""
        self.failure = error
        raise error

    def partition(
        self,
        joint: fx.GraphModule,
        forward_output_count: int,
        inputs: list[InputSpec],
        defined: DefinedTangents,
        *,
        divided: DividedGradients,
        tracing: ExitStack,
        autocast: tuple[Autocast, ...],
        loss: int | None,
        sizes: SizeInputs | None = None,
        is_hooked: bool = False,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and backward modules that run the chosen schedule.

        ``tracing`` is closed when no fake tensor is computed any more: from then on
        solvers, kernels that are measured and other threads get torch's own ways.
        """
        argument_count = len(inputs)
        inputs = inputs_of_parts(joint, inputs)
        defined.read(joint, forward_output_count)
        try:
            differentiated = self.only_differentiated(loss)
            rewrite(joint, differentiated)
            if len(inputs) == argument_count and self.may_expand_zeros:
                expand_zeros(joint, differentiated, is_alone=self.is_alone)
            tracing.close()
            varying = None if sizes is None else VaryingSizes(joint, sizes)
            if varying is not None:
                varying.set_sizes(self.choose_sizes(varying))
            self.choose_kernels(joint, forward_output_count)
            program = analyse(
                joint,
                forward_output_count=forward_output_count,
                inputs=inputs,
                name=self.name,
                varying=varying,
                is_alone=self.is_alone,
            )
            program = replace(
                program,
                gradients=divided.otherwise(),
                autocast=autocast,
                returned=self.returned.tensor,
                loss=loss,
            )
            is_foreseen = any(spec.step_bytes is not None for spec in inputs)
            is_hooked = is_hooked and not is_foreseen
            if is_hooked or len(inputs) != argument_count:
                # Hooks may change what is still to be read, and gradients are handed
                # over by the positions of arguments.
                program = replace(program, pieces={})
            self.training_step_count += 1
            program, schedule = self.choose_schedule(program)
            defined.expect_only(program.loss)
            defined.expect_unwatched(program.inner_outputs())
            defined.expect_let_go(program.unread_outputs(schedule))
            if self.is_only_planned and program.platform is not None:
                # Never run, so it need not be what is planned for devices elsewhere.
                program = replace(program, platform=None)
                order = store_all_order(program.graph)
                schedule = schedule_from_order(program.graph, order)
            lowered = self.lower(program, schedule)
        except RematError as error:
            self.fail(error)
            raise
        _allow_retaining(lowered.forward, forward_output_count)
        return lowered.forward, lowered.backward

    def only_differentiated(self, loss: int | None) -> int | None:
        """Return the output from which alone backward begins, if there is one."""
        return loss

    @property
    def is_alone(self) -> bool:
        """Whether the step is one graph, so that only the caller differentiates it."""
        return True

    @property
    def may_hand_over(self) -> bool:
        """Whether gradients may leave a backward pass before its end, as planned."""
        return True

    @property
    def may_expand_zeros(self) -> bool:
        """Whether gradients that do not exist may be one zero, expanded."""
        return True

    def choose_sizes(self, varying: VaryingSizes) -> Sizes:
        """Return the sizes for which a step is planned whose sizes vary."""
        return varying.largest()

    def lower(self, program: JointProgram, schedule: Schedule) -> LoweredStep:
        """Return the forward and backward modules that run a schedule."""
        return lower(program, schedule)

    def check_may_run(self) -> None:
        """Stop a step that is only planned.

        Raises
        ------
        StoppedBeforeRunningError
            If it is.
        """
        if self.stop_before_running:
            raise StoppedBeforeRunningError

    def compile_forward(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[[list[Any]], Any]:
        """Compile the forward pass of a training step."""
        return self.compile_pass(module, example_inputs)

    def compile_backward(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[[list[Any]], Any]:
        """Compile the backward pass of a training step."""
        return self.compile_pass(module, example_inputs)

    def before_backward(self, module: fx.GraphModule) -> Callable[[list[Any]], None]:  # noqa: ARG002
        """Return what a backward pass begins with; may change its inputs in place."""
        return lambda _values: None

    def compile_inference(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[[list[Any]], Any]:
        """Compile a graph without gradients."""
        return self.compile_pass(module, example_inputs)

    def compile_pass(
        self, module: fx.GraphModule, _example_inputs: Sequence[Any]
    ) -> Callable[[list[Any]], Any]:
        """Return boxed code that drops each value at its last use."""
        put_real_groups(module)
        module.graph.set_codegen(BoxedCodeGen())
        module.recompile()
        forward = runnable(module)

        def run(arguments: list[Any]) -> Any:
            self.check_may_run()
            return forward(arguments)

        return boxed(run)


def _allow_retaining(forward: fx.GraphModule, output_count: int) -> None:
    """Let what forward saves outlive a backward pass, for ``retain_graph=True``.

    The tracer takes what is saved, and seen from its fake tensor to be nobody else's,
    for a block that backward may overwrite, and then refuses to retain it. Backward
    overwrites only what it made.
    """
    (output,) = forward.graph.find_nodes(op="output")
    values = output.args[0]
    held = set(values[:output_count])
    for node in values[output_count:]:
        if node.op != "placeholder" and node not in held:
            node.meta.pop("val", None)
