"""Steps of several graphs, put together and taken apart again."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.errors import BudgetError
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order, store_all_order
from remat.core.platform import single_device
from remat.core.schedule import Boundary, Compute, Schedule
from remat.core.simulator import simulate
from remat.planning.one_device import plan_graph
from remat.planning.plan import Plan
from remat.planning.regions import (
    ComposedStep,
    EagerBackward,
    EagerForward,
    Parts,
    Region,
    compose,
    frugal_needs,
    frugal_order,
    plan_regions,
)
from remat.planning.several_devices import Budget

Solve = Callable[[Budget | None], Plan]

# Storages of each region of a chain.
X, W, A, OUT, TANGENT, GRAD_A, GRAD_X, GRAD_W = range(8)
F1, F2, B2, B1 = range(4)
NAMES = ("x", "w", "a", "out", "tangent", "grad a", "grad x", "grad w")


def op(
    name: str,
    reads: Iterable[int],
    writes: Iterable[int],
    phase: Phase,
    once: str | None = None,
) -> Op:
    return Op(
        name=name,
        reads=tuple(reads),
        writes=tuple(writes),
        cost_ns=(5,),
        workspace_bytes=(3,),
        phase=phase,
        non_recomputable=once,
    )


def chain(sizes: Sequence[Sequence[int]], held: Sequence[int]) -> Parts:
    """Regions that each hand one block to the next; the last one's is the loss.

    ``sizes`` are those of input, weight, inner value, and output of each region.
    """
    regions: list[Region] = []
    for index, (_, w, a, out) in enumerate(sizes):
        x = sizes[index - 1][3] if index else sizes[0][0]
        found = (x, w, a, out, out, a, x, w)
        graph = TrainingGraph(
            name=f"region {index}",
            storages=tuple(
                Storage(name=name, size_bytes=size, is_resident=number in {X, W})
                for number, (name, size) in enumerate(zip(NAMES, found, strict=True))
            ),
            ops=(
                op("f1", [X, W], [A], Phase.FORWARD),
                op("f2", [A], [OUT], Phase.FORWARD, "the caller holds its output"),
                op("b2", [A, TANGENT], [GRAD_A], Phase.BACKWARD),
                op("b1", [X, W, GRAD_A], [GRAD_X, GRAD_W], Phase.BACKWARD),
            ),
            forward_outputs=(OUT,),
            tangents=(TANGENT,),
            final_outputs=(OUT, GRAD_X, GRAD_W),
        )
        regions.append(
            Region(
                graph=graph,
                given={X: 100 + index, W: 200 + index},
                made={OUT: 101 + index},
                slots={TANGENT: index},
                gradients=[(index - 1, GRAD_X), (200 + index, GRAD_W)][not index :],
            )
        )
    return Parts(
        regions=regions,
        backward=range(len(regions))[::-1],
        held={101 + index: last for index, last in enumerate(held)},
        returned=frozenset({len(regions) - 1}),
        leaves={200 + index: False for index in range(len(regions))},
    )


def composed(parts: Parts) -> ComposedStep:
    return compose("chain", parts, frees_tangents=True)


def peak_by_hand(parts: Parts, again: Sequence[bool]) -> int:
    """Return the peak of the chain's step, from what a step needs, block by block.

    ``again`` says of each region whether its inner value is computed again.
    """
    regions = parts.regions
    count = len(regions)
    sizes = [[s.size_bytes for s in region.graph.storages] for region in regions]
    resident = sizes[0][X] + sum(size[W] for size in sizes)

    def total(blocks: set[tuple[int, int]], extra: int = 0) -> int:
        # The input of a region is the output of the one before.
        named = {(r - 1, OUT) if n == X else (r, n) for r, n in blocks}
        named -= {(-1, OUT)}
        return resident + sum(sizes[r][n] for r, n in named) + extra

    def outputs_at(index: int) -> set[tuple[int, int]]:
        return {(r, OUT) for r in range(count) if parts.held[101 + r] >= index}

    saved = [{(r, X)} if again[r] else {(r, A), (r, X)} for r in range(count)]
    peak = 0
    for r in range(count):
        before = set[tuple[int, int]]().union(*saved[:r])
        around = before | {(j, o) for j, o in outputs_at(r) if j < r}
        peak = max(peak, total(around | {(r, X), (r, A)}, 3))
        peak = max(peak, total(around | {(r, X), (r, A), (r, OUT)}, 3))
    everything = set[tuple[int, int]]().union(*saved) | outputs_at(count)
    peak = max(peak, total(everything | {(count - 1, TANGENT)}))
    for r in reversed(range(count)):
        made = {(j, GRAD_W) for j in range(r + 1, count)}
        around = set[tuple[int, int]]().union(*saved[:r]) | outputs_at(count) | made
        # The gradient of an input is the tangent of the region before.
        tangent = {(r + 1, GRAD_X)} if r + 1 < count else {(r, TANGENT)}
        if again[r]:
            peak = max(peak, total(around | tangent | {(r, X), (r, A)}, 3))
        peak = max(peak, total(around | tangent | {(r, X), (r, A), (r, GRAD_A)}, 3))
        last = {(r, X), (r, GRAD_A), (r, GRAD_X), (r, GRAD_W)}
        peak = max(peak, total(around | last, 3))
    return peak


@st.composite
def chains(draw: st.DrawFn) -> tuple[Parts, list[bool]]:
    count = draw(st.integers(1, 4))
    size = st.integers(0, 50)
    sizes = [[draw(size) for _ in range(4)] for _ in range(count)]
    held = [draw(st.integers(min(r + 1, count - 1), count - 1)) for r in range(count)]
    held[-1] = count
    return chain(sizes, held), [draw(st.booleans()) for _ in range(count)]


def chain_order(step: ComposedStep, again: Sequence[bool]) -> list[int]:
    """Return every op in order, with inner values computed again where that is said."""
    order: list[int] = []
    for index in store_all_order(step.graph):
        origin = None if index == BOUNDARY else step.origins[index]
        if origin is not None and origin[1] == B2 and again[origin[0]]:
            order.append(step.origins.index((origin[0], F1)))
        order.append(index)
    return order


@given(chains())
def test_the_peak_of_a_chain_is_that_by_hand(
    case: tuple[Parts, list[bool]],
) -> None:
    parts, again = case
    step = composed(parts)
    schedule = schedule_from_order(step.graph, chain_order(step, again))
    trace = simulate(step.graph, single_device(), schedule)
    assert trace.violation is None
    assert trace.peak_bytes == (peak_by_hand(parts, again),)
    assert trace.serial_ns == 5 * (4 * len(parts.regions) + sum(again))


@given(chains())
def test_what_is_taken_apart_runs_in_each_region(
    case: tuple[Parts, list[bool]],
) -> None:
    parts, again = case
    step = composed(parts)
    schedule = schedule_from_order(step.graph, chain_order(step, again))
    assert step.by_regions(schedule) == schedule
    trace = simulate(step.graph, single_device(), schedule)
    orders = step.region_orders(schedule, trace)
    fullest = {
        origin
        for position, each in enumerate(schedule.steps)
        if isinstance(each, Compute)
        and trace.timeline_bytes[0][position] == trace.peak_bytes[0]
        and (origin := step.origins[each.op]) is not None
    }
    found: set[tuple[int, int]] = set()
    for number, (region, order) in enumerate(zip(parts.regions, orders, strict=True)):
        ops = [F1, F2, BOUNDARY, *([F1] if again[number] else []), B2, B1]
        assert list(order.order) == ops
        own = order.schedule(region.graph)
        assert simulate(region.graph, single_device(), own).violation is None
        for position in order.fullest_steps(own):
            run = own.steps[position]
            assert isinstance(run, Compute)
            found.add((number, run.op))
    assert found == fullest


@given(chains())
def test_what_is_held_after_each_region(
    case: tuple[Parts, list[bool]],
) -> None:
    parts, again = case
    step = composed(parts)
    schedule = schedule_from_order(step.graph, chain_order(step, again))
    trace = simulate(step.graph, single_device(), schedule)
    held = step.held_bytes(schedule, trace)
    resident = sum(s.size_bytes for s in step.graph.storages if s.is_resident)
    assert held[0] == resident
    assert len(held) == len(parts.regions) + 2
    assert held[-1] == trace.timeline_bytes[0][schedule.steps.index(Boundary())]
    for index, (region, is_again) in enumerate(zip(parts.regions, again, strict=True)):
        kept = region.graph.storages[OUT].size_bytes
        kept += 0 if is_again else region.graph.storages[A].size_bytes
        assert held[index + 1] >= resident + kept


def test_ops_among_those_of_another_region_run_with_their_own() -> None:
    step = composed(chain([[4, 1, 10, 4]] * 3, [1, 2, 3]))
    order = chain_order(step, [True, True, False])
    first = step.origins.index((0, F1))
    again = len(order) - 1 - order[::-1].index(first)
    early = order.index(BOUNDARY) + 1
    moved = [*order[:early], first, *order[early:again], *order[again + 1 :]]
    mixed = schedule_from_order(step.graph, moved)
    assert simulate(step.graph, single_device(), mixed).violation is None
    assert step.by_regions(mixed) == schedule_from_order(step.graph, order)


def test_gradients_of_one_block_are_added_up() -> None:
    """Two regions read the first one's output, and all the same weight."""
    parts = chain([[4, 7, 10, 4]] * 3, [2, 2, 3])
    shared = [
        replace(
            region,
            given={X: 101 if index else 100, W: 200},
            gradients=[(0, GRAD_X), (200, GRAD_W)][not index :],
        )
        for index, region in enumerate(parts.regions)
    ]
    parts = replace(parts, regions=shared, leaves={200: False})
    step = composed(parts)
    assert [s.name for s in step.graph.storages].count("w") == 1
    names = [each.name for each in step.graph.ops]
    assert "the sum for tangent" in names  # Of the first region's output.
    assert "zeros for tangent" in names  # Of the second's, which nobody reads.
    # The weight's gradients are one block in the end: that of the last region.
    final = [step.graph.storages[s].name for s in step.graph.final_outputs]
    assert final.count("grad w") == 1
    schedule = schedule_from_order(step.graph, store_all_order(step.graph))
    end = simulate(step.graph, single_device(), schedule)
    assert end.violation is None
    kept = sorted(step.graph.storages[s].name for s in end.live_after[0])
    assert kept == ["grad w", "out"]


