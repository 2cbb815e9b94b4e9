"""Copies on threads of their own: bitwise whatever their speed, and none is lost."""

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.device_schedules import HandMade, logical, run_by, scattered
from tests.modules import make_case
from tests.training.test_device_memory import check, transformer, verified

from remat.core.errors import ExecutionError, RaceError
from remat.core.graph import TrainingGraph
from remat.core.issue_order import IssueOrder, Run, Wait
from remat.core.platform import Platform
from remat.core.schedule import Schedule
from remat.runtime import issuing, lowering, queues
from remat.training.fitted_model import FittedModel
from remat.training.verification import TrainingStep, compare

THREE = logical("cpu", "cpu:1", "host")


@pytest.fixture(autouse=True)
def _all_copies_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(lowering, "LEAST_BYTES_BESIDE", 0)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))


class Delays:
    """Lets copies chosen by chance, or one, begin late, and notes who makes them."""

    def __init__(self, seed: int, share: float = 0.1, longest_s: float = 0.02) -> None:
        self.chance = random.Random(seed)
        self.share, self.longest_s = share, longest_s
        self.threads: list[threading.Thread] = []
        self.now = 0
        self.at_once = 0

    def __call__(self, source: torch.Tensor, block: torch.Tensor) -> None:
        self.threads.append(threading.current_thread())
        self.now += 1
        self.at_once = max(self.at_once, self.now)
        if self.chance.random() < self.share:
            time.sleep(self.chance.random() * self.longest_s)
        block.copy_(source)
        self.now -= 1


@pytest.mark.parametrize("name", ["conv net", "attention", "random ops"])
def test_steps_are_bitwise_eager_whatever_the_delays(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = Delays(seed=1)
    monkeypatch.setattr(queues, "move_bytes", delays)
    case = make_case(name)
    step = TrainingStep(case.model, case.args, case.kwargs, case.loss, None)

    def choose(graph: TrainingGraph, arranged: Platform) -> Schedule:
        return scattered(graph, arranged, seed=3, eviction_share=0.7)

    fitted, _ = run_by(case, THREE, choose)
    with step.restored():
        expected = step.outcome(None)
        assert not compare(expected, step.outcome(fitted))
    assert len(set(delays.threads)) > 2
    assert threading.main_thread() not in delays.threads
    assert delays.at_once > 1
