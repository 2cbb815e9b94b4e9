"""Parts: the ops of one stage, what runs again of them, and what that takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat.algorithms.chains.stages import Stage, StageOption
from remat.core.graph import TrainingGraph

DROPPED_SHARES = (0.1, 0.4)
"""A stage may drop what it takes this share of its forward to compute again."""

_NEGLIGIBLE_SHARE = 50
"""Storages smaller than what a stage saves over this are not worth dropping."""


@dataclass(frozen=True, slots=True)
class PartOption:
    """One way to run the ops of a stage so that its backward can run.

    ``saving`` are the forward ops that run again for it, ``kept`` the storages that
    backward then finds besides the stage's output; ``backward`` are the ops of
    backward, with the forward ops that compute again what was dropped before those that
    read it.
    """

    saving: tuple[int, ...]
    kept: frozenset[int]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagePart:
    """The ops of one stage, or of the turn.

    ``again`` are the forward ops that run again for the stage's output; the first of
    the ``options`` keeps all that backward reads.
    """

    forward: tuple[int, ...]
    again: tuple[int, ...]
    options: tuple[PartOption, ...]


def stage_part(
    graph: TrainingGraph,
    *,
    forward: Sequence[int],
    backward: Sequence[int],
    ends: Iterable[int],
    kind_index: int,
    has_options: bool = True,
) -> StagePart:
    """Return the part of these ops, each ascending, whose output is ``ends``.

    With ``has_options`` it offers options that drop what is cheap to compute again.
    """
    ends = frozenset(ends)
    read = frozenset(s for op in backward for s in graph.ops[op].reads)
    drops = _drops(graph, forward, read, ends, kind_index) if has_options else []
    return StagePart(
        tuple(forward),
        again=_closure(graph, forward, ends),
        options=tuple(
            part_option(
                graph,
                forward,
                ends,
                _with_dropped(graph, forward, backward, frozenset(dropped)),
            )
            for dropped in (set[int](), *drops)
        ),
    )


def part_option(
    graph: TrainingGraph,
    forward: Sequence[int],
    ends: Iterable[int],
    backward: Sequence[int],
) -> PartOption:
    """Return the option with this backward: what it finds is what it reads first.

    Parameters
    ----------
    graph
        The training graph.
    forward
        The forward ops of the part, ascending.
    ends
        The storages that are the part's output.
    backward
        Ops of backward, and among them forward ops that run again, each before those
        that read what it writes.
    """
    ends = frozenset(ends)
    found: set[int] = set()
    made_again: set[int] = set()
    for op in backward:
        found.update(s for s in graph.ops[op].reads if s not in made_again)
        made_again.update(graph.ops[op].writes)
    saving = _closure(graph, forward, ends | found)
    made = {s for op in saving for s in graph.ops[op].writes}
    kept = frozenset((found & made) - ends)
    return PartOption(saving=saving, kept=kept, backward=tuple(backward))


def _drops(
    graph: TrainingGraph,
    forward: Sequence[int],
    read: frozenset[int],
    ends: frozenset[int],
    kind_index: int,
) -> list[set[int]]:
    """Return sets of storages that backward reads but a stage may drop.

    What takes least time per byte goes first, for as long as computing all of it again
    takes no more than a share of the stage's forward.
    """
    saving = _closure(graph, forward, ends | read)
    made = {s: op for op in saving for s in graph.ops[op].writes}
    saved = [s for s in made if s in read and s not in ends]
    size = {s: graph.storages[s].size_bytes for s in saved}
    total = cost_ns(graph, saving, kind_index)
    worth = [s for s in saved if size[s] * _NEGLIGIBLE_SHARE > sum(size.values())]
    worth.sort(key=lambda s: cost_ns(graph, (made[s],), kind_index) / size[s])
    found: list[set[int]] = []
    dropped: set[int] = set()
    for share in DROPPED_SHARES:
        before = len(dropped)
        for storage in worth:
            more = dropped | {storage}
            again = _closure(graph, forward, more, stops=read - more)
            if cost_ns(graph, again, kind_index) <= share * total:
                dropped = more
        if len(dropped) > before:
            found.append(dropped)
    return found


def _with_dropped(
    graph: TrainingGraph,
    forward: Sequence[int],
    backward: Sequence[int],
    dropped: frozenset[int],
) -> tuple[int, ...]:
    """Return backward with what was dropped computed again just before it is read."""
    order: list[int] = []
    is_back: set[int] = set()
    read = {s for op in backward for s in graph.ops[op].reads}
    for op in backward:
        missing = (dropped & set(graph.ops[op].reads)) - is_back
        if missing:
            here = (read - dropped) | is_back
            again = _closure(graph, forward, missing, stops=here)
            order += again
            is_back.update(s for o in again for s in graph.ops[o].writes)
        order.append(op)
    return tuple(order)


def _closure(
    graph: TrainingGraph,
    ops: Sequence[int],
    wanted: Iterable[int],
    stops: Iterable[int] = (),
) -> tuple[int, ...]:
    """Return those of ``ops`` that run again for the storages wanted, ascending.

    ``stops`` are storages that are there.
    """
    inside = {op for op in ops if graph.ops[op].is_recomputable}
    found: set[int] = set()
    there = set(stops)
    pending = list(wanted)
    while pending:
        producer = graph.producers[pending.pop()]
        if producer is not None and producer in inside and producer not in found:
            found.add(producer)
            pending.extend(s for s in graph.ops[producer].reads if s not in there)
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
    starts: frozenset[int] = frozenset(),
) -> int:
    """Return the most bytes that running ``ops`` adds, less what stays of them.

    What none of them reads before it is written again goes after its use, unless it
    stays. So do the storages of ``starts``, which are there before and count as given:
    what runs after one of them has gone may take its place.
    """
    leaving = _leaving(graph, ops)
    given = sum(graph.storages[s].size_bytes for s in starts)
    held = most = given
    made: set[int] = set(starts)
    final = set(graph.final_outputs)
    for position, op in enumerate(ops):
        writes = graph.ops[op].writes
        held += sum(graph.storages[s].size_bytes for s in writes if s not in made)
        made.update(writes)
        most = max(most, held + graph.ops[op].workspace_bytes[kind_index])
        for storage in leaving[position]:
            if storage in made and storage not in stays and storage not in final:
                held -= graph.storages[storage].size_bytes
                made.discard(storage)
    written = {s for op in ops for s in graph.ops[op].writes}
    staying = sum(graph.storages[s].size_bytes for s in (stays & written) - starts)
    return max(0, most - given - staying)


def _leaving(graph: TrainingGraph, ops: Sequence[int]) -> list[set[int]]:
    """Return per position of ``ops`` the storages not read after it as they are."""
    found: list[set[int]] = []
    is_read: set[int] = set()
    for op in reversed(ops):
        reads, writes = graph.ops[op].reads, graph.ops[op].writes
        found.append({*reads, *writes} - is_read)
        is_read.difference_update(writes)
        is_read.update(reads)
    return found[::-1]


def stage_of_part(
    graph: TrainingGraph,
    part: StagePart,
    outputs: Iterable[int],
    gradient_bytes: int,
    kind_index: int,
) -> Stage:
    """Return what the programs need to know of a part with these outputs.

    ``gradient_bytes`` is the size of their gradient, as it reaches the stage.
    """
    ends = frozenset(outputs)
    return Stage(
        forward_ns=cost_ns(graph, part.again, kind_index),
        output_bytes=sum(graph.storages[s].size_bytes for s in ends),
        gradient_bytes=gradient_bytes,
        forward_workspace_bytes=scratch_bytes(graph, part.again, kind_index, ends),
        options=tuple(
            stage_option(graph, option, ends, kind_index) for option in part.options
        ),
        name=graph.ops[part.forward[-1]].name if part.forward else "",
    )


def stage_option(
    graph: TrainingGraph, option: PartOption, outputs: Iterable[int], kind_index: int
) -> StageOption:
    """Return what the programs need to know of an option of a part."""
    ends = frozenset(outputs)
    inside = set(option.backward)
    backward = [op for op in option.backward if op >= graph.forward_count]

    def is_read_elsewhere(storage: int) -> bool:
        return any(
            reader not in inside
            and reader >= graph.forward_count
            and not graph.ops[reader].is_external
            for reader in graph.consumers[storage]
        )

    passed = frozenset(
        s for op in backward for s in graph.ops[op].writes if is_read_elsewhere(s)
    )
    # Gradients from above, which may go before all of the stage's backward has run.
    given = frozenset(
        storage
        for op in backward
        for storage in graph.ops[op].reads
        if (graph.producers[storage] or 0) >= graph.forward_count
        and graph.producers[storage] not in inside
    )
    starts = given | option.kept
    stays = passed | frozenset(s for s in starts if is_read_elsewhere(s))
    needs_output = any(ends & {*graph.ops[op].reads} for op in option.backward)
    return StageOption(
        forward_ns=cost_ns(graph, option.saving, kind_index),
        backward_ns=cost_ns(graph, option.backward, kind_index),
        saved_bytes=sum(graph.storages[s].size_bytes for s in option.kept),
        needs_output=needs_output,
        forward_workspace_bytes=scratch_bytes(
            graph, option.saving, kind_index, option.kept | ends
        ),
        backward_workspace_bytes=scratch_bytes(
            graph, option.backward, kind_index, stays, starts
        ),
    )
