"""The Trainer of transformers keeps its budget in two processes, bitwise."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from accelerate.state import AcceleratorState
from torch.nn.parallel import DistributedDataParallel

from remat.integrations.transformers import MemoryBudgetCallback
from tests.distributed.models import smallest
from tests.distributed.processes import in_processes
from tests.integrations.common import QUICK, Trained
from tests.integrations.test_transformers import CASES, trainer
from tests.integrations.test_transformers import run as train


def trained(folder: Path, *callbacks: Any) -> tuple[Trained, type]:
    """Return what the Trainer did, and what it put around the model."""
    case = CASES["accumulation, bf16"]
    made: Any = trainer(folder, *callbacks, ddp_backend="gloo", **case)
    # It copies them to the device cpu:0. What they are copied from is older than the
    # recording of the peak, which would not see its release.
    copied = [parameter.detach() for parameter in made.model.parameters()]
    found = train(made)
    copied_bytes = sum(each.nbytes for each in copied)
    found = Trained(found.parameters, found.peak_bytes - copied_bytes)
    return found, type(made.model_wrapped)


def run(rank: int) -> dict[str, Any]:
    """Return what one process finds."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    given = {name: str(value) for name, value in places.items()}
    with patch.dict(os.environ, given), TemporaryDirectory() as folder:
        AcceleratorState._reset_state(reset_partial_state=True)
        plain, _ = trained(Path(folder))
        budget = smallest(plain.budget_bytes)
        callback = MemoryBudgetCallback(budget, **QUICK)
        found, wrapper = trained(Path(folder), callback)
        AcceleratorState._reset_state(reset_partial_state=True)
    assert callback.plan is not None
    return {
        "is_bitwise": found.is_bitwise(plain),
        "is_wrapped": wrapper is DistributedDataParallel,
        "budget": budget,
        "measured": found.peak_bytes,
        "recomputed": callback.plan.recomputed_op_count,
    }


def test_a_budget_is_kept_and_parameters_are_bitwise_the_same() -> None:
    for found in in_processes(run):
        assert found["is_wrapped"]
        assert found["is_bitwise"]
        assert found["recomputed"] > 0
        assert 0.97 * found["budget"] <= found["measured"] <= found["budget"]
