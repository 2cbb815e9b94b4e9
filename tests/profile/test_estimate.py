import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.core.errors import ProfileError
from remat.profile import (
    CostCache,
    OperatorCall,
    Rates,
    estimate_operators,
    measure_rates,
    profile_operators,
)
from remat.profile.estimate import estimate_excess

aten = torch.ops.aten
RATES = Rates(flops_per_s=10**9, bytes_per_s=10**9, launch_ns=7)


def fake(*shape, **kwargs) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, **kwargs)


def estimate(target, *args, rates=RATES):
    (cost,) = estimate_operators([OperatorCall(target, args)], rates)
    return cost


def test_a_matrix_product_is_bound_by_its_operations():
    cost = estimate(aten.mm.default, fake(100, 200), fake(200, 300))
    # 2 m k n operations at one a nanosecond.
    assert cost.cost_ns == 7 + 2 * 100 * 200 * 300
    assert cost.output_sizes_bytes == (100 * 300 * 4,)
    assert cost.samples == 0


def test_an_elementwise_operator_is_bound_by_the_bytes_it_moves():
    cost = estimate(aten.add.Tensor, fake(1000), fake(1000))
    assert cost.cost_ns == 7 + 3 * 4000


def test_a_tensor_given_twice_is_read_once():
    x = fake(1000)
    assert estimate(aten.mul.Tensor, x, x).cost_ns == 7 + 2 * 4000


def test_a_view_costs_a_launch_and_makes_nothing():
    cost = estimate(aten.view.default, fake(4, 6), [24])
    assert (cost.cost_ns, cost.output_bytes, cost.aliases_input) == (7, 0, True)


def test_an_operator_in_place_moves_bytes_and_makes_nothing():
    cost = estimate(aten.relu_.default, fake(1000))
    assert (cost.output_bytes, cost.aliases_input) == (0, True)
    assert cost.cost_ns == 7 + 4000


def test_real_tensors_are_taken_too():
    cost = estimate(aten.view.default, torch.ones(4, 6), [24])
    assert (cost.output_bytes, cost.aliases_input) == (0, True)


def test_random_state_does_not_move():
    before = torch.get_rng_state()
    estimate(aten.native_dropout.default, fake(10), 0.5, True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (
            aten.convolution.default,
            (
                fake(2, 64, 28, 28),
                fake(64, 64, 3, 3),
                None,
                [1, 1],
                [1, 1],
                [1, 1],
                False,
                [0, 0],
                1,
            ),
        ),
        (aten.native_dropout.default, (fake(64, 100), 0.5, True)),
        (aten.mse_loss.default, (fake(64, 100), fake(64, 100))),
        (aten.smooth_l1_loss.default, (fake(64, 100), fake(64, 100))),
        (aten.huber_loss.default, (fake(64, 100), fake(64, 100))),
        (aten.binary_cross_entropy.default, (fake(64, 100), fake(64, 100))),
        (aten.logsumexp.default, (fake(64, 100), [1])),
        (aten._softmax.default, (fake(64, 100), 1, False)),
        (aten.gelu.default, (fake(64, 100),)),
        (aten.mm.default, (fake(64, 100), fake(100, 64))),
        (aten.upsample_nearest2d.vec, (fake(2, 8, 16, 16), None, [2.0, 2.0])),
        (
            aten.col2im.default,
            (fake(4, 72, 1024), [32, 32], [3, 3], [1, 1], [1, 1], [1, 1]),
        ),
    ],
)
def test_estimated_memory_is_the_measured_one(target, args):
    call = OperatorCall(target, args)
    (measured,) = profile_operators([call])
    (estimated,) = estimate_operators([call], RATES)
    assert estimated.output_sizes_bytes == measured.output_sizes_bytes
    # Boxed scalars of reductions are a few bytes.
    assert estimated.workspace_bytes == pytest.approx(measured.workspace_bytes, abs=64)


def test_rates_are_plausible_and_cached(tmp_path):
    rates = measure_rates("cpu", cache=CostCache(tmp_path))
    assert rates.flops_per_s > 10**8
    assert rates.bytes_per_s > 10**8
    assert 0 < rates.launch_ns < 10**6
    assert measure_rates("cpu", cache=CostCache(tmp_path)) == rates


@pytest.mark.parametrize("field", ["flops_per_s", "bytes_per_s"])
def test_rates_of_nothing_are_refused(field):
    values = {"flops_per_s": 1, "bytes_per_s": 1, "launch_ns": 0, field: 0}
    with pytest.raises(ProfileError, match="at least 1"):
        Rates(**values)


def test_an_operator_without_shapes_is_named():
    with pytest.raises(ProfileError, match=r"aten\.nonzero\.default"):
        estimate(aten.nonzero.default, fake(10))


def test_a_call_whose_outputs_are_known_is_not_traced():
    def fails(*_):
        raise AssertionError("it was called")

    x, w = fake(8, 4), fake(4, 6)
    with FakeTensorMode():
        y = torch.empty(8, 6)
    (traced,) = estimate_operators([OperatorCall(aten.mm.default, (x, w))], RATES)
    known = OperatorCall(aten.mm.default, (x, w), outputs=y)
    assert estimate_operators([known], RATES) == [traced]
    (made,) = estimate_operators([OperatorCall(fails, (x,), outputs=y)], RATES)
    assert made.output_sizes_bytes == (8 * 6 * 4,)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_losses_keep_the_block_that_they_were_made_in(device: str) -> None:
    with FakeTensorMode():
        x = torch.empty(64, 64, device=device)
        call = OperatorCall(torch.ops.aten.mse_loss.default, (x, x), {})
        result = torch.empty((), device=device)
        assert estimate_excess(call, result) == 64 * 64 * 4 - 4
