"""Steps on devices that are not here: what fits, how long, at which batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.errors import CaptureError, InvalidPlatformError, UnitError
from remat.core.hardware import Hardware
from remat.files.hardware import hardware_named
from remat.planning.device_estimates import ScaledGraph, plain_trace
from remat.training.device_comparison import batch_size

WIDTH, DEPTH, BATCH = 64, 6, 512


def on_meta(depth: int = DEPTH) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers).to("meta")


def batch(size: int = BATCH) -> torch.Tensor:
    return torch.empty(size, WIDTH, device="meta")


def mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def with_memory(usable_bytes: int) -> Hardware:
    like = hardware_named("l4")
    return replace(like, name="small", memory_bytes=usable_bytes, context_bytes=0)


def compared(model: nn.Module, device: Any, **options: Any) -> Any:
    (found,) = remat.compare_devices(
        model, batch(), devices=[device], loss=mean_square, **options
    ).estimates
    return found


def test_a_step_that_fits_is_left_as_it_is() -> None:
    found = compared(on_meta(), "h100-80gb", finds_largest_batch=False)
    assert found.fits == "yes"
    assert found.needed_bytes == found.plain_peak_bytes
    # Inputs and outputs of each layer, and a gradient or two.
    values = BATCH * WIDTH * 4
    assert 2 * DEPTH * values < found.plain_peak_bytes < (2 * DEPTH + 6) * values
    assert found.largest_plain is None


def test_a_step_that_is_too_large_is_planned_and_says_what_offload_would_take() -> None:
    plain = compared(on_meta(), "l4", finds_largest_batch=False).plain_peak_bytes
    small = with_memory(plain * 7 // 10)
    found = compared(on_meta(), small)
    assert found.fits == "with remat"
    assert found.plan.peak_bytes <= small.usable_bytes
    assert found.step_ns > found.plain_ns
    assert "over the link and back" in found.offload
    # Without remat a smaller batch fits, with it this one does.
    assert found.largest_plain < BATCH <= found.largest_planned


def test_what_fits_nowhere_says_what_is_needed() -> None:
    model = on_meta()
    parameters_bytes = 4 * sum(p.numel() for p in model.parameters())
    found = compared(model, with_memory(3 * parameters_bytes))
    assert (found.fits, found.plan, found.step_ns) == ("no", None, None)
    assert found.needed_bytes > 3 * parameters_bytes


@pytest.mark.parametrize("size", [100, 512, 2000])
def test_a_step_of_another_batch_is_what_a_trace_of_it_is(size: int) -> None:
    device = with_memory(10**9)

    def traced(count: int) -> Any:
        plan = remat.plan(on_meta(2), batch(count), device=device, loss=mean_square)
        return plan.graph

    scaled = ScaledGraph(traced(512), traced(1024), 512, device.granule_bytes)
    assert scaled.is_one_step
    assert (
        plain_trace(scaled.at(size)).peak_bytes == plain_trace(traced(size)).peak_bytes
    )


def test_the_largest_batch_is_the_one_of_max_batch() -> None:
    device = with_memory(2_000_000)
    found = compared(on_meta(2), device)
    sizes = remat.max_batch(
        on_meta(2),
        batch,
        least=found.largest_planned // 2,
        multiple_of=128,
        device=device,
        loss=mean_square,
    )
    assert found.largest_planned == pytest.approx(sizes.size, abs=256)


def test_the_table_has_a_row_for_each_device() -> None:
    names = ["h100-80gb", "l4"]
    both = remat.compare_devices(
        on_meta(2), batch(), devices=names, loss=mean_square, finds_largest_batch=False
    )
    rows = str(both).splitlines()
    assert [row.split()[0] for row in rows[2:4]] == names
    assert "batch of 512" in rows[0]
    assert "batch norm is traced as torch's own kernel" in str(both)
    assert [each["device"] for each in both.summary()["devices"]] == names
    times = [each.plain_ns for each in both.estimates]
    assert times[0] <= times[1]


def test_a_loss_with_targets_of_its_own_leaves_the_batch_alone() -> None:
    targets = torch.zeros(BATCH, WIDTH)
    both = remat.compare_devices(
        on_meta(2),
        batch(),
        devices=["l4"],
        loss=lambda y: (y - targets).square().mean(),
    )
    assert both.estimates[0].largest_plain is None
    assert "the largest batch was not looked for" in str(both)


def test_steps_of_an_accelerators_optimizer_take_memory_for_all_parameters() -> None:
    model = on_meta()
    adam = torch.optim.AdamW(model.parameters())
    found = remat.plan(model, batch(8), device="l4", optimizer=adam, loss=mean_square)
    (step,) = [op for op in found.graph.ops if op.name == "optimizer step"]
    parameters_bytes = 4 * sum(p.numel() for p in model.parameters())
    assert step.workspace_bytes[0] >= parameters_bytes


def test_a_plan_says_what_it_is_for_and_keeps_the_device() -> None:
    plan = remat.plan(on_meta(2), batch(), device="l4", loss=mean_square)
    assert plan.settings["device"] == "l4"
    assert plan.budget_bytes == hardware_named("l4").usable_bytes
    assert all(s.size_bytes % 512 == 0 for s in plan.graph.storages if s.is_resident)


def test_mistakes_get_one_message() -> None:
    model, x = on_meta(2), batch()
    with pytest.raises(InvalidPlatformError, match="known are a100-40gb"):
        remat.plan(model, x, device="h9000")
    with pytest.raises(UnitError, match="the parameters alone take"):
        remat.plan(model, x, device=with_memory(20_000))
    with pytest.raises(UnitError, match=r"but l4 leaves 21.79 GiB of its 22.03 GiB"):
        remat.plan(model, x, device="l4", budget="30 GiB")
    with pytest.raises(UnitError, match="but small leaves"):
        remat.plan(on_meta(), x, device=with_memory(300_000), budget="100%")
    with pytest.raises(ValueError, match="leave kernels= out"):
        remat.plan(model, x, device="l4", kernels="fused")
    with pytest.raises(ValueError, match="give one budget"):
        remat.plan(model, x, device="l4", budget={"cuda:0": "1 GiB"})
    with pytest.raises(ValueError, match=r"is for remat\.plan"):
        remat.fit(model, x, device="l4")
    with pytest.raises(ValueError, match="devices is empty"):
        remat.compare_devices(model, x, devices=[])
    with pytest.raises(ValueError, match="give devices= here"):
        remat.compare_devices(model, x, devices=["l4"], device="l4")
    with pytest.raises(ValueError, match="given twice"):
        remat.compare_devices(model, x, devices=["l4", "l4"])


def test_the_batch_is_the_first_dimension_of_the_first_tensor() -> None:
    assert batch_size((torch.tensor(1), torch.empty(3, 4)), {}) == 3
    assert batch_size((), {}) is None


def test_a_step_that_cannot_be_traced_is_refused() -> None:
    class Printed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    with pytest.raises(CaptureError):
        remat.compare_devices(Printed(), batch(), devices=["l4"])
