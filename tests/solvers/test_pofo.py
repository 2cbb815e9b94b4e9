"""PoFo on training graphs: links of every speed, the judge, and what it declines."""

from dataclasses import replace

import pytest
from tests.instances import INSTANCES, Network, joined_towers

from remat.core.errors import SolverUnsuitableError
from remat.core.graph import TrainingGraph
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.platform import Device, Link, Platform
from remat.core.problem import Limits, Problem, Result, Status, StopReason
from remat.core.schedule import Copy
from remat.core.simulator import simulate
from remat.planning.portfolio import solve
from remat.search.schedule_paging import HostLink, page
from remat.solvers.pofo import PoFo
from remat.solvers.rotor import Rotor
from remat.testing import store_all_peak_bytes
from remat.testing.device_oracles import best_on_devices

GIGA = 10**9


def with_host(graph: TrainingGraph) -> TrainingGraph:
    """Return the graph with a second kind of device, on which nothing can run."""
    ops = tuple(
        replace(
            op, cost_ns=(*op.cost_ns, None), workspace_bytes=(*op.workspace_bytes, 0)
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, device_kinds=(*graph.device_kinds, "host"))


def platform(budget: int, speed: int, host_bytes: int | None = None) -> Platform:
    return Platform(
        devices=(
            Device(budget_bytes=budget),
            Device(name="host", kind="host", budget_bytes=host_bytes),
        ),
        links=tuple(
            Link(source=one, target=1 - one, bytes_per_s=speed, latency_ns=10)
            for one in (0, 1)
        ),
        copies_wait=True,
    )


def solved(
    graph: TrainingGraph,
    on: Platform,
    solver: PoFo | Rotor | None = None,
    limits: Limits | None = None,
) -> Result:
    problem = Problem(graph=with_host(graph), platform=on)
    return solve(problem, solver or PoFo(), limits=limits)


def overlapped_ns(result: Result) -> int:
    assert result.trace is not None
    return result.trace.overlapped_ns


def copies(result: Result) -> int:
    assert result.schedule is not None
    return sum(isinstance(step, Copy) for step in result.schedule.steps)


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer"])
def test_faster_links_are_never_slower_and_copy(name: str):
    graph = INSTANCES[name]().graph
    budget = store_all_peak_bytes(graph) * 7 // 10
    least = sum(op.cost_ns[0] or 0 for op in graph.ops)
    times: list[int] = []
    for speed in (1, GIGA // 100, GIGA, 10**6 * GIGA):
        result = solved(graph, platform(budget, speed))
        assert result.status is Status.FEASIBLE
        times.append(overlapped_ns(result))
    assert times == sorted(times, reverse=True)
    # Nothing comes over the slowest link in time; the fastest takes its latency alone.
    # Both try budgets of their own, so that PoFo may find a cheaper order than Rotor.
    alone = solved(graph, platform(budget, 1), Rotor())
    assert least <= times[0] <= overlapped_ns(alone)
    assert copies(solved(graph, platform(budget, 1))) == 0
    assert times[-1] <= least * 1001 // 1000
    assert copies(solved(graph, platform(budget, 10**6 * GIGA))) > 0


def test_between_the_limits_it_does_both():
    graph = INSTANCES["resnet"]().graph
    budget = store_all_peak_bytes(graph) * 55 // 100
    alone = solved(graph, platform(budget, GIGA), Rotor())
    speeds = (GIGA // 20, GIGA // 10, GIGA // 5, GIGA // 2)
    found = [solved(graph, platform(budget, speed)) for speed in speeds]
    assert all(overlapped_ns(r) <= overlapped_ns(alone) for r in found)
    both = [r for r in found if r.trace and r.trace.recomputed_ns and copies(r)]
    assert both


def test_the_host_s_budget_is_kept():
    graph = INSTANCES["resnet"]().graph
    high = store_all_peak_bytes(graph)
    budget = high * 7 // 10
    ample = solved(graph, platform(budget, 10**6 * GIGA))
    assert ample.trace is not None
    used = ample.trace.peak_bytes[1]
    assert used > 0
    tight = solved(graph, platform(budget, 10**6 * GIGA, used // 2))
    assert tight.trace is not None
    assert tight.trace.peak_bytes[1] <= used // 2
    assert overlapped_ns(tight) >= overlapped_ns(ample)


@pytest.mark.parametrize("budget", range(9, 24))
def test_paging_is_valid_and_never_below_the_optimum(budget: int):
    net = Network("short")
    y = net.input("x", 1)
    for layer, size in enumerate((5, 3)):
        y = net.one(
            f"l{layer}",
            [y],
            size,
            40,
            saves_inputs=True,
            parameter_bytes=1,
            once="it draws",
        )
    graph = net.instance(y).graph
    on = platform(budget, GIGA)
    best = best_on_devices(with_host(graph), on)
    plain = schedule_from_order(graph, store_all_order(graph))
    link = HostLink(
        out_bytes_per_s=GIGA, in_bytes_per_s=GIGA, out_latency_ns=10, in_latency_ns=10
    )
    paged = page(graph, plain, budget, link)
    if paged is not None:
        assert best is not None
        trace = simulate(with_host(graph), on, paged.schedule)
        assert trace.violation is None
        assert trace.serial_ns == paged.serial_ns >= best[0]
    else:
        # Nothing but the gradients that the step ends with could be copied away.
        assert best is None or budget < 15


def test_ample_memory_needs_nothing():
    graph = INSTANCES["mlp"]().graph
    result = solved(graph, platform(store_all_peak_bytes(graph), GIGA))
    assert overlapped_ns(result) == sum(op.cost_ns[0] or 0 for op in graph.ops)
    assert copies(result) == 0


def test_without_a_place_to_store_it_declines():
    graph = INSTANCES["mlp"]().graph
    lonely = replace(platform(store_all_peak_bytes(graph) // 2, GIGA), links=())
    with pytest.raises(SolverUnsuitableError, match="2 devices, and none with links"):
        solved(graph, lonely)


def test_a_graph_that_is_no_chain_is_declined():
    graph = joined_towers((1, 1)).graph
    on = platform(store_all_peak_bytes(graph) * 8 // 10, GIGA)
    with pytest.raises(SolverUnsuitableError, match=r"is no chain: .* 'join'"):
        solved(graph, on)


def test_no_time_gives_no_answer():
    graph = INSTANCES["resnet"]().graph
    on = platform(store_all_peak_bytes(graph) * 6 // 10, 1)
    result = solved(graph, on, limits=Limits.after(0.0))
    assert result.stop_reason is StopReason.TIME_LIMIT