def passing(
    slots: Sequence[int], size: int, gradients: Sequence[tuple[int, int]]
) -> EagerBackward:
    """An operator in no graph that makes gradients, or hands them on."""
    sized = [(slot, size) for slot in slots]
    return EagerBackward(name="eager", slots=sized, gradients=gradients)


def users(backward: Sequence[EagerBackward], returned: int) -> Parts:
    """A region whose output of 100 bytes others use, in no graph, behind it."""
    parts = chain([[4, 1, 10, 100]], [0])
    return replace(
        parts, backward=[*backward, 0], returned=frozenset({returned}), held={101: 1}
    )


def sums(step: ComposedStep) -> list[tuple[list[int], list[int]]]:
    """Return the sizes of what each sum of gradients reads, and of what it makes."""
    return [
        (
            [step.graph.storages[s].size_bytes for s in each.reads],
            [step.graph.storages[s].size_bytes for s in each.writes],
        )
        for each in step.graph.ops
        if each.name.startswith("the sum for")
    ]


def test_gradients_are_added_up_as_they_come() -> None:
    """Four slices of one value: no more than two gradients of it exist at a time."""
    slices = [passing([50 + n], 25, [(0, 100)]) for n in range(4)]
    cut = passing([70], 100, [(50 + n, 25) for n in range(4)])
    step = composed(users([cut, *slices], 70))
    assert sums(step) == [([100, 100], [])] * 3
    schedule = schedule_from_order(step.graph, store_all_order(step.graph))
    trace = simulate(step.graph, single_device(), schedule)
    assert trace.violation is None
    # Input, weight, what the region keeps, its output; two gradients of that, and
    # those of the slices that are still to come.
    assert trace.peak_bytes[0] == 4 + 1 + 10 + 100 + 200 + 3 * 25


