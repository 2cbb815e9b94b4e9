import gc
import weakref
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from tests.accelerator import FIRST
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat.core.errors import ProfileError
from remat.profile import Measurement, measure, memory_growth
from remat.profile.allocations import Allocation, Recording
from remat.profile.memory import GrowthRecorder, _replay, live_storages, tensors_of

CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """Count storages through their lifetimes: blind inside operators, else exact."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        old = {
            t.untyped_storage()._cdata
            for t in tree_leaves(args)
            if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in old or storage in self.seen:
                continue
            self.seen.add(storage)
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self.release, storage.nbytes())
        return result

    def release(self, size_bytes: int) -> None:
        self.live_bytes -= size_bytes


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 50)
    )


def convnet() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 10),
    )


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_allocations_of_a_step_are_counted_by_hand():
    kept = torch.zeros(1000)

    def step() -> None:
        first = kept + kept
        second = first + first
        del first
        third = second + second
        fourth = third + third
        del second, third, fourth

    result = measure(step, resident=[kept], warmup=0, repeats=0)
    assert result.baseline_bytes == 4000
    # second, third and fourth are live together.
    assert result.peak_bytes == 4000 + 3 * 4000
    assert result.final_bytes == 4000
    assert [live for _, live in result.timeline] == [
        4000, 8000, 12000, 8000, 12000, 16000, 12000, 8000, 4000,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "by_hand"),
    [
        # Results of 4 + 8 bytes an element, and a row of 8-byte indices.
        (lambda x: x.sort(), 12 * 10_000 + 8 * 100),
        (lambda x: x.cumsum(0), 4 * 10_000),
        (lambda x: x.softmax(0), 4 * 10_000),
        # An elementwise loss is made in full, and once more for its mean.
        (lambda x: torch.nn.functional.smooth_l1_loss(x, x), 2 * 4 * 10_000 + 12),
        (lambda x: x.half().float(), (2 + 4) * 10_000),
    ],
)
def test_temporaries_inside_operators_count(function, by_hand):
    x = torch.rand(100, 100)
    function(x)
    assert memory_growth(lambda: function(x)).peak_bytes == by_hand


def test_softmax_backward_is_counted_by_hand():
    x = torch.rand(100, 100, requires_grad=True)

    def step() -> None:
        x.grad = None
        x.softmax(0).sum().backward()

    result = measure(step, resident=[x], repeats=0)
    # In the backward: the input, the saved output, the new gradient, and inside the
    # operator a dense copy of the expanded gradient of the sum; the sum and its
    # gradient are numbers.
    assert result.baseline_bytes == 80_000
    assert result.peak_bytes == 4 * 40_000 + 4 + 4
    assert result.final_bytes == 80_000


def test_a_training_step_of_a_perceptron_is_counted_by_hand():
    model, x = mlp(), torch.rand(64, 100)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    result = measure(step, resident=[model, optimizer, x], repeats=0)
    weights = parameter_bytes(model)
    steps = 4 * 4
    resident = 3 * weights + x.numel() * 4 + steps
    assert result.baseline_bytes == resident + weights
    assert result.final_bytes == resident + weights
    # Adam's denominator of the largest parameter, made in two pieces, is the peak.
    assert result.peak_bytes == pytest.approx(
        resident + weights + 2 * 200 * 100 * 4, abs=100
    )


@pytest.mark.parametrize(
    ("make_model", "shape"), [(mlp, (64, 100)), (convnet, (4, 3, 32, 32))]
)
def test_a_step_agrees_with_counting_its_storages(make_model, shape):
    model, x = make_model(), torch.rand(shape)

    def step() -> None:
        for param in model.parameters():
            param.grad = None
        loss = model(x).square().sum()
        loss.backward()

    step()
    result = measure(step, resident=[model, x], repeats=0)
    gc.collect()
    for param in model.parameters():
        param.grad = None
    with LiveBytes() as counter:
        step()
    by_hand = (
        parameter_bytes(model)
        + sum(b.numel() * b.element_size() for b in model.buffers())
        + x.numel() * 4
        + counter.peak_bytes
    )
    # The counter is blind inside operators: convolutions copy into blocked layouts.
    blocked = 0 if make_model is mlp else 3 * 4 * 16 * 32 * 32 * 4
    assert by_hand - 16 <= result.peak_bytes <= by_hand + blocked + 64


def test_gradients_older_than_the_recording_do_not_raise_the_peak():
    model, x = mlp(), torch.rand(64, 100)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    fresh = measure(step, resident=[model, x], repeats=0)
    again = measure(step, resident=[model, x], repeats=0)
    assert fresh.peak_bytes == again.peak_bytes
    assert fresh.baseline_bytes == again.baseline_bytes


def test_what_a_step_replaces_does_not_add_up():
    holder = [torch.empty(10_000)]

    def step() -> None:
        holder.clear()
        holder.append(torch.empty(10_000))

    result = measure(step, resident=holder, repeats=0)
    assert result.baseline_bytes == 40_000
    assert result.peak_bytes == 40_000
    assert result.final_bytes == 40_000


def change(address: int, change_bytes: int, time_ns: int = 0) -> Allocation:
    return Allocation(time_ns=time_ns, address=address, change_bytes=change_bytes)


def test_an_address_handed_out_again_was_released_before():
    recording = Recording(
        before=(), inside=(change(1, 300), change(2, 50)), start_ns=0, end_ns=9
    )
    memory = _replay({1: 200, 3: 10}, recording)
    assert memory.baseline_bytes == 210
    assert memory.timeline == ((0, 210), (0, 310), (0, 360))
    assert (memory.peak_bytes, memory.final_bytes) == (360, 360)


def test_what_the_warmup_left_and_what_python_knows_are_joined():
    recording = Recording(
        before=(change(1, 100), change(2, 70), change(1, -100), change(4, 64)),
        inside=(change(2, -70), change(9, -1000), change(3, -10)),
        start_ns=0,
        end_ns=9,
    )
    # Block 4 was shrunk: the storage says less than the allocator. Block 9 is not
    # among those that were counted.
    memory = _replay({3: 10, 4: 60}, recording)
    assert memory.baseline_bytes == 70 + 10 + 64
    assert memory.peak_bytes == 144
    assert memory.final_bytes == 64


def test_everything_live_counts_unless_residents_are_named():
    other = torch.zeros(100_000)
    x = torch.zeros(1000)

    def step() -> torch.Tensor:
        return x + x

    everywhere = measure(step, repeats=0)
    named = measure(step, resident=[x], repeats=0)
    assert named.baseline_bytes == 4000
    assert everywhere.baseline_bytes >= named.baseline_bytes + other.numel() * 4
    grown = everywhere.peak_bytes - everywhere.baseline_bytes
    assert grown == named.peak_bytes - named.baseline_bytes == 4000


def test_what_autograd_alone_holds_is_live():
    x = torch.rand(1000, requires_grad=True)
    losses: list[torch.Tensor] = []

    def step() -> None:
        losses.clear()
        # Only the graph holds the exponential.
        losses.append(x.exp().sum())

    result = measure(step, resident=[x], repeats=0)
    assert result.baseline_bytes == 4000 + 4000 + 4
    assert result.final_bytes == result.baseline_bytes


def test_steps_run_as_often_as_said():
    count = 0

    def step() -> None:
        nonlocal count
        count += 1

    result = measure(step, warmup=2, repeats=4)
    assert count == 2 + 1 + 4
    assert len(result.times_ns) == 4
    assert min(result.times_ns) <= (result.time_ns or 0) <= max(result.times_ns)
    assert measure(step, repeats=0).time_ns is None


def test_timeline_runs_from_baseline_to_final_and_holds_the_peak():
    x = torch.rand(64, 100)
    model = mlp()
    result = measure(lambda: model(x), resident=[model, x], repeats=0)
    times = [moment for moment, _ in result.timeline]
    live = [size for _, size in result.timeline]
    assert all(early <= late for early, late in pairwise(times))
    assert live[0] == result.baseline_bytes
    assert max(live) == result.peak_bytes
    assert live[-1] == result.final_bytes
    assert result.device == "cpu"
    assert result.allocated_peak_bytes is None
    assert isinstance(result, Measurement)


def test_growth_tells_what_stays():
    growth = memory_growth(lambda: torch.rand(100).sort().values)
    # The values (400) stay; the random numbers and the indices do not.
    assert growth.retained_bytes == 400
    assert growth.peak_bytes == 400 + 400 + 800 + 800


def test_calls_of_one_recording_are_measured_each_by_itself():
    kept: list[torch.Tensor] = []

    def keeps() -> None:
        kept.append(torch.empty(10))

    def releases() -> torch.Tensor:
        # Older than this call, so it is not seen, as with a recording of its own.
        kept.clear()
        return torch.empty(3)

    calls = (keeps, releases, lambda: None, lambda: torch.rand(100).sort().values)
    with GrowthRecorder() as recorder:
        for call in calls:
            torch.empty(1000)
            recorder.measure(call)
            torch.empty(1000)
    kept.clear()
    found = [(each.peak_bytes, each.retained_bytes) for each in recorder.growths]
    assert found == [(40, 40), (12, 12), (0, 0), (2400, 400)]
    assert recorder.growths == [memory_growth(call) for call in calls]


def test_a_call_that_fails_ends_the_recording():
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), GrowthRecorder() as recorder:
        recorder.measure(fails)
    assert memory_growth(lambda: torch.empty(10)).peak_bytes == 40


def test_views_and_shared_storages_count_once():
    base = torch.zeros(1000)
    views = [base[:10], base.view(10, 100), base.detach()]
    assert sum(live_storages(CPU, [base, *views]).values()) == 4000


def test_tied_parameters_and_their_gradients_count_once():
    first = torch.nn.Linear(10, 10, bias=False)
    second = torch.nn.Linear(10, 10, bias=False)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    model(torch.rand(1, 10)).sum().backward()
    assert sum(live_storages(CPU, [model]).values()) == 2 * 400


def test_residents_may_be_nested():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    batch = {"x": (torch.zeros(10), [torch.zeros(5)]), "name": "text", "count": 3}
    model(torch.rand(1, 100)).sum().backward()
    optimizer.step()
    found = live_storages(CPU, [model, optimizer, batch, None])
    assert sum(found.values()) == 3 * parameter_bytes(model) + 60


def test_fake_and_meta_tensors_hold_no_memory():
    with FakeTensorMode():
        fake = torch.zeros(1000)
    meta = torch.zeros(1000, device="meta")
    assert live_storages(CPU, [fake, meta]) == {}
    assert isinstance(live_storages(CPU), dict)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors_count_their_parts():
    coo = torch.eye(10).to_sparse()
    csr = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 1]),
        torch.ones(2),
        (2, 2),
        check_invariants=True,
    )
    assert sum(live_storages(CPU, [coo]).values()) == 10 * 4 + 2 * 10 * 8
    assert sum(live_storages(CPU, [csr]).values()) == 2 * 4 + 3 * 8 + 2 * 8


def test_gradients_are_found_everywhere():
    x = torch.rand(777, requires_grad=True)
    x.sum().backward()
    addresses = live_storages(CPU)
    assert x.grad is not None
    assert addresses[x.grad.untyped_storage().data_ptr()] == 777 * 4


def test_residents_without_tensors_are_refused_before_anything_runs():
    def step() -> None:
        pytest.fail("the step ran")

    with pytest.raises(ProfileError, match="cannot find the tensors of a object"):
        measure(step, resident=[object()])
    with pytest.raises(TypeError, match="step is 3; it must be a function"):
        measure(cast("Any", 3))
    for bad in (-1, "1", 1.5, True):
        with pytest.raises(ValueError, match=r"warmup is .*; it must be an integer"):
            measure(step, warmup=bad)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=r"repeats is .*; it must be an integer"):
            measure(step, repeats=bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"repeats is .* at most 1_000_000"):
        measure(step, repeats=2**70)
    for device in ("gpu", (), 1.5):
        with pytest.raises(
            ProfileError, match=r"device is .*; it must be a device such"
        ):
            measure(step, device=device)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProfileError, match="not on 'meta'"):
        measure(step, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ProfileError, match="no CUDA device"):
            measure(step, device="cuda")


def test_tensors_of_finds_what_modules_hold():
    model = convnet()
    assert len(tensors_of([model])) == 8 + 3


def test_an_error_of_the_step_passes_through():
    def step() -> None:
        raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        measure(step)
    assert memory_growth(lambda: torch.empty(10)).peak_bytes == 40


@pytest.mark.gpu
def test_a_step_on_an_accelerator_is_counted_by_hand():
    x = torch.zeros(1000, 1000, device=FIRST)

    def step() -> None:
        first = x + x
        second = first + first
        del first
        third = second + second
        del second, third

    result = measure(step, repeats=1)
    assert result.device == FIRST
    assert result.peak_bytes - result.baseline_bytes == 2 * 4_000_000
    assert result.final_bytes == result.baseline_bytes
    assert result.allocated_peak_bytes is not None
    assert result.reserved_peak_bytes is not None
    assert result.allocated_peak_bytes >= result.peak_bytes
    assert result.reserved_peak_bytes >= result.allocated_peak_bytes
    named = measure(step, resident=[x], repeats=0)
    assert named.baseline_bytes == 4_000_000
