"""accelerate within a budget: ``remat.fit`` before or after ``prepare``."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tests.integrations.common import QUICK, Trained, trained
from tests.integrations.digits import STEPS, Model, loader

import remat


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    # Mixed precision is a setting of the whole process.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def run(fitted: str, precision: str, budget: Any = None) -> Trained:
    torch.manual_seed(0)
    bare = Model()
    optimizer: Any = torch.optim.AdamW(bare.parameters(), 1e-3)
    batch = {name: value.clone() for name, value in next(iter(loader())).items()}
    batches: Any = loader()
    # accelerate has the next batch already.
    budget = budget and budget - sum(value.nbytes for value in batch.values())
    settings: dict[str, Any] = {"optimizer": optimizer, "accumulate": True, **QUICK}
    if fitted == "before":
        remat.fit(bare, (), batch, budget=budget, **settings)
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
    )
    model, optimizer, batches = accelerator.prepare(bare, optimizer, batches)
    if fitted == "after":
        settings["optimizer"] = optimizer
        remat.fit(model, (), batch, budget=budget, **settings)
    del batch

    def train() -> None:
        for _ in range(STEPS // len(batches)):
            for each in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**each)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()

    return trained(bare, train, optimizer)


# With mixed precision after: before, the model does not know of it.
@pytest.mark.parametrize(("fitted", "precision"), [("before", "no"), ("after", "bf16")])
def test_a_budget_is_kept_and_parameters_are_bitwise_the_same(
    fitted: str, precision: str
) -> None:
    plain = run("never", precision)
    AcceleratorState._reset_state(reset_partial_state=True)
    found = run(fitted, precision, plain.budget_bytes)
    assert found.peak_bytes <= plain.budget_bytes
    assert found.is_bitwise(plain)
