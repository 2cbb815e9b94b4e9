"""Measured peaks of devices: to the byte on logical ones, within every budget."""

from typing import Any

import pytest
import torch
from tests.device_schedules import HandMade, HandMadeSplit
from tests.modules import Case, make_case
from tests.training.test_fitting import mean_square
from torch import nn

import remat
from remat.core.errors import ProfileError
from remat.core.platform import Device, DeviceKind, Platform
from remat.profile.allocations import Allocation, Recording
from remat.solvers import registry
from remat.training.device_memory import DevicePeak, charged_peaks, measure_devices
from remat.training.verification import VerifyReport


def transformer() -> Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Case(model, (torch.randn(8, 64, 32),), loss=mean_square)


def conv_net() -> Case:
    return make_case("conv net")


MODELS = {"transformer": transformer, "conv net": conv_net}


def verified(case: Case, solver: Any, names: tuple[str, str], monkeypatch: Any) -> Any:
    """Verify a step by a schedule made by hand, in budgets that it just fits."""
    monkeypatch.setattr(registry, "AUTO_DEVICES", (solver,))
    args = (case.model, case.args, case.kwargs)
    plain = remat.plan(*args, budget=2**40, loss=case.loss)
    free = remat.plan(*args, budget=dict.fromkeys(names, 2**40), loss=case.loss)
    peaks = solver().trace_of(free).peak_bytes
    budget = dict(zip(names, peaks, strict=True))
    report = remat.verify(*args, budget=budget, loss=case.loss, repeats=1)
    return report, plain.peak_bytes


def check(report: VerifyReport) -> None:
    assert report.is_exact, report
    assert not report.against_eager, report
    assert report.is_within_budget, report
    for device in report.devices:
        assert 0 < device.measured_bytes <= device.predicted_bytes, report
        # The state of the generator is counted even where nothing is replayed.
        slack_bytes = 2 * 5056 + 1024
        assert device.predicted_bytes <= 1.02 * device.measured_bytes + slack_bytes


@pytest.mark.parametrize("name", MODELS)
def test_offloaded_steps_are_exact_and_within_budgets(
    name: str, monkeypatch: Any
) -> None:
    report, plain_bytes = verified(
        MODELS[name](), HandMade, ("cpu", "host"), monkeypatch
    )
    check(report)
    home, host = report.devices
    assert home.measured_bytes < plain_bytes
    assert host.name == "host"
    assert "bitwise equal" in str(report)


@pytest.mark.parametrize("name", MODELS)
def test_split_steps_are_exact_and_within_budgets(name: str, monkeypatch: Any) -> None:
    report, plain_bytes = verified(
        MODELS[name](), HandMadeSplit, ("cpu", "cpu:1"), monkeypatch
    )
    check(report)
    assert all(device.measured_bytes < plain_bytes for device in report.devices)
    assert report.summary()["devices"][1]["name"] == "cpu:1"


def test_blocks_are_charged_to_the_device_that_was_marked_last() -> None:
    def change(time_ns: int, address: int, size: int) -> Allocation:
        return Allocation(time_ns=time_ns, address=address, change_bytes=size)

    recording = Recording(
        before=(change(1, 90, 7), change(2, 91, 5), change(3, 91, -5)),
        inside=(
            change(11, 1, 100),  # device 0: 57 + 100
            change(13, 2, 30),  # device 1: 30
            change(14, 1, -100),  # device 0: 57
            change(15, 3, 40),  # device 1: 70
            change(17, 4, 60),  # device 0: 117
            change(18, 2, -30),  # device 1: 40
            change(19, 90, -7),  # device 0: 110
        ),
        start_ns=10,
        end_ns=20,
        marks=((5, "1"), (12, "1"), (16, "0")),
    )
    assert charged_peaks({80: 50}, recording, ("a", "b"), {}) == (157, 70)


def test_pinned_blocks_count_when_they_are_there() -> None:
    def change(time_ns: int, size: int) -> Allocation:
        return Allocation(time_ns=time_ns, address=1, change_bytes=size)

    recording = Recording(
        before=(),
        inside=(change(13, 100), change(15, -100)),
        start_ns=10,
        end_ns=20,
        marks=(
            (9, "cpu 8"),
            (11, "cpu 30"),  # 5 + 30
            (12, "cpu -30"),  # 5, and 105 with what is allocated next
            (14, "my host: 2 40"),
            (16, "another 80"),
            (17, "cpu 60"),  # 65
            (21, "cpu 400"),
        ),
    )
    names = ("cpu", "my host: 2")
    assert charged_peaks({}, recording, names, {"cpu": 5}) == (105, 40)


def test_a_device_that_is_over_its_budget_says_so() -> None:
    peak = DevicePeak(name="a", budget_bytes=10, predicted_bytes=9, measured_bytes=12)
    assert not peak.is_within_budget
    assert str(peak) == "a: 12 B measured, 9 B predicted (-25.00%), of 10 B: BROKEN"


def test_what_cannot_be_measured_is_refused() -> None:
    kinds = (
        DeviceKind(name="card", runs_on="cuda:0"),
        DeviceKind(name="x", computes=False),
    )
    for names, words in ((("card", "card"), "both cuda:0"), (("x",), "not on this")):
        devices = tuple(Device(name=f"{k}{i}", kind=k) for i, k in enumerate(names))
        with pytest.raises(ProfileError, match=words):
            measure_devices(lambda: None, Platform(devices=devices, kinds=kinds))
