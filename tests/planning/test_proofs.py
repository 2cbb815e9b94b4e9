"""What plans say is proved of them: certificates, gaps, and where neither is made."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.instances import INSTANCES

from remat.bounds.certificate import certified_bound_ns
from remat.core.certificate import Certificate
from remat.core.errors import CertificateError, PlanMismatchError
from remat.core.graph import Role, Storage
from remat.core.problem import Limits
from remat.planning.curve import trade_off
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import Plan, load_plan
from remat.planning.proofs import at_budget, on_graph
from remat.planning.replanning import at_sizes, replan, with_gradients

GRAPH = INSTANCES["unet"]().graph


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_graph(GRAPH, budget="50%", fingerprint="a step")


def proved_anew(plan: Plan) -> int:
    """Return what the verifier says of a plan's certificate, whatever was cached."""
    assert plan.certificate is not None
    assert plan.budget_bytes is not None
    return certified_bound_ns(plan.graph, plan.budget_bytes, plan.certificate)


def test_a_plan_carries_what_proves_its_floor(plan: Plan) -> None:
    assert plan.baseline_cost_ns < plan.floor_ns == proved_anew(plan) <= plan.cost_ns
    assert plan.proved_ns == plan.floor_ns <= plan.bound_ns
    assert plan.gap == (plan.cost_ns - plan.floor_ns) / plan.cost_ns
    assert "above the optimum of all schedules (proved;" in str(plan)


@pytest.mark.parametrize("solver", ["auto", "greedy-eviction", "min-cut-retention"])
def test_every_solver_of_one_device_gets_a_bound(solver: str, plan: Plan) -> None:
    found = plan_graph(GRAPH, budget="50%", solver=solver)
    assert proved_anew(found) == proved_anew(plan)


def test_what_computes_nothing_twice_needs_no_certificate() -> None:
    found = plan_graph(GRAPH, budget="100%")
    assert found.certificate is None
    assert found.floor_ns == found.cost_ns


def test_the_search_stops_as_soon_as_the_gap_asked_for_is_proved(plan: Plan) -> None:
    def asked(gap: float) -> tuple[int, Plan]:
        found = plan_graph(GRAPH, budget="50%", gap=gap)
        return len(found.settings["candidates"]), found

    thorough, best = asked(0.0)
    assert best.schedule == plan.schedule
    counts = [thorough]
    for gap in (plan.gap + 0.001, 0.5, 1.0):
        count, found = asked(gap)
        counts.append(count)
        assert found.gap <= gap
        assert found.floor_ns <= best.cost_ns <= found.cost_ns
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]


@pytest.mark.parametrize("gap", [-0.1, 1.5, float("nan"), "1 %", None])
def test_a_gap_that_is_no_share_is_refused(gap: object) -> None:
    with pytest.raises(ValueError, match="gap"):
        plan_graph(GRAPH, budget="50%", gap=gap)  # pyright: ignore[reportArgumentType]


def test_more_gradients_leave_a_proof_and_fewer_take_it(plan: Plan) -> None:
    room = (plan.budget_bytes or 0) - plan.peak_bytes
    fuller = with_gradients(plan, 0, room)
    assert fuller is not None
    assert proved_anew(fuller) == fuller.proved_ns == plan.proved_ns
    # The bytes are what count, not what is said to have been counted.
    emptier = with_gradients(fuller, 0, 0)
    assert emptier is not None
    assert emptier.certificate is None
    assert emptier.floor_ns == emptier.baseline_cost_ns


def test_a_plan_read_for_a_step_with_less_around_it_keeps_no_proof(plan: Plan) -> None:
    more = Storage(name="more", size_bytes=9, role=Role.INPUT, is_resident=True)
    fuller = replace(GRAPH, storages=(*GRAPH.storages, more))
    # The schedule has some room, so that both are valid.
    found = on_graph(plan, fuller)
    assert proved_anew(found) == found.floor_ns == plan.floor_ns
    back = on_graph(found, GRAPH)
    assert back.certificate is None
    assert back.bound_ns == back.floor_ns == back.baseline_cost_ns
    other = replace(GRAPH, final_outputs=GRAPH.final_outputs[:-1])
    assert on_graph(plan, other).certificate is None


