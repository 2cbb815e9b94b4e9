import gc
import random
import warnings
import weakref

import pytest
import torch
from tests.accelerator import FIRST
from tests.garbage import holds_its_callers
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.core.errors import ProfileError
from remat.profile import CostCache, OperatorCall, OperatorCost, profile_operators
from remat.profile.operators import _undisturbed

aten = torch.ops.aten


def profile_one(target, *args, cache=None, **kwargs) -> OperatorCost:
    (cost,) = profile_operators([OperatorCall(target, args, kwargs)], cache=cache)
    return cost


def fake(*shape, **kwargs) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, **kwargs)


def test_output_bytes_are_those_of_the_result():
    cost = profile_one(aten.add.Tensor, fake(100, 30), fake(30))
    assert cost.output_bytes == 100 * 30 * 4
    assert cost.output_sizes_bytes == (12_000,)
    assert cost.workspace_bytes == 0
    assert not cost.aliases_input
    assert cost.cost_ns > 0
    assert cost.samples >= 3


def test_each_output_has_its_size_and_absent_outputs_have_none():
    x, w = fake(2, 3, 8, 8), fake(5, 3, 3, 3)
    grad = fake(2, 5, 6, 6)
    args = (grad, x, w, [5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    both = profile_one(aten.convolution_backward.default, *args, [True, True, False])
    assert both.output_sizes_bytes == (x.numel() * 4, w.numel() * 4)
    weight = profile_one(aten.convolution_backward.default, *args, [False, True, False])
    assert weight.output_sizes_bytes == (w.numel() * 4,)


def test_a_result_that_the_trace_leaves_out_is_workspace():
    x, w = fake(4, 1, 64), fake(3, 1, 5)
    grad = fake(4, 3, 64)
    args = (grad, x, w, [3], [1], [2], [1], False, [0], 1, [True, False, True])
    # The kernel computes the weight's gradient with that of the bias, told or not.
    outputs = (fake(4, 1, 64), None, fake(3))
    call = OperatorCall(aten.convolution_backward.default, args, outputs=outputs)
    (cost,) = profile_operators([call])
    assert cost.output_sizes_bytes == (x.numel() * 4, 12)
    assert cost.workspace_bytes >= w.numel() * 4


def test_a_result_that_is_left_out_and_not_in_the_trace_has_no_bytes():
    def without_the_second(x):
        return x + 1, None, x * 2

    x = torch.empty(100)
    with FakeTensorMode():
        outputs = (torch.empty(100), torch.empty(7), torch.empty(100))
    call = OperatorCall(without_the_second, (x,), outputs=outputs)
    (cost,) = profile_operators([call])
    assert cost.output_sizes_bytes == (400, 0, 400)


def test_temporaries_inside_an_operator_are_its_workspace():
    # Sorting along the last dimension makes an index row of 8 bytes an element.
    cost = profile_one(aten.sort.default, fake(1000, 1000))
    assert cost.output_sizes_bytes == (4_000_000, 8_000_000)
    assert cost.workspace_bytes == 1000 * 8


def test_workspace_of_a_plain_function_is_what_it_holds_beyond_its_result():
    def three_at_once(x: torch.Tensor) -> torch.Tensor:
        first = x + 1
        second = first + 1
        return first * second

    cost = profile_one(three_at_once, fake(1000))
    assert cost.output_bytes == 4000
    assert cost.workspace_bytes == 8000


def test_what_only_the_first_call_allocates_does_not_count():
    kept: list[torch.Tensor] = []

    def caches(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(torch.empty(10_000))
        return x + x

    assert profile_one(caches, fake(10)).workspace_bytes == 0


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.view.default, (fake(4, 6), [24])),
        (aten._unsafe_view.default, (fake(4, 6), [24])),
        (aten.t.default, (fake(4, 6),)),
        (aten.relu_.default, (fake(4, 6),)),
        (aten.split.Tensor, (fake(4, 6), 2)),
    ],
)
def test_outputs_that_share_an_input_are_reported(target, args):
    cost = profile_one(target, *args)
    assert cost.aliases_input
    assert cost.output_bytes == 0
    assert set(cost.output_sizes_bytes) == {0}


def test_a_result_that_keeps_a_larger_block_is_reported_at_its_true_size():
    # The kernel shrinks the tensor of elementwise losses, not its block.
    cost = profile_one(aten.mse_loss.default, fake(100, 10), fake(100, 10))
    assert cost.output_sizes_bytes == (4000,)


def test_arguments_that_share_a_storage_still_do():
    x = fake(1000)

    def shared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
            pytest.fail("the storages are different")
        return a + b

    profile_one(shared, x[:500], x[500:])


