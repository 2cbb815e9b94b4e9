"""Plans on disk: the same answer again, and never an answer that was not judged."""

import functools
import json
import logging
import multiprocessing
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.instances import INSTANCES
from tests.planning.test_objective import BUDGETS, branches, pair

from remat.core.digests import digest, graph_digest
from remat.core.errors import BudgetError, UnitError
from remat.core.graph import TrainingGraph
from remat.core.problem import StopReason
from remat.planning import plan_cache
from remat.planning.in_flight import plan_in_flight
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import STOP_REASON, Plan
from remat.planning.plan_cache import PlanCall, planned_once

GRAPH = INSTANCES["unet"]().graph
OTHER = INSTANCES["transformer"]().graph


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", "1 MB")
    monkeypatch.setattr("remat.files.cache_folder._said", set())
    return tmp_path / "kept-plans"


def call_of(graph: TrainingGraph = GRAPH, **changes: Any) -> PlanCall:
    asked = {"solver": "auto", "seed": 0}
    call = PlanCall(
        graph=graph, budget="60%", settings={"torch": "2"}, asked=asked, fingerprint="f"
    )
    return replace(call, **changes)


def maker(call: PlanCall, time_limit: float | None = None) -> Callable[[], Plan]:
    def make() -> Plan:
        if call.in_flight > 1:
            assert isinstance(call.budget, str | int)
            return plan_in_flight(
                call.graph,
                call.in_flight,
                budget=call.budget,
                fingerprint=call.fingerprint,
                time_limit=time_limit,
                settings=call.settings,
            )
        return plan_graph(
            call.graph,
            budget=call.budget,
            platform=call.platform,
            fingerprint=call.fingerprint,
            time_limit=time_limit,
            settings=call.settings,
        )

    return make


@functools.cache
def planned() -> Plan:
    """The plan of the first call of most tests, made once."""
    return maker(call_of())()


def refuse() -> Plan:
    raise AssertionError("a plan was made")