def test_other_sizes_and_budgets_take_a_proof_along_only_where_it_holds(
    plan: Plan,
) -> None:
    larger = Storage(name="more", size_bytes=0, role=Role.INPUT, is_resident=True)
    other = replace(GRAPH, storages=(*GRAPH.storages, larger))
    sized = at_sizes(plan, other)
    assert sized is not None
    assert sized.certificate is None
    roomier = at_budget(plan, (plan.budget_bytes or 0) * 2)
    assert roomier.certificate is None
    assert roomier.floor_ns == roomier.baseline_cost_ns
    with pytest.raises(CertificateError, match="beyond resident ones"):
        _ = replace(roomier, certificate=plan.certificate).floor_ns


def test_in_the_middle_of_training_the_program_of_the_boundary_is_all(
    plan: Plan,
) -> None:
    limits = Limits()
    budget = plan.budget_bytes or 0
    found = replan(GRAPH, budget, plan, fingerprint="", limits=limits, settings={})
    assert found is not None
    assert found.certificate is not None
    *before, last = found.certificate.moments
    assert last == len(GRAPH.ops)
    assert len(before) <= 1
    assert found.baseline_cost_ns < proved_anew(found) < proved_anew(plan)


def test_every_point_of_a_curve_is_proved_for_its_own_budget() -> None:
    points = trade_off(GRAPH, ["45%", "60%", "80%"])
    assert len(points) == 4
    for point in points:
        assert point.floor_ns <= point.cost_ns
        if point.recomputed_op_count:
            assert point.baseline_cost_ns < proved_anew(point) == point.floor_ns
    floors = [point.floor_ns for point in points]
    assert floors == sorted(floors, reverse=True)


def test_a_file_keeps_the_certificate_and_loading_verifies_it(
    plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = load_plan(path)
    assert loaded.certificate == plan.certificate
    assert loaded.floor_ns == plan.floor_ns
    certificate = plan.certificate
    assert certificate is not None
    # Claims of the whole, with half of what proves it.
    half = replace(certificate, multipliers=certificate.multipliers[::2])
    forged = replace(plan, certificate=half, bound_ns=0)
    forged.__dict__["proved_ns"] = plan.proved_ns
    forged.save(path)
    with pytest.raises(PlanMismatchError, match="is said to prove"):
        load_plan(path)
    moved = replace(certificate, moments=certificate.moments[::-1])
    forged = replace(plan, certificate=moved)
    forged.__dict__["proved_ns"] = plan.proved_ns
    forged.save(path)
    with pytest.raises(CertificateError, match="moment"):
        load_plan(path)


def test_a_certificate_where_none_can_apply_is_refused(
    plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    platform = plan.platform.with_budgets({plan.platform.devices[0].name: None})
    forged = replace(plan, platform=platform, bound_ns=0)
    forged.__dict__["proved_ns"] = plan.proved_ns
    forged.save(path)
    with pytest.raises(PlanMismatchError, match="but it proves 0 ns"):
        load_plan(path)


def test_certificates_of_any_integers_are_kept(plan: Plan, tmp_path: Path) -> None:
    assert plan.certificate is not None
    rows = tuple((row, value << 90) for row, value in plan.certificate.multipliers)
    large: Certificate = replace(plan.certificate, multipliers=rows)
    path = tmp_path / "plan.json"
    odd = replace(plan, certificate=large)
    assert (odd.proved_ns or 0) < 0
    odd.save(path)
    assert load_plan(path).certificate == large
    assert load_plan(path).floor_ns == plan.baseline_cost_ns


def test_half_of_the_plain_peak_is_proved_within_a_few_percent() -> None:
    for name in ("resnet", "transformer", "unet"):
        graph = INSTANCES[name]().graph
        found = plan_graph(graph, budget=plain_peak_bytes(graph) * 6 // 10)
        assert found.recomputed_op_count
        assert found.gap < 0.06