def test_nothing_is_added_to_a_gradient_that_waits_elsewhere() -> None:
    """A sum of two values hands one block to both: the first to get more copies it."""
    both = passing([70], 100, [(0, -1), (60, -1)])
    other = passing([60], 100, [(0, 100)])
    more = passing([80], 100, [(70, 100), (60, 100)])
    step = composed(users([more, both, other], 80))
    # The second value has a gradient of its own already, and adds the block to it.
    assert sums(step) == [([100, 100], []), ([100, 100], [])]
    step = composed(users([both, passing([60], 100, [(0, 100)])], 70))
    assert sums(step) == [([100, 100], [])]
    last = passing([61], 100, [(60, 100)])
    twice = passing([70], 100, [(60, -1), (0, -1), (61, 100)])
    step = composed(users([twice, last, other], 70))
    assert sums(step) == [([100, 100], [100]), ([100, 100], [])]


def test_a_region_that_backward_does_not_come_to_has_no_backward() -> None:
    parts = chain([[4, 1, 10, 4]] * 3, [1, 2, 3])
    aside = replace(parts.regions[1], given={X: 101, W: 201})
    last = replace(parts.regions[2], given={X: 101, W: 202}, gradients=[(0, GRAD_X)])
    parts = replace(
        parts, regions=[parts.regions[0], aside, last], backward=[2, 0], held={103: 3}
    )
    step = composed(parts)
    schedule = schedule_from_order(step.graph, store_all_order(step.graph))
    trace = simulate(step.graph, single_device(), schedule)
    assert trace.violation is None
    orders = step.region_orders(schedule, trace)
    assert [order.order for order in orders] == [
        (F1, F2, BOUNDARY, B2, B1),
        (F1, F2, BOUNDARY),
        (F1, F2, BOUNDARY, B2, B1),
    ]