@pytest.mark.parametrize(
    "call",
    [
        call_of(),
        call_of(budget=plain_peak_bytes(GRAPH) * 7 // 10),
        call_of(budget="100%"),
        call_of(OTHER, in_flight=3, budget="70%"),
        call_of(branches(), platform=pair(), budget=BUDGETS),
    ],
    ids=["share", "bytes", "plain", "in flight", "devices"],
)
def test_a_plan_is_made_once_and_read_as_it_was(call: PlanCall, folder: Path) -> None:
    first = planned_once(call, maker(call))
    assert len(list(folder.iterdir())) == 1
    reports: list[str] = []
    again = planned_once(call, refuse, lambda activity, _: reports.append(activity))
    assert again == first
    assert again.trace == first.trace
    assert (again.proved_ns, again.gap) == (first.proved_ns, first.gap)
    assert str(again) == str(first)
    assert reports == ["took the plan of an earlier start"]


def test_an_equal_graph_of_another_step_has_the_same_answer() -> None:
    first = planned_once(call_of(), planned)
    ops = tuple(replace(op, name=f"x {op.name}", source="x") for op in GRAPH.ops)
    other = call_of(replace(GRAPH, ops=ops, name="other"), fingerprint="g")
    again = planned_once(other, refuse)
    assert again.schedule == first.schedule
    assert (again.graph, again.fingerprint) == (other.graph, "g")


def changed_graphs() -> Mapping[str, TrainingGraph]:
    op, storage = GRAPH.ops[3], GRAPH.storages[-1]
    ops, storages = GRAPH.ops, GRAPH.storages

    def with_op(**changes: Any) -> TrainingGraph:
        return replace(GRAPH, ops=(*ops[:3], replace(op, **changes), *ops[4:]))

    assert op.cost_ns[0] is not None
    return {
        "time": with_op(cost_ns=(op.cost_ns[0] + 1,)),
        "workspace": with_op(workspace_bytes=(op.workspace_bytes[0] + 1,)),
        "once": with_op(non_recomputable="it prints"),
        "order": with_op(is_ordered=True),
        "reads": with_op(reads=op.reads[1:]),
        "size": replace(
            GRAPH,
            storages=(
                *storages[:-1],
                replace(storage, size_bytes=storage.size_bytes + 1),
            ),
        ),
    }


def test_whatever_an_answer_depends_on_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [call_of(graph) for graph in changed_graphs().values()]
    calls += [
        call_of(),
        call_of(budget="61%"),
        call_of(in_flight=2),
        call_of(settings={"torch": "3"}),
        call_of(asked={"solver": "auto", "seed": 1}),
        call_of(platform=pair()),
        call_of(platform=replace(pair(), copies_wait=True)),
    ]
    keys = {call.key() for call in calls}
    assert len(keys) == len(calls)
    # Costs of a platform are in the graph; names and lines change nothing.
    assert graph_digest(replace(GRAPH, name="x")) == graph_digest(GRAPH)
    monkeypatch.setattr(plan_cache, "code_digest", lambda: "another release")
    assert call_of().key() not in keys


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file holds, and make its checksum fit."""
    document = json.loads(path.read_text(encoding="utf-8"))
    payload = document["payload"]
    change(payload["answer"])
    payload["checksum"] = digest(payload["answer"])
    path.write_text(json.dumps(document), encoding="utf-8")


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a step is missing": lambda answer: answer["schedule"]["steps"].pop(5),
    "an op that is not there": lambda answer: answer["schedule"]["steps"].insert(
        0, ["compute", 10**6]
    ),
    "a step of no kind": lambda answer: answer["schedule"]["steps"].append(["jump"]),
    "more memory than asked for": lambda answer: answer.update(
        budgets_bytes=[answer["budgets_bytes"][0] + 1]
    ),
    "no budget": lambda answer: answer.update(budgets_bytes=[None]),
    "two devices": lambda answer: answer.update(
        budgets_bytes=answer["budgets_bytes"] * 2
    ),
    "a bound above the time": lambda answer: answer.update(bound_ns=10**15),
    "a claim that is not proved": lambda answer: answer["certificate"].update(
        bound_ns=answer["certificate"]["bound_ns"] + 1
    ),
    "multipliers of nothing": lambda answer: answer["certificate"].update(rows=[]),
    "moments of nothing": lambda answer: answer["certificate"].update(moments=[10**6]),
    "no settings": lambda answer: answer.pop("settings"),
}


def test_the_key_has_the_native_core_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans that were made without one are others."""
    before = call_of().key()
    plan_cache.code_digest.cache_clear()
    monkeypatch.setattr(plan_cache, "core", lambda: None)
    assert call_of().key() != before
    plan_cache.code_digest.cache_clear()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_not_trusted(
    wrong: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = planned_once(call_of(), planned)
    (path,) = folder.iterdir()
    before = path.read_bytes()
    rewritten(path, WRONG[wrong])
    with caplog.at_level(logging.WARNING):
        again = planned_once(call_of(), lambda: first)
    assert again is first
    assert [
        record.getMessage()
        for record in caplog.records
        if "made anew" in record.getMessage()
    ]
    assert path.read_bytes() == before


def test_a_damaged_file_is_not_trusted_and_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = planned_once(call_of(), planned)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[: len(whole) // 2],
        whole.replace(b'["compute", 3]', b'["compute", 4]', 1),
    ):
        path.write_bytes(damaged)
        caplog.clear()
        assert planned_once(call_of(), lambda: first) is first
        assert len(caplog.records) == 1
        assert path.read_bytes() == whole
    # The file of another call in its place.
    path.write_bytes(whole.replace(path.stem.encode(), b"0" * 64))
    planned_once(call_of(), lambda: first)
    assert "another one" in caplog.text


def test_what_was_not_searched_to_its_end_is_not_kept(folder: Path) -> None:
    plan = planned()
    cut = replace(plan, settings={STOP_REASON: str(StopReason.INTERRUPTED)})
    assert planned_once(call_of(), lambda: cut) is cut
    assert not folder.exists()


def with_other_costs(graph: TrainingGraph, seed: int) -> TrainingGraph:
    draw = random.Random(seed)
    ops = (
        replace(op, cost_ns=tuple(draw.randint(1, 10**6) for _ in op.cost_ns))
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


def for_two(graph: TrainingGraph) -> TrainingGraph:
    """Return a graph that a second device can run, too."""
    ops = (
        replace(op, cost_ns=op.cost_ns * 2, workspace_bytes=op.workspace_bytes * 2)
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops), device_kinds=("a", "b"))


@pytest.mark.parametrize("kind", ["alone", "in flight", "several devices"])
def test_a_budget_that_was_named_is_kept_with_other_costs(
    kind: str, folder: Path
) -> None:
    """A search that other costs lead may end above what was named."""
    with_kind: dict[str, dict[str, Any]] = {
        "alone": {"graph": OTHER},
        "in flight": {"graph": OTHER, "in_flight": 2},
        "several devices": {"graph": for_two(OTHER), "platform": pair()},
    }

    def call_with(seed: int, *budgets: int) -> PlanCall:
        call = call_of(**with_kind[kind])
        budget: Any = budgets[0]
        if call.platform is not None:
            budget = dict(zip(BUDGETS, budgets, strict=True))
        return replace(call, graph=with_other_costs(call.graph, seed), budget=budget)

    seeds = range(3 if kind == "in flight" else 6)
    named: list[tuple[int, ...]] = []
    alone: list[tuple[int, ...]] = []
    for seed in seeds:
        call = call_with(seed, 1, 1)
        for found, plan in ((alone, maker(call)), (named, kept(call))):
            error = raised_by(plan)
            by_device = error.required_by_device
            found.append(tuple(by_device.values()) or (error.required_bytes, 1))
        assert f"{named[-1][0]} bytes" in str(error)
        assert (alone[-1] == named[-1]) != ("earlier search" in str(error))
        assert "made of" in str(error) or kind == "in flight"
    assert len(list(folder.iterdir())) == 1
    assert named == sorted(named, reverse=True)
    assert max(alone) > min(alone) == named[-1]
    for seed in seeds:
        call = call_with(seed, *named[-1])
        # Of several devices, what solvers take minutes for would be asked, too.
        plan = kept(call, None if call.platform is None else 0.5)()
        assert plan.peak_bytes <= named[-1][0] == plan.budget_bytes
        assert plan.graph.ops == call.graph.ops
        assert plan.in_flight == call.in_flight
        made_with = {"torch": "2", "solver": "auto", "seed": 0}
        assert made_with.items() <= plan.settings.items()


def kept(call: PlanCall, time_limit: float | None = None) -> Callable[[], Plan]:
    return lambda: planned_once(call, maker(call, time_limit))


def raised_by(make: Callable[[], Plan]) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        make()
    return caught.value


def test_a_solver_that_was_named_is_given_no_other_answer(folder: Path) -> None:
    call = call_of(OTHER, budget=1)
    with pytest.raises(BudgetError) as caught:
        planned_once(call, maker(call))

    named = caught.value.required_bytes
    call = replace(call, budget=named, asked={"solver": "store-all"})

    def with_more() -> Plan:
        raise BudgetError("more", budget_bytes=named, required_bytes=named + 1)

    for make in (
        lambda: plan_graph(OTHER, budget=named, solver="store-all"),
        with_more,
    ):
        with pytest.raises(BudgetError, match="use solver='auto'") as caught:
            planned_once(call, make)
        assert caught.value.is_known_to_fit
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "file"))
    plan = planned()
    for _ in range(2):
        assert planned_once(call_of(), lambda: plan) is plan
    (record,) = caplog.records
    assert "set REMAT_CACHE_DIR" in record.getMessage()


def test_the_size_is_the_environments(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned()
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", "0")
    assert planned_once(call_of(), lambda: plan) is plan
    assert not folder.exists()
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", "some")
    with pytest.raises(UnitError, match=r"REMAT_PLAN_CACHE_SIZE: .*'some'.*0 keeps no"):
        planned_once(call_of(), lambda: plan)
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", "1 MB")
    planned_once(call_of(), lambda: plan)
    (first,) = folder.iterdir()
    monkeypatch.setenv("REMAT_PLAN_CACHE_SIZE", str(first.stat().st_size * 5 // 2))
    for budget in ("61%", "62%", "63%"):
        planned_once(call_of(budget=budget), lambda: plan)
    assert not first.exists()
    assert len(list(folder.iterdir())) == 2


def _plan_often(number: int) -> None:
    call = call_of(OTHER, budget=f"{60 + number % 2}%")
    for _ in range(4):
        plan = planned_once(call, maker(call))
        assert plan.trace.is_valid


def test_several_processes_share_a_folder(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_plan_often, args=(n,)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert len(list(folder.iterdir())) == 2
