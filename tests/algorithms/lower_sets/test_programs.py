"""The programs, against brute force, published values, and the judge."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from studies.forward_graphs import (
    densenet161,
    published_file,
    resnet50,
    resnet152,
    shared_folder,
    towers,
)
from studies.lower_sets_references import REFERENCES
from tests.algorithms.lower_sets.brute_force import (
    Sequences,
    count_sequences,
    lower_sets,
    random_graph,
)
from tests.interrupts import begun_when_working, interrupted

from remat.algorithms.lower_sets import programs
from remat.algorithms.lower_sets.canonical import (
    canonical_schedule,
    implied_training_graph,
)
from remat.algorithms.lower_sets.choice import approximate_family, choose_family
from remat.algorithms.lower_sets.families import (
    Family,
    all_lower_sets,
    ancestor_sets,
    family_of_masks,
    prefixes,
)
from remat.algorithms.lower_sets.formula import check_segmentation, overhead, peak_bytes
from remat.algorithms.lower_sets.forward_graph import ForwardGraph
from remat.algorithms.lower_sets.programs import (
    LowerSetObjective,
    LowerSetQuery,
    Segmentation,
    chain_of_segmentation,
    plan_lower_sets,
    segmentation_of_chain,
    smallest_budget,
    sweep_lower_sets,
)
from remat.core.errors import BudgetError
from remat.core.platform import single_device
from remat.core.simulator import simulate
from remat.testing.instances.published import read_forward

MOST_SEQUENCES = 2_000
GRAPHS_PER_PART = 150
PARTS = 8


def complete(graph: ForwardGraph) -> Family:
    family = all_lower_sets(graph, 40_000)
    assert family is not None
    return family


def judge(graph: ForwardGraph, found: Segmentation, *, charge_last: bool) -> None:
    """Execute the canonical strategy: it costs what the formula says."""
    schedule = canonical_schedule(graph, found.segment_of, charge_last=charge_last)
    trace = simulate(implied_training_graph(graph), single_device(), schedule)
    assert trace.is_valid, trace.violation
    assert trace.peak_bytes == (found.peak_bytes,)
    assert trace.recomputed_ns == found.overhead


def small_random_graphs(part: int, count: int) -> list[ForwardGraph]:
    graphs: list[ForwardGraph] = []
    seed = part * 1_000_000
    while len(graphs) < count:
        graph = random_graph(seed)
        seed += 1
        if count_sequences(lower_sets(graph)) <= MOST_SEQUENCES:
            graphs.append(graph)
    return graphs


@pytest.mark.parametrize("part", range(PARTS))
def test_exact_programs_agree_with_brute_force_and_judge(part: int) -> None:
    assert PARTS * GRAPHS_PER_PART >= 1_000
    rng = random.Random(part)
    for graph in small_random_graphs(part, GRAPHS_PER_PART):
        outcomes = list(Sequences(graph))
        peaks = sorted({outcome.peak_bytes for outcome in outcomes})
        family = complete(graph)
        least = smallest_budget(graph, family)
        assert least.peak_bytes == peaks[0]
        judge(graph, least, charge_last=False)
        budgets = {peaks[0] - 1, peaks[0], peaks[-1], *rng.choices(peaks, k=2)}
        queries = [
            LowerSetQuery(
                budget_bytes=budget, objective=objective, charge_last=charge_last
            )
            for budget in sorted(budgets)
            for objective in LowerSetObjective
            for charge_last in (False, True)
        ]
        answers = sweep_lower_sets(graph, family, queries)
        for query, found in zip(queries, answers, strict=True):
            expected = best_outcome(outcomes, query)
            if found is None:
                assert expected is None
                continue
            assert found.is_optimal
            assert (found.overhead, found.cached_bytes) == expected
            assert found.peak_bytes <= query.budget_bytes
            judge(graph, found, charge_last=query.charge_last)


def best_outcome(outcomes: list[Any], query: LowerSetQuery) -> tuple[int, int] | None:
    fitting = [
        (
            outcome.overhead if query.charge_last else outcome.overhead_last_free,
            outcome.cached_bytes,
        )
        for outcome in outcomes
        if outcome.peak_bytes <= query.budget_bytes
    ]
    match query.objective:
        case LowerSetObjective.LEAST_OVERHEAD:
            return min(fitting, default=None)
        case LowerSetObjective.MOST_OVERHEAD:
            return min(fitting, key=lambda pair: (-pair[0], pair[1]), default=None)
        case LowerSetObjective.LEAST_CACHED:
            return min(fitting, key=lambda pair: pair[::-1], default=None)


def test_other_charges_agree_with_brute_force() -> None:
    for seed in range(200):
        graph = random_graph(seed, most_nodes=6, is_general=True)
        outcomes = list(Sequences(graph))
        family = complete(graph)
        peaks = sorted({outcome.peak_bytes for outcome in outcomes})
        assert smallest_budget(graph, family).peak_bytes == peaks[0]
        queries = [
            LowerSetQuery(budget_bytes=budget, objective=objective)
            for budget in (peaks[0], peaks[len(peaks) // 2], peaks[-1])
            for objective in LowerSetObjective
        ]
        for query, found in zip(
            queries, sweep_lower_sets(graph, family, queries), strict=True
        ):
            assert found is not None
            check_segmentation(graph, found.segment_of)
            expected = best_outcome(outcomes, query)
            assert (found.overhead, found.cached_bytes) == expected
            assert found.overhead == overhead(graph, found.segment_of)
            assert found.peak_bytes == peak_bytes(graph, found.segment_of)


def test_programs_are_optimal_within_any_family() -> None:
    for seed in range(100):
        graph = random_graph(seed, most_nodes=7)
        masks = ancestor_sets(graph).masks()
        sets = [
            frozenset(v for v in range(graph.node_count) if mask >> v & 1)
            for mask in masks
        ]
        outcomes = list(Sequences(graph, sets))
        family = ancestor_sets(graph)
        least = smallest_budget(graph, family, refinements=0)
        assert least.peak_bytes == min(outcome.peak_bytes for outcome in outcomes)
        for budget in sorted({outcome.peak_bytes for outcome in outcomes}):
            query = LowerSetQuery(budget_bytes=budget, charge_last=True)
            found = plan_lower_sets(graph, family, query, refinements=0)
            expected = best_outcome(outcomes, query)
            assert (found.overhead, found.cached_bytes) == expected


def oracle() -> dict[str, Any]:
    folder = shared_folder()
    if folder is None or not (folder / "papers" / "lowersets_oracle.json").is_file():
        pytest.skip("papers/lowersets_oracle.json is not beside the repository")
    file = folder / "papers" / "lowersets_oracle.json"
    return json.loads(file.read_text(encoding="utf-8"))


def test_published_oracle() -> None:
    checked = 0
    for case in oracle()["instances"]:
        graph = ForwardGraph.of_values(
            case["M"], case["T"], [(u, v) for u, v in case["edges"]], name=case["name"]
        )
        exact, pruned = complete(graph), ancestor_sets(graph)
        assert (len(exact), len(pruned)) == (case["lower_sets"], case["pruned_sets"])
        with_prefixes = pruned | prefixes(graph, graph.topological_order)
        least = smallest_budget(graph, exact)
        assert least.peak_bytes == case["min_budget_exact"]
        least = smallest_budget(graph, pruned, refinements=0)
        assert least.peak_bytes == case["min_budget_pruned"]
        peaks = [outcome.peak_bytes for outcome in Sequences(graph)]
        for entry in case["budgets"]:
            budget = entry["budget"]
            assert entry["feasible_sequences"] == sum(p <= budget for p in peaks)
            for key, family, objective, charge_last in (
                ("exact_TC", exact, LowerSetObjective.LEAST_OVERHEAD, True),
                ("exact_MC", exact, LowerSetObjective.MOST_OVERHEAD, True),
                ("exact_TC_last_free", exact, LowerSetObjective.LEAST_OVERHEAD, False),
                ("pruned_TC", pruned, LowerSetObjective.LEAST_OVERHEAD, True),
                ("pruned_MC", pruned, LowerSetObjective.MOST_OVERHEAD, True),
                (
                    "pruned_prefix_TC",
                    with_prefixes,
                    LowerSetObjective.LEAST_OVERHEAD,
                    True,
                ),
            ):
                query = LowerSetQuery(
                    budget_bytes=budget, objective=objective, charge_last=charge_last
                )
                (found,) = sweep_lower_sets(graph, family, [query], refinements=0)
                expected = entry[key]
                assert (found is None) is (expected is None)
                if found is not None:
                    free = "overhead" if charge_last else "overhead_last_free"
                    assert found.overhead == expected[free]
                    assert found.peak_bytes <= budget
                    judge(graph, found, charge_last=charge_last)
                checked += 1
    assert checked > 500


def network(name: str) -> ForwardGraph:
    shapes = {
        "resnet50": resnet50,
        "resnet152": resnet152,
        "densenet161": densenet161,
    }
    if name in shapes:
        return shapes[name]()
    file = published_file(name)
    if file is None:
        pytest.skip(f"instances/lowersets/cg_{name}.txt is not beside the repository")
    return read_forward(file)


@pytest.mark.parametrize("name", REFERENCES)
def test_published_counts_and_smallest_budgets(name: str) -> None:
    graph, reference = network(name), REFERENCES[name]
    family = complete(graph)
    assert len(family) == reference.lower_sets
    least = smallest_budget(graph, family).peak_bytes
    assert least / 1e9 <= reference.smallest_exact_gb + 0.0005
    pruned = smallest_budget(graph, ancestor_sets(graph), refinements=0).peak_bytes
    assert round(pruned / 1e9, 3) == reference.smallest_pruned_gb
    approximate = smallest_budget(graph, approximate_family(graph)).peak_bytes
    assert least <= approximate <= 1.001 * least


@pytest.mark.parametrize("name", REFERENCES)
def test_never_more_overhead_than_the_published_programs(name: str) -> None:
    graph, reference = network(name), REFERENCES[name]
    family = choose_family(graph)
    for program, budget_gb in (
        ("exact TC", reference.smallest_exact_gb),
        ("approximate TC", reference.smallest_pruned_gb),
    ):
        # Published budgets are rounded to MB, shares to percents above 10.
        budget = int((budget_gb + 0.0005) * 1e9)
        query = LowerSetQuery(budget_bytes=budget, charge_last=True)
        found = plan_lower_sets(graph, family, query)
        share = 100 * found.overhead / sum(graph.cost)
        published = reference.variants[program][1]
        assert share <= published + (0.5 if published > 10 else 0.05)


def test_counts_of_a_published_graph_are_those_of_its_shape() -> None:
    shape = resnet50()
    file = published_file("resnet50")
    if file is None:
        pytest.skip("instances/lowersets/cg_resnet50.txt is not beside the repository")
    published = read_forward(file)
    assert sorted(published.memory_bytes) == sorted(shape.memory_bytes)
    assert sorted(published.cost) == sorted(shape.cost)
    assert len(published.edges) == len(shape.edges)


LAST_FREE = {
    # Least overhead in percent, last segment free, at multiples of the smallest budget.
    "unet": (28.6, 14.3, 6.1, 0.9, 0, 0),
    "resnet50": (32.0, 19.9, 14.1, 6.4, 1.4, 0),
    "resnet152": (65.4, 57.7, 46.5, 29.7, 13.9, 2.9),
}
MULTIPLES = (1.1, 1.25, 1.5, 2, 3, 5)


@pytest.mark.parametrize("name", LAST_FREE)
def test_published_overheads(name: str) -> None:
    graph = network(name)
    family = complete(graph)
    least = smallest_budget(graph, family).peak_bytes
    queries = [
        LowerSetQuery(budget_bytes=int(least * multiple)) for multiple in MULTIPLES
    ]
    shares = [
        round(100 * found.overhead / sum(graph.cost), 1)
        for found in sweep_lower_sets(graph, family, queries)
        if found is not None
    ]
    assert tuple(shares) == LAST_FREE[name]


@pytest.mark.parametrize("make", [resnet50, resnet152, densenet161])
def test_approximate_program_is_close_to_exact(make: Any) -> None:
    graph = make()
    exact, approximate = complete(graph), approximate_family(graph)
    assert not approximate.is_complete
    least = smallest_budget(graph, exact).peak_bytes
    assert smallest_budget(graph, approximate).peak_bytes <= 1.001 * least
    queries = [
        LowerSetQuery(budget_bytes=int(least * multiple)) for multiple in MULTIPLES
    ]
    for best, found in zip(
        sweep_lower_sets(graph, exact, queries),
        sweep_lower_sets(graph, approximate, queries),
        strict=True,
    ):
        assert best is not None
        assert found is not None
        assert best.overhead <= found.overhead <= 1.02 * best.overhead


def test_refinement_reaches_what_the_pruned_family_misses() -> None:
    better = 0
    for seed in range(60):
        graph = random_graph(seed, most_nodes=8)
        family = ancestor_sets(graph)
        budget = smallest_budget(graph, family, refinements=0).peak_bytes
        query = LowerSetQuery(budget_bytes=budget)
        plain = plan_lower_sets(graph, family, query, refinements=0)
        refined = plan_lower_sets(graph, family, query, refinements=5)
        best = plan_lower_sets(graph, complete(graph), query)
        assert best.overhead <= refined.overhead <= plain.overhead
        assert refined.peak_bytes <= budget
        better += refined.overhead < plain.overhead
    assert better > 5


def test_refinement_finds_budgets_below_the_family_s_own() -> None:
    refined = 0
    for seed in range(200):
        graph = random_graph(seed, most_nodes=8)
        family = ancestor_sets(graph)
        plain = smallest_budget(graph, family, refinements=0).peak_bytes
        least = smallest_budget(graph, family).peak_bytes
        assert least <= plain
        if least < plain:
            query = LowerSetQuery(budget_bytes=least)
            assert sweep_lower_sets(graph, family, [query], refinements=0) == [None]
            assert plan_lower_sets(graph, family, query).peak_bytes == least
            refined += 1
    assert refined > 10


def test_many_parallel_towers_are_planned_without_enumeration() -> None:
    for count, length in ((8, 6), (6, 10)):  # 5_764_803 and 1_771_563 lower sets
        graph = towers(count, length)
        started = time.process_time()
        family = choose_family(graph)
        assert not family.is_complete
        assert len(family) <= 12 * graph.node_count
        least = smallest_budget(graph, family)
        found = plan_lower_sets(
            graph, family, LowerSetQuery(budget_bytes=int(1.5 * least.peak_bytes))
        )
        assert time.process_time() - started < 10
        judge(graph, found, charge_last=False)
        pruned = smallest_budget(graph, ancestor_sets(graph), refinements=0)
        assert 3 * least.peak_bytes < pruned.peak_bytes


@pytest.mark.parametrize(("count", "length"), [(4, 4), (3, 6), (5, 3)])
def test_few_parallel_towers_are_planned_as_well_as_exactly(
    count: int, length: int
) -> None:
    graph = towers(count, length)
    exact, approximate = complete(graph), approximate_family(graph)
    assert len(exact) == (length + 1) ** count + 2 > 2 * len(approximate)
    least = smallest_budget(graph, exact).peak_bytes
    assert smallest_budget(graph, approximate).peak_bytes <= 1.1 * least
    queries = [
        LowerSetQuery(budget_bytes=int(least * multiple)) for multiple in MULTIPLES
    ]
    for best, found in zip(
        sweep_lower_sets(graph, exact, queries),
        sweep_lower_sets(graph, approximate, queries),
        strict=True,
    ):
        assert best is not None
        assert found is not None
        assert best.overhead <= found.overhead <= 1.02 * best.overhead


def uneven_towers(count: int, length: int, *, seed: int) -> ForwardGraph:
    """Return towers with random sizes and costs of 1 to 1000."""
    shape, rng = towers(count, length), random.Random(seed)
    return ForwardGraph.of_values(
        [rng.randint(1, 1000) for _ in range(shape.node_count)],
        [rng.randint(1, 1000) for _ in range(shape.node_count)],
        shape.edges,
    )


def test_the_distance_from_exact_grows_with_towers_of_uneven_sizes() -> None:
    graph = uneven_towers(4, 9, seed=1)
    assert smallest_budget(graph, complete(graph)).peak_bytes == 7737
    assert smallest_budget(graph, approximate_family(graph)).peak_bytes <= 9064


def test_sizes_and_budget_scale_together() -> None:
    for seed in range(30):
        graph = random_graph(seed, most_nodes=7)
        larger = replace(
            graph,
            memory_bytes=tuple(1_000 * size for size in graph.memory_bytes),
            cost=tuple(7 * cost for cost in graph.cost),
        )
        family = complete(graph)
        least = smallest_budget(graph, family).peak_bytes
        assert smallest_budget(larger, family).peak_bytes == 1_000 * least
        for budget in (least, 2 * least):
            one = plan_lower_sets(graph, family, LowerSetQuery(budget_bytes=budget))
            other = plan_lower_sets(
                larger, family, LowerSetQuery(budget_bytes=1_000 * budget + 999)
            )
            assert other.overhead == 7 * one.overhead


def test_more_budget_never_costs_more() -> None:
    graph = resnet50()
    family = complete(graph)
    least = smallest_budget(graph, family).peak_bytes
    queries = [
        LowerSetQuery(budget_bytes=least + step * least // 20) for step in range(40)
    ]
    found = [
        answer
        for answer in sweep_lower_sets(graph, family, queries)
        if answer is not None
    ]
    assert len(found) == 40
    spent = [answer.overhead for answer in found]
    assert spent == sorted(spent, reverse=True)
    assert [
        plan_lower_sets(graph, family, query).overhead for query in queries
    ] == spent


def test_a_budget_too_small_names_the_smallest() -> None:
    graph = ForwardGraph.of_values(
        [2, 3, 5, 1], [1, 10, 10, 1], [(0, 1), (0, 2), (1, 3), (2, 3)], name="diamond"
    )
    with pytest.raises(BudgetError, match=r"diamond: .* 18 bytes; .* 19 bytes") as info:
        plan_lower_sets(graph, complete(graph), LowerSetQuery(budget_bytes=18))
    assert (info.value.budget_bytes, info.value.required_bytes) == (18, 19)
    assert sweep_lower_sets(
        graph, complete(graph), [LowerSetQuery(budget_bytes=-5)]
    ) == [None]
    unlimited = plan_lower_sets(
        graph, complete(graph), LowerSetQuery(budget_bytes=10**30)
    )
    assert unlimited.overhead == 0


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"budget_bytes": 19.5}, "budget_bytes is 19.5; it must be an integer"),
        ({"budget_bytes": "19 B"}, "budget_bytes is '19 B'; it must be an integer"),
        ({"budget_bytes": None}, "budget_bytes is None; it must be an integer"),
        ({"budget_bytes": True}, "budget_bytes is True; it must be an integer"),
        (
            {"budget_bytes": 19, "objective": "fastest"},
            "objective is 'fastest'; it must be one of 'least overhead', 'most",
        ),
        ({"budget_bytes": 19, "objective": 0}, "objective is 0; it must be one of"),
        ({"budget_bytes": 19, "charge_last": "no"}, "charge_last is 'no'; it must be"),
    ],
)
def test_questions_of_a_wrong_type_are_refused(
    question: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match="must be") as info:
        LowerSetQuery(**question)
    assert words in str(info.value)


def test_questions_may_be_put_in_other_words() -> None:
    words: Any = {"budget_bytes": np.int64(19), "objective": "most overhead"}
    query = LowerSetQuery(**words, charge_last=True)
    assert query == LowerSetQuery(
        budget_bytes=19, objective=LowerSetObjective.MOST_OVERHEAD, charge_last=True
    )
    assert type(query.budget_bytes) is int
    assert isinstance(query.objective, LowerSetObjective)


def test_refinements_are_counted() -> None:
    graph = towers(2, 2)
    family = ancestor_sets(graph)
    rounds: Any
    for rounds, words in ((2.5, "2.5; it must be an integer"), (-1, "at least 0")):
        with pytest.raises(ValueError, match=f"refinements is .*{words}"):
            sweep_lower_sets(
                graph, family, [LowerSetQuery(budget_bytes=10**9)], refinements=rounds
            )
        with pytest.raises(ValueError, match=f"refinements is .*{words}"):
            smallest_budget(graph, family, refinements=rounds)


def test_a_family_of_another_graph_is_refused() -> None:
    small, large = towers(2, 2), towers(2, 3)
    with pytest.raises(ValueError, match="8"):
        sweep_lower_sets(large, complete(small), [LowerSetQuery(budget_bytes=10**9)])
    with pytest.raises(ValueError, match="6"):
        smallest_budget(small, complete(large))


def test_rows_that_are_not_lower_sets_are_refused() -> None:
    graph = ForwardGraph.of_values([1, 1], [1, 1], [(0, 1)])
    wrong = family_of_masks(2, [0b10], label="wrong")
    with pytest.raises(ValueError, match=r"reads|later"):
        smallest_budget(graph, wrong)


def test_chains_of_sets_are_checked() -> None:
    graph = ForwardGraph.of_values([1, 1, 1], [1, 1, 1], [(0, 1)])
    with pytest.raises(ValueError, match="lacks 1 values"):
        segmentation_of_chain(graph, [0b1, 0b11])
    with pytest.raises(ValueError, match="lacks values of the set before"):
        segmentation_of_chain(graph, [0b100, 0b011])
    with pytest.raises(ValueError, match="follows"):
        segmentation_of_chain(graph, [0b010, 0b111])
    found = segmentation_of_chain(graph, [0b1, 0b11, 0b111])
    assert chain_of_segmentation(found.segment_of) == [0b1, 0b11, 0b111]
    assert found.segment_count == 3


def test_a_deadline_gives_what_is_known() -> None:
    graph = towers(7, 3)
    family = complete(graph)
    deadline_s, started = time.monotonic(), time.process_time()
    least = smallest_budget(graph, family, deadline_s=deadline_s)
    assert not least.is_optimal
    query = LowerSetQuery(budget_bytes=least.peak_bytes)
    (found,) = sweep_lower_sets(graph, family, [query], deadline_s=deadline_s)
    assert found is not None
    assert not found.is_optimal
    check_segmentation(graph, found.segment_of)
    assert found.peak_bytes <= least.peak_bytes
    with pytest.raises(TimeoutError, match="time ran out"):
        plan_lower_sets(
            graph, family, LowerSetQuery(budget_bytes=1), deadline_s=deadline_s
        )
    assert time.process_time() - started < 5


def without_time_for_more_sets_than(
    most: int, program: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a program whose time is over at once where a family is larger."""

    def run(arrays: Any, rows: Any, *questions: Any) -> Any:
        *others, limit_s = questions
        return program(arrays, rows, *others, 0.0 if len(rows) > most else limit_s)

    return run


