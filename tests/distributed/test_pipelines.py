"""Stages of a pipeline within budgets: bitwise, as predicted, for kinds of schedule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import pipeline
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from remat.capture.surroundings import SCALARS_BYTES
from remat.core.errors import BudgetError
from remat.core.units import format_bytes
from remat.integrations.pipelining import fit_stage, plan_stages
from remat.profile.memory import measure
from remat.training.fitted_model import fitted_on
from tests.distributed.processes import in_processes

WIDTH, ROWS, MICROBATCHES = 64, 256, 4
CPU = torch.device("cpu")
X, TARGET = (
    torch.randn(
        ROWS * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(seed)
    )
    for seed in (3, 4)
)
KINDS: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}
NO_OUTPUTS = "GPipe without outputs"
BUDGETS = {
    "GPipe": (35, 38),
    "1F1B": (53, 75),
    "Interleaved1F1B": (65, 70, 80, 100),
}
"""For each stage, in per cent of its plain peak; the last one keeps less."""

LETS_GO = hasattr(PipelineStage, "release_fwd_send_outputs")
"""Whether a stage lets go of what it has sent; its plan counts that all the same."""


class Block(nn.Module):
    """A residual block with a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(x))
        return x + self.dropout(self.down(hidden))


def part(index: int, depth: int) -> nn.Module:
    """Return the module of a stage."""
    torch.manual_seed(index)
    return nn.Sequential(*(Block() for _ in range(depth)))


def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, target)