def test_real_arguments_have_the_layout_of_the_fake_ones():
    seen: list[tuple[object, ...]] = []

    def look(*tensors: torch.Tensor) -> torch.Tensor:
        seen.extend(
            (
                t.shape,
                t.stride(),
                t.dtype,
                t.storage_offset(),
                t.untyped_storage().nbytes(),
            )
            for t in tensors
        )
        return tensors[0]

    with FakeTensorMode():
        base = torch.empty(6, 8)
        given = (
            base.t(),
            base[2:, 1::2],
            torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.empty(3, 1).expand(3, 5),
            torch.empty(7, dtype=torch.bfloat16),
            torch.empty(7, dtype=torch.complex64),
            torch.empty((), dtype=torch.int64),
            torch.empty(0, 4),
            torch.empty(5, dtype=torch.bool),
        )
    profile_one(look, *given)
    expected = [
        (t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes())
        for t in given
    ]
    assert seen[: len(given)] == expected


def test_integers_are_valid_as_indices():
    cost = profile_one(aten.embedding.default, fake(5, 8), fake(3, dtype=torch.int64))
    assert cost.output_bytes == 3 * 8 * 4


def test_values_that_an_operator_refuses_are_replaced():
    # Probabilities must lie between 0 and 1.
    assert profile_one(aten.bernoulli.default, fake(100)).output_bytes == 400
    cost = profile_one(aten.binary_cross_entropy.default, fake(9), fake(9), None, 0)
    assert cost.output_bytes == 36
    integers = fake(4, dtype=torch.int64)
    cost = profile_one(aten.div.Tensor_mode, integers, integers, rounding_mode="floor")
    assert cost.output_bytes == 32


def test_values_that_were_refused_keep_no_value_of_the_callers():
    assert not holds_its_callers(lambda: profile_one(aten.bernoulli.default, fake(100)))


def test_equal_calls_are_measured_once():
    count = 0

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x + 1

    calls = [OperatorCall(counted, (fake(3),)) for _ in range(4)]
    costs = profile_operators(calls)
    once = count
    assert len(set(costs)) == 1
    profile_operators(calls[:1])
    assert count <= 2 * once + 2 * 15


@pytest.mark.parametrize(
    "other",
    [
        (fake(30, 40), 1),
        (fake(40, 30).t(), 0),
        (fake(30, 40, dtype=torch.float64), 0),
        (fake(30, 41), 0),
        (fake(40, 40)[10:], 0),
    ],
)
def test_calls_that_differ_in_anything_are_distinct(other, tmp_path):
    cache = CostCache(tmp_path)
    calls = [
        OperatorCall(aten.cumsum.default, (fake(30, 40), 0)),
        OperatorCall(aten.cumsum.default, other),
    ]
    profile_operators(calls, cache=cache)
    assert len(cache) == 2


def test_random_state_and_modes_are_as_before():
    torch.manual_seed(5)
    random.seed(5)
    before = (torch.get_rng_state(), random.getstate())
    profile_operators(
        [
            OperatorCall(aten.native_dropout.default, (fake(100), 0.5, True)),
            OperatorCall(aten.rand_like.default, (fake(100),)),
        ]
    )
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.is_grad_enabled()


