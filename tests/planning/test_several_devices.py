"""Plans on several devices: what is asked for, what is refused, what is found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device_schedules import HandMade, HandMadeSplit, logical, offloading
from tests.instances import mlp_chain, resnet_like
from tests.training.test_fitting import assert_same, conv_net, mean_square, steps
from torch import nn

import remat
from remat import solvers
from remat.core.device_graph import arrange, fully_linked, place_graph
from remat.core.errors import (
    BudgetError,
    ExecutionError,
    FileFormatError,
    InvalidPlatformError,
    PlanMismatchError,
    SolverUnsuitableError,
    UnitError,
)
from remat.core.graph import Op, Phase, Storage, TrainingGraph
from remat.core.platform import Device, DeviceKind, Link, Platform, single_device
from remat.core.problem import Status
from remat.core.schedule import Compute, Copy
from remat.core.simulator import simulate
from remat.files.serialisation import save_platform
from remat.planning.one_device import plan_graph
from remat.planning.several_devices import budget_of
from remat.planning.smallest_budget import smallest_budget
from remat.solvers import registry
from remat.training.fitted_model import FittedModel
from remat.training.request import PlanRequest

REAL_PORTFOLIO = registry.AUTO_DEVICES
GRAPH = mlp_chain(6).graph
BUDGETS: dict[str, int | str | None] = {"cpu": "1 GiB", "host": "1 GiB"}


@pytest.fixture(autouse=True)
def _portfolio(monkeypatch: Any) -> None:
    monkeypatch.setattr(registry, "AUTO_DEVICES", (HandMade,))


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    return model, torch.randn(64, 32)


def plan_small(budget: Any = None, **options: Any) -> remat.Plan:
    model, x = small()
    options = {"loss": mean_square, "costs": "estimated", **options}
    return remat.plan(model, x, budget=budget or BUDGETS, **options)


class TestRequest:
    def test_names_of_this_machine_need_no_platform(self) -> None:
        plan = plan_small()
        assert plan.platform.names == ("cpu", "host")
        assert {link.bytes_per_s > 10**6 for link in plan.platform.links} == {True}
        assert not plan.platform.kind_of(1).computes

    def test_a_mapping_of_one_device_is_one_budget(self) -> None:
        plan = plan_small({"cpu": 10**8})
        assert plan.budget_bytes == 10**8
        assert not plan.has_several_devices

    def test_a_platform_is_given_as_it_is_or_as_a_file(self, tmp_path: Path) -> None:
        platform = logical("host", "cpu", "slow")
        file = tmp_path / "machine.json"
        save_platform(file, platform)
        budgets = dict.fromkeys(platform.names, "1 GiB")
        plans = [plan_small(budgets, platform=p) for p in (platform, file, str(file))]
        # The model's own device comes first, wherever the platform has it.
        assert plans[0].platform.names == ("cpu", "host", "slow")
        assert plans[0].platform == plans[1].platform == plans[2].platform

    def test_budgets_may_be_in_the_platform(self) -> None:
        platform = logical("cpu", "host", budgets_bytes=[10**8, 10**9])
        model, x = small()
        plan = remat.plan(model, x, platform=platform, costs="estimated")
        assert budget_of(plan) == {"cpu": 10**8, "host": 10**9}

    def test_the_budget_of_one_device_may_be_in_its_platform(self) -> None:
        model, x = small()
        platform = single_device(10**8)
        plan = remat.plan(model, x, platform=platform, costs="estimated")
        assert plan.budget_bytes == 10**8
        named = remat.plan(
            model, x, platform=platform, budget={"cpu": 9**8}, costs="estimated"
        )
        assert named.budget_bytes == 9**8
        with pytest.raises(InvalidPlatformError, match=r"no device .* called 'gpu'"):
            remat.plan(model, x, platform=platform, budget={"gpu": 9**8})

    def test_none_is_no_limit(self) -> None:
        plan = plan_small({"cpu": 10**8, "host": None})
        assert budget_of(plan) == {"cpu": 10**8, "host": None}

    def test_a_percentage_is_of_the_step_on_the_first_device(self) -> None:
        plan = plan_small({"cpu": "200%", "host": "1 GiB"})
        assert plan.budget_bytes == 2 * plan.baseline_peak_bytes

    def test_unequal_devices_take_unequal_time(self) -> None:
        platform = logical("cpu", "slow")
        plan = plan_small(dict.fromkeys(platform.names, "1 GiB"), platform=platform)
        for op in plan.graph.ops:
            if op.cost_ns[1] is not None:
                assert op.cost_ns[1] == 3 * (op.cost_ns[0] or 0)
        assert sum(op.cost_ns[1] is None for op in plan.graph.ops) == 2

    def test_a_device_elsewhere_can_be_planned_for_but_not_used(self) -> None:
        npu = DeviceKind(name="npu", flops_per_s=10**14, bytes_per_s=10**12)
        platform = Platform(
            devices=(Device(name="cpu"), Device(name="npu", kind="npu")),
            links=fully_linked(("cpu", "npu"), 10**10),
            kinds=(npu,),
        )
        budgets = dict.fromkeys(platform.names, "1 GiB")
        plan = plan_small(budgets, platform=platform)
        costs = [op.cost_ns for op in plan.graph.ops if op.cost_ns[1] is not None]
        assert all((b or 0) < (a or 0) for a, b in costs)
        model, x = small()
        with pytest.raises(ExecutionError, match="device 'npu', which is none here"):
            remat.fit(model, x, budget=budgets, platform=platform, costs="estimated")
        assert model._compiled_call_impl is None


class TestRefusals:
    """One message each, which names the device or op; nothing is changed."""

    @pytest.mark.parametrize(
        ("budget", "error", "words"),
        [
            ({"cpu": 10**9, "gpu7": 1}, InvalidPlatformError, "unknown device 'gpu7'"),
            ({"cpu": 10**9, "cpu:x": 1}, InvalidPlatformError, "'cpu:x'"),
            ({"cpu": 10**9, "cuda:99": 1}, InvalidPlatformError, "'cuda:99' does not"),
            ({"host": 10**9, "host:1": 1}, InvalidPlatformError, "model is on cpu"),
            ({"host": 10**9}, InvalidPlatformError, "the model is on cpu"),
            ({"cpu": 10**9, "host": 0}, UnitError, "device 'host': the budget 0"),
            ({"cpu": 10**9, "host": "1 apple"}, UnitError, "device 'host': unknown"),
            ({}, UnitError, "mapping of budgets is empty"),
            ({"cpu": 10**9, 1: 5}, UnitError, "a budget is given for 1"),
        ],
    )
    def test_budget(self, budget: Any, error: type[Exception], words: str) -> None:
        model, x = small()
        with pytest.raises(error, match=words):
            remat.fit(model, x, budget=budget, costs="estimated")
        assert model._compiled_call_impl is None

    @pytest.mark.parametrize(
        ("budget", "words"),
        [
            (10**9, "the budget is 1000000000, but the platform has the devices cpu,"),
            ({"cpu": 10**9}, "device 'host' of the platform has no budget"),
            (dict.fromkeys(("cpu", "host", "x"), 9), "no device .* called 'x'"),
            (None, "device 'host' of the platform has no budget"),
        ],
    )
    def test_budget_of_a_platform(self, budget: Any, words: str) -> None:
        platform = logical("cpu", "host", budgets_bytes=[None, None])
        model, x = small()
        if budget is None:
            platform = logical("cpu", "host", budgets_bytes=[10**9, None])
        with pytest.raises(InvalidPlatformError, match=words):
            remat.fit(model, x, budget=budget, platform=platform, costs="estimated")

    @pytest.mark.parametrize("direction", [(0, 1), (1, 0)])
    def test_disconnected_device(self, direction: tuple[int, int]) -> None:
        link = Link(source=direction[0], target=direction[1], bytes_per_s=1)
        platform = Platform(devices=logical("cpu", "host").devices, links=(link,))
        way = "back from" if direction == (0, 1) else "to"
        with pytest.raises(InvalidPlatformError, match=f"{way} device 'host'"):
            plan_small(platform=platform)

    def test_two_devices_of_one_name(self) -> None:
        platform = logical("cpu", "cpu")
        with pytest.raises(InvalidPlatformError, match=r"2 devices .* called 'cpu'"):
            plan_small({"cpu": 10**9}, platform=platform)

    def test_a_kind_that_nobody_describes(self) -> None:
        platform = Platform(
            devices=(Device(name="cpu"), Device(name="x", kind="abacus")),
            links=fully_linked(("cpu", "x"), 1),
        )
        with pytest.raises(InvalidPlatformError, match="'x' is of kind 'abacus'"):
            plan_small({"cpu": 10**9, "x": 1}, platform=platform)

    def test_a_platform_file_that_is_not_there(self) -> None:
        with pytest.raises(FileFormatError, match=r"cannot read 'nowhere\.json'"):
            plan_small(platform="nowhere.json")

    def test_unknown_solver(self) -> None:
        with pytest.raises(SolverUnsuitableError, match="unknown solver 'magic'"):
            plan_small(solver="magic")

    def test_residents_over_the_budget(self) -> None:
        with pytest.raises(BudgetError, match=r"'cpu' holds .* parameter") as refused:
            plan_small({"cpu": 1000, "host": "1 GiB"})
        assert refused.value.budget_bytes == 1000 < refused.value.required_bytes

    def test_no_time_at_all(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(registry, "AUTO_DEVICES", REAL_PORTFOLIO)
        plan = plan_small(time_limit=1e-9)
        assert plan.trace.is_valid
        tight = plan.graph.resident_bytes() + 64
        words = r"fits on no device.*nothing fits in.*raise the budgets, or shrink"
        with pytest.raises(BudgetError, match=words) as refused:
            plan_small({"cpu": tight, "host": "1 GiB"}, time_limit=1e-9)
        known = refused.value.required_bytes
        words = (
            r"none found in .* within the budgets: use solver='auto', or give more time"
        )
        with pytest.raises(BudgetError, match=words):
            plan_small(
                {"cpu": known, "host": "1 GiB"}, time_limit=1e-9, solver="xengine"
            )

    def test_below_the_floor(self) -> None:
        whole = plan_small().baseline_peak_bytes
        tight = {"cpu": whole // 2, "host": 1}
        with pytest.raises(
            BudgetError, match=r"nothing fits in .* on 'host'"
        ) as refused:
            plan_small(tight)
        known = refused.value.required_by_device
        assert set(known) == {"cpu", "host"}
        assert known["cpu"] == refused.value.required_bytes > whole // 2
        # What an error names as possible is possible.
        plan = plan_small(known)
        assert plan.peak_bytes <= known["cpu"]
        assert plan.solver in {"Paging", "smallest_budget"}


def one_way_graph() -> TrainingGraph:
    """Return a graph of which op 1 runs on kind ``b`` alone."""

    def op(name: str, reads: tuple[int, ...], write: int, phase: Phase, **k: Any) -> Op:
        cost = k.get("cost", (5, 7))
        return Op(
            name=name,
            reads=reads,
            writes=(write,),
            cost_ns=cost,
            workspace_bytes=(0, 0),
            phase=phase,
        )

    return TrainingGraph(
        name="one way",
        device_kinds=("a", "b"),
        storages=(
            Storage(name="x", size_bytes=4, is_resident=True),
            Storage(name="y", size_bytes=8),
            Storage(name="z", size_bytes=16),
        ),
        ops=(
            op("first", (0,), 1, Phase.FORWARD),
            op("second", (1,), 2, Phase.BACKWARD, cost=(None, 3)),
        ),
        final_outputs=(2,),
    )


def machine(*kinds: str) -> Platform:
    described = [DeviceKind(name=k, runs_on=k) for k in ("a", "b", "c")]
    names = [f"{kind}{index}" for index, kind in enumerate(kinds)]
    return Platform(
        devices=tuple(
            Device(name=n, kind=k) for n, k in zip(names, kinds, strict=True)
        ),
        links=fully_linked(names, 10**9),
        kinds=tuple(described),
    )


class TestGraphs:
    def test_an_op_runs_where_it_can(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(registry, "AUTO_DEVICES", (HandMadeSplit,))
        plan = plan_graph(
            one_way_graph(), budget={"a0": 100, "b1": 100}, platform=machine("a", "b")
        )
        assert Compute(1, 1) in plan.schedule.steps
        assert Copy(2, 1, 0) in plan.schedule.steps
        assert not plan.baseline.is_valid
        assert plan.cost_ns == 4 + 7 + 3 + 16
        text = str(plan)
        assert "b1: peak 24 B of 100 B, runs 2 ops in 10 ns" in text
        assert "a0 to b1: 1 copy, 4 B in 4 ns (4 B of x)" in text
        assert "alone" not in text

    def test_an_op_that_no_device_can_run(self) -> None:
        with pytest.raises(InvalidPlatformError, match="op 1 'second' can run on none"):
            plan_graph(
                one_way_graph(),
                budget=dict.fromkeys(("a0", "a1"), 9),
                platform=machine("a", "a"),
            )

    def test_costs_of_another_kind_do_not_follow(self) -> None:
        with pytest.raises(
            InvalidPlatformError, match="those on device 'c1' do not follow"
        ):
            plan_graph(
                one_way_graph(), budget={"b0": 9, "c1": 9}, platform=machine("b", "c")
            )

    def test_known_budgets_come_from_the_devices_without_limits(
        self, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(registry, "AUTO_DEVICES", (HandMadeSplit,))
        with pytest.raises(BudgetError) as refused:
            plan_graph(
                one_way_graph(), budget={"a0": 9, "b1": 9}, platform=machine("a", "b")
            )
        assert refused.value.required_by_device == {"a0": 20, "b1": 24}

    def test_offloading_takes_less_than_everything(self) -> None:
        whole = plan_graph(GRAPH, budget="100%").peak_bytes
        platform = logical("cpu", "host", speed=10**8)
        arranged = arrange(platform, 0)
        graph = place_graph(GRAPH, arranged)
        schedule = offloading(graph, arranged)
        peaks = simulate(graph, arranged, schedule).peak_bytes
        assert peaks[0] < whole
        budget = dict(zip(platform.names, peaks, strict=True))
        plan = plan_graph(GRAPH, budget=budget, platform=platform)
        assert plan.solver == "HandMade"
        assert plan.status is Status.FEASIBLE
        assert plan.link_uses[0].source == "cpu"
        assert plan.device_uses[1].run_count == 0
        assert all(a <= b for a, b in zip(plan.trace.peak_bytes, peaks, strict=True))
        assert plan.overlapped_ns < plan.cost_ns

    def test_paging_goes_where_solvers_find_nothing(self) -> None:
        graph = resnet_like(6).graph
        platform = logical("cpu", "host")
        tiny = {"cpu": graph.resident_bytes() + 1, "host": None}
        with pytest.raises(BudgetError) as refused:
            plan_graph(graph, budget=tiny, platform=platform)
        known = refused.value.required_by_device
        assert known["cpu"] < smallest_budget(graph).budget_bytes
        plan = plan_graph(graph, budget=known, platform=platform)
        assert plan.solver == "Paging"
        assert plan.link_uses
        assert "Paging: feasible" in plan.settings["candidates"][-1]

    def test_a_named_solver_may_use_the_first_device_alone(self) -> None:
        platform = logical("cpu", "cpu:1")
        plan = plan_graph(
            GRAPH,
            budget=dict.fromkeys(platform.names),
            platform=platform,
            solver="store-all",
        )
        assert plan.cost_ns == plan.baseline_cost_ns
        assert plan.trace.peak_bytes[1] == 0

    def test_plans_are_saved_with_their_platform(self, tmp_path: Path) -> None:
        platform = logical("cpu", "slow", "host")
        plan = plan_graph(
            GRAPH, budget=dict.fromkeys(platform.names, "1 GiB"), platform=platform
        )
        plan.save(tmp_path / "plan.json")
        loaded = remat.load_plan(tmp_path / "plan.json")
        assert loaded == plan
        assert loaded.platform.kind_of(1).time_percent == 300
        assert loaded.summary()["devices"] == plan.summary()["devices"]


class TestInstalled:
    def test_trains_as_before_and_plans_other_shapes(self) -> None:
        model, x = conv_net()
        plan = remat.fit(
            model,
            x,
            budget={"cpu": "90%", "host": "1 GiB"},
            loss=mean_square,
            costs="estimated",
        )
        assert plan.solver == "HandMade"
        assert plan.link_uses
        plain, _ = conv_net()
        assert_same(steps(plain, x), steps(model, x))
        small_x = x[:4].clone()
        assert_same(steps(plain, small_x), steps(model, small_x))
        fitted = model._compiled_call_impl
        assert isinstance(fitted, FittedModel)
        budgets = {
            name: plan.device_uses[i].budget_bytes
            for i, name in enumerate(("cpu", "host"))
        }
        assert fitted.planner.request.budget == budgets
        planner = fitted.planner
        assert len(planner.plans) == 2
        assert all(p.has_several_devices for p in planner.plans.values())

    def test_a_saved_plan_is_installed_on_its_model_alone(self, tmp_path: Path) -> None:
        model, x = conv_net()
        remat.plan(model, x, budget=BUDGETS, costs="estimated").save(
            tmp_path / "p.json"
        )
        plan = remat.load_plan(tmp_path / "p.json")
        installed = remat.fit(model, x, plan=plan)
        assert installed.schedule == plan.schedule
        assert installed.platform == plan.platform
        plain, _ = conv_net()
        assert_same(steps(plain, x), steps(model, x))
        other, other_x = small()
        with pytest.raises(PlanMismatchError):
            remat.fit(other, other_x, plan=plan)

    def test_the_compiler_backend_takes_budgets_by_device(self) -> None:
        model, x = conv_net()
        backend = remat.backend(budget=BUDGETS, model=model, costs="estimated")
        compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
        torch.manual_seed(3)
        compiled(x).sum().backward()
        plain, _ = conv_net()
        torch.manual_seed(3)
        plain(x).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)


def test_arranged_platforms_stay_as_they_are() -> None:
    platform = arrange(logical("host", "cpu", "slow:1"), 1)
    assert platform.names == ("cpu", "host", "slow:1")
    assert tuple(d.kind for d in platform.devices) == platform.names
    assert arrange(platform, 0) == platform
    assert platform.link(1, 0) == Link(
        source=1, target=0, bytes_per_s=10**10, latency_ns=1000
    )


def test_home_must_compute() -> None:
    with pytest.raises(InvalidPlatformError, match="device 'host' runs no ops"):
        arrange(logical("host", "cpu"), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "runs on no device of this machine and has no rates"),
        ({"runs_on": "cpu", "time_percent": 0}, "time_percent of .* is 0"),
        ({"runs_on": "cpu", "flops_per_s": 1}, "one rate of two"),
        ({"flops_per_s": 1, "bytes_per_s": 0}, "bytes_per_s of .* is 0"),
        ({"runs_on": "cpu", "launch_ns": -1}, "launch_ns of .* is -1"),
    ],
)
def test_a_kind_that_makes_no_sense(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidPlatformError, match=words):
        DeviceKind(name="k", **fields)


def test_a_kind_is_described_once() -> None:
    kind = DeviceKind(name="k", runs_on="cpu")
    with pytest.raises(InvalidPlatformError, match="described twice: k, k"):
        Platform(devices=(Device(),), kinds=(kind, kind))


def test_requests_are_checked_before_anything_slow() -> None:
    with pytest.raises(UnitError, match="give a budget"):
        PlanRequest()
    with pytest.raises(TypeError, match="platform is 3"):
        PlanRequest(budget=5, platform=3)  # type: ignore[arg-type]
    assert [
        type(s).__name__
        for s in solvers.chosen_solvers("auto", has_several_devices=True)
    ] == ["HandMade"]


def test_an_op_that_the_one_device_cannot_run() -> None:
    with pytest.raises(InvalidPlatformError, match="op 1 'second' cannot run on 'a'"):
        plan_graph(one_way_graph(), budget="50%")
