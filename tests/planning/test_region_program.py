"""The program over regions, against all choices of their options."""

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.test_regions import (
    B2,
    GRAD_X,
    OUT,
    X,
    chain,
    chain_order,
    composed,
)

from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Status
from remat.core.simulator import simulate
from remat.planning.portfolio import solve
from remat.planning.region_program import (
    Fronts,
    LoneRegion,
    RegionFront,
    RegionOption,
    RegionProgram,
    RegionSearch,
    stage_of,
)
from remat.planning.regions import ComposedStep, EagerForward, Parts, Region


def stack(
    sizes: list[int],
    count: int,
    held: list[int],
    scratch: list[int] | None = None,
    *,
    reads_output: bool = False,
) -> Parts:
    """Return equal regions, which share one graph, each but the first given a block.

    Operators in no graph take ``scratch`` bytes before each region and after the last.
    With ``reads_output`` the backward of each region reads its output as well, which
    that of the next one reads anyway.
    """
    x, w, a = sizes
    parts = chain([[x, w, a, x]] * count, held)
    first, second = parts.regions[:2]
    if reads_output:
        first, second = _reading(first), _reading(second)
    regions = [
        first,
        *(replace(region, graph=second.graph) for region in parts.regions[1:]),
    ]
    between = {
        before: EagerForward(workspace_bytes=size)
        for before, size in enumerate(scratch or [])
    }
    return replace(parts, regions=regions, between=between)


def _reading(region: Region) -> Region:
    graph = region.graph
    ops = list(graph.ops)
    ops[B2] = replace(ops[B2], reads=(*ops[B2].reads, OUT))
    return replace(region, graph=replace(graph, ops=tuple(ops)))


@st.composite
def stacks(draw: st.DrawFn, *, reads_output: bool = False) -> tuple[Parts, int]:
    count = draw(st.integers(2, 6))
    size = st.integers(0, 50)
    held = [draw(st.integers(min(r + 1, count - 1), count - 1)) for r in range(count)]
    held[-1] = count
    scratch = [draw(st.integers(0, 60)) for _ in range(count + 1)]
    sizes = [draw(size) for _ in range(3)]
    parts = stack(sizes, count, held, scratch, reads_output=reads_output)
    return parts, draw(st.integers(0, 100))


def all_choices(step: ComposedStep) -> list[tuple[int, int]]:
    """Return the peak and the time of every choice of what is computed again."""
    found: list[tuple[int, int]] = []
    for again in product([False, True], repeat=len(step.regions)):
        schedule = schedule_from_order(step.graph, chain_order(step, again))
        trace = simulate(step.graph, single_device(), schedule)
        found.append((trace.peak_bytes[0], trace.serial_ns))
    return found


@given(st.one_of(stacks(), stacks(reads_output=True)))
@settings(max_examples=80)
def test_the_best_choice_is_found(case: tuple[Parts, int]) -> None:
    parts, percent = case
    step = composed(parts)
    choices = all_choices(step)
    peaks = [peak for peak, _ in choices]
    budget = min(peaks) + (max(peaks) - min(peaks)) * percent // 100
    problem = Problem(graph=step.graph, platform=single_device(budget))
    result = solve(problem, RegionProgram(step=step))
    best = min(cost for peak, cost in choices if peak <= budget)
    assert result.trace is not None
    assert result.trace.peak_bytes[0] <= budget
    assert result.trace.serial_ns == best
    assert result.schedule is not None
    assert step.by_regions(result.schedule) == result.schedule


def test_equal_regions_are_solved_once() -> None:
    parts = stack([4, 1, 10], 6, [1, 2, 3, 4, 5, 6])
    step, fronts = composed(parts), Fronts()
    problem = Problem(graph=step.graph, platform=single_device(60))
    program = RegionProgram(step=step, fronts=fronts)
    assert program.repeats
    result = solve(problem, program)
    # The first one's input is there all the time, as the batch is.
    assert len(fronts) == 2
    before = dict(fronts)
    assert solve(problem, program).schedule == result.schedule
    assert fronts == before
    assert not RegionProgram(
        step=composed(chain([[4, 1, 10, 4]] * 3, [1, 2, 3]))
    ).repeats


