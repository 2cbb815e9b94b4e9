"""The program over regions, against all choices of their options."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.test_regions import (
    B2,
    GRAD_X,
    OUT,
    TANGENT,
    A,
    X,
    chain,
    chain_order,
    composed,
    op,
)

from remat.core.graph import Phase, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Status
from remat.core.simulator import simulate
from remat.planning import region_program
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
@settings(max_examples=30)
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


def wide(count: int, x: int = 4) -> Parts:
    """Equal regions of three ops each, with inner values of 10 and 12 between them."""
    parts = stack([x, 1, 10], count, list(range(1, count + 1)))
    region = parts.regions[1]
    graph = region.graph
    second, gradient = len(graph.storages), len(graph.storages) + 1
    f1, f2, b2, b1 = graph.ops
    graph = replace(
        graph,
        storages=(
            *graph.storages,
            Storage(name="a2", size_bytes=12),
            Storage(name="grad a2", size_bytes=12),
        ),
        ops=(
            f1,
            op("f", [A], [second], Phase.FORWARD),
            replace(f2, reads=(second,)),
            op("b3", [second, TANGENT], [gradient], Phase.BACKWARD),
            replace(b2, reads=(A, gradient)),
            b1,
        ),
    )
    # The first takes no gradient of its input, which is the batch.
    first = replace(
        graph, storages=parts.regions[0].graph.storages + graph.storages[8:]
    )
    regions = [
        replace(region, graph=graph if index else first)
        for index, region in enumerate(parts.regions)
    ]
    return replace(parts, regions=regions)


def test_what_holds_least_is_known_with_a_smaller_peak_as_well() -> None:
    """Inner values are made again one at a time, and the first of them twice."""
    region = wide(2).regions[1]
    front = LoneRegion(region, frozenset({X})).front(Limits())
    least_bytes = min(option.held_bytes for option in front.options)
    peaks = {
        option.backward_bytes: option.cost_ns
        for option in front.options
        if option.held_bytes == least_bytes
    }
    assert least_bytes == 4
    # Input, both inner values, tangent, the gradient of the second, scratch memory; or
    # input, the first inner value, both gradients, scratch memory.
    assert peaks == {4 + 10 + 12 + 4 + 12 + 3: 40, 4 + 10 + 12 + 10 + 3: 45}


def test_a_budget_below_the_peak_of_a_region_that_keeps_everything_is_kept() -> None:
    """What is between regions is not what is discarded while one runs."""
    step = composed(wide(3))
    program = RegionProgram(step=step)
    solve(Problem(graph=step.graph, platform=single_device(1)), program)
    everything, trace = step.everything
    search = RegionSearch(step, program.known_fronts(), everything, trace)
    numbers = [range(len(front.options)) for front in search.fronts]
    least = min(search.judged(way)[1].peak_bytes[0] for way in product(*numbers))
    result = solve(Problem(graph=step.graph, platform=single_device(least)), program)
    assert result.status is Status.FEASIBLE


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
@settings(max_examples=25)
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


# --- how the program is asked --------------------------------------------------------


class Scripted(RegionSearch):
    """A program that needs other bytes than the budgets that it is asked for.

    ``peak_of`` says what the judge finds of the answer, ``None`` if there is none.
    """

    def __init__(
        self,
        peak_of: Callable[[int], int | None],
        cost_of: Callable[[int], int] = lambda asked: 10_000 - asked,
    ) -> None:
        self.peak_of, self.cost_of = peak_of, cost_of
        self.asked: list[int] = []

    def choose(self, budget_bytes: int) -> list[int] | None:
        self.asked.append(budget_bytes)
        return None if self.peak_of(budget_bytes) is None else [budget_bytes]

    def judged(self, choice: Sequence[int]) -> Any:
        (asked,) = choice
        peak_bytes, serial_ns = self.peak_of(asked), self.cost_of(asked)
        return asked, SimpleNamespace(peak_bytes=(peak_bytes,), serial_ns=serial_ns)


@pytest.mark.parametrize(
    ("peak_of", "asked", "answer"),
    [
        # Sums that are too high, until less than two bytes in a thousand are left.
        (lambda asked: asked * 4 // 5, [1000, 1200, 1240, 1248], 1248),
        # Sums that are too low, from both sides.
        (lambda asked: asked * 5 // 4, [1000, 750, 813, 797, 801, 800], 800),
        # Back at what was asked for before.
        ({1000: 1200, 800: 900, 900: 1100, 850: 1000}.get, [1000, 800, 900, 850], 850),
        # Nothing fits what is asked for, and more may.
        (lambda asked: None if asked < 1700 else 999, [1000, 1500, 1750], 1750),
        (
            lambda asked: None if asked < 1900 else 999,
            [1000, 1500, 1750, 1875, 1937],
            1937,
        ),
        # No peak is near the budget: halves between what fits and what exceeds it.
        (
            lambda asked: 500 if asked <= 900 else 1400,
            [1000, 600, 800, 900, 950, 925, 912, 906],
            900,
        ),
        # The same, until the two are as near.
        (
            lambda asked: 500 if asked <= 998 else 1400,
            [1000, 600, 800, 900, 950, 975, 987, 993],
            993,
        ),
        (
            lambda asked: 100 if asked <= 3 else 1004,
            [1000, 996, 992, 988, 984, 980, 976, 972],
            None,
        ),
    ],
)
def test_it_is_asked_for_as_much_as_the_judge_is_off(
    peak_of: Callable[[int], int | None], asked: list[int], answer: int | None
) -> None:
    search = Scripted(peak_of)
    assert search.run(1000) == answer
    assert search.asked == asked


def test_what_fits_next_to_what_exceeds_ends_it() -> None:
    search = Scripted({1000: 1002, 998: 500}.__getitem__)
    assert search.run(1000) == 998
    assert search.asked == [1000, 998]


def test_the_quickest_that_fits_is_taken_the_first_of_as_quick() -> None:
    peaks = {1000: 800, 1200: 900, 1300: 999}.__getitem__
    assert Scripted(peaks, {1000: 7, 1200: 5, 1300: 6}.__getitem__).run(1000) == 1200
    assert Scripted(peaks, {1000: 5, 1200: 6, 1300: 5}.__getitem__).run(1000) == 1000


def test_states_are_thinned_out_to_the_quickest_of_those_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(region_program, "_STATES", 4)

    def cheapest(*states: tuple[int, int]) -> list[tuple[int, int]]:
        used, cost, kept = region_program.cheapest(*np.array(states).T)
        found = list(zip(used.tolist(), cost.tolist(), strict=True))
        assert found == [states[index] for index in kept]
        return found

    # More for as much or less time is no state, nor is as much for more.
    assert cheapest((5, 3), (5, 2), (4, 9), (6, 2), (7, 2), (4, 8)) == [(4, 8), (5, 2)]
    four = [(1, 9), (2, 8), (3, 7), (90, 6)]
    assert cheapest(*four) == four
    # One more than there may be: the first, and of each quarter the last.
    assert cheapest(*four[:3], (4, 6), (41, 5)) == [(1, 9), (4, 6), (41, 5)]
    # Quarters of 10 to 49: of each the most bytes, which is the least time.
    states = [(10, 9), (11, 8), (19, 7), (20, 6), (29, 5), (30, 4), (49, 3)]
    assert cheapest(*states) == [(10, 9), (19, 7), (29, 5), (30, 4), (49, 3)]


def test_regions_pay_where_half_are_equal_to_others() -> None:
    for count, pays in ((3, False), (4, True)):
        parts = stack([4, 1, 10], count, list(range(1, count + 1)))
        assert RegionProgram(step=composed(parts)).repeats is pays


def test_time_is_shared_among_the_regions_that_are_left() -> None:
    shares: list[float] = []

    class Shared(Limits):
        def share(self, share: float) -> Limits:
            shares.append(share)
            return Limits()

    step = composed(stack([4, 1, 10], 6, [1, 2, 3, 4, 5, 6]))
    problem = Problem(graph=step.graph, platform=single_device(60))
    seen: list[float] = []
    RegionProgram(step=step).solve(
        problem, Shared(), lambda _activity, part: seen.append(part)
    )
    # One share more than regions: the program needs time as well.
    assert shares == [1 / 3, 1 / 2]
    assert seen == [0, 0.45, 0.9]


def test_a_region_is_solved_for_levels_of_what_it_holds_and_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    region = chain([[4, 1, 10, 4]] * 2, [1, 2]).regions[1]
    asked: list[tuple[int, int]] = []

    def resident_bytes(graph: TrainingGraph) -> int:
        return sum(s.size_bytes for s in graph.storages if s.is_resident)

    def smallest(graph: TrainingGraph, **_: Any) -> Any:
        assert load_of(graph) == 0
        schedule = schedule_from_order(graph, store_all_order(graph))
        return SimpleNamespace(
            budget_bytes=resident_bytes(graph) - 13, schedule=schedule
        )

    def load_of(graph: TrainingGraph) -> int:
        """What is in use beside the region when its forward pass ends."""
        (load,) = graph.ops[graph.forward_count - 1].workspace_bytes
        # The region's output of 4 is still there, and gone when others run.
        load += 4 if load else 0
        others = [
            *graph.ops[: graph.forward_count - 1],
            *graph.ops[graph.forward_count :],
        ]
        assert [op.workspace_bytes for op in others] == workspaces
        return load

    def note(problem: Problem, *_: Any, **__: Any) -> Any:
        graph = problem.graph
        most = (problem.budget_bytes or 0) - resident_bytes(graph)
        asked.append((most - load_of(graph), most))
        return SimpleNamespace(schedule=None)

    lone = LoneRegion(region, frozenset({X}))
    last = lone._graph.forward_count - 1
    ops = lone._graph.ops
    workspaces = [op.workspace_bytes for op in (*ops[:last], *ops[last + 1 :])]
    monkeypatch.setattr(region_program, "smallest_budget", smallest)
    monkeypatch.setattr(region_program, "solve_portfolio", note)
    lone.front(Limits())
    held = [4, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12, 13]
    # The second limit is half way from 31 to -13, and no less than what is held; of
    # that more than 5 is no limit there. Then the peak of what holds least is halved.
    assert asked == [
        *((each, 31) for each in held),
        *((each, 9) for each in (4, 4, 9, 9, 9, 9)),
        *((4, most) for most in (9, 20, 25, 28, 29, 30)),
    ]


def test_a_region_without_backward_holds_nothing() -> None:
    region = chain([[4, 1, 10, 4]] * 2, [1, 2]).regions[1]
    graph = region.graph
    forward = replace(
        graph,
        ops=graph.ops[: graph.forward_count],
        storages=graph.storages[: OUT + 1],
        tangents=(),
        final_outputs=(),
    )
    alone = LoneRegion(
        replace(region, graph=forward, slots={}, gradients=[]), frozenset({X})
    )
    front = alone.front(Limits())
    (only,) = front.options
    assert front.everything == only
    assert only.order[-1] == BOUNDARY
    # Inner value, output and scratch memory; nobody needs the input again.
    assert only.forward_bytes == 10 + 4 + 3
    assert only.held_bytes == only.backward_bytes == 0
