"""What cannot be traced: named with the user's line and a remedy that fits."""

import functools
import importlib
import logging
import re
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo import symbolic_convert
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional

import remat
from remat.capture.tracing import (
    check_is_no_wrapper,
    example_error,
    raise_capture_error,
)
from remat.core.errors import CaptureError

assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
logger: Any = logging.getLogger("tests.tracing")


class Forward(nn.Module):
    """A layer, and a forward that is given."""

    def __init__(self, forward: Callable[[nn.Linear, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inside = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.inside(self.linear, x)


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.long().abs()).sum()


def refused(model: nn.Module, **how: Any) -> str:
    how = {"costs": "estimated", **how}
    with pytest.raises(CaptureError) as caught:
        remat.plan(model, X, budget="100%", **how)
    return str(caught.value)


def rows(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x)[x[:, 0] > 0]


def rows_in_the_middle(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(linear(x)[x[:, 0] > 0])


def masked(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x)[x > 0]


def kept(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    boxes = linear(x)[torch.where(x[:, 0] > 0)[0]]
    return boxes[: min(2, boxes.shape[0])].sum()


def cut(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x).flatten()[: int(x.argmax().item())].sum()


def listed(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x)[0].sum() * (x[:, 0] > 0).long().tolist()[0]


@pytest.mark.parametrize(
    "forward", [rows, rows_in_the_middle, masked, kept, cut, listed]
)
@pytest.mark.parametrize("costs", ["measured", "estimated"])
def test_sizes_and_numbers_of_values_name_the_line(
    forward: Callable[..., Any], costs: str
) -> None:
    message = refused(Forward(forward), costs=costs)
    assert f"in {forward.__name__}" in message
    assert "test_tracing.py" in message
    assert "torch.where" in message
    assert "src/remat" not in message


def test_a_branch_on_a_size_of_values_has_the_same_remedy() -> None:
    def branch(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        found = (x > 0).nonzero()
        return linear(x).sum() * (2 if found.shape[0] > 3 else 1)

    message = refused(Forward(branch))
    assert "found.shape[0] > 3" in message
    assert "torch.where" in message


def test_sparse_gradients_name_the_layer_and_the_option() -> None:
    message = refused(SparseTable())
    assert "self.table(x.long().abs())" in message
    assert "sparse=False" in message


def test_a_false_assertion_is_the_examples() -> None:
    def asserting(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 5, "five columns"
        return linear(x).sum()

    message = refused(Forward(asserting))
    assert message.startswith("the example raises inside the model: AssertionError")
    assert 'assert x.shape[1] == 5, "five columns"' in message


@torch.library.custom_op("tests::without_a_formula", mutates_args=())
def without_a_formula(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_operator_without_a_formula_for_fakes_is_named() -> None:
    def foreign(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return without_a_formula(linear(x)).sum()

    message = refused(Forward(foreign))
    assert "RuntimeError in tests.without_a_formula.default: There was no" in message
    assert "register_fake" in message
    assert "without_a_formula(linear(x)).sum()" in message


def test_what_fails_about_a_node_names_the_line_of_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(joint: torch.fx.GraphModule) -> None:
        for node in joint.graph.find_nodes(
            op="call_function", target=torch.ops.aten.tanh.default
        ):
            raise NotImplementedError(f"nothing is known of {node.name}")

    def bending(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x).tanh().sum()

    monkeypatch.setattr("remat.capture.rewrites.correct_statistics", fails)
    message = refused(Forward(bending))
    assert "NotImplementedError: nothing is known of tanh" in message
    assert "linear(x).tanh().sum()" in message


def test_whatever_a_trace_raises_is_a_capture_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raising(*_: Any, **__: Any) -> None:
        raise RuntimeError("from somewhere in torch")

    monkeypatch.setattr("torch._dynamo.output_graph.OutputGraph.__init__", raising)
    message = refused(Forward(rows))
    assert "from somewhere in torch" in message


# --- wrappers and hooks --------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_is_named_with_what_to_fit() -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    assert "DistributedDataParallel" in refused(wrapped)
    assert "remat.fit(model.module, ...)" in refused(nn.Sequential(wrapped))


@pytest.mark.usefixtures("process_group")
def test_a_model_that_is_sharded_as_a_whole_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    message = refused(model)
    assert "is sharded (FSDP" in message
    assert message.startswith("the model")


@pytest.mark.usefixtures("process_group")
def test_a_model_with_sharded_parts_is_planned_with_these_as_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fully_shard(model[0])
    remat.fit(model, X, budget="100%", costs="estimated")
    model(X).sum().backward()
    gradient: Any = model[0].weight.grad
    assert torch.equal(gradient.full_tensor(), gradient.to_local())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("part", ["", "0"])
@pytest.mark.parametrize("is_called_before", [False, True])
def test_sharding_after_the_fit_is_named(part: str, is_called_before: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    remat.fit(model, X, budget="100%", costs="estimated")
    if is_called_before:
        model(X).sum().backward()
    fully_shard(model.get_submodule(part))
    with pytest.raises(CaptureError) as caught:
        model(X)
    message = str(caught.value)
    assert message.startswith(f"part {part!r}" if part else "the model")
    assert "is sharded (FSDP" in message
    assert "regions='blocks'" in message


@pytest.mark.usefixtures("process_group")
def test_parameters_that_a_module_around_the_model_shards_are_named() -> None:
    model = nn.Linear(4, 4)
    fully_shard(nn.Sequential(model))
    message = refused(model)
    assert message.startswith("parameter 'weight' of the model is sharded")
    assert "fit the model before it is sharded" in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_are_named() -> None:
    message = refused(nn.Sequential(torch.jit.script(nn.Linear(4, 4))))
    assert message.startswith("part '0' of the model is a script")


def test_plain_modules_are_no_wrappers() -> None:
    check_is_no_wrapper(
        nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1))
    )


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_backward_hooks_are_named_with_their_module(register: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    handle = getattr(model[1], register)(lambda *_: None)
    message = refused(model)
    assert "there are some on 1 (Tanh)" in message
    assert "handle.remove()" in message
    assert "output.register_hook" in message
    handle.remove()
    assert remat.plan(model, X, budget="100%", costs="estimated").peak_bytes > 0


# --- logs ----------------------------------------------------------------------------


def test_an_output_that_is_to_need_gradients_is_refused_with_what_does_that() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    model[0].register_forward_hook(lambda _module, _x, y: y.requires_grad_(True))
    with pytest.raises(
        CaptureError, match=r"gradient_checkpointing=True .*: leave these"
    ):
        remat.fit(model, torch.arange(8), budget="100%")


def test_a_log_is_refused_with_what_leaves_it_out() -> None:
    def logging_one(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        logger.warning("a step")
        return linear(x).sum()

    message = refused(Forward(logging_one))
    assert 'logger.warning("a step")' in message
    assert "ignore_logging_functions" in message
    with torch._dynamo.config.patch(ignore_logging_functions={logging.Logger.warning}):
        plan = remat.plan(Forward(logging_one), X, budget="100%", costs="estimated")
    assert plan.peak_bytes > 0


def test_what_is_logged_once_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.lru_cache
    def hint_once(self: logging.Logger, message: str) -> None:
        self.warning(message)

    monkeypatch.setattr(logging.Logger, "hint_once", hint_once, raising=False)

    def hinting(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        logger.hint_once("a default is taken")
        return linear(x).sum()

    report = remat.verify(
        Forward(hinting), X, budget="100%", costs="estimated", repeats=1
    )
    assert report.against_eager == ()


# --- what is prepared at the first call ----------------------------------------------

LOCK = threading.Lock()


def doubled(_module: nn.Module, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
    return outputs * 2


class Prepares(nn.Module):
    """Hooks itself at its first call, as models of transformers do."""

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.is_prepared = False
        self.always = always
        self.seen: list[torch.Tensor] = []
        self.latest: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_prepared or self.always:
            with LOCK:
                self.first.register_forward_hook(doubled)
                self.is_prepared = True
                self.seen.append(x)
                self.latest = x
                self.extra = x
        return self.norm(self.dropout(self.first(x))).square().sum()


def test_a_first_call_is_prepared_without_touching_anything() -> None:
    model = Prepares()
    model.get_buffer("norm.running_mean").fill_(0.5)
    model.first.weight.grad = torch.ones(4, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    random_state = torch.get_rng_state()
    remat.fit(model, X, budget="100%", costs="estimated")
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert all(found is parameters[n] for n, found in model.named_parameters())
    assert torch.equal(model.first.weight.grad, torch.ones(4, 4))
    assert model.training
    assert model.seen == []
    assert model.latest is None
    assert not hasattr(model, "extra")
    assert len(model.first._forward_hooks) == 1
    assert "first" not in vars(model)


def test_what_hooks_collect_in_a_first_call_is_taken_out_again() -> None:
    model = Prepares()
    collected: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda *call: collected.append(call[-1]))
    remat.fit(model, X, budget="100%", costs="estimated")
    assert collected == []
    model(X).backward()
    assert list(map(type, collected)) == [torch.Tensor]


def test_a_prepared_model_trains_as_one_that_was_called_before() -> None:
    called = Prepares()
    random_state = torch.get_rng_state()
    called(X)
    called.norm.reset_running_stats()
    fitted = Prepares()
    remat.fit(fitted, X, budget="100%", costs="estimated")
    for model in (called, fitted):
        torch.set_rng_state(random_state)
        model(X).backward()
    assert_equal(called.first.weight.grad, fitted.first.weight.grad)
    assert_equal(called.norm.running_mean, fitted.norm.running_mean)
    # Prepared once: the hook of the first call is there once.
    assert len(fitted.first._forward_hooks) == len(called.first._forward_hooks) == 1


def test_a_lock_at_every_call_is_refused_with_both_remedies() -> None:
    message = refused(Prepares(always=True))
    assert "with LOCK:" in message
    assert "run one forward pass first (with torch.no_grad(): model(...))" in message
    assert "take the lock outside forward" in message


def test_code_of_a_library_is_named_with_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "somelib"
    package.mkdir(parents=True)
    source = "def shown(x):\n    print(x.sum().item())\n    return x\n"
    (package / "__init__.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(package.parent)
    somelib = importlib.import_module("somelib")

    def calling(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return somelib.shown(linear(x)).sum()

    message = refused(Forward(calling))
    assert f"{package / '__init__.py'}:2 in shown: print(x.sum().item())" in message
    called_at = (
        rf"called at {re.escape(__file__)}:\d+ in calling: return somelib\.shown"
    )
    assert re.search(called_at, message)
    assert "That is code of somelib: choose options of somelib" in message
    assert "Move that code" not in message


def test_a_loss_that_raises_is_named_with_the_library_and_the_users_line() -> None:
    def own(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return functional.one_hot(linear(x).argmax(1)).sum() + linear(x).sum()

    message = refused(Forward(own))
    assert "functional.one_hot(linear(x).argmax(1))" in message


def test_sizes_by_value_that_do_not_compile_name_the_other_way() -> None:
    error = GuardOnDataDependentSymNode(sympy.Symbol("u0"), "no integer is known")
    with pytest.raises(CaptureError, match='regions="breaks"'):
        raise_capture_error(error, None)


def test_an_interrupt_that_broke_the_tracer_stays_one() -> None:
    try:
        try:
            raise KeyboardInterrupt
        finally:
            [].pop()
    except IndexError as caught:
        error = caught
    with pytest.raises(KeyboardInterrupt):
        raise_capture_error(error, None)


def test_failures_of_the_tracer_are_told_from_those_of_the_model() -> None:
    source = "def fail():\n    raise AssertionError('Expected bool')\n"
    scope = symbolic_convert.__dict__
    fail = types.FunctionType(compile(source, "", "exec").co_consts[0], scope)
    with pytest.raises(AssertionError) as caught:
        fail()
    message = str(example_error(caught.value))
    assert message.startswith("the tracer fails at code that it cannot take")
    assert "@torch.compiler.disable" in message
    with pytest.raises(ZeroDivisionError) as mistake:
        _ = 1 // 0
    assert "the example raises inside" in str(example_error(mistake.value))
