"""Steps on CUDA with host memory, and on CUDA and CPU together."""

from typing import Any

import pytest
import torch
from tests.accelerator import ACCELERATOR, FIRST, IS_SIMULATED
from tests.device_schedules import HandMade, HandMadeSplit
from torch import nn
from torch.nn import functional

import remat
from remat.core.platform import Device, Link, Platform
from remat.profile.costing import place_name
from remat.profile.links import default_devices, measured_platform
from remat.runtime.copies import copy_bytes, new_block, record_event, wait_event
from remat.runtime.marks import mark_device
from remat.runtime.pinned import PINNED_BYTES, pinned_block
from remat.runtime.queues import CopyRun, StreamQueue, ThreadEvent
from remat.solvers import registry
from remat.torch_compat.accelerators import (
    device_module,
    note_random_state,
    set_random_state,
)
from remat.training.device_memory import measure_devices
from remat.training.verification import VerifyReport

HOST = (FIRST, "host")
BOTH = (FIRST, "cpu")
DEPTH, LENGTH = (1, 32) if IS_SIMULATED else (6, 128)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
    return model.to(FIRST), torch.randn(LENGTH // 8, LENGTH, 64, device=FIRST)


def conv_net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        for _ in range(DEPTH)
    ]
    return nn.Sequential(*blocks).to(FIRST), torch.randn(8, 16, 64, 64, device=FIRST)


def loss(outputs: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs, torch.zeros_like(outputs))


def verified(
    made: tuple[nn.Module, torch.Tensor], solver: Any, names: tuple[str, str]
) -> VerifyReport:
    """Verify in budgets that a schedule made by hand just fits."""
    pytest.importorskip(
        "ortools", reason="needs ortools, to find what fits at home alone"
    )
    model, x = made
    free = remat.plan(model, x, budget=dict.fromkeys(names, 2**40), loss=loss)
    peaks = solver().trace_of(free).peak_bytes
    budget = dict(zip(names, peaks, strict=True))
    return remat.verify(model, x, budget=budget, loss=loss, repeats=1)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [transformer, conv_net])
