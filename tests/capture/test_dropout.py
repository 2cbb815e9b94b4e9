"""Dropout as it is traced, against dropout as eager PyTorch computes it."""

import inspect
import threading
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
SHARES = [*(k / 100 for k in range(1, 100)), 1 / 3, 1e-6, 0.99999, 1.0, 0.0]
KINDS = {
    "dropout": (functional.dropout, torch.ops.aten.dropout.default),
    "in place": (
        lambda x, p, train=True: functional.dropout(x.clone(), p, train, inplace=True),
        torch.ops.aten.dropout_.default,
    ),
    "alpha": (functional.alpha_dropout, torch.ops.aten.alpha_dropout.default),
}


def traced(
    x: torch.Tensor, p: float, *, train: bool = True, kind: str = "dropout"
) -> torch.Tensor:
    """Return dropout as it is computed while a step is traced."""
    with eager_dropout():
        return KINDS[kind][1].py_kernels[_COMPOSITE](x, p, train)


def drawn(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return call(), torch.get_rng_state()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_every_share_is_bitwise_eager(dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(523, dtype=dtype)
    for p in SHARES:
        expected, state = drawn(lambda p=p: KINDS[kind][0](x, p, True))
        found, after = drawn(lambda p=p: traced(x.clone(), p, kind=kind))
        assert torch.equal(found.isnan(), expected.isnan()), p
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), p
        assert torch.equal(after, state), p


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [1.5, -0.1, float("nan")])
@pytest.mark.parametrize("train", [True, False])
def test_what_is_no_share_is_refused_as_eager_does(
    kind: str, p: float, *, train: bool
) -> None:
    words = "dropout probability has to be between 0 and 1"
    with pytest.raises(RuntimeError, match=words):
        KINDS[kind][1](torch.ones(3), p, train)
    with pytest.raises(RuntimeError, match=words):
        traced(torch.ones(3), p, train=train, kind=kind)


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
@pytest.mark.parametrize("kind", ["dropout", "alpha"])
def test_masks_lie_as_eager_noise_does(
    view: Callable[[torch.Tensor], torch.Tensor], kind: str
) -> None:
    x = view(torch.randn(4, 6, 5, 7))
    expected, state = drawn(lambda: KINDS[kind][0](x, 0.3, True))
    found, after = drawn(lambda: traced(x, 0.3, kind=kind))
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert torch.equal(after, state)


def test_a_mask_with_gaps_is_drawn_as_pytorch_draws_it() -> None:
    size, stride = [3, 4], [9, 2]
    expected, state = drawn(
        lambda: torch.empty_strided(size, stride, dtype=torch.uint8).bernoulli_(0.5)
    )
    found, after = drawn(lambda: torch.ops.remat.dropout_mask(size, stride, 0.5))
    assert torch.equal(found, expected)
    assert torch.equal(after, state)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_happens_outside_of_training(kind: str) -> None:
    x = torch.ones(5)
    assert traced(x, 0.5, train=False, kind=kind) is x
    assert traced(x, 0.0, kind=kind) is x
    assert torch.equal(x, torch.ones(5))


def test_kernels_are_put_back() -> None:
    overloads = [op for _, op in KINDS.values()]
    before = [dict(op.py_kernels) for op in overloads]

    def fail_inside() -> None:
        with eager_dropout():
            assert all(op.py_kernels for op in overloads)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [dict(op.py_kernels) for op in overloads] == before


def test_others_find_the_tracers_own_kernels_while_a_plan_is_made() -> None:
    op = torch.ops.aten.dropout.default
    seen: list[bool] = []
    own = dict(op.py_kernels)
    remat.plan(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        torch.randn(8, 4),
        budget=10**7,
        costs="estimated",
        progress=lambda *_: seen.append(dict(op.py_kernels) == own),
    )
    assert seen
    assert all(seen)


def test_a_second_thread_waits_for_its_turn() -> None:
    op = torch.ops.aten.dropout.default
    own = dict(op.py_kernels)
    is_in = threading.Event()

    def other() -> None:
        with eager_dropout():
            is_in.set()

    thread = threading.Thread(target=other)
    with eager_dropout():
        thread.start()
        assert not is_in.wait(0.2)
    thread.join()
    assert is_in.is_set()
    assert dict(op.py_kernels) == own


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


def test_alpha_dropout_of_images_is_bitwise_eager() -> None:
    # Noise of another layout would be other noise.
    images = torch.randn(2, 4, 10, 10).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.AlphaDropout(0.15))
    report = remat.verify(
        model.to(memory_format=torch.channels_last),
        (images,),
        budget="95%",
        loss=lambda y: y.square().sum(),
        costs="estimated",
    )
    assert not report.against_eager


@pytest.mark.parametrize("in_place", [False, True])
def test_a_mask_takes_a_byte_and_noise_is_made_from_it_again(*, in_place: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, in_place), nn.Tanh())
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


def test_a_core_that_leaves_another_state_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stays(state: np.ndarray, mask: np.ndarray, keep: float) -> None:
        draw_mask(state.copy(), mask, keep)

    monkeypatch.setattr(dropout, "draw_mask", stays)
    dropout._core_draws_alike.cache_clear()
    try:
        assert not dropout._core_draws_alike()
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


class DrawsInVain(nn.Module):
    """Draws numbers that nothing reads, in ways of its own, before others."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.how == "dropout":
            functional.dropout(hidden, 0.3)
        elif self.how == "numbers":
            torch.rand(3)
        else:
            with torch.no_grad():
                functional.dropout(x, 0.3)
        return functional.dropout(self.last(hidden.tanh()), 0.3)


@pytest.mark.parametrize("regions", ["whole", ["first", "last"], "breaks"])
@pytest.mark.parametrize("how", ["dropout", "numbers", "of no gradient"])
def test_numbers_that_nothing_uses_are_drawn(
    how: str, regions: str | list[str]
) -> None:
    model, x = DrawsInVain(how), torch.randn(8, 16)
    expected, state = drawn(lambda: model(x))
    remat.fit(model, x, budget=10**7, regions=regions, costs="estimated")
    for _ in range(2):
        found, after = drawn(lambda: model(x))
        assert torch.equal(found, expected)
        assert torch.equal(after, state)
        found.sum().backward()
