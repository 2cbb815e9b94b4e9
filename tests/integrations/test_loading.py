"""What a loader has in memory besides what it gave out, from its settings."""

from typing import Any

import pytest
import torch
from tests.integrations import late
from tests.integrations.digits import BATCH, Digits
from torch.utils.data import DataLoader

from remat.integrations.loading import batches_early

# A machine of one or two cores is warned of more workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0),
        ({"num_workers": 1}, 0),
        ({"num_workers": 2}, 2),
        ({"num_workers": 2, "prefetch_factor": 1}, 1),
        ({"num_workers": 4, "prefetch_factor": 4}, 12),
        ({"num_workers": 4, "in_order": False}, 0),
    ],
)
def test_workers_bring_some_batches_before_their_turn(
    settings: dict[str, Any], expected: int
) -> None:
    loader: Any = DataLoader(Digits(), **settings)
    assert batches_early([loader], CPU) == expected
    # Nothing of this is in the memory of another device.
    assert batches_early([loader], torch.device("cuda", 0)) == 0


def test_a_thread_that_pins_takes_all_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader: Any = DataLoader(Digits(), num_workers=2, pin_memory=True)
    found: list[int] = []
    for has_accelerator in (False, True):
        monkeypatch.setattr(
            torch.accelerator, "is_available", lambda found=has_accelerator: found
        )
        found.append(batches_early([loader], CPU))
    assert found == [2, 4]


def test_parts_of_a_batch_come_from_several_loaders() -> None:
    loaders: list[Any] = [DataLoader(Digits(), num_workers=n) for n in (0, 3, 2)]
    assert batches_early([*loaders, [1, 2]], CPU) == 4
    assert batches_early([None], CPU) == 0


def test_a_loader_holds_as_many_as_are_counted() -> None:
    rows = 5 * BATCH // 10
    loader: Any = DataLoader(
        Digits(), rows, num_workers=late.WORKERS, collate_fn=late.Late(10)
    )
    batches = iter(loader)
    held = [
        sum(len(task) == 2 for task in batches._task_info.values()) for _ in batches
    ]
    assert max(held) == batches_early([loader], CPU) == late.EARLY
