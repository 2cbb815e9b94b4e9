"""A backend for ``torch.compile`` that runs the graphs of one step by one plan."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from remat.capture.gathering import RegionCode
from remat.capture.joint_program import InputSpec, JointProgram, analyse
from remat.capture.surroundings import with_pieces
from remat.capture.tracing import GRADIENT_INSIDE
from remat.capture.varying_sizes import (
    SizeInputs,
    Sizes,
    VaryingSizes,
    is_symbol,
    size_inputs,
    symbolic_value,
)
from remat.core.errors import CaptureError, ExecutionError
from remat.core.schedule import Schedule
from remat.planning.regions import RegionOrder, frugal_order
from remat.runtime.lowering import LoweredStep, lower, lower_again, saved_name
from remat.runtime.remade import Given, remade
from remat.torch_compat.attributes import boxed
from remat.torch_compat.metadata import example_of
from remat.torch_compat.names import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    preserve_rng_state,
)
from remat.training.region_planning import FRUGAL, RegionChoice, RegionPlanner
from remat.training.step_backend import PlannedBackend, sources_of


@dataclass(kw_only=True)
class _Compiling:
    """One graph that is compiled to run in one order."""

    choice: RegionChoice
    inputs: list[InputSpec]
    program: JointProgram = field(init=False)
    # Positions, among what forward saves, of what is not kept.
    dropped: tuple[int, ...] = ()
    again: "_RunAgain | None" = None


@dataclass(frozen=True, kw_only=True)
class _RunAgain:
    """How a graph runs forward again as a whole.

    Parameters
    ----------
    run
        Returns what it makes, from a list of sizes and of what it starts from.
    sizes
        The positions of these sizes among the arguments of forward.
    given
        Of what it starts from, the position among the arguments of forward, or, from
        what forward saves for backward, the position there: negative from -1 on.
    made
        Positions of what it makes among the outputs of forward.
    unread
        Those among ``given`` that operators take and what is made does not depend on.
    """

    run: Callable[[list[Any]], Any]
    sizes: tuple[int, ...]
    given: tuple[int, ...]
    made: tuple[int, ...]
    unread: frozenset[int]


_DROPPED = "remat_dropped"


def _dropped_inputs(backward: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of inputs of backward that forward does not keep."""
    inputs = backward.graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(inputs) if node.meta.get(_DROPPED))


def _run_with(
    sizes: list[Any], run: Callable[[list[Any]], Any], given: list[Any]
) -> Any:
    """Run what takes sizes before all else; whoever calls keeps none of the rest."""
    given[:0] = sizes
    return run(given)


class _Codes:
    """The codes of one traced function, one for each of the sizes that it has had.

    Parameters
    ----------
    module
        What the tracer hands over.
    sizes
        The inputs that are sizes, ``None`` if none varies.
    """

    def __init__(self, module: fx.GraphModule, sizes: SizeInputs | None) -> None:
        values = map(example_of, module.graph.find_nodes(op="placeholder"))
        self._sources = tuple(
            source
            for source, value in zip(sources_of(module), values, strict=True)
            if not is_symbol(value)
        )
        self._sizes = sizes
        # Under each autocast of backward passes it is another graph.
        self._traced: dict[Any, RegionCode] = {}
        self._known: dict[Any, RegionCode] = {}

    def traced(self, state: Any) -> RegionCode:
        """Return the code at the sizes at which it was traced."""
        if state not in self._traced:
            first = () if self._sizes is None else self._sizes.first
            self._traced[state] = RegionCode(self._sources, first)
        return self._traced[state]

    def of(self, state: Any, inputs: Sequence[Any]) -> RegionCode:
        """Return the code at the sizes of a call."""
        traced = self.traced(state)
        if self._sizes is None:
            return traced
        sizes = self._sizes.sizes_in(inputs)
        if sizes == traced.sizes:
            return traced
        found = self._known.get((state, sizes))
        if found is None:
            # Plans keep those that they are of.
            if len(self._known) == _MOST_SIZES:
                del self._known[next(iter(self._known))]
            found = RegionCode(self._sources, sizes, traced)
            self._known[state, sizes] = found
        return found


_MOST_SIZES = 256
"""How many sizes of one trace are remembered."""


