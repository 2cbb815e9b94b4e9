"""Regions that run forward again as a whole, against all choices of which do."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.test_region_program import stack, wide
from tests.planning.test_regions import F1, F2, OUT, X, composed

from remat.core.graph import Phase
from remat.core.liveness import BOUNDARY
from remat.core.platform import single_device
from remat.core.problem import Problem, Status
from remat.core.schedule import Compute
from remat.core.simulator import simulate
from remat.planning.portfolio import solve
from remat.planning.region_program import RegionFront, RegionOption, RegionProgram
from remat.planning.region_reruns import RerunChoice, RerunProgram, RerunSearch
from remat.planning.regions import ComposedStep, Parts


def reruns_of(parts: Parts) -> Parts:
    """Let the op that makes a region's output run once for that reason alone."""
    regions = [replace(region, outputs=frozenset({F2})) for region in parts.regions]
    return replace(parts, regions=regions)


def search_of(step: ComposedStep) -> RerunSearch:
    program = RegionProgram(step=step)
    solve(Problem(graph=step.graph, platform=single_device(1)), program)
    return RerunProgram(program=program).search(program.known_fronts())


def all_choices(search: RerunSearch) -> list[tuple[int, int]]:
    """Return peak and time of all ways: what is kept inside, and who runs again."""
    step, found = search.step, list[tuple[int, int]]()
    numbers = [range(len(front.options)) for front in search.fronts]
    for options in product(*numbers):
        able = [
            region
            for region, rerun in step.reruns.items()
            if step.may_rerun(
                rerun, search.fronts[region].options[options[region]].order
            )
        ]
        for flags in product([False, True], repeat=len(able)):
            again = tuple(r for r, flag in zip(able, flags, strict=True) if flag)
            _, trace = search.judged(RerunChoice(options, again))
            assert trace.violation is None
            found.append((trace.peak_bytes[0], trace.serial_ns))
    return found


@st.composite
def stacks(draw: st.DrawFn, *, reads_output: bool = False) -> Parts:
    count = draw(st.integers(3, 4))
    sizes = [
        draw(st.integers(1, 50)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 50)),
    ]
    held = [*range(1, count), count]
    parts = stack(sizes, count, held, reads_output=reads_output)
    return reruns_of(parts)


