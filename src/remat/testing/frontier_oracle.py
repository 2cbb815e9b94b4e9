"""All frontier-advancing schedules of one device, one after the other.

Written from the definition, over the training graph itself: required ops are run for
the first time in graph order, with the boundary and the end in their places. Between
two of these, earlier ops run again, each once at most and in graph order, unless
``any_reruns`` lifts that. Nothing is pruned but states that were reached as cheaply.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from remat.core.bounds import required_ops
from remat.core.graph import Phase, TrainingGraph
from remat.testing.chain_oracles import cheapest

_BOUNDARY, _END = -1, -2


@dataclass(frozen=True)
class _State:
    """How far the frontier is, what ran again since, and what is live."""

    position: int
    last_rerun: int
    live: frozenset[int]


@dataclass(frozen=True)
class FrontierOracle:
    """The search over one graph.

    Parameters
    ----------
    graph
        The graph, of ops of one kind of device.
    any_reruns
        Whether ops run again in any order and number between two first runs.
    """

    graph: TrainingGraph
    any_reruns: bool = False

    def _sequence(self) -> list[int]:
        required = sorted(required_ops(self.graph))
        forward = [op for op in required if op < self.graph.forward_count]
        return [*forward, _BOUNDARY, *required[len(forward) :], _END]

    def _size(self, storages: frozenset[int] | tuple[int, ...]) -> int:
        return sum(self.graph.storages[s].size_bytes for s in storages)

    def _moves(self, state: _State) -> Iterator[tuple[int, int, _State]]:
        """Yield bytes during a step, its time, and where it leads."""
        graph, sequence = self.graph, self._sequence()
        resident = {i for i, s in enumerate(graph.storages) if s.is_resident}
        held = self._size(frozenset(resident)) + self._size(state.live)
        for storage in state.live:
            yield held, 0, replace(state, live=state.live - {storage})

        def has(storages: tuple[int, ...]) -> bool:
            return set(storages) <= state.live | resident

        following = sequence[state.position]
        ahead = _State(state.position + 1, -1, state.live)
        if following == _END:
            if has(graph.final_outputs):
                yield held, 0, ahead
        elif following == _BOUNDARY:
            if has(graph.forward_outputs):
                live = state.live | set(graph.tangents)
                yield held + self._size(graph.tangents), 0, replace(ahead, live=live)
        elif has(graph.ops[following].reads):
            op = graph.ops[following]
            during = held + self._size(op.writes) + op.workspace_bytes[0]
            live = state.live | set(op.writes)
            yield during, op.cost_ns[0] or 0, replace(ahead, live=live)
        done = sequence[: state.position]
        phase = Phase.BACKWARD if _BOUNDARY in done else Phase.FORWARD
        begun = any(
            i >= 0 and graph.ops[i].is_external and graph.ops[i].phase is phase
            for i in done
        )
        for index in done:
            if index < 0 or (index <= state.last_rerun and not self.any_reruns):
                continue
            op = graph.ops[index]
            if not op.is_recomputable or not has(op.reads):
                continue
            if (begun and not op.is_external) or (
                op.is_external and op.phase is not phase
            ):
                continue
            during = held + self._size(op.writes) + op.workspace_bytes[0]
            live = state.live | set(op.writes)
            yield during, op.cost_ns[0] or 0, _State(state.position, index, live)

    def best(self, budget_bytes: int) -> int | None:
        """Return the least time within the budget, or ``None`` if nothing fits."""
        end = len(self._sequence())
        return cheapest(
            _State(0, -1, frozenset()),
            lambda state: (
                (time, after)
                for size, time, after in self._moves(state)
                if size <= budget_bytes
            ),
            lambda state: state.position == end,
        )