class RegionBackend(PlannedBackend):
    """A ``torch.compile`` backend for models that the tracer splits.

    Each graph is compiled once for each order in which plans run it.

    Parameters
    ----------
    planner
        Not kept alive: the compiler never forgets a backend.
    name
        Name of the training graphs, for people.
    """

    # What is compiled now, and what was called last.
    _now: "_Compiling"
    _called: RegionCode

    def __init__(
        self,
        planner: RegionPlanner,
        name: str,
        *,
        is_only_planned: bool = False,
        backward_in_autocast: bool = False,
    ) -> None:
        super().__init__(
            self._schedule,
            name,
            is_only_planned=is_only_planned,
            backward_in_autocast=backward_in_autocast,
        )
        self._planner = weakref.ref(planner)

    @property
    def planner(self) -> RegionPlanner:
        """The planner.

        Raises
        ------
        ExecutionError
            If it is gone.
        """
        planner = self._planner()
        if planner is None:
            raise ExecutionError("the plan of this model was released")
        return planner

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile one graph, to run in the order that keeps nothing; others later."""
        specs = self.describe_inputs(module, example_inputs)
        sizes = size_inputs(module, example_inputs, ())
        codes = _Codes(module, sizes)
        variants: dict[tuple[RegionCode, int], Callable[..., Any]] = {}

        def variant(choice: RegionChoice, inputs: Sequence[Any]) -> Callable[..., Any]:
            key = choice.code.trace, choice.number
            if key not in variants:
                self._now = _Compiling(choice=choice, inputs=specs)
                with preserve_rng_state():
                    compiled = self.compile(module, inputs, specs, sizes)
                variants[key] = compiled
            return variants[key]

        # While a step runs, memory counts.
        is_trace_held = self.planner.running is not None

        def run(*inputs: Any) -> Any:
            nonlocal is_trace_held
            planner = self.planner
            if is_trace_held:
                is_trace_held = False
                # The tracer's own objects refer to each other and to what it was given.
                # It collects young ones only, so that values of the step would stay.
                gc.collect()
            between = planner.between.leading_to(inputs)
            code = codes.of(self.backward_autocast, inputs)
            choice = planner.choice_for(code, between)
            compiled = variant(choice, inputs)
            self._called = code
            outputs = compiled(*inputs)
            if planner.gathering is not None:
                planner.gathering.note_node(outputs)
            planner.check_region_end(choice)
            return outputs

        try:
            code = codes.traced(self.backward_autocast)
            first = RegionChoice(code=code, number=FRUGAL)
            variant(first, example_inputs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            # The tracer takes a smaller graph then, or none.
            self.planner.left_out = str(error)
            raise
        if self.planner.running is not None:
            self.planner.note_repetition(self.planner.programs[first.code])
        return run

    def given_inputs(
        self, inputs: Sequence[InputSpec], values: Sequence[Any]
    ) -> list[InputSpec]:
        """Return the descriptions of inputs; their blocks are known in all regions."""
        # Equal blocks share their code, so it is ready for steps that add to gradients.
        may_add = not self.planner.groups
        return [
            spec.given(
                value,
                has_gradient=may_add
                and isinstance(value, nn.Parameter)
                and value.requires_grad,
            )
            if isinstance(value, torch.Tensor)
            else spec
            for spec, value in zip(inputs, values, strict=True)
        ]

    @property
    def takes_sizes(self) -> bool:
        """Whether sizes may be among the inputs of a traced function."""
        return True

    def choose_sizes(self, varying: VaryingSizes) -> Sizes:
        """Return the sizes at which a graph was traced."""
        return varying.inputs.first

    @property
    def is_alone(self) -> bool:
        """Whether the step is one graph: others may differentiate what one returns."""
        return False

    @property
    def may_hand_over(self) -> bool:
        """Whether gradients may leave a backward pass before its end, as planned."""
        running = self.planner.running
        return running is not None and running.step.composed.adds

    def _schedule(self, program: JointProgram) -> tuple[JointProgram, Schedule]:
        if program.pieces:
            fingerprint = f"{program.fingerprint} {program.pieces}"
            program = replace(with_pieces(program), fingerprint=fingerprint)
        self._note(program)
        order = self._now.choice.order
        if order is None:
            order = RegionOrder(order=tuple(frugal_order(program.graph)))
        return program, order.schedule(program.graph)

    def _note(self, program: JointProgram) -> None:
        self._now.program = program
        self.planner.programs.setdefault(self._now.choice.code.trace, program)

    def lower(self, program: JointProgram, schedule: Schedule) -> LoweredStep:
        """Return the modules that run a region's part of the plan."""
        order = self._now.choice.order
        fullest = None if order is None else order.fullest_steps(schedule)
        lowered = lower(program, schedule, fullest)
        if order is not None and order.remade:
            inputs = list(lowered.backward.graph.find_nodes(op="placeholder"))
            # Forward returns sizes last, and backward is given them first.
            saved = [str(n.target) for n in inputs if not is_symbol(symbolic_value(n))]
            names = set(map(saved_name, order.remade))
            for node in inputs:
                # Backward is compiled when it is first called, long after forward.
                node.meta[_DROPPED] = node.target in names
            self._now.dropped = tuple(
                place for place, name in enumerate(saved) if name in names
            )
            if order.again:
                self._now.again = self._run_again(program, order, saved)
        return lowered

    def _run_again(
        self, program: JointProgram, order: RegionOrder, saved: Sequence[str]
    ) -> _RunAgain:
        ops = [program.graph.ops[op] for op in order.again]
        writes = [s for op in ops for s in op.writes]
        reads = {s for op in ops for s in op.reads}
        made = [storage for storage in writes if storage in order.remade]
        module, given, sizes = lower_again(program, order.again, made)
        inputs: dict[int, int] = {}
        nodes = list(program.module.graph.find_nodes(op="placeholder"))
        for position, node in enumerate(nodes):
            for storage in program.storages_of.get(node, ()):
                inputs.setdefault(storage, position)
        outputs: dict[int, int] = {}
        for position, node in enumerate(program.forward_values):
            if isinstance(node, fx.Node):
                for storage in program.storages_of[node]:
                    outputs.setdefault(storage, position)
        return _RunAgain(
            run=self.compile_pass(module, ()),
            sizes=tuple(nodes.index(node) for node in sizes),
            given=tuple(
                inputs[storage]
                if storage in inputs
                else -1 - saved.index(saved_name(storage))
                for storage in given
            ),
            made=tuple(outputs[storage] for storage in made),
            unread=frozenset(
                inputs[storage] for storage in {*given} - reads if storage in inputs
            ),
        )

    def check_may_run(self) -> None:
        """Let the forward pass for planning run, in which later graphs show."""

    def compile_forward(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[[list[Any]], Any]:
        """Compile a forward pass, which shows what it does in a pass for planning."""
        forward = self.compile_pass(module, example_inputs)
        if self._now.dropped or self._now.again is not None:
            forward = self._dropping(forward)
        return self._watched(forward)

    def _dropping(
        self, forward: Callable[[list[Any]], Any]
    ) -> Callable[[list[Any]], Any]:
        """Return a forward pass that does not keep what is made again."""
        again, dropped = self._now.again, self._now.dropped
        first = len(self._now.program.forward_values)

        def run(arguments: list[Any]) -> Any:
            running = self.planner.running
            if running is None:
                return forward(arguments)
            # No reference may keep what forward lets go.
            known = [] if again is None else again.given
            given = {
                place: Given.of(arguments[place], is_read=place not in again.unread)
                for place in known
                if again is not None and place >= 0
            }
            sizes = [] if again is None else [arguments[place] for place in again.sizes]
            values = list(forward(arguments))
            if again is not None:
                given |= {
                    place: Given.of(values[first - 1 - place])
                    for place in known
                    if place < 0
                }
                running.remade.note_maker(
                    partial(_run_with, sizes, again.run),
                    [given[place] for place in known],
                    [values[place] for place in again.made],
                )
            for place in dropped:
                values[first + place] = running.remade.dropped(values[first + place])
            return values

        return boxed(run)

    def before_backward(self, module: fx.GraphModule) -> Callable[[list[Any]], None]:
        """Return what a backward pass begins with; it may not run inside of forward."""
        dropped = _dropped_inputs(module)

        def begin(arguments: list[Any]) -> None:
            # Autograd may go backward when the model, and its planner, are gone.
            planner = self._planner()
            if planner is not None and planner.gathering is not None:
                raise CaptureError(GRADIENT_INSIDE)
            for place in dropped:
                arguments[place] = remade(arguments[place])

        return begin

    def compile_inference(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[[list[Any]], Any]:
        """Compile a graph without gradients, which is a region as well."""
        (output,) = module.graph.find_nodes(op="output")
        program = analyse(
            module,
            forward_output_count=len(output.args[0]),
            inputs=self._now.inputs,
            name=self.name,
        )
        self._note(program)
        return self._watched(self.compile_pass(module, example_inputs))

    def _watched(
        self, forward: Callable[[list[Any]], Any]
    ) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            gathering = self.planner.gathering
            if gathering is None:
                return forward(arguments)
            code = self._called
            gathering.begin(code, self.planner.program_of(code), arguments)
            values = gathering.known_values()
            if values is None:
                values = forward(arguments)
            arguments.clear()
            return gathering.end(values)

        return boxed(run)
