"""Operators traced on the CPU as an accelerator takes them apart."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.capture.accelerator import (
    _SINGLE,
    _SINGLE_RESULT,
    _attention,
    hardware_now,
    traced_for,
)
from remat.files.hardware import hardware_named

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
ELSEWHERE = {
    # Composite of others in the lists, in place of which these are called.
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "pdist",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
}


class Attention(nn.Module):
    def __init__(self, mask: Tensor | None = None, width: int = 16) -> None:
        super().__init__()
        self.project = nn.Linear(2 * width, 6 * width)
        self.mask, self.width = mask, width

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (2, self.width)).transpose(1, 2)
            for t in self.project(x).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return functional.dropout(y, 0.1).sum()


def ops_of(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Any:
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        graph = remat.plan(model, x, device="l4", budget="100%").graph
    return {
        op.name: [graph.storages[s].size_bytes for s in op.writes] for op in graph.ops
    }


def sized(*shape: int) -> Tensor:
    return torch.empty(shape)


def test_attention_of_low_precision_is_the_flash_kernel() -> None:
    ops = ops_of(Attention(), sized(2, 300, 32), torch.bfloat16)
    # Sums of exponentials: 4 bytes for each of 2 x 2 x 300 rows; seed and offset.
    found = ops["_scaled_dot_product_flash_attention"]
    assert found[:3] == [2 * 2 * 300 * 16 * 2 // 512 * 512, 5120, 512]
    assert "_scaled_dot_product_flash_attention_backward" in ops


@pytest.mark.parametrize(
    ("model", "dtype", "kernel"),
    [
        (Attention(), None, "_scaled_dot_product_efficient_attention"),
        (
            Attention(torch.ones(64, 64, dtype=torch.bool)),
            torch.bfloat16,
            "_scaled_dot_product_efficient_attention",
        ),
        (Attention(width=10), None, "_safe_softmax"),
    ],
)
def test_other_attention_is_what_the_rules_say(
    model: Attention, dtype: torch.dtype | None, kernel: str
) -> None:
    assert kernel in ops_of(model, sized(2, 64, 2 * model.width), dtype)


def test_fewer_keys_than_queries_and_lengths_that_differ() -> None:
    def kernel(heads: int, length: int, dtype: torch.dtype) -> str:
        query = torch.empty(2, 8, 64, 16, dtype=dtype, device="meta").requires_grad_()
        key = torch.empty(2, heads, length, 16, dtype=dtype, device="meta")
        out = _attention(query, key, key, is_causal=True, enable_gqa=heads < 8)
        assert out.shape == query.shape
        found = out.grad_fn
        while found is not None and "Attention" not in found.name():
            found = next((node for node, _ in found.next_functions), None)
        return "products" if found is None else found.name()

    assert "Flash" in kernel(2, 64, torch.bfloat16)
    assert kernel(2, 64, torch.float32) == "products"
    assert "Efficient" in kernel(8, 80, torch.bfloat16)


def test_dropout_leaves_a_mask_of_one_byte_an_element() -> None:
    ops = ops_of(Attention(), sized(2, 64, 32))
    assert ops["native_dropout"] == [2 * 64 * 32 * 4, 2 * 64 * 32]


def test_the_lists_of_autocast_are_those_of_torch() -> None:
    text = HEADER.read_text(encoding="utf-8")

    def listed(macro: str) -> set[str]:
        (body,) = re.findall(rf"define {macro}\(_\)(.*?)\n\n", text, re.DOTALL)
        pairs = re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
        return {f"{name}.{over}" if over else name for name, over in pairs}

    ours = {*_SINGLE.split(), *_SINGLE_RESULT.split()}
    theirs = listed("AT_FORALL_FP32") | listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    theirs = {name for name in theirs if not name.startswith("_")}
    assert theirs - ours == ELSEWHERE
    assert ours <= theirs


class Softened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.linear(x).softmax(-1).sum()


def test_autocast_of_cuda_is_in_force_and_softmax_is_of_single_precision() -> None:
    ops = ops_of(Softened(), sized(128, 64))
    assert ops["addmm"] == [128 * 64 * 2]
    assert ops["_softmax"] == [128 * 64 * 4]


def test_nothing_is_left_behind() -> None:
    before = torch.autocast.__init__
    with traced_for(hardware_named("l4")):
        assert hardware_now() is hardware_named("l4")
        assert torch.autocast.__init__ is not before
    assert hardware_now() is None
    assert torch.autocast.__init__ is before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        assert x.softmax(-1).dtype is torch.bfloat16