class Pipeline:
    """What one process has of a pipeline."""

    def __init__(self, rank: int, kind: str, *, count: int) -> None:
        self.rank, self.kind, self.keeps_gradients = rank, kind, False
        self.returns_outputs = True
        own = range(rank, count, 2)
        self.parts = nn.ModuleList([part(index, 8 // count) for index in own])
        self.optimizers = [
            torch.optim.AdamW(module.parameters()) for module in self.parts
        ]
        self.stages = [
            PipelineStage(module, index, count, CPU)
            for index, module in zip(own, self.parts, strict=True)
        ]
        given: Any = self.stages if len(self.stages) > 1 else self.stages[0]
        self.schedule = KINDS[kind](given, MICROBATCHES, loss_fn=loss)

    def fit(self, budgets: list[int | str], **options: Any) -> list[Any]:
        """Give each stage a budget."""
        plans: list[Any] = []
        for stage, optimizer, budget in zip(
            self.stages, self.optimizers, budgets, strict=True
        ):
            target = TARGET[:ROWS] if stage.is_last else None
            plans.append(
                fit_stage(
                    stage,
                    self.schedule,
                    X[:ROWS],
                    target=target,
                    budget=budget,
                    optimizer=optimizer,
                    costs="estimated",
                    return_outputs=self.returns_outputs,
                    **options,
                )
            )
        return plans

    def step(self) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        first = (X,) if self.rank == 0 else ()
        last = {} if self.rank == 0 else {"target": TARGET, "losses": losses}
        self.schedule.step(*first, **last, return_outputs=self.returns_outputs)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return [each.detach() for each in losses]

    def run(self) -> list[torch.Tensor]:
        torch.manual_seed(7)
        losses = self.step() + self.step()
        return [*losses, *(p.detach().clone() for p in self.parts.parameters())]

    def peak_bytes(self) -> int:
        # Of X and TARGET a process has what it is given.
        resident = [self.parts, self.optimizers, TARGET if self.rank else X]
        for stage in self.stages:
            infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
            # torch 2.11 has none where nothing is received.
            resident += [getattr(i, "buffer", None) for each in infos for i in each]
        return measure(self.step, warmup=1, repeats=0, resident=resident).peak_bytes


def largest(module: nn.Module) -> int:
    """Return the largest peak of the plans of a stage, with gradients and without."""
    fitted = fitted_on(module)
    assert fitted is not None
    return max(plan.peak_bytes for plan in fitted.planner.plans.values())


def run(
    rank: int, kind: str, count: int, *, returns_outputs: bool = True
) -> dict[str, Any]:
    """Return what one process finds."""
    plain, planned = (Pipeline(rank, kind, count=count) for _ in range(2))
    plain.returns_outputs = planned.returns_outputs = returns_outputs
    expected = plain.run()
    measured = plain.peak_bytes()
    plans = planned.fit([f"{BUDGETS[kind][s.stage_index]}%" for s in planned.stages])
    fitted = [fitted_on(module) for module in planned.parts]
    before = [each.planner.planned_count for each in fitted if each]
    found = planned.run()
    after = [each.planner.planned_count for each in fitted if each]
    return {
        "planned_later": [after[n] - before[n] for n in range(len(planned.parts))],
        "is_equal": all(
            torch.equal(one, other) for one, other in zip(found, expected, strict=True)
        ),
        "plain": measured,
        "peak": planned.peak_bytes(),
        "budgets": [plan.budget_bytes for plan in plans],
        "predicted": [largest(module) for module in planned.parts],
        "in_flight": [plan.in_flight for plan in plans],
        "recomputed": sum(plan.recomputed_op_count for plan in plans),
        "baseline": [plan.baseline_peak_bytes for plan in plans],
    }


def kept_gradients(rank: int) -> dict[str, Any]:
    """Return how gradients that stay between steps are kept within a budget."""
    plain, planned = (Pipeline(rank, "GPipe", count=2) for _ in range(2))
    plain.keeps_gradients = planned.keeps_gradients = True
    (plan,) = planned.fit(["45%"], accumulate=True)
    expected, found = plain.run(), planned.run()
    (module,) = planned.parts
    fitted = fitted_on(module)
    assert fitted is not None
    return {
        "is_equal": all(map(torch.equal, found, expected)),
        "plain": plain.peak_bytes(),
        "baseline": plan.baseline_peak_bytes,
        "budget": plan.budget_bytes,
        "peak": planned.peak_bytes(),
        "predicted": largest(module),
        "schedules": {p.schedule for p in fitted.planner.plans.values()},
    }


def refusals(rank: int) -> list[str]:
    """Return what is said of stages that cannot be fitted."""
    stages: list[Any] = [PipelineStage(part(i, 1), i, 4, CPU) for i in (rank, rank + 2)]
    split = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=loss)
    without = ScheduleInterleaved1F1B(stages, MICROBATCHES)
    good = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss)
    last = stages[1]
    calls: list[Callable[[], object]] = [
        lambda: fit_stage(last, split, X, budget="1 GiB"),
        lambda: fit_stage(last, without, X, budget="1 GiB"),
        lambda: fit_stage(last.submod, good, X, budget="1 GiB"),
        lambda: fit_stage(last, good, X, budget="1 GiB", in_flight=2),
        lambda: fit_stage(last, good, X, budget="1 GiB", regions="blocks"),
    ]
    if rank:
        calls.append(lambda: fit_stage(last, good, X, budget="1 GiB"))
    found: list[str] = []
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


def run_all(rank: int) -> dict[str, Any]:
    """Return what one process finds of all kinds."""
    found: dict[str, Any] = {
        kind: run(rank, kind, 4 if kind == "Interleaved1F1B" else 2) for kind in KINDS
    }
    found[NO_OUTPUTS] = run(rank, "GPipe", 2, returns_outputs=False)
    found["kept gradients"] = kept_gradients(rank)
    return {**found, "refusals": refusals(rank), "example": pipeline.train()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Return what each of two processes found."""
    return in_processes(run_all)


@pytest.mark.parametrize("kind", [*KINDS, NO_OUTPUTS])
def test_stages_keep_their_budgets_bit_for_bit(
    kind: str, found: list[dict[str, Any]]
) -> None:
    for each in (process[kind] for process in found):
        assert each["is_equal"]
        assert not any(each["planned_later"])
        assert each["recomputed"] > 0
        assert each["peak"] <= sum(each["budgets"]) < each["plain"]
        if len(each["budgets"]) == 1:
            over_bytes = each["predicted"][0] - each["peak"]
            sent = each["in_flight"][0] + 1 if LETS_GO else 0
            assert 0 <= over_bytes <= SCALARS_BYTES + sent * X[:ROWS].nbytes


def test_gradients_that_stay_between_steps_are_counted(
    found: list[dict[str, Any]],
) -> None:
    for each in (process["kept gradients"] for process in found):
        assert each["is_equal"]
        assert each["peak"] <= each["predicted"] <= each["budget"] < each["plain"]
        assert each["plain"] <= each["baseline"]
        assert len(each["schedules"]) == 1


def test_each_schedule_gives_stages_their_passes_in_flight(
    found: list[dict[str, Any]],
) -> None:
    in_flight = {kind: [each[kind]["in_flight"] for each in found] for kind in KINDS}
    assert in_flight == {
        "GPipe": [[4], [4]],
        "1F1B": [[2], [1]],
        "Interleaved1F1B": [[4, 2], [3, 1]],
    }


def test_the_example_learns(found: list[dict[str, Any]]) -> None:
    first, second, third = found[1]["example"]
    assert found[0]["example"] == []
    assert first > second > third


def test_what_cannot_be_fitted_is_refused(found: list[dict[str, Any]]) -> None:
    words = ["splits its backward", "no loss", "stage is of type Sequential"]
    words += ["takes in_flight from the schedule", "as one graph", "needs a target"]
    for rank, process in enumerate(found):
        said = process["refusals"]
        assert len(said) == len(words) - 1 + rank
        for text, message in zip(words, said, strict=False):
            assert text in message


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_the_report_is_what_the_stages_are_planned_for(
    schedule: str, found: list[dict[str, Any]]
) -> None:
    parts = [part(index, 4) for index in range(2)]
    optimizers = [torch.optim.AdamW(module.parameters()) for module in parts]
    report = plan_stages(
        parts,
        X[:ROWS],
        microbatches=MICROBATCHES,
        loss_fn=loss,
        target=TARGET[:ROWS],
        budget="1 GiB",
        schedule=schedule,
        optimizers=optimizers,
        costs="estimated",
    )
    rows = str(report).splitlines()
    assert len(rows) == 3
    for plan, each, row in zip(report.plans, found, rows[1:], strict=True):
        assert plan.baseline_peak_bytes == each[schedule]["baseline"][0]
        assert row.split()[1] == str(each[schedule]["in_flight"][0])
        assert format_bytes(plan.peak_bytes) in row


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "DualPipe"}, "'1F1B' or 'GPipe'"),
        ({"microbatches": 0}, "0 microbatches"),
        ({"optimizers": []}, "0 optimizers"),
        ({"target": None}, "needs a target"),
        ({"dynamic": {0: {0: (2, 8)}}}, "microbatches of one shape"),
    ],
)
def test_reports_of_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"microbatches": 2, "loss_fn": loss, "target": TARGET}
    with pytest.raises(ValueError, match=words):
        plan_stages([nn.Linear(WIDTH, 1)], X, budget="1 GiB", **{**given, **options})


def test_the_stage_that_has_no_plan_is_named() -> None:
    with pytest.raises(BudgetError) as error:
        plan_stages(
            [nn.Linear(WIDTH, WIDTH)],
            X[:1],
            microbatches=2,
            loss_fn=loss,
            target=TARGET[:1],
            budget="1 kB",
            costs="estimated",
        )
    assert "stage 0 of 1" in error.value.__notes__[0]
