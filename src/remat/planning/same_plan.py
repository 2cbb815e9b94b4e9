"""One plan for processes that run the same step: what it is for, and who differs.

Processes that train copies, or pieces, of one model trace the same step. What its
operators cost, and how large its blocks are, may differ: one machine is slower, one
process has the larger piece of a parameter. A schedule that keeps a budget with the
largest of each keeps it in every process, since no block is larger there.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from remat.core.graph import TrainingGraph
from remat.files.serialisation import schedule_to_json
from remat.planning.plan import Plan


@dataclass(frozen=True)
class Amounts:
    """The numbers of a step: all that may differ between processes that run it.

    Parameters
    ----------
    sizes_bytes
        Of each storage.
    costs_ns
        Of each op on each device kind, ``None`` where it cannot run.
    workspaces_bytes
        Of each op on each device kind.
    """

    sizes_bytes: list[int]
    costs_ns: list[list[int | None]]
    workspaces_bytes: list[list[int]]


def amounts_of(graph: TrainingGraph) -> Amounts:
    """Return the numbers of a step."""
    return Amounts(
        sizes_bytes=[storage.size_bytes for storage in graph.storages],
        costs_ns=[list(op.cost_ns) for op in graph.ops],
        workspaces_bytes=[list(op.workspace_bytes) for op in graph.ops],
    )


def with_largest(graph: TrainingGraph, all_amounts: Sequence[Amounts]) -> TrainingGraph:
    """Return a step with the largest of each number that processes found.

    Steps of equal :func:`structure` have the same numbers to compare. Takes time in
    proportion to the numbers of all.

    Examples
    --------
    >>> from remat.testing.small_graphs import joint_graph
    >>> graph = joint_graph([4, 8, 1], [10, 20, 5], [[], [0], [0, 1]], 2)
    >>> other = joint_graph([6, 2, 1], [10, 30, 5], [[], [0], [0, 1]], 2)
    >>> larger = with_largest(graph, [amounts_of(graph), amounts_of(other)])
    >>> [storage.size_bytes for storage in larger.storages]
    [6, 8]
    >>> [op.cost_ns for op in larger.ops]
    [(10,), (30,), (5,)]
    """
    sizes = zip(*(each.sizes_bytes for each in all_amounts), strict=True)
    costs = zip(*(each.costs_ns for each in all_amounts), strict=True)
    workspaces = zip(*(each.workspaces_bytes for each in all_amounts), strict=True)
    storages = [
        replace(storage, size_bytes=max(found))
        for storage, found in zip(graph.storages, sizes, strict=True)
    ]
    ops = [
        replace(
            op,
            cost_ns=tuple(map(_largest, zip(*times, strict=True))),
            workspace_bytes=tuple(map(max, zip(*scratch, strict=True))),
        )
        for op, times, scratch in zip(graph.ops, costs, workspaces, strict=True)
    ]
    return replace(graph, storages=tuple(storages), ops=tuple(ops))


def _largest(costs_ns: Sequence[int | None]) -> int | None:
    return max((cost for cost in costs_ns if cost is not None), default=None)


def structure(graph: TrainingGraph) -> str:
    """Return what is equal for steps that differ in numbers and names alone."""
    digest = hashlib.sha256()
    for storage in graph.storages:
        digest.update(f"{storage.role}|{storage.is_resident}|{storage.home}\n".encode())
    for op in graph.ops:
        runs = [cost is not None for cost in op.cost_ns]
        flags = op.is_recomputable, op.is_ordered, op.is_external
        digest.update(f"{op.phase}|{op.reads}|{op.writes}|{runs}|{flags}\n".encode())
    ends = graph.forward_outputs, graph.tangents, graph.final_outputs
    digest.update(f"{ends}|{graph.device_kinds}".encode())
    return digest.hexdigest()


def plan_digest(plan: Plan) -> str:
    """Return what is equal for plans that run the same step alike."""
    schedule = schedule_to_json(plan.schedule)
    text = f"{plan.fingerprint}|{plan.in_flight}|{plan.budget_bytes}|{schedule}"
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Difference:
    """What some processes have otherwise than the others.

    Parameters
    ----------
    ranks
        Who differs from most, or from the first where there is no most.
    text
        Who, in what, and what the others have.
    """

    ranks: tuple[int, ...]
    text: str


def difference(facts: Sequence[Mapping[str, str]]) -> Difference | None:
    """Return the first fact in which processes differ, ``None`` if they agree.

    Parameters
    ----------
    facts
        What each process plans for, by the rank; the same names in the same order.

    Examples
    --------
    >>> found = difference([{"torch": "2.13"}, {"torch": "2.13"}, {"torch": "2.12"}])
    >>> found.ranks, found.text
    ((2,), 'process 2 differs in torch: 2.12, where the others have 2.13')
    """
    for name in facts[0]:
        values = [each.get(name, "nothing") for each in facts]
        counts = Counter(values)
        most = max(counts.values())
        # The first of those that are there as often.
        common = next(value for value in values if counts[value] == most)
        ranks = [rank for rank, value in enumerate(values) if value != common]
        if ranks:
            who = f"process {ranks[0]} differs"
            if len(ranks) > 1:
                who = f"processes {', '.join(map(str, ranks))} differ"
            others = "the others have"
            if len(values) == len(ranks) + 1:
                others = f"process {values.index(common)} has"
            text = f"{who} in {name}: {values[ranks[0]]}, where {others} {common}"
            return Difference(tuple(ranks), text)
    return None
