"""``auto`` on joins with a trunk, against exhaustive values."""

from collections.abc import Sequence

from tests.chain_tables import oracle_table

from remat.core.errors import BudgetError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.planning.one_device import plan_graph


def join_with_trunk(lengths: Sequence[int], trunk: int) -> TrainingGraph:
    """Return the step of branches that meet in a trunk: all values take one byte.

    One op makes all inputs, and runs once; of the others each forward op costs 1.
    """
    storages: list[Storage] = []
    ops: list[Op] = []

    def run(name: str, reads: Sequence[int], count: int = 1, cost: int = 0) -> range:
        made = range(len(storages), len(storages) + count)
        storages.extend(Storage(name=name, size_bytes=1) for _ in made)
        ops.append(
            Op(
                name=name,
                reads=tuple(reads),
                writes=tuple(made),
                cost_ns=(cost,),
                workspace_bytes=(0,),
                phase=Phase.FORWARD if cost or not reads else Phase.BACKWARD,
                non_recomputable=None if reads else "the batch comes once",
            )
        )
        return made

    branches = [[start] for start in run("inputs", (), len(lengths))]
    for branch, length in zip(branches, lengths, strict=True):
        for _ in range(length):
            branch.extend(run("stage", branch[-1:], cost=1))
    tops = [branch[-1] for branch in branches]
    values = [*run("join", tops, cost=1)]
    for _ in range(trunk):
        values += run("trunk", values[-1:], cost=1)
    (gradient,) = run("turn", values[-1:])
    for value in reversed(values[:-1]):
        (gradient,) = run("trunk backward", (value, gradient))
    gradients = [*run("join backward", (*tops, gradient), len(lengths))]
    for index, branch in enumerate(branches):
        for value in reversed(branch[:-1]):
            (gradients[index],) = run("stage backward", (value, gradients[index]))
    return TrainingGraph(
        name="join with trunk",
        storages=tuple(storages),
        ops=tuple(ops),
        final_outputs=tuple(gradients),
    )


def test_auto_on_joins_with_a_trunk_against_exhaustive_values() -> None:
    ratios: list[float] = []
    missed = 0
    for key, rows in oracle_table("join_oracle.json")["trunk"]["strict"].items():
        shape, trunk = key.split("|m=")
        lengths = [int(length) for length in shape.split(",")]
        if len(lengths) == 1:
            continue
        graph = join_with_trunk(lengths, int(trunk))
        for units, best in rows.items():
            if best is None:
                continue
            try:
                plan = plan_graph(graph, budget=int(units))
            except BudgetError:
                missed += 1
                continue
            ratios.append(plan.cost_ns / best)
    assert len(ratios) + missed == 308
    assert missed <= 2
    assert min(ratios) == 1
    assert sum(ratio == 1 for ratio in ratios) >= 298
    assert max(ratios) < 1.15
