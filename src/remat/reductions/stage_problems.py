"""Stage problems: the step of one stage of a chain, as a training graph of its own.

A solver for training graphs can then say how the stage is best run by itself. Its graph
has what the stage makes, forward and backward, and the gradients that it is given,
which appear at the boundary. What comes from elsewhere is there all the time and left
out, so that the graph describes the stage up to names and places: stages with equal
graphs are alike, and what solves one solves all.

What is live at the boundary besides the stage's output and the gradients given is what
the stage saves. A storage that appears at the boundary and that nobody reads, as large
as the budget less what may be there, keeps that within a limit
(:meth:`StageProblem.problem`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY
from remat.core.platform import single_device
from remat.core.problem import Problem
from remat.reductions.stage_parts import PartOption, StagePart, part_option

_KIND = "stage"
_ONCE = "it runs once in the whole step"


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """The step of one stage, and the way back to the whole graph.

    Parameters
    ----------
    graph
        The step of the stage alone. Its names are empty and its numbers depend on the
        stage alone, so that stages that are alike have equal graphs. Ends are its
        forward outputs; what others read later, its final outputs.
    ops
        Per op of ``graph``, the op of the whole graph.
    work_of_caller
        Ops of the whole graph that come after the stage's backward, and are not in
        ``graph``.
    """

    graph: TrainingGraph
    ops: tuple[int, ...]
    work_of_caller: tuple[int, ...] = ()

    @cached_property
    def given_bytes(self) -> int:
        """Bytes at the boundary that are not saved: ends, and the gradients given."""
        graph = self.graph
        return _total(graph, {*graph.forward_outputs, *graph.tangents})

    @cached_property
    def all_bytes(self) -> int:
        """Bytes within which every order fits that makes nothing that is there."""
        storages = sum(s.size_bytes for s in self.graph.storages)
        return storages + max(op.workspace_bytes[0] for op in self.graph.ops)

    def order_of(self, option: PartOption) -> list[int]:
        """Return the order of the stage's step that an option of it stands for."""
        number = {op: index for index, op in enumerate(self.ops)}
        backward = [number[op] for op in option.backward if op in number]
        return [*range(self.graph.forward_count), BOUNDARY, *backward]

    def problem(self, saved_bytes: int, peak_bytes: int) -> Problem:
        """Return the question for the cheapest run of the stage within two limits.

        Parameters
        ----------
        saved_bytes
            Most bytes that the stage saves from forward to backward, at least 0.
        peak_bytes
            Most bytes of the stage's own at any time, at least 1.
        """
        filler_bytes = peak_bytes - self.given_bytes - saved_bytes
        graph = self.graph
        if filler_bytes > 0:
            filler = Storage(name="", size_bytes=filler_bytes)
            graph = replace(
                graph,
                storages=(*graph.storages, filler),
                tangents=(*graph.tangents, len(graph.storages)),
            )
        return Problem(graph=graph, platform=single_device(peak_bytes, _KIND))

    def option(
        self, whole: TrainingGraph, part: StagePart, end: int, order: Sequence[int]
    ) -> PartOption:
        """Return the option of a stage that an order of its step stands for.

        Parameters
        ----------
        whole
            The whole training graph.
        part, end
            The stage that the problem was made of, and the storage it ends in.
        order
            Ops of :attr:`graph` and the boundary. Only what comes after the boundary
            counts: forward runs what is read of it.
        """
        after = order[list(order).index(BOUNDARY) + 1 :]
        backward = [*(self.ops[op] for op in after), *self.work_of_caller]
        return part_option(whole, part.forward, (end,), backward)


def stage_problem(
    graph: TrainingGraph, part: StagePart, end: int, kind_index: int
) -> StageProblem | None:
    """Return the step of a stage alone; ``None`` if there is nothing to choose.

    Parameters
    ----------
    graph
        The whole training graph.
    part, end
        The stage, its first option the one that keeps everything, and the storage that
        it ends in.
    kind_index
        Position of the device's kind in the ops' costs.

    Notes
    -----
    Time O(reads and writes of the stage's ops, and of those that read what it makes).
    """
    keeping = part.options[0]
    caller = tuple(op for op in keeping.backward if graph.ops[op].is_external)
    ops = [*keeping.saving, *(op for op in keeping.backward if op not in caller)]
    if not keeping.kept:
        return None
    inside = set(ops)
    made = {s for op in ops for s in graph.ops[op].writes}
    given = {
        storage
        for op in ops
        for storage in graph.ops[op].reads
        if (graph.producers[storage] or 0) >= graph.forward_count
        and storage not in made
    }
    number = _numbers(graph, ops, made | given)
    storages = sorted(number, key=number.__getitem__)
    return StageProblem(
        graph=TrainingGraph(
            name="",
            storages=tuple(
                Storage(name="", size_bytes=graph.storages[s].size_bytes)
                for s in storages
            ),
            ops=tuple(_op(graph, op, number, kind_index) for op in ops),
            forward_outputs=(number[end],) if end in number else (),
            tangents=tuple(number[s] for s in storages if s in given),
            final_outputs=tuple(
                number[s]
                for s in storages
                if s != end and _is_wanted_later(graph, s, inside, part)
            ),
            device_kinds=(_KIND,),
        ),
        ops=tuple(ops),
        work_of_caller=caller,
    )


def _numbers(
    graph: TrainingGraph, ops: Iterable[int], counted: set[int]
) -> dict[int, int]:
    """Return a number per storage: in order of appearance, given ones by size."""
    found: dict[int, int] = {}
    for op in ops:
        reads = [s for s in graph.ops[op].reads if s in counted and s not in found]
        reads.sort(key=lambda s: graph.storages[s].size_bytes)
        for storage in (*reads, *graph.ops[op].writes):
            found[storage] = len(found)
    return found


def _op(graph: TrainingGraph, op: int, number: dict[int, int], kind_index: int) -> Op:
    original = graph.ops[op]
    return Op(
        name="",
        reads=tuple(sorted(number[s] for s in original.reads if s in number)),
        writes=tuple(number[s] for s in original.writes),
        cost_ns=(original.cost_ns[kind_index] or 0,),
        workspace_bytes=(original.workspace_bytes[kind_index],),
        phase=original.phase,
        non_recomputable=None if original.is_recomputable else _ONCE,
        is_ordered=original.is_ordered,
    )


def _is_wanted_later(
    graph: TrainingGraph, storage: int, inside: set[int], part: StagePart
) -> bool:
    """Whether something that comes after the stage's step needs a storage."""
    if storage in graph.final_outputs:
        return True
    forward = set(part.forward)
    return any(
        reader not in inside
        and reader not in forward
        and graph.ops[reader].phase is Phase.BACKWARD
        for reader in graph.consumers[storage]
    )


def _total(graph: TrainingGraph, storages: Iterable[int]) -> int:
    return sum(graph.storages[s].size_bytes for s in storages)
