"""Masks drawn in the native core, against PyTorch's own kernel.

Where PyTorch has MKL draw there is nothing to compare with, and the core is not used.
"""

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


@pytest.mark.skipif(not _core_draws_alike(), reason="PyTorch draws otherwise here")
@given(
    seed=st.integers(0, 2**64 - 1),
    drawn_before=st.integers(0, 1300),
    # Rounds are of 624 words, two to an element.
    count=st.one_of(st.integers(0, 5), st.integers(305, 320), st.integers(0, 3000)),
    keep=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.9, 1.0])),
)
def test_masks_and_states_are_pytorchs(
    seed: int, drawn_before: int, count: int, keep: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # One word each, so that pairs begin at odd places too.
    torch.empty(drawn_before, dtype=torch.int32).random_(generator=generator)
    states = [generator.get_state().numpy() for _ in range(2)]
    masks = [np.full(count, 7, np.uint8) for _ in range(2)]
    for draw, state, mask in zip((draw_mask, twin), states, masks, strict=True):
        draw(state, mask, keep)
    assert np.array_equal(masks[0], masks[1])
    assert np.array_equal(states[0], states[1])


@pytest.mark.parametrize(
    ("state", "keep", "message"),
    [
        (np.zeros(5056, np.uint8), 0.5, "no state"),
        (np.zeros(100, np.uint8), 0.5, "no state"),
        (np.full(5056, 255, np.uint8), 0.5, "no state"),
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
