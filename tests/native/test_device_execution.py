"""Execution on devices: the native core does what its twin does, step by step."""

import inspect

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.strategies import graphs

from remat.core.liveness import insert_discards
from remat.core.platform import Device, Link, Platform
from remat.core.problem import Problem
from remat.core.simulator import simulate
from remat.search import device_execution as execution
from remat.search.device_execution import ExecutionRule, Executor
from remat.search.device_execution_run import run_on_devices
from remat.search.device_feasibility import infeasible_reason
from remat.search.device_instance import DeviceInstance
from remat.search.device_placements import Placements

LINKS = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)]

rules = st.builds(
    ExecutionRule,
    size_exponent=st.sampled_from([0.0, 0.7, 1.0]),
    distance_exponent=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    ancestor_share=st.sampled_from([0.0, 0.3, 1.0]),
    copy_percent=st.sampled_from([1, 10, 100, 333, 10_000]),
    limit_percent=st.integers(60, 100),
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Three devices, with any links between them, so that some ways lead over two."""
    graph = draw(
        graphs(
            max_ops=9,
            kind_count=2,
            device_count=draw(st.sampled_from([1, 3])),
            sizes=st.integers(0, 6),
            holds_outputs=draw(st.booleans()),
        )
    )
    joined = draw(st.sampled_from([LINKS, LINKS[:4], LINKS[1:], LINKS[:3]]))
    return Problem(
        graph=graph,
        platform=Platform(
            devices=tuple(
                Device(
                    name=f"{place} {kind}",
                    kind=kind,
                    budget_bytes=draw(st.none() | st.integers(8, 50)),
                )
                for place, kind in enumerate((*graph.device_kinds, "cpu"))
            ),
            links=tuple(
                Link(
                    source=source,
                    target=target,
                    bytes_per_s=draw(st.integers(1, 9)) * 10**8,
                    latency_ns=draw(st.integers(0, 3)),
                )
                for source, target in joined
            ),
            copies_wait=draw(st.booleans()),
        ),
    )


@settings(max_examples=300)
@given(problem=problems(), rule=rules, data=st.data())
def test_run_on_devices(problem: Problem, rule: ExecutionRule, data: st.DataObject):
    instance = DeviceInstance.of(problem)
    assume(infeasible_reason(instance) is None)
    places = Placements(instance)
    starts = [places.cheapest_everywhere(), *places.starts()]
    placement = data.draw(st.sampled_from(starts))
    runs_per_op = data.draw(st.integers(1, 12))
    given_arguments: list[tuple[object, ...]] = []

    def note(*arguments: object):
        given_arguments.append(arguments)
        return run_on_devices(*arguments)  # pyright: ignore[reportArgumentType]

    execution.run_on_devices, before = note, execution.run_on_devices
    try:
        done = Executor(instance).execute(placement, rule, runs_per_op=runs_per_op)
    finally:
        execution.run_on_devices = before
    (arguments,) = given_arguments
    twin = inspect.unwrap(run_on_devices)(*arguments)
    assert (None if done is None else [*done.notes]) == twin
    if done is None:
        return
    schedule = insert_discards(problem.graph, done.steps())
    trace = simulate(problem.graph, problem.platform, schedule)
    # As a list the steps fit; copies that run ahead may not.
    limits = [device.budget_bytes for device in problem.platform.devices]
    for line, limit in zip(trace.timeline_bytes, limits, strict=True):
        assert limit is None or max(line) <= limit
    assert done.serial_ns == trace.serial_ns
    assert done.soonest_ns <= trace.overlapped_ns