def test_operators_in_no_graph_keep_their_blocks_until_their_backward() -> None:
    """Between two regions: a block of 30 is kept, the output of 5 is handed on."""
    parts = chain([[4, 1, 10, 4]] * 2, [0, 2])
    last = replace(
        parts.regions[1],
        given={X: 301, W: 201},
        gradients=[(77, GRAD_X), (201, GRAD_W)],
    )
    parts = replace(
        parts,
        regions=[parts.regions[0], last],
        between={1: EagerForward(made={300: 30, 301: 5}, workspace_bytes=50)},
        backward=[
            1,
            EagerBackward(
                name="eager", slots=[(77, 5)], saved=[300], gradients=[(0, 4)]
            ),
            0,
        ],
    )
    step = composed(parts)
    schedule = schedule_from_order(step.graph, store_all_order(step.graph))
    trace = simulate(step.graph, single_device(), schedule)
    assert trace.violation is None
    names = [
        step.graph.ops[each.op].name if isinstance(each, Compute) else ""
        for each in schedule.steps
    ]
    timeline = dict(zip(names, trace.timeline_bytes[0], strict=True))
    resident = 4 + 1 + 1
    # What the first region saves and returns, both blocks, and the scratch memory.
    assert timeline["operators in no graph before graph 1"] == (
        resident + 10 + 4 + 30 + 5 + 50
    )
    # The first region's inner value, the block that is kept, the gradient that comes
    # and the one that goes, the weight's, and the loss.
    assert timeline["eager"] == resident + 10 + 30 + 4 + 4 + 1 + 4
    first = timeline["b1"]
    assert first == resident + 10 + 4 + 1 + 1 + 4 + 3


