"""Rockmate: alike stages are solved once, options get no worse, nor do answers."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import pytest
from tests.instances import INSTANCES, Network, resnet_like, transformer_like

import remat.core.deadline
import remat.core.problem
from remat.algorithms.chains.rotor import plan_rotor
from remat.algorithms.chains.stages import StageOption
from remat.core.graph import TrainingGraph
from remat.core.liveness import BOUNDARY, schedule_from_order
from remat.core.platform import single_device
from remat.core.problem import Limits, Problem, Result, Status, StopReason
from remat.core.simulator import simulate
from remat.planning.portfolio import solve
from remat.reductions.stage_problems import stage_problem
from remat.reductions.stages import ChainOfStages, reduce_to_chain
from remat.solvers import rockmate
from remat.solvers.base import Solver
from remat.solvers.checkmate import Checkmate
from remat.solvers.rockmate import Enrichment, Rockmate
from remat.solvers.rotor import Rotor
from remat.solvers.stage_choices import chosen, measures
from remat.solvers.stage_programs import (
    StageAnswer,
    StagePrograms,
    solve_stage,
    stage_run,
)
from remat.testing import budgets_between, store_all_peak_bytes


def chain_of(graph: TrainingGraph, max_stages: int = 64) -> ChainOfStages:
    chain = reduce_to_chain(graph, max_stages=max_stages)
    assert chain is not None
    return chain


def solved(
    graph: TrainingGraph, budget: int, solver: Solver, limits: Limits | None = None
) -> Result:
    return solve(
        Problem(graph=graph, platform=single_device(budget)), solver, limits=limits
    )


@dataclass
class Counting:
    """The program of a stage, and what it was asked; perhaps Ctrl-C at some call."""

    asked: list[tuple[TrainingGraph, int | None]] = field(default_factory=list)
    interrupted_at: int | None = None

    def __call__(self, problem: Problem, limits: Limits) -> StageAnswer:
        self.asked.append((problem.graph, problem.budget_bytes))
        if len(self.asked) == self.interrupted_at:
            return StageAnswer(order=None, is_interrupted=True)
        return solve_stage(problem, limits)


def test_stages_that_are_alike_are_solved_once():
    asked: dict[int, Counting] = {}
    for layers in (3, 12):
        counting = Counting()
        enrichment = Enrichment(
            chain_of(transformer_like(layers).graph), StagePrograms(counting)
        )
        enrichment.run()
        # Embedding, attention of the first layer and of others, the rest, final norm.
        assert enrichment.distinct_count == 5
        assert enrichment.programs.solved_count == len(counting.asked)
        asked[layers] = counting
    assert len(asked[3].asked) > 8
    assert asked[12].asked == asked[3].asked
    assert len(set(asked[3].asked)) == len(asked[3].asked)


def test_what_one_chain_has_found_serves_another():
    programs = StagePrograms()
    first = Enrichment(chain_of(transformer_like(3).graph), programs).run()
    count = programs.solved_count
    second = Enrichment(chain_of(transformer_like(5).graph), programs).run()
    assert programs.solved_count == count
    assert second.chain.stages[4].options == first.chain.stages[4].options


@pytest.mark.parametrize("name", ["resnet", "transformer", "densenet"])
def test_options_are_nowhere_worse_and_somewhere_better(name: str):
    plain = chain_of(INSTANCES[name]().graph)
    enriched = Enrichment(plain, StagePrograms()).run()
    is_better = False
    for before, after in zip(plain.chain.stages, enriched.chain.stages, strict=True):
        assert after.options[0] == before.options[0]
        mine = [measures(option) for option in before.options]
        found = [measures(option) for option in after.options]
        for one in mine:
            assert any(covers(other, one) for other in found)
        for index, one in enumerate(found):
            assert not any(
                covers(other, one)
                for other in (found[:index] + found[index + 1 :] if index else ())
            )
        is_better |= any(not any(covers(own, one) for own in mine) for one in found)
    assert is_better


def covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def test_runs_keep_the_limits_that_they_were_asked_for():
    chain = chain_of(transformer_like(2).graph)
    counting = Counting()
    programs = StagePrograms(counting)
    Enrichment(chain, programs).run()
    for graph, runs in programs.runs.items():
        assert len({run.order for run in runs}) == len(runs)
        for run in runs:
            trace = simulate(
                graph,
                single_device(None, "stage"),
                schedule_from_order(graph, run.order),
            )
            assert trace.violation is None
            assert trace.serial_ns == run.cost_ns
            assert trace.peak_bytes == (run.peak_bytes,)
    for graph, budget in counting.asked:
        assert budget is not None
        answer = solve_stage(
            Problem(graph=graph, platform=single_device(budget, "stage")), Limits()
        )
        if answer.order is not None:
            trace = simulate(
                graph,
                single_device(budget, "stage"),
                schedule_from_order(graph, answer.order),
            )
            assert trace.violation is None


def test_predicted_time_is_that_of_the_lifted_order():
    chain = chain_of(transformer_like(4, dropout=False).graph)
    enriched = Enrichment(chain, StagePrograms()).run()
    budgets = [sum(chain.chain.all_sizes) * share // 100 for share in range(5, 60, 5)]
    compared = 0
    for budget in budgets:
        plain = plan_rotor(chain.chain, budget, slots=2000, beyond_persistence=False)
        plan = plan_rotor(enriched.chain, budget, slots=2000, beyond_persistence=False)
        if plan is None:
            assert plain is None
            continue
        compared += 1
        assert plain is None or plan.cost_ns <= plain.cost_ns
        schedule = schedule_from_order(chain.graph, enriched.order(plan.operations))
        trace = simulate(chain.graph, single_device(), schedule)
        assert trace.violation is None
        assert trace.serial_ns == plan.cost_ns
    assert compared >= 5


@pytest.mark.parametrize(
    "graph",
    [resnet_like(8).graph, transformer_like(6).graph],
    ids=["resnet", "transformer"],
)
def test_never_dearer_than_rotor(graph: TrainingGraph):
    saved_ns = 0
    for budget in budgets_between(graph, 6)[1:-1]:
        rotor = solved(graph, budget, Rotor())
        ours = solved(graph, budget, Rockmate())
        assert ours.cost_ns is not None or rotor.cost_ns is None
        if rotor.cost_ns is not None:
            assert ours.cost_ns is not None
            assert ours.cost_ns <= rotor.cost_ns
            saved_ns += rotor.cost_ns - ours.cost_ns
        assert "stages are distinct" in ours.message
    assert saved_ns > 0


def small_blocks(blocks: int) -> TrainingGraph:
    """Blocks of three ops of unequal time and size, which save what they read."""
    net = Network("small")
    x = net.one("stem", [net.input("x", 8)], 50, 10, saves_inputs=True)
    for block in range(blocks):
        for index, (size, cost) in enumerate(((80, 20), (60, 35), (50, 40))):
            x = net.one(
                f"{block}.{index}",
                [x],
                size,
                cost,
                saves_inputs=True,
                parameter_bytes=1,
            )
    head = net.one("head", [x], 4, 10, saves_inputs=True, parameter_bytes=1)
    return net.instance(head).graph


@cache
def optimum(graph: TrainingGraph, budget: int) -> Result:
    """Return what is compared with for each number of stages, proved once."""
    return solved(graph, budget, Checkmate(default_time_limit_s=60))


@pytest.mark.parametrize("max_stages", [3, 4])
def test_near_the_optimum_of_the_whole_graph(max_stages: int):
    graph = small_blocks(3)
    gaps: list[float] = []
    for budget in budgets_between(graph, 7)[1:-1]:
        exact = optimum(graph, budget)
        ours = solved(graph, budget, Rockmate(max_stages=max_stages))
        if exact.status is Status.INFEASIBLE:
            assert ours.cost_ns is None
            continue
        assert exact.status is Status.OPTIMAL
        assert exact.cost_ns is not None
        assert ours.cost_ns is not None
        gaps.append(ours.cost_ns / exact.cost_ns - 1)
    # The tightest budget comes first: there the composition loses a little.
    assert len(gaps) >= 4
    assert gaps[0] <= 0.06
    assert max(gaps[1:]) <= 1e-6


def test_ctrl_c_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    graph = transformer_like(4).graph
    budget = store_all_peak_bytes(graph) * 7 // 10
    rotor = solved(graph, budget, Rotor())
    counting = Counting(interrupted_at=3)
    monkeypatch.setattr(
        rockmate, "StagePrograms", lambda **kw: StagePrograms(counting, **kw)
    )
    result = solved(graph, budget, Rockmate())
    assert len(counting.asked) == 3
    assert result.stop_reason is StopReason.INTERRUPTED
    assert result.cost_ns is not None
    assert rotor.cost_ns is not None
    assert result.cost_ns <= rotor.cost_ns


@pytest.mark.parametrize("activity", ["distinct stages", "chain of", "keeping what"])
def test_ctrl_c_at_any_time_ends_the_search(activity: str):
    graph = transformer_like(4).graph
    budget = store_all_peak_bytes(graph) * 7 // 10

    def interrupt(told: str, share: float) -> None:
        if activity in told and share > 0.01:
            raise KeyboardInterrupt

    proposal = Rockmate().solve(
        Problem(graph=graph, platform=single_device(budget)), Limits(), interrupt
    )
    assert proposal.stop_reason is StopReason.INTERRUPTED
    if activity != "chain of":
        assert proposal.schedule is not None


def test_progress_rises_from_nothing_to_all():
    graph = transformer_like(3).graph
    told: list[tuple[str, float]] = []
    problem = Problem(
        graph=graph, platform=single_device(store_all_peak_bytes(graph) * 7 // 10)
    )
    Rockmate().solve(
        problem, Limits(), lambda activity, share: told.append((activity, share))
    )
    shares = [share for _, share in told]
    assert all(0 <= share <= 1.0001 for share in shares)
    assert shares[-1] > 0.9
    assert any("distinct stages" in activity for activity, _ in told)


def test_the_limit_holds_for_everything_together(monkeypatch: pytest.MonkeyPatch):
    """Time passes in programs alone, which find nothing and use all that they have."""
    graph = transformer_like(8).graph
    budget = store_all_peak_bytes(graph) * 6 // 10
    start_s, given_s = time.monotonic(), list[float]()
    now_s = start_s

    def program(_: Problem, limits: Limits) -> StageAnswer:
        nonlocal now_s
        assert limits.remaining_s is not None
        given_s.append(limits.remaining_s)
        now_s += limits.remaining_s
        return StageAnswer(order=None)

    clock = SimpleNamespace(monotonic=lambda: now_s)
    for module in (remat.core.problem, remat.core.deadline):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(
        rockmate, "StagePrograms", lambda **kw: StagePrograms(program, **kw)
    )
    result = solved(graph, budget, Rockmate(), Limits.after(30.0))
    assert result.cost_ns is not None
    assert len(given_s) > 5
    assert min(given_s) > 0
    assert max(given_s) <= Rockmate().program_time_limit_s
    assert now_s <= start_s + 30.0
    monkeypatch.undo()
    nothing = solved(graph, budget, Rockmate(), Limits.after(0.0))
    assert nothing.status is Status.UNKNOWN
    assert nothing.stop_reason is StopReason.TIME_LIMIT


def test_stages_that_are_too_large_are_left_as_they_are():
    chain = chain_of(INSTANCES["unet"]().graph)
    sizes = [len(part.options[0].saving) for part in chain.parts[:-1]]
    largest = sizes.index(max(sizes))
    counting = Counting()
    enriched = Enrichment(chain, StagePrograms(counting)).run()
    assert enriched.parts[largest] == chain.parts[largest]
    assert all(len(graph.ops) < 60 for graph, _ in counting.asked)


def test_programs_stop_when_time_is_over():
    chain = chain_of(transformer_like(2).graph)
    counting = Counting()
    enrichment = Enrichment(chain, StagePrograms(counting), limits=Limits.after(0.0))
    assert enrichment.run().chain == chain.chain
    assert not counting.asked


def option(backward_ns: int, saved: int, workspace: int = 0) -> StageOption:
    return StageOption(
        forward_ns=1,
        backward_ns=backward_ns,
        saved_bytes=saved,
        needs_output=False,
        backward_workspace_bytes=workspace,
    )


def thinned() -> Iterator[tuple[list[StageOption], int, list[int]]]:
    # The third is beaten by the second; of equals the earlier stays.
    four = [option(10, 100), option(20, 50), option(30, 60), option(90, 0)]
    yield four, 9, [0, 1, 3]
    yield [*four, option(90, 0)], 9, [0, 1, 3]
    # What keeps everything is first, and stays even if it is beaten.
    yield [option(20, 100), option(20, 90)], 9, [0, 1]
    # Workspace counts in backward, not in between.
    yield [option(10, 100), option(20, 50, 60), option(30, 50, 0)], 9, [0, 1, 2]
    # The closest to another goes first.
    yield [option(10, 100), option(50, 50), option(52, 49), option(90, 0)], 3, [0, 1, 3]
    yield four, 1, [0]


@pytest.mark.parametrize(("options", "most", "expected"), list(thinned()))
def test_options_that_are_offered(
    options: list[StageOption], most: int, expected: list[int]
):
    assert chosen(options, most) == expected


def test_a_run_of_a_stage_is_measured_by_hand():
    chain = chain_of(transformer_like(2).graph)
    problem = stage_problem(chain.graph, chain.parts[1], chain.ends[1], 0)
    assert problem is not None
    forward, count = problem.graph.forward_count, len(problem.graph.ops)
    own = chain.chain.stages[1].options[0]
    order = [*range(forward), BOUNDARY, *range(forward, count)]
    plain = stage_run(problem, order)
    assert plain.saved_bytes == own.saved_bytes
    assert plain.cost_ns == (own.forward_ns or 0) + own.backward_ns
    assert plain.keeps(plain.saved_bytes, plain.peak_bytes)
    assert not plain.keeps(plain.saved_bytes - 1, plain.peak_bytes)
    assert not plain.keeps(plain.saved_bytes, plain.peak_bytes - 1)
    # All that forward makes, made again right after the boundary: nothing is saved.
    again = [*range(forward), BOUNDARY, *range(count)]
    run = stage_run(problem, again)
    assert run.saved_bytes == 0
    assert run.cost_ns == plain.cost_ns + sum(
        op.cost_ns[0] or 0 for op in problem.graph.ops[:forward]
    )
