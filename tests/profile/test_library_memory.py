"""What cuBLAS keeps, by the rules of torch's source."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from remat.profile import library_memory
from remat.profile.library_memory import cublas_bytes, has_product, library_bytes

MIB = 1 << 20
HOPPER_BYTES = 2 * (32 * MIB + MIB)


def traced(operator: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator, (x, x)))
    return fx.GraphModule(nn.Module(), graph)


PRODUCT = traced(torch.ops.aten.mm.default)
SUM = traced(torch.ops.aten.add.Tensor)


def card(capability: tuple[int, int], *sizes: int) -> SimpleNamespace:
    """Return what stands for ``torch.cuda``, with blocks of these sizes in use."""
    used = [{"state": "active_allocated", "requested_size": size} for size in sizes]
    freed = {"state": "inactive", "requested_size": 32 * MIB}
    return SimpleNamespace(
        get_device_capability=lambda _place: capability,
        memory_snapshot=lambda: [{"blocks": []}, {"blocks": [freed, *used]}],
    )


@pytest.mark.parametrize(
    ("modules", "module", "expected_bytes"),
    [
        ([SUM, PRODUCT], card((9, 0)), HOPPER_BYTES),
        ([PRODUCT], card((8, 9)), 2 * (8 * MIB + 128 * 1024 + MIB)),
        ([PRODUCT], card((12, 0)), HOPPER_BYTES),
        ([SUM], card((9, 0)), 0),
        ([SUM], card((9, 0), 5 * MIB), 0),
        ([SUM], card((9, 0), 5 * MIB, 32 * MIB), HOPPER_BYTES),
        ([SUM], card((9, 0), *[32 * MIB] * 3), 3 * HOPPER_BYTES // 2),
        ([PRODUCT], card((9, 0), *[32 * MIB] * 5), 5 * HOPPER_BYTES // 2),
    ],
    ids=[
        "Hopper",
        "older",
        "newer",
        "no product",
        "none before",
        "one before",
        "three before",
        "five before",
    ],
)
def test_two_threads_keep_a_block_once_there_was_a_product(
    modules: list[fx.GraphModule],
    module: SimpleNamespace,
    expected_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    monkeypatch.setattr(library_memory, "device_module", lambda _place: module)
    assert library_bytes(modules, torch.device("cuda", 0)) == expected_bytes


def test_a_cpu_keeps_none() -> None:
    assert library_bytes([PRODUCT], torch.device("cpu")) == 0
    assert has_product(PRODUCT)
    assert not has_product(SUM)


@pytest.mark.parametrize(
    ("variables", "expected_bytes"),
    [
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, (8192 + 128 + 1024) << 10),
        ({"CUBLAS_WORKSPACE_CONFIG": "nonsense"}, 33 * MIB),
        ({"CUBLASLT_WORKSPACE_SIZE": "2048"}, 34 * MIB),
        ({"CUBLASLT_WORKSPACE_SIZE": "much"}, 33 * MIB),
        ({"CUBLASLT_WORKSPACE_SIZE": "99999999"}, 64 * MIB),
    ],
)
def test_variables_say_how_much(variables: dict[str, str], expected_bytes: int) -> None:
    assert cublas_bytes(variables, is_hopper_or_newer=True) == expected_bytes