@given(st.one_of(stacks(), stacks(reads_output=True)), st.integers(0, 100))
@settings(max_examples=12)
def test_what_is_found_fits_and_nothing_is_quicker(case: Parts, percent: int) -> None:
    step = composed(case)
    search = search_of(step)
    choices = all_choices(search)
    peaks = [peak for peak, _ in choices]
    budget = min(peaks) + (max(peaks) - min(peaks)) * percent // 100
    schedule = search.run(budget)
    best = min(cost for peak, cost in choices if peak <= budget)
    # Sums of bytes are too high by no more than one region's scratch memory and input.
    loose = min(
        (cost for peak, cost in choices if peak <= budget - 60 - peaks[0] // 20),
        default=None,
    )
    if schedule is None:
        assert loose is None
        return
    graph = step.with_reruns.graph
    trace = simulate(graph, single_device(budget), schedule)
    assert trace.violation is None
    assert trace.serial_ns >= best
    if loose is not None:
        assert trace.serial_ns <= loose


@pytest.mark.parametrize("count", [9, 16])
def test_a_deep_stack_needs_the_root_of_what_it_hands_over(count: int) -> None:
    """Blocks of 100 go from region to region, and little is inside of each."""
    parts = reruns_of(stack([100, 0, 1], count, list(range(1, count + 1))))
    step = composed(parts)
    search = search_of(step)
    kept = min(
        trace.peak_bytes[0]
        for index in range(len(search.fronts[1].options))
        for _, trace in [
            search.judged(
                RerunChoice(
                    tuple(min(index, len(f.options) - 1) for f in search.fronts)
                )
            )
        ]
    )
    found = search.least(kept)
    assert found is not None
    assert kept > 100 * count
    assert found[1].peak_bytes[0] <= 100 * (2 * count**0.5 + 4)


def test_a_schedule_is_taken_apart_into_what_each_region_does() -> None:
    parts = reruns_of(stack([4, 1, 10], 5, [1, 2, 3, 4, 5]))
    step = composed(parts)
    search = search_of(step)
    frugal = tuple(len(front.options) - 1 for front in search.fronts)
    schedule, trace = search.judged(RerunChoice(frugal, (1, 2)))
    assert step.has_reruns(schedule)
    ways = step.region_orders(schedule, trace)
    assert [way.again for way in ways] == [(), (F1, F2), (F1, F2), (), ()]
    assert [sorted(way.remade) for way in ways] == [[], [OUT], [X, OUT], [X], []]
    assert [way.order for way in ways] == [
        front.options[-1].order for front in search.fronts
    ]
    again = [s.op for s in schedule.steps if isinstance(s, Compute)]
    first = next(o for o in step.origins if o is not None and o[0] == 3)
    assert first is not None
    backward = [
        step.origins[op] for op in again if step.graph.ops[op].phase is Phase.BACKWARD
    ]
    assert backward.index((3, 2)) < backward.index((2, 2))
    plain, _ = search.judged(RerunChoice(frugal))
    assert not step.has_reruns(plain)
    # A schedule that runs no region again is judged on the step as it was.
    assert simulate(step.graph, single_device(), plain).violation is None
    assert simulate(step.graph, single_device(), schedule).violation is not None


def test_what_others_keep_or_cannot_follow_is_not_made_again() -> None:
    """The last region's output is returned; the second draws what it cannot repeat."""
    parts = reruns_of(stack([4, 1, 10], 4, [1, 2, 3, 4]))
    assert set(composed(parts).reruns) == {0, 1, 2}
    regions = list(parts.regions)
    graph = regions[1].graph
    ops = list(graph.ops)
    ops[F1] = replace(ops[F1], non_recomputable="it reads a clock")
    regions[1] = replace(regions[1], graph=replace(graph, ops=tuple(ops)))
    step = composed(replace(parts, regions=regions))
    assert set(step.reruns) == {0, 2}
    # What keeps more than its input holds what another run would make.
    everything = (F1, F2, BOUNDARY, 2, 3)
    assert not step.may_rerun(step.reruns[2], everything)
    assert step.may_rerun(step.reruns[2], (F1, F2, BOUNDARY, F1, 2, 3))


def test_the_program_is_asked_as_any_solver() -> None:
    parts = reruns_of(stack([100, 0, 1], 9, list(range(1, 10))))
    step = composed(parts)
    program = RerunProgram(program=RegionProgram(step=step))
    assert program.is_of_use
    graph = step.with_reruns.graph
    for budget, status in ((900, Status.FEASIBLE), (150, Status.UNKNOWN)):
        result = solve(Problem(graph=graph, platform=single_device(budget)), program)
        assert result.status is status


def test_options_that_none_may_rerun_by_make_no_segment() -> None:
    parts = reruns_of(stack([4, 1, 10], 3, [1, 2, 3]))
    step = composed(parts)
    order = (F1, F2, BOUNDARY, 2, 3)
    option = RegionOption(order, 20, 14, 20, 31)
    front = RegionFront(option, (option,))
    schedule, trace = step.everything
    search = RerunSearch(step, [front] * 3, schedule, trace)
    choice = search.choose(10**6)
    assert choice == RerunChoice((0, 0, 0))


def test_regions_in_segments_run_by_the_quickest_order_that_fits() -> None:
    """Of those that hold nothing but the input some have smaller peaks."""
    parts = wide(7)
    regions = [replace(region, outputs=frozenset({2})) for region in parts.regions]
    search = search_of(composed(replace(parts, regions=regions)))
    choice = search.choose(62)
    assert choice is not None
    _, trace = search.judged(choice)
    assert trace.violation is None
    assert trace.peak_bytes[0] <= 62
    ways = [search.fronts[r].options[choice.options[r]] for r in choice.again]
    assert {way.held_bytes for way in ways[1:]} == {4}
    assert len({way.cost_ns for way in ways}) == 2
