"""Joins on training graphs: what they reach and what they decline."""

import re

import pytest
from tests.instances import Instance, Network, joined_towers, mlp_chain, resnet_like
from tests.oracles import brute_force_best

from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result, Status, StopReason
from remat.planning.portfolio import solve
from remat.solvers import SOLVERS
from remat.solvers.base import Solver
from remat.solvers.join import Join
from remat.solvers.rotor import Rotor
from remat.testing import store_all_peak_bytes


def unread(layers: int) -> Instance:
    """A chain of few cuts that backward reads and more that it does not."""
    net = Network("unread")
    y = net.input("x", 64)
    for layer in range(layers):
        y = net.one(
            f"{layer}", [y], 1000, 500, saves_inputs=layer < 3, parameter_bytes=8
        )
    return net.instance(net.one("loss", [y], 8, 10))


def solved(
    graph: TrainingGraph, budget: int, solver: Solver, limits: Limits | None = None
) -> Result:
    problem = Problem(graph=graph, platform=single_device(budget))
    return solve(problem, solver, limits=limits)


@pytest.mark.parametrize("share", [4, 5, 6])
@pytest.mark.parametrize("layers", [(8, 8), (9, 3), (16, 16)], ids=str)
def test_never_dearer_than_the_chain_of_the_same_graph(
    layers: tuple[int, ...], share: int
):
    graph = joined_towers(layers).graph
    budget = store_all_peak_bytes(graph) * share // 10
    join, rotor = solved(graph, budget, Join()), solved(graph, budget, Rotor())
    assert join.cost_ns is not None
    assert rotor.cost_ns is not None
    assert join.cost_ns <= rotor.cost_ns
    assert join.message.startswith("branches of ")


@pytest.mark.parametrize("share", [1, 2, 3])
def test_near_the_optimum_on_two_short_towers(share: int):
    net = Network("short")
    tops: list[int] = []
    for tower in range(2):
        y = net.input(f"x{tower}", 1)
        for layer, cost in enumerate((3, 5)):
            y = net.one(f"t{tower}.{layer}", [y], 2 + layer, cost, saves_inputs=True)
        tops.append(y)
    graph = net.instance(net.one("loss", tops, 1, 1, saves_inputs=True)).graph
    high = store_all_peak_bytes(graph)
    budget = high - share
    best = brute_force_best(graph, budget)
    found = solved(graph, budget, Join())
    assert (best is None) == (found.cost_ns is None)
    if best is not None:
        assert found.cost_ns == best


def test_a_stage_may_run_more_than_twice():
    graph = joined_towers((16, 16)).graph
    result = solved(graph, store_all_peak_bytes(graph) * 22 // 100, Join())
    assert result.status is Status.FEASIBLE
    assert result.schedule is not None
    assert max(result.schedule.recompute_counts().values()) >= 2


@pytest.mark.parametrize(
    "graph",
    [joined_towers((5, 5), trunk=6).graph, joined_towers((5, 4), stem=5).graph],
    ids=["trunk", "stem"],
)
def test_stem_and_trunk_are_planned_too(graph: TrainingGraph):
    budget = store_all_peak_bytes(graph) * 6 // 10
    result = solved(graph, budget, Join())
    assert result.status is Status.FEASIBLE


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        (mlp_chain(8).graph, "nowhere in its forward pass do two branches meet"),
        (resnet_like().graph, "nowhere in its forward pass do two branches meet"),
        (unread(9).graph, "nowhere in its forward pass do two branches meet"),
        (joined_towers((2,) * 7, stem=1).graph, "7 branches meet, and at most 6"),
        (joined_towers((2,) * 7, stem=5).graph, "7 branches meet, and at most 6"),
    ],
    ids=["chain", "shortcuts", "unread", "wide", "wide after a stem"],
)
def test_a_graph_that_is_no_join_is_declined(graph: TrainingGraph, found: str):
    budget = store_all_peak_bytes(graph) * 9 // 10
    with pytest.raises(SolverUnsuitableError, match=f"is no join: .*{found}") as caught:
        solved(graph, budget, Join())
    named = re.findall(r"'([a-z-]+)'", str(caught.value).split("solvers that fit:")[1])
    assert named[-3:] == ["lower-sets", "min-cut-retention", "auto"]
    for name in ("lower-sets", "min-cut-retention"):
        solved(graph, budget, SOLVERS[name]())
    # Rotor is recommended exactly where it takes the graph.
    if "rotor" in named:
        solved(graph, budget, Rotor())
    else:
        with pytest.raises(SolverUnsuitableError, match="is no chain") as declined:
            solved(graph, budget, Rotor())
        assert "'join'" not in str(declined.value)


def test_no_time_gives_no_answer():
    graph = joined_towers().graph
    budget = store_all_peak_bytes(graph) * 6 // 10
    result = solved(graph, budget, Join(), Limits.after(0.0))
    assert result.status is Status.UNKNOWN
    assert result.stop_reason is StopReason.TIME_LIMIT