def test_a_gradient_that_is_handed_on_is_one_block() -> None:
    parts = chain([[4, 1, 10, 4]] * 2, [0, 2])
    last = replace(parts.regions[1], gradients=[(77, GRAD_X), (201, GRAD_W)])
    passing = EagerBackward(name="view", slots=[(77, 4)], gradients=[(0, -1)])
    parts = replace(parts, regions=[parts.regions[0], last], backward=[1, passing, 0])
    direct = composed(chain([[4, 1, 10, 4]] * 2, [0, 2]))
    step = composed(parts)
    assert sum(s.size_bytes for s in step.graph.storages) == sum(
        s.size_bytes for s in direct.graph.storages
    )


def test_tangents_are_kept_where_torch_keeps_them() -> None:
    parts = chain([[4, 1, 10, 40]] * 2, [1, 2])
    for frees in (True, False):
        step = compose("chain", parts, frees_tangents=frees)
        reads = [
            step.graph.storages[s].name
            for each in step.graph.ops
            if each.name.startswith("the end of backward")
            for s in each.reads
        ]
        assert reads == ([] if frees else ["tangent", "grad x"])


def test_gradients_that_are_added_to_others_are_gone_at_once() -> None:
    parts = chain([[4, 1, 10, 4]] * 3, [1, 2, 3])
    step = composed(replace(parts, leaves=dict.fromkeys(parts.leaves, True)))
    final = [step.graph.storages[s].name for s in step.graph.final_outputs]
    assert final == ["out"]
    schedule = schedule_from_order(step.graph, store_all_order(step.graph))
    assert simulate(step.graph, single_device(), schedule).violation is None


def solver_of(step: ComposedStep, asked: list[Budget | None]) -> Solve:
    """Return what plans the whole step, and notes the budgets that it is asked for."""

    def solve(budget: Budget | None) -> Plan:
        asked.append(budget)
        return plan_graph(step.graph, budget=budget)

    return solve


@settings(max_examples=25)
@given(chains(), st.sampled_from([100, 90, 70]))
def test_plans_hold_as_the_regions_run(
    case: tuple[Parts, list[bool]], percent: int
) -> None:
    parts, _ = case
    step = composed(parts)
    plain = schedule_from_order(step.graph, store_all_order(step.graph))
    peak_bytes = simulate(step.graph, single_device(), plain).peak_bytes[0]
    budget_bytes = peak_bytes * percent // 100
    try:
        plan = plan_regions(step, solver_of(step, []), budget_bytes)
    except BudgetError as error:
        budget_bytes = error.required_bytes
        plan = plan_regions(step, solver_of(step, []), budget_bytes)
    assert plan.trace.violation is None
    assert plan.peak_bytes <= budget_bytes == plan.budget_bytes
    assert step.by_regions(plan.schedule) == plan.schedule


def test_a_schedule_that_no_longer_fits_is_asked_for_again_with_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = composed(chain([[4, 1, 10, 4]] * 3, [1, 2, 3]))
    plain = schedule_from_order(step.graph, store_all_order(step.graph))
    peak_bytes = simulate(step.graph, single_device(), plain).peak_bytes[0]
    by_regions, worse = ComposedStep.by_regions, [plain]
    monkeypatch.setattr(
        ComposedStep,
        "by_regions",
        lambda self, schedule: worse.pop() if worse else by_regions(self, schedule),
    )
    asked: list[Budget | None] = []
    plan = plan_regions(step, solver_of(step, asked), peak_bytes - 2)
    assert asked == [peak_bytes - 2, peak_bytes - 4]
    assert plan.budget_bytes == peak_bytes - 2
    assert plan.peak_bytes <= peak_bytes - 4


def test_the_error_names_a_budget_that_whole_regions_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = composed(chain([[4, 1, 10, 4]] * 3, [1, 2, 3]))
    plain = schedule_from_order(step.graph, store_all_order(step.graph))
    peak_bytes = simulate(step.graph, single_device(), plain).peak_bytes[0]
    monkeypatch.setattr(ComposedStep, "by_regions", lambda *_: plain)
    for budget in (1, peak_bytes - 1):
        with pytest.raises(BudgetError, match="run as a whole") as caught:
            plan_regions(step, solver_of(step, []), budget)
        assert caught.value.required_bytes == peak_bytes
        assert caught.value.budget_bytes == budget
    assert plan_regions(step, solver_of(step, []), peak_bytes).peak_bytes == peak_bytes


