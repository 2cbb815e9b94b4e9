"""The study of joins: models train, shares are fixed, tables say what was recorded."""

import json
from pathlib import Path

import pytest
import torch
from studies.join_curves import (
    budgets_of,
    cheapest,
    plans_split,
    plans_together,
    shares_of,
    static_split_ns,
    weighed,
)
from studies.join_networks import JOINS, resnet101
from studies.models import Options
from tests.instances import joined_towers

import remat
from remat.algorithms.chains.stage_joins import StageJoin, plan_stage_join
from remat.reductions.joins import JoinOfStages, reduce_to_join
from studies import join_tables

TINY = Options(tiny=True)


@pytest.mark.parametrize(
    "build", [*JOINS.values(), resnet101], ids=lambda b: b.__name__
)
@pytest.mark.parametrize("is_loss_inside", [False, True])
def test_step_gives_finite_loss_and_every_gradient(build, is_loss_inside: bool) -> None:
    workload = build(Options(tiny=True, is_loss_inside=is_loss_inside))
    loss = workload.training_loss()
    loss.backward()
    assert loss.shape == ()
    assert torch.isfinite(loss)
    for name, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def a_join() -> tuple[JoinOfStages, StageJoin]:
    forms = reduce_to_join(joined_towers((4, 4)).graph)
    assert forms is not None
    assert forms.join is not None
    return forms.join, forms.join.join()


def test_fixed_shares_are_never_better_in_the_program() -> None:
    _, whole = a_join()
    shares = shares_of(whole, 12)
    compared = 0
    for budget in budgets_of(whole, 8):
        apart = static_split_ns(whole, shares, budget)
        together = plan_stage_join(whole, budget, slots=2000)
        assert together is not None
        if apart is not None:
            compared += 1
            assert together.cost_ns <= apart
    assert 2 <= compared < 8


def test_every_plan_is_weighed_by_its_true_bytes() -> None:
    form, whole = a_join()
    apart = weighed(form, plans_split(whole))
    together = weighed(form, plans_together(whole, 20))
    least = sum(op.cost_ns[0] or 0 for op in form.graph.ops)
    assert min(cost for _, cost in apart) == min(cost for _, cost in together) == least
    tightest = min(peak for peak, _ in together)
    assert cheapest(together, tightest) is not None
    assert cheapest(together, tightest - 1) is None
    high = max(peak for peak, _ in apart)
    steps = [cheapest(apart, high * share // 8) for share in range(3, 9)]
    known = [cost for cost in steps if cost is not None]
    assert known == sorted(known, reverse=True)
    assert len(set(known)) > 1


def test_tables_hold_the_lines_that_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"study": "measured", "tiny": False, "model": "siamese", "status": "ok"}
    lines = [
        shared
        | {
            "peer": "two segments",
            "peer_peak_bytes": 2**20,
            "peer_slowdown": 1.25,
            "solver": "Join",
            "candidates": [],
            "measured_peak_bytes": 2**19,
            "is_within_budget": True,
            "slowdown": 1.0625,
            "time_over_peer": 0.85,
            "differs_from_eager": 0,
            "differs_from_captured": 0,
        },
        {
            "study": "curves",
            "curve": "judged",
            "model": "siamese",
            "commit": "a",
            "budget_bytes": 50,
            "plain_peak_bytes": 100,
            "least_ns": 100,
            "split_ns": None,
            "together_ns": 120,
            "solver_ns": 110,
        },
    ]
    file, page = tmp_path / "joins.jsonl", tmp_path / "page.md"
    file.write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    marks = (
        f"<!-- {name} -->old<!-- end {name} -->" for name in ("measured", "curves")
    )
    page.write_text("before " + " ".join(marks) + " after", encoding="utf-8")
    monkeypatch.setattr(join_tables, "FILE", file)
    monkeypatch.setattr(join_tables, "PAGE", page)
    join_tables.write_tables()
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith("before ")
    assert text.endswith(" after")
    assert (
        "| siamese | two segments | 1.0 MiB | 1.25 x | `join` | 0.5 MiB | yes | 1.06 x "
        "| 0.85 | yes |"
    ) in text
    assert "| siamese | 50% | impossible | 20.0 % | 10.0 % |" in text


@pytest.mark.parametrize("name", JOINS)
def test_a_real_model_trains_within_the_budget_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    workload = JOINS[name](TINY)
    with torch.random.fork_rng():
        report = remat.verify(
            workload.model,
            workload.args,
            budget="92%",
            loss=workload.loss,
            solver="join",
            # Measured times of so small an unequal tower may come out negligible.
            costs="estimated" if name == "clip" else "measured",
            repeats=1,
        )
    assert report.is_within_budget
    assert report.plan.solver == "Join"
    assert report.is_exact
