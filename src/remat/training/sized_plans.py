"""One plan for many sizes: a planned step as it is at other sizes, judged again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.capture.joint_program import JointProgram
from remat.capture.varying_sizes import Sizes, expression_of, is_symbol
from remat.core.graph import Op, TrainingGraph
from remat.core.units import round_up
from remat.planning.plan import Plan
from remat.profile.costing import granule_bytes


@dataclass(frozen=True, kw_only=True)
class SizedStep:
    """A step, or a part of one, whose sizes vary, with its costs at some of them.

    Parameters
    ----------
    program
        What was traced, without what surrounds it, at these sizes.
    graph
        The same with its costs; may have more behind it.
    numbers
        Per storage of the traced step its bytes, with symbols, ``None`` if fixed.
    traced_bytes
        The same at these sizes.
    bounds
        Per distinct expression the number, and what it is at these sizes.
    """

    program: JointProgram
    graph: TrainingGraph
    numbers: tuple[Any, ...]
    traced_bytes: tuple[Any, ...]
    bounds: Mapping[Any, tuple[Any, Any]]

    @classmethod
    def of(cls, program: JointProgram, graph: TrainingGraph) -> "SizedStep":
        """Return what is needed to know a step at other sizes than its own."""
        return cls(**cls._sized(program, graph))

    @staticmethod
    def _sized(program: JointProgram, graph: TrainingGraph) -> dict[str, Any]:
        numbers = [
            None if by is None else by.symbolic_bytes() for by in program.sized_by
        ]
        varying = program.varying
        traced = (
            numbers if varying is None else varying.evaluated(numbers, program.sizes)
        )
        return {
            "program": program,
            "graph": graph,
            "numbers": tuple(numbers),
            "traced_bytes": tuple(traced),
            "bounds": {
                expression_of(number): (number, size)
                for number, size in zip(numbers, traced, strict=True)
                if is_symbol(number)
            },
        }

    def covers(self, sizes: Sizes) -> bool:
        """Whether operators were measured for sizes at least as large."""
        return all(a <= b for a, b in zip(sizes, self.program.sizes, strict=True))

    def sum_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of all blocks at other sizes."""
        varying = self.program.varying
        numbers = [] if varying is None else varying.evaluated(self.numbers, sizes)
        return sum(number for number in numbers if number is not None)

    def is_larger(self, sizes: Sizes) -> bool:
        """Whether at other sizes no block is larger, so that the plan holds there."""
        varying = self.program.varying
        if varying is None or not self.covers(sizes):
            return False
        bounds = self.bounds.values()
        found = varying.evaluated([number for number, _ in bounds], sizes)
        return all(new <= old for new, (_, old) in zip(found, bounds, strict=True))

    def program_at(self, sizes: Sizes) -> JointProgram:
        """Return the traced step at other sizes, with what its operators allocate."""
        varying = self.program.varying
        assert varying is not None  # noqa: S101
        new_bytes = varying.evaluated(self.numbers, sizes)
        return replace(self._with_bytes(self.program, new_bytes), sizes=sizes)

    def program_like(self, other: JointProgram) -> JointProgram | None:
        """Return another trace of the step, with what its operators allocate.

        ``None`` if it is not the same step, op for op, or is larger anywhere.
        """
        if not have_same_ops(self.program.graph, other.graph):
            return None
        new_bytes = [
            None if by is None else by.symbolic_bytes() for by in other.sized_by
        ]
        if other.varying is not None:
            new_bytes = other.varying.evaluated(new_bytes, other.sizes)
        pairs = zip(new_bytes, self.traced_bytes, strict=True)
        if any(new is not None and new > traced for new, traced in pairs):
            return None
        return self._with_bytes(other, new_bytes)

    def _with_bytes(
        self, program: JointProgram, new_bytes: Sequence[Any]
    ) -> JointProgram:
        storages = list(program.graph.storages)
        for position, new in enumerate(new_bytes):
            planned = self.graph.storages[position].size_bytes
            if new is not None:
                planned = self.allocated(planned, self.traced_bytes[position], new)
            storages[position] = replace(storages[position], size_bytes=planned)
        graph = replace(program.graph, storages=tuple(storages))
        return replace(program, graph=graph)

    def allocated(self, planned: int, traced: int, new: int) -> int:
        """Return the bytes that a block really takes at other sizes.

        Parameters
        ----------
        planned, traced
            What it takes at the plan's sizes, as measured, and what the tracer says.
        new
            What the tracer says of the other sizes. Where it was wrong, the block is
            not taken to become smaller, and to grow in proportion.
        """
        granule = granule_bytes(self.program.device.type)
        if planned == round_up(traced, granule):
            return round_up(new, granule)
        return planned if new <= traced else math.ceil(planned * new / traced)

    def with_costs(
        self, surrounded: TrainingGraph, measured: TrainingGraph
    ) -> TrainingGraph:
        """Return a graph of other sizes with the costs at the plan's sizes.

        The workspace of an operator is taken to be that at the sizes at which it was
        measured, and to grow with the largest of its operands where one is larger than
        there.

        Parameters
        ----------
        surrounded
            The graph, with what surrounds the step.
        measured
            The graph at sizes that are no smaller, whose workspace counts, too.
        """
        graphs = [self.graph]
        graphs += [] if measured is self.graph else [measured]
        ops: list[Op] = []
        for position, op in enumerate(surrounded.ops):
            if not op.is_external:
                sizes = [_workspace(graph, position, surrounded) for graph in graphs]
                planned = self.graph.ops[position]
                ops.append(
                    replace(op, cost_ns=planned.cost_ns, workspace_bytes=(max(sizes),))
                )
            else:
                ops.append(op)
        return replace(surrounded, ops=tuple(ops))


@dataclass(frozen=True, kw_only=True)
class SizedPlan(SizedStep):
    """A plan of a step whose sizes vary, made for some of them."""

    plan: Plan

    @classmethod
    def planned(cls, program: JointProgram, plan: Plan) -> "SizedPlan":
        """Return what is needed to judge a plan at other sizes than its own."""
        return cls(plan=plan, **cls._sized(program, plan.graph))


def have_same_ops(first: TrainingGraph, second: TrainingGraph) -> bool:
    """Return whether two graphs differ in sizes alone."""
    if len(first.storages) != len(second.storages):
        return False
    one, other = (
        [(op.kind, op.reads, op.writes, op.phase) for op in graph.ops]
        for graph in (first, second)
    )
    return one == other


def _workspace(known: TrainingGraph, position: int, other: TrainingGraph) -> int:
    """Return the workspace of an op at other sizes than it was measured at."""
    op, before, now = known.ops[position], known.storages, other.storages
    (workspace_bytes,) = op.workspace_bytes
    if not workspace_bytes:
        return 0
    growth = max(
        (
            now[s].size_bytes / before[s].size_bytes
            for s in (*op.reads, *op.writes)
            if before[s].size_bytes
        ),
        default=1.0,
    )
    return math.ceil(workspace_bytes * max(1.0, growth))
