"""The instance library: what it says is so, and anybody's schedule is judged."""

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from remat.core.errors import CertificateError, FileFormatError, UsageError
from remat.core.liveness import schedule_from_order, store_all_order
from remat.core.schedule import Schedule
from remat.files.serialisation import save_schedule
from remat.planning.one_device import plan_graph
from remat.testing.instances import library
from remat.testing.instances.entries import comparisons, entry_of
from remat.testing.instances.library import Instance, load_instance, save_instance

SMALL = "message-passing"


@pytest.fixture(scope="module")
def instance() -> Instance:
    return load_instance(SMALL)


@pytest.fixture
def alone(
    tmp_path: Path, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Instance], None]:
    """Let the library hold one instance."""
    monkeypatch.setattr(library, "folder", lambda: tmp_path / "data")
    (tmp_path / "data").mkdir()

    def hold(kept: Instance) -> None:
        save_instance(tmp_path / "data", kept)

    hold(instance)
    return hold


def plain(instance: Instance) -> Schedule:
    return schedule_from_order(instance.graph, store_all_order(instance.graph))


def test_what_is_known_of_an_instance_is_so(instance: Instance) -> None:
    assert list(instance.best) == list(instance.budgets_bytes)
    sizes = list(instance.budgets_bytes.values())
    assert sizes == sorted(sizes, reverse=True)
    costs = [best.cost_ns for best in instance.best.values()]
    assert costs == sorted(costs)
    for label, best in instance.best.items():
        assert instance.check(label) is None
        assert instance.once_ns <= best.bound_ns <= best.cost_ns
        assert "remat" in best.found_by


def test_files_hold_all_and_are_equal_for_equal_contents(
    instance: Instance, tmp_path: Path, alone: Callable[[Instance], None]
) -> None:
    before = {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir()}
    assert len(before) == 2
    again = load_instance(SMALL)
    assert again == instance
    alone(again)
    after = {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir()}
    assert after == before


def test_a_claim_that_is_not_so_is_found(instance: Instance) -> None:
    label, best = next(iter(instance.best.items()))

    def with_best(**changes: object) -> Instance:
        return replace(instance, best={label: replace(best, **changes)})

    assert "takes" in str(with_best(cost_ns=best.cost_ns - 1).check(label))
    assert "takes" in str(with_best(peak_bytes=1).check(label))
    assert "fails" in str(with_best(schedule=plain(instance)).check(label))
    assert "proves" in str(with_best(bound_ns=best.bound_ns + 1).check(label))
    assert "proves" in str(with_best(certificate=None).check(label))
    assert best.certificate is not None
    wrong = replace(best.certificate, moments=(10**6,))
    with pytest.raises(CertificateError):
        with_best(certificate=wrong).check(label)


def test_only_what_is_better_is_taken(instance: Instance) -> None:
    label = list(instance.budgets_bytes)[-1]
    best = instance.best[label]
    empty = replace(instance, best={})
    # More than the budget.
    assert empty.with_schedule(label, plain(instance), "me") is empty
    found = empty.with_schedule(label, best.schedule, "me")
    assert found.best[label].found_by == "me"
    assert found.best[label].bound_ns == instance.once_ns
    assert found.with_schedule(label, best.schedule, "you") is found
    assert best.certificate is not None
    proved = found.with_certificate(label, best.certificate, "you")
    assert proved.best[label].bound_ns == best.bound_ns
    assert proved.best[label].proved_by == "you"
    assert proved.with_certificate(label, best.certificate, "me") is proved


@pytest.mark.usefixtures("alone")
def test_a_schedule_finds_its_instance(instance: Instance, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    save_schedule(file, plain(instance))
    entry = entry_of(file)
    assert entry.instance.name == SMALL
    found = comparisons(entry)
    assert not any(each.fits for each in found)
    assert str(found[0]) == "takes more memory"
    label = list(instance.budgets_bytes)[-1]
    save_schedule(file, instance.best[label].schedule)
    *larger, last = comparisons(entry_of(file, SMALL))
    assert all(each.fits for each in larger)
    assert "worse than the best known" in str(larger[0])
    assert str(last) == "as good as the best known"
    save_schedule(file, Schedule(plain(instance).steps[:-9]))
    with pytest.raises(UsageError, match="valid for none of the instances; name"):
        entry_of(file)
    assert entry_of(file, SMALL).trace.violation is not None


@pytest.mark.usefixtures("alone")
def test_a_plan_finds_its_instance_by_its_graph(
    instance: Instance, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    budget = instance.budgets_bytes["90%"]
    plan = plan_graph(instance.graph, budget=budget, solver="greedy-eviction")
    plan.save(file)
    entry = entry_of(file)
    assert (entry.schedule, entry.certificate) == (plan.schedule, plan.certificate)
    other = replace(instance.graph.ops[0], cost_ns=(1,))
    graph = replace(instance.graph, ops=(other, *instance.graph.ops[1:]))
    plan_graph(graph, budget=budget, solver="greedy-eviction").save(file)
    with pytest.raises(UsageError, match="a plan of another graph"):
        entry_of(file, SMALL)


def test_wrong_files_and_names_are_refused(
    tmp_path: Path, alone: Callable[[Instance], None], instance: Instance
) -> None:
    with pytest.raises(UsageError, match="no instance 'x'; remat instances list"):
        load_instance("x")
    best = tmp_path / "data" / f"{SMALL}.best.json.gz"
    graph = tmp_path / "data" / f"{SMALL}.graph.json.gz"
    text = gzip.decompress(graph.read_bytes())
    graph.write_bytes(gzip.compress(text.replace(b'"forward", [', b'"forward", [ ', 1)))
    assert load_instance(SMALL) == instance
    for damaged in (b"", best.read_bytes()[:99], b"no gzip", gzip.compress(b"{}")):
        best.write_bytes(damaged)
        with pytest.raises(FileFormatError, match=r"best\.json\.gz"):
            load_instance(SMALL)
    alone(instance)
    other = replace(instance.graph.ops[0], cost_ns=(1,))
    changed = replace(instance.graph, ops=(other, *instance.graph.ops[1:]))
    kept = best.read_bytes()
    alone(replace(instance, graph=changed))
    best.write_bytes(kept)
    with pytest.raises(FileFormatError, match="is of another graph"):
        load_instance(SMALL)
