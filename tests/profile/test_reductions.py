"""Scratch memory of reductions on CUDA: by hand, and as a card has it."""

from typing import Any

import pytest
import torch
from tests.accelerator import FIRST

from remat.capture.accelerator import traced_for
from remat.files.hardware import hardware_named
from remat.profile.estimate import estimate_workspace
from remat.profile.operators import OperatorCall, profile_operators
from remat.profile.reductions import reduction_bytes
from remat.torch_compat.accelerators import resident_threads

aten = torch.ops.aten
H100 = 132 * 2048
MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "dims", "size_bytes"),
    [
        # Measured on an H100: 16 values a thread, sums of four outputs a thread.
        ((4096, 256), [0], 8 * MIB + 8),
        ((4096, 1024), [0], 32 * MIB + 32),
        ((2048, 1024), [0], 16 * MIB + 32),
        # Too few values: 64 rows for each of the 4 rows of threads.
        ((256, 1024), [0], 0),
        # Along rows, a block of threads sums up 256 values of each thread by itself.
        ((1024, 4096), [1], 0),
        ((4096, 256), [1], 0),
        # No dimension of the result is read as a vector: 3 outputs.
        ((1 << 16, 3), [0], 4 * 3 * 16 * 2 + 4 * 2),
    ],
)
def test_scratch_memory_is_that_of_the_kernel(
    shape: tuple[int, ...], dims: list[int], size_bytes: int
) -> None:
    x = torch.empty(shape, device="meta")
    call = OperatorCall(aten.sum.dim_IntList, (x, dims, True))
    assert reduction_bytes(call, H100) == size_bytes


CALLS: dict[str, Any] = {
    "sum": lambda x, dims: (aten.sum.dim_IntList, (x, dims)),
    "mean": lambda x, dims: (aten.mean.dim, (x, dims, True)),
    "norm": lambda x, dims: (aten.linalg_vector_norm.default, (x, 2, dims)),
    "amax": lambda x, dims: (aten.amax.default, (x, dims)),
    "var": lambda x, dims: (aten.var_mean.correction, (x, dims)),
    "all": lambda x, _: (aten.sum.default, (x,)),
    "argmax": lambda x, dims: (aten.argmax.default, (x, dims[0])),
}
SHAPES = (
    ((4096, 256), [0]),
    ((4096, 256), [1]),
    ((100_000, 7), [0]),
    ((513, 130), [0]),
    ((16, 64, 56, 56), [0, 2, 3]),
    ((8, 512, 768), [0, 1]),
    ((8, 512, 768), [1]),
    ((64, 50_000), [1]),
    ((2, 3_000_000), [1]),
    ((1 << 22,), [0]),
    ((30_000, 4096), [0]),
    ((70_000, 1), [0]),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_a_card_takes_what_is_estimated(name: str, dtype: torch.dtype) -> None:
    layouts = [*SHAPES, *(((n, 260), [0]) for n in (1, 63, 64, 255, 1023, 1024, 9999))]
    for shape, dims in layouts:
        for is_transposed in (False, True):
            x = torch.empty(shape, device=FIRST, dtype=dtype)
            if is_transposed and len(shape) == 2:
                x = torch.empty(shape[::-1], device=FIRST, dtype=dtype).t()
            call = OperatorCall(*CALLS[name](x, dims))
            estimated = estimate_workspace(call, call.target(*call.args))
            (cost,) = profile_operators([call])
            case = name, shape, dims, dtype, is_transposed
            assert estimated == cost.workspace_bytes, case


def test_only_cuda_reduces_like_that() -> None:
    x = torch.empty(4096, 256)
    call = OperatorCall(aten.sum.dim_IntList, (x, [0]))
    result = call.target(*call.args)
    assert estimate_workspace(call, result) == 0
    sizes = {}
    for name in ("h100-80gb", "l4", "mi300x"):
        with traced_for(hardware_named(name)):
            sizes[name] = estimate_workspace(call, result)
    assert sizes == {"h100-80gb": 8 * MIB + 8, "l4": 8 * MIB + 8, "mi300x": 0}


@pytest.mark.gpu
def test_a_card_says_how_many_threads_it_runs() -> None:
    found = resident_threads(torch.device(FIRST))
    assert found % 512 == 0 < found
    assert resident_threads(torch.device("cpu")) == 0
