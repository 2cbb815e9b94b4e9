"""The largest batch within a budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.errors import BudgetError, UnitError
from remat.report.figures import batch_curve, save_figure


def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(32, 32), nn.Tanh()] * 3)


def batch(size: int) -> torch.Tensor:
    return torch.zeros(size, 32)


def test_one_more_sample_does_not_fit(tmp_path: Path) -> None:
    found = remat.max_batch(model(), batch, budget="300 KiB", costs="estimated")
    fits = {each.size: each.fits for each in found.tried}
    assert fits[found.size]
    assert not fits[found.size + 1]
    assert list(fits) == sorted(fits)
    assert found.plan.peak_bytes <= found.budget_bytes == 300 * 1024
    # Recomputation is what makes room.
    assert found.plan.baseline_peak_bytes > found.budget_bytes
    with pytest.raises(BudgetError):
        remat.plan(model(), batch(found.size + 1), budget="300 KiB", costs="estimated")
    planned = remat.plan(
        model(), batch(found.size), budget="300 KiB", costs="estimated"
    )
    assert planned.peak_bytes == found.plan.peak_bytes
    text = str(found)
    assert f"the largest size within 300.00 KiB is {found.size}" in text
    assert "does not fit" in text
    save_figure(batch_curve(found), tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").stat().st_size > 0


def test_data_that_ends_is_no_search_without_end() -> None:
    data = torch.zeros(100, 32)
    how: dict[str, Any] = {"budget": "1 MiB", "costs": "estimated"}
    with pytest.raises(ValueError, match=r"\[\[100, 32\]\] for \d+ and .*Give most="):
        remat.max_batch(model(), lambda size: data[:size], **how)
    found = remat.max_batch(model(), lambda size: data[:size], most=100, **how)
    assert found.size == 100


def test_options_are_those_of_a_plan() -> None:
    def size(**options: Any) -> int:
        return remat.max_batch(
            made, batch, budget="300 KiB", multiple_of=4, costs="estimated", **options
        ).size

    made = model()
    adam = torch.optim.AdamW(made.parameters(), foreach=False)
    assert size(optimizer=adam) < size()
    assert size(solver="store-all") < size()


def test_sizes_are_multiples_up_to_the_largest_of_use() -> None:
    def by_name(size: int) -> dict[str, Any]:
        return {"input": batch(size)}

    found = remat.max_batch(
        model(), by_name, budget="1 GiB", most=100, multiple_of=8, costs="estimated"
    )
    assert found.size == 96
    assert all(each.size == 1 or each.size % 8 == 0 for each in found.tried)


def test_a_model_without_memory_will_do() -> None:
    with torch.device("meta"):
        bare = model()
    found = remat.max_batch(
        bare,
        lambda size: torch.zeros(size, 32, device="meta"),
        budget="300 KiB",
        costs="estimated",
    )
    assert found.size > 100


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"budget": "60%"}, UnitError, "within a number of bytes"),
        ({"budget": {"cpu": 10**9}}, UnitError, "within a number of bytes"),
        ({"least": 0}, ValueError, "least"),
        ({"least": 5, "most": 4}, ValueError, "most"),
        ({"multiple_of": 0}, ValueError, "multiple_of"),
        ({"budget": 1}, BudgetError, "smallest"),
        ({"speed": 1}, TypeError, "speed"),
    ],
)
def test_what_makes_no_sense_is_refused(
    given: dict[str, Any], error: type[Exception], words: str
) -> None:
    options: dict[str, Any] = {"budget": "1 MiB", "costs": "estimated", **given}
    with pytest.raises(error, match=words):
        remat.max_batch(model(), batch, **options)


def test_a_batch_is_made_by_a_function() -> None:
    with pytest.raises((TypeError, ValueError), match="make_batch"):
        remat.max_batch(model(), batch(3), budget="1 MiB")  # type: ignore[arg-type]
