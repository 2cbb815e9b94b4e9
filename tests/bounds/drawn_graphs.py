"""Small graphs drawn with a seed, and what exhaustive search says of them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.oracles import brute_force_best, brute_force_smallest_budget

from remat.core.errors import InvalidGraphError
from remat.core.graph import Op, Phase, Storage, TrainingGraph


@dataclass(frozen=True)
class Solved:
    """A graph, a budget, and the time of the best of all schedules within it."""

    graph: TrainingGraph
    budget_bytes: int
    smallest_bytes: int
    optimum_ns: int

    @property
    def once_ns(self) -> int:
        return sum(self.graph.ops[k].cost_ns[0] or 0 for k in self.graph.required_ops)

    @property
    def memory_bytes(self) -> int:
        return self.budget_bytes - self.graph.resident_bytes()

    @property
    def must_recompute(self) -> bool:
        return self.optimum_ns > self.once_ns


@cache
def solved_cases(count: int, seed: int = 0) -> tuple[Solved, ...]:
    """Return what is proved of so many graphs, at three budgets each."""
    random_state = random.Random(seed)
    found: list[Solved] = []
    graphs = 0
    while graphs < count:
        graph = drawn(random_state)
        if graph is None or (smallest := brute_force_smallest_budget(graph)) is None:
            continue
        graphs += 1
        for budget in (smallest, smallest + 1, smallest + 3):
            optimum = brute_force_best(graph, budget)
            if optimum is not None:
                found.append(Solved(graph, budget, smallest, optimum))
    return tuple(found)


def drawn(random_state: random.Random) -> TrainingGraph | None:
    """Return a graph of 4 to 8 ops with side branches, or ``None`` if it is none."""
    draw = _Draw(random_state)
    try:
        return draw.graph()
    except InvalidGraphError:
        return None


class _Draw:
    def __init__(self, random_state: random.Random) -> None:
        self.random = random_state
        resident = Storage(
            name="r", size_bytes=random_state.randint(0, 3), is_resident=True
        )
        self.storages = [resident]
        self.ops: list[Op] = []

    def storage(self, most_bytes: int) -> int:
        size = self.random.randint(1, most_bytes)
        self.storages.append(Storage(name=f"s{len(self.storages)}", size_bytes=size))
        return len(self.storages) - 1

    def is_drawn(self, share: float) -> bool:
        return self.random.random() < share

    def op(self, phase: Phase, reads: tuple[int, ...], most_bytes: int) -> list[int]:
        writes = [self.storage(most_bytes) for _ in range(2 - self.is_drawn(0.83))]
        self.ops.append(
            Op(
                name=f"{phase}{len(self.ops)}",
                reads=reads,
                writes=tuple(writes),
                cost_ns=(self.random.randint(1, 9),),
                workspace_bytes=(self.random.choice([0, 0, 2]),),
                phase=phase,
                is_ordered=self.is_drawn(0.13),
                non_recomputable="it may not" if self.is_drawn(0.1) else None,
            )
        )
        return writes

    def some(self, known: list[int], most: int) -> Iterator[int]:
        count = min(len(known), self.random.randint(1, most))
        yield from self.random.sample(known, count)

    def graph(self) -> TrainingGraph:
        known = [0]
        for index in range(self.random.randint(2, 4)):
            reads = list(self.some(known, 2))
            if index and known[-1] not in reads and self.is_drawn(0.6):
                reads.append(known[-1])
            known += self.op(Phase.FORWARD, tuple(reads), 6)
        forward_outputs = (known[-1],)
        tangents = (self.storage(3),) if self.is_drawn(0.6) else ()
        last = tangents[0] if tangents else known[-1]
        gradients: list[int] = []
        for _ in range(self.random.randint(2, 4)):
            reads = {last, self.random.choice(known)}
            if self.is_drawn(0.4):
                reads.add(self.random.choice(known))
            writes = self.op(Phase.BACKWARD, tuple(sorted(reads)), 5)
            gradients += writes
            if self.is_drawn(0.75):
                last = writes[0]
        final_outputs = {*self.some(gradients, 2), gradients[-1]}
        return TrainingGraph(
            name="drawn",
            storages=tuple(self.storages),
            ops=tuple(self.ops),
            forward_outputs=forward_outputs,
            tangents=tangents,
            final_outputs=tuple(sorted(final_outputs)),
        )
