"""No schedule of any solver is faster or smaller than what is proved of all of them."""

from functools import cache

import pytest
from tests.instances import awkward_sizes, mlp_chain, once_only

from remat.bounds.memory_bound import least_budget_bytes
from remat.bounds.time_bound import TimeBounds
from remat.core.errors import SolverUnsuitableError
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem
from remat.planning.one_device import plain_peak_bytes
from remat.planning.portfolio import solve
from remat.solvers import SOLVERS

EVERYTHING = 1 << 62
GRAPHS = {
    "chain": mlp_chain(4).graph,
    "once only": once_only().graph,
    "awkward": awkward_sizes(1, 8).graph,
}


@cache
def known_peaks(label: str, name: str) -> dict[int, int]:
    """Return the times that a solver finds, by the peaks of their schedules."""
    graph = GRAPHS[label]
    whole = plain_peak_bytes(graph)
    found: dict[int, int] = {}
    for percent in (100, 85, 70, 55):
        platform = single_device(whole * percent // 100)
        try:
            result = solve(
                Problem(graph=graph, platform=platform),
                SOLVERS[name](),
                limits=Limits.after(1.0),
            )
        except SolverUnsuitableError:
            return found
        if result.trace is not None:
            peak = result.trace.peak_bytes[0]
            found[peak] = min(result.trace.serial_ns, found.get(peak, EVERYTHING))
    return found


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("label", GRAPHS)
def test_no_solver_beats_a_bound(label: str, name: str) -> None:
    graph = GRAPHS[label]
    least = least_budget_bytes(graph)
    for peak, time_ns in known_peaks(label, name).items():
        assert least <= peak
        # With a budget of the very bytes that the schedule takes, as tight as can be.
        assert TimeBounds(graph, peak).prove(EVERYTHING) <= time_ns


def test_the_solvers_above_are_asked_something() -> None:
    found = {name for name in SOLVERS if known_peaks("chain", name)}
    assert len(found) >= 14