def test_a_budget_that_no_choice_keeps_is_unknown() -> None:
    parts = stack([4, 1, 10], 4, [1, 2, 3, 4])
    step = composed(parts)
    least = min(peak for peak, _ in all_choices(step))
    for budget, status in ((least, Status.FEASIBLE), (least - 1, Status.UNKNOWN)):
        problem = Problem(graph=step.graph, platform=single_device(budget))
        result = solve(problem, RegionProgram(step=step))
        assert result.status is status


def test_a_front_has_what_a_region_holds_and_needs() -> None:
    """Kept or computed again is an inner value of 10; in and out go blocks of 4."""
    region = chain([[4, 1, 10, 4]] * 2, [1, 2]).regions[1]
    front = LoneRegion(region, frozenset({X})).front(Limits())
    kept, again = front.options
    assert front.everything == kept
    assert [kept.cost_ns, again.cost_ns] == [20, 25]
    # Its input, which backward reads, and the inner value.
    assert [kept.held_bytes, again.held_bytes] == [14, 4]
    # Scratch memory of 3; while its output is made, input and inner value are there.
    assert kept.forward_bytes == 4 + 10 + 4 + 3
    # Inner value, tangent and the inner value's gradient; then three gradients.
    assert kept.backward_bytes == again.backward_bytes == 4 + 10 + 4 + 10 + 3
    alone = LoneRegion(region, frozenset()).front(Limits())
    assert alone.everything.held_bytes == 10


def test_regions_without_backward_run_once() -> None:
    """Backward does not come to the second of three; of the third it takes no input."""
    parts = stack([4, 1, 10], 4, [1, 2, 3, 4])
    aside = replace(parts.regions[1], given={X: 101, 1: 201})
    last = replace(parts.regions[2], given={X: 101, 1: 202}, gradients=[(0, GRAD_X)])
    parts = replace(
        parts, regions=[parts.regions[0], aside, last], backward=[2, 0], held={103: 3}
    )
    step = composed(parts)
    whole = simulate(
        step.graph,
        single_device(),
        schedule_from_order(step.graph, store_all_order(step.graph)),
    )
    budget = whole.peak_bytes[0] - 1
    problem = Problem(graph=step.graph, platform=single_device(budget))
    result = solve(problem, RegionProgram(step=step))
    assert result.schedule is not None
    assert result.trace is not None
    orders = step.region_orders(result.schedule, result.trace)
    assert orders[1].order[-1] == BOUNDARY
    assert result.trace.serial_ns == 5 * (4 + 2 + 4 + 1)


@given(stacks())
@settings(max_examples=60)
def test_sums_of_bytes_are_what_the_judge_finds(case: tuple[Parts, int]) -> None:
    """Regions of a stack hold nothing together but blocks that both options hold."""
    step = composed(case[0])
    graph = step.graph
    problem = Problem(graph=graph, platform=single_device(1))
    program = RegionProgram(step=step)
    solve(problem, program)
    everything = schedule_from_order(graph, store_all_order(graph))
    trace = simulate(graph, single_device(), everything)
    fronts = program.known_fronts()
    search = RegionSearch(step, fronts, everything, trace)
    for choice in product(*(range(len(front.options)) for front in fronts)):
        used = most = 0
        for stage, option in zip(search.stages, choice, strict=True):
            most = max(most, stage.before_bytes + used)
            most = max(most, int(stage.running_bytes[option]) + used)
            used += int(stage.held_bytes[option])
        most = max(most, search.end_bytes + used)
        _, judged = search.judged(choice)
        assert judged.peak_bytes[0] == most


def test_an_option_changes_what_runs_by_its_own_peaks() -> None:
    everything = RegionOption((), 10, 100, 60, 80)
    other = RegionOption((), 12, 40, 50, 95)
    front = RegionFront(everything, (everything, other))
    stage = stage_of(7, 1000, 2000, front)
    assert stage.before_bytes == 7
    assert list(stage.cost_ns) == [10, 12]
    assert list(stage.held_bytes) == [0, -60]
    assert list(stage.running_bytes) == [2000, 2015]
    assert list(stage_of(7, 3000, 2000, front).running_bytes) == [3000, 2990]
