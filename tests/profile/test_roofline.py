"""Times and scratch memory on accelerators, against closed forms."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from remat.capture.accelerator import traced_for
from remat.core.hardware import CLASSES
from remat.files.hardware import hardware_named
from remat.profile.estimate import estimate_operators, estimate_workspace
from remat.profile.operators import OperatorCall, OperatorCost
from remat.profile.roofline import Roofline, operator_class

aten = torch.ops.aten
ROUND = replace(
    hardware_named("l4"),
    flops_per_s={"float32": 10**12, "tf32": 2 * 10**12, "bfloat16": 4 * 10**12},
    bytes_per_s=10**11,
    launch_ns=1000,
    resident_threads=0,
    percent=dict.fromkeys(CLASSES, 50),
)
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default


def cost(target: Any, *args: object) -> OperatorCost:
    with traced_for(ROUND):
        (found,) = estimate_operators([OperatorCall(target, args)], Roofline(ROUND))
    return found


@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.float32, 10**12), (torch.bfloat16, 4 * 10**12)]
)
def test_a_product_takes_its_operations_over_half_the_rate(
    dtype: torch.dtype, rate: int
) -> None:
    side = 1024
    matrix = torch.empty(side, side, dtype=dtype)
    expected_ns = 2 * side**3 * 10**9 // (rate // 2)
    assert cost(aten.mm.default, matrix, matrix).cost_ns == pytest.approx(
        expected_ns, rel=1e-6
    )


def test_a_convolution_of_single_precision_is_rounded_to_tf32() -> None:
    x, weight = torch.empty(8, 64, 64, 64), torch.empty(64, 64, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    found = cost(aten.convolution.default, *args)
    flops = 2 * 8 * 64 * 64 * 64 * 64 * 9
    assert found.cost_ns == pytest.approx(flops * 10**9 / 10**12, rel=1e-6)
    # Copies of input, weight and output with channels last.
    assert found.workspace_bytes == 4 * (2 * x.numel() + weight.numel())


def test_a_convolution_in_groups_computes_each_group_alone() -> None:
    x, weight = torch.empty(8, 64, 64, 64), torch.empty(64, 1, 7, 7)
    args = (x, x, weight, None, [1, 1], [3, 3], [1, 1], False, [0, 0], 64)
    call = OperatorCall(aten.convolution_backward.default, (*args, [True, True, False]))
    fast = replace(ROUND, bytes_per_s=10**20)
    with traced_for(fast):
        (found,) = estimate_operators([call], Roofline(fast))
    # Twice what the forward pass takes: 49 products for each of its results.
    flops = 2 * 2 * 49 * x.numel()
    assert found.cost_ns == pytest.approx(flops * 10**9 / 10**12, rel=1e-6)


def test_other_operators_take_their_bytes_over_half_the_bandwidth() -> None:
    x = torch.empty(1 << 20)
    moved_bytes = 3 * 4 * x.numel()
    found = cost(aten.add.Tensor, x, torch.empty_like(x))
    assert found.cost_ns == -(-moved_bytes * 10**9 // (10**11 // 2))


def test_an_embedding_reads_the_rows_it_returns() -> None:
    table, rows = torch.empty(1 << 16, 256), torch.zeros(64, dtype=torch.long)
    made_bytes = 64 * 256 * 4
    found = cost(aten.embedding.default, table, rows)
    moved_ns = (2 * made_bytes + 64 * 8) / (10**11 / 2) * 1e9
    assert found.cost_ns == pytest.approx(moved_ns, abs=2)


def test_nothing_takes_less_than_a_launch() -> None:
    assert cost(aten.neg.default, torch.empty(1)).cost_ns == 1000


def test_the_flash_kernel_sums_in_single_precision() -> None:
    q = torch.empty(2, 3, 200, 40, dtype=torch.bfloat16)
    with traced_for(ROUND):
        call = OperatorCall(FLASH_BACKWARD, (q, q))
        # Rows of 200 and columns of 40 are rounded up to 256 and 64.
        assert estimate_workspace(call, (q,)) == 4 * 2 * 3 * 256 * (64 + 1)


def test_rules_are_those_of_the_cpu_where_nothing_else_is_asked_for() -> None:
    call = OperatorCall(aten.native_dropout.default, (torch.empty(100),))
    assert estimate_workspace(call, torch.empty(100)) == 400
    with traced_for(ROUND):
        assert estimate_workspace(call, torch.empty(100)) == 0


def test_classes_are_by_name() -> None:
    assert operator_class("addmm") == "matmul"
    assert operator_class("_scaled_dot_product_flash_attention") == "attention"
