"""What is said where several devices cannot do it: the cause first, and what helps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import cli
from remat.errors import BudgetError, InvalidPlatformError
from remat.graph_planning import plan_graph
from remat.platform import Device, DeviceKind, Link, Platform, single_device
from remat.serialisation import save_graph, save_platform
from remat.training_plan import loss_hint
from tests.device_schedules import logical
from tests.instances import mlp_chain
from tests.test_device_planning import one_way_graph
from tests.test_homes import known_for_both


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "costs"
    monkeypatch.setenv("REMAT_CACHE_DIR", str(folder))


def linked(*pairs: tuple[int, int]) -> Platform:
    """Return devices ``a`` and ``b`` with these links."""
    return Platform(
        devices=(Device(name="a", kind="a"), Device(name="b", kind="b")),
        links=tuple(Link(source=a, target=b, bytes_per_s=10**9) for a, b in pairs),
        kinds=tuple(DeviceKind(name=name, runs_on=name) for name in "ab"),
    )


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
