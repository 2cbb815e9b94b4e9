"""Bounds on the time of every schedule within a budget, and how hard to try for them.

The program of the boundary comes first: it takes milliseconds for hundreds of ops. The
next one has more moments, all in backward: memory is tightest around the boundary, so
they lie along a longest chain at distances that grow from there. Once a schedule is
known, a last one has the moments at which it is fullest. Any multipliers prove a bound,
so a program that is left unsolved costs nothing but time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from remat.backends.linear import LinearProgram, row_multipliers
from remat.bounds.certificate import RULES_VERSION, bound_of, rounded
from remat.bounds.instance import Instance, instance_of
from remat.bounds.moment_program import MomentProgram, default_chain
from remat.core.certificate import Certificate
from remat.core.deadline import TimeIsUpError, in_time
from remat.core.errors import MissingDependencyError
from remat.core.graph import TrainingGraph
from remat.core.problem import Limits

_SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0)
"""Parts of backward, from the boundary on, between which moments are chosen."""

_MOST_NODES = 6_000
"""Of a step, times the moments in backward; beyond it a program takes seconds."""

_MOST_FULL_NODES = 4_000
_MOST_FULL = 6
"""The same where a schedule is fullest, and most of these moments: they lie close
together, so that more ops may run between any two of them."""

_EFFORT = 2.0
"""How long one program may take: about seconds."""

_TIME_SHARE = 0.2
"""The part of what is left that one program may take, where time is limited."""

_UNITS = 1e4
"""What all costs come to in a program, so that a solver's tolerances mean little."""