def test_offloading_to_pinned_memory_changes_no_bit(
    make: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(registry, "AUTO_DEVICES", (HandMade,))
    report = verified(make(), HandMade, HOST)
    assert report.plan.link_uses
    assert report.is_exact, report
    assert report.is_within_budget, report
    card, host = report.devices
    assert 0.9 * card.predicted_bytes <= card.measured_bytes <= card.predicted_bytes
    assert 0 < host.measured_bytes <= host.predicted_bytes
    # Everything that was pinned for the step has been given back.
    device_module(FIRST).synchronize()
    assert PINNED_BYTES["host"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("make", [transformer, conv_net])
def test_both_compute_and_agree_to_rounding(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(registry, "AUTO_DEVICES", (HandMadeSplit,))
    # Else a card's convolutions round their inputs to ten bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    report = verified(make(), HandMadeSplit, BOTH)
    assert {use.run_count > 0 for use in report.plan.device_uses} == {True}
    # Kernels of the simulated device work in the CPU's memory, which counts there.
    assert report.devices[0].is_within_budget, report
    assert report.is_within_budget or IS_SIMULATED, report
    # Kernels of two kinds of device round differently.
    assert all(difference.largest < 1e-3 for difference in report.against_captured)


@pytest.mark.gpu
def test_random_ops_stay_where_their_generator_is(monkeypatch: Any) -> None:
    monkeypatch.setattr(registry, "AUTO_DEVICES", (HandMadeSplit,))
    model, x = transformer()
    plan = remat.plan(model, x, budget=dict.fromkeys(BOTH, 2**40), loss=loss)
    ordered = [op for op in plan.graph.ops if op.is_ordered]
    assert ordered
    assert all(op.cost_ns[1] is None for op in ordered)
    assert any(op.cost_ns[1] is not None for op in plan.graph.ops)


@pytest.mark.gpu
def test_a_copy_to_the_host_and_back_is_the_same() -> None:
    value = torch.randn(64, 32, device=FIRST).T[3:]
    card = (FIRST,)
    out, back = (FIRST, "cpu", FIRST, "host"), ("cpu", FIRST, "host", FIRST)
    with CopyRun():
        wait_event(out, record_event(card))
        there = copy_bytes(out, value, new_block(value, FIRST, "cpu", "host"))
        block = new_block(there, "cpu", FIRST, FIRST)
        wait_event(back, record_event(card))
        wait_event(back, record_event(out))
        again = copy_bytes(back, there, block)
        wait_event(card, record_event(back))
        wait_event((), record_event(out))
    for copy in (there, again):
        assert copy.stride() == value.stride()
        assert copy.storage_offset() == value.storage_offset()
        assert torch.equal(copy.cpu(), value.cpu())
    assert there.is_pinned() or IS_SIMULATED


@pytest.mark.gpu
def test_a_random_state_that_a_schedule_copied_is_put_back() -> None:
    state = note_random_state(FIRST)
    moved = state.to(FIRST)
    torch.rand(8, device=FIRST)
    set_random_state(FIRST, moved)
    assert torch.equal(note_random_state(FIRST), state)


@pytest.mark.gpu
def test_a_step_that_raises_has_waited_for_its_streams() -> None:
    value = torch.ones(1 << 22, device=FIRST)
    link = (FIRST, "cpu", FIRST, "host")

    def stop() -> None:
        with CopyRun() as run:
            wait_event(link, record_event((FIRST,)))
            for _ in range(4):
                copy_bytes(link, value, new_block(value, FIRST, "cpu", "host"))
            events.append(run.queue(link).record())
            msg = "enough"
            raise ValueError(msg)

    events: list[Any] = []
    with pytest.raises(ValueError, match="enough"):
        stop()
    assert events[0].query()


@pytest.mark.gpu
def test_pinned_blocks_are_counted_while_they_exist() -> None:
    block = pinned_block(1000, "some host")
    view = block[10:]
    del block
    assert PINNED_BYTES["some host"] == 1000
    del view
    assert PINNED_BYTES["some host"] == 0


@pytest.mark.gpu
def test_what_was_pinned_before_and_what_comes_after_do_not_count_together() -> None:
    size_bytes = 1 << 20
    platform = Platform(
        devices=(
            Device(name=FIRST, kind=ACCELERATOR),
            Device(name="cpu", kind="cpu"),
        )
    )
    held: list[torch.Tensor] = []

    def step() -> None:
        mark_device(1)
        block = pinned_block(size_bytes, "cpu")
        del block
        held.append(torch.empty(size_bytes, dtype=torch.uint8))
        held.clear()

    assert measure_devices(step, platform)[1] == size_bytes


@pytest.mark.gpu
def test_links_of_this_machine_are_measured() -> None:
    assert default_devices()[0] == FIRST
    platform = measured_platform([FIRST, "cpu", "host"])
    assert all(10**8 < link.bytes_per_s < 10**13 for link in platform.links)


@pytest.mark.gpu
def test_a_hand_written_platform_is_executed(monkeypatch: Any) -> None:
    monkeypatch.setattr(registry, "AUTO_DEVICES", (HandMade,))
    platform = Platform(
        devices=(
            Device(name="store", kind="host", budget_bytes=2**33),
            Device(name=FIRST, kind=ACCELERATOR, budget_bytes=2**33),
        ),
        links=(
            Link(source=0, target=1, bytes_per_s=10**10),
            Link(source=1, target=0, bytes_per_s=10**10),
        ),
    )
    model, x = conv_net()
    plan = remat.fit(model, x, platform=platform, loss=loss)
    loss(model(x)).backward()
    assert plan.platform.names == (FIRST, "store")


class Calls:
    """Stands for torch.cuda, and notes what is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for name in ("current_stream", "Event", "stream"):
            monkeypatch.setattr(torch.cuda, name, self.noted(name))

    def noted(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.made.append(f"{name}{tuple(map(str, arguments))}")
            return Noted(name, self)

        return call


class Noted:
    """A stream or an event that notes what is done with it."""

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls = name, calls

    def __getattr__(self, name: str) -> Any:
        return self.calls.noted(f"{self.name}.{name}")

    def __str__(self) -> str:
        return self.name

    def __enter__(self) -> None:
        self.calls.made.append(f"enter {self.name}")

    def __exit__(self, *_exception: object) -> None:
        self.calls.made.append(f"exit {self.name}")


def test_queues_of_cuda_record_and_wait_on_their_own_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch)
    card, link = (
        CopyRun().queue(("cuda:1",)),
        StreamQueue(Noted("link", calls), "cuda:0"),
    )
    link.wait(card.record())
    link.copy(torch.ones(3), torch.zeros(3))
    card.wait(link.record())
    link.join()
    assert calls.made == [
        "current_stream('cuda:1',)",
        "Event()",
        "Event.record('current_stream',)",
        "link.wait_event('Event',)",
        "stream('link',)",
        "enter stream",
        "exit stream",
        "Event()",
        "Event.record('link',)",
        "current_stream.wait_event('Event',)",
        "link.synchronize()",
    ]


def test_a_stream_comes_after_a_thread_as_the_host_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Calls(monkeypatch)
    event = ThreadEvent(CopyRun())
    event.happen()
    StreamQueue(Noted("link", calls), "cuda:0").wait(event)
    assert calls.made == []


def test_copies_on_the_cpu_lie_as_their_source_does() -> None:
    base = torch.randn(6, 8)
    for value in (
        base.T[2:],
        base[1].expand(4, 8),
        torch.view_as_complex(base.reshape(24, 2)).conj(),
        torch.view_as_complex(base.reshape(24, 2)).conj().imag,
        torch.empty(0, 3),
        torch.tensor(3),
    ):
        with CopyRun():
            copy = copy_bytes((), value, new_block(value, "cpu", "cpu", "host"))
        assert (copy.stride(), copy.storage_offset()) == (
            value.stride(),
            value.storage_offset(),
        )
        assert copy.untyped_storage().nbytes() == value.untyped_storage().nbytes()
        assert torch.equal(copy, value)
        if value.numel():
            assert copy.data_ptr() != value.data_ptr()


def test_the_cpu_has_one_place() -> None:
    assert place_name(torch.device("cpu", 1)) == "cpu"
    assert place_name(torch.device("cuda", 1)) == "cuda:1"