def test_the_budget_that_an_error_names_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans for larger budgets that no longer fit do not hide the smallest one."""
    step = composed(chain([[4, 1, 10, 4]] * 3, [1, 2, 3]))
    plain = schedule_from_order(step.graph, store_all_order(step.graph))
    plain_bytes = simulate(step.graph, single_device(), plain).peak_bytes[0]
    with pytest.raises(BudgetError) as caught:
        plan_graph(step.graph, budget=1)
    smallest = caught.value.schedule
    by_regions = ComposedStep.by_regions

    def fits_only_at_the_smallest(self: ComposedStep, schedule: Schedule) -> Schedule:
        return by_regions(self, schedule) if schedule == smallest else plain

    monkeypatch.setattr(ComposedStep, "by_regions", fits_only_at_the_smallest)
    with pytest.raises(BudgetError) as refused:
        plan_regions(step, solver_of(step, []), 1)
    named_bytes = refused.value.required_bytes
    assert named_bytes < plain_bytes - 1
    for budget in (named_bytes, plain_bytes - 1):
        plan = plan_regions(step, solver_of(step, []), budget)
        assert plan.peak_bytes == named_bytes
        assert plan.budget_bytes == budget


def test_what_an_error_knows_is_not_searched_for_again() -> None:
    step = composed(chain([[4, 1, 10, 4]] * 3, [1, 2, 3]))
    asked = list[Budget | None]()
    with pytest.raises(BudgetError) as caught:
        plan_regions(step, solver_of(step, asked), 1)
    assert asked == [1]
    schedule = caught.value.schedule
    assert schedule is not None
    trace = simulate(step.graph, single_device(), schedule)
    assert trace.peak_bytes[0] == caught.value.required_bytes


def test_an_error_is_of_the_budget_asked_for_where_a_second_search_finds_less() -> None:
    step = composed(chain([[4, 1, 10, 4]] * 3, [1, 2, 3]))
    solve, asked = solver_of(step, []), list[Budget | None]()

    def in_less_time(budget: Budget | None) -> Plan:
        asked.append(budget)
        if len(asked) == 2:
            assert isinstance(budget, int)
            msg = "time is over"
            raise BudgetError(msg, budget_bytes=budget, required_bytes=budget + 1)
        try:
            return solve(budget)
        except BudgetError as error:
            # As of other solvers.
            error.schedule = None
            raise

    with pytest.raises(BudgetError) as caught:
        plan_regions(step, in_less_time, 1)
    assert len(asked) == 3
    assert caught.value.budget_bytes == 1


def test_the_frugal_order_keeps_what_it_must() -> None:
    (region,) = chain([[4, 1, 10, 6]], [1]).regions
    assert frugal_order(region.graph) == [F1, F2, BOUNDARY, F1, B2, B1]
    # Forward: inner value, output and workspace; backward: output, tangent, and two.
    assert frugal_needs(region.graph) == (6 + 6 + 10 + 10 + 3, 6)


@pytest.mark.parametrize(("size_bytes", "copies"), [(1, 1), (4, 0)])
def test_expanded_gradients_are_copied_for_a_region(
    size_bytes: int, copies: int
) -> None:
    """Behind the last region a sum, whose backward hands on one number expanded."""
    parts = chain([[4, 1, 10, 4]] * 2, [1, 2])
    last = EagerBackward(name="sum", slots=[(9, 1)], gradients=[(1, size_bytes)])
    parts = replace(parts, backward=[last, 1, 0], returned=frozenset({9}))
    graph = composed(parts).graph
    names = [each.name for each in graph.ops]
    assert names.count("all of tangent") == copies
    taken = graph.ops[names.index("b2")]  # Of region 1: it is the first in backward.
    assert [graph.storages[s].size_bytes for s in taken.reads] == [10, 4]
