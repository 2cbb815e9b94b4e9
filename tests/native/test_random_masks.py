"""Masks drawn in the native core, against NumPy's Mersenne twister and PyTorch."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat.capture.dropout import _core_draws_alike, draw_mask
from remat.native import core

pytestmark = pytest.mark.skipif(core() is None, reason="needs the native core")
twin = inspect.unwrap(draw_mask)


def words_of(state: np.ndarray, count: int) -> np.ndarray:
    """Return the next words of a state of PyTorch's generator, as NumPy gives them."""
    left = int(state[8:12].view(np.int32)[0])
    following = int(state[16:24].view(np.uint64)[0])
    twister = np.random.MT19937()
    twister.state = {
        "bit_generator": "MT19937",
        "state": {
            "key": state[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32),
            "pos": 624 if left == 1 else following,
        },
    }
    return np.asarray(twister.random_raw(count), np.uint64)


@given(
    seed=st.integers(0, 2**64 - 1),
    drawn_before=st.integers(0, 1300),
    # Rounds are of 624 words, two to an element.
    count=st.one_of(st.integers(0, 5), st.integers(305, 320), st.integers(0, 3000)),
    keep=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.9, 1.0])),
)
def test_masks_are_those_of_the_twister(
    seed: int, drawn_before: int, count: int, keep: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # One word each, so that pairs begin at odd places too.
    torch.empty(drawn_before, dtype=torch.int32).random_(generator=generator)
    state = generator.get_state().numpy()
    words = words_of(state, 2 * count + 10)
    high, low = words[: 2 * count : 2], words[1 : 2 * count : 2]
    share = ((high << np.uint64(32) | low) & np.uint64(2**53 - 1)) * 2.0**-53
    mask = np.full(count, 7, np.uint8)
    draw_mask(state, mask, keep)
    assert np.array_equal(mask, share < keep)
    assert np.array_equal(words_of(state, 10), words[2 * count :])


@given(seed=st.integers(0, 2**64 - 1), count=st.integers(0, 2000))
def test_states_are_those_that_pytorch_leaves(seed: int, count: int) -> None:
    if not _core_draws_alike():
        pytest.skip("PyTorch has another kernel here, and the core is not used")
    states = [torch.Generator().manual_seed(seed).get_state().numpy() for _ in "ab"]
    masks = [np.full(count, 7, np.uint8) for _ in "ab"]
    for draw, state, mask in zip((draw_mask, twin), states, masks, strict=True):
        draw(state, mask, 0.9)
    assert np.array_equal(masks[0], masks[1])
    assert np.array_equal(states[0], states[1])


def test_the_core_is_used_where_pytorch_draws_from_the_twister() -> None:
    generator = torch.Generator().manual_seed(5)
    words = words_of(generator.get_state().numpy(), 2000)
    low, high = words[1::2], words[::2]
    share = ((high << np.uint64(32) | low) & np.uint64(2**53 - 1)) * 2.0**-53
    drawn = torch.empty(1000, dtype=torch.uint8).bernoulli_(0.7, generator=generator)
    assert _core_draws_alike() == np.array_equal(drawn.numpy(), share < 0.7)


def edited(offset: int, kind: type[np.generic], value: int) -> np.ndarray:
    """Return a state of the generator with another number at a place."""
    state = torch.Generator().manual_seed(1).get_state().numpy()
    size = np.dtype(kind).itemsize
    state[offset : offset + size].view(kind)[0] = value
    return state


@pytest.mark.parametrize(
    ("state", "keep", "message"),
    [
        (edited(8, np.int32, 0), 0.5, "no state"),
        (edited(8, np.int32, 626), 0.5, "no state"),
        (edited(16, np.uint64, 625), 0.5, "no state"),
        (edited(16, np.uint64, 2**63), 0.5, "no state"),
        (edited(8, np.int32, 1)[:5015], 0.5, "no state"),
        (torch.get_rng_state().numpy(), 1.5, "between 0 and 1"),
        (torch.get_rng_state().numpy(), float("nan"), "between 0 and 1"),
    ],
)
def test_what_is_no_state_or_share_is_refused(
    state: np.ndarray, keep: float, message: str
) -> None:
    mask = np.full(10, 7, np.uint8)
    with pytest.raises(ValueError, match=message):
        draw_mask(state, mask, keep)
    assert (mask == 7).all()
