"""Dropout as it is traced, against dropout as eager PyTorch computes it."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.capture.test_joint_program import ops_named, trace
from torch import nn
from torch.nn import functional

import remat
from remat.capture import dropout
from remat.capture.dropout import draw_mask, eager_dropout

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
SHARES = [*(k / 100 for k in range(1, 100)), 1 / 3, 1e-6, 1.0, 0.0]


def traced(x: torch.Tensor, p: float, *, train: bool = True) -> torch.Tensor:
    """Return dropout as it is computed while a step is traced."""
    op = torch.ops.aten.dropout.default
    with eager_dropout():
        return op.py_kernels[_COMPOSITE](x, p, train)


def drawn(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return call(), torch.get_rng_state()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_every_share_is_bitwise_eager(dtype: torch.dtype) -> None:
    x = torch.randn(523, dtype=dtype)
    for p in SHARES:
        expected, state = drawn(lambda p=p: functional.dropout(x, p))
        found, after = drawn(lambda p=p: traced(x, p))
        assert torch.equal(found, expected), p
        assert torch.equal(after, state), p


def test_shares_are_told_from_the_tracers_own_operator() -> None:
    # What is traced without us differs; else the test above would show nothing.
    x = torch.randn(523)
    native = torch.ops.aten.native_dropout.default
    expected, _ = drawn(lambda: functional.dropout(x, 0.15))
    found, _ = drawn(lambda: native(x, 0.15, True)[0])
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.permute(2, 0, 3, 1),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(3, -1, -1, -1),
        lambda x: x[0, 0, 0, 0],
        lambda x: x[:0],
    ],
)
def test_masks_lie_as_eager_noise_does(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = view(torch.randn(4, 6, 5, 7))
    expected, state = drawn(lambda: functional.dropout(x, 0.3))
    found, after = drawn(lambda: traced(x, 0.3))
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert torch.equal(after, state)


def test_nothing_happens_outside_of_training() -> None:
    x = torch.randn(5)
    assert traced(x, 0.5, train=False) is x
    assert traced(x, 0.0) is x


def test_kernels_are_put_back() -> None:
    plain, in_place = torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default
    before = dict(plain.py_kernels), dict(in_place.py_kernels)
    with eager_dropout():
        assert dict(plain.py_kernels) != before[0]
    assert (dict(plain.py_kernels), dict(in_place.py_kernels)) == before


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("p", [0.04, 0.15, 1.0])
def test_a_planned_step_is_bitwise_eager(p: float, *, in_place: bool) -> None:
    model = nn.Sequential(
        nn.Linear(16, 16), nn.Dropout(p, in_place), nn.GELU(), nn.Linear(16, 16)
    )
    report = remat.verify(
        model, (torch.randn(64, 16),), budget="90%", costs="estimated"
    )
    assert not report.against_eager


def test_gradients_in_half_precision_are_bitwise_eager() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        report = remat.verify(
            model,
            (torch.randn(64, 16),),
            loss=lambda y: y.float().sum(),
            budget="90%",
            costs="estimated",
        )
    assert not report.against_eager


def test_a_mask_takes_a_byte_and_noise_is_made_from_it_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    program = trace(model, torch.randn(32, 4))
    (mask,) = ops_named(program, "dropout_mask")
    (cast,) = ops_named(program, "_to_copy")
    storages = program.graph.storages
    assert [storages[s].size_bytes for s in mask.writes] == [32 * 4]
    assert cast.reads == mask.writes
    assert cast.is_recomputable
    # To draw a mask again, nothing of the model is needed.
    assert len(mask.reads) == 1


def test_a_generator_that_draws_otherwise_is_asked_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def otherwise(_state: object, mask: np.ndarray, _keep: float) -> None:
        mask[:] = 0

    monkeypatch.setattr(dropout, "draw_mask", otherwise)
    dropout._core_draws_alike.cache_clear()
    try:
        assert not dropout._core_draws_alike()
        expected, state = drawn(lambda: functional.dropout(torch.ones(99), 0.3))
        found, after = drawn(lambda: traced(torch.ones(99), 0.3))
        assert torch.equal(found, expected)
        assert torch.equal(after, state)
    finally:
        dropout._core_draws_alike.cache_clear()


def test_the_twin_draws_what_pytorch_draws() -> None:
    generator = torch.Generator().manual_seed(7)
    state = generator.get_state()
    mask = torch.empty(100, dtype=torch.uint8)
    inspect.unwrap(draw_mask)(state.numpy(), mask.numpy(), 0.6)
    expected = torch.empty_like(mask).bernoulli_(0.6, generator=generator)
    assert torch.equal(mask, expected)
    assert torch.equal(state, generator.get_state())
