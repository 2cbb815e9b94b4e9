"""A device that behaves like an accelerator, and all that is for accelerators on it."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.accelerator import FIRST
from torch import nn
from torch.nn import functional

import remat
from remat.core.errors import RematError
from remat.profile.live_memory import live_bytes
from remat.testing.simulated_device import FAULTS, DeviceLostError
from remat.torch_compat.accelerators import device_module, memory_stats

ROOT = Path(__file__).parents[2]
FOR_ACCELERATORS = (
    (
        "tests/profile/test_memory.py",
        "tests/profile/test_operators.py",
        "tests/profile/test_optimizer_memory.py",
        "tests/runtime/test_devices_cuda.py",
        "tests/testing/test_simulated_device.py",
        "tests/training/test_on_a_card.py",
        "tests/capture/test_cudnn_batch_norm.py",
    ),
    # Measures whole processes: what threads of other tests have left would count.
    ("tests/studies/test_gpu.py",),
)
FOR_CARDS_ALONE = ("tests/memory/test_snapshots.py", "tests/profile/test_reductions.py")
"""They compare with the allocator of CUDA itself, and with its kernels."""

OPTIONS = ("-p", "no:cacheprovider", "-m", "gpu or simulated")
simulated = pytest.mark.simulated


@pytest.fixture(autouse=True)
def _nothing_is_known_of_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("files", FOR_ACCELERATORS, ids=["library", "study"])
def test_what_is_for_accelerators_passes_on_the_simulated_one(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", *OPTIONS, *files],
        cwd=ROOT,
        env=os.environ
        | {"REMAT_TEST_ACCELERATOR": "sim", "REMAT_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1]


def test_every_test_for_accelerators_is_in_that_list() -> None:
    marks = ("pytest.mark." + "gpu\n", "@" + "simulated\n")
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if any(mark in path.read_text(encoding="utf-8") for mark in marks)
    }
    assert found <= {*chain(*FOR_ACCELERATORS), *FOR_CARDS_ALONE}


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
    ]
    return nn.Sequential(*blocks).to(FIRST), torch.randn(256, 64, device=FIRST)


def loss(outputs: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs, torch.zeros_like(outputs))


@simulated
def test_what_is_live_is_what_its_allocator_says() -> None:
    before = live_bytes(torch.device(FIRST))
    assert before is not None
    x = torch.empty(1 << 20, device=FIRST)
    assert live_bytes(torch.device(FIRST)) == before + x.nbytes


@simulated
def test_bytes_in_use_are_known() -> None:
    before = memory_stats(FIRST, reset=True)["requested_bytes.all.current"]
    x = torch.empty(1000, device=FIRST)
    view = x[10:]
    del x
    stats = memory_stats(FIRST)
    assert stats["requested_bytes.all.current"] == before + 4000
    del view
    stats = memory_stats(FIRST)
    assert stats["requested_bytes.all.current"] == before
    assert stats["requested_bytes.all.peak"] == before + 4000
    assert stats["allocated_bytes.all.peak"] % 512 == 0
    assert stats["reserved_bytes.all.peak"] >= stats["allocated_bytes.all.peak"]


@simulated
def test_its_memory_is_its_own() -> None:
    x = torch.ones(3, device=FIRST)
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()
    address = x.data_ptr()
    del x
    # Poisoned, and handed out again.
    again = torch.empty(3, device=FIRST)
    assert again.data_ptr() == address
    assert not torch.equal(again.cpu(), torch.ones(3))


@simulated
def test_its_generator_counts() -> None:
    module = device_module(FIRST)
    host = torch.get_rng_state()
    module.manual_seed(7)
    first = torch.rand(5, device=FIRST)
    state = module.get_rng_state()
    assert state.tolist() == [7, *[0] * 7, 8, *[0] * 7]
    second = torch.rand(5, device=FIRST)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(5, device=FIRST), second)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), host)


@simulated
def test_copies_happen_when_somebody_waits() -> None:
    module = device_module(FIRST)
    link = module.Stream()
    source, target = torch.ones(4), torch.zeros(4, device=FIRST)
    with module.stream(link):
        target.copy_(source, non_blocking=True)
        event = link.record_event()
    assert not event.query()
    assert target.sum().item() == 0
    module.current_stream().wait_event(event)
    assert target.sum().item() == 4
    with FAULTS.set(copies_are_late=False), module.stream(link):
        target.copy_(source * 2, non_blocking=True)
        assert target.sum().item() == 8


@simulated
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_keeps_its_budget_and_its_bits(dtype: torch.dtype | None) -> None:
    model, x = net()
    with torch.autocast("sim", dtype=dtype, enabled=dtype is not None):
        report = remat.verify(model, x, budget="75%", loss=loss, repeats=1)
    assert report.is_exact, report
    assert report.is_within_budget, str(report)
    assert not report.against_eager, report
    assert 0 <= report.prediction_error < 0.01, report


@simulated
@pytest.mark.parametrize("served", [0, 3, 40])
def test_memory_that_runs_out_while_planning_is_an_error_of_ours(served: int) -> None:
    model, x = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = device_module(FIRST).get_rng_state()
    with (
        FAULTS.set(failing_request=served),
        pytest.raises(RematError, match="out of memory"),
    ):
        remat.fit(model, x, budget="75%", loss=loss)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(device_module(FIRST).get_rng_state(), state)
    # Nothing is lost: the same call works.
    remat.fit(model, x, budget="75%", loss=loss)
    loss(model(x)).backward()


@simulated
def test_a_device_that_disappears_ends_planning_and_steps() -> None:
    model, x = net()
    with FAULTS.set(is_lost=True), pytest.raises(RematError, match="lost"):
        remat.fit(model, x, budget="75%", loss=loss)
    remat.fit(model, x, budget="75%", loss=loss)
    with FAULTS.set(is_lost=True), pytest.raises(DeviceLostError):
        model(x)
    loss(model(x)).backward()


@simulated
def test_operators_that_differ_from_run_to_run_are_seen() -> None:
    model, x = net()
    with FAULTS.set(random_operator="aten.gelu"):
        report = remat.verify(model, x, budget="75%", loss=loss, repeats=1)
    assert not report.is_exact


@simulated
def test_convolutions_have_the_layouts_that_torch_says() -> None:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        # The layout of weights of one pixel is both.
        nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU()),
    ]
    model = nn.Sequential(*blocks).to(FIRST, memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).to(FIRST, memory_format=torch.channels_last)
    assert model(x).is_contiguous()
    report = remat.verify(model, x, budget="100%", loss=loss, repeats=1)
    assert report.is_exact, report
    assert not report.against_eager, report
