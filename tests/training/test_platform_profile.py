"""Costs in platform files: measured, saved, edited, and planned with elsewhere."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device_schedules import logical
from torch import nn

import remat
from remat import cli
from remat.core.device_graph import fully_linked
from remat.core.errors import ExecutionError, FileFormatError, InvalidPlatformError
from remat.core.platform import (
    Device,
    DeviceKind,
    MeasuredCost,
    MeasuredCosts,
    Platform,
)
from remat.files.serialisation import load_platform, save_platform
from remat.profile import arguments, costing, known, operators
from remat.training import platform_profile
from remat.training.fitted_model import FittedModel
from remat.training.platform_profile import merged, with_measured_costs

SCRIPT = str(Path(__file__).parents[1] / "cli" / "workloads.py")
LIMITS: dict[str, Any] = {"cpu": "1 GiB", "cpu:1": "1 GiB", "host": None}
FAR = DeviceKind(name="far", runs_on="cuda:7")


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4)]
    return nn.Sequential(*layers), torch.randn(32, 8)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Empty for each test: what is found must come from the file.
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """A platform with the costs of the small model."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("costs")
        patch.setenv("REMAT_CACHE_DIR", str(folder))
        return with_measured_costs(logical("cpu", "cpu:1", "host"), *small())


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that are measured, in order."""
    seen: list[str] = []

    def noting(profile: Callable[..., Any]) -> Callable[..., Any]:
        def note(calls: Any, **options: Any) -> Any:
            seen.extend(str(call.target) for call in calls)
            return profile(calls, **options)

        return note

    monkeypatch.setattr(costing, "profile_operators", noting(costing.profile_operators))
    monkeypatch.setattr(known, "profile_operators", noting(known.profile_operators))
    monkeypatch.setattr(costing, "measure_rates", lambda *_, **__: seen.append("rates"))
    return seen


def plan_small(platform: Any, budget: Any = None, **options: Any) -> remat.Plan:
    model, x = small()
    budget = LIMITS if budget is None else budget
    options = {"solver": "store-all", **options}
    return remat.plan(model, x, budget=budget, platform=platform, **options)


def edited(
    platform: Platform, change: Callable[[MeasuredCost], MeasuredCost | None]
) -> Platform:
    """Return the platform with every cost changed, or left out."""
    assert platform.costs is not None
    rows = [change(cost) for cost in platform.costs.operators]
    costs = replace(
        platform.costs, operators=tuple(row for row in rows if row is not None)
    )
    return replace(platform, costs=costs)


def far_away(platform: Platform, *, home: bool = False) -> Platform:
    """Return the platform with a device, or with home, on another machine."""
    name = "cpu" if home else "cpu:1"
    assert platform.costs is not None
    names = {name: "far"}
    return Platform(
        devices=tuple(
            Device(name="far", kind="far") if device.name == name else device
            for device in platform.devices
            if not home or device.name != "cpu:1"
        ),
        links=fully_linked("ab" if home else "abc", 10**9),
        kinds=(FAR,),
        costs=MeasuredCosts(
            operators=tuple(
                replace(cost, device=names.get(cost.device, cost.device))
                for cost in platform.costs.operators
                if not home or cost.device != "cpu:1"
            )
        ),
    )


def test_each_device_that_computes_has_the_costs_of_each_operator(
    measured: Platform,
) -> None:
    on = [measured.costs_on(name) for name in measured.names]
    assert on[0].keys() == on[1].keys()
    assert any(
        text.startswith("aten.addmm.default(float32 [16] device") for text in on[0]
    )
    assert any("dropout" in text for text in on[0])
    assert all("cpu" not in text for text in on[0])
    assert all((cost.cost_ns or 0) > 0 for cost in on[0].values())
    assert on[2] == {}
    assert measured.costs is not None
    assert ("torch", torch.__version__) in measured.costs.environment


def test_measuring_changes_nothing() -> None:
    model, x = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    platform = logical("cpu", "host")
    assert with_measured_costs(platform, model, x).costs is not None
    assert platform.costs is None
    assert model._compiled_call_impl is None
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], value) for n, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_file_holds_what_was_measured(measured: Platform, tmp_path: Path) -> None:
    save_platform(tmp_path / "machine.json", measured)
    assert load_platform(tmp_path / "machine.json") == measured


def test_a_plan_measures_nothing_that_is_in_the_file(
    measured: Platform, tmp_path: Path, measures: list[str]
) -> None:
    save_platform(tmp_path / "machine.json", measured)
    plan = plan_small(tmp_path / "machine.json")
    assert measures == []
    assert not (tmp_path / "cache").exists()
    known_times = {cost.cost_ns for cost in measured.costs_on("cpu").values()}
    for op in plan.graph.ops:
        if op.cost_ns[0]:
            assert op.cost_ns[0] in known_times
            assert op.cost_ns[1] == op.cost_ns[0]
    # Estimates too are for what is not known.
    assert plan_small(measured, costs="estimated").graph == plan.graph
    assert measures == []
    assert plan.platform.costs is None


def test_an_edited_cost_is_what_a_plan_costs(
    measured: Platform, tmp_path: Path
) -> None:
    file = tmp_path / "machine.json"
    save_platform(file, measured)
    before = plan_small(file)
    document = json.loads(file.read_text())
    rows = document["payload"]["costs"]["operators"]["rows"]
    (here,) = (r for r in rows if r[0] == "cpu" and r[1].startswith("aten.tanh.def"))
    (there,) = (r for r in rows if r[0] == "cpu:1" and r[1] == here[1])
    here[2] += 1_000_000
    there[2] += 5
    there[3] = 777
    file.write_text(json.dumps(document))
    after = plan_small(file)
    assert after.cost_ns == before.cost_ns + 1_000_000
    (op,) = (op for op in after.graph.ops if op.name == "tanh")
    (was,) = (op for op in before.graph.ops if op.name == "tanh")
    assert op.cost_ns == (here[2], there[2], None)
    assert op.workspace_bytes[:2] == (was.workspace_bytes[0], 777)
    others = [(a, b) for a, b in zip(after.graph.ops, before.graph.ops, strict=True)]
    assert sum(a != b for a, b in others) == 1


def test_what_is_not_in_the_file_is_measured(
    measured: Platform, measures: list[str]
) -> None:
    def without(cost: MeasuredCost) -> MeasuredCost | None:
        return None if cost.operator.startswith("aten.tanh.default") else cost

    plan = plan_small(edited(measured, without))
    assert measures == ["aten.tanh.default"]
    (op,) = (op for op in plan.graph.ops if op.name == "tanh")
    assert op.cost_ns[0] == op.cost_ns[1]
    assert (op.cost_ns[0] or 0) > 0
    # Only on the other device: there it is what it is at home.
    one = edited(measured, lambda c: c if c.device == "cpu" else without(c))
    (op,) = (op for op in plan_small(one).graph.ops if op.name == "tanh")
    assert op.cost_ns[1] == op.cost_ns[0]


def test_no_cost_is_an_operator_that_cannot_run_there(measured: Platform) -> None:
    def unable(cost: MeasuredCost) -> MeasuredCost:
        is_meant = cost.device == "cpu:1" and cost.operator.startswith("aten.tanh.def")
        return replace(cost, cost_ns=None) if is_meant else cost

    plan = plan_small(edited(measured, unable))
    (op,) = (op for op in plan.graph.ops if op.name == "tanh")
    assert op.cost_ns[0] is not None
    assert op.cost_ns[1] is None

    def nowhere(cost: MeasuredCost) -> MeasuredCost:
        is_meant = cost.operator.startswith("aten.tanh.def")
        return replace(cost, cost_ns=None) if is_meant else cost

    with pytest.raises(InvalidPlatformError, match="'tanh' can run on none of the dev"):
        plan_small(edited(measured, nowhere))
    alone = Platform(
        devices=measured.devices[:1],
        costs=MeasuredCosts(
            operators=tuple(map(nowhere, measured.costs_on("cpu").values()))
        ),
    )
    with pytest.raises(InvalidPlatformError, match="'tanh' cannot run on 'cpu'"):
        plan_small(alone, "100%")


def test_a_platform_of_one_device_has_costs_too(
    measured: Platform, measures: list[str]
) -> None:
    costs = tuple(
        replace(cost, cost_ns=1000) for cost in measured.costs_on("cpu").values()
    )
    platform = Platform(
        devices=measured.devices[:1], costs=MeasuredCosts(operators=costs)
    )
    plan = plan_small(platform, "100%")
    assert measures == []
    assert {op.cost_ns[0] for op in plan.graph.ops if not op.is_external} <= {0, 1000}


def test_a_kind_scales_costs_and_gives_those_that_are_missing(
    measured: Platform, measures: list[str]
) -> None:
    kind = DeviceKind(
        name="cpu:1", time_percent=200, flops_per_s=10**12, bytes_per_s=10**12
    )
    devices = list(measured.devices)
    devices[1] = Device(name="cpu:1", kind="cpu:1")
    platform = replace(measured, devices=tuple(devices), kinds=(kind,))

    def without(cost: MeasuredCost) -> MeasuredCost | None:
        is_meant = cost.device == "cpu:1" and cost.operator.startswith("aten.tanh.def")
        return None if is_meant else cost

    plan = plan_small(edited(platform, without))
    assert measures == []
    costs = {op.name: op.cost_ns for op in plan.graph.ops}
    assert costs["addmm"][1] == 2 * (costs["addmm"][0] or 0)
    # From the rates: 2 KiB read and 2 KiB written at 10**12 B/s, twice as slow.
    assert costs["tanh"][1] == 2 * 5


def test_shapes_that_come_later_know_the_costs(
    measured: Platform, measures: list[str]
) -> None:
    model, x = small()
    remat.fit(model, x, budget=LIMITS, platform=measured, solver="store-all")
    assert measures == []
    model(x[:16].clone()).sum().backward()
    fitted = model._compiled_call_impl
    assert isinstance(fitted, FittedModel)
    assert fitted.planner.request.platform is not None
    assert fitted.planner.request.platform.costs == measured.costs
    # The parameters' operators have other shapes now, and are measured.
    assert "aten.addmm.default" in measures


def test_the_file_says_what_would_be_measured_on_another_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sizes(_: object, outputs: object) -> tuple[tuple[int, ...], bool]:
        # Meta tensors have no address by which to tell aliases.
        made = arguments.tensors_in(outputs)
        return tuple(t.untyped_storage().nbytes() for t in made), False

    monkeypatch.setattr(operators, "_output_sizes", sizes)
    kind = DeviceKind(name="m", runs_on="meta")
    platform = Platform(
        devices=(Device(name="cpu"), Device(name="m", kind="m")),
        links=fully_linked("ab", 10**9),
        kinds=(kind,),
    )
    budget = {"cpu": "1 GiB", "m": "1 GiB"}
    # Both find what was measured first in the cache.
    measured = with_measured_costs(platform, *small())
    graph = plan_small(platform, budget).graph
    assert plan_small(measured, budget).graph == graph
    on_meta = {op.cost_ns[1] for op in graph.ops if op.cost_ns[1] is not None}
    assert len(on_meta) > 5
    assert on_meta == {c.cost_ns for c in measured.costs_on("m").values()}


class TestElsewhere:
    """Planned here for devices of another machine, where they were measured."""

    def test_a_device_beside_home(
        self, measured: Platform, measures: list[str]
    ) -> None:
        platform = far_away(measured)
        budget = {"cpu": "1 GiB", "far": "1 GiB", "host": None}
        plan = plan_small(platform, budget)
        assert measures == []
        assert plan.platform.names == ("cpu", "far", "host")
        (op,) = (op for op in plan.graph.ops if op.name == "tanh")
        assert op.cost_ns[0] == op.cost_ns[1]
        # Blocks are as large as the larger of both makes them: 512 bytes at least.
        made = {s for op in plan.graph.ops if op.cost_ns[1] for s in op.writes}
        assert {plan.graph.storages[s].size_bytes % 512 for s in made} == {0}
        # The generator is at home.
        ordered = [op.cost_ns[1] for op in plan.graph.ops if op.is_ordered]
        assert ordered
        assert set(ordered) == {None}
        model, x = small()
        with pytest.raises(ExecutionError, match="'far', which is cuda:7, and this"):
            remat.fit(model, x, budget=budget, platform=platform, solver="store-all")
        assert model._compiled_call_impl is None

    @pytest.mark.parametrize("alone", [False, True])
    def test_home_itself(
        self, measured: Platform, measures: list[str], *, alone: bool
    ) -> None:
        platform, budget = far_away(measured, home=True), {"far": "1 GiB", "host": None}
        if alone:
            platform = replace(platform, devices=platform.devices[:1], links=())
            budget = {"far": "1 GiB"}
        plan = plan_small(platform, budget)
        assert measures == []
        # Blocks are rounded as that device's allocator does.
        assert {s.size_bytes % 512 for s in plan.graph.storages} == {0}
        assert plan.cost_ns > 0
        model, x = small()
        with pytest.raises(
            InvalidPlatformError, match="the model is on cpu, but no dev"
        ):
            remat.fit(model, x, budget=budget, platform=platform)

    @pytest.mark.parametrize("home", [False, True])
    def test_what_is_missing_is_named(self, measured: Platform, *, home: bool) -> None:
        platform = edited(
            far_away(measured, home=home),
            lambda c: None if c.operator.startswith("aten.tanh.def") else c,
        )
        words = (
            r"device 'far' \(cuda:7\) is not on this machine, and 1 of the step's "
            r"operators have no cost .*first aten.tanh.default\(float32 \[32, 16\]"
            r".*remat profile-platform FACTORY"
        )
        with pytest.raises(InvalidPlatformError, match=words):
            plan_small(platform, dict.fromkeys(platform.names, "1 GiB"))

    def test_a_device_without_any_costs(self) -> None:
        platform = Platform(
            devices=(Device(name="cpu"), Device(name="cuda:7", kind="cuda")),
            links=fully_linked(("cpu", "cuda:7"), 10**9),
        )
        words = (
            r"^device 'cuda:7' is not on this machine, and the platform has no costs"
        )
        with pytest.raises(InvalidPlatformError, match=words):
            plan_small(platform, dict.fromkeys(platform.names, "1 GiB"))
        with pytest.raises(
            InvalidPlatformError, match=r"'cuda:7' \(cuda:7\) is not on"
        ):
            with_measured_costs(platform, *small())


class TestFiles:
    """Whatever is wrong with the costs is one message, which names the place."""

    @pytest.mark.parametrize(
        ("path", "value", "words"),
        [
            (
                ("version",),
                99,
                r"platform\.costs are of version 99, .* reads version 1",
            ),
            (("version",), "1", r"platform\.costs\.version is \"1\""),
            (("environment",), [], r"costs\.environment is \[\]; it must be an object"),
            (("operators", "columns"), ["device"], r"operators\.columns is"),
            (("operators", "rows", 0, 0), "gpu", "no device .* is called 'gpu'"),
            (
                ("operators", "rows", 0, 2),
                -1,
                "cost_ns of the cost of .* is -1; it must",
            ),
            (("operators", "rows", 0, 2), 1.5, r"rows\[0\]\.cost_ns is 1\.5"),
            (("operators", "rows", 0, 4), [-8], "output_sizes_bytes of .* is -8"),
            (("operators", "rows", 0, 4), 8, r"output_sizes_bytes is 8; .* a list"),
            (("operators", "rows", 0, 5), 0, r"aliases_input is 0; .* true or false"),
            (
                ("operators", "rows", 0),
                ["cpu"],
                r"rows\[0\] is \[\"cpu\"\]; it must be a list of 8",
            ),
            (("operators",), None, r"costs\.operators is null"),
        ],
    )
    def test_damage(
        self, measured: Platform, tmp_path: Path, path: Any, value: Any, words: str
    ) -> None:
        file = tmp_path / "machine.json"
        save_platform(file, measured)
        document = json.loads(file.read_text())
        place = document["payload"]["costs"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        file.write_text(json.dumps(document))
        with pytest.raises(FileFormatError, match=words) as refused:
            plan_small(file)
        assert str(refused.value).startswith(str(file))

    def test_an_operator_twice(self, measured: Platform, tmp_path: Path) -> None:
        file = tmp_path / "machine.json"
        save_platform(file, measured)
        document = json.loads(file.read_text())
        rows = document["payload"]["costs"]["operators"]["rows"]
        rows.append(rows[0])
        file.write_text(json.dumps(document))
        with pytest.raises(FileFormatError, match="has two costs on device 'cpu'"):
            load_platform(file)

    def test_a_file_that_is_cut_short(self, measured: Platform, tmp_path: Path) -> None:
        file = tmp_path / "machine.json"
        save_platform(file, measured)
        file.write_text(file.read_text()[:-400])
        with pytest.raises(FileFormatError, match="damaged or cut short"):
            plan_small(file)

    @pytest.mark.parametrize("device", ["cpu", "cpu:1"])
    def test_a_cost_of_another_operator(self, measured: Platform, device: str) -> None:
        def other(cost: MeasuredCost) -> MeasuredCost:
            is_meant = cost.device == device and "tanh.def" in cost.operator
            return replace(cost, output_sizes_bytes=(4, 4)) if is_meant else cost

        words = (
            f"aten.tanh.default on device '{device}' has 2 output sizes, but .* 1 out"
        )
        with pytest.raises(InvalidPlatformError, match=words):
            plan_small(edited(measured, other))

    @pytest.mark.parametrize("device", ["cpu", "cpu:1"])
    @pytest.mark.parametrize("change", [-1, 1])
    def test_an_output_of_another_size(
        self, measured: Platform, device: str, change: int
    ) -> None:
        def other(cost: MeasuredCost) -> MeasuredCost:
            if cost.device != device or "tanh.def" not in cost.operator:
                return cost
            (size_bytes,) = cost.output_sizes_bytes
            return replace(cost, output_sizes_bytes=(size_bytes + change,))

        if change > 0:
            # Kernels may round up.
            plan_small(edited(measured, other))
            return
        words = "output takes 2047 bytes, but its elements alone take 2048"
        with pytest.raises(InvalidPlatformError, match=words):
            plan_small(edited(measured, other))


def test_costs_of_several_models_come_together(measured: Platform) -> None:
    model, x = nn.Linear(3, 5), torch.ones(2, 3)
    both = with_measured_costs(measured, model, x)
    assert both.costs is not None
    assert measured.costs is not None
    assert set(measured.costs.operators) < set(both.costs.operators)
    new = MeasuredCost(device="cpu", operator="a", cost_ns=1)
    old = MeasuredCosts(operators=(replace(new, cost_ns=2), replace(new, device="x")))
    found = merged(old, MeasuredCosts(operators=(new,)))
    assert found.operators == (old.operators[1], new)


def test_the_model_must_be_on_a_device_of_the_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform_profile, "platform_costs", lambda *_: 1 // 0)
    with pytest.raises(
        InvalidPlatformError, match="the model is on cpu, but no device"
    ):
        with_measured_costs(logical("host", "host:1"), *small())


def test_the_command_measures_and_plans_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measures: list[str]
) -> None:
    file = str(tmp_path / "machine.json")
    words = ["profile-platform", SCRIPT, "--device", "cpu", "--device", "cpu:1"]
    words += ["--budget", "cpu=1GiB", "--budget", "cpu:1=1GiB", "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remat.profile.estimate.measure_rates", _rates)
        assert cli.main([*words, "--output", file]) == 0
    text = capsys.readouterr().out
    assert "operators\n  cpu: " in text
    assert load_platform(file).costs is not None
    assert measures
    measures.clear()
    plan = ["plan", SCRIPT, "--platform", file, "--solver", "store-all", "--quiet"]
    assert cli.main([*plan, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert measures == []
    assert facts["cost_ns"] > 0
    document = json.loads(Path(file).read_text())
    document["payload"]["costs"]["version"] = 2
    Path(file).write_text(json.dumps(document))
    assert cli.main(plan) == 2
    error = capsys.readouterr().err
    assert "platform.costs are of version 2" in error


def test_a_curve_of_one_device_takes_its_costs_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measures: list[str]
) -> None:
    file = tmp_path / "machine.json"
    words = ["profile-platform", SCRIPT, "--device", "cpu", "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remat.profile.estimate.measure_rates", _rates)
        assert cli.main([*words, "--output", str(file)]) == 0
    platform = load_platform(file)
    assert platform.costs is not None
    costs = tuple(replace(c, cost_ns=1000) for c in platform.costs.operators)
    save_platform(file, replace(platform, costs=MeasuredCosts(operators=costs)))
    measures.clear()
    capsys.readouterr()
    curve = ["curve", SCRIPT, "--platform", str(file), "--points", "2", "--json"]
    assert cli.main([*curve, "--quiet"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert measures == []
    assert facts["baseline_cost_ns"] % 1000 == 0
    save_platform(file, replace(platform, costs=None))
    assert cli.main([*curve, "--quiet"]) == 2
    assert "has the device 'cpu' only" in capsys.readouterr().err


def _rates(*_: object, **__: object) -> remat.profile.Rates:
    return remat.profile.Rates(flops_per_s=1, bytes_per_s=1, launch_ns=0)
