import contextlib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from tests.accelerator import FIRST
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from remat.capture.accelerator import traced_for
from remat.core.errors import CaptureError
from remat.files.hardware import hardware_named
from remat.profile import loss_bytes, memory_growth, optimizer_bytes
from remat.profile.optimizer_memory import assumed_loss_bytes
from remat.torch_compat.names import foreach_devices
from remat.torch_compat.patches import foreach_of_fakes, patched

# A number in a tensor operation is boxed: a few bytes, not predicted.
BOXED_BYTES = 16


def params(device: str = "cpu") -> list[torch.nn.Parameter]:
    shapes = ((200, 100), (200,), (50, 200))
    made = [torch.nn.Parameter(torch.rand(s, device=device)) for s in shapes]
    for param in made:
        param.grad = torch.rand_like(param)
    return made


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, Nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam": torch.optim.Adam,
    "Adam, decay": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "Adam, AMSGrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam, tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda p: torch.optim.Muon([p[0], p[2]]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_prediction_is_what_the_optimizer_uses(name):
    optimizer = OPTIMIZERS[name](params())
    state_bytes, workspace_bytes = optimizer_bytes(optimizer)
    # RAdam changes its formula after some steps.
    for _ in range(10):
        optimizer.step()
    assert state_bytes == held_bytes(optimizer)
    used = memory_growth(optimizer.step)
    assert used.retained_bytes == 0
    assert workspace_bytes <= used.peak_bytes + BOXED_BYTES
    assert workspace_bytes >= used.peak_bytes - BOXED_BYTES