def test_under_a_deadline_nothing_is_worse_than_the_approximate_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = uneven_towers(4, 6, seed=7)
    family, approximate = complete(graph), approximate_family(graph)
    most = 2 * len(approximate)
    assert len(family) > max(most, programs._SCOUT_ABOVE)
    plain = smallest_budget(graph, approximate, refinements=0).peak_bytes
    refined = smallest_budget(graph, approximate).peak_bytes
    queries = [LowerSetQuery(budget_bytes=budget) for budget in (refined, plain)]
    others = sweep_lower_sets(graph, approximate, queries)
    # What is found without refining is worse here.
    assert refined < plain
    (unrefined,) = sweep_lower_sets(graph, approximate, queries[1:], refinements=0)
    assert others[1] is not None
    assert unrefined is not None
    assert others[1].overhead < unrefined.overhead

    for name in ("solve_lower_sets", "smallest_lower_set_budget"):
        limited = without_time_for_more_sets_than(most, getattr(programs, name))
        monkeypatch.setattr(programs, name, limited)
    deadline_s = time.monotonic() + 3600
    least = smallest_budget(graph, family, deadline_s=deadline_s)
    assert not least.is_optimal
    assert least.peak_bytes <= refined
    answers = sweep_lower_sets(graph, family, queries, deadline_s=deadline_s)
    for found, other in zip(answers, others, strict=True):
        assert found is not None
        assert other is not None
        assert not found.is_optimal
        assert found.overhead <= other.overhead


def sweep_without_end(begun: Callable[[], None]) -> None:
    graph = towers(7, 3)
    family = complete(graph)
    begun_when_working(begun)
    # Without the scout, whose many short calls any signal ends.
    with patch.object(programs, "_SCOUT_ABOVE", 10**9):
        sweep_lower_sets(graph, family, [LowerSetQuery(budget_bytes=10**8)] * 10_000)


def test_interrupts_stop_the_search() -> None:
    assert isinstance(interrupted(sweep_without_end), KeyboardInterrupt)
