"""A process that is killed within a step is an error in the other, and no orphan."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

import remat
from tests.distributed.models import Language, batch_of, language, trained
from tests.distributed.processes import of_the_first
from tests.distributed.test_pipelines import Pipeline
from tests.distributed.test_sharded_models import optimizer_of, sharded

LONGEST_S = 60
"""Far less than the timeout of the group, which is half an hour."""


def end_this_process(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(step: Callable[[], object]) -> dict[str, Any]:
    """Return how a step ends that loses the other process."""
    start_s = time.monotonic()
    try:
        step()
    except (RuntimeError, DistBackendError) as error:
        return {"error": str(error), "seconds": time.monotonic() - start_s}
    return {"error": "", "seconds": time.monotonic() - start_s}


def of_a_sharded_model(rank: int) -> dict[str, Any]:
    """Lose the second process between forward and backward."""
    ids = batch_of(rank)
    model: Language = sharded(language())
    optimizer = optimizer_of(model)
    remat.fit(model, ids, budget="80%", optimizer=optimizer, costs="estimated")
    trained(model, ids, optimizer, 1)

    def step() -> None:
        loss: torch.Tensor = model(ids)
        if rank:
            loss.register_hook(end_this_process)
        loss.backward()

    return error_of(step)


def of_a_pipeline(rank: int) -> dict[str, Any]:
    """Lose the last stage between its microbatches."""
    pipeline = Pipeline(rank, "1F1B", count=2)
    pipeline.fit(["85%"])
    pipeline.step()
    if rank:
        module = pipeline.parts[0]
        parameter = next(module.parameters())
        parameter.register_post_accumulate_grad_hook(end_this_process)
    return error_of(pipeline.step)


@pytest.mark.parametrize("lose", [of_a_sharded_model, of_a_pipeline])
def test_a_killed_process_is_an_error_in_the_other_and_leaves_no_orphan(
    lose: Callable[[int], dict[str, Any]],
) -> None:
    found, codes = of_the_first(lose)
    assert found["error"]
    assert found["seconds"] < LONGEST_S
    assert codes == [0, -signal.SIGKILL]