class ByLists(torch.optim.Optimizer):
    """Steps lists everywhere if nothing else is said, as some libraries do."""

    def __init__(self, params):
        super().__init__(params, {"foreach": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if group["foreach"] in {None, True}:
                squares = torch._foreach_mul(
                    [p.grad for p in trained], [p.grad for p in trained]
                )
                torch._foreach_sub_(trained, squares)
            else:
                for param in trained:
                    param.sub_(param.grad * param.grad)


def test_optimizers_of_others_choose_by_themselves():
    optimizer = ByLists(params())
    _, workspace_bytes = optimizer_bytes(optimizer)
    assert workspace_bytes == memory_growth(optimizer.step).peak_bytes
    optimizer.param_groups[0]["foreach"] = False
    assert optimizer_bytes(optimizer)[1] < workspace_bytes


class Averaging(torch.optim.Optimizer):
    """Wraps an optimizer, shows its groups, and keeps a copy of each parameter."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks = {}
        self._optimizer_step_post_hooks = {}
        self.base = base
        self.defaults = base.defaults
        self.hold(defaultdict(dict))

    def hold(self, state):
        self.kept = self.state = state

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for group in self.param_groups:
            for param in group["params"]:
                kept = self.kept[param].setdefault("z", param.clone())
                kept.lerp_(param, 0.1)


class AveragingAside(Averaging):
    """Shows the state of the optimizer inside, and has its own under another name."""

    def hold(self, state):
        self.kept = self._state = state

    @property
    def state(self) -> Any:
        return self.base.state


@pytest.mark.parametrize("kind", [Averaging, AveragingAside])
def test_a_wrapper_with_state_of_its_own_counts_before_it_has_any(kind):
    plain_bytes, _ = optimizer_bytes(torch.optim.AdamW(params()))
    found_bytes, _ = optimizer_bytes(kind(torch.optim.AdamW(params())))
    assert found_bytes == plain_bytes + sum(p.nbytes for p in params())


class Orthogonal(torch.optim.Optimizer):
    """Steps by an orthogonal matrix for the gradient."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.ndim == 2 and len(param) > param.shape[1]:
                param.sub_(torch.linalg.qr(param.grad).Q, alpha=0.1)


def test_what_libraries_for_matrices_take_is_counted():
    optimizer = Orthogonal(params())
    _, workspace_bytes = optimizer_bytes(optimizer)
    optimizer.step()
    used = memory_growth(optimizer.step)
    assert abs(workspace_bytes - used.peak_bytes) <= BOXED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_prediction_is_what_an_accelerator_uses(name):
    optimizer = OPTIMIZERS[name](params(FIRST))
    state_bytes, workspace_bytes = optimizer_bytes(optimizer)
    for _ in range(10):
        optimizer.step()
    assert state_bytes == held_bytes(optimizer)
    used = memory_growth(optimizer.step, device=FIRST)
    assert used.retained_bytes == 0
    assert abs(workspace_bytes - used.peak_bytes) <= BOXED_BYTES


@pytest.mark.parametrize(
    ("make", "steps_by_lists"),
    [(torch.optim.AdamW, True), (torch.optim.Adafactor, False)],
)
def test_optimizers_choose_whether_they_step_lists(make, steps_by_lists):
    with traced_for(hardware_named("l4")):
        by_default = optimizer_bytes(make(params()))
        assert by_default == optimizer_bytes(make(params(), foreach=steps_by_lists))
        assert by_default != optimizer_bytes(make(params(), foreach=not steps_by_lists))
    with traced_for(hardware_named("l4")):
        # It refuses lists with a rate that is a tensor.
        adam = torch.optim.Adam(params(), lr=torch.tensor(0.1))
        assert optimizer_bytes(adam)[0] > 0


def test_other_threads_step_as_before_meanwhile():
    def devices() -> list[str]:
        return vars(torch_optimizer)[foreach_devices.__name__]()

    with ThreadPoolExecutor(1) as pool:
        outside = pool.submit(devices).result()
        with patched(partial(foreach_of_fakes, as_on_accelerator=True)):
            assert "cpu" in devices()
            assert pool.submit(devices).result() == outside
    assert devices() == outside


@pytest.mark.parametrize("name", ["SGD, momentum", "Adam", "Adagrad", "RMSprop"])
def test_prediction_does_not_depend_on_steps_already_made(name):
    optimizer = OPTIMIZERS[name](params())
    before = optimizer_bytes(optimizer)
    optimizer.step()
    assert optimizer_bytes(optimizer) == before


def test_the_optimizer_is_not_touched():
    trained = params()
    optimizer = torch.optim.AdamW(trained)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    values = [p.detach().clone() for p in trained]
    grads = [p.grad for p in trained]
    groups = [dict(group) for group in optimizer.param_groups]
    random_state = torch.get_rng_state()
    optimizer_bytes(optimizer)
    assert calls == []
    assert len(optimizer.state) == 0
    assert optimizer.param_groups == groups
    assert all(torch.equal(p, v) for p, v in zip(trained, values, strict=True))
    assert all(p.grad is g for p, g in zip(trained, grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    optimizer.step()
    scheduler.step()
    assert calls == ["pre"]


def test_parameters_without_gradients_need_no_gradient_to_be_predicted():
    trained = params()
    for param in trained:
        param.grad = None
    assert optimizer_bytes(torch.optim.Adam(trained))[0] > 0


def test_frozen_parameters_have_no_state():
    trained = params()
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    trained[0].requires_grad_(False)
    assert optimizer_bytes(optimizer)[0] == (200 + 50 * 200) * 4
    assert optimizer_bytes(optimizer, [trained[1]])[0] == 200 * 4


def test_settings_of_each_group_hold():
    trained = params()
    optimizer = torch.optim.SGD(
        [
            {"params": trained[:1], "momentum": 0.9},
            {"params": trained[1:], "momentum": 0.0},
        ],
        lr=0.1,
    )
    assert optimizer_bytes(optimizer)[0] == 200 * 100 * 4


def test_a_step_that_needs_a_closure_is_refused():
    with pytest.raises(CaptureError, match=r"LBFGS.*closure"):
        optimizer_bytes(torch.optim.LBFGS(params()))


def test_a_step_that_raises_without_a_word_is_refused_with_one():
    class Asserting(torch.optim.SGD):
        def step(self, closure=None):
            raise AssertionError

    with pytest.raises(
        CaptureError,
        match=r"Asserting\.step\(\) .*: AssertionError: no reason given\. Use",
    ):
        optimizer_bytes(Asserting(params()))


def test_an_optimizer_of_the_users_own_is_traced():
    class Own(torch.optim.Optimizer):
        def __init__(self, trained):
            super().__init__(trained, {"rate": 0.1})
            self.extra = "kept"

        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            if self.extra != "kept":
                raise AttributeError("extra")
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state[param]
                    state.setdefault("mean", torch.zeros_like(param))
                    param.sub_(state["mean"] * group["rate"])

    state_bytes, workspace_bytes = optimizer_bytes(Own(params()))
    assert state_bytes == sum(p.numel() * 4 for p in params())
    assert workspace_bytes == 200 * 100 * 4


def test_what_an_optimizer_begins_later_counts():
    class Rectified(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.count = getattr(self, "count", 0) + 1
            if self.count > 5:
                kept = [p.grad.clone() for g in self.param_groups for p in g["params"]]
                super().step(closure)
                del kept
            else:
                super().step(closure)

    optimizer = Rectified(params(), lr=0.1)
    _, workspace_bytes = optimizer_bytes(optimizer)
    for _ in range(5):
        optimizer.step()
    used = memory_growth(optimizer.step)
    assert abs(workspace_bytes - used.peak_bytes) <= BOXED_BYTES


@pytest.mark.parametrize("every", [None, 3])
def test_whether_every_kth_step_differs_is_seen_with_one_parameter_of_each_kind(every):
    class Periodic(torch.optim.Optimizer):
        stepped = 0

        def __init__(self, trained: list[torch.nn.Parameter]) -> None:
            super().__init__(trained, {"count": 0, "frequency": 50, "every": every})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for group in self.param_groups:
                group["count"] += 1
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    Periodic.stepped += 1
                    if not self.state[param]:
                        self.state[param]["mean"] = torch.zeros_like(param)
                    if group["every"] and group["count"] % group["every"] == 0:
                        param.add_(param * 2 + param * 3)

    trained = [torch.nn.Parameter(torch.rand(100, 10)) for _ in range(20)]
    state_bytes, workspace_bytes = optimizer_bytes(Periodic(trained))
    assert state_bytes == 20 * 4000
    assert workspace_bytes == (2 * 4000 + 4000 if every else 0)
    # Without such steps two of all are enough, and no hundred.
    assert Periodic.stepped == 51 + (100 if every else 2) * 20


def test_state_made_on_construction_is_counted_and_not_touched():
    class Early(torch.optim.SGD):
        def __init__(self, trained: list[torch.nn.Parameter]) -> None:
            super().__init__(trained, lr=0.1)
            for param in trained:
                self.state[param]["early"] = torch.ones(param.numel() * 2)

    optimizer = Early(params())
    state_bytes, workspace_bytes = optimizer_bytes(optimizer)
    assert state_bytes == held_bytes(optimizer) == sum(8 * p.numel() for p in params())
    assert workspace_bytes == 0
    values = [state["early"] for state in optimizer.state.values()]
    assert all(type(v) is torch.Tensor and bool((v == 1).all()) for v in values)


targets = torch.zeros(64, dtype=torch.long)
values = torch.rand(64, 1000)
LOSSES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "cross entropy": (functional.cross_entropy, (targets,)),
    "closure": (lambda out: functional.cross_entropy(out, targets), ()),
    "smoothing": (
        lambda out: functional.cross_entropy(out, targets, label_smoothing=0.1),
        (),
    ),
    "squares": (functional.mse_loss, (values,)),
    "smooth": (functional.smooth_l1_loss, (values,)),
    "binary": (functional.binary_cross_entropy_with_logits, (values,)),
    "sum": (lambda out: out.sum(), ()),
    "power": (lambda out: (out**2).mean(), ()),
    "divergence": (lambda out, t: functional.kl_div(out.log_softmax(-1), t), (values,)),
}


def test_warnings_wait_for_the_real_run(recwarn):
    loss_bytes(lambda out: functional.mse_loss(out, values), torch.rand(1, 1000))
    assert not recwarn.list


@pytest.mark.filterwarnings("ignore:reduction.*'mean' divides:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_predicted_on_fake_tensors(name):
    loss_fn, args = LOSSES[name]
    outputs = torch.rand(64, 1000, requires_grad=True)
    predicted = loss_bytes(loss_fn, outputs, *args)

    def real() -> torch.Tensor:
        loss = loss_fn(outputs, *args)
        loss.backward()
        return loss

    real()
    outputs.grad = None
    used = memory_growth(real)
    assert predicted.peak_bytes == pytest.approx(used.peak_bytes, abs=BOXED_BYTES)
    gradient_bytes = outputs.numel() * 4
    held_bytes = used.retained_bytes - gradient_bytes
    assert predicted.held_bytes == pytest.approx(held_bytes, abs=BOXED_BYTES)
    saved_bytes = memory_growth(lambda: loss_fn(outputs, *args)).retained_bytes
    assert predicted.saved_bytes == pytest.approx(saved_bytes, abs=BOXED_BYTES)


def test_some_losses_hold_a_block_of_the_outputs_size():
    assert loss_bytes(functional.mse_loss, values, values).held_bytes == values.nbytes
    assert loss_bytes(lambda out: out.sum(), values).held_bytes == 4


class Judge(torch.nn.Module):
    """A loss that is a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1000, 300)

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layer(out), targets)


def test_parameters_of_the_loss_are_read_and_get_gradients_elsewhere():
    judge, outputs = Judge(), torch.rand(64, 1000, requires_grad=True)
    predicted = loss_bytes(judge, outputs)
    own_bytes = sum(parameter.nbytes for parameter in judge.parameters())
    assert predicted.held_bytes == own_bytes + 4
    assert {id(t) for t in predicted.read} == {
        id(t) for t in (*judge.parameters(), targets)
    }
    assert all(parameter.grad is None for parameter in judge.parameters())

    def real() -> torch.Tensor:
        loss = judge(outputs)
        loss.backward()
        return loss

    used = memory_growth(real)
    assert predicted.peak_bytes == pytest.approx(used.peak_bytes, abs=BOXED_BYTES)


def test_outputs_may_be_fake_and_nested():
    with FakeTensorMode():
        outputs = {
            "logits": torch.empty(64, 1000),
            "count": torch.empty(3, dtype=torch.int64),
        }
    flat = torch.empty(64, 1000)
    expected = loss_bytes(functional.cross_entropy, flat, targets)
    assert (
        loss_bytes(
            lambda out: functional.cross_entropy(out["logits"], targets), outputs
        )
        == expected
    )
    assert flat.grad is None


def test_a_loss_that_reads_values_is_refused():
    def branches(out: torch.Tensor) -> torch.Tensor:
        return out.sum() if out.max() > 0 else out.mean()

    loss_bytes(branches, values)

    def counts(out: torch.Tensor) -> torch.Tensor:
        return out[out > 0].sum()

    with pytest.raises(CaptureError, match="cannot be predicted"):
        loss_bytes(counts, values)


def test_a_loss_without_gradient_is_refused():
    with pytest.raises(CaptureError, match="does not depend on an output"):
        loss_bytes(lambda out: out.detach().sum(), values)


signs = 2 * values.round() - 1
flipped = values.flip(0)
ASSUMED_ENOUGH_FOR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda out: functional.cross_entropy(out, targets),
    "smoothing": LOSSES["smoothing"][0],
    "probabilities": lambda out: functional.cross_entropy(out, values),
    "shifted": lambda out: functional.cross_entropy(
        out.float()[:-1].contiguous(), targets[1:]
    ),
    "squares": lambda out: functional.mse_loss(out, values),
    "absolute": lambda out: functional.l1_loss(out, values),
    "smooth": lambda out: functional.smooth_l1_loss(out, values),
    "binary": lambda out: functional.binary_cross_entropy_with_logits(out, values),
    "weighted": lambda out: functional.binary_cross_entropy_with_logits(
        out, values, weight=values[0], pos_weight=values[1]
    ),
    "divergence": lambda out: functional.kl_div(
        out.log_softmax(-1), values, reduction="batchmean"
    ),
    "margin": lambda out: functional.soft_margin_loss(out, signs),
    "Poisson": lambda out: functional.poisson_nll_loss(out, values),
    "triplet": lambda out: functional.triplet_margin_loss(out, values, flipped),
}


@pytest.mark.parametrize("name", ASSUMED_ENOUGH_FOR)
@pytest.mark.parametrize("precision", ["single", "autocast", "cast"])
def test_what_is_assumed_covers_torchs_own_losses(name, precision):
    dtype = torch.float32 if precision == "single" else torch.bfloat16
    outputs = torch.rand(64, 1000, dtype=dtype, requires_grad=True)
    loss_fn = ASSUMED_ENOUGH_FOR[name]

    def real() -> torch.Tensor:
        with (
            torch.autocast("cpu", torch.bfloat16)
            if precision == "autocast"
            else contextlib.nullcontext()
        ):
            loss = loss_fn(outputs.float() if precision == "cast" else outputs)
        loss.backward()
        return loss

    real()
    outputs.grad = None
    used = memory_growth(real)
    assumed = assumed_loss_bytes([outputs])
    assert used.peak_bytes <= assumed.peak_bytes
    assert used.retained_bytes - outputs.nbytes <= assumed.held_bytes


def test_only_a_scalar_that_comes_first_is_taken_for_the_loss():
    scalar, logits = torch.zeros(()), torch.empty(8, 100, dtype=torch.bfloat16)
    assert assumed_loss_bytes([scalar, logits]).peak_bytes == 0
    assert assumed_loss_bytes([]).peak_bytes == 0
    found = assumed_loss_bytes([logits, scalar])
    assert found.held_bytes == 801 * 4
    assert found.peak_bytes == 4 * 801 * 4 + 800 * 4 + 4096