class TimeBounds:
    """The best proved bound on the time of every schedule, made better when asked.

    Parameters
    ----------
    graph, kind
        The step, and the kind of the one device; by default the first of the graph.
    budget_bytes
        Of the device, resident bytes included; ``None`` for no limit.
    limits
        When to stop.
    is_quick
        Whether the program of the boundary is to be all: milliseconds, and not seconds.

    Attributes
    ----------
    best_ns
        No schedule within the budget takes less; 0 if nothing is proved yet.
    certificate
        What proves it, or ``None``.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        budget_bytes: int | None,
        kind: str | None = None,
        limits: Limits | None = None,
        *,
        is_quick: bool = False,
    ) -> None:
        self.best_ns = 0
        self.certificate: Certificate | None = None
        self._limits = limits or Limits()
        self._is_quick = is_quick
        self._graph, self._budget_bytes, self._kind = graph, budget_bytes, kind
        self._stages = self._programs()

    @cached_property
    def _instance(self) -> Instance | None:
        """The step, ``None`` where nothing can be proved of it."""
        if self._budget_bytes is None:
            return None
        found = instance_of(self._graph, self._kind)
        if found is None or found.resident_bytes > self._budget_bytes:
            return None
        return found

    def prove(self, enough_ns: int) -> int:
        """Return the bound, made better until it is ``enough_ns`` or nothing is left.

        Notes
        -----
        Solves at most two linear programs, the first of two to four variables an op.
        """
        while self.best_ns < enough_ns:
            found = next(self._stages, None)
            if found is None:
                break
            self._take(found)
        return self.best_ns

    def prove_where_full(self, fullest: Sequence[int]) -> int:
        """Return the bound, made better from where a schedule takes most memory.

        Parameters
        ----------
        fullest
            Ops, those during whose first run most is there first.

        Notes
        -----
        Solves one linear program, of moments among these ops.
        """
        instance = self._instance
        if instance is not None and not self._is_quick:
            moments = full_moments(instance, fullest)
            # Else it is the program of the boundary.
            if moments[-1] != instance.boundary:
                self._take(self._solved(instance, lambda: moments))
        return self.best_ns

    def _take(self, found: tuple[int, Certificate] | None) -> None:
        if found is not None and found[0] > self.best_ns:
            self.best_ns, self.certificate = found

    def _programs(self) -> Iterator[tuple[int, Certificate]]:
        instance = self._instance
        if instance is None:
            return
        found = self._solved(instance, lambda: _edge(instance, default_chain(instance)))
        if found is not None:
            yield found
        # Of a step that is too long for more moments it is the same program.
        if not self._is_quick and _most_later_moments(instance):
            found = self._solved(instance, lambda: spread_moments(instance))
            if found is not None:
                yield found

    def _solved(
        self, instance: Instance, choose: Callable[[], tuple[int, ...]]
    ) -> tuple[int, Certificate] | None:
        if self._limits.is_over:
            return None
        memory_bytes = (self._budget_bytes or 0) - instance.resident_bytes
        part = self._limits.share(_TIME_SHARE)
        try:
            with in_time(part.deadline_s):
                program = MomentProgram(instance, memory_bytes, choose())
            return solved(program, part.remaining_s)
        except TimeIsUpError:
            return None
        except MissingDependencyError:
            # Planning goes without OR-tools, with the plain bound of every step.
            return None


def solved(
    program: MomentProgram, time_limit_s: float | None = None
) -> tuple[int, Certificate] | None:
    """Return a bound that a moment program proves, and its certificate.

    Parameters
    ----------
    program
        Of the moments.
    time_limit_s
        When to stop by the clock, or ``None``.

    Returns
    -------
    tuple[int, Certificate] or None
        What :func:`remat.bounds.certificate.bound_of` says of the rounded multipliers;
        ``None`` if the solver comes to none.
    """
    rows = program.program
    unit_ns = max(sum(rows.cost) / _UNITS, 1e-9)
    scales = [
        1 / max(1, program.memory_bytes) if is_memory else 1.0
        for is_memory in rows.is_memory
    ]
    of_entry = [
        row
        for row in range(rows.row_count)
        for _ in range(rows.starts[row], rows.starts[row + 1])
    ]
    found = row_multipliers(
        LinearProgram(
            cost=[cost / unit_ns for cost in rows.cost],
            lower=[float(is_forced) for is_forced in rows.is_forced],
            rows=of_entry,
            columns=rows.columns,
            coefficients=[
                value * scales[row]
                for row, value in zip(of_entry, rows.coefficients, strict=True)
            ],
            right=[v * s for v, s in zip(rows.right, scales, strict=True)],
        ),
        effort=_EFFORT,
        time_limit_s=time_limit_s,
    )
    if found is None:
        return None
    whole = rounded(rows, [m * unit_ns * s for m, s in zip(found, scales, strict=True)])
    moments = program.nodes[:-1]
    certificate = Certificate(
        version=RULES_VERSION,
        memory_bytes=program.memory_bytes,
        moments=moments,
        multipliers=whole,
    )
    return bound_of(rows, whole), certificate


def spread_moments(instance: Instance) -> tuple[int, ...]:
    """Return moments: around the boundary, and in backward at growing distances.

    Along a longest chain, backward is cut at a 64th, a 16th and a quarter of its nodes;
    of each part the node is taken that needs most memory. Where the program would be
    too large, the last parts are left out.

    Examples
    --------
    >>> from remat.testing.small_graphs import joint_graph
    >>> chain = joint_graph([1] * 6, [1] * 6, [[], [0], [1], [2, 1], [3, 0], [4]], 3)
    >>> spread_moments(instance_of(chain))
    (6, 3, 4)
    """
    chain = default_chain(instance)
    boundary = chain.index(instance.boundary)
    later = chain[boundary + 1 :]
    cuts = [0, *(max(1, math.ceil(len(later) * share)) for share in _SHARES)]
    moments: list[int] = []
    for start, stop in pairwise(cuts):
        part = later[start:stop]
        if part and len(moments) < _most_later_moments(instance):
            moments.append(max(part, key=instance.needed_bytes))
    return (*_edge(instance, chain), *moments)


def full_moments(instance: Instance, fullest: Sequence[int]) -> tuple[int, ...]:
    """Return moments: around the boundary, and in backward where a schedule is fullest.

    Parameters
    ----------
    instance
        The step.
    fullest
        Ops, those during whose first run most is there first.
    """
    chain = default_chain(instance)
    places = {node: place for place, node in enumerate(chain)}
    start = places[instance.boundary]
    most = min(_MOST_FULL, _MOST_FULL_NODES // len(instance.order))
    later = [places[op] for op in fullest if places.get(op, 0) > start][:most]
    return (*_edge(instance, chain), *(chain[place] for place in sorted(later)))


def _edge(instance: Instance, chain: Sequence[int]) -> tuple[int, ...]:
    """Return the boundary, after the node before it if that needs more memory.

    That is the work that is done with the outputs, such as the loss: there the step is
    fullest then.
    """
    boundary = instance.boundary
    before = chain[: chain.index(boundary)][-1:]
    needs_more = [
        node
        for node in before
        if instance.needed_bytes(node) > instance.needed_bytes(boundary)
    ]
    return (*needs_more, boundary)


def _most_later_moments(instance: Instance) -> int:
    """Return how many moments in backward a program of this step may have."""
    return _MOST_NODES // len(instance.order)
