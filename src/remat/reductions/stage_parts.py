"""Parts: the ops of one stage, what runs again of them, and what that takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat.chains.stages import Stage, StageOption
from remat.graph import TrainingGraph


@dataclass(frozen=True, slots=True)
class StagePart:
    """The ops of one stage, or of the turn.

    ``again`` are the forward ops that run again for the stage's output, ``saving``
    those that run again for its backward as well.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    again: tuple[int, ...]
    saving: tuple[int, ...]


def stage_part(
    graph: TrainingGraph,
    *,
    forward: Sequence[int],
    backward: Sequence[int],
    ends: Iterable[int],
) -> StagePart:
    """Return the part whose output is the storages ``ends``."""
    read = {s for op in backward for s in graph.ops[op].reads}
    ends = set(ends)
    return StagePart(
        tuple(forward),
        tuple(backward),
        again=_closure(graph, forward, ends),
        saving=_closure(graph, forward, ends | read),
    )


def _closure(
    graph: TrainingGraph, ops: Sequence[int], wanted: Iterable[int]
) -> tuple[int, ...]:
    """Return those of ``ops`` that run again for the storages wanted, ascending."""
    inside = {op for op in ops if graph.ops[op].is_recomputable}
    found: set[int] = set()
    pending = list(wanted)
    while pending:
        producer = graph.producers[pending.pop()]
        if producer is not None and producer in inside and producer not in found:
            found.add(producer)
            pending.extend(graph.ops[producer].reads)
    return tuple(sorted(found))


def never_lost(graph: TrainingGraph) -> list[bool]:
    """Return per storage whether it is kept in any case: its op may run only once."""
    return [
        producer is None or not graph.ops[producer].is_recomputable
        for producer in graph.producers
    ]


def cost_ns(graph: TrainingGraph, ops: Iterable[int], kind_index: int) -> int:
    """Return the time of running ``ops`` once each, in nanoseconds."""
    return sum(graph.ops[op].cost_ns[kind_index] or 0 for op in ops)


def scratch_bytes(
    graph: TrainingGraph,
    ops: Sequence[int],
    kind_index: int,
    stays: frozenset[int] = frozenset(),
) -> int:
    """Return the most bytes that running ``ops`` adds, less what stays of them.

    What none of them reads again goes after its last use, unless it stays.
    """
    last: dict[int, int] = {}
    for position, op in enumerate(ops):
        for storage in (*graph.ops[op].reads, *graph.ops[op].writes):
            last[storage] = position
    held = most = 0
    made: set[int] = set()
    final = set(graph.final_outputs)
    for position, op in enumerate(ops):
        writes = graph.ops[op].writes
        made.update(writes)
        held += sum(graph.storages[s].size_bytes for s in writes)
        most = max(most, held + graph.ops[op].workspace_bytes[kind_index])
        for storage in {*graph.ops[op].reads, *writes}:
            if (
                storage in made
                and last[storage] == position
                and storage not in stays
                and storage not in final
            ):
                held -= graph.storages[storage].size_bytes
    staying = sum(graph.storages[s].size_bytes for s in stays & made)
    return max(0, most - staying)


def stage_of_part(
    graph: TrainingGraph,
    part: StagePart,
    outputs: Iterable[int],
    gradient_bytes: int,
    kind_index: int,
) -> Stage:
    """Return what the programs need to know of a part.

    Parameters
    ----------
    graph
        The training graph.
    part
        The ops of the stage.
    outputs
        The storages that are its output.
    gradient_bytes
        Size of their gradient, as it reaches the stage.
    kind_index
        Position of the device's kind in the ops' costs.
    """
    ends = frozenset(outputs)
    read = {s for op in part.backward for s in graph.ops[op].reads}
    made = {s for op in part.saving for s in graph.ops[op].writes}
    saved = frozenset((read & made) - ends)
    inside = set(part.backward)
    passed = frozenset(
        storage
        for op in part.backward
        for storage in graph.ops[op].writes
        if any(
            reader not in inside and reader >= graph.forward_count
            for reader in graph.consumers[storage]
        )
    )
    return Stage(
        forward_ns=cost_ns(graph, part.again, kind_index),
        output_bytes=sum(graph.storages[s].size_bytes for s in ends),
        gradient_bytes=gradient_bytes,
        forward_workspace_bytes=scratch_bytes(graph, part.again, kind_index, ends),
        options=(
            StageOption(
                forward_ns=cost_ns(graph, part.saving, kind_index),
                backward_ns=cost_ns(graph, part.backward, kind_index),
                saved_bytes=sum(graph.storages[s].size_bytes for s in saved),
                needs_output=bool(ends & read),
                forward_workspace_bytes=scratch_bytes(
                    graph, part.saving, kind_index, saved | ends
                ),
                backward_workspace_bytes=scratch_bytes(
                    graph, part.backward, kind_index, passed
                ),
            ),
        ),
        name=graph.ops[part.forward[-1]].name if part.forward else "",
    )
