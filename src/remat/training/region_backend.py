"""A backend for ``torch.compile`` that runs the graphs of one step by one plan."""

import copy
import gc
import logging
import time
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from remat.capture.gathering import RegionCode
from remat.capture.joint_program import InputSpec, JointProgram, analyse
from remat.capture.readers_apart import with_readers_apart
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
    sizes: SizeInputs | None
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


logger = logging.getLogger("remat")

_BY_VALUE = DynamicOutputShapeException, DataDependentOutputException
"""What is raised where a size or a number depends on values."""

_LONG_S = 1.0
"""Steps of training that wait longer for the compiler are told."""

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


class _Traced:
    """A function that the tracer handed over, and what it was compiled to.

    Parameters
    ----------
    backend
        Compiles it.
    module, inputs
        What the tracer hands over.
    """

    def __init__(
        self, backend: "RegionBackend", module: fx.GraphModule, inputs: Sequence[Any]
    ) -> None:
        self._backend = backend
        self._module = module
        self._specs = backend.describe_inputs(module, inputs)
        self._sources = sources_of(module)
        self._sizes = size_inputs(module, inputs, ())
        # Inputs that are given once more, behind the others.
        self._again: list[int] = []
        self._is_compiled, self._is_for_all_sizes = False, True
        # What the tracer knew of the sizes when the trace was over.
        self._conditions: tuple[Any, ...] | None = None
        # By sizes, and by the autocast of backward passes: under each it is another
        # graph.
        self._codes: dict[tuple[Sizes, Any], RegionCode] = {}
        self._variants: dict[tuple[RegionCode, int], Callable[..., Any]] = {}
        # The same for the sizes of a graph only.
        self._alone: dict[tuple[RegionCode, int], Callable[..., Any]] = {}

    @property
    def sources(self) -> tuple[str, ...]:
        """Where its tensors come from."""
        return tuple(self._sources[place] for place in self._tensor_places())

    @property
    def signature(self) -> tuple[str, ...]:
        """What it is given and what it calls: the same where other sizes are traced."""
        calls = (
            str(node.target)
            for node in self._module.graph.nodes
            if node.op != "placeholder" and isinstance(example_of(node), torch.Tensor)
        )
        return *self.sources, *calls

    def take_apart(self, numbers: Collection[int]) -> bool:
        """Let each reader of some tensors have one of its own; say if any has now.

        Tensors are numbered in the order of the inputs, sizes left out.
        """
        places = self._tensor_places()
        module, again = with_readers_apart(self._module, [places[n] for n in numbers])
        if not again:
            return False
        self._module = module
        self._again += again
        self._specs += [self._specs[position] for position in again]
        self._sources += [self._sources[position] for position in again]
        if self._sizes is not None:
            self._sizes = replace(self._sizes, traced=tuple(self._examples()))
        self._forget()
        return True

    def _forget(self) -> None:
        self._is_compiled = False
        self._codes.clear()
        self._variants.clear()
        self._alone.clear()

    def _begin_with(self, inputs: Sequence[Any]) -> None:
        """Measure operators at the sizes of a call from now on."""
        sizes = self._sizes
        if sizes is not None and sizes.sizes_in(inputs) != sizes.first:
            self._sizes = sizes.begun_with(inputs)
            self._forget()

    def is_of(self, code: RegionCode) -> bool:
        """Whether a graph is one of its."""
        return code in self._codes.values()

    def repeated(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return what a call is given, and once more what has several readers."""
        return [*inputs, *(inputs[position] for position in self._again)]

    def _examples(self) -> list[Any]:
        nodes = self._module.graph.find_nodes(op="placeholder")
        return [example_of(node) for node in nodes]

    def _tensor_places(self) -> list[int]:
        examples = enumerate(self._examples())
        return [place for place, value in examples if not is_symbol(value)]

    def code(self, inputs: Sequence[Any]) -> RegionCode:
        """Return which graph a call is of."""
        sizes = None if self._sizes is None else self._sizes.sizes_in(inputs)
        return self._code(sizes)

    def _code(self, sizes: Sizes | None = None) -> RegionCode:
        """Return the graph at these sizes, or at those at which it was traced."""
        first = () if self._sizes is None else self._sizes.first
        sizes = first if sizes is None else sizes
        key = sizes, self._backend.backward_autocast
        if key not in self._codes:
            # Plans keep those that they are of.
            others = [each for each in self._codes if each[0] != first]
            if len(others) >= _MOST_SIZES:
                gone = self._codes.pop(others[0])
                for own in [own for own in self._alone if own[0] is gone]:
                    del self._alone[own]
            is_own = sizes == first or not self._is_for_all_sizes
            traced = None if is_own else self._code()
            self._codes[key] = RegionCode(self.sources, sizes, traced)
        return self._codes[key]

    def variant(
        self, choice: RegionChoice, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Return what runs a graph in an order, compiled if it is new."""
        key, own = (choice.code.trace, choice.number), (choice.code, choice.number)
        if key in self._variants:
            return self._variants[key]
        if self._is_for_all_sizes and own not in self._alone:
            compiled = self._backend.compile_in_order(
                self._module,
                _each_once(inputs, len(self._again)),
                self._specs,
                choice,
                self._sizes,
            )
            known = self._conditions
            if self._sizes is None or known in (None, self._sizes.conditions()):
                self._variants[key] = compiled
                return compiled
            self._backend.note_each_size("a size became fixed when its trace was over")
        if own not in self._alone:
            self._alone[own] = self._compiled_alone(inputs, choice)
        return self._alone[own]

    def _compiled_alone(
        self, inputs: Sequence[Any], choice: RegionChoice
    ) -> Callable[..., Any]:
        """Return what runs a graph in an order, for the sizes of a call only."""
        module = _with_numbers(self._module, inputs)
        places = [p for p, v in enumerate(inputs) if isinstance(v, torch.Tensor)]
        inputs = _each_once(inputs, len(self._again))
        compiled = self._backend.compile_in_order(
            module,
            [inputs[place] for place in places],
            [self._specs[place] for place in places],
            choice,
            None,
        )
        return lambda *values: compiled(*[values[place] for place in places])

    def compile_first(self, inputs: Sequence[Any]) -> RegionCode | None:
        """Compile it to run in the order that keeps nothing, and return which it is.

        Where that cannot be done for all sizes together, each is compiled when it is
        called, and the answer is ``None``.
        """
        code, self._is_compiled = self._code(), True
        try:
            self.variant(RegionChoice(code=code, number=FRUGAL), inputs)
        except _BY_VALUE:
            raise
        # Operators run with symbols in the place of numbers, and may raise anything.
        except Exception as error:
            if self._sizes is None:
                raise
            self._is_for_all_sizes = False
            self._codes.clear()
            self._backend.note_each_size(str(error).partition("\n")[0])
            return None
        return code

    def ready(self, inputs: Sequence[Any]) -> RegionCode:
        """Return which graph a call is of, once it is known what it does."""
        begun = self._backend.begun
        if begun is not None and self not in begun:
            begun.add(self)
            self._begin_with(inputs)
        if not self._is_compiled:
            self.compile_first(inputs)
        if self._sizes is not None and self._conditions is None:
            self._conditions = self._sizes.conditions()
        code = self.code(inputs)
        if not self._is_for_all_sizes:
            self.variant(RegionChoice(code=code, number=FRUGAL), inputs)
        return code


def _with_numbers(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return a traced function with the numbers of a call in the place of inputs."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    nodes = module.graph.find_nodes(op="placeholder")
    for node, value in zip(nodes, inputs, strict=True):
        is_number = not isinstance(value, torch.Tensor)
        copies[node] = value if is_number else graph.node_copy(node)
    graph.output(graph.graph_copy(module.graph, copies))
    return fx.GraphModule(module, graph)


def _each_once(inputs: Sequence[Any], again_count: int) -> Sequence[Any]:
    """Return inputs, of which the last are others once more, as tensors of their own.

    The tracer takes a tensor that is given twice for one input.
    """
    count = len(inputs) - again_count
    return [
        *inputs[:count],
        *(v.detach().requires_grad_(v.requires_grad) for v in inputs[count:]),
    ]


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
        self._traced = weakref.WeakSet[_Traced]()
        # Which graphs were called since each measures at the sizes of its next call.
        self.begun: weakref.WeakSet[_Traced] | None = None
        # Of which tensors each reader gets one of its own, by the graphs' signatures.
        self._apart: dict[tuple[str, ...], set[int]] = {}
        # How many graphs were traced for all sizes while steps ran.
        self._sized_trace_count = 0

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
        traced = _Traced(self, module, example_inputs)
        self._traced.add(traced)
        # Not while the tracer runs, which would take new tensors for new sizes.
        apart = set(self._apart.get(traced.signature, ()))
        # While a step runs, memory counts.
        is_trace_held = self.planner.running is not None

        def run(*inputs: Any) -> Any:
            nonlocal is_trace_held
            planner = self.planner
            if apart:
                traced.take_apart(apart)
                apart.clear()
            if is_trace_held:
                is_trace_held = False
                # The tracer's own objects refer to each other and to what it was given.
                # It collects young ones only, so that values of the step would stay.
                gc.collect()
            between = planner.between.leading_to(inputs)
            given = traced.repeated(inputs)
            code = traced.ready(given)
            choice = planner.choice_for(code, between)
            compiled = traced.variant(choice, given)
            self._called = code
            outputs = compiled(*given)
            if planner.gathering is not None:
                planner.gathering.note_node(outputs)
            planner.check_region_end(choice)
            return outputs

        try:
            code = traced.compile_first(example_inputs)
        except _BY_VALUE as error:
            # The tracer takes a smaller graph then, or none.
            self.planner.left_out = str(error)
            raise
        running = self.planner.running
        if running is not None and code is not None:
            self._sized_trace_count += bool(code.sizes)
            # Once for all sizes, and where a size of 0 or 1 came first, once more.
            expected_count = 2 * len(running.step.choices)
            if not code.sizes or self._sized_trace_count > expected_count:
                self.planner.note_repetition(self.planner.programs[code])
        return run

    @contextmanager
    def measuring_here(self) -> Generator[None]:
        """Measure operators of each graph at the sizes of its first call inside."""
        self.begun = weakref.WeakSet()
        try:
            yield
        finally:
            self.begun = None

    def take_apart(self, tensors: Mapping[RegionCode, Collection[int]]) -> bool:
        """Let readers of tensors that graphs are given have their own.

        Returns
        -------
        Whether any has now. What is traced again, for other sizes, will be so as well.
        """
        is_any = False
        for code, numbers in tensors.items():
            for traced in [each for each in self._traced if each.is_of(code)]:
                signature = traced.signature
                if traced.take_apart(numbers):
                    self._apart.setdefault(signature, set()).update(numbers)
                    is_any = True
        return is_any

    def compile_in_order(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        specs: list[InputSpec],
        choice: RegionChoice,
        sizes: SizeInputs | None,
    ) -> Callable[..., Any]:
        """Compile one graph, to run in one order."""
        self._now = _Compiling(choice=choice, inputs=specs, sizes=sizes)
        began_s = time.monotonic()
        with preserve_rng_state():
            compiled = self.compile(module, inputs, specs, sizes)
        took_s = time.monotonic() - began_s
        if took_s > _LONG_S and self.planner.running is not None:
            logger.info(
                "compiled a graph of %s in %.1f s, for this step and later ones",
                self.name,
                took_s,
            )
        return compiled

    def note_each_size(self, reason: str) -> None:
        """Say, once, that a graph is compiled for each of its sizes."""
        self.failure = None
        if "each size" not in self._told:
            self._told.add("each size")
            logger.warning(
                "a graph of %s, of which some size depends on values, cannot be traced "
                "once for all sizes: %s. Each size is traced when it comes, which takes "
                "longer than the step",
                self.name,
                reason,
            )

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
            for storage in program.storages_of[node]:
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
        traced, sizes, varying = module, self._now.sizes, None
        if sizes is not None:
            # What runs keeps the values with symbols.
            traced = fx.GraphModule(module, copy.deepcopy(module.graph))
            varying = VaryingSizes(traced, sizes)
            varying.set_sizes(self.choose_sizes(varying))
        program = analyse(
            traced,
            forward_output_count=len(output.args[0]),
            inputs=self._now.inputs,
            name=self.name,
            varying=varying,
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
