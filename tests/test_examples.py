"""The examples run as they stand, and the demo notices a broken promise."""

import re
import runpy
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
from examples import demo
from examples.workloads import TrainingTask
from torch import nn
from torch.nn import functional

import remat

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples/quickstart.py"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers, nn.BatchNorm1d(32))


def make_batches():
    torch.manual_seed(1)
    return repeat((torch.randn(512, 32), torch.randn(512, 32)))


TINY = TrainingTask(
    name="tiny model",
    make_model=make_model,
    batches=make_batches,
    loss=functional.mse_loss,
    make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The demo's arguments for a model that trains in a millisecond."""
    monkeypatch.setitem(demo.TASKS, "tiny", TINY)
    output = str(tmp_path / "new" / "folder")
    return ["--models", "tiny", "--budget", "85%", "--steps", "4", "--output", output]


def test_the_readme_shows_the_quickstart() -> None:
    block = re.search(
        r"```python\n(import torch\n.*?)```",
        (ROOT / "README.md").read_text(),
        re.DOTALL,
    )
    assert block is not None
    code = QUICKSTART.read_text().split('"""', 2)[2]

    def normal(text: str) -> str:
        return re.sub(r"\s", "", text)

    assert normal(block[1]) == normal(code)


def test_quickstart_runs_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(QUICKSTART))
    plan = names["plan"]
    assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    assert capsys.readouterr().out == f"{plan}\n"
    remat.release(names["model"])


def test_demo_keeps_every_promise(words: list[str], tmp_path: Path, capsys) -> None:
    assert demo.main(words) == 0
    text = capsys.readouterr().out
    assert "under the budget" in text
    # Six linear layers and a batch norm, which also has three buffers.
    assert "all 4 losses and all 17 parameters and buffers" in text
    assert "BROKEN" not in text
    assert (tmp_path / "new/folder/memory.png").stat().st_size > 10_000


def test_demo_notices_a_bit_that_differs(words: list[str], capsys, monkeypatch) -> None:
    train = demo.train

    def tampered(task, step_count, budget_bytes):
        run = train(task, step_count, budget_bytes)
        if budget_bytes is not None:
            run.state["0.0.bias"].view(torch.int32)[0] ^= 1
        return run

    monkeypatch.setattr(demo, "train", tampered)
    assert demo.main(words) == 1
    assert "BROKEN: 1 values differ: 0.0.bias" in capsys.readouterr().out


def test_demo_notices_a_peak_over_the_budget(
    words: list[str], capsys, monkeypatch
) -> None:
    train = demo.train

    def tampered(task, step_count, budget_bytes):
        run = train(task, step_count, budget_bytes)
        if budget_bytes is None:
            return run
        over = replace(run.measured, peak_bytes=budget_bytes + 1)
        return replace(run, measured=over)

    monkeypatch.setattr(demo, "train", tampered)
    assert demo.main(words) == 1
    text = capsys.readouterr().out
    assert "BROKEN: the measured peak is 1 B over the budget" in text
    assert "A PROMISE IS BROKEN" in text


def test_demo_refuses_too_few_steps(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--steps", "3"])
    assert "--steps must be at least 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (1.0, 1.0, True),
        (1.0, 1.0000001, False),
    ],
)
def test_bits_are_compared(one: float, other: float, is_equal: bool) -> None:
    pair = torch.tensor(one), torch.tensor(other)
    assert demo.is_bitwise_equal(*pair) is is_equal


def test_other_types_and_shapes_are_not_equal() -> None:
    assert not demo.is_bitwise_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not demo.is_bitwise_equal(torch.zeros(2), torch.zeros(1, 2))