def test_the_callers_modes_do_not_reach_the_operators():
    seen: list[tuple[bool, bool, bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(2, 2) @ torch.ones(2, 2)
        is_plain = type(x) is torch.Tensor and type(y) is torch.Tensor
        seen.append((is_plain, torch.is_grad_enabled(), y.dtype is torch.float32))
        return y

    with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        profile_one(look, torch.empty(2))
    assert set(seen) == {(True, False, True)}


def sizes_of(costs: list[OperatorCost]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(c.workspace_bytes, c.output_bytes, c.output_sizes_bytes) for c in costs]


def test_another_profiler_sees_nothing_and_changes_nothing():
    calls = [
        OperatorCall(aten.neg.default, (fake(1000),)),
        OperatorCall(aten.sort.default, (fake(64, 500),)),
        OperatorCall(
            aten.native_layer_norm.default, (fake(8, 64), [64], None, None, 0)
        ),
        OperatorCall(aten._softmax.default, (fake(30, 70), 0, False)),
    ]
    expected = profile_operators(calls)
    activities: list[str] = []
    with torch.autograd.profiler.profile(use_kineto=True) as profiler:
        found = profile_operators(calls, on_progress=lambda a, _: activities.append(a))
        torch.ones(3).abs()
    assert sizes_of(found) == sizes_of(expected)
    assert any(workspace for workspace, _, _ in sizes_of(found))
    assert all(cost.cost_ns > 0 for cost in found)
    assert len(activities) == len(calls) + 1
    assert "aten::abs" in str(profiler)
    assert "aten::sort" not in str(profiler)


def test_operators_run_whole_while_a_tracer_takes_them_apart():
    args = aten.upsample_bilinear2d.default, fake(2, 3, 8, 8), [16, 16], False
    alone = profile_one(*args)
    with enable_python_dispatcher():
        assert profile_one(*args).workspace_bytes == alone.workspace_bytes


def test_an_error_beside_another_profiler_is_the_same():
    def fails(_: torch.Tensor) -> torch.Tensor:
        raise OSError("boom")

    with (
        torch.autograd.profiler.profile(use_kineto=True),
        pytest.raises(ProfileError, match="boom"),
    ):
        profile_operators([OperatorCall(fails, (fake(3),))])


def test_an_interrupt_ends_the_work_beside():
    reports: list[str] = []

    def interrupt(activity: str, _share: float) -> None:
        reports.append(activity)
        raise KeyboardInterrupt

    calls = [OperatorCall(aten.neg.default, (fake(n),)) for n in range(1, 9)]
    with (
        torch.autograd.profiler.profile(use_kineto=True),
        pytest.raises(KeyboardInterrupt),
    ):
        profile_operators(calls, on_progress=interrupt)
    assert len(reports) == 1


def test_arguments_and_results_are_released():
    live: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def watched(x: torch.Tensor) -> torch.Tensor:
        result = x + 1
        live.update([x.untyped_storage(), result.untyped_storage()])
        return result

    profile_one(watched, fake(10))
    gc.collect()
    assert len(live) == 0


def test_an_operator_that_cannot_run_is_named_with_its_arguments():
    with pytest.raises(ProfileError) as caught:
        profile_one(aten.mm.default, fake(2, 3), fake(4, 5))
    message = str(caught.value)
    assert "aten.mm.default" in message
    assert "[2, 3]" in message
    assert "[4, 5]" in message
    assert "cannot be multiplied" in message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_tensors_that_are_not_strided_are_refused_by_name():
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(ProfileError, match="sparse"):
        profile_one(aten.neg.default, sparse)


def test_what_was_measured_before_an_error_is_kept(tmp_path):
    calls = [
        OperatorCall(aten.neg.default, (fake(3),)),
        OperatorCall(aten.mm.default, (fake(2, 3), fake(4, 5))),
    ]
    with pytest.raises(ProfileError):
        profile_operators(calls, cache=CostCache(tmp_path))
    assert len(CostCache(tmp_path)) == 1


def test_interruption_passes_through_and_keeps_what_was_measured(tmp_path):
    def interrupted(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    calls = [
        OperatorCall(aten.neg.default, (fake(3),)),
        OperatorCall(interrupted, (fake(3),)),
    ]
    with pytest.raises(KeyboardInterrupt):
        profile_operators(calls, cache=CostCache(tmp_path))
    assert len(CostCache(tmp_path)) == 1
    assert torch.is_grad_enabled()


def test_a_cached_cost_is_the_measured_one_and_runs_nothing(tmp_path):
    count = 0

    def counted(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x + 1

    calls = [OperatorCall(counted, (fake(3),))]
    measured = profile_operators(calls, cache=CostCache(tmp_path))
    runs = count
    assert profile_operators(calls, cache=CostCache(tmp_path)) == measured
    assert count == runs


def test_a_call_with_an_unknown_argument_is_measured_but_not_cached(tmp_path):
    cache = CostCache(tmp_path)

    def with_object(x: torch.Tensor, _thing: object) -> torch.Tensor:
        return x + 1

    calls = [OperatorCall(with_object, (fake(3), object())) for _ in range(2)]
    assert len(profile_operators(calls, cache=cache)) == 2
    assert len(cache) == 0


def test_a_cached_record_of_another_form_is_measured_again(tmp_path):
    calls = [OperatorCall(aten.neg.default, (fake(3),))]
    cache = CostCache(tmp_path)
    (measured,) = profile_operators(calls, cache=cache)
    (key,) = cache._costs
    cache.put(key, {"cost_ns": 1})
    (again,) = profile_operators(calls, cache=cache)
    assert again.output_sizes_bytes == measured.output_sizes_bytes


def test_progress_names_operators_and_rises_to_one():
    seen: list[tuple[str, float]] = []
    calls = [
        OperatorCall(aten.neg.default, (fake(3),)),
        OperatorCall(aten.abs.default, (fake(3),)),
    ]
    profile_operators(calls, on_progress=lambda *progress: seen.append(progress))
    assert [activity for activity, _ in seen[:2]] == [
        "measuring aten.neg.default",
        "measuring aten.abs.default",
    ]
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1


def test_nothing_is_printed(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile_one(aten.neg.default, fake(3))
    assert capfd.readouterr() == ("", "")


def test_no_calls_give_no_costs():
    assert profile_operators([]) == []


@pytest.mark.gpu
def test_workspace_and_outputs_on_an_accelerator():
    def three_at_once(x: torch.Tensor) -> torch.Tensor:
        first = x + 1
        second = first + 1
        return first * second

    with FakeTensorMode():
        x = torch.empty(1000, 1000, device=FIRST)
    cost = profile_one(three_at_once, x)
    assert cost.output_bytes == 4_000_000
    assert cost.workspace_bytes == 8_000_000
    assert cost.cost_ns > 0


def test_samples_that_were_delayed_do_not_count():
    assert _undisturbed([100, 90, 2000, 110, 136]) == [100, 90, 110]
    assert _undisturbed([7]) == [7]
