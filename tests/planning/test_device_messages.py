"""What is said where several devices cannot do it: the cause first, and what helps."""

import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device_schedules import logical
from tests.instances import mlp_chain
from tests.planning.test_homes import known_for_both
from tests.planning.test_several_devices import one_way_graph
from torch import nn

import remat
from remat import cli
from remat.core.errors import BudgetError, InvalidPlatformError, UnitError
from remat.core.graph import TrainingGraph
from remat.core.platform import Device, DeviceKind, Link, Platform, single_device
from remat.files.serialisation import save_graph, save_platform
from remat.planning.one_device import plan_graph
from remat.planning.plan import loss_hint


def linked(*pairs: tuple[int, int]) -> Platform:
    """Return devices ``a`` and ``b`` with these links."""
    return Platform(
        devices=(Device(name="a", kind="a"), Device(name="b", kind="b")),
        links=tuple(Link(source=a, target=b, bytes_per_s=10**9) for a, b in pairs),
        kinds=tuple(DeviceKind(name=name, runs_on=name) for name in "ab"),
    )


A, A1 = Device(name="a", kind="a"), Device(name="a1", kind="a")


class TestLinks:
    @pytest.mark.parametrize(
        ("pairs", "words"),
        [
            (
                (),
                "^op 1 'second' can run on 'b', .* storage 1 'y' from 'a' to 'b': add",
            ),
            (((1, 0),), "^op 1 'second' .* 'y' from 'a' to 'b': add a link$"),
            (((0, 1),), "^storage 2 'z' must be on device 'a', .*computed, 'b': add a"),
        ],
    )
    def test_a_link_that_every_schedule_needs(
        self, pairs: tuple[tuple[int, int], ...], words: str
    ) -> None:
        budget = {"a": 100, "b": 100}
        with pytest.raises(InvalidPlatformError, match=words):
            plan_graph(one_way_graph(), budget=budget, platform=linked(*pairs))

    def test_the_command_says_so_as_wrong_input(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        graph, machine = tmp_path / "graph.json", tmp_path / "machine.json"
        save_graph(graph, one_way_graph())
        save_platform(machine, linked((1, 0)))
        words = ["plan", "--graph", str(graph), "--platform", str(machine), "--quiet"]
        assert cli.main([*words, "--budget", "a=100", "--budget", "b=100"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(
            "remat: error: op 1 'second' can run on 'b', but no links"
        )
        assert len(error.splitlines()) == 1

    def test_a_link_that_these_budgets_need_comes_first(self) -> None:
        graph = replace(known_for_both(mlp_chain(4).graph), device_kinds=("a", "b"))
        budget = {"a": 300_000, "b": 10**6}
        words = (
            r"^op 10 'relu3 backward' can run on 'b', .* to 'b': add a link; nothing"
        )
        with pytest.raises(BudgetError, match=words) as refused:
            plan_graph(graph, budget=budget, platform=linked(), time_limit=1)
        assert "tried" not in str(refused.value)
        linked_both = linked((0, 1), (1, 0))
        plan = plan_graph(graph, budget=budget, platform=linked_both, time_limit=5)
        assert plan.trace.is_valid

    def test_missing_links_are_named_where_nothing_is_proved(self) -> None:
        graph = mlp_chain(4).graph
        ring = Platform(
            devices=logical("cpu", "host", "host:1").devices,
            links=tuple(
                Link(source=a, target=b, bytes_per_s=10**9)
                for a, b in ((0, 1), (1, 2), (2, 0))
            ),
        )
        words = (
            r"^none that .* fits in .* with no link from 'cpu' to 'host:1', "
            "from 'host' to 'cpu', from 'host:1' to 'host'; "
        )
        with pytest.raises(BudgetError, match=words):
            plan_graph(
                graph,
                budget={"cpu": "366 KiB", "host": 1, "host:1": 1},
                platform=ring,
                solver="store-all",
            )


class TestHome:
    """The model's device is among the names, and it is the one of that name."""

    @pytest.mark.parametrize(
        "budget",
        [{"cpu:1": "90%"}, {"cpu:1": 10**9, "cpu:2": 10**9}, {"host": 10**9}],
        ids=str,
    )
    def test_it_has_a_budget(self, budget: Any) -> None:
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
        words = "^the model is on cpu, which has no budget: .*; add one for 'cpu'"
        for function in (remat.plan, remat.fit, remat.verify):
            with pytest.raises(InvalidPlatformError, match=words):
                function(model, x, budget=budget, costs="estimated")
        assert model._compiled_call_impl is None

    def test_the_name_decides_and_not_the_order(self) -> None:
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
        budget = {"cpu:1": 10**8, "cpu": 10**9}
        options: Any = {"budget": budget, "costs": "estimated", "time_limit": 1}
        for platform in (None, logical("cpu:1", "cpu")):
            plan = remat.plan(model, x, platform=platform, **options)
            assert plan.platform.names == ("cpu", "cpu:1")
            assert plan.budget_bytes == 10**9
        graph = mlp_chain(3).graph
        placed = plan_graph(graph, budget=budget, platform=logical("cpu:1", "cpu"))
        assert placed.platform.names == ("cpu", "cpu:1")

    def test_a_platform_may_call_it_anything(self) -> None:
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
        platform = logical("host", "cpu:1", "cpu:2")
        budget: Any = dict.fromkeys(platform.names, 10**9)
        plan = remat.plan(
            model, x, budget=budget, platform=platform, costs="estimated", time_limit=1
        )
        assert plan.platform.names[0] == "cpu:1"


WIDE = nn.Linear(4, 4096)
X = torch.ones(64, 4)


class TestLoss:
    """A loss that nobody described is guessed, which is said where it matters."""

    @pytest.mark.parametrize(
        "budget",
        [
            "4 MiB",
            {"cpu": "4 MiB", "host": "1 GiB"},
            {"cpu": "4 MiB", "cpu:1": "1 KiB"},
        ],
        ids=str,
    )
    def test_describing_it_is_suggested_and_helps(self, budget: Any) -> None:
        options: Any = {"budget": budget, "costs": "estimated", "time_limit": 2}
        words = r"the loss is not described, so \d.* MiB for it are a guess: give loss="
        with pytest.raises(BudgetError, match=words) as refused:
            remat.plan(WIDE, X, **options)
        assert refused.value.budget_bytes == 4 << 20
        plan = remat.plan(WIDE, X, loss=lambda y: y.mean(), **options)
        assert plan.peak_bytes <= 4 << 20

    @pytest.mark.parametrize("budget", ["1 MiB", {"cpu": "1 MiB", "host": "1 GiB"}])
    def test_a_described_loss_is_no_guess(self, budget: Any) -> None:
        with pytest.raises(BudgetError) as refused:
            remat.plan(
                WIDE, X, budget=budget, loss=lambda y: y.mean(), costs="estimated"
            )
        assert "loss is not described" not in str(refused.value)

    def test_a_loss_inside_the_model_is_no_guess(self) -> None:
        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = WIDE

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x).square().mean()

        with pytest.raises(BudgetError) as refused:
            remat.plan(Inside(), X, budget="1 MiB", costs="estimated")
        assert "loss is not described" not in str(refused.value)

    def test_the_op_at_fault_counts_whole(self) -> None:
        plan = remat.plan(WIDE, X, budget="1 GiB", costs="estimated")
        index = next(i for i, op in enumerate(plan.graph.ops) if op.is_external)
        platform = single_device(kind=plan.graph.device_kinds[0])
        at_fault = f"op {index} {plan.graph.ops[index].name!r} fits on no device"
        hint = loss_hint(plan.graph, plan.schedule, plan.trace, platform, at_fault)
        # Four times the outputs, and some scalars.
        assert "so 4.00 MiB for it are a guess" in hint


def nowhere_graph() -> TrainingGraph:
    """Return a graph of which op 1 runs on a kind that no device is of."""
    graph = one_way_graph()
    return replace(graph, device_kinds=("a", "c"))


BELOW = {"cpu": "200 KiB", "host": "1 MiB"}


class TestEachWay:
    """The same error in Python, and one line with the right exit code in the shell."""

    @pytest.mark.parametrize(
        ("graph", "platform", "budget", "code", "error", "words"),
        [
            (
                mlp_chain(4).graph,
                logical("cpu", "host"),
                {"cpu": "1 MiB", "host": "0"},
                2,
                UnitError,
                "device 'host': the budget '0' is 0 bytes; it must be positive",
            ),
            (
                mlp_chain(4).graph,
                Platform(devices=logical("cpu", "host").devices),
                {"cpu": "1 MiB", "host": "1 MiB"},
                2,
                InvalidPlatformError,
                "no links lead to device 'host', .* link between 'cpu' and 'host'",
            ),
            (
                nowhere_graph(),
                replace(linked((0, 1), (1, 0)), devices=(A, A1)),
                {"a": "1 MiB", "a1": "1 MiB"},
                2,
                InvalidPlatformError,
                "op 1 'second' can run on none of the devices a, a1",
            ),
            (
                mlp_chain(4).graph,
                logical("cpu", "host"),
                {"cpu": "90 KiB", "host": "1 MiB"},
                1,
                BudgetError,
                "device 'cpu' holds 128.00 KiB .* parameter.* of 92_160 bytes.* smallest",
            ),
            (
                mlp_chain(4).graph,
                logical("cpu", "host"),
                BELOW,
                1,
                BudgetError,
                "op 1 'relu0' fits on no device: it needs 128.00 KiB beside .* 'cpu'",
            ),
        ],
        ids=["no memory", "no link", "no device for an op", "residents", "floor"],
    )
    def test_bad_input(
        self,
        graph: TrainingGraph,
        platform: Platform,
        budget: dict[str, str],
        code: int,
        error: type[Exception],
        words: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        with pytest.raises(error, match=f"^{words}"):
            plan_graph(graph, budget=budget, platform=platform, time_limit=1)
        save_graph(tmp_path / "graph.json", graph)
        save_platform(tmp_path / "machine.json", platform)
        before = sorted(tmp_path.iterdir())
        line = ["plan", "--graph", str(tmp_path / "graph.json"), "--quiet"]
        line += ["--platform", str(tmp_path / "machine.json"), "--time-limit", "1"]
        line += [f"--budget={name}={size}" for name, size in budget.items()]
        assert cli.main([*line, "--output", str(tmp_path / "plan.json")]) == code
        said = capsys.readouterr().err
        assert re.match(f"remat: error: {words}", said)
        assert len(said.splitlines()) == 1
        assert sorted(tmp_path.iterdir()) == before

    def test_known_budgets_are_named_where_residents_do_not_fit(self) -> None:
        with pytest.raises(BudgetError) as refused:
            plan_graph(
                mlp_chain(4).graph,
                budget={"cpu": "90 KiB", "host": None},
                platform=logical("cpu", "host"),
            )
        error = refused.value
        assert error.budget_by_device == {"cpu": 90 << 10, "host": None}
        assert error.required_bytes == error.required_by_device["cpu"] > 128 << 10
        assert not error.is_known_to_fit
        plan = plan_graph(
            mlp_chain(4).graph,
            budget=error.required_by_device,
            platform=logical("cpu", "host"),
            time_limit=1,
        )
        assert plan.peak_bytes <= error.required_bytes

    def test_the_exit_code_looks_at_every_device(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        graph, platform = mlp_chain(4).graph, logical("cpu", "host")
        with pytest.raises(BudgetError) as refused:
            plan_graph(graph, budget=BELOW, platform=platform, time_limit=1)
        known = refused.value.required_by_device
        assert known["host"] > 1
        save_graph(tmp_path / "graph.json", graph)
        save_platform(tmp_path / "machine.json", platform)
        line = ["plan", "--graph", str(tmp_path / "graph.json"), "--quiet", "--json"]
        line += ["--platform", str(tmp_path / "machine.json"), "--solver", "store-all"]
        home = f"--budget=cpu={known['cpu']}"
        # Enough at home, and too little beside it.
        assert cli.main([*line, home, "--budget=host=1"]) == 1
        facts = json.loads(capsys.readouterr().out)["error"]
        assert facts["budget_by_device"] == {"cpu": known["cpu"], "host": 1}
        assert facts["required_bytes"] > facts["budget_bytes"]
        # Enough everywhere, but not for this solver.
        assert cli.main([*line, home, f"--budget=host={known['host']}"]) == 3
        assert "use solver='auto'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "known", "fits", "code"),
    [
        ({"a": 5, "b": 1}, {"a": 4, "b": 2}, False, 1),
        ({"a": 5, "b": 2}, {"a": 4, "b": 2}, True, 3),
        ({"a": 5, "b": None}, {"a": 5, "b": 2}, True, 3),
        ({"a": 3, "b": None}, {"a": 4, "b": 2}, False, 1),
        ({"a": 5, "b": 1}, {}, False, 3),
    ],
)
def test_what_was_asked_for_is_compared_on_every_device(
    asked: dict[str, int | None],
    known: dict[str, int],
    *,
    fits: bool,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    error = BudgetError(
        "no",
        budget_bytes=asked["a"] or 0,
        required_bytes=known.get("a", asked["a"] or 0),
        required_by_device=known,
        budget_by_device=asked,
    )
    assert error.is_known_to_fit is fits
    assert pickle.loads(pickle.dumps(error)).budget_by_device == asked

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("remat.cli.commands.plan.plan_graph", refuse)
    save_graph(tmp_path / "graph.json", mlp_chain(3).graph)
    words = ["plan", "--graph", str(tmp_path / "graph.json"), "--budget", "1GB"]
    assert cli.main([*words, "--quiet"]) == code


_WITHOUT_LIBRARY = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ortools":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
from remat.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("solver", "devices"),
    [("xengine", 2), ("checkmate", 1), ("moccasin", 1), ("min-cut-retention", 1)],
)
def test_a_missing_solver_library_is_named(
    tmp_path: Path, solver: str, devices: int
) -> None:
    save_graph(tmp_path / "graph.json", mlp_chain(4).graph)
    save_platform(tmp_path / "machine.json", logical("cpu", "host"))
    words = ["plan", "--graph", "graph.json", "--solver", solver, "--quiet"]
    words += ["--output", "plan.json"]
    if devices == 1:
        words += ["--budget", "375KiB"]
    else:
        words += ["--platform", "machine.json", "--budget", "cpu=366KiB"]
        words += ["--budget", "host=1MiB"]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_LIBRARY, *words],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "needs the library OR-tools" in done.stderr
    assert "pip install 'ortools" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "plan.json").exists()
