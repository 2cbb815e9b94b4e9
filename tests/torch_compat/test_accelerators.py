"""Accelerators of types that no plan is made for are as good as none."""

import pytest
import torch

from remat.core.errors import ProfileError
from remat.profile.memory import measure
from remat.torch_compat.accelerators import (
    accelerator_in_use,
    accelerator_type,
    device_count,
)


def test_an_accelerator_that_no_plan_is_made_for_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(*, check_available: bool = False) -> torch.device:
        return torch.device("mps")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    assert accelerator_type() == "cuda"
    assert device_count("mps") == 0
    assert accelerator_in_use() in {None, "cuda"}
    assert measure(lambda: None).device in {"cpu", "cuda:0"}
    with pytest.raises(ProfileError, match="not on 'mps'"):
        measure(lambda: None, device="mps")
